//! A keyed hash of two words: another process that chooses the words cannot choose their hashes
//! without knowing the key. It is no cryptographic hash: an observer of hashes can compute the key.

/// The key of an instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hasher {
    first: u64,
    second: u64,
}

impl Hasher {
    /// `seed` is secret and random.
    pub(crate) fn new(seed: u64) -> Self {
        // the steps of splitmix64: two words without a simple relation
        let word = |n: u64| {
            let mut z = seed.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        Self {
            first: word(1),
            second: word(2),
        }
    }

    /// The hash of two words, 64 bits. Two multiplications; the first is folded from 128 bits.
    #[inline]
    pub(crate) fn hash(self, first: u64, second: u64) -> u64 {
        let second = second.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.second;
        let product = u128::from(first ^ self.first) * u128::from(second | 1);
        let folded = (product >> 64) as u64 ^ product as u64;
        (folded ^ folded >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
    }
}
