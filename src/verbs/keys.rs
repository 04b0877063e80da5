//! Keys of registrations, and addresses of the peer's memory: types of their own, so that one is not
//! taken for the other.

/// The key by which this side's requests name a registration of local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Lkey(u32);

/// The key by which a peer's requests name a registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Rkey(u32);

/// An address in the peer's memory, as the peer's device counts: virtual, or from the start of the
/// registration. It is never dereferenced on this side.
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
    /// 0, where a record has no address.
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

    /// Whether it is 0.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address so many bytes behind, modulo 2^64. The peer's device refuses an address outside
    /// the registration.
    #[inline]
    #[must_use]
    pub const fn wrapping_add(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// The address so many bytes behind; `None` if it exceeds 2^64 - 1.
    #[inline]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Whether it is aligned to `bytes`.
    #[inline]
    pub const fn is_multiple_of(self, bytes: u64) -> bool {
        self.0.is_multiple_of(bytes)
    }
}
