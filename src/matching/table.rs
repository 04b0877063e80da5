//! A hash table from a hash of 32 bits to the index of an entry. It grows by one line per change,
//! so no call moves all slots.
//!
//! Open addressing, at most half full. A line, which is a cache line, has 8 slots, and all of them
//! are compared at once. An entry is in the line of its hash, or, if that was full, in the next one
//! that was not. Each line has a count of the entries that were put past it and are present, so a
//! search ends at the first line whose count is 0. The counts of 1,000,000 entries have 256 KiB,
//! which a near cache holds: which lines are read is certain before the first of them comes from
//! memory. A slot has the whole hash, so an entry is read only if the hash agrees.
//!
//! During growth the old table is read too, and nothing is inserted into it.

#![allow(unsafe_code, reason = "lines of zeros, and SSE2")]

use super::cost;
use crate::pages::{Zero, Zeroed, prefetch};

/// Slots of a line.
const SLOTS: usize = 8;
/// Hashes that differ in their lowest bits alone, so many of them, have a pair of lines, half of
/// them each.
pub(super) const GROUP: u32 = 8;
/// Base-2 logarithm of the lines of the smallest table.
const FIRST: u32 = 1;
/// As above, of the largest one: 2^32 slots.
const LAST: u32 = 29;
/// Base-2 logarithm of the lines of a table of 512 KiB, half of a usual second-level cache.
const FAR: u32 = 13;

/// A count of entries that is not exact: they are more, or were.
const MANY: u8 = u8::MAX;

/// A cache line of slots.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line {
    /// Has no meaning in a free slot.
    hashes: [u32; SLOTS],
    /// The entry's index plus 1; 0: the slot is free.
    entries: [u32; SLOTS],
}

// SAFETY: an array of words, of one line.
unsafe impl Zero for Line {}

/// A bit for each of the numbers that is equal to `to`.
#[inline(always)]
fn equal(numbers: &[u32; SLOTS], to: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has SSE2.
    return unsafe { equal_at_once(numbers, to) };
    #[cfg(not(target_arch = "x86_64"))]
    equal_in_turn(numbers, to)
}

/// As [`equal`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
#[inline]
fn equal_at_once(numbers: &[u32; SLOTS], to: u32) -> u32 {
    use std::arch::x86_64::{
        _mm_cmpeq_epi32, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32, _mm_set_epi32,
        _mm_set1_epi32, _mm_setzero_si128,
    };
    let [a, b, c, d, e, f, g, h] = numbers.map(u32::cast_signed);
    let to = _mm_set1_epi32(to.cast_signed());
    let low = _mm_cmpeq_epi32(_mm_set_epi32(d, c, b, a), to);
    let high = _mm_cmpeq_epi32(_mm_set_epi32(h, g, f, e), to);
    let bytes = _mm_packs_epi16(_mm_packs_epi32(low, high), _mm_setzero_si128());
    _mm_movemask_epi8(bytes).cast_unsigned()
}

/// As [`equal`].
#[cfg(any(test, not(target_arch = "x86_64")))]
fn equal_in_turn(numbers: &[u32; SLOTS], to: u32) -> u32 {
    let bits = numbers.iter().enumerate();
    bits.fold(0, |bits, (i, number)| bits | u32::from(*number == to) << i)
}

#[derive(Debug)]
struct Slots {
    /// 2^`log2` lines; none in a table that does not exist.
    lines: Zeroed<Line>,
    /// For each line: how many entries of this line, and of those before it, are behind it. From
    /// [`MANY`] on it does not change.
    passed: Zeroed<u8>,
    log2: u32,
}

/// As [`Slots::home`], of a table of 2^`log2` lines.
#[inline(always)]
fn home(log2: u32, hash: u32) -> usize {
    ((hash >> (32 - log2)) & !1 | (hash / (GROUP / 2)) & 1) as usize
}

impl Slots {
    fn new(log2: u32) -> Self {
        let lines = 1 << log2;
        Self {
            lines: Zeroed::new(lines),
            passed: Zeroed::new(lines),
            log2,
        }
    }

    const NONE: Self = Self {
        lines: Zeroed::NONE,
        passed: Zeroed::NONE,
        log2: FIRST,
    };

