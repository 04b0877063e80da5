//! Receives.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::msg::{Endpoint, LocalIov};

/// Receives may be posted from the time the endpoint is enabled.
///
/// # Errors
/// - `EAGAIN`: the queue is full.
/// - `EINVAL`: too many buffers, or a descriptor that is needed and wrong.
/// - `EOPBADSTATE`: not enabled. `ESHUTDOWN`: no longer connected.
///
/// # Safety
/// Buffers must stay valid until the operation completes, and descriptors be NULL or those of
/// live regions that cover the buffers.
#[allow(clippy::missing_safety_doc, reason = "said once, above")]
impl Endpoint {
    /// `fi_recv`, `fi_recvv`.
    pub unsafe fn recv(&self, local: LocalIov<'_>, context: usize) -> Result<()> {
        let _ = (local, context);
        Err(FiErrno::ENOSYS)
    }

    /// `fi_recvmsg`.
    pub unsafe fn recv_msg(&self, local: LocalIov<'_>, context: usize, flags: Flags) -> Result<()> {
        let _ = (local, context, flags);
        Err(FiErrno::ENOSYS)
    }
}
