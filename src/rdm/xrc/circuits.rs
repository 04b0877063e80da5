//! Which circuit a link uses, which links wait for one, and which circuit is dialled.
//! `docs/protocol-xrc.md`, "Circuits". A state machine without device, lock, thread or clock: its
//! caller dials and ends circuits, and passes what has happened.
//!
//! Node ids are hints. A wrong one costs a rejected link request (NODE) and a further choice. A
//! peer can state any of them, also that of another peer, and packets for it break the circuit if
//! its receive queue is not behind it. So a circuit is used only for peers at the IP address to
//! which it was dialled.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use crate::rdm::core::link::LinkKey;
use crate::rdm::slab::Slab;
use crate::rdm::table_keys::{CircuitKey, CircuitMark};
use crate::wire::rdm::xrc::{CircuitNumber, NodeId, OnCircuit};
use crate::wire::rdm::{EndpointId, Listener};

/// What the caller does for a link that needs a circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum Choice {
    /// The circuit is up: the link request names it.
    Use(CircuitKey, OnCircuit),
    /// The circuit is dialled. [`Circuits::up`] or [`Circuits::end`] names the link, which chooses
    /// again then.
    Wait(CircuitKey),
    /// This new circuit is dialled to the address of the link, which waits for it.
    Dial(CircuitKey, CircuitNumber),
    /// The link request names no circuit; the answer states the node.
    Ask,
    /// The dial of the link has failed.
    Fail,
    /// 2^24 circuits.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Dialled for this link; the node is that which the peer is thought to be on.
    Dialling(LinkKey, Option<NodeId>),
    Up(OnCircuit),
    Ending,
}

#[derive(Debug)]
struct Circuit {
    number: CircuitNumber,
    /// To which it was dialled.
    address: Listener,
    state: State,
    /// Other circuits of its node are of no use for this peer.
    splinter: bool,
    /// Its creator does not have its target any more, or has ended: no further link uses it.
    stale: bool,
    /// The number of the first one of the circuits that are dialled for the same links.
    group: CircuitNumber,
    /// Links that use it or, while it is dialled, wait for it.
    links: Vec<LinkKey>,
    /// The node to which it leads, if that is known.
    leads_to: Option<NodeId>,
    /// The endpoints whose links have left it last, at most [`FORMER`].
    former: VecDeque<EndpointId>,
}

/// Endpoints that a circuit remembers when their links have left it. A peer that is forgotten finds
/// a failed circuit by the retries of the device.
const FORMER: usize = 64;

/// A circuit that ends, and the links that waited for it or used it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::rdm) struct Left {
    /// The link for whose peer it was dialled, if it was not up.
    pub(in crate::rdm) dialled_for: Option<LinkKey>,
    /// The others.
    pub(in crate::rdm) links: Vec<LinkKey>,
}

/// A circuit is connected.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::rdm) struct Up {
    /// The links that choose again.
    pub(in crate::rdm) links: Vec<LinkKey>,
    /// Circuits that are to be ended, because one to their node was up, or because they were
    /// dialled for the same links.
    pub(in crate::rdm) ended: Vec<CircuitKey>,
}

/// The circuits of an endpoint, as their initiator.
pub(in crate::rdm) struct Circuits {
    circuits: Slab<CircuitMark, Circuit>,
    next: CircuitNumber,
    /// The nodes that peers have stated, by listening address.
    nodes: HashMap<Listener, NodeId>,
    /// The nodes of the addresses in `nodes` and of the circuits that are up, by IP address, each
    /// with the number of these.
    hosts: HashMap<IpAddr, Vec<(NodeId, usize)>>,
}

fn host(address: Listener) -> IpAddr {
    address.socket_addr().ip()
}

impl Circuits {
    pub(in crate::rdm) fn new() -> Self {
        Self {
            circuits: Slab::new(),
            next: CircuitNumber::FIRST,
            nodes: HashMap::new(),
            hosts: HashMap::new(),
        }
    }

    /// The endpoint at an address has stated its node.
    pub(in crate::rdm) fn learn(&mut self, address: Listener, node: NodeId) {
        let old = self.nodes.insert(address, node);
        if old == Some(node) {
            return;
        }
        self.dialled_to(address, node);
        self.show(address, node);
        if let Some(old) = old {
            self.leave_node(address, old);
        }
    }

