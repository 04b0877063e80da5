//! Links on circuits: which circuit and which target a link uses, the handshakes, packets, and the
//! end. `docs/protocol-xrc.md`.
//!
//! A link ends in two halves. Its out half has ended when all its requests have completed. Its in
//! half is open until the peer has stated that it posts nothing more, or the target through which
//! the peer posts is in its error state; then the completion queue is polled until it is empty.
//! Nothing that the device has acknowledged is lost, and a circuit keeps its other links.
//!
//! In one file, because the begin and the end of a link change the same circuits and targets.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rma_recovery::Failure;
use super::{Executor, PacketMemoryRef, Todo};
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::{self, Core};
use crate::rdm::counts::object;
use crate::rdm::link::port::Port;
use crate::rdm::link::send_queue::Sent;
use crate::rdm::packet_memory::Slot;
use crate::rdm::step::Step;
use crate::rdm::table_keys::CircuitKey;
use crate::rdm::xrc::circuit_cm::{InitiatorCm, TargetCm, XrcStep};
use crate::rdm::xrc::circuit_queue::{Failing, UNUSED};
use crate::rdm::xrc::circuits::{Choice, Left, Up};
use crate::rdm::xrc::ports::{HalfEnd, HeldTarget, OfPeer};
use crate::verbs::{QpNumber, Target, Wc};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::packet::{Attach, SLOT_SIZE};
use crate::wire::rdm::xrc::{CircuitReply, LinkRejection, LinkReply, OnCircuit};
use crate::wire::rdm::{Body, Packet, Reason, Rejection};

/// After this time a circuit is destroyed although the device has not flushed all its requests.
pub(super) const FLUSH: Duration = Duration::from_secs(1);
/// The first interval between the dials of a circuit for an accepted link, and the longest.
pub(super) const PAUSES: (Duration, Duration) =
    (Duration::from_millis(1), Duration::from_millis(250));

impl Executor {
    pub(super) fn xrc_step(&mut self, step: XrcStep) {
        self.steps.push(Step::Xrc(step));
    }

    pub(in crate::rdm) fn port_mut(&mut self, link: LinkKey) -> Option<&mut Port> {
        self.links.get_mut(link)?.port.as_deref_mut()
    }

