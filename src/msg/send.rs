//! Sends, `fi_msg(3)`.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;

use crate::errno::Result;
use crate::flags::Flags;
use crate::initiator::Transmit;
use crate::initiator::local::{LocalIov, buffer};
use crate::mr::Desc;
use crate::msg::Endpoint;

/// The calls of `fi_msg(3)`. Operations without a flags argument use the endpoint's default flags.
/// Operations named `_msg` use their argument; with `FI_SELECTIVE_COMPLETION` they have a
/// completion entry only if the argument contains `FI_COMPLETION`.
///
/// A call posts without blocking, allocating, or a system call of the engine, except in these
/// cases:
/// - The connection is being established: the call waits for the thread that sends or reads the
///   reply.
/// - The send queue is full: the call polls the completion queue once.
/// - A buffer longer than the inline size has no descriptor, and is neither copied nor covered by
///   an implicit region. A hit in the registration cache makes the system call that checks the
///   entry, unless this check is disabled. A miss registers memory, which blocks and allocates.
/// - A descriptor's region is used in the endpoint's protection domain for the first time, or the
///   buffer covers several segments of a region that follows its memory: as for a miss.
/// - RMA and atomics with a key that is not an rkey of the device: unless the key is cached, the
///   call posts reads of the peer's key directory, and polls the completion queue at most twice
///   after each completed read. The first look-up of an endpoint registers memory; cached keys are
///   allocated. The first look-up in a domain starts its helper thread.
/// - An operation whose look-up does not end within these polls, whose requests do not fit in the
///   send queue, or that is behind such an operation is deferred. This allocates copies of its
///   vectors of buffers and descriptors, and of injected data, and starts the domain's helper
///   thread if it is not running. At most as many operations are deferred as the send queue has
///   free slots.
///
/// The call holds the endpoint's transmit lock; other posts to this endpoint wait for it. Refused
/// arguments are logged at level info.
///
/// # Errors
/// - `EAGAIN`: the queue is full; the caller reads the completion queue and repeats the call.
/// - `EINVAL`: too many buffers, or a required descriptor is wrong.
/// - `EMSGSIZE`: longer than the limit of the endpoint, or of inject.
/// - `EBADFLAGS`: a flag that the operation does not accept.
/// - `ENOCQ`: no completion queue is bound for transmitting.
/// - `EOPBADSTATE`: not enabled. `ENOTCONN`: not connected. `ESHUTDOWN`: no longer connected.
///
/// # Safety
/// Buffers must stay valid until the operation completes (inject: until the call returns), and
/// descriptors must be NULL or those of live regions that cover the buffers.
#[allow(
    clippy::missing_safety_doc,
    reason = "one section for all methods, above"
)]
impl Endpoint {
    /// `fi_send`, `fi_sendv`.
    #[inline(always)]
    pub unsafe fn send(&self, local: LocalIov<'_>, context: usize) -> Result<()> {
        let op = Transmit::send(local, context, self.op_flags().tx());
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit_here(&op) }
    }

    /// `fi_senddata`: the message carries the low 32 bits of `data`.
    #[inline]
    pub unsafe fn send_data(&self, local: LocalIov<'_>, data: u64, context: usize) -> Result<()> {
        let op = Transmit::send(local, context, self.op_flags().tx());
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op.with_data(data)) }
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
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op) }
    }

    /// `fi_inject`: no completion, but an error entry if the peer or the device refuses it; the
    /// application may reuse the buffer on return.
    #[inline(always)]
    pub unsafe fn inject(&self, buf: *const c_void, len: usize) -> Result<()> {
        let iov = buffer(buf, len);
        let context = self.shared.config.context;
        let op = Transmit::send(LocalIov::single(&iov, &Desc::NULL), context, Flags::empty());
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit_here(&op.injected()) }
    }

    /// `fi_injectdata`.
    #[inline]
    pub unsafe fn inject_data(&self, buf: *const c_void, len: usize, data: u64) -> Result<()> {
        let iov = buffer(buf, len);
        let context = self.shared.config.context;
        let op = Transmit::send(LocalIov::single(&iov, &Desc::NULL), context, Flags::empty());
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op.injected().with_data(data)) }
    }
}
