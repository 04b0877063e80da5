//! Protection domains.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use rdma_core_sys::{ibv_context, ibv_pd};

use crate::dm::domain;
use crate::entry::{pointer, status};
use crate::object::{Context, Pd, Td};
use crate::sys::{Errno, room};

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
        let process = context.live()?;
        if this.children.load(Ordering::Relaxed) > 0 {
            return Err(Errno(libc::EBUSY));
        }
        if this.import.is_some() {
            // SAFETY: the caller promises that it is live, and is done with it.
            unsafe { Pd::end_imported(pd) };
            return Ok(());
        }
        context.children.fetch_sub(1, Ordering::Relaxed);
        domain::hide(&process.segment, this.number);
        let (base, thread) = this.made_of;
        // SAFETY: both are kept by this one; NULL has nothing to leave.
        unsafe {
            if !base.is_null() {
                let base = Pd::from_ptr(base);
                base.children.fetch_sub(1, Ordering::Relaxed);
            }
            Td::leave(thread);
        }
        // SAFETY: made by `Box::into_raw` in `Pd::make`.
        drop(unsafe { Box::from_raw(pd.cast::<Pd>()) });
        Ok(())
    })
}
