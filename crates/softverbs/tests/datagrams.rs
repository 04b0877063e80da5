//! Datagrams and a full ring: no datagram is lost if its target runs and has a posted receive, and
//! a target that takes none delays no sender for longer than the bound.
//!
//! One file, because the cases share the parts that the two processes play.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(30);
/// Maximum time that a datagram waits for room, with a reserve for a loaded machine.
const BOUND: Duration = Duration::from_secs(5);
const SLACK: Duration = Duration::from_secs(4);
const GRH: usize = 40;

fn main() {
    run(&[
        ("a_flood_of_many_queue_pairs", flood_sender, flood_receiver),
        ("long_ones_among_short_ones", mixed_sender, mixed_receiver),
        ("beside_a_connection", beside_sender, beside_receiver),
        ("both_sides_sleep", asleep_sender, asleep_receiver),
        ("a_target_that_computes", pause_sender, pause_receiver),
        ("a_stopped_target", stopped_sender, idle),
        ("a_target_that_dies", dying_sender, idle),
        ("no_receive_is_posted", none_sender, none_receiver),
        ("a_target_that_never_looks", silent_sender, idle),
        ("flushed_while_they_wait", flushed_sender, flushed_receiver),
        ("destroyed_while_they_wait", destroyed_sender, idle),
        (
            "a_buffer_that_is_written_after_the_post",
            rewriting_sender,
            rewriting_receiver,
        ),
        (
            "an_armed_queue_without_a_completion",
            unasked_sender,
            unasked_receiver,
        ),
        (
            "a_ring_that_a_connection_made",
            waiting_sender,
            connecting_receiver,
        ),
        ("memory_of_a_flood", memory_sender, idle),
        ("a_receive_without_memory", gone_sender, gone_receiver),
    ]);
}

/// A datagram queue pair with this number of requests and receives.
fn end_of(sends: u32, recvs: u32) -> End {
    ready_for_datagrams(End::of_type(IBV_QPT_UD, sends, recvs, 1))
}

/// The destination of datagrams.
type To = (*mut ibv_ah, u32);

fn way_to(end: &End, other: Address) -> To {
    (address_handle(end, other), other.qpn)
}

/// Posts a datagram whose immediate is `number`; signaled.
fn post(end: &mut End, buffer: &Buffer, len: usize, to: To, number: u32) {
    let sge = ibv_sge {
        addr: buffer.addr(),
        length: len as u32,
        lkey: buffer.lkey(),
    };
    post_sge(end, sge, to, number);
}

/// As [`post`], of one sge.
fn post_sge(end: &mut End, mut sge: ibv_sge, to: To, number: u32) {
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.wr_id = u64::from(number);
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.__bindgen_anon_1.bindgen_union_field = number;
    wr.wr.ud.ah = to.0;
    wr.wr.ud.remote_qpn = to.1;
    wr.wr.ud.remote_qkey = QKEY;
    end.post(&mut wr);
}

/// Queue pairs with `count` posted receives each, whose addresses the peer gets.
fn receivers(link: &mut Link, ends: u32, count: u32, len: usize) -> Vec<End> {
    (0..ends)
        .map(|_| {
            let mut end = end_of(4, count);
            let receive = end.buffer(&vec![0; GRH + len]);
            for id in 0..count {
                end.recv(&receive, u64::from(id));
            }
            end.say_address(link);
            end
        })
        .collect()
}

/// Sending queue pairs, and the destination of each.
fn senders(link: &mut Link, depths: &[u32]) -> Vec<(End, To)> {
    depths
        .iter()
        .map(|&depth| {
            let end = end_of(depth, 4);
            let to = way_to(&end, Address::parse(&link.hear()));
            (end, to)
        })
        .collect()
}

