//! The request of a registration, the same for all calls: `fi_mr_reg`, `fi_mr_regv`,
//! `fi_mr_regattr`.

use std::ffi::c_void;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use libc::iovec;
use libfabric_sys::*;
use weft::auth::AuthKey;
use weft::errno::{FiErrno, Result};
use weft::mr::{Access, Buffer, Dmabuf, SharedMemory};
use weft::wire::records::MAX_SEGMENTS;

use crate::ffi::alloc::auth_key;
use crate::ffi::log::refused;

/// A flag of libfabric's own layers (`OFI_MR_NOCACHE`), which ofi_rxm sets: explicit registrations
/// are not cached here anyway.
const NO_CACHE: u64 = 1 << 60;

/// Flags that every call takes. `FI_HMEM_HOST_ALLOC` and `FI_HMEM_DEVICE_ONLY` are not among them:
/// "This flag is only usable for domains opened with FI_HMEM capability support" (fi_mr(3)), which
/// is not offered.
const FLAGS: u64 = NO_CACHE | FI_RMA_EVENT | FI_RMA_PMEM | FI_MR_SINGLE_USE;

/// The access of these flags; none if there is another one. `FI_COLLECTIVE` is a permission that
/// fi_mr(3) lists without the capability of that name, "paired with FI_SEND and/or FI_RECV", and
/// adds nothing to these.
pub(crate) fn access_of(flags: u64) -> Option<Access> {
    Access::from_bits(flags & !FI_COLLECTIVE)
}

/// The request of a registration.
pub(crate) struct Wish {
    pub(crate) buffers: [Buffer; MAX_SEGMENTS],
    pub(crate) count: usize,
    pub(crate) access: u64,
    pub(crate) offset: u64,
    pub(crate) requested_key: u64,
    pub(crate) flags: u64,
    pub(crate) context: *mut c_void,
    /// The memory is that of a descriptor of the kernel.
    pub(crate) dmabuf: Option<Dmabuf>,
    /// Its authorization key, unless it has the domain's.
    pub(crate) auth: Option<AuthKey>,
    /// The memory is the provider's.
    pub(crate) memory: Option<Arc<SharedMemory>>,
    /// The region that it is a part of, or NULL.
    pub(crate) base: *const fid_mr,
}

const NO_BUFFER: Buffer = Buffer {
    addr: std::ptr::null(),
    len: 0,
};

impl Default for Wish {
    fn default() -> Self {
        Self {
            buffers: [NO_BUFFER; MAX_SEGMENTS],
            count: 0,
            access: 0,
            offset: 0,
            requested_key: 0,
            flags: 0,
            context: std::ptr::null_mut(),
            dmabuf: None,
            auth: None,
            memory: None,
            base: std::ptr::null(),
        }
    }
}

impl Wish {
    /// With one buffer.
    pub(crate) fn buffer(addr: *const c_void, len: usize) -> Self {
        let mut this = Self {
            count: 1,
            ..Self::default()
        };
        this.buffers[0] = Buffer { addr, len };
        this
    }

    /// With the provider's own memory.
    pub(crate) fn memory(memory: Arc<SharedMemory>) -> Self {
        let mut this = Self::buffer(memory.addr(), memory.len());
        this.memory = Some(memory);
        this
    }

    /// With the buffers of a list.
    ///
    /// # Errors
    /// `EINVAL`: NULL, none, or more than `mr_iov_limit`.
    ///
    /// # Safety
    /// `iov` is NULL or has `count` elements.
    pub(crate) unsafe fn list(iov: *const iovec, count: usize) -> Result<Self> {
        if iov.is_null() || !(1..=MAX_SEGMENTS).contains(&count) {
            return Err(refused!(
                FI_LOG_MR,
                EINVAL,
                "{count} buffers at {iov:?}, and mr_iov_limit is {MAX_SEGMENTS}"
            ));
        }
        // SAFETY: not NULL, `count` elements.
        let list = unsafe { std::slice::from_raw_parts(iov, count) };
        let mut this = Self {
            count,
            ..Self::default()
        };
        for (to, from) in this.buffers.iter_mut().zip(list) {
            *to = Buffer {
                addr: from.iov_base,
                len: from.iov_len,
            };
        }
        Ok(this)
    }

