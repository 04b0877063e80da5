//! Initiators that make no call of the device while their requests wait.

use std::time::{Duration, Instant};

use super::CREATE;
use super::actor::ROOM;
use super::fleet::{Actor, Place, connect, connect_with};
use rdma_core_sys::*;

/// Time within which a message of an initiator that makes no call must arrive.
pub(super) const SOON: Duration = Duration::from_secs(1);
/// Time that it makes no call, in milliseconds.
const AWAY: u32 = 5_000;

/// A process with a domain and an empty shared receive queue, whose number is returned.
pub(super) fn unready(place: &Place) -> (Actor, u32) {
    let mut actor = Actor::start();
    actor.does(&place.open(CREATE));
    let number = actor.number("srq 8");
    (actor, number)
}

/// Receives that are posted while the initiator makes no call take the messages that wait for them,
/// also those that wait behind a message for another queue, and a WRITE.
pub(super) fn initiator() {
    let place = Place::new();
    let (mut a, srq_a) = unready(&place);
    let (mut b, srq_b) = unready(&place);
    let mut sender = Actor::start();
    let target = a.number("target");
    let qp = connect(&mut sender, &mut a, target);
    let memory = a.ask("memory");
    // in the second round the rings exist, and the thread does
    for round in 0..2 {
        let number = 10 * round;
        sender.does(&format!("batch {qp} {srq_a} {number} 50"));
        sender.does(&format!("send_imm {qp} {srq_a} {} 3000 0 0 6", number + 1));
        sender.does(&format!("send {qp} {srq_b} {} 3000", number + 1));
        sender.does(&format!("write {qp} {srq_a} {} 3000 {memory}", number + 1));
        sender.say(&format!("away {AWAY}"));
        let begin = Instant::now();
        std::thread::sleep(Duration::from_millis(50));
        b.does(&format!("receive 0 {ROOM}"));
        // nothing passes what waits for a receive of the other process
        std::thread::sleep(Duration::from_millis(200));
        a.does(&format!("receive 1 {ROOM}"));
        let posted = Instant::now();
        a.got(1, number, 50, target);
        let took = posted.elapsed();
        assert!(took < SOON, "{took:?}");
        a.does("clear 0");
        a.does(&format!("receive 2 {ROOM}"));
        let posted = Instant::now();
        let wanted = format!("2 {IBV_WC_SUCCESS} 3000 6 {target}");
        assert_eq!(a.ask("received"), wanted);
        b.got(0, number + 1, 3000, target);
        let took = posted.elapsed();
        assert!(took < SOON, "{took:?}");
        while a.ask(&format!("holds 0 {} 3000", number + 1)) != "true" {
            assert!(posted.elapsed() < SOON, "the WRITE");
        }
        let away = Duration::from_millis(AWAY.into());
        assert!(begin.elapsed() < away, "the initiator was back");
        assert_eq!(sender.hear(), "ok");
        sender.sent(number, IBV_WC_SUCCESS);
        for _ in 0..3 {
            sender.sent(number + 1, IBV_WC_SUCCESS);
        }
    }
}

/// The owner of the queue posts a receive and makes no call. Meanwhile the initiator takes it, and
/// asks to be rung for the next one. The calls of the owner leave this request: a second receive
/// rings the initiator.
pub(super) fn both() {
    let place = Place::new();
    let (mut a, srq) = unready(&place);
    let mut sender = Actor::start();
    let target = a.number("target");
    let qp = connect(&mut sender, &mut a, target);
    for number in 0..8 {
        sender.does(&format!("send {qp} {srq} {number} 50"));
    }
    sender.say(&format!("away {}", 2 * AWAY));
    for number in 0..8 {
        let posted = Instant::now();
        a.does(&format!("receive_away {number} {ROOM} 100"));
        assert_eq!(
            a.ask("received"),
            format!("{number} {IBV_WC_SUCCESS} 50 0 {target}")
        );
        let took = posted.elapsed();
        assert!(took < SOON, "{number}: {took:?}");
    }
    assert_eq!(sender.hear(), "ok");
    for number in 0..8 {
        sender.sent(number, IBV_WC_SUCCESS);
    }
}

