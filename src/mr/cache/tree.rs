//! Maps pages to registrations: a radix tree of three levels, read without a lock.
//!
//! A writer holds the cache's slow lock. Nodes are allocated before the lock is acquired, and exist
//! as long as the tree.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::sync::AtomicU64;

/// Bits of a page number per level.
const BITS: u32 = if cfg!(all(test, loom)) { 1 } else { 12 };
const FAN: usize = 1 << BITS;
const LEVELS: u32 = 3;

/// The two kinds of registrations of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The device may only read the memory.
    Read = 0,
    /// The device may also write the memory.
    Write = 1,
}

/// Two words for each of 4096 pages: 64 KiB, which the kernel allocates page by page on access.
type Leaf = [[AtomicU64; 2]; FAN];
type Mid = [OnceLock<Box<Leaf>>; FAN];

/// Maps a page number to two words; 0 means no registration.
#[derive(Debug)]
pub(super) struct Tree {
    root: Box<[OnceLock<Box<Mid>>; FAN]>,
}

/// Allocates an array on the heap without a copy on the stack.
fn array<T>(make: impl Fn() -> T) -> Box<[T; FAN]> {
    let all: Box<[T]> = (0..FAN).map(|_| make()).collect();
    match all.try_into() {
        Ok(array) => array,
        Err(_) => unreachable!("FAN elements were collected"),
    }
}

fn index(page: u64, level: u32) -> usize {
    ((page >> (BITS * (LEVELS - 1 - level))) as usize) & (FAN - 1)
}

impl Tree {
    pub(super) fn new() -> Self {
        Self {
            root: array(OnceLock::new),
        }
    }

    /// Whether the tree can contain the page number.
    pub(super) fn holds(page: u64) -> bool {
        page >> (BITS * LEVELS) == 0
    }

    /// The node with the page's words; `None` means that no word is set.
    #[inline]
    fn leaf(&self, page: u64) -> Option<&Leaf> {
        if !Self::holds(page) {
            return None;
        }
        let mid = self.root[index(page, 0)].get()?;
        mid[index(page, 1)].get().map(|leaf| &**leaf)
    }

    /// A page's word.
    #[inline]
    pub(super) fn get(&self, page: u64, kind: Kind) -> u64 {
        match self.leaf(page) {
            Some(leaf) => leaf[index(page, 2)][kind as usize].load(Ordering::Acquire),
            None => 0,
        }
    }

    /// Allocates the nodes of the pages from `first` up to `end`. The caller must not hold the slow
    /// lock.
    pub(super) fn prepare(&self, first: u64, end: u64) {
        let mut page = first;
        while page < end && Self::holds(page) {
            let mid = self.root[index(page, 0)].get_or_init(|| array(OnceLock::new));
            mid[index(page, 1)].get_or_init(|| array(Default::default));
            page = (page | (FAN as u64 - 1)) + 1;
        }
    }

    /// Sets the words of pages, whose nodes must exist. The slow lock is held.
    pub(super) fn set(&self, first: u64, end: u64, kind: Kind, word: u64) {
        for page in first..end {
            if let Some(leaf) = self.leaf(page) {
                leaf[index(page, 2)][kind as usize].store(word, Ordering::Release);
            }
        }
    }

    /// Calls `each`, which may change words, with the words of a range, once for a run of equal
    /// words, and not with 0. The slow lock is held. Missing nodes are skipped as a whole.
    pub(super) fn words(&self, first: u64, end: u64, kind: Kind, mut each: impl FnMut(u64)) {
        let (mut page, mut last) = (first, 0);
        while page < end && Self::holds(page) {
            if self.root[index(page, 0)].get().is_none() {
                page = (page | ((1 << (2 * BITS)) - 1)) + 1;
                continue;
            }
            let Some(leaf) = self.leaf(page) else {
                page = (page | (FAN as u64 - 1)) + 1;
                continue;
            };
            let word = leaf[index(page, 2)][kind as usize].load(Ordering::Relaxed);
            if word != 0 && word != last {
                each(word);
                last = word;
            }
            page += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_by_page_and_kind() {
        let tree = Tree::new();
        let far = 1 << 35;
        assert_eq!(tree.get(far, Kind::Read), 0);
        tree.prepare(far - 2, far + 3);
        tree.set(far - 2, far + 3, Kind::Write, 7);
        tree.set(far, far + 1, Kind::Read, 9);
        assert_eq!(tree.get(far - 2, Kind::Write), 7);
        assert_eq!(tree.get(far - 2, Kind::Read), 0);
        assert_eq!(tree.get(far + 3, Kind::Write), 0);
        let mut seen = Vec::new();
        tree.words(0, u64::MAX, Kind::Write, |word| seen.push(word));
        tree.words(far, far + 1, Kind::Read, |word| seen.push(word));
        assert_eq!(seen, [7, 9]);
    }

    #[test]
    fn a_number_that_is_too_high_has_no_word() {
        let tree = Tree::new();
        tree.prepare(1 << 36, (1 << 36) + 1);
        tree.set(1 << 36, (1 << 36) + 1, Kind::Read, 1);
        assert_eq!(tree.get(1 << 36, Kind::Read), 0);
        assert_eq!(tree.get(0, Kind::Read), 0);
    }
}
