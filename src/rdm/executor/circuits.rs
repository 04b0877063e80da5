//! Links on circuits: which circuit and which target a link uses, the handshakes, packets, and the
//! end. `docs/protocol-xrc.md`.
//!
//! In this step each endpoint is a node of its own, so a circuit and a target have the links of one
//! peer. The end of a link on which a packet was posted or has arrived ends both of its circuits,
//! as on RC the queue pair of the link: then no request of either side succeeds any more, and what
//! has arrived is processed before the link has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Executor, Place, Todo};
use crate::rdm::circuit_cm::{InitiatorCm, XrcStep};
use crate::rdm::circuits::{Choice, CircuitKey, Left};
use crate::rdm::core::{self, Core};
use crate::rdm::link::LinkKey;
use crate::rdm::link_cm::Step;
use crate::rdm::packet_memory::Slot;
use crate::rdm::ports::{Failing, HeldTarget, Port};
use crate::rdm::send_queue::Sent;
use crate::verbs::{QpNumber, Wc};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::packet::{Attach, SLOT_SIZE};
use crate::wire::rdm::xrc::{CircuitReply, LinkRejection, LinkReply, OnCircuit};
use crate::wire::rdm::{Body, Packet, Reason, Rejection};

/// How long a target without links is held.
const LOOSE: Duration = Duration::from_secs(2);
/// After this time a circuit is destroyed although the device has not flushed all its requests.
const FLUSH: Duration = Duration::from_secs(1);

impl Executor {
    pub(super) fn xrc_step(&mut self, step: XrcStep) {
        self.steps.push(Step::Xrc(step));
    }

    pub(in crate::rdm) fn port_mut(&mut self, link: LinkKey) -> Option<&mut Port> {
        self.links.get_mut(link)?.port.as_deref_mut()
    }

    /// Does what the choice of a circuit demands.
    pub(in crate::rdm) fn follow(&mut self, link: LinkKey, choice: Choice) {
        let on = self.links.get_mut(link).filter(|on| !on.is_ending());
        let Some(port) = on.and_then(|on| on.port.as_mut()) else {
            // the choice has listed the link
            if let Choice::Use(circuit, _) | Choice::Wait(circuit) | Choice::Dial(circuit, _) =
                choice
            {
                self.leave_circuit(circuit, link);
            }
            return;
        };
        let (address, dials) = (port.address, port.request.is_some());
        match choice {
            Choice::Use(circuit, on) => {
                port.circuit = Some(circuit);
                match dials {
                    true => self.request_link(link, Some(on)),
                    false => self.todo.push_back(Todo::Attach(link)),
                }
            }
            Choice::Wait(circuit) => port.circuit = Some(circuit),
            Choice::Dial(circuit, _) => {
                port.circuit = Some(circuit);
                let cm = InitiatorCm::new(&self.shared, circuit);
                if let Some(xrc) = &mut self.xrc {
                    xrc.add_queue(circuit, Arc::clone(&cm));
                }
                self.xrc_step(XrcStep::DialCircuit(cm, address.socket_addr()));
            }
            Choice::Ask if dials => {
                port.circuit = None;
                self.request_link(link, None);
            }
            Choice::Ask | Choice::Fail | Choice::Full => {
                port.circuit = None;
                self.todo.push_back(match dials {
                    true => Todo::NotDialled(link),
                    false => Todo::Broken(link),
                });
            }
        }
    }

    /// A link that has waited for a circuit chooses again.
    fn choose_again(&mut self, link: LinkKey) {
        let Some(on) = self.links.get_mut(link).filter(|on| !on.is_ending()) else {
            return;
        };
        let Some(port) = on.port.as_mut() else {
            return;
        };
        port.circuit = None;
        let address = port.address;
        if let Some(xrc) = &mut self.xrc {
            let choice = xrc.circuits.choose(link, address);
            self.follow(link, choice);
        }
    }

    /// A link does not use a circuit any more, which ends with its last link.
    pub(in crate::rdm) fn leave_circuit(&mut self, circuit: CircuitKey, link: LinkKey) {
        let xrc = self.xrc.as_mut();
        if xrc.is_some_and(|xrc| xrc.circuits.leave(circuit, link)) {
            self.break_circuit(circuit);
        }
    }

