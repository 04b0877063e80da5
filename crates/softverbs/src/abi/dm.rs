//! Device memory: `ibv_alloc_dm(3)`. The offsets and lengths of copies are multiples of 4, as on mlx5.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::context::Context;
use super::pd::Pd;
use super::{errno_of, mr, non_null, pointer, status};
use crate::dm::{Buffer, Held};
use crate::process::Process;
use crate::region::{Range, access};
use crate::sys::{Errno, Res, room};

/// Device memory of one process, in bytes.
pub(super) const MAX_DM: u64 = 128 << 20;
/// Memory begins at a page.
const MAX_LOG_ALIGN: u32 = 12;

/// The C object comes first.
#[repr(C)]
pub(super) struct Dm {
    object: ibv_dm,
    held: Held,
    /// Counted as device memory of this process.
    counted: u64,
    /// Known to peers. What a forked child made is not.
    shown: bool,
}

impl Dm {
    pub(super) fn make(
        room: Box<MaybeUninit<Self>>,
        context: *mut ibv_context,
        held: Held,
        counted: u64,
        shown: bool,
    ) -> *mut ibv_dm {
        let object = ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: IBV_DM_MASK_HANDLE,
            handle: held.handle(),
        };
        let this = Self {
            object,
            held,
            counted,
            shown,
        };
        Box::into_raw(Box::write(room, this)).cast()
    }

    /// # Safety
    /// `dm` must come from [`Self::make`] and be live.
    unsafe fn from_ptr<'a>(dm: *mut ibv_dm) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*dm.cast::<Self>() }
    }

    /// Where a range of it is.
    fn place(&self, offset: u64, length: usize) -> Res<*mut u8> {
        let len = self.held.buffer.len as u64;
        let inside = offset <= len && length as u64 <= len - offset;
        if !inside || !offset.is_multiple_of(4) || !length.is_multiple_of(4) {
            return Err(Errno(libc::EFAULT));
        }
        Ok(self.held.buffer.map.bytes(offset as usize, length))
    }
}

/// Sets `EINVAL` for a length of 0, attributes or an alignment that are not offered, `ENOMEM` for more than
/// is left. A forked child may allocate with its parent's context; nobody else sees that memory.
pub(super) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    pointer(|| {
        non_null(attr)?;
        // SAFETY: the caller promises a live context and valid attributes.
        let (owner, attr) = unsafe { (Context::from_ptr(context), *attr) };
        if attr.comp_mask != 0 || attr.log_align_req > MAX_LOG_ALIGN {
            return Err(Errno(libc::EINVAL));
        }
        let process = owner.process;
        let room = room()?;
        let counted = attr.length as u64;
        take_memory(process, counted)?;
        let made = make_buffer(owner, attr.length);
        let (held, shown) = made.inspect_err(|_| give_memory(process, counted))?;
        owner.children.fetch_add(1, Ordering::Relaxed);
        Ok(Dm::make(room, context, held, counted, shown))
    })
}

fn make_buffer(owner: &Context, len: usize) -> Res<(Held, bool)> {
    let buffer = Buffer::create(len)?;
    if owner.process.forked() {
        // The parent's tables are not this process's.
        return Ok((Held::alone(buffer)?, false));
    }
    let (buffers, segment) = (&owner.process.buffers, &owner.process.segment);
    Ok((buffers.add(segment, buffer, owner.origin.context)?, true))
}

fn take_memory(process: &Process, len: u64) -> Res<()> {
    let used = &process.buffers.device_memory;
    let more = |used: u64| used.checked_add(len).filter(|&sum| sum <= MAX_DM);
    match used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
        Ok(_) => Ok(()),
        Err(_) => Err(Errno(libc::ENOMEM)),
    }
}

fn give_memory(process: &Process, len: u64) {
    process
        .buffers
        .device_memory
        .fetch_sub(len, Ordering::Relaxed);
}

/// `EBUSY` while a region of it is registered.
pub(super) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: the caller promises live memory, and is done with it.
    status(|| unsafe { end(dm) })
}

/// # Safety
/// `dm` must be live, and is gone afterwards.
pub(super) unsafe fn end(dm: *mut ibv_dm) -> Res<()> {
    // SAFETY: the caller promises that; a context outlives its memory.
    let (this, context) = unsafe { (Dm::from_ptr(dm), Context::from_ptr((*dm).context)) };
    let process = context.process;
    if this.shown && process.forked() {
        // The parent's: it is not mapped here, so there is nothing to take down.
        return Ok(());
    }
    if this.shown {
        process.buffers.let_go(&process.segment, this.held.stamp)?;
    }
    give_memory(process, this.counted);
    context.children.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: made by `Box::into_raw` in `make`.
    drop(unsafe { Box::from_raw(dm.cast::<Dm>()) });
    Ok(())
}

unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: the caller promises live memory and as many readable bytes; the place is inside.
    errno_of(|| unsafe {
        match Dm::from_ptr(dm).place(offset, length) {
            Ok(to) => {
                to.copy_from(from.cast(), length);
                0
            }
            Err(error) => error.0,
        }
    })
}

unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: the caller promises live memory and as many writable bytes; the place is inside.
    errno_of(|| unsafe {
        match Dm::from_ptr(dm).place(offset, length) {
            Ok(from) => {
                to.cast::<u8>().copy_from(from, length);
                0
            }
            Err(error) => error.0,
        }
    })
}

/// What a region of device memory may allow: it is named from zero.
const OFFERED: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_ZERO_BASED;

/// Sets `EINVAL` for a range outside, other rights, or without `IBV_ACCESS_ZERO_BASED`.
pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: the caller promises live objects, whose contexts are live.
        let (domain, this, context) =
            unsafe { (Pd::from_ptr(pd), Dm::from_ptr(dm), (*pd).context) };
        // SAFETY: as above.
        let process = unsafe { Context::from_ptr(context) }.live()?;
        let access = access::check(access)?;
        let len = this.held.buffer.len as u64;
        let inside = offset <= len && length as u64 <= len - offset;
        let zero = access & IBV_ACCESS_ZERO_BASED != 0;
        if access & !OFFERED != 0 || !zero || !inside || !this.shown {
            return Err(Errno(libc::EINVAL));
        }
        let range = Range {
            addr: this.held.buffer.addr() + offset,
            len: length as u64,
            iova: 0,
        };
        let room = room()?;
        let key = process.add_region(domain.number, range, access)?;
        domain.children.fetch_add(1, Ordering::Relaxed);
        let nowhere = std::ptr::null_mut();
        Ok(mr::object(room, context, pd, nowhere, length, key, key))
    })
}
