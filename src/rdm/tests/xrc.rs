//! Endpoints on XRC, on the embedded device, in one process. The endpoints of a domain are a node
//! here; `nodes.rs` has several processes on each of several nodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Random;
use super::endpoints::{End, config, wait};
use super::nodes::Node;
use crate::domain::Domain;
use crate::errno::FiErrno;
use crate::queue::Completion;
use crate::rdm::EndpointConfig;
use crate::rdm::core::link::LinkKey;
use crate::rdm::shared::State;
use crate::rdm::slab::Slab;
use crate::rdm::xrc::circuits::Choice;
use crate::verbs::SrqNumber;
use crate::wire::rdm::xrc::{
    CircuitNumber, Inbox, LinkRejection, LinkReply, LinkRequest, LinkTag, NodeId, Presence,
};
use crate::wire::rdm::{EndpointId, Epoch, Listener, Reason, Reply, Request, Secret, Terms};

pub(super) fn open_at(domain: &Arc<Domain>, src: Option<std::net::SocketAddr>) -> End {
    open_with(domain, src, None)
}

/// With this limit of circuits and targets.
pub(super) fn open_with(
    domain: &Arc<Domain>,
    src: Option<std::net::SocketAddr>,
    max_links: Option<usize>,
) -> End {
    let config = EndpointConfig {
        max_links,
        xrc: true,
        src: src.or(config().src),
        connect_timeout: Some(Duration::from_secs(20)),
        ..config()
    };
    End::with(domain, config, 0)
}

fn open(domain: &Arc<Domain>) -> End {
    open_at(domain, None)
}

/// Circuits that are up, held targets, and links with a queue pair of their own.
pub(super) fn objects(end: &End) -> (usize, usize, usize) {
    end.state(|state| {
        let keys: Vec<_> = state.io.links.keys().collect();
        let xrc = state.io.xrc.as_ref().unwrap();
        let up = xrc.keys().into_iter();
        let up = up.filter(|key| xrc.circuits.get(*key).is_some()).count();
        let targets = xrc.targets.len();
        let own = |key: &&_| state.io.links.get_mut(**key).unwrap().qp.is_some();
        (up, targets, keys.iter().filter(own).count())
    })
}

#[test]
fn messages_of_every_length_on_circuits() {
    let domain = Node::new().process();
    let (a, b) = (open(&domain), open(&domain));
    let (to_b, to_a) = (a.knows(&b), b.knows(&a));
    let lengths = [0, 1, 100, 500, 5_000, 8_192, 8_193, 65_536, 1 << 20];
    for (number, len) in lengths.into_iter().enumerate() {
        for tagged in [true, false] {
            let bytes = |of: usize| (0..len).map(move |i: usize| (i * 7 + number + of) as u8);
            let (from_a, from_b): (Vec<u8>, Vec<u8>) = (bytes(1).collect(), bytes(2).collect());
            let (mut at_a, mut at_b) = (vec![0; len + 3], vec![0; len + 3]);
            let want = tagged.then_some((4, 1));
            a.recv(want, &mut at_a, 2);
            b.recv(want, &mut at_b, 2);
            let tag = tagged.then_some(5);
            a.send(to_b, tag, &from_a, 1);
            b.send(to_a, tag, &from_b, 1);
            let [in_a, in_b] = wait([&a, &b], [2, 2]);
            for (found, from) in [(in_a, to_b), (in_b, to_a)] {
                let got = found.iter().find(|entry| entry.context == 2).unwrap();
                assert_eq!((got.len, got.tag), (len, tag.unwrap_or(0)));
                assert_eq!(got.src_addr, from.0);
            }
            assert!(at_a[..len] == from_b && at_a[len..] == [0; 3], "{len}");
            assert!(at_b[..len] == from_a && at_b[len..] == [0; 3], "{len}");
        }
    }
    // both links of the two use one circuit in each direction
    assert_eq!((objects(&a), objects(&b)), ((1, 1, 0), (1, 1, 0)));
}

