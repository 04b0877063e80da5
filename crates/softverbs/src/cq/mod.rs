//! Completion queues: private memory that only this process fills.

mod arrivals;
mod channel;
pub(crate) mod extended;
mod moderation;
mod poll;
mod yielding;

pub use channel::answer_every_wake;
pub(crate) use channel::{
    Channel, ack_cq_events, answers_every_wake, create_channel, destroy_channel, get_cq_event,
};
pub(crate) use moderation::{
    MAX_COUNT as MAX_MODERATION_COUNT, MAX_PERIOD as MAX_MODERATION_PERIOD,
};
pub(crate) use poll::{Poll, poll_cq, req_notify};

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use rdma_core_sys::{
    IBV_EVENT_CQ_ERR, IBV_WC_RECV, IBV_WC_SUCCESS, IBV_WC_WITH_IMM, ibv_comp_channel, ibv_context,
    ibv_cq, ibv_cq_ex,
};

use self::yielding::YieldPolicy;
use crate::events::Element;
use crate::object::Context;
use crate::process::Process;
use crate::ring::{Header, op};
use crate::segment::layout::{ARMED_ANY, ARMED_NOT, ARMED_SOLICITED, cq as layout};
use crate::signal;
use crate::sync::{Guard, Lock, light_fence};
use crate::sys::{self, Errno, Res};

/// Maximum number of entries of a queue.
pub(crate) const MAX_CQE: i32 = 1 << 22;

/// A completion, as it waits to be polled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cqe {
    pub(crate) wr_id: u64,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) byte_len: u32,
    /// In network byte order.
    pub(crate) imm: u32,
    pub(crate) wc_flags: u32,
    pub(crate) opcode: u32,
    pub(crate) status: u32,
    pub(crate) vendor_err: u32,
    /// Number of requests of that queue that are done when this completion is polled, wrapping.
    pub(crate) done: u32,
    /// Time of creation in nanoseconds of the monotonic clock, if the queue was created with
    /// timestamps.
    pub(crate) time: u64,
    pub(crate) retires: Retires,
}

impl Cqe {
    /// The completion of a receive that a SEND, with or without an immediate, has filled. It
    /// retires no receive.
    #[inline(always)]
    pub(crate) fn of_receive(wr_id: u64, qp_num: u32, header: &Header) -> Self {
        Self {
            wr_id,
            qp_num,
            src_qp: header.src_qpn,
            byte_len: header.len,
            imm: header.imm,
            wc_flags: if header.op == op::SEND_IMM {
                IBV_WC_WITH_IMM
            } else {
                0
            },
            opcode: IBV_WC_RECV,
            status: IBV_WC_SUCCESS,
            ..Self::default()
        }
    }
}

/// The queue in which a slot becomes free when a completion is polled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Retires {
    #[default]
    Nothing = 0,
    Send,
    Recv,
}

// SAFETY: integers, and an enumeration with a value 0.
unsafe impl sys::Zero for Cqe {}

/// A completion queue. The C object is the first field, so a pointer to the C object is also a
/// pointer to the `Cq`. Destroying the queue does not free the memory: the next queue with the same
/// index reuses it.
#[repr(C)]
pub(crate) struct Cq {
    object: UnsafeCell<ibv_cq_ex>,
    index: u32,
    /// The process in whose pool the object is.
    process: &'static Process,
    channel: AtomicPtr<Channel>,
    /// The event that the application waits for, `ARMED_*`; the shared word is a copy for peers.
    armed: AtomicU32,
    /// Events that `ibv_get_cq_event` has returned.
    events: AtomicU32,
    asynchronous: AtomicU32,
    /// Queue pairs and shared receive queues that complete here.
    pub(crate) users: AtomicU32,
    ring: Lock<Ring>,
    /// Whether there are completions or an overrun to report, for a check without the lock.
    filled: AtomicBool,
    yielding: YieldPolicy,
    /// Polls since the last check of the clock; also approximate.
    polls: AtomicU32,
    stamps: AtomicBool,
    moderation: Lock<moderation::Moderation>,
    /// Set between `ibv_start_poll` and `ibv_end_poll`; `current` is the completion that is read
    /// then.
    polled: AtomicBool,
    current: UnsafeCell<Cqe>,
    /// Offset in the segment of the arrivals of receive rings, 0 if there are none.
    arrivals: AtomicUsize,
    /// Index of the queue pair with which the next search for arrivals begins.
    first_arrival: AtomicU32,
}

