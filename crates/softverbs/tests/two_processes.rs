//! Two processes and the device between them. Each test starts this program again as its peer.
//!
//! The two exchange addresses and synchronize their steps through the child's standard input and
//! output, one line at a time; all data goes through verbs.

#![allow(unsafe_code, reason = "verbs is a C interface")]

pub(crate) mod common;

use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("sends_of_all_sizes", sends_parent, sends_child),
        ("writes_and_reads", rdma_parent, rdma_child),
        ("inline_and_unsignaled", inline_parent, inline_child),
        ("late_receives", late_parent, late_child),
        ("rnr_retries_end", rnr_parent, rnr_child),
        ("a_stopped_target", stopped_parent, stopped_child),
        ("a_killed_peer", killed_parent, killed_child),
        (
            "a_killed_peer_wakes_sleepers",
            killed_sleeping_parent,
            killed_child,
        ),
        (
            "messages_before_a_failure",
            before_failure_parent,
            before_failure_child,
        ),
        ("stale_rkeys", stale_parent, stale_child),
        ("refused_and_reset", refused_parent, refusing_child),
        ("too_long_for_the_receive", long_parent, long_child),
        ("events_wake_sleepers", events_parent, events_child),
        ("many_queue_pairs", many_parent, many_child),
        ("a_full_ring", full_parent, full_child),
        (
            "a_connection_that_comes_late",
            connect_late_parent,
            connect_late_child,
        ),
        ("forked_children", forked_parent, idle_child),
        ("a_sender_that_ends", ending_parent, ending_child),
        (
            "a_first_thread_that_ends",
            first_thread_parent,
            first_thread_child,
        ),
    ];
    run(cases);
}

/// Bytes that depend on their offset and on the message.
fn pattern(message: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ message.wrapping_mul(7)) as u8)
        .collect()
}

const SIZES: [usize; 19] = [
    0,
    1,
    7,
    8,
    31,
    32,
    33,
    64,
    100,
    255,
    256,
    1000,
    4096,
    8192,
    8193,
    65_536,
    100_000,
    1 << 20,
    (5 << 20) + 3,
];

fn sends_parent(link: &mut Link) {
    let mut end = End::connect(link, 64, 64, 1);
    for (i, &len) in SIZES.iter().enumerate() {
        let mut buffer = end.buffer(&pattern(i, len));
        for imm in [None, Some(i as u32)] {
            end.send(&mut buffer, len, imm, IBV_SEND_SIGNALED, 5);
            let wc = end.wait(LIMIT);
            assert_eq!(
                (wc.status, wc.opcode, wc.wr_id),
                (IBV_WC_SUCCESS, IBV_WC_SEND, 5)
            );
        }
        end.release(buffer);
    }
    link.expect("done");
}

fn sends_child(link: &mut Link) {
    let mut end = End::create(link, 64, 64, 2);
    let mut buffers: Vec<_> = SIZES
        .iter()
        .flat_map(|&len| [end.buffer(&vec![0; len]), end.buffer(&vec![0; len + 5])])
        .collect();
    for (i, buffer) in buffers.iter_mut().enumerate() {
        let len = buffer.len();
        // two sges, so that payloads are split at odd offsets
        end.recv_pieces(buffer, &[len / 3, len - len / 3], 100 + i as u64);
    }
    end.join(link);
    for (i, buffer) in buffers.iter().enumerate() {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_RECV));
        assert_eq!(wc.wr_id, 100 + i as u64);
        let len = SIZES[i / 2];
        assert_eq!(wc.byte_len as usize, len);
        if i % 2 == 1 {
            assert_eq!(wc.imm, Some((i / 2) as u32));
        } else {
            assert_eq!(wc.imm, None);
        }
        assert!(
            buffer.bytes()[..len] == pattern(i / 2, len)[..],
            "message {i}"
        );
    }
    link.say("done");
}

