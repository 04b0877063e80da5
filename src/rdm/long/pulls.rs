//! Long messages that the receiver reads from the memory of their senders: their state, the READs
//! that are under way, and those that wait for room on the link of their peer.
//! `docs/protocol-rdm.md`, "Long messages".

#![allow(unsafe_code, reason = "registers buffers of the application")]

use std::collections::VecDeque;
use std::sync::Arc;

use crate::errno::{FiErrno, Result};
use crate::mr::{
    DescRule, Following, Kept, LocalKeys, MrDomain, Paging, Source, SourceKeys, Use, Withdrawn,
};
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::iov::Buffer;
use crate::rdm::number_map::NumberMap;
use crate::rdm::receive::Receive;
use crate::rdm::slab::Slab;
use crate::rdm::table_keys::{ArrivalKey, ReadKey, ReadMark};
use crate::verbs::{Lkey, Pd, RemoteAddr, Rkey, Sge};

/// Largest piece of a message in bytes: the next one is registered while it is read.
const PIECE: u64 = 1 << 20;
/// READs of a link that are under way; further ones wait. More would delay the packets behind them.
const READS: usize = 4;
/// The same on a device that copies in the post, which is under the endpoint's lock; there one READ
/// of a link is under way.
const COPY: u64 = 1 << 18;
/// Consecutive messages of a peer that could not be read, each of which has broken a link, until
/// the next ones are asked for in parts.
const REFUSALS: u32 = 2;
/// Number of messages that are asked for in parts then, before one is read again. It doubles with
/// each further message that cannot be read, as often as [`DOUBLINGS`]. The messages of an
/// application that fails some of its sends can be read again, and a device that refuses READs
/// costs few links.
const PARTS: u32 = 16;
const DOUBLINGS: u32 = 12;

/// A message that is read from the memory of its sender.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Pull {
    pub(in crate::rdm) from: (RemoteAddr, Rkey),
    /// Offset behind the last byte to be read: of those that fit into the receive, and that the
    /// sender does not write.
    pub(in crate::rdm) end: u64,
    /// Offset of the next piece.
    pub(in crate::rdm) next: u64,
    /// Number of READs that have not completed.
    pub(in crate::rdm) reads: u32,
    /// Number of links that have broken since the last READ that has succeeded, and the last one.
    pub(in crate::rdm) breaks: u32,
    pub(in crate::rdm) broken: Option<LinkKey>,
    /// The device has refused the post of a READ.
    pub(in crate::rdm) refused: bool,
    pub(in crate::rdm) state: PullState,
}

/// The end of a message, which its sender was asked to write, while the receiver reads the begin.
#[derive(Debug)]
pub(in crate::rdm) struct Push {
    /// Offset of its first byte.
    pub(in crate::rdm) offset: u64,
    pub(in crate::rdm) sink: Sink,
}

/// The registration of the part of a receive that its sender writes.
#[derive(Debug)]
pub(in crate::rdm) enum Sink {
    /// The sender may write.
    Open(Source),
    /// A WRITE is being executed, and no other one can begin.
    Ends(Withdrawn),
}

