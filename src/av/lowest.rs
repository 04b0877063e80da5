//! A set of numbers that finds its lowest one: a tree of bitmaps, 64 bits per word.

/// Levels of the tree: 64^6 numbers.
const LEVELS: usize = 6;

/// The set. Adding, removing and finding read at most [`LEVELS`] words.
#[derive(Debug, Default)]
pub(super) struct Lowest {
    /// `levels[0]` has a bit for each number, `levels[n + 1]` a bit for each word of `levels[n]`
    /// that is not 0.
    levels: [Vec<u64>; LEVELS],
}

impl Lowest {
    /// Adds a number. Allocates if it is the largest so far.
    pub(super) fn add(&mut self, number: u32) {
        let mut at = number as usize;
        for level in &mut self.levels {
            let (word, bit) = (at / 64, at % 64);
            if level.len() <= word {
                level.resize(word + 1, 0);
            }
            level[word] |= 1 << bit;
            at = word;
        }
    }

    /// Removes the lowest number.
    pub(super) fn take(&mut self) -> Option<u32> {
        let mut word = 0;
        for level in self.levels.iter().rev() {
            let bits = *level.get(word)?;
            if bits == 0 {
                return None;
            }
            word = word * 64 + bits.trailing_zeros() as usize;
        }
        let number = word;
        let mut at = number;
        for level in &mut self.levels {
            let (word, bit) = (at / 64, at % 64);
            level[word] &= !(1 << bit);
            if level[word] != 0 {
                break;
            }
            at = word;
        }
        Some(number as u32)
    }

    /// Bytes of memory.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.levels.iter().map(|level| level.capacity() * 8).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn it_agrees_with_an_ordered_set() {
        let (mut lowest, mut set) = (Lowest::default(), BTreeSet::new());
        let mut state = 3_u64;
        for _ in 0..100_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // few and many numbers, far apart and dense
            let number = (state >> 33) as u32 >> (state >> 20 & 15);
            if state >> 30 & 3 == 0 {
                assert_eq!(lowest.take(), set.pop_first());
            } else if number < 1 << 26 {
                lowest.add(number);
                set.insert(number);
            }
        }
        while let Some(number) = set.pop_first() {
            assert_eq!(lowest.take(), Some(number));
        }
        assert_eq!(lowest.take(), None);
    }
}
