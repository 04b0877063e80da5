//! The calls of fi_mr(3) as symbols: libfabric's header has them as inline functions only, so that a program
//! that no C compiler made has nothing to call. They go through the object's own operations, and so work on
//! every provider's.

use std::ffi::{c_int, c_void};

use libc::iovec;
use libfabric_sys::*;

/// The negative errno of a call that can't be made.
const INVALID: c_int = -FI_EINVAL;
const MISSING: c_int = -FI_ENOSYS;

/// Calls the operation of a slot, where the table has it.
macro_rules! through {
    ($ops:expr, $type:ident, $slot:ident, $($arg:expr),*) => {{
        let ops: *const $type = $ops;
        if ops.is_null() {
            MISSING
        } else if (*ops).size <= std::mem::offset_of!($type, $slot) {
            MISSING // the table of an older provider
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
/// As the C function of this name.
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
    // SAFETY: an open domain by the contract of the call.
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
/// As the C function of this name.
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
    // SAFETY: an open domain by the contract of the call.
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

/// fi_mr_regattr(3): registers what the attributes say. They have the layout of the API version that the
/// fabric was opened with.
///
/// # Safety
/// As the C function of this name.
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
    // SAFETY: an open domain by the contract of the call.
    unsafe {
        let fid = &raw mut (*domain).fid;
        through!((*domain).mr, fi_ops_mr, regattr, fid, attr, flags, mr)
    }
}

/// fi_mr_desc(3): the descriptor for local operations.
///
/// # Safety
/// As the C function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_desc(mr: *mut fid_mr) -> *mut c_void {
    // SAFETY: NULL or an open region by the contract of the call.
    unsafe { mr.as_ref() }.map_or(std::ptr::null_mut(), |mr| mr.mem_desc)
}

/// fi_mr_key(3): the key for peers; FI_KEY_NOTAVAIL where there is none.
///
/// # Safety
/// As the C function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_key(mr: *mut fid_mr) -> u64 {
    // SAFETY: NULL or an open region by the contract of the call.
    unsafe { mr.as_ref() }.map_or(FI_KEY_NOTAVAIL, |mr| mr.key)
}

/// A control operation of a fid.
///
/// # Safety
/// `fid` is open, and `arg` what the command takes.
unsafe fn control(fid: *mut fid, command: u32, arg: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let command = command.cast_signed();
        through!((*fid).ops, fi_ops, control, fid, command, arg)
    }
}

/// fi_mr_raw_attr(3): the raw key, and the address that it begins at.
///
/// # Safety
/// As the C function of this name.
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
    // SAFETY: an open region by the contract of the call.
    unsafe { control(&raw mut (*mr).fid, FI_GET_RAW_MR, (&raw mut attr).cast()) }
}

/// fi_mr_map_raw(3): makes a key for operations of a peer's raw key.
///
/// # Safety
/// As the C function of this name.
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
    // SAFETY: an open domain by the contract of the call.
    unsafe { control(&raw mut (*domain).fid, FI_MAP_RAW_MR, (&raw mut map).cast()) }
}

/// fi_mr_unmap_key(3): undoes fi_mr_map_raw.
///
/// # Safety
/// As the C function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_unmap_key(domain: *mut fid_domain, key: u64) -> c_int {
    if domain.is_null() {
        return INVALID;
    }
    let mut key = key;
    // SAFETY: an open domain by the contract of the call.
    unsafe { control(&raw mut (*domain).fid, FI_UNMAP_KEY, (&raw mut key).cast()) }
}

/// fi_mr_bind(3): binds a counter or an endpoint to a region.
///
/// # Safety
/// As the C function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_bind(mr: *mut fid_mr, bfid: *mut fid, flags: u64) -> c_int {
    if mr.is_null() {
        return INVALID;
    }
    // SAFETY: open objects by the contract of the call.
    unsafe {
        let fid = &raw mut (*mr).fid;
        through!((*fid).ops, fi_ops, bind, fid, bfid, flags)
    }
}

/// fi_mr_refresh(3): tells that pages of a region have changed.
///
/// # Safety
/// As the C function of this name.
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
    // SAFETY: zeros are a value of every field; an open region by the contract of the call.
    unsafe {
        let mut modify = std::mem::zeroed::<fi_mr_modify>();
        modify.flags = flags;
        modify.attr.__bindgen_anon_1.mr_iov = iov;
        modify.attr.iov_count = count;
        control(&raw mut (*mr).fid, FI_REFRESH, (&raw mut modify).cast())
    }
}

/// fi_mr_enable(3): makes a region that was made disabled accessible.
///
/// # Safety
/// As the C function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_mr_enable(mr: *mut fid_mr) -> c_int {
    if mr.is_null() {
        return INVALID;
    }
    // SAFETY: an open region by the contract of the call.
    unsafe { control(&raw mut (*mr).fid, FI_ENABLE, std::ptr::null_mut()) }
}
