//! Maps by numbers that this process has chosen: keys of slabs and numbers of queue pairs. A peer
//! cannot choose them, so their hash needs no key.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by such numbers.
pub(super) type NumberMap<V> = HashMap<u32, V, BuildHasherDefault<NumberHasher>>;

/// Hashes one number: a product whose upper bits, which the map compares, depend on all its bits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32((*byte).into());
        }
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    #[inline]
    fn finish(&self) -> u64 {
        // the map finds the bucket by the lower bits
        self.0 ^ self.0 >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::Hash;

    #[test]
    fn keys_of_a_slab_have_different_buckets_and_tags() {
        // places in the lower 24 bits, generations above
        for shift in [0, 8, 24] {
            let hashes = (0..128_u32).map(|number| {
                let mut hasher = NumberHasher::default();
                (number << shift).hash(&mut hasher);
                hasher.finish()
            });
            let hashes: Vec<_> = hashes.collect();
            let buckets: HashSet<_> = hashes.iter().map(|hash| hash % 256).collect();
            let tags: HashSet<_> = hashes.iter().map(|hash| hash >> 57).collect();
            // random ones: 101 and 81
            assert!(buckets.len() > 80, "{shift}: {} buckets", buckets.len());
            assert!(tags.len() > 60, "{shift}: {} tags", tags.len());
        }
    }
}
