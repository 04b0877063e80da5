//! A region that is registered in segments: its present pages are pinned, and `fi_mr_refresh(3)`
//! names the ranges that have changed. Used for pinned forms with `FI_MR_MMU_NOTIFY`, and, on
//! devices without on-demand paging, for memory that may be absent.
//!
//! New pages get a new registration; a segment whose pages are unchanged keeps its registration.
//! Only memory and the device limit the number of segments. A local operation that covers several
//! adjacent segments registers the whole contiguous run of segments as one; the previous
//! registrations stay until the region is closed, because outstanding operations may use them. A
//! registration whose pages have all changed ends as soon as no peer can use it.
//!
//! A change of k of n segments takes O(k log n) steps.

#![allow(unsafe_code, reason = "registers the application's memory")]

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock};
use rdma_core_sys as sys;

use super::cover::Cover;
use crate::errno::{FiErrno, Result};
use crate::mr::{Buffer, backed, page};
use crate::verbs::{Lkey, Mr, Pd, RemoteAddr, Rkey};
use crate::wire::records::Segment;

/// A registration shared by several segments.
#[derive(Clone, Debug)]
struct Shared(Arc<Mr>);

impl PartialEq for Shared {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The segments of one region. Thread safe.
#[derive(Debug)]
pub(super) struct Segments {
    pd: Arc<Pd>,
    /// `ibv_access_flags`
    rights: u32,
    buffers: Box<[Buffer]>,
    /// Held from the examination of the memory until the change takes effect.
    changing: Mutex<()>,
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    cover: Cover<Shared>,
    merged: Vec<Shared>,
}

/// A planned refresh; takes effect when it is [made](Segments::make).
pub(super) struct Change<'a> {
    /// Address ranges in the order of their changes, each with its new registration.
    steps: Vec<(u64, u64, Option<Shared>)>,
    _alone: MutexGuard<'a, ()>,
}

impl Change<'_> {
    /// Maximum number of additional segments.
    pub(super) fn most_segments(&self) -> usize {
        2 * self.steps.len()
    }

    /// The address ranges of the change, in the order of the caller's ranges.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let cuts = self.steps.iter().filter(|(_, _, by)| by.is_none());
        cuts.map(|(start, end, _)| (*start, *end))
    }
}

/// The distinct registrations of a list.
fn distinct(mut all: Vec<Shared>) -> impl Iterator<Item = Arc<Mr>> {
    all.sort_unstable_by_key(|mr| Arc::as_ptr(&mr.0));
    all.dedup();
    all.into_iter().map(|mr| mr.0)
}

impl Segments {
    /// Registers the present pages of the buffers.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering.
    pub(super) fn new(pd: &Arc<Pd>, buffers: &[Buffer], rights: u32) -> Result<Self> {
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
        // SAFETY: the caller of `Region::register` promised that the memory stays valid.
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

    /// Registers the present pages of these ranges. The segments change when [`Self::make`] is
    /// called.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn refresh(&self, ranges: &[Buffer]) -> Result<Change<'_>> {
        let alone = self.changing.lock();
        let mut steps = Vec::new();
        for range in ranges {
            // page boundaries of larger pages are boundaries of these pages too
            let first = page::floor(range.start());
            let last =
                page::ceil(range.start().saturating_add(range.len as u64)).unwrap_or(u64::MAX);
            for buffer in &self.buffers {
                let (start, end) = (first.max(buffer.start()), last.min(buffer.end()));
                if start < end {
                    self.renew(&mut steps, start, end)?;
                }
            }
        }
        Ok(Change {
            steps,
            _alone: alone,
        })
    }

