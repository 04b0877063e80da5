//! Which circuit a link uses, which links wait for one, and which circuit is dialled.
//! `docs/protocol-xrc.md`, "Circuits". A state machine without device, lock, thread or clock: its
//! caller dials and ends circuits, and passes what has happened.
//!
//! Node ids are hints. A wrong one costs a rejected link request (NODE) and a further choice.

use std::collections::HashMap;
use std::net::IpAddr;

use super::link::LinkKey;
use super::slab::{Key, Slab};
use crate::wire::rdm::Listener;
use crate::wire::rdm::xrc::{CircuitNumber, NodeId, OnCircuit};

/// Marks keys of circuits.
pub(super) enum CircuitMark {}

/// A circuit of an endpoint. Keys are not reused at once.
pub(super) type CircuitKey = Key<CircuitMark>;

/// What the caller does for a link that needs a circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
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
    /// Links that use it or, while it is dialled, wait for it.
    links: Vec<LinkKey>,
}

/// A circuit that ends, and the links that waited for it or used it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Left {
    /// The link for whose peer it was dialled, if it was not up.
    pub(super) dialled_for: Option<LinkKey>,
    /// The others.
    pub(super) links: Vec<LinkKey>,
}

/// The circuits of an endpoint, as their initiator.
pub(super) struct Circuits {
    circuits: Slab<CircuitMark, Circuit>,
    next: CircuitNumber,
    /// The nodes that peers have stated, by listening address.
    nodes: HashMap<Listener, NodeId>,
    /// The nodes that each IP address has shown.
    hosts: HashMap<IpAddr, Vec<NodeId>>,
}

fn host(address: Listener) -> IpAddr {
    address.socket_addr().ip()
}

impl Circuits {
    pub(super) fn new() -> Self {
        Self {
            circuits: Slab::new(),
            next: CircuitNumber::FIRST,
            nodes: HashMap::new(),
            hosts: HashMap::new(),
        }
    }

    /// The endpoint at an address has stated its node.
    pub(super) fn learn(&mut self, address: Listener, node: NodeId) {
        self.nodes.insert(address, node);
        let shown = self.hosts.entry(host(address)).or_default();
        if !shown.contains(&node) {
            shown.push(node);
        }
    }

    /// The node that a peer has stated, or that of the other peers at its IP address.
    fn hint(&self, address: Listener) -> Option<NodeId> {
        let shown = self.hosts.get(&host(address)).map(Vec::as_slice);
        match (self.nodes.get(&address), shown) {
            (Some(node), _) => Some(*node),
            (None, Some([only])) => Some(*only),
            _ => None,
        }
    }

