//! Queue pairs.
//!
//! Both queues are private memory. The initiator executes a request when it is posted ([`post`],
//! [`send`]), or later when the resource that the request waits for is available ([`waiting`]). The
//! process that owns the receiving queue pair turns messages into completions ([`recv`]). Messages
//! that find no receive become pending: the sender shows them to the other end ([`pending`]), which
//! takes them when a receive is posted ([`pull`]). Peers see only the queue pair's entry in the
//! segment: one state word, and the posted receives.

mod access;
mod agent_request;
mod atomic;
mod copies;
mod copy_list;
mod counts;
mod datagram;
mod drain;
mod elements;
mod execute;
mod extended;
mod fail;
mod fast_path;
mod modify;
mod object;
mod own_ring;
mod pending;
pub(crate) mod pending_word;
mod post;
mod pull;
mod push;
mod recv;
mod remote_qp;
mod request;
mod ring_sends;
mod send;
mod state;
mod waiting;
mod window;
mod xrc_send;
mod xrc_target;

pub(crate) use datagram::notify as notify_datagram;
#[cfg(test)]
pub(crate) use fail::meanwhile;
pub(crate) use fail::return_header;
pub(crate) use fast_path::deliver_fast;
pub(crate) use modify::{address_good, modify, modify_now, query};
pub(crate) use object::{QpInit, abandon, create, destroy, destroy_unused, end_events};
pub(crate) use own_ring::OwnRing;
#[cfg(any(test, fuzzing))]
pub(crate) use pending::PendingView;
pub(crate) use post::post_send;
pub(crate) use recv::{deliver, post_recv};
pub(crate) use ring_sends::OutgoingMessage;
pub(crate) use waiting::Went;
pub(crate) use window::bind_mw;
#[cfg(test)]
pub(crate) use xrc_target::behind_child;
pub(crate) use xrc_target::{create as create_target, open as open_target};

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_core_sys::{
    IBV_QPT_RC, IBV_QPT_XRC_SEND, ibv_qp, ibv_qp_attr, ibv_qp_ex, ibv_qp_init_attr, ibv_sge,
};

use crate::agent::{Link, Requester};
use crate::cq::Cq;
use crate::delivery::receives;
use crate::object::Context;
use crate::peer::Peer;
use crate::process::Process;
use crate::region::LastRegion;
use crate::segment::Mapping;
use crate::segment::layout::{Credit, StateWord, qp as layout, split_qp_num};
use crate::signal;
use crate::srq::Srq;
use crate::sync::{Arc, Holder, Lock, Mark};
use crate::sys::Zero;

/// A queue pair. The C object is the first field, so a pointer to the C object is also a pointer to
/// the `Qp`. Destroying the queue pair does not free the memory: the next queue pair with the same
/// index reuses it.
#[repr(C)]
pub(crate) struct Qp {
    object: UnsafeCell<ibv_qp_ex>,
    index: u32,
    process: AtomicPtr<Process>,
    /// `ibv_qp_state`, [`TARGET`], or [`DESTROYED`]. Changed while both queues are locked.
    state: AtomicU32,
    /// The value that the owner last stored in the shared state word.
    word: AtomicU64,
    /// Requests and receives whose completions were polled, wrapping.
    send_done: AtomicU32,
    recv_done: AtomicU32,
    /// Asynchronous events that were raised, and not dropped unread.
    events: AtomicU32,
    /// The application has not given the queue pair up.
    raises_events: AtomicBool,
    /// The calls that end rights of the other end wait for its accesses.
    awaits_accesses: AtomicBool,
    /// XRC initiator: a process holds the target, and none that does could be opened; or the
    /// target's domain has members, and none of them could be opened.
    lacks_holder: AtomicBool,
    sq: Lock<SendQueue>,
    rq: Lock<RecvQueue>,
    attr: Mutex<Attributes>,
    /// The XRC target that this object is a handle on, if it is one.
    target: Mutex<Option<xrc_target::Handle>>,
    batch: extended::Batch,
    /// The receive ring, or NULL, and the value by which its user identifies it.
    receive_ring: AtomicPtr<own_ring::OwnRing>,
    receive_ring_cookie: AtomicU64,
    /// The completion queue at which its messages are noted; NULL without a receive ring.
    receive_ring_cq: AtomicPtr<Cq>,
}

