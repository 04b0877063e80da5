//! The steps of the connection manager for circuits, and for the exchanges by which links are
//! dialled, which the domain's driver thread executes, and what follows from their events. No step
//! holds the endpoint's lock. `docs/protocol-xrc.md`, "Circuits" and "Links".

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use super::Shared;
use crate::conn::ConnectRequest;
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::rdm::core::Failure;
use crate::rdm::link::block::LinkBlock;
use crate::rdm::link::cm::Ended;
use crate::rdm::link::sidr::LinkSidr;
use crate::rdm::table_keys::CircuitKey;
use crate::rdm::xrc::circuit_cm::{InitiatorCm, NoTarget, TargetCm, Unfinished, XrcStep};
use crate::rdm::xrc::endpoint::CircuitEndpoint;
use crate::verbs::{AsyncEvent, AsyncListener, CmEvent, CmEventKind, QpNumber, Target};
use crate::wire::rdm::xrc::{CircuitReply, CircuitRequest};

impl CircuitEndpoint for Shared {
    fn circuit_event(&self, cm: &InitiatorCm, event: CmEvent) {
        let step = match event.kind {
            CmEventKind::AddrResolved => cm.id.get().and_then(|id| id.resolve_route()),
            CmEventKind::RouteResolved => cm.connect(self),
            CmEventKind::ConnectResponse => cm.establish(self, event.private_data.bytes()),
            CmEventKind::Rejected => {
                let bytes = event.private_data.bytes();
                // an acceptor that could not accept lives
                let failure = match event.is_no_listener() {
                    true => Failure::Refused,
                    false => Failure::Silent,
                };
                self.apply_event(|core, io| {
                    io.circuit_rejected(core, cm.circuit, bytes, failure);
                });
                Ok(())
            }
            CmEventKind::Unreachable => Err(FiErrno::new(event.status)),
            // the identifier owns no queue pair: the end of the connection has no meaning
            _ => Ok(()),
        };
        if let Err(error) = step {
            info_log!(
                EpCtrl,
                "circuit {:?} could not be connected: {error}",
                cm.circuit
            );
            cm.failed(self, Failure::Silent);
        }
    }

    fn circuit_broken(&self, circuit: CircuitKey) {
        self.apply_event(|_, io| io.break_circuit(circuit));
    }

    fn target_connected_or_ended(&self, cm: Arc<TargetCm>) {
        self.apply_event(|_, io| io.end_target_cm(cm));
    }

    fn target_broken(&self, target: QpNumber) {
        self.apply_event(|_, io| io.break_target(target));
    }
}

impl Shared {
    /// The endpoint, as its circuits use it.
    fn circuit_endpoint(&self) -> Weak<dyn CircuitEndpoint> {
        self.weak()
    }

