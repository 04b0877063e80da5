//! The part of a domain that memory regions use: protection domains with their key directories,
//! the application's keys, and the registrations of local buffers.

#![allow(unsafe_code, reason = "getrandom(2)")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::elsewhere::Visited;
use super::{
    AccessibleRegions, CacheConfig, DescRule, Directory, Form, LocalCache, LocalMemory, Mapped,
    Mode, Monitor, Paging, SourceCache, Workers, implicit_region, monitor,
};
use crate::auth::AuthKey;
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{Device, Lkey, Mr, Pd};

/// Parameters of a domain's memory regions.
#[derive(Clone, Debug, Default)]
pub struct MrConfig {
    /// The form of the regions.
    pub form: Form,
    /// Whether peers' operations on regions can be counted (`FI_RMA_EVENT`) although the form has
    /// no bit for it: counters are bound to regions that are enabled already.
    pub events: bool,
    /// Whether regions may be of persistent memory (`FI_RMA_PMEM`).
    pub durable: bool,
    /// How local buffers without a descriptor are reached.
    pub local: LocalMemory,
    /// Limits of the registration cache.
    pub cache: CacheConfig,
    /// The default authorization key of the domain's endpoints and regions; they may have keys of
    /// their own.
    pub auth: Option<AuthKey>,
}

/// The protection domains of a domain, and the registrations in them. Regions and endpoints hold
/// it. Thread safe.
#[derive(Debug)]
pub struct MrDomain {
    pd: Arc<Pd>,
    config: MrConfig,
    paging: Paging,
    /// The protection domains of authorization keys that are not the domain's own, never removed.
    keyed: Mutex<Vec<(AuthKey, Arc<Pd>)>>,
    /// The directory of each protection domain that has one.
    directories: Mutex<Vec<(Arc<Pd>, Arc<Directory>)>>,
    /// The application's keys of live regions.
    keys_in_use: Mutex<HashSet<u64>>,
    generation: AtomicU64,
    mapped: Mapped,
    visited: Visited,
    /// The whole address space, for local buffers that have no descriptor.
    implicit: Option<Mr>,
    /// Cached registrations of local buffers without a descriptor, if [`Self::implicit`] is `None`.
    /// Opened by the first use.
    cache: OnceLock<Option<Arc<LocalCache>>>,
    /// Cached registrations of sources that peers read. Opened by the first use.
    sources: OnceLock<Option<Arc<SourceCache>>>,
    /// Held while one of the caches is opened.
    opening: Mutex<()>,
    workers: Workers,
    accessible_regions: AccessibleRegions,
    /// The process that has opened the domain.
    owner: forks::Owner,
}

/// The endpoint to which a region is bound (`FI_MR_ENDPOINT`): peers have access through it alone.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    /// The domain of the endpoint.
    pub(crate) domain: &'a Arc<MrDomain>,
    /// The protection domain of the endpoint's queue pair.
    pub(crate) pd: &'a Arc<Pd>,
    /// The endpoint's authorization key.
    pub(crate) auth: Option<&'a AuthKey>,
}

