//! Every operation beside a naive model, on any bytes.

use proptest::prelude::*;

use super::*;

/// The result of an operation: the target's bytes, and whether they were written.
fn run(op: Op, datatype: Datatype, values: [&[u8]; 3]) -> Option<(Vec<u8>, bool)> {
    let operation = Operation::new(op, datatype)?;
    let mut target = values[0].to_vec();
    let written = operation.apply(&mut target, values[1], values[2]);
    Some((target, written))
}

/// A model of the operations on a type that Rust has: from target, operand and compare to the new
/// value.
macro_rules! model {
    ($type:ty, $one:expr, $zero:expr, $sum:expr, $diff:expr, $prod:expr) => {
        |op, t: $type, x: $type, c: $type| -> Option<$type> {
            let truth = |value: bool| Some(if value { $one } else { $zero });
            match op {
                Op::Min => (x < t).then_some(x),
                Op::Max => (x > t).then_some(x),
                Op::Sum => Some($sum(t, x)),
                Op::Diff => Some($diff(t, x)),
                Op::Prod => Some($prod(t, x)),
                Op::LogicalOr => truth(t != $zero || x != $zero),
                Op::LogicalAnd => truth(t != $zero && x != $zero),
                Op::LogicalXor => truth((t != $zero) ^ (x != $zero)),
                Op::Write => Some(x),
                Op::SwapEq => (c == t).then_some(x),
                Op::SwapNe => (c != t).then_some(x),
                Op::SwapLe => (c <= t).then_some(x),
                Op::SwapLt => (c < t).then_some(x),
                Op::SwapGe => (c >= t).then_some(x),
                Op::SwapGt => (c > t).then_some(x),
                _ => None,
            }
        }
    };
}

/// Compares all operations with a model. Values are drawn so that equal ones and zeros occur.
macro_rules! beside {
    ($bytes:expr, $datatype:expr, $type:ty, $model:expr, $same:expr) => {{
        const SIZE: usize = size_of::<$type>();
        let values = |at: usize| <[u8; SIZE]>::try_from(&$bytes[at * SIZE..][..SIZE]).unwrap();
        let (t, x, mut c) = (values(0), values(1), values(2));
        if $bytes[95] % 2 == 0 {
            c = t;
        }
        for op in Op::ALL {
            let got = run(*op, $datatype, [&t, &x, &c]);
            let of = <$type>::from_ne_bytes;
            let expected: Option<$type> = $model(*op, of(t), of(x), of(c));
            let Some((bytes, written)) = got else {
                continue;
            };
            prop_assert_eq!(written, expected.is_some(), "{:?} {:?}", op, $datatype);
            let got = of(bytes.clone().try_into().unwrap());
            let expected = expected.unwrap_or(of(t));
            prop_assert!(
                $same(got, expected),
                "{:?} {:?}: {:?}, not {:?}",
                op,
                $datatype,
                got,
                expected
            );
        }
    }};
}

macro_rules! integer {
    ($bytes:expr, $datatype:expr, $type:ty) => {{
        let rest = model!(
            $type,
            1,
            0,
            |a: $type, b: $type| a.wrapping_add(b),
            |a: $type, b: $type| a.wrapping_sub(b),
            |a: $type, b: $type| a.wrapping_mul(b)
        );
        let all = |op, t: $type, x: $type, c: $type| match op {
            Op::Or => Some(t | x),
            Op::And => Some(t & x),
            Op::Xor => Some(t ^ x),
            Op::MaskedSwap => Some((x & c) | (t & !c)),
            _ => rest(op, t, x, c),
        };
        beside!($bytes, $datatype, $type, all, |a: $type, b| a == b)
    }};
}

