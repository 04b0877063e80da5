//! Messages that wait for a receive while the sending process makes no call: between two processes,
//! as in `two_processes.rs`.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::ptr::null_mut;

use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(20);

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("a_sender_that_sleeps_elsewhere", away_parent, away_child),
        ("a_sleeping_receiver", away_parent, asleep_child),
        ("through_a_shared_queue", shared_away_parent, shared_child),
        (
            "through_a_shared_queue_of_a_sleeper",
            two_parent,
            shared_asleep_child,
        ),
        ("a_stopped_sender", stopped_parent, stopped_child),
        ("a_write_between", write_parent, write_child),
        ("too_long_for_the_receive", long_parent, long_child),
        ("both_sides_at_once", race_parent, race_child),
        (
            "both_sides_at_once_on_a_shared_queue",
            race_parent,
            shared_race_child,
        ),
        ("retries_end_all_the_same", retries_parent, retries_child),
        ("a_reset_takes_them_back", reset_parent, reset_child),
        ("a_killed_receiver", killed_parent, idle_child),
    ];
    run(cases);
}

fn pattern(message: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ message.wrapping_mul(7)) as u8)
        .collect()
}

/// Small, empty, the maximum in a ring, longer than that, and large.
const SIZES: [usize; 6] = [20, 0, 8192, 8193, 1, 1 << 20];

/// Posts one message of each size without requesting completions, and then makes no call of the
/// device.
fn away(link: &mut Link, end: &mut End) {
    for (i, &len) in SIZES.iter().enumerate() {
        let mut buffer = end.buffer(&pattern(i, len));
        end.send(&mut buffer, len, Some(i as u32), 0, 0);
        buffer.leak();
    }
    // inline data exists only in the queue
    let flags = IBV_SEND_INLINE | IBV_SEND_SOLICITED;
    end.send_unregistered(&mut pattern(6, 33), None, flags, 0);
    link.say("sent");
    link.expect("all there");
    assert!(end.poll().is_none());
    let mut last = end.buffer(&pattern(7, 5));
    end.send(&mut last, 5, None, IBV_SEND_SIGNALED, 7);
    link.say("one more");
    let wc = end.sleep(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 7));
    link.expect("done");
}

fn away_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    away(link, &mut end);
}

fn check(wc: &Wc, i: usize, buffer: &Buffer) {
    let len = SIZES.get(i).copied().unwrap_or(33);
    assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_RECV));
    assert_eq!((wc.wr_id, wc.byte_len as usize), (i as u64, len));
    assert_eq!(wc.imm, (i < SIZES.len()).then_some(i as u32));
    assert!(buffer.bytes()[..len] == pattern(i, len), "message {i}");
}

fn away_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("sent");
    let buffer = end.buffer(&vec![0; 1 << 20]);
    // one at a time, and then several
    for i in 0..3 {
        end.recv(&buffer, i as u64);
        let wc = end.wait(LIMIT);
        check(&wc, i, &buffer);
    }
    let buffers: Vec<_> = (3..7).map(|_| end.buffer(&vec![0; 1 << 20])).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        end.recv(buffer, i as u64 + 3);
    }
    for (i, buffer) in buffers.iter().enumerate() {
        let wc = end.wait(LIMIT);
        check(&wc, i + 3, buffer);
    }
    last(link, &mut end);
}

fn last(link: &mut Link, end: &mut End) {
    link.say("all there");
    link.expect("one more");
    let buffer = end.buffer(&[0; 5]);
    end.recv(&buffer, 7);
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 7));
    assert_eq!(buffer.bytes(), pattern(7, 5));
    link.say("done");
}

fn asleep_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("sent");
    let buffers: Vec<_> = (0..7).map(|_| end.buffer(&vec![0; 1 << 20])).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        end.recv(buffer, i as u64);
        let wc = end.sleep(LIMIT);
        check(&wc, i, buffer);
    }
    last(link, &mut end);
}

fn shared_away_parent(link: &mut Link) {
    let mut ends = [End::connect(link, 16, 16, 1), End::connect(link, 16, 16, 1)];
    let mut buffer = ends[1].buffer(&pattern(9, 9));
    ends[1].send(&mut buffer, 9, None, 0, 0);
    away(link, &mut ends[0]);
}

fn shared_child(link: &mut Link) {
    let mut first = End::with(32, 32, 1);
    let srq = first.create_srq(32);
    let mut ends = [first.on_srq(srq), first.on_srq(srq)];
    for end in &mut ends {
        end.join(link);
    }
    link.expect("sent");
    let buffers: Vec<_> = (0..9).map(|_| first.buffer(&vec![0; 1 << 20])).collect();
    let mut next = 0;
    let mut other = false;
    for (id, buffer) in buffers.iter().enumerate().take(8) {
        assert_eq!(post_srq(srq, buffer, id as u64), 0);
        let mut wc = first.wait(LIMIT);
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        let got = &buffers[wc.wr_id as usize];
        if wc.imm.is_none() && wc.byte_len == 9 {
            assert!(!std::mem::replace(&mut other, true));
            assert_eq!(got.bytes()[..9], pattern(9, 9));
            continue;
        }
        wc.wr_id = next as u64;
        check(&wc, next, got);
        next += 1;
    }
    assert!(other && next == 7);
    link.say("all there");
    link.expect("one more");
    assert_eq!(post_srq(srq, &buffers[8], 8), 0);
    let wc = first.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 8));
    assert_eq!(buffers[8].bytes()[..5], pattern(7, 5));
    link.say("done");
}

