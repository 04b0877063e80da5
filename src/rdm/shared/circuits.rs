//! The objects of circuits, which steps create without the endpoint's lock.

use std::sync::Arc;

use super::Shared;
use crate::errno::{FiErrno, Result};
use crate::rdm::circuit_cm::TargetCm;
use crate::rdm::circuits::CircuitKey;
use crate::rdm::ports::CIRCUIT_DEPTH;
use crate::verbs::{Qp, QpConfig, QpNumber, Target};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::xrc::{CircuitReply, CircuitRequest};
use crate::wire::rdm::{Epoch, Reason, Rejection};
use crate::xrc::XrcDomain;

impl Shared {
    /// Creates the initiator of a circuit.
    pub(in crate::rdm) fn create_initiator(&self) -> Result<Qp> {
        let cq = {
            let guard = self.lock();
            let state = guard.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
            let xrc = state.io.xrc.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
            let requests = xrc.queues().count() * CIRCUIT_DEPTH;
            self.make_entries(state, requests)?;
            state.device_queue()
        };
        let config = QpConfig {
            max_send_wr: CIRCUIT_DEPTH,
            max_recv_wr: 0,
            max_send_sge: 1,
            max_recv_sge: 0,
            max_inline: self.domain.device().max_inline(),
            flush: false,
        };
        Qp::create_initiator(self.pd(), &cq, &config)
    }

    /// Sets the initiator of a circuit. `None`: the circuit was ended.
    pub(in crate::rdm) fn set_initiator(
        &self,
        circuit: CircuitKey,
        qp: &Arc<Qp>,
    ) -> Option<CircuitRequest> {
        let mut guard = self.lock();
        guard.as_mut()?.io.set_initiator(circuit, qp)
    }

    /// The initiator of a circuit.
    pub(in crate::rdm) fn initiator(&self, circuit: CircuitKey) -> Option<Arc<Qp>> {
        let mut guard = self.lock();
        let xrc = guard.as_mut()?.io.xrc.as_mut()?;
        xrc.queue_mut(circuit)?.qp.clone()
    }

    fn xrc_domain(&self) -> Result<Arc<XrcDomain>> {
        let guard = self.lock();
        let xrc = guard.as_ref().and_then(|state| state.io.xrc.as_ref());
        Ok(Arc::clone(&xrc.ok_or(FiErrno::EOPBADSTATE)?.domain))
    }

    /// Creates a target.
    pub(in crate::rdm) fn create_target(&self) -> Result<Target> {
        Target::create(self.xrc_domain()?.xrcd())
    }

    /// Opens a target of the node.
    pub(in crate::rdm) fn open_target(&self, number: QpNumber) -> Result<Target> {
        Target::open(self.xrc_domain()?.xrcd(), number)
    }

    /// Adds the target of a circuit. `None`: the endpoint is closed.
    pub(in crate::rdm) fn add_target(
        &self,
        cm: &Arc<TargetCm>,
        target: &Arc<Target>,
        request: &CircuitRequest,
    ) -> Option<CircuitReply> {
        let mut guard = self.lock();
        guard.as_mut()?.io.add_target(cm, target, request)
    }

    /// The rejection of a request for a circuit for lack of resources.
    pub(in crate::rdm) fn busy(&self, request: &CircuitRequest) -> Vec<u8> {
        let guard = self.lock();
        let xrc = guard.as_ref().and_then(|state| state.io.xrc.as_ref());
        let Some(id) = xrc.map(|xrc| xrc.id) else {
            // the endpoint is closed: its peer is refused
            return Vec::new();
        };
        let rejection = Rejection {
            version: VERSION,
            epoch: Epoch::new(request.number.get()),
            id,
            newest: None,
            reason: Reason::Busy,
        };
        rejection.encode().to_vec()
    }
}
