//! Random numbers that a seed reproduces, and payloads that identify their message.

/// xorshift64*.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // spreads small seeds; a state of 0 would stay 0
        let mut random = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..8 {
            random.next();
        }
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    /// A number at least `from` and below `to`.
    pub(crate) fn range(&mut self, from: usize, to: usize) -> usize {
        from + self.below((to - from) as u64) as usize
    }
}

/// A seed for a run without the option.
pub(crate) fn seed() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(1, |since| since.as_nanos() as u64);
    (now ^ u64::from(std::process::id()) << 32) % 1_000_000_000
}

/// `len` bytes that depend on `tag` in every word.
pub(crate) fn pattern(tag: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    let mut at = tag;
    while bytes.len() < len {
        at = at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(tag | 1);
        bytes.extend_from_slice(&at.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
