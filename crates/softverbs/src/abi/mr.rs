//! Registering memory.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::context::Context;
use super::pd::Pd;
use super::{pointer, status};
use crate::region::Key;
use crate::sys::{self, Errno, Res};

/// Access bits that are offered.
const OFFERED: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_ZERO_BASED;
/// Access bits that a device may ignore.
const OPTIONAL: u32 = 0x3ff0_0000;

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let iova = if access.cast_unsigned() & IBV_ACCESS_ZERO_BASED != 0 {
        0
    } else {
        addr as u64
    };
    // SAFETY: the caller promises a live domain.
    pointer(|| unsafe { register(pd, addr, length, iova, access.cast_unsigned()) })
}

pub(super) unsafe extern "C" fn reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller promises a live domain.
    pointer(|| unsafe { register(pd, addr, length, iova, access.cast_unsigned()) })
}

pub(super) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller promises a live domain.
    pointer(|| unsafe { register(pd, addr, length, iova, access & !OPTIONAL) })
}

/// # Errors
/// `EINVAL` for length 0, a range that wraps, or rights that need local write and lack it,
/// `EOPNOTSUPP` for rights that are not offered, `EFAULT` for memory that is not there or can't
/// be written as asked, `ENOMEM`.
unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> Res<*mut ibv_mr> {
    // SAFETY: the caller promises a live domain, whose context is live.
    let (domain, context) = unsafe { (Pd::from_ptr(pd), (*pd).context) };
    // SAFETY: as above.
    let process = unsafe { Context::from_ptr(context) }.live()?;
    if access & !OFFERED != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    // Remote writing needs local writing (11.2.8.2).
    let remote_write = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    let write = access & IBV_ACCESS_LOCAL_WRITE != 0;
    if length == 0
        || access & remote_write != 0 && !write
        || (addr as u64).checked_add(length as u64).is_none()
        || iova.checked_add(length as u64).is_none()
    {
        return Err(Errno(libc::EINVAL));
    }
    // What a device pins must be there, for writing where it may be written.
    if !sys::pages_usable(addr as u64, length, write) {
        return Err(Errno(libc::EFAULT));
    }
    let key = process.regions.register(
        &process.segment,
        domain.number,
        addr as u64,
        length as u64,
        iova,
        access,
    )?;
    domain.children.fetch_add(1, Ordering::Relaxed);
    Ok(Box::into_raw(Box::new(ibv_mr {
        context,
        pd,
        addr,
        length,
        handle: key.0,
        lkey: key.0,
        rkey: key.0,
    })))
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live region, whose domain and context are live.
        let (domain, context, key) = unsafe {
            (
                Pd::from_ptr((*mr).pd),
                Context::from_ptr((*mr).context),
                Key((*mr).handle),
            )
        };
        let process = context.process;
        if !process.forked() {
            process
                .regions
                .deregister(&process.segment, key, |slot| process.lives(slot))?;
            domain.children.fetch_sub(1, Ordering::Relaxed);
        }
        // SAFETY: made by `Box::into_raw` in `register`.
        drop(unsafe { Box::from_raw(mr) });
        Ok(())
    })
}