/// Two connections with one message each, on which the sender sleeps.
fn two_parent(link: &mut Link) {
    let mut ends = [End::connect(link, 16, 16, 1), End::connect(link, 16, 16, 1)];
    for end in &mut ends {
        let mut buffer = end.buffer(&[3; 8]);
        end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 1);
    }
    link.say("sent");
    for end in &mut ends {
        assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.expect("done");
}

/// What another thread posts.
struct Posts(*mut ibv_srq, [Buffer; 2]);

// SAFETY: the queue and its memory exist until the thread has ended.
unsafe impl Send for Posts {}

impl Posts {
    fn run(self) {
        for (id, buffer) in self.1.iter().enumerate() {
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert_eq!(post_srq(self.0, buffer, id as u64), 0);
        }
    }
}

/// Sleeps on the queue of the second connection. The first message, which takes the first receive,
/// wakes nobody here, and the sender of the second one was rung in vain.
fn shared_asleep_child(link: &mut Link) {
    let armed = End::with(32, 32, 1);
    let srq = armed.create_srq(8);
    // SAFETY: live objects of one context.
    let quiet = unsafe {
        let cq = (verbs().ibv_create_cq)(armed.context, 32, null_mut(), armed.channel, 0);
        assert!(!cq.is_null());
        End::of_parts(armed.context, armed.channel, armed.pd, cq, armed.qp)
    };
    let mut ends = [quiet.on_srq(srq), armed.on_srq(srq)];
    for end in &mut ends {
        end.join(link);
    }
    link.expect("sent");
    let posts = Posts(srq, [0, 1].map(|_| armed.buffer(&[0; 8])));
    let poster = std::thread::spawn(|| posts.run());
    assert_eq!(ends[1].sleep(LIMIT).status, IBV_WC_SUCCESS);
    assert_eq!(ends[0].wait(LIMIT).status, IBV_WC_SUCCESS);
    poster.join().unwrap();
    link.say("done");
}

/// The sender is stopped.
fn stopped_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let buffer = end.buffer(&[0; 64]);
    link.expect("sent");
    link.stop();
    for i in 0..4 {
        end.recv(&buffer, i);
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i));
        assert_eq!(buffer.bytes(), pattern(i as usize, 64));
    }
    link.go_on();
    // each message was delivered once
    end.recv(&buffer, 9);
    link.say("go");
    link.expect("done");
    for _ in 0..50 {
        assert!(end.poll().is_none());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    link.say("checked");
}

fn stopped_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    for i in 0..4 {
        let mut buffer = end.buffer(&pattern(i as usize, 64));
        end.send(&mut buffer, 64, None, IBV_SEND_SIGNALED, i);
    }
    link.say("sent");
    link.expect("go");
    for i in 0..4 {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i));
    }
    link.say("done");
    // the end of this process would flush the parent's receive
    link.expect("checked");
}

/// Requests behind one that only the sender can execute wait for it.
fn write_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let (addr, rkey) = link.numbers();
    let mut buffer = end.buffer(&[5; 8]);
    end.send(&mut buffer, 8, Some(1), 0, 1);
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 8, addr, rkey as u32, None);
    end.send(&mut buffer, 8, Some(2), 0, 2);
    link.say("sent");
    link.expect("one");
    assert_eq!(end.wait(LIMIT).opcode, IBV_WC_RDMA_WRITE);
    link.expect("two");
}

fn write_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    let target = end.buffer(&[0; 8]);
    let buffer = end.buffer(&[0; 8]);
    link.say_numbers(target.addr(), u64::from(target.rkey()));
    link.expect("sent");
    end.recv(&buffer, 1);
    end.recv(&buffer, 2);
    assert_eq!(end.wait(LIMIT).imm, Some(1));
    for _ in 0..50 {
        assert!(end.poll().is_none());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(target.bytes(), [0; 8]);
    link.say("one");
    assert_eq!(end.wait(LIMIT).imm, Some(2));
    assert_eq!(target.bytes(), [5; 8]);
    link.say("two");
}

fn long_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut buffer = end.buffer(&[1; 9]);
    end.send(&mut buffer, 9, None, 0, 1);
    link.say("sent");
    link.expect("nothing");
    assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_INV_REQ_ERR);
    link.expect("failed");
}

fn long_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("sent");
    let buffer = end.buffer(&[7; 8]);
    end.recv(&buffer, 1);
    for _ in 0..50 {
        // the sender must detect it first
        assert!(end.poll().is_none());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    link.say("nothing");
    assert_eq!(end.wait(LIMIT).status, IBV_WC_LOC_LEN_ERR);
    assert_eq!(buffer.bytes(), [7; 8]);
    link.say("failed");
}

