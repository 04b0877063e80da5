//! Operations on keys that are not rkeys of the device: reads the key's records in the peer's
//! directory, checks the access, splits the operation, and preserves the order of operations posted
//! behind a look-up. `docs/protocol.md`, "The key directory".
//!
//! This module belongs to the transmit side and runs under the transmit lock. Completions of the
//! engine's own requests arrive through [`crate::queue::slots::Own`], whichever thread polls.
//! [`TxSide::resume`] retries the pending operations; its callers are the posting thread, the
//! thread that reads the completion queue, and, while an operation is pending, a thread of the
//! domain.

#![allow(unsafe_code, reason = "posts requests")]

mod compare;
mod lease;
mod lookup;
mod teller;
mod waiting;

use std::sync::Arc;
use std::time::Instant;

use super::atomic::ATOMIC_SIZE;
use super::local::LocalPart;
use super::pieces::Batch;
use super::refusal;
use super::transmit::{Target, Transmit};
use super::tx::TxSide;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;

use crate::mr::ConnectionBlock;
use crate::mr::keys::{KeyCache, Need, Piece, There, kind};
use crate::mr::lookup::{Lookup, Map, READ_WORDS, Resolved};
use crate::mr::mapped::{MappedKey, Meaning};
use crate::queue::event_cell::Event;
use crate::queue::slots::{Rings, SlotRing};
use crate::verbs::{SendOpcode, Sge, Words};
use crate::wire::introduction::Introduction;
use crate::wire::records::{MAX_SEGMENTS, access};

use self::compare::Comparing;
use self::teller::Poster;
pub(crate) use self::teller::Teller;
pub(crate) use self::waiting::Waiting;

/// Polls of the completion queue for the answer to a look-up, before the operation becomes pending.
#[cfg(not(test))]
fn polls() -> u32 {
    256
}

#[cfg(test)]
thread_local! {
    /// Lets a test make operations pending on a device that answers at once.
    pub(super) static POLLS: std::cell::Cell<u32> = const { std::cell::Cell::new(256) };
}

#[cfg(test)]
fn polls() -> u32 {
    POLLS.get()
}

/// The initiator's state for a peer that has sent its introduction.
#[derive(Debug)]
pub(crate) struct Remote {
    peer: Introduction,
    block: Arc<ConnectionBlock>,
    /// The peer's revocation count that this side has processed.
    revision: u64,
    /// The revocation count that the cached keys take into account: at least `revision`.
    acted: u64,
    /// Whether this side holds keys of the peer: the peer then announces revocations and waits
    /// until this side acknowledges them.
    holds: bool,
    /// The last value of the peer's *acknowledged* that was posted.
    posted: u64,
    /// `last_used`: the slot number of the last request that was posted with a key. `tended`: the
    /// value of `last_used` when the lease timer was started.
    last_used: u32,
    tended: u32,
    map: Map,
    kept: KeyCache,
    /// Cached keys that were returned to the peer; reused if no revocation has happened since.
    given_back: KeyCache,
    lookup: Option<Lookup>,
    /// Destination of directory reads; the word behind it receives the previous values of event
    /// cells. Allocated by the first look-up.
    scratch: Option<Words>,
    /// Whether the read under way belongs to an abandoned look-up.
    astray: bool,
    /// Directory reads for the operation at the head of the queue that found a record half written
    /// or changed.
    vain: u32,
    /// Time of the first such read.
    vain_since: Option<Instant>,
    /// Look-ups for that operation that were restarted because keys were revoked.
    disturbed: u32,
    /// The compare and swap at the head of the queue, if it is posted and its event is not.
    comparing: Option<Comparing>,
    poster: Poster,
    rings: Arc<Rings>,
}

/// Result of resolving an operation's key.
#[derive(Clone, Copy)]
enum Known {
    /// One request is enough.
    One(Piece),
    /// Several requests, from this offset in the region: the range covers more than one buffer, or
    /// events are counted, or the region permits only one access.
    Many(u64),
    /// A compare and swap at this offset in the region, counted only if it succeeds.
    Compare(u64),
    /// An rkey of the device; the write must be made durable.
    Native(u32),
    /// This block of the region's parts must be read first.
    Unread(usize),
    /// The operation is refused with this errno.
    Refused(FiErrno),
    /// The look-up has not ended.
    Pending,
}

