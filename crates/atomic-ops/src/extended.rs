//! `long double` on x86-64: the 80-bit format, by the instructions of the processor, which C
//! compilers use as well. In memory it has 6 bytes of padding.

#![allow(
    unsafe_code,
    reason = "Rust has no 80-bit format: instructions of the processor"
)]

use std::arch::asm;

use crate::element::{Element, Ordered, first, put};

#[derive(Clone, Copy)]
pub(crate) struct Extended([u8; 10]);

/// Executes `$instruction` on the registers st(1), which is `$a`, and st(0), which is `$b`; the
/// result replaces both.
macro_rules! calculate {
    ($instruction:literal, $a:expr, $b:expr) => {{
        let mut result = [0_u8; 10];
        // SAFETY: the operands are readable and the result is writable, 10 bytes each. The stack of
        // the unit is empty before and after, as the calling convention demands; all its registers
        // are declared as changed.
        unsafe {
            asm!(
                "fld tbyte ptr [{a}]",
                "fld tbyte ptr [{b}]",
                $instruction,
                "fstp tbyte ptr [{result}]",
                a = in(reg) $a.0.as_ptr(),
                b = in(reg) $b.0.as_ptr(),
                result = in(reg) result.as_mut_ptr(),
                out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                options(nostack),
            );
        }
        Extended(result)
    }};
}

impl Extended {
    /// The order of two values: (`a` is greater, `a` equals `b`); both are false if one is a NaN.
    fn compare(a: Self, b: Self) -> (bool, bool) {
        let (greater, equal, ordered): (u8, u8, u8);
        // SAFETY: as in `calculate`; nothing is written.
        unsafe {
            asm!(
                "fld tbyte ptr [{b}]",
                "fld tbyte ptr [{a}]",
                "fucomip st, st(1)",
                "fstp st(0)",
                "seta {greater}",
                "sete {equal}",
                "setnp {ordered}",
                a = in(reg) a.0.as_ptr(),
                b = in(reg) b.0.as_ptr(),
                greater = out(reg_byte) greater,
                equal = out(reg_byte) equal,
                ordered = out(reg_byte) ordered,
                out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                options(nostack, readonly),
            );
        }
        (greater != 0, equal & ordered != 0)
    }
}

impl Element for Extended {
    fn read(bytes: &[u8]) -> Self {
        Self(first(bytes))
    }

    fn write(self, bytes: &mut [u8]) {
        put(bytes, &self.0);
    }

    fn sum(self, other: Self) -> Self {
        calculate!("faddp st(1), st", self, other)
    }

    fn diff(self, other: Self) -> Self {
        // st(1) - st(0)
        calculate!("fsubp st(1), st", self, other)
    }

    fn prod(self, other: Self) -> Self {
        calculate!("fmulp st(1), st", self, other)
    }

    fn equals(self, other: Self) -> bool {
        Self::compare(self, other).1
    }

    fn logical(value: bool) -> Self {
        let one = [0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f];
        Self(if value { one } else { [0; 10] })
    }
}

impl Ordered for Extended {
    fn less(self, other: Self) -> bool {
        Self::compare(other, self).0
    }
}
