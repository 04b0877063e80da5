//! Actions towards peers that have failed for a passing reason, see [`crate::repeat`].

use std::sync::atomic::Ordering;

use super::Process;
use crate::peer::Peer;
use crate::qp::Qp;
use crate::segment::layout::MAX_PROCESSES;
use crate::signal;
use crate::sys::{self, Errno};

impl Process {
    /// Requests that the process in `slot`, which is not this one, checks the states of its queue
    /// pairs. If the process cannot be opened now, the call is repeated.
    #[cold]
    pub(crate) fn call_process(&self, slot: u32) {
        self.with_process(slot, Peer::call_attention);
    }

    /// Wakes the process in `slot`, if it may sleep. If the process cannot be opened now, the
    /// repetition is a call as in [`Self::call_process`].
    #[cold]
    pub(crate) fn wake_process(&self, slot: u32) {
        self.with_process(slot, Peer::ring_process);
    }

    fn with_process(&self, slot: u32, call: impl FnOnce(&Peer)) {
        let began = sys::now_ns();
        match self.peer(slot) {
            Ok(peer) => call(&peer),
            Err(error) if self.repeats.may_pass(error) => self.repeat_call(slot, began),
            // The process has ended. A queue pair that waits for it as the holder of its target
            // looks for another one.
            Err(_) if self.qps.iter().any(Qp::lacks_holder) => {
                signal::call_attention(&self.segment.map);
                self.doorbell.ring();
            }
            Err(_) => {}
        }
    }

    /// Requests the same as [`Self::call_process`], but at the next repetition.
    #[cold]
    pub(crate) fn call_later(&self, slot: u32) {
        self.repeat_call(slot, sys::now_ns());
    }

    /// Whether a process that could not be opened with this error may be opened later.
    pub(crate) fn may_open_later(&self, error: Errno) -> bool {
        self.repeats.may_pass(error)
    }

    /// Whether a repetition opens the process in `slot`.
    pub(crate) fn is_called_later(&self, slot: u32) -> bool {
        let word = self.uncalled.get(slot as usize / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (slot % 64) & 1 == 1)
    }

    fn repeat_call(&self, slot: u32, began: u64) {
        // A neighbour may have written any slot.
        if let Some(word) = self.uncalled.get(slot as usize / 64) {
            let bit = 1 << (slot % 64);
            if word.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                self.repeats.add(began);
            }
        }
    }

    /// Repeats the actions whose time has come. The caller holds no lock.
    #[inline]
    pub(super) fn repeat_failed(&self) {
        if self.repeats.begin_round() {
            self.repeat_all();
            self.repeats.end_round();
        }
    }

    #[cold]
    fn repeat_all(&self) {
        let mut unrung = [0_u64; MAX_PROCESSES / 64];
        for (&slot, peer) in self.peers().iter() {
            if peer.has_unrung()
                && let Some(word) = unrung.get_mut(slot as usize / 64)
            {
                *word |= 1 << (slot % 64);
            }
        }
        for slot in bits(unrung) {
            if let Some(peer) = self.mapped_peer(slot) {
                peer.ring_again();
            }
        }
        let uncalled = self.uncalled.each_ref();
        for slot in bits(uncalled.map(|word| word.swap(0, Ordering::AcqRel))) {
            self.call_process(slot);
        }
        self.grant_rings();
    }
}

/// The numbers of the bits that are set.
fn bits<const N: usize>(words: [u64; N]) -> impl Iterator<Item = u32> {
    (0..).zip(words).flat_map(|(at, word)| {
        (0..64)
            .filter(move |bit| word >> bit & 1 == 1)
            .map(move |bit| 64 * at + bit)
    })
}
