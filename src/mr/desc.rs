//! Descriptors of local buffers (`fi_mr_desc(3)`), and the lkeys that they stand for.

#![allow(unsafe_code, reason = "follows descriptors as C passes them")]

use std::ffi::c_void;
use std::sync::Arc;

use super::exposed::Exposed;
use super::region::Region;
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::log::{Subsystem, refuse, refused};
use crate::log_place;
use crate::verbs::Pd;

/// Marks a live region: a descriptor that points elsewhere is refused in most cases.
pub(super) const MAGIC: u32 = 0x7765_6672;
pub(super) const DEAD: u32 = 0xdead_6672;

/// A descriptor as the application passes it: what [`Region::desc`] gave, or NULL.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Desc(pub *mut c_void);

// SAFETY: a number until it is followed, and a region may be used by any thread.
unsafe impl Send for Desc {}

/// Where a descriptor is used: regions of other domains are refused there.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) pd: Arc<Pd>,
    /// Address of the domain, to compare with.
    domain: usize,
}

impl Place {
    pub(crate) fn new(domain: &Domain, pd: &Arc<Pd>) -> Self {
        Self {
            pd: Arc::clone(pd),
            domain: std::ptr::from_ref(domain).addr(),
        }
    }
}

impl Desc {
    /// No region: will do for inject, for what goes inline, and for length 0.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// The lkey with which `place` reaches the region: at once where that is the protection domain the region
    /// is exposed in, else with a registration made by the first use there, which blocks.
    ///
    /// # Errors
    /// `EINVAL`: NULL, not a region, or of another domain; of several buffers, none has it all. Else those of
    /// registering.
    ///
    /// # Safety
    /// NULL, or a pointer that [`Region::desc`] of a live region gave.
    #[inline]
    pub(crate) unsafe fn lkey(self, place: &Place, iov: &libc::iovec) -> Result<u32> {
        if self.0.is_null() {
            return Err(absent(iov.iov_base as u64, iov.iov_len));
        }
        // SAFETY: the caller promises a live region.
        let region = unsafe { &*self.0.cast::<Region>() };
        if region.magic != MAGIC {
            return Err(foreign(self.0 as u64));
        }
        match region.exposed.get() {
            Some(exposed) if Arc::ptr_eq(exposed.pd(), &place.pd) => exposed
                .lkey(iov)
                .map_err(|error| outside(error, iov.iov_base as u64, iov.iov_len)),
            _ if Arc::as_ptr(region.domain()).addr() == place.domain => {
                region.lkey_elsewhere(&place.pd, iov)
            }
            _ => Err(elsewhere(self.0 as u64)),
        }
    }
}

/// The reason of a refusal, at `info`: a buffer without a descriptor where one is needed.
#[cold]
fn absent(addr: u64, len: usize) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the buffer of {len} bytes at {addr:#x} has no descriptor, which FI_MR_LOCAL demands"
    )
}

/// The same: a descriptor that fi_mr_desc has not given, or of a closed region.
#[cold]
fn foreign(desc: u64) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "{desc:#x} is not the descriptor of an open region"
    )
}

/// The same: a region of several buffers, or of parts, none of which has all bytes.
#[cold]
fn outside(error: FiErrno, addr: u64, len: usize) -> FiErrno {
    let reason = format_args!("no buffer of the region has all {len} bytes at {addr:#x}");
    refuse(error, Subsystem::EpData, log_place!(), reason)
}

/// The same: a region of another domain.
#[cold]
fn elsewhere(desc: u64) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the region of descriptor {desc:#x} is of another domain than the endpoint"
    )
}

impl Region {
    /// The lkey in a protection domain that the region is not exposed in: before it is enabled, or at another
    /// endpoint than the one it is bound to.
    #[cold]
    fn lkey_elsewhere(&self, pd: &Arc<Pd>, iov: &libc::iovec) -> Result<u32> {
        let mut elsewhere = self.elsewhere.lock();
        if let Some(known) = elsewhere.iter().find(|known| Arc::ptr_eq(known.pd(), pd)) {
            return known.lkey(iov);
        }
        let local = Exposed::local(self, pd)?;
        let lkey = local.lkey(iov)?;
        elsewhere.push(local);
        Ok(lkey)
    }
}
