//! The provider's own calls: the declarations in `include/weft.h`, and how a program obtains the
//! table.

#[path = "../../../provider/src/exports/mr_ops.rs"]
mod mr_ops;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use libfabric_sys::*;
pub use mr_ops::*;

use crate::call;

/// `fi_open_ops`, inline in libfabric's header.
///
/// # Safety
/// A fid.
pub unsafe fn open_ops<T>(object: *mut T, name: &CStr, flags: u64) -> Result<*mut c_void, c_int> {
    let object = object.cast::<fid>();
    let mut ops = null_mut();
    // SAFETY: the caller's promise.
    let ret = unsafe {
        let (name, out) = (name.as_ptr(), &raw mut ops);
        call!(
            (*object).ops,
            ops_open,
            object,
            name,
            flags,
            out,
            null_mut()
        )
    };
    if ret == 0 { Ok(ops) } else { Err(ret) }
}

/// The table of a domain.
///
/// # Panics
/// If there is none, or its size is not that of the header.
///
/// # Safety
/// An open domain of weft.
pub unsafe fn mr_ops(domain: *mut fid_domain) -> &'static weft_mr_ops {
    // SAFETY: the caller's promise; the provider stays loaded while it has objects.
    unsafe {
        let ops = open_ops(domain, c"weft_mr_ops", 0).expect("fi_open_ops");
        let ops = &*ops.cast::<weft_mr_ops>();
        assert_eq!(ops.size, size_of::<weft_mr_ops>());
        ops
    }
}
