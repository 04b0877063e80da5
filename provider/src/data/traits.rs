//! The traits that an endpoint kind implements for `fi_msg(3)`, `fi_tagged(3)`, `fi_rma(3)` and
//! `fi_atomic(3)`, and the steps that all of these calls share.
//!
//! The entry points of the other files are generic over the kind: each kind has ops tables of its
//! own, and no call is dispatched at run time. They do not check the handle, as in libfabric's own
//! providers: only endpoints of this kind have the table of the call.
//!
//! Methods take the peer's `fi_addr_t` first; connected endpoints ignore it. `flags` are those of a
//! call with a message structure; `None`: the call uses the default flags of the endpoint. `data`
//! is the remote CQ data of a call that has some; with `flags` it is sent only if these contain
//! `FI_REMOTE_CQ_DATA`. The arguments that a call does not have are constants, and the methods are
//! inlined, so a call does not test for them.
//!
//! # Safety
//!
//! Of each method that takes buffers: a buffer is valid until the operation completes, that of an
//! injection during the call, and a descriptor is NULL or the descriptor of an open region.

use std::ffi::c_void;

use libc::iovec;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::msg::{LocalIov, RemoteIov};

use crate::ffi::fid::{Kind, assumed, on};
use crate::ffi::log::refused;

/// Transmit operations of any kind.
pub(crate) trait Transmit: Kind<C = fid_ep> {
    /// Posts the operations that were delayed for further ones (`FI_MORE`).
    fn post_delayed(&self);
}

/// Receives.
pub(crate) trait MsgReceive: Kind<C = fid_ep> {
    /// Flags that `fi_recvmsg` may carry.
    const RX_FLAGS: u64 = RX_FLAGS;

    /// `fi_recv`, `fi_recvv`, `fi_recvmsg`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn recv(
        &self,
        from: fi_addr_t,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()>;
}

/// Sends.
pub(crate) trait MsgSend: Transmit {
    /// Flags that `fi_sendmsg` may carry.
    const TX_FLAGS: u64;

    /// `fi_send`, `fi_sendv`, `fi_senddata`, `fi_sendmsg`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn send(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()>;

    /// `fi_inject`, `fi_injectdata`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn inject(
        &self,
        to: fi_addr_t,
        buf: *const c_void,
        len: usize,
        data: Option<u64>,
    ) -> Result<()>;
}

/// The tag of a receive: a message matches if its tag is equal in all bits that are not ignored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tag {
    pub(crate) tag: u64,
    pub(crate) ignore: u64,
}

/// Tagged receives.
pub(crate) trait TaggedReceive: Kind<C = fid_ep> {
    /// `fi_trecv`, `fi_trecvv`, `fi_trecvmsg`
    ///
    /// # Safety
    /// The contract of the module. With `FI_CLAIM`, `context` is the address of a
    /// `struct fi_context`.
    unsafe fn trecv(
        &self,
        from: fi_addr_t,
        tag: Tag,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()>;
}

/// Tagged sends.
pub(crate) trait TaggedSend: Transmit {
    /// `fi_tsend`, `fi_tsendv`, `fi_tsenddata`, `fi_tsendmsg`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn tsend(
        &self,
        to: fi_addr_t,
        tag: u64,
        local: LocalIov<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()>;

    /// `fi_tinject`, `fi_tinjectdata`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn tinject(
        &self,
        to: fi_addr_t,
        tag: u64,
        buf: *const c_void,
        len: usize,
        data: Option<u64>,
    ) -> Result<()>;
}

/// The peer's memory of a read or a write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Remote<'a> {
    /// One range, which is as long as the local buffers.
    One { addr: u64, key: u64 },
    /// The ranges of a message structure.
    List(&'a [RemoteIov]),
}

/// Remote reads and writes.
pub(crate) trait Rma: Transmit {
    /// `rma_iov_limit`
    const RMA_IOV_LIMIT: usize;

