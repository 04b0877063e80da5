//! Receive rings that grow, between two processes (`docs/softverbs-ring.md`, "Growth").

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);

/// Slots of the first and of the larger ring.
const FIRST: u32 = 64;
const LARGER: u32 = 256;
/// Short messages that fit into a ring of [`FIRST`] slots,
const FULL: u64 = 63;
/// and then into both, when the receiver has taken one: one into the first ring, before the marker.
const FULL_LARGER: u64 = 192;
const COOKIE: u64 = 1000;

fn main() {
    run(&[
        ("messages_of_all_lengths", lengths_parent, lengths_child),
        ("a_sender_that_sleeps_when_the_ring_grows", asleep, growing),
        ("a_sender_that_waits_before_the_marker", early, slow_reader),
        ("a_marker_without_a_message", marker_only, marker_reader),
        (
            "a_payload_for_the_larger_ring_alone",
            long_parent,
            long_child,
        ),
        ("a_cold_ring_that_grows", cold_sender, cold_receiver),
        ("a_failed_receiver_and_the_next_connection", failed, in_both),
        ("a_dead_sender", survivor, victim),
        ("a_dead_receiver", bereaved, dead_receiver),
        ("an_end_between_marker_and_message", ending, slow_sender),
        ("a_reset_beside_a_sender_that_moves", busy, busy_sender),
        ("forged_markers", forged, forged_sender),
        ("rings_that_cannot_grow", refused, idle_end),
        ("no_memory_for_a_larger_ring", full_arena, idle_end),
    ]);
}

/// A connected end with a ring.
fn connected(link: &mut Link) -> (End, Ring) {
    let mut end = End::create(link, 16, 16, 1);
    let ring = Ring::try_create(&end, FIRST, COOKIE).unwrap();
    end.join(link);
    ring.join();
    (end, ring)
}

fn idle_end(link: &mut Link) {
    let (_end, _ring) = connected(link);
    link.wait_end();
}

/// Sends short messages, numbered from `next`, until there is no room; returns the next number.
fn fill(ring: Ring, mut next: u64) -> u64 {
    loop {
        match ring.post([next, 0, 0], &[], 0) {
            0 => next += 1,
            error => {
                assert_eq!(error, libc::EAGAIN);
                return next;
            }
        }
    }
}

/// Takes messages with the numbers of the range.
fn take(ring: Ring, numbers: std::ops::Range<u64>) {
    for number in numbers {
        assert_eq!(ring.wait(LONG).words[0], number);
    }
}

/// Fills both rings of a receiver that takes one message when it hears "full", has grown before,
/// and then says "one". Returns the number of messages.
fn fill_both(link: &mut Link, ring: Ring) -> u64 {
    assert_eq!(fill(ring, 0), FULL);
    link.say("full");
    link.expect("one");
    let sent = fill(ring, FULL);
    assert_eq!(sent, FULL + FULL_LARGER);
    sent
}

/// The receiver's part of [`fill_both`].
fn grow_for(link: &mut Link, ring: Ring) {
    link.expect("full");
    assert_eq!(ring.grow(LARGER), 0);
    take(ring, 0..1);
    link.say("one");
}

fn pattern(number: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (number as usize * 31 + i) as u8).collect()
}

const COUNT: u64 = 12_000;
/// Both ends grow when they have received this number of messages.
const GROWS_AT: u64 = 2_000;
/// From this number on, messages may have the larger ring's lengths. Fewer than 130 messages are in
/// the rings of 64 slots, so both ends have grown.
const LONG_FROM: u64 = 4_000;

fn length_of(number: u64) -> usize {
    let few = [0, 1, 31, 32, 33, 95, 96, 97, 160, 1000, 1984];
    let many = [4000, 4096, 8127, 8128];
    let long = number >= LONG_FROM && number.is_multiple_of(3);
    if long {
        many[number as usize % many.len()]
    } else {
        few[number as usize % few.len()]
    }
}

