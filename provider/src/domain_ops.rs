//! The calls of `fid_domain`, `fi_domain(3)`.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use weft::conn::Tuning;
use weft::domain::{Domain as Engine, DomainConfig};
use weft::errno::{FiErrno, Result};
use weft::mr::{MrConfig, MrDomain};
use weft::wire::raw_key::MAX_RAW_KEY_SIZE;

use crate::domain::{Bound, Domain};
use crate::ep::{msg_srx, open, query_atomic, rdm_srx_ops};
use crate::eq::Eq;
use crate::fabric::Fabric;
use crate::ffi::fid::{Kind, Object, close, header, object, on};
use crate::ffi::info::View;
use crate::ffi::log::{info, refused};
use crate::ffi::param::{self, fault_point};
use crate::ffi::{log, stub};
use crate::{av, cntr, cq, devices, getinfo, mr, opened, poll, weft_mr_ops};

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Domain>),
    bind: Some(bind),
    control: Some(control),
    ops_open: Some(weft_mr_ops::open),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_domain> = stub::domain::<FI_ENOSYS>(fi_ops_domain {
    av_open: Some(av::open),
    cq_open: Some(cq::open),
    cntr_open: Some(cntr::open),
    endpoint: Some(open::open),
    endpoint2: Some(open::open2),
    srx_ctx: Some(srx_ctx),
    poll_open: Some(poll::open),
    query_atomic: Some(query_atomic::query),
    // scalable endpoints and shared transmit contexts are not offered by getinfo
    ..stub::domain_base::<FI_ENOSYS>()
});

static MR_OPS: fi_ops_mr = fi_ops_mr {
    size: size_of::<fi_ops_mr>(),
    reg: Some(mr::reg),
    regv: Some(mr::regv),
    regattr: Some(mr::regattr),
};

// SAFETY: `fid_domain` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Domain {
    type C = fid_domain;
    const CLASS: usize = FI_CLASS_DOMAIN;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_domain) {
        c.ops = (&raw const stub::closed::DOMAIN.base).cast_mut();
        c.mr = (&raw const stub::closed::MR).cast_mut();
    }
    fn finish(domain: &Object<Self>) -> Result<()> {
        if domain.engine.mr().has_mapped_keys() {
            let reason = "the domain has keys of fi_mr_map_raw: call fi_mr_unmap_key first";
            return Err(refused!(FI_LOG_DOMAIN, EBUSY, "{reason}"));
        }
        domain.engine.close();
        opened::DOMAINS.remove(domain.c().expose_provenance());
        Ok(())
    }
}

/// `fi_srx_context(3)`: for endpoints of the domain's type.
unsafe extern "C" fn srx_ctx(
    domain: *mut fid_domain,
    attr: *mut fi_rx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_srx_context(3).
    let is_rdm = unsafe { object::<Domain>(domain) }.is_ok_and(|domain| domain.rdm);
    let open = if is_rdm {
        rdm_srx_ops::open
    } else {
        msg_srx::open
    };
    // SAFETY: the arguments of fi_srx_context(3).
    unsafe { open(domain, attr, out, context) }
}

/// `fi_domain(3)`
pub(crate) unsafe extern "C" fn open(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    out: *mut *mut fid_domain,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of fi_domain(3).
    unsafe { open2(fabric, info, out, 0, context) }
}

/// `fi_domain2(3)`
pub(crate) unsafe extern "C" fn open2(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    out: *mut *mut fid_domain,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a fabric by the contract of fi_domain(3).
    let fabric = unsafe { object::<Fabric>(fabric) };
    on(fabric, |fabric| {
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS); // FI_PEER: objects are not shared with other providers
        }
        // SAFETY: the contract of fi_domain(3).
        unsafe { open_body(fabric, info, out, context)? };
        Ok(0)
    })
}

