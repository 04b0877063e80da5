//! The life cycle of a memory region: registration, binding, enabling, closing.

#![allow(unsafe_code, reason = "takes buffers as C passes them")]

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::buffer::joined;
use super::desc::{DEAD, MAGIC, keep_memory, refuse_descriptor};
use super::elsewhere::Elsewhere;
use super::key_cache::kind;
use super::ops::{ExportedMemory, SharedMemory};
use super::own_access::AccessibleRegion;
use super::pending::Pending;
use super::registration::Registration;
use crate::auth::AuthKey;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::log::refused;
use crate::mr::{Access, Buffer, Mode, MrDomain, Paging, Scope};
use crate::queue::Counter;
use crate::queue::event_cell::{Cell, Event, Watch};
use crate::verbs::Pd;
use crate::wire::raw_key::encode_short;
use crate::wire::records::MAX_SEGMENTS;

/// Attributes of a new region.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionConfig<'a> {
    /// The memory: one buffer, or up to [`MAX_SEGMENTS`] buffers that peers address as one
    /// contiguous range.
    pub buffers: &'a [Buffer],
    /// Permitted operations; may be empty.
    pub access: Access,
    /// The key, used if the application chooses keys and the region has remote access.
    pub requested_key: u64,
    /// Whether counters of peers' operations will be bound (`FI_RMA_EVENT`). The region is created
    /// disabled.
    pub counted: bool,
    /// Whether the region permits only one access, by one peer (`FI_MR_SINGLE_USE`).
    pub once: bool,
    /// Whether peers may make their writes survive a loss of power (`FI_RMA_PMEM`).
    pub persistent: bool,
    /// The memory is that of a DMA-BUF descriptor; the only buffer gives its address range.
    pub dmabuf: Option<Dmabuf>,
    /// Authorization key of the endpoints that give access, instead of the domain's key.
    pub auth: Option<&'a AuthKey>,
    /// The engine-owned memory that is the only buffer; the region holds a reference to it.
    pub memory: Option<&'a Arc<SharedMemory>>,
    /// The region (`base_mr`) of which this one is a sub-region, with its own key and rights.
    pub base: Option<&'a Arc<Region>>,
}

/// Memory behind a DMA-BUF descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Dmabuf {
    /// The descriptor; it need not stay open.
    pub fd: RawFd,
    /// Offset of the memory in the file, in bytes.
    pub offset: u64,
}

/// A memory region, with the keys and addressing of its domain's form ([`Mode`]).
///
/// [`Self::close`] ends it. Dropping an open region ends its registrations, and logs a failure.
/// Thread safe.
#[derive(Debug)]
#[repr(C)]
pub struct Region {
    pub(super) magic: AtomicU32,
    access: Access,
    /// Set once the region is enabled. Dropped before all other fields.
    pub(super) registration: OnceLock<Registration>,
    /// Registrations for local use in other protection domains, made at first use.
    pub(super) elsewhere: Arc<Elsewhere>,
    pub(super) buffers: Box<[Buffer]>,
    pub(super) len: u64,
    pub(super) requested_key: u64,
    counted: bool,
    pub(super) once: bool,
    pub(super) persistent: bool,
    bindings: Mutex<Bindings>,
    /// Progress of the registration by a worker.
    pub(super) pending: Arc<Pending>,
    /// Reserves the application's key of a region with remote access.
    _key_in_use: Option<KeyInUse>,
    /// The DMA-BUF descriptor of the region or of its base, and the offset in its file of address
    /// 0, modulo 2^64.
    pub(super) dmabuf: Option<(Arc<OwnedFd>, u64)>,
    /// `auth`: the region's authorization key, if it differs from the domain's. `pd`: the region's
    /// protection domain, unless that is an endpoint's.
    auth: Option<AuthKey>,
    pd: Arc<Pd>,
    /// The region's memory, if the engine owns it, and the processes that it is shared with.
    pub(super) exported: Option<ExportedMemory>,
    /// The region that this one is a sub-region of.
    base: Option<Arc<Region>>,
    domain: Arc<MrDomain>,
}

/// Objects bound to a region.
#[derive(Debug, Default)]
struct Bindings {
    /// Counters by the events that they count.
    counters: Vec<(Event, Arc<Counter>)>,
    /// The protection domain of the endpoint.
    endpoint: Option<Arc<Pd>>,
    /// The event cell that the counters follow.
    cell: Option<Arc<Cell>>,
    /// Set by `close`: afterwards binding and enabling fail.
    closing: bool,
}

