//! `fi_open_ops` of a domain: the table `weft_mr_ops` (`include/weft.h`).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::{Access, AdvisedRange, Buffer, HANDLE_SIZE, Hint, RegionConfig, SharedMemory};

use crate::domain::Domain;
use crate::exports::mr_ops::{
    WEFT_MAP_FIXED, WEFT_MR_HANDLE_SIZE, weft_mr_attr, weft_mr_ops, weft_mr_range,
};
use crate::ffi::fid::{Object, close, object, on};
use crate::ffi::log::info;
use crate::monitor;
use crate::mr::{self, Mr};
use crate::mr_attr::{self, access_of, check_flags};
use crate::xrcd::{self, Xrcd};

/// The name of the table in `fi_open_ops`.
const NAME: &CStr = c"weft_mr_ops";

static OPS: weft_mr_ops = weft_mr_ops {
    size: size_of::<weft_mr_ops>(),
    advise: Some(advise),
    mr_alloc: Some(mr_alloc),
    mr_free: Some(mr_free),
    mr_export: Some(mr_export),
    mr_import: Some(mr_import),
    xrcd_open: Some(xrcd_open),
    xrcd_close: Some(close::<Xrcd>),
    mr_prefetched: Some(mr_prefetched),
    monitor_import: Some(monitor_import),
};

const _: () = assert!(WEFT_MR_HANDLE_SIZE == HANDLE_SIZE);

/// `fi_open_ops`. An unknown name is `-FI_ENOSYS`, as from a provider without tables: ofi_rxm
/// requests its own table from each domain below it, and fails on any other error.
pub(crate) unsafe extern "C" fn open(
    handle: *mut fid,
    name: *const c_char,
    flags: u64,
    ops: *mut *mut c_void,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: a fid by the contract of fi_open_ops(3).
    let domain = unsafe { object::<Domain>(handle) };
    on(domain, |_| {
        if name.is_null() || ops.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        // SAFETY: not NULL, a C string by that contract.
        let name = unsafe { CStr::from_ptr(name) };
        if name != NAME {
            info!(
                FI_LOG_DOMAIN,
                "fi_open_ops: a domain has no operations named {}",
                name.to_string_lossy()
            );
            return Err(FiErrno::ENOSYS);
        }
        // SAFETY: not NULL.
        unsafe { *ops = (&raw const OPS).cast_mut().cast() };
        Ok(0)
    })
}

/// `weft_mr_ops.advise`
unsafe extern "C" fn advise(
    domain: *mut fid_domain,
    advice: u32,
    flags: u32,
    ranges: *const weft_mr_range,
    count: usize,
) -> c_int {
    // SAFETY: a domain by the contract of the call.
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
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
            let mr = unsafe { object::<Mr>(range.mr)? };
            Ok(AdvisedRange {
                region: mr.region(),
                addr: range.addr,
                len: range.len as u64,
            })
        });
        let list = list.collect::<Result<Vec<_>>>()?;
        domain.engine.mr().advise(advice, flags, &list)?;
        Ok(0)
    })
}

/// The attributes, and the hint for the address of the memory.
///
/// # Safety
/// `attr` is NULL or has the size in its size field.
unsafe fn attributes(attr: *const weft_mr_attr) -> Result<(weft_mr_attr, Access, Hint)> {
    if attr.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: not NULL; every release begins with the size, and this one has all that is read.
    let attr = unsafe {
        if (*attr).size < size_of::<weft_mr_attr>() {
            return Err(FiErrno::EINVAL);
        }
        *attr
    };
    check_flags(attr.flags)?;
    let access = access_of(attr.access)?;
    if attr.map_flags & !WEFT_MAP_FIXED != 0 {
        return Err(FiErrno::EBADFLAGS);
    }
    let hint = Hint {
        addr: attr.addr,
        fixed: attr.map_flags & WEFT_MAP_FIXED != 0,
    };
    Ok((attr, access, hint))
}

/// Registers the memory that `make` returns for a length and a place.
///
/// # Safety
/// `domain` is NULL or a fid, `attr` NULL or of the size in its size field, the others NULL or
/// writable.
unsafe fn shared(
    domain: *mut fid_domain,
    attr: *const weft_mr_attr,
    (addr, len, mr): (*mut *mut c_void, *mut usize, *mut *mut fid_mr),
    make: impl FnOnce(&Object<Domain>, Access, Hint) -> Result<Arc<SharedMemory>>,
) -> c_int {
    let mut made = None;
    // SAFETY: the caller passes NULL or a fid.
    let opened = unsafe { object::<Domain>(domain) };
    let ret = on(opened, |domain| {
        if addr.is_null() || mr.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: the caller passes NULL or a structure of the size in its size field.
        let (attr, access, hint) = unsafe { attributes(attr)? };
        made = Some((make(domain, access, hint)?, attr));
        Ok(0)
    });
    let Some((memory, attr)) = made else {
        return ret;
    };
    let register = |domain: &Object<Domain>| {
        let buffer = Buffer {
            addr: memory.addr(),
            len: memory.len(),
        };
        let config = RegionConfig {
            buffers: std::slice::from_ref(&buffer),
            memory: Some(&memory),
            ..mr_attr::config(attr.access, 0, attr.requested_key, attr.flags)?
        };
        // SAFETY: the region owns the memory; `mr` is not NULL, and writable by the caller's
        // promise.
        unsafe { mr::register(domain, &config, None, (attr.context, mr)) }
    };
    // SAFETY: `addr` is not NULL; `addr` and `len` are writable by the caller's promise.
    unsafe {
        // Set before the registration: after its event another thread may read both.
        let before = addr.replace(memory.addr());
        let len_before = (!len.is_null()).then(|| len.replace(memory.len()));
        let ret = mr::registering(opened, register);
        if ret != 0 {
            *addr = before;
            if let Some(before) = len_before {
                *len = before;
            }
        }
        ret
    }
}

