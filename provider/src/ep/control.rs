//! `fi_control(3)`, `fi_ep_alias(3)` and `fi_cancel(3)` of endpoints.

use std::ffi::{c_int, c_void};

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::{Direction, Flags};

use crate::ep::op_flags::{self, OpFlags};
use crate::ffi::fid::{Kind, Object, object, on};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::fid::{close, header};
    use crate::ffi::stub;

    /// An endpoint without an engine.
    struct Bare;

    static FID_OPS: fi_ops = fi_ops {
        close: Some(close::<Bare>),
        control: Some(control::<Bare>),
        ..stub::fid::<FI_ENOSYS>()
    };

    // SAFETY: `fid_ep` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
    unsafe impl Kind for Bare {
        type C = fid_ep;
        const CLASS: usize = FI_CLASS_EP;
        fn ops() -> &'static fi_ops {
            &FID_OPS
        }
        fn retire(_: &mut fid_ep) {}
    }

    impl OpFlags for Bare {
        fn op_flags(&self) -> &weft::flags::OpFlags {
            panic!("planted");
        }
        fn allowed_op_flags(&self, _: Direction) -> u64 {
            0
        }
    }

    impl Control for Bare {
        fn enable(&self) -> Result<()> {
            Ok(())
        }
        fn alias(
            _: &Object<Self>,
            context: *mut c_void,
            _: Direction,
            _: Flags,
        ) -> Result<(fid_ep, Self)> {
            Ok((handle(context), Self))
        }
    }

    fn handle(context: *mut c_void) -> fid_ep {
        fid_ep {
            fid: header::<Bare>(context),
            ops: std::ptr::null_mut(),
            cm: std::ptr::null_mut(),
            msg: std::ptr::null_mut(),
            rma: std::ptr::null_mut(),
            tagged: std::ptr::null_mut(),
            atomic: std::ptr::null_mut(),
            collective: std::ptr::null_mut(),
        }
    }

    /// A panic of a call on the endpoint or on its alias poisons both, and both can be closed.
    #[test]
    fn an_alias_shares_the_poison_of_its_endpoint() {
        for by_alias in [false, true] {
            let ep = Object::open(handle(std::ptr::null_mut()), Bare).as_ptr();
            let mut other: *mut fid = std::ptr::null_mut();
            let mut arg = fi_alias {
                fid: &raw mut other,
                flags: FI_TRANSMIT,
            };
            let ep: *mut fid = ep.cast();
            let mut flags = FI_TRANSMIT;
            // SAFETY: open handles, and the arguments of their commands.
            unsafe {
                let call = |ep, command: u32, arg| control::<Bare>(ep, command as c_int, arg);
                let enable = |ep| call(ep, FI_ENABLE, std::ptr::null_mut());
                assert_eq!(call(ep, FI_ALIAS, (&raw mut arg).cast()), 0);
                assert_eq!((enable(ep), enable(other)), (0, 0));
                let panics = if by_alias { other } else { ep };
                let got = call(panics, FI_GETOPSFLAG, (&raw mut flags).cast());
                assert_eq!(got, -FI_EOTHER);
                let both = (-FI_EOTHER, -FI_EOTHER);
                assert_eq!(
                    (enable(ep), enable(other)),
                    both,
                    "by the alias: {by_alias}"
                );
                assert_eq!((close::<Bare>(other), close::<Bare>(ep)), (0, 0));
            }
        }
    }
}
