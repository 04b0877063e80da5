//! The arrivals of a completion queue: the cold rings in which messages have arrived.
//!
//! Bit `i % 64` of word `i / 64` belongs to the queue pair with index `i`, and one summary bit to
//! each word. A sender sets the bit first and the summary bit second. The owner clears the summary
//! bit first and the bit second, so that no bit stays behind a cleared summary bit.

use std::ops::ControlFlow;
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

    /// Clears the bits and calls `take` with the index of each, from index `first` on and then from
    /// 0. If `take` returns false, that bit and all others stay, and the result is its index: a
    /// call that begins with it gives each index its turn, although others are noted all the time.
    #[inline]
    pub(crate) fn drain(&self, first: u32, mut take: impl FnMut(u32) -> bool) -> Option<u32> {
        let summaries = self.map.words::<SUMMARIES>(self.at);
        let any = summaries
            .into_iter()
            .any(|summary| summary.load(Ordering::Relaxed) != 0);
        if !any {
            return None;
        }
        self.drain_from(first as usize % MAX_QPS, &mut take)
            .break_value()
    }

    #[cold]
    fn drain_from(&self, first: usize, take: &mut impl FnMut(u32) -> bool) -> ControlFlow<u32> {
        let (word, bit) = (first / 64, first % 64);
        let (number, at) = (word / 64, word % 64);
        // The word of `first`, and its summary word, are examined in two parts.
        let (ahead, later) = (u64::MAX << bit, u64::MAX << at << 1);
        self.drain_word(word, ahead, take)?;
        self.drain_summary(number, later, take)?;
        for other in (number + 1..SUMMARIES).chain(0..number) {
            self.drain_summary(other, u64::MAX, take)?;
        }
        self.drain_summary(number, !(later | 1 << at), take)?;
        self.drain_word(word, !ahead, take)
    }

    /// Drains the words of a summary word whose bits are in `mask`.
    fn drain_summary(
        &self,
        number: usize,
        mask: u64,
        take: &mut impl FnMut(u32) -> bool,
    ) -> ControlFlow<u32> {
        let summary = self.map.u64(self.at + 8 * number);
        if summary.load(Ordering::Relaxed) & mask == 0 {
            return ControlFlow::Continue(());
        }
        let mut words = summary.fetch_and(!mask, Ordering::AcqRel) & mask;
        while words != 0 {
            let word = 64 * number + words.trailing_zeros() as usize;
            words &= words - 1;
            let taken = self.take_bits(word, u64::MAX, take);
            if taken.is_break() {
                summary.fetch_or(words, Ordering::AcqRel);
                return taken;
            }
        }
        ControlFlow::Continue(())
    }

    /// Drains those bits of a word that are in `mask`.
    fn drain_word(
        &self,
        word: usize,
        mask: u64,
        take: &mut impl FnMut(u32) -> bool,
    ) -> ControlFlow<u32> {
        let summary = self.map.u64(self.at + 8 * (word / 64));
        let flag = 1 << (word % 64);
        if summary.load(Ordering::Relaxed) & flag == 0 {
            return ControlFlow::Continue(());
        }
        summary.fetch_and(!flag, Ordering::AcqRel);
        self.take_bits(word, mask, take)
    }

    /// As [`Self::drain_word`], for a word whose summary bit is cleared. Sets that bit if bits
    /// stay.
    fn take_bits(
        &self,
        word: usize,
        mask: u64,
        take: &mut impl FnMut(u32) -> bool,
    ) -> ControlFlow<u32> {
        let bits = self.map.u64(self.at + WORDS_AT + 8 * word);
        let found = bits.fetch_and(!mask, Ordering::AcqRel);
        let mut left = found & mask;
        let mut refused = ControlFlow::Continue(());
        while left != 0 {
            let index = 64 * word as u32 + left.trailing_zeros();
            if !take(index) {
                bits.fetch_or(left, Ordering::AcqRel);
                refused = ControlFlow::Break(index);
                break;
            }
            left &= left - 1;
        }
        if refused.is_break() || found & !mask != 0 {
            let summary = self.map.u64(self.at + 8 * (word / 64));
            summary.fetch_or(1 << (word % 64), Ordering::AcqRel);
        }
        refused
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sys::{fallocate, memfd_create};
    use std::os::fd::AsRawFd;

    fn mapping() -> Mapping {
        let len = ARRIVALS_LEN.next_multiple_of(4096);
        let file = memfd_create(c"arrivals", len).unwrap();
        fallocate(file.as_raw_fd(), 0, len).unwrap();
        Mapping::new(&file, len).unwrap()
    }

    /// A neighbour notes arrivals as fast as they are taken, `room` at a time.
    #[test]
    fn no_index_waits_for_the_others_for_more_than_one_round() {
        for room in [1, 3, 64] {
            let map = mapping();
            let arrivals = Arrivals::at(&map, 0);
            let all = [0, 5, 63, 64, 70, 4095, 4096, 9000, MAX_QPS as u32 - 1];
            let mut calls = [0; 9];
            let mut first = 0;
            for _ in 0..900 {
                for index in all {
                    note_arrival(&map, 0, index);
                }
                let mut left = room;
                let refused = arrivals.drain(first, |index| {
                    if left == 0 {
                        return false;
                    }
                    left -= 1;
                    let which = all.iter().position(|&other| other == index);
                    calls[which.unwrap()] += 1;
                    true
                });
                first = refused.unwrap_or(first);
            }
            let (least, most) = (calls.iter().min().unwrap(), calls.iter().max().unwrap());
            assert!(
                *least >= 100.min(900 * room / 9) && most - least <= 1,
                "{calls:?}"
            );
        }
    }

    #[test]
    fn each_arrival_is_found_once_in_parts_of_any_size() {
        let map = mapping();
        let arrivals = Arrivals::at(&map, 0);
        let all: Vec<u32> = (0..MAX_QPS as u32).step_by(61).collect();
        for part in [1, 2, 64, 1000] {
            for &index in &all {
                note_arrival(&map, 0, index);
                note_arrival(&map, 0, index);
            }
            let mut found = Vec::new();
            let mut first = 77;
            loop {
                let before = found.len();
                let refused = arrivals.drain(first, |index| {
                    let room = found.len() < before + part;
                    if room {
                        found.push(index);
                    }
                    room
                });
                first = refused.unwrap_or(first);
                if found.len() == before {
                    break;
                }
            }
            found.sort_unstable();
            assert_eq!(found, all, "{part}");
        }
    }
}
