//! Remote reads and writes, `fi_rma(3)`, on endpoints of any kind.

use std::ffi::c_void;

use libc::iovec;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::Desc;
use weft::msg::{LocalIov, RemoteIov};

use crate::data::traits::{Remote, Rma, TX_FLAGS, buffer, flags_of, message, post, token};
use crate::ffi::log::refused;
use crate::ffi::stub;

/// The table of an endpoint kind.
pub(crate) const fn ops<E: Rma>() -> fi_ops_rma {
    write_ops::<E>(read_ops::<E>(stub::rma::<FI_ENOSYS>()))
}

/// The table of a kind that only reads; its other calls are those of `rest`.
pub(crate) const fn read_ops<E: Rma>(rest: fi_ops_rma) -> fi_ops_rma {
    fi_ops_rma {
        read: Some(read::<E>),
        readv: Some(readv::<E>),
        readmsg: Some(readmsg::<E>),
        ..rest
    }
}

/// The table of a kind that only writes; its other calls are those of `rest`.
pub(crate) const fn write_ops<E: Rma>(rest: fi_ops_rma) -> fi_ops_rma {
    fi_ops_rma {
        write: Some(write::<E>),
        writev: Some(writev::<E>),
        writemsg: Some(writemsg::<E>),
        inject: Some(inject::<E>),
        writedata: Some(writedata::<E>),
        injectdata: Some(injectdata::<E>),
        ..rest
    }
}

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

/// The ranges of the peer's memory.
///
/// # Errors
/// `EINVAL`: NULL, no range, or more ranges than the endpoint kind supports.
///
/// # Safety
/// `iov` is NULL or has `count` elements.
#[inline(always)]
unsafe fn remote<'a, E: Rma>(iov: *const fi_rma_iov, count: usize) -> Result<&'a [RemoteIov]> {
    // The limit is checked before the slice is made: a wrong count may exceed the list.
    if iov.is_null() || count == 0 || count > E::RMA_IOV_LIMIT {
        return Err(other_count(count, E::RMA_IOV_LIMIT));
    }
    // SAFETY: the caller's promise; the two types have one layout, asserted above.
    Ok(unsafe { std::slice::from_raw_parts(iov.cast(), count) })
}

/// Remote CQ data of a write consumes a receive at the target (`FI_RX_CQ_DATA`), which this
/// endpoint must have negotiated.
#[inline(always)]
fn check_data(ep: &impl Rma) -> Result<()> {
    if ep.writes_data() {
        Ok(())
    } else {
        Err(no_data())
    }
}

/// Logs the refusal at `info`.
#[cold]
fn other_count(count: usize, limit: usize) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "the operation has {count} remote ranges; rma_iov_limit is {limit}"
    )
}

/// Logs the refusal at `info`.
#[cold]
fn no_data() -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EOPNOTSUPP,
        "remote CQ data of a write requires an endpoint that was opened with mode FI_RX_CQ_DATA"
    )
}

unsafe extern "C" fn read<E: Rma>(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    src_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_read(3).
    unsafe {
        post::<E>(ep, |ep| {
            let remote = Remote::One { addr, key };
            ep.read(src_addr, local, remote, token(context), None)
        })
    }
}

unsafe extern "C" fn readv<E: Rma>(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    src_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_readv(3).
    unsafe {
        post::<E>(ep, |ep| {
            let local = LocalIov::from_raw(iov, desc, count)?;
            let remote = Remote::One { addr, key };
            ep.read(src_addr, local, remote, token(context), None)
        })
    }
}

unsafe extern "C" fn readmsg<E: Rma>(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize {
    // SAFETY: the contract of fi_readmsg(3).
    unsafe {
        post::<E>(ep, |ep| {
            let msg = message(msg)?;
            let local = LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?;
            let remote = remote::<E>(msg.rma_iov, msg.rma_iov_count)?;
            let flags = flags_of(flags, READ_FLAGS)?;
            let remote = Remote::List(remote);
            ep.read(msg.addr, local, remote, token(msg.context), Some(flags))
        })
    }
}

unsafe extern "C" fn write<E: Rma>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_write(3).
    unsafe {
        post::<E>(ep, |ep| {
            let remote = Remote::One { addr, key };
            ep.write(dest_addr, local, remote, None, token(context), None)
        })
    }
}

unsafe extern "C" fn writev<E: Rma>(
    ep: *mut fid_ep,
    iov: *const iovec,
    desc: *mut *mut c_void,
    count: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_writev(3).
    unsafe {
        post::<E>(ep, |ep| {
            let local = LocalIov::from_raw(iov, desc, count)?;
            let remote = Remote::One { addr, key };
            ep.write(dest_addr, local, remote, None, token(context), None)
        })
    }
}

unsafe extern "C" fn writemsg<E: Rma>(
    ep: *mut fid_ep,
    msg: *const fi_msg_rma,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_writemsg(3).
    unsafe {
        post::<E>(ep, |ep| {
            let msg = message(msg)?;
            if flags & FI_REMOTE_CQ_DATA != 0 {
                check_data(ep)?;
            }
            let local = LocalIov::from_raw(msg.msg_iov, msg.desc, msg.iov_count)?;
            let remote = remote::<E>(msg.rma_iov, msg.rma_iov_count)?;
            let flags = flags_of(flags, WRITE_FLAGS)?;
            let (remote, data) = (Remote::List(remote), Some(msg.data));
            ep.write(
                msg.addr,
                local,
                remote,
                data,
                token(msg.context),
                Some(flags),
            )
        })
    }
}

unsafe extern "C" fn inject<E: Rma>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
) -> isize {
    // SAFETY: the contract of fi_inject_write(3).
    unsafe {
        post::<E>(ep, |ep| {
            ep.inject_write(dest_addr, buf, len, (addr, key), None)
        })
    }
}

unsafe extern "C" fn writedata<E: Rma>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (iov, desc) = (buffer(buf, len), Desc(desc));
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: the contract of fi_writedata(3).
    unsafe {
        post::<E>(ep, |ep| {
            check_data(ep)?;
            let remote = Remote::One { addr, key };
            ep.write(dest_addr, local, remote, Some(data), token(context), None)
        })
    }
}

unsafe extern "C" fn injectdata<E: Rma>(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    data: u64,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
) -> isize {
    // SAFETY: the contract of fi_inject_writedata(3).
    unsafe {
        post::<E>(ep, |ep| {
            check_data(ep)?;
            ep.inject_write(dest_addr, buf, len, (addr, key), Some(data))
        })
    }
}
