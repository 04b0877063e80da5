//! Floating point of 16 and 8 bits: a sign, `EXPONENT` bits and `MANTISSA` bits.

use crate::element::{Element, Ordered, put};

/// `BYTES`: the size. `INFINITE`: whether the largest exponent is that of infinities and NaNs, as
/// in IEEE 754; otherwise only the value with all bits set is a NaN, and there is no infinity.
#[derive(Clone, Copy)]
pub(crate) struct Small<
    const BYTES: usize,
    const EXPONENT: u32,
    const MANTISSA: u32,
    const INFINITE: bool,
>(u16);

/// `FI_FLOAT16`: binary16 of IEEE 754.
pub(crate) type Float16 = Small<2, 5, 10, true>;
/// `FI_BFLOAT16`: the upper half of a binary32.
pub(crate) type Bfloat16 = Small<2, 8, 7, true>;
/// `FI_FLOAT8_E4M3`: E4M3 of the OCP 8-bit floating point specification.
pub(crate) type Float8E4m3 = Small<1, 4, 3, false>;
/// `FI_FLOAT8_E5M2`: E5M2 of the same.
pub(crate) type Float8E5m2 = Small<1, 5, 2, true>;

impl<const BYTES: usize, const EXPONENT: u32, const MANTISSA: u32, const INFINITE: bool>
    Small<BYTES, EXPONENT, MANTISSA, INFINITE>
{
    const BIAS: i32 = (1 << (EXPONENT - 1)) - 1;
    const SIGN: u16 = 1 << (EXPONENT + MANTISSA);
    /// All bits of the exponent and of the mantissa.
    const LAST: u16 = Self::SIGN - 1;
    /// The bits of the infinity, or of the NaN if there is none.
    const BEYOND: u16 = if INFINITE {
        Self::LAST >> MANTISSA << MANTISSA
    } else {
        Self::LAST
    };

    pub(crate) fn to_f64(self) -> f64 {
        let magnitude = self.0 & Self::LAST;
        let value = if magnitude > Self::BEYOND || magnitude == Self::BEYOND && !INFINITE {
            f64::NAN
        } else if magnitude == Self::BEYOND {
            f64::INFINITY
        } else {
            let exponent = i32::from(magnitude >> MANTISSA);
            let mantissa = magnitude & ((1 << MANTISSA) - 1);
            let hidden = u16::from(exponent != 0) << MANTISSA;
            let unit = exponent.max(1) - Self::BIAS - MANTISSA.cast_signed();
            f64::from(hidden | mantissa) * power(unit)
        };
        if self.0 & Self::SIGN == 0 {
            value
        } else {
            -value
        }
    }

    /// Rounds to nearest, ties to even.
    pub(crate) fn of_f64(value: f64) -> Self {
        let sign = if value.is_sign_negative() {
            Self::SIGN
        } else {
            0
        };
        let magnitude = value.abs();
        if magnitude.is_nan() {
            // all bits set: a quiet NaN in each format
            return Self(sign | Self::LAST);
        }
        let least = 1 - Self::BIAS;
        // a subnormal double has exponent -1023 here, far below the least one of the format
        let exponent = (magnitude.to_bits() >> 52) as i32 - 1023;
        if exponent > Self::BIAS + 1 {
            return Self(sign | Self::BEYOND);
        }
        let above = exponent.max(least) - least;
        let unit = above + least - MANTISSA.cast_signed();
        // at most 2^(MANTISSA + 1); with this value it carries to the exponent
        let units = (magnitude * power(-unit)).round_ties_even() as u16;
        let bits = (above.cast_unsigned() << MANTISSA) + u32::from(units);
        // the conversion cannot fail: the exponent is bounded
        let bits = u16::try_from(bits).unwrap_or(Self::BEYOND);
        Self(sign | bits.min(Self::BEYOND))
    }
}

/// 2^exponent, for the exponents of normal numbers.
fn power(exponent: i32) -> f64 {
    f64::from_bits(u64::from((exponent + 1023).cast_unsigned()) << 52)
}

impl<const BYTES: usize, const EXPONENT: u32, const MANTISSA: u32, const INFINITE: bool> Element
    for Small<BYTES, EXPONENT, MANTISSA, INFINITE>
{
    fn read(bytes: &[u8]) -> Self {
        let byte = |at| bytes.get(at).copied().unwrap_or_default();
        Self(match BYTES {
            1 => byte(0).into(),
            _ => u16::from_ne_bytes([byte(0), byte(1)]),
        })
    }

    fn write(self, bytes: &mut [u8]) {
        match BYTES {
            // the upper half is 0
            1 => put(bytes, &[self.0 as u8]),
            _ => put(bytes, &self.0.to_ne_bytes()),
        }
    }

    fn sum(self, other: Self) -> Self {
        Self::of_f64(self.to_f64() + other.to_f64())
    }

    fn diff(self, other: Self) -> Self {
        Self::of_f64(self.to_f64() - other.to_f64())
    }

    fn prod(self, other: Self) -> Self {
        Self::of_f64(self.to_f64() * other.to_f64())
    }

    fn equals(self, other: Self) -> bool {
        self.to_f64() == other.to_f64()
    }

    fn logical(value: bool) -> Self {
        Self::of_f64(u8::from(value).into())
    }
}

impl<const BYTES: usize, const EXPONENT: u32, const MANTISSA: u32, const INFINITE: bool> Ordered
    for Small<BYTES, EXPONENT, MANTISSA, INFINITE>
{
    fn less(self, other: Self) -> bool {
        self.to_f64() < other.to_f64()
    }
}
