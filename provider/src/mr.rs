//! `fid_mr`: registration of memory, `fi_mr(3)`.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libc::iovec;
use libfabric_sys::*;
use parking_lot::Mutex;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::mr::{Access, Buffer, Mode, Region, RegionConfig};
use weft::wire::records::MAX_SEGMENTS;

use crate::cntr::Cntr;
use crate::domain::Domain;
use crate::ep::Ep;
use crate::fabric::header;
use crate::ffi::fid::{Kind, Object, User};
use crate::ffi::log::warning;
use crate::ffi::param::fault_point;
use crate::ffi::{guard, stub};

/// A registered region.
pub(crate) struct Mr {
    // first: what is bound to it is held until it has gone
    region: Arc<Region>,
    /// The counters and the endpoint that it is bound to.
    bound: Mutex<Vec<User>>,
    _domain: User,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ..stub::fid::<FI_ENOSYS>()
};

impl Kind for Mr {
    type C = fid_mr;
    const CLASS: usize = FI_CLASS_MR;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_mr) {
        c.mem_desc = std::ptr::null_mut();
        c.key = FI_KEY_NOTAVAIL;
    }
}

/// A flag of libfabric's own layers (`OFI_MR_NOCACHE`), which ofi_rxm sets: explicit registrations are not
/// cached here anyway.
const NO_CACHE: u64 = 1 << 60;

/// What a registration asks for.
struct Wish {
    buffers: [Buffer; MAX_SEGMENTS],
    count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    context: *mut c_void,
}

