//! The receive ring of a queue pair.

use loom::thread;
use rdma_core_sys::{IBV_QPS_ERR, IBV_QPS_RTS};

use super::{Memory, check};
use crate::receive_ring::{
    ARRIVALS_LEN, Arrivals, CONSUMED_AT, Destination, HOT_AT, MIN_SLOTS, Message, Receiver,
    RingArea, SLOTS_AT, Sender, Stop, UseWord, WAITING_AT, is_awaited, is_writing, note_arrival,
    ring_len,
};
use crate::segment::layout::{ARMED_ANY, ARMED_SOLICITED, SEGMENT_SIZE, StateWord, cq, qp};
use crate::segment::{Mapping, Word};
use crate::signal;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Arc, heavy_fence, light_fence, pause};

/// A ring, and arrivals behind it.
const ARRIVALS: usize = 4096;
const QP: usize = 70;
/// Queue pairs with arrivals in one word, and before them one in another word of the same summary
/// word.
const INDICES: [u32; 3] = [2 * QP as u32, QP as u32, QP as u32 + 1];

fn ring() -> (Arc<Mapping>, Sender, Receiver) {
    let map = Mapping::model(ARRIVALS + ARRIVALS_LEN);
    let slots = SLOTS_AT..ring_len(MIN_SLOTS);
    let words = [
        ARRIVALS,
        ARRIVALS + 8,
        ARRIVALS + 16,
        ARRIVALS + 24,
        ARRIVALS + 128 + 8 * (QP / 64),
        ARRIVALS + 128 + 8 * (2 * QP / 64),
    ];
    map.prepare(
        [CONSUMED_AT, HOT_AT, WAITING_AT],
        slots.step_by(8).chain(words),
    );
    let map = Arc::try_new(map).unwrap();
    let receiver = Receiver::new(Arc::clone(&map), 0, MIN_SLOTS);
    let sender = Sender::new(Arc::clone(&map), 0, MIN_SLOTS).unwrap();
    (map, sender, receiver)
}

#[test]
fn messages_arrive_whole_in_order_and_their_slots_are_used_again() {
    check(|| {
        let (_, mut sender, mut receiver) = ring();
        let payload: Vec<_> = (0..MIN_SLOTS).map(|_| Memory::new(0)).collect();
        let theirs = payload.clone();
        let count = u64::from(MIN_SLOTS) + 1;
        let thread = thread::spawn(move || {
            for number in 0..count {
                let cell = &theirs[number as usize % MIN_SLOTS as usize];
                while !sender.push([number, !number, 0], 8, |_: *mut u8| cell.write(number)) {
                    pause(0);
                }
            }
        });
        let mut number = 0;
        while number < count {
            let Some(message) = receiver.peek().unwrap() else {
                pause(0);
                continue;
            };
            assert_eq!(message.words, [number, !number, 0]);
            assert_eq!(message.len, 8);
            let cell = &payload[number as usize % MIN_SLOTS as usize];
            assert_eq!(cell.read(), number);
            receiver.advance(&message);
            number += 1;
        }
        thread.join().unwrap();
    });
}

/// Padding is published behind the message that follows it.
#[test]
fn padding_is_never_found_alone() {
    check(|| {
        let (_, mut sender, mut receiver) = ring();
        for _ in 1..MIN_SLOTS {
            assert!(sender.push([0; 3], 0, |_: *mut u8| {}));
            let message = receiver.peek().unwrap().unwrap();
            receiver.advance(&message);
        }
        let payload = Memory::new(0);
        let theirs = payload.clone();
        let thread = thread::spawn(move || {
            assert!(sender.push([7; 3], 40, |_: *mut u8| theirs.write(1)));
        });
        let message = loop {
            match receiver.peek().unwrap() {
                Some(message) => break message,
                None => pause(0),
            }
        };
        assert_eq!((message.words, message.len), ([7; 3], 40));
        assert_eq!(payload.read(), 1);
        thread.join().unwrap();
    });
}

/// A larger ring behind that of [`ring`].
const LARGER: RingArea = RingArea {
    at: 2048,
    slots: 2 * MIN_SLOTS,
};

