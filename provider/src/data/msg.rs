//! Sends and receives, `fi_msg(3)`, on endpoints of any kind.

use std::ffi::c_void;

use libc::iovec;
use libfabric_sys::*;
use weft::mr::Desc;
use weft::msg::LocalIov;

use crate::data::traits::{MsgReceive, MsgSend, buffer, flags_of, message, post, receive, token};
use crate::ffi::stub;

/// The table of an endpoint kind.
pub(crate) const fn ops<E: MsgReceive + MsgSend>() -> fi_ops_msg {
    send_ops::<E>(receive_ops::<E>(stub::msg::<FI_ENOSYS>()))
}

/// The table of a kind that only sends; its other calls are those of `rest`.
pub(crate) const fn send_ops<E: MsgSend>(rest: fi_ops_msg) -> fi_ops_msg {
    fi_ops_msg {
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
pub(crate) const fn receive_ops<E: MsgReceive>(rest: fi_ops_msg) -> fi_ops_msg {
    fi_ops_msg {
        recv: Some(recv::<E>),
        recvv: Some(recvv::<E>),
        recvmsg: Some(recvmsg::<E>),
        ..rest
    }
}

unsafe extern "C" fn recv<E: MsgReceive>(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    src_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_recv(3).
    unsafe { receive::<E>(ep, |ep| ep.recv(src_addr, local, token(context), None)) }
}

unsafe extern "C" fn recvv<E: MsgReceive>(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    src_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_recvv(3).
    unsafe {
        receive::<E>(ep, |ep| {
            let local = LocalIov::from_raw(iov, desc, count)?;
            ep.recv(src_addr, local, token(context), None)
        })
    }
}

unsafe extern "C" fn recvmsg<E: MsgReceive>(
    ep: *mut fid_ep,
    msg: *const fi_msg,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_recvmsg(3).
    unsafe {
        receive::<E>(ep, |ep| {
            let msg = message(msg)?;
            let local = LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?;
            let flags = flags_of(flags, E::RX_FLAGS)?;
            ep.recv(msg.addr, local, token(msg.context), Some(flags))
        })
    }
}

unsafe extern "C" fn send<E: MsgSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    dest_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_send(3).
    unsafe {
        post::<E>(ep, |ep| {
            ep.send(dest_addr, local, None, token(context), None)
        })
    }
}

unsafe extern "C" fn sendv<E: MsgSend>(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    dest_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_sendv(3).
    unsafe {
        post::<E>(ep, |ep| {
            let local = LocalIov::from_raw(iov, desc, count)?;
            ep.send(dest_addr, local, None, token(context), None)
        })
    }
}

unsafe extern "C" fn sendmsg<E: MsgSend>(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize {
    // SAFETY: the contract of fi_sendmsg(3).
    unsafe {
        post::<E>(ep, |ep| {
            let msg = message(msg)?;
            let local = LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?;
            let flags = flags_of(flags, E::TX_FLAGS)?;
            let data = Some(msg.data);
            ep.send(msg.addr, local, data, token(msg.context), Some(flags))
        })
    }
}

unsafe extern "C" fn inject<E: MsgSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    dest_addr: fi_addr_t,
) -> isize {
    // SAFETY: the contract of fi_inject(3).
    unsafe { post::<E>(ep, |ep| ep.inject(dest_addr, buf, len, None)) }
}

unsafe extern "C" fn senddata<E: MsgSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    dest_addr: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_senddata(3).
    unsafe {
        post::<E>(ep, |ep| {
            ep.send(dest_addr, local, Some(data), token(context), None)
        })
    }
}

unsafe extern "C" fn injectdata<E: MsgSend>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    data: u64,
    dest_addr: fi_addr_t,
) -> isize {
    // SAFETY: the contract of fi_injectdata(3).
    unsafe { post::<E>(ep, |ep| ep.inject(dest_addr, buf, len, Some(data))) }
}