// SAFETY: the C object is written by this crate only at creation, under its own mutex, or by the
// thread that polls (`ibv_start_poll`), as verbs.h specifies.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl std::fmt::Debug for Cq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cq({})", self.index)
    }
}

#[derive(Debug)]
struct Ring {
    entries: Box<[Cqe]>,
    capacity: u32,
    /// Wrapping counts. They restart at 0 when a poll empties the ring, so that a long ring uses
    /// only the memory of as many entries as were ever in it.
    head: u32,
    tail: u32,
    /// `head` when the last event was raised.
    announced: u32,
    /// The application has read an event, and not polled all completions since.
    is_event_read: bool,
    overrun: bool,
}

impl Ring {
    fn new(capacity: u32) -> Res<Self> {
        let size = capacity.next_power_of_two() as usize;
        Ok(Self {
            entries: sys::zeroed(size)?,
            capacity,
            head: 0,
            tail: 0,
            announced: 0,
            is_event_read: false,
            overrun: false,
        })
    }

    /// The ring of a queue that is not in use.
    fn none() -> Self {
        Self {
            entries: Box::default(),
            capacity: 0,
            head: 0,
            tail: 0,
            announced: 0,
            is_event_read: false,
            overrun: false,
        }
    }

    #[inline]
    fn len(&self) -> u32 {
        self.head.wrapping_sub(self.tail)
    }

    #[inline]
    fn slot(&self, position: u32) -> usize {
        position as usize & (self.entries.len() - 1)
    }
}

impl Cq {
    /// # Safety
    /// `cq` must come from [`create`] and be live.
    #[inline]
    pub(crate) unsafe fn from_ptr<'a>(cq: *mut ibv_cq) -> &'a Self {
        // SAFETY: the C object is the first field and begins as an `ibv_cq`; the memory is never
        // freed.
        unsafe { &*cq.cast::<Self>() }
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_cq {
        self.object.get().cast()
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    #[inline]
    pub(crate) fn process(&self) -> &'static Process {
        self.process
    }

    fn channel(&self) -> Option<&Channel> {
        // SAFETY: NULL, or a channel that can't be destroyed while this queue uses it.
        unsafe { self.channel.load(Ordering::Relaxed).as_ref() }
    }

    fn context(&self) -> &Context {
        // SAFETY: the context can't be closed before its queues are destroyed.
        unsafe { Context::from_ptr((*self.as_ptr()).context) }
    }

    /// Publishes to peers the event that the application waits for, or a stronger one that is
    /// published already.
    fn publish_armed(&self, armed: u32) {
        signal::arm(&self.process().segment.map, self.at(), armed);
    }

    /// Whether no event is published: a peer has withdrawn it, whose message it was, or a thread is
    /// about to publish it.
    fn is_withdrawn(&self) -> bool {
        signal::is_disarmed(&self.process().segment.map, self.at())
    }

    /// Publishes to peers that the application waits for no event.
    fn publish_disarmed(&self) {
        signal::disarm(&self.process().segment.map, self.at());
    }

    /// Offset of its entry in a segment.
    fn at(&self) -> usize {
        layout::AT + layout::STRIDE * self.index as usize
    }

    /// Adds a completion. `solicited` is the flag of the message; errors always count as solicited.
    pub(crate) fn push(&self, cqe: Cqe, solicited: bool) {
        self.push_in_place(cqe, solicited);
    }

    /// As [`Self::push`], inlined for the few hot callers, to save a call and a copy of the
    /// completion.
    #[inline(always)]
    pub(crate) fn push_in_place(&self, cqe: Cqe, solicited: bool) {
        let mut ring = self.ring.lock();
        if ring.len() >= ring.capacity {
            self.overrun(ring);
            return;
        }
        let slot = ring.slot(ring.head);
        ring.entries[slot] = cqe;
        if self.stamps.load(Ordering::Relaxed) {
            ring.entries[slot].time = sys::now_ns();
        }
        ring.head = ring.head.wrapping_add(1);
        self.filled.store(true, Ordering::Relaxed);
        // Pairs with the heavy fence of arming: if a thread armed the queue and then polled
        // nothing, this load sees the armed state; a thread that arms later polls this entry.
        light_fence(true);
        let armed = self.armed.load(Ordering::Relaxed);
        drop(ring);
        if armed != ARMED_NOT {
            self.notify(solicited || cqe.status != IBV_WC_SUCCESS);
        }
    }

    #[cold]
    fn overrun(&self, mut ring: Guard<'_, Ring>) {
        let first = !std::mem::replace(&mut ring.overrun, true);
        self.filled.store(true, Ordering::Relaxed);
        drop(ring);
        if first {
            self.asynchronous.fetch_add(1, Ordering::Relaxed);
            let events = &self.context().events;
            if !events.push(IBV_EVENT_CQ_ERR, Element::Cq(self.as_ptr())) {
                self.asynchronous.fetch_sub(1, Ordering::Relaxed);
            }
            // The caller holds the lock of a queue of one of the queue pairs, so the next progress
            // fails them.
            self.process().request_failure();
        }
    }

    #[cold]
    fn notify(&self, solicited: bool) {
        let armed = self.armed.load(Ordering::Relaxed);
        if armed == ARMED_SOLICITED && !solicited {
            return;
        }
        if self.hold_back() {
            return;
        }
        self.raise();
    }

    /// Raises the requested event, unless another thread has raised it.
    fn raise(&self) {
        match self.channel() {
            Some(channel) => channel.raise(self),
            None => {
                self.withdraw();
            }
        }
    }

    /// Withdraws the requested event. Returns false if none is requested.
    fn withdraw(&self) -> bool {
        let armed = self.armed.swap(ARMED_NOT, Ordering::AcqRel) != ARMED_NOT;
        if armed {
            let mut ring = self.ring.lock();
            ring.announced = ring.head;
            drop(ring);
            #[cfg(all(test, not(loom)))]
            channel::before_disarm::run();
            self.publish_disarmed();
        }
        armed
    }

    /// Whether completions were lost, so that the queue and the queue pairs that complete here are
    /// unusable.
    pub(crate) fn is_overrun(&self) -> bool {
        self.ring.lock().overrun
    }

    /// Whether there may be completions or an overrun to report. A completion that another thread
    /// adds meanwhile is found by the next poll, or raises an event (see [`Self::push`]).
    #[inline]
    fn may_have_some(&self) -> bool {
        self.filled.load(Ordering::Relaxed)
    }

    /// Whether a completion that was not polled is younger than the last event, and the application
    /// does not poll because of an event that it has read.
    fn has_unannounced(&self) -> bool {
        let ring = self.ring.lock();
        ring.len() != 0 && ring.announced != ring.head && !ring.is_event_read
    }

    /// Whether the application waits for an event.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed) != ARMED_NOT
    }

