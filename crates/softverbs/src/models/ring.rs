//! The ring between two processes.

use std::sync::Arc;

use loom::thread;

use super::{Memory, check};
use crate::ring::{CONSUMED_AT, Consumer, Header, Producer, RING_SIZE, SLOT, SLOTS, WAITING_AT};
use crate::segment::Mapping;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{light_fence, pause};

const COOKIE: u64 = 7;

pub(super) fn ring() -> (Producer, Consumer) {
    let map = Mapping::model(RING_SIZE);
    let slots = RING_SIZE - SLOT * SLOTS as usize;
    map.prepare([CONSUMED_AT, WAITING_AT], (slots..RING_SIZE).step_by(8));
    let consumer = Consumer::new(map.again(), COOKIE);
    (Producer::new(map, COOKIE).unwrap(), consumer)
}

pub(super) fn message(number: u32) -> Header {
    Header {
        len: 8,
        imm: !number,
        msn: number,
        ..Header::default()
    }
}

#[test]
fn messages_arrive_whole_in_order_and_their_slots_are_used_again() {
    check(|| {
        let (mut producer, mut consumer) = ring();
        let payload: Vec<_> = (0..SLOTS).map(|_| Memory::new(0)).collect();
        let theirs = payload.clone();
        let count = SLOTS + 1;
        let sender = thread::spawn(move || {
            for number in 0..count {
                let cell = &theirs[(number % SLOTS) as usize];
                while !producer.push(&message(number), |_| cell.write(u64::from(number))) {
                    pause(0);
                }
            }
        });
        let mut number = 0;
        while number < count {
            let Some(message) = consumer.peek().unwrap() else {
                pause(0);
                continue;
            };
            assert_eq!(message.header, self::message(number));
            let cell = &payload[(number % SLOTS) as usize];
            assert_eq!(cell.read(), u64::from(number));
            consumer.advance(&message);
            consumer.publish();
            number += 1;
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_sender_that_waits_for_room_finds_it_or_is_rung() {
    check(|| {
        let (mut producer, mut consumer) = ring();
        let mut number = 0;
        while producer.push(&message(number), |_| {}) {
            number += 1;
        }
        let receiver = thread::spawn(move || {
            let message = consumer.peek().unwrap().unwrap();
            consumer.advance(&message);
            assert!(consumer.publish());
            light_fence(true);
            consumer.sender_waits()
        });
        let found = producer.push_or_ask(&message(number), |_| {}, || true);
        let rung = receiver.join().unwrap();
        assert!(found || rung);
    });
}

/// A sender that was rung and finds too little room waits again. A receiver that publishes the rest
/// in between must ring, or the sender must see the room.
#[test]
fn a_sender_that_waits_for_room_once_more_finds_it_or_is_rung() {
    check(|| {
        let (mut producer, mut consumer) = ring();
        let bell = Arc::new(AtomicU32::new(0));
        let theirs = Arc::clone(&bell);
        let mut number = 0;
        while producer.push(&message(number), |_| {}) {
            number += 1;
        }
        // This message needs the whole ring.
        let long = Header {
            len: SLOT as u32,
            ..message(number)
        };
        let receiver = thread::spawn(move || {
            for batch in [1, number - 1] {
                for _ in 0..batch {
                    let message = consumer.peek().unwrap().unwrap();
                    consumer.advance(&message);
                }
                assert!(consumer.publish());
                light_fence(true);
                if consumer.sender_waits() {
                    theirs.swap(1, Ordering::AcqRel);
                }
            }
        });
        let mut found = false;
        for _ in 0..2 {
            bell.swap(0, Ordering::AcqRel);
            found = found || producer.push_or_ask(&long, |_| {}, || true);
        }
        receiver.join().unwrap();
        assert!(found || bell.load(Ordering::Acquire) == 1);
    });
}
