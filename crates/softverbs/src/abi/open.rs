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
        let command = origin.to_file()?;
        Context::make(operations, device, process, origin, || command)
    })
}

/// Sets `EBADF`; `EINVAL`: the descriptor is not that of a context; `ESRCH`: its process has ended;
/// `EACCES`: its process cannot be reached. The descriptor is closed with the context; after an
/// error it stays open, and is still the caller's.
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
        // SAFETY: the caller passes its ownership to the context, if there is one.
        let command = || unsafe { OwnedFd::from_raw_fd(cmd_fd) };
        let operations = operations::table();
        Context::make(operations, device::device(), process, origin, command)
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::sys;

    /// A descriptor that the caller has after an error it closes once.
    #[test]
    fn an_import_that_fails_leaves_the_descriptor_open() {
        let process = Process::open().unwrap();
        let signature = process.signature();
        let origin = Origin {
            slot: signature.slot,
            cookie: signature.cookie,
            context: 1,
        };
        let file = origin.to_file().unwrap();
        // SAFETY: all zeros is a value of it; the calls get valid structures.
        let context = unsafe {
            let mut old: libc::rlimit = std::mem::zeroed();
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut old), 0);
            let none = libc::rlimit { rlim_cur: 0, ..old };
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none), 0);
            let context = import_device(file.as_raw_fd());
            let error = sys::Errno::last();
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const old), 0);
            assert_eq!(error, Errno(libc::EMFILE));
            context
        };
        assert!(context.is_null());
        assert_eq!(sys::inode_of(&file).map(|_| ()), Ok(()), "closed");
    }
}
