//! A hash table from a hash of 32 bits to the index of an entry. It grows by [`STEP`] slots per
//! change, so no call moves all slots.
//!
//! Open addressing with linear probing, at most half full. A slot has the whole hash, so an entry
//! is read only if the hash agrees. During growth the old table is read too: nothing is inserted
//! into it, and a slot that was moved or removed there is marked [`GONE`], so probing stays
//! correct.

use super::cost;

/// Slots of the old table that one insertion or removal moves. A table of `n` slots is replaced
/// when n/2 are in use, and the next one of 2n after n/2 further insertions, so 2 would suffice.
const STEP: usize = 4;
/// A slot of the old table whose entry was moved or removed.
const GONE: u64 = u32::MAX as u64;
/// Slots of a group. Hashes that differ in their lowest bits alone have the same line.
pub(super) const GROUP: u32 = 4;
/// Base-2 logarithm of the slots of the smallest table.
const FIRST: u32 = 4;

/// Slots with the hash in the upper half and the entry's index plus 1 in the lower half; 0 is free.
#[derive(Debug)]
struct Slots {
    /// 2^`log2` slots; none in a table that does not exist.
    slots: Box<[u64]>,
    log2: u32,
}

impl Slots {
    fn new(log2: u32) -> Self {
        Self {
            slots: vec![0; 1 << log2].into_boxed_slice(),
            log2,
        }
    }

    fn none() -> Self {
        Self {
            slots: Box::default(),
            log2: FIRST,
        }
    }

    /// The upper bits of the hash select a group of [`GROUP`] slots, a cache line; the lowest bits
    /// select the slot in it.
    #[inline]
    fn home(&self, hash: u32) -> usize {
        ((hash >> (32 - self.log2)) & !(GROUP - 1) | hash & (GROUP - 1)) as usize
    }

    /// The slot with this hash whose entry fulfils `is`, and its entry.
    #[inline]
    fn find(&self, hash: u32, is: impl Fn(u32) -> bool) -> Option<(usize, u32)> {
        let last = self.slots.len().checked_sub(1)?;
        let mut at = self.home(hash);
        loop {
            cost::slot();
            let slot = self.slots[at & last];
            if slot == 0 {
                return None;
            }
            let entry = (slot as u32).wrapping_sub(1);
            if (slot >> 32) as u32 == hash && slot != GONE && is(entry) {
                return Some((at & last, entry));
            }
            at += 1;
        }
    }

    /// Puts a slot at the first free place behind its home. Returns the place.
    fn put(&mut self, slot: u64) -> usize {
        let last = self.slots.len() - 1;
        let mut at = self.home((slot >> 32) as u32);
        while self.slots[at & last] != 0 {
            cost::slot();
            at += 1;
        }
        self.slots[at & last] = slot;
        at & last
    }

    /// Frees a slot, and moves the slots behind it that are then nearer to their home.
    fn free(&mut self, at: usize) {
        let last = self.slots.len() - 1;
        let mut gap = at;
        let mut next = at;
        loop {
            cost::slot();
            next = (next + 1) & last;
            let slot = self.slots[next];
            if slot == 0 {
                break;
            }
            let home = self.home((slot >> 32) as u32);
            if next.wrapping_sub(home) & last >= next.wrapping_sub(gap) & last {
                self.slots[gap] = slot;
                gap = next;
            }
        }
        self.slots[gap] = 0;
    }
}

fn slot(hash: u32, entry: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(entry + 1)
}

/// A slot of a table; valid until the table changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    at: usize,
    /// Whether it is a slot of the table that is being replaced.
    old: bool,
}

impl Place {
    /// No place.
    pub(super) const NONE: Self = Self { at: 0, old: false };
}

/// The table. Hashes may repeat, entries must not. Not thread safe.
#[derive(Debug)]
pub(super) struct Table {
    slots: Slots,
    /// The table that this one replaces, until all its slots are moved.
    old: Slots,
    /// Number of slots of `old` that were examined for moving.
    moved: usize,
    /// Number of entries in both.
    used: usize,
}

impl Table {
    /// A table that takes `entries` entries before it grows.
    pub(super) fn with_capacity(entries: usize) -> Self {
        let log2 = (entries.max(1) * 2).next_power_of_two().ilog2();
        Self {
            slots: Slots::new(log2.clamp(FIRST, 32)),
            old: Slots::none(),
            moved: 0,
            used: 0,
        }
    }

