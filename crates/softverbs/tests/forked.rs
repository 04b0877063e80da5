//! Calls of a forked child on its parent's objects fail with `EIO` and never crash.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::ptr::null_mut;

use common::*;
use rdma_core_sys::*;

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("every_call_of_the_table", |link| link.expect("done"), every),
        ("every_inline_call", |link| link.expect("done"), inline),
        ("calls_in_progress", |link| link.expect("done"), in_progress),
    ];
    run(cases);
}

/// One object of each kind.
struct Objects {
    end: End,
    srq: *mut ibv_srq,
    mr: *mut ibv_mr,
    td: *mut ibv_td,
    ah: *mut ibv_ah,
    cq_ex: *mut ibv_cq_ex,
    mw: *mut ibv_mw,
    dm: *mut ibv_dm,
}

impl Objects {
    fn new() -> Self {
        let end = End::with(16, 16, 1);
        let srq = end.create_srq(4);
        let ah = address_handle(&end, end.address());
        let page = Box::leak(Box::new([0u8; 4096])).as_mut_ptr().cast();
        // SAFETY: live objects, valid attributes.
        unsafe {
            let mr = (verbs().ibv_reg_mr)(end.pd, page, 4096, 1);
            let mut attr: ibv_td_init_attr = std::mem::zeroed();
            let x = verbs_get_ctx(end.context).unwrap();
            let td = (*x).alloc_td.unwrap()(end.context, &raw mut attr);
            let mut attr: ibv_cq_init_attr_ex = std::mem::zeroed();
            attr.cqe = 4;
            let cq_ex = (*x).create_cq_ex.unwrap()(end.context, &raw mut attr);
            let mw = (*end.context).ops.alloc_mw.unwrap()(end.pd, IBV_MW_TYPE_1);
            let mut attr: ibv_alloc_dm_attr = std::mem::zeroed();
            attr.length = 4096;
            let dm = (*x).alloc_dm.unwrap()(end.context, &raw mut attr);
            assert!(!mr.is_null() && !td.is_null() && !cq_ex.is_null());
            assert!(!mw.is_null() && !dm.is_null());
            Self {
                end,
                srq,
                mr,
                td,
                ah,
                cq_ex,
                mw,
                dm,
            }
        }
    }
}

/// Runs a call in a new child process.
fn in_child(name: &str, call: impl FnOnce() -> bool) {
    // SAFETY: the child only calls verbs and `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: has no memory; the child has no other alarm.
        unsafe { libc::alarm(20) };
        let good = call();
        // SAFETY: ends this process without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(
        !libc::WIFSIGNALED(status),
        "{name}: signal {}",
        libc::WTERMSIG(status)
    );
    assert_eq!(libc::WEXITSTATUS(status), 0, "{name} did not fail with EIO");
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Memory for an output, or attributes that are all zeros.
fn room<T>() -> *mut T {
    // SAFETY: used for plain C structures, of which all zeros is a value.
    Box::leak(Box::new(unsafe { std::mem::zeroed() }))
}

/// Whether the pointer is NULL because of `EIO`.
fn none<T>(pointer: *mut T) -> bool {
    pointer.is_null() && errno() == libc::EIO
}

/// Whether the call that returned an errno, or -1 with one, failed with `EIO`.
fn eio(ret: i32) -> bool {
    ret == libc::EIO || ret == -1 && errno() == libc::EIO
}

