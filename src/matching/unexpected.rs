//! Messages that no receive has matched: a list in the order of arrival, and for each class that a
//! search has used one FIFO per key.

use super::arrivals::ArrivalOrder;
use super::cost;
use super::posted::CLASSES;
use super::queues::{Entries, Key, Link, NIL, Queues, peer_key};
use super::table::SlotRef;
use super::{Claim, Message, Want};
use crate::PeerIndex;
use crate::chunks::Chunks;
use crate::hash::Hasher;

/// Searches after which a class that none of them has used may be replaced.
const UNUSED: u64 = 1024;
/// Keys for which the table of a new class has room, at most: messages may have few keys.
const KEYS: usize = 1 << 14;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Free,
    /// In the list and in every class.
    Listed,
    /// In the slab alone.
    Claimed,
}

/// A message: 64 bytes with a handle of 24.
#[derive(Debug)]
#[repr(C)]
struct Entry<M> {
    tag: u64,
    /// Length in bytes.
    len: u64,
    /// Neighbours in the FIFO of the class whose links are [`Links::InEntries`].
    link: Link,
    /// Place in [`Unexpected::arrivals`]; of a free entry, the next free one.
    place: u32,
    peer: PeerIndex,
    /// Incremented whenever the entry becomes free.
    generation: u32,
    state: State,
    message: M,
}

/// A listed message that [`Unexpected::find`] has found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) index: u32,
    /// The class in which it was found, and its place in the table there: it is the first of its
    /// FIFO.
    place: Option<(usize, SlotRef)>,
}

/// A class that searches have used, with every message of the list.
#[derive(Debug)]
struct Class {
    ignore: u64,
    directed: bool,
    /// Number of the last search that used it.
    used: u64,
    queues: Queues,
    links: Links,
}

/// The links of the FIFOs of a class.
#[derive(Debug)]
enum Links {
    /// Those of one class, which is mostly the only one: a match reads no further memory.
    InEntries,
    /// An element for each entry of the slab.
    Apart(Chunks<Link>),
}

impl Class {
    #[inline(always)]
    fn with<'a, M>(&'a mut self, slab: &'a mut Chunks<Entry<M>>) -> (&'a mut Queues, Keyed<'a, M>) {
        let keyed = Keyed {
            slab,
            ignore: self.ignore,
            directed: self.directed,
            links: &mut self.links,
        };
        (&mut self.queues, keyed)
    }
}

/// The messages as a class sees them.
struct Keyed<'a, M> {
    slab: &'a mut Chunks<Entry<M>>,
    ignore: u64,
    directed: bool,
    links: &'a mut Links,
}

impl<M> Entries for Keyed<'_, M> {
    #[inline(always)]
    fn link(&mut self, index: u32) -> &mut Link {
        match self.links {
            Links::InEntries => &mut self.slab[index].link,
            Links::Apart(links) => &mut links[index],
        }
    }

    #[inline]
    fn key(&self, index: u32) -> Key {
        let entry = &self.slab[index];
        Key {
            tag: entry.tag & !self.ignore,
            peer: peer_key(self.directed.then_some(entry.peer)),
        }
    }
}

/// The unexpected messages of an instance. Not thread safe.
#[derive(Debug)]
pub(super) struct Unexpected<M> {
    slab: Chunks<Entry<M>>,
    hasher: Hasher,
    free: u32,
    /// Number of messages in the list.
    listed: u32,
    claimed: u32,
    /// The listed messages in the order of arrival.
    arrivals: ArrivalOrder,
    classes: Vec<Class>,
    /// Number of searches among listed messages.
    searches: u64,
}

