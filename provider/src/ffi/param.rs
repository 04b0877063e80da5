//! The provider's parameters, shown by `fi_info -e` as `FI_WEFT_*` and read from the environment by
//! the host.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use libfabric_sys::{FI_PARAM_BOOL, FI_PARAM_INT, FI_PARAM_SIZE_T, FI_PARAM_STRING, fi_param_type};

use crate::ffi::log::warning;
use crate::ffi::{alloc, host};
use weft::conn::Tuning;
use weft::mr::{CacheConfig, Mode};
use weft::xrc::Places;

struct Param {
    name: &'static CStr,
    kind: fi_param_type,
    help: &'static CStr,
}

/// All parameters. fi_weft(7) has the same names, types and texts: test_parameters.py compares
/// them.
const PARAMS: &[Param] = &[
    Param {
        name: c"device",
        kind: FI_PARAM_STRING,
        help: c"Offer only the verbs devices in this comma-separated list of names (default: all)",
    },
    Param {
        name: c"interface",
        kind: FI_PARAM_STRING,
        help: c"Offer only addresses of the network interfaces in this comma-separated list of names (default: all)",
    },
    Param {
        name: c"gid_index",
        kind: FI_PARAM_INT,
        help: c"Offer only the address in this entry of a RoCE port's GID table, 0 to 255 (default: all)",
    },
    Param {
        name: c"softverbs",
        kind: FI_PARAM_BOOL,
        help: c"Offer the embedded software device soft0 (default: yes)",
    },
    Param {
        name: c"tx_size",
        kind: FI_PARAM_SIZE_T,
        help: c"Default depth of a transmit queue in operations (default: 384, or the device's maximum if that is less; 1,024 for FI_EP_RDM endpoints)",
    },
    Param {
        name: c"rx_size",
        kind: FI_PARAM_SIZE_T,
        help: c"Default depth of a receive queue in operations (default: 384, or the device's maximum if that is less; 65,536 for FI_EP_RDM endpoints)",
    },
    Param {
        name: c"inline_size",
        kind: FI_PARAM_SIZE_T,
        help: c"Default inject size in bytes (default: 64, or the device's maximum if that is less)",
    },
    Param {
        name: c"backlog",
        kind: FI_PARAM_INT,
        help: c"Connection requests that a passive endpoint queues if FI_BACKLOG is not set (default: 128)",
    },
    Param {
        name: c"min_rnr_timer",
        kind: FI_PARAM_INT,
        help: c"Minimum RNR NAK timer, encoded as in ibv_modify_qp(3), 0 to 31 (default: 12, 0.64 ms)",
    },
    Param {
        name: c"rnr_retry_count",
        kind: FI_PARAM_INT,
        help: c"Retries of a send to a peer that has no receive posted, 0 to 7; 7 retries indefinitely (default: 7)",
    },
    Param {
        name: c"ack_timeout",
        kind: FI_PARAM_INT,
        help: c"Time until an unacknowledged packet is retransmitted: 4.096 us times 2 to the power of this, 0 to 31 (default: 16)",
    },
    Param {
        name: c"retry_count",
        kind: FI_PARAM_INT,
        help: c"Retransmissions before the connection fails, 0 to 7 (default: 6)",
    },
    Param {
        name: c"traffic_class",
        kind: FI_PARAM_INT,
        help: c"Traffic class of the packets of all connections, 0 to 255 (default: that of tclass in hints, or chosen by the connection manager)",
    },
    Param {
        name: c"mr_mode",
        kind: FI_PARAM_STRING,
        help: c"Offer only this form of memory regions: bits of mr_mode by name, comma-separated, or none, basic or scalable (default: the best of those that the application supports)",
    },
    Param {
        name: c"mr_cache_check",
        kind: FI_PARAM_BOOL,
        help: c"Ask the kernel before each use of a cached registration whether another thread is changing its memory's mapping; if off, no thread may map memory while another unmaps memory (default: yes)",
    },
    Param {
        name: c"rdm",
        kind: FI_PARAM_BOOL,
        help: c"Offer reliable datagram endpoints (FI_EP_RDM), and offer weft;ofi_rxm over the devices that have them only if it is named (default: yes)",
    },
    Param {
        name: c"xrc",
        kind: FI_PARAM_BOOL,
        help: c"Order of the entries if hints name no protocol: yes: XRC before RC; no: RC alone (default: RC before XRC)",
    },
    Param {
        name: c"max_links",
        kind: FI_PARAM_SIZE_T,
        help: c"Connections of a reliable datagram endpoint, beyond which idle ones are closed, or peers take turns (default: 3/4 of the device's queue pairs or of the limit of open files, whichever is less)",
    },
    Param {
        name: c"connect_timeout",
        kind: FI_PARAM_INT,
        help: c"Seconds for which a reliable datagram endpoint tries to connect to a peer, 1 to 3600 (default: 10)",
    },
    Param {
        name: c"xrcd_path",
        kind: FI_PARAM_STRING,
        help: c"Path of the file whose inode the processes of a host share for endpoints on XRC; .msg or .rdm is appended; shared: a file in the user's directory below XDG_RUNTIME_DIR, /run/user or /dev/shm; private: no file, each process has a domain of its own (default: shared for reliable datagram endpoints, private for message endpoints)",
    },
    Param {
        name: c"counts",
        kind: FI_PARAM_STRING,
        help: c"For tests: file to which each reliable datagram endpoint appends a line with its numbers of connections when it is closed, and each domain with connected endpoints on XRC (default: none)",
    },
    Param {
        name: c"fault",
        kind: FI_PARAM_STRING,
        help: c"For tests of error handling: panic in the named call, one of domain, mr_reg and cq_open (default: none)",
    },
];

