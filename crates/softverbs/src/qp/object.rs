//! Creating and destroying queue pairs.

use std::cell::UnsafeCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use rdma_core_sys::{
    IBV_QPS_RESET, IBV_QPT_DRIVER, IBV_QPT_RAW_PACKET, IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD,
    IBV_QPT_XRC_SEND, ibv_context, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_ex, ibv_qp_init_attr,
    ibv_sge,
};

use super::copies::Copies;
use super::counts::Counts;
use super::drain::Drain;
use super::pending::PendingSends;
use super::xrc_send::Route;
use super::{
    Attributes, DESTROYED, Flow, Posted, Qp, RecvQueue, SendQueue, TARGET, extended, state,
};
use crate::cq::Cq;
use crate::hazard::RIGHTS;
use crate::limits::{MAX_INLINE, MAX_SGE, MAX_WR};
use crate::object::{Context, Pd};
use crate::process::Process;
use crate::region::LastRegion;
use crate::segment::layout::{Credit, StateWord, desc, qp as layout};
use crate::srq::Srq;
use crate::sync::Lock;
use crate::sys::{Errno, Res, random, try_box, zeroed};

/// Minimum inline data that each queue pair can send, in bytes.
const MIN_INLINE: u32 = 64;

/// Attributes of a new queue pair.
pub(crate) struct QpInit {
    pub(crate) pd: *mut ibv_pd,
    pub(crate) attr: ibv_qp_init_attr,
    /// Operations that the `ibv_wr_*` calls will use, or `None` if those calls will not be used.
    pub(crate) operations: Option<u64>,
}

impl SendQueue {
    /// The queue of an object that is not in use.
    fn unused() -> Self {
        Self {
            max_wr: 0,
            max_sge: 0,
            max_inline: 0,
            signal_all: false,
            kind: IBV_QPT_RC,
            pd: 0,
            cq: std::ptr::null(),
            head: 0,
            executed: 0,
            signaled: 0,
            stored: Box::new([]),
            sges: Box::new([]),
            inline: Box::new([]),
            copies: Copies::default(),
            peer: None,
            route: None,
            conn: None,
            dest: 0,
            dest_node: None,
            qkey: 0,
            lossy: false,
            claimed: 0,
            credit: Credit {
                posted: 0,
                least: 0,
            },
            claim: None,
            pushed: false,
            begun: false,
            may_have_changed: false,
            agent_request: None,
            queued_at: None,
            lacks_line: false,
            sent: 0,
            wait: None,
            drain: Drain::default(),
            pending: PendingSends::new(),
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            last_region: LastRegion::default(),
            counts: Counts::default(),
        }
    }

    fn new(init: &ibv_qp_init_attr, pd: u32) -> Res<Self> {
        let cap = &init.cap;
        let route = if init.qp_type == IBV_QPT_XRC_SEND {
            Some(try_box(Route::new()?)?)
        } else {
            None
        };
        Ok(Self {
            max_wr: cap.max_send_wr,
            max_sge: cap.max_send_sge.max(1),
            max_inline: cap.max_inline_data,
            signal_all: init.sq_sig_all != 0,
            kind: init.qp_type,
            pd,
            cq: init.send_cq.cast::<Cq>(),
            route,
            ..Self::unused()
        })
    }

    /// Allocates the memory of waiting requests, if this is the first one.
    ///
    /// # Errors
    /// `ENOMEM`; nothing changes.
    #[inline]
    pub(super) fn make_room(&mut self, inline: bool) -> Res<()> {
        if self.stored.is_empty() || inline && self.inline.is_empty() {
            return self.allocate(inline);
        }
        Ok(())
    }

    #[cold]
    fn allocate(&mut self, inline: bool) -> Res<()> {
        let count = self.max_wr.max(1).next_power_of_two() as usize;
        if inline && self.inline.is_empty() {
            self.inline = zeroed(count * self.max_inline as usize)?;
        }
        if self.stored.is_empty() {
            let sges = zeroed(count * self.max_sge as usize)?;
            (self.stored, self.sges) = (zeroed(count)?, sges);
        }
        Ok(())
    }

