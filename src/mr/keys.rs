//! The keys of one peer that its initiator has looked up, and what they say of an operation.
//!
//! One endpoint's own, used under its lock: finding a kept key takes a hash and one or two cache lines, no
//! lock that others share, and no allocation.

use std::sync::Arc;

use super::event::Event;
use super::lookup::Resolved;
use super::mapped::MappedKey;
use super::table::home;
use crate::errno::FiErrno;
use crate::wire::records::{Segment, access};

/// What the upper 16 bits of a key say.
pub(crate) mod kind {
    /// A handle of the peer's directory.
    pub(crate) const HANDLE: u64 = 0xfffd;
    /// Made by mapping a raw key.
    pub(crate) const MAPPED: u64 = 0xfffe;
    /// The first that an application can't choose.
    pub(crate) const RESERVED: u64 = HANDLE;
}

/// What is found by a key.
pub(crate) trait Keyed {
    fn kept_as(&self) -> u64;
}

impl Keyed for Resolved {
    fn kept_as(&self) -> u64 {
        self.entry.key
    }
}

/// Kept keys. Open addressing, half full at most.
#[derive(Debug)]
pub(crate) struct KeyCache<T = Resolved> {
    /// Key and index in `entries` plus 1; 0 is free.
    slots: Box<[(u64, u32)]>,
    log2: u32,
    entries: Vec<T>,
}

/// Slots of an empty cache, as a base-2 logarithm.
const FIRST: u32 = 4;

impl<T: Keyed> Default for KeyCache<T> {
    fn default() -> Self {
        Self::with_slots(FIRST)
    }
}

impl<T: Keyed> KeyCache<T> {
    fn with_slots(log2: u32) -> Self {
        Self {
            slots: vec![(0, 0); 1 << log2].into_boxed_slice(),
            log2,
            entries: Vec::new(),
        }
    }

    /// A kept key.
    #[inline]
    pub(crate) fn get(&self, key: u64) -> Option<&T> {
        self.entries.get(self.index(key)?)
    }

    #[inline]
    fn index(&self, key: u64) -> Option<usize> {
        let mask = self.slots.len() - 1;
        let mut slot = home(key, self.log2);
        loop {
            let &(kept, index) = self.slots.get(slot & mask)?;
            if index == 0 {
                return None;
            }
            if kept == key {
                return Some(index as usize - 1);
            }
            slot += 1;
        }
    }

    /// A kept key, to be changed.
    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let index = self.index(key)?;
        self.entries.get_mut(index)
    }

    /// Keeps a key that is not kept yet.
    pub(crate) fn insert(&mut self, entry: T) {
        if self.is_full() {
            self.log2 += 1;
            self.slots = vec![(0, 0); 1 << self.log2].into_boxed_slice();
            for index in 0..self.entries.len() {
                let key = self.entries[index].kept_as();
                self.enter(key, index);
            }
        }
        let index = self.entries.len();
        self.enter(entry.kept_as(), index);
        self.entries.push(entry);
    }

    /// Whether the slots have to become more for one more key.
    fn is_full(&self) -> bool {
        (self.entries.len() + 1) * 2 > self.slots.len()
    }

    fn enter(&mut self, key: u64, index: usize) {
        let mask = self.slots.len() - 1;
        let mut slot = home(key, self.log2) & mask;
        while self.slots[slot].1 != 0 {
            slot = (slot + 1) & mask;
        }
        // a table of 2^32 entries would not fit into memory
        self.slots[slot] = (key, index as u32 + 1);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Forgets all of them.
    pub(crate) fn clear(&mut self) {
        if !self.entries.is_empty() {
            *self = Self::default();
        }
    }
}

