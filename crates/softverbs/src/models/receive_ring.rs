//! The receive ring of a queue pair.

use loom::thread;
use rdma_core_sys::{IBV_QPS_ERR, IBV_QPS_RTS};

use super::{Memory, check};
use crate::receive_ring::{
    ARRIVALS_LEN, Arrivals, CONSUMED_AT, HOT_AT, MIN_SLOTS, Receiver, SLOTS_AT, Sender, Usage,
    WAITING_AT, is_writing, note_arrival, ring_len, state,
};
use crate::segment::Mapping;
use crate::segment::layout::{SEGMENT_SIZE, StateWord, qp};
use crate::signal;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, heavy_fence, light_fence, pause};

/// A ring, and arrivals behind it.
const ARRIVALS: usize = 4096;
const QP: usize = 70;
/// Queue pairs with arrivals in one word, and in another one of the same summary word.
const INDICES: [u32; 3] = [QP as u32, QP as u32 + 1, 2 * QP as u32];

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
                while !sender.push([number, !number, 0], 8, |_| cell.write(number)) {
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

#[test]
fn a_sender_that_waits_for_room_finds_it_or_is_rung() {
    check(|| {
        let (_, mut sender, mut receiver) = ring();
        while sender.push([0; 3], 0, |_| {}) {}
        let thread = thread::spawn(move || {
            let message = receiver.peek().unwrap().unwrap();
            receiver.advance(&message);
            light_fence(true);
            receiver.sender_waits()
        });
        sender.ask();
        heavy_fence();
        let found = sender.push([0; 3], 0, |_| {});
        let rung = thread.join().unwrap();
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
    Arrivals::at(map, ARRIVALS).drain(|index| {
        assert_eq!(index as usize, QP);
        found += 1;
        true
    });
    found
}

#[test]
fn a_ring_that_becomes_cold_has_its_message_or_an_arrival() {
    check(|| {
        let (map, mut sender, receiver) = ring();
        receiver.set_hot(true);
        let theirs = Arc::clone(&map);
        let thread = thread::spawn(move || {
            assert!(sender.push([0; 3], 0, |_| {}));
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
            Arrivals::at(&map, ARRIVALS).drain(|index| {
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

/// A sender writes a message while the receiver stops to receive. A sender that finds the state
/// unchanged was heard, and after the end the memory belongs to the receiver.
#[test]
fn a_ring_ends_behind_its_last_message() {
    check(|| {
        const INCARNATION: u32 = 9;
        const SENDER: usize = qp::AT + qp::STRIDE;
        const RECEIVER: usize = qp::AT + 2 * qp::STRIDE;
        let segment = Mapping::model(SEGMENT_SIZE);
        segment.prepare([], [RECEIVER + qp::STATE, SENDER + qp::RING_USE]);
        let word = StateWord::new(IBV_QPS_RTS, 5, 0, INCARNATION);
        let theirs = segment.u64(RECEIVER + qp::STATE);
        theirs.store(word.0, Ordering::Relaxed);
        let (_, mut sender, mut receiver) = ring();
        let payload = Memory::new(0);
        let (map, cell) = (segment.again(), payload.clone());
        let thread = thread::spawn(move || {
            let usage = Usage::begin(&map, SENDER, word, true);
            if state(&map, RECEIVER) != word {
                return false;
            }
            assert!(sender.push([0; 3], 8, |_| cell.write(1)));
            let relies = state(&map, RECEIVER) == word;
            drop(usage);
            relies
        });
        let new = word.with_state(IBV_QPS_ERR);
        assert!(signal::move_state(&segment, RECEIVER, word, new));
        heavy_fence();
        while is_writing(&segment, SENDER, INCARNATION) {
            pause(0);
        }
        let found = receiver.peek().unwrap().is_some();
        // Loom detects a race with the sender.
        payload.write(2);
        assert!(found || !thread.join().unwrap());
    });
}
