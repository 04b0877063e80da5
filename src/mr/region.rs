//! A memory region: its registrations, its key, and the descriptor of local operations.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;
use std::sync::Arc;

use rdma_core_sys as sys;

use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::mr::keys::kind;
use crate::mr::{Access, Mode, Parked, Words};
use crate::verbs::{Mr, Pd};
use crate::wire::raw_key::RawKey;
use crate::wire::records::{Entry, MAX_SEGMENTS, Segment};

/// One buffer.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// First byte.
    pub addr: *const c_void,
    /// Bytes.
    pub len: usize,
}

/// What to register.
#[derive(Clone, Copy, Debug)]
pub struct RegionConfig<'a> {
    /// The memory: one buffer, or up to [`MAX_SEGMENTS`] that peers address as if one followed the other.
    pub buffers: &'a [Buffer],
    /// What it may be used for. None at all is allowed and gives a region of no use.
    pub access: Access,
    /// The key, where keys are the application's and peers reach the region.
    pub requested_key: u64,
}

/// Marks a live region: a descriptor that points elsewhere is refused in most cases.
const MAGIC: u32 = 0x7765_6672;
const DEAD: u32 = 0xdead_6672;

/// A registered memory region in the form of its domain.
///
/// Dropping it ends it: when that returns, no operation through its key reaches the memory. Thread safe.
#[derive(Debug)]
#[repr(C)]
pub struct Region {
    magic: u32,
    /// Of the only buffer.
    lkey: u32,
    pd: Arc<Pd>,
    mrs: Vec<Mr>,
    /// First address, length and lkey of each of several buffers.
    parts: Box<[(u64, u64, u32)]>,
    /// What peers are told of several buffers.
    list: Option<Words>,
    entry: Entry,
    key: Key,
    access: Access,
    /// Of a published application's key. Given back when it is revoked.
    _key_in_use: Option<KeyInUse>,
    domain: Arc<Domain>,
}

/// The key of a region.
#[derive(Debug)]
enum Key {
    /// The rkey, known to nobody but whom the application tells.
    Native(u32),
    /// In the directory.
    Published(u64),
    /// No peer reaches the region, and it has what was asked for.
    Unused(u64),
}

impl Key {
    fn number(&self) -> u64 {
        match *self {
            Self::Native(rkey) => rkey.into(),
            Self::Published(key) | Self::Unused(key) => key,
        }
    }
}

/// Addresses, lengths and lkeys of several buffers; nothing of a single one.
fn parts(buffers: &[Buffer], mrs: &[Mr]) -> Box<[(u64, u64, u32)]> {
    if mrs.len() < 2 {
        return Box::default();
    }
    let parts = buffers.iter().zip(mrs);
    parts
        .map(|(buffer, mr)| (buffer.addr as u64, buffer.len as u64, mr.lkey()))
        .collect()
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
            return Err(FiErrno::EKEYREJECTED);
        }
        if !domain.keys_in_use().lock().insert(key) {
            return Err(FiErrno::ENOKEY);
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
    /// The first address and all bytes, if the form can express them.
    fn check(&self) -> Result<(u64, u64)> {
        let [first, ..] = self.buffers else {
            return Err(FiErrno::EINVAL);
        };
        if self.buffers.len() > MAX_SEGMENTS {
            return Err(FiErrno::EINVAL);
        }
        let mut total = 0_u64;
        for buffer in self.buffers {
            let end = (buffer.addr as u64).checked_add(buffer.len as u64);
            total = total
                .checked_add(buffer.len as u64)
                .ok_or(FiErrno::EINVAL)?;
            if end.is_none() || buffer.len == 0 {
                return Err(FiErrno::EINVAL);
            }
        }
        let start = first.addr as u64;
        start.checked_add(total).ok_or(FiErrno::EINVAL)?;
        Ok((start, total))
    }
}

impl Region {
    /// Registers memory. Blocks for as long as pinning takes.
    ///
    /// # Errors
    /// - `EINVAL`: no buffer or more than [`MAX_SEGMENTS`], one of no bytes, addresses that overflow.
    /// - `ENOKEY`: the requested key is in use. `EKEYREJECTED`: it is none that can be chosen.
    /// - `ENOMEM`: the limit of locked memory or the device's own is reached; a log line says
    ///   which limit to raise.
    /// - `EFAULT`: the memory is not there, or may not be written while `access` needs that.
    ///
    /// # Safety
    /// The memory must stay the caller's until the region is dropped: devices and peers access
    /// it as `access` says.
    pub unsafe fn register(domain: &Arc<Domain>, config: &RegionConfig<'_>) -> Result<Arc<Self>> {
        let (start, len) = config.check()?;
        let mode = domain.config().form.mode;
        let in_use = if config.access.is_remote() && !mode.contains(Mode::PROV_KEY) {
            Some(KeyInUse::take(domain, config.requested_key)?)
        } else {
            None
        };
        let atomics = domain.device().attr().atomic_cap != 0;
        let mut rights = config.access.verbs_rights(atomics);
        if !mode.contains(Mode::ALLOCATED) {
            rights |= sys::IBV_ACCESS_ON_DEMAND;
        }
        let pd = domain.pd();
        let register = |buffer: &Buffer| {
            // SAFETY: as this function.
            unsafe { Mr::register(pd, buffer.addr, buffer.len, rights) }
                .inspect_err(|&error| explain(error, buffer.len))
        };
        let mrs = config.buffers.iter().map(register);
        let mrs = mrs.collect::<Result<Vec<_>>>()?;
        let first = mrs.first().ok_or(FiErrno::EINVAL)?;
        let (lkey, rkey) = (first.lkey(), first.rkey());
        let many = mrs.len() > 1;
        let generation = domain.next_generation();
        let key = match (&in_use, config.access.is_remote()) {
            (_, false) if !mode.contains(Mode::PROV_KEY) => Key::Unused(config.requested_key),
            (None, _) if mode.contains(Mode::VIRT_ADDR) && !many => Key::Native(rkey),
            (None, false) => Key::Unused(rkey.into()),
            (None, true) => {
                let number = generation & 0xffff_ffff_ffff;
                Key::Published(kind::HANDLE << 48 | number)
            }
            (Some(in_use), _) => Key::Published(in_use.key),
        };
        let mut this = Self {
            magic: MAGIC,
            lkey,
            pd: Arc::clone(pd),
            parts: parts(config.buffers, &mrs),
            mrs,
            list: None,
            entry: Entry {
                key: key.number(),
                addr: start,
                len,
                rkey,
                access: config.access.published(atomics),
                segments: 0,
                generation,
                start: if mode.contains(Mode::VIRT_ADDR) {
                    start
                } else {
                    0
                },
                cell: 0,
            },
            key: Key::Unused(0),
            access: config.access,
            _key_in_use: in_use,
            domain: Arc::clone(domain),
        };
        if many {
            // at most MAX_SEGMENTS
            this.entry.segments = this.mrs.len() as u16;
        }
        if let Key::Published(_) = key {
            this.publish()?;
        }
        this.key = key;
        Ok(Arc::new(this))
    }

