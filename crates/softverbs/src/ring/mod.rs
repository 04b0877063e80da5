//! The ring that carries messages from one process to another.
//!
//! The receiver creates the ring's file, so a message survives the end of its sender. The sender
//! writes slots of 64 bytes. It publishes a message by storing the sequence number in the first
//! word of the message's first slot. The receiver polls that word, reads one cache line for a
//! message of one slot, and stores the count of slots that it has consumed. A message is a header
//! of 32 bytes and its payload, in one or more adjacent slots. Before the sender publishes a
//! message, it clears the first word of the next slot if that word may hold payload of an earlier
//! round: the receiver must not take payload for a header.
//!
//! Neither side trusts the other side's words: each side keeps its position in private memory, and
//! copies a header out of the ring once before it checks the header.

mod consumer;
mod datagram_turn;
mod producer;

pub(crate) use consumer::{Consumer, Message};
pub(crate) use producer::{Producer, Pushed};

use crate::segment::Mapping;

/// Bytes of a slot.
pub(crate) const SLOT: usize = 64;
/// Slots of a ring. The loom models use 4 slots, so that the ring becomes full after few messages.
pub(crate) const SLOTS: u32 = if cfg!(all(test, loom)) { 4 } else { 2048 };
/// Bytes of a message's header.
pub(crate) const HEADER: usize = 32;
/// Longest payload of a message of one slot.
pub(crate) const SHORT: usize = SLOT - HEADER;
/// Longest payload that goes through a ring.
pub(crate) const MAX_PAYLOAD: usize = 8192;

/// Bytes of a ring: one page with the positions, then the slots.
pub(crate) const RING_SIZE: usize = SLOTS_AT + SLOT * SLOTS as usize;
const _: () = assert!(RING_SIZE <= crate::segment::layout::rings::STRIDE);
const MAGIC_AT: usize = 0;
const COOKIE_AT: usize = 8;
/// u32, written by the receiver: slots that it has consumed, wrapping.
pub(crate) const CONSUMED_AT: usize = 64;
/// u32, written by both: the sender waits for free slots.
pub(crate) const WAITING_AT: usize = 128;
pub(crate) const SLOTS_AT: usize = crate::segment::layout::rings::SLOTS_AT;

/// Values of [`Header::op`].
pub(crate) mod op {
    pub(crate) const SEND: u8 = 0;
    pub(crate) const SEND_IMM: u8 = 1;
    pub(crate) const WRITE_IMM: u8 = 2;
    /// Send with invalidate: `imm` holds the rkey of the memory window to invalidate.
    pub(crate) const SEND_INV: u8 = 3;
    /// The message is longer than the receive that it claimed.
    pub(crate) const TOO_LONG: u8 = 4;
    /// The sender could not write the memory of the claimed receive.
    pub(crate) const UNWRITABLE: u8 = 5;
    /// Consumes no receive: returns the claimed receive to the queue.
    pub(crate) const RETURN: u8 = 6;
    /// Padding up to the end of the ring; not a message.
    pub(crate) const PAD: u8 = 0xff;
}

/// Bits of [`Header::flags`].
pub(crate) mod flag {
    pub(crate) const SOLICITED: u8 = 1;
    /// The sender has already copied the payload into the receive's memory.
    pub(crate) const PUSHED: u8 = 2;
    /// The destination is a UD queue pair.
    pub(crate) const DATAGRAM: u8 = 4;
    /// The message consumes a receive of an SRQ.
    pub(crate) const SHARED: u8 = 8;
}

/// The header of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) op: u8,
    pub(crate) flags: u8,
    pub(crate) dst_qpn: u32,
    /// Connected queue pairs: incarnation of the receiving queue pair, as read by the sender. UD:
    /// traffic class and flow label.
    pub(crate) incarnation: u32,
    /// Length of the message in bytes, inside the ring or not.
    pub(crate) len: u32,
    pub(crate) imm: u32,
    /// The receive that the message consumes. SRQ: the descriptor in the lower 16 bits, the SRQ's
    /// index above them. UD: the Q_Key.
    pub(crate) msn: u32,
    /// Number of the sending queue pair, 24 bits.
    pub(crate) src_qpn: u32,
    /// XRC: the lowest 8 bits of the stamp of the SRQ that the sender addresses; the stamp differs
    /// between two lives of the SRQ.
    pub(crate) life: u8,
}

