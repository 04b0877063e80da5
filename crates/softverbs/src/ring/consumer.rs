//! The receiver's side of a ring.

use std::sync::atomic::Ordering;

use super::{
    CONSUMED_AT, COOKIE_AT, HEADER, Header, MAGIC_AT, MAX_PAYLOAD, SLOTS, WAITING_AT, copy, op,
    sequence, slot_at, slots_for,
};
use crate::segment::{Mapping, layout};

/// The receiver's state of one ring.
#[derive(Debug)]
pub(crate) struct Consumer {
    map: Mapping,
    /// Slots consumed so far, wrapping.
    tail: u32,
    /// The value of `tail` that was last published to the sender.
    published: u32,
}

/// The header of a message, copied out of the ring. The payload is still in the ring.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    /// Bytes of payload in the ring.
    pub(crate) inside: usize,
    slots: u32,
}

/// The ring holds a header that no correct sender writes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl Consumer {
    /// Initialises a ring in zeroed memory for the sender with this cookie.
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

    /// Offset in the ring of the word that [`Self::peek`] reads.
    #[inline]
    pub(crate) fn place(&self) -> usize {
        slot_at(self.tail)
    }

    /// The sequence number that [`Self::peek`] waits for.
    #[inline]
    pub(crate) fn expects(&self) -> u32 {
        sequence(self.tail)
    }

    /// Whether the slot at `tail` holds a published message or padding.
    #[inline]
    pub(crate) fn ready(&self) -> bool {
        let word = self.map.u64(slot_at(self.tail)).load(Ordering::Acquire);
        word as u32 == sequence(self.tail)
    }

    /// Returns the next message, if one is published. The message stays in the ring until
    /// [`Self::advance`].
    ///
    /// # Errors
    /// [`Broken`]: the ring holds an invalid header; the caller must not read from this ring again.
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
                // A pad is shorter than the ring, so one call skips at most one pad.
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

    /// Copies `len` bytes of the payload, starting at `offset`; fewer if the payload ends earlier.
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
        // SAFETY: `Mapping::bytes` checks the source; the caller promises the destination. The
        // sender may still write the source, which changes only the bytes that are copied.
        unsafe { copy(from, to, len) };
    }

    /// `len` bytes of the payload from `offset` on, fewer if it ends earlier: the address and the
    /// number. The sender may change the bytes at any time.
    pub(crate) fn payload(&self, message: &Message, offset: usize, len: usize) -> (*mut u8, usize) {
        let offset = offset.min(message.inside);
        let len = len.min(message.inside - offset);
        let from = self.map.bytes(slot_at(self.tail) + HEADER + offset, len);
        (from, len)
    }

    /// Consumes the message that [`Self::peek`] returned.
    #[inline]
    pub(crate) fn advance(&mut self, message: &Message) {
        self.tail = self.tail.wrapping_add(message.slots);
    }

    /// Publishes `tail` to the sender; returns true if it has changed. In that case the caller runs
    /// a fence and then checks [`Self::sender_waits`].
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

    /// Whether the sender has requested a ring of its doorbell since the last call.
    #[inline]
    pub(crate) fn sender_waits(&self) -> bool {
        let waiting = self.map.u32(WAITING_AT);
        waiting.load(Ordering::Relaxed) != 0 && waiting.swap(0, Ordering::Relaxed) != 0
    }
}