/// The calls of libibverbs that use or make an object. Calls that need none (lists, names, strings)
/// are not here.
fn every(link: &mut Link) {
    let o = Objects::new();
    let v = verbs();
    let (context, pd, cq, qp) = (o.end.context, o.end.pd, o.end.cq, o.end.qp);
    let channel = o.end.channel;
    let page = Box::leak(Box::new([0u8; 4096])).as_mut_ptr();
    macro_rules! calls {
        ($kind:ident; $($call:ident($($arg:expr),*);)*) => {$(
            in_child(stringify!($call), || {
                // SAFETY: objects that were live in the parent, and room for the results; all zeros
                // is a value of each structure.
                $kind(unsafe { (v.$call)($($arg),*) })
            });
        )*};
        (optional $kind:ident; $($call:ident($($arg:expr),*);)*) => {$(
            if let Some(call) = v.$call {
                in_child(stringify!($call), || {
                    // SAFETY: as above.
                    $kind(unsafe { call($($arg),*) })
                });
            }
        )*};
    }
    calls! { eio;
        ibv_close_device(context);
        ibv_get_async_event(context, room());
        ibv_query_device(context, room());
        ibv_query_port(context, 1, room());
        ibv_query_gid(context, 1, 0, room());
        ibv_query_pkey(context, 1, 0, room());
        ibv_dealloc_pd(pd);
        ibv_dereg_mr(o.mr);
        ibv_destroy_comp_channel(channel);
        ibv_resize_cq(cq, 64);
        ibv_destroy_cq(cq);
        ibv_get_cq_event(channel, room(), room());
        ibv_modify_srq(o.srq, room(), IBV_SRQ_LIMIT.cast_signed());
        ibv_query_srq(o.srq, room());
        ibv_destroy_srq(o.srq);
        ibv_query_qp(qp, room(), 0, room());
        ibv_modify_qp(qp, room(), IBV_QP_STATE.cast_signed());
        ibv_destroy_qp(qp);
        ibv_destroy_ah(o.ah);
    }
    calls! { none;
        ibv_alloc_pd(context);
        ibv_reg_mr(pd, page.cast(), 4096, 1);
        ibv_create_comp_channel(context);
        ibv_create_cq(context, 4, null_mut(), channel, 0);
        ibv_create_srq(pd, room());
        ibv_create_qp(pd, room());
        ibv_create_ah(pd, room());
    }
    calls! { optional eio;
        ibv_init_ah_from_wc(context, 1, room(), room(), room());
        _ibv_query_gid_ex(context, 1, 0, room(), 0, size_of::<ibv_gid_entry>());
    }
    calls! { optional none;
        ibv_create_ah_from_wc(pd, room(), room(), 1);
        ibv_reg_mr_iova(pd, page.cast(), 4096, 0, 1);
        ibv_reg_mr_iova2(pd, page.cast(), 4096, 0, 1);
    }
    // it reports errors by other numbers
    in_child("ibv_rereg_mr", || {
        let flags = IBV_REREG_MR_CHANGE_ACCESS.cast_signed();
        // SAFETY: as above.
        let ret = unsafe { v.ibv_rereg_mr.unwrap()(o.mr, flags, null_mut(), null_mut(), 0, 1) };
        ret != 0 && errno() == libc::EIO
    });
    in_child("_ibv_query_gid_table", || {
        // SAFETY: as above.
        let ret = unsafe {
            v._ibv_query_gid_table.unwrap()(context, room(), 1, 0, size_of::<ibv_gid_entry>())
        };
        ret == -(libc::EIO as isize)
    });
    // the parent continues with all its objects
    o.works();
    link.say("done");
}

/// The calls that verbs.h makes through a context or an object.
fn inline(link: &mut Link) {
    let o = Objects::new();
    let (context, pd, cq, qp) = (o.end.context, o.end.pd, o.end.cq, o.end.qp);
    macro_rules! calls {
        ($($call:expr;)*) => {$(
            in_child(stringify!($call), || {
                // SAFETY: as in `every`.
                unsafe { $call }
            });
        )*};
    }
    // SAFETY: a live context; the calls stay as they are.
    let x = unsafe { &*verbs_get_ctx(context).unwrap() };
    calls! {
        ibv_poll_cq(cq, 1, room()) < 0;
        eio(ibv_req_notify_cq(cq, 0));
        eio(ibv_post_send(qp, room(), room()));
        eio(ibv_post_recv(qp, room(), room()));
        eio(ibv_post_srq_recv(o.srq, room(), room()));
        eio(x.query_port.unwrap()(context, 1, room(), size_of::<ibv_port_attr>()));
        none(x.create_qp_ex.unwrap()(context, room()));
        none(x.create_cq_ex.unwrap()(context, room()));
        none(x.create_srq_ex.unwrap()(context, room()));
        eio(x.modify_cq.unwrap()(cq, room()));
        eio(x.query_rt_values.unwrap()(context, room()));
        none(x.alloc_td.unwrap()(context, room()));
        eio(x.dealloc_td.unwrap()(o.td));
        none((*context).ops.alloc_mw.unwrap()(pd, IBV_MW_TYPE_1));
        eio((*context).ops.dealloc_mw.unwrap()(o.mw));
        eio(x.free_dm.unwrap()(o.dm));
        none(x.alloc_parent_domain.unwrap()(context, room()));
        eio(x.advise_mr.unwrap()(pd, 0, 0, null_mut(), 0));
        none(x.alloc_null_mr.unwrap()(pd));
        eio((*o.cq_ex).start_poll.unwrap()(o.cq_ex, room()));
        eio(verbs().softdv_page_prefetch.unwrap()(o.mr, room()));
    }
    o.works();
    link.say("done");
}

