//! Log lines through the host's `fi_log`.
//!
//! Nothing is formatted before `fi_log_enabled` says that somebody reads it. Not for the fast path.

use std::ffi::{CString, c_int, c_uint};
use std::fmt::Arguments;

use crate::ffi::host;
use crate::provider;

/// Whether anybody would read such a line.
pub(crate) fn enabled(level: c_uint, subsystem: c_uint) -> bool {
    host::get().is_some_and(|host| {
        // SAFETY: our static provider, registered with this host.
        unsafe { (host.log_enabled)(provider::as_ptr(), level, subsystem) != 0 }
    })
}

/// One line. `location` is `file!()`, shown in the place of the C function's name.
pub(crate) fn emit(
    level: c_uint,
    subsystem: c_uint,
    location: &str,
    line: u32,
    text: Arguments<'_>,
) {
    let Some(host) = host::get() else { return };
    let provider = provider::as_ptr();
    // SAFETY: `provider` is our static structure, registered with this host.
    if unsafe { (host.log_enabled)(provider, level, subsystem) } == 0 {
        return;
    }
    let text = CString::new(format!("{text}\n").replace('\0', "?")).unwrap_or_default();
    let location = CString::new(location).unwrap_or_default();
    // A caller's errno must survive a log line, as it does in the C macros.
    // SAFETY: errno is this thread's own.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: all strings are C strings that outlive the call; the format takes one string.
    unsafe {
        (host.log)(
            provider,
            level,
            subsystem,
            location.as_ptr(),
            c_int::try_from(line).unwrap_or(0),
            c"%s".as_ptr(),
            text.as_ptr(),
        );
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

macro_rules! log {
    ($level:ident, $subsystem:ident, $($text:tt)+) => {
        $crate::ffi::log::emit(
            libfabric_sys::$level,
            libfabric_sys::$subsystem,
            file!(),
            line!(),
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

pub(crate) use {info, log, warning};
