//! The send queue of a link as an initiator uses it (`initiator`): RMA, atomics, and the engine's
//! own requests for keys. The records of these requests are here, those of packets in `links.rs`.
//! Both are posted to one queue pair ([`Outlet`]): that of the link, or on XRC the initiator of its
//! circuit, once the link may post.

#![allow(unsafe_code, reason = "posts requests whose caller promises for them")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::core::link::LinkKey;
use super::links::WrId;
use super::shared::Shared;
use crate::conn::RevocationNotifier;
use crate::errno::{FiErrno, Result};
use crate::initiator::Link;
use crate::initiator::keys::FURTHER_REQUESTS;
use crate::initiator::sq::{Signal, Sq};
use crate::mr::{ConnectionBlock, Peer};
use crate::queue::EngineLink;
use crate::queue::slots::{EngineRequest, EngineRequests, FailureListener, Slot, SlotRing};
use crate::verbs::{Chain, Pd, Qp, RemoteAddr, Rkey, SendRequest, SrqNumber};
use crate::wire::records::Block;

/// Requests of RMA and atomics of one link that are under way. Further operations wait.
pub(super) const RMA_DEPTH: usize = 64;

/// Requests of a queue pair besides packets: those of operations, and the engine's own.
pub(super) const RMA_REQUESTS: usize = RMA_DEPTH + FURTHER_REQUESTS + EngineRequest::MOST;

/// Requests of a circuit besides packets, of all its links; and the part of them that operations do
/// not use, because the requests for keys are not repeated at once.
pub(super) const CIRCUIT_RMA: usize = 256;
const CIRCUIT_ENGINE: usize = 64;

/// The requests of a circuit besides packets that have not completed.
#[derive(Debug, Default)]
pub(super) struct Room {
    used: AtomicUsize,
    /// A request for keys found no room.
    refused: AtomicBool,
}

impl Room {
    /// Whether all requests have completed.
    pub(super) fn is_empty(&self) -> bool {
        self.used.load(Ordering::Relaxed) == 0
    }

    /// Whether so many requests can be posted.
    #[inline]
    fn has(&self, count: usize) -> bool {
        self.used.load(Ordering::Relaxed) + count <= CIRCUIT_RMA
    }

    /// # Errors
    /// `EAGAIN`: the queue is full.
    #[inline]
    fn take(&self) -> Result<()> {
        if self.used.fetch_add(1, Ordering::Relaxed) < CIRCUIT_RMA {
            return Ok(());
        }
        self.give(1);
        Err(FiErrno::EAGAIN)
    }

    /// So many requests have completed, or were not posted.
    #[inline]
    pub(super) fn give(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }

    /// As if so many requests were under way.
    #[cfg(test)]
    pub(super) fn occupy(&self, count: usize) {
        self.used.fetch_add(count, Ordering::Relaxed);
    }

    /// Whether a notification of a revocation found no room since the last call.
    #[inline]
    pub(super) fn take_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed) && self.refused.swap(false, Ordering::Relaxed)
    }
}

/// Where the requests of a link are posted.
#[derive(Clone, Debug)]
pub(super) struct Outlet {
    qp: Arc<Qp>,
    /// On a circuit: the receive queue of the peer, which each request names, and the room.
    circuit: Option<(SrqNumber, Arc<Room>)>,
}

impl Outlet {
    /// The queue pair of a link.
    pub(super) fn of_qp(qp: &Arc<Qp>) -> Self {
        Self {
            qp: Arc::clone(qp),
            circuit: None,
        }
    }

    /// A circuit, to a peer with this shared receive queue.
    pub(super) fn of_circuit(qp: &Arc<Qp>, srq: SrqNumber, room: &Arc<Room>) -> Self {
        Self {
            qp: Arc::clone(qp),
            circuit: Some((srq, Arc::clone(room))),
        }
    }

    fn srq(&self) -> Option<SrqNumber> {
        self.circuit.as_ref().map(|(srq, _)| *srq)
    }

    /// # Errors
    /// `EAGAIN`: the queue is full.
    #[inline(always)]
    fn take_room(&self) -> Result<()> {
        match &self.circuit {
            None => Ok(()),
            Some((_, room)) => room.take(),
        }
    }

    #[inline(always)]
    fn give_room(&self) {
        if let Some((_, room)) = &self.circuit {
            room.give(1);
        }
    }

