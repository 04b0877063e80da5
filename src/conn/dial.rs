//! The dialling side: resolves the peer's address and the route, and requests the connection.

use std::net::SocketAddr;

use super::{Connection, Side, State};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;

impl Connection {
    /// Starts to connect to `peer`, or to the side's destination: begins to resolve the address.
    /// [`Owner::addr_resolved`](super::Owner::addr_resolved) is next.
    ///
    /// # Errors
    /// - `EINVAL`: no address.
    /// - `EISCONN`: connected already. `EOPBADSTATE`: in another state than [`State::Enabled`].
    /// - Those that the connection manager detects at once; the caller may dial again.
    pub(crate) fn dial(&self, side: &mut Side, peer: Option<SocketAddr>) -> Result<()> {
        let peer = peer.or(side.dst).ok_or(FiErrno::EINVAL)?;
        self.begin_dial()?;
        let id = side.id()?;
        let src = side.src.filter(|_| !side.bound);
        self.tuning.set_traffic_class(id);
        id.resolve_addr(src, peer).inspect_err(|error| {
            info_log!(EpCtrl, "rdma_resolve_addr({peer}): {error}");
            self.state.set(State::Enabled);
        })?;
        // not after a refusal: a later dial without an address has the previous destination
        side.dst = Some(peer);
        Ok(())
    }

    /// Changes the state to [`State::Connecting`].
    ///
    /// # Errors
    /// `EISCONN`, `EOPBADSTATE`: as [`Self::dial`].
    pub(crate) fn begin_dial(&self) -> Result<()> {
        if self.state.change(State::Enabled, State::Connecting) {
            return Ok(());
        }
        Err(match self.state.get() {
            State::Connected => FiErrno::EISCONN,
            _ => FiErrno::EOPBADSTATE,
        })
    }

    /// Begins to resolve the route, once the queue pair exists.
    /// [`Owner::route_resolved`](super::Owner::route_resolved) is next.
    ///
    /// # Errors
    /// The connection manager's. `EOPBADSTATE`: closed.
    pub(crate) fn resolve_route(&self, side: &Side) -> Result<()> {
        side.id()?.resolve_route()
    }

    /// Requests the connection, with at most 56 bytes of private data.
    /// [`Owner::established`](super::Owner::established) is next.
    ///
    /// # Errors
    /// The connection manager's. `EOPBADSTATE`: closed.
    pub(crate) fn request(&self, side: &Side, private_data: &[u8]) -> Result<()> {
        let id = side.id()?;
        self.tuning.set_ack_timeout(id);
        id.connect(&self.tuning.conn_param(private_data))
    }
}
