//! One FIFO of entries per key: a hash table of the first entry of each FIFO, and links in the
//! entries.
//!
//! The list of a key is doubly linked. The first entry's `prev` is the last entry, and the last
//! entry's `next` is [`NIL`]; so an entry is the first of its list exactly if the `next` of its
//! `prev` is [`NIL`]. Only first entries are in the table: a million entries of one key take one
//! slot.

use std::cell::Cell;

use super::cost;
use super::table::{GROUP, SlotRef, Table};
use crate::hash::Hasher;

/// No entry.
pub(super) const NIL: u32 = u32::MAX;

/// Neighbours of an entry in its list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) next: u32,
    pub(super) prev: u32,
}

impl Link {
    pub(super) const NONE: Self = Self {
        next: NIL,
        prev: NIL,
    };
}

/// The key of a list: the tag without the ignored bits, and the peer; see [`peer_key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) tag: u64,
    pub(super) peer: u32,
}

/// Storage of the links and keys of the entries.
pub(super) trait Entries {
    fn link(&mut self, index: u32) -> &mut Link;
    fn key(&self, index: u32) -> Key;
}

/// The hash of a key. Tags that differ in their lowest bits alone have slots in one group of the
/// table, mostly in one cache line: consecutive tags are often used in turn.
#[inline]
fn hash(hasher: Hasher, key: Key) -> u32 {
    let group = hasher.hash(key.tag >> GROUP.ilog2(), u64::from(key.peer));
    (group >> 32) as u32 & !(GROUP - 1) | (key.tag ^ group) as u32 & (GROUP - 1)
}

/// The FIFOs of one class. Not thread safe.
#[derive(Debug)]
pub(super) struct Queues {
    table: Table,
    /// The FIFO to which an entry was appended last: its key, its first entry ([`NIL`]: none), and
    /// the place of that entry. No change of the table leaves an outdated place here.
    recent: (Key, u32, SlotRef),
    /// The last tag of a group that was looked for; 0: none.
    last: Cell<u64>,
}

impl Queues {
    /// Queues without entries; the table takes `keys` keys before it grows.
    pub(super) fn with_capacity(keys: usize) -> Self {
        Self {
            table: Table::with_capacity(keys),
            recent: Self::NONE,
            last: Cell::new(0),
        }
    }

    /// Has the processor read the line of the tags behind the group of this one, if the tag before
    /// it was looked for: then consecutive tags are used in turn, and the first of each group does
    /// this in time. With any mask or stride that leaves no last tag of a group nothing is read.
    #[inline(always)]
    fn prefetch_next(&self, hasher: Hasher, key: Key) {
        match key.tag % u64::from(GROUP) {
            0 if self.last.get() == key.tag.wrapping_sub(1) && self.table.is_far() => {
                let tag = key.tag.wrapping_add(GROUP.into());
                self.table.prefetch(hash(hasher, Key { tag, ..key }));
            }
            place if place == u64::from(GROUP) - 1 => self.last.set(key.tag),
            _ => {}
        }
    }

    const NONE: (Key, u32, SlotRef) = (Key { tag: 0, peer: 0 }, NIL, SlotRef::NONE);

    /// The FIFO of a key, if it is the one to which an entry was appended last.
    #[inline(always)]
    pub(super) fn find_recent(&self, key: Key) -> Option<(SlotRef, u32)> {
        let (recent, first, place) = self.recent;
        (recent == key && first != NIL).then_some((place, first))
    }

    /// The first entry of the result of [`Self::find_recent`] leaves its FIFO; `next` is the first
    /// one now. [`NIL`]: there is no other one.
    #[inline(always)]
    pub(super) fn pass_recent(&mut self, place: SlotRef, next: u32) {
        self.recent.1 = next;
        if next == NIL {
            self.table.remove(place);
        } else {
            self.table.replace(place, next);
        }
    }

    /// The first entry with this key.
    #[inline]
    pub(super) fn first(&self, entries: &impl Entries, key: Key, hasher: Hasher) -> Option<u32> {
        self.find(entries, key, hasher).map(|(_, index)| index)
    }

    /// The first entry with this key, and its place for [`Self::remove_first`].
    #[inline(always)]
    pub(super) fn find(
        &self,
        entries: &impl Entries,
        key: Key,
        hasher: Hasher,
    ) -> Option<(SlotRef, u32)> {
        self.prefetch_next(hasher, key);
        self.table.find(hash(hasher, key), |index| {
            cost::entry();
            entries.key(index) == key
        })
    }