/// Calls of the child while a thread of the parent is between the start and the end of a poll or of
/// a batch, or acknowledges an event.
fn in_progress(link: &mut Link) {
    let o = Objects::new();
    let (cq, cq_ex) = (o.end.cq, o.cq_ex);
    // SAFETY: live objects and valid attributes; the mutexes are those of the device's objects.
    unsafe {
        let x = verbs_get_ctx(o.end.context).unwrap();
        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        (init.send_cq, init.recv_cq) = (cq_ex.cast(), cq_ex.cast());
        (init.qp_type, init.pd) = (IBV_QPT_RC, o.end.pd);
        (init.cap.max_send_wr, init.cap.max_send_sge) = (4, 1);
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE.into();
        let qp = (*x).create_qp_ex.unwrap()(o.end.context, &raw mut init);
        assert!(!qp.is_null());
        let mut end = o.end.with_qp(qp);
        let to = end.address();
        end.enter_rtr(to);
        end.enter_rts();
        let ex = qp.cast::<ibv_qp_ex>();
        let write = |ex: *mut ibv_qp_ex| {
            ((*ex).wr_id, (*ex).wr_flags) = (7, IBV_SEND_SIGNALED);
            (*ex).wr_rdma_write.unwrap()(ex, 0, 0);
        };
        (*ex).wr_start.unwrap()(ex);
        write(ex);
        in_child("wr_start", || {
            (*ex).wr_start.unwrap()(ex);
            write(ex);
            (*ex).wr_set_sge.unwrap()(ex, 0, 0, 0);
            (*ex).wr_abort.unwrap()(ex);
            (*ex).wr_start.unwrap()(ex);
            eio((*ex).wr_complete.unwrap()(ex))
        });
        assert_eq!((*ex).wr_complete.unwrap()(ex), 0);
        let begin = std::time::Instant::now();
        while (*cq_ex).start_poll.unwrap()(cq_ex, room()) == libc::ENOENT {
            assert!(begin.elapsed() < std::time::Duration::from_secs(20));
        }
        in_child("start_poll", || {
            eio((*cq_ex).start_poll.unwrap()(cq_ex, room()))
        });
        assert_eq!((*cq_ex).wr_id, 7);
        (*cq_ex).end_poll.unwrap()(cq_ex);
        for mutex in [&raw mut (*cq).mutex, &raw mut (*qp).mutex] {
            assert_eq!(libc::pthread_mutex_lock(mutex), 0);
        }
        in_child("ibv_ack_cq_events", || {
            (verbs().ibv_ack_cq_events)(cq, 1);
            true
        });
        let event = room::<ibv_async_event>();
        ((*event).element.qp, (*event).event_type) = (qp, IBV_EVENT_QP_FATAL);
        in_child("ibv_ack_async_event", || {
            (verbs().ibv_ack_async_event)(event);
            true
        });
        for mutex in [&raw mut (*cq).mutex, &raw mut (*qp).mutex] {
            assert_eq!(libc::pthread_mutex_unlock(mutex), 0);
        }
        assert_eq!((verbs().ibv_destroy_qp)(qp), 0);
    }
    o.works();
    link.say("done");
}

impl Objects {
    /// In the parent: destroys everything.
    fn works(self) {
        let v = verbs();
        // SAFETY: live objects, in the order in which they can go.
        unsafe {
            let x = verbs_get_ctx(self.end.context).unwrap();
            assert_eq!((v.ibv_destroy_ah)(self.ah), 0);
            assert_eq!((v.ibv_destroy_qp)(self.end.qp), 0);
            assert_eq!((v.ibv_destroy_srq)(self.srq), 0);
            assert_eq!((v.ibv_destroy_cq)(self.cq_ex.cast()), 0);
            assert_eq!((v.ibv_destroy_cq)(self.end.cq), 0);
            assert_eq!((v.ibv_destroy_comp_channel)(self.end.channel), 0);
            assert_eq!((*x).dealloc_td.unwrap()(self.td), 0);
            assert_eq!((v.ibv_dereg_mr)(self.mr), 0);
            assert_eq!((*self.end.context).ops.dealloc_mw.unwrap()(self.mw), 0);
            assert_eq!((*x).free_dm.unwrap()(self.dm), 0);
            assert_eq!((v.ibv_dealloc_pd)(self.end.pd), 0);
            assert_eq!((v.ibv_close_device)(self.end.context), 0);
        }
    }
}
