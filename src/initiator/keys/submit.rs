//! Posts operations on resolved keys, together with the requests that count them.

#![allow(unsafe_code, reason = "posts buffers that the caller keeps valid")]

use super::Deferred;
use super::resolve::{Resolution, is_counted_by, leaves_unchanged, need};
use crate::errno::{FiErrno, Result};
use crate::initiator::local::LocalRange;
use crate::initiator::plan::Batch;
use crate::initiator::sq::Sq;
use crate::initiator::{ATOMIC_SIZE, Initiator, Transmit, refusal};
use crate::mr::key_cache::{Fragment, Need, kind};
use crate::mr::lookup::{READ_WORDS, Resolved};
use crate::mr::mapped_keys::Meaning;
use crate::queue::EngineLink;
use crate::queue::event_cell::Event;
use crate::verbs::{RemoteAddr, Rkey, Sge};
use crate::wire::records::MAX_SEGMENTS;

impl<Q: Sq> Initiator<Q> {
    /// Posts an operation whose key may need a look-up, or that follows deferred operations.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    #[inline(never)]
    pub(in crate::initiator) unsafe fn submit_unresolved(
        &mut self,
        op: &Transmit<'_>,
    ) -> Result<()> {
        let len = self.check(op)?;
        if self.deferred.is_empty()
            && let Some(target) = self.cached_target(op, len)
        {
            // SAFETY: as this function.
            return unsafe { self.post(op, len, target) };
        }
        self.resume();
        // SAFETY: as this function.
        if self.deferred.is_empty() && unsafe { self.resolve_and_post(op, len) }? {
            return Ok(());
        }
        if !self.sq.can_defer(self.deferred.len()) {
            if self.deferred.is_empty()
                && let Some(peer) = &mut self.peer
            {
                // the operation is not deferred: a repeated call starts with new counters
                peer.reset_counters();
            }
            return Err(FiErrno::EAGAIN);
        }
        // SAFETY: as this function.
        unsafe { self.defer(op) };
        Ok(())
    }

    /// The target of an operation that is one request, if its key is cached.
    #[inline]
    fn cached_target(&mut self, op: &Transmit<'_>, len: usize) -> Option<(RemoteAddr, Rkey)> {
        let peer = self.peer.as_mut();
        let mut found = peer.and_then(|peer| peer.find(op.key, op, len, 0));
        if !matches!(found, Some(Resolution::One(_))) && op.key >> 48 == kind::MAPPED {
            found = self.find_mapped(op, len, 0);
        }
        match found {
            Some(Resolution::One(fragment)) => Some((fragment.addr, fragment.rkey)),
            _ => None,
        }
    }

    /// Resolves and posts an operation that follows no deferred one; if only a batch can be posted,
    /// the rest is deferred. Returns false if the look-up of the key is in progress.
    ///
    /// # Errors
    /// As [`Initiator::submit`].
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    unsafe fn resolve_and_post(&mut self, op: &Transmit<'_>, len: usize) -> Result<bool> {
        if self.is_native(op) {
            // SAFETY: as this function.
            unsafe { self.post(op, len, op.native_target()) }?;
            return Ok(true);
        }
        let looked_up = !self.has_native_key(op) && op.key >> 48 != kind::MAPPED;
        if looked_up && (self.peer.is_none() || self.cannot_be_a_key(op.key)) {
            return Err(refusal::no_such_key(op.key, self.peer.is_some()));
        }
        self.sq.reserve()?;
        match self.resolve(op, len, 0) {
            Resolution::Pending => return Ok(false),
            Resolution::Compare(offset) => {
                // SAFETY: as this function.
                if !unsafe { self.compare(op, len, offset) }? {
                    // SAFETY: as this function.
                    unsafe { self.defer(op) };
                }
            }
            resolution => {
                // SAFETY: as this function.
                if let Some(done) = unsafe { self.post_resolved(op, len, 0, resolution) }? {
                    // SAFETY: as this function.
                    let rest = unsafe { Deferred::new(op, done) };
                    self.deferred.push_back(rest);
                    self.resume();
                    if !self.deferred.is_empty() {
                        self.sq.link().request_progress();
                    }
                }
            }
        }
        Ok(true)
    }

