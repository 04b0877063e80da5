//! The ends of circuits, of their links and of what belongs to them, on the embedded device, in one
//! process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::breaks;
use super::endpoints::{End, Transport, domain};
use super::nodes::Node;
use super::rma::connected;
use super::xrc::{exchange, open_at};
use crate::mr::Peer as _;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::{Failure, Io as _};
use crate::rdm::executor::{Executor, Todo};
use crate::rdm::link::send_queue::Sent;
use crate::rdm::table_keys::CircuitKey;
use crate::rdm::xrc::circuit_queue::CircuitQueue;
use crate::rdm::xrc::circuits::Choice;
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::xrc::CircuitRequest;
use crate::wire::rdm::{Reason, Rejection};

const LIMIT: Duration = Duration::from_secs(20);

/// Endpoints on two nodes, of which the first one has dialled the second.
fn pair() -> [End; 2] {
    let ends = [(); 2].map(|()| open_at(&Node::new().process(), None));
    exchange(&ends[0], &ends[1]);
    ends
}

/// The only link of an endpoint.
fn link_of(end: &End) -> LinkKey {
    end.state(|state| state.io.links.keys().next().unwrap())
}

fn queue(io: &mut Executor, circuit: CircuitKey) -> &mut CircuitQueue {
    io.xrc.as_mut().unwrap().queue_mut(circuit).unwrap()
}

/// The requests of a link that ends are awaited while requests of its circuit complete: they are
/// behind those.
#[test]
fn an_end_is_awaited_while_requests_of_its_circuit_complete() {
    let [a, b] = pair();
    let link = link_of(&a);
    a.ep.shared().apply_event(|core, io| {
        let port = io.port_mut(link).unwrap();
        port.under_way += 1;
        let circuit = port.circuit.unwrap();
        queue(io, circuit).queue.record(link, Sent::Control(None));
        queue(io, circuit).room.occupy(9);
        core.broken(link, io);
        let (begin, step) = (Instant::now(), Duration::from_millis(900));
        let is_up = |io: &Executor| io.xrc.as_ref().unwrap().circuits.get(circuit).is_some();
        for n in 0..9 {
            assert_eq!(io.half_ended_links(begin + step * n), []);
            assert!(is_up(io), "{n}");
            queue(io, circuit).others_completed(1);
        }
        assert_eq!(io.half_ended_links(begin + step * 9), []);
        assert!(is_up(io));
        // nothing completes any more
        assert_eq!(io.half_ended_links(begin + step * 11), []);
        assert!(!is_up(io));
    });
    exchange(&a, &b);
}

/// A link that is being ended leaves its circuit when none of its requests is under way. The key
/// directory posts none behind that: its completion would not give its room back.
#[test]
fn a_link_that_ends_posts_no_request_of_the_directory() {
    let domain = breaks::domain(false);
    let (a, _b, _) = connected(&domain, Transport::Xrc);
    let link = a.key();
    let (notifier, room) = a.end.state(|state| {
        let record = state.io.links.get_mut(link).unwrap();
        let notifier = Arc::clone(record.block.as_ref().unwrap().notifier());
        let circuit = record.port.as_ref().unwrap().circuit.unwrap();
        (notifier, Arc::clone(&queue(&mut state.io, circuit).room))
    });
    assert!(notifier.look().asked, "the link is open");
    let limit = Instant::now() + LIMIT;
    while !room.is_empty() {
        assert!(a.end.poll().is_none());
        assert!(Instant::now() < limit, "the READ does not complete");
    }
    let ended = || {
        a.end.state(|state| {
            if state.io.links.get_mut(link).unwrap().is_under_way() {
                return false;
            }
            state.core.broken(link, &mut state.io);
            assert_eq!(state.io.port_mut(link).unwrap().circuit, None);
            assert!(!notifier.look().asked && room.is_empty());
            true
        })
    };
    while !ended() {
        assert!(a.end.poll().is_none());
        assert!(Instant::now() < limit, "a packet does not complete");
    }
    // wakes the driver
    a.end.ep.shared().apply_event(|_, _| {});
}

/// From CLOSE on, the key directory posts nothing to a link: its peer may have ended its side, and
/// would end the circuit of other links. A notice follows if the link is used again.
#[test]
fn the_directory_posts_nothing_behind_close() {
    let domain = breaks::domain(false);
    let (a, _b, _) = connected(&domain, Transport::Xrc);
    let link = a.key();
    let notifier = a.end.state(|state| {
        let record = state.io.links.get_mut(link).unwrap();
        let block = record.block.as_ref().unwrap();
        let (notifier, poster) = (Arc::clone(block.notifier()), Arc::clone(&block.poster));
        state.io.hold_own_requests(link, true);
        notifier.notify_revocations();
        assert!(!notifier.look().asked && !poster.has_requests());
        state.io.hold_own_requests(link, false);
        assert!(poster.has_requests(), "the notice was posted");
        notifier
    });
    let evicts = || {
        a.end.state(|state| {
            let peer = state.core.peer_of(link).unwrap();
            let evicts = state.core.evict(peer, &mut state.io);
            assert!(!evicts || !notifier.look().asked);
            evicts
        })
    };
    let limit = Instant::now() + LIMIT;
    while !evicts() {
        assert!(a.end.poll().is_none());
        assert!(Instant::now() < limit, "the link is in use");
    }
    a.end.ep.shared().apply_event(|_, _| {});
}