fn larger_ring() -> (Arc<Mapping>, Sender, Receiver) {
    let (at, slots) = (LARGER.at, LARGER.slots);
    let map = Mapping::model(at + ring_len(slots));
    let words = [0, at].map(|at| [CONSUMED_AT, HOT_AT, WAITING_AT].map(|word| at + word));
    let slots = (SLOTS_AT..ring_len(MIN_SLOTS)).step_by(8);
    let larger = (at + SLOTS_AT..at + ring_len(LARGER.slots)).step_by(8);
    map.prepare(words.concat(), slots.chain(larger));
    let map = Arc::try_new(map).unwrap();
    let receiver = Receiver::new(Arc::clone(&map), 0, MIN_SLOTS);
    let sender = Sender::new(Arc::clone(&map), 0, MIN_SLOTS).unwrap();
    (map, sender, receiver)
}

fn next(receiver: &mut Receiver) -> Option<Message> {
    loop {
        match receiver.peek() {
            Ok(found) => return found,
            Err(stop) => assert_eq!(stop, Stop::Moved),
        }
    }
}

/// The receiver offers a larger ring between the messages of the sender, which moves at its first
/// look.
#[test]
fn messages_arrive_in_order_when_the_ring_grows() {
    check(|| {
        let (map, mut sender, mut receiver) = larger_ring();
        let payload = [0, 1, 2].map(|_| Memory::new(0));
        let theirs = payload.clone();
        // as `LARGER_AT` in the tables
        let offer = Arc::try_new(AtomicU32::new(0)).unwrap();
        let offered = Arc::clone(&offer);
        let thread = thread::spawn(move || {
            for (number, cell) in (0..).zip(theirs) {
                if offered.load(Ordering::Acquire) == 1 {
                    sender.move_to(LARGER);
                }
                while !sender.push([number; 3], 8, |_: *mut u8| cell.write(number)) {
                    pause(0);
                }
            }
        });
        let mut number = 0;
        while number < 3 {
            let Some(message) = next(&mut receiver) else {
                pause(0);
                continue;
            };
            assert_eq!(message.words, [number; 3]);
            assert_eq!(payload[number as usize].read(), number);
            receiver.advance(&message);
            if number == 0 {
                receiver.offer(LARGER, || offer.store(1, Ordering::Release));
            }
            number += 1;
        }
        thread.join().unwrap();
        drop(map);
    });
}

/// What the receiver does at the marker; whether it rings.
fn follow(receiver: &mut Receiver, map: &Mapping) -> bool {
    while !matches!(receiver.peek(), Err(Stop::Moved)) {
        pause(0);
    }
    light_fence(true);
    receiver.moved_sender_waits() && signal::must_notify(map, SENDER_CQ, true, true)
}

/// A sender that waits for room in a larger ring, at which the receiver has not arrived.
#[test]
fn a_sender_that_has_moved_is_rung() {
    check(|| {
        let (own, ..) = ends();
        let (_, mut sender, mut receiver) = larger_ring();
        receiver.offer(LARGER, || {});
        assert!(sender.move_to(LARGER));
        while sender.push([0; 3], 0, |_: *mut u8| {}) {}
        let map = own.again();
        let thread = thread::spawn(move || follow(&mut receiver, &map));
        signal::arm(&own, SENDER_CQ, ARMED_ANY);
        heavy_fence();
        sender.ask();
        heavy_fence();
        let found = sender.push([0; 3], 0, |_: *mut u8| {});
        assert!(thread.join().unwrap() || found);
    });
}

/// The same, but the receiver consumes a message of the first ring.
#[test]
fn a_consume_rings_a_sender_that_has_moved() {
    check(|| {
        let (own, ..) = ends();
        let (_, mut sender, mut receiver) = larger_ring();
        receiver.offer(LARGER, || {});
        assert!(sender.push([0; 3], 0, |_: *mut u8| {}));
        assert!(sender.move_to(LARGER));
        while sender.push([0; 3], 0, |_: *mut u8| {}) {}
        let map = own.again();
        let thread = thread::spawn(move || {
            let message = receiver.peek().unwrap().unwrap();
            receiver.advance(&message);
            light_fence(true);
            receiver.sender_waits() && signal::must_notify(&map, SENDER_CQ, true, true)
        });
        signal::arm(&own, SENDER_CQ, ARMED_ANY);
        heavy_fence();
        sender.ask();
        heavy_fence();
        let found = sender.push([0; 3], 0, |_: *mut u8| {});
        assert!(thread.join().unwrap() || found);
    });
}