/// The values of the parameters when the provider was loaded.
#[derive(Debug, Default)]
pub(crate) struct Values {
    pub(crate) devices: Option<Vec<String>>,
    pub(crate) interfaces: Option<Vec<String>>,
    pub(crate) gid_index: Option<u8>,
    pub(crate) softverbs: Option<bool>,
    pub(crate) tx_size: Option<usize>,
    pub(crate) rx_size: Option<usize>,
    pub(crate) inline_size: Option<usize>,
    pub(crate) backlog: Option<i32>,
    tuning: [Option<u8>; 5],
    pub(crate) mr_mode: Option<Mode>,
    cache: Option<CacheConfig>,
    /// Whether endpoints with many peers are offered.
    pub(crate) rdm: bool,
    /// Whether XRC comes before RC, or is left out.
    pub(crate) xrc: Option<bool>,
    /// Of endpoints with many peers.
    pub(crate) max_links: Option<usize>,
    pub(crate) connect_timeout: Option<Duration>,
    /// Where the files of XRC domains are, and the file for counts.
    pub(crate) places: Places,
    pub(crate) counts: Option<PathBuf>,
    fault: Option<String>,
}

static VALUES: OnceLock<Values> = OnceLock::new();

/// The parameters' values; all unset before [`init`].
pub(crate) fn values() -> &'static Values {
    static UNSET: Values = Values {
        devices: None,
        interfaces: None,
        gid_index: None,
        softverbs: None,
        tx_size: None,
        rx_size: None,
        inline_size: None,
        backlog: None,
        tuning: [None; 5],
        mr_mode: None,
        cache: None,
        rdm: false,
        xrc: None,
        max_links: None,
        connect_timeout: None,
        places: Places {
            demanded: None,
            runtime_dir: None,
        },
        counts: None,
        fault: None,
    };
    VALUES.get().unwrap_or(&UNSET)
}

impl Values {
    /// The limits of the registration cache.
    pub(crate) fn cache(&self) -> CacheConfig {
        self.cache.unwrap_or_default()
    }

    /// The traffic class of connections, for which the application asks for this one.
    pub(crate) fn traffic_class(&self, asked: Option<u8>) -> Option<u8> {
        self.tuning().traffic_class.or(asked)
    }

