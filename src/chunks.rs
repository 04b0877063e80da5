//! An array that grows without moving its elements: no element is copied when it grows, so the
//! longest append takes one allocation.

#![allow(unsafe_code, reason = "elements in memory of several allocations")]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};
use std::ptr::NonNull;

use crate::pages::{HUGE, LINE, Memory};

/// Base-2 logarithm of the number of elements in a chunk.
const LOG2: u32 = 10;
/// Elements of a chunk.
pub(crate) const CHUNK: usize = 1 << LOG2;
const MASK: u32 = (1 << LOG2) - 1;
/// From this size on an array grows by huge pages: a part of the last one, which is not used, is
/// less than half of its memory.
const LARGE: usize = 2 * HUGE;

/// Elements with indices from 0, in chunks of [`CHUNK`] elements. Memory is returned when the array
/// is dropped. The first element of each chunk begins a cache line.
pub(crate) struct Chunks<T> {
    /// The chunks: the elements below `len` are initialized, the others are not.
    chunks: Vec<NonNull<T>>,
    /// The memory of the chunks.
    memory: Vec<Memory>,
    /// At most [`CHUNK`] for each chunk.
    len: u32,
    /// Whether it grows by huge pages when it is large.
    huge: bool,
    of: PhantomData<T>,
}

// SAFETY: it owns its elements, as a `Vec<T>` does.
unsafe impl<T: Send> Send for Chunks<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Chunks<T> {}

impl<T> Chunks<T> {
    /// Bytes of a chunk.
    const BYTES: usize = {
        assert!(size_of::<T>() > 0 && align_of::<T>() <= LINE);
        CHUNK * size_of::<T>()
    };

    /// An array without elements, with memory for `capacity` elements.
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self::new(capacity, false)
    }

    /// As [`Self::with_capacity`]; an array of [`LARGE`] bytes and more grows by huge pages, each
    /// of which has several chunks. The kernel clears a page when its first element is written.
    pub(crate) fn in_huge_pages(capacity: usize) -> Self {
        Self::new(capacity, true)
    }

    fn new(capacity: usize, huge: bool) -> Self {
        let mut array = Self {
            chunks: Vec::with_capacity(capacity.div_ceil(CHUNK)),
            memory: Vec::new(),
            len: 0,
            huge,
            of: PhantomData,
        };
        while array.chunks.len() * CHUNK < capacity {
            array.grow();
        }
        array
    }

    /// Adds a chunk, or those of a huge page.
    #[cold]
    fn grow(&mut self) {
        let huge = self.huge && self.chunks.len() * Self::BYTES >= LARGE;
        let count = if huge { (HUGE / Self::BYTES).max(1) } else { 1 };
        let bytes = if count > 1 { HUGE } else { Self::BYTES };
        let memory = Memory::uninit(bytes);
        let first = memory.base().cast::<T>();
        self.memory.push(memory);
        for chunk in 0..count {
            // SAFETY: `count` chunks are not longer than the memory.
            self.chunks.push(unsafe { first.add(chunk * CHUNK) });
        }
    }

    /// Number of elements.
    #[inline(always)]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Whether no element can be appended.
    pub(crate) fn is_full(&self) -> bool {
        self.len >= u32::MAX - 2
    }

    /// The place of an element.
    ///
    /// # Safety
    /// A chunk has it: `index` is less than [`CHUNK`] for each chunk.
    #[inline(always)]
    unsafe fn place(&self, index: u32) -> NonNull<T> {
        // SAFETY: the caller's promise.
        let chunk = unsafe { self.chunks.get_unchecked((index >> LOG2) as usize) };
        // SAFETY: the chunk has `CHUNK` elements.
        unsafe { chunk.add((index & MASK) as usize) }
    }

    /// Appends an element and returns its index. Allocates if the last chunk is full and none is
    /// reserved.
    ///
    /// # Panics
    /// The array is full, with `u32::MAX - 2` elements: an index plus 1 is never `u32::MAX`.
    pub(crate) fn push(&mut self, value: T) -> u32 {
        let index = self.len;
        assert!(!self.is_full(), "too many elements");
        if (index >> LOG2) as usize == self.chunks.len() {
            self.grow();
        }
        // SAFETY: `len` is at most `CHUNK` for each chunk, and was not exactly that, or one chunk
        // was added.
        let place = unsafe { self.place(index) };
        // SAFETY: memory of this object that has no element.
        unsafe { place.write(value) };
        self.len += 1;
        index
    }

    /// The element at `index`, if the array is that long.
    #[inline(always)]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        if index >= self.len {
            return None;
        }
        // SAFETY: `len` is at most `CHUNK` for each chunk.
        let place = unsafe { self.place(index) };
        // SAFETY: elements below `len` are initialized, and `self` is borrowed.
        Some(unsafe { place.as_ref() })
    }

    /// As [`Self::get`].
    #[inline(always)]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        if index >= self.len {
            return None;
        }
        // SAFETY: `len` is at most `CHUNK` for each chunk.
        let mut place = unsafe { self.place(index) };
        // SAFETY: elements below `len` are initialized, and `self` is borrowed exclusively.
        Some(unsafe { place.as_mut() })
    }

    /// Bytes of memory, in use and reserved.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        let memory: usize = self.memory.iter().map(Memory::bytes).sum();
        memory
            + self.chunks.capacity() * size_of::<NonNull<T>>()
            + self.memory.capacity() * size_of::<Memory>()
    }
}