    /// Posts an operation, or its next batch. `Some(n)`: `n` bytes of the operation are posted and
    /// the rest remains.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    pub(super) unsafe fn post_resolved(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        done: u64,
        resolution: Resolution,
    ) -> Result<Option<u64>> {
        // SAFETY: as this function.
        unsafe {
            match resolution {
                Resolution::One(fragment) => self.post(op, len, (fragment.addr, fragment.rkey)),
                Resolution::Many(offset) => return self.post_many(op, len, offset, done),
                Resolution::Native(rkey) => {
                    let fragment = Fragment {
                        addr: RemoteAddr::new(op.remote_addr),
                        rkey,
                        len: len as u64,
                        last: true,
                        ..Fragment::default()
                    };
                    let whole = Batch::default();
                    self.post_fragments(op, len, &[fragment], &[], whole)
                        .map(|_| ())
                }
                Resolution::Refused(error) => self.post_failure(op, error),
                // the callers handle these results
                Resolution::Pending | Resolution::Unread(_) | Resolution::Compare(_) => {
                    Err(FiErrno::EAGAIN)
                }
            }
        }
        .map(|()| None)
    }

    /// Posts an operation on several fragments of a region, or one that is counted: at most
    /// [`MAX_SEGMENTS`] fragments, from `offset` in the region and byte `done` of the operation.
    /// Result as [`Self::post_resolved`].
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    unsafe fn post_many(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        offset: u64,
        done: u64,
    ) -> Result<Option<u64>> {
        let region = self.region(op).ok_or(FiErrno::EKEYREJECTED)?;
        let (need, len_there) = need(op, len);
        // all ranges of an operation in the region are one use
        let once = region.entry.once && op.counted.by_region;
        let mut events = [EventTarget::default(); MOST_EVENTS];
        let event = if leaves_unchanged(op) {
            Event::Read
        } else {
            need.event()
        };
        let event_count = self.events(op, region, event, &mut events);
        let mut fragments = [Fragment::default(); MAX_SEGMENTS];
        let (count, taken) = fragments_at(region, offset, len_there - done, &mut fragments);
        let fragments = &fragments[..count];
        let last = fragments.last().ok_or(FiErrno::EAGAIN)?.last;
        let mut more = None;
        if last && done == 0 {
            let events = &events[..event_count];
            // SAFETY: as this function.
            unsafe { self.post_fragments(op, len, fragments, events, Batch::default()) }?;
        } else {
            let batch = Batch {
                begun: done != 0,
                more: !last,
            };
            let events = if last { &events[..event_count] } else { &[] };
            let mut range = LocalRange::default();
            // fits `usize`: at most the length of the local buffers
            let local = range.of(&op.local, done as usize, taken as usize);
            let op = Transmit { local, ..*op };
            let whole =
                // SAFETY: as this function; `local` covers a subset of the operation's bytes.
                unsafe { self.post_fragments(&op, taken as usize, fragments, events, batch) }?;
            more = (whole && !last).then_some(done + taken);
        }
        let once = once.then(|| self.key_of(op));
        let last = self.last_number();
        if let Some(peer) = &mut self.peer {
            peer.last_used = last;
            if event_count != 0 || !matches!(need, Need::Write) {
                peer.last_read = last;
            }
            if let Some(key) = once
                && let Some(region) = peer.cache.get_mut(key)
            {
                region.used = true;
            }
        }
        Ok(more)
    }

    /// The cache key of the peer's region.
    fn key_of(&self, op: &Transmit<'_>) -> u64 {
        match self.mapped.get(op.key) {
            Some(mapped) if op.key >> 48 == kind::MAPPED => mapped.key,
            _ => op.key,
        }
    }

    /// The cached records of a resolved key's region.
    pub(super) fn region(&self, op: &Transmit<'_>) -> Option<&Resolved> {
        let cached = |key| self.peer.as_ref()?.cache.get(key);
        if op.key >> 48 != kind::MAPPED {
            return cached(op.key);
        }
        let mapped = self.mapped.get(op.key)?;
        match &mapped.meaning {
            Meaning::Native(region) => Some(region),
            Meaning::Key | Meaning::Published { .. } => cached(mapped.key),
        }
    }

    /// Fills `events` with the event cells that count an operation on a region: cell `event` of the
    /// region, and the endpoint's cell. Returns their number.
    pub(super) fn events(
        &self,
        op: &Transmit<'_>,
        region: &Resolved,
        event: Event,
        events: &mut [EventTarget; MOST_EVENTS],
    ) -> usize {
        let Some((peer, scratch)) = self
            .peer
            .as_ref()
            .and_then(|peer| Some((peer, peer.scratch.as_ref()?)))
        else {
            return 0;
        };
        // the claim word of a single-use region serves as its event cell: it is not used after the
        // claim
        let of_region = if region.entry.once {
            let claim = (region.entry.claim_addr(), region.entry.rkey);
            op.counted.by_region.then_some(claim)
        } else if is_counted_by(region, op) {
            let addr = region.entry.cell.wrapping_add(event.offset());
            Some((addr, region.cells_rkey))
        } else {
            None
        };
        // only for regions of a directory, not for those with native keys
        let has_cell = !peer.map.cell.is_null() && region.cells_rkey != Rkey::default();
        let of_endpoint = (op.counted.by_endpoint && has_cell).then(|| {
            let offset = need(op, 0).0.event_of_endpoint().offset();
            (peer.map.cell.wrapping_add(offset), region.cells_rkey)
        });
        let mut count = 0;
        let targets = of_region.into_iter().chain(of_endpoint);
        for (event, (addr, rkey)) in events.iter_mut().zip(targets) {
            *event = EventTarget {
                addr,
                rkey,
                sink: Sge {
                    addr: scratch.addr(READ_WORDS),
                    length: ATOMIC_SIZE as u32,
                    lkey: scratch.lkey(),
                },
            };
            count += 1;
        }
        count
    }
}

