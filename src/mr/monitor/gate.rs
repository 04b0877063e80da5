//! The gate: whether cached registrations may be used. One word for the process.
//!
//! The word is in a page that a forked child gets zeroed (`MADV_WIPEONFORK`). Zero means closed.

#![allow(unsafe_code, reason = "a page that is wiped in forked children")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The word while no thread closes the gate; each closing thread adds 1.
const OPEN: u64 = 1 << 32;

/// The word of the gate, which lives as long as the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate(&'static AtomicU64);

impl Gate {
    /// The gate of the process; `None` if there are no such pages: no memory, Linux before 4.14, or
    /// an emulation that does not wipe them.
    pub(crate) fn get() -> Option<Self> {
        static GATE: OnceLock<Option<Gate>> = OnceLock::new();
        *GATE.get_or_init(Self::make)
    }

    fn make() -> Option<Self> {
        let page = forks::wiped_page()?.cast::<AtomicU64>();
        // SAFETY: a page of zeros, which is never unmapped and only referenced here; its start is
        // aligned.
        let word: &'static AtomicU64 = unsafe { page.as_ref() };
        word.store(OPEN, Ordering::Release);
        Some(Self(word))
    }

    /// Whether cached registrations may be used. If it is open, the caller sees all invalidations
    /// that were made before it opened (`Acquire`).
    #[inline]
    pub(crate) fn is_open(self) -> bool {
        self.0.load(Ordering::Acquire) == OPEN
    }

    /// Whether this process is a forked child of the process that made the gate.
    pub(crate) fn is_forked(self) -> bool {
        self.0.load(Ordering::Relaxed) < OPEN
    }

    /// Closes the gate: a thread that has learned of the return of this call uses no cached
    /// registration.
    pub(crate) fn close(self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`Self::close`].
    pub(crate) fn open(self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_when_all_who_closed_it_have() {
        let gate = Gate::make().unwrap();
        assert!(gate.is_open());
        gate.close();
        gate.close();
        gate.open();
        assert!(!gate.is_open() && !gate.is_forked());
        gate.open();
        assert!(gate.is_open());
    }

    #[test]
    fn a_child_finds_it_closed() {
        let gate = Gate::make().unwrap();
        // SAFETY: the child only reads the word and exits.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(gate.is_open() || !gate.is_forked()));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
        }
        assert!(gate.is_open());
    }
}
