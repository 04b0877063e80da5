//! The order of arrival of the unexpected messages.
//!
//! Messages have consecutive places in blocks of 64; a block has a bit for each place whose message
//! is listed. A removal clears a bit. It does not touch the neighbours, which a doubly linked list
//! would read from memory: the bits and links of 1,000,000 places have 250 KiB, which a near cache
//! holds.

use super::queues::NIL;
use crate::chunks::Chunks;

/// Places of a block.
const PLACES: u32 = u64::BITS;

#[derive(Clone, Copy, Debug)]
struct Block {
    /// Its places that are listed. Not 0, except in the last block.
    listed: u64,
    /// Neighbours in the order of arrival; `next` of a free block is the next free one.
    next: u32,
    prev: u32,
}

/// Entries in one order, appended at its end. An entry has the number of its place. Not thread
/// safe.
///
/// A block is free again when none of its places is listed. So one message that stays can keep a
/// block of 272 bytes.
#[derive(Debug)]
pub(super) struct ArrivalOrder {
    blocks: Chunks<Block>,
    /// The entry of each place, by block.
    entries: Chunks<[u32; PLACES as usize]>,
    free: u32,
    first: u32,
    last: u32,
    /// Places of the last block that were given, [`PLACES`] if there is no block.
    given: u32,
}

impl ArrivalOrder {
    /// An empty order, with memory for so many entries.
    pub(super) fn with_capacity(entries: usize) -> Self {
        let blocks = entries.div_ceil(PLACES as usize);
        Self {
            blocks: Chunks::with_capacity(blocks),
            entries: Chunks::in_huge_pages(blocks),
            free: NIL,
            first: NIL,
            last: NIL,
            given: PLACES,
        }
    }

    /// Appends an entry, and returns its place. Allocates if no block is free.
    #[inline]
    pub(super) fn push(&mut self, entry: u32) -> u32 {
        if self.given == PLACES {
            self.add_block();
        }
        let at = self.given;
        self.given += 1;
        self.blocks[self.last].listed |= 1 << at;
        self.entries[self.last][at as usize] = entry;
        self.last * PLACES + at
    }

    /// # Panics
    /// 2^26 blocks are in use: places have 32 bits. Their entries have 4 GiB at least.
    #[inline(never)]
    fn add_block(&mut self) {
        assert!(self.blocks.len() < u32::MAX / PLACES, "too many messages");
        let block = Block {
            listed: 0,
            next: NIL,
            prev: self.last,
        };
        let index = if self.free == NIL {
            self.entries.push([NIL; PLACES as usize]);
            self.blocks.push(block)
        } else {
            let index = self.free;
            self.free = self.blocks[index].next;
            self.blocks[index] = block;
            index
        };
        match self.last {
            NIL => self.first = index,
            last => self.blocks[last].next = index,
        }
        self.last = index;
        self.given = 0;
    }

    /// Removes the entry at this place.
    #[inline]
    pub(super) fn remove(&mut self, place: u32) {
        let index = place / PLACES;
        let block = &mut self.blocks[index];
        block.listed &= !(1 << (place % PLACES));
        if block.listed == 0 {
            self.free_block(index);
        }
    }

    /// Frees a block of which no place is listed any more. The last block is not freed: its places
    /// are used again from the first one on.
    #[inline(never)]
    fn free_block(&mut self, index: u32) {
        let Block { next, prev, .. } = self.blocks[index];
        if next == NIL {
            self.given = 0;
            return;
        }
        self.blocks[next].prev = prev;
        match prev {
            NIL => self.first = next,
            prev => self.blocks[prev].next = next,
        }
        self.blocks[index].next = std::mem::replace(&mut self.free, index);
    }

    /// The first entry, or [`NIL`].
    #[inline]
    pub(super) fn first(&self) -> u32 {
        match self.first {
            NIL => NIL,
            first => self.of_block(first, self.blocks[first].listed),
        }
    }

    /// The entry behind the one at this place, or [`NIL`].
    #[inline]
    pub(super) fn after(&self, place: u32) -> u32 {
        let (index, at) = (place / PLACES, place % PLACES);
        let block = &self.blocks[index];
        // the bits above this one; a shift by 64 has no result
        match block.listed & (u64::MAX << at << 1) {
            0 if block.next == NIL => NIL,
            0 => self.of_block(block.next, self.blocks[block.next].listed),
            rest => self.of_block(index, rest),
        }
    }

    /// The entry of the first of these places of a block. [`NIL`]: there is none.
    #[inline]
    fn of_block(&self, block: u32, places: u64) -> u32 {
        match places {
            0 => NIL,
            places => self.entries[block][places.trailing_zeros() as usize],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// The entries and their places, read from the first on.
    fn listed(arrivals: &ArrivalOrder, place_of: &[u32]) -> Vec<u32> {
        let mut found = Vec::new();
        let mut entry = arrivals.first();
        while entry != NIL {
            found.push(entry);
            entry = arrivals.after(place_of[entry as usize]);
        }
        found
    }

    /// Number of blocks that are in use.
    fn blocks(arrivals: &ArrivalOrder) -> usize {
        let index = |block: u32| (block != NIL).then_some(block);
        let next = |block: &u32| index(arrivals.blocks[*block].next);
        std::iter::successors(index(arrivals.first), next).count()
    }

    #[test]
    fn removals_in_any_order_leave_the_order() {
        for seed in 1..50_u64 {
            let mut random = seed;
            let mut next = move || {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random
            };
            let mut arrivals = ArrivalOrder::with_capacity(0);
            let mut place_of = Vec::new();
            let mut expected = Vec::new();
            for _ in 0..2000 {
                // more are added than removed, and then the opposite
                if next() % 100 < (seed % 9) * 10 + 10 || expected.is_empty() {
                    let entry = place_of.len() as u32;
                    place_of.push(arrivals.push(entry));
                    expected.push(entry);
                } else {
                    let entry = expected.remove(next() as usize % expected.len());
                    arrivals.remove(place_of[entry as usize]);
                }
                if next() % 16 == 0 {
                    assert_eq!(listed(&arrivals, &place_of), expected, "seed {seed}");
                }
            }
            for entry in expected.drain(..).rev() {
                arrivals.remove(place_of[entry as usize]);
            }
            assert_eq!(arrivals.first(), NIL);
            assert_eq!(blocks(&arrivals), 1, "seed {seed}");
        }
    }

    /// Entries that leave in their order, and one that stays, need a few blocks.
    #[test]
    fn blocks_are_used_again() {
        let mut arrivals = ArrivalOrder::with_capacity(0);
        let kept = arrivals.push(7);
        let mut waiting = VecDeque::new();
        for entry in 0..100_000 {
            waiting.push_back(arrivals.push(entry));
            if waiting.len() > 100 {
                waiting
                    .pop_front()
                    .into_iter()
                    .for_each(|place| arrivals.remove(place));
            }
        }
        assert!(arrivals.blocks.len() <= 5, "{}", arrivals.blocks.len());
        assert_eq!(arrivals.first(), 7);
        waiting.drain(..).for_each(|place| arrivals.remove(place));
        assert_eq!(arrivals.after(kept), NIL);
        arrivals.remove(kept);
        assert_eq!(arrivals.first(), NIL);
    }
}
