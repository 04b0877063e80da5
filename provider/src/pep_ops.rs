//! The calls of `fid_pep`, `fi_passive_ep(3)`.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use parking_lot::Mutex;
use weft::Token;
use weft::errno::{FiErrno, Result};
use weft::msg::{PassiveEndpoint, PepConfig};
use weft::verbs::Device;

use crate::addr::Format;
use crate::ep::{cm, opt};
use crate::eq::Eq;
use crate::fabric::Fabric;
use crate::ffi::fid::{Kind, Object, close, header, object, on};
use crate::ffi::info::View;
use crate::ffi::param;
use crate::ffi::stub;
use crate::pep::{Pep, Template};
use crate::{devices, getinfo};

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Pep>),
    bind: Some(bind),
    control: Some(control),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_ep> = stub::ep::<FI_ENOSYS>(fi_ops_ep {
    getopt: Some(opt::getopt_pep),
    setopt: Some(opt::setopt_pep),
    ..stub::ep_base::<FI_ENOSYS>()
});

// SAFETY: `fid_pep` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Pep {
    type C = fid_pep;
    const CLASS: usize = FI_CLASS_PEP;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_pep) {
        c.ops = (&raw const stub::closed::EP.base).cast_mut();
        c.cm = (&raw const stub::closed::CM).cast_mut();
    }
    fn finish(pep: &Object<Self>) -> Result<()> {
        pep.engine.close();
        Ok(())
    }
}

/// `fi_passive_ep(3)`
pub(crate) unsafe extern "C" fn open(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    out: *mut *mut fid_pep,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a fabric by the contract of fi_passive_ep(3).
    let fabric = unsafe { object::<Fabric>(fabric) };
    on(fabric, |fabric| {
        // SAFETY: NULL or a valid fi_info, by the contract of fi_passive_ep(3).
        let view = unsafe { View::new(info) }.filter(|_| !out.is_null());
        let view = view.ok_or(FiErrno::EINVAL)?;
        let kind = view.ep().map_or(FI_EP_UNSPEC, |ep| ep.type_);
        if !matches!(kind, FI_EP_UNSPEC | FI_EP_MSG) {
            return Err(FiErrno::EINVAL); // endpoints of other types have no connections
        }
        let seed = getinfo::Seed::of(fabric.api_version, view)?;
        let format = Format::of(view.addr_format)?.unwrap_or(Format::Sockaddr);
        let addr = view.src(format)?.or_else(|| format.any());
        let name = view.domain().and_then(|domain| domain.name());
        let name = name.and_then(|name| name.to_str().ok());
        let wanted = |device: &Arc<Device>| {
            name.is_none_or(|name| name == device.name()) && fabric.has(device)
        };
        let device = devices::list(false).into_iter().find(wanted);
        let device = device.ok_or(FiErrno::ENODEV)?;
        let user = fabric.users.add()?;
        let api_version = fabric.api_version;
        let xrc = getinfo::is_xrc(view);
        getinfo::auth_keys(api_version, view)?; // refuses keys that are too long
        let object = Object::open_with(|handle| {
            let engine = PassiveEndpoint::open(
                &device,
                PepConfig {
                    addr,
                    backlog: param::values()
                        .backlog
                        .and_then(|backlog| usize::try_from(backlog).ok())
                        .unwrap_or(0),
                    token: Token(handle.expose_provenance()),
                    xrc,
                    template: Some(Arc::new(Template { api_version, seed })),
                },
            )?;
            Ok::<_, FiErrno>((
                fid_pep {
                    fid: header::<Pep>(context),
                    ops: (&raw const OPS.base).cast_mut(),
                    cm: (&raw const cm::PEP_OPS).cast_mut(),
                },
                Pep {
                    engine,
                    format,
                    eq: Mutex::new(None),
                    _fabric: user,
                },
            ))
        })?;
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: fids by the contract of fi_pep_bind(3).
    let pep = unsafe { object::<Pep>(handle) };
    on(pep, |pep| {
        // SAFETY: a fid by the contract of fi_pep_bind(3); `object` refuses NULL.
        let eq = unsafe { object::<Eq>(other)? };
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let mut bound = pep.eq.lock();
        if bound.is_some() {
            return Err(FiErrno::EINVAL);
        }
        let user = eq.users.add()?;
        pep.engine.bind_eq(&eq.engine)?;
        *bound = Some(user);
        Ok(0)
    })
}

/// `FI_BACKLOG`, which is an int.
unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let pep = unsafe { object::<Pep>(handle) };
    on(pep, |pep| {
        if command.cast_unsigned() != FI_BACKLOG {
            return Err(FiErrno::ENOSYS);
        }
        if arg.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: not NULL, the command's argument.
        let backlog = unsafe { *arg.cast::<c_int>() };
        // A backlog of 0 would refuse every request.
        let backlog = usize::try_from(backlog)
            .ok()
            .filter(|backlog| *backlog != 0);
        pep.engine.set_backlog(backlog.ok_or(FiErrno::EINVAL)?)?;
        Ok(0)
    })
}