fn rdma_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 4);
    let (addr, rkey) = link.numbers();
    for (i, &len) in SIZES.iter().enumerate() {
        let source = end.buffer(&pattern(i, len));
        end.rdma(IBV_WR_RDMA_WRITE, &source, len, addr, rkey as u32, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS, "write of {len}");
        let target = end.buffer(&vec![0; len]);
        end.rdma(IBV_WR_RDMA_READ, &target, len, addr, rkey as u32, None);
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_RDMA_READ));
        assert!(target.bytes() == pattern(i, len), "read of {len}");
        end.release(source);
        end.release(target);
    }
    let source = end.buffer(&pattern(77, 70_000));
    end.rdma(
        IBV_WR_RDMA_WRITE_WITH_IMM,
        &source,
        70_000,
        addr + 9,
        rkey as u32,
        Some(77),
    );
    assert_eq!(end.wait(LIMIT).opcode, IBV_WC_RDMA_WRITE);
    link.expect("done");
}

fn rdma_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let target = end.buffer(&vec![0; 6 << 20]);
    end.recv_pieces(&target, &[], 3);
    end.join(link);
    link.say_numbers(target.addr(), u64::from(target.rkey()));
    let wc = end.wait(LIMIT);
    assert_eq!(
        (wc.status, wc.opcode),
        (IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM)
    );
    assert_eq!((wc.wr_id, wc.byte_len, wc.imm), (3, 70_000, Some(77)));
    assert!(target.bytes()[9..70_009] == pattern(77, 70_000)[..]);
    link.say("done");
}

fn inline_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 2);
    // without completions the slots must become free by themselves, or with a later completion
    for i in 0..1000u32 {
        let mut bytes = pattern(i as usize, 60);
        let signaled = i % 7 == 6;
        let flags = IBV_SEND_INLINE | if signaled { IBV_SEND_SIGNALED } else { 0 };
        end.send_unregistered(&mut bytes, Some(i), flags, u64::from(i));
        bytes.fill(0xee);
        if signaled {
            assert_eq!(end.wait(LIMIT).wr_id, u64::from(i));
        }
    }
    link.expect("done");
}

fn inline_child(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let buffers: Vec<_> = (0..8).map(|_| end.buffer(&[0; 64])).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        end.recv(buffer, i as u64);
    }
    end.join(link);
    for i in 0..1000u32 {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.imm), (IBV_WC_SUCCESS, Some(i)));
        let buffer = &buffers[wc.wr_id as usize];
        assert!(buffer.bytes()[..60] == pattern(i as usize, 60)[..]);
        end.recv(buffer, wc.wr_id);
    }
    link.say("done");
}

fn late_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut buffer = end.buffer(&pattern(1, 20_000));
    for len in [20, 20_000, 0] {
        end.send(&mut buffer, len, None, IBV_SEND_SIGNALED, len as u64);
    }
    assert!(end.poll().is_none(), "there was no receive");
    link.say("sent");
    // the sender sleeps, and the receives must wake it
    for len in [20, 20_000, 0] {
        let wc = end.sleep(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, len));
    }
    link.expect("done");
}

fn late_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("sent");
    let buffer = end.buffer(&vec![0; 20_000]);
    for len in [20, 20_000, 0] {
        std::thread::sleep(std::time::Duration::from_millis(100));
        end.recv(&buffer, u64::from(len));
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, len));
        assert!(buffer.bytes()[..len as usize] == pattern(1, 20_000)[..len as usize]);
    }
    link.say("done");
}

fn rnr_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.rnr_retry = 3;
    end.join(link);
    let mut buffer = end.buffer(&[1; 8]);
    let begin = std::time::Instant::now();
    end.send(&mut buffer, 8, None, 0, 1);
    end.send(&mut buffer, 8, None, 0, 2);
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 8, 0, 0, None);
    // the peer's timer is 0.64 ms; only the clock can wake the sleeper
    let wc = end.sleep(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_RNR_RETRY_EXC_ERR, 1));
    assert!(begin.elapsed() > std::time::Duration::from_micros(1900));
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 2));
    // a WRITE that was not executed
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.vendor_err), (IBV_WC_WR_FLUSH_ERR, 1));
    assert_eq!(end.state(), IBV_QPS_ERR);
    link.say("over");
}

fn rnr_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("over");
}

