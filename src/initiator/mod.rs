//! Requests on the send side of one queue pair: sends, RMA and atomics, for any endpoint type.
//!
//! The path of one operation, in the order in which it is to be read:
//! 1. [`transmit`]: the arguments of one call as a [`Transmit`]; [`local`] and [`remote`] have the
//!    local and the remote memory as C passes them.
//! 2. [`post`]: an [`Initiator`] checks the lengths, finds lkeys of the local buffers or copies
//!    short data ([`slab`]), and makes the work request.
//! 3. [`sq`] and [`slot_sq`]: the send queue sets the work request's number, stores its record and
//!    posts it to the queue pair ([`crate::verbs::Qp::post_send`]).
//!
//! A device that executes RMA in a call needs no work request: before step 2 the endpoint calls
//! [`Initiator::execute`], which passes the operation to [`crate::verbs::Qp::execute`].
//!
//! Between steps 2 and 3, [`keys`] resolves a key that is not an rkey of the device, and [`plan`]
//! makes the requests of an operation that is not exactly one: one for each fragment of the target,
//! and those that flush or count. The engine's own requests, which [`keys`] needs, are posted
//! through [`link`].
//!
//! All of it runs under the endpoint's transmit lock, except the functions of [`link`] that are
//! thread safe. This module uses no endpoint type.

mod atomic;
pub(crate) mod elements;
pub(crate) mod keys;
pub(crate) mod lengths;
pub(crate) mod link;
pub(crate) mod local;
mod plan;
mod post;
pub(crate) mod qp_link;
pub(crate) mod refusal;
mod remote;
mod scratch;
mod slab;
mod slot_sq;
pub(crate) mod sq;
mod transmit;

pub use atomic::{AtomicKind, AtomicOp};
pub use lengths::LengthOption;
pub(crate) use lengths::Lengths;
pub(crate) use link::Link;
pub use local::LocalIov;
pub(crate) use post::{Initiator, InitiatorConfig};
pub(crate) use qp_link::QpLink;
pub use remote::RemoteIov;
pub use scratch::ATOMIC_SIZE;
pub(crate) use slot_sq::SlotSq;
pub(crate) use transmit::{REQUEST_ONLY, TRANSMIT_FLAGS, Transmit};
