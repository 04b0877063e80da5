//! Receive rings of queue pairs, between two processes (`docs/softverbs-ring.md`).
//!
//! One file, because the cases share the parts that the two processes play.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);

pub(crate) fn main() {
    run(&[
        ("messages_of_all_lengths", all_lengths, echo),
        ("a_peer_without_a_ring", ringless_parent, ringless_child),
        ("rings_that_cannot_be_made", refused, idle),
        ("a_full_ring", full_parent, full_child),
        ("delivery_is_visible", delivery_parent, delivery_child),
        ("a_sleeping_receiver", sleeper, waker),
        (
            "solicited_messages_alone",
            solicited_sleeper,
            solicited_waker,
        ),
        ("cold_rings_are_noted", arrivals_parent, arrivals_child),
        ("a_dead_sender", survivor, victim),
        ("a_failed_receiver", failed_parent, failed_child),
        ("another_connection", reconnect, reconnect),
        ("a_stopped_sender_does_not_block", stopper, stopped),
        ("rubbish_in_a_ring", rubbish_parent, rubbish_child),
        ("a_forked_child", forked_parent, idle),
        ("rings_and_sends_together", mixed_parent, mixed_child),
        (
            "a_waiting_sender_arms_another_queue",
            other_queue_parent,
            other_queue_child,
        ),
        (
            "a_waiting_sender_beside_other_threads",
            beside_parent,
            full_child,
        ),
        (
            "a_waiting_sender_learns_of_the_end",
            forsaken_parent,
            forsaken_child,
        ),
        (
            "an_ending_ring_wakes_its_receiver",
            ending_parent,
            slow_child,
        ),
        ("a_message_behind_the_end", late_parent, slow_child),
        (
            "a_reset_is_finished_before_the_next_connection",
            busy_parent,
            busy_child,
        ),
        ("a_state_word_that_a_neighbour_restores", restored, idle_end),
        ("room_that_is_given_back_later", room_later, fills),
        ("rings_that_are_created_at_once", create_at_once, idle),
    ]);
}

/// A connected end with a ring.
fn connected(link: &mut Link, slots: u32) -> (End, Ring, softdv_ring_info) {
    let mut end = End::create(link, 64, 64, 1);
    let ring = Ring::create(&end, slots);
    end.join(link);
    let info = ring.join();
    (end, ring, info)
}

fn idle(link: &mut Link) {
    link.wait_end();
}

fn post(ring: Ring, words: [u64; 3], payload: &[u8]) {
    let begin = Instant::now();
    loop {
        match ring.post(words, payload, 0) {
            0 => return,
            libc::EAGAIN => assert!(begin.elapsed() < LONG, "no room"),
            error => panic!("{}", std::io::Error::from_raw_os_error(error)),
        }
    }
}

fn pattern(number: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (number as usize * 31 + i) as u8).collect()
}

fn all_lengths(link: &mut Link) {
    let (mut end, ring, info) = connected(link, 128);
    assert_eq!((info.max_send, info.max_recv), (4032, 4032));
    assert_eq!(ring.post([0; 3], &[0; 4033], 0), libc::EMSGSIZE);
    let mut sent = 0;
    let mut received = 0u64;
    let lengths: Vec<usize> = (0..=200)
        .chain([1000, 2047, 2048, 2049, 4000, 4032])
        .cycle()
        .take(20_000)
        .collect();
    while received < lengths.len() as u64 {
        if let Some(&len) = lengths.get(sent as usize) {
            let payload = pattern(sent, len);
            let words = [sent, !sent, 7];
            let ret = if sent % 3 == 0 {
                let (a, b) = payload.split_at(len / 3);
                ring.post_pieces(words, &[a, &[], b])
            } else {
                ring.post(words, &payload, 0)
            };
            assert!(ret == 0 || ret == libc::EAGAIN, "{ret}");
            sent += u64::from(ret == 0);
        }
        // in place, and by calls, also behind each other
        let mut messages = match sent % 4 {
            0 => Vec::new(),
            max => ring.take_in_place(max as usize, sent % 3 != 0),
        };
        if messages.is_empty()
            && let Some(message) = ring.peek().unwrap()
        {
            assert!(ring.is_ready(), "the words show another place");
            assert_eq!(ring.consume(), 0);
            messages.push(message);
        }
        for message in messages {
            assert_eq!(message.words, [received, !received, 7]);
            assert_eq!(
                message.payload,
                pattern(received, lengths[received as usize])
            );
            received += 1;
        }
    }
    assert_eq!(ring.consume(), libc::EINVAL);
    assert_eq!(ring.poll(), Ok(None), "gives back what was taken");
    assert_eq!(ring.advance(0), libc::EINVAL);
    assert_eq!(ring.advance(ring.left() + 1), libc::EINVAL);
    assert!(end.poll().is_none());
    link.say("end");
}

