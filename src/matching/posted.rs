//! Posted receives, by classes: each class has one FIFO per key, and the least post number of the
//! first entries that match is the receive that was posted first.

use super::cost;
use super::list::{Linked, List};
use super::queues::{Entries, Key, Link, NIL, Queues, peer_key};
use super::table::SlotRef;
use super::{MultiId, Want};
use crate::PeerIndex;
use crate::chunks::Chunks;
use crate::hash::Hasher;

/// Classes with a hash of their own.
pub(super) const CLASSES: usize = 8;
/// `Entry::class` of an entry in the list of further masks.
const LISTED: u8 = CLASSES as u8;
/// `Entry::class` of a free entry.
const FREE: u8 = u8::MAX;

/// A posted receive: 96 bytes with a handle of 40.
#[derive(Debug)]
#[repr(C)]
struct Entry<R> {
    /// Post number: 1 for the first receive of the instance.
    number: u64,
    /// The tag without the ignored bits.
    tag: u64,
    ignore: u64,
    context: usize,
    /// Place in the FIFO of its key, in the list of further masks, or (`next`) in the free list.
    link: Link,
    /// As in [`Key`].
    peer: u32,
    /// The multi-receive buffer, or [`NIL`].
    multi: u32,
    class: u8,
    receive: R,
}

impl<R> Linked for Entry<R> {
    fn link(&mut self) -> &mut Link {
        &mut self.link
    }
}

impl<R> Entries for Chunks<Entry<R>> {
    fn link(&mut self, index: u32) -> &mut Link {
        &mut self[index].link
    }

    #[inline]
    fn key(&self, index: u32) -> Key {
        let entry = &self[index];
        Key {
            tag: entry.tag,
            peer: entry.peer,
        }
    }
}

#[derive(Debug)]
struct Class {
    ignore: u64,
    directed: bool,
    entries: u32,
    queues: Queues,
}

impl Class {
    /// The key of the receives of this class that match a message.
    #[inline]
    fn key(&self, tag: u64, peer: u32) -> Key {
        Key {
            tag: tag & !self.ignore,
            peer: if self.directed { peer } else { 0 },
        }
    }
}

/// A receive that [`Posted::find`] has found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) index: u32,
    /// Its class, and its place in the table there: it is the first of its FIFO. `None`: it is in
    /// the list of further masks.
    place: Option<(u32, SlotRef)>,
}

/// A receive that [`Posted::find_recent`] has found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recent<R> {
    pub(super) receive: R,
    index: u32,
    class: u32,
    place: SlotRef,
}

/// The posted receives of an instance. Not thread safe.
#[derive(Debug)]
pub(super) struct Posted<R> {
    entries: Chunks<Entry<R>>,
    hasher: Hasher,
    /// First free entry.
    first_free: u32,
    live: u32,
    classes: Vec<Class>,
    /// The class of the last receive.
    recent: usize,
    /// A bit for each class that has entries.
    occupied: u8,
    /// The receives with further masks, in the order of posting.
    list: List,
    /// Post number of the last receive.
    number: u64,
    /// Where the next search for a context begins.
    cursor: u32,
    /// The least number of the receives that were posted again, and are not in their places.
    returned: Option<u64>,
}

