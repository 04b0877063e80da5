//! Remote reads and writes, `fi_rma(3)`. As thin as the messages.

use std::ffi::c_void;

use libc::iovec;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::Desc;
use weft::msg::{LocalIov, RemoteIov};

use crate::ep::Ep;
use crate::ffi::log::refused;
use crate::msg::{TX_FLAGS, buffer, flags_of, no_message, post, token};

/// Those of connected endpoints.
pub(crate) static OPS: fi_ops_rma = fi_ops_rma {
    size: size_of::<fi_ops_rma>(),
    read: Some(read),
    readv: Some(readv),
    readmsg: Some(readmsg),
    write: Some(write),
    writev: Some(writev),
    writemsg: Some(writemsg),
    inject: Some(inject),
    writedata: Some(writedata),
    injectdata: Some(injectdata),
};

/// Flags of a read: no inject, and no remote completion data, which verbs does not carry with
/// reads.
const READ_FLAGS: u64 = TX_FLAGS & !(FI_INJECT | FI_REMOTE_CQ_DATA);

/// Flags of `fi_writemsg`; the engine refuses `FI_COMMIT_COMPLETE` without `FI_RMA_PMEM`.
const WRITE_FLAGS: u64 = TX_FLAGS | FI_COMMIT_COMPLETE;

const _: () = {
    assert!(size_of::<fi_rma_iov>() == size_of::<RemoteIov>());
    assert!(std::mem::offset_of!(fi_rma_iov, addr) == std::mem::offset_of!(RemoteIov, addr));
    assert!(std::mem::offset_of!(fi_rma_iov, len) == std::mem::offset_of!(RemoteIov, len));
    assert!(std::mem::offset_of!(fi_rma_iov, key) == std::mem::offset_of!(RemoteIov, key));
};

/// # Safety
/// `iov` is NULL or has `count` elements.
#[inline(always)]
unsafe fn remote<'a>(iov: *const fi_rma_iov, count: usize) -> Result<&'a [RemoteIov]> {
    // a slice must not be made of a count that can't be true; the limit is 1
    if iov.is_null() || count != 1 {
        return Err(other_count(count));
    }
    // SAFETY: the caller's promise; the two have one layout, asserted above.
    Ok(unsafe { std::slice::from_raw_parts(iov.cast(), count) })
}

/// Remote data of a write consumes a receive at the target, to which both sides must have agreed.
#[inline(always)]
fn with_data(ep: &Ep) -> Result<()> {
    if ep.rma_data {
        Ok(())
    } else {
        Err(no_data()) // FI_RX_CQ_DATA was not among the modes
    }
}

/// The reason of a refusal, at `info`.
#[cold]
fn other_count(count: usize) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "{count} ranges of the peer's memory, and rma_iov_limit is 1"
    )
}

/// The same.
#[cold]
fn no_data() -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EOPNOTSUPP,
        "a write with remote data, and the endpoint was opened without the mode FI_RX_CQ_DATA"
    )
}

unsafe extern "C" fn read(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    _src_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    // SAFETY: the contract of fi_read(3).
    unsafe {
        post(ep, |ep| {
            ep.engine
                .read(LocalIov::single(&iov, &desc), addr, key, token(context))
        })
    }
}

unsafe extern "C" fn readv(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    _src_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_readv(3).
    unsafe {
        post(ep, |ep| {
            ep.engine.read(
                LocalIov::from_raw(iov, desc, count)?,
                addr,
                key,
                token(context),
            )
        })
    }
}

unsafe extern "C" fn readmsg(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize {
    // SAFETY: the contract of fi_readmsg(3).
    unsafe {
        post(ep, |ep| {
            let msg = msg.as_ref().ok_or_else(no_message)?;
            ep.engine.read_msg(
                LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?,
                remote(msg.rma_iov, msg.rma_iov_count)?,
                token(msg.context),
                flags_of(flags, READ_FLAGS)?,
            )
        })
    }
}

unsafe extern "C" fn write(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    // SAFETY: the contract of fi_write(3).
    unsafe {
        post(ep, |ep| {
            ep.engine
                .write(LocalIov::single(&iov, &desc), addr, key, token(context))
        })
    }
}

unsafe extern "C" fn writev(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_writev(3).
    unsafe {
        post(ep, |ep| {
            ep.engine.write(
                LocalIov::from_raw(iov, desc, count)?,
                addr,
                key,
                token(context),
            )
        })
    }
}

unsafe extern "C" fn writemsg(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize {
    // SAFETY: the contract of fi_writemsg(3).
    unsafe {
        post(ep, |ep| {
            let msg = msg.as_ref().ok_or_else(no_message)?;
            if flags & FI_REMOTE_CQ_DATA != 0 {
                with_data(ep)?;
            }
            ep.engine.write_msg(
                LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?,
                remote(msg.rma_iov, msg.rma_iov_count)?,
                msg.data,
                token(msg.context),
                flags_of(flags, WRITE_FLAGS)?,
            )
        })
    }
}

unsafe extern "C" fn inject(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
) -> isize {
    // SAFETY: the contract of fi_inject_write(3).
    unsafe { post(ep, |ep| ep.engine.inject_write(buf, len, addr, key)) }
}

unsafe extern "C" fn writedata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    // SAFETY: the contract of fi_writedata(3).
    unsafe {
        post(ep, |ep| {
            with_data(ep)?;
            ep.engine.write_data(
                LocalIov::single(&iov, &desc),
                data,
                addr,
                key,
                token(context),
            )
        })
    }
}

unsafe extern "C" fn injectdata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    data: u64,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
) -> isize {
    // SAFETY: the contract of fi_inject_writedata(3).
    unsafe {
        post(ep, |ep| {
            with_data(ep)?;
            ep.engine.inject_write_data(buf, len, data, addr, key)
        })
    }
}