    /// Parameters of connections.
    pub(crate) fn tuning(&self) -> Tuning {
        let unset = Tuning::default();
        let [
            min_rnr_timer,
            rnr_retry_count,
            ack_timeout,
            retry_count,
            traffic_class,
        ] = self.tuning;
        Tuning {
            min_rnr_timer: min_rnr_timer.unwrap_or(unset.min_rnr_timer),
            rnr_retry_count: rnr_retry_count.unwrap_or(unset.rnr_retry_count),
            ack_timeout: ack_timeout.unwrap_or(unset.ack_timeout),
            retry_count: retry_count.unwrap_or(unset.retry_count),
            traffic_class,
        }
    }
}

/// The limits of the registration cache: parameters of libfabric (`fi_mr(3)`), and one parameter of
/// this provider.
fn cache() -> CacheConfig {
    let unset = CacheConfig::default();
    let merge = of_core::<c_int>(c"mr_cache_merge_regions").map(|on| on != 0);
    let monitor = of_core::<*mut c_char>(c"mr_cache_monitor");
    // SAFETY: the host hands out a C string that it keeps.
    let monitor = monitor.and_then(|text| unsafe { alloc::str_of(text) });
    if !matches!(monitor, None | Some("userfaultfd" | "disabled")) {
        let other = monitor.unwrap_or_default();
        warning!(
            FI_LOG_MR,
            "FI_MR_CACHE_MONITOR={other} is not supported; userfaultfd is used"
        );
    }
    CacheConfig {
        max_size: of_core::<usize>(c"mr_cache_max_size").map(|size| size as u64),
        max_count: of_core(c"mr_cache_max_count").unwrap_or(unset.max_count),
        // later releases of libfabric lack this parameter: then it is read from the environment
        merge: merge.unwrap_or_else(|| is_on("FI_MR_CACHE_MERGE_REGIONS")),
        check: get::<c_int>(c"mr_cache_check", 0).map_or(unset.check, |on| on != 0),
        userfaultfd: monitor != Some("disabled"),
    }
}

/// Whether a boolean is set in the environment, with the values that libfabric accepts.
fn is_on(name: &str) -> bool {
    let value = std::env::var(name).unwrap_or_default();
    ["1", "yes", "true", "on"].contains(&value.to_ascii_lowercase().as_str())
}

/// A parameter of libfabric; `None` if it is unset, or if the host's release has no parameter of
/// this name.
fn of_core<T: Zero>(name: &CStr) -> Option<T> {
    let host = host::get()?;
    let mut value = T::ZERO;
    // SAFETY: a NULL provider means the core, which writes a value of the parameter's type.
    let ret = unsafe {
        (host.param_get)(
            std::ptr::null(),
            name.as_ptr(),
            (&raw mut value).cast::<c_void>(),
        )
    };
    (ret == 0).then_some(value)
}

/// The type of a parameter, with its value before `fi_param_get` sets it.
trait Zero {
    const ZERO: Self;
}

impl Zero for c_int {
    const ZERO: Self = 0;
}

impl Zero for usize {
    const ZERO: Self = 0;
}

impl Zero for *mut c_char {
    const ZERO: Self = std::ptr::null_mut();
}

/// Defines the parameters and reads them.
pub(crate) fn init() {
    let Some(host) = host::get() else { return };
    for param in PARAMS {
        // SAFETY: our static provider and C strings; the help text is the one argument of "%s".
        unsafe {
            (host.param_define)(
                host.provider,
                param.name.as_ptr(),
                param.kind,
                c"%s".as_ptr(),
                param.help.as_ptr(),
            );
        }
    }
    let _ = VALUES.set(Values {
        devices: names(c"device"),
        interfaces: names(c"interface"),
        gid_index: small(c"gid_index", 255),
        // libfabric's booleans are C ints.
        softverbs: get::<c_int>(c"softverbs", 0).map(|on| on != 0),
        tx_size: get(c"tx_size", 0),
        rx_size: get(c"rx_size", 0),
        inline_size: get(c"inline_size", 0),
        backlog: get(c"backlog", 0),
        tuning: [
            small(c"min_rnr_timer", 31),
            small(c"rnr_retry_count", 7),
            small(c"ack_timeout", 31),
            small(c"retry_count", 7),
            small(c"traffic_class", 255),
        ],
        mr_mode: text(c"mr_mode").and_then(|text| {
            let mode = mode_of(&text);
            if mode.is_none() {
                warning!(
                    FI_LOG_FABRIC,
                    "FI_WEFT_MR_MODE={text} is not a list of mr_mode bits; it is ignored"
                );
            }
            mode
        }),
        cache: Some(cache()),
        rdm: get::<c_int>(c"rdm", 0).is_none_or(|on| on != 0),
        xrc: get::<c_int>(c"xrc", 0).map(|on| on != 0),
        max_links: get(c"max_links", 0).filter(|max| *max != 0),
        connect_timeout: connect_timeout(),
        places: Places {
            demanded: text(c"xrcd_path").map(PathBuf::from),
            runtime_dir: std::env::var_os("XDG_RUNTIME_DIR")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
        },
        counts: text(c"counts").map(PathBuf::from),
        fault: text(c"fault"),
    });
}

