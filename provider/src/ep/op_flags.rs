//! The default operation flags of endpoints: `FI_GETOPSFLAG`, `FI_SETOPSFLAG` and those of an alias
//! (fi_endpoint(3)).

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::{self, Direction, Flags};

/// An endpoint whose operations have default flags.
pub(crate) trait OpFlags {
    fn op_flags(&self) -> &flags::OpFlags;
    /// The flags that can be default flags.
    fn allowed_op_flags(&self, direction: Direction) -> u64;
}

/// The flags without the direction, and the direction. The flags contain exactly one of
/// `FI_TRANSMIT` and `FI_RECV` (fi_endpoint(3)).
///
/// # Errors
/// `EINVAL`: both directions, or none.
pub(crate) fn split(flags: u64) -> Result<(u64, Direction)> {
    match flags & (FI_TRANSMIT | FI_RECV) {
        FI_TRANSMIT => Ok((flags & !FI_TRANSMIT, Direction::Transmit)),
        FI_RECV => Ok((flags & !FI_RECV, Direction::Receive)),
        _ => Err(FiErrno::EINVAL),
    }
}

/// # Safety
/// `arg` is NULL or points to flags.
pub(crate) unsafe fn get(ep: &impl OpFlags, arg: *mut u64) -> Result<()> {
    // SAFETY: the caller passes NULL or a pointer to flags.
    let arg = unsafe { arg.as_mut() }.ok_or(FiErrno::EINVAL)?;
    let (_, direction) = split(*arg)?;
    *arg = ep.op_flags().get(direction).bits();
    Ok(())
}

/// # Safety
/// As [`get`].
pub(crate) unsafe fn set(ep: &impl OpFlags, arg: *mut u64) -> Result<()> {
    // SAFETY: the caller passes NULL or a pointer to flags.
    let arg = unsafe { arg.as_ref() }.ok_or(FiErrno::EINVAL)?;
    let (flags, direction) = split(*arg)?;
    let flags = check(ep, flags, direction)?;
    ep.op_flags().set(direction, flags);
    Ok(())
}

/// Default flags for one direction.
///
/// # Errors
/// `EBADFLAGS`: a flag that cannot be a default flag.
pub(crate) fn check(ep: &impl OpFlags, flags: u64, direction: Direction) -> Result<Flags> {
    if flags & !ep.allowed_op_flags(direction) != 0 {
        return Err(FiErrno::EBADFLAGS);
    }
    Ok(Flags::from_bits_retain(flags))
}
