//! Places for receive descriptors: first fit, neighbours merged.

use std::collections::BTreeMap;

/// Free pieces of a range of offsets.
#[derive(Debug)]
pub(crate) struct Arena {
    free: BTreeMap<usize, usize>,
}

impl Arena {
    /// What every place starts at and is long, a multiple of.
    pub(crate) const GRAIN: usize = 512;

    pub(crate) fn new(at: usize, len: usize) -> Self {
        Self {
            free: BTreeMap::from([(at, len)]),
        }
    }

    /// The lowest place of `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Option<usize> {
        let len = len.checked_next_multiple_of(Self::GRAIN)?.max(Self::GRAIN);
        let (&at, &room) = self.free.iter().find(|&(_, &room)| room >= len)?;
        self.free.remove(&at);
        if room > len {
            self.free.insert(at + len, room - len);
        }
        Some(at)
    }

    /// Gives back what [`Self::take`] gave for this length.
    pub(crate) fn give(&mut self, at: usize, len: usize) {
        let mut len = len.next_multiple_of(Self::GRAIN).max(Self::GRAIN);
        let mut at = at;
        if let Some(next) = self.free.remove(&(at + len)) {
            len += next;
        }
        if let Some((&before, &room)) = self.free.range(..at).next_back()
            && before + room == at
        {
            at = before;
            len += room;
        }
        self.free.insert(at, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_given_back_is_one_piece() {
        let mut arena = Arena::new(4096, 1 << 20);
        let mut taken = Vec::new();
        let mut len = 100;
        while let Some(at) = arena.take(len) {
            assert!(taken.iter().all(|&(a, l): &(usize, usize)| {
                at >= a + l.next_multiple_of(Arena::GRAIN) || at + len <= a
            }));
            taken.push((at, len));
            len = len * 7 % 9000 + 1;
        }
        assert!(taken.len() > 100);
        // An order that merges on the left, on the right, and on both sides.
        while !taken.is_empty() {
            let (at, len) = taken.remove(taken.len() * 3 / 5 % taken.len());
            arena.give(at, len);
        }
        assert_eq!(arena.free, BTreeMap::from([(4096, 1 << 20)]));
        assert_eq!(arena.take(usize::MAX), None);
    }
}
