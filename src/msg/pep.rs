//! Passive endpoints: they listen.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::Token;
use crate::errno::{FiErrno, Result};
use crate::queue::EventQueue;
use crate::verbs::Device;

/// What to open a passive endpoint with.
#[derive(Clone, Debug, Default)]
pub struct PepConfig {
    /// Where to listen: an address with port 0 takes any port; `None` is the wildcard address of
    /// IPv4 with any port.
    pub addr: Option<SocketAddr>,
    /// How many requests may wait; 0 for the default.
    pub backlog: usize,
    /// Handed back in events.
    pub token: Token,
}

/// A passive endpoint. Thread safe. Dropping it stops listening; requests that were read from
/// the event queue stay valid.
#[derive(Debug)]
pub struct PassiveEndpoint {}

impl PassiveEndpoint {
    /// Opens a passive endpoint on the connection manager that `device` belongs to, and binds it
    /// to its address. A wildcard address takes requests of any device of that manager.
    ///
    /// # Errors
    /// - `EADDRINUSE`, `EADDRNOTAVAIL`: the address.
    /// - `ENOMEM`, `EMFILE`: resources.
    pub fn open(device: &Arc<Device>, config: PepConfig) -> Result<Arc<Self>> {
        let _ = (device, config);
        Err(FiErrno::ENOSYS)
    }

    /// Takes another address (`fi_setname(3)`), before listening.
    ///
    /// # Errors
    /// `EOPBADSTATE`: it listens already. `EADDRINUSE`, `EADDRNOTAVAIL`: the address; the old one
    /// is kept.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        let _ = addr;
        Err(FiErrno::ENOSYS)
    }

    /// The address it is bound to, with the true port.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        Err(FiErrno::ENOSYS)
    }

    /// Binds the event queue that gets the requests.
    ///
    /// # Errors
    /// `EINVAL`: one is bound already.
    pub fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let _ = eq;
        Err(FiErrno::ENOSYS)
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// `ENOEQ`: no event queue is bound. `EOPBADSTATE`: it listens already.
    pub fn listen(&self) -> Result<()> {
        Err(FiErrno::ENOSYS)
    }

    /// Stops listening and forgets its events; nothing else works afterwards. Idempotent.
    pub fn close(&self) {}
}
