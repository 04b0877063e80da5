//! The embedded device with other verbs, for tests.

#![allow(unsafe_code, reason = "functions in place of verbs")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};

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
    /// Which of this thread's next calls that bind or start a listener fails, counted from 1; 0:
    /// none.
    pub(crate) static LISTENER_FAILS: Cell<u32> = const { Cell::new(0) };
}

unsafe extern "C" fn busy_region(mr: *mut sys::ibv_mr) -> c_int {
    if BUSY.get() {
        return libc::EBUSY;
    }
    // SAFETY: the arguments are those of the caller, which keeps the contract of this verb.
    unsafe { (softverbs::backend().verbs.ibv_dereg_mr)(mr) }
}

/// A device whose regions can be made busy by [`BUSY`].
pub(crate) fn with_busy_regions() -> &'static Backend {
    let mut backend = *softverbs::backend();
    backend.name = "busy regions";
    backend.verbs.ibv_dereg_mr = busy_region;
    Box::leak(Box::new(backend))
}

/// Whether this call is the one that fails; sets errno then.
fn listener_fails() -> bool {
    let left = LISTENER_FAILS.get();
    LISTENER_FAILS.set(left.saturating_sub(1));
    if left == 1 {
        // SAFETY: the number belongs to the calling thread.
        unsafe { *libc::__errno_location() = libc::ENOMEM };
    }
    left == 1
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