impl Header {
    /// Bytes of the payload inside the ring.
    #[inline(always)]
    fn inside(&self) -> usize {
        if self.flags & flag::PUSHED != 0
            || matches!(self.op, op::TOO_LONG | op::UNWRITABLE | op::RETURN)
        {
            0
        } else {
            self.len as usize
        }
    }

    #[inline]
    fn to_words(self, position: u32, slots: u32) -> [u64; 4] {
        [
            u64::from(sequence(position))
                | u64::from(self.op) << 32
                | u64::from(self.flags) << 40
                | u64::from(slots & 0xffff) << 48,
            u64::from(self.dst_qpn) | u64::from(self.incarnation) << 32,
            u64::from(self.len) | u64::from(self.imm) << 32,
            u64::from(self.msn)
                | u64::from(self.src_qpn & 0xff_ffff) << 32
                | u64::from(self.life) << 56,
        ]
    }

    #[inline]
    fn from_words(words: [u64; 4]) -> (Self, u32) {
        let header = Self {
            op: (words[0] >> 32) as u8,
            flags: (words[0] >> 40) as u8,
            dst_qpn: words[1] as u32,
            incarnation: (words[1] >> 32) as u32,
            len: words[2] as u32,
            imm: (words[2] >> 32) as u32,
            msn: words[3] as u32,
            src_qpn: (words[3] >> 32) as u32 & 0xff_ffff,
            life: (words[3] >> 56) as u8,
        };
        (header, (words[0] >> 48) as u32)
    }
}

/// The lower half of the first word of the message at `position`; never 0.
#[inline]
fn sequence(position: u32) -> u32 {
    position << 1 | 1
}

/// Number of slots of a message with `inside` bytes of payload.
#[inline]
pub(crate) fn slots_for(inside: usize) -> u32 {
    (HEADER + inside).div_ceil(SLOT) as u32
}

#[inline]
fn slot_at(position: u32) -> usize {
    SLOTS_AT + SLOT * (position % SLOTS) as usize
}

/// Copies a payload. A payload of at most 16 bytes is copied inline with at most two moves, because
/// a call of `memcpy` costs more than such a copy.
///
/// # Safety
/// As `copy_nonoverlapping` of `len` bytes. Other threads and processes may write the source during
/// the copy.
#[inline(always)]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller promises `len` bytes; each arm accesses at most `len` bytes.
    unsafe {
        match len {
            17.. => to.copy_from_nonoverlapping(from, len),
            8..=16 => twice::<u64>(from, to, len),
            4..=7 => twice::<u32>(from, to, len),
            2..=3 => twice::<u16>(from, to, len),
            1 => to.write(from.read()),
            0 => {}
        }
    }
}

/// Copies the first and the last `T` of `len` bytes; the two may overlap.
///
/// # Safety
/// As `copy_nonoverlapping` of `len` bytes; `len` is at least the size of a `T`.
#[inline(always)]
unsafe fn twice<T: Copy>(from: *const u8, to: *mut u8, len: usize) {
    let last = len - size_of::<T>();
    // SAFETY: both values lie inside the `len` bytes that the caller promises.
    unsafe {
        let (a, b) = (
            from.cast::<T>().read_unaligned(),
            from.add(last).cast::<T>().read_unaligned(),
        );
        to.cast::<T>().write_unaligned(a);
        to.add(last).cast::<T>().write_unaligned(b);
    }
}

