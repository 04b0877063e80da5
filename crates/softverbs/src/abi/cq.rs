//! Completion channels and completion queues.

use std::ffi::{c_int, c_uint, c_void};

use rdma_core_sys::*;

use crate::cq::{self, Cq, CqInit};
use crate::entry::{guard, non_null, pointer, status, void};
use crate::object::Context;
use crate::sys::Errno;

pub(super) unsafe extern "C" fn create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    pointer(|| {
        // SAFETY: the caller promises a live context.
        let owner = unsafe { Context::from_ptr(context) };
        cq::create_channel(context, owner.live()?)
    })
}

pub(super) unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller promises a live channel.
    status(|| unsafe { cq::destroy_channel(channel) })
}

pub(super) unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller promises a live channel and writable outputs.
    match guard(|| unsafe { cq::get_cq_event(channel, cq, cq_context) }) {
        Ok(()) => 0,
        Err(error) => {
            error.set();
            -1
        }
    }
}

pub(super) unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: the caller promises a live queue.
    void(|| unsafe { cq::ack_cq_events(cq, count) });
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    pointer(|| {
        // SAFETY: the caller promises a live context.
        unsafe { Context::from_ptr(context) }.live()?;
        let init = CqInit {
            context,
            cqe,
            cq_context,
            channel,
            comp_vector,
            extended: None,
        };
        // SAFETY: the caller promises a live context and channel.
        unsafe { cq::create(&init) }.map(Cq::as_ptr)
    })
}

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    pointer(|| {
        non_null(init)?;
        // SAFETY: the caller promises a live context and valid attributes.
        let ex = unsafe {
            Context::from_ptr(context).live()?;
            &*init
        };
        // The domain of a completion queue is only used by devices that place the queue in its
        // memory.
        let known = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
        let flags = if ex.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
            ex.flags
        } else {
            0
        };
        if ex.wc_flags & !cq::extended::OFFERED != 0
            || ex.comp_mask & !known != 0
            || flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
        {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let init = CqInit {
            context,
            cqe: c_int::try_from(ex.cqe).map_err(|_| Errno(libc::EINVAL))?,
            cq_context: ex.cq_context,
            channel: ex.channel,
            comp_vector: c_int::try_from(ex.comp_vector).map_err(|_| Errno(libc::EINVAL))?,
            extended: Some(ex.wc_flags),
        };
        // SAFETY: the caller promises a live context and channel.
        unsafe { cq::create(&init) }.map(|cq| cq.as_ptr().cast())
    })
}

pub(super) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live queue.
        let cq = unsafe { Cq::from_ptr(cq) };
        cq.process().live()?;
        cq::resize(cq, cqe)
    })
}

pub(super) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    status(|| {
        non_null(attr)?;
        // SAFETY: the caller promises a live queue and valid attributes.
        unsafe { Cq::from_ptr(cq).moderate(&*attr) }
    })
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live queue.
        unsafe {
            Cq::from_ptr(cq).process().live()?;
            cq::destroy(cq)
        }
    })
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller promises a live queue and room for as many completions.
    guard(|| Ok(unsafe { cq::poll_cq(cq, most, wc) })).unwrap_or(-1)
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller promises a live queue.
    guard(|| Ok(unsafe { cq::req_notify(cq, solicited_only) })).unwrap_or(libc::EFAULT)
}
