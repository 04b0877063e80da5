//! A memory region: one registration, its key, and the descriptor of local operations.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;
use std::sync::Arc;

use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::mr::Access;
use crate::verbs::{Mr, Pd};

/// What to register.
#[derive(Clone, Copy, Debug)]
pub struct RegionConfig {
    /// First byte.
    pub addr: *const c_void,
    /// Bytes.
    pub len: usize,
    /// What it may be used for. None at all is allowed and gives a region of no use.
    pub access: Access,
}

/// Marks a live region: a descriptor that points elsewhere is refused in most cases.
const MAGIC: u32 = 0x7765_6672;
const DEAD: u32 = 0xdead_6672;

/// A registered memory region in the native form: its key is the rkey, its addresses are virtual
/// addresses.
///
/// Dropping it deregisters it: from then on its key is invalid. Thread safe.
#[derive(Debug)]
#[repr(C)]
pub struct Region {
    magic: u32,
    lkey: u32,
    mr: Mr,
    access: Access,
    domain: Arc<Domain>,
}

impl Region {
    /// Registers memory. Blocks for as long as pinning takes.
    ///
    /// # Errors
    /// - `EINVAL`: length 0 where the device refuses it.
    /// - `ENOMEM`: the limit of locked memory or the device's own is reached; a log line says
    ///   which limit to raise.
    /// - `EFAULT`: the memory is not there, or may not be written while `access` needs that.
    ///
    /// # Safety
    /// The memory must stay the caller's until the region is dropped: devices and peers access
    /// it as `access` says.
    pub unsafe fn register(domain: &Arc<Domain>, config: &RegionConfig) -> Result<Arc<Self>> {
        let rights = config
            .access
            .verbs_rights(domain.device().attr().atomic_cap != 0);
        // SAFETY: as this function.
        let mr = unsafe { Mr::register(domain.pd(), config.addr, config.len, rights) }
            .inspect_err(|&error| explain(error, config))?;
        Ok(Arc::new(Self {
            magic: MAGIC,
            lkey: mr.lkey(),
            mr,
            access: config.access,
            domain: Arc::clone(domain),
        }))
    }

    /// The key for peers (`fi_mr_key(3)`).
    pub fn key(&self) -> u64 {
        u64::from(self.mr.rkey())
    }

    /// The descriptor for local operations (`fi_mr_desc(3)`): valid as long as the region.
    pub fn desc(self: &Arc<Self>) -> *mut c_void {
        Arc::as_ptr(self).cast_mut().cast()
    }

    /// What it may be used for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The domain it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.magic = DEAD;
    }
}

/// A descriptor as the application passes it: what [`Region::desc`] gave, or NULL.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Desc(pub *mut c_void);

impl Desc {
    /// No region: will do for inject, for what goes inline, and for length 0.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// The lkey with which `pd` reaches the region.
    ///
    /// # Errors
    /// `EINVAL`: NULL, not a region, or of another protection domain.
    ///
    /// # Safety
    /// NULL, or a pointer that [`Region::desc`] of a live region gave.
    #[inline]
    pub(crate) unsafe fn lkey(self, pd: &Pd) -> Result<u32> {
        if self.0.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: the caller promises a live region.
        let region = unsafe { &*self.0.cast::<Region>() };
        if region.magic != MAGIC || !std::ptr::eq(Arc::as_ptr(region.mr.pd()), pd) {
            return Err(FiErrno::EINVAL);
        }
        Ok(region.lkey)
    }
}

/// Says what to raise when memory can't be locked, since `ENOMEM` alone tells a user nothing.
fn explain(error: FiErrno, config: &RegionConfig) {
    if error != FiErrno::ENOMEM && error != FiErrno::EPERM {
        return;
    }
    let limit = memlock_limit().map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    warn_log!(
        Mr,
        "registering {} bytes failed: {error}. The limit of locked memory (RLIMIT_MEMLOCK) is {limit}: \
         raise it with 'ulimit -l', LimitMEMLOCK= of the service, or /etc/security/limits.conf",
        config.len
    );
}

/// The soft limit of locked memory in bytes, `None` if there is none.
fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is writable.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (ret == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
