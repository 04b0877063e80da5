//! Native RDM endpoints (`FI_EP_RDM`): the state of peers and links. `docs/protocol-rdm.md` has the
//! protocol; each rule named below is there.
//!
//! [`Core`] is a state machine without device, lock, thread or clock. The endpoint that owns it
//! - calls its methods with what has happened: a post, a packet, a completion of a SEND, events of
//!   the connection manager, the time;
//! - implements [`Io`], by which it acts on queue pairs, operations and matching.
//!
//! # For the author of the endpoint
//! - All calls are serialized by the lock of the endpoint. No call blocks, and none allocates once
//!   the tables have grown, except calls of the connection manager's events. Methods of [`Io`] must
//!   not call back into the [`Core`].
//! - Call [`Core::set_now`] before the other methods, except those of the application's calls,
//!   which read [`Io::now`] where they begin a limit of time; [`Core::flush`] at the end of each
//!   progress call, and [`Core::tick`] when [`Core::deadline`] has passed.
//! - [`LinkKey`] fits into 32 bits and names one queue pair; use its number in `wr_id`. Events of a
//!   link that has ended are ignored, so a late completion does no harm.
//! - Events of one link have to be passed in their order: each SEND's completion, each packet.
//!   After [`Io::end`], all of them are passed, and [`Core::ended`] last.
//! - A packet is decoded by [`Packet::decode`](crate::wire::rdm::Packet::decode) from memory that
//!   the peer cannot write any more, and passed to [`Core::arrived`]; one that is refused to
//!   [`Core::violated`].
//! - Credit of a delivered packet is given back by [`Core::give_back`]: its slot when the receive
//!   was posted again, its blocks when the message was matched.
//! - Sends to the own endpoint come back by [`Io::loop_back`].
//! - A message that was posted as [`Form::Rts`] is held until the caller calls [`Core::release`],
//!   when FIN has arrived. For RMA and other operations with an answer, call [`Core::hold`] first.
//! - RMA is posted to the link of the last [`Io::up`] only, and not after its [`Io::down`].
//! - Answers to packets go by [`Core::answer`], never to another session than that of the packet.
//! - CTS, DATA, FIN and RESULT with the name of an operation that does not exist are ignored, and
//!   their slot is given back as usual: the operation has failed ([`Io::fail_peer`]) or was
//!   cancelled, and the peer could not know. So the name of an operation has to contain a
//!   generation. An RTS or ATOMIC always begins something new. A packet whose content is impossible
//!   (DATA beyond the message, an operator that does not exist) is a violation: [`Core::content_violated`].
//! - [`Io::fail_peer`] ends the session at both sides: the caller drops the stored RTS of the peer
//!   and stops READs of matched ones before it returns to the application.
//!
//! [`Core`] decides what is posted where and when, and which operations are complete. It handles no
//! payload, matching, key or rendezvous: RTS, CTS, FIN and the other numbered packets are delivered
//! as they are.

mod completions;
mod config;
mod context;
mod core;
mod counts;
mod cq_source;
mod endpoint;
mod executor;
mod iov;
mod keys;
mod limits;
mod link;
mod listening;
mod long;
mod number_map;
mod operations;
mod packet_memory;
mod process_end;
mod receives;
mod recv;
mod rings;
mod rma;
mod search;
mod shared;
mod slab;
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
