//! Remote reads and writes.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::msg::{Endpoint, LocalIov};

/// A range of the peer's memory (`struct fi_rma_iov`, same layout).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RemoteIov {
    /// Address, as the region's form counts: here its virtual address.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// The region's key.
    pub key: u64,
}

/// As for sends; besides
///
/// # Errors
/// - `EINVAL`: more than one remote range (`rma_iov_limit` is 1), or a length other than the
///   local one's.
/// - `EKEYREJECTED`: a key that can't be one.
///
/// # Safety
/// As for sends.
#[allow(clippy::missing_safety_doc, reason = "said once, above")]
impl Endpoint {
    /// `fi_write`, `fi_writev`.
    pub unsafe fn write(
        &self,
        local: LocalIov<'_>,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let _ = (local, addr, key, context);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_writedata`.
    pub unsafe fn write_data(
        &self,
        local: LocalIov<'_>,
        data: u64,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let _ = (local, data, addr, key, context);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_writemsg`.
    pub unsafe fn write_msg(
        &self,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        data: u64,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let _ = (local, remote, data, context, flags);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_inject_write`.
    pub unsafe fn inject_write(
        &self,
        buf: *const c_void,
        len: usize,
        addr: u64,
        key: u64,
    ) -> Result<()> {
        let _ = (buf, len, addr, key);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_inject_writedata`.
    pub unsafe fn inject_write_data(
        &self,
        buf: *const c_void,
        len: usize,
        data: u64,
        addr: u64,
        key: u64,
    ) -> Result<()> {
        let _ = (buf, len, data, addr, key);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_read`, `fi_readv`.
    pub unsafe fn read(
        &self,
        local: LocalIov<'_>,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let _ = (local, addr, key, context);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_readmsg`.
    pub unsafe fn read_msg(
        &self,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let _ = (local, remote, context, flags);
        Err(FiErrno::ENOSYS)
    }
}
