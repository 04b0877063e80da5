//! Words of shared memory, and slots of a ring, whose place was checked once.

use std::ops::Deref;
use std::ptr::NonNull;

use super::Mapping;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU32, AtomicU64};

/// A word of a mapping, which it keeps mapped: an access needs no check of an offset. `A` is an
/// atomic.
#[derive(Debug)]
pub(crate) struct Word<A> {
    word: NonNull<A>,
    _map: Arc<Mapping>,
}

// SAFETY: gives access to an atomic alone, in memory that any thread may unmap.
unsafe impl<A: Sync> Send for Word<A> {}
// SAFETY: as above.
unsafe impl<A: Sync> Sync for Word<A> {}

impl Word<AtomicU64> {
    /// The word of 8 bytes at `at`.
    ///
    /// # Panics
    /// As [`Mapping::u64`].
    pub(crate) fn u64(map: &Arc<Mapping>, at: usize) -> Self {
        Self {
            word: NonNull::from(map.u64(at)),
            _map: Arc::clone(map),
        }
    }
}

impl Word<AtomicU32> {
    /// The word of 4 bytes at `at`.
    ///
    /// # Panics
    /// As [`Mapping::u32`].
    pub(crate) fn u32(map: &Arc<Mapping>, at: usize) -> Self {
        Self {
            word: NonNull::from(map.u32(at)),
            _map: Arc::clone(map),
        }
    }
}

/// The slots of a ring, which it keeps mapped: an access needs no check of an offset.
#[derive(Debug)]
pub(crate) struct Slots {
    map: Arc<Mapping>,
    /// Offset of the first slot in the mapping.
    first: usize,
    mask: u32,
    /// The first slot.
    base: *mut u8,
}

/// Bytes of a slot.
const SLOT: usize = 64;

// SAFETY: gives access to atomics and addresses alone, in memory that any thread may unmap.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// `count` slots from the offset `first` on.
    ///
    /// # Panics
    /// As [`Mapping::u64`] and [`Mapping::bytes`], or `count` is no power of two.
    pub(crate) fn new(map: Arc<Mapping>, first: usize, count: u32) -> Self {
        assert!(count.is_power_of_two() && first.is_multiple_of(8));
        Self {
            base: map.bytes(first, SLOT * count as usize),
            map,
            first,
            mask: count - 1,
        }
    }

    #[inline(always)]
    pub(crate) fn map(&self) -> &Arc<Mapping> {
        &self.map
    }

    /// Offset in the mapping of the slot at a position.
    #[inline(always)]
    pub(crate) fn place(&self, position: u32) -> usize {
        self.first + SLOT * (position & self.mask) as usize
    }

    /// The address of the slot at a position, which is not accessed.
    #[inline(always)]
    pub(crate) fn address(&self, position: u32) -> *mut u8 {
        self.base
            .wrapping_add(SLOT * (position & self.mask) as usize)
    }

    /// The four words of the slot at a position, and the address of the 32 bytes behind them.
    #[cfg(not(all(test, loom)))]
    #[inline(always)]
    pub(crate) fn slot(&self, position: u32) -> ([&AtomicU64; 4], *mut u8) {
        let at = SLOT * (position & self.mask) as usize;
        // SAFETY: `new` has checked all slots; they are aligned, and accessed through atomics and
        // raw copies only.
        unsafe {
            let slot = self.base.add(at);
            let words = std::array::from_fn(|i| AtomicU64::from_ptr(slot.add(8 * i).cast()));
            (words, slot.add(SLOT / 2))
        }
    }

    /// As in the program, through the model's mapping.
    #[cfg(all(test, loom))]
    pub(crate) fn slot(&self, position: u32) -> ([&AtomicU64; 4], *mut u8) {
        debug_assert!(self.base.is_null());
        self.map.words_and_bytes(self.place(position), SLOT / 2)
    }
}

impl<A> Deref for Word<A> {
    type Target = A;

    #[inline(always)]
    fn deref(&self) -> &A {
        // SAFETY: a reference into the mapping, which this object owns a part of.
        unsafe { self.word.as_ref() }
    }
}

/// Sets `count` bits of private memory from the bit `first` on, and returns how many of them were
/// not set before. One step sets up to 64 of them: a step for each bit waits for the store of the
/// previous step, which took 90 ns of a message of 64 slots.
///
/// # Panics
/// The bits lie outside `words`.
#[inline]
pub(crate) fn set_bits(words: &mut [u64], first: u32, count: u32) -> u32 {
    let (mut bit, end, mut changed) = (first, first + count, 0);
    while bit < end {
        let word = &mut words[bit as usize / 64];
        let step = (end - bit).min(64 - bit % 64);
        let bits = u64::MAX >> (64 - step) << (bit % 64);
        changed += (bits & !*word).count_ones();
        *word |= bits;
        bit += step;
    }
    changed
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::set_bits;

    #[test]
    fn the_given_bits_are_set_and_no_others() {
        for first in 0..192 {
            for count in 0..=192 - first {
                let before = [0x8000_0000_0000_0001, 0, 0x00ff_ff00_0000_1100];
                let (mut words, mut wanted, mut changed) = (before, before, 0);
                for bit in first..first + count {
                    changed += u32::from(wanted[bit as usize / 64] >> (bit % 64) & 1 == 0);
                    wanted[bit as usize / 64] |= 1 << (bit % 64);
                }
                assert_eq!(
                    set_bits(&mut words, first, count),
                    changed,
                    "{first} {count}"
                );
                assert_eq!(words, wanted, "{first} {count}");
            }
        }
    }
}
