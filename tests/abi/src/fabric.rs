//! `fi_getinfo` with hints, in Rust types.

use std::ffi::{CStr, CString};
use std::ptr::{NonNull, null, null_mut};

use libfabric_sys::*;

use crate::load::Lib;

/// A list of `fi_info`, freed by its libfabric.
pub struct Infos {
    lib: Lib,
    head: NonNull<fi_info>,
}

impl Infos {
    /// The first entry.
    pub fn first(&self) -> *mut fi_info {
        self.head.as_ptr()
    }

    /// All entries.
    pub fn all(&self) -> Vec<&fi_info> {
        let mut list = Vec::new();
        let mut next = self.first().cast_const();
        // SAFETY: a list of libfabric's, which lives as long as `self`.
        while let Some(info) = unsafe { next.as_ref() } {
            list.push(info);
            next = info.next;
        }
        list
    }
}

impl Drop for Infos {
    fn drop(&mut self) {
        // SAFETY: of that libfabric, freed once.
        unsafe { (self.lib.freeinfo)(self.head.as_ptr()) };
    }
}

/// Hints as an application sets them.
pub fn hints(lib: &Lib) -> Infos {
    // SAFETY: NULL asks for an empty one.
    let head = NonNull::new(unsafe { (lib.dupinfo)(null()) }).expect("an fi_info");
    let hints = Infos { lib: *lib, head };
    // SAFETY: just made, with all its parts.
    unsafe {
        let info = hints.first();
        (*info).mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
        (*(*info).ep_attr).type_ = FI_EP_MSG;
        (*(*info).domain_attr).mr_mode =
            FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        // libfabric frees it with `free`.
        (*(*info).fabric_attr).prov_name = libc::strdup(c"weft".as_ptr());
    }
    hints
}

/// `fi_getinfo`.
///
/// # Errors
/// libfabric's negative errno.
pub fn getinfo(
    lib: &Lib,
    version: u32,
    node: Option<&str>,
    service: Option<&str>,
    flags: u64,
    hints: Option<&Infos>,
) -> Result<Infos, i32> {
    let text = |text: Option<&str>| text.map(|text| CString::new(text).expect("no NUL"));
    let (node, service) = (text(node), text(service));
    let pointer = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
    let mut list = null_mut();
    // SAFETY: strings or NULL, hints of this libfabric or NULL.
    let ret = unsafe {
        (lib.getinfo)(
            version,
            pointer(&node),
            pointer(&service),
            flags,
            hints.map_or(null(), |hints| hints.first().cast_const()),
            &raw mut list,
        )
    };
    match NonNull::new(list) {
        Some(head) if ret == 0 => Ok(Infos { lib: *lib, head }),
        _ => Err(ret),
    }
}

/// The text of a C string that may be NULL.
///
/// # Safety
/// NULL or a C string that outlives the result.
pub unsafe fn text<'a>(text: *const std::ffi::c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().expect("UTF-8")
}