/// A state that no queue pair of the application is in.
const DESTROYED: u32 = 0xff;
/// State of a handle on an XRC target. The target's own state is in its domain.
const TARGET: u32 = 0xfe;

// SAFETY: the C object is written by this crate only at creation and under its own mutex; the
// application may not post or modify after destroying it (`ibv_create_qp(3)`).
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl std::fmt::Debug for Qp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Qp({})", self.index)
    }
}

/// The attributes that `ibv_query_qp` returns.
struct Attributes {
    attr: ibv_qp_attr,
    init: ibv_qp_init_attr,
}

// SAFETY: the pointers in it belong to the application; this crate only copies them back to it.
unsafe impl Send for Attributes {}

/// The send queue.
struct SendQueue {
    max_wr: u32,
    max_sge: u32,
    max_inline: u32,
    signal_all: bool,
    kind: u32,
    pd: u32,
    cq: *const Cq,
    /// Requests posted and requests executed, wrapping. The requests between the two wait, and are
    /// in `stored`.
    head: u32,
    executed: u32,
    /// Position behind the last request that has a completion.
    signaled: u32,
    /// Requests that wait, their sges and their inline data. Empty until the first request waits,
    /// and the inline data until the first request with such data does: on most queue pairs no
    /// request ever waits (see [`Self::make_room`]).
    stored: Box<[Stored]>,
    sges: Box<[ibv_sge]>,
    inline: Box<[u8]>,
    /// Payload of waiting datagrams.
    copies: copies::Copies,
    /// The process that owns the other end, once it is open; for an XRC target, one of the
    /// processes that hold it.
    peer: Option<Arc<Peer>>,
    /// Only of an XRC queue pair.
    route: Option<Box<xrc_send::Route>>,
    conn: Option<remote_qp::Connection>,
    dest: u32,
    /// Emulated node of the other end, from its address vector.
    dest_node: Option<u32>,
    qkey: u32,
    /// A message of this unreliable connection was lost because no receive was posted. Further
    /// messages are lost at once until a receive is posted.
    lossy: bool,
    /// Receives of the other end that this sender has consumed, wrapping.
    claimed: u32,
    credit: Credit,
    /// Index of the receive that the first waiting request has claimed from a shared receive queue.
    claim: Option<u32>,
    /// The first waiting request's payload has already been copied to its destination.
    pushed: bool,
    /// A part of the first request, a READ, WRITE or atomic, may have been executed.
    begun: bool,
    /// An agent may have executed the first request, an atomic. Set until the request has finished,
    /// also when its agent request has ended; cleared when the agent answers that it did nothing.
    may_have_changed: bool,
    /// The agent request that the other end's agent executes for the first waiting request.
    agent_request: Option<agent_request::AgentRequest>,
    /// The line to that agent, while the first waiting request is in the queue for a place there.
    queued_at: Option<Arc<Link>>,
    /// There was no descriptor or memory for the line to that agent, when it was needed last.
    lacks_line: bool,
    /// Messages that consumed a receive of a shared receive queue, wrapping.
    sent: u32,
    wait: Option<waiting::Wait>,
    drain: drain::Drain,
    pending: pending::PendingSends,
    timeout: u8,
    retry_cnt: u8,
    rnr_retry: u8,
    last_region: LastRegion,
    counts: counts::Counts,
}

// SAFETY: the completion queue's memory is never freed.
unsafe impl Send for SendQueue {}

/// A request that waits.
#[derive(Clone, Copy, Default)]
struct Stored {
    wr_id: u64,
    opcode: u32,
    flags: u32,
    imm: u32,
    operands: Operands,
    num_sge: u32,
    inline_len: u32,
}

// SAFETY: integers.
unsafe impl Zero for Stored {}

/// The operands of a request at the other end.
#[derive(Clone, Copy, Default)]
struct Operands {
    remote_addr: u64,
    rkey: u32,
    /// Only of atomics.
    compare_add: u64,
    swap: u64,
    /// Of datagrams. In XRC requests `qpn` is the number of the shared receive queue.
    node: u32,
    flow: u32,
    qpn: u32,
    qkey: u32,
}

