//! `fid_eq`: event queues, `fi_eq(3)`.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libfabric_sys::*;
use parking_lot::Mutex;
use weft::Token;
use weft::conn::ConnectRequest;
use weft::eq::{EqConfig, EqError, Event, EventQueue};
use weft::errno::{FiErrno, Result};

use weft::wire::cm_data::CmData;

use crate::cq::{copy_data, copy_text, wait_control, wait_kind};
use crate::fabric::Fabric;
use crate::ffi::fid::{Kind, Object, User, close, header, object, on};
use crate::ffi::info::Info;
use crate::ffi::log::warning;
use crate::ffi::stub;
use crate::{connreq, pep};

/// An open event queue.
pub(crate) struct Eq {
    pub(crate) engine: Arc<EventQueue>,
    writable: bool,
    api_version: u32,
    /// Data of the last error, valid until the next error is read (fi_eq(3)).
    err_data: Mutex<CmData>,
    _fabric: User,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Eq>),
    control: Some(control),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: fi_ops_eq = fi_ops_eq {
    size: size_of::<fi_ops_eq>(),
    read: Some(read),
    readerr: Some(readerr),
    write: Some(write),
    sread: Some(sread),
    strerror: Some(strerror),
};

// SAFETY: `fid_eq` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Eq {
    type C = fid_eq;
    const CLASS: usize = FI_CLASS_EQ;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_eq) {
        c.ops = (&raw const stub::closed::EQ).cast_mut();
    }
}

