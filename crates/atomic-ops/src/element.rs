//! Values of the datatypes, by what their operations need.

/// A value.
pub(crate) trait Element: Copy {
    /// The value in the first bytes of a slice.
    fn read(bytes: &[u8]) -> Self;
    /// Writes the value to the first bytes of a slice.
    fn write(self, bytes: &mut [u8]);
    fn sum(self, other: Self) -> Self;
    fn diff(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
    fn equals(self, other: Self) -> bool;
    /// 1 or 0.
    fn logical(value: bool) -> Self;

    fn is_true(self) -> bool {
        !self.equals(Self::logical(false))
    }
}

/// A value with an order, partial for floating point.
pub(crate) trait Ordered: Element {
    fn less(self, other: Self) -> bool;
}

/// A value with bits.
pub(crate) trait Integer: Ordered {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
    /// The bits of `self` where `mask` has ones, those of `other` where it has zeros.
    fn masked(self, mask: Self, other: Self) -> Self;
}

/// The first `N` bytes, with zeros for those that are missing.
pub(crate) fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut all = [0; N];
    let len = bytes.len().min(N);
    all[..len].copy_from_slice(&bytes[..len]);
    all
}

/// Writes the bytes for which there is room.
pub(crate) fn put(to: &mut [u8], bytes: &[u8]) {
    let len = bytes.len().min(to.len());
    to[..len].copy_from_slice(&bytes[..len]);
}

macro_rules! bytes {
    () => {
        fn read(bytes: &[u8]) -> Self {
            Self::from_ne_bytes(first(bytes))
        }
        fn write(self, bytes: &mut [u8]) {
            put(bytes, &self.to_ne_bytes());
        }
        fn equals(self, other: Self) -> bool {
            self == other
        }
    };
}

macro_rules! integers {
    ($($type:ty)*) => { $(
        impl Element for $type {
            bytes!();
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn diff(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            fn prod(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn logical(value: bool) -> Self {
                Self::from(value)
            }
        }

        impl Ordered for $type {
            fn less(self, other: Self) -> bool {
                self < other
            }
        }

        impl Integer for $type {
            fn and(self, other: Self) -> Self {
                self & other
            }
            fn or(self, other: Self) -> Self {
                self | other
            }
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
            fn masked(self, mask: Self, other: Self) -> Self {
                self & mask | other & !mask
            }
        }
    )* };
}

integers! { i8 u8 i16 u16 i32 u32 i64 u64 i128 u128 }

macro_rules! floats {
    ($($type:ty)*) => { $(
        impl Element for $type {
            bytes!();
            fn sum(self, other: Self) -> Self {
                self + other
            }
            fn diff(self, other: Self) -> Self {
                self - other
            }
            fn prod(self, other: Self) -> Self {
                self * other
            }
            fn logical(value: bool) -> Self {
                Self::from(u8::from(value))
            }
        }

        impl Ordered for $type {
            fn less(self, other: Self) -> bool {
                self < other
            }
        }
    )* };
}

floats! { f32 f64 }
