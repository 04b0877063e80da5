//! `fid_mr`: registration of memory, `fi_mr(3)`.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::iovec;
use libfabric_sys::*;
use parking_lot::Mutex;
use weft::Token;
use weft::eq::EventQueue;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::mr::{Buffer, Region, RegionConfig};

use crate::cntr::Cntr;
use crate::domain::Domain;
use crate::ep::msg_ep::Ep;
use crate::ep::rdm_ep::RdmEp;
use crate::eq;
use crate::ffi::alloc::auth_key;
use crate::ffi::fid::{Kind, Object, Other, User, close, header, object, on};
use crate::ffi::log::{info, refused};
use crate::ffi::param::fault_point;
use crate::ffi::{log, stub};
use crate::mr_attr;

/// A registered region.
pub(crate) struct Mr {
    // The first field is dropped first: the uses of the objects bound to the region end afterwards.
    region: Arc<Region>,
    /// The uses of the counters and the endpoint to which the region is bound, and of the base
    /// region of a sub-region.
    bound: Mutex<Vec<User>>,
    /// The event queue of an asynchronous registration.
    events: Option<Arc<EventQueue>>,
    _domain: User,
}

impl Mr {
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Mr>),
    bind: Some(bind),
    control: Some(control),
    ..stub::fid::<FI_ENOSYS>()
};

// SAFETY: `fid_mr` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Mr {
    type C = fid_mr;
    const CLASS: usize = FI_CLASS_MR;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_mr) {
        c.mem_desc = std::ptr::null_mut();
        c.key = FI_KEY_NOTAVAIL;
    }
    fn finish(mr: &Object<Self>) -> Result<()> {
        mr.region.close().inspect_err(|errno| {
            info!(
                FI_LOG_MR,
                "fi_close: -{errno:?}: an access of a peer, or an operation of this process that \
                 waited, has not ended; call fi_close again later"
            );
        })?;
        // the event queue of a forked child's parent may have been locked at the fork
        if let Some(events) = &mr.events
            && mr.region.is_of_this_process()
        {
            events.forget(token(mr));
        }
        Ok(())
    }
}

/// Runs the body of a registration on its domain.
pub(crate) fn registering(
    domain: Result<&Object<Domain>>,
    body: impl FnOnce(&Object<Domain>) -> Result<()>,
) -> c_int {
    on(domain, |domain| {
        log::explained("fi_mr_reg", || {
            fault_point("mr_reg");
            body(domain).map(|()| 0)
        })
    })
}

/// Registers memory and stores the handle of the region in `out`. `base` is the use of the base
/// region of a sub-region.
///
/// # Errors
/// `EINVAL`: `out` is NULL. Those of [`Region::register`].
///
/// # Safety
/// The memory is valid until the region is closed, and `out` is NULL or writable.
pub(crate) unsafe fn register(
    domain: &Object<Domain>,
    config: &RegionConfig<'_>,
    base: Option<User>,
    (context, out): (*mut c_void, *mut *mut fid_mr),
) -> Result<()> {
    if out.is_null() {
        return Err(refused!(FI_LOG_MR, EINVAL, "mr is NULL"));
    }
    let user = domain.users.add()?;
    let events = domain.events();
    // SAFETY: the caller keeps the memory valid until the region is closed.
    let region = unsafe {
        match events {
            None => Region::register(domain.engine.mr(), config)?,
            Some(_) => Region::prepare(domain.engine.mr(), config)?,
        }
    };
    let object = Object::open(
        fid_mr {
            fid: header::<Mr>(context),
            mem_desc: region.desc(),
            key: region.key(),
        },
        Mr {
            region,
            bound: Mutex::new(base.into_iter().collect()),
            events: events.cloned(),
            _domain: user,
        },
    );
    // SAFETY: not NULL; the object starts with its fid.
    unsafe { *out = object.as_ptr().cast() };
    if let Some(events) = events {
        // SAFETY: just opened, and the application's only when this returns.
        let mr = unsafe { object.as_ref() };
        // The application's variable has the region already, so an error here is the result of the
        // registration, as one of the worker, and not that of the call, which would leak the
        // region.
        if let Err(error) = register_later(mr, events, context) {
            report(events, token(mr), context.expose_provenance(), Err(error));
        }
    }
    Ok(())
}

/// Passes the registration to a worker, which then writes an event, or an error, to the event
/// queue. The application's variable contains the region before that.
fn register_later(mr: &Object<Mr>, events: &Arc<EventQueue>, context: *mut c_void) -> Result<()> {
    let owner = token(mr);
    let context = context.expose_provenance();
    if mr.region.comes_disabled() {
        report(events, owner, context, Ok(())); // the application enables it
        return Ok(());
    }
    let events = Arc::clone(events);
    mr.region.enable_later(move |result| {
        let handle: *const fid = std::ptr::with_exposed_provenance(owner.0);
        // SAFETY: a close of the object waits for the end of this job.
        if let Ok(mr) = unsafe { object::<Mr>(handle) } {
            let _bound = mr.bound.lock();
            publish_key(mr);
        }
        report(&events, owner, context, result);
    })
}

