//! A libfabric opened by path, and the functions that it exports.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use libfabric_sys::{fi_fabric_attr, fi_info, fid_fabric};

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const fi_info,
    *mut *mut fi_info,
) -> c_int;
type FreeInfo = unsafe extern "C" fn(*mut fi_info);
type DupInfo = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type Fabric = unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
type ToStr = unsafe extern "C" fn(*const c_void, u32) -> *const c_char;
type Version = unsafe extern "C" fn() -> u32;

/// The exported functions that an application calls; the others are inline in the headers.
#[derive(Clone, Copy)]
pub struct Lib {
    handle: *mut c_void,
    /// `fi_getinfo`
    pub getinfo: GetInfo,
    /// `fi_freeinfo`
    pub freeinfo: FreeInfo,
    /// `fi_dupinfo`
    pub dupinfo: DupInfo,
    /// `fi_fabric`
    pub fabric:
        unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int,
    /// `fi_tostr`
    pub tostr: ToStr,
    /// The result of `fi_version()`.
    pub version: u32,
}

impl Lib {
    /// Opens a libfabric with `RTLD_LOCAL`: the provider must find its functions without global
    /// symbols.
    ///
    /// # Panics
    /// If there is no such library, or a function is missing.
    pub fn open(path: &str) -> Self {
        let name = CString::new(path).expect("a path");
        // SAFETY: a C string; what is loaded is a libfabric by the caller's choice.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{path} can't be loaded");
        let symbol = |name: &CStr| {
            // SAFETY: a live handle and a C string.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!address.is_null(), "{path} has no {name:?}");
            address
        };
        // SAFETY: each is libfabric's function of that name, with the signature of fabric.h.
        unsafe {
            Self {
                handle,
                getinfo: std::mem::transmute::<*mut c_void, GetInfo>(symbol(c"fi_getinfo")),
                freeinfo: std::mem::transmute::<*mut c_void, FreeInfo>(symbol(c"fi_freeinfo")),
                dupinfo: std::mem::transmute::<*mut c_void, DupInfo>(symbol(c"fi_dupinfo")),
                fabric: std::mem::transmute::<*mut c_void, Fabric>(symbol(c"fi_fabric")),
                tostr: std::mem::transmute::<*mut c_void, ToStr>(symbol(c"fi_tostr")),
                version: std::mem::transmute::<*mut c_void, Version>(symbol(c"fi_version"))(),
            }
        }
    }

    /// Closes the library: its destructor calls the provider's clean-up.
    pub fn close(self) {
        // SAFETY: opened by `open`, and not used afterwards.
        unsafe { libc::dlclose(self.handle) };
    }
}