    /// Continues the generation of the pending messages of `old`, so that a late receiver does not
    /// mistake a message of this queue for one of `old`.
    fn after(mut self, old: &Self) -> Self {
        self.pending.continue_after(&old.pending);
        self
    }
}

impl RecvQueue {
    /// The queue of an object that is not in use.
    fn unused() -> Self {
        Self {
            max_wr: 0,
            max_sge: 0,
            kind: IBV_QPT_RC,
            qkey: 0,
            pd: 0,
            cq: std::ptr::null(),
            head: 0,
            next: 0,
            posted: Box::new([]),
            sges: Box::new([]),
            srq: std::ptr::null(),
            desc_at: 0,
            desc_len: 0,
            desc_stride: 0,
            least: u32::MAX,
            peer: None,
            dest: 0,
            incarnation: 0,
            flow: Flow::Open,
            flush_round: 0,
            flush_deadline: 0,
            received: 0,
            pulls: false,
            last_region: LastRegion::default(),
        }
    }

    /// Takes room for the descriptors from the segment, which the caller gives back.
    fn new(process: &Process, init: &ibv_qp_init_attr, pd: u32) -> Res<Self> {
        let (max_wr, max_sge) = if init.srq.is_null() {
            (init.cap.max_recv_wr, init.cap.max_recv_sge.max(1))
        } else {
            (0, 1)
        };
        let count = max_wr.max(1).next_power_of_two() as usize;
        let posted = zeroed::<Posted>(count)?;
        let sges = zeroed::<ibv_sge>(count * max_sge as usize)?;
        let desc_stride = desc::stride(max_sge as usize);
        let desc_len = count * desc_stride;
        Ok(Self {
            max_wr,
            max_sge,
            kind: init.qp_type,
            pd,
            cq: init.recv_cq.cast::<Cq>(),
            posted,
            sges,
            srq: init.srq.cast::<Srq>(),
            desc_at: process.segment.take(desc_len)?,
            desc_len,
            desc_stride,
            ..Self::unused()
        })
    }
}

/// An object that is not in use yet.
pub(super) fn blank(index: u32) -> Qp {
    // SAFETY: all zeros is a value of each of the C structures.
    let (object, attr, init) = unsafe {
        (
            std::mem::zeroed(),
            std::mem::zeroed::<ibv_qp_attr>(),
            std::mem::zeroed::<ibv_qp_init_attr>(),
        )
    };
    Qp {
        object: UnsafeCell::new(object),
        index,
        process: AtomicPtr::new(std::ptr::null_mut()),
        state: AtomicU32::new(DESTROYED),
        word: AtomicU64::new(StateWord::new(0, 0, 0, random() as u32).0),
        send_done: AtomicU32::new(0),
        recv_done: AtomicU32::new(0),
        events: AtomicU32::new(0),
        raises_events: AtomicBool::new(true),
        awaits_accesses: AtomicBool::new(true),
        lacks_holder: AtomicBool::new(false),
        sq: Lock::new(SendQueue::unused()),
        rq: Lock::new(RecvQueue::unused()),
        attr: Mutex::new(Attributes { attr, init }),
        target: Mutex::new(None),
        batch: extended::Batch::default(),
        receive_ring: AtomicPtr::new(std::ptr::null_mut()),
        receive_ring_cookie: AtomicU64::new(0),
        receive_ring_cq: AtomicPtr::new(std::ptr::null_mut()),
    }
}

