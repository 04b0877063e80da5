//! Links on circuits in the network in memory. A circuit carries the requests of all links of one
//! endpoint to the endpoints of a node, in order. It can fail at any request: what is under way is
//! flushed, and may still arrive. A target can fail for all its links. Each endpoint has one
//! completion queue, and finds the link of a packet when it polls it.

use std::collections::VecDeque;

use super::{Conn, Event, MS, Wire, World, number_of};
use crate::rdm::core::link::LinkKey;
use crate::verbs::QpNumber;
use crate::wire::rdm::packet::Attach;
use crate::wire::rdm::xrc::CircuitNumber;
use crate::wire::rdm::{Body, Epoch, Listener, Number, Packet, Reply, Request};

/// A packet on a circuit: the sender's side of its connection, which stands for the tag.
#[derive(Debug)]
struct Carried {
    conn: usize,
    side: usize,
    wire: Wire,
}

pub(super) struct Circuit {
    from: usize,
    /// The node of the target.
    to: usize,
    /// The initiator is in its error state.
    err: bool,
    target_err: bool,
    flight: VecDeque<Carried>,
    /// When the last packet arrives, and the last completion.
    last: u64,
    acked: u64,
    /// Requests that have not completed.
    pending: VecDeque<(usize, usize, Option<Number>)>,
}

/// A completion in the queue of an endpoint.
pub(super) enum Polled {
    Packet(usize, usize, usize, Wire),
    /// A request of this side of a connection has completed; `false`: it was flushed.
    Sent(usize, usize, Option<Number>, bool),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum OnCircuit {
    Arrive(usize),
    Ack(usize),
    Poll(usize),
    /// The initiator is moved to its error state.
    Fails(usize),
    /// The target is moved to its error state.
    TargetFails(usize),
    Attach(usize, LinkKey),
    HalfEnded(usize, LinkKey),
    /// Requests of a link that is being ended may not have completed for 1 s.
    Late(usize, usize),
    Close(usize, LinkKey),
    Silenced(usize, LinkKey),
}

impl World {
    fn on_circuit(&mut self, event: OnCircuit) {
        self.later(Event::OnCircuit(event));
    }

    /// The node of an endpoint.
    fn node_of(&self, endpoint: usize) -> usize {
        number_of(self.nodes[endpoint].listener) / self.plan.on_node
    }

    /// The endpoint that gets the packets of a side of a connection: a successor of the other side
    /// can have got the number of its receive queue.
    fn receiver(&self, conn: usize, side: usize) -> Option<usize> {
        let conn = &self.conns[conn];
        let meant = match side {
            0 => conn.acceptor,
            _ => Some(conn.dialler),
        };
        self.inboxes[meant?].filter(|at| self.nodes[*at].alive)
    }

    /// A circuit from an endpoint to the node of another one that its initiator can use.
    fn circuit(&mut self, from: usize, to: usize) -> usize {
        let to = self.node_of(to);
        let usable = |it: &Circuit| (it.from, it.to, it.err) == (from, to, false);
        self.circuits.iter().position(usable).unwrap_or_else(|| {
            self.circuits.push(Circuit {
                from,
                to,
                err: false,
                target_err: false,
                flight: VecDeque::new(),
                last: 0,
                acked: 0,
                pending: VecDeque::new(),
            });
            self.circuits.len() - 1
        })
    }

    /// A link request has arrived: whether its circuit leads to the endpoint.
    pub(super) fn leads_to(&mut self, conn: usize, node: usize) -> bool {
        let from = self.conns[conn].sides[0].map(|(from, _)| from);
        let Some(from) = from else {
            return false;
        };
        let circuit = match self.conns[conn].circuit[0] {
            Some(circuit) => circuit,
            None => self.circuit(from, node),
        };
        self.conns[conn].circuit[0] = Some(circuit);
        let it = &self.circuits[circuit];
        let leads = it.to == self.node_of(node) && !it.err && !it.target_err;
        if !leads {
            // NODE by the creator of the target
            self.on_circuit(OnCircuit::Fails(circuit));
        }
        leads
    }

