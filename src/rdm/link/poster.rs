//! What threads without the endpoint's lock access of a link: the records of its requests besides
//! packets, and the engine's own requests. The records of packets are in `links.rs`.

#![allow(unsafe_code, reason = "posts requests whose caller promises for them")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::endpoint::LinkEndpoint;
use super::outlet::Outlet;
use super::wr_id::WrId;
use crate::errno::{FiErrno, Result};
use crate::initiator::keys::FURTHER_REQUESTS;
use crate::queue::EngineLink;
use crate::queue::slots::{EngineRequest, EngineRequests, FailureListener, Slot, SlotRing};
use crate::rdm::core::link::LinkKey;
use crate::verbs::{Qp, SendRequest};

/// Requests of RMA and atomics of one link that are under way. Further operations wait.
pub(in crate::rdm) const RMA_DEPTH: usize = 64;

/// Requests of a queue pair besides packets: those of operations, and the engine's own.
pub(in crate::rdm) const RMA_REQUESTS: usize = RMA_DEPTH + FURTHER_REQUESTS + EngineRequest::MOST;

/// What threads without the endpoint's lock access of a link.
pub(in crate::rdm) struct LinkPoster {
    key: LinkKey,
    endpoint: Weak<dyn LinkEndpoint>,
    /// `None`: nothing can be posted, not yet or not any more.
    outlet: Mutex<Option<Outlet>>,
    /// The records of posted requests; allocated with the first operation.
    slots: OnceLock<Arc<SlotRing>>,
    requests: EngineRequests,
    /// The circuit was destroyed before all requests had completed.
    abandoned: AtomicBool,
    /// This side has begun to end the link, or has found it ended. A link whose terms have not
    /// arrived has not ended: the peer, which has those of this side, may use keys already.
    ended: AtomicBool,
    /// The driver was called for deferred operations or notifications.
    called: AtomicBool,
}

impl std::fmt::Debug for LinkPoster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LinkPoster({:?})", self.key)
    }
}

/// What a link asks of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum DriverRequest {
    /// Deferred operations, or notifications, are to be retried.
    Progress(LinkKey),
    /// The keys of the peer are held: their lease begins.
    Lease(LinkKey),
    /// The peer does not acknowledge a revocation: the link ends.
    Sever(LinkKey),
}

impl LinkPoster {
    /// `qp`: that of the link, which has none on a circuit.
    pub(super) fn new(
        endpoint: Weak<dyn LinkEndpoint>,
        key: LinkKey,
        qp: Option<&Arc<Qp>>,
    ) -> Self {
        Self {
            key,
            endpoint,
            outlet: Mutex::new(qp.map(Outlet::of_qp)),
            slots: OnceLock::new(),
            requests: EngineRequests::default(),
            abandoned: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            called: AtomicBool::new(false),
        }
    }

    #[inline(always)]
    pub(super) fn key(&self) -> LinkKey {
        self.key
    }

    /// Where requests are posted; `None`: nothing can be posted.
    pub(super) fn outlet(&self) -> Option<Outlet> {
        self.outlet.lock().clone()
    }

    /// The engine's own requests.
    pub(super) fn requests(&self) -> &EngineRequests {
        &self.requests
    }

    /// The records of posted requests, if there were any.
    #[inline(always)]
    pub(super) fn posted(&self) -> Option<&Arc<SlotRing>> {
        self.slots.get()
    }

    /// The records of posted requests.
    pub(super) fn slots(&self) -> &Arc<SlotRing> {
        self.slots
            .get_or_init(|| Arc::new(SlotRing::for_sends(RMA_DEPTH)))
    }

    /// Whether requests of RMA have not completed.
    #[inline]
    pub(in crate::rdm) fn is_busy(&self) -> bool {
        self.slots
            .get()
            .is_some_and(|slots| slots.outstanding() != 0)
    }

    /// Number of the first request of RMA that has not completed; wraps.
    pub(in crate::rdm) fn first(&self) -> u32 {
        self.slots.get().map_or(0, |slots| slots.tail())
    }

    /// Whether any request has not completed, until the circuit was destroyed.
    pub(in crate::rdm) fn has_requests(&self) -> bool {
        let abandoned = self.abandoned.load(Ordering::Relaxed);
        !abandoned && (self.is_busy() || self.requests.are_under_way())
    }

    /// On a circuit: requests can be posted from now on.
    pub(in crate::rdm) fn open(&self, outlet: Outlet) {
        *self.outlet.lock() = Some(outlet);
    }