    /// Appends an entry, whose key is `entries.key(index)`, to its FIFO.
    pub(super) fn push(&mut self, entries: &mut impl Entries, index: u32, hasher: Hasher) {
        let key = entries.key(index);
        self.push_key(entries, index, key, hasher);
    }

    /// As [`Self::push`], of an entry with this key.
    #[inline(always)]
    pub(super) fn push_key(
        &mut self,
        entries: &mut impl Entries,
        index: u32,
        key: Key,
        hasher: Hasher,
    ) {
        match self.find_recent(key) {
            Some((_, first)) => Self::append(entries, index, first),
            None => self.push_other(entries, index, key, hasher),
        }
    }

    /// As [`Self::push_key`], to another FIFO than the last one.
    #[inline(never)]
    fn push_other(&mut self, entries: &mut impl Entries, index: u32, key: Key, hasher: Hasher) {
        self.prefetch_next(hasher, key);
        let hash = hash(hasher, key);
        let found = self.table.find(hash, |index| {
            cost::entry();
            entries.key(index) == key
        });
        let Some((place, first)) = found else {
            *entries.link(index) = Link {
                next: NIL,
                prev: index,
            };
            let place = self.table.insert(hash, index);
            self.recent = (key, index, place);
            return;
        };
        self.recent = (key, first, place);
        Self::append(entries, index, first);
    }

    /// Appends an entry to the FIFO that begins with `first`.
    #[inline(always)]
    fn append(entries: &mut impl Entries, index: u32, first: u32) {
        cost::entry();
        let last = std::mem::replace(&mut entries.link(first).prev, index);
        entries.link(last).next = index;
        *entries.link(index) = Link {
            next: NIL,
            prev: last,
        };
    }

    /// Removes the first entry of a FIFO: the last result of [`Self::find`], without a change
    /// since.
    #[inline]
    pub(super) fn remove_first(&mut self, entries: &mut impl Entries, index: u32, place: SlotRef) {
        cost::entry();
        let Link { next, prev } = *entries.link(index);
        self.pass_first(index, place, next);
        if next != NIL {
            cost::entry();
            entries.link(next).prev = prev;
        }
    }

    /// As [`Self::remove_first`]; the caller sets the `prev` of the next entry.
    #[inline(always)]
    pub(super) fn pass_first(&mut self, index: u32, place: SlotRef, next: u32) {
        if next == NIL {
            self.table.remove(place);
            // others may have moved
            self.recent.1 = NIL;
        } else {
            self.table.replace(place, next);
            if self.recent.1 == index {
                self.recent.1 = next;
            }
        }
    }

    /// Removes an entry from its FIFO.
    pub(super) fn remove(&mut self, entries: &mut impl Entries, index: u32, hasher: Hasher) {
        let Link { next, prev } = *entries.link(index);
        if prev == index || entries.link(prev).next == NIL {
            let hash = hash(hasher, entries.key(index));
            if let Some(place) = self.table.place(hash, index) {
                self.remove_first(entries, index, place);
            }
            return;
        }
        cost::entry();
        entries.link(prev).next = next;
        if next != NIL {
            cost::entry();
            entries.link(next).prev = prev;
            return;
        }
        let key = entries.key(index);
        if let Some(first) = self.first(entries, key, hasher) {
            entries.link(first).prev = prev;
        }
    }
}

/// The peer in a key: 0 for any peer, otherwise the peer's index plus 1.
#[inline]
pub(super) fn peer_key(peer: Option<crate::PeerIndex>) -> u32 {
    peer.map_or(0, |peer| peer.0.wrapping_add(1))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn hashes_of_regular_tags_rarely_collide() {
        for seed in [0, 1, 0xdead_beef] {
            let hasher = Hasher::new(seed);
            for shift in [0, 8, 20, 31, 40, 44] {
                for peers in [1, 1000_u64] {
                    let mut seen = HashSet::new();
                    for i in 0..100_000_u64 {
                        let key = Key {
                            tag: (i / peers) << shift,
                            peer: (i % peers) as u32,
                        };
                        // as the home slots of a table of 2^18
                        let hash = hash(hasher, key);
                        seen.insert((hash >> 14) & !(GROUP - 1) | hash & (GROUP - 1));
                    }
                    // random hashes fill 83,000
                    assert!(
                        seen.len() > 75_000,
                        "{seed} {shift} {peers}: {}",
                        seen.len()
                    );
                }
            }
        }
    }
}
