//! XRC domains.

#![allow(unsafe_code, reason = "calls verbs")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys as sys;

use super::Device;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// An XRC domain that this process has open. Thread safe; closed when it is dropped.
#[derive(Debug)]
pub struct Xrcd {
    /// `None` after closing.
    raw: Mutex<Option<Raw>>,
    device: Arc<Device>,
}

#[derive(Debug)]
struct Raw(*mut sys::ibv_xrcd);

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Raw {}

impl Xrcd {
    /// `ibv_open_xrcd(3)`: the domain of a file, shared by all processes that open one with that
    /// file; without a file, a private domain. `oflags`: `O_CREAT` creates the domain if no process
    /// has it open, `O_EXCL` refuses one that a process has open. The descriptor need not stay
    /// open.
    ///
    /// # Errors
    /// - `EOPNOTSUPP`: the device has no XRC.
    /// - `EAGAIN`: no process has the domain open, and `O_CREAT` is not given.
    /// - `EINVAL`: a process has the domain open, and `O_EXCL` is given; other flags.
    /// - `EBADF`, `ENOMEM`; `EBUSY`: other processes held their locks for 5 s.
    pub fn open(device: &Arc<Device>, file: Option<BorrowedFd<'_>>, oflags: i32) -> Result<Self> {
        if oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(FiErrno::EINVAL);
        }
        let mut init = sys::ibv_xrcd_init_attr {
            comp_mask: sys::IBV_XRCD_INIT_ATTR_FD | sys::IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: file.map_or(-1, |file| file.as_raw_fd()),
            oflags,
        };
        // SAFETY: a live context, and attributes.
        let raw = unsafe { sys::ibv_open_xrcd(device.context(), &raw mut init) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Self {
            raw: Mutex::new(Some(Raw(raw))),
            device: Arc::clone(device),
        })
    }

    /// `ibv_close_xrcd(3)`. The kernel destroys the domain when the last process has closed it.
    ///
    /// # Errors
    /// `EBUSY`: an object of this process is in the domain, which stays open. `EINVAL`: the domain
    /// is closed.
    pub fn close(&self) -> Result<()> {
        let mut raw = self.raw.lock();
        let open = raw.as_ref().ok_or(FiErrno::EINVAL)?;
        // SAFETY: open, of a live context; only the thread that holds this lock closes it.
        FiErrno::from_verb(unsafe { sys::ibv_close_xrcd(open.0) })?;
        *raw = None;
        Ok(())
    }

    /// Calls `body` with the domain, which stays open meanwhile.
    ///
    /// # Errors
    /// `EINVAL`: the domain is closed. Those of `body`.
    pub(super) fn with_raw<T>(
        &self,
        body: impl FnOnce(*mut sys::ibv_xrcd) -> Result<T>,
    ) -> Result<T> {
        let raw = self.raw.lock();
        body(raw.as_ref().ok_or(FiErrno::EINVAL)?.0)
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Xrcd {
    fn drop(&mut self) {
        if self.raw.get_mut().is_some()
            && let Err(error) = self.close()
        {
            warn_log!(Domain, "ibv_close_xrcd: {error}");
        }
    }
}
