//! The table of a key directory: a hash table that peers read by RDMA READ while its owner changes
//! it. `docs/protocol.md`, "The key directory".

use std::sync::Arc;

use rdma_core_sys as sys;

use crate::errno::{FiErrno, Result};
use crate::verbs::{Pd, RemoteAddr, Rkey, Words};
use crate::wire::records::{Entry, WORDS};

/// Maximum distance of an entry from its home slot, in slots.
pub(crate) const REACH: usize = 60;
/// Base-2 logarithm of the home slots of the first table.
const FIRST: u32 = 6;
/// Base-2 logarithm of the home slots (64 bytes each) of the largest table.
const LAST: u32 = 32;

/// The home slot of a key in a table of 2^`log2` home slots.
pub(crate) fn home(key: u64, log2: u32) -> usize {
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - log2)) as usize
}

/// Entries of one directory. The only writer holds the directory's lock.
#[derive(Debug)]
pub(crate) struct Table {
    pd: Arc<Pd>,
    words: Words,
    log2: u32,
    used: usize,
    moves: u64,
    /// Tables that were replaced by larger ones, now all zeros; retained because peers may still
    /// read them.
    old: Vec<Words>,
}

fn allocate(pd: &Arc<Pd>, log2: u32) -> Result<Words> {
    let slots = (1_usize << log2) + REACH;
    Words::new(pd, slots * WORDS, sys::IBV_ACCESS_REMOTE_READ)
}

impl Table {
    pub(crate) fn new(pd: &Arc<Pd>) -> Result<Self> {
        Ok(Self {
            pd: Arc::clone(pd),
            words: allocate(pd, FIRST)?,
            log2: FIRST,
            used: 0,
            moves: 0,
            old: Vec::new(),
        })
    }

    pub(crate) fn addr(&self) -> RemoteAddr {
        self.words.remote_addr(0)
    }

    pub(crate) fn rkey(&self) -> Rkey {
        self.words.rkey()
    }

    pub(crate) fn log2(&self) -> u32 {
        self.log2
    }

    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    fn slots(&self) -> usize {
        (1 << self.log2) + REACH
    }

    fn get(&self, slot: usize) -> [u64; WORDS] {
        self.words.read(slot * WORDS)
    }

    fn is_free(&self, slot: usize) -> bool {
        self.get(slot) == [0; WORDS]
    }

    fn put(&self, slot: usize, record: &[u64; WORDS]) {
        self.words.write(slot * WORDS, record);
    }

    /// The slot that has this key.
    fn find(&self, key: u64) -> Option<usize> {
        let home = home(key, self.log2);
        (home..=home + REACH)
            .take_while(|slot| *slot < self.slots() && !self.is_free(*slot))
            .find(|slot| self.get(*slot)[0] == key)
    }

    /// Adds an entry, whose key must not be in the table. If the entries move to a larger table,
    /// `publish` is called, which must publish the new address before it returns.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering a larger table; nothing has changed then.
    pub(crate) fn insert(&mut self, entry: &Entry, publish: impl FnOnce(&Self)) -> Result<()> {
        let record = entry.encode();
        if self.used < 1 << (self.log2 - 1)
            && let Some(slot) = place(&self.words, self.log2, entry.key)
        {
            self.put(slot, &record);
            self.used += 1;
            return Ok(());
        }
        self.grow(&record, publish)
    }

