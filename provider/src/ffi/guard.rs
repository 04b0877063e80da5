//! Runs the body of every entry point: errors become negative errno, a panic becomes `-FI_EOTHER`,
//! and nothing unwinds into C.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use libfabric_sys::FI_EOTHER;
use weft::errno::Result;

use crate::ffi::log::warning;

/// Whether a call on an object has panicked. The object's state may be inconsistent, so every later
/// call on it returns `-FI_EOTHER`; only closing it still works.
#[derive(Default)]
pub(crate) struct Poison(AtomicBool);

impl Poison {
    /// The state of a new object: no panic.
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    #[inline(always)]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    #[cold]
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The return type of a C function: a value, or a negative errno.
pub(crate) trait Status {
    /// The negated errno.
    fn failed(errno: i32) -> Self;
}

impl Status for c_int {
    #[inline(always)]
    fn failed(errno: i32) -> Self {
        -errno
    }
}

impl Status for isize {
    #[inline(always)]
    fn failed(errno: i32) -> Self {
        -(errno as isize)
    }
}

/// Runs `body`; its value, or the negative errno. For entry points without an object of their own.
pub(crate) fn entry<T: Status>(body: impl FnOnce() -> Result<T>) -> T {
    // The bodies touch shared state only through atomics and through locks that a panic releases.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(errno)) => T::failed(errno.code()),
        Err(_) => T::failed(FI_EOTHER),
    }
}

/// As [`entry`], for a body that works on an object: a panic poisons it. Without a panic it costs
/// one load and no call, so the fast path uses it too.
#[inline(always)]
pub(crate) fn on<T: Status>(poison: &Poison, body: impl FnOnce() -> Result<T>) -> T {
    if poison.is_set() {
        return T::failed(FI_EOTHER);
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(errno)) => T::failed(errno.code()),
        Err(_) => {
            poison.set();
            T::failed(FI_EOTHER)
        }
    }
}

/// Sends the message of every later panic in this library to the log instead of to standard error.
/// The hook belongs to this library's copy of the standard library: the hook of a Rust application
/// is unchanged.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let text = panic
            .payload()
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.payload().downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        match panic.location() {
            Some(at) => warning!(FI_LOG_CORE, "panic at {at}: {text}"),
            None => warning!(FI_LOG_CORE, "panic: {text}"),
        }
    }));
}