/// The access to the peer's memory that an operation needs, and its length in bytes.
#[inline]
fn need(op: &Transmit<'_>, len: usize) -> (Need, u64) {
    if op.opcode == SendOpcode::Read {
        (Need::Read, len as u64)
    } else if !op.opcode.is_atomic() {
        (Need::Write, len as u64)
    } else if op.kind.contains(Flags::READ) {
        (Need::FetchAtomic, ATOMIC_SIZE as u64)
    } else {
        (Need::Atomic, ATOMIC_SIZE as u64)
    }
}

/// Whether an atomic leaves the peer's memory unchanged: `FI_ATOMIC_READ`, or a sum with 0.
/// `fi_mr_bind(3)` counts a write "whenever a remote RMA write or atomic operation modifies the
/// memory region".
fn leaves_as_it_is(op: &Transmit<'_>) -> bool {
    op.opcode == SendOpcode::FetchAdd && op.compare_add == 0
}

impl Remote {
    fn new(
        peer: Introduction,
        block: &Arc<ConnectionBlock>,
        poster: Poster,
        rings: &Arc<Rings>,
    ) -> Self {
        Self {
            peer,
            block: Arc::clone(block),
            revision: block.revision(),
            acted: block.revision(),
            holds: false,
            posted: 0,
            last_used: u32::MAX,
            tended: u32::MAX,
            map: Map::new(peer.block_addr, peer.block_rkey, block.token()),
            kept: KeyCache::default(),
            given_back: KeyCache::default(),
            lookup: None,
            scratch: None,
            astray: false,
            vain: 0,
            vain_since: None,
            disturbed: 0,
            comparing: None,
            poster,
            rings: Arc::clone(rings),
        }
    }

    pub(super) fn rings(&self) -> &Arc<Rings> {
        &self.rings
    }

    /// Resolves an operation from the cached keys. `done`: bytes of it that are posted already.
    /// `None`: the key is not cached, or there are unprocessed revocations.
    #[inline]
    fn find(&mut self, key: u64, op: &Transmit<'_>, len: usize, done: u64) -> Option<Known> {
        if self.block.revision() != self.revision && !self.is_patient() {
            return None;
        }
        let kept = self.kept.get(key)?;
        self.last_used = self.rings.tx.next_number();
        Some(known(kept, self.map.cell != 0, op, len, done))
    }

    /// As [`Self::find`], for a mapped key: refused if the cached record belongs to another
    /// registration than the one that the raw key describes.
    fn find_mapped(
        &mut self,
        mapped: &MappedKey,
        op: &Transmit<'_>,
        len: usize,
        done: u64,
    ) -> Option<Known> {
        let found = self.find(mapped.key, op, len, done)?;
        match mapped.meaning {
            Meaning::Published { domain, generation }
                if self.map.domain() != Some(domain)
                    || self.kept.get(mapped.key)?.entry.generation != generation =>
            {
                Some(Known::Refused(FiErrno::EKEYREJECTED))
            }
            _ => Some(found),
        }
    }
}

impl Remote {
    /// Whether the operation at the head of the queue uses the records that were read for it
    /// although keys were revoked meanwhile. This is safe: the operation was posted before the
    /// revocation, and the memory stays registered until this side has acknowledged.
    fn is_patient(&self) -> bool {
        self.disturbed >= DISTURBED
    }

    /// The operation at the head of the queue is resolved: resets its counters.
    fn is_settled(&mut self) {
        (self.vain, self.disturbed) = (0, 0);
        self.vain_since = None;
    }

    /// Reads the records that [`Self::find`] needs: those of the key, or a block of its parts.
    /// Result as [`Self::look_up`].
    fn read_for(&mut self, key: u64, known: Option<Known>) -> Option<Result<()>> {
        match known {
            Some(Known::Unread(block)) => self.read_parts(key, block),
            _ => self.look_up(key),
        }
    }
}

/// Reads of half-written or changed records in one call, before the operation becomes pending.
const MOST_IN_VAIN: u32 = 64;

/// Restarts of one operation's look-ups caused by revocations. A peer that changes its regions
/// continuously cannot delay the operation longer.
const DISTURBED: u32 = 8;

/// Resolves an operation whose key is an rkey of the device.
fn native(rkey: u32, op: &Transmit<'_>, len: usize) -> Known {
    if op.is_durable() {
        return Known::Native(rkey);
    }
    Known::One(Piece {
        addr: op.remote_addr,
        rkey,
        len: len as u64,
        last: true,
        ..Piece::default()
    })
}

