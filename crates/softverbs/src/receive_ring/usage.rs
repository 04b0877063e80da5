//! Proof that a sender writes only into the ring of the connected receiver, and the wake-up of the
//! receiver.
//!
//! A sender names the receiver in a word of its own queue pair ([`Usage`]), runs a light fence, and
//! checks the receiver's state word. A receiver that stops to receive changes its state word, runs
//! a heavy fence, and reads the sender's word. So the receiver finds each sender that may still
//! write, or the sender finds the changed state.
//!
//! When the sender has cleared its word, it runs a light fence and reads the receiver's state word
//! and `ARMED` once more. A receiver that waits for the word to be cleared arms its completion
//! queue, runs a heavy fence, and reads the word again before it sleeps. So the receiver finds the
//! word cleared, or the sender wakes it.

use super::Sender;
use crate::segment::layout::{StateWord, qp as layout, receives};
use crate::segment::{Mapping, Word};
use crate::signal;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{heavy_fence, known_light_fence};

/// The value by which a sender names a receiver: the number of its queue pair (24 bits) and the
/// incarnation (24 bits). Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UseWord(u64);

impl UseWord {
    /// The receiver with this number, in this incarnation.
    pub(crate) const fn new(receiver: u32, incarnation: u32) -> Self {
        Self(1 << 63 | (receiver as u64) << 32 | incarnation as u64)
    }
}

/// The word of a sending queue pair, which names a receiver until this is dropped.
#[derive(Debug)]
pub(crate) struct Usage<'a> {
    own: &'a AtomicU64,
}

impl Drop for Usage<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.own.store(0, Ordering::Release);
    }
}

/// The receiver of a ring, from the sender's side.
#[derive(Debug)]
pub(crate) struct Destination {
    /// Its state word.
    pub(crate) state: Word<AtomicU64>,
    /// The state word when it was last read.
    pub(crate) word: StateWord,
    pub(crate) used: UseWord,
    /// Offset of the entry of its completion queue for messages, and `ARMED` of that entry.
    pub(crate) cq_at: usize,
    pub(crate) armed: Word<AtomicU32>,
    /// Light fences towards its process are compiler fences ([`crate::sync::are_light`]).
    pub(crate) light: bool,
}

impl Destination {
    /// Names the receiver in `own`, the word of the sending queue pair. `None`: the connection has
    /// ended. `ring` rings the doorbell of the completion queue whose entry is at the offset.
    #[inline(always)]
    pub(crate) fn begin<'a>(
        &mut self,
        own: &'a AtomicU64,
        ring: impl FnOnce(usize),
    ) -> Option<Usage<'a>> {
        own.store(self.used.0, Ordering::Relaxed);
        known_light_fence(self.light);
        let usage = Usage { own };
        if self.is_connected() {
            return Some(usage);
        }
        self.release(usage, ring);
        None
    }

    /// Ends the usage after a message, and wakes the receiver if it waits. Returns false if the
    /// connection has ended: then the receiver may have taken the message or not.
    #[inline(always)]
    pub(crate) fn end(
        &mut self,
        usage: Usage<'_>,
        solicited: bool,
        ring: impl FnOnce(usize),
    ) -> bool {
        drop(usage);
        known_light_fence(self.light);
        let connected = self.is_connected();
        if signal::takes_notice_of(&self.armed, solicited || !connected) {
            ring(self.cq_at);
        }
        connected
    }

    /// Ends the usage without a message. Returns false if the connection has ended.
    #[inline(always)]
    pub(crate) fn release(&mut self, usage: Usage<'_>, ring: impl FnOnce(usize)) -> bool {
        drop(usage);
        known_light_fence(self.light);
        let connected = self.is_connected();
        // The receiver may wait for the end of the usage.
        if !connected && signal::takes_notice_of(&self.armed, true) {
            ring(self.cq_at);
        }
        connected
    }

    /// Asks the receiver for a wake-up at its next consume. Returns false if the connection has
    /// ended. Otherwise the caller looks for room or delivery once more.
    pub(crate) fn ask(&mut self, own: &AtomicU64, sender: &Sender, ring: impl Fn(usize)) -> bool {
        let Some(usage) = self.begin(own, &ring) else {
            return false;
        };
        sender.ask();
        // The receiver finds the request, or `release` finds that the connection has ended.
        heavy_fence();
        self.release(usage, ring)
    }

    /// Whether words that the caller has read from the ring were words of this ring: the memory of
    /// a ring is used again only after the state word has changed.
    pub(crate) fn was_connected(&mut self) -> bool {
        fence(Ordering::Acquire);
        self.is_connected()
    }

    /// Whether the receiver is still the connected one and takes messages.
    #[inline(always)]
    fn is_connected(&mut self) -> bool {
        let word = StateWord(self.state.load(Ordering::Acquire));
        word == self.word || self.is_still_connected(word)
    }

    #[cold]
    fn is_still_connected(&mut self, word: StateWord) -> bool {
        let still = word.incarnation() == self.word.incarnation()
            && word.dest() == self.word.dest()
            && receives(word.state());
        if still {
            self.word = word;
        }
        still
    }
}

/// Whether the queue pair whose entry is at `at` names this receiver. The receiver has changed its
/// state word and run a heavy fence.
pub(crate) fn is_writing(map: &Mapping, at: usize, receiver: UseWord) -> bool {
    map.u64(at + layout::RING_USE).load(Ordering::Acquire) == receiver.0
}