impl<T> Drop for Chunks<T> {
    fn drop(&mut self) {
        if !std::mem::needs_drop::<T>() {
            return;
        }
        for index in 0..self.len {
            // SAFETY: `len` is at most `CHUNK` for each chunk.
            let place = unsafe { self.place(index) };
            // SAFETY: elements below `len` are initialized; each is dropped once, here.
            unsafe { place.drop_in_place() };
        }
    }
}

impl<T> fmt::Debug for Chunks<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chunks({} elements)", self.len)
    }
}

#[cold]
#[inline(never)]
fn outside(index: u32, len: u32) -> ! {
    panic!("element {index} of {len}");
}

impl<T> Index<u32> for Chunks<T> {
    type Output = T;

    #[inline(always)]
    fn index(&self, index: u32) -> &T {
        match self.get(index) {
            Some(element) => element,
            None => outside(index, self.len),
        }
    }
}

impl<T> IndexMut<u32> for Chunks<T> {
    #[inline(always)]
    fn index_mut(&mut self, index: u32) -> &mut T {
        let len = self.len;
        match self.get_mut(index) {
            Some(element) => element,
            None => outside(index, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

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

    /// Elements of 96 bytes: a huge page has 21 chunks, and some bytes more.
    #[test]
    fn elements_of_huge_pages_are_distinct() {
        let count = 100 * CHUNK as u32 + 7;
        let mut array = Chunks::in_huge_pages(0);
        for i in 0..count {
            array.push([u64::from(i); 12]);
        }
        for i in 0..count {
            assert_eq!(array[i], [u64::from(i); 12]);
        }
        let huge = array.memory.iter().filter(|memory| memory.bytes() == HUGE);
        // 43 chunks have 4 MiB, and the other 58 are in pages of 21
        assert_eq!(huge.count(), 3);
        let bytes = array.bytes();
        assert!(bytes < count as usize * 96 + HUGE + 8192, "{bytes}");
    }

    #[test]
    fn each_element_is_dropped_once() {
        let element = Rc::new(());
        let mut array = Chunks::with_capacity(5000);
        for _ in 0..2 * CHUNK + 1 {
            array.push(Rc::clone(&element));
        }
        assert_eq!(Rc::strong_count(&element), 2 * CHUNK + 2);
        drop(array);
        assert_eq!(Rc::strong_count(&element), 1);
    }

    #[test]
    #[should_panic(expected = "element 3 of 3")]
    fn an_index_outside_is_refused() {
        let mut array = Chunks::with_capacity(0);
        for i in 0..3 {
            array.push(i);
        }
        array[3] = 0;
    }
}