/// An initiator that is killed while a request waits, or when its receive has just been posted,
/// leaves the receive to others.
pub(super) fn killed() {
    for delay in [0, 100, 300, 1_000, 1_000_000].map(Duration::from_micros) {
        for posts_first in [false, true] {
            let place = Place::new();
            let (mut a, srq) = unready(&place);
            let mut sender = Actor::start();
            let target = a.number("target");
            let qp = connect(&mut sender, &mut a, target);
            sender.does(&format!("send {qp} {srq} 1 50"));
            sender.say("away 60000");
            std::thread::sleep(Duration::from_millis(100));
            if posts_first {
                a.does(&format!("receive 0 {ROOM}"));
                std::thread::sleep(delay);
            }
            sender.kill();
            a.event(IBV_EVENT_QP_FATAL, target);
            // one receive is there, unless the message has it
            let mut next = Actor::start();
            let other = a.number("target");
            let qp = connect(&mut next, &mut a, other);
            next.does(&format!("send {qp} {srq} 2 60"));
            a.does(&format!("receive 1 {ROOM}"));
            let arrived = posts_first && a.ask("holds 0 1 50") == "true";
            assert!(arrived || !posts_first || delay < SOON);
            if arrived {
                a.got(0, 1, 50, target);
                a.got(1, 2, 60, other);
            } else {
                a.got(if posts_first { 0 } else { 1 }, 2, 60, other);
            }
            next.sent(2, IBV_WC_SUCCESS);
        }
    }
}

/// The end of the process whose receive is awaited, and of the last holder of the target, reaches
/// an initiator that sleeps in poll(2).
pub(super) fn bereaved() {
    let place = Place::new();
    let (mut a, _) = unready(&place);
    let (b, srq_b) = unready(&place);
    let mut sender = Actor::start();
    let target = a.number("target");
    let qp = connect(&mut sender, &mut a, target);
    sender.does(&format!("send {qp} {srq_b} 1 50"));
    sender.say(&format!("away {AWAY}"));
    std::thread::sleep(Duration::from_millis(200));
    b.kill();
    // the request that names its queue fails the target, in the initiator's absence
    let killed = Instant::now();
    a.event(IBV_EVENT_QP_REQ_ERR, target);
    let took = killed.elapsed();
    assert!(took < SOON, "{took:?}");
    assert_eq!(sender.hear(), "ok");
    sender.sent(1, IBV_WC_REM_INV_REQ_ERR);

    let (mut a, srq_a) = unready(&place);
    let target = a.number("target");
    let qp = connect(&mut sender, &mut a, target);
    sender.does(&format!("send {qp} {srq_a} 1 50"));
    sender.say("sleep");
    std::thread::sleep(Duration::from_millis(200));
    a.kill();
    assert_eq!(sender.hear(), format!("{IBV_EVENT_QP_FATAL} {qp}"));
    sender.sent(1, IBV_WC_RETRY_EXC_ERR);
}

/// A limited number of RNR retries ends at its time.
pub(super) fn retries() {
    let place = Place::new();
    let (mut a, srq) = unready(&place);
    let mut sender = Actor::start();
    for retries in [0, 1, 6] {
        let target = a.number("target");
        let qp = connect_with(&mut sender, &mut a, target, retries);
        // the ring, which is awaited without a limit
        a.does(&format!("receive 0 {ROOM}"));
        sender.does(&format!("send {qp} {srq} 1 50"));
        a.got(0, 1, 50, target);
        sender.sent(1, IBV_WC_SUCCESS);
        sender.does(&format!("send {qp} {srq} 2 50"));
        // the retries of the target's timer take 0.64 ms each
        sender.does("away 3000");
        a.does(&format!("receive 1 {ROOM}"));
        sender.sent(2, IBV_WC_RNR_RETRY_EXC_ERR);
        // the receive is still there
        let other = a.number("target");
        let qp = connect(&mut sender, &mut a, other);
        sender.does(&format!("send {qp} {srq} 3 60"));
        a.got(1, 3, 60, other);
        sender.sent(3, IBV_WC_SUCCESS);
    }
}
