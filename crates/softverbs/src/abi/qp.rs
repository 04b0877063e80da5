//! Queue pairs.

use std::ffi::c_int;

use rdma_core_sys::*;

use crate::entry::{guard, non_null, pointer, status};
use crate::object::Context;
use crate::qp::{self, Qp, QpInit};
use crate::sys::{Errno, Res};

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    pointer(|| {
        non_null(pd)?;
        non_null(init)?;
        // SAFETY: the caller promises live objects and a valid structure.
        unsafe {
            Context::from_ptr((*pd).context).live()?;
            let qp = qp::create(QpInit {
                pd,
                attr: *init,
                operations: None,
            })?;
            (*init).cap = qp.capabilities();
            Ok(qp.as_ptr())
        }
    })
}

pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    pointer(|| {
        non_null(init)?;
        // SAFETY: the caller promises a live context and a valid structure.
        unsafe {
            Context::from_ptr(context).live()?;
            let ex = &mut *init;
            let flags = ex.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && ex.create_flags != 0;
            let known = IBV_QP_INIT_ATTR_PD
                | IBV_QP_INIT_ATTR_XRCD
                | IBV_QP_INIT_ATTR_CREATE_FLAGS
                | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            if ex.comp_mask & !known != 0 || flags {
                return Err(Errno(libc::EOPNOTSUPP));
            }
            if ex.qp_type == IBV_QPT_XRC_RECV {
                if ex.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || ex.xrcd.is_null() {
                    return Err(Errno(libc::EINVAL));
                }
                // A target sends nothing, and has no receives of its own.
                ex.cap = ibv_qp_cap::default();
                let target = qp::create_target(ex.xrcd, ex.qp_context)?.as_ptr();
                if ex.comp_mask & IBV_QP_INIT_ATTR_PD != 0 {
                    // Without effect on the target. librdmacm creates the SRQ in this domain.
                    (*target).pd = ex.pd;
                }
                return Ok(target);
            }
            if ex.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
                return Err(Errno(libc::EINVAL));
            }
            non_null(ex.pd)?;
            let attr = ibv_qp_init_attr {
                qp_context: ex.qp_context,
                send_cq: ex.send_cq,
                recv_cq: ex.recv_cq,
                srq: ex.srq,
                cap: ex.cap,
                qp_type: ex.qp_type,
                sq_sig_all: ex.sq_sig_all,
            };
            let qp = qp::create(QpInit {
                pd: ex.pd,
                attr,
                operations: (ex.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0)
                    .then_some(ex.send_ops_flags),
            })?;
            ex.cap = qp.capabilities();
            Ok(qp.as_ptr())
        }
    })
}

pub(super) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    pointer(|| {
        non_null(attr)?;
        // SAFETY: the caller promises a live context and valid attributes.
        unsafe {
            Context::from_ptr(context).live()?;
            qp::open_target(&*attr).map(Qp::as_ptr)
        }
    })
}

/// The queue pair's `ibv_wr_*` calls, or NULL if it was created without them.
pub(super) unsafe extern "C" fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    let extended = qp.cast::<ibv_qp_ex>();
    // SAFETY: the caller promises a live queue pair; all of this device are extended ones.
    if unsafe { (*extended).wr_start }.is_some() {
        extended
    } else {
        std::ptr::null_mut()
    }
}

pub(super) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller promises a live queue pair and writable outputs.
    status(|| unsafe { qp::query(qp, attr, init) })
}

pub(super) unsafe extern "C" fn modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    status(|| {
        non_null(attr)?;
        // SAFETY: the caller promises a live queue pair and valid attributes.
        unsafe { qp::modify(qp, &*attr, mask.cast_unsigned()) }
    })
}

pub(super) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the caller promises a live queue pair.
    status(|| unsafe {
        Qp::from_ptr(qp).process().live()?;
        qp::destroy(qp)
    })
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller promises a live queue pair and a valid chain.
    guard(|| Ok(unsafe { qp::post_send(qp, wr, bad) })).unwrap_or(libc::EFAULT)
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller promises a live queue pair and a valid chain.
    guard(|| Ok(unsafe { qp::post_recv(qp, wr, bad) })).unwrap_or(libc::EFAULT)
}

/// There are no multicast groups.
fn unsupported() -> Res<()> {
    Err(Errno(libc::EOPNOTSUPP))
}

pub(super) unsafe extern "C" fn attach_mcast(
    _qp: *mut ibv_qp,
    _gid: *const ibv_gid,
    _lid: u16,
) -> c_int {
    status(unsupported)
}
