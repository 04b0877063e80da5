//! Registration of memory.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::entry::{non_null, pointer, status};
use crate::key::Key;
use crate::object::{Buf, Context, Pd, region_object};
use crate::process::Process;
use crate::region::{self, Range, access, odp};
use crate::sys::{Errno, Res, room};

/// The address of the first byte in requests, if the caller has not chosen one.
fn default_iova(addr: *mut c_void, access: u32) -> u64 {
    if access & IBV_ACCESS_ZERO_BASED != 0 {
        0
    } else {
        addr as u64
    }
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let iova = default_iova(addr, access.cast_unsigned());
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
    // `ibv_reg_mr` of verbs.h is this call, with the address, unless the rights are a constant
    let iova = match iova == addr as u64 {
        true => default_iova(addr, access),
        false => iova,
    };
    // SAFETY: the caller promises a live domain.
    pointer(|| unsafe { register(pd, addr, length, iova, access) })
}

/// # Errors
/// Those of `region::access`, and `ENOMEM`.
unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> Res<*mut ibv_mr> {
    // SAFETY: the caller promises a live domain, whose context is live.
    let (domain, context) = unsafe { (Pd::from_ptr(pd), (*pd).context) };
    // SAFETY: the caller promises a live domain, whose context is live.
    let process = unsafe { Context::from_ptr(context) }.live()?;
    let access = access::check(access)?;
    let range = Range {
        addr: addr as u64,
        len: length as u64,
        iova,
    };
    access::check_range(range, access)?;
    let room = room()?;
    let key = process.add_region(domain.number, range, access)?;
    domain.children.fetch_add(1, Ordering::Relaxed);
    Ok(region_object(room, context, pd, addr, length, key, key))
}

/// `ibv_reg_mr_ex`: memory by its address, with any IOVA.
///
/// Sets `EOPNOTSUPP` for a file or a hint, which this device does not support.
pub(super) unsafe extern "C" fn reg_mr_ex(
    pd: *mut ibv_pd,
    init: *mut ibv_mr_init_attr,
) -> *mut ibv_mr {
    pointer(|| {
        non_null(init)?;
        // SAFETY: the caller promises a valid structure.
        let init = unsafe { &*init };
        let has = |bit: u32| init.comp_mask & u64::from(bit) != 0;
        let offered = IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR | IBV_REG_MR_MASK_BUF;
        let file = IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET;
        if has(IBV_REG_MR_MASK_BUF) {
            // SAFETY: the caller promises a live buffer.
            unsafe { Buf::check(pd, init)? };
        }
        if has(IBV_REG_MR_MASK_ADDR) && has(file) {
            return Err(Errno(libc::EINVAL));
        }
        if init.comp_mask & !u64::from(offered) != 0 {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        if !has(IBV_REG_MR_MASK_ADDR) {
            return Err(Errno(libc::EINVAL));
        }
        let access = init.access.cast_unsigned();
        let iova = if has(IBV_REG_MR_MASK_IOVA) {
            init.iova
        } else {
            default_iova(init.addr, access)
        };
        // SAFETY: the caller promises a live domain.
        unsafe { register(pd, init.addr, init.length, iova, access) }
    })
}

/// `ibv_alloc_null_mr`: reads return zeros, and written data is discarded. It has no rkey.
pub(super) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: the caller promises a live domain, whose context is live.
        let (domain, context) = unsafe { (Pd::from_ptr(pd), (*pd).context) };
        // SAFETY: the caller promises a live domain, whose context is live.
        let process = unsafe { Context::from_ptr(context) }.live()?;
        let room = room()?;
        let key = process
            .regions
            .register_null(&process.segment, domain.number)?;
        domain.children.fetch_add(1, Ordering::Relaxed);
        let nowhere = std::ptr::null_mut();
        Ok(region_object(
            room,
            context,
            pd,
            nowhere,
            usize::MAX,
            key,
            Key(0),
        ))
    })
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: as this function.
    unsafe { deregister(mr, Process::end_region) }
}

/// `softdv_dereg_mr_now`: as `ibv_dereg_mr(3)`, without a wait. `EBUSY`: a peer executes a request
/// with the key, which is invalid; or a window is bound to the region, or was and is still used,
/// and the key is valid. The caller can repeat the call, or call `ibv_dereg_mr(3)`.
pub(super) unsafe extern "C" fn dereg_mr_now(mr: *mut ibv_mr) -> c_int {
    // SAFETY: as this function.
    unsafe { deregister(mr, Process::end_region_now) }
}

/// # Safety
/// The region is live.
unsafe fn deregister(mr: *mut ibv_mr, end: impl FnOnce(&Process, Key) -> Res<()>) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live region, whose domain and context are live.
        let (domain, context, key) = unsafe {
            (
                Pd::from_ptr((*mr).pd),
                Context::from_ptr((*mr).context),
                Key((*mr).handle),
            )
        };
        let process = context.live()?;
        end(process, key)?;
        domain.children.fetch_sub(1, Ordering::Relaxed);
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
        let sges = if num_sge == 0 {
            &[]
        } else {
            non_null(sg_list)?;
            // SAFETY: the caller promises a list of this length.
            unsafe { std::slice::from_raw_parts(sg_list, num_sge as usize) }
        };
        let is_window = |key| process.windows.has(key);
        region::advise(
            &process.regions,
            is_window,
            domain.number,
            advice,
            flags,
            sges,
        )
    })
}

pub(super) unsafe extern "C" fn reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let mut init = ibv_mr_init_attr {
        length,
        access,
        comp_mask: u64::from(IBV_REG_MR_MASK_BUF | IBV_REG_MR_MASK_ADDR),
        addr,
        buf,
        ..ibv_mr_init_attr::default()
    };
    // SAFETY: as this function.
    unsafe { reg_mr_ex(pd, &raw mut init) }
}
