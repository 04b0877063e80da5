//! Contexts: closing the device, asynchronous events.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::entry::{guard, status};
use crate::events::Element;
use crate::object::Context;

pub(super) unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live context.
        let this = unsafe { Context::from_ptr(context) };
        this.live()?;
        if this.children.load(Ordering::Relaxed) > 0 {
            // A close succeeds although objects remain (`ibv_open_device(3)`; perftest depends on
            // it). They no longer work. The memory of the context is kept for pointers that the
            // application still has.
            crate::qp::abandon(this.process, context);
            crate::srq::abandon(this.process, context);
            return Ok(());
        }
        // SAFETY: no object refers to it, and the caller no longer uses it.
        unsafe { Context::end(context) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    let result = guard(|| {
        // SAFETY: the caller promises a live context.
        let this = unsafe { Context::from_ptr(context) };
        this.live()?;
        this.events.next()
    });
    let (kind, element) = match result {
        Ok(event) => event,
        Err(error) => {
            error.set();
            return -1;
        }
    };
    let element = match element {
        Element::Qp(qp) => ibv_async_event__bindgen_ty_1 { qp },
        Element::Cq(cq) => ibv_async_event__bindgen_ty_1 { cq },
        Element::Srq(srq) => ibv_async_event__bindgen_ty_1 { srq },
    };
    // SAFETY: the caller promises a writable event.
    unsafe {
        event.write(ibv_async_event {
            element,
            event_type: kind,
        });
    }
    0
}

/// In a forked child it does nothing: another thread of the parent may have had the mutex at the
/// fork.
pub(super) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller promises an event of `get_async_event`, whose object is live; the type
    // determines the member of the union.
    unsafe {
        let element = &(*event).element;
        let (context, mutex, cond, count) = match (*event).event_type {
            IBV_EVENT_CQ_ERR => {
                let cq = element.cq;
                (
                    (*cq).context,
                    &raw mut (*cq).mutex,
                    &raw mut (*cq).cond,
                    &raw mut (*cq).async_events_completed,
                )
            }
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                let srq = element.srq;
                (
                    (*srq).context,
                    &raw mut (*srq).mutex,
                    &raw mut (*srq).cond,
                    &raw mut (*srq).events_completed,
                )
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                let qp = element.qp;
                (
                    (*qp).context,
                    &raw mut (*qp).mutex,
                    &raw mut (*qp).cond,
                    &raw mut (*qp).events_completed,
                )
            }
            _ => return,
        };
        if Context::from_ptr(context).process.forked() {
            return;
        }
        libc::pthread_mutex_lock(mutex);
        *count = (*count).wrapping_add(1);
        libc::pthread_cond_signal(cond);
        libc::pthread_mutex_unlock(mutex);
    }
}