    /// HELLO has arrived at the acceptor, which needs a circuit.
    pub(super) fn greeted(&mut self, node: usize, link: LinkKey) {
        if self.nodes[node].links[&link.number()].1 == 1 {
            let attach = OnCircuit::Attach(node, link);
            if self.plan.slow_circuits && self.chaos && self.random.one_in(2) {
                let time = self.now + self.random.below(15_000 * MS);
                return self.at(time, Event::OnCircuit(attach));
            }
            self.on_circuit(attach);
        }
    }

    pub(super) fn post_on_circuit(&mut self, node: usize, link: LinkKey, wire: Wire) {
        let (conn, side) = self.nodes[node].links[&link.number()];
        let circuit = self.conns[conn].circuit[side].expect("a circuit");
        let number = wire.number;
        self.conns[conn].under_way[side] += 1;
        let time = self.now + self.random.delay();
        let it = &mut self.circuits[circuit];
        if it.err {
            return self.polls(node, Polled::Sent(conn, side, number, false));
        }
        it.pending.push_back((conn, side, number));
        it.flight.push_back(Carried { conn, side, wire });
        it.last = it.last.max(time);
        let time = it.last;
        self.at(time, Event::OnCircuit(OnCircuit::Arrive(circuit)));
    }

    /// Begins to end a link: its out half.
    pub(super) fn end_half(&mut self, node: usize, link: LinkKey) {
        let (conn, side) = self.nodes[node].links[&link.number()];
        self.conns[conn].err[side] = true;
        self.try_half(conn, side);
        let time = self.now + 1_000 * MS;
        self.at(time, Event::OnCircuit(OnCircuit::Late(conn, side)));
    }

    fn try_half(&mut self, conn: usize, side: usize) {
        let it = &self.conns[conn];
        if it.err[side]
            && it.under_way[side] == 0
            && let Some((node, link)) = it.sides[side]
        {
            self.on_circuit(OnCircuit::HalfEnded(node, link));
        }
    }

    pub(super) fn close_half(&mut self, node: usize, link: LinkKey) {
        self.on_circuit(OnCircuit::Close(node, link));
    }

    /// The target through which the peer sends on a link fails. Without one, the peer has posted
    /// nothing on the link.
    pub(super) fn silence_link(&mut self, node: usize, link: LinkKey) {
        let (conn, side) = self.nodes[node].links[&link.number()];
        match self.conns[conn].bound[side] {
            Some(circuit) => self.on_circuit(OnCircuit::TargetFails(circuit)),
            None => self.on_circuit(OnCircuit::Silenced(node, link)),
        }
    }

    /// A WRITE of 0 bytes or a READ of the presence word.
    pub(super) fn probe_circuit(&mut self, node: usize, link: LinkKey) {
        let (conn, side) = self.nodes[node].links[&link.number()];
        let other = self.side(conn, 1 - side).map(|(other, _)| other);
        let there = other.is_some() && self.receiver(conn, side) == other;
        let circuit = self.conns[conn].circuit[side];
        if let Some(circuit) = circuit {
            let it = &self.circuits[circuit];
            if it.target_err || !there {
                self.on_circuit(OnCircuit::Fails(circuit));
            }
        }
    }

    /// A circuit or a target fails.
    pub(super) fn break_circuit(&mut self) {
        let newest = self.circuits.len().min(4) as u64;
        if newest > 0 {
            let circuit = self.circuits.len() - 1 - self.random.below(newest) as usize;
            self.fail_one(circuit);
        }
    }

    fn fail_one(&mut self, circuit: usize) {
        let initiator = self.random.one_in(2);
        self.on_circuit(match initiator {
            true => OnCircuit::Fails(circuit),
            false => OnCircuit::TargetFails(circuit),
        });
    }