impl Sink {
    /// Ends the registration of a part that the sender does not write any more, so that no peer
    /// writes when this has succeeded. Does not wait.
    ///
    /// # Errors
    /// A WRITE is being executed, and no other one can begin. The caller ends it later.
    pub(in crate::rdm) fn end(self, keys: &mut SourceKeys) -> std::result::Result<(), Withdrawn> {
        let withdrawn = match self {
            Self::Open(source) => keys.withdraw(source),
            Self::Ends(withdrawn) => Some(withdrawn),
        };
        withdrawn.map_or(Ok(()), Withdrawn::end)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum PullState {
    /// READs are posted.
    Reads,
    /// The message cannot be read; when the READs have completed, it is asked for in parts.
    Refused,
    /// The session has ended; when the READs have completed, the receive fails.
    Failed,
}

/// A piece of a message that is being read, or read again on the next link.
#[derive(Debug)]
pub(in crate::rdm) struct Read {
    /// The message.
    pub(in crate::rdm) of: ArrivalKey,
    /// Offset in the message.
    pub(in crate::rdm) offset: u64,
    /// Where the piece is written.
    pub(in crate::rdm) sge: Sge,
    /// The registration of that memory.
    kept: Vec<Kept>,
}

/// Messages that a peer has announced and that could not be read, without one that was read behind
/// them.
#[derive(Clone, Copy, Debug, Default)]
struct Refusals {
    /// Their number.
    count: u32,
    /// Number of messages that are asked for in parts, before one is read.
    parts: u32,
}

impl Refusals {
    /// A further one.
    fn add(&mut self) {
        self.count = self.count.saturating_add(1);
        if let Some(more) = self.count.checked_sub(REFUSALS) {
            self.parts = PARTS << more.min(DOUBLINGS);
        }
    }
}

/// What waits for room on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum Waiting {
    /// A READ whose link has broken.
    Again(ReadKey),
    /// The further pieces of a message.
    Pieces(ArrivalKey),
}

/// See the module.
pub(in crate::rdm) struct Pulls {
    /// The lkeys of receives.
    keys: LocalKeys,
    /// Largest piece in bytes, and number of READs of one link under way.
    pub(in crate::rdm) piece: u64,
    pub(in crate::rdm) most: usize,
    /// Descriptors are read, and are of regions whose pages may change. The key of a part of such a
    /// region is found under a lock that is held while the region is refreshed
    /// (`docs/locking.md`), so the engine copies into them.
    described: bool,
    refreshed: bool,
    /// The device copies in the post.
    pub(in crate::rdm) copies: bool,
    /// By the number of the peer.
    refusals: NumberMap<Refusals>,
    reads: Slab<ReadMark, Read>,
    /// By the number of the peer.
    waiting: NumberMap<VecDeque<Waiting>>,
    /// Number of all entries of `waiting`, whose lists may be empty.
    waits: usize,
    /// Empty lists for reuse.
    spare: Vec<Vec<Kept>>,
}

impl std::fmt::Debug for Pulls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pulls").finish_non_exhaustive()
    }
}

impl Pulls {
    /// May open the domain's registration cache, which starts the monitor's thread.
    pub(in crate::rdm) fn new(domain: &MrDomain, pd: &Arc<Pd>) -> Self {
        let copies = domain.device().backend().executes_in_post;
        Self {
            keys: LocalKeys::new(domain, pd),
            piece: if copies { COPY } else { PIECE },
            most: if copies { 1 } else { READS },
            described: domain.config().form.desc != DescRule::Ignored,
            refreshed: matches!(domain.paging(), Paging::Refreshed { .. }),
            copies,
            refusals: NumberMap::default(),
            reads: Slab::new(),
            waiting: NumberMap::default(),
            waits: 0,
            spare: Vec::new(),
        }
    }

    /// Begins the READ of a piece of a receive: registers the memory that it is written to. The
    /// caller keeps `follows` until the READ is posted.
    ///
    /// # Errors
    /// `EINVAL`: the buffer has no valid descriptor where one is required. `EOPNOTSUPP`: it is in a
    /// region whose pages may change, or the buffers are in several. Those of registering.
    /// `ENOMEM`: 2^24 READs are under way.
    ///
    /// # Safety
    /// As [`LocalKeys::lkey`]; the caller calls [`Self::end`] before the buffer is given back.
    pub(in crate::rdm) unsafe fn begin(
        &mut self,
        of: ArrivalKey,
        offset: u64,
        receive: &Receive,
        to: &Buffer,
        follows: &mut Following<'static>,
    ) -> Result<ReadKey> {
        let refreshed = self.refreshed && !receive.desc.0.is_null();
        if self.described && (refreshed || receive.several) {
            return Err(FiErrno::EOPNOTSUPP);
        }
        if self.described {
            // the application may close the region of a posted receive at the same time
            follows.add(receive.desc);
        }
        let keys = &mut self.keys;
        let iov = to.iovec();
        // SAFETY: as this function.
        let lkey = match unsafe { keys.lkey(receive.desc, &iov, Use::Sink) } {
            Ok(lkey) => lkey,
            Err(error) => {
                keys.release_taken();
                return Err(error);
            }
        };
        let sge = Sge {
            addr: iov.iov_base as u64,
            // a piece has at most 1 MiB
            length: iov.iov_len as u32,
            lkey,
        };
        let read = Read {
            of,
            offset,
            sge,
            kept: self.spare.pop().unwrap_or_default(),
        };
        let key = self.reads.insert(read);
        match key.and_then(|key| Some((key, self.reads.get_mut(key)?))) {
            Some((key, read)) => {
                keys.exchange(&mut read.kept);
                Ok(key)
            }
            None => {
                keys.release_taken();
                Err(FiErrno::ENOMEM)
            }
        }
    }

