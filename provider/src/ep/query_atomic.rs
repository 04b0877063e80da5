//! `fi_query_atomic(3)`: the atomics of the endpoints that a domain can open.

use std::ffi::c_int;

use libfabric_sys::*;
use weft::errno::FiErrno;
use weft::rdm::atomic_ops::Family;

use super::{msg_atomic, rdm_atomic};
use crate::domain::Domain;
use crate::ffi::fid::{object, on};

/// `fi_query_atomic(3)`
pub(crate) unsafe extern "C" fn query(
    domain: *mut fid_domain,
    datatype: fi_datatype,
    op: fi_op,
    attr: *mut fi_atomic_attr,
    flags: u64,
) -> c_int {
    // SAFETY: a domain by the contract of fi_query_atomic(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        if attr.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let family = match flags & !FI_TAGGED {
            0 => Family::Base,
            FI_FETCH_ATOMIC => Family::Fetch,
            FI_COMPARE_ATOMIC => Family::Compare,
            _ => return Err(FiErrno::EBADFLAGS),
        };
        // tagged atomics do not exist
        if flags & FI_TAGGED != 0 {
            return Err(FiErrno::EOPNOTSUPP);
        }
        let found = if domain.rdm {
            rdm_atomic::query(domain.api_version, family, datatype, op)?
        } else {
            msg_atomic::query(domain, family, datatype, op)?
        };
        // SAFETY: not NULL; the structure never changed.
        unsafe { *attr = found };
        Ok(0)
    })
}