    pub(super) fn break_circuits_between(&mut self, ends: [usize; 2]) {
        let nodes = ends.map(|end| self.node_of(end));
        for circuit in 0..self.circuits.len() {
            let it = &self.circuits[circuit];
            if ends.contains(&it.from) && nodes.contains(&it.to) && !it.err {
                self.fail_one(circuit);
            }
        }
    }

    /// An endpoint has ended. A target may live on, and lead to the successor.
    pub(super) fn replace_on_circuits(&mut self, old: usize, new: usize) {
        self.inboxes[old] = self.random.one_in(2).then_some(new);
        let node = self.node_of(old);
        for circuit in 0..self.circuits.len() {
            let lives = self.plan.on_node > 1 || self.random.one_in(2);
            let it = &mut self.circuits[circuit];
            it.err |= it.from == old;
            // of a node with one endpoint: the target is held by nobody else
            it.target_err |= it.to == node && !lives;
        }
    }

    /// An endpoint is closed: it informs its peers, waits at most 1 s until they post nothing more,
    /// and is replaced.
    pub(super) fn leave(&mut self, listener: Listener) {
        let node = self.at[&listener];
        self.call(node, |core, hands| core.leave(hands));
        let time = self.now + 1_000 * MS;
        self.at(time, Event::Left(listener));
    }

    pub(super) fn left(&mut self, listener: Listener) {
        let node = self.at[&listener];
        if !self.nodes[node].core.has_left() {
            // it was killed meanwhile
            return;
        }
        for circuit in 0..self.circuits.len() {
            let open = |(conn, side): &(usize, usize)| {
                let conn: &Conn = &self.conns[*conn];
                conn.bound[*side] == Some(circuit)
            };
            if self.nodes[node].links.values().any(open) {
                self.circuits[circuit].target_err = true;
            }
        }
        while !self.nodes[node].cq.is_empty() {
            self.poll_one(node);
        }
        // a target that is not known does not fail: its peer finds a successor as after a kill
        let unknown = |conn: &Conn| {
            conn.dialler == node && conn.bound[0].is_none() && conn.sides[1].is_some()
        };
        if self.conns.iter().any(unknown) {
            self.killed.insert(listener);
        }
        self.restart(listener);
    }

    /// What a request states, and what has been posted to the peer before.
    pub(super) fn check_request(&self, conn: usize, link: LinkKey) {
        if !self.plan.circuits {
            return;
        }
        let node = self.conns[conn].dialler;
        let core = &self.nodes[node].core;
        // the endpoint that had the address when the session began
        let id = core.peer_of(link).and_then(|peer| core.session(peer));
        let Some(other) = self.nodes.iter().position(|it| Some(it.id) == id) else {
            return;
        };
        let request = Request::decode(&self.conns[conn].request).expect("a request");
        // otherwise the dialler does not know which endpoint has the address
        if request.shows.is_some() && !request.fresh {
            self.check_statement(node, other, (Some(request.epoch), request.ended));
        }
    }

    /// As [`Self::check_request`].
    pub(super) fn check_reply(&self, conn: usize, node: usize, reply: &[u8]) {
        if !self.plan.circuits {
            return;
        }
        let other = self.conns[conn].dialler;
        let request = Request::decode(&self.conns[conn].request).expect("a request");
        let reply = Reply::decode(reply).expect("a reply");
        if request.shows.is_some() && !request.fresh {
            self.check_statement(node, other, (reply.ended, Some(reply.epoch)));
        }
    }

    /// An endpoint states that its out halves have ended: those of the links to another one that it
    /// has dialled before the epoch `own`, and that the other one has dialled before `accepted`.
    fn check_statement(
        &self,
        node: usize,
        other: usize,
        (own, accepted): (Option<Epoch>, Option<Epoch>),
    ) {
        for conn in &self.conns {
            let epoch = Request::decode(&conn.request).map(|request| request.epoch);
            let (side, before) = match (conn.dialler, conn.acceptor) {
                (from, Some(to)) if (from, to) == (node, other) => (0, own),
                (from, Some(to)) if (from, to) == (other, node) => (1, accepted),
                _ => continue,
            };
            let stated = epoch
                .ok()
                .zip(before)
                .is_some_and(|(of, it)| of.is_before(it));
            assert!(
                !stated || conn.under_way[side] == 0,
                "{node} states the end of a link to {other} on which requests are under way"
            );
        }
    }