    /// Publishes again to peers the event that the application waits for. A queue of receive rings
    /// raises the event instead, if a peer has withdrawn it: a message in a ring has no completion
    /// that would raise it. To publish again would erase a withdrawal that comes meanwhile.
    pub(crate) fn rearm(&self) {
        let armed = self.armed.load(Ordering::Relaxed);
        if armed == ARMED_NOT {
            return;
        }
        if !self.has_arrivals() {
            self.publish_armed(armed);
        } else if self.is_withdrawn() {
            self.raise();
        }
    }

    /// Counts an event that `ibv_get_cq_event` returned.
    pub(crate) fn event_taken(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
        let mut ring = self.ring.lock();
        ring.is_event_read = ring.len() != 0;
    }

    /// Removes the completions of a queue pair that is destroyed or reset.
    pub(crate) fn purge(&self, qp_num: u32) {
        let mut ring = self.ring.lock();
        let mut to = ring.tail;
        let mut from = ring.tail;
        while from != ring.head {
            let entry = ring.entries[ring.slot(from)];
            if entry.qp_num != qp_num {
                let slot = ring.slot(to);
                ring.entries[slot] = entry;
                to = to.wrapping_add(1);
            }
            from = from.wrapping_add(1);
        }
        if ring.announced == ring.head {
            ring.announced = to;
        }
        ring.head = to;
    }

    fn arm(&self, solicited_only: bool) {
        let wanted = if solicited_only {
            ARMED_SOLICITED
        } else {
            ARMED_ANY
        };
        // A weaker request does not cancel an earlier stronger one.
        let armed = self.armed.fetch_max(wanted, Ordering::AcqRel).max(wanted);
        self.publish_armed(armed);
        let process = self.process();
        if self.channel().is_some() {
            // An application may poll the channel's descriptor without calling
            // `ibv_get_cq_event` first. Messages that arrived before complete now and raise the
            // event. Earlier rings of the doorbell must not make the channel readable: UCX aborts
            // if a channel without events is readable while UCX opens its interface.
            process.prepare_sleep();
            // Some programs sleep without a poll behind this call (UCX). Those that arm between an
            // event and the poll of its completion do not expect another event (perftest).
            if answers_every_wake() && armed == ARMED_ANY && self.has_unannounced() {
                self.raise();
            }
        } else {
            process.will_sleep();
        }
    }
}

