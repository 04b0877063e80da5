//! Memory that a device allocates, for tests: peers of softverbs access it by plain copies, which a
//! signal can stop.

#![allow(unsafe_code, reason = "calls verbs")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::Pd;

/// Memory that is initially zero. Freed when dropped, after its registrations.
#[derive(Debug)]
pub(crate) struct Buf {
    raw: *mut sys::ibv_buf,
    pd: Arc<Pd>,
    pub(crate) addr: *mut u8,
}

impl Buf {
    /// `ibv_alloc_buf(3)`
    pub(crate) fn alloc(pd: &Arc<Pd>, len: usize) -> Self {
        let alloc = pd.device().backend().verbs.ibv_alloc_buf.unwrap();
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live protection domain.
        let addr = unsafe { alloc(pd.raw(), len, &raw mut raw) };
        assert!(!addr.is_null());
        Self {
            raw,
            pd: Arc::clone(pd),
            addr: addr.cast(),
        }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let free = self.pd.device().backend().verbs.ibv_free_buf.unwrap();
        // SAFETY: allocated by `alloc`; tests have closed its regions.
        unsafe { free(self.raw) };
    }
}
