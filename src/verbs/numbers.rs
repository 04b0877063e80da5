//! Numbers of queue pairs and shared receive queues, each a separate type, so that one cannot be
//! passed as the other.

use std::fmt;

/// The largest number of either kind: packets have 24 bits for it.
const MAX: u32 = (1 << 24) - 1;

/// The number of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct QpNumber(u32);

/// The number of a shared receive queue of an XRC domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct SrqNumber(u32);

impl QpNumber {
    /// `None`: the number has more than 24 bits.
    #[inline]
    pub const fn new(number: u32) -> Option<Self> {
        if number <= MAX {
            Some(Self(number))
        } else {
            None
        }
    }

    /// The number, below 2^24.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number that the device has given to a queue pair, which has 24 bits.
    pub(super) const fn of_device(number: u32) -> Self {
        Self(number & MAX)
    }
}

impl SrqNumber {
    /// `None`: the number has more than 24 bits.
    #[inline]
    pub const fn new(number: u32) -> Option<Self> {
        if number <= MAX {
            Some(Self(number))
        } else {
            None
        }
    }

    /// The number, below 2^24.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number that the device has given to a receive queue, which has 24 bits.
    pub(super) const fn of_device(number: u32) -> Self {
        Self(number & MAX)
    }
}

impl fmt::Display for QpNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for SrqNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_24_bits() {
        assert_eq!(QpNumber::new(MAX).map(QpNumber::get), Some(0xff_ffff));
        assert_eq!(QpNumber::new(MAX + 1), None);
        assert_eq!(SrqNumber::new(MAX).map(SrqNumber::get), Some(0xff_ffff));
        assert_eq!(SrqNumber::new(MAX + 1), None);
    }
}
