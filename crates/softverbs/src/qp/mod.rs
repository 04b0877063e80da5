//! Queue pairs.
//!
//! Both queues are private memory. The initiator runs a request when it is posted, or later when
//! what it waited for is there ([`send`]); messages are turned into completions by the process
//! that owns the receiving queue pair ([`recv`]). Messages that find no receive are shown to the
//! other end ([`parked`]), which takes them when it has one ([`pull`]). What peers see of a queue pair is its entry in
//! the segment: one state word, and the receives that were posted.

mod conn;
mod datagram;
mod drain;
mod errand;
mod extended;
mod fail;
mod modify;
mod object;
mod parked;
pub(crate) mod parking;
mod pull;
mod push;
mod quick;
mod recv;
mod request;
mod send;
mod state;
mod waiting;
mod window;
mod xrc_send;
mod xrc_target;

pub(crate) use conn::receives;
pub(crate) use datagram::notify as notify_datagram;
pub(crate) use modify::{address_good, modify, query};
pub(crate) use object::{QpInit, abandon, create, destroy};
#[cfg(any(test, fuzzing))]
pub(crate) use parked::Seen as ParkedSeen;
pub(crate) use quick::deliver_quickly;
pub(crate) use recv::{Inbox, Receive, deliver, post_recv};
pub(crate) use send::post_send;
pub(crate) use waiting::Went;
pub(crate) use window::bind_mw;
pub(crate) use xrc_target::{create as create_target, open as open_target};

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_core_sys::{
    IBV_QPT_RC, IBV_QPT_XRC_SEND, ibv_qp, ibv_qp_attr, ibv_qp_ex, ibv_qp_init_attr, ibv_sge,
};

use crate::cq::Cq;
use crate::object::Context;
use crate::peer::Peer;
use crate::process::Process;
use crate::region::Seen;
use crate::segment::Mapping;
use crate::segment::layout::{Credit, StateWord, qp as layout, split_qp_num};
use crate::signal;
use crate::srq::Srq;
use crate::sync::{Arc, Lock};

/// Most requests in one queue.
pub(crate) const MAX_WR: u32 = 1 << 15;
/// Most pieces of one request.
pub(crate) const MAX_SGE: u32 = 32;
/// Most inline data.
pub(crate) const MAX_INLINE: u32 = 1024;
/// Longest message.
pub(crate) const MAX_MESSAGE: u64 = 1 << 30;

/// A queue pair. The C object comes first, so a pointer to it is one to this; the memory stays
/// when the queue pair is destroyed, for the next one of its index.
#[repr(C)]
pub(crate) struct Qp {
    object: UnsafeCell<ibv_qp_ex>,
    index: u32,
    process: AtomicPtr<Process>,
    /// `ibv_qp_state`, [`TARGET`], or [`DESTROYED`]. Changed while both queues are locked.
    state: AtomicU32,
    /// What the owner last stored in the shared state word.
    word: AtomicU64,
    /// Requests and receives that were polled, wrapping.
    send_done: AtomicU32,
    recv_done: AtomicU32,
    /// Asynchronous events that were raised.
    events: AtomicU32,
    sq: Lock<SendQueue>,
    rq: Lock<RecvQueue>,
    attr: Mutex<Attributes>,
    /// What an XRC target is a handle on.
    target: Mutex<Option<xrc_target::Handle>>,
    batch: extended::Batch,
}

/// A state that no queue pair of the application is in.
const DESTROYED: u32 = 0xff;
/// That of a handle on an XRC target, whose state is in its domain.
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

/// What `ibv_query_qp` tells back.
struct Attributes {
    attr: ibv_qp_attr,
    init: ibv_qp_init_attr,
}

