//! `softverbs`: an RDMA device in user space for the processes of one user on one host.
//!
//! It implements the exported functions of libibverbs and librdmacm, and fills the operation tables
//! of `ibv_context`, so programs for verbs can use it: through [`backend`], or linked as a drop-in
//! `libibverbs.so.1`. `docs/softverbs.md` has the layout of shared memory, the writer of each word,
//! and the effects of a process's death.
//!
//! Lock order, outermost first: incoming ring, send queue, receive queue, shared receive queue,
//! completion queue, channel; outgoing ring, windows, buffers, lines to agents and the waiting list
//! are leaves. A thread that holds one of them waits for another process only with a bound: for the
//! lock of an atomic's word, and for a peer's files if the peer's agent sends them (2 s for each).
//! Before all of these: memberships of XRC domains, handles on a target, targets held. A thread
//! that holds one of these three may wait for a lock of the registry, with a bound.

#[allow(unsafe_code, reason = "the C entry points of verbs")]
pub mod abi;
mod agent;
mod agent_thread;
#[allow(unsafe_code, reason = "the C entry points of the connection manager")]
mod cm;
#[allow(unsafe_code, reason = "completion queues are C objects")]
mod cq;
#[allow(unsafe_code, reason = "receives are memory of the application")]
mod delivery;
mod dm;
#[allow(unsafe_code, reason = "called by C")]
mod entry;
mod environment;
#[allow(unsafe_code, reason = "channels are C objects")]
mod events;
#[cfg(fuzzing)]
#[allow(unsafe_code, reason = "calls the device as a C program does")]
pub mod fuzz;
#[cfg(all(test, not(fuzzing)))]
#[allow(
    unsafe_code,
    unreachable_pub,
    reason = "calls the device as a C program does"
)]
mod fuzz;
#[allow(unsafe_code, reason = "a GID is a union")]
mod gid;
mod hazard;
mod key;
mod limits;
mod log;
#[cfg(all(test, loom))]
#[allow(
    unsafe_code,
    reason = "loom checks accesses to data under a lock through its `UnsafeCell`"
)]
mod models;
mod mw;
#[allow(unsafe_code, reason = "the C objects themselves")]
mod object;
#[allow(unsafe_code, reason = "peers' memory is reached by address")]
mod peer;
#[allow(unsafe_code, reason = "owns the memory that the C objects point to")]
mod process;
#[allow(unsafe_code, reason = "queue pairs are C objects")]
mod qp;
#[cfg_attr(test, allow(unsafe_code, reason = "payload is raw memory"))]
mod receive_ring;
#[allow(unsafe_code, reason = "memory regions are raw memory")]
mod region;
mod registry;
mod repeat;
#[allow(
    unsafe_code,
    reason = "rings lie in memory shared with other processes"
)]
mod ring;
#[allow(
    unsafe_code,
    reason = "segments are memory shared with other processes"
)]
mod segment;
mod signal;
#[allow(unsafe_code, reason = "shared receive queues are C objects")]
mod srq;
#[allow(unsafe_code, reason = "lock and fences")]
mod sync;
#[allow(unsafe_code, reason = "system calls")]
mod sys;
#[cfg(any(test, fuzzing))]
#[allow(unsafe_code, reason = "calls the device as a C program does")]
mod testing;
#[cfg(test)]
#[allow(unsafe_code, reason = "calls the device as a C program does")]
mod tests;
#[allow(unsafe_code, reason = "domains are C objects")]
mod xrc;

use std::sync::OnceLock;

pub use cm::hide_ends_of_requests;
pub use cq::answer_every_wake;
pub use log::set_log;
use rdma_core_sys::Backend;

/// The vendor error of a READ, WRITE or atomic that has failed and of which no part was executed.
/// Other failed requests have 0.
pub(crate) const NOT_EXECUTED: u32 = 1;

/// The device as a table of functions. The same table on every call; opens nothing.
pub fn backend() -> &'static Backend {
    static BACKEND: OnceLock<Backend> = OnceLock::new();
    BACKEND.get_or_init(|| Backend {
        name: "softverbs",
        verbs: *abi::verbs(),
        cm: cm::table(),
        notices_dead_peers: true,
        registers_without_kernel: true,
        executes_in_post: true,
        not_executed: Some(NOT_EXECUTED),
    })
}
