//! Common parts of the tests of the shared object: a libfabric that is opened by path, its objects
//! with the inline functions of the headers, the provider under test, and other processes.
//!
//! Each test of a libfabric runs in a separate process (the `abi-probe` program), because a process
//! can contain one libfabric only.

#![allow(unsafe_code, reason = "calls a C library as an application does")]

pub mod fabric;
pub mod load;
pub mod objects;
pub mod outside;
pub mod pair;
pub mod weft;
