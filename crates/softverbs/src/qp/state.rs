//! The legal transitions of a queue pair, and the attributes of each.
//!
//! The table is table 91 of the InfiniBand specification, as in the kernel's `ib_modify_qp_is_ok`.
//! Test programs check it exactly.

use rdma_core_sys::{
    IBV_QP_ACCESS_FLAGS as ACCESS, IBV_QP_ALT_PATH as ALT, IBV_QP_AV as AV,
    IBV_QP_CUR_STATE as CUR, IBV_QP_DEST_QPN as DEST, IBV_QP_EN_SQD_ASYNC_NOTIFY as NOTIFY,
    IBV_QP_MAX_DEST_RD_ATOMIC as DEST_RD, IBV_QP_MAX_QP_RD_ATOMIC as RD,
    IBV_QP_MIN_RNR_TIMER as RNR_TIMER, IBV_QP_PATH_MIG_STATE as MIG, IBV_QP_PATH_MTU as MTU,
    IBV_QP_PKEY_INDEX as PKEY, IBV_QP_PORT as PORT, IBV_QP_QKEY as QKEY, IBV_QP_RETRY_CNT as RETRY,
    IBV_QP_RNR_RETRY as RNR_RETRY, IBV_QP_RQ_PSN as RQ_PSN, IBV_QP_SQ_PSN as SQ_PSN,
    IBV_QP_STATE as STATE, IBV_QP_TIMEOUT as TIMEOUT, IBV_QPS_ERR as ERR, IBV_QPS_INIT as INIT,
    IBV_QPS_RESET as RESET, IBV_QPS_RTR as RTR, IBV_QPS_RTS as RTS, IBV_QPS_SQD as SQD,
    IBV_QPS_SQE as SQE, IBV_QPT_RC as RC, IBV_QPT_UC as UC, IBV_QPT_UD as UD,
    IBV_QPT_XRC_RECV as XRC_RECV, IBV_QPT_XRC_SEND as XRC_SEND, ibv_qp_state, ibv_qp_type,
};

/// The required and the optional attributes of a transition.
fn attributes(kind: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state) -> Option<(u32, u32)> {
    let connected = kind != UD;
    Some(match (from, to) {
        (_, RESET) => (0, 0),
        (RESET, ERR) => return None,
        (_, ERR) => (0, 0),
        (RESET, INIT) => match kind {
            UD => (PKEY | PORT | QKEY, 0),
            _ => (PKEY | PORT | ACCESS, 0),
        },
        (INIT, INIT) => match kind {
            UD => (0, PKEY | PORT | QKEY),
            _ => (0, PKEY | PORT | ACCESS),
        },
        (INIT, RTR) => match kind {
            UD => (0, PKEY | QKEY),
            UC | XRC_SEND => (AV | MTU | DEST | RQ_PSN, ALT | ACCESS | PKEY),
            _ => (
                AV | MTU | DEST | RQ_PSN | DEST_RD | RNR_TIMER,
                ALT | ACCESS | PKEY,
            ),
        },
        (RTR, RTS) => match kind {
            UD => (SQ_PSN, CUR | QKEY),
            UC => (SQ_PSN, CUR | ALT | ACCESS | MIG),
            XRC_SEND => (
                TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD,
                CUR | ALT | ACCESS | MIG,
            ),
            XRC_RECV => (TIMEOUT | SQ_PSN, CUR | ALT | ACCESS | RNR_TIMER | MIG),
            _ => (
                TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD,
                CUR | ALT | ACCESS | RNR_TIMER | MIG,
            ),
        },
        (RTS | SQD, RTS) => match kind {
            UD => (0, CUR | QKEY),
            UC | XRC_SEND => (0, CUR | ACCESS | ALT | MIG),
            _ => (0, CUR | ACCESS | ALT | MIG | RNR_TIMER),
        },
        (RTS, SQD) => (0, NOTIFY),
        (SQD, SQD) => match kind {
            UD => (0, PKEY | QKEY),
            UC => (0, AV | ALT | ACCESS | PKEY | MIG),
            XRC_SEND => (
                0,
                PORT | AV | TIMEOUT | RETRY | RNR_RETRY | RD | ALT | ACCESS | PKEY | MIG,
            ),
            XRC_RECV => (
                0,
                PORT | AV | TIMEOUT | DEST_RD | ALT | ACCESS | PKEY | RNR_TIMER | MIG,
            ),
            _ => (
                0,
                PORT | AV
                    | TIMEOUT
                    | RETRY
                    | RNR_RETRY
                    | RD
                    | DEST_RD
                    | ALT
                    | ACCESS
                    | PKEY
                    | RNR_TIMER
                    | MIG,
            ),
        },
        // A reliable queue pair never enters SQE.
        (SQE, RTS) if kind == UD => (0, CUR | QKEY),
        (SQE, RTS) if kind == UC && connected => (0, CUR | ACCESS),
        _ => return None,
    })
}