fn fits(map: &Mapping) -> bool {
    map.len() >= RING_SIZE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{fallocate, memfd_create};
    use std::os::fd::AsRawFd;

    pub(super) fn pair() -> (Producer, Consumer) {
        let file = memfd_create(c"ring", RING_SIZE).unwrap();
        fallocate(file.as_raw_fd(), 0, RING_SIZE).unwrap();
        let consumer = Consumer::new(Mapping::new(&file, RING_SIZE).unwrap(), 42);
        let producer = Producer::new(Mapping::new(&file, RING_SIZE).unwrap(), 42).unwrap();
        (producer, consumer)
    }

    #[test]
    fn headers_survive_their_words() {
        let header = Header {
            op: op::WRITE_IMM,
            flags: flag::PUSHED,
            dst_qpn: 0xab_cdef,
            incarnation: 0x12_3456,
            len: u32::MAX,
            imm: 0xdead_beef,
            msn: u32::MAX - 1,
            src_qpn: 0x65_4321,
            life: 0x8f,
        };
        assert_eq!(Header::from_words(header.to_words(7, 130)), (header, 130));
    }

    #[test]
    fn copies_are_whole_and_no_longer() {
        let from: Vec<u8> = (1..=100).collect();
        for len in 0..=100 {
            let mut to = [0u8; 101];
            // SAFETY: both buffers have at least `len` bytes.
            unsafe { copy(from.as_ptr(), to.as_mut_ptr(), len) };
            assert_eq!(to[..len], from[..len]);
            assert!(to[len..].iter().all(|&byte| byte == 0), "{len}");
        }
    }

    #[test]
    fn payload_of_an_earlier_round_is_no_message() {
        let (mut producer, mut consumer) = pair();
        let mut head = 0;
        let mut send = |producer: &mut Producer, slots: u32| {
            let to_end = SLOTS - head % SLOTS;
            if slots > to_end {
                head += to_end;
            }
            let header = Header {
                len: slots * SLOT as u32 - HEADER as u32,
                ..Header::default()
            };
            let sent = producer.push(&header, |to| {
                for slot in 1..slots {
                    // at the start of each slot, the first word of a message of the next round
                    let word = u64::from(sequence(head + slot + SLOTS));
                    // SAFETY: inside the payload, which begins after the header.
                    unsafe {
                        let at = to.add(slot as usize * SLOT - HEADER);
                        at.cast::<u64>().write_unaligned(word);
                    }
                }
            });
            assert!(sent);
            head += slots;
        };
        for round in 0..500 {
            for slots in [40, 1, 1, 1 + round % 2] {
                send(&mut producer, slots);
                let message = consumer.peek().unwrap().expect("a message");
                consumer.advance(&message);
                let none = consumer.peek().unwrap().is_none();
                assert!(none, "payload was taken for a message");
            }
            consumer.publish();
        }
    }

    #[test]
    fn a_ring_of_somebody_else_is_refused() {
        let file = memfd_create(c"ring", RING_SIZE).unwrap();
        assert!(Producer::new(Mapping::new(&file, RING_SIZE).unwrap(), 42).is_none());
        let _consumer = Consumer::new(Mapping::new(&file, RING_SIZE).unwrap(), 42);
        assert!(Producer::new(Mapping::new(&file, RING_SIZE).unwrap(), 43).is_none());
        assert!(Producer::new(Mapping::new(&file, 8192).unwrap(), 42).is_none());
    }

    #[test]
    fn payload_is_read_to_its_end_and_not_beyond() {
        let (mut producer, mut consumer) = pair();
        // Fills every slot once, up to the last slot of the ring.
        for number in 0..SLOTS {
            let header = Header {
                len: 8,
                msn: number,
                ..Header::default()
            };
            // SAFETY: the destination has 8 bytes.
            assert!(producer.push(&header, |at| unsafe { at.write_bytes(7, 8) }));
            let message = consumer.peek().unwrap().unwrap();
            let mut got = [0u8; 8];
            for (offset, left) in [(0, 8), (5, 3), (8, 0), (40, 0), (usize::MAX, 0)] {
                got.fill(0);
                // SAFETY: the destination has 8 bytes.
                unsafe { consumer.copy_payload(&message, offset, got.as_mut_ptr(), 8) };
                assert_eq!(got.iter().filter(|&&byte| byte == 7).count(), left);
            }
            consumer.advance(&message);
            consumer.publish();
        }
    }

    /// A sender that repeatedly writes fillers of the ring's length would keep a receiver in one
    /// `peek`.
    #[test]
    fn a_filler_as_long_as_the_ring_is_rubbish() {
        let file = memfd_create(c"ring", RING_SIZE).unwrap();
        fallocate(file.as_raw_fd(), 0, RING_SIZE).unwrap();
        let mut consumer = Consumer::new(Mapping::new(&file, RING_SIZE).unwrap(), 42);
        let map = Mapping::new(&file, RING_SIZE).unwrap();
        let filler = Header {
            op: op::PAD,
            ..Header::default()
        };
        for (i, word) in filler.to_words(0, SLOTS).into_iter().enumerate().rev() {
            map.u64(slot_at(0) + 8 * i)
                .store(word, std::sync::atomic::Ordering::Release);
        }
        assert!(consumer.ready());
        assert!(consumer.peek().is_err());
    }

    /// A deterministic sequence of numbers, so that a failure can be repeated.
    pub(super) struct Random(pub(super) u64);

    impl Random {
        pub(super) fn below(&mut self, n: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % n
        }
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        for seed in 1..30 {
            let mut random = Random(seed * 0x9e37_79b9);
            let (mut producer, mut consumer) = pair();
            let mut sent = std::collections::VecDeque::new();
            let mut number = 0u32;
            for _ in 0..4000 {
                if random.below(2) == 0 {
                    let len = match random.below(4) {
                        0 => random.below(33),
                        1 => random.below(300),
                        2 => random.below(MAX_PAYLOAD as u64 + 1),
                        _ => 0,
                    } as usize;
                    // Payload that resembles headers.
                    let word = sequence(random.below(u64::from(SLOTS) * 4) as u32);
                    let payload: Vec<u8> = u64::from(word)
                        .to_ne_bytes()
                        .into_iter()
                        .cycle()
                        .take(len)
                        .collect();
                    let header = Header {
                        len: len as u32,
                        msn: number,
                        ..Header::default()
                    };
                    // SAFETY: the destination has `len` bytes.
                    let done = producer.push(&header, |at| unsafe {
                        at.copy_from_nonoverlapping(payload.as_ptr(), len);
                    });
                    if done {
                        sent.push_back(payload);
                        number += 1;
                    }
                } else {
                    for _ in 0..random.below(20) {
                        let Some(message) = consumer.peek().unwrap() else {
                            assert!(sent.is_empty());
                            break;
                        };
                        let expected = sent.pop_front().unwrap();
                        let mut got = vec![0u8; message.header.len as usize];
                        // SAFETY: the destination has room for the whole payload.
                        unsafe {
                            consumer.copy_payload(&message, 0, got.as_mut_ptr(), got.len());
                        }
                        assert_eq!(got, expected);
                        consumer.advance(&message);
                    }
                    consumer.publish();
                }
            }
            assert!(number > 500);
        }
    }

    #[test]
    fn rubbish_is_an_error_and_never_read_beyond() {
        let mut random = Random(99);
        for _ in 0..3000 {
            let file = memfd_create(c"ring", RING_SIZE).unwrap();
            let map = Mapping::new(&file, RING_SIZE).unwrap();
            let mut consumer = Consumer::new(Mapping::new(&file, RING_SIZE).unwrap(), 42);
            for word in 0..4 {
                map.u64(SLOTS_AT + word * 8).store(
                    random.below(u64::MAX) | u64::from(word == 0),
                    std::sync::atomic::Ordering::Relaxed,
                );
            }
            map.u32(SLOTS_AT)
                .store(sequence(0), std::sync::atomic::Ordering::Relaxed);
            if let Ok(Some(message)) = consumer.peek() {
                assert!(message.inside <= MAX_PAYLOAD);
                consumer.advance(&message);
            }
        }
    }

    #[test]
    fn a_ring_is_not_filled_from_its_beginning() {
        let file = memfd_create(c"ring", RING_SIZE).unwrap();
        let map = Mapping::new(&file, RING_SIZE).unwrap();
        let mut consumer = Consumer::new(Mapping::new(&file, RING_SIZE).unwrap(), 42);
        let pad = Header {
            op: op::PAD,
            ..Header::default()
        };
        let word = pad.to_words(0, SLOTS)[0];
        map.u64(SLOTS_AT)
            .store(word, std::sync::atomic::Ordering::Relaxed);
        assert!(consumer.peek().is_err());
    }

    #[test]
    fn two_threads_keep_pace() {
        let (mut producer, mut consumer) = pair();
        let sender = std::thread::spawn(move || {
            let mut random = Random(5);
            for number in 0..100_000u32 {
                let len = random.below(200) as usize;
                let header = Header {
                    len: len as u32,
                    msn: number,
                    ..Header::default()
                };
                // SAFETY: the destination has `len` bytes.
                while !producer.push(&header, |at| unsafe { at.write_bytes(number as u8, len) }) {
                    std::thread::yield_now();
                }
            }
        });
        let mut number = 0u32;
        while number < 100_000 {
            while let Some(message) = consumer.peek().unwrap() {
                assert_eq!(message.header.msn, number);
                let mut got = [0u8; 200];
                let len = message.header.len as usize;
                // SAFETY: the destination has room for the whole payload.
                unsafe { consumer.copy_payload(&message, 0, got.as_mut_ptr(), len) };
                assert!(got[..len].iter().all(|&byte| byte == number as u8));
                consumer.advance(&message);
                number += 1;
            }
            consumer.publish();
            std::thread::yield_now();
        }
        sender.join().unwrap();
    }
}
