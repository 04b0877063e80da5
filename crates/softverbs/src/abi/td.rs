//! Thread domains, and the parent domains that join them to protection domains. Locks of this
//! device are private to each object and cheap, so a thread domain changes nothing; and no object
//! lies in memory that an application could provide, so allocators are never called.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::*;

use crate::entry::{non_null, pointer, status};
use crate::object::{Context, Pd, Td};
use crate::sys::{Errno, room, try_box};

pub(super) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    pointer(|| {
        non_null(attr)?;
        // SAFETY: the caller promises a live context and valid attributes.
        let (owner, attr) = unsafe { (Context::from_ptr(context), &*attr) };
        owner.live()?;
        if attr.comp_mask != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let td = try_box(Td {
            object: ibv_td { context },
            users: AtomicU32::new(0),
        })?;
        owner.children.fetch_add(1, Ordering::Relaxed);
        Ok(Box::into_raw(td).cast())
    })
}

pub(super) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live domain, whose context is live.
        unsafe {
            Context::from_ptr((*td).context).live()?;
            if (*td.cast::<Td>()).users.load(Ordering::Relaxed) > 0 {
                return Err(Errno(libc::EBUSY));
            }
            Context::from_ptr((*td).context)
                .children
                .fetch_sub(1, Ordering::Relaxed);
            // Made by `Box::into_raw` in `alloc_td`.
            drop(Box::from_raw(td.cast::<Td>()));
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    pointer(|| {
        non_null(attr)?;
        // SAFETY: the caller promises a live context and valid attributes.
        let (owner, attr) = unsafe { (Context::from_ptr(context), &*attr) };
        owner.live()?;
        non_null(attr.pd)?;
        let known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        if attr.comp_mask & !known != 0 {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let allocators = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0;
        if allocators && (attr.alloc.is_none() || attr.free.is_none()) {
            return Err(Errno(libc::EINVAL));
        }
        let room = room()?;
        // SAFETY: NULL, or a live thread domain.
        if let Some(td) = unsafe { attr.td.cast::<Td>().as_ref() } {
            td.users.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller promises a live domain.
        let base = unsafe { Pd::from_ptr(attr.pd) };
        base.children.fetch_add(1, Ordering::Relaxed);
        owner.children.fetch_add(1, Ordering::Relaxed);
        Ok(Pd::make(room, context, base.number, (attr.pd, attr.td)))
    })
}
