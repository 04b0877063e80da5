//! A long segment list at its owner: blocks in registered memory, and an index of the blocks.
//! `docs/protocol.md`, "Long segment lists".
//!
//! A change rewrites the blocks that cover it, and the index if blocks were added or removed. A
//! block has at most [`MOST_RECORDS`] segments; above that it is split. A block that has fewer than
//! [`SHORT`] after a change is joined with the next one if the two have at most [`FILL`]. So a
//! change of one segment among n writes 2 KiB, and about one change in 28 writes the index too, 24
//! bytes for each block.
//!
//! Peers read at any time. Published memory stays until the region ends, or is returned to the
//! caller, which keeps it until the peers have acknowledged the change.

use std::sync::Arc;

use rdma_core_sys as sys;

use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::verbs::{Pd, RemoteAddr, Rkey, Words};
use crate::wire::records::Segment;
use crate::wire::segment_list::{
    BLOCK_WORDS, BlockRef, HEAD, MAX_BLOCKS, MOST_RECORDS, SUM, encode_block, encode_index,
};

/// Segments of a new block; half as many more fit in before it is split.
const FILL: usize = MOST_RECORDS * 2 / 3;
/// A block with fewer segments is joined with the next one.
const SHORT: usize = MOST_RECORDS / 4;
/// Blocks of the first registration; each further one doubles the number of blocks.
const FIRST: usize = 4;
/// Maximum number of blocks of one registration: 8 MiB.
const MOST_AT_ONCE: usize = 4096;

/// A block in use.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Offset of its first byte in the region.
    first: u64,
    /// Number of segments.
    count: usize,
    place: (usize, usize),
}

/// The list of one region. Not thread safe: one thread at a time changes it.
#[derive(Debug)]
pub(super) struct List {
    pd: Arc<Pd>,
    generation: u64,
    /// Length of the region in bytes.
    len: u64,
    /// In ascending order of offsets, without gaps.
    blocks: Vec<Block>,
    pool: Vec<Words>,
    /// Free blocks: index of the registration in `pool`, and of the block in it.
    free: Vec<(usize, usize)>,
    index: Words,
    /// A larger index for the next write of the index.
    larger: Option<Words>,
}

/// The words of an index of so many blocks, rounded up: a peer reads [`BLOCK_WORDS`] words at a
/// time, which must lie inside the registration.
fn index_words(blocks: usize) -> usize {
    (HEAD + 3 * blocks).next_multiple_of(BLOCK_WORDS)
}

