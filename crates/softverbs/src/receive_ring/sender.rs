//! The sender's side of a receive ring.

use std::sync::atomic::Ordering;

use super::{
    CONSUMED_AT, HOT_AT, MAX_SLOTS, MOVED, PAD, RingArea, SHORT, SLOT, SLOTS_AT, WAITING_AT,
    max_payload, sequence, slots_for,
};
use crate::segment::lines::{Payload, Payloads};
use crate::segment::{Mapping, Slots, Word, set_bits};
use crate::signal;
use crate::sync::Arc;
use crate::sync::atomic::AtomicU32;
use crate::sys::{Res, zeroed};

/// The payload of a message.
pub(crate) trait Fill {
    /// Writes the payload to the memory at `to`, which has room for it.
    fn fill(self, to: *mut u8);
}

impl<F: FnOnce(*mut u8)> Fill for F {
    #[inline(always)]
    fn fill(self, to: *mut u8) {
        self(to);
    }
}

/// The sender's state of one ring.
#[derive(Debug)]
pub(crate) struct Sender {
    ring: Slots,
    /// Offset of the ring in its mapping.
    at: usize,
    slots: u32,
    /// Longest payload.
    longest: usize,
    /// Slots written so far, wrapping.
    head: u32,
    /// Slots that the receiver has consumed, as last read.
    consumed: u32,
    /// One bit for each slot whose first word was covered by payload or padding, or belongs to an
    /// earlier round in which it was not the first slot of a message.
    stale: Box<[u64]>,
    /// Number of bits of `stale` that are set.
    marked: u32,
    payloads: Payloads,
    /// The word at `HOT_AT`.
    hot: Word<AtomicU32>,
    /// The ring that this sender has left, until the receiver has left it too.
    former: Option<Former>,
}

#[derive(Clone, Copy, Debug)]
struct Former {
    at: usize,
    /// Position behind the marker.
    end: u32,
}

