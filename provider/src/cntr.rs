//! `fid_cntr`: counters, `fi_cntr(3)`.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::queue::{Counter, WaitKind};

use crate::cq::{wait_control, wait_kind};
use crate::domain::Domain;
use crate::ffi::fid::{Kind, Object, User, assumed, close, header, object, on};
use crate::ffi::{guard, stub};
use crate::poll_members::Memberships;

/// An open counter.
pub(crate) struct Cntr {
    pub(crate) engine: Arc<Counter>,
    pub(crate) polls: Memberships,
    _domain: User,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Cntr>),
    control: Some(control),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_cntr> = stub::cntr::<FI_ENOSYS>(fi_ops_cntr {
    size: size_of::<WithMainSlot<fi_ops_cntr>>(),
    read: Some(read),
    readerr: Some(readerr),
    add: Some(add),
    set: Some(set),
    wait: Some(wait),
    adderr: Some(adderr),
    seterr: Some(seterr),
});

// SAFETY: `fid_cntr` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Cntr {
    type C = fid_cntr;
    const CLASS: usize = FI_CLASS_CNTR;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_cntr) {
        c.ops = (&raw const stub::closed::CNTR.base).cast_mut();
    }
    fn finish(object: &Object<Self>) -> Result<()> {
        object.polls.leave();
        Ok(())
    }
}

/// `fi_cntr_open(3)`
pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_cntr_attr,
    out: *mut *mut fid_cntr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_cntr_open(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        if out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // NULL selects the default attributes, as in libfabric's own providers.
        let mut wait = WaitKind::None;
        if !attr.is_null() {
            // SAFETY: not NULL; the structure is the same in every release.
            let attr = unsafe { *attr };
            match attr.events {
                FI_CNTR_EVENTS_COMP => {}
                FI_CNTR_EVENTS_BYTES => return Err(FiErrno::ENOSYS), // sends report no length
                _ => return Err(FiErrno::EINVAL),
            }
            if attr.flags != 0 {
                return Err(FiErrno::EBADFLAGS);
            }
            wait = wait_kind(attr.wait_obj)?;
        }
        let user = domain.users.add()?;
        let object = Object::open(
            fid_cntr {
                fid: header::<Cntr>(context),
                ops: (&raw const OPS.base).cast_mut(),
            },
            Cntr {
                engine: Counter::open(domain.engine.queues(), wait)?,
                polls: Memberships::default(),
                _domain: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

unsafe extern "C" fn read(cntr: *mut fid_cntr) -> u64 {
    // SAFETY: called through the counter's own table.
    let cntr = unsafe { assumed::<Cntr>(cntr) };
    value(cntr, Counter::read)
}

unsafe extern "C" fn readerr(cntr: *mut fid_cntr) -> u64 {
    // SAFETY: called through the counter's own table.
    let cntr = unsafe { assumed::<Cntr>(cntr) };
    value(cntr, Counter::read_errors)
}

/// Reads a value. The call cannot return an error: after a panic the result is 0.
fn value(cntr: Result<&Object<Cntr>>, read: impl FnOnce(&Counter) -> u64) -> u64 {
    let mut value = 0;
    let _: c_int = guard::entry(|| {
        value = read(&cntr?.engine);
        Ok(0)
    });
    value
}

/// # Safety
/// `cntr` is an open counter.
unsafe fn change(cntr: *mut fid_cntr, change: impl FnOnce(&Counter)) -> c_int {
    // SAFETY: called through the counter's own table.
    let cntr = unsafe { assumed::<Cntr>(cntr) };
    on(cntr, |cntr| {
        change(&cntr.engine);
        Ok(0)
    })
}

unsafe extern "C" fn add(cntr: *mut fid_cntr, value: u64) -> c_int {
    // SAFETY: the contract of fi_cntr_add(3).
    unsafe { change(cntr, |counter| counter.add(value)) }
}

unsafe extern "C" fn set(cntr: *mut fid_cntr, value: u64) -> c_int {
    // SAFETY: the contract of fi_cntr_set(3).
    unsafe { change(cntr, |counter| counter.set(value)) }
}

unsafe extern "C" fn adderr(cntr: *mut fid_cntr, value: u64) -> c_int {
    // SAFETY: the contract of fi_cntr_adderr(3).
    unsafe { change(cntr, |counter| counter.add_errors(value)) }
}

unsafe extern "C" fn seterr(cntr: *mut fid_cntr, value: u64) -> c_int {
    // SAFETY: the contract of fi_cntr_seterr(3).
    unsafe { change(cntr, |counter| counter.set_errors(value)) }
}

unsafe extern "C" fn wait(cntr: *mut fid_cntr, threshold: u64, timeout: c_int) -> c_int {
    // SAFETY: called through the counter's own table.
    let cntr = unsafe { assumed::<Cntr>(cntr) };
    on(cntr, |cntr| {
        let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
        cntr.engine.wait(threshold, timeout).map(|()| 0)
    })
}

/// The commands of fi_cntr(3). No operation flag is defined for counters.
unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let cntr = unsafe { object::<Cntr>(handle) };
    on(cntr, |cntr| {
        // SAFETY: the argument of the command, by the contract of fi_control(3).
        unsafe {
            match command.cast_unsigned() {
                command @ (FI_GETOPSFLAG | FI_SETOPSFLAG) => {
                    let flags = arg.cast::<u64>().as_mut().ok_or(FiErrno::EINVAL)?;
                    match (command, *flags) {
                        (FI_GETOPSFLAG, _) => *flags = 0,
                        (_, 0) => {}
                        _ => return Err(FiErrno::EBADFLAGS),
                    }
                    Ok(0)
                }
                _ => wait_control(command, arg, cntr.engine.fd(), cntr.engine.wait_kind()),
            }
        }
    })
}