/// # Safety
/// `handle` is NULL or a fid; the memory is the application's (fi_mr(3)).
unsafe fn register(handle: *mut fid, wish: &Wish, out: *mut *mut fid_mr) -> c_int {
    // SAFETY: the caller's promise.
    let domain = match unsafe { Object::<Domain>::checked(handle) } {
        Ok(domain) => domain,
        Err(errno) => return -errno.code(),
    };
    guard::on(&domain.poison, || {
        fault_point("mr_reg");
        if out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if wish.flags & !(NO_CACHE | FI_RMA_EVENT) != 0 {
            // FI_RMA_PMEM, FI_HMEM_*, FI_MR_*: none of them is offered.
            return Err(FiErrno::EBADFLAGS);
        }
        let access = Access::from_bits(wish.access).ok_or(FiErrno::EINVAL)?;
        if wish.offset != 0 {
            return Err(FiErrno::EINVAL); // reserved, must be 0 (fi_mr(3))
        }
        let user = domain.users.add()?;
        let config = RegionConfig {
            buffers: wish.buffers.get(..wish.count).ok_or(FiErrno::EINVAL)?,
            access,
            requested_key: wish.requested_key,
            counted: wish.flags & FI_RMA_EVENT != 0,
        };
        // SAFETY: the application keeps the memory until it closes the region (fi_mr(3)).
        let region = unsafe { Region::register(&domain.engine, &config)? };
        let object = Object::open(
            fid_mr {
                fid: header(FI_CLASS_MR, &FID_OPS, wish.context),
                mem_desc: region.desc(),
                key: key(&region),
            },
            Mr {
                region,
                bound: Mutex::default(),
                _domain: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

/// What `fi_mr_key` says.
fn key(region: &Region) -> u64 {
    if region.domain().config().form.mode.contains(Mode::RAW) {
        FI_KEY_NOTAVAIL // fi_mr_raw_attr has it
    } else {
        region.key() // FI_KEY_NOTAVAIL before it is enabled
    }
}

/// `fi_mr_reg`
pub(crate) unsafe extern "C" fn reg(
    domain: *mut fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    let mut buffers = [NO_BUFFER; MAX_SEGMENTS];
    buffers[0] = Buffer { addr: buf, len };
    let wish = Wish {
        buffers,
        count: 1,
        access,
        offset,
        requested_key,
        flags,
        context,
    };
    // SAFETY: the contract of fi_mr_reg(3).
    unsafe { register(domain, &wish, out) }
}

const NO_BUFFER: Buffer = Buffer {
    addr: std::ptr::null(),
    len: 0,
};

/// The buffers of a list, and how many there are.
///
/// # Errors
/// `EINVAL`: NULL, none, or more than `mr_iov_limit`.
///
/// # Safety
/// `iov` is NULL or has `count` elements.
unsafe fn buffers(iov: *const iovec, count: usize) -> Result<([Buffer; MAX_SEGMENTS], usize)> {
    if iov.is_null() || !(1..=MAX_SEGMENTS).contains(&count) {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: not NULL, `count` elements.
    let list = unsafe { std::slice::from_raw_parts(iov, count) };
    let mut buffers = [NO_BUFFER; MAX_SEGMENTS];
    for (to, from) in buffers.iter_mut().zip(list) {
        *to = Buffer {
            addr: from.iov_base,
            len: from.iov_len,
        };
    }
    Ok((buffers, count))
}

/// `fi_mr_regv`
pub(crate) unsafe extern "C" fn regv(
    domain: *mut fid,
    iov: *const iovec,
    count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of fi_mr_regv(3).
    let (buffers, count) = match unsafe { buffers(iov, count) } {
        Ok(list) => list,
        Err(errno) => return -errno.code(),
    };
    let wish = Wish {
        buffers,
        count,
        access,
        offset,
        requested_key,
        flags,
        context,
    };
    // SAFETY: as above.
    unsafe { register(domain, &wish, out) }
}

/// `fi_mr_regattr`. The attributes have the layout of the application's API version.
pub(crate) unsafe extern "C" fn regattr(
    domain: *mut fid,
    attr: *const fi_mr_attr,
    flags: u64,
    out: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: the contract of fi_mr_regattr(3).
    let wish = unsafe {
        Object::<Domain>::checked(domain)
            .and_then(|domain| read_attr(domain.api_version, attr, flags))
    };
    match wish {
        // SAFETY: as above.
        Ok(wish) => unsafe { register(domain, &wish, out) },
        Err(errno) => -errno.code(),
    }
}

/// # Safety
/// `attr` is NULL or has the size that `fi_mr_attr` has in API `version`.
unsafe fn read_attr(version: u32, attr: *const fi_mr_attr, flags: u64) -> Result<Wish> {
    if attr.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: not NULL; fields are read only where the version has them.
    unsafe {
        if flags & !(NO_CACHE | FI_RMA_EVENT) != 0 {
            return Err(FiErrno::EBADFLAGS); // FI_MR_DMABUF: there are no buffers to be read
        }
        let (buffers, count) = buffers((*attr).__bindgen_anon_1.mr_iov, (*attr).iov_count)?;
        if version >= fi_version(1, 5) && (*attr).auth_key_size != 0 {
            return Err(FiErrno::EINVAL); // more than the domain's auth_key_size, which is 0
        }
        // The interface came with 1.10; before that nothing is behind the key.
        if version >= fi_version(1, 10) && (*attr).iface != FI_HMEM_SYSTEM {
            warning!(
                FI_LOG_MR,
                "memory interface {} is not available",
                match (*attr).iface {
                    FI_HMEM_CUDA => "FI_HMEM_CUDA",
                    FI_HMEM_ROCR => "FI_HMEM_ROCR",
                    FI_HMEM_ZE => "FI_HMEM_ZE",
                    FI_HMEM_NEURON => "FI_HMEM_NEURON",
                    FI_HMEM_SYNAPSEAI => "FI_HMEM_SYNAPSEAI",
                    _ => "(unknown)",
                }
            );
            return Err(FiErrno::ENOSYS);
        }
        if version >= fi_version(2, 0) && !(*attr).base_mr.is_null() {
            return Err(FiErrno::ENOSYS); // sub-regions are not there yet
        }
        Ok(Wish {
            buffers,
            count,
            access: (*attr).access,
            offset: (*attr).offset,
            requested_key: (*attr).requested_key,
            flags,
            context: (*attr).context,
        })
    }
}

/// `fi_mr_bind`
unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: fids by the contract of fi_mr_bind(3).
    let mr = match unsafe { Object::<Mr>::checked(handle) } {
        Ok(mr) => mr,
        Err(errno) => return -errno.code(),
    };
    guard::on(&mr.poison, || {
        if other.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: not NULL, a fid.
        let class = unsafe { (*other).fclass };
        let user = match class {
            FI_CLASS_CNTR => {
                // SAFETY: as above.
                let cntr = unsafe { Object::<Cntr>::checked(other)? };
                let user = cntr.users.add()?;
                let kinds = Flags::from_bits_retain(flags);
                mr.region.bind_counter(&cntr.engine, kinds)?;
                user
            }
            FI_CLASS_EP => {
                // SAFETY: as above.
                let ep = unsafe { Object::<Ep>::checked(other)? };
                if flags != 0 {
                    return Err(FiErrno::EBADFLAGS);
                }
                let user = ep.users.add()?;
                mr.region.bind_endpoint(&ep.engine)?;
                user
            }
            _ => return Err(FiErrno::EINVAL),
        };
        mr.bound.lock().push(user);
        Ok(0)
    })
}

unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let mr = match unsafe { Object::<Mr>::checked(handle) } {
        Ok(mr) => mr,
        Err(errno) => return -errno.code(),
    };
    guard::on(&mr.poison, || match command.cast_unsigned() {
        // SAFETY: the argument is NULL or a pointer to that structure.
        FI_GET_RAW_MR => unsafe { raw_attr(&mr.region, arg.cast()) }.map(|()| 0),
        FI_ENABLE => {
            let _bound = mr.bound.lock();
            mr.region.enable()?;
            mr.update(|c| c.key = key(&mr.region));
            Ok(0)
        }
        // SAFETY: as above.
        FI_REFRESH => unsafe { refresh(&mr.region, arg.cast()) }.map(|()| 0),
        _ => Err(FiErrno::ENOSYS), // what belongs to other fids
    })
}

/// `fi_mr_refresh`
///
/// # Safety
/// `modify` is NULL or points to such a structure, whose list has as many elements as it says.
unsafe fn refresh(region: &Region, modify: *const fi_mr_modify) -> Result<()> {
    if modify.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: the caller's promise; only fields that every release has are read.
    unsafe {
        if (*modify).flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let attr = &raw const (*modify).attr;
        let (iov, count) = ((*attr).__bindgen_anon_1.mr_iov, (*attr).iov_count);
        if iov.is_null() || count == 0 || count > isize::MAX as usize / size_of::<iovec>() {
            return Err(FiErrno::EINVAL);
        }
        let ranges: Vec<_> = std::slice::from_raw_parts(iov, count)
            .iter()
            .map(|range| Buffer {
                addr: range.iov_base,
                len: range.iov_len,
            })
            .collect();
        region.refresh(&ranges)
    }
}

/// `fi_mr_raw_attr`
///
/// # Safety
/// `attr` is NULL or points to such a structure, whose pointers are NULL or valid; there is as much room
/// for the key as it says.
unsafe fn raw_attr(region: &Region, attr: *const fi_mr_raw_attr) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let attr = attr.as_ref().ok_or(FiErrno::EINVAL)?;
        if attr.flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        if attr.key_size.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let (base, key) = region.raw_key()?;
        let room = attr.key_size.replace(key.len());
        if room < key.len() {
            return Err(FiErrno::ETOOSMALL);
        }
        if attr.raw_key.is_null() {
            return Err(FiErrno::EINVAL);
        }
        std::ptr::copy_nonoverlapping(key.as_ptr(), attr.raw_key, key.len());
        if !attr.base_addr.is_null() {
            *attr.base_addr = base;
        }
    }
    Ok(())
}

unsafe extern "C" fn close(handle: *mut fid) -> c_int {
    guard::entry(|| {
        // SAFETY: a fid by the contract of fi_close(3).
        unsafe { Object::<Mr>::close(handle, |_| Ok(()))? };
        Ok(0)
    })
}