/// # Safety
/// The shared receive queue must be live.
unsafe fn check(init: &ibv_qp_init_attr) -> Res<()> {
    if !state::is_supported_type(init.qp_type) {
        // Types that other devices have are valid, but not supported here.
        let elsewhere = matches!(init.qp_type, IBV_QPT_RAW_PACKET | IBV_QPT_DRIVER);
        return Err(Errno(if elsewhere {
            libc::EOPNOTSUPP
        } else {
            libc::EINVAL
        }));
    }
    let cap = &init.cap;
    let receives = init.qp_type != IBV_QPT_XRC_SEND;
    let good = !init.send_cq.is_null()
        && (!init.recv_cq.is_null() || !receives)
        // `ibv_create_qp(3)`: "other than IBV_QPT_RC or IBV_QPT_UD associated with an SRQ"
        && (init.srq.is_null() || receives && init.qp_type != IBV_QPT_UC)
        && cap.max_send_wr <= MAX_WR
        && cap.max_recv_wr <= MAX_WR
        && cap.max_send_sge <= MAX_SGE
        && cap.max_recv_sge <= MAX_SGE
        && cap.max_inline_data <= MAX_INLINE;
    // SAFETY: NULL, or a live queue, as the caller promises.
    let srq = unsafe { init.srq.cast::<Srq>().as_ref() };
    // As in the kernel (`create_qp` of `drivers/infiniband/core/uverbs_cmd.c`).
    if good && !srq.is_some_and(Srq::is_xrc) {
        Ok(())
    } else {
        Err(Errno(libc::EINVAL))
    }
}

/// `ibv_create_qp`.
///
/// # Errors
/// `EINVAL`: a capability exceeds the limits, the shared receive queue is one of XRC, or the type
/// has none.
/// `EOPNOTSUPP`: the type or an operation is not supported. `ENOMEM`: no memory.
///
/// # Safety
/// The domain and queues must be live.
pub(crate) unsafe fn create(mut init: QpInit) -> Res<&'static Qp> {
    // SAFETY: the caller promises live queues.
    unsafe { check(&init.attr)? };
    let offered = extended::operations(init.attr.qp_type);
    if init.operations.is_some_and(|asked| asked & !offered != 0) {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    init.settle_capabilities();
    // SAFETY: the caller promises a live domain.
    let pd = unsafe { Pd::from_ptr(init.pd) };
    // SAFETY: a domain's context is live.
    let context = unsafe { Context::from_ptr((*init.pd).context) };
    let (qp, sq, rq) = reserve(context.process, &init.attr, pd.number)?;
    // SAFETY: the queue pair is not handed out yet; the caller promises live objects.
    unsafe {
        qp.fill_object(&init);
        count_users(&init.attr);
    }
    pd.children.fetch_add(1, Ordering::Relaxed);
    context.children.fetch_add(1, Ordering::Relaxed);
    qp.begin_events();
    qp.set_access_wait(true);
    qp.remember_init(&init.attr);
    qp.publish_queues(&sq, &rq);
    {
        let mut old = qp.sq.lock();
        let sq = sq.after(&old);
        *old = sq;
    }
    *qp.rq.lock() = rq;
    qp.reset();
    Ok(qp)
}

impl QpInit {
    /// Clears the attributes of a receive queue that the queue pair does not have, and raises the
    /// inline length to the minimum of the device.
    fn settle_capabilities(&mut self) {
        let init = &mut self.attr;
        if init.qp_type == IBV_QPT_XRC_SEND {
            init.recv_cq = std::ptr::null_mut();
        }
        if init.qp_type == IBV_QPT_XRC_SEND || !init.srq.is_null() {
            init.cap.max_recv_wr = 0;
            init.cap.max_recv_sge = 0;
        }
        init.cap.max_inline_data = init.cap.max_inline_data.max(MIN_INLINE);
    }
}

/// Reserves an object, the memory of its queues, and its room in the segment. Nothing stays
/// reserved after an error.
fn reserve(
    process: &'static Process,
    init: &ibv_qp_init_attr,
    pd: u32,
) -> Res<(&'static Qp, SendQueue, RecvQueue)> {
    let sq = SendQueue::new(init, pd)?;
    let rq = RecvQueue::new(process, init, pd)?;
    let reserved = process.qps.take(blank).and_then(|qp| {
        process
            .segment
            .back_halves(qp.at(), layout::STRIDE)
            .inspect_err(|_| process.qps.give(qp.index))
            .map(|()| qp)
    });
    let qp = reserved.inspect_err(|_| process.segment.give(rq.desc_at, rq.desc_len))?;
    qp.process
        .store(std::ptr::from_ref(process).cast_mut(), Ordering::Relaxed);
    Ok((qp, sq, rq))
}

