//! Atomics on elements of all datatypes, which only softverbs has (`softdv_atomic`,
//! `docs/softverbs-atomics.md`).
//!
//! A request of [`SendOpcode::Elements`](super::SendOpcode::Elements) has the address of an
//! [`ElementsRequest`] in the place of the value to add.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::{c_int, c_void};

use rdma_core_sys as sys;

use super::Device;
use crate::errno::{FiErrno, Result};

/// An operation on elements (`struct softdv_atomic`). It and its operands stay valid until the
/// request completes.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct ElementsRequest(sys::softdv_atomic);

impl ElementsRequest {
    /// The numbers of `enum fi_op` and `enum fi_datatype`; `count` elements; addresses of the
    /// operands, and of the values to compare with.
    pub(crate) fn new(
        (op, datatype, count): (u8, u8, u16),
        operands: *const u8,
        compare: *const u8,
    ) -> Self {
        Self(sys::softdv_atomic {
            op,
            datatype,
            count,
            changed: 0,
            operands: operands.cast(),
            compare: compare.cast(),
        })
    }

    /// The operation on `count` elements after the first `skipped` bytes of all elements.
    pub(crate) fn part(&self, skipped: usize, count: usize) -> Self {
        Self(sys::softdv_atomic {
            count: count as u16,
            operands: self.0.operands.wrapping_byte_add(skipped),
            compare: self.0.compare.wrapping_byte_add(skipped),
            ..self.0
        })
    }

    pub(super) fn as_raw(&mut self) -> *mut sys::softdv_atomic {
        &raw mut self.0
    }

    /// Number of elements that a completed request has changed.
    pub(crate) fn changed(&self) -> u32 {
        self.0.changed
    }
}

impl Device {
    /// Largest size of the elements of an operation in bytes; 0: the device has no such atomics.
    pub(crate) fn max_elements(&self) -> usize {
        let verbs = &self.backend().verbs;
        let calls = verbs.softdv_max_atomic.zip(verbs.softdv_atomic_own);
        // SAFETY: the context is live and of this backend.
        let most = calls.map_or(0, |(most, _)| unsafe { most(self.context()) });
        usize::try_from(most).unwrap_or(0)
    }

    /// Executes an operation on memory of this process, atomically with the requests of peers. The
    /// elements lie in the buffers of `list`, at most 8. `earlier` gets their earlier values.
    /// Returns the number of elements that have changed.
    ///
    /// # Errors
    /// `EFAULT`: the memory is not mapped or not writable; elements before one may have changed.
    /// `EBUSY`: another process has held a lock for 2 s. `EINVAL`: lengths that do not fit.
    /// `EOPNOTSUPP`: the device has no such atomics.
    ///
    /// # Safety
    /// The operands are readable. `earlier` has the size of the elements. The buffers are memory
    /// that peers may change; they need not be mapped.
    pub(crate) unsafe fn change_elements(
        &self,
        request: &mut ElementsRequest,
        list: &[libc::iovec],
        earlier: *mut u8,
    ) -> Result<u32> {
        let call = self.backend().verbs.softdv_atomic_own;
        let call = call.ok_or(FiErrno::EOPNOTSUPP)?;
        let (asked, count) = (request.as_raw(), list.len() as c_int);
        // SAFETY: the context is live and of this backend; the rest as this function.
        let done = unsafe {
            let earlier = earlier.cast::<c_void>();
            call(self.context(), asked, list.as_ptr(), count, earlier)
        };
        FiErrno::from_verb(done)?;
        Ok(request.changed())
    }
}