impl Bindings {
    /// Detaches the counters from the event cell.
    fn leave(&mut self) {
        if let Some(cell) = self.cell.take() {
            for (_, counter) in &self.counters {
                counter.leave(&cell);
            }
        }
    }
}

/// Reserves an application's key until dropped.
#[derive(Debug)]
struct KeyInUse {
    key: u64,
    domain: Arc<MrDomain>,
}

impl KeyInUse {
    /// # Errors
    /// `EKEYREJECTED`: the key is outside the application's range. `ENOKEY`: a region uses it.
    fn take(domain: &Arc<MrDomain>, key: u64) -> Result<Self> {
        if key >> 48 >= kind::RESERVED {
            return Err(refused!(
                Mr,
                EKEYREJECTED,
                "the keys from {:#x} on are reserved, so requested_key must not be {key:#x}",
                kind::RESERVED << 48
            ));
        }
        if !domain.keys_in_use().lock().insert(key) {
            return Err(refused!(
                Mr,
                ENOKEY,
                "requested_key {key:#x} is the key of an open region"
            ));
        }
        Ok(Self {
            key,
            domain: Arc::clone(domain),
        })
    }
}

impl Drop for KeyInUse {
    fn drop(&mut self) {
        self.domain.keys_in_use().lock().remove(&self.key);
    }
}

impl RegionConfig<'_> {
    /// Checks the attributes and returns the total length in bytes.
    fn check(&self) -> Result<u64> {
        let [first, ..] = self.buffers else {
            return Err(refused!(Mr, EINVAL, "the region has no buffers"));
        };
        if self.buffers.len() > MAX_SEGMENTS {
            let count = self.buffers.len();
            let reason =
                format_args!("the region has {count} buffers; mr_iov_limit is {MAX_SEGMENTS}");
            return Err(refused!(Mr, EINVAL, "{reason}"));
        }
        let mut total = 0_u64;
        for buffer in self.buffers {
            let end = buffer.start().checked_add(buffer.len as u64);
            total = total
                .checked_add(buffer.len as u64)
                .ok_or(FiErrno::EINVAL)?;
            if end.is_none() || buffer.len == 0 {
                return Err(refused!(
                    Mr,
                    EINVAL,
                    "the buffer of {} bytes at {:?} is empty, or exceeds the address space",
                    buffer.len,
                    buffer.addr
                ));
            }
        }
        let start = first.start();
        start.checked_add(total).ok_or(FiErrno::EINVAL)?;
        if self.dmabuf.is_some() && (self.buffers.len() != 1 || self.base.is_some()) {
            return Err(FiErrno::EINVAL);
        }
        if let Some(memory) = self.memory {
            let whole = (memory.addr().cast_const(), memory.len());
            let alone = self.base.is_none() && self.dmabuf.is_none() && self.buffers.len() == 1;
            if !alone || (first.addr, first.len) != whole {
                return Err(FiErrno::EINVAL);
            }
        }
        let outside = |base: &Arc<Region>| self.buffers.iter().find(|buffer| !base.covers(buffer));
        if let Some(buffer) = self.base.and_then(outside) {
            return Err(refused!(
                Mr,
                EINVAL,
                "no buffer of base_mr contains the {} bytes at {:?}",
                buffer.len,
                buffer.addr
            ));
        }
        Ok(total)
    }
}

/// Duplicates a descriptor (`FD_CLOEXEC` set).
fn duplicate(fd: RawFd) -> Result<OwnedFd> {
    // SAFETY: `fcntl` accepts any number and refuses invalid descriptors.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if new < 0 {
        return Err(FiErrno::last());
    }
    // SAFETY: `fcntl` has just returned this descriptor; it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// The error for a disabled region; logged at `info`.
#[cold]
pub(super) fn not_enabled() -> FiErrno {
    refused!(
        Mr,
        EOPBADSTATE,
        "the region is disabled, or its registration is not complete"
    )
}

impl Region {
    /// `FI_KEY_NOTAVAIL`: no region has this key.
    pub const NO_KEY: u64 = u64::MAX;

