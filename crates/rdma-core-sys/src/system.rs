//! The system's libibverbs and librdmacm, opened at the first use.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::sync::OnceLock;

use crate::table::{Backend, CmFns, VerbsFns};

/// The reason why the system's libraries cannot be used. On a machine without RDMA hardware they
/// are often not installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// `dlopen` failed; its message.
    Open(String),
    /// The library is older than the oldest release that this crate supports; the missing symbol.
    Symbol(&'static str),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(message) => f.write_str(message),
            Self::Symbol(name) => write!(f, "the library has no {name}"),
        }
    }
}

impl std::error::Error for LoadError {}

/// The system's libraries as a backend, opened on the first call and kept open until the process
/// ends (rdma-core keeps providers' state in statics and does not survive being unloaded).
///
/// Blocks on the first call for the time of a `dlopen`. Thread safe.
///
/// # Errors
/// [`LoadError`], the same one on every call.
pub fn backend() -> Result<&'static Backend, LoadError> {
    static BACKEND: OnceLock<Result<Backend, LoadError>> = OnceLock::new();
    BACKEND.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Backend, LoadError> {
    let verbs = open(c"libibverbs.so.1")?;
    let cm = open(c"librdmacm.so.1")?;
    // SAFETY: both are the libraries of that soname, whose exported functions have the signatures
    // of rdma-core's public headers; the ABI of a soname never changes.
    let verbs = unsafe { VerbsFns::from_symbols(|name| symbol(verbs, name)) };
    // SAFETY: as above.
    let cm = unsafe { CmFns::from_symbols(|name| symbol(cm, name)) };
    Ok(Backend {
        name: "rdma-core",
        verbs: verbs.map_err(LoadError::Symbol)?,
        cm: cm.map_err(LoadError::Symbol)?,
        notices_dead_peers: false,
        registers_without_kernel: false,
        executes_in_post: false,
        not_executed: None,
    })
}

fn open(soname: &CStr) -> Result<*mut c_void, LoadError> {
    // SAFETY: `soname` is a C string. Loading runs the library's constructors, as in a program
    // that is linked to it.
    let handle = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: `dlerror` returns NULL or a string that is valid until this thread's next dl call.
    let message = unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            CString::default()
        } else {
            CStr::from_ptr(text).to_owned()
        }
    };
    Err(LoadError::Open(message.to_string_lossy().into_owned()))
}

/// The default version of a symbol. For libibverbs this is the newest version, to which a program
/// built today is linked.
fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `library` is a live handle and `name` a C string.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_the_same_on_every_call() {
        let first = backend().map(|b| b.name);
        assert_eq!(first, backend().map(|b| b.name));
        if let Ok(name) = first {
            assert_eq!(name, "rdma-core");
        }
    }

    #[test]
    fn a_missing_library_is_an_error_with_its_name() {
        let Err(LoadError::Open(message)) = open(c"libnot-there.so.1") else {
            panic!("opened a library that does not exist");
        };
        assert!(message.contains("libnot-there.so.1"), "{message}");
    }

    #[test]
    fn a_missing_required_symbol_is_named() {
        // SAFETY: no address is returned.
        let table = unsafe { VerbsFns::from_symbols(|_| std::ptr::null_mut()) };
        assert_eq!(table.err(), Some("ibv_get_device_list"));
    }
}
