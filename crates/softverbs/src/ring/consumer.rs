//! The receiver's side of a ring.

use std::sync::atomic::Ordering;

use super::{
    CONSUMED_AT, COOKIE_AT, HEADER, Header, MAGIC_AT, MAX_PAYLOAD, SLOTS, WAITING_AT, copy, op,
    sequence, slot_at, slots_for,
};
use crate::segment::{Mapping, layout};

/// Reads messages.
#[derive(Debug)]
pub(crate) struct Consumer {
    map: Mapping,
    /// Slots read so far, wrapping.
    tail: u32,
    /// What of it the sender was told.
    published: u32,
}

/// A message that was copied out of the ring, all but its payload.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    /// Bytes of payload in the ring.
    pub(crate) inside: usize,
    slots: u32,
}

/// The sender wrote something that no sender writes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl Consumer {
    /// Makes a ring in empty memory for the sender with this cookie.
    pub(crate) fn new(map: Mapping, cookie: u64) -> Self {
        map.u64(COOKIE_AT).store(cookie, Ordering::Relaxed);
        map.u64(MAGIC_AT)
            .store(layout::RING_MAGIC, Ordering::Release);
        Self {
            map,
            tail: 0,
            published: 0,
        }
    }

    /// Where in the ring [`Self::peek`] looks.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn place(&self) -> usize {
        slot_at(self.tail)
    }

    /// The sequence number that [`Self::peek`] waits for.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn expects(&self) -> u32 {
        sequence(self.tail)
    }

    /// Whether something is there that [`Self::peek`] would look at.
    #[inline]
    pub(crate) fn ready(&self) -> bool {
        let word = self.map.u64(slot_at(self.tail)).load(Ordering::Acquire);
        word as u32 == sequence(self.tail)
    }

    /// The next message, if there is one; it stays until [`Self::advance`].
    ///
    /// # Errors
    /// [`Broken`]: nothing more can be read from this ring.
    #[inline]
    pub(crate) fn peek(&mut self) -> Result<Option<Message>, Broken> {
        loop {
            let [first, rest @ ..] = self.map.words::<4>(slot_at(self.tail));
            let first = first.load(Ordering::Acquire);
            if first as u32 != sequence(self.tail) {
                return Ok(None);
            }
            let [second, third, fourth] = rest.map(|word| word.load(Ordering::Relaxed));
            let (header, slots) = Header::from_words([first, second, third, fourth]);
            let to_end = SLOTS - self.tail % SLOTS;
            if header.op == op::PAD {
                // None is as long as the ring, so no more than one is gone past here.
                if slots != to_end || slots == SLOTS {
                    return Err(Broken);
                }
                self.tail = self.tail.wrapping_add(slots);
                continue;
            }
            let inside = header.inside();
            if inside > MAX_PAYLOAD || slots != slots_for(inside) || slots > to_end {
                return Err(Broken);
            }
            return Ok(Some(Message {
                header,
                inside,
                slots,
            }));
        }
    }

    /// Copies `len` bytes of the payload, from `offset` on; fewer where it has fewer.
    ///
    /// # Safety
    /// `to` must be writable for `len` bytes and not lie in the ring.
    #[inline(always)]
    pub(crate) unsafe fn copy_payload(
        &self,
        message: &Message,
        offset: usize,
        to: *mut u8,
        len: usize,
    ) {
        let offset = offset.min(message.inside);
        let len = len.min(message.inside - offset);
        let from = self.map.bytes(slot_at(self.tail) + HEADER + offset, len);
        // SAFETY: the source is inside the mapping; the caller promises the destination. The
        // sender may still write there, which gives other bytes and nothing worse.
        unsafe { copy(from, to, len) };
    }

    /// Goes past the message that [`Self::peek`] gave.
    #[inline]
    pub(crate) fn advance(&mut self, message: &Message) {
        self.tail = self.tail.wrapping_add(message.slots);
    }

    /// Tells the sender how far this side came; true where it waits for that. To be followed by
    /// a check of [`Self::sender_waits`] behind a fence.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if self.published == self.tail {
            return false;
        }
        self.published = self.tail;
        self.map
            .u32(CONSUMED_AT)
            .store(self.tail, Ordering::Release);
        true
    }

    /// Whether the sender asked to be rung since the last call.
    #[inline]
    pub(crate) fn sender_waits(&self) -> bool {
        let waiting = self.map.u32(WAITING_AT);
        waiting.load(Ordering::Relaxed) != 0 && waiting.swap(0, Ordering::Relaxed) != 0
    }
}
