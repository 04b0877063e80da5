//! Memory that libfabric or the application frees with C's `free`, and reading of C strings.

use std::ffi::{CStr, CString, c_char, c_void};

use libfabric_sys::fi_info;
use weft::errno::{FiErrno, Result};

use crate::ffi::host;

/// A zeroed C structure.
///
/// # Errors
/// `ENOMEM`.
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
/// `ENOMEM`.
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

/// A copy of `text` as a C string in C's heap. It ends at the first NUL, should there be one.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn string(text: &str) -> Result<*mut c_char> {
    let end = text.find('\0').unwrap_or(text.len());
    let text = CString::new(&text[..end]).unwrap_or_default();
    Ok(bytes(text.as_bytes_with_nul())?.cast())
}

/// The text of a C string; NULL and invalid UTF-8 are `None`.
///
/// # Safety
/// `text` is NULL or a C string that outlives the result.
pub(crate) unsafe fn str_of<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// An `fi_info` under construction; freed by the host unless it is taken.
pub(crate) struct Info(*mut fi_info);

impl Info {
    /// An empty one, with all its attribute structures in the sizes of the host's release.
    ///
    /// # Errors
    /// `ENOMEM`; `ENOSYS` without a host.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: NULL asks for an empty structure.
        unsafe { Self::duplicate(std::ptr::null()) }
    }

    /// A deep copy of `info`, made by the host.
    ///
    /// # Errors
    /// `ENOMEM`; `ENOSYS` without a host.
    ///
    /// # Safety
    /// `info` is NULL or a valid `fi_info` of the host's release.
    pub(crate) unsafe fn duplicate(info: *const fi_info) -> Result<Self> {
        let host = host::get().ok_or(FiErrno::ENOSYS)?;
        // SAFETY: the caller's promise.
        let copy = unsafe { (host.dupinfo)(info) };
        if copy.is_null() {
            return Err(FiErrno::ENOMEM);
        }
        Ok(Self(copy))
    }

    pub(crate) fn as_ptr(&self) -> *mut fi_info {
        self.0
    }

    /// Gives it away.
    pub(crate) fn into_raw(self) -> *mut fi_info {
        let info = self.0;
        std::mem::forget(self);
        info
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        if let Some(host) = host::get() {
            // SAFETY: made by this host's fi_dupinfo and not given away.
            unsafe { (host.freeinfo)(self.0) };
        }
    }
}
