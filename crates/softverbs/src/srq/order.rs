//! The owner's side of the order of receives: appends words and follows their claims.

use super::shared::{LINE, Word};
use crate::segment::Mapping;
use crate::sync::atomic::Ordering;

/// The words of one queue and the owner's private state. The owner keeps the descriptor index of
/// each place in private memory, because other processes can write the words.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Offset of the first word in the owner's segment.
    at: usize,
    places: Box<[u32]>,
    /// `head`: position of the next receive to append. `followed`: position of the first receive
    /// whose claim has not been read. Both wrap.
    head: u32,
    followed: u32,
}

impl Order {
    /// Makes an order with one word per element of `places` (a power of two), with its words at
    /// `at`. The first receive gets the given position.
    pub(crate) fn starting(map: &Mapping, at: usize, places: Box<[u32]>, position: u32) -> Self {
        // With positions: a sender that was stopped while an earlier queue had these words may
        // store a hint of that time. From there on, the next ones lead to the first receive.
        for before in 1..=places.len() as u32 {
            let before = position.wrapping_sub(before);
            let place = before as usize & (places.len() - 1);
            map.u64(at + 8 * place)
                .store(Word::none(before).0, Ordering::Relaxed);
        }
        Self {
            at,
            places,
            head: position,
            followed: position,
        }
    }

    /// Clears the words: a late sender finds no receive.
    pub(crate) fn clear(&self, map: &Mapping) {
        for place in 0..self.places.len() {
            map.u64(self.at + 8 * place).store(0, Ordering::Release);
        }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Number of words; 0 for an unused queue.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The position of the next receive.
    pub(crate) fn position(&self) -> u32 {
        self.head
    }

    /// Number of receives whose claim has not been read.
    pub(crate) fn left(&self) -> u32 {
        self.head.wrapping_sub(self.followed)
    }

    /// Whether [`Self::append`] has no free word until [`Self::follow`] frees one.
    pub(crate) fn is_full(&self) -> bool {
        self.left() as usize >= self.places.len()
    }

    /// Publishes the receive with this descriptor, of `room` bytes, as the last one. The caller has
    /// written the descriptor before.
    #[inline]
    pub(crate) fn append(&mut self, map: &Mapping, index: u32, room: u32) {
        let mask = self.places.len() - 1;
        let place = self.head as usize & mask;
        self.places[place] = index;
        map.u64(self.at + 8 * place)
            .store(Word::posted(self.head, index, room).0, Ordering::Release);
        let apart = self.left() + 2 * LINE <= self.places.len() as u32;
        if apart && self.head.is_multiple_of(LINE) {
            // Senders have claimed the receives of the next line in the last round.
            let next = self.head.wrapping_add(LINE) as usize & mask;
            map.prefetch_to_write(self.at + 8 * next);
        }
        self.head = self.head.wrapping_add(1);
    }

    /// Returns the next claimed receive and the slot of its claimant, as written in the word.
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
        // A word with any other content counts as claimed: no sender can claim this receive any
        // more.
        self.followed = self.followed.wrapping_add(1);
        Some((index, word.claimant()))
    }

    /// The first receive whose claim has not been read.
    #[inline]
    pub(crate) fn next(&self) -> Option<u32> {
        let place = self.followed as usize & self.places.len().wrapping_sub(1);
        (self.followed != self.head).then(|| self.places.get(place).copied())?
    }

    /// Skips the first receive. A message for it has arrived, so its sender has claimed it, and the
    /// word is not read.
    #[inline]
    pub(crate) fn skip(&mut self) {
        self.followed = self.followed.wrapping_add(1);
    }

    /// Sets the room of unclaimed receives to 0, for those for which `of` returns true: a sender
    /// that claims such a receive reads its descriptor.
    pub(crate) fn hide_room(&self, map: &Mapping, of: impl Fn(u32) -> bool) {
        let mut position = self.followed;
        while position != self.head {
            let place = position as usize & (self.places.len() - 1);
            let index = self.places[place];
            let cell = map.u64(self.at + 8 * place);
            let word = Word(cell.load(Ordering::Relaxed));
            if of(index) && word.is_still(position, index) {
                let bare = Word::posted(position, index, 0).0;
                // Fails if a sender has claimed the receive in the meantime; the claim stays.
                let _ = cell.compare_exchange(word.0, bare, Ordering::Release, Ordering::Relaxed);
            }
            position = position.wrapping_add(1);
        }
    }
}
