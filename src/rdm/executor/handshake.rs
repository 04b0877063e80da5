//! The handshakes of circuits and of links on circuits. `docs/protocol-xrc.md`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Executor, Todo};
use crate::conn::ConnectRequest;
use crate::log::warn_log;
use crate::rdm::circuit_cm::{Held, LinkSidr, TargetCm, XrcStep};
use crate::rdm::circuits::CircuitKey;
use crate::rdm::core::{self, Core};
use crate::rdm::link::LinkKey;
use crate::rdm::link_cm::Step;
use crate::rdm::ports::{HeldTarget, Port};
use crate::verbs::{Qp, Target};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::xrc::{
    CircuitReply, CircuitRequest, Inbox, LinkRejection, LinkReply, LinkRequest, OnCircuit, Presence,
};
use crate::wire::rdm::{Bad, EndpointId, Epoch, Listener, Reason, Rejection, Reply, Request};

/// How long the answer to a link request is awaited.
pub(super) const ANSWER: Duration = Duration::from_secs(3);
/// How many targets without links are held for circuits of one endpoint, and in all.
const LOOSE_OF_ONE: usize = 4;
const LOOSE_OF_ALL: usize = 64;

impl Executor {
    /// Dials a link: chooses a circuit first.
    pub(super) fn dial_on_circuit(&mut self, link: LinkKey, to: Listener, request: &Request) {
        let Some(tag) = self.xrc.as_mut().and_then(|xrc| xrc.add_tag(link).ok()) else {
            self.add_link(link, None, None);
            return self.todo.push_back(Todo::NotDialled(link));
        };
        let mut port = Port::new(tag, to);
        port.request = Some(*request);
        self.add_link(link, None, Some(Box::new(port)));
        if let Some(xrc) = &mut self.xrc {
            let choice = xrc.circuits.choose(link, to);
            self.follow(link, choice);
        }
    }

    /// Sends the request for a link.
    pub(super) fn request_link(&mut self, link: LinkKey, circuit: Option<OnCircuit>) {
        let Some(xrc) = &self.xrc else {
            return;
        };
        let (node, srq) = (xrc.node, xrc.srq);
        let Some(port) = self.links.get_mut(link).and_then(|on| on.port.as_mut()) else {
            return;
        };
        let Some(request) = port.request else {
            return;
        };
        let request = LinkRequest {
            request,
            node,
            circuit,
            ended: None,
            inbox: Inbox { srq, tag: port.tag },
            presence: Presence::default(),
            failed: None,
        };
        let sidr = LinkSidr::new(&self.shared, link, &request);
        let limit = Instant::now() + ANSWER;
        let former = port.exchange.replace((Arc::clone(&sidr), limit));
        let to = port.address.socket_addr();
        if let Some((former, _)) = former {
            self.xrc_step(XrcStep::EndExchange(former));
        }
        self.xrc_step(XrcStep::DialLink(sidr, to));
    }

    /// Whether an exchange is the present one of a link.
    pub(in crate::rdm) fn is_exchange(&mut self, link: LinkKey, sidr: &LinkSidr) -> bool {
        let exchange = self.port_mut(link).and_then(|port| port.exchange.as_ref());
        exchange.is_some_and(|(of, _)| std::ptr::eq(Arc::as_ptr(of), sidr))
    }

    pub(super) fn end_exchange(&mut self, link: LinkKey) {
        let exchange = self.port_mut(link).and_then(|port| port.exchange.take());
        if let Some((sidr, _)) = exchange {
            self.xrc_step(XrcStep::EndExchange(sidr));
        }
    }

    /// A link request has no answer. One that asked for the node alone is followed by a request for
    /// a circuit, which tells an endpoint on RC from an address without a process.
    pub(in crate::rdm) fn exchange_failed(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        failure: core::Failure,
    ) {
        self.end_exchange(link);
        let port = self.port_mut(link).filter(|port| port.circuit.is_none());
        let address = port.map(|port| port.address);
        match (address, &mut self.xrc, failure) {
            (Some(address), Some(xrc), core::Failure::Refused) => {
                let choice = xrc.circuits.dial(link, address, false);
                self.follow(link, choice);
            }
            _ => self.not_dialled(core, link, failure),
        }
    }