fn lengths_parent(link: &mut Link) {
    let (mut end, ring) = connected(link);
    assert_eq!(ring.post([0; 3], &[0; 2017], 0), libc::EMSGSIZE);
    let (mut sent, mut received) = (0, 0);
    while received < COUNT {
        if sent < COUNT {
            let payload = pattern(sent, length_of(sent));
            let words = [sent, !sent, 7];
            let (a, b) = payload.split_at(payload.len() / 3);
            let ret = match sent % 2 {
                0 => ring.post_pieces(words, &[a, &[], b]),
                _ => ring.post(words, &payload, 0),
            };
            assert!(ret == 0 || ret == libc::EAGAIN, "{ret}");
            sent += u64::from(ret == 0);
        }
        if let Some(message) = ring.poll().unwrap() {
            assert_eq!(message.words, [received, !received, 7]);
            assert_eq!(message.payload, pattern(received, length_of(received)));
            received += 1;
            if received == GROWS_AT {
                assert_eq!(ring.grow(LARGER), 0);
            }
        }
    }
    // both senders have moved
    let info = ring.join();
    assert_eq!((info.max_send, info.max_recv), (8128, 8128));
    assert_eq!(ring.post([0; 3], &[0; 8129], 0), libc::EMSGSIZE);
    assert_eq!(ring.consume(), libc::EINVAL);
    assert!(end.poll().is_none());
    assert_eq!(ring.delivered(), ring.sent());
    link.say("end");
}

/// Sends each message back.
fn lengths_child(link: &mut Link) {
    let (_end, ring) = connected(link);
    for number in 0..COUNT {
        let message = ring.wait(LONG);
        if number == GROWS_AT {
            assert_eq!(ring.grow(LARGER), 0);
        }
        let begin = Instant::now();
        loop {
            match ring.post(message.words, &message.payload, 0) {
                0 => break,
                error => assert_eq!(error, libc::EAGAIN),
            }
            assert!(begin.elapsed() < LONG, "no room");
        }
    }
    link.expect("end");
}

/// Sleeps on the channel until `number` is sent.
fn send_sleeping(end: &End, ring: Ring, number: u64) {
    let begin = Instant::now();
    loop {
        end.arm(false);
        assert_eq!(ring.await_consume(), 0);
        if ring.post([number, 0, 0], &[], 0) == 0 {
            return;
        }
        assert!(end.sleep_on_channel(LONG), "nobody rang");
        assert!(begin.elapsed() < LONG);
    }
}

/// Takes what makes the channel readable although nothing has happened, and asks for a wake-up.
fn fall_asleep(end: &End, ring: Ring) {
    let _ = end.sleep_on_channel(Duration::ZERO);
    end.arm(false);
    assert_eq!(ring.await_consume(), 0);
}

fn asleep(link: &mut Link) {
    let (end, ring) = connected(link);
    assert_eq!(fill(ring, 0), FULL);
    fall_asleep(&end, ring);
    assert_eq!(fill(ring, FULL), FULL);
    link.say("grow");
    assert!(end.sleep_on_channel(LONG), "nobody rang");
    link.expect("grown");
    // the receiver has taken nothing
    let mut sent = fill(ring, FULL);
    assert_eq!(sent, FULL + FULL_LARGER - 1);
    link.say("go");
    while sent < 2_000 {
        send_sleeping(&end, ring, sent);
        sent += 1;
    }
    link.expect("end");
}

fn growing(link: &mut Link) {
    let (_end, ring) = connected(link);
    link.expect("grow");
    assert_eq!(ring.grow(LARGER), 0);
    link.say("grown");
    link.expect("go");
    for number in 0..2_000 {
        if number % 200 == 0 {
            // the sender sleeps
            std::thread::sleep(Duration::from_millis(20));
        }
        take(ring, number..number + 1);
    }
    link.say("end");
}

/// Waits in the larger ring while the receiver consumes from the first one: each consume makes
/// room, is visible as delivered, and wakes the sender.
fn early(link: &mut Link) {
    let (end, ring) = connected(link);
    let mut sent = fill_both(link, ring);
    for taken in 2..10 {
        fall_asleep(&end, ring);
        assert_eq!(fill(ring, sent), sent);
        link.say("consume");
        assert!(end.sleep_on_channel(LONG), "nobody rang");
        assert_eq!(ring.delivered(), taken);
        assert_eq!(fill(ring, sent), sent + 1);
        sent += 1;
    }
    fall_asleep(&end, ring);
    assert_eq!(fill(ring, sent), sent);
    link.say("all");
    link.say(&sent.to_string());
    let begin = Instant::now();
    while ring.delivered() != ring.sent() {
        assert!(end.sleep_on_channel(LONG), "nobody rang");
        end.arm(false);
        assert_eq!(ring.await_consume(), 0);
        assert!(begin.elapsed() < LONG);
    }
    link.say("end");
}