/// Sends each message back.
fn echo(link: &mut Link) {
    let (_end, ring, _) = connected(link, 128);
    for _ in 0..20_000 {
        let message = ring.wait(LONG);
        post(ring, message.words, &message.payload);
    }
    link.expect("end");
}

/// The receiver reads in place, and gives the room back later.
fn room_later(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    for calls in 0..3 {
        link.expect("full");
        let taken = ring.take_in_place(8, true);
        let words: Vec<u64> = taken.iter().map(|message| message.words[0]).collect();
        assert_eq!(words, (0..8).collect::<Vec<u64>>());
        link.say("taken");
        link.expect("still full");
        match calls {
            0 => assert_eq!(ring.advance(0), 0),
            1 => assert_eq!(ring.advance(1), 0, "with the next message"),
            _ => assert_eq!(ring.peek().unwrap().unwrap().words[0], 8),
        }
        link.say("given back");
        link.expect("posted");
        while ring.poll().unwrap().is_some() {}
        link.say("empty");
    }
}

fn fills(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    for _ in 0..3 {
        let mut count = 0;
        while ring.post([count, 0, 0], &[], 0) == 0 {
            count += 1;
        }
        assert_eq!(count, 63);
        link.say("full");
        link.expect("taken");
        assert_eq!(ring.post([count, 0, 0], &[], 0), libc::EAGAIN);
        link.say("still full");
        link.expect("given back");
        assert_eq!(ring.post([count, 0, 0], &[], 0), 0);
        link.say("posted");
        link.expect("empty");
    }
}

fn ringless_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let ring = Ring::create(&end, 64);
    assert_eq!(ring.attach().0, libc::EAGAIN);
    end.join(link);
    assert_eq!(ring.attach().0, libc::EOPNOTSUPP);
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    assert_eq!(ring.poll(), Ok(None));
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    link.say("receive");
    assert_eq!(end.wait(LONG).wr_id, 1);
}

fn ringless_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("receive");
    let mut message = end.buffer(&[3; 8]);
    end.send(&mut message, 8, None, IBV_SEND_SIGNALED, 2);
    assert_eq!(end.wait(LONG).wr_id, 2);
}

fn refused(link: &mut Link) {
    let end = End::create(link, 16, 16, 1);
    for slots in [0, 1, 32, 63, 65, 8192, u32::MAX] {
        assert_eq!(Ring::try_create(&end, slots, 0).err(), Some(libc::EINVAL));
    }
    Ring::create(&end, 64);
    assert_eq!(Ring::try_create(&end, 64, 0).err(), Some(libc::EEXIST));
    let datagrams = End::of_type(IBV_QPT_UD, 4, 4, 1);
    assert_eq!(
        Ring::try_create(&datagrams, 64, 0).err(),
        Some(libc::EOPNOTSUPP)
    );
    let mut failed = End::create(link, 16, 16, 1);
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    failed.modify(&mut attr, IBV_QP_STATE);
    assert_eq!(Ring::try_create(&failed, 64, 0).err(), Some(libc::EINVAL));
    // rings whose memory is used again
    for slots in [64, 4096, 256, 64] {
        let other = End::create(link, 16, 16, 1);
        Ring::create(&other, slots);
        // SAFETY: live, and not used again.
        assert_eq!(unsafe { (verbs().ibv_destroy_qp)(other.qp) }, 0);
    }
}

