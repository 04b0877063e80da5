//! The objects of circuits, which steps create without the endpoint's lock.

use std::sync::Arc;

use super::{Shared, State};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::rdm::core::Failure;
use crate::rdm::core::link::LinkKey;
use crate::rdm::table_keys::CircuitKey;
use crate::rdm::xrc::circuit_cm::TargetCm;
use crate::verbs::{Qp, QpNumber, Target};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::xrc::{CircuitReply, CircuitRequest};
use crate::wire::rdm::{Epoch, Reason, Rejection};
use crate::xrc::XrcDomain;

impl Shared {
    /// Creates the initiator of a circuit.
    pub(in crate::rdm) fn create_initiator(&self) -> Result<Qp> {
        let (cq, entries) = {
            let guard = self.lock();
            let state = guard.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
            let xrc = state.io.xrc.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
            let requests = xrc.queues().count() * self.depth();
            (state.device_queue(), requests + state.io.max_receives())
        };
        self.make_entries(&cq, entries)?;
        Qp::create_initiator(self.pd(), &cq, &self.qp_config())
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
        #[cfg(test)]
        {
            use std::sync::atomic::Ordering::Relaxed;
            let left = self
                .missing_descriptors
                .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            if left.is_ok() {
                return Err(FiErrno::EMFILE);
            }
        }
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

    /// Creates the block of a link on a circuit, before the link is requested or accepted.
    pub(in crate::rdm) fn open_block(&self, link: LinkKey) {
        let mut block = match self.create_block(link, None) {
            Ok(block) => block,
            Err(error) => {
                info_log!(EpCtrl, "{link:?} has no connection block: {error}");
                return self.apply_event(|core, io| {
                    let port = io.port_mut(link);
                    match port.is_some_and(|port| port.request.is_some()) {
                        true => io.not_dialled(core, link, Failure::Silent),
                        false => core.broken(link, io),
                    }
                });
            }
        };
        let set = |state: &mut State| state.io.links.set_block(link, &mut block);
        let set = self.lock().as_mut().is_some_and(set);
        if !set && let Some(block) = block {
            // the link was ended meanwhile
            drop(block.leave());
        }
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
