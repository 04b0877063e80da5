//! The embedded device with other verbs, for tests.

#![allow(unsafe_code, reason = "functions in place of verbs")]

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