    /// What follows from an event of an exchange.
    pub(super) fn follow_exchange(&self, sidr: &LinkSidr, event: &CmEvent) {
        let step = match event.kind {
            CmEventKind::AddrResolved => sidr.id.get().and_then(|id| id.resolve_route()),
            CmEventKind::RouteResolved => {
                let id = sidr.id.get();
                id.and_then(|id| id.request_service(&sidr.request))
            }
            CmEventKind::Established => {
                let answer = event.private_data.bytes();
                self.apply_event(|core, io| {
                    if io.is_exchange(sidr.link, sidr) {
                        io.answered(core, sidr.link, answer);
                    }
                });
                Ok(())
            }
            CmEventKind::Unreachable | CmEventKind::Rejected => {
                let failure = match event.is_no_service() {
                    true => Failure::Refused,
                    false => Failure::Silent,
                };
                sidr.failed(self, failure);
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = step {
            info_log!(EpCtrl, "{:?} could not be dialled: {error}", sidr.link);
            sidr.failed(self, Failure::Silent);
        }
    }
}

impl InitiatorCm {
    fn dial(&self, shared: &Shared, to: SocketAddr) -> Result<()> {
        let mut registry = shared.driver().dispatcher().registry();
        let id = Arc::new(registry.channel(shared.domain.device())?.create_id()?);
        self.id.set(registry, &id, self.target());
        shared.tuning().set_traffic_class(&id);
        let (from, to) = shared.path(to);
        id.resolve_addr(from, to)
    }

    fn connect(&self, shared: &Shared) -> Result<()> {
        let id = self.id.get()?;
        let qp = Arc::new(shared.create_initiator()?);
        qp.advance_to_init(&id)?;
        shared.domain.device().listen(qp.object(), self.listener());
        let Some(request) = shared.set_initiator(self.circuit, &qp) else {
            // the circuit was ended meanwhile
            shared.domain.device().unlisten(qp.object());
            return Err(FiErrno::ECANCELED);
        };
        let tuning = shared.tuning();
        tuning.set_ack_timeout(&id);
        id.connect_with(qp.qp_number(), &tuning.conn_param(&request.encode()))
    }

    /// The reply has arrived.
    fn establish(&self, shared: &Shared, reply: &[u8]) -> Result<()> {
        let id = self.id.get()?;
        let qp = shared.initiator(self.circuit).ok_or(FiErrno::ECANCELED)?;
        let reply = CircuitReply::decode(reply).map_err(|_| FiErrno::ECONNREFUSED)?;
        qp.advance_to_rts(&id)?;
        id.establish()?;
        shared.apply_event(|core, io| io.circuit_up(core, self.circuit, &reply));
        Ok(())
    }

    fn failed(&self, shared: &Shared, failure: Failure) {
        shared.apply_event(|core, io| io.circuit_not_dialled(core, self.circuit, failure, None));
    }
}

/// The events of an endpoint's receive queue.
pub(in crate::rdm) struct SrqEvents(pub(in crate::rdm) Weak<Shared>);

impl AsyncListener for SrqEvents {
    fn async_event(&self, event: AsyncEvent) {
        if let (AsyncEvent::SrqLimit, Some(shared)) = (event, self.0.upgrade()) {
            shared.apply_event(|core, io| io.receives_low(core.link_count()));
        }
    }
}

impl TargetCm {
    /// Listens to the events of the target.
    fn listen(&self, shared: &Shared, target: &Target) {
        // set once: a handle has one target
        let _ = self.target.set(target.number());
        shared
            .domain
            .device()
            .listen(target.object(), self.listener());
    }

    /// Opens a target of the node. With `initiator`: if it is connected to that, and receives.
    fn open(
        &self,
        shared: &Shared,
        number: QpNumber,
        initiator: Option<QpNumber>,
    ) -> std::result::Result<Arc<Target>, NoTarget> {
        let opened = shared.open_target(number);
        let target = opened.map_err(|error| match error.code() {
            libc::EINVAL | libc::ENOENT => NoTarget::Gone,
            _ => NoTarget::Unknown,
        })?;
        // before the query: an event between both would get lost
        self.listen(shared, &target);
        let fits = initiator.map_or(Ok(true), |initiator| {
            let state = target.query().map_err(|_| NoTarget::Unknown)?;
            Ok(state.receives && state.peer == initiator)
        });
        if fits != Ok(true) {
            shared.domain.device().unlisten(target.object());
            return Err(fits.err().unwrap_or(NoTarget::Gone));
        }
        Ok(Arc::new(target))
    }

    /// Creates the target of a circuit, and replies.
    fn accept(
        self: &Arc<Self>,
        shared: &Shared,
        held: ConnectRequest,
        request: &CircuitRequest,
    ) -> Result<()> {
        let (id, _) = held.take().ok_or(FiErrno::EINVAL)?;
        let id = Arc::new(id);
        let registry = shared.driver().dispatcher().registry();
        self.id.set(registry, &id, self.events());
        let tuning = shared.tuning();
        let created = shared.create_target().and_then(|target| {
            tuning.set_traffic_class(&id);
            tuning.set_ack_timeout(&id);
            target.advance_to_rts(&id, tuning.min_rnr_timer)?;
            Ok(Arc::new(target))
        });
        let target = created.inspect_err(|_| {
            let _ = id.reject(&shared.busy(request));
        })?;
        self.listen(shared, &target);
        // the first link request may arrive before the call returns
        let reply = shared.add_target(self, &target, request);
        let reply = reply.ok_or(FiErrno::EOPBADSTATE)?;
        id.accept_with(target.number(), &tuning.conn_param(&reply.encode()))
            .inspect_err(|_| shared.apply_event(|_, io| io.break_target(target.number())))
    }
}

impl LinkSidr {
    fn dial(&self, shared: &Shared, to: SocketAddr) -> Result<()> {
        let mut registry = shared.driver().dispatcher().registry();
        let id = Arc::new(registry.channel(shared.domain.device())?.create_sidr_id()?);
        self.id.set(registry, &id, self.target());
        let (from, to) = shared.path(to);
        id.resolve_addr(from, to)
    }

    fn failed(&self, shared: &Shared, failure: Failure) {
        shared.apply_event(|core, io| {
            if io.is_exchange(self.link, self) {
                io.exchange_failed(core, self.link, failure);
            }
        });
    }
}

impl XrcStep {
    /// Executes the step.
    pub(in crate::rdm) fn execute(self, shared: &Shared) {
        match self {
            Self::DialCircuit(cm, to) => {
                if let Err(error) = cm.dial(shared, to) {
                    info_log!(EpCtrl, "{to} cannot be dialled: {error}");
                    cm.failed(shared, Failure::Silent);
                }
            }
            Self::AcceptCircuit(held, request) => {
                let cm = TargetCm::new(&shared.circuit_endpoint());
                if let Err(error) = cm.accept(shared, held, &request) {
                    info_log!(EpCtrl, "a circuit could not be accepted: {error}");
                    drop(cm.id.take(shared.driver().dispatcher()));
                }
            }
            Self::DialLink(sidr, to) => {
                if let Err(error) = sidr.dial(shared, to) {
                    info_log!(EpCtrl, "{to} cannot be dialled: {error}");
                    sidr.failed(shared, Failure::Silent);
                }
            }
            Self::AnswerLink(held, mut answer, link) => {
                if let Some(link) = link {
                    shared.apply_event(|_, io| io.check_answer(link, &mut answer));
                }
                let answered = held.take().ok_or(FiErrno::EINVAL);
                let answered = answered.and_then(|(id, _)| id.answer_service(&answer));
                match (answered, link) {
                    (Ok(()), Some(link)) => shared.accepted(link),
                    (Ok(()), None) => {}
                    (Err(error), link) => {
                        info_log!(EpCtrl, "a link could not be answered: {error}");
                        if let Some(link) = link {
                            shared.apply_event(|core, io| core.broken(link, io));
                        }
                    }
                }
            }
            Self::EndExchange(sidr) => drop(sidr.id.take(shared.driver().dispatcher())),
            Self::FailCircuit(circuit, qp) => {
                // an error is that of a queue pair that is in this state already
                let _ = qp.set_error();
                shared.apply_event(|_, io| io.circuit_failed(circuit));
            }
            Self::OpenTarget(cm, number, initiator) => {
                let opened = cm.open(shared, number, initiator);
                let object = opened.as_ref().ok().map(|target| target.object());
                let mut held = false;
                shared.apply_event(|core, io| held = io.target_opened(core, number, opened));
                if let Some(object) = object.filter(|_| !held) {
                    // closed by now
                    shared.domain.device().unlisten(object);
                }
            }
            Self::FailTarget(target) => {
                // an error is that of a target that is in this state already
                let _ = target.set_error();
                shared.apply_event(|core, io| io.target_failed(core, target.number()));
            }
            Self::EndCircuitCm(cm) => drop(cm.id.take(shared.driver().dispatcher())),
            Self::EndTargetCm(cm) => drop(cm.id.take(shared.driver().dispatcher())),
            Self::DestroyCircuit(cm, qp, unfinished) => {
                if let Some(qp) = &qp {
                    shared.domain.device().unlisten(qp.object());
                }
                drop(cm.id.take(shared.driver().dispatcher()));
                let unfinished: Vec<_> = unfinished
                    .into_iter()
                    .map(|Unfinished(link, initiator, ended)| {
                        drop(initiator);
                        (link, ended)
                    })
                    .collect();
                drop(qp);
                for (link, Ended { reads, rma }) in unfinished {
                    shared.apply_event(|core, io| {
                        io.reads_ended(link, reads);
                        io.rma_ended(core, &rma);
                    });
                }
            }
            Self::OpenBlock(link) => shared.open_block(link),
            Self::CloseBlock(block, initiator) => {
                let block = block.map(LinkBlock::leave);
                drop(initiator);
                drop(block);
            }
            Self::CloseTarget(cm, target) => {
                if let Some(target) = target {
                    shared.domain.device().unlisten(target.object());
                }
                drop(cm.id.take(shared.driver().dispatcher()));
            }
            Self::Look => {}
            Self::Arm(srq, limit) => {
                if let Err(error) = srq.arm_limit(limit) {
                    info_log!(EpData, "ibv_modify_srq: {error}");
                }
            }
        }
    }
}