fn stopped_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let (addr, rkey) = link.numbers();
    link.stop();
    for len in [8, 5000, 3 << 20] {
        let source = end.buffer(&pattern(2, len));
        end.rdma(IBV_WR_RDMA_WRITE, &source, len, addr, rkey as u32, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        let target = end.buffer(&vec![0; len]);
        end.rdma(IBV_WR_RDMA_READ, &target, len, addr, rkey as u32, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        assert!(target.bytes() == pattern(2, len));
    }
    let mut buffer = end.buffer(&pattern(3, 100_000));
    end.send(&mut buffer, 100_000, None, IBV_SEND_SIGNALED, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.go_on();
    link.expect("done");
}

fn stopped_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let target = end.buffer(&vec![0; 4 << 20]);
    let receive = end.buffer(&vec![0; 100_000]);
    end.recv(&receive, 1);
    end.join(link);
    link.say_numbers(target.addr(), u64::from(target.rkey()));
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, 100_000));
    assert!(receive.bytes() == pattern(3, 100_000));
    assert!(target.bytes()[..3 << 20] == pattern(2, 3 << 20)[..]);
    link.say("done");
}

fn killed_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 9);
    let mut buffer = end.buffer(&[1; 8]);
    // there is no receive, so these messages wait
    end.send(&mut buffer, 8, None, 0, 1);
    end.send(&mut buffer, 8, None, 0, 2);
    link.kill();
    let seen: Vec<_> = (0..3)
        .map(|_| end.wait(LIMIT))
        .map(|wc| (wc.status, wc.wr_id))
        .collect();
    assert!(seen.contains(&(IBV_WC_RETRY_EXC_ERR, 1)), "{seen:?}");
    assert!(seen.contains(&(IBV_WC_WR_FLUSH_ERR, 2)), "{seen:?}");
    assert!(seen.contains(&(IBV_WC_WR_FLUSH_ERR, 9)), "{seen:?}");
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
    assert_eq!(end.state(), IBV_QPS_ERR);
}

fn killed_sleeping_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 9);
    let child = link.pid();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        // SAFETY: the child of this test.
        unsafe { libc::kill(child, libc::SIGKILL) };
        std::time::Instant::now()
    });
    let wc = end.sleep(LIMIT);
    let woken = std::time::Instant::now();
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 9));
    let killed = killer.join().unwrap();
    assert!(woken.saturating_duration_since(killed) < std::time::Duration::from_secs(1));
    link.kill();
}

fn killed_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    std::thread::sleep(std::time::Duration::from_secs(60));
}

/// A successful send is received, however the connection ends before the receiver polls.
fn before_failure_parent(link: &mut Link) {
    for case in 0..5 {
        let mut end = End::create(link, 16, 16, 1);
        let buffers: Vec<_> = (0..3).map(|_| end.buffer(&[0; 8])).collect();
        for (i, buffer) in buffers.iter().enumerate() {
            end.recv(buffer, i as u64);
        }
        end.join(link);
        let (addr, rkey) = link.numbers();
        link.expect("sent");
        let local = end.buffer(&[1; 8]);
        let mut request = Some(IBV_WC_RETRY_EXC_ERR);
        match case {
            // its own request fails because of an invalid key
            0 => {
                end.rdma(IBV_WR_RDMA_WRITE, &local, 8, addr, rkey as u32 ^ 1, None);
                request = Some(IBV_WC_REM_ACCESS_ERR);
            }
            // the request of the other end has failed
            1 => request = None,
            // the other end is in ERR, which this end detects by a request
            2 => end.rdma(IBV_WR_RDMA_WRITE, &local, 8, addr, rkey as u32, None),
            // it moves to ERR by itself
            3 => {
                // SAFETY: all zeros is a value of it.
                let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
                attr.qp_state = IBV_QPS_ERR;
                end.modify(&mut attr, IBV_QP_STATE);
                request = None;
            }
            // the other end is dead, which this end detects by a request
            _ => {
                link.kill();
                std::thread::sleep(std::time::Duration::from_millis(20));
                end.rdma(IBV_WR_RDMA_WRITE, &local, 8, addr, rkey as u32, None);
            }
        }
        let late = end.buffer(&[0; 8]);
        end.recv(&late, 3);
        let count = 4 + usize::from(request.is_some());
        let seen: Vec<_> = (0..count).map(|_| end.sleep(LIMIT)).collect();
        let (sends, receives): (Vec<Wc>, Vec<Wc>) = seen
            .into_iter()
            .partition(|wc| wc.opcode == IBV_WC_RDMA_WRITE);
        assert_eq!(sends.first().map(|wc| wc.status), request, "case {case}");
        let receives: Vec<_> = receives.iter().map(|wc| (wc.wr_id, wc.status)).collect();
        let flushed = IBV_WC_WR_FLUSH_ERR;
        let expected = [
            (0, IBV_WC_SUCCESS),
            (1, IBV_WC_SUCCESS),
            (2, flushed),
            (3, flushed),
        ];
        assert_eq!(receives, expected, "case {case}");
        assert_eq!(buffers[1].bytes(), pattern(1, 8));
        assert_eq!(end.state(), IBV_QPS_ERR);
        if case < 4 {
            link.say("next");
        }
    }
}

