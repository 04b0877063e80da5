//! Choices of circuits for links, without device.

use super::*;
use crate::rdm::core::link::LinkMark;
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
        assert_eq!(self.circuits.up(key, ids(number, node)), kept([link]));
        let again = self.circuits.choose(link, at(port));
        assert_eq!(again, Choice::Use(key, ids(number, node)));
        (link, key)
    }
}

fn at(port: u16) -> Listener {
    Listener::new([127, 0, 0, 1].into(), port).unwrap()
}

/// A circuit that is kept, for which these links have waited.
fn kept(links: impl Into<Vec<LinkKey>>) -> Up {
    Up {
        links: links.into(),
        ended: Vec::new(),
    }
}

fn ids(number: CircuitNumber, node: u64) -> OnCircuit {
    OnCircuit {
        node: NodeId::new(node),
        number,
        initiator: QpNumber::new(number.get()).unwrap(),
        target: QpNumber::new(100 + number.get()).unwrap(),
    }
}

#[test]
fn links_to_one_address_wait_for_the_first_circuit() {
    let mut it = Bench::new();
    let (_, choice) = it.choose(1);
    let Choice::Dial(first, _) = choice else {
        panic!("{choice:?}");
    };
    // probably on the same node
    assert_eq!(it.choose(2).1, Choice::Wait(first));
    assert_eq!(it.choose(1).1, Choice::Wait(first));
    // another IP address
    let link = it.link();
    let other = Listener::new([127, 0, 0, 2].into(), 1).unwrap();
    assert!(matches!(it.circuits.choose(link, other), Choice::Dial(..)));
    // another node than that which is dialled
    let mut it = Bench::new();
    it.circuits.learn(at(3), NodeId::new(7));
    let (_, choice) = it.choose(3);
    let Choice::Dial(first, _) = choice else {
        panic!("{choice:?}");
    };
    assert_eq!(it.choose(4).1, Choice::Wait(first));
    it.circuits.learn(at(5), NodeId::new(8));
    assert!(matches!(it.choose(5).1, Choice::Dial(..)));
    // the peer has stated its node, and that to which a circuit is dialled has not
    let mut it = Bench::new();
    let (_, choice) = it.choose(1);
    let Choice::Dial(first, _) = choice else {
        panic!("{choice:?}");
    };
    it.circuits.learn(at(2), NodeId::new(7));
    assert_eq!(it.choose(2).1, Choice::Wait(first));
    it.circuits.learn(at(1), NodeId::new(8));
    assert!(matches!(it.choose(2).1, Choice::Dial(..)));
}

/// The acceptor of the first circuit is stopped.
#[test]
fn the_first_reply_decides() {
    let mut it = Bench::new();
    let (first, choice) = it.choose(1);
    let Choice::Dial(silent, number) = choice else {
        panic!("{choice:?}");
    };
    let (second, _) = it.choose(2);
    let (third, _) = it.choose(3);
    let ports = [(first, 1), (second, 2), (third, 3)];
    let address = |link| {
        let port = ports.iter().find(|(of, _)| *of == link)?;
        Some(at(port.1))
    };
    let Some((link, Choice::Dial(answers, other))) = it.circuits.dial_second(silent, address)
    else {
        panic!();
    };
    assert_eq!(link, second);
    let up = it.circuits.up(answers, ids(other, 7));
    assert_eq!(
        (up.links, up.ended),
        (vec![second, first, third], vec![silent])
    );
    assert_eq!(it.circuits.up(silent, ids(number, 7)), Up::default());
    for (link, port) in ports {
        let choice = it.circuits.choose(link, at(port));
        assert_eq!(choice, Choice::Use(answers, ids(other, 7)));
    }
    // no other link waits
    assert_eq!(it.circuits.dial_second(answers, address), None);
}

