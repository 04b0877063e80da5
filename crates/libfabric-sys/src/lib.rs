//! The C ABI of libfabric, the provider's side included, as it is in its headers.
//!
//! Nothing here links against libfabric: linking binds a symbol version of one release, while one
//! provider serves them all (it resolves the host library's functions at run time). Types and most
//! constants are generated ([`bindings`]); what the generator can't evaluate is in [`consts`]; how
//! the structures differ between releases is in [`layout`].

#[rustfmt::skip]
#[allow(
    unsafe_code, unsafe_op_in_unsafe_fn, missing_docs, unreachable_pub, missing_debug_implementations,
    non_camel_case_types, non_snake_case, non_upper_case_globals, clippy::all, clippy::pedantic,
    clippy::ptr_as_ptr, clippy::ref_as_ptr, clippy::cast_lossless, clippy::undocumented_unsafe_blocks,
    reason = "generated; names and meaning are those of the C headers"
)]
pub mod bindings;
pub mod consts;
pub mod layout;

pub use bindings::*;
pub use consts::*;