/// The attributes that apply to one half of an XRC connection. Attributes of the other half are
/// ignored, as in the kernel's `modify_qp_mask` (`drivers/infiniband/core/uverbs_cmd.c`), because
/// programs set the same attributes on both halves.
pub(crate) fn meaningful(kind: ibv_qp_type, mask: u32) -> u32 {
    match kind {
        XRC_SEND => mask & !(DEST_RD | RNR_TIMER),
        XRC_RECV => mask & !(RD | RETRY | RNR_RETRY),
        _ => mask,
    }
}

/// Whether `ibv_modify_qp` may go from one state to another with these attributes.
pub(crate) fn transition_allowed(
    kind: ibv_qp_type,
    from: ibv_qp_state,
    to: ibv_qp_state,
    mask: u32,
) -> bool {
    if mask & CUR != 0 && !matches!(from, RTR | RTS | SQD | SQE) {
        return false;
    }
    attributes(kind, from, to).is_some_and(|(required, optional)| {
        mask & required == required && mask & !(required | optional | STATE) == 0
    })
}

/// Whether queue pairs of this type have queues and are supported.
pub(crate) fn is_supported_type(kind: ibv_qp_type) -> bool {
    matches!(kind, RC | UC | UD | XRC_SEND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_way_up() {
        let init = STATE | PKEY | PORT | ACCESS;
        let rtr = STATE | AV | MTU | DEST | RQ_PSN | DEST_RD | RNR_TIMER;
        let rts = STATE | TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD;
        assert!(transition_allowed(RC, RESET, INIT, init));
        assert!(transition_allowed(RC, INIT, RTR, rtr));
        assert!(transition_allowed(RC, RTR, RTS, rts));
        for bit in 0..26 {
            let bit = 1 << bit;
            if rtr & bit != 0 && bit != STATE {
                assert!(!transition_allowed(RC, INIT, RTR, rtr & !bit), "{bit}");
            }
            let optional = ALT | ACCESS | PKEY;
            if (rtr | optional) & bit == 0 {
                assert!(!transition_allowed(RC, INIT, RTR, rtr | bit), "{bit}");
            }
        }
        assert!(!transition_allowed(RC, RESET, RTR, rtr));
        assert!(!transition_allowed(RC, INIT, RTS, rts));
        assert!(!transition_allowed(RC, SQE, RTS, STATE));
        assert!(transition_allowed(UD, SQE, RTS, STATE));
    }

    #[test]
    fn reset_from_everywhere_and_error_from_all_but_reset() {
        for kind in [RC, UC, UD] {
            for from in [RESET, INIT, RTR, RTS, SQD, SQE, ERR] {
                assert!(transition_allowed(kind, from, RESET, STATE));
                assert_eq!(transition_allowed(kind, from, ERR, STATE), from != RESET);
                assert!(!transition_allowed(kind, ERR, from, STATE) || matches!(from, RESET | ERR));
            }
        }
        assert!(!transition_allowed(RC, INIT, ERR, STATE | CUR));
        assert!(!transition_allowed(RC, RTS, ERR, STATE | QKEY));
    }
}