    /// An address, or a circuit to it, is on a node.
    fn show(&mut self, address: Listener, node: NodeId) {
        let shown = self.hosts.entry(host(address)).or_default();
        match shown.iter_mut().find(|(of, _)| *of == node) {
            Some((_, count)) => *count += 1,
            None => shown.push((node, 1)),
        }
    }

    /// The peer at an address was freed, or the link to an address that no peer has was removed:
    /// the node is learnt again when the peer returns.
    pub(in crate::rdm) fn forget(&mut self, address: Listener) {
        if let Some(node) = self.nodes.remove(&address) {
            self.leave_node(address, node);
        }
    }

    /// An address is not on this node any more, or a circuit to it has ended. The IP address has
    /// shown a node as long as one of its addresses is on it, or a circuit leads to it.
    fn leave_node(&mut self, address: Listener, node: NodeId) {
        let Some(shown) = self.hosts.get_mut(&host(address)) else {
            return;
        };
        for (_, count) in shown.iter_mut().filter(|(of, _)| *of == node) {
            *count -= 1;
        }
        shown.retain(|(_, count)| *count != 0);
        if shown.is_empty() {
            self.hosts.remove(&host(address));
        }
    }

    /// The node of the peers to which circuits are dialled is known now.
    fn dialled_to(&mut self, address: Listener, node: NodeId) {
        for key in self.keys().collect::<Vec<_>>() {
            if let Some(circuit) = self.circuits.get_mut(key)
                && circuit.address == address
                && let State::Dialling(_, of) = &mut circuit.state
            {
                *of = Some(node);
            }
        }
    }

    /// The node that a peer has stated, or that of the other peers at its IP address.
    pub(in crate::rdm) fn node(&self, address: Listener) -> Option<NodeId> {
        let shown = self.hosts.get(&host(address)).map(Vec::as_slice);
        match (self.nodes.get(&address), shown) {
            (Some(node), _) => Some(*node),
            (None, Some([(only, _)])) => Some(*only),
            _ => None,
        }
    }

