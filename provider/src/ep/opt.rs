//! `fi_getopt` and `fi_setopt` of endpoints, fi_endpoint(3).

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::msg::{ATOMIC_SIZE, LengthOption};
use weft::rdm::MAX_ATOMIC_SIZE;
use weft::verbs::Device;
use weft::wire::cm_data::MAX_CM_DATA;

use crate::ep::msg_ep::Ep;
use crate::ep::rdm_ep::RdmEp;
use crate::ep::rdm_srx::RdmSrx;
use crate::ffi::fid::{object, on};
use crate::pep::Pep;

/// Stores an option's value, a `size_t` or an `int`, in the buffer, and its size in `*len`.
///
/// # Safety
/// `len` is NULL or writable; `buf` is NULL or has `*len` bytes.
unsafe fn answer<T>(value: T, buf: *mut c_void, len: *mut usize) -> Result<c_int> {
    if len.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: not NULL; the caller passes a writable `len`, and `*len` bytes in `buf`.
    unsafe {
        let room = len.replace(size_of::<T>());
        if room < size_of::<T>() {
            return Err(FiErrno::ETOOSMALL);
        }
        if buf.is_null() {
            return Err(FiErrno::EINVAL);
        }
        buf.cast::<T>().write_unaligned(value);
    }
    Ok(0)
}

/// The value of `FI_OPT_FI_HMEM_P2P`, for [`answer`].
fn p2p_of(p2p: &AtomicU32) -> c_int {
    p2p.load(Ordering::Relaxed).cast_signed()
}

/// The errno of `fi_getopt(3)` for an option that the endpoint does not have.
fn no_option(name: u32) -> FiErrno {
    match name {
        // the page has an own answer for endpoints without triggered operations
        FI_OPT_XPU_TRIGGER => FiErrno::EOPNOTSUPP,
        _ => FiErrno::ENOPROTOOPT,
    }
}

/// The length option with this name.
///
/// # Errors
/// `ENOPROTOOPT`: not a length option.
fn length(name: u32) -> Result<LengthOption> {
    match name {
        FI_OPT_MAX_MSG_SIZE => Ok(LengthOption::MaxMsg),
        FI_OPT_MAX_RMA_SIZE => Ok(LengthOption::MaxRma),
        FI_OPT_INJECT_MSG_SIZE => Ok(LengthOption::InjectMsg),
        FI_OPT_INJECT_RMA_SIZE => Ok(LengthOption::InjectRma),
        _ => Err(FiErrno::ENOPROTOOPT),
    }
}

/// `fi_getopt(3)` of passive endpoints.
pub(crate) unsafe extern "C" fn getopt_pep(
    handle: *mut fid,
    level: c_int,
    name: c_int,
    buf: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: a passive endpoint by the contract of fi_getopt(3).
    let pep = unsafe { object::<Pep>(handle) };
    on(pep, |_| {
        match (level.cast_unsigned(), name.cast_unsigned()) {
            // SAFETY: a buffer and its length by the contract of fi_getopt(3).
            (FI_OPT_ENDPOINT, FI_OPT_CM_DATA_SIZE) => unsafe { answer(MAX_CM_DATA, buf, len) },
            _ => Err(FiErrno::ENOPROTOOPT),
        }
    })
}

/// `fi_setopt(3)` of passive endpoints, whose only option is read only.
pub(crate) unsafe extern "C" fn setopt_pep(
    handle: *mut fid,
    _level: c_int,
    _name: c_int,
    _buf: *const c_void,
    _len: usize,
) -> c_int {
    // SAFETY: a passive endpoint by the contract of fi_setopt(3).
    let pep = unsafe { object::<Pep>(handle) };
    on(pep, |_| Err(FiErrno::ENOPROTOOPT))
}

/// `fi_getopt(3)` of connected endpoints.
pub(crate) unsafe extern "C" fn getopt(
    handle: *mut fid,
    level: c_int,
    name: c_int,
    buf: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_getopt(3) and fi_setopt(3).
    let ep = unsafe { object::<Ep>(handle) };
    on(ep, |ep| {
        if level.cast_unsigned() != FI_OPT_ENDPOINT {
            return Err(FiErrno::ENOPROTOOPT);
        }
        let value = match name.cast_unsigned() {
            // SAFETY: a buffer and its length by the contract of fi_getopt(3).
            FI_OPT_FI_HMEM_P2P => return unsafe { answer(p2p_of(&ep.common.p2p), buf, len) },
            FI_OPT_CM_DATA_SIZE => ep.engine.cm_data_size(),
            FI_OPT_MAX_ATOMIC_SIZE if ep.engine.has_atomics() => ATOMIC_SIZE,
            // fi_endpoint(3): not more than inject_size, although operands are always copied
            FI_OPT_INJECT_ATOMIC_SIZE if ep.engine.has_atomics() => {
                ATOMIC_SIZE.min(ep.engine.inject_size())
            }
            name => ep.engine.length(length(name).map_err(|_| no_option(name))?),
        };
        // SAFETY: a buffer and its length by the contract of fi_getopt(3).
        unsafe { answer(value, buf, len) }
    })
}