    /// From attributes, which have the layout of API `version`.
    ///
    /// # Errors
    /// - `EINVAL`: NULL, wrong buffers, an authorization key that is NULL or too long, a size that
    ///   no page has, a part of another region together with a descriptor of the kernel.
    /// - `EBADFLAGS`: as [`check_flags`].
    ///
    /// # Safety
    /// `attr` is NULL or has the size that `fi_mr_attr` has in that version.
    pub(crate) unsafe fn attributes(
        version: u32,
        attr: *const fi_mr_attr,
        flags: u64,
    ) -> Result<Self> {
        if attr.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let is_dmabuf = version >= fi_version(1, 20) && flags & FI_MR_DMABUF != 0;
        check_flags(if is_dmabuf {
            flags & !FI_MR_DMABUF
        } else {
            flags
        })?;
        // SAFETY: not NULL; fields are read only where the version has them.
        unsafe {
            let memory = (*attr).__bindgen_anon_1;
            let mut this = if is_dmabuf {
                Self::dmabuf(memory.dmabuf, (*attr).iov_count)?
            } else {
                Self::list(memory.mr_iov, (*attr).iov_count)?
            };
            if version >= fi_version(1, 5) {
                this.auth = auth_key((*attr).auth_key, (*attr).auth_key_size)?;
            }
            // iface, device, hmem_data: "ignored unless the application has requested the FI_HMEM
            // capability"
            if version >= fi_version(2, 0) {
                this.base = (*attr).base_mr;
                let is_part = !this.base.is_null();
                // a part has its base's page_size: "ignored when creating the sub-MR"
                if (!is_part && !is_page_size((*attr).page_size)) || (is_part && is_dmabuf) {
                    return Err(FiErrno::EINVAL);
                }
                // sub_mr_cnt: how many parts there will be, which changes nothing here
            }
            this.access = (*attr).access;
            this.offset = (*attr).offset;
            this.requested_key = (*attr).requested_key;
            this.flags = flags;
            this.context = (*attr).context;
            Ok(this)
        }
    }

    /// # Safety
    /// `dmabuf` is NULL or has `count` elements.
    unsafe fn dmabuf(dmabuf: *const fi_mr_dmabuf, count: usize) -> Result<Self> {
        // SAFETY: the caller's promise.
        let Some(from) = (unsafe { dmabuf.as_ref() }).filter(|_| count == 1) else {
            return Err(FiErrno::EINVAL);
        };
        let start = (from.base_addr.addr() as u64).checked_add(from.offset);
        let start = start.ok_or(FiErrno::EINVAL)?;
        let addr = std::ptr::without_provenance(start as usize); // the device's to call it by
        let mut this = Self::buffer(addr, from.len);
        this.dmabuf = Some(Dmabuf {
            fd: from.fd,
            offset: from.offset,
        });
        Ok(this)
    }
}

/// # Errors
/// `EBADFLAGS`: one that belongs to another call, to a capability that is not offered, or to
/// nothing.
pub(crate) fn check_flags(flags: u64) -> Result<()> {
    if flags & !FLAGS != 0 {
        return Err(refused!(
            FI_LOG_MR,
            EBADFLAGS,
            "flags {:#x} are not flags of a registration",
            flags & !FLAGS
        ));
    }
    Ok(())
}

/// Whether pages can have this size; 0 leaves it to the provider, which leaves it to the device in
/// any case (fi_mr(3), `page_size`: a hint).
fn is_page_size(size: usize) -> bool {
    // SAFETY: no arguments that matter.
    let base = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let huge = || {
        let pages = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", size / 1024);
        size.is_power_of_two() && fs::exists(Path::new(&pages)).unwrap_or(false)
    };
    size == 0 || usize::try_from(base) == Ok(size) || huge()
}
