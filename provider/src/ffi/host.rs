//! The libfabric that loaded the provider, and its functions.
//!
//! They are looked up at run time, never linked: a linked symbol binds the version of one release,
//! so that older libraries refuse to load the provider and newer ones bind it to compatibility
//! shims. The host is the object that holds the return address of `fi_prov_ini`; there may be other
//! libfabrics in the process. One host is served for the life of the process: structures differ
//! between releases, and a provider call does not identify its host.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libfabric_sys::{fi_info, fi_param_type, fi_provider};

type DupInfo = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type FreeInfo = unsafe extern "C" fn(*mut fi_info);
type Version = unsafe extern "C" fn() -> u32;
type LogEnabled = unsafe extern "C" fn(*const fi_provider, c_uint, c_uint) -> c_int;
type Log = unsafe extern "C" fn(
    *const fi_provider,
    c_uint,
    c_uint,
    *const c_char,
    c_int,
    *const c_char,
    ...
);
type ParamDefine = unsafe extern "C" fn(
    *const fi_provider,
    *const c_char,
    fi_param_type,
    *const c_char,
    ...
) -> c_int;
type ParamGet = unsafe extern "C" fn(*const fi_provider, *const c_char, *mut c_void) -> c_int;

/// The functions of the host that we use.
pub(crate) struct Host {
    /// The structure that is registered with the host: it names the caller in the log and in
    /// parameters.
    pub(crate) provider: *const fi_provider,
    pub(crate) dupinfo: DupInfo,
    pub(crate) freeinfo: FreeInfo,
    pub(crate) log_enabled: LogEnabled,
    pub(crate) log: Log,
    pub(crate) param_define: ParamDefine,
    pub(crate) param_get: ParamGet,
    /// The result of the host's `fi_version()`.
    pub(crate) version: u32,
    base: usize,
}

// SAFETY: `provider` points to a static, which only libfabric writes to (its own `context`); the
// functions may be called by any thread.
unsafe impl Send for Host {}
// SAFETY: no field changes after registration; any thread may call the functions.
unsafe impl Sync for Host {}

static HOST: OnceLock<Option<Host>> = OnceLock::new();

/// The host, once `fi_prov_ini` has found it.
pub(crate) fn get() -> Option<&'static Host> {
    HOST.get().and_then(Option::as_ref)
}

/// Finds the host: the libfabric that contains `caller`, the return address of `fi_prov_ini`, or
/// else a loaded `libfabric.so.1`. `None` if there is none, or if `caller` is in another libfabric
/// than the host of the first call. `provider` is the static structure that the host registers.
pub(crate) fn init(caller: *const c_void, provider: *const fi_provider) -> Option<&'static Host> {
    let here = object_at(caller);
    let host = HOST
        .get_or_init(|| find(here.as_ref(), provider))
        .as_ref()?;
    match here {
        Some((base, _)) if is_libfabric(&here) && base != host.base => None,
        _ => Some(host),
    }
}

/// Base address and handle of the loaded object that holds `address`.
fn object_at(address: *const c_void) -> Option<(usize, *mut c_void)> {
    // SAFETY: an all-zero Dl_info is valid, and dladdr only writes to it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr takes any address; `info` is live.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: `dli_fname` is the C string that dladdr returned. NOLOAD: the call loads nothing.
    let handle = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let handle = if handle.is_null() {
        // A statically linked libfabric is in the program, which cannot be reopened by its name.
        // SAFETY: NULL names the main program.
        unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_LAZY) }
    } else {
        handle
    };
    (!handle.is_null()).then_some((info.dli_fbase.addr(), handle))
}

fn is_libfabric(object: &Option<(usize, *mut c_void)>) -> bool {
    object.is_some_and(|(_, handle)| !symbol(handle, c"fi_dupinfo").is_null())
}

/// The default version of a symbol, the one with the host's own structures.
fn symbol(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `handle` comes from dlopen and is never closed; `name` is a C string.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

fn find(caller: Option<&(usize, *mut c_void)>, provider: *const fi_provider) -> Option<Host> {
    if let Some(&(base, handle)) = caller
        && let Some(host) = functions(base, handle, provider)
    {
        return Some(host);
    }
    // The caller is not libfabric: a test, or a tool that wraps the loading.
    // SAFETY: a C string; the call only looks for a loaded object.
    let handle = unsafe {
        libc::dlopen(
            c"libfabric.so.1".as_ptr(),
            libc::RTLD_LAZY | libc::RTLD_NOLOAD,
        )
    };
    if handle.is_null() {
        return None;
    }
    let (base, _) = object_at(symbol(handle, c"fi_dupinfo"))?;
    functions(base, handle, provider)
}

macro_rules! function {
    ($handle:expr, $name:literal, $type:ty) => {{
        let address = symbol($handle, $name);
        if address.is_null() {
            return None;
        }
        // SAFETY: the host's function of that name has this signature in every release (fabric.h,
        // fi_log.h, fi_prov.h), and the address is not NULL.
        unsafe { std::mem::transmute::<*mut c_void, $type>(address) }
    }};
}

fn functions(base: usize, handle: *mut c_void, provider: *const fi_provider) -> Option<Host> {
    let version = function!(handle, c"fi_version", Version);
    // SAFETY: fi_version takes nothing and only returns a constant.
    let version = unsafe { version() };
    Some(Host {
        provider,
        dupinfo: function!(handle, c"fi_dupinfo", DupInfo),
        freeinfo: function!(handle, c"fi_freeinfo", FreeInfo),
        log_enabled: function!(handle, c"fi_log_enabled", LogEnabled),
        log: function!(handle, c"fi_log", Log),
        param_define: function!(handle, c"fi_param_define", ParamDefine),
        param_get: function!(handle, c"fi_param_get", ParamGet),
        version,
        base,
    })
}