/// Equal bits, or both are NaNs, whose bits an operation may choose.
fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Bytes of which some runs are zeros: values that are equal, small or 0.
fn bytes() -> impl Strategy<Value = [u8; 96]> {
    (any::<[[u8; 32]; 3]>(), any::<[u8; 3]>()).prop_map(|(parts, zeros)| {
        let mut all = [0; 96];
        for (at, part) in parts.iter().enumerate() {
            let from = usize::from(zeros[at] % 48).min(32);
            all[at * 32..][..32].copy_from_slice(part);
            all[at * 32 + from..(at + 1) * 32].fill(0);
        }
        all[95] = parts[0][31];
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 2000 }))]

    #[test]
    fn integers_are_as_in_the_model(bytes in bytes()) {
        integer!(bytes, Datatype::Int8, i8);
        integer!(bytes, Datatype::Uint8, u8);
        integer!(bytes, Datatype::Int16, i16);
        integer!(bytes, Datatype::Uint16, u16);
        integer!(bytes, Datatype::Int32, i32);
        integer!(bytes, Datatype::Uint32, u32);
        integer!(bytes, Datatype::Int64, i64);
        integer!(bytes, Datatype::Uint64, u64);
        integer!(bytes, Datatype::Int128, i128);
        integer!(bytes, Datatype::Uint128, u128);
    }

    #[test]
    fn floats_are_as_in_the_model(bytes in bytes()) {
        let single = model!(f32, 1.0, 0.0, |a, b| a + b, |a, b| a - b, |a, b| a * b);
        beside!(bytes, Datatype::Float, f32, single, |a: f32, b: f32| same(a.into(), b.into()));
        let double = model!(f64, 1.0, 0.0, |a, b| a + b, |a, b| a - b, |a, b| a * b);
        beside!(bytes, Datatype::Double, f64, double, same);
    }

    #[test]
    fn complex_numbers_are_as_in_the_model(values in any::<[(i16, i16); 3]>(), equal: bool) {
        // products of these are exact
        let [t, x, c] = values.map(|(a, b)| (f64::from(a), f64::from(b)));
        let c = if equal { t } else { c };
        let bytes = |(a, b): (f64, f64)| [a.to_ne_bytes(), b.to_ne_bytes()].concat();
        let truth = |(a, b): (f64, f64)| a != 0.0 || b != 0.0;
        let logical = |value| Some((f64::from(u8::from(value)), 0.0));
        for op in Op::ALL {
            let expected = match op {
                Op::Sum => Some((t.0 + x.0, t.1 + x.1)),
                Op::Diff => Some((t.0 - x.0, t.1 - x.1)),
                Op::Prod => Some((t.0 * x.0 - t.1 * x.1, t.0 * x.1 + t.1 * x.0)),
                Op::LogicalOr => logical(truth(t) || truth(x)),
                Op::LogicalAnd => logical(truth(t) && truth(x)),
                Op::LogicalXor => logical(truth(t) != truth(x)),
                Op::Write => Some(x),
                Op::SwapEq => (c == t).then_some(x),
                Op::SwapNe => (c != t).then_some(x),
                Op::Read => None,
                _ => {
                    prop_assert!(Operation::new(*op, Datatype::DoubleComplex).is_none());
                    continue;
                }
            };
            let (t, x, c) = (bytes(t), bytes(x), bytes(c));
            let got = run(*op, Datatype::DoubleComplex, [&t, &x, &c]);
            let got_single = run(*op, Datatype::FloatComplex, [&narrow(&t), &narrow(&x), &narrow(&c)]);
            let wanted = expected.map_or(t, bytes);
            prop_assert_eq!(got, Some((wanted.clone(), expected.is_some())), "{:?}", op);
            let exact = *op != Op::Prod;
            prop_assert!(!exact || got_single == Some((narrow(&wanted), expected.is_some())), "{:?}", op);
        }
    }

    #[test]
    fn sixteen_bit_floats_are_the_nearest(a: u16, b: u16) {
        for datatype in [Datatype::Float16, Datatype::Bfloat16] {
            nearest(datatype, a, b)?;
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn long_doubles_are_as_integers(values in any::<[i64; 3]>(), equal: bool, shift in 2_u32..63) {
        // sums of these are exact in 64 bits of mantissa, and so are products of the upper halves
        let [t, x, c] = values.map(|value| value >> shift);
        let c = if equal { t } else { c };
        let sums = model!(i128, 1, 0, |a, b| a + b, |a, b| a - b, |a, b| a * b);
        for op in Op::ALL {
            let (t, x) = if *op == Op::Prod { (t >> 32, x >> 32) } else { (t, x) };
            let c = if equal { t } else { c };
            let Some((got, written)) = run(*op, Datatype::LongDouble, [&long(t.into()), &long(x.into()), &long(c.into())]) else {
                continue;
            };
            let expected = sums(*op, t.into(), x.into(), c.into());
            prop_assert_eq!(written, expected.is_some(), "{:?}", op);
            // the sign of a zero is not that of an integer
            let wanted = long(expected.unwrap_or(t.into()));
            let zero = wanted[..10] == [0; 10] && got[..9] == [0; 9] && got[9] & 0x7f == 0;
            prop_assert!(zero || got == wanted, "{:?} {} {}: {:?}", op, t, x, got);
        }
    }
}

/// Doubles as floats.
fn narrow(doubles: &[u8]) -> Vec<u8> {
    let of = |bytes: &[u8]| f64::from_ne_bytes(bytes.try_into().unwrap());
    let parts = doubles
        .chunks(8)
        .map(|bytes| (of(bytes) as f32).to_ne_bytes());
    parts.flatten().collect()
}

/// An integer as `long double`, with padding.
#[cfg(target_arch = "x86_64")]
fn long(value: i128) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[10..].fill(0x5a);
    if value != 0 {
        let magnitude = value.unsigned_abs();
        let top = 127 - magnitude.leading_zeros();
        let mantissa = (magnitude << 64 >> (top + 1)) as u64;
        let sign = u16::from(value < 0) << 15;
        bytes[..8].copy_from_slice(&mantissa.to_le_bytes());
        bytes[8..10].copy_from_slice(&(sign | (16383 + top as u16)).to_le_bytes());
    }
    bytes
}

