//! Shared receive queues.

#![allow(unsafe_code, reason = "calls verbs")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::{Pd, RecvRequest};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// A shared receive queue, whose receives any queue pair that was created with it may consume.
/// Thread safe.
#[derive(Debug)]
pub struct Srq {
    raw: *mut sys::ibv_srq,
    pd: Arc<Pd>,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    /// `ibv_create_srq(3)`: creates a queue for at least `max_wr` receives of `max_sge` buffers
    /// each.
    ///
    /// # Errors
    /// `EINVAL`: a size exceeds the device's limit. `ENOSYS`, `EOPNOTSUPP`: the device has no
    /// shared receive queues. `ENOMEM`.
    pub fn create(pd: &Arc<Pd>, max_wr: usize, max_sge: usize) -> Result<Self> {
        let mut init = sys::ibv_srq_init_attr::default();
        init.attr.max_wr = u32::try_from(max_wr).map_err(|_| FiErrno::EINVAL)?;
        init.attr.max_sge = u32::try_from(max_sge).map_err(|_| FiErrno::EINVAL)?;
        // SAFETY: the protection domain is live and of this backend.
        let raw = unsafe { (pd.device().backend().verbs.ibv_create_srq)(pd.raw(), &raw mut init) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Self {
            raw,
            pd: Arc::clone(pd),
        })
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_srq {
        self.raw
    }

    /// `ibv_post_srq_recv(3)` of one request.
    ///
    /// # Errors
    /// `EAGAIN`: the queue is full. `EINVAL`: the request is invalid.
    ///
    /// # Safety
    /// The caller keeps the buffers valid until completion, or until the queue is destroyed.
    #[inline]
    pub unsafe fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        let mut wr = request.wr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is live, the request a valid chain of one.
        FiErrno::from_post(unsafe { sys::ibv_post_srq_recv(self.raw, &raw mut wr, &raw mut bad) })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: created by this backend. Each queue pair on the queue holds a reference to it, so
        // no such queue pair exists any more.
        let ret = unsafe { (self.pd.device().backend().verbs.ibv_destroy_srq)(self.raw) };
        if let Err(error) = FiErrno::from_verb(ret) {
            warn_log!(EpData, "ibv_destroy_srq: {error}");
        }
    }
}
