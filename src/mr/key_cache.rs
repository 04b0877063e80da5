//! Cache of the keys of one peer that the initiator has looked up, and the checks of an operation
//! against them.
//!
//! A cache belongs to one endpoint and is used under its transmit lock. Finding a cached key
//! computes one hash, reads one or two cache lines, acquires no lock that other endpoints share,
//! and does not allocate.

use std::sync::Arc;

use super::directory_table::home;
use super::lookup::Resolved;
use super::mapped_keys::MappedKey;
use crate::errno::FiErrno;
use crate::queue::event_cell::Event;
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::records::access;
use crate::wire::segment_list::SegmentAt;

/// Kinds of keys, in their upper 16 bits.
pub(crate) mod kind {
    /// A handle: a key that the peer's engine has assigned in its directory.
    pub(crate) const HANDLE: u64 = 0xfffd;
    /// A key made by mapping a raw key.
    pub(crate) const MAPPED: u64 = 0xfffe;
    /// The first kind that is reserved for the engine.
    pub(crate) const RESERVED: u64 = HANDLE;
}

/// An object that is cached by a key.
pub(crate) trait Keyed {
    fn kept_as(&self) -> u64;
}

impl Keyed for Resolved {
    fn kept_as(&self) -> u64 {
        self.entry.key
    }
}

/// Cached keys. Open addressing, at most half full.
#[derive(Debug)]
pub(crate) struct KeyCache<T = Resolved> {
    /// Key and index in `entries` plus 1; 0 is free.
    slots: Box<[(u64, u32)]>,
    log2: u32,
    entries: Vec<T>,
    /// Number of blocks and segments of all cached keys.
    units: usize,
}

/// Maximum number of cached blocks and segments: bounds the memory for one peer's records to 64
/// MiB.
const MOST_UNITS: usize = 1 << 21;

/// Base-2 logarithm of the slots of an empty cache.
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
            units: 0,
        }
    }

    /// The object cached by a key.
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

    /// As [`Self::get`], mutable.
    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let index = self.index(key)?;
        self.entries.get_mut(index)
    }

    /// Adds a key that is not cached yet.
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

    /// Whether one more key requires more slots.
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

    /// Drops all keys.
    pub(crate) fn clear(&mut self) {
        if !self.entries.is_empty() {
            *self = Self::default();
        }
        self.units = 0;
    }
}

impl KeyCache {
    /// Accounts for more blocks and segments; drops all keys if [`MOST_UNITS`] would be exceeded.
    fn make_room(&mut self, units: usize) {
        if self.units + units > MOST_UNITS {
            self.clear();
        }
        self.units += units;
    }

    /// Adds a looked-up key that is not cached yet.
    pub(crate) fn admit(&mut self, resolved: Resolved) {
        self.make_room(resolved.units());
        self.insert(resolved);
    }

    /// Adds segments to a cached key. Returns false if the key or the block is not cached.
    pub(crate) fn fill(&mut self, key: u64, block: usize, segments: Box<[SegmentAt]>) -> bool {
        self.make_room(segments.len());
        let kept = self.get_mut(key);
        let Some(place) = kept.and_then(|kept| kept.blocks.get_mut(block)) else {
            return false;
        };
        place.segments = segments;
        true
    }
}

impl KeyCache<Arc<MappedKey>> {
    /// Adds a mapped key that is not cached yet. When the slots are full, drops the unmapped keys
    /// and resizes the slots for twice the remaining keys, so an addition takes constant amortized
    /// time.
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

/// The access to the peer's memory that an operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Read,
    Write,
    Atomic,
    FetchAtomic,
    /// An atomic on elements that the device executes.
    Elements {
        fetches: bool,
        writes: bool,
    },
}

