//! The failure of an endpoint, and of its device queue. `docs/rdm.md`, "Failures".

use std::sync::Weak;

use super::{Shared, State};
use crate::errno::FiErrno;
use crate::log::warn_log;
use crate::verbs::{AsyncEvent, AsyncListener};

/// The asynchronous events of an endpoint's device queue.
pub(in crate::rdm) struct CqEvents(pub(in crate::rdm) Weak<Shared>);

impl AsyncListener for CqEvents {
    fn async_event(&self, event: AsyncEvent) {
        if let (AsyncEvent::CqError, Some(shared)) = (event, self.0.upgrade()) {
            shared.fail(FiErrno::EOVERRUN);
        }
    }
}

impl Shared {
    /// Ends all service of the endpoint, and wakes the threads that wait for it.
    #[cold]
    pub(in crate::rdm) fn fail(&self, error: FiErrno) {
        // the state may be in the middle of a change, so nothing that was delayed is posted
        if let Some(state) = self.lock_for_rma().as_mut() {
            state.fail(error);
            self.wake_sources(state);
        }
    }

    /// Wakes the threads that sleep on a completion queue for which there is an entry, or all of
    /// them if the endpoint has failed.
    #[cold]
    pub(in crate::rdm) fn wake_sources(&self, state: &mut State) {
        state.sleepers = false;
        for source in &*self.cq_sources.lock() {
            if source.is_armed() && (source.has(state) || state.failed.is_some()) {
                source.wake();
            }
            state.sleepers |= source.is_armed();
        }
    }
}

impl State {
    /// Whether a call has left the state in the middle of a change.
    pub(in crate::rdm) fn has_panicked(&self) -> bool {
        self.failed == Some(FiErrno::EOTHER)
    }

    /// Ends all service: posts to peers and reads of the queues fail with `error`. No post finds
    /// its peer any more, so that the fast paths need no check.
    #[cold]
    pub(super) fn fail(&mut self, error: FiErrno) {
        if self.failed.is_none() {
            warn_log!(EpData, "an endpoint has failed: {error}");
        }
        self.failed.get_or_insert(error);
        self.peers.clear();
    }
}
