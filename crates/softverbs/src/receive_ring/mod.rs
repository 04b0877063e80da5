//! The receive ring of one queue pair (`docs/softverbs-ring.md`).
//!
//! A ring lies in the receiver's segment. It begins with words of 128 bytes distance, each written
//! by one side, and continues with slots of 64 bytes. A message is a header of 32 bytes, in a slot
//! of its own unless the payload fits into the rest of it, and the payload in the slots behind. The
//! sender publishes it by storing the position in the first word of its first slot. The receiver
//! polls that word and reads the payload in place. So the sender writes to the line that the
//! receiver polls when all others are written, and only then.
//!
//! Neither side trusts the other side's words: each side keeps its position in private memory, and
//! the receiver copies a header once before it checks it. The caller of [`Sender`] ensures that the
//! memory is still that ring ([`crate::qp`]).

mod arrivals;
mod receiver;
mod sender;
mod usage;

pub(crate) use arrivals::{ARRIVALS_LEN, Arrivals, note_arrival};
pub(crate) use receiver::{Message, Receiver, Stop, is_awaited};
pub(crate) use sender::{Fill, Sender};
pub(crate) use usage::{Destination, Usage, UseWord, is_writing};

/// Bytes of a slot.
pub(crate) const SLOT: usize = 64;
/// Bytes of a header.
pub(crate) const HEADER: usize = 32;
/// Longest payload of a message of one slot.
pub(crate) const SHORT: usize = SLOT - HEADER;
/// Limits of the number of slots, a power of two.
pub(crate) const MIN_SLOTS: u32 = if cfg!(all(test, loom)) { 4 } else { 64 };
pub(crate) const MAX_SLOTS: u32 = 4096;

/// u32, by the receiver: slots that it has consumed, wrapping.
pub(crate) const CONSUMED_AT: usize = 0;
/// u32, by the receiver: it examines the ring although no arrival is noted.
pub(crate) const HOT_AT: usize = 128;
/// u32, by both: the sender waits for the next change of `CONSUMED_AT`.
pub(crate) const WAITING_AT: usize = 256;
pub(crate) const SLOTS_AT: usize = 512;

/// Length of padding in a header.
const PAD: u32 = u32::MAX;
/// The same of a marker: the next message is in the larger ring.
const MOVED: u32 = u32::MAX - 1;

/// The memory of a ring in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingArea {
    pub(crate) at: usize,
    pub(crate) slots: u32,
}

/// Bytes of a ring.
pub(crate) fn ring_len(slots: u32) -> usize {
    SLOTS_AT + SLOT * slots as usize
}

/// Whether a ring may have this number of slots.
pub(crate) fn is_valid(slots: u32) -> bool {
    slots.is_power_of_two() && (MIN_SLOTS..=MAX_SLOTS).contains(&slots)
}

/// Longest payload of a message. Padding of one slot less than the message, the message, and a slot
/// behind it fit into an empty ring.
pub(crate) fn max_payload(slots: u32) -> usize {
    SLOT * (slots / 2 - 1) as usize
}

/// Number of slots of a message with `len` bytes of payload.
#[inline(always)]
fn slots_for(len: usize) -> u32 {
    if len <= SHORT {
        1
    } else {
        1 + len.div_ceil(SLOT) as u32
    }
}

/// Offset in a message of its payload of `len` bytes.
#[inline(always)]
fn payload_at(len: usize) -> usize {
    if len <= SHORT { HEADER } else { SLOT }
}

/// The lower half of the first word of the message at `position`; never 0.
#[inline(always)]
fn sequence(position: u32) -> u32 {
    position << 1 | 1
}