    /// Whether so many requests can be posted.
    #[inline(always)]
    fn has_room(&self, count: usize) -> bool {
        let circuit = self.circuit.as_ref();
        circuit.is_none_or(|(_, room)| room.has(count))
    }

    /// Completes a request: its receive queue.
    #[inline(always)]
    fn direct(&self, request: &mut SendRequest<'_>) {
        if let Some(srq) = self.srq() {
            request.to_srq(srq);
        }
    }

    /// Posts a request.
    ///
    /// # Errors
    /// `EAGAIN`: the queue is full. The device's.
    ///
    /// # Safety
    /// As [`Qp::post_send`].
    #[inline(always)]
    unsafe fn post(&self, request: &mut SendRequest<'_>) -> Result<()> {
        self.take_room()?;
        self.direct(request);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.qp.post_send(request) }.inspect_err(|_| self.give_room())
    }
}

/// What threads without the endpoint's lock access of a link.
pub(super) struct LinkPoster {
    key: LinkKey,
    shared: Weak<Shared>,
    /// `None`: nothing can be posted, not yet or not any more.
    outlet: Mutex<Option<Outlet>>,
    /// The records of posted requests; allocated with the first operation.
    tx: OnceLock<Arc<SlotRing>>,
    requests: EngineRequests,
    /// The circuit was destroyed before all requests had completed.
    abandoned: AtomicBool,
    /// The link can be used: it is connected, and does not end.
    up: AtomicBool,
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
pub(super) enum DriverRequest {
    /// Deferred operations, or notifications, are to be retried.
    Progress(LinkKey),
    /// The keys of the peer are held: their lease begins.
    Lease(LinkKey),
    /// The peer does not acknowledge a revocation: the link ends.
    Sever(LinkKey),
}

impl LinkPoster {
    /// The records of posted requests.
    fn ring(&self) -> &Arc<SlotRing> {
        self.tx
            .get_or_init(|| Arc::new(SlotRing::for_sends(RMA_DEPTH)))
    }

    /// Whether requests of RMA have not completed.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.tx.get().is_some_and(|tx| tx.outstanding() != 0)
    }

    /// Number of the first request of RMA that has not completed; wraps.
    pub(super) fn first(&self) -> u32 {
        self.tx.get().map_or(0, |tx| tx.tail())
    }

    /// Whether any request has not completed, until the circuit was destroyed.
    pub(super) fn has_requests(&self) -> bool {
        let abandoned = self.abandoned.load(Ordering::Relaxed);
        !abandoned && (self.is_busy() || self.requests.are_under_way())
    }

    /// On a circuit: requests can be posted from now on.
    pub(super) fn open(&self, outlet: Outlet) {
        *self.outlet.lock() = Some(outlet);
    }

    /// On a circuit: nothing is posted any more, and the queue pair is not referenced. The peer may
    /// still use keys.
    pub(super) fn shut(&self) {
        *self.outlet.lock() = None;
    }

    /// See [`Self::abandon`].
    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// The circuit is destroyed: what has not completed never will.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.shut();
    }

    fn request_driver(&self, request: DriverRequest) {
        if let Some(shared) = self.shared.upgrade() {
            shared.request_driver(request);
        }
    }

    pub(super) fn set_up(&self, up: bool) {
        self.up.store(up, Ordering::Relaxed);
    }

    /// Takes the call for progress.
    pub(super) fn take_call(&self) -> bool {
        self.called.swap(false, Ordering::SeqCst)
    }

    /// Records the completion of one of the engine's own requests. Returns whether a notification
    /// is still to be sent.
    pub(super) fn request_ended(&self, kind: EngineRequest, success: bool) -> bool {
        self.requests.end(kind, success);
        self.requests.is_wanted()
    }

    /// The record of a completed request, of which `wr_id` has the low bits of the number, and the
    /// number of unsignaled requests before it that have completed with it.
    #[inline]
    pub(super) fn complete(&self, number: u16) -> Option<(Slot, u16)> {
        let ring = self.tx.get()?;
        let tail = ring.tail();
        let ahead = number.wrapping_sub(tail as u16);
        let slot = ring.complete(tail.wrapping_add(ahead.into()))?;
        Some((slot, ahead))
    }
}

impl FailureListener for LinkPoster {
    fn operation_failed(&self) {}

