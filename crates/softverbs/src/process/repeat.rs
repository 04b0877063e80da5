//! Actions towards peers that have failed for a passing reason, see [`crate::repeat`].

use std::sync::atomic::{AtomicU64, Ordering};

use super::{AgentLink, Process};
use crate::peer::Peer;
use crate::qp::Qp;
use crate::segment::layout::MAX_PROCESSES;
use crate::signal;
use crate::sync::Arc;
use crate::sys::{self, Errno, Res};

impl Process {
    /// Calls the process in `slot`, which is not this one, for attention. If the process cannot be
    /// opened now, the call is repeated.
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
            Err(error) if self.repeats.may_pass(error) => {
                self.repeat(&self.uncalled, slot, began);
            }
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
        self.call_later_than(slot, sys::now_ns());
    }

    /// As [`Self::call_later`], after a try that began at the time `began`, in nanoseconds of the
    /// monotonic clock: the longer it took, the later is the repetition.
    #[cold]
    pub(crate) fn call_later_than(&self, slot: u32, began: u64) {
        self.repeat(&self.uncalled, slot, began);
    }

    /// Whether a process that could not be opened with this error may be opened later.
    pub(crate) fn may_open_later(&self, error: Errno) -> bool {
        self.repeats.may_pass(error)
    }

    /// Whether a repetition opens the process in `slot`, now or later.
    pub(crate) fn is_called_later(&self, slot: u32) -> bool {
        let has = |list: &[AtomicU64]| {
            let word = list.get(slot as usize / 64);
            word.is_some_and(|word| word.load(Ordering::Acquire) >> (slot % 64) & 1 == 1)
        };
        // in this order: a repetition enters a process in `calling` before it removes it elsewhere
        has(&self.uncalled) || has(&self.calling)
    }

    /// Opens the process in `slot`. The caller may hold locks of a queue, or is not to wait. So a
    /// process that a repetition opens, now or later, is left to it: opening a process that is
    /// stopped takes 2 s if only its agent can open its files.
    ///
    /// # Errors
    /// `EAGAIN`: a repetition opens it. Others as [`Self::peer`]; the caller then calls
    /// [`Self::call_later`] if [`Self::may_open_later`].
    pub(crate) fn open_now(&self, slot: u32) -> Res<Arc<Peer>> {
        if !self.is_called_later(slot) {
            return self.peer(slot);
        }
        // looks at once, as `Self::peer`
        let living = self.mapped_peer(slot).filter(|peer| !peer.has_ended());
        living.ok_or(Errno(libc::EAGAIN))
    }

    /// As [`Self::open_now`]; a repetition opens a process that cannot be opened now. `None`: it
    /// cannot.
    pub(crate) fn open_now_or_later(&self, slot: u32) -> Option<Arc<Peer>> {
        let opened = self.open_now(slot);
        if opened
            .as_ref()
            .is_err_and(|&error| self.may_open_later(error))
        {
            self.call_later(slot);
        }
        opened.ok()
    }

    /// Asks the agent of a peer to make progress for its process. If there is no descriptor or
    /// memory for that now, or the agent's queue of connections is full, it is repeated: the peer
    /// may sleep, and nothing else reminds it. The caller may hold locks of a queue.
    #[cold]
    pub(crate) fn ask_to_go_on(&self, peer: &Arc<Peer>) {
        let began = sys::now_ns();
        let asked = match self.link_to(peer) {
            Ok(AgentLink::Open(link)) => link.ask_to_go_on(),
            Ok(AgentLink::Unopened) => false,
            // it makes progress when it starts its agent; or it has ended
            Ok(AgentLink::Requested) | Err(_) => true,
        };
        if !asked {
            self.repeat(&self.unasked, peer.slot, began);
        }
    }

    /// Enters an action towards the process in `slot` in its list, for the next repetition.
    fn repeat(&self, list: &[AtomicU64], slot: u32, began: u64) {
        // A neighbour may have written any slot.
        if let Some(word) = list.get(slot as usize / 64) {
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
        for slot in bits(
            self.uncalled
                .each_ref()
                .map(|word| word.load(Ordering::Acquire)),
        ) {
            // Other threads find the process in one of the two lists until it was called.
            let (at, bit) = (slot as usize / 64, 1 << (slot % 64));
            self.calling[at].fetch_or(bit, Ordering::AcqRel);
            if self.uncalled[at].fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
                self.call_process(slot);
            }
            self.calling[at].fetch_and(!bit, Ordering::AcqRel);
        }
        // In this round, so that a failure is followed by a longer pause.
        for qp in self.qps.iter() {
            qp.find_domain_again();
        }
        let unasked = self.unasked.each_ref();
        for slot in bits(unasked.map(|word| word.swap(0, Ordering::AcqRel))) {
            if let Some(peer) = self.mapped_peer(slot) {
                self.ask_to_go_on(&peer);
            }
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