fn full_parent(link: &mut Link) {
    let (end, ring, _) = connected(link, 64);
    let mut sent = 0;
    while ring.post([sent, 0, 0], &[], 0) == 0 {
        sent += 1;
    }
    assert_eq!(sent, 63);
    link.say("full");
    // a sleeping sender is rung when there is room
    let begin = Instant::now();
    while sent < 500 {
        if ring.post([sent, 0, 0], &[], 0) == 0 {
            sent += 1;
            continue;
        }
        end.arm(false);
        assert_eq!(ring.await_consume(), 0);
        if ring.post([sent, 0, 0], &[], 0) == 0 {
            sent += 1;
            continue;
        }
        assert!(end.sleep_on_channel(LONG), "nobody rang");
        assert!(begin.elapsed() < LONG);
    }
    link.say("sent");
    link.expect("end");
}

fn full_child(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    link.expect("full");
    for number in 0..500 {
        if number % 50 == 0 {
            // the sender sleeps
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(ring.wait(LONG).words[0], number);
    }
    link.expect("sent");
    link.say("end");
}

fn delivery_parent(link: &mut Link) {
    let (end, ring, _) = connected(link, 64);
    assert_eq!((ring.sent(), ring.delivered()), (0, 0));
    post(ring, [1, 0, 0], &[0; 100]);
    assert_eq!(ring.sent(), 3);
    link.say("sent");
    link.expect("seen");
    assert_eq!(ring.delivered(), 0);
    end.arm(false);
    assert_eq!(ring.await_consume(), 0);
    assert_eq!(ring.delivered(), 0);
    link.say("consume");
    // an earlier ring of the doorbell may wake it too
    while ring.delivered() != ring.sent() {
        assert!(end.sleep_on_channel(LONG), "nobody rang");
    }
    link.say("end");
}

fn delivery_child(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    link.expect("sent");
    assert!(ring.is_ready());
    // the same message until it is consumed
    for _ in 0..3 {
        assert_eq!(ring.peek().unwrap().unwrap().words[0], 1);
    }
    link.say("seen");
    link.expect("consume");
    assert_eq!(ring.consume(), 0);
    assert!(!ring.is_ready());
    link.expect("end");
}

fn sleeper(link: &mut Link) {
    let (end, ring, _) = connected(link, 64);
    ring.set_hot(true);
    for number in 0..200 {
        link.say("go");
        let begin = Instant::now();
        let message = loop {
            end.arm(false);
            if let Some(message) = ring.poll().unwrap() {
                break message;
            }
            assert!(end.sleep_on_channel(LONG), "nobody rang");
            assert!(begin.elapsed() < LONG);
        };
        assert_eq!(message.words[0], number);
    }
    // without a message the channel stays quiet
    end.arm(false);
    assert_eq!(ring.poll(), Ok(None));
    let _ = end.sleep_on_channel(Duration::ZERO);
    assert!(!end.sleep_on_channel(SHORT));
    link.say("end");
}

fn waker(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    for number in 0..200 {
        link.expect("go");
        if number % 4 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        post(ring, [number, 0, 0], &[]);
    }
    link.expect("end");
}

fn solicited_sleeper(link: &mut Link) {
    let (end, ring, _) = connected(link, 64);
    end.arm(true);
    let _ = end.sleep_on_channel(Duration::ZERO);
    link.say("plain");
    link.expect("sent");
    assert!(!end.sleep_on_channel(SHORT), "woken by a plain message");
    link.say("solicited");
    assert!(end.sleep_on_channel(LONG), "nobody rang");
    assert_eq!(ring.wait(LONG).words[0], 1);
    assert_eq!(ring.wait(LONG).words[0], 2);
    link.say("end");
}

fn solicited_waker(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    link.expect("plain");
    post(ring, [1, 0, 0], &[]);
    link.say("sent");
    link.expect("solicited");
    assert_eq!(ring.post([2, 0, 0], &[], SOFTDV_RING_SOLICITED), 0);
    link.expect("end");
}

const MANY: u64 = 150;

/// The ends of [`MANY`] connections over one completion queue.
fn many(link: &mut Link) -> (Vec<End>, Vec<Ring>) {
    let first = End::with(16, 16, 1);
    let mut ends = vec![first];
    for _ in 1..MANY {
        // SAFETY: live objects.
        let qp = unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = ends[0].cq;
            init.recv_cq = ends[0].cq;
            init.qp_type = IBV_QPT_RC;
            init.cap.max_send_wr = 1;
            init.cap.max_recv_wr = 1;
            (verbs().ibv_create_qp)(ends[0].pd, &raw mut init)
        };
        assert!(!qp.is_null());
        let end = ends[0].with_qp(qp);
        ends.push(end);
    }
    let mut rings = Vec::new();
    for (i, end) in ends.iter_mut().enumerate() {
        let ring = Ring::try_create(end, 64, 1000 + i as u64).unwrap();
        end.join(link);
        ring.join();
        rings.push(ring);
    }
    (ends, rings)
}

