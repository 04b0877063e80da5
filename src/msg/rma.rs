//! Remote reads and writes, `fi_rma(3)`.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::Transmit;
use crate::initiator::local::buffer;
use crate::initiator::refusal;
use crate::mr::Desc;
use crate::msg::{Endpoint, LocalIov, RemoteIov};
use crate::verbs::SendOpcode;

/// The calls of `fi_rma(3)`.
///
/// # Errors
/// Those of [`Endpoint::send`], and:
/// - `EINVAL`: the number of remote ranges is not 1 (`rma_iov_limit`), or the length of the range
///   differs from the local length.
/// - `EKEYREJECTED`: the value cannot be a key of the peer.
///
/// # Safety
/// As [`Endpoint::send`].
#[allow(
    clippy::missing_safety_doc,
    reason = "one section for all methods, above"
)]
impl Endpoint {
    /// `fi_write`, `fi_writev`.
    #[inline]
    pub unsafe fn write(
        &self,
        local: LocalIov<'_>,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let flags = self.op_flags().tx();
        let op = Transmit::rma(SendOpcode::Write, local, (addr, key), context, flags);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op) }
    }

    /// `fi_writedata`.
    #[inline]
    pub unsafe fn write_data(
        &self,
        local: LocalIov<'_>,
        data: u64,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let flags = self.op_flags().tx();
        let op = Transmit::rma(SendOpcode::Write, local, (addr, key), context, flags);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op.with_data(data)) }
    }

    /// `fi_writemsg`.
    #[inline]
    pub unsafe fn write_msg(
        &self,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        data: u64,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let durable = flags & Flags::COMMIT_COMPLETE;
        if !durable.is_empty() && !self.is_durable() {
            return Err(refusal::not_durable());
        }
        let op = Transmit::rma_msg(SendOpcode::Write, local, remote, context, flags - durable)?;
        let mut op = op.with_flags_checked(data)?;
        op.flags |= durable;
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op) }
    }

    /// A write of `fi_inject_write`, with the context of the endpoint for an error entry.
    #[inline]
    fn injected_write<'a>(&self, local: LocalIov<'a>, target: (u64, u64)) -> Transmit<'a> {
        let context = self.shared.config.context;
        Transmit::rma(SendOpcode::Write, local, target, context, Flags::empty()).injected()
    }

    /// `fi_inject_write`: no completion, but an error entry if the peer or the device refuses it.
    #[inline]
    pub unsafe fn inject_write(
        &self,
        buf: *const c_void,
        len: usize,
        addr: u64,
        key: u64,
    ) -> Result<()> {
        let iov = buffer(buf, len);
        let op = self.injected_write(LocalIov::single(&iov, &Desc::NULL), (addr, key));
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op) }
    }

    /// `fi_inject_writedata`.
    #[inline]
    pub unsafe fn inject_write_data(
        &self,
        buf: *const c_void,
        len: usize,
        data: u64,
        addr: u64,
        key: u64,
    ) -> Result<()> {
        let iov = buffer(buf, len);
        let op = self.injected_write(LocalIov::single(&iov, &Desc::NULL), (addr, key));
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op.with_data(data)) }
    }

    /// `fi_read`, `fi_readv`.
    #[inline]
    pub unsafe fn read(
        &self,
        local: LocalIov<'_>,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        // FI_INJECT has no meaning for an operation that writes local memory
        let flags = self.op_flags().tx() - Flags::INJECT;
        let op = Transmit::rma(SendOpcode::Read, local, (addr, key), context, flags);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op) }
    }

    /// `fi_readmsg`.
    #[inline]
    pub unsafe fn read_msg(
        &self,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        if flags.intersects(Flags::INJECT | Flags::REMOTE_CQ_DATA) {
            return Err(FiErrno::EBADFLAGS);
        }
        let op = Transmit::rma_msg(SendOpcode::Read, local, remote, context, flags)?;
        let op = op.with_flags_checked(0)?;
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op) }
    }
}