impl<M: Copy> Unexpected<M> {
    pub(super) fn with_capacity(hasher: Hasher, capacity: usize) -> Self {
        Self {
            slab: Chunks::in_huge_pages(capacity),
            hasher,
            free: NIL,
            listed: 0,
            claimed: 0,
            arrivals: ArrivalOrder::with_capacity(capacity),
            classes: Vec::with_capacity(CLASSES),
            searches: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.listed as usize
    }

    pub(super) fn claimed(&self) -> usize {
        self.claimed as usize
    }

    /// Adds a message behind all others.
    pub(super) fn store(&mut self, tag: u64, peer: PeerIndex, len: u64, message: M) {
        let index = match self.free {
            NIL => self.slab.len(),
            free => free,
        };
        let mut entry = Entry {
            tag,
            len,
            link: Link::NONE,
            place: self.arrivals.push(index),
            peer,
            generation: 0,
            state: State::Listed,
            message,
        };
        if self.free == NIL {
            for class in &mut self.classes {
                if let Links::Apart(links) = &mut class.links {
                    links.push(Link::NONE);
                }
            }
            self.slab.push(entry);
        } else {
            let free = &mut self.slab[index];
            self.free = free.place;
            entry.generation = free.generation;
            *free = entry;
        }
        self.listed += 1;
        for class in &mut self.classes {
            let (queues, mut keyed) = class.with(&mut self.slab);
            queues.push(&mut keyed, index, self.hasher);
        }
    }

    /// Whether no message is listed.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.listed == 0
    }

    /// The message that arrived first of those that match `want`. Builds the class if it does
    /// not exist and fewer than [`CLASSES`] do.
    pub(super) fn find(&mut self, want: &Want) -> Option<Found> {
        let place = None;
        if self.is_empty() {
            return None;
        }
        if want.ignore == u64::MAX && want.from.is_none() {
            cost::entry();
            let index = self.arrivals.first();
            return Some(Found { index, place });
        }
        self.searches += 1;
        let Some(number) = self.class(want.ignore, want.from.is_some()) else {
            return self.walk(want).map(|index| Found { index, place });
        };
        let class = &mut self.classes[number];
        class.used = self.searches;
        let key = Key {
            tag: want.tag & !want.ignore,
            peer: peer_key(want.from),
        };
        let (queues, keyed) = class.with(&mut self.slab);
        let (place, index) = queues.find(&keyed, key, self.hasher)?;
        let place = Some((number, place));
        Some(Found { index, place })
    }

    /// The first match by reading all messages: for masks without a class.
    fn walk(&self, want: &Want) -> Option<u32> {
        let mut index = self.arrivals.first();
        while index != NIL {
            cost::entry();
            let entry = &self.slab[index];
            if want.matches(entry.tag, entry.peer) {
                return Some(index);
            }
            index = self.arrivals.after(entry.place);
        }
        None
    }

    /// The class of a mask. It is built if it does not exist and there is room for it: fewer than
    /// [`CLASSES`] classes, or one that was not used during as many searches as messages are
    /// listed, and [`UNUSED`]. So building takes O(1) per search on average.
    fn class(&mut self, ignore: u64, directed: bool) -> Option<usize> {
        let found = self
            .classes
            .iter()
            .position(|class| class.ignore == ignore && class.directed == directed);
        if found.is_some() {
            return found;
        }
        if self.classes.len() == CLASSES {
            let oldest = (0..CLASSES).min_by_key(|class| self.classes[*class].used)?;
            let unused = self.searches - self.classes[oldest].used;
            if unused < UNUSED.max(u64::from(self.listed)) {
                return None;
            }
            self.classes.swap_remove(oldest);
        }
        self.build(ignore, directed);
        Some(self.classes.len() - 1)
    }

    /// Adds a class with all listed messages.
    fn build(&mut self, ignore: u64, directed: bool) {
        let in_entries = |class: &Class| matches!(class.links, Links::InEntries);
        let links = if self.classes.iter().any(in_entries) {
            let mut links = Chunks::in_huge_pages(self.slab.len() as usize);
            for _ in 0..self.slab.len() {
                links.push(Link::NONE);
            }
            Links::Apart(links)
        } else {
            Links::InEntries
        };
        let mut class = Class {
            ignore,
            directed,
            used: self.searches,
            queues: Queues::with_capacity(self.len().min(KEYS)),
            links,
        };
        let mut index = self.arrivals.first();
        while index != NIL {
            cost::entry();
            let (queues, mut keyed) = class.with(&mut self.slab);
            queues.push(&mut keyed, index, self.hasher);
            index = self.arrivals.after(self.slab[index].place);
        }
        self.classes.push(class);
    }

    /// A message of the slab.
    #[inline]
    pub(super) fn message(&self, index: u32) -> Message<M> {
        let entry = &self.slab[index];
        Message {
            tag: entry.tag,
            peer: entry.peer,
            len: entry.len,
            payload: entry.message,
        }
    }

