//! Buffers of `ibv_alloc_buf(3)`.

use rdma_core_sys::*;

use crate::dm::BufferReference;
use crate::entry::non_null;
use crate::sys::{Errno, Res};

/// The object behind an `ibv_buf`.
pub(crate) struct Buf {
    pub(crate) pd: *mut ibv_pd,
    pub(crate) buffer_reference: BufferReference,
}

impl Buf {
    /// Checks the parameters of a registration by handle against `ibv_alloc_buf(3)`.
    ///
    /// # Errors
    /// `EINVAL`: another domain, no address, an additional file, or a range outside the buffer.
    ///
    /// # Safety
    /// The buffer must be live.
    pub(crate) unsafe fn check(pd: *mut ibv_pd, init: &ibv_mr_init_attr) -> Res<()> {
        non_null(init.buf)?;
        // SAFETY: not NULL; the caller promises a live buffer.
        let this = unsafe { &*init.buf.cast::<Self>() };
        let has = |bit: u32| init.comp_mask & u64::from(bit) != 0;
        let room = this.buffer_reference.buffer.len as u64;
        let offset = (init.addr as u64).wrapping_sub(this.buffer_reference.buffer.addr());
        let inside = offset <= room && init.length as u64 <= room - offset;
        let file = IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET;
        if pd == this.pd && has(IBV_REG_MR_MASK_ADDR) && !has(file) && inside {
            Ok(())
        } else {
            Err(Errno(libc::EINVAL))
        }
    }
}