    /// The entry with this hash that fulfils `is`, and its place.
    #[inline]
    pub(super) fn find(&self, hash: u32, is: impl Fn(u32) -> bool) -> Option<(Place, u32)> {
        let place = |old| move |(at, entry)| (Place { at, old }, entry);
        let found = self.slots.find(hash, &is).map(place(false));
        found.or_else(|| self.old.find(hash, &is).map(place(true)))
    }

    /// Adds an entry. Returns its place. Allocates a table of twice the size if this one is half
    /// full.
    pub(super) fn insert(&mut self, hash: u32, entry: u32) -> Place {
        self.step();
        self.used += 1;
        if self.used * 2 > self.slots.slots.len() && self.slots.log2 < 32 {
            while !self.old.slots.is_empty() {
                self.step();
            }
            let larger = Slots::new(self.slots.log2 + 1);
            self.old = std::mem::replace(&mut self.slots, larger);
            self.moved = 0;
        }
        let at = self.slots.put(slot(hash, entry));
        Place { at, old: false }
    }

    /// The place of an entry.
    #[inline]
    pub(super) fn place(&self, hash: u32, entry: u32) -> Option<Place> {
        let found = self.find(hash, |found| found == entry);
        debug_assert!(found.is_some(), "entry {entry} is not in the table");
        found.map(|(place, _)| place)
    }

    /// Replaces the entry at a place by one with the same hash.
    #[inline(always)]
    pub(super) fn replace(&mut self, place: Place, by: u32) {
        let slots = if place.old {
            &mut self.old
        } else {
            &mut self.slots
        };
        let found = &mut slots.slots[place.at];
        *found = slot((*found >> 32) as u32, by);
    }

    /// Removes the entry at a place.
    #[inline]
    pub(super) fn remove(&mut self, place: Place) {
        if place.old {
            self.old.slots[place.at] = GONE;
        } else {
            self.slots.free(place.at);
        }
        self.used -= 1;
        self.step();
    }

    /// Moves the entries of the next [`STEP`] slots of the old table.
    #[inline]
    fn step(&mut self) {
        if self.old.slots.is_empty() {
            return;
        }
        for at in self.moved..self.moved + STEP {
            let slot = std::mem::replace(&mut self.old.slots[at], GONE);
            // a free slot stays free: probing ends there
            if slot == 0 {
                self.old.slots[at] = 0;
            } else if slot != GONE {
                self.slots.put(slot);
            }
        }
        self.moved += STEP;
        if self.moved == self.old.slots.len() {
            self.old = Slots::none();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn it_agrees_with_a_map_while_it_grows() {
        for bits in [32, 12, 4] {
            let mut table = Table::with_capacity(0);
            let mut map: HashMap<u32, u32> = HashMap::new();
            let mut state = 7_u64;
            for round in 0..60_000_u32 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let entry = (state >> 40) as u32 % 20_000;
                // few different hashes in the last case: long runs of one hash
                let hash =
                    |entry: u32| entry.wrapping_mul(0x9e37_79b9) >> (32 - bits) << (32 - bits);
                let growing = round < 30_000;
                if bits == 4 && map.len() > 300 && !map.contains_key(&entry) {
                    continue;
                }
                let present = map.contains_key(&entry);
                if present && !(growing && state & 1 == 0) {
                    map.remove(&entry);
                    let place = table.place(hash(entry), entry).unwrap();
                    table.remove(place);
                } else if !present {
                    map.insert(entry, hash(entry));
                    table.insert(hash(entry), entry);
                }
                let probe = (state >> 20) as u32 % 20_000;
                let found = table.find(hash(probe), |found| found == probe);
                assert_eq!(found.is_some(), map.contains_key(&probe));
            }
            assert_eq!(table.used, map.len());
            for (entry, hash) in &map {
                let found = table.find(*hash, |found| found == *entry);
                assert_eq!(found.map(|(_, entry)| entry), Some(*entry));
            }
            for (entry, hash) in map {
                let place = table.place(hash, entry).unwrap();
                table.remove(place);
            }
            assert_eq!(table.used, 0);
        }
    }

    #[test]
    fn growth_is_complete_before_the_next_growth() {
        let mut table = Table::with_capacity(0);
        for entry in 0..100_000_u32 {
            let full = (table.used + 1) * 2 > table.slots.slots.len();
            let left = table.old.slots.len().saturating_sub(table.moved);
            assert!(!full || left <= STEP, "{left} slots left at {entry}");
            table.insert(entry.wrapping_mul(0x9e37_79b9), entry);
        }
    }
}
