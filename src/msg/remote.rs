//! Operations on keys that are not the device's own: looking them up in the peer's directory, checking,
//! splitting, and keeping what is posted behind a look-up in order. `docs/protocol.md`, "The key directory".
//!
//! All of it is the transmit side's and runs under its lock. What the device reports of the engine's own
//! requests comes by way of [`crate::queue::slots::Own`], whoever polls. [`TxSide::resume`] goes on with what waits: who posts calls
//! it, who reads the completion queue, and a thread of the domain while anything waits.

#![allow(unsafe_code, reason = "posts requests")]

mod compare;
mod lease;
mod lookup;
mod teller;
mod waiting;

use std::sync::Arc;

use super::atomic::ATOMIC_SIZE;
use super::refusal;
use super::transmit::{Target, Transmit};
use super::tx::TxSide;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::Event;
use crate::mr::keys::{KeyCache, Need, Piece, kind};
use crate::mr::lookup::{Lookup, Map, READ_WORDS, Resolved};
use crate::mr::mapped::{MappedKey, Meaning};
use crate::mr::{ConnectionBlock, Words};
use crate::queue::slots::{Rings, SlotRing};
use crate::verbs::{SendOpcode, Sge};
use crate::wire::introduction::Introduction;
use crate::wire::records::{MAX_SEGMENTS, access};

use self::compare::Comparing;
use self::teller::Poster;
pub(crate) use self::teller::Teller;
pub(crate) use self::waiting::Waiting;

/// How often the completion queue is polled for the answer to a look-up before its operation waits.
#[cfg(not(test))]
fn polls() -> u32 {
    256
}

#[cfg(test)]
thread_local! {
    /// Tests let operations wait on a device that answers at once.
    pub(super) static POLLS: std::cell::Cell<u32> = const { std::cell::Cell::new(256) };
}

#[cfg(test)]
fn polls() -> u32 {
    POLLS.get()
}

/// A peer that has introduced itself, as an initiator sees it.
#[derive(Debug)]
pub(crate) struct Remote {
    peer: Introduction,
    block: Arc<ConnectionBlock>,
    /// The peer's count of revocations, as far as it has been looked at.
    revision: u64,
    /// The count that the kept keys take into account: no less than `revision`.
    acted: u64,
    /// Whether keys are held: the peer tells of revocations, and waits until they are acknowledged.
    holds: bool,
    /// The last value of the peer's *acknowledged* that was posted.
    posted: u64,
    /// The number of the last request that was posted with a key, and what it was when the timer
    /// was started.
    last_used: u32,
    tended: u32,
    map: Map,
    kept: KeyCache,
    /// The keys that were given back.
    given_back: KeyCache,
    lookup: Option<Lookup>,
    /// Where reads go, and behind them what event cells were before; made by the first look-up.
    scratch: Option<Words>,
    /// Whether what is being read is for a look-up that was given up.
    astray: bool,
    /// Of the operation that waits first: a compare and swap that is posted, and not counted yet.
    comparing: Option<Comparing>,
    poster: Poster,
    rings: Arc<Rings>,
}

/// What is known of an operation's key.
#[derive(Clone, Copy)]
enum Known {
    /// One request.
    One(Piece),
    /// Several, from this offset of the region on: it has more than one buffer there, or counts, or may be accessed
    /// once only.
    Many(u64),
    /// A compare and swap, counted by its result, at this offset of the region.
    Compare(u64),
    /// The device's own key, and what is written there is to be made durable.
    Native(u32),
    /// It can't be done: the errno.
    Refused(FiErrno),
    /// Not yet.
    Pending,
}

/// What an operation does with the peer's memory, and with how many bytes of it.
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