    fn keys(&self) -> impl Iterator<Item = CircuitKey> + '_ {
        let first = self.circuits.at_or_behind(0);
        std::iter::successors(first, |key| self.circuits.after(*key))
    }

    fn age(&self, number: CircuitNumber) -> u32 {
        self.next.get().wrapping_sub(number.get())
    }

    /// The newest circuit to a node at an IP address that is up, of those that are older than
    /// `before`.
    fn up_to(
        &self,
        (node, ip): (NodeId, IpAddr),
        before: Option<CircuitNumber>,
    ) -> Option<(CircuitKey, OnCircuit)> {
        let up = |key| {
            let circuit = self.circuits.get(key)?;
            let usable = !circuit.stale && host(circuit.address) == ip;
            match circuit.state {
                State::Up(ids) if ids.node == node && usable => Some((key, ids)),
                _ => None,
            }
        };
        let least = before.map_or(0, |number| self.age(number) + 1);
        let ups = self.keys().filter_map(up);
        let ups = ups.filter(|(_, ids)| self.age(ids.number) >= least);
        ups.min_by_key(|(_, ids)| self.age(ids.number))
    }

    /// Chooses the circuit of a link that is dialled to an address. The link has none.
    pub(in crate::rdm) fn choose(&mut self, link: LinkKey, address: Listener) -> Choice {
        let hint = self.node(address);
        let ip = host(address);
        if let Some((key, ids)) = hint.and_then(|node| self.up_to((node, ip), None)) {
            self.join(key, link);
            return Choice::Use(key, ids);
        }
        // one that is dialled to the peer, or that may lead to its node: another peer of its IP
        // address is probably on the same node
        let stated = self.nodes.get(&address).copied();
        let may_lead = |it: &Circuit| match it.state {
            _ if host(it.address) != ip => false,
            State::Dialling(_, of) => match (stated, of) {
                (Some(stated), Some(of)) => stated == of,
                (None, Some(_)) => it.address == address || hint == of,
                _ => true,
            },
            _ => false,
        };
        let coming = self
            .keys()
            .find(|key| self.circuits.get(*key).is_some_and(may_lead));
        if let Some(key) = coming {
            self.join(key, link);
            return Choice::Wait(key);
        }
        let shown = self.hosts.get(&ip).map_or(0, Vec::len);
        match hint {
            None if shown > 1 => Choice::Ask,
            _ => self.dial(link, address, false),
        }
    }

    /// A new circuit, to the peer of a link itself.
    pub(in crate::rdm) fn dial(
        &mut self,
        link: LinkKey,
        address: Listener,
        splinter: bool,
    ) -> Choice {
        self.dial_in(link, address, splinter, None)
    }

    fn dial_in(
        &mut self,
        link: LinkKey,
        address: Listener,
        splinter: bool,
        group: Option<CircuitNumber>,
    ) -> Choice {
        let number = self.next;
        let circuit = Circuit {
            number,
            address,
            state: State::Dialling(link, self.nodes.get(&address).copied()),
            splinter,
            stale: false,
            group: group.unwrap_or(number),
            links: vec![link],
            leads_to: None,
            former: VecDeque::new(),
        };
        match self.circuits.insert(circuit) {
            Some(key) => {
                self.next = number.next();
                Choice::Dial(key, number)
            }
            None => Choice::Full,
        }
    }

    /// A circuit that is dialled has no answer yet: a further one, to the next link that waits for
    /// it and whose peer is at an address that is not being dialled for these links. `address`:
    /// that of a link's peer. `None`: no other link waits.
    pub(in crate::rdm) fn dial_second(
        &mut self,
        key: CircuitKey,
        mut address: impl FnMut(LinkKey) -> Option<Listener>,
    ) -> Option<(LinkKey, Choice)> {
        let first = self.circuits.get(key)?;
        let State::Dialling(..) = first.state else {
            return None;
        };
        let group = first.group;
        let dialled = |to: Listener| {
            let circuits = self.keys().filter_map(|key| self.circuits.get(key));
            let mut group = circuits.filter(|it| it.group == group);
            group.any(|it| matches!(it.state, State::Dialling(..)) && it.address == to)
        };
        let waits = |link: &LinkKey| Some((*link, address(*link)?));
        let mut waiting = first.links.iter().filter_map(waits);
        let (link, to) = waiting.find(|(_, to)| !dialled(*to))?;
        let choice = self.dial_in(link, to, false, Some(group));
        if let Some(first) = self
            .circuits
            .get_mut(key)
            .filter(|_| choice != Choice::Full)
        {
            first.links.retain(|of| *of != link);
        }
        Some((link, choice))
    }

    /// The peer of a link was found not to be behind its circuit (NODE), and has stated its node.
    /// [`Choice::Fail`]: the circuit has no target any more, and has to be ended.
    /// `from`: the circuit that the request has named, which the link leaves after this call.
    pub(in crate::rdm) fn elsewhere(
        &mut self,
        link: LinkKey,
        address: Listener,
        node: NodeId,
        from: Option<CircuitKey>,
    ) -> Choice {
        self.learn(address, node);
        let named = from.and_then(|key| self.circuits.get_mut(key));
        let same = |it: &&mut Circuit| matches!(it.state, State::Up(ids) if ids.node == node);
        let Some(named) = named.filter(same) else {
            return self.choose(link, address);
        };
        let number = named.number;
        if named.address == address {
            // its creator does not have the target any more. The next dial makes another one.
            named.stale = true;
            return Choice::Fail;
        }
        // its target has ended, or the ids are equal by accident
        match self.up_to((node, host(address)), Some(number)) {
            Some((key, ids)) => {
                self.join(key, link);
                Choice::Use(key, ids)
            }
            None => self.dial(link, address, true),
        }
    }

    /// The endpoint at an address ends, or has ended; `link` is one to it. Its circuit may have no
    /// target any more, if no other link shows that the target has a further holder: no further
    /// link uses it.
    pub(in crate::rdm) fn departed(&mut self, address: Listener, link: LinkKey) {
        let keys: Vec<CircuitKey> = self.keys().collect();
        for key in keys {
            if let Some(circuit) = self.circuits.get_mut(key)
                && circuit.address == address
                && matches!(circuit.state, State::Up(_))
                && circuit.links.iter().all(|of| *of == link)
            {
                circuit.stale = true;
            }
        }
    }

    fn join(&mut self, key: CircuitKey, link: LinkKey) {
        if let Some(circuit) = self.circuits.get_mut(key) {
            circuit.links.push(link);
        }
    }

    /// The circuit to the node of a peer, for the link that this side has accepted from it.
    /// `address`: at the IP address that the connection manager has stated, not the peer.
    pub(in crate::rdm) fn for_accepted(
        &mut self,
        link: LinkKey,
        address: Listener,
        node: NodeId,
    ) -> Choice {
        self.learn(address, node);
        self.choose(link, address)
    }

    /// A link does not use or wait for its circuit any more. `peer`: its endpoint, if that is
    /// known, which [`Self::is_former`] remembers. Returns whether the circuit has no link left, so
    /// that it is to be ended.
    pub(in crate::rdm) fn leave(
        &mut self,
        key: CircuitKey,
        link: LinkKey,
        peer: Option<EndpointId>,
    ) -> bool {
        if let Some(peer) = peer {
            self.note_former(key, peer);
        }
        let Some(circuit) = self.circuits.get_mut(key) else {
            return false;
        };
        circuit.links.retain(|of| *of != link);
        circuit.links.is_empty() && circuit.state != State::Ending
    }

    /// Whether a circuit is dialled.
    pub(in crate::rdm) fn is_dialled(&self, key: CircuitKey) -> bool {
        let circuit = self.circuits.get(key);
        circuit.is_some_and(|it| matches!(it.state, State::Dialling(..)))
    }

    /// *ended circuits*: all circuits to this node with numbers before this one have ended. `None`:
    /// no statement.
    pub(in crate::rdm) fn ended_before(&self, node: NodeId) -> Option<CircuitNumber> {
        let may_lead = |it: &&Circuit| it.leads_to.is_none_or(|to| to == node);
        let circuits = self.keys().filter_map(|key| self.circuits.get(key));
        let oldest = circuits
            .filter(may_lead)
            .max_by_key(|it| self.age(it.number));
        let before = oldest.map_or(self.next, |it| it.number);
        Some(before).filter(|before| *before != CircuitNumber::FIRST)
    }

    /// The circuit with this number, if it is up and leads to this node.
    pub(in crate::rdm) fn find(&self, number: CircuitNumber, node: NodeId) -> Option<CircuitKey> {
        self.keys().find(|key| {
            self.get(*key)
                .is_some_and(|ids| ids.number == number && ids.node == node)
        })
    }

    /// The links that use a circuit, or wait for it.
    pub(in crate::rdm) fn links(&self, key: CircuitKey) -> &[LinkKey] {
        self.circuits.get(key).map_or(&[], |it| &it.links)
    }

    /// A link to this endpoint leaves a circuit.
    pub(in crate::rdm) fn note_former(&mut self, key: CircuitKey, peer: EndpointId) {
        let circuit = self.circuits.get_mut(key);
        let up = circuit.filter(|it| matches!(it.state, State::Up(_)));
        if let Some(circuit) = up.filter(|it| !it.former.contains(&peer)) {
            if circuit.former.len() >= FORMER {
                circuit.former.pop_front();
            }
            circuit.former.push_back(peer);
        }
    }

    /// Whether a link to this endpoint has left a circuit, unless that was long ago.
    pub(in crate::rdm) fn is_former(&self, key: CircuitKey, peer: EndpointId) -> bool {
        let circuit = self.circuits.get(key);
        circuit.is_some_and(|it| it.former.contains(&peer))
    }

    /// Number of links that use a circuit, or wait for it.
    pub(in crate::rdm) fn users(&self, key: CircuitKey) -> usize {
        self.circuits.get(key).map_or(0, |it| it.links.len())
    }

    /// Number of circuits that are dialled or up.
    pub(in crate::rdm) fn in_use(&self) -> usize {
        let used = |key: &CircuitKey| {
            let circuit = self.circuits.get(*key);
            circuit.is_some_and(|it| it.state != State::Ending)
        };
        self.keys().filter(used).count()
    }

    /// Whether all peers that have stated their nodes, and all circuits that are up, are on one
    /// node at one IP address: one circuit leads to them.
    pub(in crate::rdm) fn has_one_node(&self) -> bool {
        self.hosts.values().map(Vec::len).sum::<usize>() == 1
    }

    /// The circuits that are up and have no links.
    pub(in crate::rdm) fn unused(&self) -> Vec<CircuitKey> {
        self.keys().filter(|key| self.is_unused(*key)).collect()
    }

    /// Whether a circuit is dialled for more than one link.
    pub(in crate::rdm) fn has_waiting(&self, key: CircuitKey) -> bool {
        let circuit = self.circuits.get(key);
        circuit.is_some_and(|it| matches!(it.state, State::Dialling(..)) && it.links.len() > 1)
    }

    /// Whether a circuit is up and has no links.
    pub(in crate::rdm) fn is_unused(&self, key: CircuitKey) -> bool {
        let circuit = self.circuits.get(key);
        circuit.is_some_and(|it| matches!(it.state, State::Up(_)) && it.links.is_empty())
    }

    /// A circuit is connected.
    pub(in crate::rdm) fn up(&mut self, key: CircuitKey, ids: OnCircuit) -> Up {
        let mut up = Up::default();
        let Some(address) = self.circuits.get(key).map(|it| it.address) else {
            return up;
        };
        let other = self.up_to((ids.node, host(address)), None).is_some();
        let Some(circuit) = self.circuits.get_mut(key) else {
            return up;
        };
        let State::Dialling(link, _) = circuit.state else {
            return up;
        };
        let ends = other && !circuit.splinter;
        circuit.state = match ends {
            true => State::Ending,
            false => State::Up(ids),
        };
        circuit.leads_to = Some(ids.node);
        let group = circuit.group;
        up.links = std::mem::take(&mut circuit.links);
        if ends {
            up.ended.push(key);
        } else {
            // the links of other peers find it by the IP address
            self.show(address, ids.node);
        }
        if up.links.contains(&link) {
            // otherwise nothing may forget the address
            self.learn(address, ids.node);
        }
        for key in self.keys().collect::<Vec<_>>() {
            let Some(circuit) = self.circuits.get_mut(key) else {
                continue;
            };
            if circuit.group == group && matches!(circuit.state, State::Dialling(..)) {
                circuit.state = State::Ending;
                up.links.append(&mut circuit.links);
                up.ended.push(key);
            }
        }
        up
    }

    /// A circuit has failed, or is not needed any more: no link uses it from now on. Returns what
    /// used it; `None`: it was ending already.
    pub(in crate::rdm) fn end(&mut self, key: CircuitKey) -> Option<Left> {
        let circuit = self.circuits.get_mut(key)?;
        let state = std::mem::replace(&mut circuit.state, State::Ending);
        let mut links = std::mem::take(&mut circuit.links);
        let address = circuit.address;
        let dialled_for = match state {
            State::Ending => return None,
            State::Up(ids) => {
                self.leave_node(address, ids.node);
                None
            }
            State::Dialling(link, _) => Some(link).filter(|link| links.contains(link)),
        };
        links.retain(|link| Some(*link) != dialled_for);
        Some(Left { dialled_for, links })
    }

    /// Number of circuits that are up.
    pub(in crate::rdm) fn ups(&self) -> usize {
        self.keys().filter(|key| self.get(*key).is_some()).count()
    }

    /// As if circuits with the numbers before this one had ended.
    #[cfg(test)]
    pub(in crate::rdm) fn begin_at(&mut self, number: CircuitNumber) {
        self.next = number;
    }

    /// Number of circuits, also of those that are not up.
    #[cfg(test)]
    pub(in crate::rdm) fn len(&self) -> usize {
        self.keys().count()
    }

    /// Numbers of addresses whose nodes are known, and of nodes of IP addresses, also by circuits.
    #[cfg(test)]
    pub(in crate::rdm) fn sizes(&self) -> (usize, usize) {
        let shown = self.hosts.values().map(Vec::len).sum();
        (self.nodes.len(), shown)
    }

    /// A circuit that was ending has ended.
    pub(in crate::rdm) fn remove(&mut self, key: CircuitKey) {
        self.circuits.remove(key);
    }

    /// The number of a circuit.
    pub(in crate::rdm) fn number(&self, key: CircuitKey) -> Option<CircuitNumber> {
        Some(self.circuits.get(key)?.number)
    }

    /// Number and queue pairs of a circuit that is up.
    pub(in crate::rdm) fn get(&self, key: CircuitKey) -> Option<OnCircuit> {
        match self.circuits.get(key)?.state {
            State::Up(ids) => Some(ids),
            _ => None,
        }
    }
}
