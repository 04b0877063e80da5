//! Limits of the device: those that `ibv_query_device` reports, and the longest wait for a peer.

use std::time::Duration;

/// Maximum number of requests in one queue.
pub(crate) const MAX_WR: u32 = 1 << 15;
/// Maximum number of sges of one request.
pub(crate) const MAX_SGE: u32 = 32;
/// Maximum inline data of one request, in bytes.
pub(crate) const MAX_INLINE: u32 = 1024;
/// Maximum message length, in bytes.
pub(crate) const MAX_MESSAGE: u64 = 1 << 30;
/// Maximum datagram length in bytes: the port's MTU.
pub(crate) const MAX_DATAGRAM: u64 = 4096;
/// Maximum number of RDMA READs and atomics that an application may ask to have outstanding. They
/// are executed one after the other, so any number has the same effect.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;
/// Number of emulated nodes: limited by the node's field in GIDs and LIDs.
pub(crate) const MAX_NODES: u32 = 4096;
/// Longest wait of a call or of a request for a peer that does not end its part: an access to
/// memory that its owner takes back, a lock of a file, the consumption of datagrams. A stopped
/// process may never end it.
pub(crate) const PEER_WAIT: Duration = Duration::from_secs(5);
/// [`PEER_WAIT`] in nanoseconds.
pub(crate) const PEER_WAIT_NS: u64 = PEER_WAIT.as_nanos() as u64;
