//! Loading: `fi_prov_ini` (`fi_provider(3)`), and the version for programs that load the library
//! without libfabric.

use libfabric_sys::fi_provider;

use crate::{identity, provider};

/// fi_provider(3): libfabric calls this when it has loaded the library. Finds the calling libfabric
/// by the return address, and returns the provider. NULL: the caller is no libfabric, or a second,
/// different libfabric in the same process.
// One body for each architecture: passes the return address as the first argument to a function
// that returns in place of this one.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut fi_provider {
    std::arch::naked_asm!(
        #[cfg(target_arch = "x86_64")]
        "mov rdi, [rsp]",
        #[cfg(target_arch = "x86_64")]
        "jmp {init}",
        #[cfg(target_arch = "aarch64")]
        "mov x0, x30",
        #[cfg(target_arch = "aarch64")]
        "b {init}",
        init = sym provider::init,
    )
}

/// The version of the provider in libfabric's encoding (FI_VERSION): the major number shifted left
/// by 16 bits, plus the minor number.
#[unsafe(no_mangle)]
pub extern "C" fn weft_version() -> u32 {
    identity::version()
}