/// The receive queue.
struct RecvQueue {
    max_wr: u32,
    max_sge: u32,
    kind: u32,
    qkey: u32,
    pd: u32,
    cq: *const Cq,
    /// Receives posted and receives completed, wrapping.
    head: u32,
    next: u32,
    posted: Box<[Posted]>,
    sges: Box<[ibv_sge]>,
    /// The shared receive queue that is used instead, or NULL.
    srq: *const Srq,
    /// The receive descriptors that peers read, in the segment.
    desc_at: usize,
    desc_len: usize,
    desc_stride: usize,
    least: u32,
    peer: Option<Arc<Peer>>,
    dest: u32,
    incarnation: u32,
    /// Messages that consumed a receive of a shared receive queue, wrapping.
    received: u32,
    /// This queue is in the list of queues that will pull pending messages.
    pulls: bool,
    flow: Flow,
    /// The round of flushes in which the last messages of the failed queue pair are taken; 0 if it
    /// is in none.
    flush_round: u64,
    /// Deadline for a sender that still writes into a receive of the failed queue pair, in
    /// nanoseconds of the monotonic clock; 0 if there is none.
    flush_deadline: u64,
    last_region: LastRegion,
}

/// How arriving messages and posted receives are treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flow {
    #[default]
    Open,
    /// The queue pair has failed. Messages that the other end had published before are still
    /// delivered at the next progress, because its sends were successful.
    Closing,
    /// As `Closing`, but no more messages are delivered. The receives only wait for a sender that
    /// still writes into one.
    Refusing,
    /// Receives are flushed.
    Closed,
}

// SAFETY: the queues' memory is never freed.
unsafe impl Send for RecvQueue {}

/// A posted receive.
#[derive(Clone, Copy, Default)]
struct Posted {
    wr_id: u64,
    total: u32,
    num_sge: u32,
}

// SAFETY: integers.
unsafe impl Zero for Posted {}

impl RecvQueue {
    #[inline]
    fn shared(&self) -> Option<&'static Srq> {
        // SAFETY: NULL, or a shared receive queue, whose memory is never freed.
        unsafe { self.srq.as_ref() }
    }
}

