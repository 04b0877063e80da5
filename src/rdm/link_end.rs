//! The send queue of a link as an initiator uses it (`initiator`): RMA, atomics, and the engine's
//! own requests for keys. The requests have records apart from those of packets (`links.rs`); both
//! are posted to one queue pair.

#![allow(unsafe_code, reason = "posts requests whose caller promises for them")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::link::LinkKey;
use super::links::WrId;
use super::shared::Shared;
use crate::conn::RevocationNotifier;
use crate::errno::Result;
use crate::initiator::Link;
use crate::initiator::keys::FURTHER_REQUESTS;
use crate::initiator::sq::{Signal, Sq};
use crate::mr::{ConnectionBlock, Peer};
use crate::queue::EngineLink;
use crate::queue::slots::{EngineRequest, EngineRequests, FailureListener, Slot, SlotRing};
use crate::verbs::{Chain, Pd, Qp, RemoteAddr, Rkey, SendRequest};

/// Requests of RMA and atomics of one link that are under way. Further operations wait.
pub(super) const RMA_DEPTH: usize = 64;

/// Requests of a queue pair besides packets: those of operations, and the engine's own.
pub(super) const RMA_REQUESTS: usize = RMA_DEPTH + FURTHER_REQUESTS + EngineRequest::MOST;

/// What threads without the endpoint's lock access of a link.
pub(super) struct LinkRings {
    key: LinkKey,
    shared: Weak<Shared>,
    /// The records of posted requests; allocated with the first operation.
    tx: OnceLock<Arc<SlotRing>>,
    requests: EngineRequests,
    /// The link can be used: it is connected, and does not end.
    up: AtomicBool,
    /// The driver was called for deferred operations or notifications.
    called: AtomicBool,
}

impl std::fmt::Debug for LinkRings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LinkRings({:?})", self.key)
    }
}

/// What a link asks of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// Deferred operations, or notifications, are to be retried.
    Progress(LinkKey),
    /// The keys of the peer are held: their lease begins.
    Lease(LinkKey),
    /// The peer does not acknowledge a revocation: the link ends.
    Sever(LinkKey),
}

impl LinkRings {
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

