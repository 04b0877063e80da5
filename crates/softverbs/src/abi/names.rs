//! The texts of `ibv_*_str`.

use std::ffi::c_char;

use rdma_core_sys::*;

pub(super) unsafe extern "C" fn wc_status_str(value: ibv_wc_status) -> *const c_char {
    let text = match value {
        IBV_WC_SUCCESS => c"success",
        IBV_WC_LOC_LEN_ERR => c"local length error",
        IBV_WC_LOC_QP_OP_ERR => c"local queue pair operation error",
        IBV_WC_LOC_EEC_OP_ERR => c"local end-to-end context operation error",
        IBV_WC_LOC_PROT_ERR => c"local protection error",
        IBV_WC_WR_FLUSH_ERR => c"request flushed error",
        IBV_WC_MW_BIND_ERR => c"memory window bind error",
        IBV_WC_BAD_RESP_ERR => c"bad response error",
        IBV_WC_LOC_ACCESS_ERR => c"local access error",
        IBV_WC_REM_INV_REQ_ERR => c"remote invalid request error",
        IBV_WC_REM_ACCESS_ERR => c"remote access error",
        IBV_WC_REM_OP_ERR => c"remote operation error",
        IBV_WC_RETRY_EXC_ERR => c"retries exceeded error",
        IBV_WC_RNR_RETRY_EXC_ERR => c"receiver not ready retries exceeded error",
        IBV_WC_LOC_RDD_VIOL_ERR => c"local reliable datagram domain violation error",
        IBV_WC_REM_INV_RD_REQ_ERR => c"remote invalid read request error",
        IBV_WC_REM_ABORT_ERR => c"remote aborted error",
        IBV_WC_INV_EECN_ERR => c"invalid end-to-end context number error",
        IBV_WC_INV_EEC_STATE_ERR => c"invalid end-to-end context state error",
        IBV_WC_FATAL_ERR => c"fatal error",
        IBV_WC_RESP_TIMEOUT_ERR => c"response timeout error",
        IBV_WC_GENERAL_ERR => c"general error",
        IBV_WC_TM_ERR => c"tag matching error",
        IBV_WC_TM_RNDV_INCOMPLETE => c"tag matching rendezvous incomplete",
        _ => c"unknown",
    };
    text.as_ptr()
}

pub(super) unsafe extern "C" fn event_type_str(value: ibv_event_type) -> *const c_char {
    let text = match value {
        IBV_EVENT_CQ_ERR => c"completion queue error",
        IBV_EVENT_QP_FATAL => c"queue pair fatal",
        IBV_EVENT_QP_REQ_ERR => c"queue pair request error",
        IBV_EVENT_QP_ACCESS_ERR => c"queue pair access error",
        IBV_EVENT_COMM_EST => c"communication established",
        IBV_EVENT_SQ_DRAINED => c"send queue drained",
        IBV_EVENT_PATH_MIG => c"path migration",
        IBV_EVENT_PATH_MIG_ERR => c"path migration error",
        IBV_EVENT_DEVICE_FATAL => c"device fatal",
        IBV_EVENT_PORT_ACTIVE => c"port active",
        IBV_EVENT_PORT_ERR => c"port error",
        IBV_EVENT_LID_CHANGE => c"LID change",
        IBV_EVENT_PKEY_CHANGE => c"partition key change",
        IBV_EVENT_SM_CHANGE => c"subnet manager change",
        IBV_EVENT_SRQ_ERR => c"shared receive queue error",
        IBV_EVENT_SRQ_LIMIT_REACHED => c"shared receive queue limit reached",
        IBV_EVENT_QP_LAST_WQE_REACHED => c"queue pair last request reached",
        IBV_EVENT_CLIENT_REREGISTER => c"client wants registration",
        IBV_EVENT_GID_CHANGE => c"GID change",
        IBV_EVENT_WQ_FATAL => c"work queue fatal",
        IBV_EVENT_DEVICE_SPEED_CHANGE => c"device speed change",
        _ => c"unknown",
    };
    text.as_ptr()
}

pub(super) unsafe extern "C" fn node_type_str(value: ibv_node_type) -> *const c_char {
    let text = match value {
        IBV_NODE_CA => c"channel adapter",
        IBV_NODE_SWITCH => c"switch",
        IBV_NODE_ROUTER => c"router",
        IBV_NODE_RNIC => c"iWARP adapter",
        IBV_NODE_USNIC => c"usNIC",
        IBV_NODE_USNIC_UDP => c"usNIC UDP",
        IBV_NODE_UNSPECIFIED => c"unspecified",
        _ => c"unknown",
    };
    text.as_ptr()
}

pub(super) unsafe extern "C" fn port_state_str(value: ibv_port_state) -> *const c_char {
    let text = match value {
        IBV_PORT_NOP => c"no change",
        IBV_PORT_DOWN => c"down",
        IBV_PORT_INIT => c"initializing",
        IBV_PORT_ARMED => c"armed",
        IBV_PORT_ACTIVE => c"active",
        IBV_PORT_ACTIVE_DEFER => c"active deferred",
        _ => c"unknown",
    };
    text.as_ptr()
}