impl Sender {
    /// The sender of an empty ring, which lies at `at`; the caller has checked the bounds.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(map: Arc<Mapping>, at: usize, slots: u32) -> Res<Self> {
        Ok(Self {
            hot: Word::u32(&map, at + HOT_AT),
            ring: Slots::new(map, at + SLOTS_AT, slots),
            at,
            slots,
            longest: max_payload(slots),
            head: 0,
            consumed: 0,
            stale: zeroed(MAX_SLOTS.div_ceil(64) as usize)?,
            marked: 0,
            payloads: Payloads::new(),
            former: None,
        })
    }

    /// Longest payload of a message, in bytes.
    #[inline]
    pub(crate) fn max_payload(&self) -> usize {
        self.longest
    }

    /// The address of the slot of the next message.
    #[inline(always)]
    pub(crate) fn next_slot(&self) -> *mut u8 {
        self.ring.address(self.head)
    }

    /// Position behind the last message, in slots, wrapping.
    #[inline]
    pub(crate) fn sent(&self) -> u32 {
        self.head
    }

    /// Moves to an empty ring, of which the receiver knows that this sender moves there. The caller
    /// has checked its bounds. Returns false, with nothing changed, if it is this ring. Otherwise a
    /// marker is published, and the caller does the same as after a message.
    pub(crate) fn move_to(&mut self, ring: RingArea) -> bool {
        if ring.at == self.at {
            return false;
        }
        // Each message leaves one slot free. Nothing follows the marker, so no word behind it has
        // to be cleared.
        let first = u64::from(sequence(self.head)) | u64::from(MOVED) << 32;
        self.ring
            .map()
            .u64(self.ring.place(self.head))
            .store(first, Ordering::Release);
        self.head = self.head.wrapping_add(1);
        self.former = Some(Former {
            at: self.at,
            end: self.head,
        });
        (self.at, self.slots) = (ring.at, ring.slots);
        self.ring = Slots::new(Arc::clone(self.ring.map()), ring.at + SLOTS_AT, ring.slots);
        self.hot = Word::u32(self.ring.map(), ring.at + HOT_AT);
        self.longest = max_payload(ring.slots);
        self.stale.fill(0);
        self.marked = 0;
        true
    }

    /// Reads the position behind the last message that the receiver has consumed. `is_valid` checks
    /// after the read that the memory is still that of the ring; otherwise the result is the
    /// position that was read last.
    #[inline]
    pub(crate) fn delivered(&mut self, is_valid: impl FnOnce() -> bool) -> u32 {
        let last = self.consumed;
        self.look();
        if !is_valid() {
            self.consumed = last;
        }
        self.consumed
    }

    /// Publishes a message with `len` bytes of payload, at most [`Self::max_payload`]. `fill`
    /// writes the payload. Returns false, with nothing published, if there is no
    /// room.
    #[inline(always)]
    pub(crate) fn push(&mut self, words: [u64; 3], len: usize, fill: impl Fill) -> bool {
        if len <= SHORT {
            if !self.room(2) {
                return false;
            }
            self.put(words, len, 1, fill);
            return true;
        }
        self.push_many(words, len, fill)
    }

    #[inline(never)]
    fn push_many(&mut self, words: [u64; 3], len: usize, fill: impl Fill) -> bool {
        if len > self.max_payload() {
            return false;
        }
        let slots = slots_for(len);
        let to_end = self.slots - (self.head & (self.slots - 1));
        let pad = if slots > to_end { to_end } else { 0 };
        // One more slot must be free: its first word, behind the message, may have to be cleared.
        if !self.room(pad + slots + 1) {
            return false;
        }
        let pads = self.head;
        self.pass(pad);
        let at = self.ring.place(self.head) + SLOT;
        self.put(words, len, slots, fill);
        // The receiver examines the message only behind the padding, so it never finds padding
        // alone.
        if pad > 0 {
            let first = u64::from(sequence(pads)) | u64::from(PAD) << 32;
            self.ring
                .map()
                .u64(self.ring.place(pads))
                .store(first, Ordering::Release);
        }
        let next = Payload {
            at: self.ring.place(self.head) + SLOT,
            len: len.min(SLOT * self.free_in_row() as usize),
        };
        self.payloads
            .published(self.ring.map(), Payload { at, len }, next);
        true
    }

    /// Slots behind the next one that are free according to the last position that was read from
    /// the receiver, and that follow it in the mapping.
    #[inline(always)]
    fn free_in_row(&self) -> u32 {
        let used = self.used().max(self.head & (self.slots - 1));
        self.slots.saturating_sub(used).saturating_sub(1)
    }

    /// Writes and publishes a message for which there is room.
    #[inline(always)]
    fn put(&mut self, words: [u64; 3], len: usize, slots: u32, fill: impl Fill) {
        self.clear(self.head.wrapping_add(slots));
        let ([word, second, third, fourth], payload) = match slots {
            1 => self.ring.slot(self.head),
            _ => {
                let at = self.ring.place(self.head);
                let payload = self.ring.map().bytes(at + SLOT, len);
                (self.ring.slot(self.head).0, payload)
            }
        };
        if len > 0 {
            fill.fill(payload);
        }
        second.store(words[0], Ordering::Relaxed);
        third.store(words[1], Ordering::Relaxed);
        fourth.store(words[2], Ordering::Relaxed);
        let first = u64::from(sequence(self.head)) | (len as u64) << 32;
        word.store(first, Ordering::Release);
        self.pass(slots);
    }

    /// Goes behind a message or padding.
    #[inline(always)]
    fn pass(&mut self, slots: u32) {
        if slots > 1 {
            let next = self.head.wrapping_add(1) & (self.slots - 1);
            self.marked += set_bits(&mut self.stale, next, slots - 1);
        }
        self.head = self.head.wrapping_add(slots);
    }

    /// Clears the first word of the slot at `position`, which may hold payload of an earlier round.
    #[inline(always)]
    fn clear(&mut self, position: u32) {
        if self.marked == 0 {
            return;
        }
        let (word, bit) = self.stale_bit(position);
        if self.stale[word] & bit != 0 {
            self.stale[word] &= !bit;
            self.marked -= 1;
            let at = self.ring.place(position);
            self.ring.map().u64(at).store(0, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn stale_bit(&self, position: u32) -> (usize, u64) {
        let slot = position & (self.slots - 1);
        (slot as usize / 64, 1 << (slot % 64))
    }

    #[inline(always)]
    fn room(&mut self, slots: u32) -> bool {
        if self.used().saturating_add(slots) <= self.slots {
            return true;
        }
        self.look();
        self.used().saturating_add(slots) <= self.slots
    }

    /// Slots in use.
    #[inline(always)]
    fn used(&self) -> u32 {
        self.head.wrapping_sub(self.consumed)
    }

    #[inline(always)]
    fn look(&mut self) {
        self.look_at(self.at);
        if let Some(former) = self.former {
            self.look_back(former);
        }
    }

    #[inline(always)]
    fn look_at(&mut self, ring: usize) {
        let consumed = self.ring.map().u32(ring + CONSUMED_AT);
        let consumed = consumed.load(Ordering::Acquire);
        // A larger ring has an earlier position until the receiver is there too. No correct
        // receiver is ahead of `head`.
        if consumed.wrapping_sub(self.consumed) <= self.used() {
            self.consumed = consumed;
        }
    }

    /// Looks at the ring that the receiver may still be in.
    #[cold]
    fn look_back(&mut self, former: Former) {
        self.look_at(former.at);
        if self.consumed.wrapping_sub(former.end).cast_signed() >= 0 {
            self.former = None;
        }
    }

    /// Whether the receiver does not examine the ring. The caller runs a light fence between the
    /// last message and this call.
    #[inline(always)]
    pub(crate) fn is_cold(&self) -> bool {
        self.hot.load(Ordering::Relaxed) == 0
    }

    /// Asks the receiver to ring when it consumes. The caller then runs a heavy fence and looks for
    /// room or delivery once more.
    pub(crate) fn ask(&self) {
        let former = self.former.map(|former| former.at);
        for at in std::iter::once(self.at).chain(former) {
            signal::ask(self.ring.map(), at + WAITING_AT, signal::ANYBODY);
        }
    }
}