/// Keeps `depth` requests outstanding on each queue pair until all have sent `count`. Completions
/// arrive in order.
fn send_all(ends: &mut [(End, To)], len: impl Fn(usize) -> usize, depth: u32, count: u32) {
    let buffer = ends[0].0.buffer(&[7; 4096]);
    let mut buffers = vec![buffer];
    for (end, _) in &ends[1..] {
        buffers.push(end.buffer(&[7; 4096]));
    }
    let mut posted = vec![0; ends.len()];
    let mut done = vec![0; ends.len()];
    let begin = Instant::now();
    while done.iter().any(|&n| n < count) {
        for (i, (end, to)) in ends.iter_mut().enumerate() {
            while posted[i] < count && posted[i] - done[i] < depth {
                post(end, &buffers[i], len(i), *to, posted[i]);
                posted[i] += 1;
            }
            while let Some(wc) = end.poll() {
                assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, u64::from(done[i])));
                done[i] += 1;
            }
        }
        assert!(begin.elapsed() < LIMIT, "completions: {done:?}");
    }
}

/// Receives `count` datagrams on each queue pair, in order; waits for `pause` after each round in
/// which any arrived.
fn take_all(ends: &mut [End], count: u32, pause: Duration) {
    let mut taken = vec![0; ends.len()];
    let mut last = Instant::now();
    while taken.iter().any(|&n| n < count) {
        for (i, end) in ends.iter_mut().enumerate() {
            if let Some(wc) = end.poll() {
                assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_RECV));
                assert_eq!(wc.imm, Some(taken[i]), "queue pair {i} has lost some");
                taken[i] += 1;
                last = Instant::now();
                if taken[i].is_multiple_of(8) {
                    std::thread::sleep(pause);
                }
            }
        }
        assert!(last.elapsed() < LIMIT, "datagrams: {taken:?}");
    }
}

/// More queue pairs than fit into a ring, and a slow receiver.
fn flood_sender(link: &mut Link) {
    let mut ends = senders(link, &[128; 16]);
    link.expect("ready");
    send_all(&mut ends, |_| 1024, 128, 400);
    link.expect("all");
}

fn flood_receiver(link: &mut Link) {
    let mut ends = receivers(link, 16, 400, 1024);
    link.say("ready");
    take_all(&mut ends, 400, Duration::from_millis(1));
    link.say("all");
}

/// Short datagrams use each slot that becomes free. A long one, which needs many slots at once,
/// gets its turn.
fn mixed_sender(link: &mut Link) {
    let mut ends = senders(link, &[512; 4]);
    link.expect("ready");
    let lens = [8, 8, 8, 4096];
    send_all(&mut ends[..], |i| lens[i], 512, 4000);
    link.expect("all");
}

fn mixed_receiver(link: &mut Link) {
    let mut ends = receivers(link, 4, 4000, 4096);
    link.say("ready");
    take_all(&mut ends, 4000, Duration::ZERO);
    link.say("all");
}

/// Messages of a connection share the ring.
fn beside_sender(link: &mut Link) {
    let (mut rc, len) = (End::connect(link, 512, 4, 1), 8);
    let mut long = senders(link, &[4]).remove(0);
    let (mut short, buffer) = (rc.buffer(&[1; 8]), long.0.buffer(&[7; 4096]));
    link.expect("ready");
    let (mut posted, mut done, mut numbers) = (0u64, 0u64, 0);
    let begin = Instant::now();
    post(&mut long.0, &buffer, 4096, long.1, 0);
    while numbers < 200 {
        while posted - done < 512 {
            rc.send(&mut short, len, None, IBV_SEND_SIGNALED, posted);
            posted += 1;
        }
        while let Some(wc) = rc.poll() {
            assert_eq!(wc.status, IBV_WC_SUCCESS);
            done += 1;
        }
        if let Some(wc) = long.0.poll() {
            assert_eq!(wc.status, IBV_WC_SUCCESS);
            numbers += 1;
            post(&mut long.0, &buffer, 4096, long.1, numbers);
        }
        assert!(begin.elapsed() < LIMIT, "{numbers} long ones went");
    }
    link.say("over");
    link.expect("all");
    println!("{done} messages beside {numbers} datagrams");
}

