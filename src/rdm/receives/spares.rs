//! Memory of stored payloads, which is kept for reuse.
//!
//! The vectors are in classes of powers of two: a payload has memory of less than twice its length,
//! or of one block of credit. So the credit of the stored messages bounds their memory, whatever
//! the lengths of those before them.

use crate::wire::rdm::packet::BLOCK_SIZE;
use crate::wire::rdm::terms::MAX_EAGER;

/// Number of vectors of each class that are kept: 4 MiB in all classes together.
const KEPT: usize = 256;

/// The capacity of the smallest vectors, which doubles from class to class.
const SMALLEST: usize = BLOCK_SIZE as usize;

const CLASSES: usize = (MAX_EAGER / BLOCK_SIZE).ilog2() as usize + 1;

/// See the module.
#[derive(Default)]
pub(super) struct Spares([Vec<Vec<u8>>; CLASSES]);

impl Spares {
    /// The class of payloads of this length, not 0; one that is too long has none of [`CLASSES`].
    const fn class(len: usize) -> usize {
        len.div_ceil(SMALLEST).next_power_of_two().ilog2() as usize
    }

    /// An empty vector with room for `len` bytes, at most [`MAX_EAGER`].
    pub(super) fn take(&mut self, len: usize) -> Vec<u8> {
        if len == 0 {
            return Vec::new();
        }
        let class = Self::class(len);
        let spare = self.0.get_mut(class).and_then(Vec::pop);
        spare.unwrap_or_else(|| Vec::with_capacity(SMALLEST << class))
    }

    /// Takes a vector back.
    pub(super) fn put(&mut self, mut bytes: Vec<u8>) {
        let capacity = bytes.capacity();
        if capacity < SMALLEST {
            return;
        }
        let class = Self::class(capacity);
        if let Some(spare) = self.0.get_mut(class)
            && capacity == SMALLEST << class
            && spare.len() < KEPT
        {
            bytes.clear();
            spare.push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::rdm::packet::eager_credit;

    /// Short messages behind long ones do not keep the memory of these.
    #[test]
    fn credit_bounds_the_memory_of_payloads() {
        let mut spares = Spares::default();
        let most = MAX_EAGER as usize;
        let long: Vec<_> = (0..2 * KEPT).map(|_| spares.take(most)).collect();
        for bytes in long {
            spares.put(bytes);
        }
        for len in 0..=most {
            let bytes = spares.take(len);
            let blocks = eager_credit(len as u32).blocks as usize;
            assert!(bytes.is_empty() && bytes.capacity() >= len);
            let capacity = bytes.capacity();
            assert!(capacity <= 2 * SMALLEST * blocks, "{capacity} for {len}");
            spares.put(bytes);
        }
        assert_eq!(spares.take(0).capacity(), 0);
        // 1 to 64 bytes, 65 to 128, and so on
        let kept: Vec<_> = spares.0.iter().map(Vec::len).collect();
        assert_eq!(kept, [1, 1, 1, 1, 1, 1, 1, KEPT]);
    }

    #[test]
    fn memory_is_used_again() {
        let mut spares = Spares::default();
        for len in [1, 64, 65, 100, 4096, 8192] {
            let mut bytes = spares.take(len);
            bytes.resize(len, 7);
            let at = bytes.as_ptr();
            spares.put(bytes);
            let again = spares.take(len);
            assert_eq!((again.as_ptr(), again.len()), (at, 0));
            spares.put(again);
        }
    }
}