    /// Lets peers find it.
    fn publish(&mut self) -> Result<()> {
        if self.entry.segments != 0 {
            let words = Segment::encode_list(self.entry.generation, &self.segments());
            let list = Words::new(&self.pd, words.len(), sys::IBV_ACCESS_REMOTE_READ)?;
            list.write(0, &words);
            (self.entry.addr, self.entry.rkey) = (list.addr(0), list.rkey());
            self.list = Some(list);
        }
        self.domain.directory(&self.pd)?.insert(&self.entry)
    }

    /// Its buffers, if there are several, as peers address them.
    fn segments(&self) -> Vec<Segment> {
        let parts = self.parts.iter().zip(&self.mrs);
        parts
            .map(|(&(addr, len, _), mr)| Segment {
                addr,
                len,
                rkey: mr.rkey(),
            })
            .collect()
    }

    /// The raw key (`fi_mr_raw_attr(3)`), and the address by which peers call the first byte.
    ///
    /// # Errors
    /// `ENOMEM` and others, where it is the domain's first.
    pub fn raw_key(&self) -> Result<(u64, Vec<u8>)> {
        let raw = RawKey {
            domain: self.domain.directory(&self.pd)?.number(),
            published: matches!(self.key, Key::Published(_)),
            entry: self.entry,
            segments: self.segments(),
        };
        Ok((self.entry.start, raw.encode()))
    }

    /// The key for peers (`fi_mr_key(3)`).
    pub fn key(&self) -> u64 {
        self.key.number()
    }

    /// The descriptor for local operations (`fi_mr_desc(3)`): valid as long as the region.
    pub fn desc(self: &Arc<Self>) -> *mut c_void {
        Arc::as_ptr(self).cast_mut().cast()
    }

    /// The lkey of the one of several buffers that a local one lies in.
    fn part(&self, iov: &libc::iovec) -> Result<u32> {
        let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
        let inside = |&&(start, whole, _): &&(u64, u64, u32)| {
            addr.checked_sub(start)
                .and_then(|offset| offset.checked_add(len))
                .is_some_and(|end| end <= whole)
        };
        let part = self.parts.iter().find(inside).ok_or(FiErrno::EINVAL)?;
        Ok(part.2)
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
        if let Key::Published(key) = self.key
            && let Ok(directory) = self.domain.directory(&self.pd)
        {
            let parked = Parked {
                mrs: std::mem::take(&mut self.mrs),
                list: self.list.take(),
            };
            directory.revoke(key, parked);
        }
    }
}

/// A descriptor as the application passes it: what [`Region::desc`] gave, or NULL.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Desc(pub *mut c_void);

// SAFETY: a number until it is followed, and a region may be used by any thread.
unsafe impl Send for Desc {}

impl Desc {
    /// No region: will do for inject, for what goes inline, and for length 0.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// The lkey with which `pd` reaches the region.
    ///
    /// # Errors
    /// `EINVAL`: NULL, not a region, or of another protection domain; of several buffers, none has it all.
    ///
    /// # Safety
    /// NULL, or a pointer that [`Region::desc`] of a live region gave.
    #[inline]
    pub(crate) unsafe fn lkey(self, pd: &Pd, iov: &libc::iovec) -> Result<u32> {
        if self.0.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: the caller promises a live region.
        let region = unsafe { &*self.0.cast::<Region>() };
        if region.magic != MAGIC || !std::ptr::eq(Arc::as_ptr(&region.pd), pd) {
            return Err(FiErrno::EINVAL);
        }
        if region.parts.is_empty() {
            return Ok(region.lkey);
        }
        region.part(iov)
    }
}

/// Says what to raise when memory can't be locked, since `ENOMEM` alone tells a user nothing.
fn explain(error: FiErrno, len: usize) {
    if error != FiErrno::ENOMEM && error != FiErrno::EPERM {
        return;
    }
    let limit = memlock_limit().map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    warn_log!(
        Mr,
        "registering {len} bytes failed: {error}. The limit of locked memory (RLIMIT_MEMLOCK) is {limit}: \
         raise it with 'ulimit -l', LimitMEMLOCK= of the service, or /etc/security/limits.conf"
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
