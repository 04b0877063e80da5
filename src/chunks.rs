//! An array that grows without moving its elements: no element is copied when it grows, so the
//! longest append takes one allocation.

use std::ops::{Index, IndexMut};

/// Base-2 logarithm of the number of elements in a chunk.
const LOG2: u32 = 10;
/// Elements of a chunk.
pub(crate) const CHUNK: usize = 1 << LOG2;
const MASK: u32 = (1 << LOG2) - 1;

/// Elements with indices from 0, in chunks of [`CHUNK`] elements. Memory is returned when the array
/// is dropped.
#[derive(Debug)]
pub(crate) struct Chunks<T> {
    /// All but the last one that is used are full; those behind it are reserved and empty.
    chunks: Vec<Vec<T>>,
    len: u32,
}

impl<T> Chunks<T> {
    /// An array without elements, with memory for `capacity` elements.
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        let chunks = capacity.div_ceil(CHUNK);
        Self {
            chunks: (0..chunks).map(|_| Vec::with_capacity(CHUNK)).collect(),
            len: 0,
        }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Whether no element can be appended.
    pub(crate) fn is_full(&self) -> bool {
        self.len >= u32::MAX - 2
    }

    /// Appends an element and returns its index. Allocates if the last chunk is full and none is
    /// reserved.
    ///
    /// # Panics
    /// The array is full, with `u32::MAX - 2` elements: an index plus 1 is never `u32::MAX`.
    pub(crate) fn push(&mut self, value: T) -> u32 {
        let index = self.len;
        assert!(!self.is_full(), "too many elements");
        let chunk = (index >> LOG2) as usize;
        if chunk == self.chunks.len() {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        self.chunks[chunk].push(value);
        self.len += 1;
        index
    }

    /// The element at `index`, if the array is that long.
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.chunks
            .get((index >> LOG2) as usize)?
            .get((index & MASK) as usize)
    }

    /// As [`Self::get`].
    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.chunks
            .get_mut((index >> LOG2) as usize)?
            .get_mut((index & MASK) as usize)
    }

    /// Bytes of memory, in use and reserved.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<T>() + self.chunks.capacity() * size_of::<Vec<T>>()
    }
}

impl<T> Index<u32> for Chunks<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        &self.chunks[(index >> LOG2) as usize][(index & MASK) as usize]
    }
}

impl<T> IndexMut<u32> for Chunks<T> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.chunks[(index >> LOG2) as usize][(index & MASK) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_stay_where_they_are() {
        let mut array = Chunks::with_capacity(3 * CHUNK + 1);
        let reserved = array.chunks.len();
        for i in 0..4 * CHUNK as u32 {
            assert_eq!(array.push(i * 3), i);
        }
        assert_eq!(
            array.chunks.len(),
            reserved,
            "no chunk beyond the reserved ones"
        );
        let first = std::ptr::from_ref(&array[0]);
        for i in 0..10 * CHUNK as u32 {
            array.push(i);
        }
        assert_eq!(std::ptr::from_ref(&array[0]), first);
        assert_eq!(array[2 * CHUNK as u32 + 1], (2 * CHUNK as u32 + 1) * 3);
        assert_eq!(array.get(array.len()), None);
    }
}