    /// Does what the choice of a circuit demands.
    pub(in crate::rdm) fn follow(&mut self, link: LinkKey, choice: Choice) {
        let record = self.links.get_open(link);
        let Some(port) = record.and_then(|record| record.port.as_mut()) else {
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
            Choice::Use(circuit, ids) => {
                port.circuit = Some(circuit);
                self.count_users(circuit);
                match dials {
                    true => self.request_link(link, Some(ids)),
                    false => self.todo.push_back(Todo::Attach(link)),
                }
            }
            Choice::Wait(circuit) => {
                port.circuit = Some(circuit);
                // the acceptor may be stopped
                self.xrc_step(XrcStep::Look);
            }
            Choice::Dial(circuit, _) => {
                port.circuit = Some(circuit);
                self.end_unused_circuits();
                let cm = InitiatorCm::new(&self.endpoint, circuit);
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

    /// Ends the circuits without links, if their places are needed.
    fn end_unused_circuits(&mut self) {
        let Some(xrc) = &self.xrc else {
            return;
        };
        let unused = match xrc.places_used() > self.max_links {
            true => xrc.circuits.unused(),
            false => Vec::new(),
        };
        for circuit in unused {
            self.break_circuit(circuit);
        }
    }

    /// A link that has waited for a circuit chooses again.
    pub(super) fn choose_again(&mut self, link: LinkKey) {
        let Some(record) = self.links.get_open(link) else {
            return;
        };
        let Some(port) = record.port.as_mut() else {
            return;
        };
        port.circuit = None;
        let address = port.address;
        if let Some(xrc) = &mut self.xrc {
            let choice = xrc.circuits.choose(link, address);
            self.follow(link, choice);
        }
    }

    /// A link does not use a circuit any more. Without links it ends: after [`UNUSED`], if it is
    /// up.
    pub(in crate::rdm) fn leave_circuit(&mut self, circuit: CircuitKey, link: LinkKey) {
        let peer = self.port_mut(link).and_then(|port| port.peer);
        if let Some(xrc) = self.xrc.as_mut()
            && xrc.circuits.leave(circuit, link, peer)
        {
            let unused = xrc.circuits.is_unused(circuit);
            match xrc.queue_mut(circuit).filter(|_| unused) {
                Some(queue) => {
                    queue.unused_until = Some(Instant::now() + UNUSED);
                    self.xrc_step(XrcStep::Look);
                }
                None => self.break_circuit(circuit),
            }
        }
        self.count_users(circuit);
    }

    /// Links have begun or ended to use a circuit.
    fn count_users(&mut self, circuit: CircuitKey) {
        if let Some(xrc) = &mut self.xrc {
            let users = xrc.circuits.users(circuit);
            if let Some(queue) = xrc.queue_mut(circuit) {
                queue.users = users;
            }
        }
    }

    /// A circuit has failed, or has no links: its links break.
    pub(in crate::rdm) fn break_circuit(&mut self, circuit: CircuitKey) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        if xrc.circuits.is_dialled(circuit) {
            return self.todo.push_back(Todo::CircuitNotDialled(circuit));
        }
        if let Some(left) = xrc.circuits.end(circuit) {
            xrc.counts.circuits_failed += u64::from(!left.links.is_empty());
            self.todo.extend(left.links.into_iter().map(Todo::Broken));
            self.fail_circuit(circuit);
        }
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
        queue.failing = Some(Failing::new(qp.is_none()));
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
        held.failing = Some(Failing::new(false));
        let target = held.target.clone();
        if let Some(of) = held.of {
            for link in &held.links {
                let port = self
                    .links
                    .get_mut(*link)
                    .and_then(|record| record.port.as_ref());
                // nothing is dialled at an address that the peer of the link does not have
                let Some(port) = port.filter(|port| !port.forgets) else {
                    continue;
                };
                let newest = xrc.failed.entry(port.address).or_insert(of.number);
                if newest.is_before(of.number) {
                    *newest = of.number;
                }
            }
        }
        xrc.counts.targets_failed += u64::from(!held.links.is_empty());
        self.todo
            .extend(held.links.iter().copied().map(Todo::Broken));
        // otherwise when it is opened
        if let Some(target) = target {
            self.xrc_step(XrcStep::FailTarget(target));
        }
    }

    /// The targets through which the peer of a link may send on it.
    pub(in crate::rdm) fn targets_of(&mut self, link: LinkKey) -> Vec<Arc<Target>> {
        let port = self
            .links
            .get_mut(link)
            .and_then(|record| record.port.as_ref());
        let (Some(port), Some(xrc)) = (port, &self.xrc) else {
            return Vec::new();
        };
        let of_link = |(number, held): &(&QpNumber, &HeldTarget)| match port.from {
            Some(from) => **number == from,
            None => held.of.is_some_and(|of| port.peer == Some(of.peer)),
        };
        let held = xrc.targets.iter().filter(of_link);
        held.filter_map(|(_, held)| held.target.clone()).collect()
    }

    /// Moves the target through which the peer sends on a link to its error state.
    pub(super) fn silence_on_circuit(&mut self, link: LinkKey) {
        let from = self.port_mut(link).and_then(|port| port.from);
        let targets = self.xrc.as_ref().map(|xrc| &xrc.targets);
        let held = from.and_then(|from| targets?.get(&from));
        match (from, held.and_then(|held| held.failing)) {
            // the driver's step follows, or has been listed
            (Some(from), None) if held.is_some() => self.break_target(from),
            (_, Some(Failing { done: false, .. })) => {}
            // nothing of the peer arrives any more, or its target is not known
            _ => self.todo.push_back(Todo::Silenced(link)),
        }
    }

    /// A target is in its error state: it acknowledges nothing any more.
    pub(in crate::rdm) fn target_failed(&mut self, core: &mut Core<Self>, number: QpNumber) {
        let targets = self.xrc.as_mut().map(|xrc| &mut xrc.targets);
        let Some(held) = targets.and_then(|targets| targets.get_mut(&number)) else {
            return;
        };
        if let Some(failing) = &mut held.failing {
            failing.done = true;
        }
        for link in held.links.clone() {
            core.silenced(link, self);
        }
    }

    /// A circuit is connected.
    pub(in crate::rdm) fn circuit_up(
        &mut self,
        core: &mut Core<Self>,
        circuit: CircuitKey,
        reply: &CircuitReply,
    ) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let auth = xrc.auth == reply.auth;
        let fits = auth && xrc.circuits.number(circuit) == Some(reply.number);
        let qp = xrc.queue_mut(circuit).and_then(|queue| queue.qp.clone());
        let Some(qp) = qp.filter(|_| fits) else {
            return self.circuit_not_dialled(core, circuit, core::Failure::Refused, None);
        };
        let ids = OnCircuit {
            node: reply.node,
            number: reply.number,
            initiator: qp.qp_number(),
            target: reply.target,
        };
        let Up { links, ended } = xrc.circuits.up(circuit, ids);
        if xrc.circuits.get(circuit).is_some() {
            xrc.counts.circuits += 1;
            xrc.counts.circuits_most = xrc.counts.circuits_most.max(xrc.circuits.ups());
        }
        for link in links {
            self.choose_again(link);
        }
        let unused = self
            .xrc
            .as_ref()
            .is_some_and(|xrc| xrc.circuits.is_unused(circuit));
        if unused {
            self.break_circuit(circuit);
        }
        for circuit in ended {
            self.fail_circuit(circuit);
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
        let Some(xrc) = self.xrc.as_mut() else {
            return;
        };
        if !xrc.circuits.is_dialled(circuit) {
            // an acceptor that ends before the ready-to-use has arrived rejects a circuit that is
            // up
            return self.break_circuit(circuit);
        }
        let Some(Left { dialled_for, links }) = xrc.circuits.end(circuit) else {
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
                    self.dial_ended(core, link);
                }
                None if dials => self.not_dialled(core, link, failure),
                Some(rejection) if rejection.reason.is_lasting() => core.broken(link, self),
                _ => self.retry(core, link),
            }
        }
        for link in links {
            self.choose_again(link);
        }
    }

