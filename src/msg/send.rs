//! Sends.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;
use std::marker::PhantomData;

use libc::iovec;

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::Desc;
use crate::msg::Endpoint;

/// The local memory of one operation: buffers, and the descriptors of the regions they lie in.
#[derive(Clone, Copy, Debug)]
pub struct LocalIov<'a> {
    iov: *const iovec,
    desc: *const Desc,
    count: usize,
    lifetime: PhantomData<&'a [iovec]>,
}

impl<'a> LocalIov<'a> {
    /// One buffer. A NULL descriptor will do for inject, for what goes inline, and for length 0.
    #[inline]
    pub fn single(iov: &'a iovec, desc: &'a Desc) -> Self {
        Self {
            iov,
            desc,
            count: 1,
            lifetime: PhantomData,
        }
    }

    /// C's way: `count` buffers, and as many descriptors unless `desc` is NULL.
    ///
    /// # Errors
    /// `EINVAL`: NULL with a count.
    ///
    /// # Safety
    /// `iov`, and `desc` if it isn't NULL, point to `count` elements that live for `'a`.
    #[inline]
    pub unsafe fn from_raw(
        iov: *const iovec,
        desc: *const *mut c_void,
        count: usize,
    ) -> Result<Self> {
        if count != 0 && iov.is_null() {
            return Err(FiErrno::EINVAL);
        }
        Ok(Self {
            iov,
            desc: desc.cast(),
            count,
            lifetime: PhantomData,
        })
    }
}

/// Operations without flags take the endpoint's default ones; those named `_msg` take theirs, and
/// with `FI_SELECTIVE_COMPLETION` complete visibly only if `FI_COMPLETION` is among them.
///
/// None of them blocks, allocates, or makes a system call. All answer `EAGAIN` when the queue is
/// full: read the completion queue and try again.
///
/// # Errors
/// - `EAGAIN`: the queue is full.
/// - `EINVAL`: too many buffers, or a descriptor that is needed and wrong.
/// - `EMSGSIZE`: more bytes than the device, or inject, takes.
/// - `EOPBADSTATE`: not enabled. `ENOTCONN`: not connected. `ESHUTDOWN`: no longer connected.
///
/// # Safety
/// Buffers must stay valid until the operation completes (inject: until it returns), and
/// descriptors be NULL or those of live regions that cover the buffers.
#[allow(clippy::missing_safety_doc, reason = "said once, above")]
impl Endpoint {
    /// `fi_send`, `fi_sendv`.
    pub unsafe fn send(&self, local: LocalIov<'_>, context: usize) -> Result<()> {
        let _ = (local, context);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_senddata`: the low 32 bits of `data` go along.
    pub unsafe fn send_data(&self, local: LocalIov<'_>, data: u64, context: usize) -> Result<()> {
        let _ = (local, data, context);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_sendmsg`.
    pub unsafe fn send_msg(
        &self,
        local: LocalIov<'_>,
        data: u64,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let _ = (local, data, context, flags);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_inject`: no completion, and the buffer is free on return.
    pub unsafe fn inject(&self, buf: *const c_void, len: usize) -> Result<()> {
        let _ = (buf, len);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_injectdata`.
    pub unsafe fn inject_data(&self, buf: *const c_void, len: usize, data: u64) -> Result<()> {
        let _ = (buf, len, data);
        Err(FiErrno::ENOSYS)
    }
}