    fn keys(&self) -> impl Iterator<Item = CircuitKey> + '_ {
        let first = self.circuits.at_or_behind(0);
        std::iter::successors(first, |key| self.circuits.after(*key))
    }

    /// The newest circuit to a node that is up.
    fn up_to(&self, node: NodeId) -> Option<(CircuitKey, OnCircuit)> {
        let up = |key| match self.circuits.get(key)?.state {
            State::Up(on) if on.node == node => Some((key, on)),
            _ => None,
        };
        let age = |on: &OnCircuit| self.next.get().wrapping_sub(on.number.get());
        self.keys().filter_map(up).min_by_key(|(_, on)| age(on))
    }

    /// Chooses the circuit of a link that is dialled to an address. The link has none.
    pub(super) fn choose(&mut self, link: LinkKey, address: Listener) -> Choice {
        let hint = self.hint(address);
        if let Some((key, on)) = hint.and_then(|node| self.up_to(node)) {
            self.join(key, link);
            return Choice::Use(key, on);
        }
        // a circuit that leads to the peer, or to the node that it has stated. Others of its IP
        // address do not count: their peers may be silent.
        let stated = self.nodes.get(&address).copied();
        let coming = self.keys().find(|key| {
            let circuit = self.circuits.get(*key);
            circuit.is_some_and(|it| match it.state {
                State::Dialling(_, of) => it.address == address || stated.is_some() && stated == of,
                _ => false,
            })
        });
        if let Some(key) = coming {
            self.join(key, link);
            return Choice::Wait(key);
        }
        let shown = self.hosts.get(&host(address)).map_or(0, Vec::len);
        match hint {
            None if shown > 1 => Choice::Ask,
            _ => self.dial(link, address, false),
        }
    }

    /// A new circuit, to the peer of a link itself.
    pub(super) fn dial(&mut self, link: LinkKey, address: Listener, splinter: bool) -> Choice {
        let number = self.next;
        let circuit = Circuit {
            number,
            address,
            state: State::Dialling(link, self.nodes.get(&address).copied()),
            splinter,
            links: vec![link],
        };
        match self.circuits.insert(circuit) {
            Some(key) => {
                self.next = number.next();
                Choice::Dial(key, number)
            }
            None => Choice::Full,
        }
    }

    /// The peer of a link was found not to be behind its circuit (NODE), and has stated its node.
    /// `from`: the circuit that the request has named, which the link does not use any more.
    pub(super) fn elsewhere(
        &mut self,
        link: LinkKey,
        address: Listener,
        node: NodeId,
        from: Option<CircuitKey>,
    ) -> Choice {
        self.learn(address, node);
        let named = from.and_then(|key| self.circuits.get(key));
        let same = named.is_some_and(|it| matches!(it.state, State::Up(on) if on.node == node));
        let creator = named.is_some_and(|it| it.address == address);
        match (same, creator) {
            (false, _) => self.choose(link, address),
            // its target has ended, or the ids are equal by accident
            (true, false) => self.dial(link, address, true),
            (true, true) => Choice::Fail,
        }
    }

    fn join(&mut self, key: CircuitKey, link: LinkKey) {
        if let Some(circuit) = self.circuits.get_mut(key) {
            circuit.links.push(link);
        }
    }

    /// The circuit to the node of a peer, for the link that this side has accepted from it.
    pub(super) fn for_accepted(
        &mut self,
        link: LinkKey,
        address: Listener,
        node: NodeId,
    ) -> Choice {
        self.learn(address, node);
        self.choose(link, address)
    }

    /// A link does not use or wait for its circuit any more. Returns whether the circuit has no
    /// link left, so that it is to be ended.
    pub(super) fn leave(&mut self, key: CircuitKey, link: LinkKey) -> bool {
        let Some(circuit) = self.circuits.get_mut(key) else {
            return false;
        };
        circuit.links.retain(|of| *of != link);
        circuit.links.is_empty() && circuit.state != State::Ending
    }

    /// Whether a circuit is dialled.
    pub(super) fn is_dialled(&self, key: CircuitKey) -> bool {
        let circuit = self.circuits.get(key);
        circuit.is_some_and(|it| matches!(it.state, State::Dialling(..)))
    }

    /// Whether a circuit is up and has no links.
    pub(super) fn is_unused(&self, key: CircuitKey) -> bool {
        let circuit = self.circuits.get(key);
        circuit.is_some_and(|it| matches!(it.state, State::Up(_)) && it.links.is_empty())
    }

    /// A circuit is connected. Returns the links that waited for it, which choose again, and
    /// whether it is kept: otherwise it is to be ended, because one to its node was up.
    pub(super) fn up(&mut self, key: CircuitKey, on: OnCircuit) -> (Vec<LinkKey>, bool) {
        let other = self.up_to(on.node).is_some();
        let Some(circuit) = self.circuits.get_mut(key) else {
            return (Vec::new(), false);
        };
        if !matches!(circuit.state, State::Dialling(..)) {
            return (Vec::new(), true);
        }
        let keeps = !other || circuit.splinter;
        circuit.state = match keeps {
            true => State::Up(on),
            false => State::Ending,
        };
        let (address, links) = (circuit.address, std::mem::take(&mut circuit.links));
        self.learn(address, on.node);
        (links, keeps)
    }

    /// A circuit has failed, or is not needed any more: no link uses it from now on. Returns what
    /// used it; `None`: it was ending already.
    pub(super) fn end(&mut self, key: CircuitKey) -> Option<Left> {
        let circuit = self.circuits.get_mut(key)?;
        let state = std::mem::replace(&mut circuit.state, State::Ending);
        let mut links = std::mem::take(&mut circuit.links);
        let dialled_for = match state {
            State::Ending => return None,
            State::Up(_) => None,
            State::Dialling(link, _) => Some(link).filter(|link| links.contains(link)),
        };
        links.retain(|link| Some(*link) != dialled_for);
        Some(Left { dialled_for, links })
    }

    /// Number of circuits, also of those that are not up.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.keys().count()
    }

    /// A circuit that was ending has ended.
    pub(super) fn remove(&mut self, key: CircuitKey) {
        self.circuits.remove(key);
    }

    /// The number of a circuit.
    pub(super) fn number(&self, key: CircuitKey) -> Option<CircuitNumber> {
        Some(self.circuits.get(key)?.number)
    }

    /// Number and queue pairs of a circuit that is up.
    pub(super) fn get(&self, key: CircuitKey) -> Option<OnCircuit> {
        match self.circuits.get(key)?.state {
            State::Up(on) => Some(on),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdm::link::LinkMark;
    use crate::verbs::QpNumber;

    struct Bench {
        circuits: Circuits,
        links: Slab<LinkMark, ()>,
    }

    impl Bench {
        fn new() -> Self {
            Self {
                circuits: Circuits::new(),
                links: Slab::new(),
            }
        }

        /// Two peers have stated the same node.
        fn of_one_node() -> Self {
            let mut this = Self::new();
            for port in [1, 2] {
                this.circuits.learn(at(port), NodeId::new(7));
            }
            this
        }

        fn link(&mut self) -> LinkKey {
            self.links.insert(()).unwrap()
        }

        /// A new link to a port of one IP address.
        fn choose(&mut self, port: u16) -> (LinkKey, Choice) {
            let link = self.link();
            (link, self.circuits.choose(link, at(port)))
        }

        /// A circuit to a port that is up.
        fn connected(&mut self, port: u16, node: u64) -> (LinkKey, CircuitKey) {
            let (link, choice) = self.choose(port);
            let Choice::Dial(key, number) = choice else {
                panic!("{choice:?}");
            };
            assert_eq!(self.circuits.up(key, on(number, node)), (vec![link], true));
            let again = self.circuits.choose(link, at(port));
            assert_eq!(again, Choice::Use(key, on(number, node)));
            (link, key)
        }
    }

    fn at(port: u16) -> Listener {
        Listener::new([127, 0, 0, 1].into(), port).unwrap()
    }

    fn on(number: CircuitNumber, node: u64) -> OnCircuit {
        OnCircuit {
            node: NodeId::new(node),
            number,
            initiator: QpNumber::new(number.get()).unwrap(),
            target: QpNumber::new(100 + number.get()).unwrap(),
        }
    }

    #[test]
    fn a_link_waits_for_no_circuit_to_another_peer_of_its_address() {
        let mut it = Bench::new();
        let (_, choice) = it.choose(1);
        let Choice::Dial(first, _) = choice else {
            panic!("{choice:?}");
        };
        // its node is not known
        assert!(matches!(it.choose(2).1, Choice::Dial(key, _) if key != first));
        assert_eq!(it.choose(1).1, Choice::Wait(first));
        // another node than those which are dialled
        it.circuits.learn(at(3), NodeId::new(7));
        assert!(matches!(it.choose(3).1, Choice::Dial(..)));
    }

    #[test]
    fn the_peers_of_a_node_share_the_circuit_that_is_dialled() {
        let mut it = Bench::of_one_node();
        let (first, choice) = it.choose(1);
        let Choice::Dial(key, number) = choice else {
            panic!("{choice:?}");
        };
        let (second, wait) = it.choose(2);
        assert_eq!(wait, Choice::Wait(key));
        let (links, kept) = it.circuits.up(key, on(number, 7));
        assert_eq!((links, kept), (vec![first, second], true));
        for (link, port) in [(first, 1), (second, 2)] {
            let choice = it.circuits.choose(link, at(port));
            assert_eq!(choice, Choice::Use(key, on(number, 7)));
        }
        assert!(!it.circuits.leave(key, first));
        assert!(it.circuits.leave(key, second));
    }

    #[test]
    fn a_wrong_choice_costs_one_request() {
        let mut it = Bench::new();
        let (_, first) = it.connected(1, 7);
        let (link, choice) = it.choose(2);
        assert!(matches!(choice, Choice::Use(key, _) if key == first));
        assert!(!it.circuits.leave(first, link));
        // the peer is on another node, to which there is no circuit
        let choice = it
            .circuits
            .elsewhere(link, at(2), NodeId::new(8), Some(first));
        let Choice::Dial(second, number) = choice else {
            panic!("{choice:?}");
        };
        it.circuits.up(second, on(number, 8));
        assert!(matches!(it.circuits.choose(link, at(2)), Choice::Use(key, _) if key == second));
        // the address has shown two nodes
        let (third, choice) = it.choose(3);
        assert_eq!(choice, Choice::Ask);
        let choice = it.circuits.elsewhere(third, at(3), NodeId::new(8), None);
        assert!(matches!(choice, Choice::Use(key, _) if key == second));
        // known from now on
        assert!(matches!(it.choose(3).1, Choice::Use(key, _) if key == second));
    }

    #[test]
    fn equal_ids_of_different_nodes_cost_a_splinter() {
        let mut it = Bench::new();
        let (_, first) = it.connected(1, 7);
        let (link, _) = it.choose(2);
        it.circuits.leave(first, link);
        let choice = it
            .circuits
            .elsewhere(link, at(2), NodeId::new(7), Some(first));
        let Choice::Dial(second, number) = choice else {
            panic!("{choice:?}");
        };
        let (links, kept) = it.circuits.up(second, on(number, 7));
        assert_eq!((links, kept), (vec![link], true));
        // the newest first
        assert!(matches!(it.circuits.choose(link, at(2)), Choice::Use(key, _) if key == second));
        // NODE by the creator of the target itself
        let choice = it
            .circuits
            .elsewhere(link, at(2), NodeId::new(7), Some(second));
        assert_eq!(choice, Choice::Fail);
    }

    #[test]
    fn a_second_circuit_to_a_node_ends() {
        let mut it = Bench::new();
        let (_, first) = it.connected(1, 7);
        let link = it.link();
        let other = Listener::new([127, 0, 0, 2].into(), 1).unwrap();
        let choice = it.circuits.choose(link, other);
        let Choice::Dial(second, number) = choice else {
            panic!("{choice:?}");
        };
        let (links, kept) = it.circuits.up(second, on(number, 7));
        assert_eq!((links, kept), (vec![link], false));
        assert!(matches!(it.circuits.choose(link, other), Choice::Use(key, _) if key == first));
        assert_eq!(it.circuits.end(second), None);
        it.circuits.remove(second);
        assert_eq!(it.circuits.number(second), None);
    }

    #[test]
    fn links_leave_a_circuit_that_fails() {
        let mut it = Bench::of_one_node();
        let (first, choice) = it.choose(1);
        let Choice::Dial(key, _) = choice else {
            panic!("{choice:?}");
        };
        let (second, _) = it.choose(2);
        let left = Left {
            dialled_for: Some(first),
            links: vec![second],
        };
        assert_eq!(it.circuits.end(key), Some(left));
        // the address of the next link is used
        let again = it.circuits.choose(second, at(2));
        assert!(matches!(again, Choice::Dial(other, _) if other != key));
        // one that is up has no such link
        let (link, up) = {
            let mut other = Bench::new();
            let (link, up) = other.connected(1, 7);
            it = other;
            (link, up)
        };
        let left = Left {
            dialled_for: None,
            links: vec![link],
        };
        assert_eq!(it.circuits.end(up), Some(left));
        assert_eq!(it.circuits.get(up), None);
        assert!(matches!(it.choose(1).1, Choice::Dial(..)));
    }

    #[test]
    fn a_link_that_gives_up_leaves_the_circuit_that_is_dialled() {
        let mut it = Bench::of_one_node();
        let (first, choice) = it.choose(1);
        let Choice::Dial(key, number) = choice else {
            panic!("{choice:?}");
        };
        let (second, _) = it.choose(2);
        assert!(!it.circuits.leave(key, first));
        assert_eq!(it.circuits.up(key, on(number, 7)), (vec![second], true));
    }
}