    /// Number of slots.
    fn len(&self) -> usize {
        self.lines.len() * SLOTS
    }

    /// The line of a hash: its upper bits select the pair, and the highest one of the group's bits
    /// the line in it. A larger table has the same order, so the lines that growth fills are
    /// neighbours.
    #[inline(always)]
    fn home(&self, hash: u32) -> usize {
        home(self.log2, hash)
    }

    /// The slot with this hash whose entry fulfils `is`, and its entry.
    #[inline(always)]
    fn find(&self, hash: u32, is: impl Fn(u32) -> bool) -> Option<(usize, u32)> {
        let last = self.lines.len().checked_sub(1)?;
        let home = self.home(hash);
        let mut at = home;
        loop {
            cost::line();
            let line = &self.lines[at];
            let mut same = equal(&line.hashes, hash);
            while same != 0 {
                let slot = same.trailing_zeros() as usize % SLOTS;
                let entry = line.entries[slot];
                if entry != 0 && is(entry - 1) {
                    return Some((at * SLOTS + slot, entry - 1));
                }
                same &= same - 1;
            }
            if self.passed[at] == 0 {
                return None;
            }
            at = (at + 1) & last;
            // all counts may be set: lines that were full in turn
            if at == home {
                return None;
            }
        }
    }

    /// Puts an entry into the first free slot of its line, or of the next one that is not full.
    /// Returns the slot.
    #[inline]
    fn put(&mut self, hash: u32, entry: u32) -> usize {
        let last = self.lines.len() - 1;
        let mut at = self.home(hash);
        loop {
            cost::line();
            let line = &mut self.lines[at];
            let free = equal(&line.entries, 0);
            if free != 0 {
                let slot = free.trailing_zeros() as usize % SLOTS;
                line.hashes[slot] = hash;
                line.entries[slot] = entry + 1;
                return at * SLOTS + slot;
            }
            self.passed[at] = self.passed[at].saturating_add(1);
            at = (at + 1) & last;
        }
    }

    /// Frees a slot.
    #[inline(always)]
    fn free(&mut self, at: usize) {
        let number = at / SLOTS;
        let Some(line) = self.lines.get_mut(number) else {
            return;
        };
        line.entries[at % SLOTS] = 0;
        let home = home(self.log2, line.hashes[at % SLOTS]);
        if home != number {
            self.came_back(home, number);
        }
    }

    /// An entry of the line `home` was removed from another one.
    #[inline(never)]
    fn came_back(&mut self, home: usize, from: usize) {
        let mut passed = home;
        while passed != from {
            let count = &mut self.passed[passed];
            if *count != MANY {
                *count -= 1;
            }
            passed = (passed + 1) & (self.lines.len() - 1);
        }
    }
}

/// A slot of a table; valid until the table changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotRef {
    at: usize,
    /// Whether it is a slot of the table that is being replaced.
    old: bool,
}

impl SlotRef {
    /// No place.
    pub(super) const NONE: Self = Self { at: 0, old: false };
}

/// The table. Hashes may repeat, entries must not. Not thread safe.
#[derive(Debug)]
pub(super) struct Table {
    slots: Slots,
    /// The table that this one replaces, until all its slots are moved.
    old: Slots,
    /// Number of lines of `old` whose entries were moved.
    moved: usize,
    /// Number of entries in both.
    used: usize,
}

impl Table {
    /// A table that takes `entries` entries before it grows.
    pub(super) fn with_capacity(entries: usize) -> Self {
        let lines = (entries * 2).div_ceil(SLOTS).next_power_of_two();
        Self {
            slots: Slots::new(lines.ilog2().clamp(FIRST, LAST)),
            old: Slots::NONE,
            moved: 0,
            used: 0,
        }
    }

    /// Whether its lines are probably in no near cache.
    #[inline(always)]
    pub(super) fn is_far(&self) -> bool {
        self.slots.log2 >= FAR
    }

    /// Has the lines of the group of a hash read, which will be searched soon.
    #[inline(always)]
    pub(super) fn prefetch(&self, hash: u32) {
        let home = self.slots.home(hash);
        prefetch(&self.slots.lines[home]);
        prefetch(&self.slots.lines[home ^ 1]);
    }

