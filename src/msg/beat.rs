//! Keepalive of a connected endpoint: each beat probes a silent peer. On XRC also while the peer's
//! request is awaited, and not while another endpoint has operations under way on the circuit.

use std::sync::Weak;

use super::shared::{Control, Shared};
use crate::conn::{CircuitUser, State};
use crate::queue::keepalive::Probed;

impl Probed for Shared {
    fn beat(&self) -> bool {
        if self.conn.state.is(State::Connected) && self.follows_other_operations() {
            return true;
        }
        // a control call is under way and may take long: the next beat probes
        let Some(control) = self.control.try_lock() else {
            return true;
        };
        // under the lock: `CircuitUser::send_end_notice` acquires it when the connection has ended
        self.conn.state.is(State::Connected) && self.probe_silent(&control)
    }
}

impl Shared {
    /// Whether a probe would wait behind operations of other endpoints. When this endpoint and its
    /// peer have closed meanwhile, it would find no receive queue, and break the circuit. Those of
    /// the operations that are at the device probe the path themselves. Others count too, and probe
    /// nothing: an operation that is deferred, or that has completed in a device queue which is not
    /// polled further because the application's completion queue is full.
    fn follows_other_operations(&self) -> bool {
        let user: Weak<dyn CircuitUser> = self.weak();
        self.own_circuit()
            .is_some_and(|circuit| circuit.others_have_operations(&user))
    }

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
