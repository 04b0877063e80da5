//! Active endpoints: their life from creation to close.

use std::net::SocketAddr;
use std::sync::Arc;

use bitflags::bitflags;

use crate::Token;
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::msg::ConnectRequest;
use crate::queue::{CompletionQueue, EventQueue};

bitflags! {
    /// What a completion queue is bound for, with libfabric's values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct BindFlags: u64 {
        /// `FI_RECV`
        const RECV = 1 << 10;
        /// `FI_TRANSMIT`
        const TRANSMIT = 1 << 11;
        /// `FI_SELECTIVE_COMPLETION`
        const SELECTIVE_COMPLETION = 1 << 59;
    }
}

/// What to make an endpoint with. Sizes are clipped to what the device has.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Handed back in events.
    pub token: Token,
    /// How many transmit operations may be under way.
    pub tx_size: usize,
    /// How many receives may be posted.
    pub rx_size: usize,
    /// Buffers per transmit operation.
    pub tx_iov_limit: usize,
    /// Buffers per receive.
    pub rx_iov_limit: usize,
    /// Bytes that inject must take.
    pub inject_size: usize,
    /// Default flags of transmit operations (`tx_attr->op_flags`).
    pub tx_op_flags: Flags,
    /// Default flags of receives (`rx_attr->op_flags`).
    pub rx_op_flags: Flags,
    /// Whether its capabilities include sending or initiating RMA: enabling needs a completion
    /// queue for that then.
    pub needs_tx: bool,
    /// Whether its capabilities include receiving: enabling needs a completion queue for that
    /// then.
    pub needs_rx: bool,
    /// This side's address, if it was chosen.
    pub src: Option<SocketAddr>,
    /// The peer's address, if it is known.
    pub dst: Option<SocketAddr>,
}

/// A connected endpoint on an RC queue pair. Thread safe.
///
/// Dropping the last reference closes it.
#[derive(Debug)]
pub struct Endpoint {}

impl Endpoint {
    /// Makes an endpoint that will connect to a peer.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn open(domain: &Arc<Domain>, config: EndpointConfig) -> Result<Arc<Self>> {
        let _ = (domain, config);
        Err(FiErrno::ENOSYS)
    }

    /// Makes an endpoint that will accept a request.
    ///
    /// # Errors
    /// Gives the request back with `EDOMAIN` if it came in by another device than the domain's.
    pub fn from_request(
        domain: &Arc<Domain>,
        config: EndpointConfig,
        request: ConnectRequest,
    ) -> std::result::Result<Arc<Self>, (FiErrno, ConnectRequest)> {
        let _ = (domain, config);
        Err((FiErrno::ENOSYS, request))
    }

    /// Binds the event queue for connection events.
    ///
    /// # Errors
    /// `EINVAL`: one is bound already. `EOPBADSTATE`: enabled already.
    pub fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let _ = eq;
        Err(FiErrno::ENOSYS)
    }

    /// Binds a completion queue for one direction or both.
    ///
    /// # Errors
    /// - `EINVAL`: no direction, or one that has a queue already.
    /// - `EDOMAIN`: a queue of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_cq(&self, cq: &Arc<CompletionQueue>, flags: BindFlags) -> Result<()> {
        let _ = (cq, flags);
        Err(FiErrno::ENOSYS)
    }

    /// Makes it ready: receives can be posted from now on. Connecting and accepting do it too.
    ///
    /// # Errors
    /// - `ENOEQ`, `ENOCQ`: what must be bound isn't.
    /// - `EADDRNOTAVAIL`: the source address is not one of the device.
    /// - `ENOMEM`, `EINVAL`: the device refuses a queue pair of this size.
    pub fn enable(&self) -> Result<()> {
        Err(FiErrno::ENOSYS)
    }

    /// Begins to connect to `peer` (or the address that it was made with); the event queue tells
    /// how it ends.
    ///
    /// # Errors
    /// - `EINVAL`: no address, or more data than fits.
    /// - `EOPBADSTATE`: it is connecting, connected, or made from a request.
    /// - as [`Self::enable`].
    pub fn connect(&self, peer: Option<SocketAddr>, data: &[u8]) -> Result<()> {
        let _ = (peer, data);
        Err(FiErrno::ENOSYS)
    }

    /// Accepts the request that it was made from; the event queue tells when it is connected.
    ///
    /// # Errors
    /// - `EINVAL`: more data than fits.
    /// - `EOPBADSTATE`: not made from a request, or accepted already.
    /// - `ECONNABORTED` and others of the connection manager: the peer has gone.
    /// - as [`Self::enable`].
    pub fn accept(&self, data: &[u8]) -> Result<()> {
        let _ = data;
        Err(FiErrno::ENOSYS)
    }

    /// Ends the connection. Operations under way complete with `ECANCELED`.
    ///
    /// # Errors
    /// `ENOTCONN`: there is none.
    pub fn shutdown(&self) -> Result<()> {
        Err(FiErrno::ENOSYS)
    }

    /// Disconnects, flushes every operation to its completion queue, and gives the device's
    /// resources back; nothing else works afterwards. Idempotent.
    pub fn close(&self) {}

    /// Takes another source address (`fi_setname(3)`).
    ///
    /// # Errors
    /// `EOPBADSTATE`: enabled already.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        let _ = addr;
        Err(FiErrno::ENOSYS)
    }

    /// This side's address (`fi_getname(3)`).
    ///
    /// # Errors
    /// `EOPBADSTATE`: it has none before it is enabled.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        Err(FiErrno::ENOSYS)
    }

    /// The peer's address (`fi_getpeer(3)`).
    ///
    /// # Errors
    /// `ENOTCONN`: not connected.
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        Err(FiErrno::ENOSYS)
    }

    /// Default flags of transmit operations.
    pub fn tx_op_flags(&self) -> Flags {
        Flags::empty()
    }

    /// Changes them (`FI_SETOPSFLAG`).
    pub fn set_tx_op_flags(&self, flags: Flags) {
        let _ = flags;
    }

    /// Default flags of receives.
    pub fn rx_op_flags(&self) -> Flags {
        Flags::empty()
    }

    /// Changes them (`FI_SETOPSFLAG`).
    pub fn set_rx_op_flags(&self, flags: Flags) {
        let _ = flags;
    }

    /// Asks for a receive with this context to be taken back (`fi_cancel(3)`).
    ///
    /// # Errors
    /// `ENOSYS`: verbs can't take a posted receive back.
    pub fn cancel(&self, context: usize) -> Result<()> {
        let _ = context;
        Err(FiErrno::ENOSYS)
    }

    /// The domain it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        unreachable!()
    }
}