impl MrDomain {
    /// The regions of a domain with this protection domain.
    pub(crate) fn new(pd: Arc<Pd>, mut config: MrConfig) -> Arc<Self> {
        monitor::count_forks();
        let mode = config.form.mode;
        // found by trying, and only where it matters
        let on_demand = !mode.contains(Mode::ALLOCATED)
            && pd.device().behaviour().is_ok_and(|seen| seen.odp.works());
        let paging = mode.paging(on_demand);
        if paging == Paging::Unregistered {
            // regions have no lkeys
            config.form.desc = DescRule::Ignored;
        }
        let implicit =
            if config.form.desc == DescRule::Required || config.local != LocalMemory::Best {
                None
            } else {
                implicit(&pd)
            };
        Arc::new(Self {
            pd,
            config,
            paging,
            keyed: Mutex::default(),
            directories: Mutex::default(),
            keys_in_use: Mutex::default(),
            generation: AtomicU64::new(1),
            mapped: Mapped::default(),
            visited: Visited::default(),
            implicit,
            cache: OnceLock::new(),
            sources: OnceLock::new(),
            opening: Mutex::default(),
            workers: Workers::default(),
            accessible_regions: AccessibleRegions::default(),
            owner: forks::Owner::this_process(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.pd.device()
    }

    /// The protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The parameters. If the mode needs on-demand paging that the device does not have, the rule
    /// for descriptors is [`DescRule::Ignored`].
    pub fn config(&self) -> &MrConfig {
        &self.config
    }

    /// The protection domain of an authorization key; `None` is the domain's own.
    ///
    /// # Errors
    /// `ENOMEM`: the device has no more.
    pub(crate) fn pd_of(&self, key: Option<&AuthKey>) -> Result<Arc<Pd>> {
        let Some(key) = key.filter(|key| self.config.auth.as_ref() != Some(key)) else {
            return Ok(Arc::clone(&self.pd));
        };
        let mut keyed = self.keyed.lock();
        if let Some((_, pd)) = keyed.iter().find(|(of, _)| of == key) {
            return Ok(Arc::clone(pd));
        }
        let pd = Pd::alloc(self.device())?;
        keyed.push((key.clone(), Arc::clone(&pd)));
        Ok(pd)
    }

    /// The key directory of a protection domain of this domain, made on the first call.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering memory.
    pub(crate) fn directory(&self, pd: &Arc<Pd>) -> Result<Arc<Directory>> {
        let mut directories = self.directories.lock();
        if let Some((_, directory)) = directories.iter().find(|(of, _)| Arc::ptr_eq(of, pd)) {
            return Ok(Arc::clone(directory));
        }
        let directory = Directory::new(pd, random()?, self.counts())?;
        directories.push((Arc::clone(pd), Arc::clone(&directory)));
        Ok(directory)
    }

    /// Removes the directory of an endpoint's own protection domain, and the registrations of
    /// regions in it, after the endpoint was closed.
    pub(crate) fn forget(&self, pd: &Arc<Pd>) {
        self.visited.leave(pd);
        let mut directories = self.directories.lock();
        let gone = directories.extract_if(.., |(of, _)| Arc::ptr_eq(of, pd));
        let gone: Vec<_> = gone.collect();
        drop(directories);
        drop(gone);
    }

    /// Number of key directories.
    #[cfg(test)]
    pub(crate) fn directory_count(&self) -> usize {
        self.directories.lock().len()
    }

    /// How its regions hold on to their pages.
    pub(crate) fn paging(&self) -> Paging {
        self.paging
    }

    /// Whether peers' operations on its regions can be counted.
    pub(crate) fn counts(&self) -> bool {
        self.config.events || self.config.form.mode.contains(Mode::RMA_EVENT)
    }

    /// The application's keys of live regions.
    pub(crate) fn keys_in_use(&self) -> &Mutex<HashSet<u64>> {
        &self.keys_in_use
    }

    /// Maps a raw key of a peer (`fi_mr_map_raw(3)`): the result is a key for operations of this
    /// domain's endpoints that are connected to the peer.
    ///
    /// # Errors
    /// `EINVAL`: not a raw key, or one that is truncated, modified, or of another version.
    pub fn map_raw(&self, raw: &[u8]) -> Result<u64> {
        self.mapped.map(raw)
    }

    /// Undoes [`Self::map_raw`].
    ///
    /// # Errors
    /// `EINVAL`: the key is not mapped.
    pub fn unmap_key(&self, key: u64) -> Result<()> {
        self.mapped.unmap(key)
    }

    /// Whether keys are mapped: the domain is in use then.
    pub fn has_mapped_keys(&self) -> bool {
        !self.mapped.is_empty()
    }

    pub(crate) fn mapped(&self) -> &Mapped {
        &self.mapped
    }

    /// The protection domains in which regions have registrations for local use.
    pub(super) fn visited(&self) -> &Visited {
        &self.visited
    }

    /// A generation for a new region; unique in the domain.
    pub(crate) fn next_generation(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::Relaxed)
    }

    /// The lkey in `pd` of the whole address space, where the device has such a region.
    pub(crate) fn implicit_lkey(&self, pd: &Arc<Pd>) -> Option<Lkey> {
        let region = self.implicit.as_ref()?;
        Arc::ptr_eq(region.pd(), pd).then(|| region.lkey())
    }

    /// The cache of registrations of local buffers in `pd`. The first call opens it, which may
    /// start the monitor's thread. `None`: `pd` is not the domain's own; the application registers
    /// local buffers; the device needs no registrations; the configuration disables the cache; or
    /// the kernel refuses `userfaultfd(2)` to a domain without a monitor of the application. Also
    /// if the process has no descriptor or no thread for it now: the next call tries again.
    pub(crate) fn local_cache(&self, pd: &Arc<Pd>) -> Option<Arc<LocalCache>> {
        if !Arc::ptr_eq(pd, &self.pd) || !self.caches() {
            return None;
        }
        let open = || LocalCache::open(&self.pd, &self.config.cache);
        opened(&self.cache, &self.opening, open)
    }

    /// The cache of registrations in `pd` of sources that peers read. The first call opens it,
    /// which may start the monitor's thread. `None`: `pd` is not the domain's own; the
    /// configuration disables the cache; the application has a monitor, which serves one cache; or
    /// the kernel refuses `userfaultfd(2)`; also as [`Self::local_cache`].
    pub(crate) fn source_cache(&self, pd: &Arc<Pd>) -> Option<Arc<SourceCache>> {
        let foreign = self.cache.get().and_then(Option::as_ref);
        let foreign = foreign.is_some_and(|cache| cache.is_foreign());
        if foreign || !Arc::ptr_eq(pd, &self.pd) || self.config.local == LocalMemory::Each {
            return None;
        }
        let open = || SourceCache::open(&self.pd, &self.config.cache);
        opened(&self.sources, &self.opening, open)
    }

    fn caches(&self) -> bool {
        self.config.form.desc != DescRule::Required
            && self.config.local != LocalMemory::Each
            && self.implicit.is_none()
    }

    /// Uses a monitor of the application, instead of `userfaultfd(2)`, to detect changes of memory;
    /// the monitor reports them by [`memory_changed`](crate::mr::memory_changed). To be called
    /// before an endpoint of the domain is enabled. `make` is called at most once. The cache owns
    /// the monitor and drops it when the domain and its endpoints are closed; a forked child never
    /// drops it.
    ///
    /// # Errors
    /// - `EBUSY`: the domain has a monitor, or [`Self::local_cache`] was called before.
    /// - `EOPNOTSUPP`: this domain caches no registrations: the application registers local
    ///   buffers, the device needs no registrations, or the configuration disables the cache.
    /// - `ENOSYS`: forks cannot be detected. `ENOSPC`: the process has 64 caches. Those of `make`.
    pub fn import_monitor(&self, make: impl FnOnce() -> Result<Box<dyn Monitor>>) -> Result<()> {
        if !self.caches() || self.config.cache.max_count == 0 {
            return Err(FiErrno::EOPNOTSUPP);
        }
        if self.cache.get().is_some() {
            return Err(FiErrno::EBUSY);
        }
        let cache = LocalCache::open_foreign(&self.pd, &self.config.cache, make)?;
        self.cache.set(Some(cache)).map_err(|_| FiErrno::EBUSY)
    }

    /// The regions on which this side executes atomics of peers.
    pub(crate) fn accessible_regions(&self) -> &AccessibleRegions {
        &self.accessible_regions
    }

    /// Whether this process has opened the domain. A forked child has not.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.owner.is_this_process()
    }

    /// Threads that register memory.
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }
}

