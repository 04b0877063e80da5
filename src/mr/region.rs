//! A memory region: from registration through binding and enabling to its end.

#![allow(unsafe_code, reason = "takes buffers as C passes them")]

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::desc::{DEAD, MAGIC};
use super::event::{Cell, Event, Watch};
use super::exposed::Exposed;
use super::keys::kind;
use super::ops::{Shared, SharedMemory};
use super::pending::Pending;
use crate::auth::AuthKey;
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::log::refused;
use crate::mr::{Access, Mode, Paging};
use crate::msg::Endpoint;
use crate::queue::Counter;
use crate::verbs::Pd;
use crate::wire::raw_key::encode_short;
use crate::wire::records::MAX_SEGMENTS;

/// One buffer.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// First byte.
    pub addr: *const c_void,
    /// Bytes.
    pub len: usize,
}

/// What to register.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionConfig<'a> {
    /// The memory: one buffer, or up to [`MAX_SEGMENTS`] that peers address as if one followed the other.
    pub buffers: &'a [Buffer],
    /// What it may be used for. None at all is allowed and gives a region of no use.
    pub access: Access,
    /// The key, where keys are the application's and peers reach the region.
    pub requested_key: u64,
    /// Whether counters will be bound that count what peers do to it (`FI_RMA_EVENT`). It is made disabled.
    pub counted: bool,
    /// Whether it may be accessed once, by one peer (`FI_MR_SINGLE_USE`).
    pub once: bool,
    /// Whether peers may make what they write there outlive a loss of power (`FI_RMA_PMEM`).
    pub persistent: bool,
    /// The memory is the kernel's, behind this descriptor; the one buffer says by which addresses it is called.
    pub dmabuf: Option<Dmabuf>,
    /// Only endpoints with this authorization key give access, not those with the domain's.
    pub auth: Option<&'a AuthKey>,
    /// The one buffer is this memory, which the region keeps.
    pub memory: Option<&'a Arc<SharedMemory>>,
    /// It is a part of this region (`base_mr`), with a key and rights of its own.
    pub base: Option<&'a Arc<Region>>,
}

/// Memory that a descriptor of the kernel stands for.
#[derive(Clone, Copy, Debug)]
pub struct Dmabuf {
    /// The descriptor; it need not stay open.
    pub fd: RawFd,
    /// Where in it the memory begins, in bytes.
    pub offset: u64,
}

/// A buffer as numbers: what is there is reached by devices only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) addr: u64,
    pub(super) len: u64,
}

/// A registered memory region in the form of its domain.
///
/// [`Self::close`] ends it. Dropping one that was not closed does as much as one such call, and tells in the log if that
/// was not enough. Thread safe.
#[derive(Debug)]
#[repr(C)]
pub struct Region {
    pub(super) magic: u32,
    access: Access,
    /// Once it is enabled. Dropped before all else.
    pub(super) exposed: OnceLock<Exposed>,
    /// Registrations for local use in further protection domains, made when first needed.
    pub(super) elsewhere: Mutex<Vec<Exposed>>,
    pub(super) buffers: Box<[Range]>,
    pub(super) len: u64,
    pub(super) requested_key: u64,
    counted: bool,
    pub(super) once: bool,
    pub(super) persistent: bool,
    bindings: Mutex<Bindings>,
    /// Its registration by a worker.
    pub(super) pending: Arc<Pending>,
    /// Of an application's key of a region that peers reach.
    _key_in_use: Option<KeyInUse>,
    /// A descriptor of the kernel's memory, and where in it the region begins.
    pub(super) dmabuf: Option<(OwnedFd, u64)>,
    /// Its authorization key, if it is not the domain's, and the protection domain that it is in, unless that is an
    /// endpoint's.
    auth: Option<AuthKey>,
    pd: Arc<Pd>,
    /// Its memory, where that is the engine's, and who else may have it.
    pub(super) shared: Option<Shared>,
    /// What it is a part of.
    base: Option<Arc<Region>>,
    domain: Arc<Domain>,
}

