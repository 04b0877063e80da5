//! A call of `fi_atomic(3)`, in one form for all entry points and endpoint kinds.

use std::ffi::c_void;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::rdm::atomic_ops::Family;

use crate::data::traits::Transmit;
use crate::ffi::log::refused;

/// Maximum number of members of a vector, of all endpoint kinds.
pub(crate) const MAX_VECTOR: usize = 16;

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

    /// The members.
    ///
    /// # Errors
    /// As [`members`].
    ///
    /// # Safety
    /// As [`members`].
    #[inline(always)]
    pub(crate) unsafe fn members<'a>(self) -> Result<&'a [fi_ioc]> {
        // SAFETY: the caller keeps the contract.
        unsafe { members(self.ioc, self.count) }
    }

    /// The descriptor of a member, or NULL.
    ///
    /// # Safety
    /// The vector has more than `index` members, and as many descriptors or none.
    #[inline(always)]
    pub(crate) unsafe fn desc(self, index: usize) -> *mut c_void {
        if self.desc.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: not NULL, and the caller passes an index that is less than the count.
        unsafe { *self.desc.add(index) }
    }

    /// The number of elements of all members; 0 for a vector that [`members`] refuses.
    ///
    /// # Safety
    /// As [`members`].
    #[inline(always)]
    pub(crate) unsafe fn elements(self) -> usize {
        if self.ioc.is_null() || self.count > MAX_VECTOR {
            return 0;
        }
        // SAFETY: not NULL; the caller passes a vector of `count` members.
        let vector = unsafe { std::slice::from_raw_parts(self.ioc, self.count) };
        let elements = vector.iter().map(|member| member.count);
        elements.fold(0, usize::saturating_add)
    }
}

/// The members of a vector of operands, results or targets.
///
/// # Errors
/// `EINVAL`: NULL, no members, or more than [`MAX_VECTOR`].
///
/// # Safety
/// `vector` has `count` members for `'a`, or is NULL.
#[inline(always)]
pub(crate) unsafe fn members<'a, T>(vector: *const T, count: usize) -> Result<&'a [T]> {
    if vector.is_null() || !(1..=MAX_VECTOR).contains(&count) {
        return Err(no_vector(count));
    }
    // SAFETY: not NULL; the caller passes a vector of `count` members.
    Ok(unsafe { std::slice::from_raw_parts(vector, count) })
}

/// A call. Only the compare family has `compare`, and the base family has no `result`.
pub(crate) struct Call<'a> {
    pub(crate) family: Family,
    pub(crate) msg: &'a fi_msg_atomic,
    pub(crate) compare: Vector,
    pub(crate) result: Vector,
    /// `None`: the default flags of the endpoint.
    pub(crate) flags: Option<Flags>,
    /// `fi_inject_atomic`: no entry, and the operands can be reused at once.
    pub(crate) injected: bool,
}

/// An endpoint kind with atomics.
pub(crate) trait Atomics: Transmit {
    /// Posts a call.
    ///
    /// # Errors
    /// `EINVAL`: a vector that [`members`] refuses, or with a member at NULL. `EOPNOTSUPP`: as
    /// [`Self::max_count`]. Others are those of the kind.
    ///
    /// # Safety
    /// The contract of fi_atomicmsg(3), fi_fetch_atomicmsg(3) or fi_compare_atomicmsg(3): vectors
    /// with their members and descriptors, readable operands, and results that stay valid until
    /// the entry.
    unsafe fn atomic(&self, call: &Call<'_>) -> Result<()>;

    /// The maximum number of elements of an operation, `fi_atomicvalid(3)`.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the endpoint does not support it. It is not logged, because callers of
    /// `fi_atomicvalid(3)` expect it.
    fn max_count(&self, family: Family, datatype: fi_datatype, op: fi_op) -> Result<usize>;
}

/// Logs the refusal at `info`.
#[cold]
fn no_vector(count: usize) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "a vector of the atomic is NULL, or its count {count} is not 1 to {MAX_VECTOR}"
    )
}