impl<R: Copy> Posted<R> {
    pub(super) fn with_capacity(hasher: Hasher, capacity: usize) -> Self {
        Self {
            entries: Chunks::in_huge_pages(capacity),
            hasher,
            first_free: NIL,
            live: 0,
            classes: Vec::with_capacity(CLASSES),
            recent: 0,
            occupied: 0,
            list: List::EMPTY,
            number: 0,
            cursor: 0,
            returned: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.live as usize
    }

    /// The class of a mask: the one that it has, a new one, or one that is empty; `None` if all
    /// classes have entries of other masks.
    #[inline(always)]
    fn class(&mut self, ignore: u64, directed: bool) -> Option<usize> {
        let is = |class: &Class| class.ignore == ignore && class.directed == directed;
        if self.classes.get(self.recent).is_some_and(is) {
            return Some(self.recent);
        }
        self.find_class(ignore, directed)
            .inspect(|class| self.recent = *class)
    }

    fn find_class(&mut self, ignore: u64, directed: bool) -> Option<usize> {
        let found = self
            .classes
            .iter()
            .position(|class| class.ignore == ignore && class.directed == directed);
        if found.is_some() {
            return found;
        }
        if self.classes.len() < CLASSES {
            self.classes.push(Class {
                ignore,
                directed,
                entries: 0,
                queues: Queues::with_capacity(0),
            });
            return Some(self.classes.len() - 1);
        }
        let empty = self.classes.iter().position(|class| class.entries == 0)?;
        let class = &mut self.classes[empty];
        class.ignore = ignore;
        class.directed = directed;
        Some(empty)
    }

    /// A post number behind all others.
    pub(super) fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    /// Adds a receive with the number of an earlier one that was removed. It has its place after
    /// [`Self::restore_order`].
    pub(super) fn post_again(&mut self, want: &Want, context: usize, receive: R, number: u64) {
        let newest = std::mem::replace(&mut self.number, number - 1);
        self.post(want, context, receive, None);
        self.number = newest;
        if number != newest {
            self.returned = Some(self.returned.map_or(number, |least| least.min(number)));
        }
    }

    /// Puts the receives that were posted again, and those that were posted behind the first of
    /// them, into the order of their numbers.
    pub(super) fn restore_order(&mut self) {
        let Some(least) = self.returned.take() else {
            return;
        };
        for index in self.all(|_| true) {
            if self.entries[index].number >= least {
                self.unlink(index);
                self.link(index);
            }
        }
    }

    /// Adds a receive behind all others.
    #[inline(always)]
    pub(super) fn post(&mut self, want: &Want, context: usize, receive: R, multi: Option<MultiId>) {
        self.number += 1;
        let class = self.class(want.ignore, want.from.is_some());
        let key = Key {
            tag: want.tag & !want.ignore,
            peer: peer_key(want.from),
        };
        if self.first_free == NIL {
            self.grow(receive);
        }
        let index = self.first_free;
        let place = &mut self.entries[index];
        self.first_free = place.link.next;
        // one by one: a whole entry would be copied in other units than those it is made of, and
        // the processor would wait for its own stores
        place.number = self.number;
        place.tag = key.tag;
        place.ignore = want.ignore;
        place.context = context;
        place.link = Link::NONE;
        place.peer = key.peer;
        place.multi = multi.map_or(NIL, |multi| multi.0);
        place.class = class.map_or(LISTED, |class| class as u8);
        place.receive = receive;
        self.live += 1;
        match class {
            Some(class) => self.link_as(index, class, key),
            None => self.list.push(&mut self.entries, index),
        }
    }

    /// Adds a free entry, which has some value of a receive.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, receive: R) {
        self.first_free = self.entries.push(Entry {
            number: 0,
            tag: 0,
            ignore: 0,
            context: 0,
            link: Link::NONE,
            peer: 0,
            multi: NIL,
            class: FREE,
            receive,
        });
    }

    /// Puts an entry into the queues of a class as the last one.
    #[inline]
    fn link_as(&mut self, index: u32, class: usize, key: Key) {
        let of = &mut self.classes[class];
        of.queues
            .push_key(&mut self.entries, index, key, self.hasher);
        of.entries += 1;
        self.occupied |= 1 << class;
    }

    /// Puts an entry into the queues of its class, or the list of further masks, as the last one.
    fn link(&mut self, index: u32) {
        let class = self.entries[index].class;
        if class == LISTED {
            self.list.push(&mut self.entries, index);
            return;
        }
        let key = self.entries.key(index);
        self.link_as(index, class.into(), key);
    }

