//! The rules of the tree's layout, as functions over text, so that each can be shown to see the breach it
//! is there for. `tests/tree.rs` applies them to the tree itself.
//!
//! A rule returns one line for each breach; none means that it is kept.

pub mod arrows;
pub mod commands;
pub mod conformance;
pub mod lexer;
pub mod modules;
pub mod paths;
pub mod sources;
pub mod tree;
