//! Direct verbs: calls that only this device has. Programs find them in the table of functions, and
//! do not use them with other devices.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};

use rdma_core_sys::*;

use crate::dm::{Buffer, BufferReference};
use crate::entry::{guard, non_null, pointer, status};
use crate::object::Context;
use crate::process::Process;
use crate::region::{Key, odp};
use crate::sys::{Errno, Res};

struct Adopted {
    process: &'static Process,
    buffer_reference: BufferReference,
}

/// `softdv_adopt_buf`: makes `len` bytes at `addr` a buffer of the device, as if `ibv_alloc_buf(3)`
/// had made them. They are the beginning of a file that is mapped there, shared, and sealed against
/// shrinking and growing. Whatever is registered of them from now on is reached directly by peers.
/// The descriptor need not stay open, the mapping must, until `softdv_release_buf` and the end of
/// the last region.
///
/// Sets `EINVAL` for no bytes or another length than the file has, `EPERM` for a file that is not
/// sealed or not of ordinary pages, `EBADF`, `EMFILE`, `ENOMEM`.
pub(super) unsafe extern "C" fn adopt_buf(
    context: *mut ibv_context,
    fd: c_int,
    addr: *mut c_void,
    len: usize,
) -> *mut c_void {
    pointer(|| {
        non_null(context)?;
        non_null(addr)?;
        if fd < 0 {
            return Err(Errno(libc::EBADF));
        }
        // SAFETY: the caller promises a live context.
        let owner = unsafe { Context::from_ptr(context) };
        let process = owner.live()?;
        // SAFETY: the caller promises an open descriptor; a wrong one is an error of the kernel.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let file: OwnedFd = file.try_clone_to_owned().map_err(Errno::from)?;
        // SAFETY: the caller promises the mapping.
        let buffer = unsafe { Buffer::adopt(file, addr.cast(), len)? };
        let buffer_reference =
            process
                .buffers
                .add_another(&process.segment, buffer, owner.origin.context)?;
        let adopted: *mut Adopted = Box::into_raw(Box::new(Adopted {
            process,
            buffer_reference,
        }));
        Ok(adopted.cast())
    })
}

/// `softdv_release_buf`: undoes `softdv_adopt_buf`. Remaining regions stay valid.
pub(super) unsafe extern "C" fn release_buf(adopted: *mut c_void) {
    let _: Res<()> = guard(|| {
        non_null(adopted)?;
        // SAFETY: of `adopt_buf`, and the caller is done with it.
        let this = unsafe { Box::from_raw(adopted.cast::<Adopted>()) };
        let process = this.process;
        if process.forked() {
            // The parent's, and not in the table here.
            std::mem::forget(this);
            return Ok(());
        }
        process
            .buffers
            .leave_to_regions(&process.segment, this.buffer_reference.stamp);
        Ok(())
    });
}

/// `softdv_page_prefetch`: how many pages of a region `ibv_advise_mr(3)` has made present since it
/// was registered, those that were there already and those of each call counted again: what `rdma
/// statistic show mr` has as `page_prefetch` on mlx5. Pages that a transfer touches are the
/// kernel's affair, in whichever process copies, and are not counted.
///
/// Returns `EOPNOTSUPP` if the device does not page on demand. Thread safe.
pub(super) unsafe extern "C" fn page_prefetch(mr: *mut ibv_mr, pages: *mut u64) -> c_int {
    status(|| {
        non_null(mr)?;
        non_null(pages)?;
        // SAFETY: the caller promises a live region, whose context is live.
        let (context, key) = unsafe { (Context::from_ptr((*mr).context), Key((*mr).lkey)) };
        let process = context.live()?;
        if !odp::enabled() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        // SAFETY: not NULL; the caller has room for it.
        unsafe { *pages = process.regions.prefetched(key) };
        Ok(())
    })
}
