//! Resolves an operation's key from the cached records, or by reading the records of the peer's
//! directory.

use super::PeerKeys;
use super::lookup::{Effort, Step};
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::elements::Shape;
use crate::initiator::link::Link;
use crate::initiator::sq::Sq;
use crate::initiator::{ATOMIC_SIZE, Initiator, Transmit};
use crate::mr::key_cache::{Fragment, Need, There, kind};
use crate::mr::lookup::Resolved;
use crate::mr::mapped_keys::{MappedKey, Meaning};
use crate::verbs::{RemoteAddr, Rkey, SendOpcode};
use crate::wire::records::MAX_SEGMENTS;
use crate::wire::records::access;

/// Result of resolving an operation's key.
#[derive(Clone, Copy)]
pub(super) enum Resolution {
    /// The operation is posted as one request.
    One(Fragment),
    /// The operation is posted as several requests, from this offset in the region: the range
    /// covers more than one registration, or events are counted, or the region is single-use.
    Many(u64),
    /// A compare and swap, or an atomic on elements, at this offset in the region, counted only if
    /// it changes the memory.
    Compare(u64),
    /// The key is this rkey of the device, and the write must be made durable.
    Native(Rkey),
    /// This block of the region's segments must be read first.
    Unread(usize),
    /// The operation is refused with this errno.
    Refused(FiErrno),
    /// The look-up is in progress.
    Pending,
}

/// The access to the peer's memory that an operation needs, and its length in bytes.
#[inline]
pub(super) fn need(op: &Transmit<'_>, len: usize) -> (Need, u64) {
    if op.opcode == SendOpcode::Read {
        (Need::Read, len as u64)
    } else if op.opcode == SendOpcode::Elements {
        let shape = Shape::of(op);
        let (fetches, writes) = (shape.fetches, shape.writes);
        (Need::Elements { fetches, writes }, shape.len as u64)
    } else if !op.opcode.is_atomic() {
        (Need::Write, len as u64)
    } else if op.completion_flags.contains(Flags::READ) {
        (Need::FetchAtomic, ATOMIC_SIZE as u64)
    } else {
        (Need::Atomic, ATOMIC_SIZE as u64)
    }
}

/// Whether an atomic leaves the peer's memory unchanged: `FI_ATOMIC_READ`, or a sum with 0.
/// `fi_mr_bind(3)` counts a write "whenever a remote RMA write or atomic operation modifies the
/// memory region".
pub(super) fn leaves_unchanged(op: &Transmit<'_>) -> bool {
    match op.opcode {
        SendOpcode::FetchAdd => op.compare_add == 0,
        SendOpcode::Elements => !Shape::of(op).writes,
        _ => false,
    }
}

impl<L: Link> PeerKeys<L> {
    /// Resolves an operation from the cached keys. `done`: bytes of it that are posted already.
    /// `None`: the key is not cached, or the peer has sent revocations that are not processed yet.
    #[inline]
    pub(super) fn find(
        &mut self,
        key: u64,
        op: &Transmit<'_>,
        len: usize,
        done: u64,
    ) -> Option<Resolution> {
        if self.block.revision() != self.revision && !self.ignores_revocations() {
            return None;
        }
        let region = self.cache.get(key)?;
        self.last_used = self.link.next_number();
        if !matches!(need(op, len).0, Need::Write) {
            self.last_read = self.last_used;
        }
        Some(resolution(region, !self.map.cell.is_null(), op, len, done))
    }

    /// As [`Self::find`], for a mapped key: refuses the operation if the cached record belongs to
    /// another registration than the raw key.
    fn find_mapped(
        &mut self,
        mapped: &MappedKey,
        op: &Transmit<'_>,
        len: usize,
        done: u64,
    ) -> Option<Resolution> {
        let found = self.find(mapped.key, op, len, done)?;
        match mapped.meaning {
            Meaning::Published { domain, generation }
                if self.map.domain() != Some(domain)
                    || self.cache.get(mapped.key)?.entry.generation != generation =>
            {
                Some(Resolution::Refused(FiErrno::EKEYREJECTED))
            }
            _ => Some(found),
        }
    }