/// Attributes of a new queue.
pub(crate) struct CqInit {
    pub(crate) context: *mut ibv_context,
    pub(crate) cqe: i32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: i32,
    /// Flags of the fields that are read after `ibv_start_poll`, or `None` if that call will not be
    /// used.
    pub(crate) extended: Option<u64>,
}

/// `ibv_create_cq`.
///
/// # Errors
/// `EINVAL`: the size or the completion vector is out of range. `ENOMEM`: no memory.
///
/// # Safety
/// Context and channel must be live.
pub(crate) unsafe fn create(init: &CqInit) -> Res<&'static Cq> {
    if init.cqe < 1 || init.cqe > MAX_CQE || init.comp_vector < 0 || init.comp_vector >= 1 {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: the caller promises a live context.
    let context = unsafe { Context::from_ptr(init.context) };
    let process = context.process;
    let ring = Ring::new(init.cqe.cast_unsigned())?;
    let cq = process.cqs.take(|index| Cq {
        // SAFETY: all zeros is a valid value of the C structure.
        object: UnsafeCell::new(unsafe { std::mem::zeroed() }),
        index,
        process,
        channel: AtomicPtr::new(std::ptr::null_mut()),
        armed: AtomicU32::new(ARMED_NOT),
        events: AtomicU32::new(0),
        asynchronous: AtomicU32::new(0),
        users: AtomicU32::new(0),
        ring: Lock::new(Ring::none()),
        filled: AtomicBool::new(false),
        yielding: YieldPolicy::default(),
        polls: AtomicU32::new(0),
        stamps: AtomicBool::new(false),
        moderation: Lock::default(),
        polled: AtomicBool::new(false),
        current: UnsafeCell::new(Cqe::default()),
        arrivals: AtomicUsize::new(0),
        first_arrival: AtomicU32::new(0),
    })?;
    let at = layout::AT + layout::STRIDE * cq.index as usize;
    // SAFETY: the caller promises NULL or a live channel.
    let channel = unsafe { init.channel.cast::<Channel>().as_ref() };
    process
        .segment
        .back_halves(at, layout::STRIDE)
        .and_then(|()| channel.map_or(Ok(()), |channel| channel.attach(cq.index)))
        .inspect_err(|_| process.cqs.give(cq.index))?;
    cq.armed.store(ARMED_NOT, Ordering::Relaxed);
    cq.events.store(0, Ordering::Relaxed);
    cq.asynchronous.store(0, Ordering::Relaxed);
    cq.users.store(0, Ordering::Relaxed);
    cq.polled.store(false, Ordering::Relaxed);
    *cq.moderation.lock() = moderation::Moderation::default();
    cq.stamps.store(
        init.extended.is_some_and(extended::stamps),
        Ordering::Relaxed,
    );
    *cq.ring.lock() = ring;
    let object = cq.as_ptr();
    // SAFETY: the object is not handed out yet; mutex and condition are initialised in place.
    unsafe {
        cq.object.get().write_bytes(0, 1);
        if let Some(asked) = init.extended {
            extended::fill(cq.object.get(), asked);
        }
        (*object).context = init.context;
        (*object).channel = init.channel;
        (*object).cq_context = init.cq_context;
        (*object).handle = cq.index;
        (*object).cqe = init.cqe;
        (*object).comp_events_completed = 0;
        (*object).async_events_completed = 0;
        libc::pthread_mutex_init(&raw mut (*object).mutex, std::ptr::null());
        libc::pthread_cond_init(&raw mut (*object).cond, std::ptr::null());
    }
    let map = &process.segment.map;
    map.u32(at + layout::ARMED)
        .store(ARMED_NOT, Ordering::Relaxed);
    cq.channel.store(init.channel.cast(), Ordering::Relaxed);
    if let Some(channel) = cq.channel() {
        map.u32(at + layout::DOORBELL)
            .store(channel.pipe.read_fd().cast_unsigned(), Ordering::Relaxed);
        map.u64(at + layout::DOORBELL_INODE)
            .store(channel.pipe.inode(), Ordering::Relaxed);
    }
    context.children.fetch_add(1, Ordering::Relaxed);
    Ok(cq)
}