fn beside_receiver(link: &mut Link) {
    let mut rc = End::connect(link, 4, 1024, 1);
    let mut ends = receivers(link, 1, 210, 4096);
    let receive = rc.buffer(&[0; 8]);
    for id in 0..1024 {
        rc.recv(&receive, id);
    }
    link.say("ready");
    let (mut numbers, begin) = (0, Instant::now());
    while numbers < 200 {
        if rc.poll().is_some() {
            rc.recv(&receive, 0);
        }
        if let Some(wc) = ends[0].poll() {
            assert_eq!(wc.imm, Some(numbers), "one is lost");
            numbers += 1;
        }
        assert!(begin.elapsed() < LIMIT, "{numbers} datagrams came");
    }
    link.expect("over");
    link.say("all");
}

/// No sender polls: the receiver that makes room rings them.
fn asleep_sender(link: &mut Link) {
    let mut ends = senders(link, &[128, 128]);
    let buffers: Vec<_> = ends.iter().map(|end| end.0.buffer(&[7; 1024])).collect();
    link.expect("ready");
    for (i, (end, to)) in ends.iter_mut().enumerate() {
        for number in 0..128 {
            post(end, &buffers[i], 1024, *to, number);
        }
    }
    // the datagrams of the second one first: those of the first are sent meanwhile
    for (end, _) in ends.iter_mut().rev() {
        for number in 0..128 {
            let wc = end.sleep(BOUND - Duration::from_secs(2));
            assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, number));
        }
    }
    link.expect("all");
}

fn asleep_receiver(link: &mut Link) {
    let mut ends = receivers(link, 2, 128, 1024);
    link.say("ready");
    std::thread::sleep(Duration::from_millis(300));
    for end in &mut ends {
        for number in 0..128 {
            assert_eq!(end.sleep(LIMIT).imm, Some(number), "one is lost");
        }
    }
    link.say("all");
}

/// The receiver has posted receives, and polls after 1 s.
fn pause_sender(link: &mut Link) {
    let mut ends = senders(link, &[128, 128]);
    link.expect("ready");
    send_all(&mut ends, |_| 1024, 128, 300);
    link.expect("all");
}

fn pause_receiver(link: &mut Link) {
    let mut ends = receivers(link, 2, 300, 1024);
    link.say("ready");
    // the ring is made, and soon full
    for end in &mut ends {
        assert_eq!(end.wait(LIMIT).imm, Some(0));
    }
    std::thread::sleep(Duration::from_secs(2));
    let mut next = [1; 2];
    let begin = Instant::now();
    while next != [300; 2] {
        for (end, next) in ends.iter_mut().zip(&mut next) {
            if let Some(wc) = end.poll() {
                assert_eq!(wc.imm, Some(*next), "one is lost");
                *next += 1;
            }
        }
        assert!(begin.elapsed() < LIMIT, "{next:?}");
    }
    link.say("all");
}

/// The receiver takes a datagram into memory that it has unmapped, and the next one into other
/// memory.
fn gone_sender(link: &mut Link) {
    let (mut end, to) = senders(link, &[4]).remove(0);
    let buffer = end.buffer(&[7; 1024]);
    for number in 0..2 {
        link.expect("ready");
        post(&mut end, &buffer, 1024, to, number);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.expect("got");
}

fn gone_receiver(link: &mut Link) {
    let mut end = end_of(4, 4);
    end.say_address(link);
    for (number, gone) in [true, false].into_iter().enumerate() {
        // pages that contain nothing else
        let memory = end.buffer(&[0; 3 * 4096]);
        let page = (memory.addr() as usize).next_multiple_of(4096);
        let mut sge = ibv_sge {
            addr: page as u64,
            length: 2048,
            lkey: memory.lkey(),
        };
        let mut wr = ibv_recv_wr {
            sg_list: &raw mut sge,
            num_sge: 1,
            ..Default::default()
        };
        // SAFETY: live queue pair, a chain of one, a writable pointer; a page of this test.
        unsafe {
            assert_eq!(
                ibv_post_recv(end.qp, &raw mut wr, &mut std::ptr::null_mut()),
                0
            );
            let page = std::ptr::with_exposed_provenance_mut(page);
            if gone {
                assert_eq!(libc::mprotect(page, 4096, libc::PROT_NONE), 0);
            }
            link.say("ready");
            let wc = end.wait(LIMIT);
            if gone {
                assert_eq!(wc.status, IBV_WC_LOC_PROT_ERR);
                libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_WRITE);
                // as after any error
                end.reset();
                end = ready_for_datagrams(end);
            } else {
                assert_eq!((wc.status, wc.imm), (IBV_WC_SUCCESS, Some(number as u32)));
            }
        }
    }
    link.say("got");
}