/// Whether the peer's memory is as it was behind an atomic: `FI_ATOMIC_READ`, a sum of 0. `fi_mr_bind(3)` counts as
/// writes "whenever a remote RMA write or atomic operation modifies the memory region".
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
            comparing: None,
            poster,
            rings: Arc::clone(rings),
        }
    }

    pub(super) fn rings(&self) -> &Arc<Rings> {
        &self.rings
    }

    /// What a key that is kept says.
    #[inline]
    fn find(&mut self, key: u64, op: &Transmit<'_>, len: usize) -> Option<Known> {
        if self.block.revision() != self.revision {
            return None;
        }
        let kept = self.kept.get(key)?;
        self.last_used = self.rings.tx.next_number();
        Some(known(kept, self.map.cell != 0, op, len))
    }

    /// As [`Self::find`], of a key that was mapped: it stands for no other registration than the one that the raw key
    /// describes.
    fn find_mapped(&mut self, mapped: &MappedKey, op: &Transmit<'_>, len: usize) -> Option<Known> {
        let found = self.find(mapped.key, op, len)?;
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

/// What the device's own key says of an operation.
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

/// What a key that was looked up says of an operation; `counted`: the peer's endpoint counts it.
#[inline]
fn known(resolved: &Resolved, counted: bool, op: &Transmit<'_>, len: usize) -> Known {
    let (need, len) = need(op, len);
    let offset = match resolved.offset(op.remote_addr, len, need) {
        Ok(offset) => offset,
        Err(error) => return Known::Refused(error),
    };
    if resolved.used {
        return Known::Refused(FiErrno::EKEYREJECTED);
    }
    if op.is_durable() {
        return match resolved.entry.access & access::FLUSH {
            0 => Known::Refused(FiErrno::EACCES),
            _ if resolved.is_absent(offset, len) => Known::Refused(FiErrno::EACCES),
            _ => Known::Many(offset),
        };
    }
    if resolved.is_absent(offset, len) {
        return Known::Refused(FiErrno::EACCES);
    }
    match resolved.pieces(offset, len).next() {
        // where addresses count from 0, only the base tells
        Some(piece) if op.opcode.is_atomic() && !(piece.last && piece.addr.is_multiple_of(len)) => {
            Known::Refused(FiErrno::EINVAL)
        }
        Some(piece)
            if piece.last && resolved.entry.cell == 0 && !counted && !resolved.entry.once =>
        {
            Known::One(piece)
        }
        // without a result the initiator can't tell
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

impl TxSide {
    /// Posts an operation whose key may have to be looked up, or that comes after one.
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
            && let Some(Known::One(piece)) = remote.find(op.key, op, len)
        {
            // SAFETY: as this function.
            return unsafe { self.post(&rings.tx, op, len, Target::of(&piece)) };
        }
        if op.key >> 48 == kind::MAPPED
            && self.waiting.is_empty()
            && let Some(Known::One(piece)) = self.find_mapped(op, len)
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
            match self.resolve(op, len) {
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
                // SAFETY: as this function.
                known => return unsafe { self.post_known(&rings.tx, op, len, known) },
            }
        }
        if rings.tx.outstanding() as usize + self.waiting.len() >= rings.tx.depth() as usize {
            return Err(FiErrno::EAGAIN);
        }
        // SAFETY: as this function.
        unsafe { self.wait(rings, op) };
        Ok(())
    }

    /// Lets an operation wait, behind those that do.
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn wait(&mut self, rings: &Rings, op: &Transmit<'_>) {
        // SAFETY: as this function.
        self.waiting.push_back(unsafe { Waiting::new(op) });
        rings.set_waiting(true);
        self.wake_helper();
    }

    /// Whether no key of the peer looks like this.
    fn is_senseless(&self, key: u64) -> bool {
        !self.application_keys && key >> 48 != kind::HANDLE
    }

    /// What a mapped key that is kept says.
    fn find_mapped(&mut self, op: &Transmit<'_>, len: usize) -> Option<Known> {
        let mapped = self.mapped.get(op.key)?;
        if !mapped.is_mapped() {
            return Some(Known::Refused(FiErrno::EKEYREJECTED));
        }
        match &mapped.meaning {
            // neither such regions nor such endpoints count
            Meaning::Native(region) => Some(known(region, false, op, len)),
            Meaning::Key if mapped.key >> 32 == 0 && !self.application_keys => {
                Some(native(mapped.key as u32, op, len))
            }
            Meaning::Key | Meaning::Published { .. } => {
                self.remote.as_mut()?.find_mapped(mapped, op, len)
            }
        }
    }

    fn resolve(&mut self, op: &Transmit<'_>, len: usize) -> Known {
        if self.has_native_key(op) {
            return native(Target::native(op).rkey, op, len);
        }
        if op.key >> 48 == kind::MAPPED {
            return self.resolve_mapped(op, len);
        }
        let Some(remote) = &mut self.remote else {
            return Known::Refused(FiErrno::EKEYREJECTED);
        };
        loop {
            if let Some(known) = remote.find(op.key, op, len) {
                return known;
            }
            match remote.look_up(op.key) {
                None => return Known::Pending,
                Some(Ok(())) => {}
                Some(Err(error)) => return Known::Refused(error),
            }
        }
    }

    /// As [`Self::resolve`], of a key that was mapped.
    fn resolve_mapped(&mut self, op: &Transmit<'_>, len: usize) -> Known {
        if self.mapped.get(op.key).is_none() {
            let Some(mapped) = self.cq.domain().mapped().get(op.key) else {
                return Known::Refused(FiErrno::EKEYREJECTED);
            };
            self.mapped.keep(mapped);
        }
        loop {
            if let Some(known) = self.find_mapped(op, len) {
                return known;
            }
            let (Some(mapped), Some(remote)) = (self.mapped.get(op.key), &mut self.remote) else {
                return Known::Refused(FiErrno::EKEYREJECTED);
            };
            match remote.look_up(mapped.key) {
                None => return Known::Pending,
                Some(Ok(())) => {}
                Some(Err(error)) => return Known::Refused(error),
            }
        }
    }

    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn post_known(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        known: Known,
    ) -> Result<()> {
        // SAFETY: as this function.
        unsafe {
            match known {
                Known::One(piece) => self.post(ring, op, len, Target::of(&piece)),
                Known::Many(offset) => self.post_many(ring, op, len, offset),
                Known::Native(rkey) => {
                    let piece = Piece {
                        addr: op.remote_addr,
                        rkey,
                        len: len as u64,
                        last: true,
                        ..Piece::default()
                    };
                    self.post_pieces(ring, op, len, &[piece], &[])
                }
                Known::Refused(error) => self.post_failure(ring, op, error),
                // not here
                Known::Pending | Known::Compare(_) => Err(FiErrno::EAGAIN),
            }
        }
    }

    /// Posts an operation that touches several buffers of a kept key, or is counted.
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn post_many(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        offset: u64,
    ) -> Result<()> {
        let mut pieces = [Piece::default(); MAX_SEGMENTS];
        let region = self.region(op).ok_or(FiErrno::EKEYREJECTED)?;
        let (need, len_there) = need(op, len);
        let found = region.pieces(offset, len_there);
        let once = region.entry.once;
        let mut events = [EventTarget::default(); MOST_EVENTS];
        let event = if leaves_as_it_is(op) {
            Event::Read
        } else {
            need.event()
        };
        let event_count = self.events(op, region, event, &mut events);
        let mut count = 0;
        for (to, piece) in pieces.iter_mut().zip(found) {
            *to = piece;
            count += 1;
        }
        // SAFETY: as this function.
        unsafe { self.post_pieces(ring, op, len, &pieces[..count], &events[..event_count]) }?;
        let once = once.then(|| self.key_of(op));
        if let Some(remote) = &mut self.remote {
            remote.last_used = ring.next_number().wrapping_sub(1);
            if let Some(key) = once
                && let Some(kept) = remote.kept.get_mut(key)
            {
                kept.used = true;
            }
        }
        Ok(())
    }

    /// The key by which the peer's region is kept.
    fn key_of(&self, op: &Transmit<'_>) -> u64 {
        match self.mapped.get(op.key) {
            Some(mapped) if op.key >> 48 == kind::MAPPED => mapped.key,
            _ => op.key,
        }
    }

    /// What is known of the region of a key that was resolved.
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

    /// Where an operation on a region is counted, as `event` there; gives the number of places.
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
        // the claim of a region that was accessed is nobody's any more
        let of_region = if region.entry.once {
            Some((region.entry.claim_addr(), region.entry.rkey))
        } else if region.entry.cell != 0 {
            let addr = region.entry.cell.wrapping_add(event.offset());
            Some((addr, region.cells_rkey))
        } else {
            None
        };
        // of what was looked up: a region with a native key is in no directory
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

    /// Goes on with what waits, as far as that is possible now.
    pub(super) fn resume(&mut self, rings: &Rings) {
        if let Some(remote) = &mut self.remote {
            remote.catch_up();
            remote.acknowledge();
        }
        while let Some(waiting) = self.waiting.pop_front() {
            let op = waiting.transmit();
            // SAFETY: whoever posted it promised that the buffers stay until completion.
            if !unsafe { self.retry(rings, &op) } {
                self.waiting.push_front(waiting);
                return;
            }
        }
        rings.set_waiting(false);
    }

    /// Posts an operation that has waited; says whether that is done.
    ///
    /// # Safety
    /// As [`super::Endpoint::send`].
    unsafe fn retry(&mut self, rings: &Rings, op: &Transmit<'_>) -> bool {
        let len = op.local.len();
        if self.is_comparing() {
            // SAFETY: as this function.
            return unsafe { self.count_compare(&rings.tx, op) };
        }
        if rings.tx.is_full() {
            return false;
        }
        let result = if self.is_native(op) {
            // SAFETY: as this function.
            unsafe { self.post(&rings.tx, op, len, Target::native(op)) }
        } else {
            match self.resolve(op, len) {
                Known::Pending => return false,
                Known::Compare(offset) => {
                    // SAFETY: as this function.
                    match unsafe { self.compare(&rings.tx, op, len, offset) } {
                        Ok(all) => return all,
                        Err(error) => Err(error),
                    }
                }
                // SAFETY: as this function.
                known => unsafe { self.post_known(&rings.tx, op, len, known) },
            }
        };
        match result {
            Ok(()) => true,
            Err(FiErrno::EAGAIN) => false,
            Err(error) => self.post_failure(&rings.tx, op, error).is_ok(),
        }
    }

    /// The connection has ended: what waits takes its place among what is flushed, as far as there is room.
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
    /// Where the count before goes, which nobody reads.
    pub(super) sink: Sge,
}

/// Requests of the engine's own that a queue pair must have room for besides those of [`crate::queue::slots::Own`]: the other
/// parts of the last operation: a write to each segment, a flush of each, remote data behind them, events.
pub(super) const OTHER_PARTS: usize = 2 * MAX_SEGMENTS + MOST_EVENTS;

/// Cells that one operation counts in: the region's, and that of the endpoint.
const MOST_EVENTS: usize = 2;
