//! Opening the device, also by the descriptor of another context: `ibv_open_device(3)`,
//! `ibv_import_device(3)`.

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::{device, operations};
use crate::dm::Origin;
use crate::entry::pointer;
use crate::object::{Context, origin_peer};
use crate::process::Process;
use crate::sys::Errno;

pub(super) unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(|| {
        if !device::is_device(device) {
            return Err(Errno(libc::EINVAL));
        }
        let process = Process::open()?;
        let signature = process.signature();
        let origin = Origin {
            slot: signature.slot,
            cookie: signature.cookie,
            context: process.next_context.fetch_add(1, Ordering::Relaxed),
        };
        let operations = operations::table();
        Context::make(operations, device, process, origin, origin.to_file()?)
    })
}

/// Sets `EBADF`; `EINVAL`: the descriptor is not that of a context; `ESRCH`: its process has ended;
/// `EACCES`: its process cannot be reached. The descriptor is closed with the context.
pub(super) unsafe extern "C" fn import_device(cmd_fd: c_int) -> *mut ibv_context {
    pointer(|| {
        if cmd_fd < 0 {
            return Err(Errno(libc::EBADF));
        }
        // SAFETY: the caller promises an open descriptor; a wrong one is an error of the kernel.
        let origin = Origin::of_file(unsafe { BorrowedFd::borrow_raw(cmd_fd) })?;
        let process = Process::open()?;
        if !origin.is_of(process.slot, &process.identity) {
            origin_peer(process, origin)?;
        }
        // SAFETY: the caller passes its ownership.
        let command = unsafe { OwnedFd::from_raw_fd(cmd_fd) };
        let operations = operations::table();
        Context::make(operations, device::device(), process, origin, command)
    })
}
