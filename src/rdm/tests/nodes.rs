//! Nodes with several processes on XRC, emulated by domains of one process: the domains of a node
//! share the file of their XRC domain, and its endpoints an address.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::Random;
use super::endpoints::End;
use super::xrc::{break_one, exchange, objects, open_at, open_with};
use crate::domain::{Domain, DomainConfig};
use crate::rdm::core::connect::BACKOFF;
use crate::rdm::table_keys::CircuitKey;
use crate::verbs::QpNumber;
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::xrc::{LinkRejection, NodeId};
use crate::wire::rdm::{EndpointId, Listener, Reason, Rejection};
use crate::xrc::Places;

/// A node: the path of its file, which is removed with its last domain.
pub(super) struct Node(PathBuf);

impl Node {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("/dev/shm/weft-test-{}-{number}", std::process::id());
        Self(name.into())
    }

    /// A process of the node.
    pub(super) fn process(&self) -> Arc<Domain> {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let config = DomainConfig {
            xrc: Places {
                demanded: Some(self.0.clone()),
                runtime_dir: None,
            },
            ..DomainConfig::default()
        };
        Domain::open(&device, config).unwrap()
    }
}

/// Endpoints of so many processes on each of so many nodes, node by node.
fn network(nodes: u8, processes: usize) -> Vec<End> {
    let ends = (0..nodes).flat_map(|node| {
        let domains = Node::new();
        let address = SocketAddr::from(([127, 0, 0, node + 1], 0));
        (0..processes).map(move |_| open_at(&domains.process(), Some(address)))
    });
    ends.collect()
}

/// Each endpoint sends to each other one, in rounds of one message.
struct Exchange<'a> {
    ends: &'a [End],
    rounds: usize,
}

fn bytes_of(from: usize, to: usize, round: usize) -> Vec<u8> {
    let len = [8, 0, 200, 9_000][(from + to + round) % 4];
    let byte = |at: usize| (at * 7 + from + 16 * to + 5 * round) as u8;
    (0..len).map(byte).collect()
}

impl Exchange<'_> {
    /// Sends all, and checks the contents. Calls `disturb` again and again meanwhile.
    fn run(&self, mut disturb: impl FnMut()) {
        let ends = self.ends;
        let count = ends.len();
        let pairs = || (0..count * count).map(move |pair| (pair / count, pair % count));
        let pairs = || pairs().filter(|(from, to)| from != to);
        let addresses = |end: &End| ends.iter().map(|other| end.knows(other)).collect();
        let known: Vec<Vec<_>> = ends.iter().map(addresses).collect();
        let limit = Instant::now() + Duration::from_secs(60);
        for round in 0..self.rounds {
            let tag = |from| Some((round * count + from) as u64);
            let outboxes: Vec<_> = pairs()
                .map(|(from, to)| bytes_of(from, to, round))
                .collect();
            let mut inboxes: Vec<_> = outboxes.iter().map(|it| vec![0xee; it.len()]).collect();
            for ((from, to), inbox) in pairs().zip(&mut inboxes) {
                ends[to].recv(tag(from).map(|tag| (tag, 0)), inbox, 2);
            }
            for ((from, to), outbox) in pairs().zip(&outboxes) {
                ends[from].send(known[from][to], tag(from), outbox, 1);
            }
            let mut left = 2 * count * (count - 1);
            while left > 0 {
                left -= ends.iter().filter_map(End::poll).count();
                disturb();
                assert!(
                    Instant::now() < limit,
                    "round {round}: {left} entries are missing"
                );
            }
            assert!(inboxes == outboxes, "round {round}");
        }
    }
}

/// Initiators of an endpoint that are up, and the numbers of the targets through which it receives.
fn held(end: &End) -> (usize, HashSet<QpNumber>) {
    end.state(|state| {
        let xrc = state.io.xrc.as_ref().unwrap();
        let keys = xrc.keys();
        let up = |key: &&CircuitKey| xrc.circuits.get(**key).is_some();
        let used = xrc
            .targets
            .iter()
            .filter(|(_, held)| !held.links.is_empty());
        let numbers = used.map(|(number, _)| *number).collect();
        (keys.iter().filter(up).count(), numbers)
    })
}

/// Two nodes of three processes: each endpoint needs one initiator for each node, its own included,
/// and a node one target for each endpoint.
#[test]
fn the_processes_of_a_node_share_targets() {
    let ends = network(2, 3);
    let exchange = Exchange {
        ends: &ends,
        rounds: 3,
    };
    exchange.run(|| {});
    for (place, end) in ends.iter().enumerate() {
        let (up, targets) = held(end);
        assert_eq!(up, 2, "{place}: circuits");
        assert_eq!(targets.len(), ends.len() - 1, "{place}: one for each peer");
        assert_eq!(objects(end).2, 0);
        end.state(|state| {
            let counts = &state.io.xrc.as_ref().unwrap().counts;
            // a peer that gets no processor for 100 ms is as one that is stopped
            assert_eq!(
                counts.circuit_requests,
                2 + counts.second_requests,
                "{counts:?}"
            );
            // none was at the wrong process
            assert_eq!(counts.nodes, 0, "{counts:?}");
            // one for each peer; if both sides dial, one of them can be superfluous
            assert!(counts.link_requests < ends.len() as u64, "{counts:?}");
        });
    }
    for node in ends.chunks(3) {
        let numbers = node.iter().flat_map(|end| held(end).1);
        let numbers: HashSet<QpNumber> = numbers.collect();
        assert_eq!(numbers.len(), ends.len());
    }
}