    /// Takes a message out of the list and of every class; its entry stays.
    #[inline]
    fn unlist(&mut self, Found { index, place }: Found) {
        for (number, class) in self.classes.iter_mut().enumerate() {
            let (queues, mut keyed) = class.with(&mut self.slab);
            match place {
                Some((of, place)) if of == number => queues.remove_first(&mut keyed, index, place),
                _ => queues.remove(&mut keyed, index, self.hasher),
            }
        }
        self.arrivals.remove(self.slab[index].place);
        self.listed -= 1;
    }

    fn release(&mut self, index: u32) {
        let entry = &mut self.slab[index];
        entry.state = State::Free;
        entry.generation = entry.generation.wrapping_add(1);
        entry.place = std::mem::replace(&mut self.free, index);
    }

    /// Removes a listed message: the last result of [`Self::find`], without a change since.
    #[inline]
    pub(super) fn take(&mut self, found: Found) -> Message<M> {
        let message = self.message(found.index);
        self.unlist(found);
        self.release(found.index);
        message
    }

    /// As [`Self::take`], of any listed message.
    pub(super) fn take_listed(&mut self, index: u32) -> Message<M> {
        self.take(Found { index, place: None })
    }

    /// Reserves a listed message, as [`Self::take`], for the holder of the claim.
    pub(super) fn claim(&mut self, found: Found) -> Claim {
        let index = found.index;
        self.unlist(found);
        self.claimed += 1;
        let entry = &mut self.slab[index];
        entry.state = State::Claimed;
        Claim::new(index, entry.generation)
    }

    /// Removes a claimed message. `None` if the claim is not of a message that is claimed.
    pub(super) fn redeem(&mut self, claim: Claim) -> Option<Message<M>> {
        let (index, generation) = claim.parts();
        let entry = self.slab.get(index)?;
        if entry.state != State::Claimed || entry.generation != generation {
            return None;
        }
        let message = self.message(index);
        self.claimed -= 1;
        self.release(index);
        Some(message)
    }

    /// Removes the messages that `keep` refuses: the listed ones in the order of arrival, then
    /// those that are claimed.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Message<M>, bool) -> bool) {
        let mut index = self.arrivals.first();
        while index != NIL {
            let next = self.arrivals.after(self.slab[index].place);
            if !keep(&self.message(index), false) {
                self.take_listed(index);
            }
            index = next;
        }
        if self.claimed == 0 {
            return;
        }
        for index in 0..self.slab.len() {
            if self.slab[index].state == State::Claimed && !keep(&self.message(index), true) {
                self.claimed -= 1;
                self.release(index);
            }
        }
    }

    /// The listed messages of a peer, in the order of arrival.
    pub(super) fn of_peer(&self, peer: PeerIndex) -> Vec<u32> {
        self.listed(|of| of == peer)
    }

    fn listed(&self, is: impl Fn(PeerIndex) -> bool) -> Vec<u32> {
        let mut found = Vec::new();
        let mut index = self.arrivals.first();
        while index != NIL {
            let entry = &self.slab[index];
            if is(entry.peer) {
                found.push(index);
            }
            index = self.arrivals.after(entry.place);
        }
        found
    }

    /// Messages from `from` are messages from `into` from now on; the order of arrival stays.
    pub(super) fn merge(&mut self, from: PeerIndex, into: PeerIndex) {
        for index in 0..self.slab.len() {
            let entry = &mut self.slab[index];
            if entry.peer == from && entry.state == State::Claimed {
                entry.peer = into;
            }
        }
        let both = self.listed(|peer| peer == from || peer == into);
        for index in &both {
            for class in self.classes.iter_mut().filter(|class| class.directed) {
                let (queues, mut keyed) = class.with(&mut self.slab);
                queues.remove(&mut keyed, *index, self.hasher);
            }
        }
        for index in both {
            self.slab[index].peer = into;
            for class in self.classes.iter_mut().filter(|class| class.directed) {
                let (queues, mut keyed) = class.with(&mut self.slab);
                queues.push(&mut keyed, index, self.hasher);
            }
        }
    }

    /// Bytes of one entry.
    #[cfg(test)]
    pub(super) const ENTRY: usize = size_of::<Entry<M>>();
}
