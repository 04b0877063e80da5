//! A region that is registered piece by piece: what of its memory is there is pinned, and `fi_mr_refresh(3)` says
//! where that has changed. For pinned forms with `FI_MR_MMU_NOTIFY`, and for memory that need not be there on
//! devices without on-demand paging.
//!
//! New pages get a registration of their own, and a part that keeps its pages keeps its registration. When there
//! would be too many parts, neighbours are merged under a new one; then the old ones stay registered until the
//! region ends, because an operation of this side that is under way may use them. One whose pages have all
//! changed goes as soon as no peer can use it.

#![allow(unsafe_code, reason = "registers the application's memory")]

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock};
use rdma_core_sys as sys;

use super::cover::Cover;
use super::region::Range;
use super::{backed, page};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::verbs::{Mr, Pd};
use crate::wire::records::{MAX_SEGMENTS, Segment};

/// A registration, the same one wherever it is held.
#[derive(Clone, Debug)]
struct Shared(Arc<Mr>);

impl PartialEq for Shared {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// See the module. Thread safe.
#[derive(Debug)]
pub(super) struct Pieces {
    pd: Arc<Pd>,
    /// `ibv_access_flags`
    rights: u32,
    buffers: Box<[Range]>,
    /// Held from finding out to having changed.
    changing: Mutex<()>,
    inner: RwLock<Inner>,
}

#[derive(Clone, Debug, Default)]
struct Inner {
    cover: Cover<Shared>,
    merged: Vec<Shared>,
}

/// What refreshing comes to; nothing has changed before it is [made](Pieces::make).
pub(super) struct Change<'a> {
    inner: Inner,
    _alone: MutexGuard<'a, ()>,
}

impl Pieces {
    /// Registers what of the buffers is there.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering, or more than [`MAX_SEGMENTS`] parts with gaps between them.
    pub(super) fn new(pd: &Arc<Pd>, buffers: &[Range], rights: u32) -> Result<Self> {
        let this = Self {
            pd: Arc::clone(pd),
            rights,
            buffers: buffers.into(),
            changing: Mutex::default(),
            inner: RwLock::default(),
        };
        let change = this.refresh(buffers)?;
        this.make(change);
        Ok(this)
    }

    fn register(&self, start: u64, end: u64) -> Result<Shared> {
        // SAFETY: who registered the region promised that its memory is the caller's (`Region::register`).
        let mr = unsafe {
            Mr::register(
                &self.pd,
                start as *const _,
                (end - start) as usize,
                self.rights,
            )
        };
        Ok(Shared(Arc::new(mr?)))
    }

