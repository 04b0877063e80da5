//! State protected by the cache's slow lock: the eviction list, the counts, and the ranges that are
//! being registered.
//!
//! Code under this lock does not allocate, free or call foreign code, because the monitor's thread
//! acquires the lock too.

use std::sync::atomic::Ordering;

use super::entry::{Entry, NONE, Pool};
use crate::sync::AtomicU32;

/// Maximum number of ranges that are registered for the cache at the same time.
const MAKING: usize = 32;

/// Maximum number of registrations that an eviction skips: used recently, or in use. Bounds the
/// time for which the monitor may wait for the lock.
pub(super) const CHANCES: usize = 64;

/// A miss whose registration was not cached: page and kind, and the count of misses at that time.
#[derive(Clone, Copy, Debug, Default)]
struct Missed {
    tag: u64,
    clock: u32,
}

/// Maximum number of remembered misses.
const MISSED: usize = 8192;

/// A range that is being registered.
#[derive(Clone, Copy, Debug, Default)]
struct Making {
    start: u64,
    end: u64,
    taken: bool,
    /// Whether the memory has changed since the registration began.
    spoilt: bool,
}

/// The state under the slow lock.
#[derive(Debug)]
pub(super) struct Slow {
    making: [Making; MAKING],
    /// Indexed by a hash of the tag. An entry contains the last miss with that hash.
    missed: Box<[Missed]>,
    /// First of the free list, linked by [`Entry::next`].
    free: u32,
    /// The first index that was never used.
    fresh: u32,
    oldest: u32,
    newest: u32,
    /// Number of live registrations.
    pub(super) live: usize,
    /// Number of all registrations: live ones, and dead ones with references.
    pub(super) count: usize,
    pub(super) bytes: u64,
}

fn get(link: &AtomicU32) -> u32 {
    link.load(Ordering::Relaxed)
}

fn set(link: &AtomicU32, to: u32) {
    link.store(to, Ordering::Relaxed);
}

impl Slow {
    /// The state of a cache of at most `count` registrations.
    pub(super) fn new(count: usize) -> Self {
        let missed = count.clamp(8, MISSED / 2) * 2;
        Self {
            missed: vec![Missed::default(); missed.next_power_of_two()].into(),
            making: [Making::default(); MAKING],
            free: NONE,
            fresh: 0,
            oldest: NONE,
            newest: NONE,
            live: 0,
            count: 0,
            bytes: 0,
        }
    }

    /// Whether a miss of a full cache may replace another registration: if the same page and kind
    /// missed before, and the number of misses since then is at most half the number of live
    /// registrations. A buffer that is used less often would be evicted before its next use, so
    /// caching it would only add cost.
    pub(super) fn admits(&mut self, tag: u64, clock: u32) -> bool {
        let hash = tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let at = hash as usize & (self.missed.len() - 1);
        let within = (self.live / 2).max(1) as u32;
        let Some(place) = self.missed.get_mut(at) else {
            return true;
        };
        let again = place.tag == tag && clock.wrapping_sub(place.clock) <= within;
        *place = if again {
            Missed::default()
        } else {
            Missed { tag, clock }
        };
        again
    }

    /// Records a range that is being registered. `None`: [`MAKING`] ranges are recorded.
    pub(super) fn begin(&mut self, start: u64, end: u64) -> Option<usize> {
        let at = self.making.iter().position(|making| !making.taken)?;
        *self.making.get_mut(at)? = Making {
            start,
            end,
            taken: true,
            spoilt: false,
        };
        Some(at)
    }

    /// Removes the record. Returns false if the memory has changed since.
    pub(super) fn finish(&mut self, at: usize) -> bool {
        match self.making.get_mut(at) {
            Some(making) => !std::mem::take(making).spoilt,
            None => false,
        }
    }

    /// Marks the recorded ranges that overlap a changed range.
    pub(super) fn spoil(&mut self, start: u64, end: u64) {
        for making in &mut self.making {
            making.spoilt |= making.taken && making.start < end && start < making.end;
        }
    }

    /// The index that [`Self::take`] returns next.
    pub(super) fn next(&self) -> u32 {
        if self.free == NONE {
            self.fresh
        } else {
            self.free
        }
    }

    /// Takes an index for a registration; `None` if its entry is not allocated.
    pub(super) fn take<M>(&mut self, pool: &Pool<M>) -> Option<u32> {
        let index = self.next();
        let entry = pool.get(index)?;
        if self.free == NONE {
            self.fresh += 1;
        } else {
            self.free = get(&entry.next);
        }
        Some(index)
    }

    /// Returns an index to the free list.
    pub(super) fn give_back(&mut self, index: u32, entry: &Entry) {
        set(&entry.next, self.free);
        self.free = index;
    }

    /// Appends an entry to the eviction list.
    pub(super) fn append<M>(&mut self, pool: &Pool<M>, index: u32, entry: &Entry) {
        set(&entry.older, self.newest);
        set(&entry.newer, NONE);
        set(&entry.seen, entry.stamp());
        match pool.get(self.newest) {
            Some(last) => set(&last.newer, index),
            None => self.oldest = index,
        }
        self.newest = index;
    }

    /// Removes an entry from the eviction list.
    pub(super) fn unlink<M>(&mut self, pool: &Pool<M>, entry: &Entry) {
        let (older, newer) = (get(&entry.older), get(&entry.newer));
        match pool.get(older) {
            Some(other) => set(&other.newer, newer),
            None => self.oldest = newer,
        }
        match pool.get(newer) {
            Some(other) => set(&other.older, older),
            None => self.newest = older,
        }
    }

    /// The registration to evict: the oldest that no operation uses and that was not used since it
    /// was last moved to the end of the list. After [`CHANCES`] others, the next one, or the first
    /// of these, that no operation uses. `None`: operations use all of these. The eviction of a
    /// registration in use would free nothing before the operation is complete.
    pub(super) fn victim<M>(&mut self, pool: &Pool<M>) -> Option<u32> {
        let mut idle = None;
        for _ in 0..self.live.min(CHANCES) {
            let index = self.oldest;
            let entry = pool.get(index)?;
            if !entry.is_used() {
                if entry.stamp() == get(&entry.seen) {
                    return Some(index);
                }
                idle = idle.or(Some(index));
            }
            self.unlink(pool, entry);
            self.append(pool, index, entry);
        }
        let next = pool.get(self.oldest)?;
        match next.is_used() {
            true => idle,
            false => Some(self.oldest),
        }
    }

    /// The index of the oldest registration.
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}