/// Each peer is dialled once for the links that wait.
#[test]
fn no_peer_is_dialled_twice_for_a_circuit() {
    let mut it = Bench::new();
    let (_, choice) = it.choose(1);
    let Choice::Dial(silent, _) = choice else {
        panic!("{choice:?}");
    };
    for port in [1, 2, 2] {
        it.choose(port);
    }
    let ports: Vec<_> = it
        .links
        .keys_where(|()| true)
        .into_iter()
        .zip([1, 1, 2, 2])
        .collect();
    let address = |link| {
        let port = ports.iter().find(|(of, _)| *of == link)?;
        Some(at(port.1))
    };
    let (link, _) = it.circuits.dial_second(silent, address).unwrap();
    assert_eq!(address(link), Some(at(2)));
    assert_eq!(it.circuits.dial_second(silent, address), None);
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
    let up = it.circuits.up(key, ids(number, 7));
    assert_eq!(up, kept([first, second]));
    for (link, port) in [(first, 1), (second, 2)] {
        let choice = it.circuits.choose(link, at(port));
        assert_eq!(choice, Choice::Use(key, ids(number, 7)));
    }
    assert!(!it.circuits.leave(key, first, None));
    assert!(it.circuits.leave(key, second, None));
}

#[test]
fn a_wrong_choice_costs_one_request() {
    let mut it = Bench::new();
    let (_, first) = it.connected(1, 7);
    let (link, choice) = it.choose(2);
    assert!(matches!(choice, Choice::Use(key, _) if key == first));
    assert!(!it.circuits.leave(first, link, None));
    // the peer is on another node, to which there is no circuit
    let choice = it
        .circuits
        .elsewhere(link, at(2), NodeId::new(8), Some(first));
    let Choice::Dial(second, number) = choice else {
        panic!("{choice:?}");
    };
    it.circuits.up(second, ids(number, 8));
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
    it.circuits.leave(first, link, None);
    let choice = it
        .circuits
        .elsewhere(link, at(2), NodeId::new(7), Some(first));
    let Choice::Dial(second, number) = choice else {
        panic!("{choice:?}");
    };
    assert_eq!(it.circuits.up(second, ids(number, 7)), kept([link]));
    // the newest first, then the older ones
    assert!(matches!(it.circuits.choose(link, at(2)), Choice::Use(key, _) if key == second));
    let (third, choice) = it.choose(3);
    assert!(matches!(choice, Choice::Use(key, _) if key == second));
    let choice = it
        .circuits
        .elsewhere(third, at(3), NodeId::new(7), Some(second));
    assert!(matches!(choice, Choice::Use(key, _) if key == first));
    // NODE by the creator of the target itself: it is used no more
    let choice = it
        .circuits
        .elsewhere(link, at(2), NodeId::new(7), Some(second));
    assert_eq!(choice, Choice::Fail);
    assert!(matches!(it.circuits.choose(link, at(2)), Choice::Use(key, _) if key == first));
}

#[test]
fn circuits_that_have_ended_are_stated() {
    let mut it = Bench::new();
    let node = NodeId::new(7);
    assert_eq!(it.circuits.ended_before(node), None);
    let (_, first) = it.connected(1, 7);
    let number = it.circuits.number(first).unwrap();
    assert_eq!(it.circuits.ended_before(node), None);
    assert_eq!(it.circuits.find(number, node), Some(first));
    assert_eq!(it.circuits.find(number, NodeId::new(8)), None);
    // requests on it can have an effect until it is removed
    it.circuits.end(first);
    assert_eq!(it.circuits.ended_before(node), None);
    assert_eq!(it.circuits.find(number, node), None);
    it.circuits.remove(first);
    assert_eq!(it.circuits.ended_before(node), Some(number.next()));
    // one that is dialled may lead to this node, one to another node does not
    let (_, choice) = it.choose(1);
    let Choice::Dial(second, second_number) = choice else {
        panic!("{choice:?}");
    };
    assert_eq!(it.circuits.ended_before(node), Some(second_number));
    it.circuits.up(second, ids(second_number, 8));
    assert_eq!(it.circuits.ended_before(node), Some(second_number.next()));
}

#[test]
fn a_second_circuit_to_a_node_ends() {
    let mut it = Bench::new();
    let (_, first) = it.connected(1, 7);
    // a peer that is thought to be on another node
    it.circuits.learn(at(2), NodeId::new(8));
    let (link, choice) = it.choose(2);
    let Choice::Dial(second, number) = choice else {
        panic!("{choice:?}");
    };
    let up = it.circuits.up(second, ids(number, 7));
    assert_eq!((up.links, up.ended), (vec![link], vec![second]));
    assert!(matches!(it.circuits.choose(link, at(2)), Choice::Use(key, _) if key == first));
    assert_eq!(it.circuits.end(second), None);
    it.circuits.remove(second);
    assert_eq!(it.circuits.number(second), None);
}

