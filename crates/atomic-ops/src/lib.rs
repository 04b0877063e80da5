//! The arithmetic of `fi_atomic(3)`: every operation on an element of every datatype.
//!
//! The engine executes with it the atomics that a target's processor executes, and softverbs those
//! that its device executes, so both have the same results. It has no state, device or lock: the
//! caller makes an operation atomic.
//!
//! - Integers wrap. Results of floating point are rounded to nearest, ties to even.
//! - Comparisons are those of C: a NaN is neither less than, equal to nor greater than a value, and
//!   -0.0 equals 0.0. So `FI_MIN` and `FI_MAX` keep the target if an operand is a NaN, and
//!   `FI_CSWAP` does not swap a NaN.
//! - Logical operations take each value that does not equal 0 as true; their results are 1 and 0.
//! - A product of complex numbers is (ac - bd) + (ad + bc)i, without the special cases for
//!   infinities of C, annex G.
//! - `long double` is the 80-bit format of x86. On other processors there is no such datatype here.
//!   Its padding bytes are never changed.
//! - 16-bit and 8-bit floating point: each operation is executed in `double` and rounded once to
//!   the format, which gives the correctly rounded result because `double` has more than twice
//!   their precision. An `E4M3` value has no infinity: a result beyond ±448 is a NaN.

#![allow(
    clippy::float_cmp,
    reason = "the operations are exact comparisons by definition"
)]

mod apply;
mod complex;
mod element;
#[cfg(target_arch = "x86_64")]
mod extended;
mod small;
#[cfg(test)]
mod tests;

/// Size in bytes of the largest element.
pub const MAX_SIZE: usize = 32;

macro_rules! numbered {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* $variant = $number,)* }

        impl $name {
            /// All, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The one with libfabric's number.
            #[inline]
            pub const fn of(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

numbered! {
    /// `enum fi_datatype`, with its numbers.
    Datatype {
        /// `FI_INT8`
        Int8 = 0,
        /// `FI_UINT8`
        Uint8 = 1,
        /// `FI_INT16`
        Int16 = 2,
        /// `FI_UINT16`
        Uint16 = 3,
        /// `FI_INT32`
        Int32 = 4,
        /// `FI_UINT32`
        Uint32 = 5,
        /// `FI_INT64`
        Int64 = 6,
        /// `FI_UINT64`
        Uint64 = 7,
        /// `FI_FLOAT`
        Float = 8,
        /// `FI_DOUBLE`
        Double = 9,
        /// `FI_FLOAT_COMPLEX`
        FloatComplex = 10,
        /// `FI_DOUBLE_COMPLEX`
        DoubleComplex = 11,
        /// `FI_LONG_DOUBLE`
        LongDouble = 12,
        /// `FI_LONG_DOUBLE_COMPLEX`
        LongDoubleComplex = 13,
        /// `FI_INT128`
        Int128 = 14,
        /// `FI_UINT128`
        Uint128 = 15,
        /// `FI_FLOAT16`
        Float16 = 16,
        /// `FI_BFLOAT16`
        Bfloat16 = 17,
        /// `FI_FLOAT8_E4M3`
        Float8E4m3 = 18,
        /// `FI_FLOAT8_E5M2`
        Float8E5m2 = 19,
    }
}

numbered! {
    /// `enum fi_op`, with its numbers, without those of collectives alone.
    Op {
        /// `FI_MIN`
        Min = 0,
        /// `FI_MAX`
        Max = 1,
        /// `FI_SUM`
        Sum = 2,
        /// `FI_PROD`
        Prod = 3,
        /// `FI_LOR`
        LogicalOr = 4,
        /// `FI_LAND`
        LogicalAnd = 5,
        /// `FI_BOR`
        Or = 6,
        /// `FI_BAND`
        And = 7,
        /// `FI_LXOR`
        LogicalXor = 8,
        /// `FI_BXOR`
        Xor = 9,
        /// `FI_ATOMIC_READ`
        Read = 10,
        /// `FI_ATOMIC_WRITE`
        Write = 11,
        /// `FI_CSWAP`
        SwapEq = 12,
        /// `FI_CSWAP_NE`
        SwapNe = 13,
        /// `FI_CSWAP_LE`
        SwapLe = 14,
        /// `FI_CSWAP_LT`
        SwapLt = 15,
        /// `FI_CSWAP_GE`
        SwapGe = 16,
        /// `FI_CSWAP_GT`
        SwapGt = 17,
        /// `FI_MSWAP`
        MaskedSwap = 18,
        /// `FI_DIFF`
        Diff = 19,
    }
}

/// A family of the calls of `fi_atomic(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `fi_atomic`: no result.
    Base,
    /// `fi_fetch_atomic`: the result is the earlier value.
    Fetch,
    /// `fi_compare_atomic`: as fetch, with a second operand.
    Compare,
}

/// The class of a datatype, which decides its operations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Integer,
    Real,
    Complex,
}