/// A rejection that arrives behind the reply: the links of the circuit break, and are dialled
/// again.
#[test]
fn a_late_rejection_breaks_a_circuit_that_is_up() {
    let [a, b] = pair();
    for end in [&a, &b] {
        end.ep.shared().apply_event(|core, io| {
            let xrc = io.xrc.as_ref().unwrap();
            let up = xrc.keys().into_iter();
            let up = up.filter(|key| xrc.circuits.get(*key).is_some());
            for circuit in up.collect::<Vec<_>>() {
                io.circuit_rejected(core, circuit, &[], Failure::Silent);
            }
        });
        exchange(&a, &b);
    }
}

/// The acceptor of a link cannot dial its circuit: it repeats the request if another answer can
/// follow, and otherwise ends the link.
#[test]
fn a_circuit_request_is_not_repeated_if_its_answer_is_certain() {
    let [a, b] = pair();
    let reasons = [
        (Reason::Foreign, true),
        (Reason::Version, true),
        (Reason::Auth, true),
        (Reason::Known, true),
        (Reason::Transport, true),
        (Reason::Busy, false),
    ];
    for (reason, ends) in reasons {
        exchange(&a, &b);
        // either side may have dialled the present link
        let accepted = |end: &End| {
            end.state(|state| {
                let io = &mut state.io;
                let keys: Vec<_> = io.links.keys().collect();
                let accepted = |key: &LinkKey| {
                    let ends = io.links.ends(*key);
                    let port = io.port_mut(*key).unwrap();
                    !ends && port.request.is_none() && port.circuit.is_some()
                };
                keys.into_iter().find(accepted)
            })
        };
        let mut links = [&a, &b]
            .into_iter()
            .filter_map(|end| Some((end, accepted(end)?)));
        let (end, link) = links.next().expect("an accepted link");
        end.ep.shared().apply_event(|core, io| {
            let port = io.port_mut(link).unwrap();
            // as before ATTACH
            port.attached = false;
            let (old, address) = (port.circuit.take().unwrap(), port.address);
            io.leave_circuit(old, link);
            let xrc = io.xrc.as_mut().unwrap();
            let Choice::Dial(circuit, _) = xrc.circuits.dial(link, address, true) else {
                panic!("not dialled");
            };
            io.port_mut(link).unwrap().circuit = Some(circuit);
            let rejection = Rejection {
                version: VERSION,
                epoch: None,
                id: io.xrc.as_ref().unwrap().id,
                newest: None,
                reason,
            };
            io.circuit_rejected(core, circuit, &rejection.encode(), Failure::Refused);
            let repeats = io.xrc.as_ref().unwrap().retries.len();
            assert_eq!(
                (repeats, io.links.ends(link)),
                (usize::from(!ends), ends),
                "{reason:?}"
            );
        });
    }
    exchange(&a, &b);
}

/// The device assigns the number of a target that was being opened to a new one: the links through
/// the first one, which has ended, end.
#[test]
fn links_through_a_target_end_with_its_number() {
    let [a, b] = pair();
    let link = link_of(&b);
    b.ep.shared().apply_event(|_, io| {
        let number = io.port_mut(link).unwrap().from.unwrap();
        let held = io.xrc.as_mut().unwrap().targets.get_mut(&number).unwrap();
        assert!(held.links.contains(&link));
        let (cm, of) = (Arc::clone(&held.cm), held.of.unwrap());
        let target = held.target.take().unwrap();
        // as the first one, which acknowledges nothing
        target.set_error().unwrap();
        let node = io.xrc.as_ref().unwrap().node;
        let request = CircuitRequest {
            number: of.number,
            id: of.peer,
            auth: 0,
            node,
            initiator: of.initiator,
        };
        assert!(io.add_target(&cm, &target, &request).is_some());
        let silenced = |todo: &Todo| matches!(todo, Todo::Silenced(of) if *of == link);
        assert_eq!(io.todo.iter().filter(|todo| silenced(todo)).count(), 1);
    });
    exchange(&a, &b);
}

/// The connection manager has no part in a circuit that is up: no identifier of it is left.
#[test]
fn circuits_that_are_up_have_no_identifiers() {
    let ends = [(); 2].map(|()| open_at(&Node::new().process(), None));
    let identifiers = |end: &End| end.ep.shared().driver().dispatcher().registry().targets();
    let before = ends.each_ref().map(identifiers);
    exchange(&ends[0], &ends[1]);
    let limit = Instant::now() + LIMIT;
    while ends.each_ref().map(identifiers) != before {
        assert!(ends.iter().all(|end| end.poll().is_none()));
        let found = ends.each_ref().map(identifiers);
        assert!(Instant::now() < limit, "{before:?} {found:?}");
    }
    exchange(&ends[0], &ends[1]);
}

/// A link ends, and the next one follows, although other peers keep the endpoint busy.
#[test]
fn links_end_although_no_poll_finds_everything_empty() {
    Transport::each(|transport| {
        let domain = domain();
        let [a, b] = [(); 2].map(|()| End::with(&domain, transport.config(), 0));
        exchange(&a, &b);
        b.state(|state| state.busy = true);
        let begin = Instant::now();
        for _ in 0..3 {
            let link = link_of(&b);
            b.ep.shared().apply_event(|core, io| core.broken(link, io));
            exchange(&a, &b);
        }
        // each of them would wait for at least the limit of the connection
        assert!(begin.elapsed() < LIMIT / 2, "{:?}", begin.elapsed());
    });
}
