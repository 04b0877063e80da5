//! The handshakes of circuits and of links on circuits. `docs/protocol-xrc.md`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Executor, Todo};
use crate::conn::ConnectRequest;
use crate::log::warn_log;
use crate::rdm::core::connect;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::{self, Core};
use crate::rdm::link::port::Port;
use crate::rdm::link::sidr::LinkSidr;
use crate::rdm::step::Step;
use crate::rdm::table_keys::CircuitKey;
use crate::rdm::xrc::circuit_cm::{Held, NoTarget, TargetCm, XrcStep};
use crate::rdm::xrc::circuit_queue::Failing;
use crate::rdm::xrc::circuits::Choice;
use crate::rdm::xrc::ports::{HeldTarget, OfPeer};
use crate::verbs::{Qp, QpNumber, Target};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::xrc::{
    CircuitNumber, CircuitReply, CircuitRequest, Inbox, LinkRejection, LinkReply, LinkRequest,
    OnCircuit, Presence,
};
use crate::wire::rdm::{Bad, EndpointId, Epoch, Listener, Reason, Rejection, Reply, Request};

/// How long the answer to a link request is awaited.
pub(super) const LINK_REPLY_WAIT: Duration = Duration::from_nanos(connect::LINK_REPLY_WAIT);
/// How many targets without links are held for circuits of one endpoint, and in all.
const LOOSE_OF_ONE: usize = 4;
const LOOSE_OF_ALL: usize = 64;
/// After so many answers NODE a dial has failed: the peer states another node each time, or that of
/// the circuit. One that is reachable needs two, and one for each further circuit to a node with
/// the id of its own.
const ELSEWHERE: u8 = 8;
/// How long ATTACH is awaited. A process that has ended before is reported by no target.
const ATTACH: Duration = Duration::from_nanos(connect::ATTACH);
/// After this time the device is asked again for a target that it could not open.
const REOPEN: Duration = Duration::from_millis(10);