    /// Follows the descriptor of a receive again, for a READ that is posted again: the region may
    /// have been closed since, and its lkey be that of another one. `follows` as for
    /// [`Self::begin`].
    ///
    /// # Errors
    /// `EINVAL`: the descriptor is not valid any more.
    ///
    /// # Safety
    /// As [`Self::begin`].
    pub(in crate::rdm) unsafe fn renew(
        &mut self,
        key: ReadKey,
        receive: &Receive,
        follows: &mut Following<'static>,
    ) -> Result<()> {
        let Some(read) = self.reads.get_mut(key) else {
            return Ok(());
        };
        // the READ holds the registration of a buffer without a descriptor
        if !self.described || receive.desc.0.is_null() {
            return Ok(());
        }
        follows.add(receive.desc);
        let iov = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(read.sge.addr as usize),
            iov_len: read.sge.length as usize,
        };
        // SAFETY: as this function.
        let lkey = unsafe { self.keys.of_descriptor(receive.desc, &iov) };
        // regions whose pages may change are not read into
        self.keys.release_taken();
        read.sge.lkey = lkey?;
        Ok(())
    }

    pub(in crate::rdm) fn get(&self, key: ReadKey) -> Option<&Read> {
        self.reads.get(key)
    }

    /// Ends a READ: releases the registration.
    pub(in crate::rdm) fn end(&mut self, key: ReadKey) {
        if let Some(Read { mut kept, .. }) = self.reads.remove(key) {
            self.keys.exchange(&mut kept);
            self.spare.push(kept);
        }
    }

    /// Ends all READs; the queue pairs are destroyed.
    pub(in crate::rdm) fn end_all(&mut self) {
        for key in self.reads.keys_where(|_| true) {
            self.end(key);
        }
        self.waiting.clear();
        self.waits = 0;
    }

    /// Adds to what waits for a link of a peer: READs of a broken link first.
    pub(in crate::rdm) fn wait(&mut self, peer: PeerKey, what: Waiting) {
        let list = self.waiting.entry(peer.number()).or_default();
        self.waits += 1;
        match what {
            Waiting::Again(_) => list.push_front(what),
            Waiting::Pieces(_) => list.push_back(what),
        }
    }

    /// What is posted next to a peer.
    pub(in crate::rdm) fn first(&self, peer: PeerKey) -> Option<Waiting> {
        self.waiting.get(&peer.number())?.front().copied()
    }

    /// Removes the first, if it is this one.
    pub(in crate::rdm) fn pop(&mut self, peer: PeerKey, first: Waiting) {
        if let Some(list) = self.waiting.get_mut(&peer.number()) {
            let popped = list.pop_front_if(|it| *it == first);
            self.waits -= usize::from(popped.is_some());
        }
    }

    /// Removes all that waits for a message.
    pub(in crate::rdm) fn forget(&mut self, peer: PeerKey, message: ArrivalKey) {
        let Some(mut list) = self.waiting.remove(&peer.number()) else {
            return;
        };
        self.waits -= list.len();
        list.retain(|waiting| {
            let of = match *waiting {
                Waiting::Pieces(of) => Some(of),
                Waiting::Again(key) => self.reads.get(key).map(|read| read.of),
            };
            if let Waiting::Again(key) = *waiting
                && of == Some(message)
            {
                self.end(key);
            }
            of != Some(message)
        });
        self.waits += list.len();
        if !list.is_empty() {
            self.waiting.insert(peer.number(), list);
        }
    }

    /// The session of a peer has ended: removes all that waits for its links.
    pub(in crate::rdm) fn forget_peer(&mut self, peer: PeerKey) {
        self.refusals.remove(&peer.number());
        let list = self.waiting.remove(&peer.number()).unwrap_or_default();
        self.waits -= list.len();
        for waiting in list {
            if let Waiting::Again(key) = waiting {
                self.end(key);
            }
        }
    }

    /// A message of a peer could not be read, although it has a source.
    pub(in crate::rdm) fn refused(&mut self, peer: PeerKey) {
        self.refusals.entry(peer.number()).or_default().add();
    }

    /// A READ of a message of a peer has succeeded.
    #[inline]
    pub(in crate::rdm) fn succeeded(&mut self, peer: PeerKey) {
        if !self.refusals.is_empty() {
            self.refusals.remove(&peer.number());
        }
    }

    /// The key of a buffer for a READ without a request, and whether the device checks it: it
    /// checks those of descriptors alone. `None`: the READ is posted; the device does not copy, or
    /// [`Self::begin`] would refuse the buffer. The caller keeps `follows` until the READ is
    /// executed.
    ///
    /// # Safety
    /// As [`LocalKeys::lkey`].
    #[inline(always)]
    pub(in crate::rdm) unsafe fn key_at_once(
        &mut self,
        receive: &Receive,
        to: &libc::iovec,
        follows: &mut Following<'static>,
    ) -> Option<(Lkey, bool)> {
        if !self.copies || self.described && receive.several {
            return None;
        }
        if self.keys.may_be_unregistered(receive.desc) {
            return Some((Lkey::default(), false));
        }
        // SAFETY: as this function.
        unsafe { self.described_key(receive, to, follows) }
    }

    /// [`Self::key_at_once`] of a buffer that needs its descriptor.
    ///
    /// # Safety
    /// As [`Self::key_at_once`].
    #[inline(never)]
    unsafe fn described_key(
        &mut self,
        receive: &Receive,
        to: &libc::iovec,
        follows: &mut Following<'static>,
    ) -> Option<(Lkey, bool)> {
        if self.refreshed {
            return None;
        }
        follows.add(receive.desc); // as in `begin`
        // SAFETY: as this function.
        let lkey = unsafe { self.keys.lkey(receive.desc, to, Use::Sink) };
        // a descriptor's region is not registered for this READ
        self.keys.release_taken();
        Some((lkey.ok()?, true))
    }

    /// Whether messages of a peer are read, not asked for in parts.
    #[inline]
    pub(in crate::rdm) fn reads_from(&self, peer: PeerKey) -> bool {
        let refusals = self.refusals.get(&peer.number());
        self.refusals.is_empty() || refusals.is_none_or(|it| it.parts == 0)
    }

    /// As [`Self::reads_from`], of a message that has arrived: counts it if it is asked for in
    /// parts.
    #[inline]
    pub(in crate::rdm) fn reads_next(&mut self, peer: PeerKey) -> bool {
        let reads = self.reads_from(peer);
        if !reads && let Some(refusals) = self.refusals.get_mut(&peer.number()) {
            refusals.parts -= 1;
        }
        reads
    }

    /// Whether anything waits for a link of a peer.
    #[inline]
    pub(in crate::rdm) fn has_waiting(&self, peer: PeerKey) -> bool {
        self.waits != 0 && self.first(peer).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_after_refusals_doubles() {
        let mut refusals = Refusals::default();
        let mut parts = || {
            refusals.add();
            refusals.parts
        };
        assert_eq!([(); 5].map(|()| parts()), [0, 16, 32, 64, 128]);
        (0..100).for_each(|_| _ = parts());
        assert_eq!(parts(), 65_536);
    }
}
