//! Device memory.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::Context;
use crate::dm::BufferReference;
use crate::entry::errno_of;
use crate::process::Process;
use crate::sys::{Errno, Res};

/// Maximum of device memory of one process, in bytes.
pub(crate) const MAX_DM: u64 = 128 << 20;

/// The C object comes first.
#[repr(C)]
pub(crate) struct Dm {
    object: ibv_dm,
    pub(crate) buffer_reference: BufferReference,
    /// Bytes of it that count as device memory of this process.
    counted: u64,
    /// Whether it is published to peers. Memory that a forked child allocates is not.
    pub(crate) shown: bool,
}

impl Dm {
    pub(crate) fn make(
        room: Box<MaybeUninit<Self>>,
        context: *mut ibv_context,
        buffer_reference: BufferReference,
        counted: u64,
        shown: bool,
    ) -> *mut ibv_dm {
        let object = ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: IBV_DM_MASK_HANDLE,
            handle: buffer_reference.handle(),
        };
        let this = Self {
            object,
            buffer_reference,
            counted,
            shown,
        };
        Box::into_raw(Box::write(room, this)).cast()
    }

    /// # Safety
    /// `dm` must come from [`Self::make`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(dm: *mut ibv_dm) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*dm.cast::<Self>() }
    }

    /// The address of a range of it.
    ///
    /// # Errors
    /// As mlx5 (`mlx5_access_dm` of `providers/mlx5/verbs.c`): `EFAULT` for a range that is not
    /// inside, `EINVAL` for an offset or a length that is not a multiple of 4.
    fn place(&self, offset: u64, length: usize) -> Res<*mut u8> {
        let len = self.buffer_reference.buffer.len as u64;
        let inside = offset <= len && length as u64 <= len - offset;
        if !inside {
            return Err(Errno(libc::EFAULT));
        }
        if !offset.is_multiple_of(4) || !length.is_multiple_of(4) {
            return Err(Errno(libc::EINVAL));
        }
        Ok(self
            .buffer_reference
            .buffer
            .map
            .bytes(offset as usize, length))
    }

    /// # Errors
    /// `EBUSY`: a region of it is registered. `EIO`: it is the memory of the parent of this forked
    /// child.
    ///
    /// # Safety
    /// `dm` must be live; it is freed on success.
    pub(crate) unsafe fn end(dm: *mut ibv_dm) -> Res<()> {
        // SAFETY: the caller promises that `dm` is live; its context outlives it.
        let (this, context) = unsafe { (Self::from_ptr(dm), Context::from_ptr((*dm).context)) };
        let process = context.process;
        // a forked child may free what it has allocated itself
        if this.shown {
            process
                .live()?
                .buffers
                .release(&process.segment, this.buffer_reference.stamp)?;
        }
        Self::uncount(process, this.counted);
        context.children.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by `Box::into_raw` in `make`.
        drop(unsafe { Box::from_raw(dm.cast::<Self>()) });
        Ok(())
    }

    /// Counts `len` bytes as device memory of this process.
    ///
    /// # Errors
    /// `ENOMEM`: the sum would exceed [`MAX_DM`].
    pub(crate) fn count(process: &Process, len: u64) -> Res<()> {
        let used = &process.buffers.device_memory;
        let more = |used: u64| used.checked_add(len).filter(|&sum| sum <= MAX_DM);
        match used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(()),
            Err(_) => Err(Errno(libc::ENOMEM)),
        }
    }

    /// Undoes [`Self::count`].
    pub(crate) fn uncount(process: &Process, len: u64) {
        process
            .buffers
            .device_memory
            .fetch_sub(len, Ordering::Relaxed);
    }
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
