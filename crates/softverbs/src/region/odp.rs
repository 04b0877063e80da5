//! On-demand paging: regions whose pages become present at the first access.
//!
//! The copies between processes fault pages in, so an on-demand region differs from another region
//! only in its registration, which does not access the memory. `SOFTVERBS_ODP=0` disables the
//! feature.

use std::sync::OnceLock;

use rdma_core_sys::*;

use crate::environment;

/// Whether the device offers on-demand paging in this process.
pub(crate) fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| environment::ODP.value().is_none_or(|value| value != "0"))
}

/// The capabilities that `ibv_query_device_ex` reports, for each transport.
pub(crate) fn caps() -> ibv_odp_caps {
    if !enabled() {
        return ibv_odp_caps::default();
    }
    let messages = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
    let uc = messages | IBV_ODP_SUPPORT_WRITE;
    ibv_odp_caps {
        general_caps: u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT),
        per_transport_caps: ibv_odp_caps__bindgen_ty_1 {
            rc_odp_caps: uc
                | IBV_ODP_SUPPORT_READ
                | IBV_ODP_SUPPORT_ATOMIC
                | IBV_ODP_SUPPORT_FLUSH
                | IBV_ODP_SUPPORT_ATOMIC_WRITE,
            uc_odp_caps: uc,
            ud_odp_caps: messages,
        },
    }
}

/// As [`caps`], for XRC, which has the capabilities of RC.
pub(crate) fn xrc_caps() -> u32 {
    caps().per_transport_caps.rc_odp_caps
}
