//! A region that is registered in segments: its present pages are pinned, and `fi_mr_refresh(3)`
//! names the ranges that have changed. Used for pinned forms with `FI_MR_MMU_NOTIFY`, and, on
//! devices without on-demand paging, for memory that may be absent.
//!
//! New pages get a new registration; a segment whose pages are unchanged keeps its registration.
//! Only memory and the device limit the number of segments. A registration whose pages have all
//! been replaced ends as soon as no peer and no local operation can use it.
//!
//! A local operation that covers several adjacent segments registers the whole contiguous run of
//! segments as one. If peers can access the region, this registration is for local operations
//! alone, in addition to those of the segments. Refreshes replace it in the same way.
//!
//! A change of k of n segments takes O(k log n) steps.

#![allow(unsafe_code, reason = "registers the application's memory")]

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock};
use rdma_core_sys as sys;

use super::cover::Cover;
use super::replaceable_mr::{InUse, ReplaceableMr};
use crate::errno::{FiErrno, Result};
use crate::mr::{Buffer, backed, page};
use crate::verbs::{Lkey, Mr, Pd, RemoteAddr, Rkey};
use crate::wire::records::Segment;

/// A registration that several segments share.
#[derive(Clone, Debug)]
struct SegmentMr {
    /// Local operations have further references.
    mr: Arc<ReplaceableMr>,
    /// One reference for each segment.
    segments: Arc<()>,
}

impl SegmentMr {
    fn new(mr: Mr, len: u64) -> Self {
        Self {
            mr: Arc::new(ReplaceableMr::new(mr, len)),
            segments: Arc::default(),
        }
    }

    /// The lkey, and a use of the registration. The caller holds the lock of the segments, so that
    /// no thread replaces the registration before it is in use.
    fn hold(&self) -> (Lkey, InUse) {
        (self.mr.lkey(), self.mr.hold())
    }
}

impl PartialEq for SegmentMr {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mr, &other.mr)
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
    /// The segments.
    cover: Cover<SegmentMr>,
    /// Registrations of several adjacent segments, for local operations, of a region that peers can
    /// access.
    joined: Cover<SegmentMr>,
    /// Replaced registrations that local operations use.
    replaced: Vec<Arc<ReplaceableMr>>,
}

impl Inner {
    /// The sum of the lengths of the joined registrations, in bytes.
    fn joined_len(&self) -> u64 {
        let mut all: Vec<_> = self.joined.registrations().collect();
        all.sort_unstable_by_key(|of| Arc::as_ptr(&of.mr));
        all.dedup();
        all.iter().map(|of| of.mr.len()).sum()
    }

    /// A registration of all of these bytes, for a local operation.
    fn find(&self, addr: u64, len: u64) -> Option<&SegmentMr> {
        let joined = || self.joined.find(addr, len);
        self.cover.find(addr, len).or_else(joined)
    }

    /// Adds a replaced registration that has not ended. Amortized over the additions, this removes
    /// those that have ended meanwhile.
    fn add_replaced(&mut self, mr: Arc<ReplaceableMr>) {
        if self.replaced.len() == self.replaced.capacity() {
            self.tidy();
            self.replaced.reserve(self.replaced.len() + 1);
        }
        self.replaced.push(mr);
    }

    /// Removes the replaced registrations that have ended, and ends those that could not be ended
    /// with their last operation, because a request was being executed.
    fn tidy(&mut self) {
        self.replaced.retain(|mr| mr.is_used() || !mr.end());
    }
}

/// Registrations that no segment uses any more.
#[must_use]
pub(super) struct Unused {
    /// Those that peers may use until they have acknowledged the change.
    published: Vec<Arc<ReplaceableMr>>,
    /// Those for local operations alone.
    local: Vec<Arc<ReplaceableMr>>,
}

impl Unused {
    /// Whether a local operation uses a registration that peers have used.
    pub(super) fn is_published_used(&self) -> bool {
        self.published.iter().any(|mr| mr.is_used())
    }
}

/// A planned refresh; takes effect when it is [made](Segments::make).
pub(super) struct Change<'a> {
    /// Address ranges in the order of their changes, each with its new registration.
    steps: Vec<(u64, u64, Option<SegmentMr>)>,
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

/// The distinct registrations of a list that no segment outside it uses.
fn unused(mut all: Vec<SegmentMr>) -> Vec<Arc<ReplaceableMr>> {
    all.sort_unstable_by_key(|of| Arc::as_ptr(&of.mr));
    all.dedup();
    let all = all.into_iter();
    let alone = all.filter_map(|of| Arc::into_inner(of.segments).map(|()| of.mr));
    alone.collect()
}

