//! XRC domains.

use std::ffi::c_int;

use rdma_core_sys::*;

use crate::entry::{non_null, pointer, status};
use crate::xrc;

pub(super) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    init: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    pointer(|| {
        non_null(init)?;
        // SAFETY: the caller promises a live context and valid attributes.
        unsafe { xrc::open(context, &*init) }
    })
}

pub(super) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: the caller promises a live domain.
    status(|| unsafe { xrc::close(xrcd) })
}