/// A peer can state any node, and any receive queue, whose number the device refuses if it does not
/// exist behind the circuit: a circuit to another host is neither used for it nor replaced by its
/// own.
#[test]
fn a_peer_at_another_host_has_a_circuit_of_its_own_whatever_it_states() {
    let other = |port| Listener::new([127, 0, 0, 2].into(), port).unwrap();
    let mut it = Bench::new();
    let (_, first) = it.connected(1, 7);
    // its request states the node
    let link = it.link();
    let choice = it.circuits.for_accepted(link, other(1), NodeId::new(7));
    let Choice::Dial(second, number) = choice else {
        panic!("{choice:?}");
    };
    // so does the reply of its circuit
    assert_eq!(it.circuits.up(second, ids(number, 7)), kept([link]));
    assert!(matches!(it.circuits.choose(link, other(1)), Choice::Use(key, _) if key == second));
    // another one has no circuit, as its rejection states
    let link = it.link();
    assert!(matches!(it.circuits.choose(link, other(2)), Choice::Use(key, _) if key == second));
    it.circuits.leave(second, link, None);
    let choice = it
        .circuits
        .elsewhere(link, other(2), NodeId::new(7), Some(second));
    assert!(matches!(choice, Choice::Dial(..)), "{choice:?}");
    // the newest circuit to the node is not for the peers of the first host
    assert!(matches!(it.choose(1).1, Choice::Use(key, _) if key == first));
    assert!(matches!(it.choose(2).1, Choice::Use(key, _) if key == first));
    // nor is one waited for that is dialled to the node at another host
    let mut it = Bench::of_one_node();
    let (_, choice) = it.choose(1);
    assert!(matches!(choice, Choice::Dial(..)));
    let link = it.link();
    let choice = it.circuits.for_accepted(link, other(1), NodeId::new(7));
    assert!(matches!(choice, Choice::Dial(..)), "{choice:?}");
    assert!(!it.circuits.has_one_node());
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
    assert!(!it.circuits.leave(key, first, None));
    assert_eq!(it.circuits.up(key, ids(number, 7)), kept([second]));
}

/// The link for whose peer a circuit was dialled has ended, and nothing would forget the peer's
/// address. The links of other peers find the circuit by its IP address.
#[test]
fn the_address_of_a_link_that_has_ended_is_not_learnt() {
    let mut it = Bench::new();
    let (first, choice) = it.choose(1);
    let Choice::Dial(key, number) = choice else {
        panic!("{choice:?}");
    };
    let (second, wait) = it.choose(2);
    assert_eq!(wait, Choice::Wait(key));
    assert!(!it.circuits.leave(key, first, None));
    assert_eq!(it.circuits.up(key, ids(number, 7)), kept([second]));
    assert_eq!(it.circuits.sizes(), (0, 1));
    let again = it.circuits.choose(second, at(2));
    assert_eq!(again, Choice::Use(key, ids(number, 7)));
    it.circuits.end(key);
    assert_eq!(it.circuits.sizes(), (0, 0));
}

/// A host whose processes restart, each as a node of its own: what is known of it does not grow,
/// and the one node that it has is used without a question.
#[test]
fn nodes_that_no_address_has_are_forgotten() {
    let mut it = Bench::new();
    for number in 0..100 {
        // one address restarts again and again, the other ones come and are freed
        it.circuits.learn(at(1), NodeId::new(1000 + number));
        it.circuits
            .learn(at(2 + number as u16), NodeId::new(2000 + number));
        it.circuits.forget(at(2 + number as u16));
        assert_eq!(it.circuits.sizes(), (1, 1));
    }
    it.circuits.learn(at(1), NodeId::new(1099));
    assert_eq!(it.circuits.node(at(7)), Some(NodeId::new(1099)));
    assert!(it.circuits.has_one_node());
    it.circuits.learn(at(2), NodeId::new(1099));
    it.circuits.forget(at(1));
    assert_eq!(it.circuits.node(at(7)), Some(NodeId::new(1099)));
    it.circuits.forget(at(2));
    it.circuits.forget(at(2));
    assert_eq!(it.circuits.sizes(), (0, 0));
    assert!(matches!(it.choose(7).1, Choice::Dial(..)));
}
