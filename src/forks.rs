//! Recognizes a forked child: its objects are copies of those of its parent, whose other threads it
//! does not have.

#![allow(unsafe_code, reason = "pthread_atfork")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of forks between this process and its ancestor that has called [`are_counted`] first.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// See [`FORKS`]: a process and its children have different numbers.
#[inline(always)]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Makes forks be counted. `false`: no memory for that.
pub(crate) fn are_counted() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        // SAFETY: the handler only changes an atomic. The provider's library is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) == 0 }
    })
}
