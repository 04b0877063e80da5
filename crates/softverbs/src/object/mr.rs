//! Memory regions.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use rdma_core_sys::{ibv_context, ibv_mr, ibv_pd};

use crate::key::Key;

/// The C object of a region, in its [`crate::sys::room`].
pub(crate) fn region_object(
    room: Box<MaybeUninit<ibv_mr>>,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    lkey: Key,
    rkey: Key,
) -> *mut ibv_mr {
    let region = ibv_mr {
        context,
        pd,
        addr,
        length,
        handle: lkey.0,
        lkey: lkey.0,
        rkey: rkey.0,
    };
    Box::into_raw(Box::write(room, region))
}