    /// Registers memory. Blocks while the kernel pins the pages. If regions are bound to endpoints
    /// ([`Mode::ENDPOINT`]) or events are counted, the region is created disabled: the memory is
    /// registered by [`Self::enable`].
    ///
    /// # Errors
    /// - `EINVAL`: no buffer or more than [`MAX_SEGMENTS`]; a buffer of length 0; addresses that
    ///   overflow; a buffer outside `base`, or a base of another domain.
    /// - `ENOSYS`: the device cannot register memory behind a descriptor; logged.
    /// - `EBADFLAGS`: counted, and the domain has no events; persistent, and the domain has no
    ///   persistent regions; single use, and the device has no atomics or the form has
    ///   [`Mode::MMU_NOTIFY`] and pins.
    /// - `ENOKEY`: the requested key is in use. `EKEYREJECTED`: it is outside the application's
    ///   range.
    /// - `ENOMEM`: the limit of locked memory or of the device is reached; the log names the limit
    ///   to raise.
    /// - `EINVAL`: also if the device cannot make writes to this memory persistent.
    /// - `EFAULT`: the memory is not mapped, or is read-only and `access` requires writing.
    ///
    /// # Safety
    /// The caller keeps the memory valid until the region is dropped: devices and peers access it
    /// as permitted by `access`.
    pub unsafe fn register(domain: &Arc<MrDomain>, config: &RegionConfig<'_>) -> Result<Arc<Self>> {
        // SAFETY: as this function: the caller keeps the memory valid.
        let this = unsafe { Self::prepare(domain, config)? };
        if !this.comes_disabled() {
            this.enable()?;
        }
        Ok(this)
    }

    /// As [`Self::register`], but always creates a disabled region and registers nothing. Never
    /// blocks.
    ///
    /// # Errors
    /// Those of [`Self::register`], except errors of the registration itself.
    ///
    /// # Safety
    /// As [`Self::register`].
    pub unsafe fn prepare(domain: &Arc<MrDomain>, config: &RegionConfig<'_>) -> Result<Arc<Self>> {
        let len = config.check()?;
        let mode = domain.config().form.mode;
        if config.counted && !domain.counts() {
            let reason = "FI_RMA_EVENT requires a domain that was opened with it";
            return Err(refused!(Mr, EBADFLAGS, "{reason}"));
        }
        if config.persistent && !domain.config().durable {
            let reason = "FI_RMA_PMEM requires a domain that was opened with it";
            return Err(refused!(Mr, EBADFLAGS, "{reason}"));
        }
        let follows = matches!(domain.paging(), Paging::Refreshed { .. });
        if config.once && (follows || domain.device().attr().atomic_cap == 0) {
            let reason = "FI_MR_SINGLE_USE requires a device with atomics, and pages that need no fi_mr_refresh";
            return Err(refused!(Mr, EBADFLAGS, "{reason}"));
        }
        if config.once && config.counted {
            let reason = "FI_MR_SINGLE_USE with FI_RMA_EVENT: a single-use region has no counters";
            return Err(refused!(Mr, EBADFLAGS, "{reason}"));
        }
        if config
            .base
            .is_some_and(|base| !Arc::ptr_eq(base.domain(), domain))
        {
            return Err(refused!(Mr, EINVAL, "base_mr belongs to another domain"));
        }
        let pd = domain.pd_of(config.auth)?;
        let dmabuf = match (config.dmabuf, config.base) {
            (Some(memory), _) => {
                let start = config.buffers.first().map_or(0, Buffer::start);
                let fd = Arc::new(duplicate(memory.fd)?);
                Some((fd, memory.offset.wrapping_sub(start)))
            }
            (None, Some(base)) => base.dmabuf.clone(),
            (None, None) => None,
        };
        let memory = config.memory.is_some() || config.base.is_some_and(|of| of.memory().is_some());
        let access = match domain.paging() {
            Paging::Unregistered if dmabuf.is_none() && !memory => config.access.local(),
            _ => config.access,
        };
        let in_use = if access.is_remote() && !mode.contains(Mode::PROV_KEY) {
            Some(KeyInUse::take(domain, config.requested_key)?)
        } else {
            None
        };
        Ok(Arc::new(Self {
            magic: AtomicU32::new(MAGIC),
            access,
            registration: OnceLock::new(),
            elsewhere: Arc::default(),
            buffers: joined(config.buffers),
            len,
            requested_key: config.requested_key,
            counted: config.counted,
            once: config.once && access.is_remote(),
            persistent: config.persistent && access.is_remote(),
            bindings: Mutex::default(),
            pending: Arc::default(),
            _key_in_use: in_use,
            dmabuf,
            auth: config.auth.cloned(),
            pd,
            exported: config.memory.map(ExportedMemory::new),
            base: config.base.map(Arc::clone),
            domain: Arc::clone(domain),
        }))
    }

