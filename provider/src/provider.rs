//! The provider structure that libfabric registers, and the devices behind it.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};
use std::fmt::Arguments;
use std::sync::{Arc, OnceLock};

use libfabric_sys::*;
use rdma_core_sys::Backend;
use weft::log::{Level, Place, Sink, Subsystem};
use weft::verbs::Device;

use crate::ffi::{guard, host, log, param};
use crate::{fabric, getinfo};

struct Registered(UnsafeCell<fi_provider>);

// SAFETY: after `init` only libfabric writes to it (its own `context`).
unsafe impl Sync for Registered {}

/// The name in `FI_PROVIDER` and `fabric_attr->prov_name`.
pub(crate) const NAME: &str = "weft";
const C_NAME: &CStr = c"weft";

static PROVIDER: Registered = Registered(UnsafeCell::new(fi_provider {
    version: version(),
    fi_version: 0,
    context: fi_context {
        internal: [std::ptr::null_mut(); 4],
    },
    name: C_NAME.as_ptr(),
    getinfo: Some(getinfo::getinfo),
    fabric: Some(fabric::fabric),
    cleanup: Some(cleanup),
}));

/// This release as libfabric writes versions.
pub(crate) const fn version() -> u32 {
    const fn number(text: &str) -> u32 {
        let mut value = 0;
        let mut i = 0;
        while i < text.len() {
            value = value * 10 + (text.as_bytes()[i] - b'0') as u32;
            i += 1;
        }
        value
    }
    fi_version(
        number(env!("CARGO_PKG_VERSION_MAJOR")),
        number(env!("CARGO_PKG_VERSION_MINOR")),
    )
}

/// The structure, for the host's functions that take the calling provider.
pub(crate) fn as_ptr() -> *const fi_provider {
    PROVIDER.0.get()
}

/// Finds the host by the return address of `fi_prov_ini` and prepares everything that its
/// registration needs. NULL if it isn't a libfabric, or a second one in the process.
pub(crate) extern "C" fn init(caller: *const c_void) -> *mut fi_provider {
    static ONCE: std::sync::Once = std::sync::Once::new();
    let body = || {
        let Some(host) = host::init(caller) else {
            return std::ptr::null_mut();
        };
        ONCE.call_once(|| {
            // The host skips a provider that is older than the API that an application requests.
            // Later releases only add to the bound headers, so the host's version is used here.
            // SAFETY: the structure is not published yet.
            unsafe { (*PROVIDER.0.get()).fi_version = host.version };
            guard::log_panics();
            weft::log::set_sink(&HostLog);
            softverbs::set_log(|line| log::warning!(FI_LOG_CORE, "{line}"));
            param::init();
        });
        PROVIDER.0.get()
    };
    std::panic::catch_unwind(body).unwrap_or(std::ptr::null_mut())
}

unsafe extern "C" fn cleanup() {
    // Nothing to free: threads belong to open objects, and the library stays mapped (-z nodelete).
}

/// The devices of this machine, the system's before the embedded one; `rescan` looks for new ones.
pub(crate) fn devices(rescan: bool) -> Vec<Arc<Device>> {
    static BACKENDS: OnceLock<Vec<&'static Backend>> = OnceLock::new();
    let backends = BACKENDS.get_or_init(|| {
        let mut backends: Vec<&'static Backend> = Vec::new();
        match rdma_core_sys::system::backend() {
            Ok(system) => backends.push(system),
            Err(why) => log::info!(FI_LOG_CORE, "no system devices: {why}"),
        }
        if param::values().softverbs != Some(false) {
            backends.push(softverbs::backend());
        }
        backends
    });
    let mut devices = weft::verbs::devices(backends, rescan);
    if let Some(wanted) = &param::values().devices {
        devices.retain(|device| wanted.iter().any(|name| name == device.name()));
    }
    devices
}

struct HostLog;

fn subsystem_of(subsystem: Subsystem) -> u32 {
    match subsystem {
        Subsystem::Core => FI_LOG_CORE,
        Subsystem::Fabric => FI_LOG_FABRIC,
        Subsystem::Domain => FI_LOG_DOMAIN,
        Subsystem::EpCtrl => FI_LOG_EP_CTRL,
        Subsystem::EpData => FI_LOG_EP_DATA,
        Subsystem::Cq => FI_LOG_CQ,
        Subsystem::Eq => FI_LOG_EQ,
        Subsystem::Mr => FI_LOG_MR,
    }
}

fn level_of(level: Level) -> u32 {
    match level {
        Level::Warn => FI_LOG_WARN,
        Level::Info => FI_LOG_INFO,
        Level::Debug => FI_LOG_DEBUG,
    }
}

impl Sink for HostLog {
    fn enabled(&self, level: Level, subsystem: Subsystem) -> bool {
        log::enabled(level_of(level), subsystem_of(subsystem))
    }

    fn log(&self, level: Level, subsystem: Subsystem, place: Place, message: Arguments<'_>) {
        log::emit(level_of(level), subsystem_of(subsystem), || place, message);
    }
}