    /// The dial of a link has failed.
    pub(in crate::rdm) fn not_dialled(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        failure: core::Failure,
    ) {
        core.failed(link, failure, self);
        self.remove_dialled(link);
    }

    /// The answer to a link request has arrived.
    pub(in crate::rdm) fn answered(&mut self, core: &mut Core<Self>, link: LinkKey, answer: &[u8]) {
        self.end_exchange(link);
        let Some(port) = self.links.get_mut(link).and_then(|on| on.port.as_mut()) else {
            return;
        };
        let (address, circuit) = (port.address, port.circuit);
        if self.links.ends(link) {
            return;
        }
        let Some(port) = self.port_mut(link) else {
            return;
        };
        if let Ok(answer) = LinkReply::decode(answer) {
            port.inbox = Some(answer.inbox);
            port.peer = Some(answer.reply.id);
            port.attached = circuit.is_some();
            if let Some(xrc) = &mut self.xrc {
                xrc.circuits.learn(address, answer.node);
            }
            let reply = circuit.map(|_| answer.reply);
            return core.replied_with(link, reply, self);
        }
        let Ok(answer) = LinkRejection::decode(answer) else {
            core.rejected_by(link, None, self);
            return self.remove_dialled(link);
        };
        let fits = port.request.map(|request| request.epoch) == answer.rejection.epoch;
        if answer.rejection.reason == Reason::Node && fits {
            port.circuit = None;
            if let Some(circuit) = circuit {
                self.leave_circuit(circuit, link);
            }
            if let Some(xrc) = &mut self.xrc {
                let choice = xrc.circuits.elsewhere(link, address, answer.node, circuit);
                self.follow(link, choice);
            }
            return;
        }
        core.rejected_by(link, Some(answer.rejection), self);
        self.remove_dialled(link);
    }

    /// The initiator of a circuit was created. `None`: the circuit was ended.
    pub(in crate::rdm) fn set_initiator(
        &mut self,
        circuit: CircuitKey,
        qp: &Arc<Qp>,
    ) -> Option<CircuitRequest> {
        let xrc = self.xrc.as_mut()?;
        let number = xrc.circuits.number(circuit)?;
        let (id, auth, node) = (xrc.id, xrc.auth, xrc.node);
        let queue = xrc.queue_mut(circuit)?;
        if queue.failing.is_some() {
            return None;
        }
        queue.qp = Some(Arc::clone(qp));
        Some(CircuitRequest {
            number,
            id,
            auth,
            node,
            initiator: qp.qp_number(),
        })
    }

    /// A request for a circuit was rejected.
    pub(in crate::rdm) fn circuit_rejected(
        &mut self,
        core: &mut Core<Self>,
        circuit: CircuitKey,
        private_data: &[u8],
    ) {
        let number = self
            .xrc
            .as_ref()
            .and_then(|xrc| xrc.circuits.number(circuit));
        let fits = |rejection: &Rejection| {
            let of = rejection.epoch.map(Epoch::get);
            of.is_none() || of == number.map(|number| number.get())
        };
        let rejection = Rejection::decode(private_data).ok().filter(fits);
        let rejection = rejection.map(|rejection| Rejection {
            // that of the link is another number
            epoch: None,
            ..rejection
        });
        if rejection.is_some_and(|it| it.reason == Reason::Transport) {
            warn_log!(
                EpCtrl,
                "a peer has FI_PROTO_IB_RDM, this endpoint FI_PROTO_RDMA_CM_IB_XRC: no connection"
            );
        }
        self.circuit_not_dialled(core, circuit, core::Failure::Refused, rejection);
    }