    /// Whether the application must enable the region.
    pub fn comes_disabled(&self) -> bool {
        let waits = self.counted && self.mode().contains(Mode::RMA_EVENT);
        waits || self.mode().contains(Mode::ENDPOINT)
    }

    /// Binds a counter of peers' operations on the region (`fi_mr_bind(3)`): writes and atomics,
    /// reads, or both. In a form with [`Mode::RMA_EVENT`] only before the region is enabled;
    /// otherwise at any time. Operations that peers post after the return are counted. If the
    /// region is enabled, blocks until the peers that hold keys have acknowledged, at most 1 s.
    ///
    /// # Errors
    /// - `ENOSYS`: the domain has no events.
    /// - `ENOMEM`: all event cells are in use.
    /// - `EBADFLAGS`: `kinds` is empty, or contains other flags than `REMOTE_WRITE` and
    ///   `REMOTE_READ`.
    /// - `EDOMAIN`: the counter belongs to another domain.
    /// - `EOPBADSTATE`: the region is enabled, in a form with [`Mode::RMA_EVENT`]; or it is being
    ///   closed.
    /// - `EINVAL`: the form has [`Mode::RMA_EVENT`] and [`RegionConfig::counted`] was not set; the
    ///   region is single-use; or one of the kinds has a counter.
    pub fn bind_counter(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        if !self.domain.counts() {
            return Err(refused!(
                Mr,
                ENOSYS,
                "the domain was opened without FI_RMA_EVENT"
            ));
        }
        let known = Flags::REMOTE_WRITE | Flags::REMOTE_READ;
        if kinds.is_empty() || kinds.intersects(known.complement()) {
            return Err(refused!(
                Mr,
                EBADFLAGS,
                "the flags to bind a counter to a region are FI_REMOTE_READ, FI_REMOTE_WRITE or both"
            ));
        }
        if !Arc::ptr_eq(counter.domain().pd(), self.domain.pd()) {
            return Err(refused!(
                Mr,
                EDOMAIN,
                "the counter belongs to another domain"
            ));
        }
        let mut bindings = self.bindings.lock();
        let announced = self.mode().contains(Mode::RMA_EVENT);
        if bindings.closing || (announced && self.is_enabled()) {
            return Err(refused!(
                Mr,
                EOPBADSTATE,
                "the region is already enabled, or is being closed"
            ));
        }
        let events: Vec<_> = Event::of(kinds).collect();
        let taken = |event: &Event| bindings.counters.iter().any(|(other, _)| other == event);
        if (announced && !self.counted) || self.once || events.iter().any(taken) {
            return Err(refused!(
                Mr,
                EINVAL,
                "the region was registered without FI_RMA_EVENT, is single-use, or has such a counter"
            ));
        }
        if let Some(registration) = self.registration.get().filter(|_| self.access.is_remote()) {
            let cell = match &bindings.cell {
                Some(cell) => Arc::clone(cell),
                None => self.domain.directory(registration.pd())?.event_cell()?,
            };
            for event in &events {
                counter.follow(Watch::new(&cell, *event));
            }
            registration.publish_cell(&cell);
            for event in &events {
                let accessible = self.domain.accessible_regions();
                accessible.add_counter(registration.key(), *event, counter);
            }
            bindings.cell = Some(cell);
        }
        for event in events {
            bindings.counters.push((event, Arc::clone(counter)));
        }
        Ok(())
    }

    /// Binds the only endpoint through which peers can access the region (`fi_mr_bind(3)`).
    ///
    /// # Errors
    /// - `ENOSYS`: the form does not bind regions to endpoints.
    /// - `EDOMAIN`: the endpoint belongs to another domain.
    /// - `EOPBADSTATE`: the region is enabled, or is being closed.
    /// - `EINVAL`: an endpoint is bound, or the region's authorization key differs from the
    ///   endpoint's.
    pub fn bind_endpoint(&self, endpoint: Scope<'_>) -> Result<()> {
        if !self.mode().contains(Mode::ENDPOINT) {
            return Err(refused!(
                Mr,
                ENOSYS,
                "the domain was opened without mr_mode FI_MR_ENDPOINT"
            ));
        }
        if !Arc::ptr_eq(endpoint.domain, &self.domain) {
            return Err(refused!(
                Mr,
                EDOMAIN,
                "the endpoint belongs to another domain"
            ));
        }
        let mut bindings = self.bindings.lock();
        if bindings.closing || self.is_enabled() {
            return Err(refused!(
                Mr,
                EOPBADSTATE,
                "the region is already enabled, or is being closed"
            ));
        }
        let stranger = self.auth.is_some() && self.auth.as_ref() != endpoint.auth;
        if stranger || bindings.endpoint.is_some() {
            return Err(refused!(
                Mr,
                EINVAL,
                "the region has an endpoint already, or the endpoint has another authorization key"
            ));
        }
        bindings.endpoint = Some(Arc::clone(endpoint.pd));
        Ok(())
    }

