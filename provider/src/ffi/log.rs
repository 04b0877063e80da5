//! Log lines through the host's `fi_log`.
//!
//! A line is formatted only if `fi_log_enabled` returns true. Not for the fast path.

use std::cell::Cell;
use std::ffi::{CString, c_int, c_uint};
use std::fmt::Arguments;

use libfabric_sys::FI_LOG_INFO;
use weft::errno::{FiErrno, Result};
use weft::log::SourceLocation;

use crate::ffi::host;

/// Whether lines of this level and subsystem are logged.
pub(crate) fn enabled(level: c_uint, subsystem: c_uint) -> bool {
    host::get().is_some_and(|host| {
        // SAFETY: the provider is the static structure that this host registered.
        unsafe { (host.log_enabled)(host.provider, level, subsystem) != 0 }
    })
}

/// Logs one line, with the Rust function and source line that log it.
pub(crate) fn emit(
    level: c_uint,
    subsystem: c_uint,
    place: impl FnOnce() -> SourceLocation,
    text: Arguments<'_>,
) {
    let Some(host) = host::get() else { return };
    // SAFETY: the provider is the static structure that this host registered.
    if unsafe { (host.log_enabled)(host.provider, level, subsystem) } == 0 {
        return;
    }
    let text = CString::new(format!("{text}\n").replace('\0', "?")).unwrap_or_default();
    let place = place();
    let function = CString::new(place.function()).unwrap_or_default();
    LINES.set(LINES.get().wrapping_add(1));
    // A log line preserves the caller's errno, as in the C macros.
    // SAFETY: errno is this thread's own.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: all strings are C strings that outlive the call; the format takes one string.
    unsafe {
        (host.log)(
            host.provider,
            level,
            subsystem,
            function.as_ptr(),
            c_int::try_from(place.line).unwrap_or(0),
            c"%s".as_ptr(),
            text.as_ptr(),
        );
    }
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() = errno };
}

thread_local! {
    /// Lines that this thread has logged.
    static LINES: Cell<u32> = const { Cell::new(0) };
}

macro_rules! log {
    ($level:ident, $subsystem:ident, $($text:tt)+) => {
        $crate::ffi::log::emit(
            libfabric_sys::$level,
            libfabric_sys::$subsystem,
            weft::log_place!(),
            format_args!($($text)+),
        )
    };
}

macro_rules! warning {
    ($subsystem:ident, $($text:tt)+) => { $crate::ffi::log::log!(FI_LOG_WARN, $subsystem, $($text)+) };
}

macro_rules! info {
    ($subsystem:ident, $($text:tt)+) => { $crate::ffi::log::log!(FI_LOG_INFO, $subsystem, $($text)+) };
}

/// The errno of a refused call; the reason is logged at `info`.
macro_rules! refused {
    ($subsystem:ident, $errno:ident, $($text:tt)+) => {
        $crate::ffi::log::refuse(
            weft::errno::FiErrno::$errno,
            libfabric_sys::$subsystem,
            weft::log_place!(),
            format_args!($($text)+),
        )
    };
}

/// Logs the reason for [`refused`].
#[cold]
#[inline(never)]
pub(crate) fn refuse(
    errno: FiErrno,
    subsystem: c_uint,
    place: fn() -> SourceLocation,
    reason: Arguments<'_>,
) -> FiErrno {
    emit(
        FI_LOG_INFO,
        subsystem,
        place,
        format_args!("-{errno:?}: {reason}"),
    );
    errno
}

/// Runs the body of a control call, and logs a refusal for which the body has logged no reason.
pub(crate) fn explained<T>(call: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = LINES.get();
    body().inspect_err(|errno| {
        if LINES.get() == before {
            info!(FI_LOG_CORE, "{call}: -{errno:?}");
        }
    })
}

pub(crate) use {info, log, refused, warning};
