//! The accepting side: replies to a peer's request.

use super::{Connection, Side, State};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;

impl Connection {
    /// Starts to accept. The owner then prepares everything that an arriving message needs, and
    /// calls [`Self::accept`] without giving its lock back: the peer may send as soon as it has the
    /// reply.
    ///
    /// # Errors
    /// `EOPBADSTATE`: in another state than [`State::Enabled`].
    pub(crate) fn begin_accept(&self) -> Result<()> {
        if self.state.change(State::Enabled, State::Accepting) {
            Ok(())
        } else {
            Err(FiErrno::EOPBADSTATE)
        }
    }

    /// Sends the reply, with at most 196 bytes of private data.
    /// [`Owner::established`](super::Owner::established) is next.
    ///
    /// # Errors
    /// The connection manager's, for instance when the peer has gone: the connection has ended.
    pub(crate) fn accept(&self, side: &Side, private_data: &[u8]) -> Result<()> {
        let id = side.id()?;
        // the dialling side sets the traffic class earlier, for its route
        self.tuning.set_traffic_class(id);
        self.tuning.set_ack_timeout(id);
        let param = self.tuning.conn_param(private_data);
        id.accept(&param).inspect_err(|error| {
            info_log!(EpCtrl, "rdma_accept: {error}");
            self.state.set(State::Disconnected);
        })?;
        // fails if another thread has already ended the connection; that state stays
        self.state.change(State::Accepting, State::Accepted);
        Ok(())
    }

    /// Rejects the request instead of accepting it.
    ///
    /// # Errors
    /// `EOPBADSTATE`: answered already, or closed.
    pub(crate) fn refuse(&self, side: &Side, private_data: &[u8]) -> Result<()> {
        let early = |from| self.state.change(from, State::Disconnected);
        if !early(State::Idle) && !early(State::Enabled) {
            return Err(FiErrno::EOPBADSTATE);
        }
        if let Some(id) = &side.id {
            // the peer may have gone already
            let _ = id.reject(private_data);
        }
        Ok(())
    }
}
