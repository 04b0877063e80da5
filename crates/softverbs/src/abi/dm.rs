//! Device memory: `ibv_alloc_dm(3)`. The offsets and lengths of copies are multiples of 4, as on
//! mlx5.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::dm::{Buffer, BufferReference};
use crate::entry::{non_null, pointer, status};
use crate::object::{Context, Dm, Pd, region_object};
use crate::region::{Range, access};
use crate::sys::{Errno, Res, room};

/// Device memory is page-aligned.
const MAX_LOG_ALIGN: u32 = 12;

/// Sets `EINVAL` for a length of 0 or for attributes or an alignment that are not supported,
/// `ENOMEM` for more than is available. A forked child may allocate with its parent's context; the
/// memory is private to the child.
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
        Dm::count(process, counted)?;
        let made = make_buffer(owner, attr.length);
        let (buffer_reference, shown) = made.inspect_err(|_| Dm::uncount(process, counted))?;
        owner.children.fetch_add(1, Ordering::Relaxed);
        Ok(Dm::make(room, context, buffer_reference, counted, shown))
    })
}

fn make_buffer(owner: &Context, len: usize) -> Res<(BufferReference, bool)> {
    let buffer = Buffer::create(len)?;
    if owner.process.forked() {
        // The parent's tables do not belong to this process.
        return Ok((BufferReference::alone(buffer)?, false));
    }
    let (buffers, segment) = (&owner.process.buffers, &owner.process.segment);
    Ok((buffers.add(segment, buffer, owner.origin.context)?, true))
}

/// `EBUSY`: a region of it is registered. `EIO`: it is the memory of the parent of this forked
/// child.
pub(super) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: the caller promises live memory, which it no longer uses.
    status(|| unsafe { Dm::end(dm) })
}

/// Access flags that a region of device memory may have. Its IOVA begins at zero.
const OFFERED: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_ZERO_BASED;

/// Sets `EINVAL` for a range that is not inside, for other rights, or without
/// `IBV_ACCESS_ZERO_BASED`.
pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    pointer(|| {
        let (domain, this, context) =
            // SAFETY: the caller promises live objects, whose contexts are live.
            unsafe { (Pd::from_ptr(pd), Dm::from_ptr(dm), (*pd).context) };
        // SAFETY: the caller promises live objects, whose contexts are live.
        let process = unsafe { Context::from_ptr(context) }.live()?;
        let access = access::check(access)?;
        let len = this.buffer_reference.buffer.len as u64;
        let inside = offset <= len && length as u64 <= len - offset;
        let zero = access & IBV_ACCESS_ZERO_BASED != 0;
        if access & !OFFERED != 0 || !zero || !inside || !this.shown {
            return Err(Errno(libc::EINVAL));
        }
        let range = Range {
            addr: this.buffer_reference.buffer.addr() + offset,
            len: length as u64,
            iova: 0,
        };
        let room = room()?;
        let key = process.add_region(domain.number, range, access)?;
        domain.children.fetch_add(1, Ordering::Relaxed);
        let nowhere = std::ptr::null_mut();
        Ok(region_object(room, context, pd, nowhere, length, key, key))
    })
}
