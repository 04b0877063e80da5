//! Protection domains.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::{ibv_context, ibv_pd, ibv_td};

use super::context::Context;
use super::{pointer, status, td};
use crate::dm::domain;
use crate::sys::{Errno, room};

/// A protection domain. The C object comes first.
#[repr(C)]
pub(crate) struct Pd {
    object: ibv_pd,
    /// Unlike any other of this process.
    pub(crate) number: u32,
    /// Objects that were made in it.
    pub(crate) children: AtomicU32,
    /// What a parent domain was made of; NULL for others.
    made_of: (*mut ibv_pd, *mut ibv_td),
    pub(crate) import: Option<Import>,
}

/// Where an imported domain comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Import {
    /// By which its process knows it.
    pub(crate) handle: u32,
    /// Of another process.
    pub(crate) foreign: bool,
}

impl Pd {
    /// # Safety
    /// `pd` must come from [`alloc_pd`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(pd: *mut ibv_pd) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*pd.cast::<Self>() }
    }

    /// A new domain as a C object, in its [`room`].
    pub(super) fn make(
        room: Box<MaybeUninit<Self>>,
        context: *mut ibv_context,
        number: u32,
        made_of: (*mut ibv_pd, *mut ibv_td),
    ) -> *mut ibv_pd {
        let this = Self {
            object: ibv_pd {
                context,
                handle: number,
            },
            number,
            children: AtomicU32::new(0),
            made_of,
            import: None,
        };
        Box::into_raw(Box::write(room, this)).cast()
    }
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: the caller promises a live context.
        let owner = unsafe { Context::from_ptr(context) };
        let process = owner.live()?;
        let room = room()?;
        let number = process.next_pd.fetch_add(1, Ordering::Relaxed);
        domain::show(&process.segment, number, owner.origin.context)?;
        owner.children.fetch_add(1, Ordering::Relaxed);
        let made_of = (std::ptr::null_mut(), std::ptr::null_mut());
        Ok(Pd::make(room, context, number, made_of))
    })
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live domain, whose context is live.
        let (this, context) = unsafe { (Pd::from_ptr(pd), Context::from_ptr((*pd).context)) };
        context.live()?;
        if this.children.load(Ordering::Relaxed) > 0 {
            return Err(Errno(libc::EBUSY));
        }
        if this.import.is_some() {
            // SAFETY: the caller promises that it is live, and is done with it.
            unsafe { super::import::drop_pd(pd) };
            return Ok(());
        }
        context.children.fetch_sub(1, Ordering::Relaxed);
        if !context.process.forked() {
            domain::hide(&context.process.segment, this.number);
        }
        let (base, thread) = this.made_of;
        // SAFETY: both are kept by this one; NULL has nothing to leave.
        unsafe {
            if !base.is_null() {
                let base = Pd::from_ptr(base);
                base.children.fetch_sub(1, Ordering::Relaxed);
            }
            td::leave(thread);
        }
        // SAFETY: made by `Box::into_raw` in `Pd::make`.
        drop(unsafe { Box::from_raw(pd.cast::<Pd>()) });
        Ok(())
    })
}
