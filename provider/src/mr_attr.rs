//! The arguments of a registration as the engine's [`RegionConfig`]: `fi_mr_reg`, `fi_mr_regv`,
//! `fi_mr_regattr`. Buffers are not copied.

use std::fs;
use std::mem::MaybeUninit;
use std::path::Path;

use libc::iovec;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::{Access, Buffer, Dmabuf, RegionConfig};
use weft::wire::records::MAX_SEGMENTS;

use crate::ffi::log::refused;

/// A flag of libfabric's own layers (`OFI_MR_NOCACHE`), which ofi_rxm sets: explicit registrations
/// are not cached here anyway.
const NO_CACHE: u64 = 1 << 60;

/// Flags that every call takes. `FI_HMEM_HOST_ALLOC` and `FI_HMEM_DEVICE_ONLY` are not among them:
/// "This flag is only usable for domains opened with FI_HMEM capability support" (fi_mr(3)), which
/// is not offered.
const FLAGS: u64 = NO_CACHE | FI_RMA_EVENT | FI_RMA_PMEM | FI_MR_SINGLE_USE;

/// Capabilities, which applications pass with the flags that permit their operations. They permit
/// nothing, and most of libfabric's own providers ignore them. `FI_COLLECTIVE` is listed in
/// fi_mr(3), "paired with FI_SEND and/or FI_RECV"; it adds nothing to these two.
const CAPABILITIES: u64 = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_COLLECTIVE;

/// The access of these flags. [`CAPABILITIES`] are ignored.
///
/// # Errors
/// `EINVAL`: any other flag.
pub(crate) fn access_of(flags: u64) -> Result<Access> {
    let access = Access::from_bits(flags & !CAPABILITIES);
    access.ok_or_else(|| {
        refused!(
            FI_LOG_MR,
            EINVAL,
            "access {flags:#x} has bits that are not access flags"
        )
    })
}

/// The configuration of a region, without its memory.
///
/// # Errors
/// - `EBADFLAGS`: as [`check_flags`].
/// - `EINVAL`: an unknown access flag, or an offset.
pub(crate) fn config(
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
) -> Result<RegionConfig<'static>> {
    check_flags(flags)?;
    if offset != 0 {
        let reason = format_args!("offset {offset:#x} is reserved, and must be 0"); // fi_mr(3)
        return Err(refused!(FI_LOG_MR, EINVAL, "{reason}"));
    }
    Ok(RegionConfig {
        access: access_of(access)?,
        requested_key,
        counted: flags & FI_RMA_EVENT != 0,
        once: flags & FI_MR_SINGLE_USE != 0,
        persistent: flags & FI_RMA_PMEM != 0,
        ..RegionConfig::default()
    })
}

const _: () = {
    assert!(size_of::<iovec>() == size_of::<Buffer>());
    assert!(std::mem::offset_of!(iovec, iov_base) == std::mem::offset_of!(Buffer, addr));
    assert!(std::mem::offset_of!(iovec, iov_len) == std::mem::offset_of!(Buffer, len));
};

/// The buffers of a list.
///
/// # Errors
/// `EINVAL`: NULL, none, or more than `mr_iov_limit`.
///
/// # Safety
/// `iov` is NULL or has `count` elements, for `'a`.
pub(crate) unsafe fn buffers<'a>(iov: *const iovec, count: usize) -> Result<&'a [Buffer]> {
    if iov.is_null() || !(1..=MAX_SEGMENTS).contains(&count) {
        return Err(refused!(
            FI_LOG_MR,
            EINVAL,
            "iov is {iov:?} and its count {count}; the count can be 1 to {MAX_SEGMENTS}"
        ));
    }
    // SAFETY: not NULL; the caller promises `count` elements.
    Ok(unsafe { as_buffers(iov, count) })
}

/// The elements of a list as buffers, in place.
///
/// # Safety
/// `iov` has `count` elements, for `'a`.
pub(crate) unsafe fn as_buffers<'a>(iov: *const iovec, count: usize) -> &'a [Buffer] {
    // SAFETY: the caller promises `count` elements; the two types have one layout, asserted above.
    unsafe { std::slice::from_raw_parts(iov.cast(), count) }
}

/// The memory of a dmabuf descriptor: its address range, and its place in the dmabuf.
///
/// # Errors
/// `EINVAL`: NULL, or not one element.
///
/// # Safety
/// `dmabuf` is NULL or has `count` elements.
pub(crate) unsafe fn dmabuf(dmabuf: *const fi_mr_dmabuf, count: usize) -> Result<(Buffer, Dmabuf)> {
    if count != 1 {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: the caller passes NULL or one element.
    let from = unsafe { dmabuf.as_ref() }.ok_or(FiErrno::EINVAL)?;
    let start = (from.base_addr.addr() as u64).checked_add(from.offset);
    let start = start.ok_or(FiErrno::EINVAL)?;
    let buffer = Buffer {
        addr: std::ptr::without_provenance(start as usize), // only the device uses it
        len: from.len,
    };
    let dmabuf = Dmabuf {
        fd: from.fd,
        offset: from.offset,
    };
    Ok((buffer, dmabuf))
}

/// The attributes of an application of API `version`; fields that it does not have are zeros, as
/// are `iface`, `device` and `hmem_data` before 2.0: they are "ignored unless the application has
/// requested the FI_HMEM capability" (fi_mr(3)).
///
/// # Errors
/// `EINVAL`: NULL.
///
/// # Safety
/// `attr` is NULL or has the size that `fi_mr_attr` has in that version.
pub(crate) unsafe fn attributes(version: u32, attr: *const fi_mr_attr) -> Result<fi_mr_attr> {
    if attr.is_null() {
        return Err(FiErrno::EINVAL);
    }
    let size = if version < fi_version(1, 5) {
        std::mem::offset_of!(fi_mr_attr, auth_key_size)
    } else if version < fi_version(2, 0) {
        std::mem::offset_of!(fi_mr_attr, iface)
    } else {
        size_of::<fi_mr_attr>()
    };
    let mut copy = MaybeUninit::<fi_mr_attr>::zeroed();
    // SAFETY: not NULL, and the caller's promise; integers and pointers, of which zeros and the
    // copied bytes are values.
    unsafe {
        std::ptr::copy_nonoverlapping(attr.cast::<u8>(), copy.as_mut_ptr().cast(), size);
        Ok(copy.assume_init())
    }
}

/// # Errors
/// `EBADFLAGS`: a flag of another call or of a capability that is not offered, or an unknown flag.
pub(crate) fn check_flags(flags: u64) -> Result<()> {
    if flags & !FLAGS != 0 {
        return Err(refused!(
            FI_LOG_MR,
            EBADFLAGS,
            "fi_mr_reg does not support the flags {:#x}",
            flags & !FLAGS
        ));
    }
    Ok(())
}

/// Whether pages can have this size. 0 leaves the choice to the provider. The size is a hint
/// (fi_mr(3), `page_size`), and the device chooses in any case.
pub(crate) fn is_page_size(size: usize) -> bool {
    // SAFETY: no arguments that matter.
    let base = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let huge = || {
        let pages = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", size / 1024);
        size.is_power_of_two() && fs::exists(Path::new(&pages)).unwrap_or(false)
    };
    size == 0 || usize::try_from(base) == Ok(size) || huge()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_permit_nothing() {
        let flags = FI_SEND | FI_REMOTE_WRITE;
        assert_eq!(access_of(flags | CAPABILITIES), access_of(flags));
        assert_eq!(access_of(CAPABILITIES), access_of(0));
        assert_eq!(access_of(flags | FI_FENCE), Err(FiErrno::EINVAL));
    }
}
