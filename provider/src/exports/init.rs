//! Loading: `fi_prov_ini`, and what a program can ask without libfabric.

use libfabric_sys::fi_provider;

use crate::provider;

/// Called by libfabric when it has loaded the library: finds the libfabric that called, by the return
/// address, and returns the provider. NULL if no libfabric is there, or if a second, different one
/// calls in the same process.
// One body for each architecture: the return address becomes the first argument of a function that
// then returns in its place.
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

/// The version of the provider as libfabric writes versions: the major number shifted left by 16, or'ed
/// with the minor one.
#[unsafe(no_mangle)]
pub extern "C" fn weft_version() -> u32 {
    provider::version()
}