    /// Moves all entries, and one more, to a larger table.
    fn grow(&mut self, more: &[u64; WORDS], publish: impl FnOnce(&Self)) -> Result<()> {
        for log2 in self.log2 + 1..=LAST {
            let larger = allocate(&self.pd, log2)?;
            let records = (0..self.slots()).map(|slot| self.get(slot));
            let mut records = records.filter(|record| *record != [0; WORDS]);
            let placed = records
                .by_ref()
                .chain(std::iter::once(*more))
                .all(|record| {
                    place(&larger, log2, record[0])
                        .map(|slot| larger.write(slot * WORDS, &record))
                        .is_some()
                });
            if !placed {
                continue;
            }
            let old = std::mem::replace(&mut self.words, larger);
            let slots = self.slots();
            self.log2 = log2;
            self.used += 1;
            // even again: readers of the old table find another address in the header
            self.moves += 2;
            publish(self);
            for slot in 0..slots {
                old.write(slot * WORDS, &[0; WORDS]);
            }
            self.old.push(old);
            return Ok(());
        }
        Err(FiErrno::ENOMEM)
    }

    /// Replaces the entry with the same key. Returns false if the key is not in the table.
    pub(crate) fn replace(&mut self, entry: &Entry) -> bool {
        let slot = self.find(entry.key);
        if let Some(slot) = slot {
            self.put(slot, &entry.encode());
        }
        slot.is_some()
    }

    /// Removes the entry of a key. Returns false if the key is not in the table; otherwise the
    /// caller publishes the header next. If other entries move, `publish` is called before the
    /// first of them leaves its slot: from then to the caller's header `moves` is odd, and a reader
    /// that misses a key starts again.
    pub(crate) fn remove(&mut self, key: u64, publish: impl FnOnce(&Self)) -> bool {
        let Some(mut gap) = self.find(key) else {
            return false;
        };
        if let Some(mut slot) = self.next_for(gap) {
            self.moves += 1;
            publish(self);
            loop {
                self.put(gap, &self.get(slot));
                gap = slot;
                match self.next_for(gap) {
                    Some(next) => slot = next,
                    None => break,
                }
            }
            self.moves += 1;
        }
        self.put(gap, &[0; WORDS]);
        self.used -= 1;
        true
    }

    /// The first entry behind a slot that may be in it: no free slot is between them.
    fn next_for(&self, gap: usize) -> Option<usize> {
        (gap + 1..self.slots())
            .take_while(|slot| !self.is_free(*slot))
            .find(|slot| home(self.get(*slot)[0], self.log2) <= gap)
    }
}