fn slow_reader(link: &mut Link) {
    let (_end, ring) = connected(link);
    grow_for(link, ring);
    let mut number = 1;
    while link.hear() == "consume" {
        take(ring, number..number + 1);
        number += 1;
    }
    take(ring, number..link.hear().parse().unwrap());
    link.expect("end");
}

/// The larger ring has no room for the message until the receiver has found the marker: padding of
/// 63 slots, 64 slots, and one behind them are all 128. So nothing but the marker is there to wake
/// the receiver, whose ring is cold; and the sender has asked for room before it moved.
fn marker_only(link: &mut Link) {
    let (end, ring) = connected(link);
    for number in 0..64 {
        assert_eq!(ring.post([number, 0, 0], &[], 0), 0);
        link.say("take");
        link.expect("taken");
    }
    link.expect("asleep");
    fall_asleep(&end, ring);
    assert_eq!(ring.post([64, 0, 0], &[5; 4032], 0), libc::EAGAIN);
    assert!(end.sleep_on_channel(LONG), "nobody rang the sender");
    assert_eq!(ring.post([64, 0, 0], &[5; 4032], 0), 0);
    link.expect("end");
}

fn marker_reader(link: &mut Link) {
    let (end, ring) = connected(link);
    for number in 0..64 {
        link.expect("take");
        take(ring, number..number + 1);
        link.say("taken");
    }
    end.arrivals(8);
    let _ = end.sleep_on_channel(Duration::ZERO);
    assert_eq!(ring.grow(128), 0);
    end.arm(true);
    assert_eq!(ring.poll(), Ok(None));
    assert!(end.arrivals(8).is_empty());
    link.say("asleep");
    assert!(end.sleep_on_channel(LONG), "nobody rang the receiver");
    assert_eq!(end.arrivals(8), [COOKIE]);
    let message = ring.wait(LONG);
    assert_eq!((message.words[0], message.payload), (64, vec![5; 4032]));
    link.say("end");
}

/// A payload that the first ring never takes.
fn long_parent(link: &mut Link) {
    let (_end, ring) = connected(link);
    assert_eq!(fill(ring, 0), FULL);
    assert_eq!(ring.post([FULL, 0, 0], &[6; 8128], 0), libc::EMSGSIZE);
    link.say("grow");
    link.expect("grown");
    assert_eq!(ring.post([FULL, 0, 0], &[6; 8129], 0), libc::EMSGSIZE);
    assert_eq!(ring.post([FULL, 0, 0], &[6; 8128], 0), 0);
    link.say("take");
    link.expect("end");
}

fn long_child(link: &mut Link) {
    let (_end, ring) = connected(link);
    link.expect("grow");
    assert_eq!(ring.grow(LARGER), 0);
    link.say("grown");
    link.expect("take");
    take(ring, 0..FULL);
    let message = ring.wait(LONG);
    assert_eq!((message.words[0], message.payload), (FULL, vec![6; 8128]));
    link.say("end");
}

fn cold_sender(link: &mut Link) {
    let (_end, ring) = connected(link);
    let sent = fill_both(link, ring);
    // the receiver has made its ring hot, cold and hot, and it is behind the marker
    for number in sent..sent + 4 {
        link.say("sent");
        link.expect("more");
        assert_eq!(ring.post([number, 0, 0], &[], 0), 0);
    }
    link.say("sent");
    link.expect("end");
}

