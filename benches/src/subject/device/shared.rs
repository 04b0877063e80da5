//! Ends that take their receives from a shared queue: of RC, and of XRC.
//!
//! Both sides are the same. Each XRC side has a domain that nobody else finds: who sends there need not have it open.

use std::ffi::c_int;
use std::ptr::null_mut;

use rdma_core_sys::*;

use super::common::{Address, End, open, verbs};
use super::{INLINE, RECEIVES};

const SENDS: u32 = 256;

/// The queue that receives are posted to, and what XRC has besides.
pub(super) struct Shared {
    pub(super) srq: *mut ibv_srq,
    target: Option<Target>,
}

/// The queue pair that takes requests of XRC, and the number that they name.
struct Target {
    qp: *mut ibv_qp,
    srqn: u32,
}

fn there<T>(object: *mut T) -> *mut T {
    assert!(!object.is_null(), "{}", std::io::Error::last_os_error());
    object
}

/// Context, channel, protection domain and completion queue of an end to be.
fn parts() -> (
    *mut ibv_context,
    *mut ibv_comp_channel,
    *mut ibv_pd,
    *mut ibv_cq,
) {
    let context = open();
    // SAFETY: a live context, and a channel of it.
    unsafe {
        let channel = there((verbs().ibv_create_comp_channel)(context));
        let pd = there((verbs().ibv_alloc_pd)(context));
        let cqe = (SENDS + RECEIVES) as c_int;
        let cq = there((verbs().ibv_create_cq)(
            context,
            cqe,
            null_mut(),
            channel,
            0,
        ));
        (context, channel, pd, cq)
    }
}

fn cap() -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: SENDS,
        max_send_sge: 1,
        max_inline_data: INLINE as u32,
        ..Default::default()
    }
}

/// An RC end with a shared receive queue.
pub(super) fn rc() -> (End, Shared) {
    let (context, channel, pd, cq) = parts();
    // SAFETY: live objects of one context, valid attributes.
    unsafe {
        let mut attr = ibv_srq_init_attr::default();
        attr.attr.max_wr = RECEIVES;
        attr.attr.max_sge = 1;
        let srq = there((verbs().ibv_create_srq)(pd, &raw mut attr));
        let mut init = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            srq,
            cap: cap(),
            qp_type: IBV_QPT_RC,
            ..Default::default()
        };
        let qp = there((verbs().ibv_create_qp)(pd, &raw mut init));
        let mut end = End::of_parts(context, channel, pd, cq, qp);
        end.enter_init();
        (end, Shared { srq, target: None })
    }
}

/// An end whose queue pair sends by XRC, and the target of what comes back.
pub(super) fn xrc() -> (End, Shared) {
    let (context, channel, pd, cq) = parts();
    // SAFETY: live objects of one context, valid attributes.
    unsafe {
        let mut attr = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        let xrcd = there(ibv_open_xrcd(context, &raw mut attr));
        let mut attr = ibv_srq_init_attr_ex {
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ,
            srq_type: IBV_SRQT_XRC,
            pd,
            xrcd,
            cq,
            ..Default::default()
        };
        attr.attr.max_wr = RECEIVES;
        attr.attr.max_sge = 1;
        let srq = there(ibv_create_srq_ex(context, &raw mut attr));
        let mut srqn = 0;
        assert_eq!(ibv_get_srq_num(srq, &raw mut srqn), 0);
        let mut init = ibv_qp_init_attr_ex {
            comp_mask: IBV_QP_INIT_ATTR_XRCD,
            qp_type: IBV_QPT_XRC_RECV,
            xrcd,
            ..Default::default()
        };
        let target = there(ibv_create_qp_ex(context, &raw mut init));
        let mut init = ibv_qp_init_attr_ex {
            comp_mask: IBV_QP_INIT_ATTR_PD,
            qp_type: IBV_QPT_XRC_SEND,
            pd,
            send_cq: cq,
            cap: cap(),
            ..Default::default()
        };
        let qp = there(ibv_create_qp_ex(context, &raw mut init));
        let mut end = End::of_parts(context, channel, pd, cq, qp);
        end.enter_init();
        End::of_parts(context, channel, pd, cq, target).enter_init();
        let target = Some(Target { qp: target, srqn });
        (end, Shared { srq, target })
    }
}

impl Shared {
    /// What the other side has to know besides the sending queue pair: the number of the target and that of the queue.
    pub(super) fn numbers(&self) -> (u32, u32) {
        // SAFETY: a live queue pair.
        let number = |target: &Target| unsafe { ((*target.qp).qp_num, target.srqn) };
        self.target.as_ref().map_or((0, 0), number)
    }

    /// Connects the target to the other side's sending queue pair. False for RC, which has none.
    pub(super) fn connect(&self, end: &End, initiator: Address) -> bool {
        let Some(target) = &self.target else {
            return false;
        };
        let mut target = End::of_parts(end.context, end.channel, end.pd, end.cq, target.qp);
        target.enter_rtr(initiator);
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            timeout: 14,
            ..Default::default()
        };
        target.modify(&mut attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN);
        true
    }
}

/// Moves a sending queue pair of XRC to RTR: it has no half that receives.
pub(super) fn enter_rtr(end: &mut End, target: Address) {
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: IBV_MTU_1024,
        dest_qp_num: target.qpn,
        ..Default::default()
    };
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    // SAFETY: a GID is 16 bytes.
    unsafe {
        let gid = (&raw mut attr.ah_attr.grh.dgid).cast::<u128>();
        gid.write_unaligned(target.gid);
    }
    end.modify(
        &mut attr,
        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
    );
}
