//! A list of entries in one order: receives with further masks, unexpected messages.

use super::queues::{Link, NIL};
use crate::chunks::Chunks;

/// An entry with the link of one list.
pub(super) trait Linked {
    fn link(&mut self) -> &mut Link;
}

/// The ends of a doubly linked list. Not thread safe.
#[derive(Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
}

impl List {
    pub(super) const EMPTY: Self = Self {
        first: NIL,
        last: NIL,
    };

    /// The first entry, or [`NIL`].
    #[inline(always)]
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    /// Appends an entry, which is in no list of this link.
    pub(super) fn push<T: Linked>(&mut self, entries: &mut Chunks<T>, index: u32) {
        let prev = std::mem::replace(&mut self.last, index);
        *entries[index].link() = Link { next: NIL, prev };
        match prev {
            NIL => self.first = index,
            prev => entries[prev].link().next = index,
        }
    }

    /// Removes an entry of the list.
    pub(super) fn remove<T: Linked>(&mut self, entries: &mut Chunks<T>, index: u32) {
        let Link { next, prev } = *entries[index].link();
        match prev {
            NIL => self.first = next,
            prev => entries[prev].link().next = next,
        }
        match next {
            NIL => self.last = prev,
            next => entries[next].link().prev = prev,
        }
    }
}
