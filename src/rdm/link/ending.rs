//! The end of a link: which of its completions were polled.

use std::time::Instant;

/// Completions that were polled, and polls that have found the device queue empty; both wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rdm) struct Polled {
    completions: u64,
    empty: u64,
}

impl Polled {
    /// So many completions were polled; `empty`: there were no more.
    #[inline(always)]
    pub(in crate::rdm) fn note(&mut self, completions: usize, empty: bool) {
        self.completions = self.completions.wrapping_add(completions as u64);
        self.empty = self.empty.wrapping_add(empty.into());
    }

    /// Whether all completions that were in the queue, of this size, at an earlier time were
    /// polled.
    pub(in crate::rdm) fn covers(self, earlier: Self, cqe: usize) -> bool {
        let polled = self.completions.wrapping_sub(earlier.completions);
        self.empty != earlier.empty || polled >= cqe as u64
    }
}

/// The end of a link.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Ending {
    /// When the wait for the completions began; `None`: the queue pair may still be in use.
    pub(in crate::rdm) since: Option<Instant>,
    /// All requests of the send queue have completed.
    pub(in crate::rdm) sends: bool,
    /// No receive is consumed any more.
    pub(in crate::rdm) receives: bool,
    /// What had been polled when the link was first found to have ended but for completions in the
    /// device queue.
    pub(in crate::rdm) drained: Option<Polled>,
}