    /// Registers the present pages of a range again.
    fn renew(
        &self,
        steps: &mut Vec<(u64, u64, Option<Shared>)>,
        start: u64,
        end: u64,
    ) -> Result<()> {
        steps.push((start, end, None));
        let write = self.rights & sys::IBV_ACCESS_LOCAL_WRITE != 0;
        let parts = match backed::parts(start, end, write) {
            Ok(parts) => parts,
            // the kernel cannot report mappings: registers the whole range first, which fails with
            // EFAULT if a page is absent
            Err(_) => match self.register(start, end) {
                Ok(mr) => {
                    steps.push((start, end, Some(mr)));
                    return Ok(());
                }
                Err(FiErrno::EFAULT) => {
                    // no present page if /proc is not available
                    backed::read_parts(start, end, write).unwrap_or_default()
                }
                Err(error) => return Err(error),
            },
        };
        // adjacent mappings are registered as one
        for run in parts.chunk_by(|one, next| one.1 == next.0) {
            let (Some((start, _)), Some((_, end))) = (run.first(), run.last()) else {
                continue;
            };
            match self.register(*start, *end) {
                Ok(mr) => steps.push((*start, *end, Some(mr))),
                Err(FiErrno::EFAULT) => self.renew_begins(steps, run)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Registers as much of the begin of each mapping as can be pinned: a mapping can be longer than
    /// its file, or be of a device. A mapping of n pages takes at most 2 + log n registrations.
    #[cold]
    fn renew_begins(
        &self,
        steps: &mut Vec<(u64, u64, Option<Shared>)>,
        mappings: &[(u64, u64)],
    ) -> Result<()> {
        for &(start, end) in mappings {
            // the begin up to `some` can be pinned, the one up to `all` cannot
            let (mut some, mut found, mut all) = (page::floor(start), None, end);
            let mut next = end;
            while some < next {
                match self.register(start, next) {
                    Ok(mr) => (some, found) = (next, Some(mr)),
                    Err(FiErrno::EFAULT) => all = next,
                    Err(error) => return Err(error),
                }
                next = page::floor(some + (all - some).div_ceil(2));
            }
            steps.extend(found.map(|mr| (start, some, Some(mr))));
        }
        Ok(())
    }

    /// The current segments of `len` bytes from `offset` in the region, as peers address them.
    pub(super) fn range(&self, offset: u64, len: u64) -> Vec<Segment> {
        let inner = self.inner.read();
        let (mut skip, mut left) = (offset, len);
        let mut segments = Vec::new();
        for buffer in &self.buffers {
            let whole = buffer.len as u64;
            let skipped = skip.min(whole);
            skip -= skipped;
            let (start, len) = (buffer.start() + skipped, left.min(whole - skipped));
            left -= len;
            if len == 0 {
                continue;
            }
            let walk = inner.cover.walk(start, len).into_iter();
            segments.extend(walk.map(|(addr, len, by)| Segment {
                addr: RemoteAddr::new(addr),
                len,
                rkey: by.map_or(Rkey::default(), |mr| mr.0.rkey()),
                absent: by.is_none(),
            }));
        }
        segments
    }

    /// The current segments of the whole region.
    pub(super) fn all(&self) -> Vec<Segment> {
        self.range(0, u64::MAX)
    }

    /// The offsets in the region of a range of addresses, for each buffer that overlaps it.
    pub(super) fn offsets(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let mut before = 0;
        self.buffers.iter().filter_map(move |buffer| {
            let base = before;
            before += buffer.len as u64;
            let (from, to) = (start.max(buffer.start()), end.min(buffer.end()));
            (from < to).then(|| (base + from - buffer.start(), base + to - buffer.start()))
        })
    }

    /// Applies a change. Returns the registrations that no segment uses any more.
    pub(super) fn make(&self, change: Change<'_>) -> Vec<Arc<Mr>> {
        let mut gone = Vec::new();
        let mut inner = self.inner.write();
        for (start, end, by) in change.steps {
            match by {
                None => inner.cover.cut(start, end, &mut gone),
                Some(mr) => inner.cover.put(start, end, &mr, &mut gone),
            }
        }
        // other segments, or merged registrations, may still refer to the registration
        distinct(gone)
            .filter(|mr| Arc::strong_count(mr) == 1)
            .collect()
    }

    /// The lkey of a local buffer. Acquires a read lock whose writers hold it only while the
    /// segments change. If the buffer covers several segments, registers them as one, which blocks
    /// and allocates.
    ///
    /// # Errors
    /// `EINVAL`: a page of the buffer is absent. Those of registering, if the buffer covers several
    /// segments.
    pub(super) fn lkey(&self, iov: &libc::iovec) -> Result<Lkey> {
        let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
        if let Some(mr) = self.inner.read().cover.find(addr, len) {
            return Ok(mr.0.lkey());
        }
        let _alone = self.changing.lock();
        let around = {
            let inner = self.inner.read();
            if let Some(mr) = inner.cover.find(addr, len) {
                return Ok(mr.0.lkey()); // another thread has registered it meanwhile
            }
            inner.cover.around(addr, len)
        };
        let (start, end) = around.ok_or(FiErrno::EINVAL)?;
        let mr = self.register(start, end)?;
        let lkey = mr.0.lkey();
        let mut inner = self.inner.write();
        let Inner { cover, merged } = &mut *inner;
        cover.put(start, end, &mr, merged);
        Ok(lkey)
    }

    /// Removes and returns all registrations, of which the caller becomes the only owner. The
    /// region then has no segments.
    pub(super) fn take(&self) -> Vec<Mr> {
        let _alone = self.changing.lock();
        let inner = std::mem::take(&mut *self.inner.write());
        let mut all = inner.merged;
        all.extend(inner.cover.into_registrations());
        distinct(all).filter_map(Arc::into_inner).collect()
    }
}