    fn call(&self, call: Call) {
        if let Some(shared) = self.shared.upgrade() {
            shared.call(call);
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

    /// The record of a completed request, of which `wr_id` has the low bits of the number, and
    /// whether unsignaled requests before it have completed with it.
    #[inline]
    pub(super) fn complete(&self, number: u16) -> Option<(Slot, bool)> {
        let ring = self.tx.get()?;
        let tail = ring.tail();
        let ahead = number.wrapping_sub(tail as u16);
        let slot = ring.complete(tail.wrapping_add(ahead.into()))?;
        Some((slot, ahead != 0))
    }
}

impl FailureListener for LinkRings {
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

/// The queue pair of a link as the keys of both sides use it.
#[derive(Clone, Debug)]
pub(super) struct RdmLink {
    qp: Arc<Qp>,
    rings: Arc<LinkRings>,
}

impl EngineLink for RdmLink {
    fn engine_requests(&self) -> &EngineRequests {
        &self.rings.requests
    }

    unsafe fn post_request(
        &self,
        kind: EngineRequest,
        request: &mut SendRequest<'_>,
    ) -> Result<()> {
        request
            .wr_id(WrId::engine(self.rings.key, kind))
            .signaled(true);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.qp.post_send(request) }
    }

    /// Has no effect if another thread, or the caller, holds the endpoint's lock.
    fn poll(&self) {
        if let Some(shared) = self.rings.shared.upgrade() {
            shared.try_poll();
        }
    }

    fn request_progress(&self) {
        if !self.rings.called.swap(true, Ordering::SeqCst) {
            self.rings.call(Call::Progress(self.rings.key));
        }
    }

    fn owner(&self) -> Option<Arc<dyn FailureListener>> {
        Some(Arc::clone(&self.rings) as _)
    }

    fn sever(&self) {
        let _ = self.qp.set_error();
        self.rings.set_up(false);
        self.rings.call(Call::Sever(self.rings.key));
    }
}

impl Link for RdmLink {
    fn pd(&self) -> &Arc<Pd> {
        self.qp.pd()
    }

    #[inline]
    fn qp(&self) -> &Qp {
        &self.qp
    }

    #[inline]
    fn next_number(&self) -> u32 {
        self.rings.tx.get().map_or(0, |ring| ring.next_number())
    }

    fn is_outstanding(&self, number: u32) -> bool {
        let ring = self.rings.tx.get();
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
        self.rings.call(Call::Lease(self.rings.key));
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
        let ring = Arc::clone(link.rings.ring());
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
            chain.post(&self.link.qp);
        }
    }

    /// Appends a request to the delayed ones.
    ///
    /// # Safety
    /// As [`Sq::post`].
    unsafe fn delay(&mut self, request: &SendRequest<'_>) {
        let chain = self.chain.get_or_insert_with(|| Box::new(Chain::new()));
        // SAFETY: as this function.
        unsafe { chain.push(request) };
        self.delayed = true;
    }

    #[inline(always)]
    fn posted(&self, number: u32, posted: Result<()>) -> Result<u32> {
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
        self.ring.is_full()
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
            .wr_id(WrId::rma(self.link.rings.key, number))
            .signaled(signaled);
        // SAFETY: the caller keeps the contract of this function.
        let posted = unsafe { self.link.qp.post_send(request) };
        self.posted(number, posted)
    }

    #[inline(always)]
    fn executes(&self) -> bool {
        self.link.qp.executes() && self.ring.outstanding() == 0
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
        let (number, signaled) = self.push(slot, signal);
        request
            .wr_id(WrId::rma(self.link.rings.key, number))
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
        let (number, signaled) = self.push(slot, signal);
        let wr_id = WrId::rma(self.link.rings.key, number);
        let posted = self.link.qp.post_flush(wr_id, to, len, signaled);
        self.posted(number, posted)
    }

    fn fail(&self) {
        let _ = self.link.qp.set_error();
    }
}

/// This side of a link: its connection block in the key directory, which the peer accesses.
#[derive(Debug)]
pub(super) struct LinkEnd {
    pub(super) rings: Arc<LinkRings>,
    link: RdmLink,
    block: Arc<ConnectionBlock>,
    notifier: Arc<RevocationNotifier<RdmLink>>,
}

impl LinkEnd {
    /// Adds the link to the key directory, before the address of the block is sent. No lock is held
    /// that is after the directory's.
    pub(super) fn new(
        shared: &Weak<Shared>,
        key: LinkKey,
        qp: &Arc<Qp>,
        block: ConnectionBlock,
    ) -> Self {
        let rings = Arc::new(LinkRings {
            key,
            shared: Weak::clone(shared),
            tx: OnceLock::new(),
            requests: EngineRequests::default(),
            up: AtomicBool::new(false),
            called: AtomicBool::new(false),
        });
        let link = RdmLink {
            qp: Arc::clone(qp),
            rings: Arc::clone(&rings),
        };
        let block = Arc::new(block);
        let notifier = Arc::new(RevocationNotifier::new(link.clone(), &block));
        let weak = Arc::downgrade(&notifier);
        let weak: Weak<dyn Peer> = weak;
        block.join(weak);
        Self {
            rings,
            link,
            block,
            notifier,
        }
    }

    /// Whether requests of RMA have not completed.
    pub(super) fn is_busy(&self) -> bool {
        self.rings.is_busy()
    }

    /// Address and rkey of the connection block.
    pub(super) fn block(&self) -> (RemoteAddr, Rkey) {
        (self.block.addr(), self.block.rkey())
    }

    pub(super) fn connection_block(&self) -> &Arc<ConnectionBlock> {
        &self.block
    }

    pub(super) fn notifier(&self) -> &Arc<RevocationNotifier<RdmLink>> {
        &self.notifier
    }

    /// The queue pair, for the peer's keys.
    pub(super) fn link(&self) -> RdmLink {
        self.link.clone()
    }

    /// The send queue of an initiator. At most one is made.
    pub(super) fn sq(&self) -> LinkSq {
        LinkSq::new(self.link.clone())
    }

    /// Leaves the key directory: the queue pair executes no operation of the peer any more. The
    /// block is returned, to be dropped behind the queue pair. Acquires the directory's lock.
    pub(super) fn leave(self) -> Arc<ConnectionBlock> {
        self.block.leave();
        // behind `leave`: the directory does not use the notifier any more
        drop((self.notifier, self.link, self.rings));
        self.block
    }
}
