//! Sends and receives, `fi_msg(3)`. Thin: checks that cost nothing, then the engine.
//!
//! As all providers do, these trust the handle: it came through a table that only our endpoints
//! carry.

use std::ffi::c_void;

use libc::iovec;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::mr::Desc;
use weft::msg::LocalIov;

use crate::ep::Ep;
use crate::ffi::fid::{assumed, on};
use crate::ffi::log::refused;

/// Those of connected endpoints.
pub(crate) static OPS: fi_ops_msg = fi_ops_msg {
    size: size_of::<fi_ops_msg>(),
    recv: Some(recv),
    recvv: Some(recvv),
    recvmsg: Some(recvmsg),
    send: Some(send),
    sendv: Some(sendv),
    sendmsg: Some(sendmsg),
    inject: Some(inject),
    senddata: Some(senddata),
    injectdata: Some(injectdata),
};

/// Flags that a transmit operation may carry.
pub(crate) const TX_FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_FENCE
    | FI_MORE
    | FI_REMOTE_CQ_DATA;

/// Flags that `fi_sendmsg` may carry. A reliable send is acknowledged when it has consumed a
/// receive, so it has been matched with a buffer of the application then.
const SEND_FLAGS: u64 = TX_FLAGS | FI_MATCH_COMPLETE;

/// Flags that a receive may carry.
pub(crate) const RX_FLAGS: u64 = FI_COMPLETION | FI_MORE | FI_TRANSMIT_COMPLETE;

/// Runs an operation on an endpoint.
///
/// # Safety
/// `ep` is an open endpoint of ours.
#[inline(always)]
pub(crate) unsafe fn post(ep: *mut fid_ep, body: impl FnOnce(&Ep) -> Result<()>) -> isize {
    // SAFETY: the caller's promise.
    let ep = unsafe { assumed::<Ep>(ep) };
    on(ep, |ep| body(ep).map(|()| 0))
}

/// One buffer as a vector of one.
#[inline(always)]
pub(crate) fn buffer(buf: *const c_void, len: usize) -> iovec {
    iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    }
}

/// The application's context as the number that comes back in its completion.
#[inline(always)]
pub(crate) fn token(context: *mut c_void) -> usize {
    context.expose_provenance()
}

/// # Errors
/// `EBADFLAGS` for flags that the operation doesn't have.
#[inline(always)]
pub(crate) fn flags_of(flags: u64, allowed: u64) -> Result<Flags> {
    if flags & !allowed != 0 {
        return Err(bad_flags(flags & !allowed));
    }
    Ok(Flags::from_bits_retain(flags))
}

/// The reason of a refusal, at `info`, as are those below.
#[cold]
fn bad_flags(flags: u64) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EBADFLAGS,
        "flags {flags:#x} are not flags of this operation"
    )
}

/// A call without its structure.
#[cold]
pub(crate) fn no_message() -> FiErrno {
    refused!(FI_LOG_EP_DATA, EINVAL, "msg is NULL")
}

unsafe extern "C" fn recv(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    _src_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    // SAFETY: the contract of fi_recv(3).
    unsafe {
        post(ep, |ep| {
            ep.engine
                .recv(LocalIov::single(&iov, &desc), token(context))
        })
    }
}

unsafe extern "C" fn recvv(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    _src_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_recvv(3).
    unsafe {
        post(ep, |ep| {
            ep.engine
                .recv(LocalIov::from_raw(iov, desc, count)?, token(context))
        })
    }
}

unsafe extern "C" fn recvmsg(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize {
    // SAFETY: the contract of fi_recvmsg(3).
    unsafe {
        post(ep, |ep| {
            let msg = msg.as_ref().ok_or_else(no_message)?;
            ep.engine.recv_msg(
                LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?,
                token(msg.context),
                flags_of(flags, RX_FLAGS)?,
            )
        })
    }
}

unsafe extern "C" fn send(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    _dest_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    // SAFETY: the contract of fi_send(3).
    unsafe {
        post(ep, |ep| {
            ep.engine
                .send(LocalIov::single(&iov, &desc), token(context))
        })
    }
}

unsafe extern "C" fn sendv(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    _dest_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_sendv(3).
    unsafe {
        post(ep, |ep| {
            ep.engine
                .send(LocalIov::from_raw(iov, desc, count)?, token(context))
        })
    }
}

unsafe extern "C" fn sendmsg(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize {
    // SAFETY: the contract of fi_sendmsg(3).
    unsafe {
        post(ep, |ep| {
            let msg = msg.as_ref().ok_or_else(no_message)?;
            ep.engine.send_msg(
                LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?,
                msg.data,
                token(msg.context),
                flags_of(flags, SEND_FLAGS)?,
            )
        })
    }
}

unsafe extern "C" fn inject(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    _dest_addr: fi_addr_t,
) -> isize {
    // SAFETY: the contract of fi_inject(3).
    unsafe { post(ep, |ep| ep.engine.inject(buf, len)) }
}

unsafe extern "C" fn senddata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    _dest_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    // SAFETY: the contract of fi_senddata(3).
    unsafe {
        post(ep, |ep| {
            ep.engine
                .send_data(LocalIov::single(&iov, &desc), data, token(context))
        })
    }
}

unsafe extern "C" fn injectdata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    data: u64,
    _dest_addr: fi_addr_t,
) -> isize {
    // SAFETY: the contract of fi_injectdata(3).
    unsafe { post(ep, |ep| ep.engine.inject_data(buf, len, data)) }
}