impl Need {
    /// The event of the region's counter if the operation changes the memory: `fi_mr(3)` counts all
    /// atomics as writes.
    pub(crate) fn event(self) -> Event {
        match self {
            Self::Read => Event::Read,
            Self::Elements { writes: false, .. } => Event::Read,
            Self::Write | Self::Atomic | Self::FetchAtomic | Self::Elements { .. } => Event::Write,
        }
    }

    /// The event of the counter of the target's endpoint: `fi_endpoint(3)` counts fetching atomics
    /// as reads.
    pub(crate) fn event_of_endpoint(self) -> Event {
        match self {
            Self::Read | Self::FetchAtomic | Self::Elements { fetches: true, .. } => Event::Read,
            Self::Write | Self::Atomic | Self::Elements { .. } => Event::Write,
        }
    }

    fn rights(self) -> u8 {
        match self {
            Self::Read => access::READ,
            Self::Write => access::WRITE,
            // "FI_REMOTE_WRITE: the target buffer of an RMA write or atomic operation" (fi_mr(3))
            Self::Atomic => access::ATOMIC,
            // "the target buffer of fetch-atomic operations must be enabled for remote read access"
            // (fi_atomic(3)). FI_ATOMIC_READ too needs the right to atomics, which FI_REMOTE_WRITE
            // gives: the device executes it as a sum
            Self::FetchAtomic => access::ATOMIC | access::READ,
            Self::Elements { fetches, writes } => {
                let read = if fetches { access::READ } else { 0 };
                let write = if writes { access::WRITE } else { 0 };
                read | write
            }
        }
    }
}

impl Resolved {
    /// Offset in the region of an operation of `len` bytes at the application's `addr`.
    ///
    /// # Errors
    /// `EACCES`: the region does not permit the access, or the range exceeds it.
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

    /// Whether memory is present for these bytes, according to the segments read so far. The range
    /// lies inside the region.
    #[inline]
    pub(crate) fn there(&self, offset: u64, len: u64) -> There {
        if self.blocks.is_empty() {
            return There::All;
        }
        self.walk(offset, len)
    }

    fn walk(&self, mut offset: u64, mut left: u64) -> There {
        loop {
            match self.fragment(offset, left) {
                Ok(fragment) if fragment.absent => return There::Absent,
                Ok(fragment) if fragment.last => return There::All,
                Ok(fragment) => {
                    offset += fragment.len;
                    left -= fragment.len;
                }
                Err(block) => return There::Unread(block),
            }
        }
    }

    /// The first fragment of `len` bytes from `offset` on: the contiguous bytes in one
    /// registration, at least one unless `len` is 0. The range lies inside the region.
    ///
    /// # Errors
    /// The index of the block that must be read first.
    #[inline]
    pub(crate) fn fragment(&self, offset: u64, len: u64) -> Result<Fragment, usize> {
        if self.blocks.is_empty() {
            return Ok(Fragment {
                // cannot wrap: the record and the offset have been checked
                addr: self.entry.addr.wrapping_add(offset),
                rkey: self.entry.rkey,
                len,
                absent: false,
                last: true,
            });
        }
        self.fragment_of_segments(offset, len)
    }

    fn fragment_of_segments(&self, offset: u64, len: u64) -> Result<Fragment, usize> {
        let mut block = self
            .blocks
            .partition_point(|block| block.place.first <= offset);
        block = block.saturating_sub(1);
        let mut segments = &*self.blocks.get(block).ok_or(block)?.segments;
        let mut index = segments.partition_point(|at| at.offset <= offset);
        index = index.saturating_sub(1);
        let first = *segments.get(index).ok_or(block)?;
        let skipped = offset - first.offset;
        let mut fragment = Fragment {
            addr: first.segment.addr.wrapping_add(skipped),
            rkey: first.segment.rkey,
            absent: first.segment.absent && len != 0,
            len: first.segment.len.saturating_sub(skipped).min(len),
            last: false,
        };
        // joins contiguous segments that a block or buffer boundary separates
        while fragment.len < len {
            index += 1;
            if index == segments.len() {
                (block, index) = (block + 1, 0);
                match self.blocks.get(block) {
                    Some(next) => segments = &next.segments,
                    None => break,
                }
            }
            let Some(next) = segments.get(index) else {
                // This segment is not read yet: the fragment ends here.
                break;
            };
            let follows = next.segment.addr == fragment.addr.wrapping_add(fragment.len)
                && (next.segment.rkey, next.segment.absent)
                    == (fragment.rkey, first.segment.absent);
            if next.segment.len != 0 && !follows {
                break;
            }
            fragment.len += next.segment.len.min(len - fragment.len);
        }
        fragment.last = fragment.len == len;
        // only if the range is outside the region; with an empty fragment the operation would never
        // end
        fragment.absent |= fragment.len == 0 && len != 0;
        Ok(fragment)
    }
}

