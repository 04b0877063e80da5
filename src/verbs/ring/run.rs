//! Messages that are read in a ring without calls of the device.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rdma_core_sys as sys;

use super::{Message, RingProbe};

/// Bytes of a slot and of a message's header (`docs/softverbs-ring.md`, "A message").
pub(super) const SLOT: usize = 64;
pub(super) const HEADER: usize = 32;

/// How many slots [`Run::prefetch`] reads ahead.
const AHEAD: u32 = 4;

/// Result of [`Run::peek`].
#[derive(Clone, Copy, Debug)]
pub enum Next {
    /// The next message.
    Message(Message),
    /// No message.
    Empty,
    /// [`Ring::poll`](super::Ring::poll) has to be called, after [`Run::leave`] if the run has
    /// taken messages: the ring begins again here, or has ended, or its content is invalid.
    Other,
}

/// A position in a ring up to which messages were read in place ([`RingProbe::run`]). A copy: it
/// does not borrow the ring, so that the caller can send while it reads. The messages that it has
/// taken stay where they are until their room is given back.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    raw: NonNull<sys::softdv_ring>,
    /// The next message, if the lower half of its first word is `expected`.
    next: *const u8,
    expected: u32,
    /// Slots from `next` to the end of the ring.
    left: u32,
    /// Longest payload in bytes.
    longest: u32,
    /// Slots of the messages that were taken.
    slots: u32,
}

impl RingProbe {
    /// The messages at the place of the next one, read without calls of the device.
    ///
    /// # Safety
    /// As [`Self::is_ready`], until the run is dropped.
    #[inline(always)]
    pub unsafe fn run(self) -> Run {
        // SAFETY: live, by the caller's promise.
        let ring = unsafe { self.0.as_ref() };
        Run {
            raw: self.0,
            next: ring.next.cast(),
            expected: ring.expected,
            left: ring.left,
            longest: ring.longest,
            slots: 0,
        }
    }
}

impl Run {
    /// The next message, if it can be read here. Its header is copied once, and it lies inside the
    /// ring, whatever a hostile neighbour writes.
    ///
    /// # Safety
    /// The ring of the run lives, no other call has taken messages or room since, and this is not a
    /// forked child of the process that created the ring.
    #[inline(always)]
    pub unsafe fn peek(&self) -> Next {
        if self.left == 0 {
            return Next::Other;
        }
        // SAFETY: a slot of the ring, which is mapped and accessed by atomics only.
        let word = |at: usize| unsafe {
            AtomicU64::from_ptr(self.next.wrapping_add(at).cast_mut().cast::<u64>())
        };
        let first = word(0).load(Ordering::Acquire);
        if first as u32 != self.expected {
            return Next::Empty;
        }
        let length = (first >> 32) as u32;
        // padding is longer
        if length > self.longest || slots(length) > self.left {
            return Next::Other;
        }
        let words = [8, 16, 24].map(|at| word(at).load(Ordering::Relaxed));
        Next::Message(Message {
            raw: sys::softdv_ring_message {
                words,
                payload: self.next.wrapping_add(payload_at(length)).cast(),
                length,
            },
        })
    }

    /// Takes the message that [`Self::peek`] has just returned.
    #[inline(always)]
    pub fn take(&mut self, message: &Message) {
        let slots = slots(message.raw.length);
        self.next = self.next.wrapping_add(SLOT * slots as usize);
        // the position counts slots, and is in the upper 31 bits
        self.expected = self.expected.wrapping_add(slots << 1);
        self.left = self.left.saturating_sub(slots);
        self.slots += slots;
    }

    /// Has the processor read the slots that the next messages will have, if there are so many.
    #[inline(always)]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        if self.left > AHEAD {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let slot = self.next.wrapping_add(SLOT * AHEAD as usize);
            // SAFETY: it is a hint, valid for any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(slot.cast()) };
        }
    }

    /// Has the processor read the slot of the next message.
    #[inline(always)]
    pub fn prefetch_next(&self) {
        #[cfg(target_arch = "x86_64")]
        if self.left != 0 {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: it is a hint, valid for any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.next.cast()) };
        }
    }

    /// Ends the run: the messages that it has taken are not the next ones any more. Returns the
    /// number of slots of all messages that were taken and whose room was not given back; the
    /// caller calls [`Ring::give_back`](super::Ring::give_back) with 0 before it sleeps, and before
    /// the sender lacks the room.
    ///
    /// # Errors
    /// The next message is at the begin of the ring: the caller calls
    /// [`Ring::give_back`](super::Ring::give_back) with this number of slots at once.
    ///
    /// # Safety
    /// As [`Self::peek`].
    #[inline(always)]
    pub unsafe fn leave(self) -> Result<u32, u32> {
        if self.left == 0 {
            return Err(self.slots);
        }
        // SAFETY: live, and nothing else accesses it, by the caller's promise.
        let ring = unsafe { &mut *self.raw.as_ptr() };
        ring.next = self.next.cast();
        ring.expected = self.expected;
        ring.left = self.left;
        ring.ahead = ring.ahead.wrapping_add(self.slots);
        Ok(ring.ahead)
    }

    /// Slots of the messages that were taken.
    #[inline(always)]
    pub fn taken(&self) -> u32 {
        self.slots
    }
}

/// Number of slots of a message.
#[inline(always)]
const fn slots(length: u32) -> u32 {
    match payload_at(length) {
        SLOT => 1 + length.div_ceil(SLOT as u32),
        _ => 1,
    }
}

/// Offset in a message of its payload.
#[inline(always)]
const fn payload_at(length: u32) -> usize {
    if length as usize <= SLOT - HEADER {
        HEADER
    } else {
        SLOT
    }
}
