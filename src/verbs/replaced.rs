//! The embedded device with other verbs, for tests.

#![allow(unsafe_code, reason = "functions in place of verbs")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdma_core_sys::{self as sys, Backend};

unsafe extern "C" fn no_resize(_: *mut sys::ibv_cq, _: c_int) -> c_int {
    libc::EOPNOTSUPP
}

/// Makes queues of at most 8,192 entries.
unsafe extern "C" fn small_queue(
    context: *mut sys::ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut sys::ibv_comp_channel,
    vector: c_int,
) -> *mut sys::ibv_cq {
    let create = softverbs::backend().verbs.ibv_create_cq;
    // SAFETY: the arguments are those of the caller, which keeps the contract of this verb.
    unsafe { create(context, cqe.min(8192), cq_context, channel, vector) }
}

/// A device that cannot resize completion queues. `small`: it makes them with at most 8,192
/// entries.
pub(crate) fn without_resize(small: bool) -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "fixed queues";
    backend.verbs.ibv_resize_cq = no_resize;
    if small {
        backend.name = "small queues";
        backend.verbs.ibv_create_cq = small_queue;
    }
    Box::leak(Box::new(backend))
}

thread_local! {
    /// Whether deregistrations of this thread fail, because a peer uses the region.
    pub(crate) static BUSY: Cell<bool> = const { Cell::new(false) };
    /// How many of them would have waited for the peer.
    pub(crate) static WAITS: Cell<u32> = const { Cell::new(0) };
    /// How many registrations of this thread can reserve their keys before a peer uses the next
    /// one.
    pub(crate) static RESERVES: Cell<u32> = const { Cell::new(u32::MAX) };
    /// Which of this thread's next calls that bind or start a listener fails, counted from 1; 0:
    /// none.
    pub(crate) static LISTENER_FAILS: Cell<u32> = const { Cell::new(0) };
    /// Which of this thread's next calls that bind an address fails, counted from 1; 0: none.
    pub(crate) static BIND_FAILS: Cell<u32> = const { Cell::new(0) };
    /// The verb that fails in this thread, and its errno.
    pub(crate) static SHORT: Cell<Option<(&'static str, c_int)>> = const { Cell::new(None) };
}

unsafe extern "C" fn busy_region(mr: *mut sys::ibv_mr) -> c_int {
    if BUSY.get() {
        WAITS.set(WAITS.get() + 1);
        return libc::EBUSY;
    }
    // SAFETY: the arguments are those of the caller, which keeps the contract of this verb.
    unsafe { (softverbs::backend().verbs.ibv_dereg_mr)(mr) }
}

unsafe extern "C" fn busy_region_now(mr: *mut sys::ibv_mr) -> c_int {
    match softverbs::backend().verbs.softdv_dereg_mr_now {
        // SAFETY: as in `busy_region`.
        Some(deregister) if !BUSY.get() => unsafe { deregister(mr) },
        _ => libc::EBUSY,
    }
}

unsafe extern "C" fn busy_rereg(
    mr: *mut sys::ibv_mr,
    flags: c_int,
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let left = RESERVES.get();
    RESERVES.set(left.saturating_sub(1));
    match softverbs::backend().verbs.ibv_rereg_mr {
        // SAFETY: as in `busy_region`.
        Some(rereg) if left != 0 => unsafe { rereg(mr, flags, pd, addr, length, access) },
        _ => {
            set_errno(libc::EBUSY);
            -1
        }
    }
}

/// A device whose regions can be made busy by [`BUSY`] and [`RESERVES`].
pub(crate) fn with_busy_regions() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "busy regions";
    backend.verbs.ibv_dereg_mr = busy_region;
    backend.verbs.ibv_rereg_mr = Some(busy_rereg);
    backend.verbs.softdv_dereg_mr_now = Some(busy_region_now);
    Box::leak(Box::new(backend))
}

thread_local! {
    /// How many registrations of this thread were on demand.
    pub(crate) static PAGED: Cell<u32> = const { Cell::new(0) };
}