fn before_failure_child(link: &mut Link) {
    for case in 0..5 {
        let mut end = End::create(link, 16, 16, 1);
        let target = end.buffer(&[0; 8]);
        end.join(link);
        link.say_numbers(target.addr(), u64::from(target.rkey()));
        for i in 0..2 {
            let mut buffer = end.buffer(&pattern(i, 8));
            end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 0);
            assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        }
        if case == 1 {
            end.rdma(IBV_WR_RDMA_WRITE, &target, 8, target.addr(), 1, None);
            assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_ACCESS_ERR);
        } else if case == 2 {
            // SAFETY: all zeros is a value of it.
            let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
            attr.qp_state = IBV_QPS_ERR;
            end.modify(&mut attr, IBV_QP_STATE);
        }
        link.say("sent");
        link.expect("next");
    }
}

/// A request that the other end has refused completes as refused, although the other end is reset
/// as soon as its process learns of it.
fn refused_parent(link: &mut Link) {
    for round in 0..ROUNDS {
        let mut end = End::connect(link, 16, 16, 1);
        let local = end.buffer(&[0x55; 64]);
        let opcode = [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ][round % 2];
        link.expect("go");
        end.rdma(opcode, &local, 8, 0x1000, 0x00de_ad00, None);
        assert_eq!(
            end.wait(LIMIT).status,
            IBV_WC_REM_ACCESS_ERR,
            "round {round}"
        );
        link.say("done");
    }
}

fn refusing_child(link: &mut Link) {
    for _ in 0..ROUNDS {
        let mut end = End::connect(link, 16, 16, 1);
        link.say("go");
        assert_eq!(end.async_event(), IBV_EVENT_QP_ACCESS_ERR);
        end.reset();
        link.expect("done");
    }
}

/// Repetitions of a case whose processes race.
const ROUNDS: usize = 100;

fn stale_parent(link: &mut Link) {
    for case in 0..5 {
        let mut end = End::connect(link, 16, 16, 1);
        let (addr, rkey) = link.numbers();
        let local = end.buffer(&[0x55; 64]);
        let (opcode, addr, rkey) = match case {
            0 => (IBV_WR_RDMA_WRITE, addr, rkey),
            1 => (IBV_WR_RDMA_READ, addr + 64 - 7, rkey),
            2 => (IBV_WR_RDMA_WRITE, addr, rkey + 1),
            3 => (IBV_WR_RDMA_READ, addr - 1, rkey),
            _ => (IBV_WR_RDMA_WRITE, addr, rkey),
        };
        end.rdma(opcode, &local, 8, addr, rkey as u32, None);
        let wc = end.wait(LIMIT);
        assert_eq!(wc.status, IBV_WC_REM_ACCESS_ERR, "case {case}");
        assert_eq!(end.state(), IBV_QPS_ERR);
        link.expect("failed");
    }
}

