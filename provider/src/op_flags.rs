//! The default operation flags of endpoints: `FI_GETOPSFLAG`, `FI_SETOPSFLAG` and those of an alias
//! (fi_endpoint(3)).

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;

use crate::ep_traits::OpFlags;

/// The flags without the direction, and whether the direction is transmit. The flags contain
/// exactly one of `FI_TRANSMIT` and `FI_RECV` (fi_endpoint(3)).
///
/// # Errors
/// `EINVAL`: both directions, or none.
pub(crate) fn direction(flags: u64) -> Result<(u64, bool)> {
    match flags & (FI_TRANSMIT | FI_RECV) {
        FI_TRANSMIT => Ok((flags & !FI_TRANSMIT, true)),
        FI_RECV => Ok((flags & !FI_RECV, false)),
        _ => Err(FiErrno::EINVAL),
    }
}

/// # Safety
/// `arg` is NULL or points to flags.
pub(crate) unsafe fn get(ep: &impl OpFlags, arg: *mut u64) -> Result<()> {
    // SAFETY: the caller passes NULL or a pointer to flags.
    let arg = unsafe { arg.as_mut() }.ok_or(FiErrno::EINVAL)?;
    let (_, transmit) = direction(*arg)?;
    *arg = ep.op_flags(transmit).bits();
    Ok(())
}

/// # Safety
/// As [`get`].
pub(crate) unsafe fn set(ep: &impl OpFlags, arg: *mut u64) -> Result<()> {
    // SAFETY: the caller passes NULL or a pointer to flags.
    let arg = unsafe { arg.as_ref() }.ok_or(FiErrno::EINVAL)?;
    let (flags, transmit) = direction(*arg)?;
    ep.set_op_flags(transmit, check(ep, flags, transmit)?);
    Ok(())
}

/// Default flags for one direction.
///
/// # Errors
/// `EBADFLAGS`: a flag that cannot be a default flag.
pub(crate) fn check(ep: &impl OpFlags, flags: u64, transmit: bool) -> Result<Flags> {
    if flags & !ep.allowed_op_flags(transmit) != 0 {
        return Err(FiErrno::EBADFLAGS);
    }
    Ok(Flags::from_bits_retain(flags))
}
