//! Ends with a shared receive queue: for RC, and for XRC.
//!
//! Both sides are the same. Each XRC side has an anonymous XRC domain; the sender does not need to
//! open the domain of its target.

use std::ffi::c_int;
use std::ptr::null_mut;

use rdma_core_sys::*;

use super::common::{Address, End, open, verbs};
use super::{INLINE, RECEIVES};

const SENDS: u32 = 256;

/// The shared receive queue, and the target of an XRC end.
pub(super) struct Shared {
    pub(super) srq: *mut ibv_srq,
    target: Option<Target>,
}

/// The XRC target queue pair, and the number of the SRQ that requests contain.
struct Target {
    qp: *mut ibv_qp,
    srqn: u32,
}

fn there<T>(object: *mut T) -> *mut T {
    assert!(!object.is_null(), "{}", std::io::Error::last_os_error());
    object
}

/// Context, channel, protection domain and completion queue of a new end.
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

/// An end whose queue pair is an XRC initiator, and the target for the peer's requests.
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
    /// The numbers of the target queue pair and of the SRQ, for the peer; 0 for RC.
    pub(super) fn numbers(&self) -> (u32, u32) {
        // SAFETY: a live queue pair.
        let number = |target: &Target| unsafe { ((*target.qp).qp_num, target.srqn) };
        self.target.as_ref().map_or((0, 0), number)
    }

    /// Connects the target to the peer's initiator queue pair. False for RC, which has no target.
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

/// Moves an XRC initiator queue pair to RTR; it has no receive side.
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
