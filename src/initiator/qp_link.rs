//! The queue pair of a connected endpoint, as its initiator's keys use it.

#![allow(unsafe_code, reason = "posts buffers whose caller promises for them")]

use std::sync::{Arc, Weak};

use super::link::Link;
use crate::errno::Result;
use crate::queue::slots::{EndpointSlots, EngineRequest, EngineRequests, FailureListener};
use crate::queue::{CompletionQueue, CqMember, EngineLink};
use crate::verbs::{Pd, Qp, SendRequest, SrqNumber};

/// Maximum number of polls of the application's completion queue, in one call, for a completion
/// that an operation waits for; counted again after each completed read of a look-up. Then the
/// operation is deferred, so a call never waits for a round trip. soft0 completes a read while it
/// is posted: one poll finds it, after another one for the announcement.
pub(crate) const POLL_LIMIT: u32 = 2;

#[cfg(not(test))]
fn poll_limit() -> u32 {
    POLL_LIMIT
}

#[cfg(test)]
thread_local! {
    /// Lets a test defer operations on a device that answers at once.
    pub(crate) static POLLS: std::cell::Cell<u32> = const { std::cell::Cell::new(POLL_LIMIT) };
}

#[cfg(test)]
fn poll_limit() -> u32 {
    POLLS.get()
}

/// The queue pair; the completion queue of its requests, and the member of that queue for them; the
/// records of the requests.
#[derive(Clone, Debug)]
pub(crate) struct QpLink {
    pub(super) qp: Arc<Qp>,
    pub(super) cq: Arc<CompletionQueue>,
    pub(super) member: CqMember,
    pub(super) slots: Arc<EndpointSlots>,
    /// The receive queue of the peer that requests on an initiator of XRC name; `None`: the queue
    /// pair is one of RC.
    pub(super) peer: Option<SrqNumber>,
}

impl QpLink {
    /// `peer`: the peer's receive queue, if `qp` is an initiator of XRC, which other endpoints may
    /// use too.
    pub(crate) fn new(
        qp: Arc<Qp>,
        cq: Arc<CompletionQueue>,
        member: CqMember,
        slots: Arc<EndpointSlots>,
        peer: Option<SrqNumber>,
    ) -> Self {
        Self {
            qp,
            cq,
            member,
            slots,
            peer,
        }
    }

    /// Names the peer's receive queue in a request.
    #[inline(always)]
    pub(super) fn address(&self, request: &mut SendRequest<'_>) {
        if let Some(peer) = self.peer {
            request.to_srq(peer);
        }
    }
}

impl EngineLink for QpLink {
    fn engine_requests(&self) -> &EngineRequests {
        &self.slots.engine_requests
    }

    unsafe fn post_request(
        &self,
        kind: EngineRequest,
        request: &mut SendRequest<'_>,
    ) -> Result<()> {
        request.wr_id(self.member.engine(kind)).signaled(true);
        self.address(request);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.qp.post_send(request) }
    }

    fn poll(&self) {
        let _ = self.cq.progress_engine_requests();
    }

    fn request_progress(&self) {
        self.slots.set_needs_progress();
        let slots = Arc::downgrade(&self.slots);
        self.cq.domain().helper().add(slots, &self.cq);
    }

    fn owner(&self) -> Option<Arc<dyn FailureListener>> {
        self.slots.owner.get().and_then(Weak::upgrade)
    }

    fn sever(&self) {
        let _ = self.qp.set_error();
        if let (Some(_), Some(owner)) = (self.peer, self.owner()) {
            owner.sever();
        }
        // reported here, because the device may have no request to flush
        self.slots.notify_failure();
    }
}

impl Link for QpLink {
    fn pd(&self) -> &Arc<Pd> {
        self.qp.pd()
    }

    #[inline]
    fn qp(&self) -> &Qp {
        &self.qp
    }

    #[inline]
    fn next_number(&self) -> u32 {
        self.slots.tx.next_number()
    }

    fn is_outstanding(&self, number: u32) -> bool {
        self.slots.tx.is_outstanding(number)
    }

    fn poll_once_more(&self, polls: &mut u32) -> bool {
        if *polls >= poll_limit() {
            return false;
        }
        *polls += 1;
        self.poll();
        true
    }

    fn clear_progress_request(&self) {
        if !self.slots.clear_needs_progress() {
            self.request_progress();
        }
    }

    fn set_holds_keys(&self, holds: bool) {
        self.slots.set_holds_keys(holds);
    }

    fn start_lease(&self) {
        let slots = Arc::downgrade(&self.slots);
        self.cq.domain().helper().hold(slots, &self.cq);
    }
}
