//! Keys of registrations and addresses of the peer's memory, each a separate type, so that one
//! cannot be passed as another.

/// The key by which this side's requests refer to a registration of local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Lkey(u32);

/// The key by which a peer's requests refer to a registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Rkey(u32);

/// An address in the peer's memory, in the address space of the registration (its iova). Never
/// dereferenced on this side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RemoteAddr(u64);

impl Lkey {
    /// The key with the device's number.
    #[inline]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The device's number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl Rkey {
    /// The key with the device's number.
    #[inline]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The device's number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl RemoteAddr {
    /// 0: a record has no address.
    pub const NULL: Self = Self(0);

    /// The address with this number.
    #[inline]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whether the address is 0.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address plus `bytes`, modulo 2^64. The peer's device refuses an address outside the
    /// registration.
    #[inline]
    #[must_use]
    pub const fn wrapping_add(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// The address plus `bytes`; `None` if the sum exceeds 2^64 - 1.
    #[inline]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Whether the address is aligned to `bytes`.
    #[inline]
    pub const fn is_multiple_of(self, bytes: u64) -> bool {
        self.0.is_multiple_of(bytes)
    }
}
