//! The entries of the cache: one registration each, with its references.
//!
//! Entries are freed only with the cache, so a reader may access an entry that has been reused for
//! another registration. It detects this by the generation. The fields do not change while the
//! reader holds a reference.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicU32, AtomicU64, Mutex};

/// Entries per block, and number of blocks.
const BLOCK: usize = if cfg!(all(test, loom)) { 2 } else { 1 << 12 };
const BLOCKS: usize = 1 << 10;

/// Index that refers to no entry.
pub(super) const NONE: u32 = u32::MAX;

/// The entry is queued for deregistration, or free.
const QUEUED: u64 = 1 << 31;
/// The entry gives no new references.
const DEAD: u64 = 1 << 30;
const REFS: u64 = DEAD - 1;

/// Identifies a registration by index and generation. Not 0 for a published registration.
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

/// One registration, or a free entry. Occupies one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Entry {
    /// Generation in the upper half, QUEUED, DEAD, references.
    state: AtomicU64,
    /// The cache's clock at the last use.
    stamp: AtomicU32,
    key: AtomicU32,
    start: AtomicU64,
    end: AtomicU64,
    /// Link in the list of zombies, or in the free list.
    pub(super) next: AtomicU32,
    /// Links in the eviction list; protected by the slow lock.
    pub(super) older: AtomicU32,
    pub(super) newer: AtomicU32,
    /// The stamp when the entry was last moved to the end of the eviction list.
    pub(super) seen: AtomicU32,
    writable: AtomicU32,
}

impl Entry {
    fn new() -> Self {
        Self {
            state: AtomicU64::new(QUEUED | DEAD),
            stamp: AtomicU32::new(0),
            key: AtomicU32::new(0),
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            next: AtomicU32::new(NONE),
            older: AtomicU32::new(NONE),
            newer: AtomicU32::new(NONE),
            seen: AtomicU32::new(0),
            writable: AtomicU32::new(0),
        }
    }

    /// Initializes a free entry for a registration with one reference. The stores are relaxed,
    /// because the tree's words publish the entry.
    pub(super) fn begin(
        &self,
        index: u32,
        (start, end): (u64, u64),
        writable: bool,
        key: u32,
        clock: u32,
    ) -> Word {
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.key.store(key, Ordering::Relaxed);
        self.writable.store(u32::from(writable), Ordering::Relaxed);
        self.stamp.store(clock, Ordering::Relaxed);
        self.seen.store(clock, Ordering::Relaxed);
        // an addition, because readers with an old word may concurrently change the reference count
        let more = (1_u64 << 32).wrapping_sub(QUEUED | DEAD) + 1;
        let old = self.state.fetch_add(more, Ordering::Release);
        Word::new(index, (old.wrapping_add(more) >> 32) as u32)
    }

    /// Acquires a reference if the word's registration is live. Increments the count in either
    /// case; the caller releases the reference.
    #[inline]
    pub(super) fn acquire(&self, word: Word) -> bool {
        let old = self.state.fetch_add(1, Ordering::Acquire);
        if old >> 32 == word.generation() && old & DEAD == 0 {
            return true;
        }
        false
    }

    /// Releases a reference. Returns true if it was the last one of a dead registration, which the
    /// caller must queue.
    #[inline]
    pub(super) fn release(&self) -> bool {
        let left = self.state.fetch_sub(1, Ordering::Release) - 1;
        left & (DEAD | QUEUED) == DEAD && left & REFS == 0 && self.claim(left)
    }

    /// Whether an operation has a reference.
    pub(super) fn is_used(&self) -> bool {
        self.state.load(Ordering::Relaxed) & REFS != 0
    }

    /// Marks the registration dead, so that it gets no new references. Returns true if it has no
    /// references; the caller must then queue it.
    pub(super) fn kill(&self) -> bool {
        let state = self.state.fetch_or(DEAD, Ordering::AcqRel) | DEAD;
        state & (REFS | QUEUED) == 0 && self.claim(state)
    }

    /// Selects one of the threads that find the entry dead and without references; that thread
    /// queues it. If a reader with an old word changes the count meanwhile, that reader finds the
    /// same state when it releases its reference.
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
    pub(super) fn key(&self) -> u32 {
        self.key.load(Ordering::Relaxed)
    }

    pub(super) fn range(&self) -> (u64, u64) {
        let start = self.start.load(Ordering::Relaxed);
        (start, self.end.load(Ordering::Relaxed))
    }

    pub(super) fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Relaxed) != 0
    }

    /// Records a use. Writes only if the stamp changes.
    #[inline]
    pub(super) fn touch(&self, clock: u32) {
        if self.stamp.load(Ordering::Relaxed) != clock {
            self.stamp.store(clock, Ordering::Relaxed);
        }
    }

    pub(super) fn stamp(&self) -> u32 {
        self.stamp.load(Ordering::Relaxed)
    }

    /// The word of the entry's live registration.
    pub(super) fn word(&self, index: u32) -> Word {
        Word::new(index, (self.state.load(Ordering::Relaxed) >> 32) as u32)
    }
}

/// A block of entries and their registrations. A hit accesses only the entries.
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

    /// Allocates the block of an index. Returns false if the index exceeds the limit.
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

    /// Exchanges the registration itself. The caller has taken the entry from the free list or from
    /// the zombies.
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
        assert!(!entry.acquire(word)); // the count is incremented nevertheless
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
        // a reader with the old word, while the entry is reused
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