/// `fi_eq_open(3)`. The size is a hint: the engine queues events in its own memory, without a
/// limit.
pub(crate) unsafe extern "C" fn open(
    fabric: *mut fid_fabric,
    attr: *mut fi_eq_attr,
    out: *mut *mut fid_eq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a fabric by the contract of fi_eq_open(3).
    let fabric = unsafe { object::<Fabric>(fabric) };
    on(fabric, |fabric| {
        if attr.is_null() || out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: not NULL; the structure never changed.
        let attr = unsafe { *attr };
        if attr.flags & !(FI_WRITE | FI_AFFINITY) != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let wait = wait_kind(attr.wait_obj)?;
        let user = fabric.users.add()?;
        let engine = EventQueue::open(EqConfig { wait })?;
        let object = Object::open(
            fid_eq {
                fid: header::<Eq>(context),
                ops: (&raw const OPS).cast_mut(),
            },
            Eq {
                engine,
                writable: attr.flags & FI_WRITE != 0,
                api_version: fabric.api_version,
                err_data: Mutex::new(CmData::EMPTY),
                _fabric: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

/// The data that a read takes out of the engine's event, before it is converted.
enum Taken {
    Request {
        pep: Token,
        id: u64,
        request: Option<ConnectRequest>,
        data: CmData,
        prepared: Option<Box<dyn Any + Send>>,
    },
    Connection {
        event: u32,
        ep: Token,
        data: CmData,
    },
    /// An event of `fi_eq_write`, copied already: its number and its length in bytes.
    User(u32, usize),
}

/// The `fi_info` that a peek built from a connection request. The application owns it once it
/// consumes the event.
struct Prepared(*mut fi_info);

// SAFETY: an fi_info is plain memory that one thread at a time uses.
unsafe impl Send for Prepared {}

impl Prepared {
    /// Builds the `fi_info` of a request; `None`: no endpoint can answer it, and it is rejected.
    ///
    /// Another thread may close the passive endpoint meanwhile, so its fid is not dereferenced.
    fn new(request: Option<ConnectRequest>) -> Option<Self> {
        match request.map(pep::request_info) {
            Some(Ok(info)) => Some(Self(Info::into_raw(info))),
            other => {
                let error = other.and_then(Result::err).unwrap_or(FiErrno::EOTHER);
                warning!(FI_LOG_EQ, "a connection request is rejected: {error}");
                None
            }
        }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // SAFETY: the event was not read, so `self` is the only owner of the info and of its
        // request.
        unsafe { connreq::discard(self.0) };
    }
}

/// The buffer that an event goes to.
#[derive(Clone, Copy)]
struct Target {
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
}

/// Bytes of `fi_eq_cm_entry` without data.
const CM_ENTRY: usize = std::mem::offset_of!(fi_eq_cm_entry, data);

impl Target {
    /// Checks the length of the buffer.
    ///
    /// # Errors
    /// `ETOOSMALL`: the buffer has less than `needed` bytes.
    fn checked(self, needed: usize) -> Result<()> {
        if self.len < needed {
            return Err(FiErrno::ETOOSMALL);
        }
        Ok(())
    }

    /// Writes a connection event, with the part of its data that fits.
    ///
    /// # Safety
    /// The target is valid and was checked for `CM_ENTRY` bytes.
    unsafe fn connection(self, event: u32, owner: Token, info: *mut fi_info, data: &[u8]) -> isize {
        let count = data.len().min(self.len - CM_ENTRY);
        // SAFETY: the caller passes a target with room for `CM_ENTRY` bytes.
        unsafe {
            *self.event = event;
            let entry = self.buf.cast::<fi_eq_cm_entry>();
            (&raw mut (*entry).fid).write_unaligned(std::ptr::with_exposed_provenance_mut(owner.0));
            (&raw mut (*entry).info).write_unaligned(info);
            std::ptr::copy_nonoverlapping(
                data.as_ptr(),
                self.buf.cast::<u8>().add(CM_ENTRY),
                count,
            );
        }
        (CM_ENTRY + count).cast_signed()
    }
}

/// Takes the data of the first event, and copies it to `target` if it needs no conversion.
fn take(event: &mut Event, target: Target) -> Result<Taken> {
    match event {
        Event::ConnReq {
            pep,
            id,
            request,
            data,
            attachment,
        } => {
            target.checked(CM_ENTRY)?;
            Ok(Taken::Request {
                pep: *pep,
                id: *id,
                request: request.take(),
                data: *data,
                prepared: attachment.take(),
            })
        }
        Event::Connected { ep, data } => {
            target.checked(CM_ENTRY)?;
            Ok(Taken::Connection {
                event: FI_CONNECTED,
                ep: *ep,
                data: *data,
            })
        }
        Event::Shutdown { ep } => {
            target.checked(CM_ENTRY)?;
            Ok(Taken::Connection {
                event: FI_SHUTDOWN,
                ep: *ep,
                data: CmData::EMPTY,
            })
        }
        Event::User { event, bytes, .. } => {
            target.checked(bytes.len())?;
            // SAFETY: `buf` has room for them.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.buf.cast::<u8>(), bytes.len());
            }
            Ok(Taken::User(*event, bytes.len()))
        }
    }
}

impl Object<Eq> {
    /// # Safety
    /// The contract of fi_eq_read(3).
    unsafe fn read_event(
        &self,
        target: Target,
        flags: u64,
        wait: Option<Option<Duration>>,
    ) -> Result<isize> {
        if target.event.is_null() || (target.buf.is_null() && target.len != 0) {
            return Err(FiErrno::EINVAL);
        }
        if flags & !FI_PEEK != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let peek = flags & FI_PEEK != 0;
        // later than any clock can show: no limit
        let deadline =
            wait.map(|timeout| timeout.and_then(|time| Instant::now().checked_add(time)));
        loop {
            let taken = match deadline {
                None => self.engine.read(peek, |event| take(event, target))?,
                Some(deadline) => {
                    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                    self.engine.sread(peek, left, |event| take(event, target))?
                }
            };
            match taken {
                Taken::User(event, length) => {
                    // SAFETY: not NULL.
                    unsafe { *target.event = event };
                    return Ok(length.cast_signed());
                }
                Taken::Connection { event, ep, data } => {
                    // SAFETY: checked in `take`.
                    return Ok(unsafe {
                        target.connection(event, ep, std::ptr::null_mut(), data.data())
                    });
                }
                Taken::Request {
                    pep,
                    id,
                    request,
                    data,
                    prepared,
                } => {
                    let prepared = match prepared.map(<Box<dyn Any + Send>>::downcast::<Prepared>) {
                        Some(Ok(prepared)) => Some(*prepared),
                        _ => Prepared::new(request),
                    };
                    let info = prepared.as_ref().map(|prepared| prepared.0);
                    let kept = if peek {
                        let object = prepared.map(|p| Box::new(p) as Box<dyn Any + Send>);
                        // an object that is not stored is dropped, which rejects the request
                        self.engine.end_peek(id, object).is_ok()
                    } else {
                        // from now on the application owns it
                        prepared.map(std::mem::forget).is_some()
                    };
                    if let Some(info) = info.filter(|_| kept) {
                        // SAFETY: checked in `take`.
                        return Ok(unsafe {
                            target.connection(FI_CONNREQ, pep, info, data.data())
                        });
                    }
                }
            }
        }
    }
}

/// The bytes of a `fi_eq_entry` (fi_eq(3)).
pub(crate) fn entry(owner: Token, context: usize, data: u64) -> [u8; size_of::<fi_eq_entry>()] {
    let entry = fi_eq_entry {
        fid: std::ptr::with_exposed_provenance_mut(owner.0),
        context: std::ptr::with_exposed_provenance_mut(context),
        data,
    };
    // SAFETY: two pointers and a word, without gaps.
    unsafe { std::mem::transmute(entry) }
}

unsafe extern "C" fn read(
    eq: *mut fid_eq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    flags: u64,
) -> isize {
    // SAFETY: a queue by the contract of fi_eq_read(3).
    let eq = unsafe { object::<Eq>(eq) };
    let target = Target { event, buf, len };
    // SAFETY: the caller keeps the contract of fi_eq_read(3).
    on(eq, |eq| unsafe { eq.read_event(target, flags, None) })
}

unsafe extern "C" fn sread(
    eq: *mut fid_eq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    // SAFETY: a queue by the contract of fi_eq_sread(3).
    let eq = unsafe { object::<Eq>(eq) };
    let target = Target { event, buf, len };
    let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
    // SAFETY: the caller keeps the contract of fi_eq_sread(3), whose buffers are those of
    // fi_eq_read(3).
    on(eq, |eq| unsafe {
        eq.read_event(target, flags, Some(timeout))
    })
}

/// `fi_eq_readerr(3)`
unsafe extern "C" fn readerr(eq: *mut fid_eq, buf: *mut fi_eq_err_entry, flags: u64) -> isize {
    // SAFETY: a queue by the contract of fi_eq_readerr(3).
    let eq = unsafe { object::<Eq>(eq) };
    on(eq, |eq| {
        if buf.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let error = eq.engine.read_error()?;
        let mut kept = eq.err_data.lock();
        *kept = error.cm_data;
        let data = kept.data();
        // SAFETY: not NULL; from 1.5 on `err_data` has `err_data_size` bytes where that isn't 0.
        unsafe {
            let owner: *mut fid = std::ptr::with_exposed_provenance_mut(error.owner.0);
            (*buf).fid = owner;
            (*buf).context = match error.context {
                Some(context) => std::ptr::with_exposed_provenance_mut(context),
                None if owner.is_null() => std::ptr::null_mut(),
                None => (*owner).context,
            };
            (*buf).data = error.data as u64;
            (*buf).err = error.err.code();
            (*buf).prov_errno = error.prov_errno;
            let sized = eq.api_version >= fi_version(1, 5);
            if sized && (*buf).err_data_size != 0 {
                let to = (*buf).err_data.cast();
                (*buf).err_data_size = copy_data(data, to, (*buf).err_data_size);
            } else {
                (*buf).err_data = data.as_ptr().cast_mut().cast();
                (*buf).err_data_size = data.len();
            }
        }
        Ok(size_of::<fi_eq_err_entry>().cast_signed())
    })
}

/// `fi_eq_write(3)`
unsafe extern "C" fn write(
    eq: *mut fid_eq,
    event: u32,
    buf: *const c_void,
    len: usize,
    flags: u64,
) -> isize {
    // SAFETY: a queue by the contract of fi_eq_write(3).
    let eq = unsafe { object::<Eq>(eq) };
    on(eq, |eq| {
        if !eq.writable || (buf.is_null() && len != 0) {
            return Err(FiErrno::EINVAL);
        }
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let bytes = if len == 0 {
            &[][..]
        } else {
            // SAFETY: `buf` has `len` bytes.
            unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), len) }
        };
        eq.engine.write(event, bytes, None);
        Ok(len.cast_signed())
    })
}

/// The connection manager's codes are reasons of rejections, or errno values.
unsafe extern "C" fn strerror(
    _eq: *mut fid_eq,
    prov_errno: c_int,
    _err_data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: strerror returns a C string.
    let errno = || unsafe { CStr::from_ptr(libc::strerror(prov_errno)) };
    let text = EqError::text(prov_errno).unwrap_or_else(errno);
    // SAFETY: `buf` is NULL or has `len` bytes.
    unsafe { copy_text(text, buf, len) };
    text.as_ptr()
}

unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let eq = unsafe { object::<Eq>(handle) };
    on(eq, |eq| {
        // SAFETY: the argument of the command, by the contract of fi_control(3).
        unsafe { wait_control(command, arg, eq.engine.fd(), eq.engine.wait_kind()) }
    })
}
