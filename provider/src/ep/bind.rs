//! `fi_ep_bind(3)`: the objects to which endpoints of both kinds are bound in the same way.

use std::sync::Arc;

use libfabric_sys::*;
use weft::eq::EventQueue;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::queue::Counter;

use crate::cntr::Cntr;
use crate::eq::Eq;
use crate::ffi::fid::{Other, User};

/// Binds an event queue or a counter. Returns its use by the endpoint.
///
/// # Errors
/// `ENOSYS`: a shared transmit context. `EINVAL`: another object. Those of `bind_eq`,
/// `bind_counter`.
pub(crate) fn bind_common(
    other: &Other<'_>,
    flags: u64,
    bind_eq: impl FnOnce(&Arc<EventQueue>) -> Result<()>,
    bind_counter: impl FnOnce(&Arc<Counter>, Flags) -> Result<()>,
) -> Result<User> {
    match other.class() {
        FI_CLASS_EQ => {
            let (eq, user) = other.used::<Eq>()?;
            no_flags(flags)?;
            bind_eq(&eq.engine)?;
            Ok(user)
        }
        FI_CLASS_CNTR => {
            let (cntr, user) = other.used::<Cntr>()?;
            bind_counter(&cntr.engine, Flags::from_bits_retain(flags))?;
            Ok(user)
        }
        FI_CLASS_STX_CTX => Err(FiErrno::ENOSYS), // not offered
        _ => Err(FiErrno::EINVAL),
    }
}

/// The flags of a bind that takes none.
///
/// # Errors
/// `EBADFLAGS`: a flag.
pub(crate) fn no_flags(flags: u64) -> Result<()> {
    match flags {
        0 => Ok(()),
        _ => Err(FiErrno::EBADFLAGS),
    }
}
