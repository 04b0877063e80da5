//! `weft`: the engine of the libfabric provider of that name.
//!
//! It implements libfabric's semantics by verbs, without libfabric's C structures: the crate in
//! `provider/` owns those, and calls the public items of this crate. Values that cross that
//! boundary (error numbers, flags) have libfabric's numeric values.
//!
//! Layers, each using only those above it in this list (`tests/dependencies` checks it):
//! - [`errno`], [`flags`], [`log`], [`auth`]: values;
//! - [`av`], [`matching`]: addresses and tags of endpoints with many peers; no device, no lock, no
//!   I/O;
//! - [`verbs`]: owners of verbs and connection manager objects, the only module that calls a verb;
//! - [`wire`]: formats of bytes that peers exchange or read;
//! - [`mr`]: memory regions and their keys; [`queue`]: completion queues and counters, which [`mr`]
//!   uses;
//! - [`conn`]: the steps of the connection manager; `initiator`: requests of one queue pair's send
//!   side, for any endpoint type;
//! - [`eq`]: event queues;
//! - [`domain`]: devices opened for use;
//! - [`msg`]: connected endpoints; [`rdm`]: endpoints with many peers.
//!
//! The lock order is in `docs/locking.md`, the wire protocol in `docs/protocol.md`.

pub mod auth;
pub mod av;
mod chunks;
pub mod conn;
pub mod domain;
pub mod eq;
pub mod errno;
pub mod flags;
#[cfg(fuzzing)]
pub mod fuzz;
#[cfg(all(test, not(fuzzing)))]
#[allow(unreachable_pub, reason = "public for the fuzz targets")]
mod fuzz;
mod hash;
mod initiator;
pub mod log;
pub mod matching;
pub mod mr;
pub mod msg;
mod pages;
pub mod queue;
pub mod rdm;
mod sync;
pub mod verbs;
pub mod wire;
pub mod xrc;

/// The object of the caller that an event is about. The engine does not interpret it and returns it
/// unchanged in events. The provider stores the address of its fid here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token(pub usize);

/// A peer of endpoints that have an address vector: one remote address, or several addresses of one
/// remote endpoint. At most `u32::MAX - 2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerIndex(pub u32);
