//! `fi_control(3)`, `fi_ep_alias(3)` and `fi_cancel(3)` of endpoints, and the flags of
//! `fi_ep_bind(3)`.

use std::ffi::{c_int, c_void};

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;

use crate::ffi::fid::{Kind, Object, object, on};
use crate::op_flags::{self, Direction, OpFlags};

/// An object to which operations are posted that can be cancelled.
pub(crate) trait Cancel: Kind {
    /// `fi_cancel(3)`.
    ///
    /// # Errors
    /// Those of `fi_cancel`.
    fn cancel(&self, context: usize) -> Result<()>;
}

/// An endpoint kind that transmits.
pub(crate) trait Control: Kind<C = fid_ep> + OpFlags {
    /// `fi_enable(3)`.
    ///
    /// # Errors
    /// Those of `fi_enable`.
    fn enable(&self) -> Result<()>;

    /// The parts of another handle of the endpoint, whose default flags of one direction are
    /// `flags`.
    ///
    /// # Errors
    /// `EINVAL`: the endpoint is being closed. Those of the engine.
    fn alias(
        ep: &Object<Self>,
        context: *mut c_void,
        direction: Direction,
        flags: Flags,
    ) -> Result<(fid_ep, Self)>;
}

pub(crate) unsafe extern "C" fn cancel<K: Cancel>(handle: *mut fid, context: *mut c_void) -> isize {
    // SAFETY: a fid by the contract of fi_cancel(3).
    let object = unsafe { object::<K>(handle) };
    on(object, |object| {
        object.cancel(context.expose_provenance()).map(|()| 0)
    })
}

pub(crate) unsafe extern "C" fn control<E: Control>(
    handle: *mut fid,
    command: c_int,
    arg: *mut c_void,
) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let ep = unsafe { object::<E>(handle) };
    on(ep, |ep| {
        match command.cast_unsigned() {
            FI_ENABLE => ep.enable()?,
            // SAFETY: the argument is a pointer to 64-bit flags, or NULL.
            FI_GETOPSFLAG => unsafe { op_flags::get(&**ep, arg.cast())? },
            // SAFETY: the argument is a pointer to 64-bit flags, or NULL.
            FI_SETOPSFLAG => unsafe { op_flags::set(&**ep, arg.cast())? },
            // SAFETY: the argument of fi_ep_alias(3), by its contract.
            FI_ALIAS => unsafe { alias(handle, ep, arg.cast())? },
            _ => return Err(FiErrno::ENOSYS), // commands of other fids
        }
        Ok(0)
    })
}

/// `fi_ep_alias(3)`: another handle of the endpoint, with default flags of its own. The endpoint
/// can't be closed before the alias.
///
/// # Safety
/// `handle` is that of `ep`; `arg` is NULL or valid.
unsafe fn alias<E: Control>(handle: *mut fid, ep: &Object<E>, arg: *mut fi_alias) -> Result<()> {
    // SAFETY: the caller passes NULL or a valid argument of fi_ep_alias(3).
    let arg = unsafe { arg.as_ref() }.ok_or(FiErrno::EINVAL)?;
    if arg.fid.is_null() {
        return Err(FiErrno::EINVAL);
    }
    let (flags, direction) = op_flags::split(arg.flags)?;
    let flags = op_flags::check(&**ep, flags, direction)?;
    // SAFETY: the caller passes the handle of the open endpoint `ep`.
    let context = unsafe { (*handle).context };
    let (c, body) = E::alias(ep, context, direction, flags)?;
    let object = Object::open(c, body);
    // SAFETY: just opened; no other thread has the handle.
    ep.share_poison(unsafe { object.as_ref() });
    // SAFETY: not NULL; the object starts with its fid.
    unsafe { *arg.fid = object.as_ptr().cast() };
    Ok(())
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
