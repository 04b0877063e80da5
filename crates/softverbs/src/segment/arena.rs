//! Allocator of ranges in a segment: first fit, adjacent free ranges are merged.

use crate::sys::{Errno, Grow, Res};

/// The free ranges of one part of the segment.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Offset and length, sorted by offset; no two are adjacent. Capacity is reserved for one range
    /// more than there are allocated ranges, which is the maximum: so `give` needs no memory.
    free: Vec<(usize, usize)>,
    taken: usize,
}

impl Arena {
    /// Offsets and lengths of allocated ranges are multiples of this.
    pub(crate) const GRAIN: usize = 512;

    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(at: usize, len: usize) -> Res<Self> {
        let mut free = Vec::new();
        free.try_push((at, len))?;
        Ok(Self { free, taken: 0 })
    }

    /// Allocates the lowest free range of `len` bytes.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take(&mut self, len: usize) -> Res<usize> {
        const NONE: Errno = Errno(libc::ENOMEM);
        let len = len.checked_next_multiple_of(Self::GRAIN).ok_or(NONE)?;
        let len = len.max(Self::GRAIN);
        let fits = |&(_, room): &(usize, usize)| room >= len;
        let index = self.free.iter().position(fits).ok_or(NONE)?;
        self.free.make_room(self.taken + 2 - self.free.len())?;
        self.taken += 1;
        let (at, room) = self.free[index];
        if room > len {
            self.free[index] = (at + len, room - len);
        } else {
            self.free.remove(index);
        }
        Ok(at)
    }

    /// Releases a range that [`Self::take`] returned for this length.
    pub(crate) fn give(&mut self, at: usize, len: usize) {
        let len = len.next_multiple_of(Self::GRAIN).max(Self::GRAIN);
        self.taken -= 1;
        let next = self.free.partition_point(|&(other, _)| other < at);
        let after = self
            .free
            .get(next)
            .is_some_and(|&(other, _)| other == at + len);
        let before = next
            .checked_sub(1)
            .filter(|&index| self.free[index].0 + self.free[index].1 == at);
        match (before, after) {
            (Some(before), true) => {
                self.free[before].1 += len + self.free[next].1;
                self.free.remove(next);
            }
            (Some(before), false) => self.free[before].1 += len,
            (None, true) => self.free[next] = (at, len + self.free[next].1),
            (None, false) => self.free.insert(next, (at, len)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_given_back_is_one_piece() {
        let mut arena = Arena::new(4096, 1 << 20).unwrap();
        let mut taken = Vec::new();
        let mut len = 100;
        while let Ok(at) = arena.take(len) {
            assert!(taken.iter().all(|&(a, l): &(usize, usize)| {
                at >= a + l.next_multiple_of(Arena::GRAIN) || at + len <= a
            }));
            taken.push((at, len));
            len = len * 7 % 9000 + 1;
        }
        assert!(taken.len() > 100);
        // This order of releases merges on the left, on the right, and on both sides.
        while !taken.is_empty() {
            let (at, len) = taken.remove(taken.len() * 3 / 5 % taken.len());
            let room = arena.free.capacity();
            arena.give(at, len);
            assert_eq!(arena.free.capacity(), room);
            assert!(arena.free.is_sorted());
        }
        assert_eq!((&arena.free[..], arena.taken), (&[(4096, 1 << 20)][..], 0));
        assert!(arena.take(usize::MAX).is_err());
        assert!(arena.take(1 << 21).is_err());
    }
}
