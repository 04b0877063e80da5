//! The C ABI of rdma-core's verbs and connection manager, as it is in its headers.
//!
//! Nothing here links against rdma-core: types come from generated declarations
//! ([`bindings`]), exported functions from a table of pointers ([`table`]) that the system's
//! libraries ([`system`]) or another device fills, and the functions that are `static inline` in
//! `verbs.h` are translated to Rust ([`inline`]). The user of a table can't distinguish its origin.

#[rustfmt::skip]
#[allow(
    unsafe_code, unsafe_op_in_unsafe_fn, missing_docs, unreachable_pub, missing_debug_implementations,
    non_camel_case_types, non_snake_case, non_upper_case_globals, clippy::all, clippy::pedantic,
    clippy::ptr_as_ptr, clippy::ref_as_ptr, clippy::cast_lossless, clippy::undocumented_unsafe_blocks,
    reason = "generated; names and meaning are those of the C headers"
)]
pub mod bindings;
#[allow(unsafe_code, reason = "dereferences C objects as verbs.h does")]
pub mod inline;
#[allow(
    missing_docs,
    non_camel_case_types,
    reason = "names and meaning are the kernel's"
)]
pub mod scalars;
#[allow(non_camel_case_types, reason = "names as in a C header")]
pub mod softdv;
#[allow(unsafe_code, reason = "loads C libraries")]
pub mod system;
#[allow(unsafe_code, reason = "turns symbols into function pointers")]
pub mod table;

pub use bindings::*;
pub use inline::*;
pub use softdv::*;
pub use table::{Backend, CmFns, VerbsFns};
