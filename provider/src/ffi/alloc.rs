//! Memory that libfabric or the application frees with C's `free`, and reading of C strings and
//! keys.

use std::ffi::{CStr, CString, c_char, c_void};

use weft::auth::AuthKey;
use weft::errno::{FiErrno, Result};

/// A zeroed C structure.
///
/// # Errors
/// `ENOMEM`: no memory.
pub(crate) fn calloc<T>() -> Result<*mut T> {
    // SAFETY: any size and count are allowed.
    let memory = unsafe { libc::calloc(1, size_of::<T>()) };
    if memory.is_null() {
        return Err(FiErrno::ENOMEM);
    }
    Ok(memory.cast())
}

/// A copy of `bytes` in C's heap.
///
/// # Errors
/// `ENOMEM`: no memory.
pub(crate) fn bytes(bytes: &[u8]) -> Result<*mut c_void> {
    // SAFETY: any size is allowed; one byte more makes an empty copy a distinct object.
    let memory = unsafe { libc::malloc(bytes.len().max(1)) };
    if memory.is_null() {
        return Err(FiErrno::ENOMEM);
    }
    // SAFETY: `memory` is new and has room for `bytes`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.cast::<u8>(), bytes.len()) };
    Ok(memory)
}

/// A copy of `text` in C's heap as a C string. The copy ends before the first NUL of `text`.
///
/// # Errors
/// `ENOMEM`: no memory.
pub(crate) fn string(text: &str) -> Result<*mut c_char> {
    let end = text.find('\0').unwrap_or(text.len());
    let text = CString::new(&text[..end]).unwrap_or_default();
    Ok(bytes(text.as_bytes_with_nul())?.cast())
}

/// The text of a C string; `None` for NULL and for invalid UTF-8.
///
/// # Safety
/// `text` is NULL or a C string that outlives the result.
pub(crate) unsafe fn str_of<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not NULL; the caller passes a C string that outlives the result.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// An authorization key; `None` if `size` is 0.
///
/// # Errors
/// `EINVAL`: NULL, or too long.
///
/// # Safety
/// `key` is NULL or has `size` bytes, unless `size` exceeds the maximum length of a key.
pub(crate) unsafe fn auth_key(key: *const u8, size: usize) -> Result<Option<AuthKey>> {
    if size == 0 {
        return Ok(None);
    }
    if key.is_null() || size > AuthKey::MAX_SIZE {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: the caller passes a key of `size` bytes; the size was checked.
    let bytes = unsafe { std::slice::from_raw_parts(key, size) };
    AuthKey::new(bytes).map(Some)
}
