//! Sends.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;

use crate::errno::Result;
use crate::flags::Flags;
use crate::initiator::Transmit;
use crate::initiator::local::{LocalIov, buffer};
use crate::mr::Desc;
use crate::msg::Endpoint;

/// Operations without a flags argument use the endpoint's default flags. Those named `_msg` use
/// their argument; with `FI_SELECTIVE_COMPLETION` they have a completion entry only if it contains
/// `FI_COMPLETION`.
///
/// No operation blocks, allocates, or makes a system call. `EAGAIN`: the queue is full; the caller
/// reads the completion queue and repeats the call.
///
/// # Errors
/// - `EAGAIN`: the queue is full.
/// - `EINVAL`: too many buffers, or a required descriptor is wrong.
/// - `EMSGSIZE`: longer than the limit of the endpoint, or of inject.
/// - `EBADFLAGS`: a flag that the operation does not accept.
/// - `ENOCQ`: no completion queue is bound for transmitting.
/// - `EOPBADSTATE`: not enabled. `ENOTCONN`: not connected. `ESHUTDOWN`: no longer connected.
///
/// # Safety
/// Buffers must stay valid until the operation completes (inject: until it returns), and
/// descriptors be NULL or those of live regions that cover the buffers.
#[allow(clippy::missing_safety_doc, reason = "said once, above")]
impl Endpoint {
    /// `fi_send`, `fi_sendv`.
    #[inline(always)]
    pub unsafe fn send(&self, local: LocalIov<'_>, context: usize) -> Result<()> {
        let op = Transmit::send(local, context, self.tx_op_flags());
        // SAFETY: as this function.
        unsafe { self.core.transmit_here(&op) }
    }

    /// `fi_senddata`: the message carries the low 32 bits of `data`.
    #[inline]
    pub unsafe fn send_data(&self, local: LocalIov<'_>, data: u64, context: usize) -> Result<()> {
        let op = Transmit::send(local, context, self.tx_op_flags());
        // SAFETY: as this function.
        unsafe { self.core.transmit(&op.with_data(data)) }
    }

    /// `fi_sendmsg`.
    #[inline]
    pub unsafe fn send_msg(
        &self,
        local: LocalIov<'_>,
        data: u64,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let op = Transmit::send(local, context, flags).with_flags_checked(data)?;
        // SAFETY: as this function.
        unsafe { self.core.transmit(&op) }
    }

    /// `fi_inject`: no completion, and the buffer is free on return.
    #[inline(always)]
    pub unsafe fn inject(&self, buf: *const c_void, len: usize) -> Result<()> {
        let iov = buffer(buf, len);
        let op = Transmit::send(LocalIov::single(&iov, &Desc::NULL), 0, Flags::empty());
        // SAFETY: as this function.
        unsafe { self.core.transmit_here(&op.injected()) }
    }

    /// `fi_injectdata`.
    #[inline]
    pub unsafe fn inject_data(&self, buf: *const c_void, len: usize, data: u64) -> Result<()> {
        let iov = buffer(buf, len);
        let op = Transmit::send(LocalIov::single(&iov, &Desc::NULL), 0, Flags::empty());
        // SAFETY: as this function.
        unsafe { self.core.transmit(&op.injected().with_data(data)) }
    }
}
