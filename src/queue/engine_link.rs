//! A queue pair as the engine's own requests use it: reads of the peer's key directory,
//! acknowledgements, notifications of revocations.

#![allow(unsafe_code, reason = "posts requests")]

use std::sync::Arc;

use super::slots::{EngineRequest, EngineRequests, FailureListener};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{RemoteAddr, Rkey, SendOpcode, SendRequest, Sge};

/// Posts the engine's own requests to one queue pair. Thread safe: they are posted without the
/// transmit lock too.
pub(crate) trait EngineLink: Send + Sync {
    /// Progress of the engine's own requests; pollers of the completion queue update it.
    fn engine_requests(&self) -> &EngineRequests;

    /// Posts one of the engine's own requests, of kind `kind`, after setting its `wr_id`; it is
    /// signaled.
    ///
    /// # Errors
    /// Those of the device.
    ///
    /// # Safety
    /// As [`crate::verbs::Qp::post_send`].
    unsafe fn post_request(&self, kind: EngineRequest, request: &mut SendRequest<'_>)
    -> Result<()>;

    /// Polls the completion queue for requests of this link.
    fn poll(&self);

    /// Makes the threads that poll the completion queue, and the domain's helper thread, retry the
    /// deferred operations and revocation notifications of this link.
    fn request_progress(&self);

    /// The endpoint, if it still exists.
    fn owner(&self) -> Option<Arc<dyn FailureListener>>;

    /// Ends the connection, and reports this to the endpoint.
    fn sever(&self);

    /// Posts one of the engine's own requests: `sge` is the local word or words, `to` the peer's
    /// address and rkey, `swap` the new value of a compare and swap with 0. `fence`: it waits for
    /// the reads and atomics before it. Returns whether it was posted.
    ///
    /// # Safety
    /// The buffer stays valid until the request completes.
    unsafe fn post_engine_request(
        &self,
        kind: EngineRequest,
        opcode: SendOpcode,
        sge: Sge,
        to: (RemoteAddr, Rkey),
        swap: u64,
        fence: bool,
    ) -> bool {
        if kind != EngineRequest::Revocation {
            self.engine_requests().begin(kind);
        }
        let sges = [sge];
        let mut request = SendRequest::new(opcode, &sges);
        if opcode.is_atomic() {
            request.atomic(to, 0, swap);
        } else {
            request.rdma(to);
        }
        request.fence(fence);
        // SAFETY: as this function: the caller keeps the buffer valid until completion.
        let posted = unsafe { self.post_request(kind, &mut request) };
        if let Err(error) = posted {
            self.engine_requests().end(kind, false);
            if error == FiErrno::ENOTCONN {
                // the link cannot post yet, or not any more
                return false;
            }
            info_log!(EpCtrl, "{kind:?} could not be posted: {error}");
        }
        posted.is_ok()
    }
}
