//! Memory that several processes map: the process's own segment, the segments of its peers, and
//! rings.
//!
//! Every word of shared memory may change at any time and may hold any value. It is accessed only
//! through atomics and bounded copies, by offset; no Rust reference to plain data covers it.

mod arena;
pub(crate) mod layout;
pub(crate) mod lines;
#[cfg_attr(all(test, loom), path = "mapping_model.rs")]
mod mapping;
mod own;
mod word;

#[cfg(any(test, fuzzing))]
pub(crate) use arena::Arena;
pub(crate) use mapping::Mapping;
pub(crate) use own::OwnSegment;
pub(crate) use word::{Slots, Word, set_bits};