/// Registers other memory instead, if the registration is on demand.
unsafe extern "C" fn paged_elsewhere(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut sys::ibv_mr {
    let verbs = &softverbs::backend().verbs;
    let rights = access.cast_unsigned();
    if rights & sys::IBV_ACCESS_ON_DEMAND == 0 {
        // SAFETY: as in `busy_region`.
        return unsafe { (verbs.ibv_reg_mr)(pd, addr, length, access) };
    }
    PAGED.set(PAGED.get() + 1);
    if length == usize::MAX {
        set_errno(libc::EINVAL);
        return std::ptr::null_mut();
    }
    let other = Box::leak(vec![0_u8; length].into_boxed_slice());
    let (other, pinned) = (
        other.as_mut_ptr().cast(),
        rights & !sys::IBV_ACCESS_ON_DEMAND,
    );
    // SAFETY: the caller's protection domain, and memory that is never freed.
    unsafe { sys::ibv_reg_mr_iova(verbs, pd, other, length, addr as u64, pinned) }
}

/// A device that accepts on-demand registrations, and accesses other memory through them. They are
/// counted in [`PAGED`].
pub(crate) fn with_broken_paging() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "broken paging";
    backend.verbs.ibv_reg_mr = paged_elsewhere;
    Box::leak(Box::new(backend))
}

thread_local! {
    /// How many registrations of this thread were moved.
    pub(crate) static MOVES: Cell<u32> = const { Cell::new(0) };
}

/// Moves a registration as the device does, by another one: the old key is free then.
unsafe extern "C" fn moves_to_another_key(
    mr: *mut sys::ibv_mr,
    flags: c_int,
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    MOVES.set(MOVES.get() + 1);
    let Some(rereg) = softverbs::backend().verbs.ibv_rereg_mr else {
        return libc::EOPNOTSUPP;
    };
    // SAFETY: as in `busy_region`. Only the caller reads the key.
    unsafe {
        let ret = rereg(mr, flags, pd, addr, length, access);
        (*mr).rkey ^= 1 << 31;
        ret
    }
}

/// A device that gives a registration another key when it moves it.
pub(crate) fn with_changing_keys() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "changing keys";
    backend.verbs.ibv_rereg_mr = Some(moves_to_another_key);
    Box::leak(Box::new(backend))
}

/// Whether this call is the one that fails; sets errno then.
fn listener_fails() -> bool {
    let left = LISTENER_FAILS.get();
    LISTENER_FAILS.set(left.saturating_sub(1));
    if left == 1 {
        set_errno(libc::ENOMEM);
    }
    left == 1
}

fn set_errno(errno: c_int) {
    // SAFETY: the number belongs to the calling thread.
    unsafe { *libc::__errno_location() = errno };
}

unsafe extern "C" fn listen(id: *mut sys::rdma_cm_id, backlog: c_int) -> c_int {
    if listener_fails() {
        return -1;
    }
    // SAFETY: as in `busy_region`.
    unsafe { (softverbs::backend().cm.rdma_listen)(id, backlog) }
}

unsafe extern "C" fn migrate(id: *mut sys::rdma_cm_id, to: *mut sys::rdma_event_channel) -> c_int {
    if listener_fails() {
        return -1;
    }
    // SAFETY: as in `busy_region`.
    unsafe { (softverbs::backend().cm.rdma_migrate_id)(id, to) }
}

/// A device on which binding or starting a listener fails by [`LISTENER_FAILS`].
pub(crate) fn with_failing_listeners() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "failing listeners";
    backend.cm.rdma_listen = listen;
    backend.cm.rdma_migrate_id = migrate;
    Box::leak(Box::new(backend))
}

unsafe extern "C" fn bind_addr(id: *mut sys::rdma_cm_id, addr: *mut libc::sockaddr) -> c_int {
    let left = BIND_FAILS.get();
    BIND_FAILS.set(left.saturating_sub(1));
    if left == 1 {
        set_errno(libc::EADDRNOTAVAIL);
        return -1;
    }
    // SAFETY: as in `busy_region`.
    unsafe { (softverbs::backend().cm.rdma_bind_addr)(id, addr) }
}

/// A device on which binding an address fails by [`BIND_FAILS`], as on the kernel's connection
/// manager if another identifier has the port at the wildcard address.
pub(crate) fn with_taken_ports() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "taken ports";
    backend.cm.rdma_bind_addr = bind_addr;
    Box::leak(Box::new(backend))
}

/// The queue pair whose last receive [`with_late_last_receives`] reports next, and since when it
/// could be reported.
static LAST_RECEIVE: Mutex<Option<(usize, Instant)>> = Mutex::new(None);
/// How many were reported.
pub(crate) static LAST_RECEIVES: AtomicU32 = AtomicU32::new(0);
/// How much later they are reported.
const LATE: Duration = Duration::from_millis(50);

