//! XRC domains as fids, for `weft_mr_ops.xrcd_open`: libfabric has no such object. Endpoints are
//! bound to them by `fi_ep_bind(3)`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::verbs;
use weft::xrc::XrcDomain;

use crate::domain::Domain;
use crate::ffi::fid::{Kind, Object, User, close, header};
use crate::ffi::stub;

/// An open XRC domain.
pub(crate) struct Xrcd {
    pub(crate) engine: Arc<verbs::Xrcd>,
    /// The domain as endpoints use it.
    pub(crate) shared: Arc<XrcDomain>,
    /// That in which it was opened.
    pub(crate) domain: Arc<weft::domain::Domain>,
    _domain: User,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Xrcd>),
    ..stub::fid::<FI_ENOSYS>()
};

// SAFETY: `C` is the fid itself; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Xrcd {
    type C = fid;
    /// Not a class of libfabric.
    const CLASS: usize = usize::MAX;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(_: &mut fid) {}
    fn finish(xrcd: &Object<Self>) -> Result<()> {
        xrcd.engine.close()
    }
}

/// The file that identifies a domain, if `path` is not NULL. `oflags` determine whether it is
/// created.
///
/// # Safety
/// `path` is NULL or a C string.
unsafe fn file(path: *const c_char, oflags: c_int) -> Result<Option<File>> {
    if path.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, a C string.
    let path = unsafe { CStr::from_ptr(path) };
    let path = std::path::Path::new(path.to_str().map_err(|_| FiErrno::EINVAL)?);
    let mut options = OpenOptions::new();
    options.read(true).mode(0o600);
    if oflags & libc::O_CREAT != 0 {
        options.write(true).create(true);
    }
    Ok(Some(options.open(path)?))
}

/// # Safety
/// `path` is NULL or a C string, `fd` −1 or a descriptor, `out` writable.
pub(crate) unsafe fn open(
    domain: &Object<Domain>,
    (path, fd): (*const c_char, c_int),
    oflags: c_int,
    out: *mut *mut fid,
    context: *mut c_void,
) -> Result<()> {
    if out.is_null() || (!path.is_null() && fd >= 0) {
        return Err(FiErrno::EINVAL);
    }
    let user = domain.users.add()?;
    // SAFETY: the caller passes NULL or a C string.
    let named = unsafe { file(path, oflags)? };
    let shared = match &named {
        Some(file) => Some(file.as_fd()),
        None if fd < 0 => None,
        // SAFETY: not negative, and a descriptor by the caller's promise.
        None => Some(unsafe { BorrowedFd::borrow_raw(fd) }),
    };
    let engine = Arc::new(verbs::Xrcd::open(domain.engine.device(), shared, oflags)?);
    let shared = XrcDomain::of_application(Arc::clone(&engine), shared)?;
    let object = Object::open(
        header::<Xrcd>(context),
        Xrcd {
            engine,
            shared: Arc::new(shared),
            domain: Arc::clone(&domain.engine),
            _domain: user,
        },
    );
    // SAFETY: not NULL; the object starts with its fid.
    unsafe { *out = object.as_ptr().cast() };
    Ok(())
}
