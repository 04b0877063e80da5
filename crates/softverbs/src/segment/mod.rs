//! Memory that several processes map: a process's own segment, the segments of its peers, rings.
//!
//! Every word of it may change at any time and hold anything, so it is reached only through
//! atomics and bounded copies, by offset; no Rust reference to plain data ever covers it.

mod arena;
pub(crate) mod layout;
#[cfg_attr(all(test, loom), path = "mapping_model.rs")]
mod mapping;
mod own;

#[cfg(any(test, fuzzing))]
pub(crate) use arena::Arena;
pub(crate) use mapping::Mapping;
pub(crate) use own::OwnSegment;