    /// A connection request has arrived: one for a circuit, or one of an endpoint on RC.
    pub(in crate::rdm) fn circuit_requested(&mut self, held: ConnectRequest) {
        let Some(xrc) = &self.xrc else {
            return;
        };
        let private_data = held.private_data().bytes();
        let reject = |reason, epoch| Rejection {
            version: VERSION,
            epoch,
            id: xrc.id,
            newest: None,
            reason,
        };
        let rejection = match CircuitRequest::decode(private_data) {
            Ok(request) => {
                let epoch = Epoch::new(request.number.get());
                if request.auth != xrc.auth {
                    reject(Reason::Auth, epoch)
                } else if request.id == xrc.id {
                    reject(Reason::Known, epoch)
                } else if self.has_loose_targets(request.id) {
                    reject(Reason::Busy, epoch)
                } else {
                    return self.xrc_step(XrcStep::AcceptCircuit(held, request));
                }
            }
            Err(Bad::Version(_)) => reject(Reason::Version, None),
            Err(_) if Request::decode(private_data).is_ok() => {
                warn_log!(
                    EpCtrl,
                    "{:?} has FI_PROTO_IB_RDM, this endpoint FI_PROTO_RDMA_CM_IB_XRC: rejected",
                    held.peer_addr()
                );
                reject(Reason::Transport, None)
            }
            Err(_) => reject(Reason::Foreign, None),
        };
        let private_data = rejection.encode().to_vec();
        self.steps.push(Step::Reject(held, private_data));
    }

    /// Whether as many targets have no links as permitted, of one endpoint or of all, with those
    /// that are to be created. Anybody who reaches the port can ask for them.
    fn has_loose_targets(&self, id: EndpointId) -> bool {
        let targets = self.xrc.iter().flat_map(|xrc| xrc.targets.values());
        let loose = targets.filter(|held| held.links.is_empty());
        let coming = self.steps.iter().filter_map(|step| match step {
            Step::Xrc(XrcStep::AcceptCircuit(_, request)) => Some(request.id),
            _ => None,
        });
        let all = loose.map(|held| held.peer).chain(coming);
        let (mut of_all, mut of_one) = (0, 0);
        for of in all {
            of_all += 1;
            of_one += usize::from(of == id);
        }
        of_one >= LOOSE_OF_ONE || of_all >= LOOSE_OF_ALL
    }

    /// The target of a circuit was created: the reply to its request.
    pub(in crate::rdm) fn add_target(
        &mut self,
        cm: &Arc<TargetCm>,
        target: &Arc<Target>,
        request: &CircuitRequest,
    ) -> Option<CircuitReply> {
        let xrc = self.xrc.as_mut()?;
        let held = HeldTarget {
            target: Arc::clone(target),
            cm: Arc::clone(cm),
            peer: request.id,
            number: request.number,
            initiator: request.initiator,
            links: Vec::new(),
            loose_since: Instant::now(),
            failing: None,
        };
        xrc.targets.insert(target.number(), held);
        Some(CircuitReply {
            number: request.number,
            node: xrc.node,
            auth: xrc.auth,
            target: target.number(),
        })
    }

    /// A request for a link has arrived.
    pub(in crate::rdm) fn link_requested(&mut self, core: &mut Core<Self>, held: ConnectRequest) {
        let Some(xrc) = &self.xrc else {
            return;
        };
        let request = match LinkRequest::decode(held.private_data().bytes()) {
            Ok(request) => request,
            Err(bad) => {
                let reason = match bad {
                    Bad::Version(_) => Reason::Version,
                    _ => Reason::Foreign,
                };
                let rejection = Rejection {
                    version: VERSION,
                    epoch: None,
                    id: xrc.id,
                    newest: None,
                    reason,
                };
                return self.reject_link(held, &rejection);
            }
        };
        if let Some(answer) = self.reply_to(&request) {
            return self.xrc_step(XrcStep::AnswerLink(held, answer, None));
        }
        let Some(xrc) = &self.xrc else {
            return;
        };
        let inner = request.request;
        let decided = inner.auth != xrc.auth || inner.id == xrc.id;
        if !decided && !self.holds(&request) {
            let rejection = Rejection {
                version: VERSION,
                epoch: Some(inner.epoch),
                id: xrc.id,
                newest: None,
                reason: Reason::Node,
            };
            return self.reject_link(held, &rejection);
        }
        core.request(Held::Link(held, Box::new(request)), &inner, self);
    }

