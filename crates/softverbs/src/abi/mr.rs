//! Registering memory.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::context::Context;
use super::pd::Pd;
use super::{non_null, pointer, status};
use crate::region::{self, Key, Range, access, odp};
use crate::sys::{Errno, Res};

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
    pointer(|| unsafe { register(pd, addr, length, iova, access) })
}

/// # Errors
/// As `region::access` has them, and `ENOMEM`.
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
    let access = access::check(access)?;
    let range = Range {
        addr: addr as u64,
        len: length as u64,
        iova,
    };
    access::check_range(range, access)?;
    let key = process
        .regions
        .register(&process.segment, domain.number, range, access)?;
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

/// `ibv_advise_mr`.
pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sge: u32,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live domain, whose context is live.
        let (domain, context) = unsafe { (Pd::from_ptr(pd), Context::from_ptr((*pd).context)) };
        let process = context.live()?;
        if !odp::enabled() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let pieces = if num_sge == 0 {
            &[]
        } else {
            non_null(sg_list)?;
            // SAFETY: the caller promises a list of that many.
            unsafe { std::slice::from_raw_parts(sg_list, num_sge as usize) }
        };
        region::advise(&process.regions, domain.number, advice, flags, pieces)
    })
}
