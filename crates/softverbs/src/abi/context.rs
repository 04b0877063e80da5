//! Contexts: opening and closing the device, asynchronous events.

use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::*;

use super::{device, dm, guard, mr, mw, objects, pointer, query, status, td};
use crate::dm::Origin;
use crate::events::{AsyncQueue, Element};
use crate::process::Process;
use crate::sys::{Errno, Res, room};

/// An open device. The C context is inside the extended one, which comes first.
#[repr(C)]
pub(crate) struct Context {
    verbs: verbs_context,
    pub(crate) process: &'static Process,
    pub(crate) events: AsyncQueue,
    /// Objects that were made with it.
    pub(crate) children: AtomicU32,
    /// The context that its command descriptor stands for: this one, or that which it imports.
    pub(crate) origin: Origin,
    /// What `cmd_fd` is.
    _command: OwnedFd,
}

impl Context {
    /// # Safety
    /// `context` must come from [`open_device`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(context: *mut ibv_context) -> &'a Self {
        // SAFETY: the C context is this field of the first field; the caller promises the rest.
        unsafe {
            &*context
                .byte_sub(offset_of!(verbs_context, context))
                .cast::<Self>()
        }
    }

    /// The process, unless this is a forked child of it.
    pub(crate) fn live(&self) -> Res<&'static Process> {
        self.process.live()
    }
}

pub(super) unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(|| {
        if !device::is_device(device) {
            return Err(Errno(libc::EINVAL));
        }
        let process = Process::open()?;
        let signature = process.signature();
        let origin = Origin {
            slot: signature.slot,
            cookie: signature.cookie,
            context: process.next_context.fetch_add(1, Ordering::Relaxed),
        };
        make(device, process, origin, origin.to_file()?)
    })
}

/// A context of its own, or one that shares what `origin`'s makes. The descriptor is closed with it.
pub(super) fn make(
    device: *mut ibv_device,
    process: &'static Process,
    origin: Origin,
    command: OwnedFd,
) -> Res<*mut ibv_context> {
    {
        let room = room()?;
        let events = AsyncQueue::new(process)?;
        // SAFETY: all zeros is a value of it: no operation, no object.
        let mut verbs: verbs_context = unsafe { std::mem::zeroed() };
        verbs.sz = size_of::<verbs_context>();
        verbs.query_port = Some(query::query_port);
        verbs.query_device_ex = Some(query::query_device_ex);
        verbs.create_qp_ex = Some(objects::create_qp_ex);
        verbs.create_cq_ex = Some(objects::create_cq_ex);
        verbs.modify_cq = Some(objects::modify_cq);
        verbs.query_rt_values = Some(query::query_rt_values);
        verbs.alloc_td = Some(td::alloc_td);
        verbs.dealloc_td = Some(td::dealloc_td);
        verbs.alloc_parent_domain = Some(td::alloc_parent_domain);
        verbs.create_srq_ex = Some(objects::create_srq_ex);
        verbs.get_srq_num = Some(objects::get_srq_num);
        verbs.open_xrcd = Some(objects::open_xrcd);
        verbs.close_xrcd = Some(objects::close_xrcd);
        verbs.open_qp = Some(objects::open_qp);
        verbs.advise_mr = Some(mr::advise_mr);
        verbs.alloc_null_mr = Some(mr::alloc_null_mr);
        verbs.alloc_dm = Some(dm::alloc_dm);
        verbs.free_dm = Some(dm::free_dm);
        verbs.reg_dm_mr = Some(dm::reg_dm_mr);
        let context = &mut verbs.context;
        context.device = device;
        context.ops.poll_cq = Some(objects::poll_cq);
        context.ops.req_notify_cq = Some(objects::req_notify_cq);
        context.ops.post_send = Some(objects::post_send);
        context.ops.post_recv = Some(objects::post_recv);
        context.ops.post_srq_recv = Some(objects::post_srq_recv);
        context.ops.alloc_mw = Some(mw::alloc_mw);
        context.ops.bind_mw = Some(mw::bind_mw);
        context.ops.dealloc_mw = Some(mw::dealloc_mw);
        context.cmd_fd = command.as_raw_fd();
        context.async_fd = events.epoll.fd();
        context.num_comp_vectors = 1;
        // "Look around me": this context lies in a `verbs_context`.
        context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        let context = Context {
            verbs,
            process,
            events,
            children: AtomicU32::new(0),
            origin,
            _command: command,
        };
        let context = Box::into_raw(Box::write(room, context));
        // SAFETY: just made; the mutex is initialised in place.
        unsafe {
            let context = &raw mut (*context).verbs.context;
            libc::pthread_mutex_init(&raw mut (*context).mutex, std::ptr::null());
            Ok(context)
        }
    }
}

pub(super) unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live context.
        let this = unsafe { Context::from_ptr(context) };
        this.live()?;
        if this.children.load(Ordering::Relaxed) > 0 {
            // A close succeeds over what is left (`ibv_open_device(3)`; perftest does so): it no
            // longer works, and its memory stays for pointers that the application still has.
            crate::qp::abandon(this.process, context);
            crate::srq::abandon(this.process, context);
            return Ok(());
        }
        // SAFETY: made by `Box::into_raw` in `open_device`, and no object refers to it.
        unsafe {
            libc::pthread_mutex_destroy(&raw mut (*context).mutex);
            drop(Box::from_raw(
                context
                    .byte_sub(offset_of!(verbs_context, context))
                    .cast::<Context>(),
            ));
        }
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

pub(super) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller promises an event of `get_async_event`, whose object is live; which
    // member of the union is meant follows from the type.
    unsafe {
        let element = &(*event).element;
        let (mutex, cond, count) = match (*event).event_type {
            IBV_EVENT_CQ_ERR => {
                let cq = element.cq;
                (
                    &raw mut (*cq).mutex,
                    &raw mut (*cq).cond,
                    &raw mut (*cq).async_events_completed,
                )
            }
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                let srq = element.srq;
                (
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
                    &raw mut (*qp).mutex,
                    &raw mut (*qp).cond,
                    &raw mut (*qp).events_completed,
                )
            }
            _ => return,
        };
        libc::pthread_mutex_lock(mutex);
        *count = (*count).wrapping_add(1);
        libc::pthread_cond_signal(cond);
        libc::pthread_mutex_unlock(mutex);
    }
}