    /// A circuit has failed, or has no links: its links break.
    pub(in crate::rdm) fn break_circuit(&mut self, circuit: CircuitKey) {
        let Some(left) = self.xrc.as_mut().and_then(|xrc| xrc.circuits.end(circuit)) else {
            return;
        };
        let links = left.dialled_for.into_iter().chain(left.links);
        self.todo.extend(links.map(Todo::Broken));
        self.fail_circuit(circuit);
    }

    fn fail_circuit(&mut self, circuit: CircuitKey) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let Some(queue) = xrc.queue_mut(circuit) else {
            // it was never dialled
            return xrc.circuits.remove(circuit);
        };
        let qp = queue.qp.clone();
        queue.failing = Some(Failing {
            since: Instant::now(),
            done: qp.is_none(),
        });
        xrc.ending.push(circuit);
        self.xrc_step(match qp {
            Some(qp) => XrcStep::FailCircuit(circuit, qp),
            None => XrcStep::Look,
        });
    }

    /// An initiator is in its error state.
    pub(in crate::rdm) fn circuit_failed(&mut self, circuit: CircuitKey) {
        let queue = self.xrc.as_mut().and_then(|xrc| xrc.queue_mut(circuit));
        if let Some(failing) = queue.and_then(|queue| queue.failing.as_mut()) {
            failing.done = true;
        }
    }

    /// A target is of no use any more: its links break.
    pub(in crate::rdm) fn break_target(&mut self, number: QpNumber) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let held = xrc.targets.get_mut(&number);
        let Some(held) = held.filter(|held| held.failing.is_none()) else {
            return;
        };
        held.failing = Some(Failing {
            since: Instant::now(),
            done: false,
        });
        let target = Arc::clone(&held.target);
        self.todo
            .extend(held.links.iter().copied().map(Todo::Broken));
        self.xrc_step(XrcStep::FailTarget(target));
    }

    /// A target is in its error state: it acknowledges nothing any more.
    pub(in crate::rdm) fn target_failed(&mut self, number: QpNumber) {
        let held = self
            .xrc
            .as_mut()
            .and_then(|xrc| xrc.targets.get_mut(&number));
        if let Some(failing) = held.and_then(|held| held.failing.as_mut()) {
            failing.done = true;
        }
    }

    /// A circuit is connected.
    pub(in crate::rdm) fn circuit_up(&mut self, circuit: CircuitKey, reply: &CircuitReply) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let auth = xrc.auth == reply.auth;
        let fits = auth && xrc.circuits.number(circuit) == Some(reply.number);
        let qp = xrc.queue_mut(circuit).and_then(|queue| queue.qp.clone());
        let Some(qp) = qp.filter(|_| fits) else {
            return self.break_circuit(circuit);
        };
        let on = OnCircuit {
            node: reply.node,
            number: reply.number,
            initiator: qp.qp_number(),
            target: reply.target,
        };
        let (links, keeps) = xrc.circuits.up(circuit, on);
        for link in links {
            self.choose_again(link);
        }
        let unused = self
            .xrc
            .as_ref()
            .is_some_and(|xrc| xrc.circuits.is_unused(circuit));
        match keeps {
            true if unused => self.break_circuit(circuit),
            true => {}
            false => self.fail_circuit(circuit),
        }
    }

    /// The dial of a circuit has failed, with this rejection. The other links that waited for it
    /// choose again.
    pub(in crate::rdm) fn circuit_not_dialled(
        &mut self,
        core: &mut Core<Self>,
        circuit: CircuitKey,
        failure: core::Failure,
        rejection: Option<Rejection>,
    ) {
        let left = self.xrc.as_mut().and_then(|xrc| xrc.circuits.end(circuit));
        let Some(Left { dialled_for, links }) = left else {
            return;
        };
        self.fail_circuit(circuit);
        if let Some(link) = dialled_for {
            let dials = self.port_mut(link).is_some_and(|port| {
                port.circuit = None;
                port.request.is_some()
            });
            match rejection {
                Some(_) if dials => {
                    core.rejected_by(link, rejection, self);
                    self.remove_dialled(link);
                }
                None if dials => self.not_dialled(core, link, failure),
                _ => core.broken(link, self),
            }
        }
        for link in links {
            self.choose_again(link);
        }
    }

    /// HELLO has arrived on a link that this side has accepted: it needs a circuit to the node of
    /// the peer.
    pub(in crate::rdm) fn greeted_on_circuit(&mut self, link: LinkKey) {
        let Some(xrc) = self.xrc.as_mut().filter(|_| !self.links.ends(link)) else {
            return;
        };
        let port = self.links.get_mut(link).and_then(|on| on.port.as_ref());
        let Some((address, node)) = port.and_then(|port| Some((port.address, port.node?))) else {
            return;
        };
        let choice = xrc.circuits.for_accepted(link, address, node);
        self.follow(link, choice);
    }

    /// The reply to a link request becomes BUSY if the link has ended, or is being ended. The peer
    /// would post packets with a tag that this side does not know.
    pub(in crate::rdm) fn check_answer(&mut self, link: LinkKey, answer: &mut Vec<u8>) {
        if self.links.get_mut(link).is_some_and(|on| !on.is_ending()) {
            return;
        }
        if let Ok(LinkReply { reply, node, .. }) = LinkReply::decode(answer) {
            let rejection = Rejection {
                version: VERSION,
                epoch: Some(reply.epoch),
                id: reply.id,
                newest: None,
                reason: Reason::Busy,
            };
            *answer = LinkRejection { rejection, node }.encode().to_vec();
        }
    }

    /// Posts ATTACH, and then what waits for it.
    pub(in crate::rdm) fn attach(&mut self, core: &mut Core<Self>, link: LinkKey) {
        let Some(xrc) = &self.xrc else {
            return;
        };
        let Some(on) = self.links.get_mut(link).filter(|on| !on.is_ending()) else {
            return;
        };
        let Some(port) = on.port.as_mut().filter(|port| !port.attached) else {
            return;
        };
        let Some(of) = port.circuit.and_then(|circuit| xrc.circuits.get(circuit)) else {
            return;
        };
        let attach = Attach {
            circuit: of.number,
            initiator: of.initiator,
            target: of.target,
        };
        port.attached = true;
        if core.attach(link, attach, self) {
            core.has_room(link, self);
        } else if let Some(port) = self.port_mut(link) {
            // the circuit has no room: the link is listed there
            port.attached = false;
        }
    }

    /// A packet on a circuit has completed.
    #[inline]
    pub(super) fn sent_on_circuit(
        &mut self,
        core: &mut Core<Self>,
        circuit: CircuitKey,
        position: u16,
        wc: &Wc,
    ) {
        let failed = wc.status() != 0;
        loop {
            let queue = self.xrc.as_mut().and_then(|xrc| xrc.queue_mut(circuit));
            let Some(queue) = queue else {
                return;
            };
            queue.proven |= !failed;
            let Some((link, sent)) = queue.queue.take_completed(position) else {
                break;
            };
            match sent {
                Sent::Control(Some(slot)) => {
                    self.memory.give_back(slot);
                    self.has_memory();
                }
                Sent::Numbered(number) if !failed => core.sent(link, number, self),
                _ => {}
            }
        }
        if failed {
            return self.break_circuit(circuit);
        }
        let queue = self.xrc.as_mut().and_then(|xrc| xrc.queue_mut(circuit));
        let Some(queue) = queue.filter(|queue| !queue.waiting.is_empty()) else {
            return;
        };
        for link in std::mem::take(&mut queue.waiting) {
            match self.port_mut(link).map(|port| port.attached) {
                Some(true) => core.has_room(link, self),
                Some(false) => self.todo.push_back(Todo::Attach(link)),
                None => {}
            }
        }
    }

    /// A packet has arrived.
    #[inline]
    pub(super) fn received_on_circuit(&mut self, core: &mut Core<Self>, slot: Slot, wc: &Wc) {
        self.receives_posted -= 1;
        let Some(xrc) = &self.xrc else {
            return;
        };
        if wc.status() != 0 {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        }
        let link = wc.imm().and_then(|tag| xrc.tagged(tag));
        let on = link.and_then(|link| self.links.get_mut(link));
        let port = on.and_then(|on| on.port.as_mut());
        let (Some(link), Some(port)) = (link, port) else {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        };
        let comes_from = match port.from {
            Some(from) => from.get() == wc.qp_num(),
            // only ATTACH, through a target of the peer
            None => QpNumber::new(wc.qp_num())
                .and_then(|through| xrc.targets.get(&through))
                .is_some_and(|held| port.peer == Some(held.peer)),
        };
        if !comes_from {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        }
        let total = wc.byte_len();
        let packet = match wc.is_recv_rdma() || total > SLOT_SIZE {
            true => None,
            false => Packet::decode(&self.memory.bytes(&slot)[..total], total).ok(),
        };
        let Some(packet) = packet else {
            return core.violated(link, Place::Slot(slot), self);
        };
        let known = match (port.from, &packet.body) {
            (Some(_), body) => !matches!(body, Body::Attach(_)),
            (None, Body::Attach(attach)) => {
                let attach = *attach;
                self.attached_by_peer(link, &attach, wc.qp_num())
            }
            (None, _) => false,
        };
        if !known {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        }
        if let Some(port) = self.port_mut(link) {
            port.used = true;
        }
        self.arriving = Some(link);
        core.arrived(link, &packet, Place::Slot(slot), self);
    }

    /// ATTACH of the acceptor of a link has arrived through a target. `false`: it names another
    /// one, or one that this side does not hold.
    fn attached_by_peer(&mut self, link: LinkKey, attach: &Attach, through: u32) -> bool {
        let Some(xrc) = &mut self.xrc else {
            return false;
        };
        let port = self.links.get_mut(link).and_then(|on| on.port.as_mut());
        let (Some(port), Some(held)) = (port, xrc.targets.get_mut(&attach.target)) else {
            return false;
        };
        let fits = attach.target.get() == through
            && port.peer == Some(held.peer)
            && (held.number, held.initiator) == (attach.circuit, attach.initiator)
            && held.failing.is_none();
        if fits {
            port.from = Some(attach.target);
            held.links.push(link);
            held.used = true;
        }
        fits
    }

    /// A packet with an unknown tag has arrived through a target, which is of no use to its sender.
    #[cold]
    fn unknown_tag(&mut self, through: u32) {
        if let Some(number) = QpNumber::new(through) {
            self.break_target(number);
        }
    }

    /// Begins to end a link.
    pub(super) fn end_on_circuit(&mut self, link: LinkKey) {
        let Some(on) = self.links.get_mut(link).filter(|on| !on.is_ending()) else {
            return;
        };
        let Some(port) = on.port.as_mut().filter(|port| port.is_used()) else {
            // nothing is under way
            self.links.begin_end_on_circuit(link);
            self.end_exchange(link);
            return self.xrc_step(XrcStep::Look);
        };
        let peer = port.peer;
        // one on which the link has posted nothing may be that of other links
        let (posted_on, left) = match port.attached {
            true => (port.circuit, None),
            false => (None, port.circuit.take()),
        };
        let mut fails: Vec<QpNumber> = port.from.into_iter().collect();
        if let (None, Some(xrc)) = (port.from, &self.xrc) {
            // ATTACH may have arrived through any target of the peer
            let of_peer = xrc
                .targets
                .iter()
                .filter(|(_, held)| Some(held.peer) == peer);
            fails.extend(of_peer.map(|(number, _)| *number));
        }
        port.fails.clone_from(&fails);
        self.links.begin_end_on_circuit(link);
        self.end_exchange(link);
        for target in fails {
            self.break_target(target);
        }
        if let Some(circuit) = posted_on {
            self.break_circuit(circuit);
        }
        if let Some(circuit) = left {
            self.leave_circuit(circuit, link);
        }
        self.xrc_step(XrcStep::Look);
    }

    /// Looks which links that end have no requests under way, and do not receive any more.
    pub(in crate::rdm) fn tend_links(&mut self) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        for at in 0..self.links.ending().len() {
            let Some(key) = self.links.ending().get(at).copied() else {
                break;
            };
            let Some(link) = self.links.get_mut(key) else {
                continue;
            };
            let (mut sends, mut receives) = (true, true);
            if let Some(port) = link.port.as_ref().filter(|port| port.is_used()) {
                let queue = port.circuit.and_then(|circuit| xrc.queue_mut(circuit));
                sends = queue.is_none_or(|queue| queue.is_flushed());
                let fails = |number| {
                    let held = xrc.targets.get(number);
                    held.is_none_or(|held| held.failing.is_some_and(|it| it.done))
                };
                receives = port.fails.iter().all(fails);
            }
            link.set_drained(sends, receives);
        }
    }

    /// Removes what a link on a circuit has.
    pub(super) fn remove_port(&mut self, link: LinkKey, port: &Port) {
        if let Some((sidr, _)) = &port.exchange {
            self.xrc_step(XrcStep::EndExchange(Arc::clone(sidr)));
        }
        if let Some(xrc) = &mut self.xrc {
            xrc.remove_tag(port.tag);
            for held in xrc.targets.values_mut() {
                held.links.retain(|of| *of != link);
            }
        }
        if let Some(circuit) = port.circuit {
            self.leave_circuit(circuit, link);
        }
    }

    /// Ends what is not needed any more, and exchanges without an answer. Returns the time of the
    /// next call.
    pub(in crate::rdm) fn tend_circuits(
        &mut self,
        core: &mut Core<Self>,
        now: Instant,
    ) -> Option<Instant> {
        let mut next = self.end_silent_exchanges(core, now);
        let xrc = self.xrc.as_mut()?;
        let mut later = |time: Instant| next = Some(next.map_or(time, |it: Instant| it.min(time)));
        let used = |links: &super::Links, circuit| {
            links
                .ending()
                .iter()
                .any(|link| links.circuit_of(*link) == Some(circuit))
        };
        let mut steps = Vec::new();
        for circuit in xrc.ending.clone() {
            let Some(queue) = xrc.queue_mut(circuit) else {
                continue;
            };
            let since = queue.failing.map_or(now, |failing| failing.since);
            if used(&self.links, circuit) || !queue.is_flushed() && now < since + FLUSH {
                later(since + FLUSH);
                continue;
            }
            if let Some(mut queue) = xrc.remove_queue(circuit) {
                for (_, sent) in queue.queue.drain() {
                    if let Sent::Control(Some(slot)) = sent {
                        self.memory.give_back(slot);
                    }
                }
                steps.push(XrcStep::DestroyCircuit(queue.cm, queue.qp));
            }
        }
        for queue in xrc.proven() {
            steps.push(XrcStep::EndCircuitCm(queue));
        }
        let loose = |held: &HeldTarget| match held.failing {
            Some(failing) => failing.done && held.links.is_empty(),
            None => held.links.is_empty() && (held.used || now >= held.made + LOOSE),
        };
        for held in xrc.targets.values() {
            if held.links.is_empty() && !held.used && held.failing.is_none() {
                later(held.made + LOOSE);
            }
        }
        for (_, held) in xrc.targets.extract_if(|_, held| loose(held)) {
            steps.push(XrcStep::CloseTarget(held.cm, held.target));
        }
        self.steps.extend(steps.into_iter().map(Step::Xrc));
        next
    }

    /// Whether packets without number may not have reached their peers.
    pub(super) fn circuits_send_control(&self) -> bool {
        let xrc = self.xrc.as_ref();
        xrc.is_some_and(|xrc| xrc.queues().any(|queue| queue.queue.has_control()))
    }

    /// The steps that end all circuits and targets, of an endpoint that is closed.
    pub(super) fn close_circuits(&mut self) -> Vec<Step> {
        let Some(xrc) = &mut self.xrc else {
            return Vec::new();
        };
        let mut steps = Vec::new();
        for (_, held) in xrc.targets.drain() {
            steps.push(XrcStep::FailTarget(Arc::clone(&held.target)));
            steps.push(XrcStep::CloseTarget(held.cm, held.target));
        }
        for circuit in xrc.keys() {
            if let Some(queue) = xrc.remove_queue(circuit) {
                if let Some(qp) = &queue.qp {
                    steps.push(XrcStep::FailCircuit(circuit, Arc::clone(qp)));
                }
                steps.push(XrcStep::DestroyCircuit(queue.cm, queue.qp));
            }
        }
        steps.into_iter().map(Step::Xrc).collect()
    }
}
