//! `ibv_open_xrcd` and `ibv_close_xrcd`: a handle on a domain.

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

/// A handle on a domain. The C object comes first.
#[repr(C)]
pub(crate) struct Xrcd {
    object: ibv_xrcd,
    pub(crate) membership: Arc<Membership>,
    /// Queue pairs and shared receive queues that were made by it.
    pub(crate) children: AtomicU32,
    /// Keeps the inode's number from another file.
    _file: Option<OwnedFd>,
}

impl Xrcd {
    /// # Safety
    /// `xrcd` must come from [`open`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(xrcd: *mut ibv_xrcd) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*xrcd.cast::<Self>() }
    }

    /// The context that it was opened by.
    pub(crate) fn context(&self) -> *mut ibv_context {
        self.object.context
    }
}

/// `ibv_open_xrcd`.
///
/// # Errors
/// `EINVAL` without descriptor and flags, or with `O_EXCL` where the file has a domain; `EOPNOTSUPP` for attributes of later
/// releases; `EBADF`; `EAGAIN` without `O_CREAT` where it has none; `EBUSY`, `ENOMEM`, `EMFILE`.
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
        // SAFETY: the caller's descriptor, open as long as the call takes; the kernel says if it is none.
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

/// `ibv_close_xrcd`.
///
/// # Errors
/// `EBUSY` while queue pairs or shared receive queues that were made by this handle exist.
///
/// # Safety
/// `xrcd` must be live, and is gone after success.
pub(crate) unsafe fn close(xrcd: *mut ibv_xrcd) -> Res<()> {
    // SAFETY: the caller promises a live handle, whose context is live.
    let (this, owner) = unsafe { (Xrcd::from_ptr(xrcd), Context::from_ptr((*xrcd).context)) };
    let process = owner.live()?;
    if this.children.load(Ordering::Relaxed) > 0 {
        return Err(Errno(libc::EBUSY));
    }
    owner.children.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: made by `Box::into_raw` in `open`, and nothing refers to it.
    let this = unsafe { Box::from_raw(xrcd.cast::<Xrcd>()) };
    process.domains.leave(this.membership);
    Ok(())
}
