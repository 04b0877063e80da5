//! Keys of memory regions and windows.

use crate::segment::layout::MAX_REGIONS;

/// A 32-bit key: an index of 20 bits and a generation of 12 bits, which differs between successive
/// regions of one index. The low 8 bits belong to the generation, because the owner of a memory
/// window may choose them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Key(pub(crate) u32);

impl Key {
    pub(crate) fn new(index: u32, generation: u32) -> Self {
        Self((generation & 0xf00) << 20 | index << 8 | generation & 0xff)
    }

    /// The key with its low 8 bits cleared and the upper 4 bits of its generation incremented.
    pub(crate) fn with_next_upper(self) -> u32 {
        (self.0 & !0xff).wrapping_add(1 << 28)
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        (self.0 >> 8) as usize & (MAX_REGIONS - 1)
    }
}
