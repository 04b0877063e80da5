//! The ring: between two sides that follow the protocol, and with arbitrary content.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use super::Input;
use crate::ring::{Consumer, HEADER, Header, MAX_PAYLOAD, Producer, RING_SIZE, SLOT, SLOTS};
use crate::segment::Mapping;
use crate::sys::{fallocate, memfd_create};

fn pair() -> (Mapping, Producer, Consumer) {
    let file = memfd_create(c"ring", RING_SIZE).unwrap();
    fallocate(file.as_raw_fd(), 0, RING_SIZE).unwrap();
    let map = || Mapping::new(&file, RING_SIZE).unwrap();
    let consumer = Consumer::new(map(), 42);
    (map(), Producer::new(map(), 42).unwrap(), consumer)
}

/// Slots of a message, and the slots left empty at the ring's end before it.
fn slots(head: u32, len: usize) -> u32 {
    let slots = (HEADER + len).div_ceil(SLOT) as u32;
    let to_end = SLOTS - head % SLOTS;
    if slots > to_end {
        slots + to_end
    } else {
        slots
    }
}

/// Messages of any sizes arrive complete and in order. A push fails if and only if there is no
/// room.
///
/// # Panics
/// If this property does not hold.
pub fn ring(data: &[u8]) {
    let mut input = Input::new(data);
    let (_, mut producer, mut consumer) = pair();
    let mut sent = VecDeque::new();
    // Slots written, slots read, and slots that the producer knows to be read.
    let (mut head, mut tail, mut told) = (0u32, 0u32, 0u32);
    let mut number = 0u32;
    while !input.is_empty() {
        match input.u8() % 4 {
            0 | 1 => {
                let len = match input.u8() % 3 {
                    0 => input.below(33),
                    1 => input.below(300),
                    _ => input.below(MAX_PAYLOAD + 1),
                };
                // Payload that resembles a header as closely as possible.
                let word = u64::from((head + u32::from(input.u8())) << 1 | 1).to_ne_bytes();
                let payload: Vec<u8> = word.into_iter().cycle().take(len).collect();
                let header = Header {
                    len: len as u32,
                    msn: number,
                    ..Header::default()
                };
                // SAFETY: the place has room for the payload.
                let pushed = producer.push(&header, |to| unsafe {
                    to.copy_from_nonoverlapping(payload.as_ptr(), len);
                });
                let room = SLOTS - (head - told);
                assert_eq!(pushed, slots(head, len) < room, "{len} bytes, {room} slots");
                if pushed {
                    head += slots(head, len);
                    sent.push_back((number, payload));
                    number += 1;
                }
            }
            2 => {
                for _ in 0..input.u8() {
                    let Some(message) = consumer.peek().unwrap() else {
                        assert!(sent.is_empty());
                        break;
                    };
                    let (number, payload) = sent.pop_front().unwrap();
                    assert_eq!(message.header.msn, number);
                    let mut got = vec![0; message.inside];
                    // SAFETY: room for all of the payload.
                    unsafe { consumer.copy_payload(&message, 0, got.as_mut_ptr(), got.len()) };
                    assert_eq!(got, payload);
                    tail += slots(tail, payload.len());
                    consumer.advance(&message);
                }
            }
            _ => {
                consumer.publish();
                told = tail;
            }
        }
    }
}

/// For any words in a ring, its receiver reads only inside the ring, and its sender writes only
/// inside it.
///
/// # Panics
/// If this property does not hold.
pub fn ring_rubbish(data: &[u8]) {
    let mut input = Input::new(data);
    let (map, mut producer, mut consumer) = pair();
    while !input.is_empty() {
        match input.u8() % 4 {
            0 => {
                let at = input.below(RING_SIZE / 8) * 8;
                map.u64(at).store(input.edgy(), Ordering::Relaxed);
            }
            1 => {
                // The position that the receiver reads next, with the sequence number that it
                // expects.
                let at = consumer.place();
                let op = u64::from(input.u8());
                let flags = u64::from(input.u8());
                let slots = u64::from(input.u16());
                let first = u64::from(consumer.expects());
                map.u64(at).store(
                    first | op << 32 | flags << 40 | slots << 48,
                    Ordering::Relaxed,
                );
                for word in 1..4 {
                    map.u64(at + 8 * word)
                        .store(input.edgy(), Ordering::Relaxed);
                }
            }
            2 => {
                let len = input.below(MAX_PAYLOAD + 1);
                let header = Header {
                    len: len as u32,
                    ..Header::default()
                };
                // SAFETY: the place has room for the payload.
                producer.push(&header, |to| unsafe { to.write_bytes(0xa5, len) });
            }
            _ => {
                let Ok(message) = consumer.peek() else { break };
                let Some(message) = message else { continue };
                assert!(message.inside <= MAX_PAYLOAD);
                let offset = input.below(2 * MAX_PAYLOAD);
                let len = input.below(MAX_PAYLOAD);
                let mut got = vec![0u8; len].into_boxed_slice();
                // SAFETY: room for that many bytes.
                unsafe { consumer.copy_payload(&message, offset, got.as_mut_ptr(), len) };
                consumer.advance(&message);
                consumer.publish();
            }
        }
    }
}
