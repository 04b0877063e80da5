//! `fi_open_ops` of a domain: the table `weft_mr_ops` (`include/weft.h`).

use std::ffi::{CStr, c_char, c_int, c_void};

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::AdvisedRange;

use crate::domain::Domain;
use crate::exports::mr_ops::{weft_mr_ops, weft_mr_range};
use crate::ffi::fid::Object;
use crate::ffi::guard;
use crate::ffi::log::info;
use crate::mr::Mr;

/// What the table is asked for by.
const NAME: &CStr = c"weft_mr_ops";

static OPS: weft_mr_ops = weft_mr_ops {
    size: size_of::<weft_mr_ops>(),
    advise: Some(advise),
};

/// `fi_open_ops`. A name that is not known is `-FI_ENOSYS`, as of a provider without tables: ofi_rxm asks each domain below
/// it for its own, and takes any other error for the end.
pub(crate) unsafe extern "C" fn open(
    handle: *mut fid,
    name: *const c_char,
    flags: u64,
    ops: *mut *mut c_void,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: a fid by the contract of fi_open_ops(3).
    let domain = match unsafe { Object::<Domain>::checked(handle) } {
        Ok(domain) => domain,
        Err(errno) => return -errno.code(),
    };
    guard::on(&domain.poison, || {
        if name.is_null() || ops.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        // SAFETY: not NULL, a C string by that contract.
        let name = unsafe { CStr::from_ptr(name) };
        if name != NAME {
            info!(FI_LOG_DOMAIN, "fi_open_ops: no {}", name.to_string_lossy());
            return Err(FiErrno::ENOSYS);
        }
        // SAFETY: not NULL.
        unsafe { *ops = (&raw const OPS).cast_mut().cast() };
        Ok(0)
    })
}

/// Runs a call of the table on its domain.
///
/// # Safety
/// `domain` is NULL or a fid.
unsafe fn on(domain: *mut fid_domain, body: impl FnOnce(&Domain) -> Result<()>) -> c_int {
    // SAFETY: the caller's promise.
    let domain = match unsafe { Object::<Domain>::checked(domain) } {
        Ok(domain) => domain,
        Err(errno) => return -errno.code(),
    };
    guard::on(&domain.poison, || body(domain).map(|()| 0))
}

/// `weft_mr_ops.advise`
unsafe extern "C" fn advise(
    domain: *mut fid_domain,
    advice: u32,
    flags: u32,
    ranges: *const weft_mr_range,
    count: usize,
) -> c_int {
    let body = |domain: &Domain| {
        let list = if count == 0 {
            &[]
        } else if ranges.is_null() || count > isize::MAX as usize / size_of::<weft_mr_range>() {
            return Err(FiErrno::EINVAL);
        } else {
            // SAFETY: not NULL; the caller has as many.
            unsafe { std::slice::from_raw_parts(ranges, count) }
        };
        let list = list.iter().map(|range| {
            // SAFETY: a region by the contract of the call.
            let mr = unsafe { Object::<Mr>::checked(range.mr)? };
            Ok(AdvisedRange {
                region: mr.region(),
                addr: range.addr,
                len: range.len as u64,
            })
        });
        let list = list.collect::<Result<Vec<_>>>()?;
        domain.engine.advise(advice, flags, &list)
    };
    // SAFETY: a domain by the contract of the call.
    unsafe { on(domain, body) }
}