/// Resolves an operation from the records of its key. `counted`: the peer's endpoint counts the
/// operation. `done`: bytes of it that are posted already.
#[inline]
fn known(resolved: &Resolved, counted: bool, op: &Transmit<'_>, len: usize, done: u64) -> Known {
    let (need, len) = need(op, len);
    let offset = match resolved.offset(op.remote_addr, len, need) {
        Ok(offset) => offset,
        Err(error) => return Known::Refused(error),
    };
    if resolved.used {
        return Known::Refused(FiErrno::EKEYREJECTED);
    }
    if done != 0 {
        return rest(resolved, op, offset + done, len - done);
    }
    let durable = op.is_durable();
    if durable && resolved.entry.access & access::FLUSH == 0 {
        return Known::Refused(FiErrno::EACCES);
    }
    match resolved.there(offset, len) {
        There::All => {}
        There::Absent => return Known::Refused(FiErrno::EACCES),
        There::Unread(block) => return Known::Unread(block),
    }
    match resolved.piece(offset, len) {
        // with offset addressing, alignment is checked on base plus offset
        Ok(piece) if op.opcode.is_atomic() && !(piece.last && piece.addr.is_multiple_of(len)) => {
            Known::Refused(FiErrno::EINVAL)
        }
        Ok(piece)
            if piece.last
                && resolved.entry.cell == 0
                && !(counted || durable || resolved.entry.once) =>
        {
            Known::One(piece)
        }
        // without a result buffer the initiator cannot detect success
        _ if op.opcode == SendOpcode::CompareSwap
            && resolved.entry.cell != 0
            && !resolved.entry.once
            && op.local.count() != 0 =>
        {
            Known::Compare(offset)
        }
        _ => Known::Many(offset),
    }
}

/// As [`known`], for an operation that is partly posted and whose remaining bytes are this range of
/// the region. The range was checked at the start and may have changed since: only the next piece
/// is checked here, each later one when it is posted.
fn rest(resolved: &Resolved, op: &Transmit<'_>, offset: u64, len: u64) -> Known {
    if op.is_durable() && resolved.entry.access & access::FLUSH == 0 {
        return Known::Refused(FiErrno::EACCES);
    }
    match resolved.piece(offset, len) {
        Ok(piece) if piece.absent => Known::Refused(FiErrno::EACCES),
        Ok(_) => Known::Many(offset),
        Err(block) => Known::Unread(block),
    }
}

impl TxSide {
    /// Posts an operation whose key may need a look-up, or that is behind such an operation.
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    #[inline(never)]
    pub(super) unsafe fn submit_resolved(
        &mut self,
        rings: &Rings,
        op: &Transmit<'_>,
    ) -> Result<()> {
        let len = self.check(op)?;
        if self.waiting.is_empty()
            && let Some(remote) = &mut self.remote
            && let Some(Known::One(piece)) = remote.find(op.key, op, len, 0)
        {
            // SAFETY: as this function.
            return unsafe { self.post(&rings.tx, op, len, Target::of(&piece)) };
        }
        if op.key >> 48 == kind::MAPPED
            && self.waiting.is_empty()
            && let Some(Known::One(piece)) = self.find_mapped(op, len, 0)
        {
            // SAFETY: as this function.
            return unsafe { self.post(&rings.tx, op, len, Target::of(&piece)) };
        }
        self.resume(rings);
        if self.waiting.is_empty() {
            if self.is_native(op) {
                // SAFETY: as this function.
                return unsafe { self.post(&rings.tx, op, len, Target::native(op)) };
            }
            let looked_up = !self.has_native_key(op) && op.key >> 48 != kind::MAPPED;
            if looked_up && (self.remote.is_none() || self.is_senseless(op.key)) {
                return Err(refusal::no_such_key(op.key, self.remote.is_some()));
            }
            if rings.tx.is_full() && !self.make_room(&rings.tx)? {
                return Err(FiErrno::EAGAIN);
            }
            match self.resolve(op, len, 0) {
                Known::Pending => {}
                Known::Compare(offset) => {
                    // SAFETY: as this function.
                    if unsafe { self.compare(&rings.tx, op, len, offset) }? {
                        return Ok(());
                    }
                    // SAFETY: as this function.
                    unsafe { self.wait(rings, op) };
                    return Ok(());
                }
                known => {
                    // SAFETY: as this function.
                    if let Some(done) = unsafe { self.post_known(&rings.tx, op, len, 0, known) }? {
                        // SAFETY: as this function.
                        let waiting = unsafe { Waiting::new(op) }.begun(done);
                        self.waiting.push_back(waiting);
                        self.resume(rings);
                        if !self.waiting.is_empty() {
                            rings.set_waiting(true);
                            self.wake_helper();
                        }
                    }
                    return Ok(());
                }
            }
        }
        if rings.tx.outstanding() as usize + self.waiting.len() >= rings.tx.depth() as usize {
            if self.waiting.is_empty()
                && let Some(remote) = &mut self.remote
            {
                // the caller may repost the operation after a revocation: it starts with new
                // counters
                remote.is_settled();
            }
            return Err(FiErrno::EAGAIN);
        }
        // SAFETY: as this function.
        unsafe { self.wait(rings, op) };
        Ok(())
    }

