//! The accepting side: replies to a peer's request.

use super::connection::ended_errno;
use super::{Connection, Side, State};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;

impl Connection {
    /// Begins to accept. The owner then prepares the objects that an arriving message needs, and
    /// calls [`Self::accept`] without releasing its lock, because the peer may send as soon as it
    /// has received the reply.
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
    /// `ECONNRESET`: the peer has ended the connection. Others: the connection manager's.
    pub(crate) fn accept(&self, side: &Side, private_data: &[u8]) -> Result<()> {
        let id = side.id()?;
        // the dialling side sets the traffic class earlier, for its route
        self.tuning.set_traffic_class(id);
        self.tuning.set_ack_timeout(id);
        let param = self.tuning.conn_param(private_data);
        let accepted = id.accept(&param).inspect_err(|error| {
            info_log!(EpCtrl, "rdma_accept: {error}");
            self.state.set(State::Disconnected);
        });
        accepted.map_err(ended_errno)?;
        // no effect if another thread has ended the connection meanwhile
        self.state.change(State::Accepting, State::Accepted);
        Ok(())
    }

    /// Rejects the request instead of accepting it.
    ///
    /// # Errors
    /// `EOPBADSTATE`: the request is answered, or the connection is closed.
    pub(crate) fn refuse(&self, side: &Side, private_data: &[u8]) -> Result<()> {
        let early = |from| self.state.change(from, State::Disconnected);
        if !early(State::Idle) && !early(State::Enabled) {
            return Err(FiErrno::EOPBADSTATE);
        }
        if let Some(id) = &side.id {
            // an error is ignored: the peer may have ended the connection
            let _ = id.reject(private_data);
        }
        Ok(())
    }
}