/// A queue pair with receives, whose process receives one datagram and polls no more.
fn idle(link: &mut Link) {
    let mut ends = receivers(link, 1, 400, 1024);
    link.say("ready");
    assert_eq!(ends[0].wait(LIMIT).imm, Some(0));
    link.say("got");
    if link.hear() == "look" {
        let begin = Instant::now();
        while !matches!(ends[0].poll(), Some(wc) if wc.imm == Some(999)) {
            assert!(begin.elapsed() < LIMIT, "the last one");
        }
        link.say("seen");
        link.wait_end();
    }
}

/// A queue pair connected to [`idle`], which has received one datagram; and an address handle to
/// itself.
fn towards_idle(link: &mut Link, depth: u32) -> (End, To, To, Buffer) {
    let (mut end, to) = senders(link, &[depth]).remove(0);
    let own = end.address();
    let itself = way_to(&end, own);
    let buffer = end.buffer(&[7; 1024]);
    link.expect("ready");
    post(&mut end, &buffer, 1024, to, 0);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("got");
    (end, to, itself, buffer)
}

/// All `count` completions, and the time until the last.
fn completions(end: &mut End, count: u32) -> Duration {
    let begin = Instant::now();
    for number in 0..count {
        let wc = end.wait(LIMIT);
        assert_eq!(
            (wc.status, wc.wr_id),
            (IBV_WC_SUCCESS, u64::from(number)),
            "in their order"
        );
    }
    begin.elapsed()
}

/// Datagrams to a stopped target are dropped after the bound; once it continues, it receives again.
fn stopped_sender(link: &mut Link) {
    let (mut end, to, _, buffer) = towards_idle(link, 256);
    link.stop();
    for number in 0..256 {
        post(&mut end, &buffer, 1024, to, number);
    }
    let took = completions(&mut end, 256);
    assert!(
        took < Duration::from_secs(3),
        "{took:?} for one that is stopped"
    );
    // afterwards no datagram waits for it; a short one may still find room
    for number in 0..64 {
        post(
            &mut end,
            &buffer,
            if number % 2 == 0 { 8 } else { 1024 },
            to,
            number,
        );
    }
    let took = completions(&mut end, 64);
    assert!(took < Duration::from_millis(500), "{took:?} once more");
    link.go_on();
    link.say("look");
    let begin = Instant::now();
    loop {
        // it has received the datagrams in the ring after a time
        post(&mut end, &buffer, 1024, to, 999);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        std::thread::sleep(Duration::from_millis(20));
        if begin.elapsed() > Duration::from_millis(500) {
            break;
        }
    }
    link.expect("seen");
    link.say("end");
}

/// Datagrams that wait for a process that dies are dropped, and complete.
fn dying_sender(link: &mut Link) {
    let (mut end, to, _, buffer) = towards_idle(link, 256);
    for number in 0..256 {
        post(&mut end, &buffer, 1024, to, number);
    }
    // they wait for a living process
    for number in 0..100 {
        assert_eq!(end.wait(LIMIT).wr_id, number);
    }
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(500) {
        if let Some(wc) = end.poll() {
            assert!(wc.wr_id < 130, "{wc:?}: the ring has no room for it");
        }
    }
    link.kill();
    let begin = Instant::now();
    while end.wait(LIMIT).wr_id != 255 {}
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?} for a dead one");
}