    /// The reverse of [`Self::link`].
    fn unlink(&mut self, index: u32) {
        let class = self.entries[index].class;
        if class == LISTED {
            self.list.remove(&mut self.entries, index);
            return;
        }
        let of = &mut self.classes[usize::from(class)];
        of.queues.remove(&mut self.entries, index, self.hasher);
        self.unlinked(class);
    }

    /// The receive that was posted first of those that match a message.
    #[inline(always)]
    pub(super) fn find(&self, tag: u64, peer: PeerIndex) -> Option<Found> {
        debug_assert!(self.returned.is_none(), "receives are out of order");
        let occupied = self.occupied;
        if !occupied.is_power_of_two() || self.list.first() != NIL {
            return self.find_among(tag, peer);
        }
        // one class has all receives: none of them has to be the one that was posted first
        let number = occupied.trailing_zeros();
        let class = self.classes.get(number as usize)?;
        let key = class.key(tag, peer_key(Some(peer)));
        let (place, index) = class.queues.find(&self.entries, key, self.hasher)?;
        let place = Some((number, place));
        Some(Found { index, place })
    }

    /// As [`Self::find`], among several classes and the receives with further masks.
    #[inline(never)]
    fn find_among(&self, tag: u64, peer: PeerIndex) -> Option<Found> {
        let peer = peer_key(Some(peer));
        let mut occupied = self.occupied;
        let mut best = None;
        let mut number = u64::MAX;
        while occupied != 0 {
            let of = occupied.trailing_zeros();
            let class = &self.classes[of as usize];
            occupied &= occupied - 1;
            let key = class.key(tag, peer);
            if let Some((place, index)) = class.queues.find(&self.entries, key, self.hasher) {
                let found = self.entries[index].number;
                if found < number {
                    number = found;
                    let place = Some((of, place));
                    best = Some(Found { index, place });
                }
            }
        }
        let mut index = self.list.first();
        while index != NIL {
            cost::entry();
            let entry = &self.entries[index];
            if entry.number > number {
                break;
            }
            if entry.tag == tag & !entry.ignore && (entry.peer == 0 || entry.peer == peer) {
                return Some(Found { index, place: None });
            }
            index = entry.link.next;
        }
        best
    }

    /// Fast path of [`Self::find`]: the receive of a message, if one class has all receives, the
    /// last one was posted to the FIFO of the message's key, and it takes this message alone.
    #[inline(always)]
    pub(super) fn find_recent(&self, tag: u64, peer: PeerIndex) -> Option<Recent<R>> {
        let occupied = self.occupied;
        if !occupied.is_power_of_two() || self.list.first() != NIL {
            return None;
        }
        let class = occupied.trailing_zeros();
        let of = self.classes.get(class as usize)?;
        let key = of.key(tag, peer_key(Some(peer)));
        let (place, index) = of.queues.find_recent(key)?;
        cost::entry();
        let entry = self.entries.get(index)?;
        (entry.multi == NIL).then_some(Recent {
            receive: entry.receive,
            index,
            class,
            place,
        })
    }

    /// Removes the last result of [`Self::find_recent`], without a change since.
    #[inline(always)]
    pub(super) fn remove_recent(&mut self, found: &Recent<R>) {
        let class = self.classes.get_mut(found.class as usize);
        let entry = self.entries.get_mut(found.index);
        let (Some(class), Some(entry)) = (class, entry) else {
            return;
        };
        let Link { next, prev } = entry.link;
        entry.class = FREE;
        entry.link.next = std::mem::replace(&mut self.first_free, found.index);
        self.live -= 1;
        class.entries -= 1;
        class.queues.pass_recent(found.place, next);
        if let Some(next) = self.entries.get_mut(next) {
            cost::entry();
            next.link.prev = prev;
        } else if class.entries == 0 {
            // there is no next one
            self.occupied = 0;
        }
    }