fn get<T>(name: &CStr, unset: T) -> Option<T> {
    let host = host::get()?;
    let mut value = unset;
    // SAFETY: the parameter was defined with the type that `T` is.
    let ret = unsafe {
        (host.param_get)(
            host.provider,
            name.as_ptr(),
            (&raw mut value).cast::<c_void>(),
        )
    };
    (ret == 0).then_some(value)
}

/// A number from 0 to `most`; any other value is logged and ignored.
fn small(name: &CStr, most: u8) -> Option<u8> {
    let value = get::<c_int>(name, 0)?;
    let taken = u8::try_from(value).ok().filter(|value| *value <= most);
    if taken.is_none() {
        warning!(
            FI_LOG_FABRIC,
            "FI_WEFT_{}={value} is not between 0 and {most}; it is ignored",
            name.to_string_lossy().to_uppercase()
        );
    }
    taken
}

fn connect_timeout() -> Option<Duration> {
    let value = get::<c_int>(c"connect_timeout", 0)?;
    let seconds = u64::try_from(value).ok();
    let seconds = seconds.filter(|seconds| (1..=3600).contains(seconds));
    if seconds.is_none() {
        warning!(
            FI_LOG_FABRIC,
            "FI_WEFT_CONNECT_TIMEOUT={value} is not between 1 and 3600; it is ignored"
        );
    }
    seconds.map(Duration::from_secs)
}

fn names(name: &CStr) -> Option<Vec<String>> {
    let list = text(name)?;
    let names = list.split(',').map(str::trim);
    Some(
        names
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect(),
    )
}

fn text(name: &CStr) -> Option<String> {
    let value = get::<*mut c_char>(name, std::ptr::null_mut())?;
    // SAFETY: the host hands out a C string that it keeps.
    unsafe { alloc::str_of(value) }.map(str::to_owned)
}

/// Parses an `mr_mode`: names of bits, with or without `FI_MR_`, separated by commas or bars. `0`,
/// `none` and `scalable` are no bit, `basic` is the bits of `FI_MR_BASIC`. `None` for any other
/// word.
fn mode_of(text: &str) -> Option<Mode> {
    let mut mode = Mode::empty();
    for word in text
        .split([',', '|'])
        .map(str::trim)
        .filter(|word| !word.is_empty())
    {
        let word = word.to_ascii_uppercase();
        mode |= match word.strip_prefix("FI_MR_").unwrap_or(&word) {
            "0" | "NONE" | "SCALABLE" => Mode::empty(),
            "BASIC" => Mode::NATIVE,
            name => Mode::from_name(name)?,
        };
    }
    Some(mode)
}

/// Panics if the value of `FI_WEFT_FAULT` is `place`. Not for the fast path.
pub(crate) fn fault_point(place: &str) {
    if values().fault.as_deref() == Some(place) {
        panic!("planted by FI_WEFT_FAULT={place}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_of_regions_is_read_by_the_names_of_its_bits() {
        assert_eq!(
            mode_of("FI_MR_VIRT_ADDR, allocated|PROV_KEY"),
            Some(Mode::NATIVE)
        );
        assert_eq!(mode_of("none"), Some(Mode::empty()));
        assert_eq!(mode_of("basic"), Some(Mode::NATIVE));
        assert_eq!(mode_of("FI_MR_WRONG"), None);
    }
}
