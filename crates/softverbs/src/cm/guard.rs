//! Panics: no panic of a call leaves it, and the locks that it held stay usable.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::c_int;

use crate::sys::{Errno, Res};

/// Runs the body of an entry point. A panic is a defect of this crate, and must not end the
/// application.
fn guard<T>(body: impl FnOnce() -> Res<T>) -> Res<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Errno(libc::EIO)))
}

/// The result in C: 0, or −1 with `errno`.
pub(super) fn status(body: impl FnOnce() -> Res<()>) -> c_int {
    match guard(body) {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// The result in C: a pointer, or NULL with `errno`.
pub(super) fn pointer<T>(body: impl FnOnce() -> Res<*mut T>) -> *mut T {
    guard(body).unwrap_or_else(|errno| {
        errno.set();
        null_mut()
    })
}

/// Runs the body of a function that returns no error.
pub(super) fn void(body: impl FnOnce()) {
    // a caught panic cannot be reported to the caller
    let _ = guard(|| {
        body();
        Ok(())
    });
}

/// Takes a lock. A panic in another call must not make every later call panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
