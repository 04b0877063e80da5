//! Channels, queues and queue pairs: from C arguments to the modules that do the work.

use std::ffi::{c_int, c_uint, c_void};

use rdma_core_sys::*;

use super::context::Context;
use super::{guard, non_null, pointer, status};
use crate::cq::{self, Cq, CqInit};
use crate::events;
use crate::qp::{self, Qp, QpInit};
use crate::srq::{self, Srq, SrqInit, XrcInit};
use crate::sys::{Errno, Res};
use crate::xrc;

pub(super) unsafe extern "C" fn create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    pointer(|| {
        // SAFETY: the caller promises a live context.
        let owner = unsafe { Context::from_ptr(context) };
        events::create_channel(context, owner.live()?)
    })
}

pub(super) unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller promises a live channel.
    status(|| unsafe { events::destroy_channel(channel) })
}

pub(super) unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller promises a live channel and writable outputs.
    match guard(|| unsafe { events::get_cq_event(channel, cq, cq_context) }) {
        Ok(()) => 0,
        Err(error) => {
            error.set();
            -1
        }
    }
}

pub(super) unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: the caller promises a live queue.
    unsafe { events::ack_cq_events(cq, count) };
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
        // The domain of a queue only matters to devices whose queues lie in its memory.
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
                // It sends nothing, and what it receives is not its own.
                ex.cap = ibv_qp_cap::default();
                return qp::create_target(ex.xrcd, ex.qp_context).map(Qp::as_ptr);
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

/// The queue pair's calls of `ibv_wr_*`, or NULL where it was made without.
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

pub(super) unsafe extern "C" fn create_srq(
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    pointer(|| {
        non_null(pd)?;
        non_null(init)?;
        // SAFETY: the caller promises a live domain and a valid structure.
        unsafe {
            Context::from_ptr((*pd).context).live()?;
            let srq = srq::create(&SrqInit {
                pd,
                basic: *init,
                xrc: None,
            })?;
            let limit = (*init).attr.srq_limit;
            (*init).attr = srq::query(srq);
            (*init).attr.srq_limit = limit;
            Ok(srq.as_ptr())
        }
    })
}

pub(super) unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    pointer(|| {
        non_null(init)?;
        // SAFETY: the caller promises a live context and a valid structure.
        unsafe {
            Context::from_ptr(context).live()?;
            let ex = &mut *init;
            let known = IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ;
            let kind = if ex.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 {
                ex.srq_type
            } else {
                IBV_SRQT_BASIC
            };
            if ex.comp_mask & !known != 0 || !matches!(kind, IBV_SRQT_BASIC | IBV_SRQT_XRC) {
                return Err(Errno(libc::EOPNOTSUPP));
            }
            let needed = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
            let xrc = if kind == IBV_SRQT_BASIC {
                None
            } else if ex.comp_mask & needed != needed || ex.xrcd.is_null() || ex.cq.is_null() {
                return Err(Errno(libc::EINVAL));
            } else {
                Some(XrcInit {
                    xrcd: ex.xrcd,
                    cq: ex.cq,
                })
            };
            if ex.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 {
                return Err(Errno(libc::EINVAL));
            }
            non_null(ex.pd)?;
            let basic = ibv_srq_init_attr {
                srq_context: ex.srq_context,
                attr: ex.attr,
            };
            let srq = srq::create(&SrqInit {
                pd: ex.pd,
                basic,
                xrc,
            })?;
            ex.attr.max_wr = srq::query(srq).max_wr;
            ex.attr.max_sge = srq::query(srq).max_sge;
            Ok(srq.as_ptr())
        }
    })
}

pub(super) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live queue and a writable number.
        unsafe {
            let srq = Srq::from_ptr(srq);
            srq.process().live()?;
            number.write(srq::number_of(srq)?);
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    init: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    pointer(|| {
        non_null(init)?;
        // SAFETY: the caller promises a live context and valid attributes.
        unsafe { xrc::open(context, &*init) }
    })
}

pub(super) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: the caller promises a live domain.
    status(|| unsafe { xrc::close(xrcd) })
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

pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    status(|| {
        non_null(attr)?;
        // SAFETY: the caller promises a live queue and valid attributes.
        unsafe {
            let srq = Srq::from_ptr(srq);
            srq.process().live()?;
            srq::modify(srq, &*attr, mask.cast_unsigned())
        }
    })
}

pub(super) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live queue and a writable structure.
        unsafe {
            let srq = Srq::from_ptr(srq);
            srq.process().live()?;
            attr.write(srq::query(srq));
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: the caller promises a live queue.
    status(|| unsafe {
        Srq::from_ptr(srq).process().live()?;
        srq::destroy(srq)
    })
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller promises a live queue and a valid chain.
    guard(|| Ok(unsafe { srq::post_srq_recv(srq, wr, bad) })).unwrap_or(libc::EFAULT)
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
