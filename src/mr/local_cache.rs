//! The registration caches of a domain: their configuration, their registrars, and the monitor of
//! memory changes.

#![allow(unsafe_code, reason = "registers memory")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::cache::{Bounds, Cache, Registrar, Watch};
use super::monitor::{Foreign, Monitor, Watching, refused};
use crate::errno::Result;
use crate::log::info_log;
use crate::verbs::{Lkey, Mr, Pd, Rkey};

/// How local buffers without descriptors get an lkey (`FI_MR_LOCAL` off, `fi_mr(3)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalMemory {
    /// By one implicit on-demand region if the device supports it, else by the cache.
    #[default]
    Best,
    /// By the cache, also if the device supports an implicit on-demand region.
    Cached,
    /// By a registration for each operation.
    Each,
}

/// Limits and settings of the registration cache (`FI_MR_CACHE_*`, `fi_mr(3)`).
#[derive(Clone, Copy, Debug)]
pub struct CacheConfig {
    /// Maximum bytes of all registrations. `None`: the machine's memory divided by twice the number
    /// of its processors.
    pub max_size: Option<u64>,
    /// Maximum number of registrations; 0 disables the cache.
    pub max_count: usize,
    /// Whether adjacent registrations are merged.
    pub merge: bool,
    /// Whether each use of a cached registration asks the kernel if a change of memory is in
    /// progress.
    pub check: bool,
    /// Whether `userfaultfd(2)` may detect changes of memory. If not, only a domain with a monitor
    /// of the application caches registrations.
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

/// Registers memory in a protection domain, for local use.
#[derive(Debug)]
pub(crate) struct LocalRegistrar(Arc<Pd>);

pub(crate) type LocalCache = Cache<LocalRegistrar>;

impl Registrar for LocalRegistrar {
    type Mr = Mr;
    type Key = Lkey;

    unsafe fn register(&self, start: u64, len: u64, writable: bool) -> Result<(Mr, Lkey)> {
        let rights = if writable {
            sys::IBV_ACCESS_LOCAL_WRITE
        } else {
            0
        };
        let addr = std::ptr::without_provenance(start as usize);
        // SAFETY: the caller of `register` promises the memory; peers get no rights.
        let mr = unsafe { Mr::register(&self.0, addr, len as usize, rights) }?;
        let lkey = mr.lkey();
        Ok((mr, lkey))
    }
}

/// Registers memory in a protection domain, for remote read alone.
#[derive(Debug)]
pub(crate) struct SourceRegistrar(Arc<Pd>);

pub(crate) type SourceCache = Cache<SourceRegistrar>;

impl Registrar for SourceRegistrar {
    type Mr = Mr;
    type Key = Rkey;

    unsafe fn register(&self, start: u64, len: u64, _: bool) -> Result<(Mr, Rkey)> {
        let addr = std::ptr::without_provenance(start as usize);
        // SAFETY: the caller of `register` promises the memory.
        let mr = unsafe { Mr::register(&self.0, addr, len as usize, sys::IBV_ACCESS_REMOTE_READ) }?;
        let rkey = mr.rkey();
        Ok((mr, rkey))
    }
}

impl SourceCache {
    /// As [`LocalCache::open`].
    ///
    /// # Errors
    /// As [`LocalCache::open`].
    pub(crate) fn open(pd: &Arc<Pd>, config: &CacheConfig) -> Result<Option<Arc<Self>>> {
        open(SourceRegistrar(Arc::clone(pd)), config)
    }
}

fn all_memory() -> u64 {
    // SAFETY: `sysconf` has no preconditions.
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

/// A cache with `userfaultfd(2)` as its monitor. Result as [`LocalCache::open`].
fn open<R: Registrar<Mr: 'static> + 'static>(
    registrar: R,
    config: &CacheConfig,
) -> Result<Option<Arc<Cache<R>>>> {
    if config.max_count == 0 || !config.userfaultfd {
        return Ok(None);
    }
    let cache = Cache::new(registrar, config.bounds(), |index| {
        let index = Arc::clone(index);
        let watching: Box<dyn Watch> = Box::new(Watching::new(index, config.check)?);
        Ok(watching)
    });
    match cache {
        Ok(cache) => Ok(Some(Arc::new(cache))),
        Err(error) if error.may_pass() => Err(error),
        Err(error) => {
            refused(error);
            Ok(None)
        }
    }
}

impl LocalCache {
    /// The cache of a protection domain, with `userfaultfd(2)` as its monitor. `None`: the
    /// configuration disables the cache, or the kernel refuses `userfaultfd`, which is logged once.
    ///
    /// # Errors
    /// Those that may pass: a later call can open the cache. `EMFILE`, `ENFILE`, `ENOMEM`;
    /// `EAGAIN`: no thread could be started.
    pub(crate) fn open(pd: &Arc<Pd>, config: &CacheConfig) -> Result<Option<Arc<Self>>> {
        open(LocalRegistrar(Arc::clone(pd)), config)
    }

    /// The cache of a protection domain with a monitor of the application.
    ///
    /// # Errors
    /// `ENOSYS`: forks cannot be detected. `ENOSPC`: the process has 64 caches. Those of `make`,
    /// which is called last.
    pub(crate) fn open_foreign(
        pd: &Arc<Pd>,
        config: &CacheConfig,
        make: impl FnOnce() -> Result<Box<dyn Monitor>>,
    ) -> Result<Arc<Self>> {
        let cache = Self::new(LocalRegistrar(Arc::clone(pd)), config.bounds(), |index| {
            let watching: Box<dyn Watch> = Box::new(Foreign::new(Arc::clone(index) as _, make)?);
            Ok(watching)
        })?;
        info_log!(
            Mr,
            "the registration cache uses the application's memory monitor"
        );
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