/// An endpoint with idle peers posts few receives. Their number is raised with the number of links
/// when the device reports that three quarters of them are consumed, and the device is asked to
/// report it again.
#[test]
fn receives_follow_the_limit_of_their_queue() {
    let end = open(&Node::new().process());
    let posted = |low: Option<usize>| {
        let mut posted = 0;
        end.ep.shared().apply_event(|_, io| {
            if let Some(links) = low {
                io.receives_low(links);
            }
            io.post_receives(400).unwrap();
            posted = io.receives_posted();
        });
        posted
    };
    // by the driver
    let is_armed_at = |limit: u32| {
        let armed = || end.state(|state| state.io.xrc.as_ref().map_or(0, |xrc| xrc.limit));
        let began = Instant::now();
        while armed() != limit {
            assert!(began.elapsed() < Duration::from_secs(10), "{}", armed());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // the driver has no other reason to run any more
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!([None, None].map(posted), [128, 128]);
    is_armed_at(32);
    assert_eq!(posted(Some(2)), 256);
    is_armed_at(64);
    assert_eq!(posted(Some(150)), 300);
    is_armed_at(75);
    assert_eq!(posted(Some(1000)), 400);
}

/// All endpoints have one IP address, so the first choice of a circuit is wrong for most.
#[test]
fn endpoints_at_one_address_find_their_nodes() {
    const COUNT: usize = 6;
    let ends: Vec<End> = (0..COUNT).map(|_| open(&Node::new().process())).collect();
    let mut inboxes = vec![[0_u8; COUNT]; COUNT];
    let bytes: Vec<u8> = (0..COUNT as u8).collect();
    for (to, (end, inbox)) in ends.iter().zip(&mut inboxes).enumerate() {
        for (from, byte) in inbox.iter_mut().enumerate().filter(|(from, _)| *from != to) {
            end.recv(Some((from as u64, 0)), std::slice::from_mut(byte), 2);
        }
    }
    for (from, end) in ends.iter().enumerate() {
        for (to, other) in ends.iter().enumerate().filter(|(to, _)| *to != from) {
            let address = end.knows(other);
            end.send(address, Some(from as u64), &bytes[to..=to], 1);
        }
    }
    let limit = Instant::now() + Duration::from_secs(20);
    let mut done = 0;
    while done < 2 * COUNT * (COUNT - 1) {
        done += ends.iter().filter_map(End::poll).count();
        assert!(Instant::now() < limit, "{done}");
    }
    for (to, inbox) in inboxes.iter().enumerate() {
        let others = inbox.iter().enumerate().filter(|(from, _)| *from != to);
        assert!(others.into_iter().all(|(_, byte)| usize::from(*byte) == to));
    }
    // targets of superfluous circuits are closed after 2 s
    let others = (COUNT - 1, COUNT - 1, 0);
    while ends.iter().any(|end| objects(end) != others) {
        assert!(ends.iter().all(|end| end.poll().is_none()));
        let found: Vec<_> = ends.iter().map(objects).collect();
        assert!(Instant::now() < limit, "{found:?}");
    }
}

/// Circuits and targets break at random, also those of links that are being set up; each message
/// arrives once and in order.
#[test]
fn broken_circuits_lose_and_repeat_nothing() {
    const COUNT: usize = 200;
    let mut breaks = 0;
    for seed in 0..8 {
        let mut random = Random(seed);
        let domain = Node::new().process();
        let (a, b) = (open(&domain), open(&domain));
        let (to_b, to_a) = (a.knows(&b), b.knows(&a));
        let bytes: Vec<[u8; 8]> = (0..COUNT as u64).map(u64::to_le_bytes).collect();
        let mut inboxes = [vec![[0; 8]; COUNT], vec![[0; 8]; COUNT]];
        for (end, inbox) in [&a, &b].into_iter().zip(&mut inboxes) {
            for bytes in inbox {
                end.recv(Some((7, 0)), bytes, 2);
            }
        }
        let mut completed = [0, 0];
        let limit = Instant::now() + Duration::from_secs(40);
        // posted sends, and those that are complete
        let (mut sent, mut done) = ([0, 0], [0, 0]);
        while completed != [2 * COUNT, 2 * COUNT] {
            for (at, (end, to)) in [(&a, to_b), (&b, to_a)].into_iter().enumerate() {
                if sent[at] < COUNT && sent[at] < done[at] + 16 {
                    end.send(to, Some(7), &bytes[sent[at]], 1);
                    sent[at] += 1;
                }
                if random.one_in(60) {
                    breaks += usize::from(break_one(end, &mut random));
                }
                let entry = end.poll();
                completed[at] += usize::from(entry.is_some());
                done[at] += usize::from(entry.is_some_and(|entry| entry.context == 1));
            }
            assert!(Instant::now() < limit, "seed {seed}: {completed:?}");
        }
        assert!(inboxes.iter().all(|inbox| *inbox == bytes), "seed {seed}");
    }
    assert!(breaks >= 16, "{breaks}");
}

/// Breaks a circuit or a target of an endpoint, in whatever state. `false`: there is none.
pub(super) fn break_one(end: &End, random: &mut Random) -> bool {
    let target = random.one_in(2);
    let mut broken = true;
    end.ep.shared().apply_event(|_, io| {
        let xrc = io.xrc.as_ref().unwrap();
        let (circuit, held) = (
            xrc.keys().into_iter().next(),
            xrc.targets.keys().next().copied(),
        );
        match (circuit, held) {
            (_, Some(held)) if target => io.break_target(held),
            (Some(circuit), _) => io.break_circuit(circuit),
            _ => broken = false,
        }
    });
    broken
}

/// A sends to B once, so B has accepted a link. Returns that link.
fn accepted_link(a: &End, b: &End) -> LinkKey {
    exchange(a, b);
    b.state(|state| state.io.links.keys().next().unwrap())
}

/// One message in each direction.
pub(super) fn exchange(a: &End, b: &End) {
    let (to_b, to_a) = (a.knows(b), b.knows(a));
    let (bytes, mut at_a, mut at_b) = ([3; 8], [0; 8], [0; 8]);
    a.recv(Some((1, 0)), &mut at_a, 2);
    b.recv(Some((1, 0)), &mut at_b, 2);
    a.send(to_b, Some(1), &bytes, 1);
    wait([a, b], [1, 1]);
    b.send(to_a, Some(1), &bytes, 1);
    wait([a, b], [1, 1]);
    assert_eq!((at_a, at_b), (bytes, bytes));
}

/// The circuits of an endpoint, also those that are not up, and those that have a queue.
fn circuits(end: &End) -> (usize, usize) {
    end.state(|state| {
        let xrc = state.io.xrc.as_ref().unwrap();
        (xrc.circuits.len(), xrc.keys().len())
    })
}

/// HELLO is polled after its link has broken: it chooses no circuit.
#[test]
fn a_link_that_ends_leaves_no_circuit_behind() {
    let domain = Node::new().process();
    let (a, b) = (open(&domain), open(&domain));
    let link = accepted_link(&a, &b);
    b.ep.shared().apply_event(|core, io| {
        core.broken(link, io);
        io.greeted_on_circuit(link);
    });
    let (all, dialled) = circuits(&b);
    assert_eq!(all, dialled);
    // nor a choice that was made for it earlier
    b.ep.shared().apply_event(|_, io| {
        let address = io.port_mut(link).map(|port| port.address);
        if let (Some(address), Some(xrc)) = (address, &mut io.xrc) {
            let choice = xrc.circuits.choose(link, address);
            io.follow(link, choice);
        }
    });
    let (all, dialled) = circuits(&b);
    assert_eq!(all, dialled);
    exchange(&a, &b);
    // a link that was lost in a simultaneous dial ends its circuits, and they are dialled again
    let limit = Instant::now() + Duration::from_secs(20);
    while (objects(&a), objects(&b)) != ((1, 1, 0), (1, 1, 0)) {
        a.poll();
        b.poll();
        assert!(
            Instant::now() < limit,
            "{:?} {:?}",
            objects(&a),
            objects(&b)
        );
    }
}

/// The peer of an accepted link may post as soon as it has the reply. A link on which HELLO does
/// not arrive in time accepts it later: its target, which others use, does not fail.
#[test]
fn an_accepted_link_without_hello_lingers() {
    let domain = Node::new().process();
    let (a, b) = (open(&domain), open(&domain));
    let link = accepted_link(&a, &b);
    b.ep.shared().apply_event(|core, io| {
        // as before HELLO
        io.port_mut(link).unwrap().used = false;
        core.broken(link, io);
        assert!(io.port_mut(link).is_some());
    });
    exchange(&a, &b);
    for end in [&a, &b] {
        let failed = end.state(|state| {
            let counts = &state.io.xrc.as_ref().unwrap().counts;
            (counts.circuits_failed, counts.targets_failed)
        });
        assert_eq!(failed, (0, 0));
    }
}

#[test]
fn a_link_that_ends_is_not_accepted() {
    let domain = Node::new().process();
    let (a, b) = (open(&domain), open(&domain));
    let link = accepted_link(&a, &b);
    let reply = LinkReply {
        reply: Reply {
            epoch: Epoch::new(5).unwrap(),
            id: EndpointId::new(6).unwrap(),
            auth: 0,
            gives: Secret::new(7).unwrap(),
            ended: None,
            terms: Terms::default(),
        },
        presence: Presence::default(),
        node: NodeId::new(8),
        inbox: Inbox {
            srq: SrqNumber::new(9).unwrap(),
            tag: LinkTag::new(10).unwrap(),
        },
        ended: None,
    };
    b.ep.shared().apply_event(|core, io| {
        let accepts = reply.encode().to_vec();
        let mut answer = accepts.clone();
        io.check_answer(link, &mut answer);
        assert_eq!(answer, accepts);
        core.broken(link, io);
        io.check_answer(link, &mut answer);
        let LinkRejection { rejection, node } = LinkRejection::decode(&answer).unwrap();
        assert_eq!(
            (rejection.reason, rejection.epoch, rejection.id, node),
            (
                Reason::Busy,
                Some(reply.reply.epoch),
                reply.reply.id,
                reply.node
            )
        );
    });
    exchange(&a, &b);
}

/// A circuit on which a link has posted nothing does not break with it.
#[test]
fn a_link_without_attach_does_not_break_the_circuit_of_others() {
    let domain = Node::new().process();
    let (a, b) = (open(&domain), open(&domain));
    let link = accepted_link(&a, &b);
    b.ep.shared().apply_event(|core, io| {
        let port = io.port_mut(link).unwrap();
        port.attached = false;
        let (circuit, address) = (port.circuit.unwrap(), port.address);
        // the key of a link that does not exist
        let mut others = Slab::new();
        let other = (0..9).filter_map(|_| others.insert(())).last().unwrap();
        let xrc = io.xrc.as_mut().unwrap();
        let choice = xrc.circuits.choose(other, address);
        assert!(matches!(choice, Choice::Use(key, _) if key == circuit));
        core.broken(link, io);
        assert!(io.xrc.as_ref().unwrap().circuits.get(circuit).is_some());
        io.leave_circuit(circuit, other);
    });
    exchange(&a, &b);
}

/// A peer can end a circuit of the other side only if it is behind the circuit, whatever node it
/// states.
#[test]
fn a_peer_ends_no_circuit_of_others() {
    let (node, other) = (Node::new(), Node::new());
    let domain = node.process();
    let [a, b, c] = [&domain, &other.process(), &domain].map(open);
    let link = accepted_link(&a, &b);
    exchange(&c, &a);
    let id_of = |end: &End| end.state(|state| state.io.xrc.as_ref().unwrap().id);
    let (id, neighbour) = (id_of(&a), id_of(&c));
    let stranger = EndpointId::new(6).unwrap();
    b.ep.shared().apply_event(|_, io| {
        let port = io.port_mut(link).unwrap();
        let (circuit, node) = (port.circuit.unwrap(), port.node.unwrap());
        let (address, tag) = (port.address, port.tag);
        let ids = io.xrc.as_ref().unwrap().circuits.get(circuit).unwrap();
        let states = |id: EndpointId, failed: Option<_>| LinkRequest {
            request: Request {
                listener: address,
                id,
                auth: 0,
                epoch: Epoch::new(5).unwrap(),
                ended: None,
                gives: Secret::new(7).unwrap(),
                shows: None,
                fresh: false,
            },
            node,
            circuit: None,
            ended: None,
            inbox: Inbox {
                srq: SrqNumber::new(9).unwrap(),
                tag,
            },
            presence: Presence::default(),
            failed,
        };
        let failed = Some(ids.number);
        assert_eq!(io.failed_circuit(&states(stranger, failed)), None);
        // an endpoint of that node which this one has no link to
        assert_eq!(io.failed_circuit(&states(neighbour, failed)), None);
        assert_eq!(io.failed_circuit(&states(id, failed)), Some(circuit));
        assert_eq!(
            io.failed_circuit(&states(id, Some(ids.number.next()))),
            None
        );
        assert_eq!(io.failed_circuit(&states(id, None)), None);
        // its link may have left the circuit before the request arrives
        let xrc = io.xrc.as_mut().unwrap();
        for number in 1..=64 {
            xrc.circuits
                .note_former(circuit, EndpointId::new(number).unwrap());
            xrc.circuits.note_former(circuit, id);
        }
        assert!(xrc.circuits.is_former(circuit, id));
        assert!(!xrc.circuits.is_former(circuit, EndpointId::new(1).unwrap()));
        assert!(
            xrc.circuits
                .is_former(circuit, EndpointId::new(64).unwrap())
        );
    });
    exchange(&a, &b);
}

/// Endpoints at the IP addresses of hosts, each on a node of its own. A hostile one states the node
/// of another one, and the number of a receive queue that does not exist: packets to it break the
/// circuit that they are posted to.
fn hosts() -> [End; 3] {
    let ends = [2, 3, 4].map(|host| {
        let address = std::net::SocketAddr::from(([127, 0, 0, host], 0));
        open_at(&Node::new().process(), Some(address))
    });
    let node = ends[1].state(|state| state.io.xrc.as_ref().unwrap().node);
    ends[2].state(|state| {
        let xrc = state.io.xrc.as_mut().unwrap();
        (xrc.node, xrc.srq) = (node, SrqNumber::new(0xff_fffe).unwrap());
    });
    ends
}

/// Circuits and targets of an endpoint that have failed with links.
fn failures(end: &End) -> (u64, u64) {
    end.state(|state| {
        let counts = &state.io.xrc.as_ref().unwrap().counts;
        (counts.circuits_failed, counts.targets_failed)
    })
}

#[test]
fn a_peer_that_states_the_node_of_another_one_breaks_circuits_to_its_own_host_alone() {
    let [a, b, hostile] = hosts();
    exchange(&a, &b);
    hostile.send(hostile.knows(&a), Some(9), &[1; 8], 1);
    let limit = Instant::now() + Duration::from_secs(20);
    while failures(&a).0 < 3 {
        hostile.poll();
        exchange(&a, &b);
        assert_eq!(failures(&b), (0, 0));
        assert!(Instant::now() < limit, "{:?}", failures(&a));
    }
}

#[test]
fn a_peer_that_states_the_address_of_another_one_breaks_none_of_its_circuits() {
    let [a, b, hostile] = hosts();
    exchange(&a, &b);
    let (listener, node) = b.state(|state| {
        let node = state.io.xrc.as_ref().unwrap().node;
        (state.core.config.listener, node)
    });
    hostile.state(|state| state.core.config.listener = listener);
    hostile.send(hostile.knows(&a), Some(9), &[1; 8], 1);
    let accepted = || a.state(|state| state.io.xrc.as_ref().unwrap().counts.links_accepted);
    let before = accepted();
    let limit = Instant::now() + Duration::from_secs(20);
    let mut end = None;
    while end.is_none_or(|end| Instant::now() < end) {
        hostile.poll();
        exchange(&a, &b);
        if accepted() > before {
            end.get_or_insert(Instant::now() + Duration::from_millis(500));
        }
        assert!(Instant::now() < limit, "not accepted");
    }
    assert_eq!((failures(&a), failures(&b)), ((0, 0), (0, 0)));
    // nor is its node the one that the peer states
    let known = a.state(|state| state.io.xrc.as_ref().unwrap().circuits.node(listener));
    assert_eq!(known, Some(node));
}

/// A peer states another port in each request, and its circuit fails again and again. What this
/// side notes of its addresses does not grow.
#[test]
fn a_peer_that_states_many_ports_adds_no_entries() {
    let [a, b, _] = hosts();
    exchange(&a, &b);
    let to_a = b.knows(&a);
    let ip = b.state(|state| state.core.config.listener.socket_addr().ip());
    let accepted = || a.state(|state| state.io.xrc.as_ref().unwrap().counts.links_accepted);
    let limit = Instant::now() + Duration::from_secs(60);
    for port in 1..=20 {
        let listener = Listener::new(ip, port).unwrap();
        b.state(|state| state.core.config.listener = listener);
        let before = accepted();
        while accepted() == before {
            b.ep.shared().apply_event(|_, io| {
                for circuit in io.xrc.as_ref().unwrap().keys() {
                    io.break_circuit(circuit);
                }
            });
            b.send(to_a, Some(9), &[1; 8], 1);
            while b.poll().is_none() {
                a.poll();
                assert!(Instant::now() < limit, "not sent");
            }
        }
    }
    let (nodes, failed) = a.state(|state| {
        let xrc = state.io.xrc.as_ref().unwrap();
        (xrc.circuits.sizes(), xrc.failed.len())
    });
    // the peer has one address, and its links, of which some linger, some others
    assert!(
        nodes.0 <= 5 && nodes.1 <= 5 && failed <= 1,
        "{nodes:?} {failed}"
    );
}

/// A circuit leads to the IP address from which its peer has dialled, whatever the peer states:
/// places are counted there.
#[test]
fn places_are_counted_where_circuits_lead() {
    let at = |host: u8| std::net::SocketAddr::from(([127, 0, 0, host], 0));
    let states = |end: &End, host: u8| {
        end.state(|state| {
            let port = state.core.config.listener.socket_addr().port();
            state.core.config.listener = Listener::new([127, 0, 0, host].into(), port).unwrap();
        });
    };
    let a = || open_at(&Node::new().process(), Some(at(2)));
    // one at another host states the IP address of B
    let b = open_at(&Node::new().process(), Some(at(3)));
    let other = open_at(&Node::new().process(), Some(at(4)));
    states(&other, 3);
    // two of one node state another IP address than theirs
    let node = Node::new();
    let twins = [0, 1].map(|_| open_at(&node.process(), Some(at(5))));
    twins.iter().for_each(|twin| states(twin, 6));
    let [first, second] = twins;
    for (ends, circuits) in [([b, other], 2), ([first, second], 1)] {
        let a = a();
        for end in &ends {
            end.send(end.knows(&a), Some(9), &[1; 8], 1);
        }
        let limit = Instant::now() + Duration::from_secs(20);
        let attached = || {
            a.state(|state| {
                let keys: Vec<_> = state.io.links.keys().collect();
                let attached = |key: &&LinkKey| state.io.port_mut(**key).unwrap().attached;
                keys.iter().filter(attached).count()
            })
        };
        while (objects(&a).0, attached()) != (circuits, 2) {
            a.poll();
            for end in &ends {
                end.poll();
            }
            assert!(Instant::now() < limit, "{:?} {}", objects(&a), attached());
        }
        let places = a.state(|state| state.core.places_taken(&state.io));
        assert_eq!(places, circuits + 2);
    }
}

/// A reply states that the circuits of its endpoint have ended.
#[test]
fn a_peer_that_replies_as_another_one_ends_none_of_its_targets() {
    let [a, b, hostile] = hosts();
    exchange(&a, &b);
    let id = b.state(|state| state.core.config.id);
    hostile.state(|state| {
        state.core.config.id = id;
        let xrc = state.io.xrc.as_mut().unwrap();
        xrc.id = id;
        xrc.circuits.begin_at(CircuitNumber::new(100).unwrap());
    });
    let mut at_b = [0; 8];
    b.recv(Some((9, 0)), &mut at_b, 2);
    a.send(a.knows(&hostile), Some(9), &[1; 8], 1);
    // the message goes to the endpoint with the id
    let limit = Instant::now() + Duration::from_secs(20);
    let mut left = 2;
    while left > 0 {
        left -= [&a, &b].into_iter().filter_map(End::poll).count();
        hostile.poll();
        assert!(Instant::now() < limit, "{left}");
    }
    assert_eq!((failures(&a).1, failures(&b).1), (0, 0));
    exchange(&a, &b);
}

/// The error of the first operation that fails.
fn error(end: &End, other: &End) -> FiErrno {
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        other.poll();
        match end.cq.read(1, &mut |_: &Completion| {}) {
            Err(FiErrno::EAVAIL) => return end.cq.read_error().unwrap().err,
            Err(FiErrno::EAGAIN) => assert!(Instant::now() < limit, "no error"),
            found => panic!("{found:?}"),
        }
    }
}

/// A process ends whose circuit has ended before: no target fails with it, and the one through
/// which it is reached has another holder. A side that waits for its answer has to ask.
#[test]
fn the_end_of_a_process_behind_an_ended_circuit_is_found() {
    let node = Node::new();
    let a = open(&Node::new().process());
    let (b, other) = (open(&node.process()), open(&node.process()));
    exchange(&a, &b);
    exchange(&a, &other);
    assert_eq!(objects(&a).0, 1, "one circuit to the node");
    // announced, and not answered, because there is no receive
    let long = vec![5; 20_000];
    a.send(a.knows(&b), Some(3), &long, 1);
    let limit = Instant::now() + Duration::from_secs(20);
    while b.state(|state| state.io.rx.own().unwrap().stored_len()) == 0 {
        assert_eq!((a.poll(), b.poll()), (None, None));
        assert!(Instant::now() < limit, "not announced");
    }
    // as a process that is killed: its peers get no message. The device destroys its initiators,
    // and reports nothing
    drop(b.ep.shared().end());
    drop(b);
    let begin = Instant::now();
    assert_eq!(error(&a, &other), FiErrno::ECONNABORTED);
    // two periods of probes, and the recovery
    assert!(
        begin.elapsed() < Duration::from_secs(4),
        "{:?}",
        begin.elapsed()
    );
    exchange(&a, &other);
}

/// An endpoint that is closed informs its peers, and awaits their answers: not that of a peer whose
/// receive queue does not exist, also if the target of the circuit does.
#[test]
fn a_close_does_not_wait_for_a_peer_that_has_ended() {
    let node = Node::new();
    let a = open(&Node::new().process());
    let (b, holder) = (open(&node.process()), open(&node.process()));
    exchange(&a, &b);
    let ids = a.state(|state| {
        let xrc = state.io.xrc.as_ref().unwrap();
        let mut up = xrc.keys().into_iter();
        up.find_map(|key| xrc.circuits.get(key)).unwrap()
    });
    let _held = holder.ep.shared().open_target(ids.target).unwrap();
    // as a process that is killed, whose initiator has ended before: no target fails with it
    drop(b.ep.shared().end());
    drop(b);
    let begin = Instant::now();
    a.ep.close();
    let time = begin.elapsed();
    assert!(time < Duration::from_millis(800), "{time:?}");
}

/// A peer that is silent, because it has no receive, is asked, and answers when it has one. Nothing
/// breaks.
#[test]
fn a_peer_that_is_silent_is_probed() {
    let (a, b) = (open(&Node::new().process()), open(&Node::new().process()));
    exchange(&a, &b);
    a.state(|state| state.core.config.beat = Some(20_000_000));
    let completed = || {
        a.state(|state| {
            let queues = state.io.xrc.as_ref().unwrap().queues();
            queues.map(|queue| queue.queue.position()).sum::<u16>()
        })
    };
    let long = vec![5; 20_000];
    a.send(a.knows(&b), Some(3), &long, 1);
    let stored = || b.state(|state| state.io.rx.own().unwrap().stored_len());
    let limit = Instant::now() + Duration::from_secs(20);
    while stored() == 0 {
        assert_eq!((a.poll(), b.poll()), (None, None));
        assert!(Instant::now() < limit, "not announced");
    }
    let before = completed();
    // each period, not just once
    while completed() < before + 5 {
        assert_eq!((a.poll(), b.poll()), (None, None));
        assert!(Instant::now() < limit, "{before} {}", completed());
    }
    let mut at_b = vec![0; long.len()];
    b.recv(Some((3, 0)), &mut at_b, 2);
    wait([&a, &b], [1, 1]);
    assert!(at_b == long);
    let failed = |end: &End| {
        let count = |state: &mut State| state.io.xrc.as_ref().unwrap().counts.circuits_failed;
        end.state(count)
    };
    assert_eq!((failed(&a), failed(&b)), (0, 0));
    // nothing is awaited any more
    let limit = Instant::now() + Duration::from_secs(20);
    while a.state(|state| state.core.deadline()).is_some() {
        assert!(Instant::now() < limit, "it is still asked");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn endpoints_on_rc_and_xrc_refuse_each_other() {
    let domain = Node::new().process();
    let (rc, xrc) = (End::open(&domain), open(&domain));
    for (from, to) in [(&rc, &xrc), (&xrc, &rc)] {
        let address = from.knows(to);
        let bytes = [1; 8];
        from.send(address, Some(1), &bytes, 1);
        assert_eq!(error(from, to), FiErrno::ECONNREFUSED);
    }
}

/// The endpoint at an address is replaced: its operations fail, and those after them reach the
/// other one.
#[test]
fn a_replaced_endpoint_is_found() {
    let domain = Node::new().process();
    let (a, b) = (open(&domain), open(&domain));
    let name = b.ep.name().unwrap();
    let to_b = a.knows(&b);
    let (bytes, mut at_b) = ([1; 8], [0; 8]);
    b.recv(Some((1, 0)), &mut at_b, 2);
    a.send(to_b, Some(1), &bytes, 1);
    wait([&a, &b], [1, 1]);
    drop(b);
    let limit = Instant::now() + Duration::from_secs(20);
    let c = open_at(&domain, Some(name));
    let mut at_c = [0; 8];
    c.recv(Some((2, 0)), &mut at_c, 2);
    // the first ones may be meant for the former endpoint
    let mut got = false;
    while !got {
        a.send(to_b, Some(2), &bytes, 1);
        let mut ended = false;
        while !ended {
            got |= c.poll().is_some();
            ended = match a.cq.read(1, &mut |_: &Completion| {}) {
                Ok(_) => true,
                Err(FiErrno::EAVAIL) => a.cq.read_error().is_ok(),
                Err(_) => false,
            };
            assert!(Instant::now() < limit, "not found");
        }
        got |= c.poll().is_some();
    }
    assert_eq!(at_c, bytes);
}
