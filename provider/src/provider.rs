//! The provider structure that libfabric registers, and its initialization in `fi_prov_ini`.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::fmt::Arguments;
use std::sync::Arc;

use libfabric_sys::*;
use weft::log::{Level, Sink, SourceLocation, Subsystem};
use weft::verbs::Device;

use crate::ffi::{guard, host, log, param};
use crate::{devices, fabric_ops, getinfo, identity};

struct Registered(UnsafeCell<fi_provider>);

// SAFETY: after `init` only libfabric writes to it (its own `context`).
unsafe impl Sync for Registered {}

static PROVIDER: Registered = Registered(UnsafeCell::new(fi_provider {
    version: identity::version(),
    fi_version: 0,
    context: fi_context {
        internal: [std::ptr::null_mut(); 4],
    },
    name: identity::C_NAME.as_ptr(),
    getinfo: Some(getinfo::getinfo),
    fabric: Some(fabric_ops::fabric),
    cleanup: Some(cleanup),
}));

/// The `context` of a provider over which libfabric layers others only if the application names
/// that combination, because all its devices have endpoints with many peers. libfabric keeps a
/// `struct ofi_prov_context` there (include/ofi.h, the same in the releases from 1.17 on): the type
/// of the provider, an `int`, and two `bool`, `disable_logging` and `disable_layering`. It sets the
/// type, and clears neither `bool`.
const OWN_RDM: fi_context = {
    let mut bytes = [0_u8; size_of::<usize>()];
    bytes[5] = 1;
    let mut internal = [std::ptr::null_mut(); 4];
    internal[0] = std::ptr::without_provenance_mut(usize::from_ne_bytes(bytes));
    fi_context { internal }
};

/// Finds the host by the return address of `fi_prov_ini` and prepares everything that its
/// registration needs. NULL if there is no libfabric, or the caller is a second one in the process.
pub(crate) extern "C" fn init(caller: *const c_void) -> *mut fi_provider {
    static ONCE: std::sync::Once = std::sync::Once::new();
    let body = || {
        let Some(host) = host::init(caller, PROVIDER.0.get()) else {
            return std::ptr::null_mut();
        };
        ONCE.call_once(|| {
            // The host skips a provider whose version is lower than the API version that an
            // application requests. Later releases only add to the bound headers, so this is the
            // host's version.
            // SAFETY: the structure is not published yet.
            unsafe { (*PROVIDER.0.get()).fi_version = host.version };
            guard::log_panics();
            weft::log::set_sink(&HostLog);
            softverbs::set_log(|line| log::warning!(FI_LOG_CORE, "{line}"));
            param::init();
            let lists_rdm = |device: &Arc<Device>| getinfo::layered::lists_rdm(device);
            if param::values().rdm && devices::list(false).iter().all(lists_rdm) {
                // SAFETY: as above.
                unsafe { (*PROVIDER.0.get()).context = OWN_RDM };
            }
        });
        PROVIDER.0.get()
    };
    std::panic::catch_unwind(body).unwrap_or(std::ptr::null_mut())
}

unsafe extern "C" fn cleanup() {
    // Messages that were accepted are not lost if the process ends now. Nothing is freed: threads
    // belong to open objects, and the library stays mapped (-z nodelete).
    let _ = std::panic::catch_unwind(weft::rdm::linger_all);
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

    fn log(
        &self,
        level: Level,
        subsystem: Subsystem,
        place: SourceLocation,
        message: Arguments<'_>,
    ) {
        log::emit(level_of(level), subsystem_of(subsystem), || place, message);
    }
}