/// The sender has asked for room in the first ring, then moves, and finds no room in the larger
/// one.
#[test]
fn a_sender_that_asks_before_it_moves_is_rung() {
    check(|| {
        let (own, ..) = ends();
        let (_, mut sender, mut receiver) = larger_ring();
        receiver.offer(LARGER, || {});
        let map = own.again();
        let thread = thread::spawn(move || follow(&mut receiver, &map));
        signal::arm(&own, SENDER_CQ, ARMED_ANY);
        heavy_fence();
        sender.ask();
        heavy_fence();
        assert!(sender.move_to(LARGER));
        let mut sent = 0;
        while sender.push([0; 3], 0, |_: *mut u8| {}) {
            sent += 1;
        }
        // with the marker one less, until the receiver has found it
        let found = sent == LARGER.slots - 1;
        assert!(thread.join().unwrap() || found);
    });
}

#[test]
fn a_ring_that_grows_and_becomes_cold_has_its_message_or_an_arrival() {
    check(|| {
        let (map, mut sender, mut receiver) = larger_ring();
        receiver.set_hot(true);
        receiver.offer(LARGER, || {});
        let thread = thread::spawn(move || {
            assert!(sender.move_to(LARGER));
            assert!(sender.push([0; 3], 0, |_: *mut u8| {}));
            light_fence(true);
            sender.is_cold()
        });
        let found = receiver.set_hot(false);
        assert!(thread.join().unwrap() || found);
        drop(map);
    });
}

/// The sender has armed its completion queue, which a message to it may wake first.
#[test]
fn a_sender_that_waits_for_room_finds_it_or_is_rung() {
    check(|| {
        let (own, ..) = ends();
        let (_, mut sender, mut receiver) = ring();
        while sender.push([0; 3], 0, |_: *mut u8| {}) {}
        let (map, other) = (own.again(), own.again());
        let thread = thread::spawn(move || {
            let message = receiver.peek().unwrap().unwrap();
            receiver.advance(&message);
            light_fence(true);
            receiver.sender_waits() && signal::must_notify(&map, SENDER_CQ, true, true)
        });
        let another = thread::spawn(move || signal::must_notify(&other, SENDER_CQ, false, true));
        signal::arm(&own, SENDER_CQ, ARMED_ANY);
        heavy_fence();
        sender.ask();
        heavy_fence();
        let found = sender.push([0; 3], 0, |_: *mut u8| {});
        let rung = thread.join().unwrap() | another.join().unwrap();
        assert!(found || rung);
    });
}

/// What a sender does behind a message.
fn note(map: &Mapping, sender: &Sender) -> bool {
    light_fence(true);
    let cold = sender.is_cold();
    if cold {
        note_arrival(map, ARRIVALS, QP as u32);
    }
    cold
}

fn arrivals(map: &Mapping) -> u32 {
    let mut found = 0;
    Arrivals::at(map, ARRIVALS).drain(0, |index| {
        assert_eq!(index as usize, QP);
        found += 1;
        true
    });
    found
}

#[test]
fn a_ring_that_becomes_cold_has_its_message_or_an_arrival() {
    check(|| {
        let (map, mut sender, mut receiver) = ring();
        receiver.set_hot(true);
        let theirs = Arc::clone(&map);
        let thread = thread::spawn(move || {
            assert!(sender.push([0; 3], 0, |_: *mut u8| {}));
            note(&theirs, &sender);
        });
        let found = receiver.set_hot(false);
        thread.join().unwrap();
        assert!(found || arrivals(&map) == 1);
    });
}

#[test]
fn no_arrival_is_lost_while_others_are_taken() {
    check(|| {
        let (map, ..) = ring();
        let messages = INDICES.map(|_| Memory::new(0));
        let (theirs, cells) = (Arc::clone(&map), messages.clone());
        let thread = thread::spawn(move || {
            for (index, cell) in INDICES.into_iter().zip(cells) {
                cell.write(1);
                note_arrival(&theirs, ARRIVALS, index);
            }
        });
        let mut found = INDICES.map(|_| 0);
        let mut take = || {
            // begins in the middle of a word
            Arrivals::at(&map, ARRIVALS).drain(INDICES[2], |index| {
                let which = INDICES.iter().position(|&other| other == index).unwrap();
                assert_eq!(messages[which].read(), 1);
                found[which] += 1;
                true
            });
        };
        take();
        thread.join().unwrap();
        take();
        assert_eq!(found, [1, 1, 1]);
    });
}

const INCARNATION: u32 = 9;
const SENDER: usize = qp::AT + qp::STRIDE;
const RECEIVER: usize = qp::AT + 2 * qp::STRIDE;
const RECEIVED_BY: UseWord = UseWord::new(2, INCARNATION);
const SENDER_CQ: usize = cq::AT + cq::STRIDE;
const RECEIVER_CQ: usize = cq::AT + 2 * cq::STRIDE;