/// The value of bits, computed from the definition of the format. `None`: not a number.
fn value(datatype: Datatype, bits: u16) -> Option<f64> {
    let (exponent_bits, mantissa_bits) = match datatype {
        Datatype::Float16 => (5, 10),
        Datatype::Bfloat16 => (8, 7),
        Datatype::Float8E4m3 => (4, 3),
        _ => (5, 2),
    };
    let field = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let full = field == (1 << exponent_bits) - 1;
    let e4m3 = datatype == Datatype::Float8E4m3;
    if full && (!e4m3 && mantissa != 0 || e4m3 && mantissa == 7) {
        return None;
    }
    let sign = if bits >> (exponent_bits + mantissa_bits) & 1 == 1 {
        -1.0
    } else {
        1.0
    };
    if full && !e4m3 {
        return Some(sign * f64::INFINITY);
    }
    let bias = (1 << (exponent_bits - 1)) - 1;
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    let (whole, exponent) = match field {
        0 => (fraction, 1 - bias),
        _ => (1.0 + fraction, i32::from(field) - bias),
    };
    Some(sign * whole * 2_f64.powi(exponent))
}

/// Checks sums, differences and products of two values: no other value of the format is nearer to
/// the exact result.
fn nearest(datatype: Datatype, a: u16, b: u16) -> std::result::Result<(), TestCaseError> {
    let size = datatype.size();
    let bytes = |bits: u16| bits.to_ne_bytes()[..size].to_vec();
    let (x, y) = (value(datatype, a), value(datatype, b));
    for op in [Op::Sum, Op::Diff, Op::Prod] {
        let (got, _) = run(op, datatype, [&bytes(a), &bytes(b), &[]]).unwrap();
        let got = got
            .iter()
            .rev()
            .fold(0, |bits, byte| bits << 8 | u16::from(*byte));
        let exact = x.zip(y).map(|(x, y)| match op {
            Op::Sum => x + y,
            Op::Diff => x - y,
            _ => x * y,
        });
        let result = value(datatype, got);
        let Some(exact) = exact.filter(|exact| !exact.is_nan()) else {
            prop_assert!(result.is_none(), "{datatype:?} {op:?} {a:#x} {b:#x}");
            continue;
        };
        let sign = 1 << (8 * size - 1);
        prop_assert_eq!(got & sign != 0, exact.is_sign_negative());
        let magnitude = got & (sign - 1);
        // the greatest finite value, and the value that would follow it
        let last = (0..sign)
            .rev()
            .find(|bits| value(datatype, *bits).is_some_and(f64::is_finite))
            .unwrap();
        let of = |bits: u16| value(datatype, bits).unwrap();
        let gap = of(last) - of(last - 1);
        let exact = exact.abs();
        let limit = of(last) + gap / 2.0;
        // the middle is rounded to the even one of both
        if exact > limit || exact == limit && last % 2 == 1 {
            let beyond = result.is_none_or(f64::is_infinite);
            prop_assert!(beyond, "{datatype:?} {op:?} {a:#x} {b:#x}");
            continue;
        }
        let error = |bits: u16| (of(bits) - exact).abs();
        let result = error(magnitude);
        for other in [magnitude.saturating_sub(1), (magnitude + 1).min(last)] {
            let near = result < error(other)
                || result == error(other) && (other == magnitude || magnitude.is_multiple_of(2));
            prop_assert!(near, "{datatype:?} {op:?} {a:#x} {b:#x}: {got:#x}");
        }
    }
    Ok(())
}

#[test]
fn all_pairs_of_eight_bit_floats_are_the_nearest() {
    for datatype in [Datatype::Float8E4m3, Datatype::Float8E5m2] {
        for pair in 0..=u16::MAX {
            nearest(datatype, pair >> 8, pair & 0xff).unwrap();
        }
    }
}