impl KeyCache<Arc<MappedKey>> {
    /// Keeps a mapped key that is not kept yet. Those that were unmapped are forgotten whenever there is no room for one more;
    /// then there is room for as many again as are left, so this takes constant time in the mean.
    pub(crate) fn keep(&mut self, mapped: Arc<MappedKey>) {
        if self.is_full() {
            let all = std::mem::take(&mut self.entries).into_iter();
            let left: Vec<_> = all.filter(|one| one.is_mapped()).collect();
            let slots = (4 * (left.len() + 1)).max(1 << FIRST);
            *self = Self::with_slots(slots.next_power_of_two().ilog2());
            left.into_iter().for_each(|one| self.insert(one));
        }
        self.insert(mapped);
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

/// What an operation does with the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Read,
    Write,
    Atomic,
    FetchAtomic,
}

impl Need {
    /// As what a counter of the region counts it, if it changes the memory: `fi_mr(3)` has all atomics among the writes.
    pub(crate) fn event(self) -> Event {
        match self {
            Self::Read => Event::Read,
            Self::Write | Self::Atomic | Self::FetchAtomic => Event::Write,
        }
    }

    /// As what a counter of the target's endpoint counts it: `fi_endpoint(3)` has atomics that fetch among the reads.
    pub(crate) fn event_of_endpoint(self) -> Event {
        match self {
            Self::Read | Self::FetchAtomic => Event::Read,
            Self::Write | Self::Atomic => Event::Write,
        }
    }

    fn rights(self) -> u8 {
        match self {
            Self::Read => access::READ,
            Self::Write => access::WRITE,
            // "FI_REMOTE_WRITE: the target buffer of an RMA write or atomic operation" (fi_mr(3)), whether it fetches or not
            Self::Atomic | Self::FetchAtomic => access::ATOMIC,
        }
    }
}

impl Resolved {
    /// Where in the region an operation of `len` bytes at the application's `addr` begins.
    ///
    /// # Errors
    /// `EACCES`: the region does not allow it, or has not so many bytes there.
    #[inline]
    pub(crate) fn offset(&self, addr: u64, len: u64, need: Need) -> Result<u64, FiErrno> {
        let entry = &self.entry;
        let rights = need.rights();
        let offset = addr.checked_sub(entry.start).ok_or(FiErrno::EACCES)?;
        let end = offset.checked_add(len).ok_or(FiErrno::EACCES)?;
        if end > entry.len || entry.access & rights != rights {
            return Err(FiErrno::EACCES);
        }
        Ok(offset)
    }

    /// Whether some of these bytes are not there. The range lies inside the region.
    #[inline]
    pub(crate) fn is_absent(&self, offset: u64, len: u64) -> bool {
        !self.segments.is_empty() && self.pieces(offset, len).any(|piece| piece.absent)
    }

    /// The pieces of `len` bytes from `offset` on, in order: address, rkey, bytes. At least one, even of no
    /// bytes. The range lies inside the region.
    pub(crate) fn pieces(&self, offset: u64, len: u64) -> Pieces<'_> {
        Pieces {
            resolved: self,
            index: 0,
            offset,
            left: Some(len),
        }
    }
}

/// A part of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
    pub(crate) len: u64,
    /// Whether there is memory behind it.
    pub(crate) absent: bool,
    /// Whether there is no other behind it.
    pub(crate) last: bool,
}