/// A segment with both queue pairs, the receiver's state word, and the receiver from the sender's
/// side.
fn ends() -> (Mapping, StateWord, Destination) {
    let segment = Mapping::model(SEGMENT_SIZE);
    segment.prepare(
        [SENDER_CQ + cq::ARMED, RECEIVER_CQ + cq::ARMED],
        [RECEIVER + qp::STATE, SENDER + qp::RING_USE],
    );
    let word = StateWord::new(IBV_QPS_RTS, 1, 0, INCARNATION);
    let state = segment.u64(RECEIVER + qp::STATE);
    state.store(word.0, Ordering::Relaxed);
    let map = Arc::try_new(segment.again()).unwrap();
    let destination = Destination {
        state: Word::u64(&map, RECEIVER + qp::STATE),
        word,
        used: RECEIVED_BY,
        cq_at: RECEIVER_CQ,
        armed: Word::u32(&map, RECEIVER_CQ + cq::ARMED),
        light: true,
    };
    (segment, word, destination)
}

fn fail(segment: &Mapping, word: StateWord) {
    let new = word.with_state(IBV_QPS_ERR);
    assert!(signal::move_state(segment, RECEIVER, word, new));
}

/// A sender writes a message while the receiver stops to receive. A sender that finds the state
/// unchanged was heard, and after the end the memory belongs to the receiver.
#[test]
fn a_ring_ends_behind_its_last_message() {
    check(|| {
        let (segment, word, mut destination) = ends();
        let (_, mut sender, mut receiver) = ring();
        let payload = Memory::new(0);
        let (map, cell) = (segment.again(), payload.clone());
        let thread = thread::spawn(move || {
            let Some(usage) = destination.begin(map.u64(SENDER + qp::RING_USE), |_| {}) else {
                return false;
            };
            assert!(sender.push([0; 3], 8, |_: *mut u8| cell.write(1)));
            destination.end(usage, false, |_| {})
        });
        fail(&segment, word);
        heavy_fence();
        while is_writing(&segment, SENDER, RECEIVED_BY) {
            pause(0);
        }
        let found = receiver.peek().unwrap().is_some();
        // Loom detects a race with the sender.
        payload.write(2);
        assert!(found || !thread.join().unwrap());
    });
}

/// A receiver that stops to receive sleeps while the sender is in the middle of a message, or of a
/// post without room. It is woken although it has armed its queue for solicited messages alone.
fn the_end_of_a_usage_is_found(posts: bool) {
    let (segment, word, mut destination) = ends();
    let map = segment.again();
    let thread = thread::spawn(move || {
        let mut rings = false;
        let mut ring = |at| {
            assert_eq!(at, RECEIVER_CQ);
            rings = true;
        };
        if let Some(usage) = destination.begin(map.u64(SENDER + qp::RING_USE), &mut ring) {
            if posts {
                destination.end(usage, false, &mut ring);
            } else {
                destination.release(usage, &mut ring);
            }
        }
        rings
    });
    fail(&segment, word);
    heavy_fence();
    signal::arm(&segment, RECEIVER_CQ, ARMED_SOLICITED);
    heavy_fence();
    let sleeps = is_writing(&segment, SENDER, RECEIVED_BY);
    assert!(thread.join().unwrap() || !sleeps);
}

#[test]
fn the_end_of_the_last_message_is_found_or_rung() {
    check(|| the_end_of_a_usage_is_found(true));
}

#[test]
fn the_end_of_a_post_without_room_is_found_or_rung() {
    check(|| the_end_of_a_usage_is_found(false));
}

#[test]
fn a_sender_that_waits_for_room_finds_the_end_or_is_rung() {
    check(|| {
        let (segment, word, mut destination) = ends();
        let (ring, sender, _) = ring();
        let map = segment.again();
        let thread = thread::spawn(move || {
            fail(&map, word);
            light_fence(true);
            is_awaited(&ring, WAITING_AT) && signal::must_notify(&map, SENDER_CQ, true, true)
        });
        signal::arm(&segment, SENDER_CQ, ARMED_ANY);
        heavy_fence();
        let sleeps = destination.ask(segment.u64(SENDER + qp::RING_USE), &sender, |_| {});
        assert!(thread.join().unwrap() || !sleeps);
    });
}