/// Whether memory is present for a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum There {
    All,
    Absent,
    /// Unknown: this block of the segments must be read first.
    Unread(usize),
}

/// The range of an operation in one segment of the peer's region, or in contiguous segments with
/// the same rkey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub(crate) addr: RemoteAddr,
    pub(crate) rkey: Rkey,
    pub(crate) len: u64,
    /// Whether the memory of the fragment is absent.
    pub(crate) absent: bool,
    /// Whether this is the last fragment of the operation.
    pub(crate) last: bool,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::lookup::SegmentBlock;
    use super::*;
    use crate::wire::records::{Entry, Segment};
    use crate::wire::segment_list::BlockRef;

    fn region(len: u64, start: u64, access: u8) -> Resolved {
        Resolved {
            entry: Entry {
                addr: RemoteAddr::new(0x1_0000),
                len,
                start,
                access,
                rkey: Rkey::new(9),
                ..Entry::default()
            },
            cells_rkey: Rkey::default(),
            blocks: Box::default(),
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
            (Need::FetchAtomic, access::ATOMIC | access::READ),
        ];
        for (need, rights) in needs {
            for granted in 0..8 {
                let allowed = region(8, 0, granted).offset(0, 8, need).is_ok();
                assert_eq!(allowed, granted & rights == rights, "{need:?} {granted}");
            }
        }
    }

    /// All fragments of a range.
    fn fragments(region: &Resolved, mut offset: u64, mut len: u64) -> Result<Vec<Fragment>, usize> {
        let mut fragments = Vec::new();
        loop {
            let fragment = region.fragment(offset, len)?;
            fragments.push(fragment);
            if fragment.last {
                return Ok(fragments);
            }
            assert!(fragment.len > 0);
            offset += fragment.len;
            len -= fragment.len;
        }
    }

    /// A region of these segments, in blocks that begin with these ones; `short`: in a
    /// list without blocks.
    fn listed(segments: &[Segment], firsts: &[usize], short: bool) -> Resolved {
        let mut region = region(segments.iter().map(|s| s.len).sum(), 0, 7);
        let all = SegmentBlock::of(segments);
        region.blocks = if short {
            Box::new([all])
        } else {
            let ends = firsts.iter().skip(1).copied().chain([segments.len()]);
            let blocks = firsts.iter().zip(ends).map(|(&first, end)| SegmentBlock {
                place: BlockRef {
                    first: all.segments[first].offset,
                    ..BlockRef::default()
                },
                segments: all.segments[first..end].into(),
            });
            blocks.collect()
        };
        region
    }

    #[test]
    fn fragments_cover_each_byte_once_and_in_order() {
        let lens = [5_u64, 0, 1, 100, 7];
        let segments: Vec<_> = lens
            .iter()
            .enumerate()
            .map(|(i, len)| Segment {
                addr: RemoteAddr::new((i as u64 + 1) << 20),
                len: *len,
                rkey: Rkey::new(i as u32),
                absent: false,
            })
            .collect();
        let many = listed(&segments, &[0], true);
        // the address of each byte
        let bytes: Vec<(u64, u32)> = segments
            .iter()
            .flat_map(|s| (0..s.len).map(|i| (s.addr.get() + i, s.rkey.get())))
            .collect();
        for offset in 0..=113_u64 {
            for len in 0..=113 - offset {
                let fragments = fragments(&many, offset, len).unwrap();
                let covered: Vec<_> = fragments
                    .iter()
                    .flat_map(|p| (0..p.len).map(|i| (p.addr.get() + i, p.rkey.get())))
                    .collect();
                assert_eq!(covered, bytes[offset as usize..(offset + len) as usize]);
                assert!(len == 0 || fragments.iter().all(|fragment| fragment.len > 0));
            }
        }
        assert_eq!(
            fragments(&region(10, 0, 7), 3, 4).map(|list| list.len()),
            Ok(1)
        );
    }

    proptest! {
        /// The fragments agree with a model of single bytes: the same addresses, absent bytes and
        /// unread blocks, and at most one fragment for each change of registration.
        #[test]
        fn parts_in_blocks_agree_with_bytes(
            lens in prop::collection::vec((1..6_u64, 0..3_u32, any::<bool>()), 1..40),
            cuts in prop::collection::vec(any::<bool>(), 40),
            unread: Option<u8>,
        ) {
            let mut at = 4096;
            let segments: Vec<_> = lens.iter().map(|&(len, rkey, jump)| {
                // registrations that touch the next one, or do not
                at += if jump { 10 } else { 0 };
                let segment = Segment { addr: RemoteAddr::new(at), len, rkey: Rkey::new(rkey), absent: rkey == 0 };
                at += len;
                segment
            }).collect();
            let mut firsts: Vec<_> = (0..segments.len()).filter(|i| *i == 0 || cuts[*i]).collect();
            firsts.dedup();
            let mut region = listed(&segments, &firsts, false);
            let bytes: Vec<(u64, u32)> =
                segments.iter().flat_map(|s| (0..s.len).map(|i| (s.addr.get() + i, s.rkey.get()))).collect();
            let unread = unread.map(|unread| usize::from(unread) % firsts.len());
            let hidden = unread.map(|unread| {
                let (place, end) = region.block(unread).unwrap();
                (unread, place.first..end)
            });
            if let Some(unread) = unread {
                region.blocks[unread].segments = Box::default();
            }
            let all = bytes.len() as u64;
            for offset in 0..all {
                for len in 1..=all - offset {
                    let range = &bytes[offset as usize..(offset + len) as usize];
                    let there = region.there(offset, len);
                    let absent = range.iter().position(|byte| byte.1 == 0).map(|at| offset + at as u64);
                    let first = hidden.as_ref().and_then(|(block, hidden)| {
                        let at = hidden.start.max(offset);
                        (at < hidden.end.min(offset + len)).then_some((*block, at))
                    });
                    match (absent, first) {
                        (Some(absent), Some((_, at))) if absent < at => prop_assert_eq!(there, There::Absent),
                        (_, Some((block, _))) => prop_assert_eq!(there, There::Unread(block)),
                        (Some(_), None) => prop_assert_eq!(there, There::Absent),
                        (None, None) => prop_assert_eq!(there, There::All),
                    }
                    if first.is_none() {
                        let fragments = fragments(&region, offset, len).unwrap();
                        let covered: Vec<_> =
                            fragments.iter().flat_map(|p| (0..p.len).map(|i| (p.addr.get() + i, p.rkey.get()))).collect();
                        prop_assert_eq!(&covered[..], range);
                        let changes = range.windows(2).filter(|b| b[1] != (b[0].0 + 1, b[0].1)).count();
                        let edges = if unread.is_some() { 2 } else { 0 };
                        prop_assert!(fragments.len() <= changes + 1 + edges);
                    }
                }
            }
        }
    }
}