fn stale_child(link: &mut Link) {
    for case in 0..5 {
        let mut end = End::create(link, 16, 16, 1);
        let target = if case == 4 {
            // without the right to write
            end.buffer_with(&[7; 64], IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)
        } else {
            end.buffer(&[7; 64])
        };
        let receive = end.buffer(&[0; 8]);
        end.recv(&receive, 4);
        end.join(link);
        let (addr, rkey) = (target.addr(), u64::from(target.rkey()));
        let bytes = if case == 0 {
            end.deregister(target)
        } else {
            target.leak()
        };
        link.say_numbers(addr, rkey);
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 4));
        assert_eq!(end.state(), IBV_QPS_ERR);
        assert_eq!(end.async_event(), IBV_EVENT_QP_ACCESS_ERR);
        assert!(bytes.iter().all(|&byte| byte == 7));
        link.say("failed");
    }
}

fn long_parent(link: &mut Link) {
    for len in [9, 20_000] {
        let mut end = End::connect(link, 16, 16, 1);
        let mut buffer = end.buffer(&vec![0; len]);
        end.send(&mut buffer, len, None, IBV_SEND_SIGNALED, 1);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_INV_REQ_ERR);
        link.expect("failed");
    }
}

fn long_child(link: &mut Link) {
    for _ in 0..2 {
        let mut end = End::create(link, 16, 16, 1);
        let receive = end.buffer(&[7; 8]);
        end.recv(&receive, 1);
        end.recv(&receive, 2);
        end.join(link);
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_LOC_LEN_ERR, 1));
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 2));
        assert_eq!(receive.bytes(), [7; 8]);
        link.say("failed");
    }
}

fn events_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut buffer = end.buffer(&[1; 8]);
    let receive = end.buffer(&[0; 8]);
    for i in 0..2000 {
        end.recv(&receive, i);
        end.send(&mut buffer, 8, None, 0, 0);
        let wc = end.sleep(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i));
    }
    // first, because the other side does not poll while it waits for its end
    end.recv(&receive, 1);
    end.recv(&receive, 2);
    link.say("unsolicited next");
    let wc = end.sleep_solicited(LIMIT);
    assert_eq!(wc.wr_id, 1);
    assert_eq!(end.wait(LIMIT).wr_id, 2);
    link.expect("done");
}

fn events_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 0);
    end.join(link);
    let mut buffer = end.buffer(&[1; 8]);
    for i in 0..2000 {
        let wc = end.sleep(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i));
        end.recv(&receive, i + 1);
        end.send(&mut buffer, 8, None, 0, 0);
    }
    link.expect("unsolicited next");
    end.send(&mut buffer, 8, None, 0, 0);
    std::thread::sleep(std::time::Duration::from_millis(200));
    end.send(&mut buffer, 8, None, IBV_SEND_SOLICITED, 0);
    link.say("done");
    // the process must not end before the last message is taken, because its peer would get an
    // error
    link.wait_end();
}

fn many_parent(link: &mut Link) {
    let mut ends: Vec<_> = (0..200).map(|_| End::connect(link, 4, 4, 1)).collect();
    for (i, end) in ends.iter_mut().enumerate() {
        end.send_unregistered(
            &mut [0; 4],
            Some(i as u32),
            IBV_SEND_INLINE | IBV_SEND_SIGNALED,
            1,
        );
    }
    for end in &mut ends {
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.expect("done");
}

fn many_child(link: &mut Link) {
    let mut ends = Vec::new();
    for i in 0..200 {
        let mut end = End::create(link, 4, 4, 1);
        let receive = end.buffer(&[0; 8]);
        end.recv(&receive, i);
        receive.leak();
        end.join(link);
        ends.push(end);
    }
    for (i, end) in ends.iter_mut().enumerate() {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.wr_id, wc.imm), (i as u64, Some(i as u32)));
    }
    link.say("done");
}

fn full_parent(link: &mut Link) {
    let mut end = End::connect(link, 4096, 4096, 1);
    let mut buffer = end.buffer(&pattern(4, 1000));
    // more messages than a ring holds, while the receiver does not poll
    for i in 0..1000 {
        end.send(&mut buffer, 1000, Some(i), IBV_SEND_SIGNALED, u64::from(i));
    }
    link.say("posted");
    for i in 0..1000 {
        let wc = end.sleep(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i));
    }
    link.expect("done");
}