    /// Appends an operation to the pending operations.
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn wait(&mut self, rings: &Rings, op: &Transmit<'_>) {
        // SAFETY: as this function.
        self.waiting.push_back(unsafe { Waiting::new(op) });
        rings.set_waiting(true);
        self.wake_helper();
    }

    /// Whether the value cannot be a key of the peer.
    fn is_senseless(&self, key: u64) -> bool {
        !self.application_keys && key >> 48 != kind::HANDLE
    }

    /// As [`Remote::find`], for a mapped key in the cache of mapped keys.
    fn find_mapped(&mut self, op: &Transmit<'_>, len: usize, done: u64) -> Option<Known> {
        let mapped = self.mapped.get(op.key)?;
        if !mapped.is_mapped() {
            return Some(Known::Refused(FiErrno::EKEYREJECTED));
        }
        match &mapped.meaning {
            // neither these regions nor these endpoints count events
            Meaning::Native(region) => Some(known(region, false, op, len, done)),
            Meaning::Key if mapped.key >> 32 == 0 && !self.application_keys => {
                Some(native(mapped.key as u32, op, len))
            }
            Meaning::Key | Meaning::Published { .. } => {
                self.remote.as_mut()?.find_mapped(mapped, op, len, done)
            }
        }
    }

    fn resolve(&mut self, op: &Transmit<'_>, len: usize, done: u64) -> Known {
        let known = if self.has_native_key(op) {
            native(Target::native(op).rkey, op, len)
        } else if op.key >> 48 == kind::MAPPED {
            self.resolve_mapped(op, len, done)
        } else {
            self.look_up(op, len, done)
        };
        if let Some(remote) = &mut self.remote
            && !matches!(known, Known::Pending)
        {
            remote.is_settled();
        }
        known
    }

    /// As [`Self::resolve`], for a key in the peer's directory.
    fn look_up(&mut self, op: &Transmit<'_>, len: usize, done: u64) -> Known {
        let Some(remote) = &mut self.remote else {
            return Known::Refused(FiErrno::EKEYREJECTED);
        };
        let before = remote.vain;
        loop {
            if remote.vain.wrapping_sub(before) > MOST_IN_VAIN {
                return Known::Pending;
            }
            let known = match remote.find(op.key, op, len, done) {
                known @ (None | Some(Known::Unread(_))) => known,
                Some(known) => return known,
            };
            match remote.read_for(op.key, known) {
                None => return Known::Pending,
                Some(Ok(())) => {}
                Some(Err(error)) => return Known::Refused(error),
            }
        }
    }

    /// As [`Self::resolve`], for a mapped key.
    fn resolve_mapped(&mut self, op: &Transmit<'_>, len: usize, done: u64) -> Known {
        if self.mapped.get(op.key).is_none() {
            let Some(mapped) = self.domain.mapped().get(op.key) else {
                return Known::Refused(FiErrno::EKEYREJECTED);
            };
            self.mapped.keep(mapped);
        }
        let before = self.remote.as_ref().map_or(0, |remote| remote.vain);
        loop {
            let known = match self.find_mapped(op, len, done) {
                known @ (None | Some(Known::Unread(_))) => known,
                Some(known) => return known,
            };
            let (Some(mapped), Some(remote)) = (self.mapped.get(op.key), &mut self.remote) else {
                return Known::Refused(FiErrno::EKEYREJECTED);
            };
            if remote.vain.wrapping_sub(before) > MOST_IN_VAIN {
                return Known::Pending;
            }
            match remote.read_for(mapped.key, known) {
                None => return Known::Pending,
                Some(Ok(())) => {}
                Some(Err(error)) => return Known::Refused(error),
            }
        }
    }