    /// On a circuit: nothing is posted any more, and the queue pair is not referenced. The peer may
    /// still use keys.
    pub(in crate::rdm) fn shut(&self) {
        *self.outlet.lock() = None;
    }

    /// See [`Self::abandon`].
    pub(in crate::rdm) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// The circuit is destroyed: what has not completed never will.
    pub(in crate::rdm) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.shut();
    }

    pub(super) fn request_driver(&self, request: DriverRequest) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.request_driver(request);
        }
    }

    pub(in crate::rdm) fn set_ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Takes the call for progress.
    pub(in crate::rdm) fn take_call(&self) -> bool {
        self.called.swap(false, Ordering::SeqCst)
    }

    /// Records the completion of one of the engine's own requests. Returns whether a notification
    /// is still to be sent.
    pub(in crate::rdm) fn request_ended(&self, kind: EngineRequest, success: bool) -> bool {
        self.requests.end(kind, success);
        self.requests.is_wanted()
    }

    /// The record of a completed request, of which `wr_id` has the low bits of the number, and the
    /// number of unsignaled requests before it that have completed with it.
    #[inline]
    pub(in crate::rdm) fn complete(&self, number: u16) -> Option<(Slot, u16)> {
        let slots = self.slots.get()?;
        let tail = slots.tail();
        let ahead = number.wrapping_sub(tail as u16);
        let slot = slots.complete(tail.wrapping_add(ahead.into()))?;
        Some((slot, ahead))
    }

    /// Posts one of the engine's own requests.
    ///
    /// # Errors
    /// Those of [`Outlet::post`].
    ///
    /// # Safety
    /// As [`EngineLink::post_request`].
    pub(super) unsafe fn post_engine(
        &self,
        outlet: &Outlet,
        kind: EngineRequest,
        request: &mut SendRequest<'_>,
    ) -> Result<()> {
        request.wr_id(WrId::engine(self.key, kind)).signaled(true);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { outlet.post(request) }
    }

    /// Has no effect if another thread, or the caller, holds the endpoint's lock.
    pub(super) fn poll(&self) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.try_poll();
        }
    }

    pub(super) fn request_progress(&self) {
        if !self.called.swap(true, Ordering::SeqCst) {
            self.request_driver(DriverRequest::Progress(self.key));
        }
    }

    /// Ends the peer's access, whose requests arrive at the queue pair of the link, or on XRC at
    /// targets.
    pub(super) fn sever(&self) {
        self.set_ended();
        let outlet = self.outlet.lock().clone();
        match outlet {
            Some(Outlet { qp, circuit: None }) => {
                let _ = qp.set_error();
            }
            _ => {
                if let Some(endpoint) = self.endpoint.upgrade() {
                    endpoint.sever_targets(self.key);
                }
            }
        }
        self.request_driver(DriverRequest::Sever(self.key));
    }
}

impl FailureListener for LinkPoster {
    fn operation_failed(&self) {}

    fn acknowledge(&self) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.acknowledge(self.key);
        }
    }

    fn is_up(&self) -> bool {
        !self.ended.load(Ordering::Relaxed)
    }
}

/// A link as the key directory of this side uses it. It may have no outlet yet.
#[derive(Clone, Debug)]
pub(in crate::rdm) struct DirectoryLink(pub(super) Arc<LinkPoster>);

impl EngineLink for DirectoryLink {
    fn engine_requests(&self) -> &EngineRequests {
        &self.0.requests
    }

    /// # Errors
    /// `ENOTCONN`: nothing can be posted.
    unsafe fn post_request(
        &self,
        kind: EngineRequest,
        request: &mut SendRequest<'_>,
    ) -> Result<()> {
        let outlet = self.0.outlet.lock();
        let outlet = outlet.as_ref().ok_or(FiErrno::ENOTCONN)?;
        // SAFETY: the caller keeps the contract of this function.
        let posted = unsafe { self.0.post_engine(outlet, kind, request) };
        if posted == Err(FiErrno::EAGAIN) {
            outlet.note_refused();
        }
        posted
    }

    fn poll(&self) {
        self.0.poll();
    }

    fn request_progress(&self) {
        self.0.request_progress();
    }

    fn owner(&self) -> Option<Arc<dyn FailureListener>> {
        Some(Arc::clone(&self.0) as _)
    }

    fn sever(&self) {
        self.0.sever();
    }
}