    /// The entry with this hash that fulfils `is`, and its place.
    #[inline(always)]
    pub(super) fn find(&self, hash: u32, is: impl Fn(u32) -> bool) -> Option<(SlotRef, u32)> {
        let place = |(at, entry)| (SlotRef { at, old: false }, entry);
        let found = self.slots.find(hash, &is).map(place);
        if found.is_some() || self.old.lines.is_empty() {
            return found;
        }
        self.find_old(hash, is)
    }

    #[inline(never)]
    fn find_old(&self, hash: u32, is: impl Fn(u32) -> bool) -> Option<(SlotRef, u32)> {
        let (at, entry) = self.old.find(hash, is)?;
        let old = true;
        Some((SlotRef { at, old }, entry))
    }

    /// Adds an entry. Returns its place. Allocates a table of twice the size if this one is half
    /// full.
    pub(super) fn insert(&mut self, hash: u32, entry: u32) -> SlotRef {
        self.step();
        self.used += 1;
        if self.used * 2 > self.slots.len() && self.slots.log2 < LAST {
            while !self.old.lines.is_empty() {
                self.step();
            }
            let larger = Slots::new(self.slots.log2 + 1);
            self.old = std::mem::replace(&mut self.slots, larger);
            self.moved = 0;
        }
        let at = self.slots.put(hash, entry);
        SlotRef { at, old: false }
    }

    /// The place of an entry.
    #[inline]
    pub(super) fn place(&self, hash: u32, entry: u32) -> Option<SlotRef> {
        let found = self.find(hash, |found| found == entry);
        debug_assert!(found.is_some(), "entry {entry} is not in the table");
        found.map(|(place, _)| place)
    }

    /// Replaces the entry at a place by one with the same hash.
    #[inline(always)]
    pub(super) fn replace(&mut self, place: SlotRef, by: u32) {
        let slots = if place.old {
            &mut self.old
        } else {
            &mut self.slots
        };
        slots.lines[place.at / SLOTS].entries[place.at % SLOTS] = by + 1;
    }

    /// Removes the entry at a place.
    #[inline(always)]
    pub(super) fn remove(&mut self, place: SlotRef) {
        if place.old {
            self.old.lines[place.at / SLOTS].entries[place.at % SLOTS] = 0;
        } else {
            self.slots.free(place.at);
        }
        self.used -= 1;
        self.step();
    }

    /// Moves the entries of the next line of the old table. A table of n slots is replaced when n/2
    /// are in use, and the next one of 2n after n/2 further insertions, so every fourth call would
    /// suffice.
    #[inline(always)]
    fn step(&mut self) {
        if !self.old.lines.is_empty() {
            self.move_line();
        }
    }

    #[cold]
    fn move_line(&mut self) {
        let line = &mut self.old.lines[self.moved];
        let entries = std::mem::take(&mut line.entries);
        for (hash, entry) in line.hashes.into_iter().zip(entries) {
            if entry != 0 {
                self.slots.put(hash, entry - 1);
            }
        }
        self.moved += 1;
        if self.moved == self.old.lines.len() {
            self.old = Slots::NONE;
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
            let full = (table.used + 1) * 2 > table.slots.len();
            let left = table.old.lines.len().saturating_sub(table.moved);
            assert!(!full || left <= 1, "{left} lines left at {entry}");
            table.insert(entry.wrapping_mul(0x9e37_79b9), entry);
        }
    }

    #[test]
    fn slots_are_compared_at_once_as_in_turn() {
        for i in 0..256_u32 {
            let numbers = std::array::from_fn(|slot| i >> slot & 1 ^ 0x8000_0001);
            for to in [0x8000_0000, 0x8000_0001, 0, u32::MAX] {
                assert_eq!(equal(&numbers, to), equal_in_turn(&numbers, to));
            }
            assert_eq!(equal(&numbers, 0x8000_0000), i);
        }
    }

