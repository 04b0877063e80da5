//! Connected endpoints (`FI_EP_MSG`) on RC queue pairs.

mod atomic;
mod connect;
mod core;
mod enable;
mod ep;
mod keepalive;
mod lengths;
mod local;
mod pep;
mod pieces;
mod recv;
mod refusal;
mod remote;
mod rma;
mod send;
mod shutdown;
mod slab;
mod srx;
#[cfg(test)]
mod tests;
mod transmit;
mod tx;

pub use atomic::{ATOMIC_SIZE, AtomicKind, AtomicOp};
pub use ep::{BindFlags, Endpoint, EndpointConfig, Limits};
pub use lengths::LengthOption;
pub use local::LocalIov;
pub use pep::{PassiveEndpoint, PepConfig};
pub use rma::RemoteIov;
pub use srx::{SharedRx, SharedRxConfig};