    /// Reads the records that [`Self::find`] needs: those of the key, or a block of its segments,
    /// as far as the reads complete while the link polls. `None`: the look-up is still in progress.
    fn read_for(&mut self, key: u64, found: Option<Resolution>) -> Option<Result<()>> {
        let mut effort = Effort::default();
        loop {
            let step = match found {
                Some(Resolution::Unread(block)) => self.read_segments(key, block, &mut effort),
                _ => self.look_up(key, &mut effort),
            };
            match step {
                Step::Ended(result) => return Some(result),
                Step::UnderWay if self.link.poll_once_more(&mut effort.polls) => {}
                Step::UnderWay | Step::Exhausted => return None,
            }
        }
    }
}

/// Maximum number of reads of incomplete or changed records in one call, before the operation is
/// deferred.
const TORN_PER_CALL: u32 = 64;

/// Resolves an operation whose key is an rkey of the device.
fn native(rkey: Rkey, op: &Transmit<'_>, len: usize) -> Resolution {
    if op.is_durable() {
        return Resolution::Native(rkey);
    }
    Resolution::One(Fragment {
        addr: RemoteAddr::new(op.remote_addr),
        rkey,
        len: len as u64,
        last: true,
        ..Fragment::default()
    })
}

/// Resolves an operation from the records of its key. `counted`: the peer's endpoint counts the
/// operation. `done`: bytes of it that are posted already.
#[inline]
fn resolution(
    resolved: &Resolved,
    counted: bool,
    op: &Transmit<'_>,
    len: usize,
    done: u64,
) -> Resolution {
    let (need, len) = need(op, len);
    let offset = match resolved.offset(op.remote_addr, len, need) {
        Ok(offset) => offset,
        Err(error) => return Resolution::Refused(error),
    };
    if resolved.used {
        return Resolution::Refused(FiErrno::EKEYREJECTED);
    }
    if done != 0 {
        return rest(resolved, op, offset + done, len - done);
    }
    let durable = op.is_durable();
    if durable && resolved.entry.access & access::FLUSH == 0 {
        return Resolution::Refused(FiErrno::EACCES);
    }
    match resolved.there(offset, len) {
        There::All => {}
        There::Absent => return Resolution::Refused(FiErrno::EACCES),
        There::Unread(block) => return Resolution::Unread(block),
    }
    if op.opcode == SendOpcode::Elements {
        return elements(resolved, counted, op, offset, len);
    }
    match resolved.fragment(offset, len) {
        // with offset addressing, base plus offset must be aligned
        Ok(fragment)
            if op.opcode.is_atomic() && !(fragment.last && fragment.addr.is_multiple_of(len)) =>
        {
            Resolution::Refused(FiErrno::EINVAL)
        }
        Ok(fragment)
            if fragment.last
                && !is_counted_by(resolved, op)
                && !(counted || durable || resolved.entry.once) =>
        {
            Resolution::One(fragment)
        }
        // without a result buffer the initiator cannot detect success
        _ if op.opcode == SendOpcode::CompareSwap
            && is_counted_by(resolved, op)
            && !resolved.entry.once
            && op.local.count() != 0 =>
        {
            Resolution::Compare(offset)
        }
        _ => Resolution::Many(offset),
    }
}

/// Whether counters of the region count the operation.
pub(super) fn is_counted_by(resolved: &Resolved, op: &Transmit<'_>) -> bool {
    op.counted.by_region && !resolved.entry.cell.is_null()
}

/// As [`resolution`], for an atomic on elements that are present.
fn elements(
    resolved: &Resolved,
    counted: bool,
    op: &Transmit<'_>,
    offset: u64,
    len: u64,
) -> Resolution {
    let shape = Shape::of(op);
    if resolved.entry.once {
        return Resolution::Refused(FiErrno::EKEYREJECTED);
    }
    let (mut at, mut count) = (0, 0);
    let first = loop {
        match resolved.fragment(offset + at, len - at) {
            // each request has whole elements
            Ok(fragment) if !fragment.len.is_multiple_of(shape.size as u64) => {
                return Resolution::Refused(FiErrno::EACCES);
            }
            Ok(fragment) if fragment.last => break fragment,
            Ok(fragment) => (at, count) = (at + fragment.len, count + 1),
            Err(block) => return Resolution::Unread(block),
        }
        if count == MAX_SEGMENTS {
            return Resolution::Refused(FiErrno::EACCES);
        }
    };
    let of_region = is_counted_by(resolved, op);
    if of_region && shape.writes && !shape.always {
        return Resolution::Compare(offset);
    }
    match count == 0 && !of_region && !counted {
        true => Resolution::One(first),
        false => Resolution::Many(offset),
    }
}

