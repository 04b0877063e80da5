//! Complex numbers: a real part, followed by an imaginary part.

use crate::element::Element;

#[derive(Clone, Copy)]
pub(crate) struct Complex<T, const PART: usize> {
    real: T,
    imaginary: T,
}

/// `PART`: size of a part in bytes, with its padding.
impl<T: Element, const PART: usize> Element for Complex<T, PART> {
    fn read(bytes: &[u8]) -> Self {
        Self {
            real: T::read(bytes),
            imaginary: T::read(bytes.get(PART..).unwrap_or_default()),
        }
    }

    fn write(self, bytes: &mut [u8]) {
        self.real.write(bytes);
        self.imaginary
            .write(bytes.get_mut(PART..).unwrap_or_default());
    }

    fn sum(self, other: Self) -> Self {
        Self {
            real: self.real.sum(other.real),
            imaginary: self.imaginary.sum(other.imaginary),
        }
    }

    fn diff(self, other: Self) -> Self {
        Self {
            real: self.real.diff(other.real),
            imaginary: self.imaginary.diff(other.imaginary),
        }
    }

    fn prod(self, other: Self) -> Self {
        let (a, b, c, d) = (self.real, self.imaginary, other.real, other.imaginary);
        Self {
            real: a.prod(c).diff(b.prod(d)),
            imaginary: a.prod(d).sum(b.prod(c)),
        }
    }

    fn equals(self, other: Self) -> bool {
        self.real.equals(other.real) && self.imaginary.equals(other.imaginary)
    }

    fn logical(value: bool) -> Self {
        Self {
            real: T::logical(value),
            imaginary: T::logical(false),
        }
    }
}