/// What was bound to a region before it was enabled.
#[derive(Debug, Default)]
struct Bindings {
    /// By what they count.
    counters: Vec<(Event, Arc<Counter>)>,
    /// The protection domain of the endpoint.
    endpoint: Option<Arc<Pd>>,
    /// What the counters follow.
    cell: Option<Arc<Cell>>,
    /// Nothing can be bound or enabled any more.
    closing: bool,
}

impl Bindings {
    /// Its counters count nothing any more.
    fn leave(&mut self) {
        if let Some(cell) = self.cell.take() {
            for (_, counter) in &self.counters {
                counter.leave(&cell);
            }
        }
    }
}

/// An application's key, in use until this is dropped.
#[derive(Debug)]
struct KeyInUse {
    key: u64,
    domain: Arc<Domain>,
}

impl KeyInUse {
    /// # Errors
    /// `EKEYREJECTED`: out of range. `ENOKEY`: in use.
    fn take(domain: &Arc<Domain>, key: u64) -> Result<Self> {
        if key >> 48 >= kind::RESERVED {
            return Err(refused!(
                Mr,
                EKEYREJECTED,
                "keys from {:#x} on are the provider's, and {key:#x} is asked for",
                kind::RESERVED << 48
            ));
        }
        if !domain.keys_in_use().lock().insert(key) {
            return Err(refused!(Mr, ENOKEY, "an open region has the key {key:#x}"));
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
    /// The number of all bytes, if the form can express them.
    fn check(&self) -> Result<u64> {
        let [first, ..] = self.buffers else {
            return Err(refused!(Mr, EINVAL, "a region of no buffer"));
        };
        if self.buffers.len() > MAX_SEGMENTS {
            let count = self.buffers.len();
            let reason = format_args!("{count} buffers, and mr_iov_limit is {MAX_SEGMENTS}");
            return Err(refused!(Mr, EINVAL, "{reason}"));
        }
        let mut total = 0_u64;
        for buffer in self.buffers {
            let end = (buffer.addr as u64).checked_add(buffer.len as u64);
            total = total
                .checked_add(buffer.len as u64)
                .ok_or(FiErrno::EINVAL)?;
            if end.is_none() || buffer.len == 0 {
                return Err(refused!(
                    Mr,
                    EINVAL,
                    "the buffer of {} bytes at {:?} is empty, or goes past the last address",
                    buffer.len,
                    buffer.addr
                ));
            }
        }
        let start = first.addr as u64;
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
        let whole = |base: &Region| self.buffers.iter().all(|part| base.covers(part));
        if self.base.is_some_and(|base| !whole(base)) {
            let reason = "a buffer does not lie in the buffers of base_mr";
            return Err(refused!(Mr, EINVAL, "{reason}"));
        }
        Ok(total)
    }
}

/// A descriptor of one's own for the same file.
fn duplicate(fd: RawFd) -> Result<OwnedFd> {
    // SAFETY: a number; what is no descriptor is refused.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if new < 0 {
        return Err(FiErrno::last());
    }
    // SAFETY: just made, nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// The reason of a refusal, at `info`.
#[cold]
pub(super) fn not_enabled() -> FiErrno {
    refused!(
        Mr,
        EOPBADSTATE,
        "the region is not enabled, or not registered yet"
    )
}

impl Region {
    /// What no region's key is: `FI_KEY_NOTAVAIL`.
    pub const NO_KEY: u64 = u64::MAX;

    /// Registers memory. Blocks for as long as pinning takes. Where the form has endpoints' regions
    /// ([`Mode::ENDPOINT`]), and where events are counted, it comes disabled: nothing is registered before
    /// [`Self::enable`].
    ///
    /// # Errors
    /// - `EINVAL`: no buffer or more than [`MAX_SEGMENTS`], one of no bytes, addresses that overflow; a part that
    ///   does not lie in its base, or whose base is of another domain.
    /// - `ENOSYS`: the device can't register the kernel's memory; a log line says so.
    /// - `EBADFLAGS`: counted, and the domain has no events; persistent, and the domain has no such regions; to be accessed once, and the device has no atomics or the
    ///   form has [`Mode::MMU_NOTIFY`] and pins.
    /// - `ENOKEY`: the requested key is in use. `EKEYREJECTED`: it is none that can be chosen.
    /// - `ENOMEM`: the limit of locked memory or the device's own is reached; a log line says
    ///   which limit to raise.
    /// - `EINVAL` too: the device has no way to make what is written to this memory persistent.
    /// - `EFAULT`: the memory is not there, or may not be written while `access` needs that.
    ///
    /// # Safety
    /// The memory must stay the caller's until the region is dropped: devices and peers access
    /// it as `access` says.
    pub unsafe fn register(domain: &Arc<Domain>, config: &RegionConfig<'_>) -> Result<Arc<Self>> {
        // SAFETY: the caller's promise.
        let this = unsafe { Self::prepare(domain, config)? };
        if !this.comes_disabled() {
            this.enable()?;
        }
        Ok(this)
    }

    /// As [`Self::register`], but registers nothing yet in any form. Never blocks.
    ///
    /// # Errors
    /// Those of [`Self::register`] that registering has not.
    ///
    /// # Safety
    /// As [`Self::register`].
    pub unsafe fn prepare(domain: &Arc<Domain>, config: &RegionConfig<'_>) -> Result<Arc<Self>> {
        let len = config.check()?;
        let mode = domain.config().form.mode;
        if config.counted && !domain.counts() {
            let reason = "FI_RMA_EVENT, and the domain was opened without it";
            return Err(refused!(Mr, EBADFLAGS, "{reason}"));
        }
        if config.persistent && !domain.config().durable {
            let reason = "FI_RMA_PMEM, and the domain was opened without it";
            return Err(refused!(Mr, EBADFLAGS, "{reason}"));
        }
        let follows = matches!(domain.paging(), Paging::Refreshed { .. });
        if config.once && (follows || domain.device().attr().atomic_cap == 0) {
            let reason = "FI_MR_SINGLE_USE needs a device with atomics, and pages that stay";
            return Err(refused!(Mr, EBADFLAGS, "{reason}"));
        }
        if config
            .base
            .is_some_and(|base| !Arc::ptr_eq(base.domain(), domain))
        {
            return Err(refused!(Mr, EINVAL, "base_mr is of another domain"));
        }
        let pd = domain.pd_of(config.auth)?;
        let dmabuf = match config.dmabuf {
            Some(memory) => Some((duplicate(memory.fd)?, memory.offset)),
            None => None,
        };
        let in_use = if config.access.is_remote() && !mode.contains(Mode::PROV_KEY) {
            Some(KeyInUse::take(domain, config.requested_key)?)
        } else {
            None
        };
        let buffers = config.buffers.iter().map(|buffer| Range {
            addr: buffer.addr as u64,
            len: buffer.len as u64,
        });
        Ok(Arc::new(Self {
            magic: MAGIC,
            access: config.access,
            exposed: OnceLock::new(),
            elsewhere: Mutex::default(),
            buffers: buffers.collect(),
            len,
            requested_key: config.requested_key,
            counted: config.counted,
            once: config.once && config.access.is_remote(),
            persistent: config.persistent && config.access.is_remote(),
            bindings: Mutex::default(),
            pending: Arc::default(),
            _key_in_use: in_use,
            dmabuf,
            auth: config.auth.cloned(),
            pd,
            shared: config.memory.map(Shared::new),
            base: config.base.map(Arc::clone),
            domain: Arc::clone(domain),
        }))
    }

    /// Whether it is for the application to enable it.
    pub fn comes_disabled(&self) -> bool {
        let waits = self.counted && self.mode().contains(Mode::RMA_EVENT);
        waits || self.mode().contains(Mode::ENDPOINT)
    }

    /// Lets a counter count what peers do to the region (`fi_mr_bind(3)`): writes and atomics, reads, or both. In
    /// a form with [`Mode::RMA_EVENT`] before it is enabled; else at any time, and from then on.
    ///
    /// # Errors
    /// - `ENOSYS`: the domain has no events.
    /// - `ENOMEM`: all event cells are taken.
    /// - `EBADFLAGS`: `kinds` are others than `REMOTE_WRITE` and `REMOTE_READ`, or none.
    /// - `EDOMAIN`: a counter of another domain.
    /// - `EOPBADSTATE`: enabled already, in a form with that bit; or being closed.
    /// - `EINVAL`: registered without the intention, in such a form; to be accessed once; or one of the kinds has a
    ///   counter.
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
                "a counter of a region is bound for FI_REMOTE_READ, FI_REMOTE_WRITE or both"
            ));
        }
        if !Arc::ptr_eq(counter.domain(), &self.domain) {
            return Err(refused!(Mr, EDOMAIN, "the counter is of another domain"));
        }
        let mut bindings = self.bindings.lock();
        let announced = self.mode().contains(Mode::RMA_EVENT);
        if bindings.closing || (announced && self.is_enabled()) {
            return Err(refused!(
                Mr,
                EOPBADSTATE,
                "the region is enabled already, or being closed"
            ));
        }
        let events: Vec<_> = Event::of(kinds).collect();
        let taken = |event: &Event| bindings.counters.iter().any(|(other, _)| other == event);
        if (announced && !self.counted) || self.once || events.iter().any(taken) {
            return Err(refused!(
                Mr,
                EINVAL,
                "the region was registered without FI_RMA_EVENT, is single use, or counts this already"
            ));
        }
        if let Some(exposed) = self.exposed.get().filter(|_| self.access.is_remote()) {
            let cell = match &bindings.cell {
                Some(cell) => Arc::clone(cell),
                None => self.domain.directory(exposed.pd())?.event_cell()?,
            };
            for event in &events {
                counter.follow(Watch::new(&cell, *event));
            }
            exposed.count(&cell);
            bindings.cell = Some(cell);
        }
        for event in events {
            bindings.counters.push((event, Arc::clone(counter)));
        }
        Ok(())
    }

    /// Binds the endpoint through which peers will reach the region, and no other (`fi_mr_bind(3)`).
    ///
    /// # Errors
    /// - `ENOSYS`: regions of this form are not endpoints'.
    /// - `EDOMAIN`: an endpoint of another domain.
    /// - `EOPBADSTATE`: enabled already, or being closed.
    /// - `EINVAL`: one is bound, or the region has an authorization key and the endpoint another.
    pub fn bind_endpoint(&self, endpoint: &Endpoint) -> Result<()> {
        if !self.mode().contains(Mode::ENDPOINT) {
            return Err(refused!(
                Mr,
                ENOSYS,
                "the domain has no mr_mode FI_MR_ENDPOINT"
            ));
        }
        if !Arc::ptr_eq(endpoint.domain(), &self.domain) {
            return Err(refused!(Mr, EDOMAIN, "the endpoint is of another domain"));
        }
        let mut bindings = self.bindings.lock();
        if bindings.closing || self.is_enabled() {
            return Err(refused!(
                Mr,
                EOPBADSTATE,
                "the region is enabled already, or being closed"
            ));
        }
        let stranger = self.auth.is_some() && self.auth.as_ref() != endpoint.auth();
        if stranger || bindings.endpoint.is_some() {
            return Err(refused!(
                Mr,
                EINVAL,
                "an endpoint is bound already, or it has another authorization key"
            ));
        }
        bindings.endpoint = Some(Arc::clone(endpoint.pd()));
        Ok(())
    }

    /// Makes it reachable (`fi_mr_enable(3)`): registers it, and publishes its key. Blocks as
    /// [`Self::register`] does. Nothing can be bound any more.
    ///
    /// # Errors
    /// - `EOPBADSTATE`: enabled already or being closed, or its form needs an endpoint and none is bound.
    /// - those of [`Self::register`] that registering has; it stays disabled then.
    pub fn enable(&self) -> Result<()> {
        let mut bindings = self.bindings.lock();
        if bindings.closing || self.is_enabled() {
            return Err(refused!(
                Mr,
                EOPBADSTATE,
                "the region is enabled already, or being closed"
            ));
        }
        let endpoint = bindings.endpoint.clone();
        let pd = if self.mode().contains(Mode::ENDPOINT) {
            endpoint.as_ref().ok_or_else(|| {
                refused!(
                    Mr,
                    EOPBADSTATE,
                    "FI_MR_ENDPOINT, and no endpoint is bound to the region"
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
            // before peers find it, so that none of their operations is missed
            for (event, counter) in &bindings.counters {
                counter.follow(Watch::new(cell, *event));
            }
            bindings.cell = Some(Arc::clone(cell));
        }
        match Exposed::new(self, pd, cell) {
            Ok(exposed) => {
                // nobody else can have set it: the bindings are locked
                let _ = self.exposed.set(exposed);
                Ok(())
            }
            Err(error) => {
                bindings.leave();
                Err(error)
            }
        }
    }

    /// Ends it: its key is revoked first of all, and when this has succeeded no operation, a peer's or one of this
    /// side, reads or writes the memory through it. Withdraws a registration by a worker, or waits for it. After the
    /// first call, whatever it answers, the region and its descriptor are good for nothing but to be closed.
    ///
    /// Blocks while somebody is in the middle of an access, for as long as the device waits: 5 s on softverbs, for a
    /// process that was stopped (`SIGSTOP`, a debugger). One that was killed is not waited for.
    ///
    /// # Errors
    /// `EBUSY`: it was waited for in vain, and the access may still be made. No new one can begin. To be called again.
    pub fn close(&self) -> Result<()> {
        self.settle();
        if let Some(shared) = &self.shared {
            shared.end();
        }
        let mut bindings = self.bindings.lock();
        bindings.closing = true;
        let exposed = self.exposed.get().map_or(Ok(()), Exposed::end);
        let elsewhere = self.elsewhere.lock();
        let all = elsewhere.iter().map(Exposed::end);
        all.fold(exposed, |so_far, one| so_far.and(one))
    }

    /// Whether peers, if it is for them, reach it.
    pub fn is_enabled(&self) -> bool {
        self.exposed.get().is_some()
    }

    /// The raw key (`fi_mr_raw_attr(3)`), and the address by which peers call the first byte. In forms without
    /// [`Mode::RAW`], whose keys have 8 bytes (`mr_key_size`), it is the key itself.
    ///
    /// # Errors
    /// `EOPBADSTATE`: not enabled. `ENOMEM` and others, where it is the domain's first.
    pub fn raw_key(&self) -> Result<(u64, Vec<u8>)> {
        let exposed = self.exposed.get().ok_or_else(not_enabled)?;
        let raw = if self.mode().contains(Mode::RAW) {
            exposed.raw_key(self)?.encode()
        } else {
            encode_short(exposed.key()).to_vec()
        };
        Ok((self.first_address(), raw))
    }

    /// The key for peers (`fi_mr_key(3)`); [`Self::NO_KEY`] before it is enabled.
    pub fn key(&self) -> u64 {
        self.exposed.get().map_or(Self::NO_KEY, Exposed::key)
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

    /// Whether a buffer lies in this region: in one of its buffers, or in several whose addresses follow each other.
    fn covers(&self, part: &Buffer) -> bool {
        let mut at = part.addr as u64;
        // checked not to overflow
        let end = at + part.len as u64;
        while at < end {
            let behind = |whole: &Range| {
                at.checked_sub(whole.addr)
                    .is_some_and(|off| off < whole.len)
            };
            let Some(whole) = self.buffers.iter().find(|whole| behind(whole)) else {
                return false;
            };
            at = whole.addr + whole.len;
        }
        true
    }

    /// Whether the device takes its pages when they are used.
    pub(super) fn is_on_demand(&self) -> bool {
        let own = self.dmabuf.is_none() && self.memory().is_none();
        own && matches!(self.domain.paging(), Paging::OnDemand)
    }

    /// What it or its base has for memory, where that is the engine's.
    pub(super) fn memory(&self) -> Option<&Arc<SharedMemory>> {
        match (&self.shared, &self.base) {
            (Some(shared), _) => Some(shared.memory()),
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

    /// The address of the first buffer.
    pub(super) fn start(&self) -> u64 {
        self.buffers.first().map_or(0, |buffer| buffer.addr)
    }

    /// Bytes of all buffers.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// By which address peers call the first byte.
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
        self.magic = DEAD;
        // revoked first: what was executed before that is counted
        drop(self.exposed.take());
        self.bindings.get_mut().leave();
    }
}