const RACES: u32 = 20_000;

fn race_len(i: u32) -> usize {
    [8, 60, 0, 3000, 9000][i as usize % 5]
}

/// A sender that polls takes messages back while the receiver pulls them.
fn race_parent(link: &mut Link) {
    let mut end = End::connect(link, 64, 4, 1);
    let mut buffers: Vec<_> = (0..64).map(|_| end.buffer(&vec![0; 9000])).collect();
    let mut posted = 0;
    let mut done = 0;
    let begin = std::time::Instant::now();
    while done < RACES {
        while posted < RACES && posted - done < 64 {
            let len = race_len(posted);
            let buffer = &mut buffers[posted as usize % 64];
            buffer.fill(posted as u8);
            end.send(
                buffer,
                len,
                Some(posted),
                IBV_SEND_SIGNALED,
                u64::from(posted),
            );
            posted += 1;
        }
        if let Some(wc) = end.poll() {
            assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, u64::from(done)));
            done += 1;
        }
        if done % 1000 == 500 {
            std::thread::yield_now();
        }
        assert!(begin.elapsed() < 6 * LIMIT, "{done} of {RACES}");
    }
    link.expect("done");
}

/// Takes [`RACES`] messages; `post` posts a receive.
fn take_all(end: &mut End, buffers: &[Buffer], mut post: impl FnMut(&mut End, &Buffer, u64)) {
    for i in 0..RACES {
        let buffer = &buffers[i as usize % buffers.len()];
        post(end, buffer, u64::from(i));
        // arming pulls pending messages at once
        // SAFETY: a live queue.
        unsafe { ibv_req_notify_cq(end.cq, 0) };
        let wc = if i % 3 == 0 {
            end.sleep(LIMIT)
        } else {
            end.wait(LIMIT)
        };
        let len = race_len(i);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, u64::from(i)));
        assert_eq!((wc.imm, wc.byte_len as usize), (Some(i), len));
        assert!(buffer.bytes()[..len].iter().all(|&byte| byte == i as u8));
    }
}

fn race_child(link: &mut Link) {
    let mut end = End::create(link, 4, 16, 1);
    end.join(link);
    let buffers: Vec<_> = (0..4).map(|_| end.buffer(&vec![0; 9000])).collect();
    take_all(&mut end, &buffers, End::recv);
    link.say("done");
}

fn shared_race_child(link: &mut Link) {
    let mut first = End::with(16, 16, 1);
    let srq = first.create_srq(16);
    let mut end = first.on_srq(srq);
    end.join(link);
    let buffers: Vec<_> = (0..4).map(|_| first.buffer(&vec![0; 9000])).collect();
    take_all(&mut first, &buffers, |_, buffer, id| {
        assert_eq!(post_srq(srq, buffer, id), 0);
    });
    link.say("done");
}

fn retries_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.rnr_retry = 3;
    end.join(link);
    let mut buffer = end.buffer(&[1; 8]);
    for id in 0..3 {
        end.send(&mut buffer, 8, None, 0, id);
    }
    // longer than the retries; messages that are pulled meanwhile do not time out
    link.say("sent");
    link.expect("taken");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_RNR_RETRY_EXC_ERR, 1));
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 2));
    link.say("over");
}

fn retries_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("sent");
    std::thread::sleep(std::time::Duration::from_millis(50));
    let buffer = end.buffer(&[0; 8]);
    end.recv(&buffer, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("taken");
    link.expect("over");
    assert!(end.poll().is_none());
}

fn reset_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut buffer = end.buffer(&[1; 8]);
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 1);
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    end.modify(&mut attr, IBV_QP_STATE);
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 1));
    link.say("failed");
    link.expect("nothing");
    let mut end = End::connect(link, 16, 16, 1);
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 1);
    attr.qp_state = IBV_QPS_RESET;
    end.modify(&mut attr, IBV_QP_STATE);
    link.say("reset");
    link.expect("nothing");
}

fn reset_child(link: &mut Link) {
    for what in ["failed", "reset"] {
        let mut end = End::create(link, 16, 16, 1);
        end.join(link);
        link.expect(what);
        let buffer = end.buffer(&[0; 8]);
        end.recv(&buffer, 1);
        for _ in 0..20 {
            assert!(end.poll().is_none());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        link.say("nothing");
    }
}

fn killed_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut buffer = end.buffer(&[1; 8]);
    for id in 0..3 {
        end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, id);
    }
    link.expect("taken");
    link.kill();
    let seen: Vec<_> = (0..3).map(|_| end.wait(LIMIT)).collect();
    let seen: Vec<_> = seen.iter().map(|wc| (wc.status, wc.wr_id)).collect();
    let expected = [
        (IBV_WC_SUCCESS, 0),
        (IBV_WC_RETRY_EXC_ERR, 1),
        (IBV_WC_WR_FLUSH_ERR, 2),
    ];
    assert_eq!(seen, expected);
}

fn idle_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    let buffer = end.buffer(&[0; 8]);
    end.recv(&buffer, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("taken");
    std::thread::sleep(3 * LIMIT);
}