fn arrivals_parent(link: &mut Link) {
    let (ends, rings) = many(link);
    assert!(ends[0].arrivals(8).is_empty());
    link.say("all");
    link.expect("sent");
    let mut found = Vec::new();
    loop {
        let some = ends[0].arrivals(7);
        if some.is_empty() {
            break;
        }
        found.extend(some);
    }
    found.sort_unstable();
    assert_eq!(found, (1000..1000 + MANY).collect::<Vec<_>>());
    for ring in &rings {
        assert!(ring.poll().unwrap().is_some());
    }
    // a hot ring notes nothing
    assert!(!rings[5].set_hot(true));
    link.say("some");
    link.expect("sent");
    assert_eq!(ends[0].arrivals(8), [1006]);
    assert!(rings[5].poll().unwrap().is_some());
    assert!(!rings[5].set_hot(false));
    link.say("some");
    link.expect("sent");
    let mut found = ends[0].arrivals(8);
    found.sort_unstable();
    assert_eq!(found, [1005, 1006]);
    // a ring that is made cold with a message in it
    assert!(rings[5].set_hot(false));
    link.say("end");
}

fn arrivals_child(link: &mut Link) {
    let (_ends, rings) = many(link);
    link.expect("all");
    for ring in &rings {
        post(*ring, [0; 3], &[]);
    }
    link.say("sent");
    for _ in 0..2 {
        link.expect("some");
        post(rings[5], [0; 3], &[]);
        post(rings[6], [0; 3], &[]);
        link.say("sent");
    }
    link.expect("end");
}

fn survivor(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    assert_eq!(link.hear(), "sent");
    link.kill();
    let (rest, error) = ring.wait_end(&mut end, LONG);
    let words: Vec<_> = rest.iter().map(|message| message.words[0]).collect();
    assert_eq!(words, (0..40).collect::<Vec<_>>());
    assert_eq!(error, -libc::ENOTCONN);
    assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    assert_eq!(ring.await_consume(), libc::ENOTCONN);
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
    assert_eq!(end.state(), IBV_QPS_ERR);
    // the ring is there again for the next connection
    end.reset();
    end.enter_init();
    assert_eq!(ring.poll(), Ok(None));
}

fn victim(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    for number in 0..40 {
        post(ring, [number, 0, 0], &[]);
    }
    link.say("sent");
    link.wait_end();
}

fn fail(end: &mut End) {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    end.modify(&mut attr, IBV_QP_STATE);
}

fn failed_parent(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    link.expect("sent");
    fail(&mut end);
    link.say("failed");
    let (rest, error) = ring.wait_end(&mut end, LONG);
    assert_eq!((rest.len(), error), (20, -libc::ENOTCONN));
    link.expect("noticed");
    // unread messages are lost with a reset
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    end.reset();
    assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
    link.say("end");
}

fn failed_child(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    for number in 0..20 {
        post(ring, [number, 0, 0], &[1; 40]);
    }
    link.say("sent");
    link.expect("failed");
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    assert_eq!(ring.await_consume(), libc::ENOTCONN);
    fail(&mut end);
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    assert_eq!(ring.wait_end(&mut end, LONG).1, -libc::ENOTCONN);
    link.say("noticed");
    link.expect("end");
}

fn reconnect(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let ring = Ring::create(&end, 64);
    for round in 0..20 {
        end.join(link);
        ring.join();
        // attached twice
        ring.join();
        for number in 0..30 + round {
            post(ring, [round, number, 0], &[2; 60]);
            if number >= 20 {
                assert_eq!(ring.wait(LONG).words[..2], [round, number - 20]);
            }
        }
        link.say("sent");
        link.expect("sent");
        // the rest is lost
        end.reset();
        link.say("reset");
        link.expect("reset");
        end.enter_init();
        assert_eq!(ring.attach().0, libc::EAGAIN);
    }
    // SAFETY: live, and not used again.
    assert_eq!(unsafe { (verbs().ibv_destroy_qp)(end.qp) }, 0);
}