/// `weft_mr_ops.mr_alloc`
unsafe extern "C" fn mr_alloc(
    domain: *mut fid_domain,
    len: usize,
    attr: *const weft_mr_attr,
    addr: *mut *mut c_void,
    mr: *mut *mut fid_mr,
) -> c_int {
    let out = (addr, std::ptr::null_mut(), mr);
    // SAFETY: the arguments are those of this function, which keep the contract of `shared`.
    unsafe {
        shared(domain, attr, out, |domain, _, hint| {
            SharedMemory::alloc(domain.engine.device(), len, hint)
        })
    }
}

/// `weft_mr_ops.mr_import`
unsafe extern "C" fn mr_import(
    domain: *mut fid_domain,
    handle: *const c_void,
    size: usize,
    attr: *const weft_mr_attr,
    addr: *mut *mut c_void,
    len: *mut usize,
    mr: *mut *mut fid_mr,
) -> c_int {
    let import = |domain: &Object<Domain>, access, hint| {
        if handle.is_null() || size != HANDLE_SIZE {
            return Err(FiErrno::EINVAL);
        }
        let mut bytes = [0; HANDLE_SIZE];
        // SAFETY: not NULL, with as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(handle.cast(), bytes.as_mut_ptr(), size) };
        SharedMemory::import(domain.engine.device(), &bytes, access, hint)
    };
    // SAFETY: the arguments are those of this function, which keep the contract of `shared`.
    unsafe { shared(domain, attr, (addr, len, mr), import) }
}

/// `weft_mr_ops.mr_free`
unsafe extern "C" fn mr_free(mr: *mut fid_mr) -> c_int {
    // SAFETY: a region by the contract of the call.
    match unsafe { object::<Mr>(mr) } {
        Ok(object) if object.region().is_shared() => {}
        Ok(_) => return -FI_EINVAL,
        Err(errno) => return -errno.code(),
    }
    // SAFETY: a region by the contract of the call; no other call on it runs or follows.
    unsafe { close::<Mr>(mr.cast()) }
}

/// `weft_mr_ops.mr_export`
unsafe extern "C" fn mr_export(
    mr: *mut fid_mr,
    access: u64,
    handle: *mut c_void,
    size: *mut usize,
) -> c_int {
    // SAFETY: a region by the contract of the call.
    let mr = unsafe { object::<Mr>(mr) };
    on(mr, |mr| {
        if size.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let access = access_of(access)?;
        let bytes = mr.region().export(access)?;
        // SAFETY: not NULL; the caller promises room for `*size` bytes.
        unsafe {
            if size.replace(bytes.len()) < bytes.len() {
                return Err(FiErrno::ETOOSMALL);
            }
            if handle.is_null() {
                return Err(FiErrno::EINVAL);
            }
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), handle.cast(), bytes.len());
        }
        Ok(0)
    })
}

/// `weft_mr_ops.mr_prefetched`
unsafe extern "C" fn mr_prefetched(mr: *mut fid_mr, pages: *mut u64) -> c_int {
    // SAFETY: a region by the contract of the call.
    let mr = unsafe { object::<Mr>(mr) };
    on(mr, |mr| {
        if pages.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let count = mr.region().prefetched()?;
        // SAFETY: not NULL; the caller has room for it.
        unsafe { *pages = count };
        Ok(0)
    })
}

/// `weft_mr_ops.xrcd_open`
unsafe extern "C" fn xrcd_open(
    domain: *mut fid_domain,
    path: *const c_char,
    fd: c_int,
    oflags: c_int,
    out: *mut *mut fid,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of the call.
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        // SAFETY: the other arguments by the contract of the call.
        unsafe { xrcd::open(domain, (path, fd), oflags, out, context)? };
        Ok(0)
    })
}

/// `weft_mr_ops.monitor_import`
unsafe extern "C" fn monitor_import(
    domain: *mut fid_domain,
    monitor: *mut fid_mem_monitor,
) -> c_int {
    // SAFETY: a domain by the contract of the call.
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        // SAFETY: a monitor by the contract of the call.
        unsafe { monitor::import(domain, monitor)? };
        Ok(0)
    })
}