/// The first free slot for a key, at most [`REACH`] - 1 slots behind its home slot.
fn place(words: &Words, log2: u32, key: u64) -> Option<usize> {
    let home = home(key, log2);
    (home..home + REACH).find(|slot| words.read::<WORDS>(slot * WORDS) == [0; WORDS])
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::directory::Directory;
    use super::super::lookup::{Lookup, Map, Outcome};
    use super::*;
    use crate::verbs::devices;

    fn pd() -> Arc<Pd> {
        let device = devices(&[softverbs::backend()], false).remove(0);
        Pd::alloc(&device).unwrap()
    }

    fn entry(key: u64, generation: u64) -> Entry {
        Entry {
            key,
            generation,
            len: 1,
            ..Entry::default()
        }
    }

    /// One of some keys whose home slot is 0 in every table of fewer than 2^20 slots.
    fn same_home(i: u64) -> u64 {
        let inverse = 0xf1de_83e1_9937_733d_u64;
        assert_eq!(inverse.wrapping_mul(0x9e37_79b9_7f4a_7c15), 1);
        (i << 40).wrapping_mul(inverse)
    }

    /// The reader's result for a key.
    fn lookup(table: &Table, key: u64) -> Option<u64> {
        let slot = table.find(key)?;
        let found = Entry::decode(&table.get(slot)).unwrap().unwrap();
        Some(found.generation)
    }

    #[test]
    fn it_agrees_with_a_map_through_growth_and_removal() {
        let mut table = Table::new(&pd()).unwrap();
        let mut map = HashMap::new();
        let mut state = 1_u64;
        let mut published = 0;
        for generation in 0..20_000 {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            // dense keys, sparse keys, and keys with one home slot
            let key = match state >> 62 {
                0 => state >> 33 & 1023,
                1 => state >> 20 & 0xfff << 40,
                _ => (state >> 33 & 0x3ff) << 54,
            };
            if map.remove(&key).is_some() {
                let before = table.moves();
                let mut during = before;
                assert!(table.remove(key, |table| during = table.moves()));
                assert_eq!((before % 2, table.moves() % 2), (0, 0));
                assert!(during == before || during == before + 1);
                assert_eq!(table.moves() - before, 2 * (during - before));
                assert!(!table.remove(key, |_| unreachable!()), "twice");
            } else {
                map.insert(key, generation);
                let new = entry(key, generation);
                table
                    .insert(&new, |table| published = table.log2())
                    .unwrap();
            }
            assert_eq!(lookup(&table, key), map.get(&key).copied());
        }
        for (key, generation) in &map {
            assert_eq!(lookup(&table, *key), Some(*generation));
        }
        assert_eq!(table.used, map.len());
        assert_eq!(published, table.log2());
        // the replaced tables are empty
        assert!(!table.old.is_empty());
        for words in &table.old {
            assert!(
                (0..(1 << FIRST) + REACH)
                    .all(|slot| words.read::<WORDS>(slot * WORDS) == [0; WORDS])
            );
        }
        for key in map.into_keys() {
            assert!(table.remove(key, |_| {}));
        }
        assert!((0..table.slots()).all(|slot| table.is_free(slot)));
    }

    /// One read of a look-up, as a peer does it, of the directory's memory in this process.
    #[allow(unsafe_code, reason = "reads addresses of the directory's records")]
    fn step(lookup: &mut Lookup, map: &mut Map) -> Outcome {
        let read = lookup.read(map);
        let words: Vec<u64> = (0..read.words)
            .map(|i| {
                let at = (read.addr.get() as *const AtomicU64).wrapping_add(i);
                // SAFETY: the directory's words, which are retained as long as itself; they are
                // written as atomics.
                unsafe { &*at }.load(Ordering::Relaxed)
            })
            .collect();
        lookup.feed(map, &words)
    }

    /// A look-up has read the slots before that of a key; then the key's entry moves into them, and
    /// the look-up reads the old slot. It does not miss the key: it reads the header until the
    /// moves have ended, and then the slots again.
    #[test]
    fn a_moving_key_is_found() {
        const KEY: u64 = 100;
        let directory = Directory::new(&pd(), 7, false).unwrap();
        let block = directory.block(None).unwrap();
        // in the slots 0 to 4, of which the first read of a look-up has four
        for i in [1, 2, 3, 4, KEY] {
            directory.insert(&entry(same_home(i), i)).unwrap();
        }
        let map = RefCell::new(Map::new(block.addr(), block.rkey(), 1));
        let lookup = RefCell::new(Lookup::new(same_home(KEY), &map.borrow()));
        let step = || step(&mut lookup.borrow_mut(), &mut map.borrow_mut());
        let goes_on = || assert!(matches!(step(), Outcome::More));
        let moving = || {
            // the connection block, the header, and the slots 0 to 3
            goes_on();
            goes_on();
            goes_on();
        };
        let moved = || {
            // slot 4, which is free now
            goes_on();
            assert!(matches!(step(), Outcome::Torn), "the header");
        };
        directory.withdraw_in_steps(same_home(1), moving, moved);
        let outcome = std::iter::repeat_with(step).find(|it| !matches!(it, Outcome::More));
        let Some(Outcome::Found(found)) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!(found.entry.generation, KEY);
    }

    #[test]
    fn a_place_beyond_the_reach_makes_it_grow() {
        let mut table = Table::new(&pd()).unwrap();
        for i in 0..31_u64 {
            let key = same_home(i);
            assert_eq!(home(key, FIRST), 0);
            table.insert(&entry(key, i), |_| {}).unwrap();
        }
        for i in 0..31_u64 {
            assert_eq!(lookup(&table, same_home(i)), Some(i));
        }
    }
}