/// As [`resolution`], for an operation that is partly posted and whose remaining bytes are this
/// range of the region. The whole range was checked when the operation was first posted, and the
/// region may have changed since: only the next fragment is checked here, and each later one when
/// it is posted.
fn rest(resolved: &Resolved, op: &Transmit<'_>, offset: u64, len: u64) -> Resolution {
    if op.is_durable() && resolved.entry.access & access::FLUSH == 0 {
        return Resolution::Refused(FiErrno::EACCES);
    }
    match resolved.fragment(offset, len) {
        Ok(fragment) if fragment.absent => Resolution::Refused(FiErrno::EACCES),
        Ok(_) => Resolution::Many(offset),
        Err(block) => Resolution::Unread(block),
    }
}

impl<Q: Sq> Initiator<Q> {
    /// Whether the value cannot be a key of the peer's directory.
    pub(super) fn cannot_be_a_key(&self, key: u64) -> bool {
        !self.application_keys && key >> 48 != kind::HANDLE
    }

    /// As [`PeerKeys::find`], for a mapped key in the cache of mapped keys.
    pub(super) fn find_mapped(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        done: u64,
    ) -> Option<Resolution> {
        let mapped = self.mapped.get(op.key)?;
        if !mapped.is_mapped() {
            return Some(Resolution::Refused(FiErrno::EKEYREJECTED));
        }
        match &mapped.meaning {
            // events of such regions and endpoints are not counted
            Meaning::Native(region) => Some(resolution(region, false, op, len, done)),
            Meaning::Key if mapped.key >> 32 == 0 && !self.application_keys => {
                Some(native(Rkey::new(mapped.key as u32), op, len))
            }
            Meaning::Key | Meaning::Published { .. } => {
                self.peer.as_mut()?.find_mapped(mapped, op, len, done)
            }
        }
    }

    pub(super) fn resolve(&mut self, op: &Transmit<'_>, len: usize, done: u64) -> Resolution {
        let resolution = if self.has_native_key(op) {
            native(op.native_target().1, op, len)
        } else if op.key >> 48 == kind::MAPPED {
            self.resolve_mapped(op, len, done)
        } else {
            self.look_up(op, len, done)
        };
        if let Some(peer) = &mut self.peer
            && !matches!(resolution, Resolution::Pending)
        {
            peer.reset_counters();
        }
        resolution
    }

    /// As [`Self::resolve`], for a key in the peer's directory.
    fn look_up(&mut self, op: &Transmit<'_>, len: usize, done: u64) -> Resolution {
        let Some(peer) = &mut self.peer else {
            return Resolution::Refused(FiErrno::EKEYREJECTED);
        };
        let before = peer.torn;
        loop {
            if peer.torn.wrapping_sub(before) > TORN_PER_CALL {
                return Resolution::Pending;
            }
            let found = match peer.find(op.key, op, len, done) {
                found @ (None | Some(Resolution::Unread(_))) => found,
                Some(resolution) => return resolution,
            };
            match peer.read_for(op.key, found) {
                None => return Resolution::Pending,
                Some(Ok(())) => {}
                Some(Err(error)) => return Resolution::Refused(error),
            }
        }
    }

    /// As [`Self::resolve`], for a mapped key.
    fn resolve_mapped(&mut self, op: &Transmit<'_>, len: usize, done: u64) -> Resolution {
        if self.mapped.get(op.key).is_none() {
            let Some(mapped) = self.domain.mapped().get(op.key) else {
                return Resolution::Refused(FiErrno::EKEYREJECTED);
            };
            self.mapped.keep(mapped);
        }
        let before = self.peer.as_ref().map_or(0, |peer| peer.torn);
        loop {
            let found = match self.find_mapped(op, len, done) {
                found @ (None | Some(Resolution::Unread(_))) => found,
                Some(resolution) => return resolution,
            };
            let (Some(mapped), Some(peer)) = (self.mapped.get(op.key), &mut self.peer) else {
                return Resolution::Refused(FiErrno::EKEYREJECTED);
            };
            if peer.torn.wrapping_sub(before) > TORN_PER_CALL {
                return Resolution::Pending;
            }
            match peer.read_for(mapped.key, found) {
                None => return Resolution::Pending,
                Some(Ok(())) => {}
                Some(Err(error)) => return Resolution::Refused(error),
            }
        }
    }
}