/// Fills `fragments` with those of `len` bytes from `offset` in a region, as far as they are read
/// and present. Returns the number of fragments, and of the bytes that they cover.
pub(super) fn fragments_at(
    region: &Resolved,
    offset: u64,
    len: u64,
    fragments: &mut [Fragment; MAX_SEGMENTS],
) -> (usize, u64) {
    let (mut count, mut taken) = (0, 0);
    for to in fragments {
        match region.fragment(offset + taken, len - taken) {
            Ok(fragment) if !fragment.absent => *to = fragment,
            // the segment must be read first, or is absent now; a later call handles this
            _ => break,
        }
        count += 1;
        taken += to.len;
        if to.last {
            break;
        }
    }
    (count, taken)
}

/// An event cell that counts an operation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventTarget {
    pub(in crate::initiator) addr: RemoteAddr,
    pub(in crate::initiator) rkey: Rkey,
    /// Local destination of the fetch-and-add's result, which is never read.
    pub(in crate::initiator) sink: Sge,
}

/// Number of requests that the send queue has room for besides those of the application and those
/// of [`crate::queue::slots::EngineRequest`]: the further requests of one operation, which are a
/// write to each segment, a flush of each segment, remote data, and events.
pub(crate) const FURTHER_REQUESTS: usize = 2 * MAX_SEGMENTS + MOST_EVENTS;

/// Maximum number of event cells per operation: the region's and the endpoint's.
pub(super) const MOST_EVENTS: usize = 2;
