//! The functions of fi_mr(3) as symbols. libfabric's header has them as inline functions only, so a
//! program that is not compiled from C has no symbol to call. They call the operations in the
//! object's tables, so they work with the objects of every provider.

use std::ffi::{c_int, c_void};

use libc::iovec;
use libfabric_sys::*;

/// -FI_EINVAL: NULL in place of an object. -FI_ENOSYS: the object's table lacks the operation.
const INVALID: c_int = -FI_EINVAL;
const MISSING: c_int = -FI_ENOSYS;

/// Calls the operation of a slot, if the table has it.
macro_rules! through {
    ($ops:expr, $type:ident, $slot:ident, $($arg:expr),*) => {{
        let ops: *const $type = $ops;
        if ops.is_null() {
            MISSING
        } else if (*ops).size <= std::mem::offset_of!($type, $slot) {
            MISSING // the table of an older provider ends before the slot
        } else if let Some(call) = (*ops).$slot {
            call($($arg),*)
        } else {
            MISSING
        }
    }};
}

/// fi_mr_reg(3): registers one buffer.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_reg(
    domain: *mut fid_domain,
    buf: *const c_void,
    len: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    mr: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    if domain.is_null() {
        return INVALID;
    }
    // SAFETY: the caller passes an open domain, as fi_mr(3) requires.
    unsafe {
        let fid = &raw mut (*domain).fid;
        through!(
            (*domain).mr,
            fi_ops_mr,
            reg,
            fid,
            buf,
            len,
            access,
            offset,
            requested_key,
            flags,
            mr,
            context
        )
    }
}

/// fi_mr_regv(3): registers several buffers as one region.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_regv(
    domain: *mut fid_domain,
    iov: *const iovec,
    count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    mr: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    if domain.is_null() {
        return INVALID;
    }
    // SAFETY: the caller passes an open domain, as fi_mr(3) requires.
    unsafe {
        let fid = &raw mut (*domain).fid;
        through!(
            (*domain).mr,
            fi_ops_mr,
            regv,
            fid,
            iov,
            count,
            access,
            offset,
            requested_key,
            flags,
            mr,
            context
        )
    }
}

/// fi_mr_regattr(3): registers by attributes. Their layout is that of the API version with which
/// the fabric was opened.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_regattr(
    domain: *mut fid_domain,
    attr: *const fi_mr_attr,
    flags: u64,
    mr: *mut *mut fid_mr,
) -> c_int {
    if domain.is_null() {
        return INVALID;
    }
    // SAFETY: the caller passes an open domain, as fi_mr(3) requires.
    unsafe {
        let fid = &raw mut (*domain).fid;
        through!((*domain).mr, fi_ops_mr, regattr, fid, attr, flags, mr)
    }
}

/// fi_mr_desc(3): the descriptor of a region for local operations.
///
/// # Safety
/// The region is NULL or open, as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_desc(mr: *mut fid_mr) -> *mut c_void {
    // SAFETY: the caller passes NULL or an open region.
    unsafe { mr.as_ref() }.map_or(std::ptr::null_mut(), |mr| mr.mem_desc)
}

/// fi_mr_key(3): the key of a region for peers; FI_KEY_NOTAVAIL if it has none.
///
/// # Safety
/// The region is NULL or open, as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_key(mr: *mut fid_mr) -> u64 {
    // SAFETY: the caller passes NULL or an open region.
    unsafe { mr.as_ref() }.map_or(FI_KEY_NOTAVAIL, |mr| mr.key)
}

/// Calls a control operation of a fid (`fi_control(3)`).
///
/// # Safety
/// `fid` is open, and `arg` is of the command's type.
unsafe fn control(fid: *mut fid, command: u32, arg: *mut c_void) -> c_int {
    // SAFETY: the caller promises an open fid and the argument.
    unsafe {
        let command = command.cast_signed();
        through!((*fid).ops, fi_ops, control, fid, command, arg)
    }
}

/// fi_mr_raw_attr(3): the raw key of a region and its base address.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_raw_attr(
    mr: *mut fid_mr,
    base_addr: *mut u64,
    raw_key: *mut u8,
    key_size: *mut usize,
    flags: u64,
) -> c_int {
    if mr.is_null() {
        return INVALID;
    }
    let mut attr = fi_mr_raw_attr {
        flags,
        base_addr,
        raw_key,
        key_size,
    };
    // SAFETY: the caller passes an open region, as fi_mr(3) requires.
    unsafe { control(&raw mut (*mr).fid, FI_GET_RAW_MR, (&raw mut attr).cast()) }
}

/// fi_mr_map_raw(3): maps a peer's raw key to a key for operations.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_map_raw(
    domain: *mut fid_domain,
    base_addr: u64,
    raw_key: *mut u8,
    key_size: usize,
    key: *mut u64,
    flags: u64,
) -> c_int {
    if domain.is_null() {
        return INVALID;
    }
    let mut map = fi_mr_map_raw {
        flags,
        base_addr,
        raw_key,
        key_size,
        key,
    };
    // SAFETY: the caller passes an open domain, as fi_mr(3) requires.
    unsafe { control(&raw mut (*domain).fid, FI_MAP_RAW_MR, (&raw mut map).cast()) }
}

/// fi_mr_unmap_key(3): unmaps a key of fi_mr_map_raw.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_unmap_key(domain: *mut fid_domain, key: u64) -> c_int {
    if domain.is_null() {
        return INVALID;
    }
    let mut key = key;
    // SAFETY: the caller passes an open domain, as fi_mr(3) requires.
    unsafe { control(&raw mut (*domain).fid, FI_UNMAP_KEY, (&raw mut key).cast()) }
}

/// fi_mr_bind(3): binds a counter or an endpoint to a region.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_bind(mr: *mut fid_mr, bfid: *mut fid, flags: u64) -> c_int {
    if mr.is_null() {
        return INVALID;
    }
    // SAFETY: the caller passes open objects, as fi_mr(3) requires.
    unsafe {
        let fid = &raw mut (*mr).fid;
        through!((*fid).ops, fi_ops, bind, fid, bfid, flags)
    }
}

/// fi_mr_refresh(3): reports that pages of a region have changed.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_refresh(
    mr: *mut fid_mr,
    iov: *const iovec,
    count: usize,
    flags: u64,
) -> c_int {
    if mr.is_null() {
        return INVALID;
    }
    // SAFETY: zeros are valid for every field; the caller passes an open region.
    unsafe {
        let mut modify = std::mem::zeroed::<fi_mr_modify>();
        modify.flags = flags;
        modify.attr.__bindgen_anon_1.mr_iov = iov;
        modify.attr.iov_count = count;
        control(&raw mut (*mr).fid, FI_REFRESH, (&raw mut modify).cast())
    }
}

/// fi_mr_enable(3): enables a region that was created disabled.
///
/// # Safety
/// The arguments are as fi_mr(3) requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_enable(mr: *mut fid_mr) -> c_int {
    if mr.is_null() {
        return INVALID;
    }
    // SAFETY: the caller passes an open region, as fi_mr(3) requires.
    unsafe { control(&raw mut (*mr).fid, FI_ENABLE, std::ptr::null_mut()) }
}