/// Counts a new queue pair as a user of its completion queues and its shared receive queue.
///
/// # Safety
/// Each queue must be NULL or live.
unsafe fn count_users(init: &ibv_qp_init_attr) {
    for cq in [init.send_cq, init.recv_cq] {
        // SAFETY: the caller's promise.
        if let Some(cq) = unsafe { cq.cast::<Cq>().as_ref() } {
            cq.users.fetch_add(1, Ordering::Relaxed);
        }
    }
    // SAFETY: the caller's promise.
    if let Some(srq) = unsafe { init.srq.cast::<Srq>().as_ref() } {
        srq.users.fetch_add(1, Ordering::Relaxed);
    }
}

impl Qp {
    /// Fills the C object.
    ///
    /// # Safety
    /// No other thread may have the object yet; the domain must be live.
    unsafe fn fill_object(&self, init: &QpInit) {
        let object = self.as_ptr();
        // SAFETY: the caller's promise; mutex and condition are initialised in place.
        unsafe {
            (*object).context = (*init.pd).context;
            (*object).qp_context = init.attr.qp_context;
            (*object).pd = init.pd;
            (*object).send_cq = init.attr.send_cq;
            (*object).recv_cq = init.attr.recv_cq;
            (*object).srq = init.attr.srq;
            (*object).handle = self.index;
            (*object).qp_num = self.number();
            (*object).state = IBV_QPS_RESET;
            (*object).qp_type = init.attr.qp_type;
            (*object).events_completed = 0;
            let extended = object.cast::<ibv_qp_ex>();
            extended
                .byte_add(size_of::<ibv_qp>())
                .cast::<u8>()
                .write_bytes(0, size_of::<ibv_qp_ex>() - size_of::<ibv_qp>());
            if let Some(asked) = init.operations {
                extended::fill(extended, init.attr.qp_type, asked);
            }
            libc::pthread_mutex_init(&raw mut (*object).mutex, std::ptr::null());
            libc::pthread_cond_init(&raw mut (*object).cond, std::ptr::null());
        }
    }

    /// Records the attributes of a new queue pair for `ibv_query_qp`.
    fn remember_init(&self, init: &ibv_qp_init_attr) {
        let mut attributes = self.attributes();
        // SAFETY: all zeros is a valid value of the C structure.
        attributes.attr = unsafe { std::mem::zeroed() };
        attributes.attr.cap = init.cap;
        attributes.init = *init;
    }

    /// Writes to the entry in the segment what peers need to know of the queues.
    fn publish_queues(&self, sq: &SendQueue, rq: &RecvQueue) {
        // SAFETY: NULL, or a completion queue, whose memory is never freed.
        let index_of = |cq: *const Cq| unsafe { cq.as_ref() }.map_or(0, Cq::index);
        let (map, at) = (self.map(), self.at());
        let put = |offset: usize, value: u32| map.u32(at + offset).store(value, Ordering::Relaxed);
        put(layout::RECV_CQ, index_of(rq.cq));
        put(layout::SEND_CQ, index_of(sq.cq));
        put(layout::PD, rq.pd);
        put(layout::SRQ, rq.shared().map_or(0, |srq| srq.index() + 1));
        put(layout::TYPE, rq.kind);
        map.u64(at + layout::DESC_AT)
            .store(rq.desc_at as u64, Ordering::Relaxed);
        put(layout::DESC_COUNT, (rq.desc_len / rq.desc_stride) as u32);
        put(layout::DESC_STRIDE, rq.desc_stride as u32);
    }
}