#[test]
fn small_floats_have_the_order_of_their_values() {
    for datatype in [Datatype::Float8E4m3, Datatype::Float8E5m2] {
        for pair in 0..=u16::MAX {
            let [x, y] = pair.to_ne_bytes();
            let (a, b) = (value(datatype, x.into()), value(datatype, y.into()));
            let (a, b) = (a.unwrap_or(f64::NAN), b.unwrap_or(f64::NAN));
            let check = |op, expected| {
                let got = run(op, datatype, [&[x], &[y], &[y]]).unwrap();
                let value = if expected { y } else { x };
                assert_eq!(got, (vec![value], expected), "{datatype:?} {op:?} {a} {b}");
            };
            check(Op::Min, b < a);
            check(Op::Max, b > a);
            check(Op::SwapEq, b == a);
            check(Op::SwapNe, b != a);
            check(Op::SwapLe, b <= a);
            check(Op::SwapLt, b < a);
            check(Op::SwapGe, b >= a);
            check(Op::SwapGt, b > a);
        }
    }
}

#[test]
fn every_pair_of_the_manual_is_valid_and_no_other() {
    for op in Op::ALL {
        let families = [Family::Base, Family::Fetch, Family::Compare];
        let of = families.map(|family| op.is_of(family));
        let number = *op as u8;
        let expected = match number {
            10 => [false, true, false],
            12..=18 => [false, false, true],
            _ => [true, true, false],
        };
        assert_eq!(of, expected, "{op:?}");
        for datatype in Datatype::ALL {
            let integer = matches!(*datatype as u8, 0..=7 | 14 | 15);
            let complex = matches!(*datatype as u8, 10 | 11 | 13);
            let defined = match number {
                0 | 1 | 14..=17 => !complex,
                6 | 7 | 9 | 18 => integer,
                _ => true,
            };
            let defined = defined && datatype.exists();
            assert_eq!(
                Operation::new(*op, *datatype).is_some(),
                defined,
                "{op:?} {datatype:?}"
            );
            for (family, of) in families.into_iter().zip(of) {
                let found = Operation::of(family, number.into(), *datatype as u32);
                assert_eq!(found.is_some(), of && defined);
            }
        }
    }
    assert!(Operation::of(Family::Base, 20, 0).is_none());
    assert!(Operation::of(Family::Base, 256, 0).is_none());
    assert!(Operation::of(Family::Base, 2, 20).is_none());
}

#[test]
fn no_byte_behind_the_element_changes() {
    for op in Op::ALL {
        for datatype in Datatype::ALL {
            let Some(operation) = Operation::new(*op, *datatype) else {
                continue;
            };
            let mut target = [0x41; 64];
            operation.apply(&mut target, &[0x42; 64], &[0x41; 64]);
            let behind = &target[datatype.size()..];
            assert!(
                behind.iter().all(|byte| *byte == 0x41),
                "{op:?} {datatype:?}"
            );
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn long_doubles_keep_their_padding_and_their_nans() {
    let mut nan = long(1);
    nan[..10].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0xc0, 0xff, 0x7f]);
    let (one, mut target) = (long(1), long(2));
    target[10..].fill(0x77);
    for (op, operand, compare) in [
        (Op::Min, nan, nan),
        (Op::Max, nan, nan),
        (Op::SwapEq, one, nan),
    ] {
        let got = run(op, Datatype::LongDouble, [&target, &operand, &compare]).unwrap();
        assert_eq!(got, (target.to_vec(), false));
    }
    let (sum, _) = run(Op::Sum, Datatype::LongDouble, [&target, &one, &[]]).unwrap();
    assert_eq!((&sum[..10], &sum[10..]), (&long(3)[..10], &[0x77; 6][..]));
    // a tenth has no end in binary: 64 bits of mantissa, rounded
    let tenth = [
        0xcd, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xfb, 0x3f, 0, 0, 0, 0, 0, 0,
    ];
    let ten = long(10);
    let (product, _) = run(Op::Prod, Datatype::LongDouble, [&ten, &tenth, &[]]).unwrap();
    assert_eq!(&product[..10], &one[..10]);
    let (product, _) = run(
        Op::Prod,
        Datatype::LongDoubleComplex,
        [
            &[long(1), long(2)].concat(),
            &[long(3), long(4)].concat(),
            &[],
        ],
    )
    .unwrap();
    assert_eq!(product, [long(-5), long(10)].concat());
}