fn cold_receiver(link: &mut Link) {
    let (end, ring) = connected(link);
    link.expect("full");
    assert_eq!(ring.grow(LARGER), 0);
    assert_eq!(end.arrivals(8), [COOKIE]);
    assert!(ring.set_hot(true));
    take(ring, 0..1);
    link.say("one");
    // HOT of both rings
    link.expect("sent");
    assert!(end.arrivals(8).is_empty(), "the larger ring is cold");
    take(ring, 1..2);
    assert!(ring.set_hot(false));
    end.arm(false);
    let _ = end.sleep_on_channel(Duration::ZERO);
    end.arm(false);
    link.say("more");
    assert!(end.sleep_on_channel(LONG), "nobody rang");
    link.expect("sent");
    assert_eq!(end.arrivals(8), [COOKIE]);
    // up to the marker alone
    take(ring, 2..FULL + 1);
    assert!(ring.is_ready());
    assert!(ring.set_hot(true));
    link.say("more");
    link.expect("sent");
    assert!(end.arrivals(8).is_empty());
    take(ring, FULL + 1..FULL + FULL_LARGER + 2);
    assert!(!ring.is_ready());
    assert_eq!(ring.poll(), Ok(None));
    assert!(!ring.set_hot(false));
    link.say("more");
    link.expect("sent");
    assert_eq!(end.arrivals(8), [COOKIE]);
    assert!(ring.set_hot(true));
    link.say("more");
    link.expect("sent");
    assert!(end.arrivals(8).is_empty());
    let next = FULL + FULL_LARGER + 2;
    take(ring, next..next + 2);
    link.say("end");
}

fn fail(end: &mut End) {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    end.modify(&mut attr, IBV_QP_STATE);
}

fn numbers(messages: &[Received]) -> Vec<u64> {
    messages.iter().map(|message| message.words[0]).collect()
}

fn failed(link: &mut Link) {
    let (mut end, ring) = connected(link);
    grow_for(link, ring);
    link.expect("sent");
    fail(&mut end);
    assert_eq!(ring.grow(4096), libc::EALREADY);
    assert_eq!(ring.poll().unwrap().unwrap().words[0], 1);
    link.say("failed");
    let (rest, error) = ring.wait_end(&mut end, LONG);
    assert_eq!(error, -libc::ENOTCONN);
    assert_eq!(numbers(&rest), (2..FULL + FULL_LARGER).collect::<Vec<_>>());
    assert!(!ring.is_ready());
    for round in 0..3 {
        link.expect("noticed");
        end.reset();
        assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
        end.enter_init();
        end.join(link);
        // the larger ring is the only one
        let info = ring.join();
        assert_eq!((info.max_send, info.max_recv), (1984, 8128));
        assert_eq!(ring.grow(4096), libc::EALREADY);
        // an arrival of the last connection
        end.arrivals(8);
        link.say("attached");
        link.expect("sent");
        assert_eq!(end.arrivals(8), [COOKIE]);
        take(ring, 0..100);
        assert_eq!(ring.wait(LONG).payload, [round; 8128]);
        // a reset with messages in the ring
        link.say("taken");
    }
    link.expect("end");
}

fn in_both(link: &mut Link) {
    let (mut end, ring) = connected(link);
    let sent = fill_both(link, ring);
    link.say("sent");
    link.expect("failed");
    assert_eq!(ring.post([sent, 0, 0], &[], 0), libc::ENOTCONN);
    assert_eq!(ring.await_consume(), libc::ENOTCONN);
    for round in 0..3 {
        end.reset();
        end.enter_init();
        link.say("noticed");
        end.join(link);
        let info = ring.join();
        assert_eq!((info.max_send, info.max_recv), (8128, 1984));
        link.expect("attached");
        for number in 0..100 {
            assert_eq!(ring.post([number, 0, 0], &[], 0), 0);
        }
        assert_eq!(ring.post([100, 0, 0], &[round; 8128], 0), 0);
        for number in 101..110 {
            assert_eq!(ring.post([number, 0, 0], &[], 0), 0);
        }
        link.say("sent");
        link.expect("taken");
    }
    link.say("end");
}

fn survivor(link: &mut Link) {
    let (mut end, ring) = connected(link);
    grow_for(link, ring);
    link.expect("sent");
    link.kill();
    let (rest, error) = ring.wait_end(&mut end, LONG);
    assert_eq!(error, -libc::ENOTCONN);
    assert_eq!(numbers(&rest), (1..FULL + FULL_LARGER).collect::<Vec<_>>());
    assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
    end.reset();
    end.enter_init();
    assert_eq!(ring.poll(), Ok(None));
    // SAFETY: live, and not used again.
    assert_eq!(unsafe { (verbs().ibv_destroy_qp)(end.qp) }, 0);
}

