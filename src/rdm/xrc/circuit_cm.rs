//! The connections of circuits: their identifiers, their events, and the steps of endpoints on XRC.
//! `docs/protocol-xrc.md`, "Circuits" and "Links". `shared/circuit_steps.rs` executes the steps,
//! and has what follows from the events.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};

use super::endpoint::CircuitEndpoint;
use crate::conn::{CmTarget, ConnectRequest};
use crate::initiator::Initiator;
use crate::rdm::core::link::LinkKey;
use crate::rdm::link::block::LinkBlock;
use crate::rdm::link::cm::{Ended, Id};
use crate::rdm::link::initiator_sq::LinkSq;
use crate::rdm::link::sidr::LinkSidr;
use crate::rdm::table_keys::CircuitKey;
use crate::verbs::{AsyncEvent, AsyncListener, CmEvent, CmEventKind, Qp, QpNumber, Srq, Target};
use crate::wire::rdm::xrc::{CircuitRequest, LinkRequest};

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
    endpoint: Weak<dyn CircuitEndpoint>,
    pub(in crate::rdm) circuit: CircuitKey,
    pub(in crate::rdm) id: Id,
}

impl std::fmt::Debug for InitiatorCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "InitiatorCm({:?})", self.circuit)
    }
}

impl InitiatorCm {
    pub(in crate::rdm) fn new(
        endpoint: &Weak<dyn CircuitEndpoint>,
        circuit: CircuitKey,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            endpoint: Weak::clone(endpoint),
            circuit,
            id: Id::default(),
        })
    }

    /// Receives the events of the identifier.
    pub(in crate::rdm) fn target(&self) -> Weak<dyn CmTarget> {
        let target: Weak<Self> = Weak::clone(&self.this);
        target
    }

    /// Receives the events of the initiator.
    pub(in crate::rdm) fn listener(&self) -> Weak<dyn AsyncListener> {
        let listener: Weak<Self> = Weak::clone(&self.this);
        listener
    }
}

impl CmTarget for InitiatorCm {
    fn cm_event(&self, event: CmEvent) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.circuit_event(self, event);
        }
    }
}

impl AsyncListener for InitiatorCm {
    fn async_event(&self, event: AsyncEvent) {
        if let (AsyncEvent::QpError | AsyncEvent::DeviceFatal, Some(endpoint)) =
            (event, self.endpoint.upgrade())
        {
            endpoint.circuit_broken(self.circuit);
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
    endpoint: Weak<dyn CircuitEndpoint>,
    pub(in crate::rdm) target: OnceLock<QpNumber>,
    pub(in crate::rdm) id: Id,
}

impl std::fmt::Debug for TargetCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TargetCm({:?})", self.target)
    }
}

impl TargetCm {
    pub(in crate::rdm) fn new(endpoint: &Weak<dyn CircuitEndpoint>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            endpoint: Weak::clone(endpoint),
            target: OnceLock::new(),
            id: Id::default(),
        })
    }

    /// Receives the events of the identifier.
    pub(in crate::rdm) fn events(&self) -> Weak<dyn CmTarget> {
        let events: Weak<Self> = Weak::clone(&self.this);
        events
    }

    /// Receives the events of the target.
    pub(in crate::rdm) fn listener(&self) -> Weak<dyn AsyncListener> {
        let listener: Weak<Self> = Weak::clone(&self.this);
        listener
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
        if let (true, Some(endpoint), Some(this)) =
            (over, self.endpoint.upgrade(), self.this.upgrade())
        {
            // not under the dispatcher's lock
            endpoint.target_connected_or_ended(this);
        }
    }
}

impl AsyncListener for TargetCm {
    fn async_event(&self, event: AsyncEvent) {
        if let (AsyncEvent::QpError | AsyncEvent::DeviceFatal, Some(endpoint), Some(target)) =
            (event, self.endpoint.upgrade(), self.target.get())
        {
            endpoint.target_broken(*target);
        }
    }
}