/// # Safety
/// The contract of fi_domain(3).
unsafe fn open_body(
    fabric: &Object<Fabric>,
    info: *mut fi_info,
    out: *mut *mut fid_domain,
    context: *mut c_void,
) -> Result<()> {
    // SAFETY: NULL or a valid fi_info, by the contract of fi_domain(3).
    let info = unsafe { View::new(info) }.filter(|_| !out.is_null());
    let info = info.ok_or(FiErrno::EINVAL)?;
    let attr = info.domain().ok_or(FiErrno::EINVAL)?;
    let name = attr.name().and_then(|name| name.to_str().ok());
    let name = name.ok_or(FiErrno::EINVAL)?;
    fault_point("domain");
    let device = devices::list(false)
        .into_iter()
        .find(|device| device.name() == name && fabric.has(device))
        .ok_or(FiErrno::ENODEV)?;
    let terms = getinfo::domain_terms(fabric.api_version, info, &device)?;
    let user = fabric.users.add()?;
    let engine = Engine::open(
        &device,
        DomainConfig {
            tuning: Tuning {
                traffic_class: param::values().traffic_class(terms.traffic_class),
                ..param::values().tuning()
            },
            mr: MrConfig {
                form: terms.form,
                events: terms.events,
                auth: terms.auth.clone(),
                durable: terms.durable,
                cache: param::values().cache(),
                ..MrConfig::default()
            },
            xrc: param::values().places.clone(),
            counts: param::values().counts.clone(),
            ..DomainConfig::default()
        },
    )?;
    let object = Object::open(
        fid_domain {
            fid: header::<Domain>(context),
            ops: (&raw const OPS.base).cast_mut(),
            mr: (&raw const MR_OPS).cast_mut(),
        },
        Domain {
            engine,
            api_version: fabric.api_version,
            rdm: terms.rdm,
            xrc: terms.xrc,
            format: terms.format,
            events: OnceLock::new(),
            _fabric: user,
        },
    );
    let opened = opened::Domain {
        name: name.to_owned(),
        fabric: fabric.c().expose_provenance(),
        version: fabric.api_version,
        rdm: terms.rdm,
        xrc: terms.xrc,
        mode: terms.form.mode,
        events: terms.events,
        durable: terms.durable,
        format: terms.format,
        traffic_class: terms.traffic_class,
        auth: terms.auth,
    };
    opened::DOMAINS.add(object.as_ptr().expose_provenance(), opened);
    // SAFETY: not NULL; the object starts with its fid.
    unsafe { *out = object.as_ptr().cast() };
    Ok(())
}

/// `fi_domain_bind(3)`: binds one event queue. It receives the events of endpoints without an event
/// queue of their own; with `FI_REG_MR`, regions are registered in the background.
unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: fids by the contract of fi_domain_bind(3).
    let domain = unsafe { object::<Domain>(handle) };
    on(domain, |domain| {
        // SAFETY: a fid by the contract of fi_domain_bind(3); `object` refuses NULL.
        let eq = unsafe { object::<Eq>(other)? };
        if flags & !FI_REG_MR != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let bound = Bound {
            in_background: flags & FI_REG_MR != 0,
            eq: Arc::clone(&eq.engine),
            _user: eq.users.add()?,
        };
        // the second of two concurrent calls fails here, and binds nothing
        domain.events.set(bound).map_err(|_| FiErrno::EINVAL)?;
        domain.engine.bind_eq(&eq.engine)?;
        Ok(0)
    })
}

unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let domain = unsafe { object::<Domain>(handle) };
    let control = |domain: &Object<Domain>| {
        match command.cast_unsigned() {
            // SAFETY: the argument is NULL or a pointer to that structure.
            FI_MAP_RAW_MR => unsafe { map_raw(domain.engine.mr(), arg.cast())? },
            FI_UNMAP_KEY => {
                // SAFETY: the argument is NULL or a pointer to a key.
                let key = unsafe { arg.cast::<u64>().as_ref() }.ok_or(FiErrno::EINVAL)?;
                domain.engine.mr().unmap_key(*key).inspect_err(|errno| {
                    info!(
                        FI_LOG_MR,
                        "fi_mr_unmap_key: -{errno:?}: key {key:#x} is not mapped"
                    );
                })?;
            }
            _ => return Err(FiErrno::ENOSYS), // FI_QUEUE_WORK etc.: FI_TRIGGER is not offered
        }
        Ok(0)
    };
    on(domain, |domain| {
        log::explained("fi_control", || control(domain))
    })
}

/// `fi_mr_map_raw`. The base address is ignored: the key contains it.
///
/// # Safety
/// `map` is NULL or points to such a structure; the key has `key_size` bytes.
unsafe fn map_raw(domain: &MrDomain, map: *const fi_mr_map_raw) -> Result<()> {
    // SAFETY: the caller passes NULL or a valid structure, whose key has `key_size` bytes.
    unsafe {
        let map = map.as_ref().ok_or(FiErrno::EINVAL)?;
        if map.flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        if map.raw_key.is_null() || map.key.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let size = map.key_size.min(MAX_RAW_KEY_SIZE);
        let raw = std::slice::from_raw_parts(map.raw_key, size);
        *map.key = domain.map_raw(raw).inspect_err(|errno| {
            info!(
                FI_LOG_MR,
                "fi_mr_map_raw: -{errno:?}: the {size} bytes are not a raw key of this version, or are damaged"
            );
        })?;
    }
    Ok(())
}
