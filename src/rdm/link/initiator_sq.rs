//! The send queue of a link as an initiator uses it (`initiator`): RMA, atomics, and the engine's
//! own requests for keys.

#![allow(unsafe_code, reason = "posts requests whose caller promises for them")]

use std::sync::Arc;

use super::outlet::{CIRCUIT_ENGINE, Outlet};
use super::poster::{DriverRequest, LinkPoster};
use super::wr_id::WrId;
use crate::errno::Result;
use crate::initiator::Link;
use crate::initiator::keys::FURTHER_REQUESTS;
use crate::initiator::sq::{Signal, Sq};
use crate::queue::EngineLink;
use crate::queue::slots::{EngineRequest, EngineRequests, FailureListener, Slot, SlotRing};
use crate::verbs::{DelayedRequests, Pd, Qp, RemoteAddr, Rkey, SendRequest, SrqNumber};

/// A link as its initiator uses it: where it posts.
#[derive(Clone, Debug)]
pub(in crate::rdm) struct InitiatorLink {
    pub(super) outlet: Outlet,
    pub(super) poster: Arc<LinkPoster>,
}

impl EngineLink for InitiatorLink {
    fn engine_requests(&self) -> &EngineRequests {
        self.poster.requests()
    }

    unsafe fn post_request(
        &self,
        kind: EngineRequest,
        request: &mut SendRequest<'_>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.poster.post_engine(&self.outlet, kind, request) }
    }

    fn poll(&self) {
        self.poster.poll();
    }

    fn request_progress(&self) {
        self.poster.request_progress();
    }

    fn owner(&self) -> Option<Arc<dyn FailureListener>> {
        Some(Arc::clone(&self.poster) as _)
    }

    fn sever(&self) {
        self.poster.sever();
    }
}

impl Link for InitiatorLink {
    fn pd(&self) -> &Arc<Pd> {
        self.outlet.qp.pd()
    }

    #[inline]
    fn qp(&self) -> &Qp {
        &self.outlet.qp
    }

    #[inline]
    fn srq(&self) -> Option<SrqNumber> {
        self.outlet.srq()
    }

    fn has_room(&self) -> bool {
        self.outlet.has_room(1)
    }

    #[inline]
    fn next_number(&self) -> u32 {
        self.poster.posted().map_or(0, |slots| slots.next_number())
    }

    fn is_outstanding(&self, number: u32) -> bool {
        let slots = self.poster.posted();
        slots.is_some_and(|slots| slots.is_outstanding(number))
    }

    /// Operations are deferred: the caller holds the endpoint's lock, and polls after the post.
    fn poll_once_more(&self, _: &mut u32) -> bool {
        false
    }

    /// The driver finds out by itself that no operation is deferred.
    fn clear_progress_request(&self) {}

    fn set_holds_keys(&self, _: bool) {}

    fn start_lease(&self) {
        self.poster
            .request_driver(DriverRequest::Lease(self.poster.key()));
    }
}

/// Posts the requests of a link's initiator, under the endpoint's lock.
#[derive(Debug)]
pub(in crate::rdm) struct LinkSq {
    link: InitiatorLink,
    slots: Arc<SlotRing>,
    delayed: DelayedRequests,
}

impl LinkSq {
    pub(super) fn new(link: InitiatorLink) -> Self {
        let slots = Arc::clone(link.poster.slots());
        Self {
            link,
            slots,
            delayed: DelayedRequests::default(),
        }
    }

    /// Number of records.
    pub(in crate::rdm) fn capacity(&self) -> usize {
        self.slots.capacity()
    }

    /// Stores the record of a request. Returns its number, and whether it is signaled: each last
    /// request of an operation is.
    #[inline(always)]
    fn push(&self, slot: Slot, signal: Signal) -> (u32, bool) {
        let signaled = signal != Signal::No;
        (self.slots.push(Slot { signaled, ..slot }), signaled)
    }

    #[cold]
    #[inline(never)]
    fn post_chain(&mut self) {
        self.delayed.post(&self.link.outlet.qp);
    }
}

impl Sq for LinkSq {
    type Link = InitiatorLink;

    #[inline]
    fn link(&self) -> &InitiatorLink {
        &self.link
    }

    #[inline]
    fn is_full(&self) -> bool {
        let room = self.link.outlet.has_room(CIRCUIT_ENGINE + FURTHER_REQUESTS);
        self.slots.is_full() || !room
    }

    /// The caller holds the endpoint's lock, and polls.
    fn make_room(&self) -> Result<bool> {
        Ok(!self.is_full())
    }

    /// The endpoint's `tx_size` limits the operations.
    fn can_defer(&self, _: usize) -> bool {
        true
    }

    #[inline]
    fn next_index(&self) -> usize {
        self.slots.next_index()
    }

    #[inline]
    fn tail(&self) -> u32 {
        self.slots.tail()
    }

    #[inline(always)]
    unsafe fn post(
        &mut self,
        request: &mut SendRequest<'_>,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32> {
        self.post_delayed();
        let (number, signaled) = self.push(slot, signal);
        request
            .wr_id(WrId::rma(self.link.poster.key(), number))
            .signaled(signaled);
        // SAFETY: the caller keeps the contract of this function.
        let posted = unsafe { self.link.outlet.post(request) };
        self.slots.unpush_if_refused(number, posted)
    }

    #[inline(always)]
    fn executes(&self) -> bool {
        self.link.outlet.qp.executes() && self.slots.outstanding() == 0
    }

    #[inline]
    fn has_delayed(&self) -> bool {
        !self.delayed.is_empty()
    }

    /// Progress is that of the endpoint (`Executor::post_delayed`).
    #[cold]
    #[inline(never)]
    unsafe fn post_in_list(
        &mut self,
        request: &mut SendRequest<'_>,
        slot: Slot,
        signal: Signal,
        more: bool,
    ) -> Result<u32> {
        self.link.outlet.take_room()?;
        let (number, signaled) = self.push(slot, signal);
        request
            .wr_id(WrId::rma(self.link.poster.key(), number))
            .signaled(signaled);
        self.link.outlet.direct(request);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.delayed.push(request) };
        // the next request must find room
        if !more || self.is_full() || self.delayed.is_full() {
            self.post_delayed();
        }
        Ok(number)
    }

    #[inline]
    fn post_delayed(&mut self) {
        if !self.delayed.is_empty() {
            self.post_chain();
        }
    }

    fn post_flush(
        &mut self,
        to: (RemoteAddr, Rkey),
        len: usize,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32> {
        self.post_delayed();
        let outlet = &self.link.outlet;
        outlet.take_room()?;
        let (number, signaled) = self.push(slot, signal);
        let wr_id = WrId::rma(self.link.poster.key(), number);
        let posted = outlet
            .qp
            .post_flush(wr_id, outlet.srq(), (to, len), signaled);
        let posted = posted.inspect_err(|_| outlet.give_room());
        self.slots.unpush_if_refused(number, posted)
    }

    fn fail(&self) {
        let _ = self.link.outlet.qp.set_error();
    }
}