/// Registers the longest first part of a mapping that can be registered. Returns the end of this
/// part and its registration. The part ends at the end of a page, or at `end`, which may be inside
/// a page. `register` is called with the end of a part.
///
/// # Errors
/// Those of `register`, except for `EFAULT`, after which a shorter part is tried.
fn longest_begin<T>(
    start: u64,
    end: u64,
    mut register: impl FnMut(u64) -> Result<T>,
) -> Result<Option<(u64, T)>> {
    // the pages up to `some` can be pinned, those up to `all` cannot
    let whole = page::ceil(end).unwrap_or(end);
    let (mut some, mut found, mut all) = (page::floor(start), None, whole);
    let mut next = whole;
    while some < next {
        let until = next.min(end);
        match register(until) {
            Ok(mr) => (some, found) = (next, Some((until, mr))),
            Err(FiErrno::EFAULT) => all = next,
            Err(error) => return Err(error),
        }
        next = page::floor(some + (all - some).div_ceil(2));
    }
    Ok(found)
}

impl Segments {
    /// Registers the present pages of the buffers.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering. If a page is absent: `EMFILE`, `ENFILE`, because no
    /// descriptor is free to read which pages are present; others of reading that.
    pub(super) fn new(pd: &Arc<Pd>, buffers: &[Buffer], rights: u32) -> Result<Self> {
        let this = Self {
            pd: Arc::clone(pd),
            rights,
            buffers: buffers.into(),
            changing: Mutex::default(),
            inner: RwLock::default(),
        };
        let change = this.refresh(buffers)?;
        let unused = this.make(change);
        // those of ranges that several buffers have
        this.end_local(unused);
        Ok(this)
    }

    fn register(&self, start: u64, end: u64) -> Result<SegmentMr> {
        self.register_with(start, end, self.rights)
    }

    fn register_with(&self, start: u64, end: u64, rights: u32) -> Result<SegmentMr> {
        let len = end - start;
        // SAFETY: the caller of `Region::register` promised that the memory stays valid.
        let mr = unsafe { Mr::register(&self.pd, start as *const _, len as usize, rights) };
        Ok(SegmentMr::new(mr?, len))
    }

