//! The receiver's side of a receive ring.

use super::{
    CONSUMED_AT, HOT_AT, MOVED, PAD, RingArea, WAITING_AT, max_payload, payload_at, sequence,
    slot_at, slots_for,
};
use crate::segment::Mapping;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::{Arc, heavy_fence};

/// The receiver's state of one ring.
#[derive(Debug)]
pub(crate) struct Receiver {
    map: Arc<Mapping>,
    /// Offset of the ring in `map`.
    at: usize,
    slots: u32,
    /// Longest payload.
    longest: usize,
    /// Slots consumed so far, wrapping.
    tail: u32,
    /// As published.
    hot: bool,
    /// A larger ring, to which the sender has not moved yet.
    larger: Option<RingArea>,
    /// Offset of the ring from which the receiver has followed the sender.
    former: Option<usize>,
}

/// A message. Its header was copied out of the ring; its payload is still there.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) words: [u64; 3],
    pub(crate) payload: *const u8,
    /// Bytes of the payload.
    pub(crate) len: usize,
    slots: u32,
}

/// Why a ring that is not empty has no message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The ring holds a header that no correct sender writes. The caller must not read from this
    /// ring again.
    Broken,
    /// The sender has moved to the [larger](Receiver::offer) ring, and so has the receiver. The
    /// caller runs a light fence, checks [`Receiver::moved_sender_waits`] and looks again.
    Moved,
}

impl Receiver {
    /// The receiver of the ring at `at`, which it empties. No sender knows the ring yet.
    pub(crate) fn new(map: Arc<Mapping>, at: usize, slots: u32) -> Self {
        let mut this = Self {
            map,
            at,
            slots,
            longest: max_payload(slots),
            tail: 0,
            hot: false,
            larger: None,
            former: None,
        };
        this.clear();
        this
    }

    /// Empties the ring for another sender. No sender writes into it any more. That sender begins
    /// in the larger ring, if there is one.
    pub(crate) fn clear(&mut self) {
        if let Some(larger) = self.larger.take() {
            self.enter(larger);
        }
        self.former = None;
        (self.tail, self.hot) = (0, false);
        // A sender of an earlier ring in this memory reads `CONSUMED`, and then finds that its
        // connection has ended.
        fence(Ordering::Release);
        self.prepare(self.area());
    }

    /// Fills the memory of an empty ring, to which no sender has moved yet.
    fn prepare(&self, ring: RingArea) {
        for position in 0..ring.slots {
            let at = ring.at + slot_at(position, ring.slots);
            self.map.u64(at).store(0, Ordering::Relaxed);
        }
        let word = |word| self.map.u32(ring.at + word);
        word(CONSUMED_AT).store(self.tail, Ordering::Relaxed);
        word(HOT_AT).store(u32::from(self.hot), Ordering::Relaxed);
        word(WAITING_AT).store(0, Ordering::Relaxed);
    }

    /// The ring that is read.
    pub(crate) fn area(&self) -> RingArea {
        let (at, slots) = (self.at, self.slots);
        RingArea { at, slots }
    }

    /// Longest payload that can arrive.
    pub(crate) fn max_payload(&self) -> usize {
        let slots = self.larger.map_or(self.slots, |larger| larger.slots);
        max_payload(slots)
    }

    /// Prepares a larger ring, and names it to the sender by `show`, a store with release. The
    /// sender moves there between two messages.
    pub(crate) fn offer(&mut self, larger: RingArea, show: impl FnOnce()) {
        fence(Ordering::Release);
        self.prepare(larger);
        self.larger = Some(larger);
        show();
    }

    fn enter(&mut self, ring: RingArea) {
        (self.at, self.slots) = (ring.at, ring.slots);
        self.longest = max_payload(ring.slots);
    }

    /// Offset in the mapping of the word that [`Self::peek`] reads.
    #[inline(always)]
    pub(crate) fn next_at(&self) -> usize {
        self.at + slot_at(self.tail, self.slots)
    }

    /// The address of that word.
    #[inline(always)]
    pub(crate) fn next(&self) -> *const u32 {
        self.map.bytes(self.next_at(), 4).cast()
    }

    /// The lower half of that word, if the ring is not empty.
    #[inline(always)]
    pub(crate) fn expected(&self) -> u32 {
        self.expected_behind(0)
    }

    /// As [`Self::expected`], `slots` slots later.
    #[inline(always)]
    pub(crate) fn expected_behind(&self, slots: u32) -> u32 {
        sequence(self.tail.wrapping_add(slots))
    }

    /// Whether the ring holds a message or padding.
    #[inline(always)]
    pub(crate) fn ready(&self) -> bool {
        let first = self.map.u64(self.next_at()).load(Ordering::Acquire);
        first as u32 == self.expected()
    }

