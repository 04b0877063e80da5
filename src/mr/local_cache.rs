//! The registration cache of a domain: how much it keeps, what it registers with, and who watches memory.

#![allow(unsafe_code, reason = "registers memory")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::cache::{Bounds, Cache, Registrar, Watch};
use super::monitor::{Foreign, Monitor, Watching, refused};
use crate::errno::Result;
use crate::log::info_log;
use crate::verbs::{Mr, Pd};

/// How local buffers without descriptors are reached (`FI_MR_LOCAL` off).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalMemory {
    /// Through one implicit on-demand region, where the device has that; else by the cache.
    #[default]
    Best,
    /// By the cache, even where the device has such a region.
    Cached,
    /// Registered for their operation only.
    Each,
}

/// How much the registration cache keeps (`FI_MR_CACHE_*` of `fi_mr(3)`).
#[derive(Clone, Copy, Debug)]
pub struct CacheConfig {
    /// Bytes of all registrations; `None`: the machine's memory divided by twice its processors.
    pub max_size: Option<u64>,
    /// How many registrations. 0: none is kept.
    pub max_count: usize,
    /// Whether registrations that touch each other become one.
    pub merge: bool,
    /// Whether the kernel is asked before each use whether memory is just being changed.
    pub check: bool,
    /// Whether memory is watched by `userfaultfd(2)`; if not, nothing is kept without a foreign monitor.
    pub userfaultfd: bool,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            max_size: None,
            max_count: 1024,
            merge: false,
            check: true,
            userfaultfd: true,
        }
    }
}

/// Registers in a protection domain, for local use.
#[derive(Debug)]
pub(crate) struct Pinned(Arc<Pd>);

pub(crate) type LocalCache = Cache<Pinned>;

impl Registrar for Pinned {
    type Mr = Mr;

    unsafe fn register(&self, start: u64, len: u64, writable: bool) -> Result<(Mr, u32)> {
        let rights = if writable {
            sys::IBV_ACCESS_LOCAL_WRITE
        } else {
            0
        };
        let addr = std::ptr::without_provenance(start as usize);
        // SAFETY: the caller's promise; peers have no rights.
        let mr = unsafe { Mr::register(&self.0, addr, len as usize, rights) }?;
        let lkey = mr.lkey();
        Ok((mr, lkey))
    }
}

fn all_memory() -> u64 {
    // SAFETY: have no preconditions.
    let numbers = unsafe {
        [
            libc::_SC_PHYS_PAGES,
            libc::_SC_PAGESIZE,
            libc::_SC_NPROCESSORS_ONLN,
        ]
        .map(|name| libc::sysconf(name))
    };
    let [pages, size, processors] = numbers.map(|number| u64::try_from(number).unwrap_or(1).max(1));
    pages.saturating_mul(size) / processors / 2
}

impl LocalCache {
    /// The cache for a protection domain, if there is to be one and memory can be watched; a refusal is said once.
    pub(crate) fn open(pd: &Arc<Pd>, config: &CacheConfig) -> Option<Arc<Self>> {
        if config.max_count == 0 || !config.userfaultfd {
            return None;
        }
        let cache = Self::new(Pinned(Arc::clone(pd)), config.bounds(), |index| {
            let index = Arc::clone(index);
            let watching: Box<dyn Watch> = Box::new(Watching::new(index, config.check)?);
            Ok(watching)
        });
        match cache {
            Ok(cache) => Some(Arc::new(cache)),
            Err(error) => {
                refused(error);
                None
            }
        }
    }

    /// The same with a monitor of the application's.
    ///
    /// # Errors
    /// Those of making the monitor, which comes last; `ENOSYS`, `ENOSPC`.
    pub(crate) fn open_foreign(
        pd: &Arc<Pd>,
        config: &CacheConfig,
        make: impl FnOnce() -> Result<Box<dyn Monitor>>,
    ) -> Result<Arc<Self>> {
        let cache = Self::new(Pinned(Arc::clone(pd)), config.bounds(), |index| {
            let watching: Box<dyn Watch> = Box::new(Foreign::new(Arc::clone(index) as _, make)?);
            Ok(watching)
        })?;
        info_log!(Mr, "the application's memory monitor watches local buffers");
        Ok(Arc::new(cache))
    }
}

impl CacheConfig {
    fn bounds(&self) -> Bounds {
        Bounds {
            size: self.max_size.unwrap_or_else(all_memory),
            count: self.max_count,
            merge: self.merge,
        }
    }
}
