//! The opening of endpoints of both kinds, `fi_endpoint(3)`.

use std::ffi::{c_int, c_void};

use libfabric_sys::*;
use weft::errno::FiErrno;

use crate::domain::Domain;
use crate::ep::{msg_ep_ops, rdm_ep_ops};
use crate::ffi::fid::{object, on};
use crate::ffi::info::View;

/// `fi_endpoint(3)`
pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of fi_endpoint(3).
    unsafe { open2(domain, info, out, 0, context) }
}

/// `fi_endpoint2(3)`
pub(crate) unsafe extern "C" fn open2(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_endpoint(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        // SAFETY: NULL or a valid fi_info, by the contract of fi_endpoint(3).
        let info = unsafe { View::new(info) }.filter(|_| !out.is_null());
        let info = info.ok_or(FiErrno::EINVAL)?;
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS); // FI_PEER_TRANSFER: there is no peer provider
        }
        let object = match info.ep().map_or(FI_EP_UNSPEC, |ep| ep.type_) {
            FI_EP_RDM => rdm_ep_ops::open(domain, info, context)?,
            _ => msg_ep_ops::open(domain, info, context)?,
        };
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.cast() };
        Ok(0)
    })
}