unsafe extern "C" fn late_event(
    context: *mut sys::ibv_context,
    event: *mut sys::ibv_async_event,
) -> c_int {
    let mut held = LAST_RECEIVE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((qp, since)) = *held
        && since.elapsed() >= LATE
    {
        *held = None;
        // SAFETY: the caller passes a writable event.
        unsafe {
            (*event).event_type = sys::IBV_EVENT_QP_LAST_WQE_REACHED;
            (*event).element.qp = std::ptr::with_exposed_provenance_mut(qp);
        }
        LAST_RECEIVES.fetch_add(1, Ordering::Relaxed);
        return 0;
    }
    let verbs = &softverbs::backend().verbs;
    // SAFETY: as in `busy_region`.
    let ret = unsafe { (verbs.ibv_get_async_event)(context, event) };
    // SAFETY: the call above has written the event.
    if ret != 0 || unsafe { (*event).event_type } != sys::IBV_EVENT_QP_LAST_WQE_REACHED {
        return ret;
    }
    // SAFETY: the element of this type of event.
    let qp = unsafe { (*event).element.qp };
    *held = Some((qp.expose_provenance(), Instant::now()));
    // SAFETY: as in `busy_region`; the caller does not get this event.
    unsafe { (verbs.ibv_ack_async_event)(event) };
    set_errno(libc::EAGAIN);
    -1
}

unsafe extern "C" fn ack_late_event(event: *mut sys::ibv_async_event) {
    // SAFETY: the caller passes an event.
    if unsafe { (*event).event_type } != sys::IBV_EVENT_QP_LAST_WQE_REACHED {
        // SAFETY: as in `busy_region`.
        unsafe { (softverbs::backend().verbs.ibv_ack_async_event)(event) };
    }
}

/// A device that reports last receives late, of one queue pair at a time, and counts them in
/// [`LAST_RECEIVES`].
pub(crate) fn with_late_last_receives() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "late last receives";
    backend.verbs.ibv_get_async_event = late_event;
    backend.verbs.ibv_ack_async_event = ack_late_event;
    Box::leak(Box::new(backend))
}

/// The events of [`with_failing_events`].
pub(crate) struct Events {
    /// Whether taking an event fails.
    pub(crate) fail: AtomicBool,
    /// Calls that have failed by `fail`.
    pub(crate) calls: AtomicU32,
    /// Events that were taken.
    pub(crate) taken: AtomicU32,
    /// One test at a time.
    used: Mutex<()>,
}

static EVENTS: Events = Events {
    fail: AtomicBool::new(false),
    calls: AtomicU32::new(0),
    taken: AtomicU32::new(0),
    used: Mutex::new(()),
};

/// [`Events`] of the test that holds it.
pub(crate) struct OneTest {
    _used: MutexGuard<'static, ()>,
}

impl std::ops::Deref for OneTest {
    type Target = Events;

    fn deref(&self) -> &Events {
        &EVENTS
    }
}

unsafe extern "C" fn next_event(
    channel: *mut sys::rdma_event_channel,
    event: *mut *mut sys::rdma_cm_event,
) -> c_int {
    if EVENTS.fail.load(Ordering::Relaxed) {
        EVENTS.calls.fetch_add(1, Ordering::Relaxed);
        set_errno(libc::EMFILE);
        return -1;
    }
    // SAFETY: as in `busy_region`.
    let result = unsafe { (softverbs::backend().cm.rdma_get_cm_event)(channel, event) };
    EVENTS
        .taken
        .fetch_add(u32::from(result == 0), Ordering::Relaxed);
    result
}

/// A device whose connection manager has no descriptor left for its next event: taking it fails,
/// and the channel stays readable.
pub(crate) fn with_failing_events() -> (&'static Backend, OneTest) {
    let one = OneTest {
        _used: EVENTS.used.lock().unwrap_or_else(PoisonError::into_inner),
    };
    one.fail.store(true, Ordering::Relaxed);
    one.calls.store(0, Ordering::Relaxed);
    one.taken.store(0, Ordering::Relaxed);
    let mut backend = *softverbs::backend();
    backend.name = "failing events";
    backend.cm.rdma_get_cm_event = next_event;
    (Box::leak(Box::new(backend)), one)
}

/// Whether this verb is the one that fails by [`SHORT`]; sets errno then.
fn is_short(verb: &str) -> bool {
    match SHORT.get() {
        Some((short, errno)) if short == verb => {
            set_errno(errno);
            true
        }
        _ => false,
    }
}

