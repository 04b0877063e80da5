//! The rules of the tree's layout, as functions of texts, so that a test can show that each rule
//! detects its violation. `tests/tree.rs` applies them to the tree.
//!
//! A rule returns one line per violation.

pub mod arrows;
pub mod commands;
pub mod conformance;
pub mod entries;
pub mod lexer;
pub mod modules;
pub mod paths;
pub mod sources;
pub mod tree;