impl List {
    /// A list of a region of `len` bytes with room for `segments` segments. It publishes nothing
    /// before [`Self::update`]. Blocks and allocates.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub(super) fn new(pd: &Arc<Pd>, generation: u64, len: u64, segments: usize) -> Result<Self> {
        let blocks = segments.div_ceil(FILL) + 2;
        let rights = sys::IBV_ACCESS_REMOTE_READ;
        let mut this = Self {
            index: Words::new(pd, index_words(blocks), rights)?,
            pd: Arc::clone(pd),
            generation,
            len,
            blocks: Vec::new(),
            pool: Vec::new(),
            free: Vec::new(),
            larger: None,
        };
        this.reserve(segments, 1)?;
        Ok(this)
    }

    /// Reserves room for `more` segments in `ranges` ranges, so that the next update cannot fail.
    ///
    /// # Errors
    /// `ENOMEM`: the list would exceed [`MAX_BLOCKS`], the maximum that peers accept. Those of
    /// registering memory. The published list has not changed.
    pub(super) fn reserve(&mut self, more: usize, ranges: usize) -> Result<()> {
        let ranges = if self.is_dense(ranges) { 1 } else { ranges };
        // each range may split the blocks at both of its ends
        let wanted = more.div_ceil(FILL) + 2 * ranges;
        let blocks = self.blocks.len() + wanted;
        if blocks > MAX_BLOCKS {
            warn_log!(
                Mr,
                "the segment list of a region of {} bytes needs {blocks} blocks; \
                 peers read at most {MAX_BLOCKS}",
                self.len
            );
            return Err(FiErrno::ENOMEM);
        }
        let rights = sys::IBV_ACCESS_REMOTE_READ;
        while self.free.len() < wanted {
            let all: usize = self
                .pool
                .iter()
                .map(|words| words.len() / BLOCK_WORDS)
                .sum();
            let count = all.clamp(FIRST, MOST_AT_ONCE);
            let words = Words::new(&self.pd, count * BLOCK_WORDS, rights)?;
            let registration = self.pool.len();
            self.pool.push(words);
            self.free
                .extend((0..count).rev().map(|block| (registration, block)));
        }
        if self.index_room() < blocks {
            let words = index_words(blocks).max(self.index.len() * 2);
            self.larger = Some(Words::new(&self.pd, words, rights)?);
        }
        Ok(())
    }

    /// Address and rkey of the index.
    pub(super) fn at(&self) -> (RemoteAddr, Rkey) {
        (self.index.remote_addr(0), self.index.rkey())
    }

    /// Whether the region has one segment.
    pub(super) fn is_short(&self) -> bool {
        matches!(*self.blocks, [Block { count: 1, .. }])
    }

    /// The number of blocks that the index has room for when it is written next.
    fn index_room(&self) -> usize {
        let words = self.larger.as_ref().unwrap_or(&self.index).len();
        ((words - HEAD) / 3).min(MAX_BLOCKS)
    }

    /// Whether an update of so many ranges is done as one update from the first to the last of
    /// them. There are then about 4 blocks for each range, so the update walks over about 336
    /// segments for each.
    fn is_dense(&self, ranges: usize) -> bool {
        ranges > 1 && ranges >= self.blocks.len() / 4
    }

    /// Publishes the segments of these ranges, pairs of offsets in the region; the first update
    /// must be of the whole region. `walk` returns the segments of a range. The caller has
    /// [reserved](Self::reserve) the room. Returns the index that a larger one has replaced; peers
    /// may still read it.
    pub(super) fn update(
        &mut self,
        ranges: &[(u64, u64)],
        walk: impl Fn(u64, u64) -> Vec<Segment>,
    ) -> Option<Words> {
        let mut changed = false;
        if self.is_dense(ranges.len()) {
            let start = ranges.iter().map(|range| range.0).min()?;
            let end = ranges.iter().map(|range| range.1).max()?;
            changed = self.update_one(start, end, &walk);
        } else {
            for &(start, end) in ranges {
                changed |= self.update_one(start, end, &walk);
            }
        }
        if changed { self.write_index() } else { None }
    }

    /// Updates one range; returns whether the index must be written.
    fn update_one(
        &mut self,
        start: u64,
        end: u64,
        walk: &impl Fn(u64, u64) -> Vec<Segment>,
    ) -> bool {
        let containing = |offset: u64| {
            let behind = self.blocks.partition_point(|block| block.first <= offset);
            behind.saturating_sub(1)
        };
        let first = containing(start);
        let mut behind = (containing(end.saturating_sub(1)) + 1).min(self.blocks.len());
        let from = self.blocks.get(first).map_or(0, |block| block.first);
        let end_of = |blocks: &[Block], behind: usize| {
            blocks.get(behind).map_or(self.len, |block| block.first)
        };
        let mut segments = walk(from, end_of(&self.blocks, behind));
        if segments.len() < SHORT
            && let Some(next) = self.blocks.get(behind)
            && segments.len() + next.count <= FILL
        {
            behind += 1;
            segments = walk(from, end_of(&self.blocks, behind));
        }
        if behind == first + 1 && segments.len() <= MOST_RECORDS {
            self.blocks[first].count = segments.len();
            self.write(&self.blocks[first], &segments);
            return false;
        }
        let before: Vec<_> = self.blocks[first..behind]
            .iter()
            .map(|block| block.place)
            .collect();
        self.free.extend(before.iter().rev());
        let least = segments.len().div_ceil(MOST_RECORDS).max(1);
        // the reserved blocks suffice for `least`
        let others = self.blocks.len() - before.len();
        let room = self
            .free
            .len()
            .min(self.index_room().saturating_sub(others));
        let count = segments.len().div_ceil(FILL).min(room).max(least);
        let each = segments.len().div_ceil(count).max(1);
        let mut new = Vec::with_capacity(count);
        let mut offset = from;
        for segments in segments.chunks(each) {
            // the caller has reserved the room
            let Some(place) = self.free.pop() else { break };
            let block = Block {
                first: offset,
                count: segments.len(),
                place,
            };
            self.write(&block, segments);
            new.push(block);
            offset += segments.iter().map(|segment| segment.len).sum::<u64>();
        }
        self.blocks.splice(first..behind, new);
        true
    }

    fn write(&self, block: &Block, segments: &[Segment]) {
        let words = encode_block(self.generation, block.first, segments);
        let (registration, at) = block.place;
        self.pool[registration].rewrite(at * BLOCK_WORDS, &words, SUM);
    }

    fn write_index(&mut self) -> Option<Words> {
        let places = self.blocks.iter().map(|block| {
            let (registration, at) = block.place;
            let words = &self.pool[registration];
            BlockRef {
                first: block.first,
                addr: words.remote_addr(at * BLOCK_WORDS),
                rkey: words.rkey(),
            }
        });
        let words = encode_index(self.generation, places);
        let mut old = None;
        if words.len() > self.index.len()
            && let Some(larger) = self.larger.take()
        {
            old = Some(std::mem::replace(&mut self.index, larger));
        }
        self.index.rewrite(0, &words, SUM);
        old
    }

    /// All memory that peers may still read.
    pub(super) fn into_words(self) -> Vec<Words> {
        let mut all = self.pool;
        all.push(self.index);
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::verbs::devices;
    use crate::wire::segment_list::{IndexReader, decode_block};

    const PAGES: usize = 4000;

    /// The segments of a range of pages, adjacent equal ones merged; rkey 0 is absent.
    fn walk(model: &[u32], from: u64, to: u64) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for (page, rkey) in model
            .iter()
            .enumerate()
            .take(to as usize)
            .skip(from as usize)
        {
            match segments.last_mut() {
                Some(last) if last.rkey.get() == *rkey => last.len += 1,
                _ => segments.push(Segment {
                    addr: RemoteAddr::new(page as u64),
                    len: 1,
                    rkey: Rkey::new(*rkey),
                    absent: *rkey == 0,
                }),
            }
        }
        segments
    }

    /// Reads the list as a peer does; returns each page's rkey.
    fn read(list: &List, generation: u64) -> Vec<u32> {
        let len = PAGES as u64;
        let mut reader = IndexReader::new(generation, len);
        let places = loop {
            let (at, count) = (reader.read(), reader.wants());
            let words: Vec<_> = (at..at + count).map(|at| list.index.load(at)).collect();
            if let Some(places) = reader.feed(&words).unwrap() {
                break places;
            }
        };
        let mut pages = Vec::new();
        for (i, place) in places.iter().enumerate() {
            let block = list.blocks[i].place;
            let words = &list.pool[block.0];
            assert_eq!(place.addr, words.remote_addr(block.1 * BLOCK_WORDS));
            let words: [u64; BLOCK_WORDS] = words.read(block.1 * BLOCK_WORDS);
            let end = places.get(i + 1).map_or(len, |next| next.first);
            for at in &decode_block(&words, generation, place.first, end).unwrap() {
                assert_eq!(at.offset, at.segment.addr.get());
                pages.extend((0..at.segment.len).map(|_| at.segment.rkey.get()));
            }
        }
        pages
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
        /// After any changes a peer reads the state of the model, and no block has too many
        /// segments.
        #[test]
        fn it_agrees_with_a_model(
            steps in prop::collection::vec((0..PAGES, 1..PAGES, 0..4_u32, 1..6_usize, any::<bool>()), 1..60)
        ) {
            let device = devices(&[softverbs::backend()], false).remove(0);
            let domain = Domain::open(&device, DomainConfig::default()).unwrap();
            let mut model = vec![0; PAGES];
            let mut list = List::new(domain.pd(), 3, PAGES as u64, 1).unwrap();
            list.update(&[(0, PAGES as u64)], |from, to| walk(&model, from, to));
            prop_assert!(list.is_short());
            for (start, len, kind, step, several) in steps {
                let end = (start + len / 1.max(4 * kind as usize)).clamp(start + 1, PAGES);
                // either one rkey for all pages, or a different one for each
                for page in (start..end).step_by(step) {
                    model[page] = if kind == 0 { 0 } else if kind == 1 { 9 } else { page as u32 + 10 };
                }
                let ranges: Vec<_> = match several {
                    true => (start..end).step_by(step).map(|at| (at as u64, at as u64 + 1)).collect(),
                    false => vec![(start as u64, end as u64)],
                };
                list.reserve(2 * (end - start) + 2, ranges.len()).unwrap();
                list.update(&ranges, |from, to| walk(&model, from, to));
                prop_assert_eq!(&read(&list, 3), &model);
                let segments: usize = list.blocks.iter().map(|block| block.count).sum();
                prop_assert!(list.blocks.iter().all(|block| block.count <= MOST_RECORDS));
                prop_assert!(segments >= walk(&model, 0, PAGES as u64).len());
            }
            // the whole region at once: to one segment, and from one to many
            list.reserve(2, 1).unwrap();
            list.update(&[(0, PAGES as u64)], |from, to| walk(&[1; PAGES], from, to));
            prop_assert!(list.is_short(), "one segment, one block");
            let apart: Vec<_> = (1..=PAGES as u32).collect();
            list.reserve(PAGES, 1).unwrap();
            list.update(&[(0, PAGES as u64)], |from, to| walk(&apart, from, to));
            prop_assert_eq!(&read(&list, 3), &apart);
            let mut made = List::new(domain.pd(), 3, PAGES as u64, PAGES).unwrap();
            made.update(&[(0, PAGES as u64)], |from, to| walk(&apart, from, to));
            prop_assert_eq!(&read(&made, 3), &apart);
        }
    }
}
