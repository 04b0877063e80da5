//! The end of a connection.

use super::{Connection, Registry, Side, State};
use crate::errno::{FiErrno, Result};
use crate::wire::cm_data::CmData;

impl Connection {
    /// Starts to end an established connection: changes the state, so that nothing is posted any
    /// more. The caller takes back what the peer has of it, and calls [`Self::disconnect`] and
    /// [`Self::report_end`].
    ///
    /// # Errors
    /// `ENOTCONN`: not connected.
    pub(crate) fn begin_shutdown(&self) -> Result<()> {
        if self.state.change(State::Connected, State::Disconnected) {
            Ok(())
        } else {
            Err(FiErrno::ENOTCONN)
        }
    }

    /// The connection manager or the device has ended an established connection: reports the end.
    /// Returns false if the connection was not established.
    pub(crate) fn end(&self) -> bool {
        let ended = self.begin_shutdown().is_ok();
        if ended {
            self.report_end();
        }
        ended
    }

    /// The queue pair has failed.
    pub(crate) fn qp_failed(&self) {
        // before the peer's confirmation is read, that step reports the end
        if !self.state.change(State::Accepted, State::Broken) {
            self.end();
        }
    }

    /// Disconnects, or answers the peer's disconnect, and moves the queue pair to its error state.
    /// Does nothing if there was no connection, or it has ended.
    pub(crate) fn disconnect(&self, side: &Side) {
        if let Some(id) = &side.id {
            let _ = id.disconnect();
        }
    }

    /// Sets the state [`State::Closed`], discards the events of the identifier and the untaken
    /// results, and rejects a request that was not answered. Returns the state before; `None` if it
    /// is closed already. `registry` is that of the dispatcher, if one is bound.
    pub(crate) fn begin_close(
        &self,
        side: &Side,
        registry: Option<&mut Registry<'_>>,
    ) -> Option<State> {
        let old = self.state.get();
        if old == State::Closed {
            return None;
        }
        self.state.set(State::Closed);
        if let Some(registry) = registry {
            self.unbind(side, registry);
        }
        if side.passive
            && matches!(old, State::Idle | State::Enabled)
            && let Some(id) = &side.id
        {
            let _ = id.reject(CmData::EMPTY.encoded());
        }
        Some(old)
    }
}