    /// Finds out what of these ranges is there now, and registers it.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn refresh(&self, ranges: &[Range]) -> Result<Change<'_>> {
        let alone = self.changing.lock();
        let mut inner = self.inner.read().clone();
        for range in ranges {
            // larger pages begin and end at such places too
            let first = page::floor(range.addr);
            let last = page::ceil(range.addr.saturating_add(range.len)).unwrap_or(u64::MAX);
            for buffer in &self.buffers {
                // both were checked not to overflow
                let (start, end) = (first.max(buffer.addr), last.min(buffer.addr + buffer.len));
                if start < end {
                    self.renew(&mut inner.cover, start, end)?;
                }
            }
        }
        self.merge(&mut inner)?;
        Ok(Change {
            inner,
            _alone: alone,
        })
    }

    /// Registers what of a range is there, anew.
    fn renew(&self, cover: &mut Cover<Shared>, start: u64, end: u64) -> Result<()> {
        let write = self.rights & sys::IBV_ACCESS_LOCAL_WRITE != 0;
        // where nothing tells, the device does
        let runs = backed::runs(start, end, write).unwrap_or_else(|_| vec![(start, end)]);
        cover.cut(start, end);
        for (start, end) in runs {
            match self.register(start, end) {
                Ok(mr) => cover.put(start, end, &mr),
                // mapped, but without pages behind it: the end of a file
                Err(FiErrno::EFAULT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Merges neighbours until peers can be told of all parts.
    fn merge(&self, inner: &mut Inner) -> Result<()> {
        while self.segments_of(&inner.cover).len() > MAX_SEGMENTS {
            let Some((start, end)) = inner.cover.shortest_pair() else {
                warn_log!(
                    Mr,
                    "memory that is there in more than {MAX_SEGMENTS} parts can't be registered as one region"
                );
                return Err(FiErrno::ENOMEM);
            };
            self.join(inner, start, end)?;
        }
        Ok(())
    }

    /// Registers parts that touch each other as one.
    fn join(&self, inner: &mut Inner, start: u64, end: u64) -> Result<()> {
        let mr = self.register(start, end)?;
        let parts = inner.cover.parts().iter();
        let old = parts.filter(|part| part.start < end && start < part.end);
        let old: Vec<_> = old.map(|part| part.by.clone()).collect();
        inner.merged.extend(old);
        inner.cover.put(start, end, &mr);
        Ok(())
    }

    fn segments_of(&self, cover: &Cover<Shared>) -> Vec<Segment> {
        let buffers = self.buffers.iter();
        let walks = buffers.flat_map(|buffer| cover.walk(buffer.addr, buffer.len));
        walks
            .map(|(addr, len, by)| Segment {
                addr,
                len,
                rkey: by.map_or(0, |mr| mr.0.rkey()),
                absent: by.is_none(),
            })
            .collect()
    }

    /// The region as peers will address it after a change.
    pub(super) fn segments(&self, change: &Change<'_>) -> Vec<Segment> {
        self.segments_of(&change.inner.cover)
    }

    /// The region as peers address it now.
    pub(super) fn segments_now(&self) -> Vec<Segment> {
        self.segments_of(&self.inner.read().cover)
    }

    /// Makes a change; gives the registrations that are of no use any more.
    pub(super) fn make(&self, change: Change<'_>) -> Vec<Arc<Mr>> {
        let mut inner = self.inner.write();
        let old = std::mem::replace(&mut *inner, change.inner);
        let parts = old.cover.parts().iter().map(|part| part.by.clone());
        let still = |mr: &Shared| {
            inner.merged.contains(mr) || inner.cover.parts().iter().any(|part| part.by == *mr)
        };
        let mut gone: Vec<Arc<Mr>> = Vec::new();
        for mr in parts.filter(|mr| !still(mr)) {
            if !gone.iter().any(|known| Arc::ptr_eq(known, &mr.0)) {
                gone.push(mr.0);
            }
        }
        gone
    }

    /// The lkey of a local buffer. Finding it takes a lock that only changes of the region hold for long.
    ///
    /// # Errors
    /// `EINVAL`: some of it is not there. Those of registering, where it lies across several parts.
    pub(super) fn lkey(&self, iov: &libc::iovec) -> Result<u32> {
        let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
        if let Some(mr) = self.inner.read().cover.find(addr, len) {
            return Ok(mr.0.lkey());
        }
        let _alone = self.changing.lock();
        let mut inner = self.inner.read().clone();
        if let Some(mr) = inner.cover.find(addr, len) {
            return Ok(mr.0.lkey()); // somebody else was sooner
        }
        let (start, end) = inner.cover.around(addr, len).ok_or(FiErrno::EINVAL)?;
        self.join(&mut inner, start, end)?;
        let mr = inner.cover.find(addr, len).ok_or(FiErrno::EINVAL)?;
        let lkey = mr.0.lkey();
        *self.inner.write() = inner;
        Ok(lkey)
    }

    /// All registrations, which are nobody else's. Nothing is there any more behind it.
    pub(super) fn take(&self) -> Vec<Mr> {
        let _alone = self.changing.lock();
        let inner = std::mem::take(&mut *self.inner.write());
        let mut all: Vec<Arc<Mr>> = Vec::new();
        let parts = inner.cover.parts().iter().map(|part| &part.by);
        for mr in parts.chain(&inner.merged) {
            if !all.iter().any(|known| Arc::ptr_eq(known, &mr.0)) {
                all.push(Arc::clone(&mr.0));
            }
        }
        drop(inner);
        all.into_iter().filter_map(Arc::into_inner).collect()
    }
}