    /// The next message, if one is published. It stays in the ring until [`Self::advance_by`].
    ///
    /// # Errors
    /// See [`Stop`].
    #[inline(always)]
    pub(crate) fn peek(&mut self) -> Result<Option<Message>, Stop> {
        let at = self.next_at();
        let first = self.map.u64(at).load(Ordering::Acquire);
        if first as u32 != self.expected() {
            return Ok(None);
        }
        let len = (first >> 32) as usize;
        if len > self.longest {
            return self.skip(first);
        }
        self.message(at, len).map(Some)
    }

    /// The message at `at`, whose length is at most the longest.
    #[inline(always)]
    fn message(&self, at: usize, len: usize) -> Result<Message, Stop> {
        let slots = slots_for(len);
        if slots > self.to_end() {
            return Err(Stop::Broken);
        }
        let [_, second, third, fourth] = self.map.words::<4>(at);
        Ok(Message {
            words: [second, third, fourth].map(|word| word.load(Ordering::Relaxed)),
            payload: self.map.bytes(at + payload_at(len), len),
            len,
            slots,
        })
    }

    /// Skips padding, which is shorter than the ring, or follows the sender to the larger ring. The
    /// sender publishes the message behind padding first.
    #[cold]
    fn skip(&mut self, first: u64) -> Result<Option<Message>, Stop> {
        if (first >> 32) as u32 == MOVED {
            return Err(self.follow());
        }
        let pad = self.to_end();
        // no correct sender needs more padding than the longest message has slots
        if (first >> 32) as u32 != PAD || pad >= self.slots / 2 {
            return Err(Stop::Broken);
        }
        let position = self.tail.wrapping_add(pad);
        let at = self.at + slot_at(position, self.slots);
        let first = self.map.u64(at).load(Ordering::Acquire);
        if first as u32 != sequence(position) {
            return Err(Stop::Broken);
        }
        let len = (first >> 32) as usize;
        if len > self.longest {
            return Err(Stop::Broken);
        }
        self.tail = position;
        self.message(at, len).map(Some)
    }

    /// The sender has written no further message into this ring.
    fn follow(&mut self) -> Stop {
        let Some(larger) = self.larger.take() else {
            return Stop::Broken;
        };
        self.former = Some(self.at);
        self.enter(larger);
        // the marker used a slot of the former ring
        self.advance_by(1);
        Stop::Moved
    }

    /// Longest payload of a message in the ring that is read.
    #[inline(always)]
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Slots from the next message to the end of the ring.
    #[inline(always)]
    pub(crate) fn to_end(&self) -> u32 {
        self.slots - (self.tail & (self.slots - 1))
    }

    /// Consumes the message that [`Self::peek`] returned.
    #[cfg(test)]
    pub(crate) fn advance(&mut self, message: &Message) {
        self.advance_by(message.slots);
    }

    /// Consumes a message of this number of slots and publishes the position. The caller runs a
    /// light fence and then checks [`Self::sender_waits`].
    #[inline(always)]
    pub(crate) fn advance_by(&mut self, slots: u32) {
        self.tail = self.tail.wrapping_add(slots);
        let consumed = self.map.u32(self.at + CONSUMED_AT);
        consumed.store(self.tail, Ordering::Release);
    }

    /// As [`is_awaited`], after a consume.
    #[inline(always)]
    pub(crate) fn sender_waits(&self) -> bool {
        is_awaited(&self.map, self.at + WAITING_AT)
    }

    /// As [`is_awaited`], after [`Stop::Moved`], for both rings: the sender may have asked before
    /// it moved.
    pub(crate) fn moved_sender_waits(&self) -> bool {
        let former = self.former;
        let before = former.is_some_and(|at| is_awaited(&self.map, at + WAITING_AT));
        self.sender_waits() || before
    }

    /// Publishes whether the receiver examines the ring without a noted arrival. Returns whether
    /// the ring holds a message; after a call with false, arrivals of all later messages are noted.
    pub(crate) fn set_hot(&mut self, hot: bool) -> bool {
        self.hot = hot;
        let larger = self.larger.map(|larger| larger.at);
        for at in std::iter::once(self.at).chain(larger) {
            let word = self.map.u32(at + HOT_AT);
            word.store(u32::from(hot), Ordering::Relaxed);
        }
        if !hot {
            heavy_fence();
        }
        self.ready()
    }
}

/// Whether the sender into a ring waits for a change since the last call; the word for that is at
/// `at`. The caller runs a light fence between the change and this call, and then wakes the sender.
#[inline(always)]
pub(crate) fn is_awaited(map: &Mapping, at: usize) -> bool {
    let waiting = map.u32(at);
    waiting.load(Ordering::Relaxed) != 0 && waiting.swap(0, Ordering::AcqRel) != 0
}

impl Message {
    /// Number of slots of the message.
    #[inline(always)]
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }
}
