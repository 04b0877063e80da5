//! The vectors of elements that calls of `fi_atomic(3)` pass: operands, result and target. An
//! atomic has one element, which any member of its vector may contain.

use std::ffi::c_void;

use libc::iovec;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::Desc;
use weft::msg::ATOMIC_SIZE;

use crate::ep_traits::buffer;
use crate::ffi::log::refused;

/// Maximum number of members of a vector. A larger count is refused before the vector is read.
const MAX_VECTOR: usize = 16;

/// The member that has the vector's only element, and the member's index. `elements` returns the
/// number of elements of a member.
///
/// # Errors
/// `EINVAL`: no element, or a vector longer than any endpoint takes. `EMSGSIZE`: more than one.
///
/// # Safety
/// `vector` has `count` members or is NULL.
#[inline(always)]
unsafe fn single<T: Copy>(
    vector: *const T,
    count: usize,
    elements: impl Fn(&T) -> usize,
) -> Result<(usize, T)> {
    if vector.is_null() || !(1..=MAX_VECTOR).contains(&count) {
        return Err(no_vector(count));
    }
    // SAFETY: not NULL; the caller passes a vector of `count` members.
    let vector = unsafe { std::slice::from_raw_parts(vector, count) };
    let sum = vector.iter().map(&elements);
    let sum = sum.fold(0_usize, usize::saturating_add);
    if sum != 1 {
        return Err(not_one(sum));
    }
    let mut members = vector.iter().copied().enumerate();
    let found = members.find(|(_, member)| elements(member) == 1);
    found.ok_or(FiErrno::EINVAL)
}

/// The target of a call: an address and a key.
///
/// # Errors
/// As [`single`].
///
/// # Safety
/// As [`single`], for the vector of targets.
#[inline(always)]
pub(crate) unsafe fn target(msg: &fi_msg_atomic) -> Result<(u64, u64)> {
    // SAFETY: the caller passes a vector of `rma_iov_count` members, or NULL.
    let (_, member) = unsafe { single(msg.rma_iov, msg.rma_iov_count, |ioc| ioc.count)? };
    Ok((member.addr, member.key))
}

/// A vector in the memory of the caller, with the descriptors of its members.
#[derive(Clone, Copy)]
pub(crate) struct Vector {
    ioc: *const fi_ioc,
    desc: *const *mut c_void,
    count: usize,
}

impl Vector {
    pub(crate) const NONE: Self = Self::new(std::ptr::null(), std::ptr::null(), 0);

    /// `count` members, and as many descriptors; the pointers may be NULL.
    #[inline(always)]
    pub(crate) const fn new(ioc: *const fi_ioc, desc: *const *mut c_void, count: usize) -> Self {
        Self { ioc, desc, count }
    }

    /// The vector of operands of a call.
    #[inline(always)]
    pub(crate) const fn of(msg: &fi_msg_atomic) -> Self {
        Self::new(msg.msg_iov, msg.desc, msg.iov_count)
    }

    /// The value of an operand.
    ///
    /// # Errors
    /// As [`single`]; `EINVAL`: the element is at NULL.
    ///
    /// # Safety
    /// As [`single`]; the element has 8 bytes or is at NULL.
    #[inline(always)]
    pub(crate) unsafe fn operand(self) -> Result<u64> {
        // SAFETY: the caller passes a vector of `count` members, or NULL.
        let (_, member) = unsafe { single(self.ioc, self.count, |ioc| ioc.count)? };
        if member.addr.is_null() {
            return Err(at_null("operand"));
        }
        // SAFETY: not NULL; the caller's promise.
        Ok(unsafe { member.addr.cast::<u64>().read_unaligned() })
    }

    /// The buffer for a result, and its descriptor.
    ///
    /// # Errors
    /// As [`Self::operand`].
    ///
    /// # Safety
    /// As [`single`]; there are as many descriptors, or they are NULL.
    #[inline(always)]
    pub(crate) unsafe fn buffer(self) -> Result<(iovec, Desc)> {
        // SAFETY: the caller passes a vector of `count` members, or NULL.
        let (index, member) = unsafe { single(self.ioc, self.count, |ioc| ioc.count)? };
        if member.addr.is_null() {
            return Err(at_null("result"));
        }
        let desc = if self.desc.is_null() {
            Desc::NULL
        } else {
            // SAFETY: not NULL, and the index is less than the count.
            Desc(unsafe { *self.desc.add(index) })
        };
        Ok((buffer(member.addr, ATOMIC_SIZE), desc))
    }
}

/// Logs the refusal at `info`, as do those below.
#[cold]
fn no_vector(count: usize) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "a vector of the atomic is NULL, or its count {count} is not 1 to {MAX_VECTOR}"
    )
}

#[cold]
fn not_one(count: usize) -> FiErrno {
    match count {
        0 => refused!(FI_LOG_EP_DATA, EINVAL, "the atomic has no elements"),
        _ => refused!(
            FI_LOG_EP_DATA,
            EMSGSIZE, // fi_atomic(3): more elements than supported
            "the atomic has {count} elements; the maximum is 1"
        ),
    }
}

#[cold]
fn at_null(name: &str) -> FiErrno {
    refused!(FI_LOG_EP_DATA, EINVAL, "the {name} of the atomic is NULL")
}
