//! Atomics on elements of all datatypes, which some devices execute (`verbs/elements.rs`).
//!
//! The caller of [`Initiator::submit`](super::Initiator::submit) supplies [`Elements`]: its address
//! is `compare_add` of the operation, and its [`Shape`] `swap`. It stays valid until the operation
//! completes.

#![allow(unsafe_code, reason = "memory that the device writes")]

use super::Transmit;
use crate::verbs::{ElementsRequest, Sge};
use crate::wire::records::MAX_SEGMENTS;

/// An operation in memory that the device reads, and in which it counts the changes.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Elements {
    whole: ElementsRequest,
    /// The operation on the fragments of a region, if there are several.
    parts: [ElementsRequest; MAX_SEGMENTS],
    /// Registered memory for the earlier values; length 0: they are not fetched.
    result: Sge,
}

/// The properties of an operation that do not depend on its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Size of the elements in bytes, at most 65,535, and of one of them.
    pub(crate) len: usize,
    pub(crate) size: usize,
    /// Whether the earlier values are fetched.
    pub(crate) fetches: bool,
    /// Whether it can change elements, and whether each execution counts as a change.
    pub(crate) writes: bool,
    pub(crate) always: bool,
}

impl Shape {
    /// The value for [`Transmit::swap`](super::Transmit).
    pub(crate) fn to_word(self) -> u64 {
        let flags = [self.fetches, self.writes, self.always];
        let flags = flags
            .into_iter()
            .rev()
            .fold(0, |bits, flag| bits << 1 | u64::from(flag));
        self.len as u64 | (self.size as u64) << 16 | flags << 32
    }

    /// That of an operation on elements.
    #[inline]
    pub(super) fn of(op: &Transmit<'_>) -> Self {
        let flag = |bit: u32| op.swap >> (32 + bit) & 1 != 0;
        Self {
            len: usize::from(op.swap as u16),
            size: usize::from((op.swap >> 16) as u16),
            fetches: flag(0),
            writes: flag(1),
            always: flag(2),
        }
    }
}

impl Elements {
    pub(crate) fn new(whole: ElementsRequest, result: Sge) -> Self {
        Self {
            whole,
            parts: [whole; MAX_SEGMENTS],
            result,
        }
    }

    fn at(op: &Transmit<'_>) -> *mut Self {
        std::ptr::with_exposed_provenance_mut(op.compare_add as usize)
    }

    /// The memory for the earlier values.
    ///
    /// # Safety
    /// The operation has elements, as the module describes.
    pub(super) unsafe fn result(op: &Transmit<'_>) -> Option<Sge> {
        // SAFETY: the caller's promise.
        let result = unsafe { (*Self::at(op)).result };
        (result.length != 0).then_some(result)
    }

    /// The operation on the fragment at `index`, which begins behind `skipped` bytes and has
    /// `count` elements: its address, for a request.
    ///
    /// # Safety
    /// As [`Self::result`]; no request uses the part. `index` is less than [`MAX_SEGMENTS`].
    pub(super) unsafe fn part(
        op: &Transmit<'_>,
        index: usize,
        skipped: usize,
        count: usize,
    ) -> u64 {
        let this = Self::at(op);
        // SAFETY: the caller's promise.
        unsafe {
            let part = (*this).whole.part(skipped, count);
            let to = (&raw mut (*this).parts)
                .cast::<ElementsRequest>()
                .add(index);
            to.write(part);
            to.expose_provenance() as u64
        }
    }

    /// Whether a completed operation has changed no element; `parts`: the number of its fragments.
    ///
    /// # Safety
    /// As [`Self::result`].
    pub(super) unsafe fn unchanged(op: &Transmit<'_>, parts: usize) -> bool {
        let this = Self::at(op);
        // SAFETY: the caller's promise; the requests are complete.
        unsafe {
            match parts {
                1 => (*this).whole.changed() == 0,
                _ => (&(*this).parts)[..parts]
                    .iter()
                    .all(|part| part.changed() == 0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::Flags;
    use crate::initiator::LocalIov;

    #[test]
    fn shapes_survive_their_words() {
        for bits in 0..8 {
            let shape = Shape {
                len: 1024,
                size: 32,
                fetches: bits & 1 != 0,
                writes: bits & 2 != 0,
                always: bits & 4 != 0,
            };
            let mut op = Transmit::send(LocalIov::NONE, 0, Flags::empty());
            op.swap = shape.to_word();
            assert_eq!(Shape::of(&op), shape);
        }
    }
}
