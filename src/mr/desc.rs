//! Descriptors of local buffers (`fi_mr_desc(3)`), and the lkeys that they resolve to.

#![allow(unsafe_code, reason = "follows descriptors as C passes them")]

use std::ffi::c_void;
use std::sync::Arc;

use super::MrDomain;
use super::region::Region;
use crate::errno::{FiErrno, Result};
use crate::log::{Subsystem, refuse, refused};
use crate::log_place;
use crate::verbs::{Lkey, Pd};

/// Marks a live region. Most invalid descriptors are refused because they do not point to it.
pub(super) const MAGIC: u32 = 0x7765_6672;
pub(super) const DEAD: u32 = 0xdead_6672;

/// A descriptor as the application passes it: a pointer from [`Region::desc`], or NULL.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Desc(pub *mut c_void);

// SAFETY: the pointer is only dereferenced in `lkey`, whose callers promise that the region is open
// until then; a region may be used by any thread.
unsafe impl Send for Desc {}

/// The protection domain and domain of an endpoint, which its descriptors must match.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) pd: Arc<Pd>,
    /// Address of the domain, for comparison only.
    domain: usize,
}

impl Place {
    pub(crate) fn new(domain: &MrDomain, pd: &Arc<Pd>) -> Self {
        Self {
            pd: Arc::clone(pd),
            domain: std::ptr::from_ref(domain).addr(),
        }
    }
}

impl Desc {
    /// No region: valid for inject, for inline data, and for a length of 0.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// The lkey of the region in the protection domain of `place`. If the region is registered in
    /// another one, or not enabled yet, the first use in this one registers the region there, which
    /// blocks and allocates; later uses take a lock of the region.
    ///
    /// # Errors
    /// - `EINVAL`: NULL; not a region; a region of another domain; or no buffer of the region has
    ///   all bytes.
    /// - Those of registering (`ibv_reg_mr(3)`).
    ///
    /// # Safety
    /// NULL, or a pointer from [`Region::desc`] of a region that is still open.
    #[inline]
    pub(crate) unsafe fn lkey(self, place: &Place, iov: &libc::iovec) -> Result<Lkey> {
        if self.0.is_null() {
            return Err(absent(iov.iov_base as u64, iov.iov_len));
        }
        // SAFETY: the caller promises that the region is open.
        let region = unsafe { &*self.0.cast::<Region>() };
        if region.magic != MAGIC {
            return Err(foreign(self.0 as u64));
        }
        match region.registration.get() {
            Some(registration) if Arc::ptr_eq(registration.pd(), &place.pd) => registration
                .lkey(iov)
                .map_err(|error| outside(error, iov.iov_base as u64, iov.iov_len)),
            _ if Arc::as_ptr(region.domain()).addr() == place.domain => {
                region.lkey_elsewhere(&place.pd, iov)
            }
            _ => Err(elsewhere(self.0 as u64)),
        }
    }
}

/// Refuses, and logs at `info`, a buffer without a descriptor in a domain with `FI_MR_LOCAL`.
#[cold]
fn absent(addr: u64, len: usize) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the buffer of {len} bytes at {addr:#x} has no descriptor; FI_MR_LOCAL requires one"
    )
}

/// Refuses a pointer that is not from `fi_mr_desc`, or is of a closed region.
#[cold]
fn foreign(desc: u64) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "{desc:#x} is not the descriptor of an open region"
    )
}

/// Refuses a buffer that no single buffer of the region contains.
#[cold]
fn outside(error: FiErrno, addr: u64, len: usize) -> FiErrno {
    let reason = format_args!("no buffer of the region contains all {len} bytes at {addr:#x}");
    refuse(error, Subsystem::EpData, log_place!(), reason)
}

/// Refuses a region of another domain.
#[cold]
fn elsewhere(desc: u64) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the region of descriptor {desc:#x} belongs to another domain than the endpoint"
    )
}