/// Offset in a ring of the slot at `position`.
#[inline(always)]
fn slot_at(position: u32, slots: u32) -> usize {
    SLOTS_AT + SLOT * (position & (slots - 1)) as usize
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::Ordering;

    use proptest::prelude::*;

    use super::*;
    use crate::segment::Mapping;
    use crate::sync::Arc;
    use crate::sys::{fallocate, memfd_create};

    /// Offset of the ring in its mapping; the bytes before it must stay 0.
    const AT: usize = 4096;

    /// A larger ring, behind the page that follows a ring of 64 slots.
    const LARGER: RingArea = RingArea {
        at: AT + 2 * 4096 + 4096,
        slots: 256,
    };

    fn pair(slots: u32) -> (Arc<Mapping>, Sender, Receiver) {
        pair_within(slots, AT + ring_len(slots) + 4096)
    }

    fn pair_within(slots: u32, len: usize) -> (Arc<Mapping>, Sender, Receiver) {
        let file = memfd_create(c"ring", len).unwrap();
        fallocate(file.as_raw_fd(), 0, len).unwrap();
        let map = Arc::try_new(Mapping::new(&file, len).unwrap()).unwrap();
        let sender = Sender::new(Arc::clone(&map), AT, slots).unwrap();
        let receiver = Receiver::new(Arc::clone(&map), AT, slots);
        (map, sender, receiver)
    }

    fn send(sender: &mut Sender, words: [u64; 3], payload: &[u8]) -> bool {
        // SAFETY: the ring has room for the payload.
        sender.push(words, payload.len(), |to: *mut u8| unsafe {
            to.copy_from_nonoverlapping(payload.as_ptr(), payload.len());
        })
    }

    fn payload_of(message: &Message) -> Vec<u8> {
        let mut got = vec![0; message.len];
        // SAFETY: the message has that many bytes.
        unsafe {
            message
                .payload
                .copy_to_nonoverlapping(got.as_mut_ptr(), got.len());
        }
        got
    }

    fn outside_is_zero(map: &Mapping, slots: u32) -> bool {
        let end = AT + ring_len(slots);
        (0..AT)
            .chain(end..end + 4096)
            .step_by(8)
            .all(|at| map.u64(at).load(Ordering::Relaxed) == 0)
    }

    #[test]
    fn the_longest_message_fits_at_each_position() {
        for slots in [64, 128, 4096] {
            let (map, mut sender, mut receiver) = pair(slots);
            let long = vec![7; max_payload(slots)];
            for _ in 0..2 * slots {
                assert!(send(&mut sender, [1, 2, 3], &long));
                let message = receiver.peek().unwrap().unwrap();
                assert_eq!(payload_of(&message), long);
                receiver.advance(&message);
                assert!(send(&mut sender, [4, 5, 6], &[]));
                let message = receiver.peek().unwrap().unwrap();
                assert_eq!((message.words, message.len), ([4, 5, 6], 0));
                receiver.advance(&message);
                assert!(receiver.peek().unwrap().is_none());
            }
            assert!(outside_is_zero(&map, slots));
        }
    }

    /// The next message, also behind the move to a larger ring.
    fn next(receiver: &mut Receiver) -> Option<Message> {
        loop {
            match receiver.peek() {
                Ok(found) => return found,
                Err(stop) => assert_eq!(stop, Stop::Moved),
            }
        }
    }

    #[test]
    fn the_sender_into_a_full_ring_moves() {
        let end = LARGER.at + ring_len(LARGER.slots);
        let (_, mut sender, mut receiver) = pair_within(64, end);
        while send(&mut sender, [0; 3], &[1; SHORT]) {}
        receiver.offer(LARGER, || {});
        assert!(sender.move_to(LARGER));
        assert!(!sender.move_to(LARGER));
        // the receiver is in the former ring
        let message = next(&mut receiver).unwrap();
        receiver.advance(&message);
        assert_eq!(sender.delivered(|| true), 1);
        let long = vec![3; max_payload(256)];
        assert!(send(&mut sender, [1; 3], &long));
        for _ in 1..63 {
            let message = next(&mut receiver).unwrap();
            assert_eq!(message.words, [0; 3]);
            receiver.advance(&message);
        }
        assert_eq!(receiver.area().at, AT);
        let message = next(&mut receiver).unwrap();
        assert_eq!(receiver.area(), LARGER);
        assert_eq!(payload_of(&message), long);
        receiver.advance(&message);
        assert!(next(&mut receiver).is_none());
        assert_eq!(sender.delivered(|| true), sender.sent());
    }

    #[test]
    fn a_position_ahead_of_the_sender_changes_nothing() {
        let (map, mut sender, mut receiver) = pair(64);
        while send(&mut sender, [0; 3], &[]) {}
        let forged = map.u32(AT + CONSUMED_AT);
        for position in [64, 65, 1 << 30, 1 << 31, u32::MAX] {
            forged.store(position, Ordering::Relaxed);
            assert_eq!(sender.delivered(|| true), 0, "{position}");
            assert!(!send(&mut sender, [0; 3], &[]), "{position}");
        }
        let message = receiver.peek().unwrap().unwrap();
        receiver.advance(&message);
        assert_eq!(sender.delivered(|| true), 1);
        assert!(send(&mut sender, [0; 3], &[]));
    }

    #[test]
    fn a_marker_without_a_larger_ring_is_invalid() {
        let (map, _, mut receiver) = pair(64);
        let first = u64::from(receiver.expected()) | u64::from(MOVED) << 32;
        map.u64(receiver.next_at()).store(first, Ordering::Relaxed);
        assert_eq!(receiver.peek().unwrap_err(), Stop::Broken);
    }

    #[test]
    fn the_next_sender_begins_in_the_larger_ring() {
        let end = LARGER.at + ring_len(LARGER.slots);
        for moves in [true, false] {
            let (map, mut sender, mut receiver) = pair_within(64, end);
            receiver.offer(LARGER, || {});
            if moves {
                assert!(sender.move_to(LARGER));
                assert!(send(&mut sender, [0; 3], &[1; 60]));
                assert!(next(&mut receiver).is_some());
            }
            receiver.clear();
            assert_eq!(receiver.area(), LARGER);
            let mut sender = Sender::new(map, LARGER.at, LARGER.slots).unwrap();
            assert!(receiver.peek().unwrap().is_none());
            assert!(send(&mut sender, [5; 3], &[2; 4000]));
            assert_eq!(next(&mut receiver).unwrap().words, [5; 3]);
        }
    }

    #[test]
    fn a_full_ring_takes_no_message_until_one_is_consumed() {
        let (_, mut sender, mut receiver) = pair(64);
        let mut count = 0u64;
        while send(&mut sender, [count, 0, 0], &[1; SHORT]) {
            count += 1;
        }
        assert_eq!(count, 63);
        for number in 0..1000 {
            let message = receiver.peek().unwrap().unwrap();
            assert_eq!(message.words[0], number);
            assert!(!send(&mut sender, [0; 3], &[]));
            receiver.advance(&message);
            assert!(send(&mut sender, [count, 0, 0], &[]));
            count += 1;
        }
        assert_eq!(sender.sent().wrapping_sub(sender.delivered(|| true)), 63);
    }

    proptest! {
        /// Messages of any lengths arrive whole and in order, with payload that looks like the
        /// first word of a later message. A push fails only for lack of room.
        #[test]
        fn messages_arrive_whole_and_in_order(
            steps in prop::collection::vec((any::<bool>(), 0..9000usize, 0..300u32), 1..600),
            grows: prop::sample::Index,
            moves: prop::sample::Index,
        ) {
            let end = LARGER.at + ring_len(LARGER.slots);
            let (map, mut sender, mut receiver) = pair_within(64, end + 4096);
            let mut sent = VecDeque::new();
            let mut number = 0u64;
            let (grows, moves) = (grows.index(800), moves.index(900));
            for (step, (sends, len, ahead)) in steps.into_iter().enumerate() {
                if step == grows {
                    receiver.offer(LARGER, || {});
                }
                if step >= grows.max(moves) {
                    sender.move_to(LARGER);
                }
                if sends {
                    let longest = sender.max_payload();
                    let len = if len % 3 == 0 { len % 33 } else { len.min(longest) };
                    let word = u64::from(sequence(sender.sent() + ahead)).to_ne_bytes();
                    let payload: Vec<u8> = word.into_iter().cycle().take(len).collect();
                    let mut done = send(&mut sender, [number, !number, 0], &payload);
                    if !done && sent.is_empty() {
                        // Only the marker of the move can be in the way: the receiver goes past it.
                        prop_assert!(next(&mut receiver).is_none());
                        done = send(&mut sender, [number, !number, 0], &payload);
                        prop_assert!(done);
                    }
                    if done {
                        sent.push_back((number, payload));
                        number += 1;
                    }
                } else {
                    for _ in 0..ahead % 20 {
                        let Some(message) = next(&mut receiver) else {
                            prop_assert!(sent.is_empty());
                            break;
                        };
                        let (number, payload) = sent.pop_front().unwrap();
                        prop_assert_eq!(message.words, [number, !number, 0]);
                        prop_assert_eq!(payload_of(&message), payload);
                        receiver.advance(&message);
                    }
                }
            }
            let between = AT + ring_len(64)..LARGER.at;
            for at in (0..AT).chain(between).chain(end..end + 4096).step_by(8) {
                prop_assert_eq!(map.u64(at).load(Ordering::Relaxed), 0);
            }
        }

        /// For any words in a ring, the receiver reads only inside it, and the sender writes only
        /// inside it.
        #[test]
        fn rubbish_leads_nowhere(
            steps in prop::collection::vec((0..4u8, any::<u64>(), any::<u32>()), 1..400),
        ) {
            let (map, mut sender, mut receiver) = pair(64);
            for (kind, word, place) in steps {
                match kind {
                    0 => {
                        let at = place as usize % (ring_len(64) / 8) * 8;
                        map.u64(AT + at).store(word, Ordering::Relaxed);
                    }
                    1 => {
                        let len = if place % 2 == 0 { word % 5000 } else { word >> 32 };
                        let first = u64::from(receiver.expected()) | len << 32;
                        map.u64(receiver.next_at()).store(first, Ordering::Relaxed);
                    }
                    2 => {
                        let len = place as usize % (max_payload(64) + 1);
                        send(&mut sender, [word; 3], &vec![0xa5; len]);
                    }
                    _ => {
                        let Ok(message) = receiver.peek() else { break };
                        let Some(message) = message else { continue };
                        let from = map.bytes(AT, ring_len(64)).addr() + SLOTS_AT;
                        let at = message.payload.addr();
                        prop_assert!(at >= from + HEADER);
                        prop_assert!(at + message.len <= from + 64 * SLOT);
                        receiver.advance(&message);
                    }
                }
            }
            prop_assert!(outside_is_zero(&map, 64));
        }
    }

    #[test]
    fn padding_alone_is_invalid() {
        let (map, _, mut receiver) = pair(64);
        let padding = u64::from(sequence(0)) | u64::from(PAD) << 32;
        for slots in [40, 60] {
            for _ in 0..slots {
                receiver.advance_by(1);
            }
            let first = padding | u64::from(receiver.expected());
            map.u64(receiver.next_at()).store(first, Ordering::Relaxed);
            assert!(receiver.peek().is_err());
            receiver.clear();
        }
    }

    #[test]
    fn a_ring_starts_again_empty() {
        let (map, mut sender, mut receiver) = pair(64);
        for _ in 0..40 {
            send(&mut sender, [1; 3], &[1; 60]);
        }
        receiver.clear();
        let mut sender = Sender::new(map, AT, 64).unwrap();
        assert!(receiver.peek().unwrap().is_none());
        for number in 0..200 {
            assert!(send(&mut sender, [number; 3], &[2; 100]));
            let message = receiver.peek().unwrap().unwrap();
            assert_eq!(message.words, [number; 3]);
            receiver.advance(&message);
        }
    }
}
