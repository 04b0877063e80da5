//! The entries of the cache: what is known of each registration, and who uses it.
//!
//! Entries are never freed before the cache, so a reader may look at one that belongs to another registration by
//! now: it finds out by the generation. What a reader learns it may rely on while it holds a reference.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicU32, AtomicU64, Mutex};

/// Entries per block, and blocks.
const BLOCK: usize = if cfg!(all(test, loom)) { 2 } else { 1 << 12 };
const BLOCKS: usize = 1 << 10;

/// No entry.
pub(super) const NONE: u32 = u32::MAX;

/// It stands in the list of those to be deregistered, or is free.
const QUEUED: u64 = 1 << 31;
/// It gives no reference any more.
const DEAD: u64 = 1 << 30;
const REFS: u64 = DEAD - 1;

/// Names a registration: index and generation. Never 0 for one that was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(pub(super) u64);

impl Word {
    fn new(index: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | (u64::from(index) + 1))
    }

    pub(super) fn index(self) -> Option<u32> {
        (self.0 as u32).checked_sub(1)
    }

    fn generation(self) -> u64 {
        self.0 >> 32
    }
}

/// One registration, or the place for one. A cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Entry {
    /// Generation in the upper half, QUEUED, DEAD, references.
    state: AtomicU64,
    /// The cache's clock when it was used last.
    stamp: AtomicU32,
    lkey: AtomicU32,
    start: AtomicU64,
    end: AtomicU64,
    /// In the list of zombies, or the free list.
    pub(super) next: AtomicU32,
    /// In the list for eviction: under the slow lock.
    pub(super) older: AtomicU32,
    pub(super) newer: AtomicU32,
    /// Its stamp when it went to the end of that list.
    pub(super) seen: AtomicU32,
    writable: AtomicU32,
}

impl Entry {
    fn new() -> Self {
        Self {
            state: AtomicU64::new(QUEUED | DEAD),
            stamp: AtomicU32::new(0),
            lkey: AtomicU32::new(0),
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            next: AtomicU32::new(NONE),
            older: AtomicU32::new(NONE),
            newer: AtomicU32::new(NONE),
            seen: AtomicU32::new(0),
            writable: AtomicU32::new(0),
        }
    }

    /// A free one becomes a registration, with one reference. Relaxed: the tree's words publish it.
    pub(super) fn begin(
        &self,
        index: u32,
        (start, end): (u64, u64),
        writable: bool,
        lkey: u32,
        clock: u32,
    ) -> Word {
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.lkey.store(lkey, Ordering::Relaxed);
        self.writable.store(u32::from(writable), Ordering::Relaxed);
        self.stamp.store(clock, Ordering::Relaxed);
        self.seen.store(clock, Ordering::Relaxed);
        // by addition: late readers count references up and down meanwhile
        let more = (1_u64 << 32).wrapping_sub(QUEUED | DEAD) + 1;
        let old = self.state.fetch_add(more, Ordering::Release);
        Word::new(index, (old.wrapping_add(more) >> 32) as u32)
    }

    /// Takes a reference on the registration that the word names, if it is live.
    #[inline]
    pub(super) fn acquire(&self, word: Word) -> bool {
        let old = self.state.fetch_add(1, Ordering::Acquire);
        if old >> 32 == word.generation() && old & DEAD == 0 {
            return true;
        }
        false
    }

    /// Gives a reference back. True: it was the last one of a dead registration, which the caller now queues.
    #[inline]
    pub(super) fn release(&self) -> bool {
        let left = self.state.fetch_sub(1, Ordering::Release) - 1;
        left & (DEAD | QUEUED) == DEAD && left & REFS == 0 && self.claim(left)
    }

    /// No reference is given from now on. True: there is none, and the caller now queues it.
    pub(super) fn kill(&self) -> bool {
        let state = self.state.fetch_or(DEAD, Ordering::AcqRel) | DEAD;
        state & (REFS | QUEUED) == 0 && self.claim(state)
    }

