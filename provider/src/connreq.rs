//! The handle of a connection request (`fi_info.handle`, fi_cm(3)). The endpoint that answers the
//! request, or `fi_reject`, takes the request from it.

use std::ptr::NonNull;

use libfabric_sys::*;
use parking_lot::Mutex;
use weft::conn::ConnectRequest;
use weft::errno::{FiErrno, Result};

use crate::ffi::fid::{Kind, Object, close, header, object};
use crate::ffi::{host, stub};

/// A request without an answer; `None` once it is taken.
pub(crate) struct ConnReq {
    request: Mutex<Option<ConnectRequest>>,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<ConnReq>),
    ..stub::fid::<FI_ENOSYS>()
};

// SAFETY: `C` is the fid itself; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for ConnReq {
    type C = fid;
    const CLASS: usize = FI_CLASS_CONNREQ;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(_: &mut fid) {}
}

/// A new handle.
pub(crate) fn open(request: ConnectRequest) -> NonNull<Object<ConnReq>> {
    Object::open(
        header::<ConnReq>(std::ptr::null_mut()),
        ConnReq {
            request: Mutex::new(Some(request)),
        },
    )
}

/// Takes the request. The handle stays open: the caller puts the request back or closes the handle.
///
/// # Errors
/// `EINVAL`: not such a handle, or the request is answered already.
///
/// # Safety
/// `handle` is NULL or readable as a fid.
pub(crate) unsafe fn take(handle: *mut fid) -> Result<ConnectRequest> {
    // SAFETY: the caller passes NULL or a readable fid.
    let object = unsafe { object::<ConnReq>(handle)? };
    object.request.lock().take().ok_or(FiErrno::EINVAL)
}

/// Puts a request back after opening its endpoint has failed.
///
/// # Safety
/// `handle` is the handle from which [`take`] took the request.
pub(crate) unsafe fn put_back(handle: *mut fid, request: ConnectRequest) {
    // SAFETY: the caller passes the handle from which `take` took the request.
    if let Ok(object) = unsafe { object::<ConnReq>(handle) } {
        *object.request.lock() = Some(request);
    }
}

/// Frees the handle; a request that was not taken is refused.
///
/// # Safety
/// As [`take`]; the handle is not used afterwards.
pub(crate) unsafe fn finish(handle: *mut fid) -> Result<()> {
    // SAFETY: the caller passes a readable fid, and does not use it afterwards.
    unsafe { Object::<ConnReq>::close(handle) }
}

/// Frees the `fi_info` of a request that will not be answered, and the request.
///
/// # Safety
/// [`crate::pep::request_info`] made `info`, and the caller is its only owner.
pub(crate) unsafe fn discard(info: *mut fi_info) {
    // SAFETY: `request_info` made the info; the caller is its only owner.
    unsafe {
        let _ = finish((*info).handle);
        if let Some(host) = host::get() {
            (host.freeinfo)(info);
        }
    }
}
