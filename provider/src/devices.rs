//! The devices that the provider offers: those of the system's verbs libraries, and the embedded
//! one.

use std::sync::{Arc, OnceLock};

use rdma_core_sys::Backend;
use weft::verbs::Device;

use crate::ffi::{log, param};

/// The devices of this machine, the system's before the embedded one; `rescan` adds devices that
/// have appeared since the last call.
pub(crate) fn list(rescan: bool) -> Vec<Arc<Device>> {
    static BACKENDS: OnceLock<Vec<&'static Backend>> = OnceLock::new();
    let backends = BACKENDS.get_or_init(|| {
        let mut backends: Vec<&'static Backend> = Vec::new();
        match rdma_core_sys::system::backend() {
            Ok(system) => backends.push(system),
            Err(error) => {
                log::info!(FI_LOG_CORE, "rdma-core could not be loaded: {error}");
            }
        }
        if param::values().softverbs != Some(false) {
            backends.push(softverbs::backend());
        }
        backends
    });
    let mut devices = weft::verbs::devices(backends, rescan);
    if let Some(names) = &param::values().devices {
        devices.retain(|device| names.iter().any(|name| name == device.name()));
    }
    devices
}