    /// Whether writes may carry remote CQ data.
    fn writes_data(&self) -> bool;

    /// `fi_read`, `fi_readv`, `fi_readmsg`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn read(
        &self,
        from: fi_addr_t,
        local: LocalIov<'_>,
        remote: Remote<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()>;

    /// `fi_write`, `fi_writev`, `fi_writedata`, `fi_writemsg`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn write(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        remote: Remote<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()>;

    /// `fi_inject_write`, `fi_inject_writedata`
    ///
    /// # Safety
    /// The contract of the module.
    unsafe fn inject_write(
        &self,
        to: fi_addr_t,
        buf: *const c_void,
        len: usize,
        target: (u64, u64),
        data: Option<u64>,
    ) -> Result<()>;
}

/// Flags that a receive may carry.
pub(crate) const RX_FLAGS: u64 = FI_COMPLETION | FI_MORE | FI_TRANSMIT_COMPLETE;

/// Flags that a transmit operation may carry.
pub(crate) const TX_FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_FENCE
    | FI_MORE
    | FI_REMOTE_CQ_DATA;

/// Runs a receive on an endpoint or a shared receive context.
///
/// # Safety
/// `ep` is an open object of kind `E`.
#[inline(always)]
pub(crate) unsafe fn receive<E: Kind>(
    ep: *mut fid_ep,
    body: impl FnOnce(&E) -> Result<()>,
) -> isize {
    // SAFETY: the caller passes an open object of kind `E`.
    let ep = unsafe { assumed::<E>(ep) };
    on(ep, |ep| body(ep).map(|()| 0))
}

/// Runs a transmit operation on an endpoint.
///
/// fi_msg(3), fi_rma(3), `FI_MORE`: "all previously delayed calls [are] flushed when an error is
/// returned from a new call".
///
/// # Safety
/// `ep` is an open endpoint of kind `E`.
#[inline(always)]
pub(crate) unsafe fn post<E: Transmit>(
    ep: *mut fid_ep,
    body: impl FnOnce(&E) -> Result<()>,
) -> isize {
    // SAFETY: the caller passes an open endpoint of kind `E`.
    let ep = unsafe { assumed::<E>(ep) };
    on(ep, |ep| match body(ep) {
        Ok(()) => Ok(0),
        Err(error) => {
            ep.post_delayed();
            Err(error)
        }
    })
}

/// One buffer as a vector of one element.
#[inline(always)]
pub(crate) fn buffer(buf: *const c_void, len: usize) -> iovec {
    iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    }
}

/// The application's context as the number that its completion returns.
#[inline(always)]
pub(crate) fn token(context: *mut c_void) -> usize {
    context.expose_provenance()
}

/// The flags of a call.
///
/// # Errors
/// `EBADFLAGS`: a flag that is not in `allowed`.
#[inline(always)]
pub(crate) fn flags_of(flags: u64, allowed: u64) -> Result<Flags> {
    if flags & !allowed != 0 {
        return Err(bad_flags(flags & !allowed));
    }
    Ok(Flags::from_bits_retain(flags))
}

/// The structure of a `msg` call.
///
/// # Errors
/// `EINVAL`: NULL.
///
/// # Safety
/// `msg` is NULL or valid for `'a`.
#[inline(always)]
pub(crate) unsafe fn message<'a, M>(msg: *const M) -> Result<&'a M> {
    // SAFETY: the caller passes NULL, or a message that is valid for `'a`.
    unsafe { msg.as_ref() }.ok_or_else(no_message)
}

/// Logs the refusal at `info`.
#[cold]
fn bad_flags(flags: u64) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EBADFLAGS,
        "the operation does not support all of the flags {flags:#x}"
    )
}

/// Logs the refusal at `info`.
#[cold]
fn no_message() -> FiErrno {
    refused!(FI_LOG_EP_DATA, EINVAL, "msg is NULL")
}