/// `fi_setopt(3)`. Lengths can be reduced before the endpoint is enabled.
pub(crate) unsafe extern "C" fn setopt(
    handle: *mut fid,
    level: c_int,
    name: c_int,
    buf: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_setopt(3).
    let ep = unsafe { object::<Ep>(handle) };
    on(ep, |ep| {
        if level.cast_unsigned() != FI_OPT_ENDPOINT {
            return Err(FiErrno::ENOPROTOOPT);
        }
        let name = name.cast_unsigned();
        let device = ep.engine.domain().device();
        // SAFETY: a buffer and its length by the contract of fi_setopt(3).
        if let Some(result) = unsafe { permit((device, &ep.common.p2p), name, buf, len) } {
            return result;
        }
        if name == FI_OPT_CM_DATA_SIZE {
            return Err(FiErrno::ENOPROTOOPT); // read only
        }
        let option = length(name)?;
        // SAFETY: a buffer and its length by the contract of fi_setopt(3).
        let value = unsafe { size_in(buf, len)? };
        ep.engine.set_length(option, value)?;
        Ok(0)
    })
}

/// `fi_getopt(3)` of endpoints with many peers.
pub(crate) unsafe extern "C" fn getopt_rdm(
    handle: *mut fid,
    level: c_int,
    name: c_int,
    buf: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_getopt(3).
    let ep = unsafe { object::<RdmEp>(handle) };
    on(ep, |ep| {
        if level.cast_unsigned() != FI_OPT_ENDPOINT {
            return Err(FiErrno::ENOPROTOOPT);
        }
        let value = match name.cast_unsigned() {
            // SAFETY: a buffer and its length by the contract of fi_getopt(3).
            FI_OPT_FI_HMEM_P2P => return unsafe { answer(p2p_of(&ep.common.p2p), buf, len) },
            FI_OPT_MIN_MULTI_RECV => ep.engine.min_multi_recv(),
            FI_OPT_MAX_MSG_SIZE | FI_OPT_MAX_TAGGED_SIZE | FI_OPT_MAX_RMA_SIZE => ep.max_msg_size,
            FI_OPT_INJECT_MSG_SIZE | FI_OPT_INJECT_TAGGED_SIZE | FI_OPT_INJECT_RMA_SIZE => {
                ep.inject_size
            }
            // operands are copied in any case, so an injected atomic has no smaller limit
            FI_OPT_MAX_ATOMIC_SIZE | FI_OPT_INJECT_ATOMIC_SIZE if ep.atomics => MAX_ATOMIC_SIZE,
            name => return Err(no_option(name)),
        };
        // SAFETY: a buffer and its length by the contract of fi_getopt(3).
        unsafe { answer(value, buf, len) }
    })
}

/// `fi_setopt(3)` of endpoints with many peers. The sizes are read only.
pub(crate) unsafe extern "C" fn setopt_rdm(
    handle: *mut fid,
    level: c_int,
    name: c_int,
    buf: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_setopt(3).
    let ep = unsafe { object::<RdmEp>(handle) };
    on(ep, |ep| {
        if level.cast_unsigned() != FI_OPT_ENDPOINT {
            return Err(FiErrno::ENOPROTOOPT);
        }
        // SAFETY: a buffer and its length by the contract of fi_setopt(3).
        unsafe {
            match name.cast_unsigned() {
                FI_OPT_MIN_MULTI_RECV => {
                    ep.engine.set_min_multi_recv(size_in(buf, len)?);
                    Ok(0)
                }
                name => permit((ep.domain.device(), &ep.common.p2p), name, buf, len)
                    .unwrap_or(Err(FiErrno::ENOPROTOOPT)),
            }
        }
    })
}

