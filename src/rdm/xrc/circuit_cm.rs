//! The connections of circuits: the steps of the connection manager, which the domain's driver
//! thread executes, and its events. No step holds the endpoint's lock. `docs/protocol-xrc.md`,
//! "Circuits" and "Links".

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};

use crate::conn::{CmTarget, ConnectRequest};
use crate::errno::{FiErrno, Result};
use crate::initiator::Initiator;
use crate::log::info_log;
use crate::rdm::core::Failure;
use crate::rdm::core::link::LinkKey;
use crate::rdm::keys::CircuitKey;
use crate::rdm::link::block::LinkBlock;
use crate::rdm::link::cm::{Ended, Id};
use crate::rdm::link::initiator_sq::LinkSq;
use crate::rdm::link::sidr::LinkSidr;
use crate::rdm::shared::Shared;
use crate::verbs::{AsyncEvent, AsyncListener, CmEvent, CmEventKind, Qp, QpNumber, Srq, Target};
use crate::wire::rdm::xrc::{CircuitReply, CircuitRequest, LinkRequest};

/// A request that waits for its answer.
#[derive(Debug)]
pub(in crate::rdm) enum Held {
    /// A connection request, for a link of its own queue pair.
    Connect(ConnectRequest),
    /// A request for a link on a circuit.
    Link(ConnectRequest, Box<LinkRequest>),
}

/// What had not completed of a link when its circuit was destroyed, and what has posted it.
#[derive(Debug)]
pub(in crate::rdm) struct Unfinished(
    pub(in crate::rdm) LinkKey,
    pub(in crate::rdm) Option<Box<Initiator<LinkSq>>>,
    pub(in crate::rdm) Ended,
);

/// A step of an endpoint on XRC.
#[derive(Debug)]
pub(in crate::rdm) enum XrcStep {
    /// Dial a circuit.
    DialCircuit(Arc<InitiatorCm>, SocketAddr),
    /// Accept a request for a circuit.
    AcceptCircuit(ConnectRequest, CircuitRequest),
    /// Send a request for a link.
    DialLink(Arc<LinkSidr>, SocketAddr),
    /// Answer a request for a link; the reply to one that was accepted has its link.
    AnswerLink(ConnectRequest, Vec<u8>, Option<LinkKey>),
    /// End the exchange of a link.
    EndExchange(Arc<LinkSidr>),
    /// Move an initiator to its error state.
    FailCircuit(CircuitKey, Arc<Qp>),
    /// Open a target of the node that a peer has named, or through which a packet has come. It is
    /// that of the circuit if it is connected to this initiator.
    OpenTarget(Arc<TargetCm>, QpNumber, Option<QpNumber>),
    /// Move a target to its error state.
    FailTarget(Arc<Target>),
    /// End the identifier of a circuit, which owns no queue pair, at its initiator or its target.
    EndCircuitCm(Arc<InitiatorCm>),
    EndTargetCm(Arc<TargetCm>),
    /// Destroy an initiator and its identifier, and then end what had not completed, of each link.
    DestroyCircuit(Arc<InitiatorCm>, Option<Arc<Qp>>, Vec<Unfinished>),
    /// Close the handle of a target, and destroy its identifier.
    CloseTarget(Arc<TargetCm>, Option<Arc<Target>>),
    /// Create the connection block of a link.
    OpenBlock(LinkKey),
    /// End the connection block of a link, and what posts RMA to it.
    CloseBlock(Option<LinkBlock>, Option<Box<Initiator<LinkSq>>>),
    /// The driver looks at links that end.
    Look,
    /// Request the event of a receive queue with fewer receives than this.
    Arm(Arc<Srq>, u32),
}

/// The connection of a circuit, at its initiator.
pub(in crate::rdm) struct InitiatorCm {
    this: Weak<Self>,
    shared: Weak<Shared>,
    circuit: CircuitKey,
    id: Id,
}

impl std::fmt::Debug for InitiatorCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "InitiatorCm({:?})", self.circuit)
    }
}