fn token(mr: &Object<Mr>) -> Token {
    Token(std::ptr::from_ref(mr).expose_provenance())
}

/// Writes `FI_MR_COMPLETE` or the error to the event queue (fi_eq(3)).
fn report(events: &EventQueue, owner: Token, context: usize, result: Result<()>) {
    if let Err(error) = result {
        events.write_error(owner, error);
        return;
    }
    events.write(FI_MR_COMPLETE, &eq::entry(owner, context, 0), Some(owner));
}

/// Sets the key that `fi_mr_key`, an inline function, reads. The caller holds the lock of the
/// bindings.
fn publish_key(mr: &Object<Mr>) {
    // SAFETY: the structure lives as long as the object, and the field is aligned. The application
    // only reads it, possibly at the same time.
    let field = unsafe { AtomicU64::from_ptr(&raw mut (*mr.c()).key) };
    field.store(mr.region.key(), Ordering::Release);
}

/// `fi_mr_reg`
pub(crate) unsafe extern "C" fn reg(
    domain: *mut fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_mr_reg(3).
    let domain = unsafe { object::<Domain>(domain) };
    registering(domain, |domain| {
        let buffer = Buffer { addr: buf, len };
        let config = RegionConfig {
            buffers: std::slice::from_ref(&buffer),
            ..mr_attr::config(access, offset, requested_key, flags)?
        };
        // SAFETY: the memory and `out` by the contract of fi_mr_reg(3).
        unsafe { register(domain, &config, None, (context, out)) }
    })
}

/// `fi_mr_regv`
pub(crate) unsafe extern "C" fn regv(
    domain: *mut fid,
    iov: *const iovec,
    count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    out: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_mr_regv(3).
    let domain = unsafe { object::<Domain>(domain) };
    registering(domain, |domain| {
        let mut config = mr_attr::config(access, offset, requested_key, flags)?;
        // SAFETY: a list of `count` buffers by the contract of fi_mr_regv(3).
        config.buffers = unsafe { mr_attr::buffers(iov, count)? };
        // SAFETY: the memory and `out` by the contract of fi_mr_regv(3).
        unsafe { register(domain, &config, None, (context, out)) }
    })
}

/// `fi_mr_regattr`. The attributes have the layout of the application's API version.
pub(crate) unsafe extern "C" fn regattr(
    domain: *mut fid,
    attr: *const fi_mr_attr,
    flags: u64,
    out: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: a domain by the contract of fi_mr_regattr(3).
    let domain = unsafe { object::<Domain>(domain) };
    registering(domain, |domain| {
        let version = domain.api_version;
        // SAFETY: attributes of this version by the contract of fi_mr_regattr(3).
        let attr = unsafe { mr_attr::attributes(version, attr)? };
        let is_dmabuf = version >= fi_version(1, 20) && flags & FI_MR_DMABUF != 0;
        let flags = flags & !if is_dmabuf { FI_MR_DMABUF } else { 0 };
        let mut config = mr_attr::config(attr.access, attr.offset, attr.requested_key, flags)?;
        let buffer;
        // SAFETY: the flag determines the type of the list, by the contract of fi_mr_regattr(3);
        // the key and the base region below are valid by the same contract.
        unsafe {
            if is_dmabuf {
                let memory = mr_attr::dmabuf(attr.__bindgen_anon_1.dmabuf, attr.iov_count)?;
                buffer = memory.0;
                config.buffers = std::slice::from_ref(&buffer);
                config.dmabuf = Some(memory.1);
            } else {
                config.buffers = mr_attr::buffers(attr.__bindgen_anon_1.mr_iov, attr.iov_count)?;
            }
        }
        // SAFETY: the key has `auth_key_size` bytes, by the contract of fi_mr_regattr(3).
        let auth = unsafe { auth_key(attr.auth_key, attr.auth_key_size)? };
        config.auth = auth.as_ref();
        let mut user = None;
        if attr.base_mr.is_null() {
            if !mr_attr::is_page_size(attr.page_size) {
                return Err(FiErrno::EINVAL);
            }
        } else {
            // A sub-region has the `page_size` of its base: "ignored when creating the sub-MR". The
            // announced number of sub-regions, `sub_mr_cnt`, has no effect.
            if is_dmabuf {
                return Err(FiErrno::EINVAL);
            }
            // SAFETY: not NULL, and a region by the contract of fi_mr_regattr(3).
            let base = unsafe { object::<Mr>(attr.base_mr)? };
            user = Some(base.users.add()?);
            config.base = Some(&base.region);
        }
        // SAFETY: the memory and `out` by the contract of fi_mr_regattr(3).
        unsafe { register(domain, &config, user, (attr.context, out)) }
    })
}

