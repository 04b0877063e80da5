//! The owner's side of the order of receives: it appends words and follows their claims.

use super::shared::Word;
use crate::segment::Mapping;
use crate::sync::atomic::Ordering;

/// The words of one queue, and what the owner knows of them. Which descriptor is at each place it
/// keeps for itself: the words can be written by others.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Of the first word, in the owner's segment.
    at: usize,
    places: Box<[u32]>,
    /// Receives appended, and how far claims were followed, wrapping.
    head: u32,
    followed: u32,
}

impl Order {
    /// An order of up to as many receives as there are `places` (a power of two) with its words at `at`, whose first
    /// receive has this position.
    pub(crate) fn starting(map: &Mapping, at: usize, places: Box<[u32]>, position: u32) -> Self {
        for place in 0..places.len() {
            map.u64(at + 8 * place).store(0, Ordering::Relaxed);
        }
        Self {
            at,
            places,
            head: position,
            followed: position,
        }
    }

    /// Empties the words: who comes late finds nothing.
    pub(crate) fn clear(&self, map: &Mapping) {
        for place in 0..self.places.len() {
            map.u64(self.at + 8 * place).store(0, Ordering::Release);
        }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// How many words there are; 0 for a queue out of use.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The position of the next receive.
    pub(crate) fn position(&self) -> u32 {
        self.head
    }

    /// How many are not known to be claimed.
    pub(crate) fn left(&self) -> u32 {
        self.head.wrapping_sub(self.followed)
    }

    /// Whether [`Self::append`] has no room before [`Self::follow`] makes some.
    pub(crate) fn is_full(&self) -> bool {
        self.left() as usize >= self.places.len()
    }

    /// Makes the receive with this descriptor, of `room` bytes, known to senders, after all others. What it says was
    /// written before.
    #[inline]
    pub(crate) fn append(&mut self, map: &Mapping, index: u32, room: u32) {
        let place = self.head as usize & (self.places.len() - 1);
        self.places[place] = index;
        map.u64(self.at + 8 * place)
            .store(Word::posted(self.head, index, room).0, Ordering::Release);
        self.head = self.head.wrapping_add(1);
    }

    /// The next receive that was claimed, and the process that says it did.
    pub(crate) fn follow(&mut self, map: &Mapping) -> Option<(u32, u32)> {
        if self.followed == self.head {
            return None;
        }
        let place = self.followed as usize & (self.places.len() - 1);
        let word = Word(map.u64(self.at + 8 * place).load(Ordering::Acquire));
        let index = self.places[place];
        if word.is_still(self.followed, index) {
            return None;
        }
        // Whatever else it says, this receive is not to be had any more.
        self.followed = self.followed.wrapping_add(1);
        Some((index, word.claimant()))
    }

    /// The first receive that is not known to be claimed.
    #[inline]
    pub(crate) fn next(&self) -> Option<u32> {
        let place = self.followed as usize & self.places.len().wrapping_sub(1);
        (self.followed != self.head).then(|| self.places.get(place).copied())?
    }

    /// That was claimed, by who has sent a message for it: the word need not be looked at.
    #[inline]
    pub(crate) fn skip(&mut self) {
        self.followed = self.followed.wrapping_add(1);
    }

    /// Takes the room of receives back that nobody has claimed yet: who claims one looks at its descriptor.
    pub(crate) fn hide_room(&self, map: &Mapping, of: impl Fn(u32) -> bool) {
        let mut position = self.followed;
        while position != self.head {
            let place = position as usize & (self.places.len() - 1);
            let index = self.places[place];
            let cell = map.u64(self.at + 8 * place);
            let word = Word(cell.load(Ordering::Relaxed));
            if of(index) && word.is_still(position, index) {
                let bare = Word::posted(position, index, 0).0;
                // One that was claimed meanwhile is claimed.
                let _ = cell.compare_exchange(word.0, bare, Ordering::Release, Ordering::Relaxed);
            }
            position = position.wrapping_add(1);
        }
    }
}
