//! `softverbs` under the exported names of libibverbs, so that programs built for rdma-core run on
//! it without changes and without being built again. For tests only: rdma-core's private ABI
//! changes with each release, and this library is not installed.
//!
//! The crate is a static library. `build-dropin` links it to `libibverbs.so.1` with the symbol
//! versions of the installed libibverbs. It also makes stubs for the functions that are not here:
//! the interface of driver libraries, the calls from before 2006 (`IBVERBS_1.0`), and functions of
//! the installed release that this crate does not have.
//!
//! Invariant: every exported function has the name and the signature of rdma-core's header, except
//! those of `ucm`, which stand for system calls. Only `ucm` has state: the descriptors and ids of
//! the process.

#[allow(
    unsafe_code,
    reason = "exports C functions and calls through C function pointers"
)]
mod forward;
#[allow(unsafe_code, reason = "exports C functions")]
mod rate;
#[allow(
    unsafe_code,
    reason = "exports C functions that take C strings and buffers"
)]
mod sysfs;
#[allow(
    unsafe_code,
    reason = "exports C functions, and calls through C function pointers"
)]
mod ucm;

use std::ffi::c_int;

/// Sets `errno`, for results that cannot contain a reason.
fn set_errno(errno: c_int) {
    #[allow(unsafe_code, reason = "errno has no safe setter")]
    // SAFETY: glibc's pointer to this thread's errno is always valid.
    unsafe {
        *libc::__errno_location() = errno;
    }
}