impl Qp {
    /// Marks the threads that may copy from or to local memory for this queue pair.
    pub(crate) fn mark_holders(&self, mark: Mark) -> impl Iterator<Item = Holder<'_>> {
        let holders = [self.sq.mark_holder(mark), self.rq.mark_holder(mark)];
        holders.into_iter().flatten()
    }

    /// Calls `then` as a thread that copies, from local memory if `sends`. Its arguments return
    /// whether another thread waits for this one, and let that thread pass.
    #[cfg(test)]
    pub(crate) fn while_copying<T>(
        &self,
        sends: bool,
        then: impl FnOnce(&dyn Fn() -> bool, &dyn Fn()) -> T,
    ) -> T {
        if sends {
            let _held = self.sq.lock();
            then(&|| self.sq.is_awaited(), &|| self.sq.let_pass())
        } else {
            let _held = self.rq.lock();
            then(&|| self.rq.is_awaited(), &|| self.rq.let_pass())
        }
    }

    /// # Safety
    /// `qp` must come from [`create`] and be live.
    #[inline]
    pub(crate) unsafe fn from_ptr<'a>(qp: *mut ibv_qp) -> &'a Self {
        // SAFETY: the C object is the first field and begins as an `ibv_qp`; the memory is never
        // freed.
        unsafe { &*qp.cast::<Self>() }
    }

    /// Whether a request without an answer waits for the next connection; `may_have_changed`: it is
    /// an atomic that an agent may have executed.
    #[cfg(test)]
    pub(crate) fn waits_unanswered(&self, may_have_changed: bool) -> bool {
        let mut sq = self.sq.lock();
        let before = std::mem::replace(&mut sq.may_have_changed, may_have_changed);
        let waits = send::unanswered(&sq, rdma_core_sys::IBV_WC_RETRY_EXC_ERR);
        sq.may_have_changed = before;
        waits
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_qp {
        self.object.get().cast()
    }

    #[inline]
    pub(crate) fn process(&self) -> &'static Process {
        // SAFETY: set before the application got the queue pair; processes are never freed.
        unsafe { &*self.process.load(Ordering::Relaxed) }
    }

    fn context(&self) -> &Context {
        // SAFETY: the context can't be closed before its queue pairs are destroyed.
        unsafe { Context::from_ptr((*self.as_ptr()).context) }
    }

    #[inline]
    fn number(&self) -> u32 {
        crate::segment::layout::qp_num(self.process().slot, self.index)
    }

    /// Whether the transport is reliable: the other end answers, so a failed request fails the
    /// queue pair.
    #[inline]
    fn is_reliable(kind: u32) -> bool {
        matches!(kind, IBV_QPT_RC | IBV_QPT_XRC_SEND)
    }

    #[inline]
    fn state(&self) -> u32 {
        self.state.load(Ordering::Relaxed)
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// The present incarnation. It changes while both queues are locked.
    pub(crate) fn incarnation(&self) -> u32 {
        StateWord(self.word.load(Ordering::Relaxed)).incarnation()
    }

    /// As if the process of the other end could not have been opened when the queue pair was
    /// connected.
    #[cfg(test)]
    pub(crate) fn forget_sender(&self) {
        self.rq.lock().peer = None;
    }

    /// Whether the receives of the failed queue pair are still to be flushed.
    #[cfg(test)]
    pub(crate) fn awaits_flush(&self) -> bool {
        self.rq.lock().flow == Flow::Closing
    }

    /// The protection domain and the access rights that this queue pair grants to the queue pair
    /// `from` of the requester, if `from` is connected to this incarnation and the requester is the
    /// process to which this queue pair is connected. Read from private memory only.
    pub(crate) fn granted_to(
        &self,
        from: u32,
        incarnation: u32,
        requester: Requester,
    ) -> Option<(u32, u32)> {
        let word = StateWord(self.word.load(Ordering::Acquire));
        let connected = receives(self.state())
            && word.dest() == from
            && word.incarnation() == incarnation
            && split_qp_num(from).0 == requester.slot;
        if !connected {
            return None;
        }
        let rq = self.rq.lock();
        let (pd, peer) = (rq.pd, rq.peer.clone());
        drop(rq);
        // Without a peer, the process could not be opened when this queue pair was connected.
        let admitted = self.process().admits(requester, peer);
        admitted.then_some((pd, word.access()))
    }

    fn attributes(&self) -> MutexGuard<'_, Attributes> {
        self.attr.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn map(&self) -> &Mapping {
        &self.process().segment.map
    }

    /// Offset of its entry in a segment.
    #[inline]
    fn at(&self) -> usize {
        entry_at(self.index)
    }

    /// A completion of the send queue was polled.
    #[inline]
    pub(crate) fn send_polled(&self, done: u32) {
        self.send_done.store(done, Ordering::Release);
    }

    /// A completion of the receive queue was polled.
    #[inline]
    pub(crate) fn recv_polled(&self, done: u32) {
        self.recv_done.store(done, Ordering::Release);
    }

    /// Publishes a new state to peers. Returns false, with the state unchanged, if a peer has moved
    /// the queue pair to ERR in the meantime.
    fn publish(&self, new: StateWord) -> bool {
        let old = StateWord(self.word.load(Ordering::Relaxed));
        let done = signal::move_state(self.map(), self.at(), old, new);
        if done {
            self.word.store(new.0, Ordering::Relaxed);
        }
        done
    }
}

/// Offset in a segment of the entry of the queue pair with this index.
#[inline]
fn entry_at(index: u32) -> usize {
    layout::AT + layout::STRIDE * (index as usize % crate::segment::layout::MAX_QPS)
}

impl Process {
    /// The queue pair with this number, if it belongs to this process. It may be destroyed.
    #[inline]
    pub(crate) fn qp_by_num(&self, num: u32) -> Option<&Qp> {
        let (slot, index) = split_qp_num(num);
        if slot == self.slot {
            self.qps.get(index)
        } else {
            None
        }
    }
}