/// A sender that is stopped between two messages delays neither ERR nor RESET.
fn stopper(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    link.expect("flood");
    for _ in 0..20 {
        ring.wait(LONG);
    }
    link.stop();
    let begin = Instant::now();
    fail(&mut end);
    let (_, error) = ring.wait_end(&mut end, LONG);
    assert_eq!(error, -libc::ENOTCONN);
    // unless it was stopped in the middle of a message
    let within = begin.elapsed();
    // SAFETY: all zeros is a value of it, and RESET.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    let mask = IBV_QP_STATE.cast_signed();
    // SAFETY: live queue pair, valid attributes.
    let ret = unsafe { (verbs().ibv_modify_qp)(end.qp, &raw mut attr, mask) };
    if within < Duration::from_secs(4) {
        assert_eq!(ret, 0);
    } else {
        assert_eq!(ret, libc::EBUSY);
    }
    link.go_on();
    link.expect("end");
    end.reset();
}

fn stopped(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    link.say("flood");
    let begin = Instant::now();
    while ring.post([0; 3], &[1; 200], 0) != libc::ENOTCONN {
        assert!(begin.elapsed() < 2 * LONG);
    }
    link.say("end");
}

/// Writes into the ring through this process's own mapping, which is the memory that a neighbour
/// can write.
fn rubbish_parent(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    link.expect("attached");
    // SAFETY: live ring, whose next word is mapped for writing in this process.
    unsafe {
        let next = (*ring.0).next.cast_mut();
        next.add(1).write_volatile(5000);
        next.write_volatile((*ring.0).expected);
    }
    assert!(ring.is_ready());
    assert_eq!(ring.poll(), Err(-libc::EPROTO));
    assert_eq!(ring.poll(), Err(-libc::EPROTO));
    // its content is no message
    assert!(!ring.is_ready());
    assert!(!ring.set_hot(false));
    assert_eq!(end.async_event(), IBV_EVENT_QP_REQ_ERR);
    assert_eq!(end.state(), IBV_QPS_ERR);
    link.say("broken");
    link.expect("noticed");
}

fn rubbish_child(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    link.say("attached");
    link.expect("broken");
    assert_eq!(ring.post([0; 3], &[], 0), libc::ENOTCONN);
    link.say("noticed");
}

fn forked_parent(link: &mut Link) {
    let end = End::create(link, 16, 16, 1);
    let ring = Ring::create(&end, 64);
    // SAFETY: the child calls only functions of the device, which return an error, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let good = ring.attach().0 == libc::EIO
                && ring.post([0; 3], &[], 0) == libc::EIO
                && ring.poll() == Err(-libc::EIO)
                && ring.consume() == libc::EIO
                && ring.await_consume() == libc::EIO
                && Ring::try_create(&end, 64, 0).err() == Some(libc::EIO);
            libc::_exit(i32::from(!good));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0);
    }
}

fn mixed_parent(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    let receive = end.buffer(&[0; 64]);
    for _ in 0..200 {
        end.recv(&receive, 1);
        link.say("go");
        assert_eq!(end.wait(LONG).wr_id, 1);
        assert_eq!(ring.wait(LONG).payload, [4; 16]);
    }
}

fn mixed_child(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    let mut message = end.buffer(&[3; 64]);
    for _ in 0..200 {
        link.expect("go");
        post(ring, [0; 3], &[4; 16]);
        end.send(&mut message, 8, None, IBV_SEND_SIGNALED, 2);
        assert_eq!(end.wait(LONG).wr_id, 2);
    }
}

/// Sends until the ring is full.
fn fill(ring: Ring) -> u64 {
    let mut sent = 0;
    while ring.post([sent, 0, 0], &[], 0) == 0 {
        sent += 1;
    }
    sent
}

/// Whether the sender of a full ring finds no room after it has asked for a wake-up.
fn waits(end: &End, ring: Ring, number: u64) -> bool {
    end.arm(false);
    assert_eq!(ring.await_consume(), 0);
    ring.post([number, 0, 0], &[], 0) == libc::EAGAIN
}