fn full_child(link: &mut Link) {
    let mut end = End::create(link, 4096, 4096, 1);
    let receive = end.buffer(&[0; 1000]);
    for i in 0..1000 {
        end.recv(&receive, i);
    }
    end.join(link);
    link.expect("posted");
    std::thread::sleep(std::time::Duration::from_millis(100));
    for i in 0..1000 {
        let wc = end.wait(LIMIT);
        assert_eq!(
            (wc.status, wc.wr_id, wc.imm),
            (IBV_WC_SUCCESS, u64::from(i), Some(i))
        );
    }
    assert!(receive.bytes() == pattern(4, 1000));
    link.say("done");
}

fn connect_late_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join_early(link);
    let mut buffer = end.buffer(&[1; 8]);
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 6);
    assert!(end.poll().is_none());
    link.say("sent");
    let wc = end.sleep(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 6));
    link.expect("done");
}

fn connect_late_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    let other = end.exchange(link);
    link.expect("sent");
    std::thread::sleep(std::time::Duration::from_millis(100));
    end.enter_rtr(other);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("done");
}

fn forked_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    // SAFETY: the child only calls verbs and `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = end.refuses_everything();
        // SAFETY: ends this process without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the forked child");
    let mut buffer = end.buffer(&[1; 8]);
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 6);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("done");
}

fn idle_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    end.join(link);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("done");
}

/// A message whose send has completed arrives, even if the sender ended before this process polled.
fn ending_parent(link: &mut Link) {
    let mut end = End::connect(link, 4, 16, 1);
    let buffers: Vec<_> = (0..8).map(|_| end.buffer(&[0; 64])).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        end.recv(buffer, i as u64);
    }
    link.say("go");
    std::thread::sleep(std::time::Duration::from_millis(300));
    for (i, buffer) in buffers.iter().enumerate() {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i as u64));
        assert_eq!(buffer.bytes(), pattern(i, 64));
    }
    link.wait_end();
}

fn ending_child(link: &mut Link) {
    let mut end = End::connect(link, 16, 4, 1);
    link.expect("go");
    for i in 0..8 {
        let mut buffer = end.buffer(&pattern(i, 64));
        end.send(&mut buffer, 64, None, IBV_SEND_SIGNALED, i as u64);
        end.wait(LIMIT);
    }
}

/// The first thread of the other process ends, and the others go on. Its files are not shown any
/// more before it is a zombie.
fn first_thread_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut other = End::with(4, 4, 1);
    let address = other.exchange(link);
    let stat = format!("/proc/{}/stat", link.pid());
    let begin = std::time::Instant::now();
    while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
        // looks whether the process has ended
        other.enter_rtr(address);
        other.reset();
        other.enter_init();
        assert!(begin.elapsed() < LIMIT, "the thread does not end");
    }
    other.enter_rtr(address);
    let mut buffer = end.buffer(&pattern(5, 64));
    end.send(&mut buffer, 64, None, IBV_SEND_SIGNALED, 6);
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 6));
    link.expect("received");
}

fn first_thread_child(link: &mut Link) {
    struct Rest<'a>(&'a mut Link, End, Buffer);
    // SAFETY: the first thread uses none of it any more.
    unsafe impl Send for Rest<'_> {}
    let mut end = End::create(link, 16, 16, 1);
    let receive = end.buffer(&[0; 64]);
    end.recv(&receive, 1);
    end.join(link);
    let _ = end.exchange(link);
    let rest = Rest(link, end, receive);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let Rest(link, mut end, receive) = { rest };
            assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
            assert_eq!(receive.bytes(), pattern(5, 64));
            link.say("received");
            std::process::exit(0);
        });
        // SAFETY: a C string. The thread ends without a return, so that the scope does not end. Its
        // own list of files has one that takes the kernel milliseconds to give back.
        unsafe {
            libc::unshare(libc::CLONE_FILES);
            let large = libc::memfd_create(c"large".as_ptr(), 0);
            libc::fallocate(large, 0, 0, 64 << 20);
            libc::syscall(libc::SYS_exit, 0);
        }
    });
}
