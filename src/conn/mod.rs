//! Connections: the steps of the connection manager (`rdma_cm(7)`) on both sides, and the objects
//! that perform them.
//!
//! - [`Dispatcher`] takes the events of the connection manager and passes each to the [`CmTarget`]
//!   of its identifier. A thread that reads the owner of the dispatcher drives it.
//! - [`Connection`] is one side of a connection: its life cycle and its steps. The queue pair
//!   belongs to the connection's [`Owner`], which is called between the steps.
//! - [`Listener`] passes on the requests of peers, each as a [`ConnectRequest`].
//! - [`Circuits`] are the initiators that connected endpoints on XRC share; each request for one,
//!   or on one, is a [`Dial`], and the peer's an [`Incoming`].
//! - [`RevocationNotifier`] notifies the peer of a connection of revoked keys.
//! - [`CmSink`] receives the results. The application's event queue is one; this module does not
//!   depend on it.
//!
//! The steps carry private data as raw bytes, which the caller of each step passes: those of a
//! request, of a reply and of a rejection. [`introduction`] has the format of connected endpoints.
//! No step blocks.

mod accept;
mod answered;
mod circuit;
mod circuit_dial;
mod circuits;
mod connection;
mod dial;
mod dial_config;
mod dispatcher;
mod driver;
mod end_notice;
mod incoming;
pub(crate) mod introduction;
mod listen;
mod notifier;
mod peer_queues;
mod rename;
mod request;
mod shutdown;
pub(crate) mod silence;
mod sink;
mod state;
#[cfg(test)]
mod tests;
mod tuning;

pub(crate) use circuit::{Circuit, CircuitUser, Share};
pub(crate) use circuit_dial::Dial;
pub(crate) use circuits::Circuits;
pub(crate) use connection::{Connection, Owner, Side};
pub(crate) use dial_config::DialConfig;
pub(crate) use dispatcher::{CmTarget, Dispatcher, Found, Registry};
pub(crate) use driver::{Driven, Driver, Turn};
pub(crate) use end_notice::Keep;
pub(crate) use incoming::Incoming;
pub(crate) use listen::{Listener, is_in_use};
pub(crate) use notifier::RevocationNotifier;
pub(crate) use rename::{Renamed, rename};
pub use request::{ConnectRequest, Template};
pub(crate) use shutdown::{DeviceError, REFUSAL_WAIT};
pub(crate) use sink::{CmSink, Outcome};
pub(crate) use state::{AtomicState, State};
pub use tuning::Tuning;