fn other_queue_parent(link: &mut Link) {
    let (end, ring, _) = connected(link, 64);
    let other = End::with(4, 4, 1);
    let sent = fill(ring);
    for number in sent..sent + 20 {
        assert!(waits(&end, ring, number));
        link.say("consume");
        link.expect("consumed");
        other.arm(false);
        assert!(end.sleep_on_channel(LONG), "nobody rang");
        assert_eq!(ring.post([number, 0, 0], &[], 0), 0);
    }
    link.say("end");
}

fn other_queue_child(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    let mut number = 0;
    while link.hear() == "consume" {
        assert_eq!(ring.wait(LONG).words[0], number);
        number += 1;
        link.say("consumed");
    }
}

/// Other threads take the rings of the process's doorbell while the sender sleeps.
fn beside_parent(link: &mut Link) {
    static DONE: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    let thread = std::thread::spawn(|| {
        let other = End::with(4, 4, 1);
        while !DONE.load(std::sync::atomic::Ordering::Relaxed) {
            other.arm(false);
            let _ = other.sleep_on_channel(Duration::from_millis(1));
        }
    });
    full_parent(link);
    DONE.store(true, std::sync::atomic::Ordering::Relaxed);
    thread.join().unwrap();
}

const ENDS: [&str; 3] = ["ERR", "RESET", "destroyed"];

fn forsaken_parent(link: &mut Link) {
    for end_by in ENDS {
        for delivery in [false, true] {
            let (end, ring, _) = connected(link, 64);
            let number = if delivery { 1 } else { fill(ring) };
            if delivery {
                post(ring, [0; 3], &[]);
            }
            link.say(end_by);
            link.expect("ready");
            end.arm(false);
            assert_eq!(ring.await_consume(), 0);
            if delivery {
                assert_ne!(ring.delivered(), ring.sent());
            } else {
                assert_eq!(ring.post([number, 0, 0], &[], 0), libc::EAGAIN);
            }
            link.say("end");
            assert!(end.sleep_on_channel(LONG), "nobody rang: {end_by}");
            assert_eq!(ring.await_consume(), libc::ENOTCONN);
            assert_eq!(ring.post([number, 0, 0], &[], 0), libc::ENOTCONN);
            link.say("next");
            link.expect("next");
        }
    }
}

fn forsaken_child(link: &mut Link) {
    for _ in 0..2 * ENDS.len() {
        let (mut end, _ring, _) = connected(link, 64);
        let end_by = link.hear();
        link.say("ready");
        link.expect("end");
        match end_by.as_str() {
            "ERR" => fail(&mut end),
            "RESET" => end.reset(),
            // SAFETY: live, and not used again.
            _ => assert_eq!(unsafe { (verbs().ibv_destroy_qp)(end.qp) }, 0),
        }
        link.expect("next");
        link.say("next");
    }
}

fn slow_child(link: &mut Link) {
    let (_end, ring, _) = connected(link, 64);
    assert_eq!(ring.post([1, 0, 0], &[], 0), 0);
    let ret = ring.post_slowly([2, 0, 0]);
    assert_eq!(ret, libc::ENOTCONN);
    link.say("posted");
    link.expect("end");
}

/// A receiver that sleeps although its sender is in the middle of a message.
fn ending_parent(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    link.expect("writing");
    fail(&mut end);
    assert_eq!(ring.wait(LONG).words[0], 1);
    assert_eq!(ring.poll(), Err(-libc::EAGAIN));
    end.arm(true);
    let _ = end.sleep_on_channel(Duration::ZERO);
    assert_eq!(ring.poll(), Err(-libc::EAGAIN));
    assert!(!end.sleep_on_channel(SHORT));
    link.say("go");
    assert!(end.sleep_on_channel(LONG), "nobody rang");
    assert_eq!(ring.poll().unwrap().unwrap().words[0], 2);
    assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
    link.expect("posted");
    link.say("end");
}

/// A sender that is stopped in the middle of a message for longer than the receiver waits.
fn late_parent(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    link.expect("writing");
    fail(&mut end);
    let (rest, error) = ring.wait_end(&mut end, LONG);
    assert_eq!((rest.len(), error), (1, -libc::ENOTCONN));
    link.say("go");
    link.expect("posted");
    assert!(!ring.is_ready());
    assert_eq!(ring.poll(), Err(-libc::ENOTCONN));
    link.say("end");
}

