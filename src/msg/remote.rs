//! Operations on keys that are not the device's own: looking them up in the peer's directory, checking,
//! splitting, and keeping what is posted behind a look-up in order. `docs/protocol.md`, "The key directory".
//!
//! All of it is the transmit side's and runs under its lock. What the device reports of the engine's own
//! requests comes by way of [`crate::queue::slots::Own`], whoever polls. [`TxSide::resume`] goes on with what waits: who posts calls
//! it, who reads the completion queue, and a thread of the domain while anything waits.

#![allow(unsafe_code, reason = "posts requests")]

mod lookup;
mod teller;
mod waiting;

use std::sync::Arc;

use super::atomic::ATOMIC_SIZE;
use super::transmit::{Target, Transmit};
use super::tx::TxSide;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::keys::{KeyCache, Need, Piece, kind};
use crate::mr::lookup::{Lookup, Map, READ_WORDS, Resolved};
use crate::mr::{ConnectionBlock, Words};
use crate::queue::slots::{Rings, SlotRing};
use crate::verbs::{SendOpcode, Sge};
use crate::wire::introduction::Introduction;
use crate::wire::records::{Entry, MAX_SEGMENTS, access};

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
    /// The peer's count of revocations that the kept keys take into account.
    revision: u64,
    /// Whether the peer has been told that keys are looked up.
    announced: bool,
    /// Whether it must still be told of `revision`.
    owes: bool,
    map: Map,
    kept: KeyCache,
    lookup: Option<Lookup>,
    /// Where reads go, and behind them what event cells were before; made by the first look-up.
    scratch: Option<Words>,
    /// Whether what is being read is for a look-up that was given up.
    astray: bool,
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
    /// The device's own key, and what is written there is to be made durable.
    Native,
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
            announced: false,
            owes: false,
            map: Map::new(peer.block_addr, peer.block_rkey, block.token()),
            kept: KeyCache::default(),
            lookup: None,
            scratch: None,
            astray: false,
            poster,
            rings: Arc::clone(rings),
        }
    }

    pub(super) fn rings(&self) -> &Arc<Rings> {
        &self.rings
    }

    /// What a key that is kept says.
    #[inline]
    fn find(&self, op: &Transmit<'_>, len: usize) -> Option<Known> {
        if self.block.revision() != self.revision {
            return None;
        }
        Some(known(self.kept.get(op.key)?, self.map.cell != 0, op, len))
    }
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
            && let Some(remote) = &self.remote
            && let Some(Known::One(piece)) = remote.find(op, len)
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
                return Err(FiErrno::EKEYREJECTED);
            }
            if rings.tx.is_full() && !self.make_room(&rings.tx)? {
                return Err(FiErrno::EAGAIN);
            }
            match self.resolve(op, len) {
                Known::Pending => {}
                // SAFETY: as this function.
                known => return unsafe { self.post_known(&rings.tx, op, len, known) },
            }
        }
        if rings.tx.outstanding() as usize + self.waiting.len() >= rings.tx.depth() as usize {
            return Err(FiErrno::EAGAIN);
        }
        // SAFETY: as this function.
        self.waiting.push_back(unsafe { Waiting::new(op) });
        rings.set_waiting(true);
        self.wake_helper();
        Ok(())
    }

    /// Whether no key of the peer looks like this.
    fn is_senseless(&self, key: u64) -> bool {
        !self.application_keys && key >> 48 != kind::HANDLE
    }

    fn resolve(&mut self, op: &Transmit<'_>, len: usize) -> Known {
        if self.has_native_key(op) {
            return Known::Native;
        }
        let raw = if op.key >> 48 == kind::MAPPED {
            self.cq.domain().mapped().get(op.key)
        } else {
            None
        };
        if let Some(raw) = raw.as_ref().filter(|raw| !raw.published) {
            let native = Resolved {
                // counted regions are published
                entry: Entry {
                    cell: 0,
                    once: false,
                    ..raw.entry
                },
                cells_rkey: 0,
                segments: raw.segments.clone().into(),
                used: false,
            };
            return known(&native, false, op, len); // nor do such endpoints count
        }
        let Some(remote) = &mut self.remote else {
            return Known::Refused(FiErrno::EKEYREJECTED);
        };
        loop {
            if let Some(known) = remote.find(op, len) {
                return known;
            }
            if op.key >> 48 == kind::MAPPED {
                let Some(raw) = &raw else {
                    return Known::Refused(FiErrno::EKEYREJECTED);
                };
                match remote.alias(op.key, raw) {
                    None => return Known::Pending,
                    Some(Ok(())) => continue,
                    Some(Err(error)) => return Known::Refused(error),
                }
            }
            match remote.look_up(op.key) {
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
                Known::Native => {
                    let piece = Piece {
                        addr: op.remote_addr,
                        rkey: Target::native(op).rkey,
                        len: len as u64,
                        last: true,
                        ..Piece::default()
                    };
                    self.post_pieces(ring, op, len, &[piece], &[])
                }
                Known::Refused(error) => self.post_failure(ring, op, error),
                Known::Pending => Err(FiErrno::EAGAIN),
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
        let remote = self.remote.as_ref().ok_or(FiErrno::EKEYREJECTED)?;
        let kept = remote.kept.get(op.key).ok_or(FiErrno::EKEYREJECTED)?;
        let (need, len_there) = need(op, len);
        let found = kept.pieces(offset, len_there);
        let once = kept.entry.once;
        // the claim of a region that was accessed is nobody's any more
        let of_region = if once {
            Some((kept.entry.claim_addr(), kept.entry.rkey))
        } else if kept.entry.cell != 0 {
            let addr = kept.entry.cell.wrapping_add(need.event().offset());
            Some((addr, kept.cells_rkey))
        } else {
            None
        };
        let of_endpoint = (remote.map.cell != 0).then(|| {
            let offset = need.event_of_endpoint().offset();
            (remote.map.cell.wrapping_add(offset), kept.cells_rkey)
        });
        let mut events = [EventTarget::default(); MOST_EVENTS];
        let mut event_count = 0;
        if let Some(scratch) = &remote.scratch {
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
                event_count += 1;
            }
        }
        let mut count = 0;
        for (to, piece) in pieces.iter_mut().zip(found) {
            *to = piece;
            count += 1;
        }
        // SAFETY: as this function.
        unsafe { self.post_pieces(ring, op, len, &pieces[..count], &events[..event_count]) }?;
        if once
            && let Some(remote) = &mut self.remote
            && let Some(kept) = remote.kept.get_mut(op.key)
        {
            kept.used = true;
        }
        Ok(())
    }

    /// Goes on with what waits, as far as that is possible now.
    pub(super) fn resume(&mut self, rings: &Rings) {
        if let Some(remote) = &mut self.remote
            && remote.announced
        {
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
        if rings.tx.is_full() {
            return false;
        }
        let len = op.local.len();
        let result = if self.is_native(op) {
            // SAFETY: as this function.
            unsafe { self.post(&rings.tx, op, len, Target::native(op)) }
        } else {
            match self.resolve(op, len) {
                Known::Pending => return false,
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
