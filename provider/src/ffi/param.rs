//! The provider's parameters, shown by `fi_info -e` as `FI_WEFT_*` and read from the environment by
//! the host.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libfabric_sys::{FI_PARAM_BOOL, FI_PARAM_INT, FI_PARAM_SIZE_T, FI_PARAM_STRING, fi_param_type};

use crate::ffi::log::warning;
use crate::ffi::{alloc, host};
use crate::getinfo::mr_mode;
use crate::provider;
use weft::mr::Mode;

struct Param {
    name: &'static CStr,
    kind: fi_param_type,
    help: &'static CStr,
}

const PARAMS: &[Param] = &[
    Param {
        name: c"device",
        kind: FI_PARAM_STRING,
        help: c"Only offer the verbs devices of this comma-separated list of names (default: all)",
    },
    Param {
        name: c"softverbs",
        kind: FI_PARAM_BOOL,
        help: c"Offer the embedded software device soft0 (default: yes)",
    },
    Param {
        name: c"tx_size",
        kind: FI_PARAM_SIZE_T,
        help: c"Default depth of a transmit queue (default: 384, less where the device has less)",
    },
    Param {
        name: c"rx_size",
        kind: FI_PARAM_SIZE_T,
        help: c"Default depth of a receive queue (default: 384, less where the device has less)",
    },
    Param {
        name: c"inline_size",
        kind: FI_PARAM_SIZE_T,
        help: c"Default inject size in bytes (default: 64, less where the device has less)",
    },
    Param {
        name: c"backlog",
        kind: FI_PARAM_INT,
        help: c"Connection requests that a passive endpoint keeps waiting (default: 128)",
    },
    Param {
        name: c"mr_mode",
        kind: FI_PARAM_STRING,
        help: c"Only offer this form of memory regions, bits of mr_mode by name, comma-separated (default: the best of those that the application supports)",
    },
    Param {
        name: c"fault",
        kind: FI_PARAM_STRING,
        help: c"For tests of error handling: panic in the named call (domain, mr_reg, cq_open) (default: none)",
    },
];

/// What the parameters said when the provider was loaded.
#[derive(Debug, Default)]
pub(crate) struct Values {
    pub(crate) devices: Option<Vec<String>>,
    pub(crate) softverbs: Option<bool>,
    pub(crate) tx_size: Option<usize>,
    pub(crate) rx_size: Option<usize>,
    pub(crate) inline_size: Option<usize>,
    pub(crate) backlog: Option<i32>,
    pub(crate) mr_mode: Option<Mode>,
    fault: Option<String>,
}

static VALUES: OnceLock<Values> = OnceLock::new();

/// The parameters' values; all unset before [`init`].
pub(crate) fn values() -> &'static Values {
    static UNSET: Values = Values {
        devices: None,
        softverbs: None,
        tx_size: None,
        rx_size: None,
        inline_size: None,
        backlog: None,
        mr_mode: None,
        fault: None,
    };
    VALUES.get().unwrap_or(&UNSET)
}

/// Defines the parameters and reads them.
pub(crate) fn init() {
    let Some(host) = host::get() else { return };
    for param in PARAMS {
        // SAFETY: our static provider and C strings; the help text is the one argument of "%s".
        unsafe {
            (host.param_define)(
                provider::as_ptr(),
                param.name.as_ptr(),
                param.kind,
                c"%s".as_ptr(),
                param.help.as_ptr(),
            );
        }
    }
    let _ = VALUES.set(Values {
        devices: text(c"device").map(|list| {
            list.split(',')
                .map(|name| name.trim().to_owned())
                .filter(|name| !name.is_empty())
                .collect()
        }),
        // libfabric's booleans are C ints.
        softverbs: get::<c_int>(c"softverbs", 0).map(|on| on != 0),
        tx_size: get(c"tx_size", 0),
        rx_size: get(c"rx_size", 0),
        inline_size: get(c"inline_size", 0),
        backlog: get(c"backlog", 0),
        mr_mode: text(c"mr_mode").and_then(|text| {
            let mode = mr_mode::parse(&text);
            if mode.is_none() {
                warning!(FI_LOG_FABRIC, "FI_WEFT_MR_MODE={text} is not understood");
            }
            mode
        }),
        fault: text(c"fault"),
    });
}

fn get<T>(name: &CStr, unset: T) -> Option<T> {
    let host = host::get()?;
    let mut value = unset;
    // SAFETY: the parameter was defined with the type that `T` is.
    let ret = unsafe {
        (host.param_get)(
            provider::as_ptr(),
            name.as_ptr(),
            (&raw mut value).cast::<c_void>(),
        )
    };
    (ret == 0).then_some(value)
}

fn text(name: &CStr) -> Option<String> {
    let value = get::<*mut c_char>(name, std::ptr::null_mut())?;
    // SAFETY: the host hands out a C string that it keeps.
    unsafe { alloc::str_of(value) }.map(str::to_owned)
}

/// Panics if `FI_WEFT_FAULT` names this place. Not for the fast path.
pub(crate) fn fault_point(place: &str) {
    if values().fault.as_deref() == Some(place) {
        panic!("planted by FI_WEFT_FAULT={place}");
    }
}
