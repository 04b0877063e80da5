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
mod request;
mod rma;
mod send;
mod shutdown;
mod slab;
mod srx;
mod state;
#[cfg(test)]
mod tests;
mod transmit;
mod tuning;
mod tx;

pub use atomic::{ATOMIC_SIZE, AtomicKind, AtomicOp};
pub use ep::{BindFlags, Endpoint, EndpointConfig, Limits};
pub use lengths::LengthOption;
pub use local::LocalIov;
pub use pep::{PassiveEndpoint, PepConfig};
pub use request::ConnectRequest;
pub use rma::RemoteIov;
pub use srx::{SharedRx, SharedRxConfig};
pub use tuning::Tuning;