    pub(super) fn step_on_circuit(&mut self, event: OnCircuit) {
        match event {
            OnCircuit::Arrive(circuit) => self.arrive_on_circuit(circuit),
            OnCircuit::Ack(circuit) => {
                let it = &mut self.circuits[circuit];
                let from = it.from;
                if let Some((conn, side, number)) = it.pending.pop_front() {
                    self.polls(from, Polled::Sent(conn, side, number, true));
                }
            }
            OnCircuit::Poll(node) => self.poll_one(node),
            OnCircuit::Fails(circuit) => {
                let it = &mut self.circuits[circuit];
                it.err = true;
                let (from, pending) = (it.from, std::mem::take(&mut it.pending));
                for (conn, side, number) in pending {
                    self.polls(from, Polled::Sent(conn, side, number, false));
                }
                for conn in 0..self.conns.len() {
                    for side in 0..2 {
                        if self.conns[conn].circuit[side] == Some(circuit)
                            && let Some((node, link)) = self.side(conn, side)
                        {
                            self.later(Event::Broken(node, link));
                        }
                    }
                }
            }
            OnCircuit::TargetFails(circuit) => {
                self.circuits[circuit].target_err = true;
                for conn in 0..self.conns.len() {
                    self.silence(conn, circuit);
                }
            }
            OnCircuit::Attach(node, link) => self.attach(node, link),
            OnCircuit::HalfEnded(node, link) => {
                if !self.nodes[node].links.contains_key(&link.number()) {
                    return;
                }
                self.call(node, |core, hands| core.half_ended(link, hands));
                if self.nodes[node].core.peer_of(link).is_none() {
                    self.forget_link(node, link);
                }
            }
            OnCircuit::Late(conn, side) => {
                if self.conns[conn].under_way[side] > 0
                    && let Some(circuit) = self.conns[conn].circuit[side]
                {
                    self.on_circuit(OnCircuit::Fails(circuit));
                }
            }
            OnCircuit::Close(node, link) => {
                while !self.nodes[node].cq.is_empty() {
                    self.poll_one(node);
                }
                self.forget_link(node, link);
                self.call(node, |core, hands| core.ended(link, hands));
            }
            OnCircuit::Silenced(node, link) => {
                self.call(node, |core, hands| core.silenced(link, hands));
            }
        }
    }

    fn forget_link(&mut self, node: usize, link: LinkKey) {
        if let Some((conn, side)) = self.nodes[node].links.remove(&link.number()) {
            self.conns[conn].sides[side] = None;
        }
        self.nodes[node].hands.posted.remove(&link.number());
        self.nodes[node].hands.attached.remove(&link.number());
    }

    /// The links of a failed target break, and get nothing more.
    fn silence(&mut self, conn: usize, circuit: usize) {
        for side in 0..2 {
            if self.conns[conn].bound[side] == Some(circuit)
                && let Some((node, link)) = self.side(conn, side)
            {
                self.on_circuit(OnCircuit::Silenced(node, link));
            }
        }
    }