impl Datatype {
    /// Size of an element in bytes. An element of a target is aligned to it.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8E4m3 | Self::Float8E5m2 => 1,
            Self::Int16 | Self::Uint16 | Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float => 4,
            Self::Int64 | Self::Uint64 | Self::Double | Self::FloatComplex => 8,
            Self::DoubleComplex | Self::LongDouble | Self::Int128 | Self::Uint128 => 16,
            Self::LongDoubleComplex => MAX_SIZE,
        }
    }

    /// The alignment of an element in C, in bytes, which a target must have: the size of one of the
    /// two parts of a complex number, otherwise the size.
    #[inline]
    pub const fn alignment(self) -> usize {
        match self.class() {
            Class::Complex => self.size() / 2,
            _ => self.size(),
        }
    }

    const fn class(self) -> Class {
        match self {
            Self::Int8
            | Self::Uint8
            | Self::Int16
            | Self::Uint16
            | Self::Int32
            | Self::Uint32
            | Self::Int64
            | Self::Uint64
            | Self::Int128
            | Self::Uint128 => Class::Integer,
            Self::Float
            | Self::Double
            | Self::LongDouble
            | Self::Float16
            | Self::Bfloat16
            | Self::Float8E4m3
            | Self::Float8E5m2 => Class::Real,
            Self::FloatComplex | Self::DoubleComplex | Self::LongDoubleComplex => Class::Complex,
        }
    }

    /// Whether the processor has the datatype.
    const fn exists(self) -> bool {
        let long = matches!(self, Self::LongDouble | Self::LongDoubleComplex);
        !long || cfg!(target_arch = "x86_64")
    }
}

impl Op {
    /// Whether the operation is one of a family of calls.
    #[inline]
    pub const fn is_of(self, family: Family) -> bool {
        let compares = matches!(
            self,
            Self::SwapEq
                | Self::SwapNe
                | Self::SwapLe
                | Self::SwapLt
                | Self::SwapGe
                | Self::SwapGt
                | Self::MaskedSwap
        );
        match family {
            Family::Base => !compares && !matches!(self, Self::Read),
            Family::Fetch => !compares,
            Family::Compare => compares,
        }
    }

    /// Whether the operation has a second operand.
    #[inline]
    pub const fn compares(self) -> bool {
        self.is_of(Family::Compare)
    }

    /// Whether the operation can change the target.
    #[inline]
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read)
    }

    const fn is_on(self, class: Class) -> bool {
        match self {
            Self::Or | Self::And | Self::Xor | Self::MaskedSwap => matches!(class, Class::Integer),
            Self::Min | Self::Max | Self::SwapLe | Self::SwapLt | Self::SwapGe | Self::SwapGt => {
                !matches!(class, Class::Complex)
            }
            _ => true,
        }
    }
}

/// An operation on elements of a datatype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    op: Op,
    datatype: Datatype,
}

impl Operation {
    /// `None`: `fi_atomic(3)` does not define the operation on this datatype, or the processor does
    /// not have the datatype.
    #[inline]
    pub const fn new(op: Op, datatype: Datatype) -> Option<Self> {
        if datatype.exists() && op.is_on(datatype.class()) {
            Some(Self { op, datatype })
        } else {
            None
        }
    }

    /// The operation of a call, by libfabric's numbers of `enum fi_op` and `enum fi_datatype`.
    #[inline]
    pub const fn of(family: Family, op: u32, datatype: u32) -> Option<Self> {
        match (Op::of(op), Datatype::of(datatype)) {
            (Some(op), Some(datatype)) if op.is_of(family) => Self::new(op, datatype),
            _ => None,
        }
    }

    /// The operator.
    #[inline]
    pub const fn op(self) -> Op {
        self.op
    }

    /// The datatype.
    #[inline]
    pub const fn datatype(self) -> Datatype {
        self.datatype
    }

    /// Applies the operation to an element: `target` gets its new value. Returns whether the
    /// operation writes it. `operand` is ignored by [`Op::Read`], and `compare` by operations with
    /// one operand. Only the first [`Datatype::size`] bytes of each are used; the slices need no
    /// alignment, and shorter ones are as if filled up with zeros.
    #[inline]
    pub fn apply(self, target: &mut [u8], operand: &[u8], compare: &[u8]) -> bool {
        apply::apply(self, target, operand, compare)
    }
}
