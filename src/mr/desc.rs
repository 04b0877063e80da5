//! Descriptors of local buffers (`fi_mr_desc(3)`), and the lkeys that they resolve to.

#![allow(unsafe_code, reason = "follows descriptors as C passes them")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use forks::PerProcess;
use parking_lot::Mutex;

use super::region::Region;
use super::registration::InUse;
use super::{MrDomain, following};
use crate::errno::{FiErrno, Result};
use crate::log::{Subsystem, refuse, refused};
use crate::log_place;
use crate::verbs::{Lkey, Pd};

/// Mark a live and a closed region. Most invalid descriptors are refused because they do not point
/// to the first.
pub(super) const MAGIC: u32 = 0x7765_6672;
pub(super) const DEAD: u32 = 0xdead_6672;

/// Number of closed regions whose descriptors are certainly refused. An older descriptor must not
/// be used: only a search among the open regions would detect it, and each post would pay for that
/// search.
const CLOSED: usize = 1024;

/// The memory of the last closed regions, oldest first. Operations that wait have descriptors, and
/// the application may close a region before them (`fi_mr(3)`, "queued operations that reference a
/// memory region being closed may fail").
static MEMORY: PerProcess<Mutex<VecDeque<Weak<Region>>>> =
    PerProcess::new(Mutex::new(VecDeque::new()));

/// Keeps the memory of a region that is closed.
pub(super) fn keep_memory(region: &Arc<Region>) {
    let mut memory = MEMORY.get().lock();
    memory.push_back(Arc::downgrade(region));
    let oldest = (memory.len() > CLOSED).then(|| memory.pop_front());
    drop(memory);
    drop(oldest);
}

/// Makes the descriptor of a region invalid, and waits for the operations that follow it already
/// ([`following`]).
///
/// # Errors
/// `EBUSY`: one still follows it after 5 s. The caller repeats the call.
pub(super) fn refuse_descriptor(region: &Region) -> Result<()> {
    region.magic.store(DEAD, Ordering::Relaxed);
    following::wait_for(std::ptr::from_ref(region).addr())
}

/// A descriptor as the application passes it: a pointer from [`Region::desc`], or NULL.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Desc(pub *mut c_void);

// SAFETY: the pointer is only dereferenced in `lkey`, whose callers promise that the region is open
// until then; a region may be used by any thread.
unsafe impl Send for Desc {}

/// The protection domain and domain of an endpoint, which its descriptors must match.
#[derive(Clone, Debug)]
pub(crate) struct DescScope {
    pub(crate) pd: Arc<Pd>,
    /// Address of the domain, for comparison only.
    domain: usize,
}

impl DescScope {
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

    /// The lkey of the region in the protection domain of `scope`. If the region is registered in
    /// another one, or not enabled yet, the first use in this one registers the region there, which
    /// blocks and allocates; later uses take a lock of the region. If a refresh may replace the
    /// registration, `hold` gets the use of it, which the caller keeps until the operation is
    /// complete.
    ///
    /// # Errors
    /// - `EINVAL`: NULL; not a region; a region of another domain; or no buffer of the region has
    ///   all bytes.
    /// - Those of registering (`ibv_reg_mr(3)`).
    ///
    /// # Safety
    /// NULL, or a pointer from [`Region::desc`] of a region that is open, or one of the last
    /// [`CLOSED`] that were closed. No thread closes it during the call, or the caller has added
    /// the descriptor to a [`Following`](super::Following) that it holds.
    #[inline]
    pub(super) unsafe fn lkey(
        self,
        scope: &DescScope,
        iov: &libc::iovec,
        hold: impl FnOnce(InUse),
    ) -> Result<Lkey> {
        if self.0.is_null() {
            return Err(absent(iov.iov_base as u64, iov.iov_len));
        }
        let region = self.0.cast::<Region>();
        // SAFETY: the caller promises that the region is open, or one of the last that were closed:
        // `MEMORY` keeps those, in which the mark stays valid.
        let mark = unsafe { &(*region).magic };
        if mark.load(Ordering::Relaxed) != MAGIC {
            return Err(foreign(self.0 as u64));
        }
        #[cfg(test)]
        following::stops::reached(self);
        // SAFETY: as above; it is open, and its close waits for the caller (`following`), or does
        // not begin, by the caller's promise.
        let region = unsafe { &*region };
        match region.registration.get() {
            Some(registration) if Arc::ptr_eq(registration.pd(), &scope.pd) => registration
                .lkey(iov, hold)
                .map_err(|error| outside(error, iov.iov_base as u64, iov.iov_len)),
            _ if Arc::as_ptr(region.domain()).addr() == scope.domain => {
                region.lkey_elsewhere(&scope.pd, iov, hold)
            }
            _ => Err(of_another_domain(self.0 as u64)),
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
fn of_another_domain(desc: u64) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the region of descriptor {desc:#x} belongs to another domain than the endpoint"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::mr::{Access, Following, tests};

    /// The close of a region waits for a thread that follows its descriptor; from its begin on the
    /// descriptor is refused.
    #[test]
    fn a_close_waits_for_what_follows_a_descriptor() {
        let domain = Domain::open(&tests::device(), DomainConfig::default()).unwrap();
        let memory = [0_u8; 64];
        let region = tests::region(&domain, &memory, Access::READ, 0);
        let pd = region.registration.get().unwrap().pd().clone();
        let scope = DescScope::new(domain.mr(), &pd);
        let (desc, iov) = (Desc(region.desc()), tests::iov(&memory));
        let mut follows = Following::default();
        follows.add(desc);
        let closed = following::stops::close_at_next(&region);
        // SAFETY: the descriptor is followed.
        assert!(unsafe { desc.lkey(&scope, &iov, drop) }.is_ok());
        assert_eq!(*closed.lock(), Some(Err(FiErrno::EBUSY)));
        let mut later = Following::default();
        later.add(desc);
        // SAFETY: as above.
        let refused = unsafe { desc.lkey(&scope, &iov, drop) };
        assert_eq!(refused, Err(FiErrno::EINVAL));
        std::thread::scope(|scope| {
            let close = scope.spawn(|| region.close());
            drop((follows, later));
            close.join().unwrap().unwrap();
        });
    }

    /// Regions of the same size are registered meanwhile, which would be allocated in its memory.
    #[test]
    fn a_descriptor_of_a_closed_region_is_refused() {
        let domain = Domain::open(&tests::device(), DomainConfig::default()).unwrap();
        let memory = [0_u8; 64];
        let register = || tests::region(&domain, &memory, Access::READ, 0);
        let region = register();
        let (desc, pd) = (
            Desc(region.desc()),
            region.registration.get().unwrap().pd().clone(),
        );
        let scope = DescScope::new(domain.mr(), &pd);
        let iov = tests::iov(&memory);
        // SAFETY: the region is open.
        assert!(unsafe { desc.lkey(&scope, &iov, drop) }.is_ok());
        region.close().unwrap();
        drop(region);
        let others: Vec<_> = (0..100).map(|_| register()).collect();
        // SAFETY: the region is one of the last that were closed.
        let refused = unsafe { desc.lkey(&scope, &iov, drop) };
        assert_eq!(refused, Err(FiErrno::EINVAL));
        for other in others {
            other.close().unwrap();
        }
    }
}