// SAFETY: the pointers in it are the application's own and only copied back to it.
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
    /// Requests posted and requests executed, wrapping; those in between wait, and are in
    /// `stored`.
    head: u32,
    executed: u32,
    /// Where the last request with a completion ended.
    signaled: u32,
    stored: Box<[Stored]>,
    sges: Box<[ibv_sge]>,
    inline: Box<[u8]>,
    /// The process that the other end belongs to, once it is known; of a target, one that holds it.
    peer: Option<Arc<Peer>>,
    /// Of an XRC queue pair.
    route: Option<Box<xrc_send::Route>>,
    conn: Option<conn::Connection>,
    dest: u32,
    /// Emulated node of the other end, by its address.
    dest_node: Option<u32>,
    qkey: u32,
    /// Messages of an unreliable connection were lost for want of a receive, and are until there
    /// is one.
    lossy: bool,
    /// Receives of the other end that were taken, wrapping.
    claimed: u32,
    credit: Credit,
    /// The receive that the first waiting request claimed, of a shared queue.
    claim: Option<u32>,
    /// The first waiting request's payload is in the receive already.
    pushed: bool,
    /// What the other end's agent does for the first waiting request.
    errand: Option<errand::Errand>,
    /// Messages that took a receive of a shared queue, wrapping.
    sent: u32,
    wait: Option<waiting::Wait>,
    drain: drain::Drain,
    parked: parked::Parked,
    timeout: u8,
    retry_cnt: u8,
    rnr_retry: u8,
    seen: Seen,
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
    pieces: u32,
    inline_len: u32,
}

/// What a request names at the other end.
#[derive(Clone, Copy, Default)]
struct Operands {
    remote_addr: u64,
    rkey: u32,
    /// Of atomics.
    compare_add: u64,
    swap: u64,
    /// Of datagrams; of XRC requests, the shared receive queue.
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
    /// Where receives come from instead, or NULL.
    srq: *const Srq,
    /// Descriptors for peers.
    desc_at: usize,
    desc_len: usize,
    desc_stride: usize,
    least: u32,
    peer: Option<Arc<Peer>>,
    dest: u32,
    incarnation: u32,
    /// Messages that took a receive of a shared queue, wrapping.
    received: u32,
    /// This queue is among those that will look for parked messages.
    pulls: bool,
    flow: Flow,
    /// Until when a sender is awaited that writes into a receive of the failed queue pair, in nanoseconds of
    /// the monotonic clock; 0 for none.
    patience: u64,
    seen: Seen,
}

/// What becomes of messages and receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flow {
    #[default]
    Open,
    /// The queue pair has failed. What the other end had published until then is still taken, at the next
    /// progress; its sends were successful.
    Closing,
    /// As that, but nothing more is taken: receives only wait for a sender that writes into one.
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
    pieces: u32,
}

impl RecvQueue {
    #[inline]
    fn shared(&self) -> Option<&'static Srq> {
        // SAFETY: NULL, or a shared receive queue, whose memory is never freed.
        unsafe { self.srq.as_ref() }
    }
}

impl Qp {
    /// # Safety
    /// `qp` must come from [`create`] and be live.
    #[inline]
    pub(crate) unsafe fn from_ptr<'a>(qp: *mut ibv_qp) -> &'a Self {
        // SAFETY: the C object is the first field and begins as an `ibv_qp`; the memory stays.
        unsafe { &*qp.cast::<Self>() }
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_qp {
        self.object.get().cast()
    }

    #[inline]
    pub(crate) fn process(&self) -> &'static Process {
        // SAFETY: set before the queue pair was handed out; processes are never freed.
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

    /// Whether the other end answers, so that a failed request is one of the queue pair.
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

    /// The protection domain and rights of the queue pair `from`, of the process in `slot`, if that is the connected one in
    /// this life; from private memory.
    pub(crate) fn granted_to(&self, from: u32, incarnation: u32, slot: u32) -> Option<(u32, u32)> {
        let word = StateWord(self.word.load(Ordering::Acquire));
        let connected = conn::receives(self.state())
            && word.dest() == from
            && word.incarnation() == incarnation
            && split_qp_num(from).0 == slot;
        connected.then(|| (self.rq.lock().pd, word.access()))
    }

    fn attributes(&self) -> MutexGuard<'_, Attributes> {
        self.attr.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn map(&self) -> &Mapping {
        &self.process().segment.map
    }

    /// Where its entry is in a segment.
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

    /// Makes a new state visible to peers. Where one of them moved the queue pair to ERR in the
    /// meantime, that stays.
    fn publish(&self, new: StateWord) -> bool {
        let old = StateWord(self.word.load(Ordering::Relaxed));
        let done = signal::move_state(self.map(), self.at(), old, new);
        if done {
            self.word.store(new.0, Ordering::Relaxed);
        }
        done
    }
}

/// Where the entry of the queue pair with this index is in a segment.
#[inline]
fn entry_at(index: u32) -> usize {
    layout::AT + layout::STRIDE * (index as usize % crate::segment::layout::MAX_QPS)
}

impl Process {
    /// The queue pair of this number, if it is one of this process; it may be out of use.
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
