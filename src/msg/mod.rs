//! Connected endpoints (`FI_EP_MSG`) on RC queue pairs.

mod atomic;
mod core;
mod ep;
mod keepalive;
mod lengths;
mod pep;
mod recv;
mod remote;
mod request;
mod rma;
mod send;
mod slab;
mod srx;
#[cfg(test)]
mod tests;
mod tuning;

pub use atomic::{ATOMIC_SIZE, AtomicKind, AtomicOp};
pub use ep::{BindFlags, Endpoint, EndpointConfig, Limits};
pub use lengths::LengthOption;
pub use pep::{PassiveEndpoint, PepConfig};
pub use request::ConnectRequest;
pub use rma::RemoteIov;
pub use send::LocalIov;
pub use srx::{SharedRx, SharedRxConfig};
pub use tuning::Tuning;
