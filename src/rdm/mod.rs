//! Native RDM endpoints (`FI_EP_RDM`). `docs/protocol-rdm.md` has the protocol, `docs/rdm.md` the
//! parts.
//!
//! The layers, the highest first (`tests/dependencies/src/modules.rs` has them all):
//! - `endpoint`: the calls of the application, from creation to close;
//! - `shared`, with `context`, `cq_source` and `rings`: the state under the endpoint's lock, the
//!   calls of the driver, and progress;
//! - `executor`: does what the state machine decides, on queue pairs, operations and receives;
//! - `link` and `xrc`: queue pairs, circuits and their connections;
//! - `rma`, `receives`, `long`, `operations`: the records of what is under way;
//! - `core`: the state machine of the protocol, and the contract with its callers ([`Core`]).

mod completions;
mod config;
mod context;
mod core;
mod counts;
mod cq_source;
mod endpoint;
mod executor;
mod iov;
mod limits;
mod link;
mod listening;
mod long;
mod number_map;
mod operations;
mod packet_memory;
mod process_end;
mod receive;
mod receives;
mod recv;
mod rings;
mod rma;
mod search;
mod shared;
mod slab;
mod step;
mod table_keys;
#[cfg(test)]
mod tests;
mod vector;
mod xrc;

pub use self::core::credit::{FIRST, Pool, SMALLEST};
pub use self::core::link::{LinkKey, LinkMark};
pub use self::core::ops::{Form, Uses};
pub use self::core::peer::{PeerKey, PeerMark};
pub use self::core::recover::Unposted;
pub use self::core::{Config, Core, Failure, Io, Origin, Post, Random, SendOp};
pub use crate::initiator::{LocalIov, RemoteIov};
pub use atomic_ops;
pub use config::EndpointConfig;
pub use context::{SharedRx, SharedRxConfig};
pub use endpoint::{AtomicCall, Endpoint, MAX_ATOMIC_SIZE, max_atomic_count};
pub use limits::Limits;
pub use process_end::linger_all;
pub use recv::Directed;
pub use slab::Key;
pub use vector::{AddressVector, VectorUser};