/// The value of `cache`; the first call opens it. An error that may pass is not stored: the next
/// call opens it again.
fn opened<T: Clone>(
    cache: &OnceLock<Option<T>>,
    opening: &Mutex<()>,
    open: impl FnOnce() -> Result<Option<T>>,
) -> Option<T> {
    if let Some(known) = cache.get() {
        return known.clone();
    }
    let _opening = opening.lock();
    if let Some(known) = cache.get() {
        return known.clone();
    }
    match open() {
        Ok(new) => cache.get_or_init(|| new).clone(),
        Err(error) => {
            info_log!(
                Mr,
                "the registration cache could not be opened: {error}; \
                 it is tried again for the next endpoint"
            );
            None
        }
    }
}

/// 64 random bits of the kernel.
pub(crate) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    // SAFETY: the buffer has that size.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) != Ok(bytes.len()) {
        return Err(FiErrno::last());
    }
    Ok(u64::from_ne_bytes(bytes))
}

/// A region of everything, where the device was seen to have that.
fn implicit(pd: &Arc<Pd>) -> Option<Mr> {
    let behaviour = pd.device().behaviour().ok()?;
    if !behaviour.odp_implicit.works() {
        return None;
    }
    implicit_region(pd).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::mr::{Access, Desc, LocalKeys, Use, tests};
    use crate::verbs::devices;
    use crate::verbs::replaced::{self, PAGED};

    /// Without a bit for pages, on a device whose on-demand paging writes beside the buffer.
    #[test]
    #[allow(unsafe_code, reason = "looks up lkeys")]
    fn a_device_with_broken_paging_registers_nothing_on_demand() {
        let device = devices(&[replaced::with_broken_paging()], false).remove(0);
        assert!(!device.behaviour().unwrap().odp.works());
        assert_ne!(PAGED.replace(0), 0);
        let config = DomainConfig {
            mr: MrConfig {
                form: Form::new(Mode::empty(), true),
                local: LocalMemory::Each,
                ..MrConfig::default()
            },
            ..DomainConfig::default()
        };
        let domain = Domain::open(&device, config).unwrap();
        let memory = vec![0_u8; 4096];
        let region = tests::region(&domain, &memory, Access::all(), 7);
        assert!(!region.access().is_remote());
        assert_eq!(region.key(), 7);
        region.refresh(&[]).unwrap();
        let mut keys = LocalKeys::new(domain.mr(), domain.pd());
        // SAFETY: the region is open; nothing is posted.
        unsafe { keys.lkey(Desc(region.desc()), &tests::iov(&memory), Use::Sink) }.unwrap();
        keys.release_taken();
        region.close().unwrap();
        assert_eq!(PAGED.get(), 0);
    }

    #[test]
    fn a_cache_is_opened_again_after_an_error_that_may_pass() {
        let (cache, opening) = (OnceLock::new(), Mutex::new(()));
        assert_eq!(opened(&cache, &opening, || Err(FiErrno::EMFILE)), None);
        assert_eq!(opened(&cache, &opening, || Ok(Some(1))), Some(1));
        assert_eq!(opened(&cache, &opening, || Ok(Some(2))), Some(1));
        let refused: OnceLock<Option<i32>> = OnceLock::new();
        assert_eq!(opened(&refused, &opening, || Ok(None)), None);
        assert_eq!(opened(&refused, &opening, || Ok(Some(2))), None);
    }
}