/// `fi_getopt(3)` of shared receive contexts of endpoints with many peers.
pub(crate) unsafe extern "C" fn getopt_rdm_srx(
    handle: *mut fid,
    level: c_int,
    name: c_int,
    buf: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: a context by the contract of fi_getopt(3).
    let srx = unsafe { object::<RdmSrx>(handle) };
    on(srx, |srx| {
        is_min_multi_recv(level, name)?;
        // SAFETY: a buffer and its length by the contract of fi_getopt(3).
        unsafe { answer(srx.engine.min_multi_recv(), buf, len) }
    })
}

/// `fi_setopt(3)` of shared receive contexts of endpoints with many peers.
pub(crate) unsafe extern "C" fn setopt_rdm_srx(
    handle: *mut fid,
    level: c_int,
    name: c_int,
    buf: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: a context by the contract of fi_setopt(3).
    let srx = unsafe { object::<RdmSrx>(handle) };
    on(srx, |srx| {
        is_min_multi_recv(level, name)?;
        // SAFETY: a buffer and its length by the contract of fi_setopt(3).
        srx.engine.set_min_multi_recv(unsafe { size_in(buf, len) }?);
        Ok(0)
    })
}

/// # Errors
/// `ENOPROTOOPT`: another option.
fn is_min_multi_recv(level: c_int, name: c_int) -> Result<()> {
    let option = (level.cast_unsigned(), name.cast_unsigned());
    match option == (FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV) {
        true => Ok(()),
        false => Err(FiErrno::ENOPROTOOPT),
    }
}

/// The `size_t` in the buffer of `fi_setopt(3)`.
///
/// # Errors
/// `EINVAL`: not the length of a `size_t`, or NULL.
///
/// # Safety
/// `buf` is NULL or has `len` bytes.
unsafe fn size_in(buf: *const c_void, len: usize) -> Result<usize> {
    if len != size_of::<usize>() || buf.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: not NULL, of that size by the caller's promise.
    Ok(unsafe { buf.cast::<usize>().read_unaligned() })
}

/// `fi_setopt(3)` of the options by which an application permits or forbids the use of something;
/// `None`: another option.
///
/// # Safety
/// `buf` is NULL or has `len` bytes.
unsafe fn permit(
    (device, p2p): (&Device, &AtomicU32),
    name: u32,
    buf: *const c_void,
    len: usize,
) -> Option<Result<c_int>> {
    Some(match name {
        // FI_HMEM is not offered, so no device memory is passed: each value of the page is
        // satisfied except FI_HMEM_P2P_REQUIRED.
        FI_OPT_FI_HMEM_P2P if len == size_of::<c_int>() && !buf.is_null() => {
            // SAFETY: not NULL, of that size by the caller's promise.
            let wish = unsafe { buf.cast::<c_uint>().read_unaligned() };
            match wish {
                FI_HMEM_P2P_ENABLED | FI_HMEM_P2P_PREFERRED | FI_HMEM_P2P_DISABLED => {
                    p2p.store(wish, Ordering::Relaxed);
                    Ok(0)
                }
                FI_HMEM_P2P_REQUIRED => Err(FiErrno::EOPNOTSUPP),
                _ => Err(FiErrno::EINVAL),
            }
        }
        // CUDA is not used, permitted or not
        FI_OPT_CUDA_API_PERMITTED if len == size_of::<bool>() && !buf.is_null() => {
            has_cuda().then_some(0).ok_or(FiErrno::EINVAL)
        }
        FI_OPT_SHARED_MEMORY_PERMITTED if len == size_of::<bool>() && !buf.is_null() => {
            // SAFETY: not NULL, of that size by the caller's promise.
            let permitted = unsafe { buf.cast::<u8>().read() } != 0;
            // soft0 has no other way to its peers; other devices never use shared memory
            match permitted || !std::ptr::eq(device.backend(), softverbs::backend()) {
                true => Ok(0),
                false => Err(FiErrno::EOPNOTSUPP),
            }
        }
        FI_OPT_FI_HMEM_P2P | FI_OPT_CUDA_API_PERMITTED | FI_OPT_SHARED_MEMORY_PERMITTED => {
            Err(FiErrno::EINVAL)
        }
        _ => return None,
    })
}

/// Whether the process has CUDA's library: one that can pass memory of CUDA has loaded it.
fn has_cuda() -> bool {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: a C string; nothing is loaded, and no code of the library runs.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) };
    if !library.is_null() {
        // SAFETY: of the call before; the process has its own reference.
        unsafe { libc::dlclose(library) };
    }
    !library.is_null()
}
