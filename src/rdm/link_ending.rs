//! The end of a link: which of its completions were polled.

use std::time::Instant;

/// Completions that were polled, and polls that have found the device queue empty; both wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Polled {
    completions: u64,
    empty: u64,
}

impl Polled {
    /// So many completions were polled; `empty`: there were no more.
    #[inline(always)]
    pub(super) fn note(&mut self, completions: usize, empty: bool) {
        self.completions = self.completions.wrapping_add(completions as u64);
        self.empty = self.empty.wrapping_add(empty.into());
    }

    /// Whether all completions that were in the queue, of this size, at an earlier time were
    /// polled.
    pub(super) fn covers(self, earlier: Self, cqe: usize) -> bool {
        let polled = self.completions.wrapping_sub(earlier.completions);
        self.empty != earlier.empty || polled >= cqe as u64
    }
}

/// The end of a link.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// When the wait for the completions began; `None`: the queue pair may still be in use.
    pub(super) since: Option<Instant>,
    /// All requests of the send queue have completed.
    pub(super) sends: bool,
    /// No receive is consumed any more.
    pub(super) receives: bool,
    /// What had been polled when the link was first found to have ended but for completions in the
    /// device queue.
    pub(super) drained: Option<Polled>,
}
