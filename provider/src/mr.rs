//! `fid_mr`: registration of memory, `fi_mr(3)`.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libc::iovec;
use libfabric_sys::*;
use parking_lot::Mutex;
use weft::Token;
use weft::eq::EventQueue;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::mr::{Buffer, Mode, Region, RegionConfig};

use crate::cntr::Cntr;
use crate::domain::Domain;
use crate::ep::Ep;
use crate::ffi::fid::{Kind, Object, User, close, header, object, on};
use crate::ffi::log::{info, refused};
use crate::ffi::param::fault_point;
use crate::ffi::{log, stub};
use crate::mr_attr::{Wish, access_of, check_flags};

/// A registered region.
pub(crate) struct Mr {
    // first field, so dropped first: the objects bound to it are held until then
    region: Arc<Region>,
    /// The counters and the endpoint that it is bound to, and the region that it is a part of.
    bound: Mutex<Vec<User>>,
    /// The event queue of the registration's completion, if that is asynchronous.
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

impl Kind for Mr {
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
                "fi_close: -{errno:?}: an access through the region has not ended; to be called again"
            );
        })?;
        if let Some(events) = &mr.events {
            events.forget(token(mr));
        }
        Ok(())
    }
}

/// # Safety
/// `handle` is NULL or a fid; the memory is the application's (fi_mr(3)).
pub(crate) unsafe fn register(
    handle: *mut fid,
    wish: impl FnOnce() -> Result<Wish>,
    out: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: the caller's promise.
    let domain = unsafe { object::<Domain>(handle) };
    let register = |domain: &Object<Domain>| {
        fault_point("mr_reg");
        let wish = wish()?;
        if out.is_null() {
            return Err(refused!(FI_LOG_MR, EINVAL, "mr is NULL"));
        }
        let access = access_of(wish.access).ok_or_else(|| {
            refused!(
                FI_LOG_MR,
                EINVAL,
                "{:#x} has bits that are no access",
                wish.access
            )
        })?;
        if wish.offset != 0 {
            let reason = "offset is reserved, and must be 0"; // fi_mr(3)
            return Err(refused!(FI_LOG_MR, EINVAL, "{reason}"));
        }
        let mut bound = Vec::new();
        let mut base = None;
        if !wish.base.is_null() {
            // SAFETY: a region by the contract of fi_mr_regattr(3).
            let of = unsafe { object::<Mr>(wish.base)? };
            bound.push(of.users.add()?);
            base = Some(&of.region);
        }
        let user = domain.users.add()?;
        let config = RegionConfig {
            buffers: wish.buffers.get(..wish.count).ok_or(FiErrno::EINVAL)?,
            access,
            requested_key: wish.requested_key,
            counted: wish.flags & FI_RMA_EVENT != 0,
            once: wish.flags & FI_MR_SINGLE_USE != 0,
            persistent: wish.flags & FI_RMA_PMEM != 0,
            dmabuf: wish.dmabuf,
            auth: wish.auth.as_ref(),
            memory: wish.memory.as_ref(),
            base,
        };
        let events = domain.events();
        // SAFETY: the application keeps the memory until it closes the region (fi_mr(3)).
        let region = unsafe {
            match events {
                None => Region::register(domain.engine.mr(), &config)?,
                Some(_) => Region::prepare(domain.engine.mr(), &config)?,
            }
        };
        let object = Object::open(
            fid_mr {
                fid: header::<Mr>(wish.context),
                mem_desc: region.desc(),
                key: key(&region),
            },
            Mr {
                region,
                bound: Mutex::new(bound),
                events: events.cloned(),
                _domain: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        if let Some(events) = events {
            // SAFETY: just opened, and the application's only when this returns.
            register_later(unsafe { object.as_ref() }, events, wish.context)?;
        }
        Ok(0)
    };
    on(domain, |domain| {
        log::explained("fi_mr_reg", || register(domain))
    })
}

/// Passes the registration to a worker, which then writes an event, or an error, to the event
/// queue. The application's variable has the region before either.
fn register_later(mr: &Object<Mr>, events: &Arc<EventQueue>, context: *mut c_void) -> Result<()> {
    let owner = token(mr);
    let context = context.expose_provenance();
    if mr.region.comes_disabled() {
        tell(events, owner, context, Ok(())); // the application enables it
        return Ok(());
    }
    let events = Arc::clone(events);
    mr.region.enable_later(move |result| {
        let handle: *const fid = std::ptr::with_exposed_provenance(owner.0);
        // SAFETY: a close of the object waits for the end of this job.
        if let Ok(mr) = unsafe { object::<Mr>(handle) } {
            let _bound = mr.bound.lock();
            mr.update(|c| c.key = key(&mr.region));
        }
        tell(&events, owner, context, result);
    })
}

fn token(mr: &Object<Mr>) -> Token {
    Token(std::ptr::from_ref(mr).expose_provenance())
}

/// Puts `FI_MR_COMPLETE` or the error into the queue (fi_eq(3)).
fn tell(events: &EventQueue, owner: Token, context: usize, result: Result<()>) {
    if let Err(error) = result {
        events.write_error(owner, error);
        return;
    }
    let entry = fi_eq_entry {
        fid: std::ptr::with_exposed_provenance_mut(owner.0),
        context: std::ptr::with_exposed_provenance_mut(context),
        data: 0,
    };
    const LEN: usize = size_of::<fi_eq_entry>();
    // SAFETY: two pointers and a word, without gaps.
    let bytes = unsafe { std::mem::transmute::<fi_eq_entry, [u8; LEN]>(entry) };
    events.write(FI_MR_COMPLETE, &bytes, owner);
}

/// The result of `fi_mr_key`.
fn key(region: &Region) -> u64 {
    if region.domain().config().form.mode.contains(Mode::RAW) {
        FI_KEY_NOTAVAIL // fi_mr_raw_attr has it
    } else {
        region.key() // FI_KEY_NOTAVAIL before it is enabled
    }
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
    let wish = Wish {
        access,
        offset,
        requested_key,
        flags,
        context,
        ..Wish::buffer(buf, len)
    };
    // SAFETY: the contract of fi_mr_reg(3).
    unsafe { register(domain, || check_flags(flags).map(|()| wish), out) }
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
    // SAFETY: the contract of fi_mr_regv(3).
    unsafe {
        let wish = || {
            check_flags(flags)?;
            Ok(Wish {
                access,
                offset,
                requested_key,
                flags,
                context,
                ..Wish::list(iov, count)?
            })
        };
        register(domain, wish, out)
    }
}

/// `fi_mr_regattr`. The attributes have the layout of the application's API version.
pub(crate) unsafe extern "C" fn regattr(
    domain: *mut fid,
    attr: *const fi_mr_attr,
    flags: u64,
    out: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: the contract of fi_mr_regattr(3).
    unsafe {
        let wish = || {
            let version = object::<Domain>(domain)?.api_version;
            Wish::attributes(version, attr, flags)
        };
        register(domain, wish, out)
    }
}

/// `fi_mr_bind`
unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: fids by the contract of fi_mr_bind(3).
    let mr = unsafe { object::<Mr>(handle) };
    let bind = |mr: &Object<Mr>| {
        if other.is_null() {
            return Err(refused!(FI_LOG_MR, EINVAL, "the object to bind is NULL"));
        }
        // SAFETY: not NULL, a fid.
        let class = unsafe { (*other).fclass };
        let user = match class {
            FI_CLASS_CNTR => {
                // SAFETY: as above.
                let cntr = unsafe { object::<Cntr>(other)? };
                let user = cntr.users.add()?;
                let kinds = Flags::from_bits_retain(flags);
                mr.region.bind_counter(&cntr.engine, kinds)?;
                user
            }
            FI_CLASS_EP => {
                // SAFETY: as above.
                let ep = unsafe { object::<Ep>(other)? };
                if flags != 0 {
                    return Err(refused!(
                        FI_LOG_MR,
                        EBADFLAGS,
                        "an endpoint is bound with flags 0"
                    ));
                }
                let user = ep.users.add()?;
                mr.region.bind_endpoint(ep.engine.scope())?;
                user
            }
            _ => {
                let reason = "only counters and endpoints are bound to a region";
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
            "the region is not one that was made disabled"
        )),
        FI_ENABLE => {
            let _bound = mr.bound.lock();
            mr.region.enable()?;
            mr.update(|c| c.key = key(&mr.region));
            Ok(0)
        }
        // SAFETY: as above.
        FI_REFRESH => unsafe { refresh(&mr.region, arg.cast()) }.map(|()| 0),
        _ => Err(FiErrno::ENOSYS), // what belongs to other fids
    };
    on(mr, |mr| log::explained("fi_control", || control(mr)))
}

/// `fi_mr_refresh`
///
/// # Safety
/// `modify` is NULL or points to such a structure, whose list has as many elements as its count.
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
        let ranges: Vec<_> = std::slice::from_raw_parts(iov, count)
            .iter()
            .map(|range| Buffer {
                addr: range.iov_base,
                len: range.iov_len,
            })
            .collect();
        region.refresh(&ranges)
    }
}

/// `fi_mr_raw_attr`
///
/// # Safety
/// `attr` is NULL or points to such a structure, whose pointers are NULL or valid; the key has room
/// for `*key_size` bytes.
unsafe fn raw_attr(region: &Region, attr: *const fi_mr_raw_attr) -> Result<()> {
    // SAFETY: the caller's promise.
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
                "{room} bytes, and the raw key has {need}"
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
