//! Requests on the send side of one queue pair: sends, RMA and atomics, for any endpoint type.
//!
//! An [`Initiator`] posts to a send queue, [`sq::Sq`], which the endpoint type implements. The
//! initiator finds lkeys for local buffers ([`local`]) or copies short data ([`slab`]), splits
//! operations ([`plan`]), and resolves the peer's keys ([`keys`]). All of it runs under the
//! endpoint's transmit lock. This module uses no endpoint type.

mod atomic;
pub(crate) mod keys;
pub(crate) mod lengths;
pub(crate) mod local;
mod plan;
mod post;
pub(crate) mod refusal;
mod remote;
mod scratch;
mod slab;
pub(crate) mod sq;
mod transmit;

pub use atomic::{AtomicKind, AtomicOp};
pub use lengths::LengthOption;
pub(crate) use lengths::Lengths;
pub use local::LocalIov;
pub(crate) use post::{Initiator, InitiatorConfig};
pub use remote::RemoteIov;
pub use scratch::ATOMIC_SIZE;
pub(crate) use transmit::Transmit;