    /// Entries behind full lines are found, also around the end of the table, and after removals
    /// from these lines. Removing all of them leaves no count.
    #[test]
    fn entries_behind_full_lines_are_found() {
        // all hashes are of the last two of 16 lines, so runs go around the end
        let hash = |entry: u32| 0xe000_0000 | entry.wrapping_mul(0x9e37_79b9) >> 3;
        let mut state = 1_u32;
        let mut table = Table::with_capacity(64);
        let mut present = Vec::new();
        for round in 0..20_000_u32 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let full = present.len() == 60 || round > 19_000;
            if !present.is_empty() && (full || state >> 31 == 0) {
                let entry = present.swap_remove(state as usize % present.len());
                let place = table.place(hash(entry), entry).unwrap();
                table.remove(place);
            } else if round < 19_000 {
                table.insert(hash(round), round);
                present.push(round);
            }
            for entry in &present {
                assert!(table.place(hash(*entry), *entry).is_some());
            }
        }
        assert_eq!((present.len(), table.slots.lines.len()), (0, 16));
        assert!(table.slots.passed.iter().all(|count| *count == 0));
    }

    /// Each line in turn is full, has an entry put past it, and becomes nearly empty.
    #[test]
    fn a_search_ends_although_each_line_was_passed() {
        let mut table = Table::with_capacity(16);
        assert_eq!(table.slots.lines.len(), 4);
        let mut entry = 0;
        for home in 0..4_u32 {
            let hash = (home >> 1) << 31 | (home & 1) << 2;
            let mut added = Vec::new();
            // until one is put past the line
            while table.slots.passed[home as usize] == 0 {
                table.insert(hash, entry);
                added.push(entry);
                entry += 1;
            }
            added.pop();
            for entry in added {
                let place = table.place(hash, entry).unwrap();
                table.remove(place);
            }
        }
        assert!(table.slots.passed.iter().all(|count| *count != 0));
        assert_eq!((table.used, table.slots.lines.len()), (4, 4));
        assert!(table.find(5, |_| true).is_none());
    }

    /// Counts that are no longer exact hide no entry.
    #[test]
    fn thousands_of_entries_of_one_hash_are_found() {
        let mut table = Table::with_capacity(6000);
        for entry in 0..6000 {
            table.insert(7 << 20, entry);
        }
        assert!(table.slots.passed.contains(&MANY));
        for entry in (0..6000).step_by(2).chain((1..6000).step_by(2)) {
            assert!(table.find(7 << 20, |found| found == 5999).is_some());
            let place = table.place(7 << 20, entry).unwrap();
            table.remove(place);
        }
        assert!(table.find(7 << 20, |_| true).is_none());
        assert!(table.slots.passed.contains(&MANY), "not exact");
    }

    /// Entries do not return to their lines when others leave these. At half load searches read up
    /// to 2.3 and 4.1 lines then, in 150 rounds as in 20, and do not become longer by
    /// further changes.
    #[test]
    fn searches_stay_short_however_often_entries_are_replaced() {
        // hashes without a pattern; and groups of tags, each of which has the same pair of
        // lines
        for group in [1, 2, GROUP] {
            let hasher = crate::hash::Hasher::new(3);
            let hash = |entry: u32| {
                let number = hasher.hash(u64::from(entry / group), 0) >> 32;
                number as u32 & !(GROUP - 1) | (number as u32 ^ entry) & (GROUP - 1)
            };
            let count = 1 << 14;
            let mut table = Table::with_capacity(count as usize);
            for entry in 0..count {
                table.insert(hash(entry), entry);
            }
            let lines = |table: &Table, entries: std::ops::Range<u32>| {
                cost::take();
                let calls = f64::from(entries.end - entries.start);
                for entry in entries {
                    let _ = table.find(hash(entry), |found| found == entry);
                }
                cost::take().lines as f64 / calls
            };
            let mut first = count;
            for round in 0..20 {
                let hits = lines(&table, first - count..first);
                let misses = lines(&table, first..first + count);
                println!("{group} {round}: hits {hits:.2}, misses {misses:.2} lines");
                assert!(
                    hits < 3.0 && misses < 5.5,
                    "{group} {round}: {hits} {misses}"
                );
                // in turn: one leaves, one comes
                for entry in first..first + count {
                    let place = table.place(hash(entry - count), entry - count).unwrap();
                    table.remove(place);
                    table.insert(hash(entry), entry);
                }
                first += count;
            }
            assert_eq!(table.slots.len(), 2 * count as usize);
        }
    }
}