/// Where the dialler of a link is dialled for a circuit. Its request states an address, which could
/// be that of another host; the IP address is that from which the connection manager has got the
/// request. An endpoint listens at each address from which it dials, at one port.
pub(super) fn address_of(held: &ConnectRequest, stated: Listener) -> Listener {
    let from = held.peer_addr().ok();
    let from = from.and_then(|from| Listener::new(from.ip(), stated.port()));
    from.unwrap_or(stated)
}

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
        self.xrc_step(XrcStep::OpenBlock(link));
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
        let ended = circuit.and_then(|circuit| xrc.circuits.ended_before(circuit.node));
        let endpoint = self.link_endpoint();
        let Some(port) = self
            .links
            .get_mut(link)
            .and_then(|record| record.port.as_mut())
        else {
            return;
        };
        let Some(request) = port.request else {
            return;
        };
        let request = LinkRequest {
            request,
            node,
            circuit,
            ended,
            inbox: Inbox { srq, tag: port.tag },
            presence: Presence::default(),
            failed: xrc.failed.get(&port.address).copied(),
        };
        if let Some(xrc) = &mut self.xrc {
            xrc.counts.link_requests += 1;
        }
        let sidr = LinkSidr::new(endpoint, link, &request);
        let limit = Instant::now() + LINK_REPLY_WAIT;
        let former = port.exchange.replace((Arc::clone(&sidr), limit));
        let to = port.address.socket_addr();
        match former {
            Some((former, _)) => self.xrc_step(XrcStep::EndExchange(former)),
            None => {
                if let Some(xrc) = &mut self.xrc {
                    xrc.exchanging.push(link);
                }
            }
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
    /// a circuit, whose answer distinguishes an endpoint on RC from an address without a process.
    pub(in crate::rdm) fn exchange_failed(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        failure: core::Failure,
    ) {
        self.end_exchange(link);
        if let Some(xrc) = &mut self.xrc {
            xrc.counts.link_failures += 1;
        }
        let port = self.port_mut(link);
        let dialled = port.map(|port| (port.address, port.circuit.is_some()));
        match (dialled, &mut self.xrc, failure) {
            (Some((address, false)), Some(xrc), core::Failure::Refused) => {
                let choice = xrc.circuits.dial(link, address, false);
                return self.follow(link, choice);
            }
            (Some((address, true)), Some(xrc), core::Failure::Refused) => {
                xrc.circuits.departed(address, link);
            }
            _ => {}
        }
        self.not_dialled(core, link, failure);
    }

    /// The dial of a link has failed.
    pub(in crate::rdm) fn not_dialled(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        failure: core::Failure,
    ) {
        core.dial_failed(link, failure, self);
        self.dial_ended(core, link);
    }

    /// The answer to a link request has arrived.
    pub(in crate::rdm) fn answered(&mut self, core: &mut Core<Self>, link: LinkKey, answer: &[u8]) {
        self.end_exchange(link);
        let Some(port) = self
            .links
            .get_mut(link)
            .and_then(|record| record.port.as_mut())
        else {
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
            // another endpoint could state the id of one that this side has links to
            if core.may_be(link, answer.reply.id) {
                self.peer_ended(answer.reply.id, answer.ended);
            }
            if let Some(xrc) = &mut self.xrc {
                xrc.attaches.push((Instant::now() + ATTACH, link));
                xrc.failed.remove(&address);
                xrc.circuits.learn(address, answer.node);
                xrc.counts.link_replies += 1;
            }
            let reply = circuit.map(|_| answer.reply);
            return core.replied_with(link, reply, self);
        }
        let Ok(answer) = LinkRejection::decode(answer) else {
            core.rejected_by(link, None, self);
            return self.dial_ended(core, link);
        };
        let fits = port.request.map(|request| request.epoch) == answer.rejection.epoch;
        if answer.rejection.reason == Reason::Node && fits {
            port.elsewhere += 1;
            if port.elsewhere > ELSEWHERE {
                // the next dial is after a pause
                if let Some(xrc) = &mut self.xrc {
                    xrc.circuits.learn(address, answer.node);
                }
                return self.not_dialled(core, link, core::Failure::Silent);
            }
            port.circuit = None;
            let xrc = self.xrc.as_mut();
            let choice = xrc.map(|xrc| {
                xrc.counts.nodes += 1;
                let circuits = &mut xrc.circuits;
                circuits.elsewhere(link, address, answer.node, circuit)
            });
            if let Some(circuit) = circuit {
                self.leave_circuit(circuit, link);
                if choice == Some(Choice::Fail) {
                    // a link that was accepted on it would find out by the retries of the device
                    self.break_circuit(circuit);
                }
            }
            if let Some(choice) = choice {
                self.follow(link, choice);
            }
            return;
        }
        core.rejected_by(link, Some(answer.rejection), self);
        self.dial_ended(core, link);
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
        xrc.counts.circuit_requests += 1;
        Some(CircuitRequest {
            number,
            id,
            auth,
            node,
            initiator: qp.qp_number(),
        })
    }

    /// A request for a circuit was rejected; `failure`: what this means without private data.
    pub(in crate::rdm) fn circuit_rejected(
        &mut self,
        core: &mut Core<Self>,
        circuit: CircuitKey,
        private_data: &[u8],
        failure: core::Failure,
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
        self.circuit_not_dialled(core, circuit, failure, rejection);
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
        let loose = targets.filter(|held| held.is_loose());
        let coming = self.steps.iter().filter_map(|step| match step {
            Step::Xrc(XrcStep::AcceptCircuit(_, request)) => Some(request.id),
            _ => None,
        });
        let all = loose.filter_map(|held| Some(held.of?.peer)).chain(coming);
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
        let of = OfPeer {
            peer: request.id,
            number: request.number,
            initiator: request.initiator,
        };
        let held = HeldTarget {
            target: Some(Arc::clone(target)),
            ..HeldTarget::opening(Arc::clone(cm), Some(of))
        };
        // one with this number that is being opened does not exist
        xrc.counts.circuits_accepted += 1;
        if let Some(former) = xrc.targets.insert(target.number(), held) {
            // it acknowledges nothing
            let links = former.links.into_iter().map(Todo::Silenced);
            self.todo.extend(links);
            self.refuse_requests(former.requests, Reason::Node);
        }
        let xrc = self.xrc.as_ref()?;
        Some(CircuitReply {
            number: request.number,
            node: xrc.node,
            auth: xrc.auth,
            target: target.number(),
        })
    }

    /// The initiator of a circuit has the reply, or has ended: the identifier at the target is not
    /// needed any more.
    pub(in crate::rdm) fn end_target_cm(&mut self, cm: Arc<TargetCm>) {
        self.xrc_step(XrcStep::EndTargetCm(cm));
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
        if inner.auth == xrc.auth && inner.id != xrc.id && !self.holds(&request) {
            return self.request_elsewhere(held, request);
        }
        core.request(Held::Link(held, Box::new(request)), &inner, self);
    }

    /// A request for a link that names no circuit, or one whose target this endpoint does not hold:
    /// it is opened, unless this endpoint knows the number as that of another target.
    fn request_elsewhere(&mut self, held: ConnectRequest, request: LinkRequest) {
        let (Some(circuit), Some(xrc)) = (request.circuit, &mut self.xrc) else {
            return self.refuse_requests(vec![(held, Box::new(request))], Reason::Node);
        };
        let of = OfPeer::of(&request.request, &circuit);
        match xrc.targets.get_mut(&circuit.target) {
            Some(known) if known.target.is_none() && known.failing.is_none() => {
                known.requests.push((held, Box::new(request)));
            }
            Some(_) => self.refuse_requests(vec![(held, Box::new(request))], Reason::Node),
            None => {
                let cm = TargetCm::new(&self.endpoint);
                let mut opening = HeldTarget::opening(Arc::clone(&cm), Some(of));
                opening.requests.push((held, Box::new(request)));
                xrc.targets.insert(circuit.target, opening);
                self.xrc_step(XrcStep::OpenTarget(
                    cm,
                    circuit.target,
                    Some(circuit.initiator),
                ));
            }
        }
    }

    /// A peer has ended its circuits with numbers before this one: nothing that was posted to them
    /// is to have an effect any more. Their targets are moved to their error state.
    fn peer_ended(&mut self, peer: EndpointId, before: Option<CircuitNumber>) {
        let Some((xrc, before)) = self.xrc.as_ref().zip(before) else {
            return;
        };
        let ended = |held: &HeldTarget| {
            let of = held.of.filter(|of| of.peer == peer);
            of.is_some_and(|of| of.number.is_before(before)) && held.failing.is_none()
        };
        let targets = xrc.targets.iter().filter(|(_, held)| ended(held));
        for number in targets.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.break_target(number);
        }
    }

    /// Answers requests for links: NODE, or BUSY if it is not known whether their targets exist.
    pub(super) fn refuse_requests(
        &mut self,
        requests: Vec<(ConnectRequest, Box<LinkRequest>)>,
        reason: Reason,
    ) {
        for (held, request) in requests {
            let Some(xrc) = &self.xrc else {
                return;
            };
            let rejection = Rejection {
                version: VERSION,
                epoch: Some(request.request.epoch),
                id: xrc.id,
                newest: None,
                reason,
            };
            self.reject_link(held, &rejection);
        }
    }

    /// A target was opened, or cannot be. Returns whether it is held.
    pub(in crate::rdm) fn target_opened(
        &mut self,
        core: &mut Core<Self>,
        number: QpNumber,
        opened: std::result::Result<Arc<Target>, NoTarget>,
    ) -> bool {
        let xrc = self.xrc.as_mut();
        let held = xrc.and_then(|xrc| xrc.targets.get_mut(&number));
        let Some(held) = held.filter(|held| held.target.is_none()) else {
            return false;
        };
        let is_held = opened.is_ok();
        let reason = match opened {
            Err(NoTarget::Unknown) => Reason::Busy,
            _ => Reason::Node,
        };
        let requests = std::mem::take(&mut held.requests);
        match opened {
            Ok(target) => {
                held.target = Some(Arc::clone(&target));
                held.loose_since = Instant::now();
                if held.failing.is_some() {
                    self.xrc_step(XrcStep::FailTarget(target));
                }
            }
            Err(NoTarget::Gone) => {
                // it acknowledges nothing
                held.failing = Some(Failing::new(true));
                for link in held.links.clone() {
                    core.silenced(link, self);
                }
            }
            // what the links of the peer need, or the sender of a packet with an unknown tag
            Err(NoTarget::Unknown) if !held.links.is_empty() || held.failing.is_some() => {
                let (cm, initiator) = (Arc::clone(&held.cm), held.of.map(|of| of.initiator));
                if let Some(xrc) = &mut self.xrc {
                    let time = Instant::now() + REOPEN;
                    xrc.reopens.push((time, cm, number, initiator));
                }
                self.xrc_step(XrcStep::Look);
            }
            Err(NoTarget::Unknown) => {
                // nothing is known of it when it is asked for again
                let held = self
                    .xrc
                    .as_mut()
                    .and_then(|xrc| xrc.targets.remove(&number));
                if let Some(HeldTarget { cm, target, .. }) = held {
                    self.xrc_step(XrcStep::CloseTarget(cm, target));
                }
            }
        }
        for (held, request) in requests {
            if let Some(answer) = self.reply_to(&request) {
                self.xrc_step(XrcStep::AnswerLink(held, answer, None));
            } else if self.holds(&request) {
                let inner = request.request;
                core.request(Held::Link(held, request), &inner, self);
            } else {
                self.refuse_requests(vec![(held, request)], reason);
            }
        }
        is_held
    }

    /// The reply to a request that the connection manager has repeated: its link was accepted, and
    /// HELLO has not arrived.
    fn reply_to(&mut self, request: &LinkRequest) -> Option<Vec<u8>> {
        let link = *self.xrc.as_ref()?.accepted.get(&request.request.id)?;
        let record = self.links.get_open(link)?;
        let port = record.port.as_ref().filter(|port| !port.used)?;
        let (of, reply) = &**port.reply.as_ref()?;
        (of == request).then(|| reply.clone())
    }

    /// Whether this endpoint holds the target of the circuit that a link request names.
    pub(super) fn holds(&self, request: &LinkRequest) -> bool {
        let targets = self.xrc.as_ref().map(|xrc| &xrc.targets);
        let named = request.circuit.zip(targets);
        named.is_some_and(|(circuit, targets)| {
            let of = OfPeer::of(&request.request, &circuit);
            targets.get(&circuit.target).is_some_and(|held| {
                held.target.is_some() && held.failing.is_none() && held.of == Some(of)
            })
        })
    }

    /// The circuit of this side whose target has failed at the dialler, as its request states. The
    /// dialler could state any node, so this is a circuit that a link to the dialler uses or has
    /// used: the circuits of other peers are not affected.
    pub(in crate::rdm) fn failed_circuit(&mut self, request: &LinkRequest) -> Option<CircuitKey> {
        let circuits = &self.xrc.as_ref()?.circuits;
        let circuit = circuits.find(request.failed?, request.node)?;
        let peer = request.request.id;
        let links = circuits.links(circuit).to_vec();
        let uses = circuits.is_former(circuit, peer)
            || links.into_iter().any(|link| {
                let port = self.port_mut(link);
                port.is_some_and(|port| port.peer == Some(peer))
            });
        uses.then_some(circuit)
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

    /// Accepts a request for a link. `peer`: where the peer is dialled.
    pub(super) fn accept_on_circuit(
        &mut self,
        link: LinkKey,
        held: ConnectRequest,
        (request, peer): (&LinkRequest, Option<Listener>),
        reply: &Reply,
    ) {
        let holds = self.holds(request);
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let (srq, node, id) = (xrc.srq, xrc.node, xrc.id);
        let (Some(circuit), Ok(tag)) = (request.circuit.filter(|_| holds), xrc.add_tag(link))
        else {
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
        let ended = xrc.circuits.ended_before(request.node);
        let failed = self.failed_circuit(request);
        // the peer gets the reply when the targets are in their error state
        self.peer_ended(request.request.id, request.ended);
        if let Some(circuit) = failed {
            self.break_circuit(circuit);
        }
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let mut port = Port::new(tag, address_of(&held, request.request.listener));
        port.forgets = peer != Some(port.address);
        port.inbox = Some(request.inbox);
        port.from = Some(circuit.target);
        port.peer = Some(request.request.id);
        port.node = Some(request.node);
        xrc.use_target(circuit.target, link);
        xrc.counts.links_accepted += 1;
        xrc.accepted.insert(request.request.id, link);
        let reply = LinkReply {
            reply: *reply,
            presence: Presence::default(),
            node,
            inbox: Inbox { srq, tag },
            ended,
        };
        let answer = reply.encode().to_vec();
        port.reply = Some(Box::new((*request, answer.clone())));
        self.add_link(link, None, Some(Box::new(port)));
        self.xrc_step(XrcStep::OpenBlock(link));
        self.xrc_step(XrcStep::AnswerLink(held, answer, Some(link)));
    }

    /// Gives up link requests whose acceptors do not answer.
    pub(super) fn end_silent_exchanges(
        &mut self,
        core: &mut Core<Self>,
        now: Instant,
    ) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut exchanging = std::mem::take(&mut self.xrc.as_mut()?.exchanging);
        exchanging.retain(|link| {
            let exchange = self.port_mut(*link).and_then(|port| port.exchange.as_ref());
            let Some(limit) = exchange.map(|(_, limit)| *limit) else {
                return false;
            };
            if limit <= now {
                self.end_exchange(*link);
                if let Some(xrc) = &mut self.xrc {
                    xrc.counts.link_failures += 1;
                }
                self.not_dialled(core, *link, core::Failure::Silent);
                return false;
            }
            next = Some(next.map_or(limit, |next| next.min(limit)));
            true
        });
        let xrc = self.xrc.as_mut()?;
        // links that were dialled meanwhile
        exchanging.append(&mut xrc.exchanging);
        xrc.exchanging = exchanging;
        next
    }
}
