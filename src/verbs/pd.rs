//! Protection domains.

#![allow(unsafe_code, reason = "calls verbs")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::Device;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// A protection domain. Thread safe.
#[derive(Debug)]
pub struct Pd {
    raw: *mut sys::ibv_pd,
    device: Arc<Device>,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// `ibv_alloc_pd(3)`.
    ///
    /// # Errors
    /// `ENOMEM`: the device's limit is reached.
    pub fn alloc(device: &Arc<Device>) -> Result<Arc<Self>> {
        // SAFETY: the context is live and of this backend.
        let raw = unsafe { (device.backend().verbs.ibv_alloc_pd)(device.context()) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Arc::new(Self {
            raw,
            device: Arc::clone(device),
        }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: created by this backend. Each object in the domain holds a reference to it, so no
        // such object exists any more.
        let ret = unsafe { (self.device.backend().verbs.ibv_dealloc_pd)(self.raw) };
        if let Err(error) = FiErrno::from_verb(ret) {
            warn_log!(Domain, "ibv_dealloc_pd: {error}");
        }
    }
}