/// A target that polls and has no receive drops the datagrams; no sender waits.
fn none_sender(link: &mut Link) {
    let mut ends = senders(link, &[128]);
    link.expect("ready");
    let begin = Instant::now();
    send_all(&mut ends, |_| 1024, 128, 4000);
    let took = begin.elapsed();
    assert!(took < BOUND, "{took:?} for what is lost");
    link.say("over");
    link.expect("posted");
    let buffer = ends[0].0.buffer(&[7; 8]);
    let to = ends[0].1;
    post(&mut ends[0].0, &buffer, 8, to, 4000);
    assert_eq!(ends[0].0.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("all");
}

fn none_receiver(link: &mut Link) {
    let mut end = end_of(4, 4);
    end.say_address(link);
    link.say("ready");
    let receive = end.buffer(&[0; GRH + 1024]);
    let polling = std::sync::atomic::AtomicBool::new(true);
    std::thread::scope(|scope| {
        // one thread sleeps on the channel, the other one polls
        let cq = end.cq as usize;
        let polling = &polling;
        scope.spawn(move || {
            while polling.load(std::sync::atomic::Ordering::Relaxed) {
                // SAFETY: live queue, room for one.
                let count = unsafe {
                    let mut wc: ibv_wc = std::mem::zeroed();
                    let cq: *mut ibv_cq = std::ptr::with_exposed_provenance_mut(cq);
                    ibv_poll_cq(cq, 1, &raw mut wc)
                };
                assert_eq!(count, 0, "a datagram without a receive");
            }
        });
        link.expect("over");
        polling.store(false, std::sync::atomic::Ordering::Relaxed);
    });
    // datagrams that are still in the ring are dropped too
    assert!(end.poll().is_none());
    for _ in 0..100 {
        assert!(end.poll().is_none());
    }
    end.recv(&receive, 1);
    link.say("posted");
    assert_eq!(end.wait(LIMIT).imm, Some(4000));
    link.say("all");
}

/// A target that runs and never polls delays one queue pair once, for the bound, and no other queue
/// pair.
fn silent_sender(link: &mut Link) {
    let (mut end, to, itself, buffer) = towards_idle(link, 512);
    let mut other = end_of(64, 64);
    let own = other.address();
    let to_other = way_to(&other, own);
    let room = end.buffer(&[0; GRH + 1024]);
    let other_room = other.buffer(&[0; GRH + 1024]);
    let other_buffer = other.buffer(&[7; 1024]);
    let mut numbers = HashMap::new();
    let begin = Instant::now();
    end.recv(&room, 10_000);
    for number in 0..300 {
        post(&mut end, &buffer, 1024, to, number);
    }
    // after all those
    post(&mut end, &buffer, 1024, itself, 300);
    let mut longest = Duration::ZERO;
    while numbers.len() < 302 {
        // the other queue pair continues meanwhile
        let since = Instant::now();
        other.recv(&other_room, 1);
        post(&mut other, &other_buffer, 1024, to_other, 0);
        for _ in 0..2 {
            assert_eq!(other.wait(LIMIT).status, IBV_WC_SUCCESS);
        }
        longest = longest.max(since.elapsed());
        while let Some(wc) = end.poll() {
            assert_eq!(wc.status, IBV_WC_SUCCESS);
            numbers.insert(wc.wr_id, begin.elapsed());
        }
        assert!(begin.elapsed() < LIMIT, "{} completions", numbers.len());
    }
    let took = numbers[&300];
    assert!(
        took >= BOUND - Duration::from_millis(100),
        "{took:?}: it waits"
    );
    assert!(took < BOUND + SLACK, "{took:?}: once for all");
    assert!(longest < BOUND / 2, "{longest:?} on the other queue pair");
    // no further delays from now on
    let begin = Instant::now();
    for _ in 0..200 {
        post(&mut end, &buffer, 1024, to, 1);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    assert!(begin.elapsed() < BOUND / 2, "each of them waits");
    link.say("end");
}

/// A queue pair that fails while it waits for room does not block the others.
fn flushed_sender(link: &mut Link) {
    let mut ends = senders(link, &[256, 256]);
    let buffers: Vec<_> = ends.iter().map(|end| end.0.buffer(&[7; 4096])).collect();
    let to = ends[0].1;
    link.expect("ready");
    // the ring is made for this queue pair
    post(&mut ends[0].0, &buffers[0], 4096, to, 0);
    assert_eq!(ends[0].0.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("got");
    for (i, (end, to)) in ends.iter_mut().enumerate() {
        for number in 0..256 {
            let len = if i == 0 { 4096 } else { 8 };
            post(end, &buffers[i], len, *to, number);
        }
    }
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    ends[0].0.modify(&mut attr, IBV_QP_STATE);
    let mut flushed = 0;
    for number in 0..256 {
        let wc = ends[0].0.wait(LIMIT);
        assert_eq!(wc.wr_id, number, "in their order");
        assert!(
            wc.status == IBV_WC_WR_FLUSH_ERR || flushed == 0 && wc.status == IBV_WC_SUCCESS,
            "{wc:?}"
        );
        flushed += u32::from(wc.status == IBV_WC_WR_FLUSH_ERR);
    }
    assert!(flushed > 0, "nothing has waited");
    link.say("look");
    let took = completions(&mut ends[1].0, 256);
    assert!(took < BOUND / 2, "{took:?} behind one that has failed");
    link.expect("all");
}

fn flushed_receiver(link: &mut Link) {
    let mut ends = receivers(link, 2, 256, 4096);
    link.say("ready");
    assert_eq!(ends[0].wait(LIMIT).imm, Some(0));
    link.say("got");
    link.expect("look");
    for number in 0..256 {
        assert_eq!(ends[1].wait(LIMIT).imm, Some(number), "one is lost");
    }
    link.say("all");
}

/// No call waits long for datagrams that cannot be sent.
fn destroyed_sender(link: &mut Link) {
    let (mut end, to, _, buffer) = towards_idle(link, 256);
    for number in 0..256 {
        post(&mut end, &buffer, 1024, to, number);
    }
    let begin = Instant::now();
    // SAFETY: live objects, not used any more.
    unsafe { assert_eq!((verbs().ibv_destroy_qp)(end.qp), 0) };
    assert!(
        begin.elapsed() < Duration::from_secs(2),
        "{:?}",
        begin.elapsed()
    );
    // the next turn belongs to the next queue pair
    let mut next = end_of(4, 4);
    let to = (address_handle(&next, next.address()), to.1);
    let buffer = next.buffer(&[7; 1024]);
    link.say("look");
    post(&mut next, &buffer, 1024, to, 999);
    assert_eq!(next.wait(BOUND / 2).status, IBV_WC_SUCCESS);
    link.expect("seen");
    link.say("end");
}

/// UCX reuses a buffer after it has received an answer, without the completion of the send. A
/// waiting datagram must have the bytes of the post.
fn rewriting_sender(link: &mut Link) {
    let mut ends = senders(link, &[64]);
    let (end, to) = &mut ends[0];
    let mut buffer = end.buffer(&[0; 1024]);
    link.expect("ready");
    for number in 0..16 {
        buffer.fill(number as u8 + 1);
        post(end, &buffer, 1024, *to, number);
    }
    buffer.fill(0xff);
    post_empty(end, *to, 16);
    link.say("posted");
    for _ in 0..17 {
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.expect("all");
}

/// Posts a datagram with a single empty sge at NULL, which names no region.
fn post_empty(end: &mut End, to: To, number: u32) {
    let sge = ibv_sge {
        addr: 0,
        length: 0,
        lkey: 0,
    };
    post_sge(end, sge, to, number);
}

fn rewriting_receiver(link: &mut Link) {
    let mut end = end_of(1, 17);
    let rooms: Vec<_> = (0..17).map(|_| end.buffer(&[0; GRH + 1024])).collect();
    for (number, room) in rooms.iter().enumerate() {
        end.recv(room, number as u64);
    }
    end.say_address(link);
    link.say("ready");
    // no poll before, so no ring: all datagrams wait
    link.expect("posted");
    for (number, room) in rooms[..16].iter().enumerate() {
        assert_eq!(end.wait(LIMIT).imm, Some(number as u32));
        assert!(
            room.bytes()[GRH..].iter().all(|&b| b == number as u8 + 1),
            "datagram {number}: {}",
            room.bytes()[GRH]
        );
    }
    let empty = end.wait(LIMIT);
    assert_eq!((empty.imm, empty.byte_len as usize), (Some(16), GRH));
    link.say("all");
}

/// A datagram without a receive completes nothing, so it makes no channel readable. UCX aborts if a
/// channel is readable at its start.
fn unasked_sender(link: &mut Link) {
    let mut ends = senders(link, &[4]);
    let (end, to) = &mut ends[0];
    let buffer = end.buffer(&[7; 8]);
    link.expect("ready");
    for number in 0..2 {
        post(end, &buffer, 8, *to, number);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        link.say("sent");
        link.expect("next");
    }
    post(end, &buffer, 8, *to, 2);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("all");
}

fn unasked_receiver(link: &mut Link) {
    let mut end = end_of(1, 1);
    let room = end.buffer(&[0; GRH + 8]);
    end.recv(&room, 0);
    end.say_address(link);
    link.say("ready");
    assert_eq!(end.wait(LIMIT).imm, Some(0));
    link.expect("sent");
    link.say("next");
    link.expect("sent");
    // SAFETY: live queue and channel.
    let fd = unsafe {
        assert_eq!(ibv_req_notify_cq(end.cq, 0), 0);
        (*end.channel).fd
    };
    assert!(!readable(fd, Duration::from_millis(100)));
    // the next datagram completes a receive
    end.recv(&room, 2);
    link.say("next");
    assert!(readable(fd, LIMIT));
    assert_eq!(end.wait(LIMIT).imm, Some(2));
    link.say("all");
}

/// A datagram waits for its target's ring, which another thread of the target's process makes for a
/// connection. The sender sleeps, and is rung.
fn waiting_sender(link: &mut Link) {
    let mut ends = senders(link, &[4]);
    let (end, to) = &mut ends[0];
    let connection = End::with(4, 4, 1);
    let buffer = end.buffer(&[7; 8]);
    link.expect("ready");
    post(end, &buffer, 8, *to, 0);
    // SAFETY: live queue and channel.
    let fd = unsafe {
        assert_eq!(ibv_req_notify_cq(end.cq, 0), 0);
        (*end.channel).fd
    };
    let begin = Instant::now();
    connection.say_address(link);
    assert!(readable(fd, LIMIT));
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    // It gives up on the ring after a second.
    let took = begin.elapsed();
    assert!(took < Duration::from_millis(900), "{took:?}");
    link.say("all");
}

/// Polls nothing.
fn connecting_receiver(link: &mut Link) {
    let end = end_of(1, 1);
    end.say_address(link);
    let mut connection = End::with(4, 4, 1);
    link.say("ready");
    let other = Address::parse(&link.hear());
    connection.enter_rtr(other);
    link.expect("all");
}

/// Bytes that the program has allocated.
fn allocated() -> usize {
    // SAFETY: reads the allocator's counts.
    let counts = unsafe { libc::mallinfo2() };
    counts.uordblks + counts.hblkhd
}

/// The copies of datagrams that have waited are not kept.
fn memory_sender(link: &mut Link) {
    const DEPTH: u32 = 4096;
    let (mut end, to, _, _) = towards_idle(link, DEPTH);
    let buffer = end.buffer(&[7; 4096]);
    let before = allocated();
    for number in 0..DEPTH {
        post(&mut end, &buffer, 4096, to, number);
    }
    let waiting = allocated() - before;
    assert!(waiting > 8 << 20, "nothing waits: {waiting}");
    link.stop();
    completions(&mut end, DEPTH);
    let kept = allocated().saturating_sub(before);
    assert!(kept < 1 << 20, "{kept} of {waiting} bytes are kept");
    link.kill();
}

/// Whether the descriptor becomes readable in time.
fn readable(fd: i32, time: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element.
    unsafe { libc::poll(&raw mut poll, 1, time.as_millis() as i32) == 1 }
}