/// Circuits and targets break at random; those of a node have several users.
///
/// How often the exchange polls, and with it the number of breaks in one, depends on the time that
/// the drivers get; exchanges follow until 16 links have broken.
#[test]
fn shared_targets_that_break_lose_and_repeat_nothing() {
    let mut breaks = 0;
    for seed in 0..64 {
        if seed >= 4 && breaks >= 16 {
            break;
        }
        let mut random = Random(seed);
        let ends = network(2, 2);
        let exchange = Exchange {
            ends: &ends,
            rounds: 40,
        };
        exchange.run(|| {
            if random.one_in(150) {
                let end = &ends[random.below(ends.len() as u64) as usize];
                breaks += usize::from(break_one(end, &mut random));
            }
        });
    }
    assert!(breaks >= 16, "{breaks}");
}

/// An endpoint with room for the circuit and the two targets of two nodes talks to four.
#[test]
fn a_node_is_evicted_for_a_further_one() {
    let others = network(4, 2);
    let end = open_with(&Node::new().process(), None, Some(6));
    for _ in 0..3 {
        for other in &others {
            exchange(&end, other);
            let used = end.state(|state| state.io.xrc.as_ref().unwrap().places_used());
            // a peer may connect when there was room for it, and then answer
            assert!(used <= 7, "{used}");
        }
    }
}

/// The endpoint that is closed takes what its peers have posted, and nothing breaks.
#[test]
fn a_close_breaks_no_circuit_of_others() {
    let mut ends = network(2, 3);
    let exchange = |ends: &[End], rounds| Exchange { ends, rounds }.run(|| {});
    exchange(&ends, 2);
    let mut patient = true;
    for _ in 0..3 {
        let begin = Instant::now();
        drop(ends.remove(0));
        // a driver that gets no processor for 1 s does not answer
        patient &= begin.elapsed() < Duration::from_secs(1);
        exchange(&ends, 1);
    }
    for end in ends.iter().filter(|_| patient) {
        end.state(|state| {
            let counts = &state.io.xrc.as_ref().unwrap().counts;
            let broken = (
                counts.circuits_failed,
                counts.targets_failed,
                counts.unknown_tags,
            );
            assert_eq!(broken, (0, 0, 0), "{counts:?}");
        });
    }
}

/// A process has no descriptor for the target of a circuit that exists: its peer repeats the
/// request, and neither ends the circuit nor makes a further one.
#[test]
fn a_process_without_descriptors_answers_busy() {
    let at = |host| Some(SocketAddr::from(([127, 0, 0, host], 0)));
    let a = open_at(&Node::new().process(), at(2));
    let node = Node::new();
    let (b, c) = (
        open_at(&node.process(), at(3)),
        open_at(&node.process(), at(3)),
    );
    exchange(&a, &b);
    c.ep.shared()
        .missing_descriptors
        .store(3, Ordering::Relaxed);
    exchange(&a, &c);
    assert_eq!(c.ep.shared().missing_descriptors.load(Ordering::Relaxed), 0);
    let counts = a.state(|state| {
        let counts = &state.io.xrc.as_ref().unwrap().counts;
        (
            counts.nodes,
            counts.circuit_requests,
            counts.circuits_failed,
        )
    });
    assert_eq!(counts, (0, 1, 0));
    exchange(&a, &b);
}

/// A peer answers each request for a link with NODE, and states another node each time. The dial
/// has failed after a few of them, and the next one is after a pause.
#[test]
fn a_peer_that_states_ever_new_nodes_is_dialled_with_pauses() {
    let end = open_at(&Node::new().process(), None);
    let nowhere = Listener::new([127, 0, 0, 1].into(), 1).unwrap();
    let begin = Instant::now();
    end.ep.shared().apply_event(|core, io| {
        let peer = core.peer_at(nowhere).unwrap();
        core.hold(peer, io);
        let link = io.links.keys().next().unwrap();
        let mut answers = 0;
        while core.peer_of(link).is_some() {
            let request = io.port_mut(link).unwrap().request.unwrap();
            let rejection = Rejection {
                version: VERSION,
                epoch: Some(request.epoch),
                id: EndpointId::new(77).unwrap(),
                newest: None,
                reason: Reason::Node,
            };
            answers += 1;
            let node = NodeId::new(1_000 + answers);
            io.answered(core, link, &LinkRejection { rejection, node }.encode());
            assert!(answers < 100);
        }
        assert_eq!(answers, 9);
        assert!(!core.is_up(peer));
        // the pause begins with the time of the last event, and can have passed on a busy machine
        let pause = Duration::from_nanos(BACKOFF.0.into());
        assert!(core.link_count() == 0 || begin.elapsed() >= pause);
    });
}