    /// The circuit of a link that this side has accepted cannot be dialled now. The link chooses
    /// again after a pause, for at most the connect timeout from the first call on.
    fn retry(&mut self, core: &mut Core<Self>, link: LinkKey) {
        let now = Instant::now();
        let limit = core.timeout();
        let Some(port) = self.port_mut(link) else {
            return;
        };
        let (limit, pause) = port.retries.unwrap_or((now + limit, PAUSES.0));
        port.retries = Some((limit, (pause * 2).min(PAUSES.1)));
        if now >= limit {
            return core.broken(link, self);
        }
        if let Some(xrc) = &mut self.xrc {
            xrc.retries.push((now + pause, link));
        }
        self.xrc_step(XrcStep::Look);
    }

    /// HELLO has arrived on a link that this side has accepted: it needs a circuit to the node of
    /// the peer.
    pub(in crate::rdm) fn greeted_on_circuit(&mut self, link: LinkKey) {
        let Some(xrc) = self.xrc.as_mut().filter(|_| !self.links.ends(link)) else {
            return;
        };
        let port = self
            .links
            .get_mut(link)
            .and_then(|record| record.port.as_ref());
        let Some((address, node)) = port.and_then(|port| Some((port.address, port.node?))) else {
            return;
        };
        let choice = xrc.circuits.for_accepted(link, address, node);
        self.follow(link, choice);
    }