/// `ibv_destroy_qp`: waits until the application has acknowledged every asynchronous event that it
/// has read.
///
/// # Errors
/// `EBUSY`: a stopped process may still write into its receives, or access memory through it. The
/// queue pair is then in RESET, and the call can be repeated.
///
/// # Safety
/// `qp` must be live, and must not be used after success.
pub(crate) unsafe fn destroy(qp: *mut ibv_qp) -> Res<()> {
    // SAFETY: the caller promises a live queue pair.
    let this = unsafe { Qp::from_ptr(qp) };
    if this.state() == TARGET {
        return this.destroy_target();
    }
    let process = this.process();
    let context = this.context();
    // Messages that have arrived are acknowledged, as a device would have done before: an
    // application may end as soon as it has the data that it needs.
    process.progress();
    // SAFETY: the queue pair is live, and its type never changes.
    if unsafe { (*qp).qp_type } == IBV_QPT_UD {
        this.finish_datagrams();
    }
    this.reset();
    this.await_writers()?;
    this.await_accesses(RIGHTS)?;
    this.free_receive_ring();
    let counts;
    let (desc_at, desc_len, send_cq, recv_cq, srq) = {
        let mut sq = this.sq.lock();
        if let Some((at, len)) = sq.pending.take_place() {
            process.segment.give(at, len);
        }
        let mut rq = this.rq.lock();
        this.state.store(DESTROYED, Ordering::Relaxed);
        sq.stored = Box::new([]);
        sq.sges = Box::new([]);
        sq.inline = Box::new([]);
        sq.copies = Copies::default();
        // the object stays in the pool
        sq.route = None;
        rq.posted = Box::new([]);
        rq.sges = Box::new([]);
        let cqs = (sq.cq, rq.cq);
        sq.cq = std::ptr::null();
        rq.cq = std::ptr::null();
        let srq = rq.shared();
        rq.srq = std::ptr::null();
        counts = std::mem::take(&mut sq.counts);
        (rq.desc_at, rq.desc_len, cqs.0, cqs.1, srq)
    };
    counts.write();
    if let Some(srq) = srq {
        srq.users.fetch_sub(1, Ordering::Relaxed);
    }
    process.segment.give(desc_at, desc_len);
    for cq in [send_cq, recv_cq] {
        // SAFETY: NULL, or a completion queue, whose memory is never freed.
        if let Some(cq) = unsafe { cq.as_ref() } {
            cq.users.fetch_sub(1, Ordering::Relaxed);
        }
    }
    this.await_acknowledgements();
    // SAFETY: the object is live until its index is given back below.
    let pd = unsafe { Pd::from_ptr((*qp).pd) };
    pd.children.fetch_sub(1, Ordering::Relaxed);
    context.children.fetch_sub(1, Ordering::Relaxed);
    process.qps.give(this.index);
    Ok(())
}

/// As [`destroy`], for a queue pair for which that was `EBUSY`. Does not wait for the processes
/// that use it.
///
/// # Errors
/// `EBUSY`: as for [`destroy`].
///
/// # Safety
/// As for [`destroy`].
pub(crate) unsafe fn destroy_unused(qp: *mut ibv_qp) -> Res<()> {
    // SAFETY: the caller promises a live queue pair.
    if unsafe { Qp::from_ptr(qp) }.is_in_use() {
        return Err(Errno(libc::EBUSY));
    }
    // SAFETY: the caller's promise.
    unsafe { destroy(qp) }
}

/// To be called for a queue pair for which [`destroy`] was `EBUSY`, and which the application has
/// given up nevertheless. Drops its unread events, and waits until the application has acknowledged
/// those that it has read, as [`destroy`] does. No event of it is raised from then on, so that
/// [`destroy_unused`] waits for no acknowledgement.
///
/// # Safety
/// As for [`destroy`]. No other thread destroys the queue pair meanwhile.
pub(crate) unsafe fn end_events(qp: *mut ibv_qp) {
    // SAFETY: the caller promises a live queue pair.
    unsafe { Qp::from_ptr(qp) }.end_events();
}

/// Takes the remaining queue pairs of a closed context out of service, as the kernel does with the
/// objects of a closed descriptor. Their memory is not freed, as the application may still hold
/// pointers to them.
pub(crate) fn abandon(process: &Process, context: *mut ibv_context) {
    for qp in process.qps.iter() {
        // SAFETY: live or in the pool; the context is written before a queue pair is handed out.
        let theirs = unsafe { (*qp.as_ptr()).context };
        if qp.state() != DESTROYED && theirs == context {
            if qp.state() == TARGET {
                qp.abandon_target();
                qp.state.store(DESTROYED, Ordering::Relaxed);
                continue;
            }
            qp.reset();
            // Closing a context succeeds even if writers remain.
            let _ = qp.await_writers().and_then(|()| qp.await_accesses(RIGHTS));
            qp.state.store(DESTROYED, Ordering::Relaxed);
        }
    }
}