    /// Registers the present pages of these ranges. The segments change when [`Self::make`] is
    /// called.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn refresh(&self, ranges: &[Buffer]) -> Result<Change<'_>> {
        let alone = self.changing.lock();
        if !self.inner.read().replaced.is_empty() {
            self.inner.write().tidy();
        }
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
        steps: &mut Vec<(u64, u64, Option<SegmentMr>)>,
        start: u64,
        end: u64,
    ) -> Result<()> {
        steps.push((start, end, None));
        let write = self.rights & sys::IBV_ACCESS_LOCAL_WRITE != 0;
        let parts = match backed::parts(start, end, write) {
            Ok(parts) => parts,
            // The kernel cannot report mappings, or no descriptor is free: registers the whole
            // range first, which needs no descriptor, and fails with EFAULT if a page is absent.
            Err(unknown) => match self.register(start, end) {
                Ok(mr) => {
                    steps.push((start, end, Some(mr)));
                    return Ok(());
                }
                // which pages are present is unknown only for now
                Err(FiErrno::EFAULT) if unknown.may_pass() => return Err(unknown),
                Err(FiErrno::EFAULT) => match backed::read_parts(start, end, write) {
                    Ok(parts) => parts,
                    // no present page if /proc is not accessible
                    Err(FiErrno::EACCES | FiErrno::EPERM | FiErrno::ENOENT) => Vec::new(),
                    Err(error) => return Err(error),
                },
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

    /// Registers as much of the begin of each mapping as can be pinned: a mapping can be longer
    /// than its file, or be of a device. A mapping of n pages takes at most 2 + log n
    /// registrations.
    #[cold]
    fn renew_begins(
        &self,
        steps: &mut Vec<(u64, u64, Option<SegmentMr>)>,
        mappings: &[(u64, u64)],
    ) -> Result<()> {
        for &(start, end) in mappings {
            let found = longest_begin(start, end, |end| self.register(start, end))?;
            steps.extend(found.map(|(end, mr)| (start, end, Some(mr))));
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
                rkey: by.map_or(Rkey::default(), |of| of.mr.rkey()),
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

    /// Applies a change. Returns the registrations that no segment uses any more: the caller ends
    /// them ([`Self::end_local`], [`Self::end_published`]).
    pub(super) fn make(&self, change: Change<'_>) -> Unused {
        let (mut published, mut local) = (Vec::new(), Vec::new());
        let mut inner = self.inner.write();
        for (start, end, by) in change.steps {
            match by {
                None => {
                    inner.cover.cut(start, end, &mut published);
                    inner.joined.cut(start, end, &mut local);
                }
                Some(mr) => inner.cover.put(start, end, &mr, &mut published),
            }
        }
        Unused {
            published: unused(published),
            local: unused(local),
        }
    }

    /// Ends the registrations that peers do not use; all of them, of a region that is not in a
    /// directory. Those that local operations use end with these operations.
    pub(super) fn end_local(&self, unused: Unused) {
        self.end_now(unused.published);
        self.end_now(unused.local);
    }

    /// As [`Self::end_local`], when the peers have acknowledged the change. Returns the
    /// registrations that peers have used and no local operation uses: the caller ends these.
    pub(super) fn end_published(&self, unused: Unused) -> Vec<Mr> {
        self.end_now(unused.local);
        let mut free = Vec::new();
        for mr in unused.published {
            match mr.replace() {
                Some(mr) => free.push(mr),
                None => self.inner.write().add_replaced(mr),
            }
        }
        free
    }

    /// Ends registrations that no peer uses.
    fn end_now(&self, unused: Vec<Arc<ReplaceableMr>>) {
        for mr in unused {
            if !mr.end_replaced() {
                self.inner.write().add_replaced(mr);
            }
        }
    }

    /// The lkey of a local buffer, and the use of its registration, which the caller keeps until
    /// the operation is complete. Acquires a read lock whose writers hold it only while the
    /// segments change. If the buffer covers several segments, registers them as one, which blocks
    /// and allocates.
    ///
    /// # Errors
    /// `EINVAL`: a page of the buffer is absent. Those of registering, if the buffer covers several
    /// segments.
    pub(super) fn lkey(&self, iov: &libc::iovec) -> Result<(Lkey, InUse)> {
        let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
        if let Some(mr) = self.inner.read().find(addr, len) {
            return Ok(mr.hold());
        }
        let _alone = self.changing.lock();
        let around = {
            let inner = self.inner.read();
            if let Some(mr) = inner.find(addr, len) {
                return Ok(mr.hold()); // another thread has registered it meanwhile
            }
            inner.cover.around(addr, len)
        };
        let (start, end) = around.ok_or(FiErrno::EINVAL)?;
        self.join(start, end)
    }

    /// Registers adjacent segments, which are contiguous memory, as one. The caller holds the lock
    /// of changes.
    #[cold]
    fn join(&self, start: u64, end: u64) -> Result<(Lkey, InUse)> {
        let local = self.rights & sys::IBV_ACCESS_LOCAL_WRITE;
        if self.rights == local {
            let new = self.register(start, end)?;
            let mut gone = Vec::new();
            let joined = {
                let mut inner = self.inner.write();
                inner.cover.put(start, end, &new, &mut gone);
                new.hold()
            };
            drop(new);
            self.end_now(unused(gone));
            return Ok(joined);
        }
        // The previous ones end first, because the limit of locked memory counts each.
        let mut gone = Vec::new();
        self.inner.write().joined.cut(start, end, &mut gone);
        self.end_now(unused(gone));
        let new = self.register_with(start, end, local)?;
        let mut gone = Vec::new();
        let joined = {
            let mut inner = self.inner.write();
            inner.joined.put(start, end, &new, &mut gone);
            if inner.joined_len() > 2 * self.len() {
                // A joined registration of which segments have a small part left pins all of it.
                inner.joined.cut(0, start, &mut gone);
                inner.joined.cut(end, u64::MAX, &mut gone);
            }
            new.hold()
        };
        self.end_now(unused(gone));
        Ok(joined)
    }

    /// Bytes of all buffers.
    fn len(&self) -> u64 {
        let lengths = self.buffers.iter().map(|buffer| buffer.len as u64);
        lengths.sum()
    }

    /// Number of registrations that have not ended.
    #[cfg(test)]
    pub(super) fn alive(&self) -> usize {
        let inner = self.inner.read();
        let segments = inner
            .cover
            .registrations()
            .chain(inner.joined.registrations());
        let all = segments.map(|of| &of.mr).chain(&inner.replaced);
        let alive = all.filter(|mr| !mr.is_over());
        alive
            .map(Arc::as_ptr)
            .collect::<std::collections::HashSet<_>>()
            .len()
    }

    /// Removes and returns all registrations. The region then has no segments.
    pub(super) fn take(&self) -> Vec<Mr> {
        let _alone = self.changing.lock();
        let inner = std::mem::take(&mut *self.inner.write());
        let mut all: Vec<_> = inner.cover.into_registrations().collect();
        all.extend(inner.joined.into_registrations());
        let mut all = unused(all);
        all.extend(inner.replaced);
        all.iter().filter_map(|mr| mr.take()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages up to a limit can be pinned, also the last one of a mapping of which the buffer has a
    /// part.
    #[test]
    fn every_page_that_can_be_pinned_is() {
        let page = page::ceil(1).unwrap();
        for limit in 0..8 {
            for start in [0, 100, page, page + 1] {
                for end in 2 * page..6 * page {
                    if !(end % page < 2 || end % page == page / 2 || end % page == page - 1) {
                        continue;
                    }
                    let mut calls = 0;
                    let found = longest_begin(start, end, |until| {
                        calls += 1;
                        assert!(until > start && until <= end);
                        match page::ceil(until) <= Some(limit * page) {
                            true => Ok(()),
                            false => Err(FiErrno::EFAULT),
                        }
                    });
                    let longest = end.min(limit * page);
                    let expected = (longest > start).then_some((longest, ()));
                    assert_eq!(found, Ok(expected), "{start}..{end}, {limit} pages");
                    assert!(calls <= 5, "{calls} for at most 6 pages");
                }
            }
        }
        let other = longest_begin(0, page, |_| Err::<(), _>(FiErrno::ENOMEM));
        assert_eq!(other, Err(FiErrno::ENOMEM));
    }
}
