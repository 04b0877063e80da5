//! Shared memory that softverbs accesses directly (`softdv_adopt_buf`): direct verbs that not all
//! devices have.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::Device;
use crate::errno::{FiErrno, Result};

/// A mapped file that is registered with the device for direct access. Thread safe.
#[derive(Debug)]
pub(crate) struct Adopted {
    raw: *mut c_void,
    device: Arc<Device>,
}

// SAFETY: the pointer is only passed to softverbs, once, and softverbs may be called from any
// thread, like verbs.
unsafe impl Send for Adopted {}
// SAFETY: as above.
unsafe impl Sync for Adopted {}

impl Adopted {
    /// Passes the mapping of a sealed file to the device; `None` for a device without direct
    /// access.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`: resources of the process. `EINVAL`, `EPERM`: the file is not of the
    /// required kind.
    ///
    /// # Safety
    /// The first `len` bytes of the file stay mapped at `addr`, shared, until this object and every
    /// registration in the mapping are dropped.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        file: &OwnedFd,
        addr: *mut c_void,
        len: usize,
    ) -> Result<Option<Self>> {
        let Some(adopt) = device.backend().verbs.softdv_adopt_buf else {
            return Ok(None);
        };
        // SAFETY: the context is live and of this backend; the caller promises the mapping.
        let raw = unsafe { adopt(device.context(), file.as_raw_fd(), addr, len) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        let device = Arc::clone(device);
        Ok(Some(Self { raw, device }))
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        if let Some(release) = self.device.backend().verbs.softdv_release_buf {
            // SAFETY: created by this backend, released once.
            unsafe { release(self.raw) };
        }
    }
}
