//! The provider's name and version, in libfabric's form.

use std::ffi::CStr;

use libfabric_sys::fi_version;

/// The name in `FI_PROVIDER` and `fabric_attr->prov_name`.
pub(crate) const NAME: &str = "weft";
/// [`NAME`] as a C string.
pub(crate) const C_NAME: &CStr = c"weft";

/// This release as libfabric writes versions.
pub(crate) const fn version() -> u32 {
    const fn number(text: &str) -> u32 {
        let mut value = 0;
        let mut i = 0;
        while i < text.len() {
            value = value * 10 + (text.as_bytes()[i] - b'0') as u32;
            i += 1;
        }
        value
    }
    fi_version(
        number(env!("CARGO_PKG_VERSION_MAJOR")),
        number(env!("CARGO_PKG_VERSION_MINOR")),
    )
}