/// See [`Resolved::pieces`].
#[derive(Debug)]
pub(crate) struct Pieces<'a> {
    resolved: &'a Resolved,
    index: usize,
    /// From the beginning of the segment `index`.
    offset: u64,
    left: Option<u64>,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        let left = self.left?;
        let entry = &self.resolved.entry;
        let whole = Segment {
            addr: entry.addr,
            len: entry.len,
            rkey: entry.rkey,
            absent: false,
        };
        let segments = if self.resolved.segments.is_empty() {
            std::slice::from_ref(&whole)
        } else {
            &*self.resolved.segments
        };
        let mut segment = segments.get(self.index)?;
        while self.offset >= segment.len && self.index + 1 < segments.len() {
            self.offset -= segment.len;
            self.index += 1;
            segment = segments.get(self.index)?;
        }
        let len = left.min(segment.len.saturating_sub(self.offset));
        let piece = Piece {
            // both were checked not to overflow
            addr: segment.addr.wrapping_add(self.offset),
            rkey: segment.rkey,
            absent: segment.absent && len != 0,
            len,
            last: len == left,
        };
        self.offset += len;
        self.left = (len < left).then_some(left - len);
        if len == 0 && left != 0 {
            // not inside the region, against the promise
            self.left = None;
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::records::Entry;

    fn region(len: u64, start: u64, access: u8) -> Resolved {
        Resolved {
            entry: Entry {
                addr: 0x1_0000,
                len,
                start,
                access,
                rkey: 9,
                ..Entry::default()
            },
            cells_rkey: 0,
            segments: Box::default(),
            used: false,
        }
    }

    #[test]
    fn kept_keys_are_found_and_others_are_not() {
        let mut cache = KeyCache::default();
        assert!(cache.get(0).is_none());
        for i in 0..10_000_u64 {
            let mut resolved = region(1, 0, 0);
            resolved.entry.key = i.wrapping_mul(1 << 57 | 3);
            resolved.entry.generation = i;
            cache.insert(resolved);
        }
        for i in 0..10_000_u64 {
            let found = cache.get(i.wrapping_mul(1 << 57 | 3)).unwrap();
            assert_eq!(found.entry.generation, i);
            assert!(cache.get(i.wrapping_mul(1 << 57 | 3) + 1).is_none());
        }
        cache.clear();
        assert!(cache.get(0).is_none());
    }

    #[test]
    fn bounds_hold_to_the_byte_and_nothing_overflows() {
        for start in [0, 0x7000, u64::MAX - 100] {
            let region = region(100, start, access::READ | access::WRITE);
            for (offset, len) in [(0, 100), (99, 1), (100, 0), (0, 0)] {
                let addr = start.wrapping_add(offset);
                assert_eq!(region.offset(addr, len, Need::Write), Ok(offset));
            }
            for (offset, len) in [
                (0, 101),
                (99, 2),
                (100, 1),
                (0, u64::MAX),
                (50, u64::MAX - 20),
            ] {
                let addr = start.wrapping_add(offset);
                assert_eq!(region.offset(addr, len, Need::Read), Err(FiErrno::EACCES));
            }
            assert_eq!(
                region.offset(start.wrapping_sub(1), 1, Need::Read),
                Err(FiErrno::EACCES)
            );
        }
    }

    #[test]
    fn what_was_not_granted_is_refused() {
        let needs = [
            (Need::Read, access::READ),
            (Need::Write, access::WRITE),
            (Need::Atomic, access::ATOMIC),
            (Need::FetchAtomic, access::ATOMIC),
        ];
        for (need, rights) in needs {
            for granted in 0..8 {
                let allowed = region(8, 0, granted).offset(0, 8, need).is_ok();
                assert_eq!(allowed, granted & rights == rights, "{need:?} {granted}");
            }
        }
    }

    #[test]
    fn pieces_cover_each_byte_once_and_in_order() {
        let lens = [5_u64, 0, 1, 100, 7];
        let mut many = region(lens.iter().sum(), 0, 7);
        many.segments = lens
            .iter()
            .enumerate()
            .map(|(i, len)| Segment {
                addr: (i as u64 + 1) << 20,
                len: *len,
                rkey: i as u32,
                absent: false,
            })
            .collect();
        // the address of each byte
        let bytes: Vec<(u64, u32)> = many
            .segments
            .iter()
            .flat_map(|s| (0..s.len).map(|i| (s.addr + i, s.rkey)))
            .collect();
        for offset in 0..=113_u64 {
            for len in 0..=113 - offset {
                let pieces: Vec<_> = many.pieces(offset, len).collect();
                let covered: Vec<_> = pieces
                    .iter()
                    .flat_map(|p| (0..p.len).map(|i| (p.addr + i, p.rkey)))
                    .collect();
                assert_eq!(covered, bytes[offset as usize..(offset + len) as usize]);
                let last = pieces.iter().filter(|piece| piece.last).count();
                assert!(last == 1 && pieces.last().unwrap().last, "{pieces:?}");
                assert!(len == 0 || pieces.iter().all(|piece| piece.len > 0));
            }
        }
        assert_eq!(region(10, 0, 7).pieces(3, 4).count(), 1);
    }
}
