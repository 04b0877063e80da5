//! A region's registrations in one protection domain: what its operations are posted with, and what peers are
//! told of it.

#![allow(unsafe_code, reason = "registers the application's memory")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::event::Cell;
use super::keys::kind;
use super::region::Region;
use super::{Directory, Mode, Parked, Words};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::verbs::{Mr, Pd};
use crate::wire::raw_key::RawKey;
use crate::wire::records::{Entry, Segment};

/// See the module.
#[derive(Debug)]
pub(crate) struct Exposed {
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
    /// Where it is published.
    directory: Option<Arc<Directory>>,
    cell: Option<Arc<Cell>>,
}

/// The key of a region.
#[derive(Clone, Copy, Debug)]
enum Key {
    /// The rkey, known to nobody but whom the application tells.
    Native(u32),
    /// In the directory.
    Published(u64),
    /// No peer reaches the region, and it has what was asked for.
    Unused(u64),
}

impl Key {
    fn number(self) -> u64 {
        match self {
            Self::Native(rkey) => rkey.into(),
            Self::Published(key) | Self::Unused(key) => key,
        }
    }
}

/// Registers the buffers of a region with these `ibv_access_flags`.
fn register(region: &Region, pd: &Arc<Pd>, mut rights: u32) -> Result<Vec<Mr>> {
    if !region.mode().contains(Mode::ALLOCATED) {
        rights |= sys::IBV_ACCESS_ON_DEMAND;
    }
    let buffers = region.buffers.iter();
    buffers
        .map(|buffer| {
            // SAFETY: who registered the region promised that the memory stays (`Region::register`).
            unsafe { Mr::register(pd, buffer.addr as *const _, buffer.len as usize, rights) }
                .inspect_err(|&error| explain(error, buffer.len))
        })
        .collect()
}

impl Exposed {
    /// For local operations alone.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(super) fn local(region: &Region, pd: &Arc<Pd>) -> Result<Self> {
        let rights = region.access().verbs_rights(false) & sys::IBV_ACCESS_LOCAL_WRITE;
        let mrs = register(region, pd, rights)?;
        Ok(Self::of(region, pd, mrs, Key::Unused(0), 0))
    }

    /// For everything that the region is for; peers find it when this returns. `cell` is where they count.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(super) fn new(region: &Region, pd: &Arc<Pd>, cell: Option<Arc<Cell>>) -> Result<Self> {
        let mode = region.mode();
        let remote = region.access().is_remote();
        let rights = region.access().verbs_rights(region.atomics());
        let mrs = register(region, pd, rights)?;
        let rkey = mrs.first().ok_or(FiErrno::EINVAL)?.rkey();
        let generation = region.domain().next_generation();
        let key = if !mode.contains(Mode::PROV_KEY) {
            match remote {
                true => Key::Published(region.requested_key),
                false => Key::Unused(region.requested_key),
            }
        } else if mode.contains(Mode::VIRT_ADDR) && mrs.len() == 1 && cell.is_none() {
            Key::Native(rkey)
        } else if remote {
            Key::Published(kind::HANDLE << 48 | (generation & 0xffff_ffff_ffff))
        } else {
            Key::Unused(rkey.into())
        };
        let mut this = Self::of(region, pd, mrs, key, generation);
        this.entry.cell = cell.as_ref().map_or(0, |cell| cell.addr());
        this.cell = cell;
        if let Key::Published(_) = key {
            this.publish(region)?;
        }
        Ok(this)
    }

    fn of(region: &Region, pd: &Arc<Pd>, mrs: Vec<Mr>, key: Key, generation: u64) -> Self {
        let first = mrs.first();
        let several = mrs.len() > 1;
        let buffers = region.buffers.iter().zip(&mrs);
        let parts = buffers.filter(|_| several);
        Self {
            lkey: first.map_or(0, Mr::lkey),
            pd: Arc::clone(pd),
            parts: parts
                .map(|(buffer, mr)| (buffer.addr, buffer.len, mr.lkey()))
                .collect(),
            list: None,
            entry: Entry {
                key: key.number(),
                addr: region.start(),
                len: region.len(),
                rkey: first.map_or(0, Mr::rkey),
                access: region.access().published(region.atomics()),
                // at most MAX_SEGMENTS
                segments: if several { mrs.len() as u16 } else { 0 },
                generation,
                start: region.first_address(),
                cell: 0,
            },
            mrs,
            key,
            directory: None,
            cell: None,
        }
    }

    /// Lets peers find it.
    fn publish(&mut self, region: &Region) -> Result<()> {
        let directory = region.domain().directory(&self.pd)?;
        if self.entry.segments != 0 {
            let words = Segment::encode_list(self.entry.generation, &self.segments());
            let list = Words::new(&self.pd, words.len(), sys::IBV_ACCESS_REMOTE_READ)?;
            list.write(0, &words);
            (self.entry.addr, self.entry.rkey) = (list.addr(0), list.rkey());
            self.list = Some(list);
        }
        directory.insert(&self.entry)?;
        self.directory = Some(directory);
        Ok(())
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

    pub(super) fn raw_key(&self, region: &Region) -> Result<RawKey> {
        Ok(RawKey {
            domain: region.domain().directory(&self.pd)?.number(),
            published: self.directory.is_some(),
            entry: self.entry,
            segments: self.segments(),
        })
    }

    #[inline]
    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(super) fn key(&self) -> u64 {
        self.key.number()
    }

    /// The lkey of a local buffer.
    ///
    /// # Errors
    /// `EINVAL`: of several buffers, none has it all.
    #[inline]
    pub(super) fn lkey(&self, iov: &libc::iovec) -> Result<u32> {
        if self.parts.is_empty() {
            return Ok(self.lkey);
        }
        self.part(iov)
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
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if let Some(directory) = self.directory.take() {
            let parked = Parked {
                mrs: std::mem::take(&mut self.mrs),
                list: self.list.take(),
                cell: self.cell.take(),
            };
            directory.revoke(self.key.number(), parked);
        }
    }
}

/// Says what to raise when memory can't be locked, since `ENOMEM` alone tells a user nothing.
fn explain(error: FiErrno, len: u64) {
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