fn try_init(end: &End) -> libc::c_int {
    // SAFETY: all zeros is a value of it; live queue pair.
    unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        (verbs().ibv_modify_qp)(end.qp, &raw mut attr, mask.cast_signed())
    }
}

/// A queue pair that enters INIT although its RESET has returned `EBUSY`.
fn busy_parent(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    link.expect("writing");
    // SAFETY: all zeros is a value of it, and RESET; live queue pair.
    let ret = unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        (verbs().ibv_modify_qp)(end.qp, &raw mut attr, IBV_QP_STATE.cast_signed())
    };
    assert_eq!(ret, libc::EBUSY);
    assert_eq!(try_init(&end), libc::EBUSY);
    assert_eq!(end.state(), IBV_QPS_RESET);
    link.say("go");
    link.expect("posted");
    assert_eq!(try_init(&end), 0);
    end.join(link);
    ring.join();
    assert_eq!(ring.wait(LONG).words[0], 3);
    post(ring, [4, 0, 0], &[]);
    link.expect("end");
}

fn busy_child(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    assert_eq!(ring.post_slowly([2, 0, 0]), libc::ENOTCONN);
    link.say("posted");
    end.reset();
    end.enter_init();
    end.join(link);
    ring.join();
    post(ring, [3, 0, 0], &[]);
    assert_eq!(ring.wait(LONG).words[0], 4);
    link.say("end");
}

fn idle_end(link: &mut Link) {
    let (_end, _ring, _) = connected(link, 64);
    link.wait_end();
}

/// The first bytes of the file that the ring is in, which neighbours can write too.
fn shared_words(ring: Ring) -> &'static [std::sync::atomic::AtomicU64] {
    // SAFETY: live ring.
    let next = unsafe { (*ring.0).next } as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().map(|line| {
        let (from, rest) = line.split_once('-').unwrap();
        let to = rest.split_once(' ').unwrap().0;
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        number(from)..number(to)
    });
    let range = ranges
        .into_iter()
        .find(|range| range.contains(&next))
        .unwrap();
    // the queue pairs come before the 8th MB
    let len = range.len().min(8 << 20);
    // SAFETY: mapped for reading and writing, and accessed by atomics only.
    unsafe { std::slice::from_raw_parts(range.start as *const _, len / 8) }
}

/// A neighbour stores the state word that a failed queue pair had before.
fn restored(link: &mut Link) {
    let (mut end, ring, _) = connected(link, 64);
    let words = shared_words(ring);
    let read = || -> Vec<u64> {
        let words = words.iter();
        words
            .map(|word| word.load(std::sync::atomic::Ordering::Relaxed))
            .collect()
    };
    let before = read();
    fail(&mut end);
    let change = u64::from(IBV_QPS_RTS ^ IBV_QPS_ERR);
    let after = read();
    let moved: Vec<usize> = (0..before.len())
        .filter(|&at| {
            let changed = before[at] ^ after[at];
            changed != 0 && changed >> changed.trailing_zeros() == change
        })
        .collect();
    assert_eq!(moved.len(), 1, "{moved:?}");
    words[moved[0]].store(before[moved[0]], std::sync::atomic::Ordering::Relaxed);
    assert_eq!(ring.wait_end(&mut end, LONG).1, -libc::ENOTCONN);
}

fn create_at_once(link: &mut Link) {
    for _ in 0..100 {
        let end = End::create(link, 1, 1, 1);
        // the address of a live queue pair, which any thread may use
        let qp = end.qp as usize;
        let create = verbs().softdv_ring_create.unwrap();
        let barrier = std::sync::Barrier::new(2);
        let create_one = || {
            let attr = softdv_ring_attr {
                slots: 64,
                ..softdv_ring_attr::default()
            };
            barrier.wait();
            // SAFETY: live queue pair.
            !unsafe { create(qp as *mut ibv_qp, &raw const attr) }.is_null()
        };
        let created = std::thread::scope(|scope| {
            let other = scope.spawn(create_one);
            [create_one(), other.join().unwrap()]
        });
        assert_ne!(created[0], created[1]);
        // SAFETY: live, and not used again.
        assert_eq!(unsafe { (verbs().ibv_destroy_qp)(end.qp) }, 0);
    }
}