    fn arrive_on_circuit(&mut self, circuit: usize) {
        let late = self.random.one_in(2);
        let delay = self.random.delay();
        let it = &mut self.circuits[circuit];
        let Some(Carried { conn, side, wire }) = it.flight.pop_front() else {
            return;
        };
        let (err, target_err) = (it.err, it.target_err);
        let to = self.receiver(conn, side).filter(|_| !target_err);
        let Some(to) = to else {
            if !target_err {
                // a request for a queue that does not exist
                self.on_circuit(OnCircuit::TargetFails(circuit));
            }
            if !err {
                self.on_circuit(OnCircuit::Fails(circuit));
            }
            return;
        };
        let it = &mut self.circuits[circuit];
        if it.err && !late {
            // so are those behind it
            return it.flight.clear();
        }
        if !it.err {
            it.acked = it.acked.max(self.now + delay);
            let time = it.acked;
            self.at(time, Event::OnCircuit(OnCircuit::Ack(circuit)));
        }
        self.polls(to, Polled::Packet(circuit, conn, side, wire));
    }

    fn polls(&mut self, node: usize, polled: Polled) {
        self.nodes[node].cq.push_back(polled);
        self.on_circuit(OnCircuit::Poll(node));
    }

    fn poll_one(&mut self, node: usize) {
        match self.nodes[node].cq.pop_front() {
            Some(Polled::Packet(circuit, conn, side, wire)) => {
                let packet = Packet::decode(&wire.head, wire.total).expect("a packet");
                let attaches = matches!(packet.body, Body::Attach(_));
                let at = 1 - side;
                let link = self.conns[conn].sides[at].filter(|(of, _)| *of == node);
                let bound = self.conns[conn].bound[at];
                let known = bound == Some(circuit) || bound.is_none() && attaches;
                let Some((_, link)) = link.filter(|_| known) else {
                    // an unknown tag, or through another target
                    return self.on_circuit(OnCircuit::TargetFails(circuit));
                };
                self.conns[conn].bound[at] = Some(circuit);
                if attaches && self.circuits[circuit].target_err {
                    self.silence(conn, circuit);
                }
                self.call(node, |core, hands| core.arrived(link, &packet, (), hands));
            }
            Some(Polled::Sent(conn, side, number, ok)) => {
                self.conns[conn].under_way[side] -= 1;
                if let Some((node, link)) = self.side(conn, side) {
                    if let (Some(number), true) = (number, ok) {
                        if let Some(posted) = self.nodes[node].hands.posted.get_mut(&link.number())
                        {
                            *posted -= 1;
                        }
                        self.call(node, |core, hands| core.sent(link, number, hands));
                    }
                    self.try_half(conn, side);
                }
            }
            None => {}
        }
    }

    /// The acceptor of a link dials its circuit, or finds it, and posts ATTACH.
    fn attach(&mut self, node: usize, link: LinkKey) {
        let Some((conn, side)) = self.nodes[node].links.get(&link.number()).copied() else {
            return;
        };
        let Some((other, _)) = self.conns[conn].sides[0] else {
            // the circuit cannot be dialled, or leads to an unknown tag
            let from = self.conns[conn].dialler;
            return self.attach_to(node, link, (conn, side), from);
        };
        self.attach_to(node, link, (conn, side), other);
    }

    fn attach_to(
        &mut self,
        node: usize,
        link: LinkKey,
        (conn, side): (usize, usize),
        other: usize,
    ) {
        if self.conns[conn].err[side] || !self.nodes[node].alive {
            return;
        }
        let circuit = self.circuit(node, other);
        self.conns[conn].circuit[side] = Some(circuit);
        self.nodes[node].hands.attached.insert(link.number());
        let number = QpNumber::new(1).unwrap();
        let attach = Attach {
            circuit: CircuitNumber::FIRST,
            initiator: number,
            target: number,
        };
        let mut posted = false;
        self.call(node, |core, hands| {
            posted = core.attach(link, attach, hands);
            match posted {
                true => core.has_room(link, hands),
                false => {
                    hands.attached.remove(&link.number());
                }
            }
        });
        if !posted {
            self.on_circuit(OnCircuit::Attach(node, link));
        }
    }
}

impl Conn {
    /// What a connection has besides, of links on circuits.
    pub(super) fn accept_on_circuit(&mut self) {
        self.bound[1] = self.circuit[0];
    }
}
