//! Keepalive of a connected endpoint: each beat probes a silent peer. On XRC also while the peer's
//! request is awaited.

use super::shared::{Control, Shared};
use crate::conn::State;
use crate::queue::keepalive::Probed;

impl Probed for Shared {
    fn beat(&self) -> bool {
        // a control call is under way and may take long: the next beat probes
        let Some(control) = self.control.try_lock() else {
            return true;
        };
        // under the lock: `CircuitUser::send_end_notice` acquires it when the connection has ended
        self.conn.state.is(State::Connected) && self.probe_silent(&control)
    }
}

impl Shared {
    /// Probes the peer, if it is silent. Returns whether the endpoint has a queue pair.
    pub(super) fn probe_silent(&self, control: &Control) -> bool {
        let (Some(qp), Some((binding, member))) = (&control.qp, control.engine_queue()) else {
            return false;
        };
        // the application may not read this queue, which may hold the last probe's completion
        let _ = binding.cq.progress_engine_requests();
        let peer = control.xrc.peer_srq;
        self.silence.probe(qp, peer, member, &self.slots);
        true
    }
}