fn victim(link: &mut Link) {
    let (_end, ring) = connected(link);
    fill_both(link, ring);
    link.say("sent");
    link.wait_end();
}

fn bereaved(link: &mut Link) {
    let (mut end, ring) = connected(link);
    let sent = fill_both(link, ring);
    fall_asleep(&end, ring);
    link.kill();
    let begin = Instant::now();
    // the death makes the channel readable
    assert!(end.sleep_on_channel(LONG), "nobody noticed");
    while ring.await_consume() != libc::ENOTCONN {
        let _ = end.poll();
        assert!(begin.elapsed() < LONG, "no end");
    }
    assert_eq!(ring.post([sent, 0, 0], &[], 0), libc::ENOTCONN);
    assert_eq!(ring.delivered(), 1);
    assert_eq!(ring.wait_end(&mut end, LONG), (vec![], -libc::ENOTCONN));
}

fn dead_receiver(link: &mut Link) {
    let (_end, ring) = connected(link);
    grow_for(link, ring);
    link.wait_end();
}

/// Sends 62 short messages, so that one of two slots has no room and a marker has, and then one of
/// two slots slowly.
fn send_slowly(ring: Ring) -> libc::c_int {
    for number in 0..62 {
        assert_eq!(ring.post([number, 0, 0], &[], 0), 0);
    }
    ring.post_slowly([62, 0, 0])
}

/// The sender is stopped between the marker and its message when the receiver fails.
fn ending(link: &mut Link) {
    let (mut end, ring) = connected(link);
    assert_eq!(ring.grow(LARGER), 0);
    link.say("grown");
    link.expect("writing");
    fail(&mut end);
    take(ring, 0..62);
    assert!(ring.is_ready(), "no marker");
    assert_eq!(ring.poll(), Err(-libc::EAGAIN));
    assert!(!ring.is_ready());
    end.arm(true);
    let _ = end.sleep_on_channel(Duration::ZERO);
    end.arm(true);
    assert_eq!(ring.poll(), Err(-libc::EAGAIN));
    assert!(!end.sleep_on_channel(SHORT));
    link.say("go");
    assert!(end.sleep_on_channel(LONG), "nobody rang");
    assert_eq!(ring.poll().unwrap().unwrap().words[0], 62);
    assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
    link.expect("posted");
}

fn slow_sender(link: &mut Link) {
    let (_end, ring) = connected(link);
    link.expect("grown");
    assert_eq!(send_slowly(ring), libc::ENOTCONN);
    link.say("posted");
}

/// A RESET waits for a sender that writes into the larger ring, before that becomes the ring of the
/// next connection.
fn busy(link: &mut Link) {
    let (mut end, ring) = connected(link);
    assert_eq!(ring.grow(LARGER), 0);
    link.say("grown");
    link.expect("writing");
    // SAFETY: all zeros is a value of it, and RESET; live queue pair.
    let ret = unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        (verbs().ibv_modify_qp)(end.qp, &raw mut attr, IBV_QP_STATE.cast_signed())
    };
    assert_eq!(ret, libc::EBUSY);
    assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
    link.say("go");
    link.expect("posted");
    end.reset();
    end.enter_init();
    assert_eq!(ring.poll(), Ok(None));
    end.join(link);
    assert_eq!(ring.join().max_recv, 8128);
    assert_eq!(ring.poll(), Ok(None));
    link.say("attached");
    take(ring, 0..100);
    link.expect("end");
}

fn busy_sender(link: &mut Link) {
    let (mut end, ring) = connected(link);
    link.expect("grown");
    assert_eq!(send_slowly(ring), libc::ENOTCONN);
    link.say("posted");
    end.reset();
    end.enter_init();
    end.join(link);
    ring.join();
    link.expect("attached");
    for number in 0..100 {
        assert_eq!(ring.post([number, 0, 0], &[], 0), 0);
    }
    link.say("end");
}

/// Writes a header into the next slot through this process's own mapping, which is the memory that
/// a neighbour can write.
fn forge(ring: Ring, length: u32) {
    // SAFETY: live ring, whose next word is mapped for writing in this process.
    unsafe {
        let next = (*ring.0).next.cast_mut();
        next.add(1).write_volatile(length);
        next.write_volatile((*ring.0).expected);
    }
    assert!(ring.is_ready());
}