/// Drops the asynchronous events that were not read, and waits until the application has
/// acknowledged all events that it has read. Without further completions, [`destroy`] waits for no
/// acknowledgement then.
///
/// # Safety
/// `cq` must be live, and no other thread destroys it meanwhile.
pub(crate) unsafe fn end_events(cq: *mut ibv_cq) {
    // SAFETY: the caller promises a live queue.
    let this = unsafe { Cq::from_ptr(cq) };
    let unread = this.context().events.forget(Element::Cq(cq));
    this.asynchronous.fetch_sub(unread, Ordering::Relaxed);
    let events = this.events.load(Ordering::Relaxed);
    let raised = this.asynchronous.load(Ordering::Relaxed);
    // SAFETY: the caller promises a live object.
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*cq).mutex);
        // Later events of a queue that is not destroyed now can be acknowledged together with
        // these.
        let lacks = |completed: u32, taken: u32| completed.wrapping_sub(taken).cast_signed() < 0;
        while lacks((*cq).comp_events_completed, events)
            || lacks((*cq).async_events_completed, raised)
        {
            libc::pthread_cond_wait(&raw mut (*cq).cond, &raw mut (*cq).mutex);
        }
        libc::pthread_mutex_unlock(&raw mut (*cq).mutex);
    }
}

/// `ibv_destroy_cq`: waits until the application has acknowledged every event that it has read.
///
/// # Errors
/// `EBUSY`: a queue pair or shared receive queue still completes here.
///
/// # Safety
/// `cq` must be live, and must not be used after success.
pub(crate) unsafe fn destroy(cq: *mut ibv_cq) -> Res<()> {
    // SAFETY: the caller promises a live queue.
    let this = unsafe { Cq::from_ptr(cq) };
    if this.users.load(Ordering::Relaxed) > 0 {
        return Err(Errno(libc::EBUSY));
    }
    this.forget_held();
    let context = this.context();
    if let Some(channel) = this.channel() {
        channel.detach(this.index);
    }
    // SAFETY: the object is live until its index is given back below.
    unsafe {
        end_events(cq);
        libc::pthread_mutex_destroy(&raw mut (*cq).mutex);
        libc::pthread_cond_destroy(&raw mut (*cq).cond);
    }
    *this.ring.lock() = Ring::none();
    this.free_arrivals();
    this.armed.store(ARMED_NOT, Ordering::Relaxed);
    // From here on no peer rings this queue: its descriptor may later be another pipe.
    this.publish_disarmed();
    let map = &this.process().segment.map;
    let at = layout::AT + layout::STRIDE * this.index as usize;
    map.u32(at + layout::DOORBELL)
        .store(u32::MAX, Ordering::Relaxed);
    map.u64(at + layout::DOORBELL_INODE)
        .store(0, Ordering::Relaxed);
    this.channel.store(std::ptr::null_mut(), Ordering::Relaxed);
    context.children.fetch_sub(1, Ordering::Relaxed);
    this.process().cqs.give(this.index);
    Ok(())
}

/// `ibv_resize_cq`.
///
/// # Errors
/// `EINVAL`: the size is out of range or smaller than the number of queued completions. `ENOMEM`:
/// no memory.
pub(crate) fn resize(cq: &Cq, cqe: i32) -> Res<()> {
    if !(1..=MAX_CQE).contains(&cqe) {
        return Err(Errno(libc::EINVAL));
    }
    let mut new = Ring::new(cqe.cast_unsigned())?;
    // Completions that a poll would find now count as well.
    cq.process().progress();
    let mut ring = cq.ring.lock();
    if ring.len() > cqe.cast_unsigned() {
        return Err(Errno(libc::EINVAL));
    }
    while ring.tail != ring.head {
        let slot = new.slot(new.head);
        new.entries[slot] = ring.entries[ring.slot(ring.tail)];
        new.head += 1;
        ring.tail = ring.tail.wrapping_add(1);
    }
    if ring.announced == ring.head {
        new.announced = new.head;
    }
    new.overrun = ring.overrun;
    *ring = new;
    // SAFETY: the object is live; readers of `cqe` race with a resize in C as well.
    unsafe { (*cq.as_ptr()).cqe = cqe };
    Ok(())
}

/// A context of a test, which is never closed.
#[cfg(all(test, not(loom)))]
fn test_context() -> *mut ibv_context {
    let verbs = &crate::backend().verbs;
    // SAFETY: the list is freed after its only use.
    unsafe {
        let list = (verbs.ibv_get_device_list)(std::ptr::null_mut());
        let context = (verbs.ibv_open_device)(*list);
        (verbs.ibv_free_device_list)(list);
        context
    }
}