    fn acknowledge(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.acknowledge(self.key);
        }
    }

    fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }
}

impl LinkPoster {
    /// Posts one of the engine's own requests.
    ///
    /// # Errors
    /// Those of [`Outlet::post`].
    ///
    /// # Safety
    /// As [`EngineLink::post_request`].
    unsafe fn post_engine(
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
    fn poll(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.try_poll();
        }
    }

    fn request_progress(&self) {
        if !self.called.swap(true, Ordering::SeqCst) {
            self.request_driver(DriverRequest::Progress(self.key));
        }
    }

    /// Ends the peer's access, whose requests arrive at the queue pair of the link, or on XRC at
    /// targets.
    fn sever(&self) {
        self.set_up(false);
        let outlet = self.outlet.lock().clone();
        match outlet {
            Some(Outlet { qp, circuit: None }) => {
                let _ = qp.set_error();
            }
            _ => {
                if let Some(shared) = self.shared.upgrade() {
                    shared.sever_targets(self.key);
                }
            }
        }
        self.request_driver(DriverRequest::Sever(self.key));
    }
}

/// A link as the key directory of this side uses it. It may have no outlet yet.
#[derive(Clone, Debug)]
pub(super) struct OwnerLink(Arc<LinkPoster>);

impl EngineLink for OwnerLink {
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
        if posted == Err(FiErrno::EAGAIN)
            && let Some((_, room)) = &outlet.circuit
        {
            room.refused.store(true, Ordering::Relaxed);
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

/// A link as its initiator uses it: where it posts.
#[derive(Clone, Debug)]
pub(super) struct RdmLink {
    outlet: Outlet,
    poster: Arc<LinkPoster>,
}

impl EngineLink for RdmLink {
    fn engine_requests(&self) -> &EngineRequests {
        &self.poster.requests
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

impl Link for RdmLink {
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
        self.poster.tx.get().map_or(0, |ring| ring.next_number())
    }

    fn is_outstanding(&self, number: u32) -> bool {
        let ring = self.poster.tx.get();
        ring.is_some_and(|ring| ring.is_outstanding(number))
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
            .request_driver(DriverRequest::Lease(self.poster.key));
    }
}

/// Posts the requests of a link's initiator, under the endpoint's lock.
#[derive(Debug)]
pub(super) struct LinkSq {
    link: RdmLink,
    ring: Arc<SlotRing>,
    /// Delayed requests; allocated with the first one.
    chain: Option<Box<Chain>>,
    /// Whether there are delayed requests.
    delayed: bool,
}

impl LinkSq {
    fn new(link: RdmLink) -> Self {
        let ring = Arc::clone(link.poster.ring());
        Self {
            link,
            ring,
            chain: None,
            delayed: false,
        }
    }

    /// Number of records.
    pub(super) fn capacity(&self) -> usize {
        self.ring.capacity()
    }

    /// Stores the record of a request. Returns its number, and whether it is signaled: each last
    /// request of an operation is.
    #[inline(always)]
    fn push(&self, slot: Slot, signal: Signal) -> (u32, bool) {
        let signaled = signal != Signal::No;
        (self.ring.push(Slot { signaled, ..slot }), signaled)
    }

    #[cold]
    #[inline(never)]
    fn post_chain(&mut self) {
        self.delayed = false;
        if let Some(chain) = &mut self.chain {
            chain.post(&self.link.outlet.qp);
        }
    }

    /// Appends a request to the delayed ones.
    ///
    /// # Safety
    /// As [`Sq::post`].
    unsafe fn delay(&mut self, request: &mut SendRequest<'_>) {
        self.link.outlet.direct(request);
        let chain = self.chain.get_or_insert_with(|| Box::new(Chain::new()));
        // SAFETY: as this function.
        unsafe { chain.push(request) };
        self.delayed = true;
    }

    #[inline(always)]
    fn undo_if_refused(&self, number: u32, posted: Result<()>) -> Result<u32> {
        if let Err(error) = posted {
            self.ring.unpush();
            return Err(error);
        }
        Ok(number)
    }
}

impl Sq for LinkSq {
    type Link = RdmLink;

    #[inline]
    fn link(&self) -> &RdmLink {
        &self.link
    }

    #[inline]
    fn is_full(&self) -> bool {
        let room = self.link.outlet.has_room(CIRCUIT_ENGINE + FURTHER_REQUESTS);
        self.ring.is_full() || !room
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
        self.ring.next_index()
    }

    #[inline]
    fn tail(&self) -> u32 {
        self.ring.tail()
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
            .wr_id(WrId::rma(self.link.poster.key, number))
            .signaled(signaled);
        // SAFETY: the caller keeps the contract of this function.
        let posted = unsafe { self.link.outlet.post(request) };
        self.undo_if_refused(number, posted)
    }

    #[inline(always)]
    fn executes(&self) -> bool {
        self.link.outlet.qp.executes() && self.ring.outstanding() == 0
    }

    #[inline]
    fn has_delayed(&self) -> bool {
        self.delayed
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
            .wr_id(WrId::rma(self.link.poster.key, number))
            .signaled(signaled);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.delay(request) };
        // the next request must find room
        if !more || self.is_full() || self.chain.as_ref().is_some_and(|chain| chain.is_full()) {
            self.post_delayed();
        }
        Ok(number)
    }

    #[inline]
    fn post_delayed(&mut self) {
        if self.delayed {
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
        let wr_id = WrId::rma(self.link.poster.key, number);
        let posted = outlet
            .qp
            .post_flush(wr_id, outlet.srq(), (to, len), signaled);
        let posted = posted.inspect_err(|_| outlet.give_room());
        self.undo_if_refused(number, posted)
    }

    fn fail(&self) {
        let _ = self.link.outlet.qp.set_error();
    }
}

/// The connection block of a link, in the key directory, which the peer accesses.
#[derive(Debug)]
pub(super) struct LinkBlock {
    pub(super) poster: Arc<LinkPoster>,
    block: Arc<ConnectionBlock>,
    notifier: Arc<RevocationNotifier<OwnerLink>>,
}

impl LinkBlock {
    /// Adds the link to the key directory, before the address of the block is sent. No lock is held
    /// that is after the directory's. `qp`: that of the link, which has none on a circuit.
    pub(super) fn new(
        shared: &Weak<Shared>,
        key: LinkKey,
        qp: Option<&Arc<Qp>>,
        block: ConnectionBlock,
    ) -> Self {
        let poster = Arc::new(LinkPoster {
            key,
            shared: Weak::clone(shared),
            outlet: Mutex::new(qp.map(Outlet::of_qp)),
            tx: OnceLock::new(),
            requests: EngineRequests::default(),
            abandoned: AtomicBool::new(false),
            up: AtomicBool::new(false),
            called: AtomicBool::new(false),
        });
        let block = Arc::new(block);
        let link = OwnerLink(Arc::clone(&poster));
        let notifier = Arc::new(RevocationNotifier::new(link, &block));
        let weak = Arc::downgrade(&notifier);
        let weak: Weak<dyn Peer> = weak;
        block.join(weak);
        Self {
            poster,
            block,
            notifier,
        }
    }

    /// Address and rkey of the connection block.
    pub(super) fn block(&self) -> (RemoteAddr, Rkey) {
        (self.block.addr(), self.block.rkey())
    }

    pub(super) fn connection_block(&self) -> &Arc<ConnectionBlock> {
        &self.block
    }

    pub(super) fn notifier(&self) -> &Arc<RevocationNotifier<OwnerLink>> {
        &self.notifier
    }

    /// On a circuit: nothing is posted any more, and all that was posted has completed. No key of
    /// the peer is held, which the peer may read here.
    pub(super) fn shut(&self) {
        self.poster.shut();
        if !self.poster.is_abandoned() {
            self.block.show_settled(Block::HOLDS_NONE);
        }
    }

    /// The send queue of an initiator. At most one is made. `None`: nothing can be posted.
    pub(super) fn sq(&self) -> Option<LinkSq> {
        let outlet = self.poster.outlet.lock().clone()?;
        let poster = Arc::clone(&self.poster);
        Some(LinkSq::new(RdmLink { outlet, poster }))
    }

    /// Leaves the key directory: the queue pair executes no operation of the peer any more. The
    /// block is returned, to be dropped behind the queue pair. Acquires the directory's lock.
    pub(super) fn leave(self) -> Arc<ConnectionBlock> {
        self.block.leave();
        // behind `leave`: the directory does not use the notifier any more
        self.poster.shut();
        drop((self.notifier, self.poster));
        self.block
    }
}