unsafe extern "C" fn short_channel() -> *mut sys::rdma_event_channel {
    if is_short("rdma_create_event_channel") {
        return std::ptr::null_mut();
    }
    // SAFETY: as in `busy_region`.
    unsafe { (softverbs::backend().cm.rdma_create_event_channel)() }
}

unsafe extern "C" fn short_id(
    channel: *mut sys::rdma_event_channel,
    id: *mut *mut sys::rdma_cm_id,
    context: *mut c_void,
    space: sys::rdma_port_space,
) -> c_int {
    if is_short("rdma_create_id") {
        return -1;
    }
    // SAFETY: as in `busy_region`.
    unsafe { (softverbs::backend().cm.rdma_create_id)(channel, id, context, space) }
}

unsafe extern "C" fn short_bind(id: *mut sys::rdma_cm_id, addr: *mut libc::sockaddr) -> c_int {
    if is_short("rdma_bind_addr") {
        return -1;
    }
    // SAFETY: as in `busy_region`.
    unsafe { (softverbs::backend().cm.rdma_bind_addr)(id, addr) }
}

unsafe extern "C" fn short_cq(
    context: *mut sys::ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut sys::ibv_comp_channel,
    vector: c_int,
) -> *mut sys::ibv_cq {
    if is_short("ibv_create_cq") {
        return std::ptr::null_mut();
    }
    let create = softverbs::backend().verbs.ibv_create_cq;
    // SAFETY: as in `busy_region`.
    unsafe { create(context, cqe, cq_context, channel, vector) }
}

unsafe extern "C" fn short_qp(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    if is_short("ibv_create_qp") {
        return std::ptr::null_mut();
    }
    // SAFETY: as in `busy_region`.
    unsafe { (softverbs::backend().verbs.ibv_create_qp)(pd, attr) }
}

/// A device on which a verb fails by [`SHORT`].
pub(crate) fn with_shortage() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "shortage";
    backend.cm.rdma_create_event_channel = short_channel;
    backend.cm.rdma_create_id = short_id;
    backend.cm.rdma_bind_addr = short_bind;
    backend.verbs.ibv_create_cq = short_cq;
    backend.verbs.ibv_create_qp = short_qp;
    Box::leak(Box::new(backend))
}

/// Whether the confirmations of answers are lost. The sender's identifier ends at once.
pub(crate) static CONFIRMATIONS_LOST: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn establish(id: *mut sys::rdma_cm_id) -> c_int {
    let cm = &softverbs::backend().cm;
    match cm.rdma_establish {
        // SAFETY: as in `busy_region`.
        Some(establish) if !CONFIRMATIONS_LOST.load(Ordering::Acquire) => unsafe { establish(id) },
        // SAFETY: as in `busy_region`.
        _ => unsafe { (cm.rdma_disconnect)(id) },
    }
}

/// A device whose confirmations are lost by [`CONFIRMATIONS_LOST`].
pub(crate) fn with_lost_confirmations() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "lost confirmations";
    backend.cm.rdma_establish = Some(establish);
    Box::leak(Box::new(backend))
}

/// Whether targets fail when they are connected, as if the process of the initiator had ended.
pub(crate) static TARGETS_FAIL: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn modify_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let modify = softverbs::backend().verbs.ibv_modify_qp;
    // SAFETY: as in `busy_region`.
    let ret = unsafe { modify(qp, attr, mask) };
    // SAFETY: the caller's queue pair and attributes are live.
    let (kind, state) = unsafe { ((*qp).qp_type, (*attr).qp_state) };
    let connected = kind == sys::IBV_QPT_XRC_RECV && state == sys::IBV_QPS_RTS;
    if ret != 0 || !connected || !TARGETS_FAIL.load(Ordering::Acquire) {
        return ret;
    }
    let mut failed = sys::ibv_qp_attr {
        qp_state: sys::IBV_QPS_ERR,
        ..Default::default()
    };
    // SAFETY: as in `busy_region`.
    unsafe { modify(qp, &raw mut failed, sys::IBV_QP_STATE as c_int) }
}

/// A device whose targets fail by [`TARGETS_FAIL`].
pub(crate) fn with_failing_targets() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "failing targets";
    backend.verbs.ibv_modify_qp = modify_qp;
    Box::leak(Box::new(backend))
}
