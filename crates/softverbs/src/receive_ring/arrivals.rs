//! The arrivals of a completion queue: the cold rings in which messages have arrived.
//!
//! Bit `i % 64` of word `i / 64` belongs to the queue pair with index `i`, and one summary bit to
//! each word. A sender sets the bit first and the summary bit second. The owner clears the summary
//! bit first and the bit second, so that no bit stays behind a cleared summary bit.

use std::sync::atomic::Ordering;

use crate::segment::Mapping;
use crate::segment::layout::MAX_QPS;

const WORDS: usize = MAX_QPS / 64;
const SUMMARIES: usize = WORDS / 64;
const WORDS_AT: usize = 128;
/// Bytes of the arrivals.
pub(crate) const ARRIVALS_LEN: usize = WORDS_AT + 8 * WORDS;

/// Notes a message for the queue pair with this index. `at` is the offset of the arrivals, whose
/// bounds the caller has checked.
#[cold]
pub(crate) fn note_arrival(map: &Mapping, at: usize, index: u32) {
    let index = index as usize % MAX_QPS;
    let word = index / 64;
    map.u64(at + WORDS_AT + 8 * word)
        .fetch_or(1 << (index % 64), Ordering::AcqRel);
    map.u64(at + 8 * (word / 64))
        .fetch_or(1 << (word % 64), Ordering::AcqRel);
}

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Arrivals<'a> {
    map: &'a Mapping,
    at: usize,
}

impl<'a> Arrivals<'a> {
    /// The arrivals at `at`.
    pub(crate) fn at(map: &'a Mapping, at: usize) -> Self {
        Self { map, at }
    }

    /// Clears all bits. No sender knows the arrivals yet.
    pub(crate) fn clear(&self) {
        for at in (0..ARRIVALS_LEN).step_by(8) {
            self.map.u64(self.at + at).store(0, Ordering::Relaxed);
        }
    }

    /// Clears the bits and calls `take` with the index of each. If `take` returns false, that bit
    /// and all others stay.
    #[inline]
    pub(crate) fn drain(&self, mut take: impl FnMut(u32) -> bool) {
        let summaries = self.map.words::<SUMMARIES>(self.at);
        for (number, summary) in summaries.into_iter().enumerate() {
            if summary.load(Ordering::Relaxed) != 0 && !self.drain_summary(number, &mut take) {
                return;
            }
        }
    }

    #[cold]
    fn drain_summary(&self, number: usize, take: &mut impl FnMut(u32) -> bool) -> bool {
        let summary = self.map.u64(self.at + 8 * number);
        let mut words = summary.swap(0, Ordering::AcqRel);
        while words != 0 {
            let word = 64 * number + words.trailing_zeros() as usize;
            let bits = self.map.u64(self.at + WORDS_AT + 8 * word);
            let mut left = bits.swap(0, Ordering::AcqRel);
            while left != 0 {
                if !take(64 * word as u32 + left.trailing_zeros()) {
                    bits.fetch_or(left, Ordering::AcqRel);
                    summary.fetch_or(words, Ordering::AcqRel);
                    return false;
                }
                left &= left - 1;
            }
            words &= words - 1;
        }
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sys::{fallocate, memfd_create};
    use std::os::fd::AsRawFd;

    #[test]
    fn each_arrival_is_found_once_in_parts_of_any_size() {
        let len = ARRIVALS_LEN.next_multiple_of(4096);
        let file = memfd_create(c"arrivals", len).unwrap();
        fallocate(file.as_raw_fd(), 0, len).unwrap();
        let map = Mapping::new(&file, len).unwrap();
        let arrivals = Arrivals::at(&map, 0);
        let all: Vec<u32> = (0..MAX_QPS as u32).step_by(61).collect();
        for part in [1, 2, 64, 1000] {
            for &index in &all {
                note_arrival(&map, 0, index);
                note_arrival(&map, 0, index);
            }
            let mut found = Vec::new();
            loop {
                let before = found.len();
                arrivals.drain(|index| {
                    let room = found.len() < before + part;
                    if room {
                        found.push(index);
                    }
                    room
                });
                if found.len() == before {
                    break;
                }
            }
            found.sort_unstable();
            assert_eq!(found, all, "{part}");
        }
    }
}