const MARKER: u32 = 0xffff_fffe;

/// A marker without a larger ring, one before the sender has moved, and one in the larger ring.
fn forged(link: &mut Link) {
    for grows in [false, true] {
        let (mut end, ring) = connected(link);
        if grows {
            assert_eq!(ring.grow(LARGER), 0);
            forge(ring, MARKER);
            assert_eq!(ring.poll(), Ok(None));
            assert!(!ring.is_ready());
        }
        link.say("send");
        link.expect("full");
        if grows {
            // the messages are lost
            assert_eq!(ring.poll(), Ok(None));
        } else {
            take(ring, 0..FULL);
        }
        forge(ring, MARKER);
        assert_eq!(ring.poll(), Err(-libc::EPROTO));
        assert!(!ring.is_ready());
        assert_eq!(end.async_event(), IBV_EVENT_QP_REQ_ERR);
        assert_eq!(end.state(), IBV_QPS_ERR);
        link.say("broken");
        link.expect("noticed");
        end.reset();
        assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
        // SAFETY: live, and not used again.
        assert_eq!(unsafe { (verbs().ibv_destroy_qp)(end.qp) }, 0);
    }
}

fn forged_sender(link: &mut Link) {
    for _ in 0..2 {
        let (_end, ring) = connected(link);
        link.expect("send");
        let sent = fill(ring, 0);
        link.say("full");
        link.expect("broken");
        assert_eq!(ring.post([sent, 0, 0], &[], 0), libc::ENOTCONN);
        link.say("noticed");
    }
}

fn refused(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let ring = Ring::create(&end, FIRST);
    assert_eq!(ring.grow(LARGER), libc::ENOTCONN);
    end.join(link);
    ring.join();
    for slots in [0, 1, 32, FIRST, 65, 100, 8192, u32::MAX] {
        assert_eq!(ring.grow(slots), libc::EINVAL);
    }
    // SAFETY: the child calls only functions of the device, which return an error, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(i32::from(ring.grow(LARGER) != libc::EIO));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0);
    }
    assert_eq!(ring.grow(LARGER), 0);
    assert_eq!(ring.grow(4096), libc::EALREADY);
    let other = End::create(link, 16, 16, 1);
    let unconnected = Ring::create(&other, FIRST);
    assert_eq!(unconnected.grow(LARGER), libc::ENOTCONN);
    // SAFETY: NULL is refused.
    let null = unsafe { (verbs().softdv_ring_grow.unwrap())(std::ptr::null_mut(), LARGER) };
    assert_eq!(null, libc::EINVAL);
    let largest = Ring::create(&End::create(link, 16, 16, 1), 4096);
    assert_eq!(largest.grow(4096), libc::EINVAL);
}

fn full_arena(link: &mut Link) {
    let (mut end, ring) = connected(link);
    let mut others = Vec::new();
    let error = loop {
        // SAFETY: live objects.
        let qp = unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = end.cq;
            init.recv_cq = end.cq;
            init.qp_type = IBV_QPT_RC;
            init.cap.max_send_wr = 1;
            init.cap.max_recv_wr = 1;
            (verbs().ibv_create_qp)(end.pd, &raw mut init)
        };
        assert!(!qp.is_null());
        let other = end.with_qp(qp);
        others.push(qp);
        if let Err(error) = Ring::try_create(&other, 4096, 1) {
            break error;
        }
    };
    assert_eq!(error, libc::ENOMEM);
    assert_eq!(ring.grow(4096), libc::ENOMEM);
    // SAFETY: live, and not used again.
    assert_eq!(unsafe { (verbs().ibv_destroy_qp)(others[0]) }, 0);
    assert_eq!(ring.grow(4096), 0);
    assert_eq!(ring.join().max_recv, 64 * 2047);
    // both rings' memory is free after the destruction
    fail(&mut end);
    // SAFETY: live, and not used again.
    assert_eq!(unsafe { (verbs().ibv_destroy_qp)(end.qp) }, 0);
    // SAFETY: live objects.
    let other = unsafe {
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = end.cq;
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        (verbs().ibv_create_qp)(end.pd, &raw mut init)
    };
    assert!(!other.is_null());
    assert!(Ring::try_create(&end.with_qp(other), 4096, 1).is_ok());
}