    /// The reply to a request that the connection manager has repeated: its link was accepted, and
    /// HELLO has not arrived.
    fn reply_to(&mut self, request: &LinkRequest) -> Option<Vec<u8>> {
        let link = *self.xrc.as_ref()?.accepted.get(&request.request.id)?;
        let on = self.links.get_mut(link).filter(|on| !on.is_ending())?;
        let port = on.port.as_ref().filter(|port| !port.used)?;
        let (of, reply) = &**port.reply.as_ref()?;
        (of == request).then(|| reply.clone())
    }

    /// Whether the circuit that a link request names leads to this endpoint.
    pub(super) fn holds(&self, request: &LinkRequest) -> bool {
        let targets = self.xrc.as_ref().map(|xrc| &xrc.targets);
        let named = request.circuit.zip(targets);
        named.is_some_and(|(on, targets)| {
            targets.get(&on.target).is_some_and(|held| {
                held.failing.is_none()
                    && held.peer == request.request.id
                    && (held.number, held.initiator) == (on.number, on.initiator)
            })
        })
    }

    /// Rejects a request for a link.
    pub(super) fn reject_link(&mut self, held: ConnectRequest, rejection: &Rejection) {
        let Some(xrc) = &self.xrc else {
            return;
        };
        let rejection = LinkRejection {
            rejection: *rejection,
            node: xrc.node,
        };
        let answer = rejection.encode().to_vec();
        self.xrc_step(XrcStep::AnswerLink(held, answer, None));
    }

    /// Accepts a request for a link.
    pub(super) fn accept_on_circuit(
        &mut self,
        link: LinkKey,
        held: ConnectRequest,
        request: &LinkRequest,
        reply: &Reply,
    ) {
        let holds = self.holds(request);
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let (srq, node, id) = (xrc.srq, xrc.node, xrc.id);
        let (Some(on), Ok(tag)) = (request.circuit.filter(|_| holds), xrc.add_tag(link)) else {
            // its target has failed since the request arrived
            self.add_link(link, None, None);
            self.todo.push_back(Todo::Broken(link));
            let rejection = Rejection {
                version: VERSION,
                epoch: Some(reply.epoch),
                id,
                newest: None,
                reason: Reason::Busy,
            };
            return self.reject_link(held, &rejection);
        };
        let mut port = Port::new(tag, request.request.listener);
        port.inbox = Some(request.inbox);
        port.from = Some(on.target);
        port.peer = Some(request.request.id);
        port.node = Some(request.node);
        if let Some(held) = xrc.targets.get_mut(&on.target) {
            held.links.push(link);
        }
        xrc.accepted.insert(request.request.id, link);
        let reply = LinkReply {
            reply: *reply,
            presence: Presence::default(),
            node,
            inbox: Inbox { srq, tag },
            ended: None,
        };
        let answer = reply.encode().to_vec();
        port.reply = Some(Box::new((*request, answer.clone())));
        self.add_link(link, None, Some(Box::new(port)));
        self.xrc_step(XrcStep::AnswerLink(held, answer, Some(link)));
    }

    /// Gives up link requests whose acceptors do not answer.
    pub(super) fn end_silent_exchanges(
        &mut self,
        core: &mut Core<Self>,
        now: Instant,
    ) -> Option<Instant> {
        self.xrc.as_ref()?;
        let mut next: Option<Instant> = None;
        let keys: Vec<LinkKey> = self.links.exchanging().collect();
        for link in keys {
            let exchange = self.port_mut(link).and_then(|port| port.exchange.as_ref());
            match exchange.map(|(_, limit)| *limit) {
                Some(limit) if limit <= now => {
                    self.end_exchange(link);
                    self.not_dialled(core, link, core::Failure::Silent);
                }
                Some(limit) => next = Some(next.map_or(limit, |next| next.min(limit))),
                None => {}
            }
        }
        next
    }
}
