//! Limits of the process: locked memory, sizes of files, descriptors.

use std::os::fd::RawFd;

/// `RLIMIT_MEMLOCK` in bytes; `None`: unlimited.
pub(crate) fn memlock() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is writable.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (ret == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// `RLIMIT_FSIZE`, the largest size that this process may give a file, in bytes; `None`: unlimited.
pub(crate) fn fsize() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is writable.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    (ret == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Whether a descriptor that has just been opened shows that less than one `share`th of
/// `RLIMIT_NOFILE` is in use: the kernel assigns the lowest unused number.
pub(crate) fn is_spare(fd: RawFd, share: u64) -> bool {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is writable.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    ret == 0 && u64::from(fd.cast_unsigned()) < limit.rlim_cur / share
}

/// `struct __user_cap_header_struct` and two of `struct __user_cap_data_struct`
/// (linux/capability.h).
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const VERSION_3: u32 = 0x2008_0522;
const CAP_IPC_LOCK: u32 = 14;

/// Whether the calling thread may exceed the limit.
pub(crate) fn may_exceed_memlock() -> bool {
    let mut header = Header {
        version: VERSION_3,
        pid: 0,
    };
    let mut data = [Data::default(), Data::default()];
    // SAFETY: both are as this version of the call has them, and writable.
    let ret = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) };
    ret == 0 && data[0].effective & 1 << CAP_IPC_LOCK != 0
}
