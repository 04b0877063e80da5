//! The guard around every C entry point: it converts a panic of the body to an errno, and the
//! result to the form in the function's man page.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sys::{Errno, Res};

/// Runs an entry's body; a panic becomes `EFAULT` and never reaches C.
#[inline]
pub(crate) fn guard<T>(body: impl FnOnce() -> Res<T>) -> Res<T> {
    // Objects stay usable after a panic: locks of this crate are released by unwinding.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        #[cfg(any(test, fuzzing))]
        PANICKED.store(true, std::sync::atomic::Ordering::Relaxed);
        Err(Errno(libc::EFAULT))
    })
}

/// Whether the body of an entry has panicked; the caller gets an errno only.
#[cfg(any(test, fuzzing))]
pub(crate) static PANICKED: std::sync::atomic::AtomicBool =
    std::sync::atomic::AtomicBool::new(false);

/// 0, or the errno, which is left in `errno` as well.
#[inline]
pub(crate) fn status(body: impl FnOnce() -> Res<()>) -> i32 {
    match guard(body) {
        Ok(()) => 0,
        Err(error) => {
            error.set();
            error.0
        }
    }
}

/// The errno that a body gives, or `EFAULT` for a panic.
pub(crate) fn errno_of(body: impl FnOnce() -> i32) -> i32 {
    guard(|| Ok(body())).unwrap_or(libc::EFAULT)
}

/// Runs a body without a result.
pub(crate) fn void(body: impl FnOnce()) {
    let _: Res<()> = guard(|| {
        body();
        Ok(())
    });
}

/// A pointer, or NULL with `errno`.
pub(crate) fn pointer<T>(body: impl FnOnce() -> Res<*mut T>) -> *mut T {
    match guard(body) {
        Ok(pointer) => pointer,
        Err(error) => {
            error.set();
            std::ptr::null_mut()
        }
    }
}

/// `EINVAL` for NULL.
pub(crate) fn non_null<T>(pointer: *const T) -> Res<()> {
    if pointer.is_null() {
        Err(Errno(libc::EINVAL))
    } else {
        Ok(())
    }
}
