//! Thread domains.

use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::ibv_td;

/// A thread domain. The C object comes first.
#[repr(C)]
pub(crate) struct Td {
    pub(crate) object: ibv_td,
    pub(crate) users: AtomicU32,
}

impl Td {
    /// Removes a parent domain from the users of `td`.
    ///
    /// # Safety
    /// `td` must be NULL or live.
    pub(crate) unsafe fn leave(td: *mut ibv_td) {
        // SAFETY: the caller promises NULL or a live thread domain.
        if let Some(td) = unsafe { td.cast::<Self>().as_ref() } {
            td.users.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