    /// The receive, the context and the multi-receive buffer of an entry.
    #[inline(always)]
    pub(super) fn of(&self, index: u32) -> (R, usize, Option<MultiId>) {
        let entry = &self.entries[index];
        let multi = (entry.multi != NIL).then_some(MultiId(entry.multi));
        (entry.receive, entry.context, multi)
    }

    pub(super) fn remove(&mut self, index: u32) {
        self.unlink(index);
        self.free(index);
    }

    /// As [`Self::remove`], of the last result of [`Self::find`], without a change since.
    #[inline(always)]
    pub(super) fn remove_found(&mut self, found: Found) {
        let Some((class, place)) = found.place else {
            return self.remove(found.index);
        };
        let of = &mut self.classes[class as usize];
        let entry = &mut self.entries[found.index];
        cost::entry();
        let Link { next, prev } = entry.link;
        entry.class = FREE;
        entry.link.next = std::mem::replace(&mut self.first_free, found.index);
        self.live -= 1;
        of.entries -= 1;
        if of.entries == 0 {
            self.occupied &= !(1 << class);
        }
        of.queues.pass_first(found.index, place, next);
        if next != NIL {
            cost::entry();
            self.entries[next].link.prev = prev;
        }
    }

    /// An entry has left the queues of its class.
    #[inline]
    fn unlinked(&mut self, class: u8) {
        let of = &mut self.classes[usize::from(class)];
        of.entries -= 1;
        if of.entries == 0 {
            self.occupied &= !(1 << class);
        }
    }

    #[inline]
    fn free(&mut self, index: u32) {
        let entry = &mut self.entries[index];
        entry.class = FREE;
        entry.link.next = std::mem::replace(&mut self.first_free, index);
        self.live -= 1;
    }

    /// A receive with this context: the next one behind the receive that the previous search has
    /// found.
    pub(super) fn with_context(&mut self, context: usize) -> Option<u32> {
        let len = self.entries.len();
        let mut at = self.cursor;
        for _ in 0..len {
            at = if at < len { at } else { 0 };
            cost::entry();
            let entry = &self.entries[at];
            if entry.class != FREE && entry.context == context {
                self.cursor = at + 1;
                return Some(at);
            }
            at += 1;
        }
        None
    }

    /// The indices of all entries that fulfil `is`, in the order of posting.
    pub(super) fn all(&self, is: impl Fn(Option<PeerIndex>) -> bool) -> Vec<u32> {
        let mut found: Vec<u32> = (0..self.entries.len())
            .filter(|index| {
                let entry = &self.entries[*index];
                entry.class != FREE && is(entry.peer.checked_sub(1).map(PeerIndex))
            })
            .collect();
        found.sort_unstable_by_key(|index| self.entries[*index].number);
        found
    }

    /// The peers that receives name, each at least once.
    pub(super) fn named(&self) -> Vec<PeerIndex> {
        let entries = (0..self.entries.len()).map(|index| &self.entries[index]);
        let live = entries.filter(|entry| entry.class != FREE);
        live.filter_map(|entry| entry.peer.checked_sub(1).map(PeerIndex))
            .collect()
    }

    /// Receives from `from` are receives from `into` from now on; the order of posting stays.
    pub(super) fn merge(&mut self, from: PeerIndex, into: PeerIndex) {
        let both = self.all(|peer| peer == Some(from) || peer == Some(into));
        // the list of further masks has no keys
        let both: Vec<u32> = both
            .into_iter()
            .filter(|index| {
                let listed = self.entries[*index].class == LISTED;
                if listed {
                    self.entries[*index].peer = peer_key(Some(into));
                }
                !listed
            })
            .collect();
        for index in &both {
            self.unlink(*index);
        }
        for index in both {
            self.entries[index].peer = peer_key(Some(into));
            self.link(index);
        }
    }

    /// Bytes of one entry.
    #[cfg(test)]
    pub(super) const ENTRY: usize = size_of::<Entry<R>>();
}
