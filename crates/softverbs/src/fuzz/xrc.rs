//! A domain of XRC with a target, and a shared receive queue of the domain.

use std::ptr::null_mut;
use std::sync::OnceLock;

use rdma_core_sys::*;

use crate::testing::{RECVS, attributes, device, verbs};

/// A domain that no other process finds, the same for all inputs. Inputs that run at the same time
/// as one with a spoiled domain use another domain.
fn domain(spoiled: bool) -> *mut ibv_xrcd {
    struct Xrcd(*mut ibv_xrcd);
    // SAFETY: a domain may be used by several threads at once.
    unsafe impl Send for Xrcd {}
    // SAFETY: as above.
    unsafe impl Sync for Xrcd {}
    static DOMAINS: [OnceLock<Xrcd>; 2] = [OnceLock::new(), OnceLock::new()];
    DOMAINS[usize::from(spoiled)]
        .get_or_init(|| {
            let mut init = ibv_xrcd_init_attr {
                comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
                fd: -1,
                oflags: libc::O_CREAT,
            };
            // SAFETY: live context, valid attributes.
            let xrcd = unsafe { ibv_open_xrcd(device().context, &raw mut init) };
            assert!(!xrcd.is_null(), "{}", std::io::Error::last_os_error());
            Xrcd(xrcd)
        })
        .0
}

/// A target, and a shared receive queue of its domain with its own completion queue.
pub(super) struct Targeted {
    pub(super) cq: *mut ibv_cq,
    pub(super) srq: *mut ibv_srq,
    pub(super) qp: *mut ibv_qp,
    pub(super) srqn: u32,
}

impl Targeted {
    /// `spoiled`: the caller will overwrite the domain's file.
    pub(super) fn new(spoiled: bool) -> Self {
        let device = device();
        // SAFETY: all objects are live and of one context.
        unsafe {
            let cq = (verbs().ibv_create_cq)(device.context, 64, null_mut(), null_mut(), 0);
            assert!(!cq.is_null());
            let mut init = ibv_srq_init_attr_ex {
                comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                    | IBV_SRQ_INIT_ATTR_PD
                    | IBV_SRQ_INIT_ATTR_XRCD
                    | IBV_SRQ_INIT_ATTR_CQ,
                srq_type: IBV_SRQT_XRC,
                pd: device.pd,
                xrcd: domain(spoiled),
                cq,
                ..Default::default()
            };
            init.attr.max_wr = RECVS;
            init.attr.max_sge = 2;
            let srq = ibv_create_srq_ex(device.context, &raw mut init);
            assert!(!srq.is_null(), "{}", std::io::Error::last_os_error());
            let mut srqn = 0;
            assert_eq!(ibv_get_srq_num(srq, &raw mut srqn), 0);
            let mut init = ibv_qp_init_attr_ex {
                comp_mask: IBV_QP_INIT_ATTR_XRCD,
                qp_type: IBV_QPT_XRC_RECV,
                xrcd: domain(spoiled),
                ..Default::default()
            };
            let qp = ibv_create_qp_ex(device.context, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            Self { cq, srq, qp, srqn }
        }
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }

    pub(super) fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> i32 {
        // SAFETY: live, with valid attributes.
        unsafe { (verbs().ibv_modify_qp)(self.qp, attr, mask.cast_signed()) }
    }

    pub(super) fn reset(&self) {
        let mut attr = attributes(0);
        attr.qp_state = IBV_QPS_RESET;
        assert_eq!(self.modify(&mut attr, IBV_QP_STATE), 0);
    }

    /// Connects the target to an initiator with the access `access`. Returns false if another
    /// thread has changed its state meanwhile.
    #[must_use]
    pub(super) fn connect(&self, initiator: u32, access: u32) -> bool {
        let mut attr = attributes(initiator);
        attr.qp_access_flags = access;
        attr.qp_state = IBV_QPS_INIT;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        if self.modify(&mut attr, mask) != 0 {
            return false;
        }
        attr.qp_state = IBV_QPS_RTR;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask) == 0
    }

    pub(super) fn post_recv(&self, sges: &mut [ibv_sge], id: u64) -> i32 {
        let mut bad = null_mut();
        let mut wr = ibv_recv_wr {
            wr_id: id,
            next: null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as i32,
        };
        // SAFETY: live, a chain of one.
        unsafe { ibv_post_srq_recv(self.srq, &raw mut wr, &raw mut bad) }
    }
}

impl Drop for Targeted {
    fn drop(&mut self) {
        // SAFETY: live, and not used afterwards.
        unsafe {
            assert_eq!((verbs().ibv_destroy_qp)(self.qp), 0);
            assert_eq!((verbs().ibv_destroy_srq)(self.srq), 0);
            assert_eq!((verbs().ibv_destroy_cq)(self.cq), 0);
        }
    }
}