    /// The reply to a link request becomes BUSY if the link has ended, or is being ended. The peer
    /// would post packets with a tag that this side does not know.
    ///
    /// Otherwise the connection block, which exists now, is added to the reply.
    pub(in crate::rdm) fn check_answer(&mut self, link: LinkKey, answer: &mut Vec<u8>) {
        if let Some(record) = self.links.get_open(link) {
            if let Some(block) = &record.block
                && let Ok(mut reply) = LinkReply::decode(answer)
            {
                let terms = &mut reply.reply.terms;
                (terms.block_addr, terms.block_rkey) = block.block();
                *answer = reply.encode().to_vec();
                let sent = record.port.as_mut().and_then(|port| port.reply.as_mut());
                if let Some(sent) = sent {
                    sent.1.clone_from(answer);
                }
            }
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
        let Some(record) = self.links.get_open(link) else {
            return;
        };
        let Some(port) = record.port.as_mut().filter(|port| !port.attached) else {
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
            self.open_outlet(link);
            core.has_room(link, self);
            return self.pull_and_run(core, link);
        }
        if let Some(port) = self.port_mut(link) {
            port.attached = false;
        }
        if !self.waits_for_room(link) {
            core.broken(link, self);
        }
    }

    /// Whether a link is listed to continue when its circuit has room.
    fn waits_for_room(&mut self, link: LinkKey) -> bool {
        let circuit = self.port_mut(link).and_then(|port| port.circuit);
        let queue = circuit.and_then(|it| self.xrc.as_mut()?.queue_mut(it));
        queue.is_some_and(|queue| queue.is_waiting(link))
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
        let status = self.links.circuit_status(circuit, wc);
        let failure = Failure::of(status, self.not_executed);
        let failed = failure.is_some();
        let mut last = None;
        loop {
            let queue = self.xrc.as_mut().and_then(|xrc| xrc.queue_mut(circuit));
            let Some(queue) = queue else {
                return;
            };
            queue.proven |= !failed;
            let Some((link, sent)) = queue.queue.take_completed(position) else {
                break;
            };
            last = Some(link);
            let read = matches!(sent, Sent::Read(_));
            if let Some(port) = self.port_mut(link) {
                port.under_way -= 1;
                port.reads -= u32::from(read);
                port.probing &= !matches!(sent, Sent::Probe);
            }
            match sent {
                Sent::Control(Some(slot)) => {
                    self.memory.give_back(slot);
                    self.has_memory();
                }
                Sent::Numbered(number) if !failed => core.sent(link, number, self),
                Sent::Read(read) => self.read_ended(read, link, Some(status.0)),
                _ => {}
            }
        }
        if let Some(failure) = failure {
            self.circuit_request_failed(circuit, &failure);
            // the receive queue of the peer, whose answer is awaited, does not exist
            if let Some(link) = last.filter(|_| core.has_left() && failure.is_refusal()) {
                core.silenced(link, self);
            }
            return;
        }
        let queue = self.xrc.as_mut().and_then(|xrc| xrc.queue_mut(circuit));
        if queue.is_some_and(|queue| queue.waiting() != 0) {
            self.give_turns(core, circuit);
        }
    }

    /// Gives the free places of a circuit to the links that wait, one place each in turn, until
    /// none of them uses one. A link that does not use its place leaves the list, or is put to its
    /// end.
    #[cold]
    pub(in crate::rdm) fn give_turns(&mut self, core: &mut Core<Self>, circuit: CircuitKey) {
        // how many links that wait may use a place
        let mut left = usize::MAX;
        while let Some(queue) = self.xrc.as_mut().and_then(|xrc| xrc.queue_mut(circuit)) {
            left = left.min(queue.waiting());
            if left == 0 {
                break;
            }
            let Some(link) = queue.next_turn() else {
                break;
            };
            match self.port_mut(link).map(|port| port.attached) {
                Some(true) => {
                    core.has_room(link, self);
                    let peer = core.peer_of(link);
                    if let Some(peer) = peer.filter(|peer| self.pulls.has_waiting(*peer))
                        && core.open_link(peer) == Some(link)
                    {
                        self.pull(peer, link);
                    }
                }
                Some(false) => self.todo.push_back(Todo::Attach(link)),
                None => {}
            }
            let queue = self.xrc.as_mut().and_then(|xrc| xrc.queue_mut(circuit));
            let used = queue.is_some_and(|queue| queue.end_turn());
            left = if used { usize::MAX } else { left - 1 };
        }
    }

    /// A packet has arrived.
    #[inline]
    pub(super) fn received_on_circuit(&mut self, core: &mut Core<Self>, slot: Slot, wc: &Wc) {
        let Some(xrc) = &self.xrc else {
            return;
        };
        if wc.status() != 0 {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        }
        let link = wc.imm().and_then(|tag| xrc.tagged(tag));
        let record = link.and_then(|link| self.links.get_mut(link));
        let port = record.and_then(|record| record.port.as_mut());
        let (Some(link), Some(port)) = (link, port) else {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        };
        let attached = port.from.is_some();
        // before ATTACH each target of the node can be that of the peer
        if port.from.is_some_and(|from| from.get() != wc.qp_num()) {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        }
        let total = wc.byte_len();
        let packet = match wc.is_recv_rdma() || total > SLOT_SIZE {
            true => None,
            false => Packet::decode(&self.memory.bytes(&slot)[..total], total).ok(),
        };
        let known = match packet.as_ref().map(|packet| &packet.body) {
            Some(Body::Attach(attach)) => {
                let attach = *attach;
                !attached && self.attached_by_peer(link, &attach, wc.qp_num())
            }
            _ => attached,
        };
        if !known {
            self.post_receive(slot);
            return self.unknown_tag(wc.qp_num());
        }
        let Some(packet) = packet else {
            return core.violated(link, PacketMemoryRef::Slot(slot), self);
        };
        if let Some(port) = self.port_mut(link) {
            port.used = true;
        }
        self.arriving = Some(link);
        core.arrived(link, &packet, PacketMemoryRef::Slot(slot), self);
    }

    /// ATTACH of the acceptor of a link has arrived through a target, which this endpoint opens, if
    /// it does not hold it. `false`: it names another target, or another circuit than that which
    /// the target is known to have.
    fn attached_by_peer(&mut self, link: LinkKey, attach: &Attach, through: u32) -> bool {
        let port = self
            .links
            .get_mut(link)
            .and_then(|record| record.port.as_mut());
        let Some((port, xrc)) = port.zip(self.xrc.as_mut()) else {
            return false;
        };
        let (number, Some(peer)) = (attach.target, port.peer) else {
            return false;
        };
        let of = OfPeer {
            peer,
            number: attach.circuit,
            initiator: attach.initiator,
        };
        let known = xrc.targets.get(&number);
        // a claim in a request may be about an earlier target with this number
        let certain = known.filter(|held| held.target.is_some() || !held.links.is_empty());
        let fits = certain.is_none_or(|held| held.of.is_none_or(|known| known == of));
        if number.get() != through || !fits {
            return false;
        }
        port.from = Some(number);
        let endpoint = &self.endpoint;
        let mut opens = None;
        let held = xrc.targets.entry(number).or_insert_with(|| {
            let cm = TargetCm::new(endpoint);
            opens = Some(Arc::clone(&cm));
            HeldTarget::opening(cm, Some(of))
        });
        held.of = Some(of);
        let failing = held.failing;
        xrc.use_target(number, link);
        // it has arrived before the target has failed
        match failing {
            Some(Failing { done: true, .. }) => self.todo.push_back(Todo::Silenced(link)),
            Some(_) => self.todo.push_back(Todo::Broken(link)),
            None => {}
        }
        if let Some(cm) = opens {
            self.xrc_step(XrcStep::OpenTarget(cm, number, Some(attach.initiator)));
        }
        true
    }

    /// A packet with an unknown tag has arrived through a target, which is of no use to its sender.
    #[cold]
    fn unknown_tag(&mut self, through: u32) {
        let Some((number, xrc)) = QpNumber::new(through).zip(self.xrc.as_mut()) else {
            return;
        };
        xrc.counts.unknown_tags += 1;
        if let Entry::Vacant(place) = xrc.targets.entry(number) {
            let cm = TargetCm::new(&self.endpoint);
            place.insert(HeldTarget::opening(Arc::clone(&cm), None));
            self.xrc_step(XrcStep::OpenTarget(cm, number, None));
        }
        self.break_target(number);
    }

    /// Begins to end a link: nothing more is posted.
    pub(super) fn end_on_circuit(&mut self, link: LinkKey) {
        if self.links.ends(link) {
            return;
        }
        self.links.begin_half_end(link);
        self.end_exchange(link);
        let record = self
            .links
            .get_mut(link)
            .filter(|record| !record.is_under_way());
        let left = record.and_then(|record| record.port.as_mut());
        if let Some(circuit) = left.and_then(|port| port.circuit.take()) {
            self.leave_circuit(circuit, link);
        }
        if let Some(xrc) = &mut self.xrc {
            xrc.half_ends.push(HalfEnd {
                link,
                since: Instant::now(),
                seen: None,
            });
        }
        self.xrc_step(XrcStep::Look);
    }

    /// The links that are being ended of whose requests none is under way any more, each once.
    pub(in crate::rdm) fn half_ended_links(&mut self, now: Instant) -> Vec<LinkKey> {
        let Some(xrc) = &mut self.xrc else {
            return Vec::new();
        };
        let mut late = Vec::new();
        let links = &mut self.links;
        let mut half_ends = std::mem::take(&mut xrc.half_ends);
        let ended = half_ends.extract_if(.., |half| {
            let record = links.get(half.link).filter(|record| record.is_under_way());
            let Some(port) = record.and_then(|record| record.port.as_ref()) else {
                return true;
            };
            let queue = port.circuit.and_then(|circuit| xrc.queue_mut(circuit));
            let progress = queue.map(|queue| queue.progress());
            let before = std::mem::replace(&mut half.seen, progress);
            if before.is_some() && before != progress {
                half.since = now;
            }
            if now >= half.since + FLUSH {
                late.extend(port.circuit);
            }
            false
        });
        let ended = ended.map(|half| half.link).collect();
        xrc.half_ends = half_ends;
        for circuit in late {
            // its target does not acknowledge
            self.break_circuit(circuit);
        }
        ended
    }

    /// The endpoint of a link's peer is being closed.
    pub(super) fn departs_on_circuit(&mut self, link: LinkKey) {
        let address = self.port_mut(link).map(|port| port.address);
        if let (Some(address), Some(xrc)) = (address, &mut self.xrc) {
            xrc.circuits.departed(address, link);
        }
    }

    /// A link posts nothing more, and accepts packets until its peer has stated that it posts none.
    pub(in crate::rdm) fn linger(&mut self, link: LinkKey) {
        let Some(port) = self.port_mut(link) else {
            return;
        };
        let circuit = port.circuit.take();
        self.shut_outlet(link);
        if let Some(circuit) = circuit {
            self.leave_circuit(circuit, link);
        }
    }

    /// Whether requests of links that are being ended are under way.
    pub(in crate::rdm) fn ends_on_circuits(&self) -> bool {
        self.xrc
            .as_ref()
            .is_some_and(|xrc| !xrc.half_ends.is_empty())
    }

    /// Removes what a link on a circuit has.
    pub(super) fn remove_port(&mut self, link: LinkKey, port: &Port) {
        if let Some((sidr, _)) = &port.exchange {
            self.xrc_step(XrcStep::EndExchange(Arc::clone(sidr)));
        }
        if let Some(xrc) = &mut self.xrc {
            if port.forgets {
                xrc.circuits.forget(port.address);
            }
            xrc.remove_tag(port.tag);
            let held = port.from.and_then(|from| xrc.targets.get_mut(&from));
            if let Some(held) = held {
                held.links.retain(|of| *of != link);
                held.loose_since = Instant::now();
            }
            if let Some(id) = port.peer
                && xrc.accepted.get(&id) == Some(&link)
            {
                xrc.accepted.remove(&id);
            }
            xrc.half_ends.retain(|half| half.link != link);
        }
        if let Some(circuit) = port.circuit {
            self.leave_circuit(circuit, link);
        }
    }

    /// Fewer receives are posted than the limit that was set: a burst of an endpoint with so many
    /// links. The driver takes what has arrived and posts receives.
    pub(in crate::rdm) fn receives_low(&mut self, links: usize) {
        if let Some(xrc) = &mut self.xrc {
            xrc.limit = 0;
            xrc.counts.receives_low += 1;
        }
        self.receives.raise(links);
        self.xrc_step(XrcStep::Look);
    }

    /// The endpoint begins to end its links.
    pub(in crate::rdm) fn count_at_end(&mut self) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let used =
            |key: &CircuitKey| xrc.circuits.get(*key).is_some() && xrc.circuits.users(*key) != 0;
        let circuits = xrc.keys().iter().filter(|key| used(key)).count();
        let targets = xrc.targets.iter();
        let targets = targets.filter(|(_, held)| !held.links.is_empty());
        xrc.counts.targets_at_end = targets.map(|(number, _)| *number).collect();
        xrc.counts.circuits_at_end = circuits;
    }

    /// What was counted, as a line of JSON.
    pub(in crate::rdm) fn counts(&self) -> String {
        let protocol = if self.xrc.is_some() { "xrc" } else { "rc" };
        let mut members = vec![
            ("pid", std::process::id().to_string()),
            ("protocol", format!("\"{protocol}\"")),
            ("links_most", self.links.most().to_string()),
        ];
        if let Some(xrc) = &self.xrc {
            members.push(("node", xrc.node.get().to_string()));
            members.extend(xrc.counts.members());
        }
        object(&members)
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
            // peers may post to this endpoint; others of the node may use the target
            let target = held.target.iter().filter(|_| !held.links.is_empty());
            steps.extend(target.cloned().map(XrcStep::FailTarget));
            steps.push(XrcStep::CloseTarget(held.cm, held.target));
        }
        for circuit in xrc.keys() {
            if let Some(queue) = xrc.remove_queue(circuit) {
                if let Some(qp) = &queue.qp {
                    steps.push(XrcStep::FailCircuit(circuit, Arc::clone(qp)));
                }
                steps.push(XrcStep::DestroyCircuit(queue.cm, queue.qp, Vec::new()));
            }
        }
        steps.into_iter().map(Step::Xrc).collect()
    }
}