/// `fi_mr_bind`
unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: fids by the contract of fi_mr_bind(3).
    let mr = unsafe { object::<Mr>(handle) };
    let bind = |mr: &Object<Mr>| {
        if other.is_null() {
            return Err(refused!(FI_LOG_MR, EINVAL, "the object to bind is NULL"));
        }
        // SAFETY: not NULL, and a fid by the contract of fi_mr_bind(3).
        let other = unsafe { Other::new(other)? };
        let user = match other.class() {
            FI_CLASS_CNTR => {
                let (cntr, user) = other.used::<Cntr>()?;
                let kinds = Flags::from_bits_retain(flags);
                mr.region.bind_counter(&cntr.engine, kinds)?;
                user
            }
            FI_CLASS_EP => {
                if flags != 0 {
                    return Err(refused!(
                        FI_LOG_MR,
                        EBADFLAGS,
                        "flags {flags:#x} must be 0 to bind an endpoint to a region"
                    ));
                }
                if other.is::<RdmEp>() {
                    let (ep, user) = other.used::<RdmEp>()?;
                    mr.region.bind_endpoint(ep.engine.scope())?;
                    user
                } else {
                    let (ep, user) = other.used::<Ep>()?;
                    mr.region.bind_endpoint(ep.engine.scope())?;
                    user
                }
            }
            _ => {
                let reason = "only a counter or an endpoint can be bound to a region";
                return Err(refused!(FI_LOG_MR, EINVAL, "{reason}"));
            }
        };
        mr.bound.lock().push(user);
        Ok(0)
    };
    on(mr, |mr| log::explained("fi_mr_bind", || bind(mr)))
}

unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let mr = unsafe { object::<Mr>(handle) };
    let control = |mr: &Object<Mr>| match command.cast_unsigned() {
        // SAFETY: the argument is NULL or a pointer to that structure.
        FI_GET_RAW_MR => unsafe { raw_attr(&mr.region, arg.cast()) }.map(|()| 0),
        FI_ENABLE if !mr.region.comes_disabled() => Err(refused!(
            FI_LOG_MR,
            EOPBADSTATE,
            "the region was not created disabled"
        )),
        FI_ENABLE => {
            let _bound = mr.bound.lock();
            mr.region.enable()?;
            publish_key(mr);
            Ok(0)
        }
        // SAFETY: the argument is NULL or a pointer to the structure of FI_REFRESH.
        FI_REFRESH => unsafe { refresh(&mr.region, arg.cast()) }.map(|()| 0),
        _ => Err(FiErrno::ENOSYS), // commands of other fids
    };
    on(mr, |mr| log::explained("fi_control", || control(mr)))
}

/// `fi_mr_refresh`
///
/// # Safety
/// `modify` is NULL or valid, and its list has as many elements as its count.
unsafe fn refresh(region: &Region, modify: *const fi_mr_modify) -> Result<()> {
    if modify.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: the caller's promise; only fields that every release has are read.
    unsafe {
        if (*modify).flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let attr = &raw const (*modify).attr;
        let (iov, count) = ((*attr).__bindgen_anon_1.mr_iov, (*attr).iov_count);
        if count == 0 {
            return region.refresh(&[]); // "The iov parameter is optional"
        }
        if iov.is_null() || count > isize::MAX as usize / size_of::<iovec>() {
            return Err(FiErrno::EINVAL);
        }
        region.refresh(mr_attr::as_buffers(iov, count))
    }
}

/// `fi_mr_raw_attr`
///
/// # Safety
/// `attr` is NULL or valid, and its pointers are NULL or valid; the key has room for `*key_size`
/// bytes.
unsafe fn raw_attr(region: &Region, attr: *const fi_mr_raw_attr) -> Result<()> {
    // SAFETY: the caller passes NULL or a valid structure, whose key has `*key_size` bytes.
    unsafe {
        let attr = attr.as_ref().ok_or(FiErrno::EINVAL)?;
        if attr.flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        if attr.key_size.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let (base, key) = region.raw_key()?;
        let room = attr.key_size.replace(key.len());
        if room < key.len() {
            let need = key.len();
            return Err(refused!(
                FI_LOG_MR,
                ETOOSMALL,
                "key_size is {room}; the raw key has {need} bytes"
            ));
        }
        if attr.raw_key.is_null() {
            return Err(FiErrno::EINVAL);
        }
        std::ptr::copy_nonoverlapping(key.as_ptr(), attr.raw_key, key.len());
        if !attr.base_addr.is_null() {
            *attr.base_addr = base;
        }
    }
    Ok(())
}
