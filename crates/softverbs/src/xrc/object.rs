//! `ibv_open_xrcd(3)` and `ibv_close_xrcd(3)`: handles of XRC domains.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::{
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, IBV_XRCD_INIT_ATTR_RESERVED, ibv_context,
    ibv_xrcd, ibv_xrcd_init_attr,
};

use super::Membership;
use super::directory::Name;
use crate::object::Context;
use crate::sync::Arc;
use crate::sys::{self, Errno, Res};

/// A handle of an XRC domain. The C object is the first field.
#[repr(C)]
pub(crate) struct Xrcd {
    object: ibv_xrcd,
    pub(crate) membership: Arc<Membership>,
    /// Number of queue pairs and shared receive queues of the domain.
    pub(crate) children: AtomicU32,
    /// The open file keeps its inode number from being reused while the handle exists.
    _file: Option<OwnedFd>,
}

impl Xrcd {
    /// The handle of a C object.
    ///
    /// # Safety
    /// `xrcd` must come from [`open`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(xrcd: *mut ibv_xrcd) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*xrcd.cast::<Self>() }
    }

    /// The context that opened it.
    pub(crate) fn context(&self) -> *mut ibv_context {
        self.object.context
    }
}

/// `ibv_open_xrcd(3)`. Blocks on the locks of other processes for up to 5 s.
///
/// # Errors
/// - `EINVAL`: no descriptor or no flags in `comp_mask`; or `O_EXCL`, and a domain exists for the
///   file.
/// - `EOPNOTSUPP`: attributes of later releases.
/// - `EBADF`: not a descriptor.
/// - `EAGAIN`: no domain exists for the file, and no `O_CREAT`.
/// - `EBUSY`, `ENOMEM`, `EMFILE`.
///
/// # Safety
/// The context must be live.
pub(crate) unsafe fn open(
    context: *mut ibv_context,
    init: &ibv_xrcd_init_attr,
) -> Res<*mut ibv_xrcd> {
    // SAFETY: the caller promises a live context.
    let owner = unsafe { Context::from_ptr(context) };
    let process = owner.live()?;
    if init.comp_mask >= IBV_XRCD_INIT_ATTR_RESERVED {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    if init.comp_mask & needed != needed {
        return Err(Errno(libc::EINVAL));
    }
    let (file, name) = if init.fd == -1 {
        (None, None)
    } else if init.fd < 0 {
        return Err(Errno(libc::EBADF));
    } else {
        // SAFETY: the caller's descriptor, open during the call; if it is none, the kernel refuses
        // it.
        let given = unsafe { BorrowedFd::borrow_raw(init.fd) };
        let file = given.try_clone_to_owned()?;
        let name = sys::name_of(&file)?;
        (Some(file), Some(name))
    };
    let name = Name {
        node: process.node,
        file: name,
    };
    let create = init.oflags & libc::O_CREAT != 0;
    let exclusive = init.oflags & libc::O_EXCL != 0;
    let room = sys::room()?;
    let membership = process.domains.open(process, name, create, exclusive)?;
    owner.children.fetch_add(1, Ordering::Relaxed);
    let xrcd = Xrcd {
        object: ibv_xrcd { context },
        membership,
        children: AtomicU32::new(0),
        _file: file,
    };
    Ok(Box::into_raw(Box::write(room, xrcd)).cast())
}

/// `ibv_close_xrcd(3)`.
///
/// # Errors
/// `EBUSY`: queue pairs or shared receive queues that were created with this handle exist.
///
/// # Safety
/// `xrcd` must be live; success frees it.
pub(crate) unsafe fn close(xrcd: *mut ibv_xrcd) -> Res<()> {
    // SAFETY: the caller promises a live handle, whose context is live.
    let (this, owner) = unsafe { (Xrcd::from_ptr(xrcd), Context::from_ptr((*xrcd).context)) };
    let process = owner.live()?;
    // Acquire: the last child has released its reference to the membership.
    if this.children.load(Ordering::Acquire) > 0 {
        return Err(Errno(libc::EBUSY));
    }
    owner.children.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: from `Box::into_raw` in `open`, and no child refers to it.
    let this = unsafe { Box::from_raw(xrcd.cast::<Xrcd>()) };
    process.domains.leave(this.membership);
    Ok(())
}
