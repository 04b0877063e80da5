//! The word in which a sending queue pair names the receiver into whose ring it writes.
//!
//! The sender stores the word, runs a light fence, and checks the receiver's state word. The
//! receiver changes its state word, runs a heavy fence, and reads the sender's word. So the receiver
//! finds each sender that may still write, or the sender finds the changed state.

use std::sync::atomic::Ordering;

use crate::segment::Mapping;
use crate::segment::layout::{StateWord, qp as layout};
use crate::sync::light_fence;

/// The word of a sending queue pair, which names a receiver until this is dropped.
pub(crate) struct Usage<'a> {
    own: &'a Mapping,
    at: usize,
}

impl<'a> Usage<'a> {
    /// Names the receiver with this state word in the own queue pair's entry at `at`. The caller
    /// then checks that the receiver's state word is unchanged. `barriers`: the receiver's process
    /// runs barriers.
    #[inline(always)]
    pub(crate) fn begin(own: &'a Mapping, at: usize, word: StateWord, barriers: bool) -> Self {
        let at = at + layout::RING_USE;
        own.u64(at).store(word.0, Ordering::Relaxed);
        light_fence(barriers);
        Self { own, at }
    }
}

impl Drop for Usage<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.own.u64(self.at).store(0, Ordering::Release);
    }
}

/// Whether the queue pair whose entry is at `at` writes into the ring of a receiver of this
/// incarnation. The receiver has changed its state word and run a heavy fence.
pub(crate) fn is_writing(map: &Mapping, at: usize, incarnation: u32) -> bool {
    let word = StateWord(map.u64(at + layout::RING_USE).load(Ordering::Acquire));
    word.0 != 0 && word.incarnation() == incarnation
}

/// The receiver's state word, whose entry is at `at`.
#[inline(always)]
pub(crate) fn state(map: &Mapping, at: usize) -> StateWord {
    StateWord(map.u64(at + layout::STATE).load(Ordering::Acquire))
}