impl InitiatorCm {
    pub(in crate::rdm) fn new(shared: &Weak<Shared>, circuit: CircuitKey) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            shared: Weak::clone(shared),
            circuit,
            id: Id::default(),
        })
    }

    fn dial(&self, shared: &Shared, to: SocketAddr) -> Result<()> {
        let id = {
            let mut registry = shared.driver().dispatcher().registry();
            let id = Arc::new(registry.channel(shared.domain.device())?.create_id()?);
            let target: Weak<Self> = Weak::clone(&self.this);
            registry.insert(id.object(), target);
            id
        };
        self.id.set(&id);
        shared.tuning().set_traffic_class(&id);
        let (from, to) = shared.path(to);
        id.resolve_addr(from, to)
    }

    fn connect(&self, shared: &Shared) -> Result<()> {
        let id = self.id.get()?;
        let qp = Arc::new(shared.create_initiator()?);
        qp.advance_to_init(&id)?;
        let listener: Weak<Self> = Weak::clone(&self.this);
        shared.domain.device().listen(qp.object(), listener);
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

impl CmTarget for InitiatorCm {
    fn cm_event(&self, event: CmEvent) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let step = match event.kind {
            CmEventKind::AddrResolved => self.id.get().and_then(|id| id.resolve_route()),
            CmEventKind::RouteResolved => self.connect(&shared),
            CmEventKind::ConnectResponse => self.establish(&shared, event.private_data.bytes()),
            CmEventKind::Rejected => {
                let bytes = event.private_data.bytes();
                // an acceptor that could not accept lives
                let failure = match event.is_no_listener() {
                    true => Failure::Refused,
                    false => Failure::Silent,
                };
                shared.apply_event(|core, io| {
                    io.circuit_rejected(core, self.circuit, bytes, failure);
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
                self.circuit
            );
            self.failed(&shared, Failure::Silent);
        }
    }
}

impl AsyncListener for InitiatorCm {
    fn async_event(&self, event: AsyncEvent) {
        if let (AsyncEvent::QpError | AsyncEvent::DeviceFatal, Some(shared)) =
            (event, self.shared.upgrade())
        {
            shared.apply_event(|_, io| io.break_circuit(self.circuit));
        }
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

/// Why a target is not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum NoTarget {
    /// The domain has no such target, or it receives nothing, or not from this circuit.
    Gone,
    /// It may exist.
    Unknown,
}

/// A handle of a target: its events, and its connection at the process that has created it.
pub(in crate::rdm) struct TargetCm {
    this: Weak<Self>,
    shared: Weak<Shared>,
    target: OnceLock<QpNumber>,
    id: Id,
}

impl std::fmt::Debug for TargetCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TargetCm({:?})", self.target)
    }
}

impl TargetCm {
    pub(in crate::rdm) fn new(shared: &Weak<Shared>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            shared: Weak::clone(shared),
            target: OnceLock::new(),
            id: Id::default(),
        })
    }

    /// Listens to the events of the target.
    fn listen(&self, shared: &Shared, target: &Target) {
        // set once: a handle has one target
        let _ = self.target.set(target.number());
        let listener: Weak<Self> = Weak::clone(&self.this);
        shared.domain.device().listen(target.object(), listener);
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
        let events: Weak<Self> = Weak::clone(&self.this);
        let mut registry = shared.driver().dispatcher().registry();
        registry.insert(id.object(), events);
        drop(registry);
        self.id.set(&id);
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

impl CmTarget for TargetCm {
    /// The identifier owns no queue pair, and the target receives since the reply: neither needs
    /// the other.
    fn cm_event(&self, event: CmEvent) {
        let over = matches!(
            event.kind,
            CmEventKind::Established
                | CmEventKind::Disconnected
                | CmEventKind::Rejected
                | CmEventKind::Unreachable
        );
        if let (true, Some(shared), Some(this)) = (over, self.shared.upgrade(), self.this.upgrade())
        {
            // not under the dispatcher's lock
            shared.apply_event(|_, io| io.end_target_cm(this));
        }
    }
}

impl AsyncListener for TargetCm {
    fn async_event(&self, event: AsyncEvent) {
        if let (AsyncEvent::QpError | AsyncEvent::DeviceFatal, Some(shared), Some(target)) =
            (event, self.shared.upgrade(), self.target.get())
        {
            shared.apply_event(|_, io| io.break_target(*target));
        }
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
                let cm = TargetCm::new(&shared.weak());
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
