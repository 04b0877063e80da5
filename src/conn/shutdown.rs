//! The end of a connection.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::{Connection, Registry, Side, State};
use crate::errno::{FiErrno, Result};
use crate::verbs::{PrivateData, Qp};

/// How long a queue pair that the peer has disconnected is not moved to ERR while requests are
/// under way, if the device does not report whether a flushed request was executed.
///
/// A device that refuses a request moves its queue pair to ERR, and then its process disconnects.
/// The disconnect request can be processed before the negative acknowledgement: they belong to
/// different queue pairs. In ERR the device of the initiator ignores the latter (Linux:
/// `drain_resp_pkts` in `drivers/infiniband/sw/rxe/rxe_comp.c`).
///
/// Requests without a completion count too: the device reports no success of these, so whether they
/// have been executed is not known here, but one that is refused has an error entry (`fi_cq(3)`).
pub(crate) const REFUSAL_WAIT: Duration = Duration::from_millis(250);

/// Time limit for a device that has reported an error of a queue pair to move it to ERR.
const ERROR_WAIT: Duration = Duration::from_millis(100);

/// The error of a queue pair that its device has reported by an asynchronous event.
///
/// The event can come before the device has answered the request that it refuses: rxe raises
/// `IBV_EVENT_QP_ACCESS_ERR` first (Linux 7.2), then sends the negative acknowledgement, and moves
/// the queue pair to ERR last. If the process moves it there before, the peer gets no answer, and
/// does not know that its request was refused.
#[derive(Debug, Default)]
pub(crate) struct DeviceError {
    reported: OnceLock<Instant>,
}

impl DeviceError {
    /// The device has reported an error.
    pub(crate) fn note(&self) {
        let _ = self.reported.set(Instant::now());
    }

    /// Whether the device has reported an error, at most [`ERROR_WAIT`] ago, and has not moved the
    /// queue pair to ERR yet. The process then must not do so.
    pub(crate) fn is_unanswered(&self, qp: &Qp) -> bool {
        let recent = self
            .reported
            .get()
            .is_some_and(|at| at.elapsed() < ERROR_WAIT);
        recent && qp.is_in_error() == Ok(false)
    }

    /// Waits until the device has moved the queue pair to ERR, if it has reported an error; at most
    /// [`ERROR_WAIT`].
    pub(crate) fn await_answer(&self, qp: &Qp) {
        while self.is_unanswered(qp) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Connection {
    /// The peer has disconnected.
    pub(super) fn note_disconnect(&self) {
        let _ = self.disconnected.set(Instant::now());
    }

    /// When the peer has disconnected.
    pub(crate) fn disconnected(&self) -> Option<Instant> {
        self.disconnected.get().copied()
    }

    /// Begins to end an established connection: changes the state, so that no further operation is
    /// posted. The caller then returns the keys that it holds of the peer, and calls
    /// [`Self::disconnect`] and [`Self::report_end`].
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

    /// Reports the end of an established connection that the connection manager or the device has
    /// ended. Returns false if the connection was not established.
    pub(crate) fn end(&self) -> bool {
        let ended = self.begin_shutdown().is_ok();
        if ended {
            self.report_end();
        }
        ended
    }

    /// Processes the failure of the queue pair or of one of the circuits, or the peer's notice of
    /// the end: reports the end of an established connection, or the failure of a requested one.
    /// After the reply to the peer's request is begun, the event of the peer's confirmation or of a
    /// failure reports the result; on circuits, the answer to the reciprocal request or its
    /// failure.
    pub(crate) fn note_failure(&self) {
        // another thread can change the state between two of these steps, to that of a later step
        let replied = self.state.change(State::Accepting, State::Broken)
            || self.state.change(State::Accepted, State::Broken);
        if replied {
            return;
        }
        if self.state.change(State::Connecting, State::Disconnected) {
            self.report_failure(FiErrno::ECONNABORTED, 0, PrivateData::EMPTY);
        } else {
            self.end();
        }
    }

    /// Disconnects, or answers the peer's disconnect, and moves the queue pair to its error state.
    /// No effect if no connection exists.
    pub(crate) fn disconnect(&self, side: &Side) {
        if let Some(id) = &side.id {
            let _ = id.disconnect();
        }
    }

    /// Sets the state [`State::Closed`], discards the events of the identifier and the untaken
    /// results, and rejects a request that was not answered, with the private data `refusal`.
    /// Returns the previous state; `None` if the connection is closed already. `registry` is that
    /// of the dispatcher, if one is bound.
    pub(crate) fn begin_close(
        &self,
        side: &Side,
        registry: Option<&mut Registry<'_>>,
        refusal: &[u8],
    ) -> Option<State> {
        let old = self.state.get();
        if old == State::Closed {
            return None;
        }
        self.state.set(State::Closed);
        self.unbind(side, registry);
        if side.passive
            && matches!(old, State::Idle | State::Enabled)
            && let Some(id) = &side.id
        {
            let _ = id.reject(refusal);
        }
        Some(old)
    }
}