    /// Enables the region (`fi_mr_enable(3)`): registers it and publishes its key. Blocks as
    /// [`Self::register`] does. Nothing can be bound afterwards.
    ///
    /// # Errors
    /// - `EOPBADSTATE`: the region is enabled or is being closed, or the form requires an endpoint
    ///   and none is bound.
    /// - Errors of the registration, as for [`Self::register`]; the region stays disabled.
    pub fn enable(&self) -> Result<()> {
        let mut bindings = self.bindings.lock();
        #[cfg(test)]
        self.pending.pause();
        if bindings.closing || self.is_enabled() {
            return Err(refused!(
                Mr,
                EOPBADSTATE,
                "the region is already enabled, or is being closed"
            ));
        }
        let endpoint = bindings.endpoint.clone();
        let pd = if self.mode().contains(Mode::ENDPOINT) {
            endpoint.as_ref().ok_or_else(|| {
                refused!(
                    Mr,
                    EOPBADSTATE,
                    "no endpoint is bound to the region, which FI_MR_ENDPOINT requires"
                )
            })?
        } else {
            &self.pd
        };
        let mut cell = None;
        if self.access.is_remote() && !bindings.counters.is_empty() {
            cell = Some(self.domain.directory(pd)?.event_cell()?);
        }
        if let Some(cell) = &cell {
            // before the key is published, so that every operation of a peer is counted
            for (event, counter) in &bindings.counters {
                counter.follow(Watch::new(cell, *event));
            }
            bindings.cell = Some(Arc::clone(cell));
        }
        match Registration::new(self, pd, cell) {
            Ok(registration) => {
                self.add_accessible(&registration, &bindings.counters);
                // cannot fail: the lock of the bindings has been held since the check
                let _ = self.registration.set(registration);
                Ok(())
            }
            Err(error) => {
                bindings.leave();
                Err(error)
            }
        }
    }

    /// Closes the region. The key is revoked first. After success no operation of a peer or of this
    /// side accesses the memory through the region. A pending registration by a worker is
    /// withdrawn; one that has begun is waited for. After the first call, successful or not, the
    /// only valid call on the region and its descriptor is `close`.
    ///
    /// Blocks while an access is in progress, at most for the time that the device waits: 5 s on
    /// softverbs if the accessing process is stopped (`SIGSTOP`, a debugger). A killed process does
    /// not delay it.
    ///
    /// # Errors
    /// `EBUSY`: the wait has timed out and the access may still be executed. No new access can
    /// start. The caller repeats the call. Also if a thread has posted an operation on the region,
    /// which had waited, for 5 s: then only the handles of shared memory have ended.
    ///
    /// In a forked child, for a region of its parent, it only makes the descriptor invalid, and
    /// acquires no lock: a thread of the parent may have held it at the fork. The child's copy of
    /// the region is not dropped any more.
    pub fn close(self: &Arc<Self>) -> Result<()> {
        if !self.is_of_this_process() {
            self.magic.store(DEAD, Ordering::Relaxed);
            std::mem::forget(Arc::clone(self));
            return Ok(());
        }
        if let Some(exported) = &self.exported {
            exported.end();
        }
        // with no lock held: no operation that waited uses a registration that ends
        refuse_descriptor(self)?;
        self.cancel_enable();
        let mut bindings = self.bindings.lock();
        bindings.closing = true;
        self.remove_accessible();
        let ended = self.registration.get().map_or(Ok(()), Registration::end);
        ended.and(self.elsewhere.end())?;
        keep_memory(self);
        Ok(())
    }

    /// Whether this process has opened the region's domain. A forked child has not.
    pub fn is_of_this_process(&self) -> bool {
        self.domain.is_of_this_process()
    }

    /// Whether the region is enabled.
    pub fn is_enabled(&self) -> bool {
        self.registration.get().is_some()
    }