    /// One of those that see it dead and without references queues it. A late reader may come between; then that one
    /// sees the same when it gives its reference back.
    #[cold]
    fn claim(&self, state: u64) -> bool {
        self.state
            .compare_exchange(state, state | QUEUED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    #[inline]
    pub(super) fn covers(&self, start: u64, end: u64) -> bool {
        self.start.load(Ordering::Relaxed) <= start && end <= self.end.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn lkey(&self) -> u32 {
        self.lkey.load(Ordering::Relaxed)
    }

    pub(super) fn range(&self) -> (u64, u64) {
        let start = self.start.load(Ordering::Relaxed);
        (start, self.end.load(Ordering::Relaxed))
    }

    pub(super) fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Relaxed) != 0
    }

    /// It was used. Writes only what is not there yet.
    #[inline]
    pub(super) fn touch(&self, clock: u32) {
        if self.stamp.load(Ordering::Relaxed) != clock {
            self.stamp.store(clock, Ordering::Relaxed);
        }
    }

    pub(super) fn stamp(&self) -> u32 {
        self.stamp.load(Ordering::Relaxed)
    }

    /// The name of the live registration that it is.
    pub(super) fn word(&self, index: u32) -> Word {
        Word::new(index, (self.state.load(Ordering::Relaxed) >> 32) as u32)
    }
}

/// Entries that were made together, and the registrations beside them, which a hit doesn't look at.
#[derive(Debug)]
struct Block<M> {
    entries: Box<[Entry]>,
    owned: Box<[Mutex<Option<M>>]>,
}

/// All entries.
#[derive(Debug)]
pub(super) struct Pool<M> {
    blocks: Box<[OnceLock<Block<M>>]>,
}

impl<M> Pool<M> {
    pub(super) fn new() -> Self {
        Self {
            blocks: (0..BLOCKS).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Makes room for an index. Allocates. False: there are no more.
    pub(super) fn prepare(&self, index: u32) -> bool {
        let Some(block) = self.blocks.get(index as usize / BLOCK) else {
            return false;
        };
        block.get_or_init(|| Block {
            entries: (0..BLOCK).map(|_| Entry::new()).collect(),
            owned: (0..BLOCK).map(|_| Mutex::new(None)).collect(),
        });
        true
    }

    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&Entry> {
        let block = self.blocks.get(index as usize / BLOCK)?.get()?;
        block.entries.get(index as usize % BLOCK)
    }

    /// The registration itself.
    #[cfg(test)]
    pub(super) fn peek(&self, index: u32) -> Option<M>
    where
        M: Clone,
    {
        let block = self.blocks.get(index as usize / BLOCK)?.get()?;
        let owned = block.owned.get(index as usize % BLOCK)?.lock();
        owned.ok()?.clone()
    }

    /// Exchanges the registration itself: by who took the entry from the free list, or from the zombies.
    pub(super) fn replace(&self, index: u32, new: Option<M>) -> Option<M> {
        let block = self.blocks.get(index as usize / BLOCK)?.get()?;
        let mut owned = match block.owned.get(index as usize % BLOCK)?.lock() {
            Ok(owned) => owned,
            Err(poisoned) => poisoned.into_inner(),
        };
        std::mem::replace(&mut *owned, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun() -> (Entry, Word) {
        let entry = Entry::new();
        let word = entry.begin(5, (0, 4096), true, 77, 1);
        (entry, word)
    }

    #[test]
    fn the_last_reference_of_a_dead_one_queues_it_once() {
        let (entry, word) = begun();
        assert_eq!(word.index(), Some(5));
        assert!(entry.acquire(word));
        assert!(!entry.kill());
        assert!(!entry.kill());
        assert!(!entry.acquire(word)); // counted all the same
        assert!(!entry.release());
        assert!(!entry.release());
        assert!(entry.release());
        assert!(!entry.kill());
    }

    #[test]
    fn another_generation_gives_no_reference() {
        let (entry, word) = begun();
        assert!(!entry.release());
        assert!(entry.kill());
        // a late reader, over the beginning of the next one
        assert!(!entry.acquire(word));
        let next = entry.begin(5, (0, 8192), false, 78, 2);
        assert_ne!(word, next);
        assert!(!entry.acquire(word));
        assert!(!entry.release());
        assert!(!entry.release());
        assert!(entry.acquire(next));
        assert_eq!(entry.word(5), next);
    }

    #[test]
    fn an_entry_is_a_cache_line() {
        assert_eq!(size_of::<Entry>(), 64);
    }
}