    /// Posts an operation, or its next part. `Some(n)`: `n` bytes of the operation are posted and
    /// the rest remains.
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn post_known(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        done: u64,
        known: Known,
    ) -> Result<Option<u64>> {
        // SAFETY: as this function.
        unsafe {
            match known {
                Known::One(piece) => self.post(ring, op, len, Target::of(&piece)),
                Known::Many(offset) => return self.post_many(ring, op, len, offset, done),
                Known::Native(rkey) => {
                    let piece = Piece {
                        addr: op.remote_addr,
                        rkey,
                        len: len as u64,
                        last: true,
                        ..Piece::default()
                    };
                    let whole = Batch::default();
                    self.post_pieces(ring, op, len, &[piece], &[], whole)
                        .map(|_| ())
                }
                Known::Refused(error) => self.post_failure(ring, op, error),
                // resolved by the callers
                Known::Pending | Known::Unread(_) | Known::Compare(_) => Err(FiErrno::EAGAIN),
            }
        }
        .map(|()| None)
    }

    /// Posts an operation that covers several buffers of a cached key, or is counted: at most
    /// [`MAX_SEGMENTS`] pieces, from `offset` in the region and byte `done` of the operation.
    /// Result as [`Self::post_known`].
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn post_many(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        offset: u64,
        done: u64,
    ) -> Result<Option<u64>> {
        let mut pieces = [Piece::default(); MAX_SEGMENTS];
        let region = self.region(op).ok_or(FiErrno::EKEYREJECTED)?;
        let (need, len_there) = need(op, len);
        let once = region.entry.once;
        let mut events = [EventTarget::default(); MOST_EVENTS];
        let event = if leaves_as_it_is(op) {
            Event::Read
        } else {
            need.event()
        };
        let event_count = self.events(op, region, event, &mut events);
        let (mut count, mut taken) = (0, 0);
        for to in &mut pieces {
            let left = len_there - done - taken;
            match region.piece(offset + taken, left) {
                Ok(piece) if !piece.absent => *to = piece,
                // the part must be read first, or is absent by now: a later call handles it
                _ => break,
            }
            count += 1;
            taken += to.len;
            if to.last {
                break;
            }
        }
        let pieces = &pieces[..count];
        let last = pieces.last().ok_or(FiErrno::EAGAIN)?.last;
        let mut more = None;
        if last && done == 0 {
            let events = &events[..event_count];
            // SAFETY: as this function.
            unsafe { self.post_pieces(ring, op, len, pieces, events, Batch::default()) }?;
        } else {
            let batch = Batch {
                begun: done != 0,
                more: !last,
            };
            let events = if last { &events[..event_count] } else { &[] };
            let mut part = LocalPart::default();
            // limited to the length of the local buffers
            let local = part.of(&op.local, done as usize, taken as usize);
            let op = Transmit { local, ..*op };
            // SAFETY: as this function; `local` covers a subset of the operation's bytes.
            let whole =
                unsafe { self.post_pieces(ring, &op, taken as usize, pieces, events, batch) }?;
            more = (whole && !last).then_some(done + taken);
        }
        let once = once.then(|| self.key_of(op));
        if let Some(remote) = &mut self.remote {
            remote.last_used = ring.next_number().wrapping_sub(1);
            if let Some(key) = once
                && let Some(kept) = remote.kept.get_mut(key)
            {
                kept.used = true;
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
    fn region(&self, op: &Transmit<'_>) -> Option<&Resolved> {
        let kept = |key| self.remote.as_ref()?.kept.get(key);
        if op.key >> 48 != kind::MAPPED {
            return kept(op.key);
        }
        let mapped = self.mapped.get(op.key)?;
        match &mapped.meaning {
            Meaning::Native(region) => Some(region),
            Meaning::Key | Meaning::Published { .. } => kept(mapped.key),
        }
    }

    /// Fills `events` with the event cells that count an operation on a region: cell `event` of the
    /// region, and the endpoint's cell. Returns their number.
    fn events(
        &self,
        op: &Transmit<'_>,
        region: &Resolved,
        event: Event,
        events: &mut [EventTarget; MOST_EVENTS],
    ) -> usize {
        let Some((remote, scratch)) = self
            .remote
            .as_ref()
            .and_then(|remote| Some((remote, remote.scratch.as_ref()?)))
        else {
            return 0;
        };
        // the claim word of an access-once region is free for this use once the region was accessed
        let of_region = if region.entry.once {
            Some((region.entry.claim_addr(), region.entry.rkey))
        } else if region.entry.cell != 0 {
            let addr = region.entry.cell.wrapping_add(event.offset());
            Some((addr, region.cells_rkey))
        } else {
            None
        };
        // only for regions found in a directory; a region with a native key is in none
        let of_endpoint = (remote.map.cell != 0 && region.cells_rkey != 0).then(|| {
            let offset = need(op, 0).0.event_of_endpoint().offset();
            (remote.map.cell.wrapping_add(offset), region.cells_rkey)
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

    /// Retries the pending operations in order, until one cannot be posted.
    pub(super) fn resume(&mut self, rings: &Rings) {
        if let Some(remote) = &mut self.remote {
            remote.catch_up();
            remote.acknowledge();
        }
        while let Some(mut waiting) = self.waiting.pop_front() {
            // SAFETY: the caller that posted the operation promised that the buffers stay valid
            // until completion.
            if !unsafe { self.retry(rings, &mut waiting) } {
                self.waiting.push_front(waiting);
                return;
            }
        }
        rings.set_waiting(false);
    }

    /// Posts a pending operation, or the rest of one. Returns whether all of it is posted.
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn retry(&mut self, rings: &Rings, waiting: &mut Waiting) -> bool {
        if self.is_comparing() {
            // SAFETY: as this function.
            return unsafe { self.count_compare(&rings.tx, &waiting.transmit()) };
        }
        loop {
            let done = waiting.done();
            let op = waiting.transmit();
            if rings.tx.is_full() && !(done != 0 && self.make_room(&rings.tx).unwrap_or(false)) {
                return false;
            }
            let len = op.local.len();
            let result = if self.is_native(&op) {
                // SAFETY: as this function.
                unsafe { self.post(&rings.tx, &op, len, Target::native(&op)) }.map(|()| None)
            } else {
                match self.resolve(&op, len, done) {
                    Known::Pending => return false,
                    Known::Compare(offset) => {
                        // SAFETY: as this function.
                        match unsafe { self.compare(&rings.tx, &op, len, offset) } {
                            Ok(all) => return all,
                            Err(error) => Err(error),
                        }
                    }
                    // SAFETY: as this function.
                    known => unsafe { self.post_known(&rings.tx, &op, len, done, known) },
                }
            };
            match result {
                Ok(None) => return true,
                Ok(Some(done)) => waiting.go_on(done),
                Err(FiErrno::EAGAIN) => return false,
                Err(error) => return self.post_failure(&rings.tx, &op, error).is_ok(),
            }
        }
    }

    /// After the end of the connection: fails the pending operations with `ECANCELED`, in order, as
    /// far as the send queue has room.
    pub(super) fn give_up(&mut self, rings: &Rings) {
        if let Some(remote) = &mut self.remote {
            remote.comparing = None;
        }
        while let Some(waiting) = self.waiting.pop_front() {
            let op = waiting.transmit();
            let full = rings.tx.is_full();
            if full
                || self
                    .post_failure(&rings.tx, &op, FiErrno::ECANCELED)
                    .is_err()
            {
                self.waiting.push_front(waiting);
                return;
            }
        }
        rings.set_waiting(false);
    }
}

/// The event cell that counts an operation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EventTarget {
    pub(super) addr: u64,
    pub(super) rkey: u32,
    /// Local destination of the fetch-and-add's result, which is never read.
    pub(super) sink: Sge,
}

/// Engine requests that the send queue has room for besides those of [`crate::queue::slots::Own`]:
/// the further parts of one operation, which are a write to each segment, a flush of each segment,
/// remote data, and events.
pub(super) const OTHER_PARTS: usize = 2 * MAX_SEGMENTS + MOST_EVENTS;

/// Event cells per operation: the region's and the endpoint's.
const MOST_EVENTS: usize = 2;
