//! Connected endpoints (`FI_EP_MSG`) on RC queue pairs, or on XRC with a shared receive context.

mod atomic;
mod beat;
mod connect;
mod enable;
mod ep;
mod introduced;
mod leaving;
mod pep;
mod recv;
mod rma;
mod send;
mod shared;
mod shutdown;
mod srx;
#[cfg(test)]
mod tests;
mod tx;
mod xrc;

pub use crate::initiator::ATOMIC_SIZE;
pub use crate::initiator::LengthOption;
pub use crate::initiator::{AtomicKind, AtomicOp, LocalIov, RemoteIov};
pub use ep::{BindFlags, Endpoint, EndpointConfig, Limits};
pub use pep::{PassiveEndpoint, PepConfig};
pub use srx::{SharedRx, SharedRxConfig};
