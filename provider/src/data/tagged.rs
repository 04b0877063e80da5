//! Tagged messages, `fi_tagged(3)`, on endpoints of any kind that has them.

use std::ffi::c_void;

use libc::iovec;
use libfabric_sys::*;
use weft::errno::Result;
use weft::mr::Desc;
use weft::rdm::LocalIov;

use crate::data::traits::{
    TX_FLAGS, Tag, TaggedReceive, TaggedSend, buffer, flags_of, message, post, receive, token,
};
use crate::ffi::log::refused;
use crate::ffi::stub;

/// The table of an endpoint kind.
pub(crate) const fn ops<E: TaggedReceive + TaggedSend>() -> fi_ops_tagged {
    send_ops::<E>(receive_ops::<E>(stub::tagged::<FI_ENOSYS>()))
}

/// The table of a kind that only sends; its other calls are those of `rest`.
pub(crate) const fn send_ops<E: TaggedSend>(rest: fi_ops_tagged) -> fi_ops_tagged {
    fi_ops_tagged {
        send: Some(send::<E>),
        sendv: Some(sendv::<E>),
        sendmsg: Some(sendmsg::<E>),
        inject: Some(inject::<E>),
        senddata: Some(senddata::<E>),
        injectdata: Some(injectdata::<E>),
        ..rest
    }
}

/// The table of a kind that only receives; its other calls are those of `rest`.
pub(crate) const fn receive_ops<E: TaggedReceive>(rest: fi_ops_tagged) -> fi_ops_tagged {
    fi_ops_tagged {
        recv: Some(recv::<E>),
        recvv: Some(recvv::<E>),
        recvmsg: Some(recvmsg::<E>),
        ..rest
    }
}

/// Flags that `fi_trecvmsg` may carry.
const RX_FLAGS: u64 = FI_COMPLETION | FI_MORE | FI_TRANSMIT_COMPLETE | SEARCH_FLAGS;

/// Flags of `fi_trecvmsg` that search for a message, and post no receive.
const SEARCH_FLAGS: u64 = FI_PEEK | FI_CLAIM | FI_DISCARD;

/// Checks flags of `fi_trecvmsg` against each other.
///
/// # Errors
/// `EINVAL`: `FI_DISCARD` alone, or `FI_CLAIM` without a context, which stores the claim.
#[inline(always)]
fn check_search(flags: u64, context: *mut c_void) -> Result<()> {
    if flags & SEARCH_FLAGS == FI_DISCARD {
        let reason = "FI_DISCARD without FI_PEEK or FI_CLAIM";
        return Err(refused!(FI_LOG_EP_DATA, EINVAL, "{reason}"));
    }
    if flags & FI_CLAIM != 0 && context.is_null() {
        let reason = "FI_CLAIM without a struct fi_context";
        return Err(refused!(FI_LOG_EP_DATA, EINVAL, "{reason}"));
    }
    Ok(())
}

unsafe extern "C" fn recv<E: TaggedReceive>(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    src_addr: fi_addr_t,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    let tag = Tag { tag, ignore };
    // SAFETY: the contract of fi_trecv(3).
    unsafe {
        receive::<E>(ep, |ep| {
            ep.trecv(src_addr, tag, local, token(context), None)
        })
    }
}

unsafe extern "C" fn recvv<E: TaggedReceive>(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    src_addr: fi_addr_t,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_trecvv(3).
    unsafe {
        receive::<E>(ep, |ep| {
            let local = LocalIov::from_raw(iov, desc, count)?;
            let tag = Tag { tag, ignore };
            ep.trecv(src_addr, tag, local, token(context), None)
        })
    }
}

unsafe extern "C" fn recvmsg<E: TaggedReceive>(
    ep: *mut fid_ep,
    msg: *const fi_msg_tagged,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_trecvmsg(3).
    unsafe {
        receive::<E>(ep, |ep| {
            let msg = message(msg)?;
            let local = match flags & FI_DISCARD {
                0 => LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?,
                // fi_tagged(3): "the input buffer(s) and length parameters are ignored"
                _ => LocalIov::NONE,
            };
            check_search(flags, msg.context)?;
            let flags = flags_of(flags, RX_FLAGS)?;
            let (tag, ignore) = (msg.tag, msg.ignore);
            let tag = Tag { tag, ignore };
            ep.trecv(msg.addr, tag, local, token(msg.context), Some(flags))
        })
    }
}

unsafe extern "C" fn send<E: TaggedSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    dest_addr: fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_tsend(3).
    unsafe {
        post::<E>(ep, |ep| {
            ep.tsend(dest_addr, tag, local, None, token(context), None)
        })
    }
}

unsafe extern "C" fn sendv<E: TaggedSend>(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    dest_addr: fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_tsendv(3).
    unsafe {
        post::<E>(ep, |ep| {
            let local = LocalIov::from_raw(iov, desc, count)?;
            ep.tsend(dest_addr, tag, local, None, token(context), None)
        })
    }
}

unsafe extern "C" fn sendmsg<E: TaggedSend>(
    ep: *mut fid_ep,
    msg: *const fi_msg_tagged,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_tsendmsg(3).
    unsafe {
        post::<E>(ep, |ep| {
            let msg = message(msg)?;
            let local = LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?;
            let flags = flags_of(flags, TX_FLAGS)?;
            ep.tsend(
                msg.addr,
                msg.tag,
                local,
                Some(msg.data),
                token(msg.context),
                Some(flags),
            )
        })
    }
}

unsafe extern "C" fn inject<E: TaggedSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    dest_addr: fi_addr_t,
    tag: u64,
) -> isize {
    // SAFETY: the contract of fi_tinject(3).
    unsafe { post::<E>(ep, |ep| ep.tinject(dest_addr, tag, buf, len, None)) }
}

unsafe extern "C" fn senddata<E: TaggedSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    dest_addr: fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_tsenddata(3).
    unsafe {
        post::<E>(ep, |ep| {
            ep.tsend(dest_addr, tag, local, Some(data), token(context), None)
        })
    }
}

unsafe extern "C" fn injectdata<E: TaggedSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    data: u64,
    dest_addr: fi_addr_t,
    tag: u64,
) -> isize {
    // SAFETY: the contract of fi_tinjectdata(3).
    unsafe { post::<E>(ep, |ep| ep.tinject(dest_addr, tag, buf, len, Some(data))) }
}
