//! Shared receive queues.

use std::ffi::c_int;

use rdma_core_sys::*;

use crate::entry::{guard, non_null, pointer, status};
use crate::object::Context;
use crate::srq::{self, Srq, SrqInit, XrcInit};
use crate::sys::Errno;

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
