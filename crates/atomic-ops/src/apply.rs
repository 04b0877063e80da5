//! From an operation to the arithmetic of its datatype.

use crate::complex::Complex;
use crate::element::{Element, Integer, Ordered};
#[cfg(target_arch = "x86_64")]
use crate::extended::Extended;
use crate::small::{Bfloat16, Float8E4m3, Float8E5m2, Float16};
use crate::{Datatype, Op, Operation};

/// The values of an element's operation.
struct Values<T> {
    target: T,
    operand: T,
    compare: T,
}

/// The new value of an element, or `None` if the operation does not write it. Operations that the
/// class does not have never get here ([`Operation::new`]); they would write nothing.
type New<T> = fn(Op, &Values<T>) -> Option<T>;

/// Of any class.
fn element<T: Element>(op: Op, values: &Values<T>) -> Option<T> {
    let Values {
        target,
        operand,
        compare,
    } = *values;
    let logical = |value| Some(T::logical(value));
    match op {
        Op::Sum => Some(target.sum(operand)),
        Op::Diff => Some(target.diff(operand)),
        Op::Prod => Some(target.prod(operand)),
        Op::LogicalOr => logical(target.is_true() || operand.is_true()),
        Op::LogicalAnd => logical(target.is_true() && operand.is_true()),
        Op::LogicalXor => logical(target.is_true() != operand.is_true()),
        Op::Write => Some(operand),
        Op::SwapEq => compare.equals(target).then_some(operand),
        Op::SwapNe => (!compare.equals(target)).then_some(operand),
        _ => None,
    }
}

/// With an order.
fn ordered<T: Ordered>(op: Op, values: &Values<T>) -> Option<T> {
    let Values {
        target,
        operand,
        compare,
    } = *values;
    let swaps = match op {
        Op::Min => operand.less(target),
        Op::Max => target.less(operand),
        Op::SwapLe => compare.less(target) || compare.equals(target),
        Op::SwapLt => compare.less(target),
        Op::SwapGe => target.less(compare) || compare.equals(target),
        Op::SwapGt => target.less(compare),
        _ => return element(op, values),
    };
    swaps.then_some(operand)
}

/// With bits.
fn integer<T: Integer>(op: Op, values: &Values<T>) -> Option<T> {
    let Values {
        target,
        operand,
        compare,
    } = *values;
    Some(match op {
        Op::Or => target.or(operand),
        Op::And => target.and(operand),
        Op::Xor => target.xor(operand),
        Op::MaskedSwap => operand.masked(compare, target),
        _ => return ordered(op, values),
    })
}

fn with<T: Element>(
    new: New<T>,
    op: Op,
    target: &mut [u8],
    operand: &[u8],
    compare: &[u8],
) -> bool {
    let values = Values {
        target: T::read(target),
        operand: T::read(operand),
        compare: T::read(compare),
    };
    let new = new(op, &values);
    if let Some(new) = new {
        new.write(target);
    }
    new.is_some()
}

pub(crate) fn apply(
    operation: Operation,
    target: &mut [u8],
    operand: &[u8],
    compare: &[u8],
) -> bool {
    let op = operation.op;
    macro_rules! on {
        ($new:ident::<$type:ty>) => {
            with::<$type>($new, op, target, operand, compare)
        };
    }
    match operation.datatype {
        Datatype::Int8 => on!(integer::<i8>),
        Datatype::Uint8 => on!(integer::<u8>),
        Datatype::Int16 => on!(integer::<i16>),
        Datatype::Uint16 => on!(integer::<u16>),
        Datatype::Int32 => on!(integer::<i32>),
        Datatype::Uint32 => on!(integer::<u32>),
        Datatype::Int64 => on!(integer::<i64>),
        Datatype::Uint64 => on!(integer::<u64>),
        Datatype::Int128 => on!(integer::<i128>),
        Datatype::Uint128 => on!(integer::<u128>),
        Datatype::Float => on!(ordered::<f32>),
        Datatype::Double => on!(ordered::<f64>),
        Datatype::Float16 => on!(ordered::<Float16>),
        Datatype::Bfloat16 => on!(ordered::<Bfloat16>),
        Datatype::Float8E4m3 => on!(ordered::<Float8E4m3>),
        Datatype::Float8E5m2 => on!(ordered::<Float8E5m2>),
        Datatype::FloatComplex => on!(element::<Complex<f32, 4>>),
        Datatype::DoubleComplex => on!(element::<Complex<f64, 8>>),
        #[cfg(target_arch = "x86_64")]
        Datatype::LongDouble => on!(ordered::<Extended>),
        #[cfg(target_arch = "x86_64")]
        Datatype::LongDoubleComplex => on!(element::<Complex<Extended, 16>>),
        // `Operation::new` refuses them
        #[cfg(not(target_arch = "x86_64"))]
        Datatype::LongDouble | Datatype::LongDoubleComplex => false,
    }
}