    /// The raw key (`fi_mr_raw_attr(3)`), and the address of the first byte for peers. In forms
    /// without [`Mode::RAW`], whose keys have 8 bytes (`mr_key_size`), the raw key is the key
    /// itself.
    ///
    /// # Errors
    /// `EOPBADSTATE`: the region is not enabled. `ENOMEM` and others: the domain's directory could
    /// not be created.
    pub fn raw_key(&self) -> Result<(u64, Vec<u8>)> {
        let registration = self.registration.get().ok_or_else(not_enabled)?;
        let raw = if self.mode().contains(Mode::RAW) {
            registration.raw_key(self)?.encode()
        } else {
            encode_short(registration.key()).to_vec()
        };
        Ok((self.first_address(), raw))
    }

    /// The key for peers (`fi_mr_key(3)`); [`Self::NO_KEY`] before the region is enabled, and in
    /// forms with [`Mode::RAW`], whose keys [`Self::raw_key`] returns.
    pub fn key(&self) -> u64 {
        match self.registration.get() {
            Some(registration) if !self.mode().contains(Mode::RAW) => registration.key(),
            _ => Self::NO_KEY,
        }
    }

    /// The descriptor for local operations (`fi_mr_desc(3)`): valid as long as the region.
    pub fn desc(self: &Arc<Self>) -> *mut c_void {
        Arc::as_ptr(self).cast_mut().cast()
    }

    /// The permitted operations: those of the configuration, without those of peers if the mode
    /// needs on-demand paging that the device does not have.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The domain that the region belongs to.
    pub fn domain(&self) -> &Arc<MrDomain> {
        &self.domain
    }

    /// Whether this side can execute operations of peers on the region. Memory behind a descriptor
    /// need not be mapped; and a single use is claimed in the directory, which only peers do.
    fn is_accessible(&self) -> bool {
        self.access.is_remote() && self.dmabuf.is_none() && !self.once
    }

    fn add_accessible(&self, registration: &Registration, counters: &[(Event, Arc<Counter>)]) {
        if self.is_accessible() {
            let region = AccessibleRegion {
                pd: Arc::clone(registration.pd()),
                generation: registration.generation(),
                access: self.access,
                first: self.first_address(),
                buffers: self.buffers.clone(),
                counters: counters.to_vec(),
            };
            self.domain
                .accessible_regions()
                .insert(registration.key(), region);
        }
    }

    fn remove_accessible(&self) {
        if let Some(registration) = self.registration.get().filter(|_| self.is_accessible()) {
            let (key, generation) = (registration.key(), registration.generation());
            self.domain.accessible_regions().remove(key, generation);
        }
    }

    /// Whether one buffer of this region, or several with contiguous addresses, cover `range`.
    fn covers(&self, range: &Buffer) -> bool {
        let mut at = range.start();
        while at < range.end() {
            let Some(whole) = self.buffers.iter().find(|whole| whole.contains(at, 1)) else {
                return false;
            };
            at = whole.end();
        }
        true
    }

    /// Whether the region's pages are fetched on demand.
    pub(super) fn is_on_demand(&self) -> bool {
        let own = self.dmabuf.is_none() && self.memory().is_none();
        own && matches!(self.domain.paging(), Paging::OnDemand)
    }

    /// The memory of the region or of its base, if the engine owns it.
    pub(super) fn memory(&self) -> Option<&Arc<SharedMemory>> {
        match (&self.exported, &self.base) {
            (Some(exported), _) => Some(exported.memory()),
            (None, Some(base)) => base.memory(),
            (None, None) => None,
        }
    }

    pub(super) fn mode(&self) -> Mode {
        self.domain.config().form.mode
    }

    /// Whether the device has atomics.
    pub(super) fn atomics(&self) -> bool {
        self.domain.device().attr().atomic_cap != 0
    }

    /// Number of the device's registrations, of a region whose pages may change.
    #[cfg(test)]
    pub(crate) fn registrations(&self) -> usize {
        self.registration.get().map_or(0, Registration::alive)
    }

    /// The address of the first buffer.
    pub(super) fn start(&self) -> u64 {
        self.buffers.first().map_or(0, Buffer::start)
    }

    /// Bytes of all buffers.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The address of the first byte for peers.
    pub(super) fn first_address(&self) -> u64 {
        if self.mode().contains(Mode::VIRT_ADDR) {
            self.start()
        } else {
            0
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        *self.magic.get_mut() = DEAD;
        self.remove_accessible();
        // the key is revoked first, so that operations executed before are counted
        drop(self.registration.take());
        self.bindings.get_mut().leave();
    }
}
