//! Turns of peers on circuits, step by step. Peers whose ports have the same tens are on one node.

use super::*;

const MS: u64 = 1_000_000;

impl Scene {
    /// A peer on a circuit with a message under way, and operations for others, at these ports.
    fn with_crowd(places: usize, ports: &[u16]) -> (Self, LinkKey) {
        let mut it = Self::on_circuits();
        it.acts.places = places;
        it.send(it.peer, 1);
        let link = it.reply();
        it.settle(link);
        assert_eq!((it.acts.posts, it.acts.completed.len()), (1, 0));
        for port in ports {
            let other = it.core.peer_at(place(*port)).expect("a peer");
            it.send(other, (*port).into());
        }
        (it, link)
    }

    fn tick(&mut self, time: u64) {
        self.core.set_now(time);
        self.core.tick(&mut self.acts);
    }

    fn posted_closes(&self) -> Vec<(LinkKey, Close)> {
        let close = |(link, packet): &(LinkKey, Packet)| match packet.body {
            Body::Close(close) => Some((*link, close)),
            _ => None,
        };
        self.acts.packets.iter().filter_map(close).collect()
    }

    /// Both halves of a link, which no side uses any more, have ended.
    fn halves_ended(&mut self, link: LinkKey) {
        assert_eq!(self.acts.ends, [link]);
        self.core.half_ended(link, &mut self.acts);
        assert_eq!(self.acts.closes, [link]);
        self.core.ended(link, &mut self.acts);
    }

    /// The peer rejects the last dial.
    fn reject_dial(&mut self, reason: Reason) {
        let (link, request) = *self.acts.dials.last().expect("a dial");
        let rejection = Rejection {
            version: VERSION,
            epoch: Some(request.epoch),
            id: id(2),
            newest: None,
            reason,
        };
        let private_data = rejection.encode();
        self.core.rejected(link, &private_data, &mut self.acts);
    }

    /// The ports of the peers that were dialled.
    fn dialled_ports(&self) -> Vec<u16> {
        let dials = self.acts.dials.iter();
        let peers = dials.filter_map(|(link, _)| self.core.peer_of(*link));
        let addresses = peers.filter_map(|peer| self.core.address(peer));
        addresses.map(|address| address.port()).collect()
    }
}

#[test]
fn the_places_of_a_busy_peer_are_demanded_for_another_node() {
    let (mut it, link) = Scene::with_crowd(2, &[23]);
    it.tick(49 * MS);
    assert_eq!((it.acts.dials.len(), it.acts.downs.len()), (1, 0));
    it.tick(52 * MS);
    assert_eq!(it.posted_closes(), [(link, Close::Demand)]);
    it.packet(link, 0, 99, Body::Close(Close::Accept));
    it.halves_ended(link);
    it.tick(54 * MS);
    assert_eq!(it.dialled_ports(), [23]);
    assert!(it.acts.failed.is_empty());
}

#[test]
fn peers_of_one_node_share_the_place_of_its_circuit() {
    // the circuit and two targets
    let (mut it, link) = Scene::with_crowd(3, &[3, 4]);
    assert_eq!(it.dialled_ports(), [2, 3]);
    it.tick(52 * MS);
    assert_eq!(it.posted_closes(), [(link, Close::Demand)]);
    it.packet(link, 0, 99, Body::Close(Close::Accept));
    it.halves_ended(link);
    // a request has precedence over a second dial
    it.tick(54 * MS);
    assert_eq!(it.dialled_ports(), [3]);
    it.request_of(7, 1);
    assert_eq!((it.acts.accepts.len(), it.acts.rejects.len()), (1, 0));
}

#[test]
fn a_demand_is_accepted_and_both_halves_end() {
    let (mut it, link) = Scene::with_crowd(8, &[]);
    it.acts.rma = true;
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    it.send(it.peer, 2);
    assert_eq!((it.posted_closes(), it.acts.posts), (vec![], 1));
    it.acts.rma = false;
    it.tick(MS);
    assert_eq!(it.posted_closes(), [(link, Close::Accept)]);
    it.halves_ended(link);
    // what has not arrived is repeated on the next link
    assert_eq!(it.dialled_ports(), [2]);
    it.reply_with(0);
    assert_eq!((it.acts.posts, it.core.violations), (3, 0));
}

#[test]
fn demands_of_both_sides_meet_on_circuits() {
    let (mut it, link) = Scene::with_crowd(2, &[23]);
    it.tick(52 * MS);
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    assert_eq!(it.posted_closes(), [(link, Close::Demand)]);
    it.halves_ended(link);
    assert_eq!((it.dialled_ports(), it.core.violations), (vec![23], 0));
}

/// A circle of endpoints that wait for each other with all their places is broken by the order of
/// their ids.
#[test]
fn a_request_waits_if_its_places_are_not_those_of_a_dial() {
    for (places, waits) in [(2, false), (3, true)] {
        let mut it = Scene::on_circuits();
        it.acts.places = places;
        // one node
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 1);
        it.request_of(7, 1);
        let answers = (it.acts.accepts.len(), it.acts.rejects.len());
        assert_eq!(answers, if waits { (1, 0) } else { (0, 1) }, "{places}");
    }
}

/// A dialler gives its request up after 3 s, and nothing reports that to the acceptor: a link of
/// this request would have the places for the 2 s in which HELLO is awaited.
#[test]
fn a_request_that_has_waited_until_its_dialler_gave_it_up_gets_no_place() {
    for (time, late) in [(2_999, false), (3_000, true)] {
        let mut it = Scene::on_circuits();
        it.acts.full = true;
        it.send(it.peer, 1);
        it.request(1, None);
        while let Some(next) = it.core.deadline().filter(|at| *at < time * MS) {
            it.tick(next);
        }
        assert_eq!((it.acts.dials.len(), it.acts.rejects.len()), (0, 0));
        it.acts.full = false;
        it.tick(time * MS);
        if late {
            // the place is that of a dial
            assert_eq!((it.dialled_ports(), it.acts.accepts.len()), (vec![2], 0));
            assert_eq!(it.acts.rejects[0].reason, Reason::Busy);
            it.request(2, None);
            let up = it.hello(2, 0);
            assert_eq!(it.core.out_link(it.peer), Some(up));
        } else {
            assert_eq!((it.acts.dials.len(), it.acts.accepts.len()), (0, 1));
        }
        assert!(it.acts.failed.is_empty());
    }
}

/// A peer whose dial is rejected gets the next place before those that have begun to wait later,
/// unless its dials had a place for long.
#[test]
fn a_peer_that_is_busy_keeps_its_position() {
    for (time, order) in [(1, [2, 3]), (500, [2, 3]), (501, [3, 2])] {
        let mut it = Scene::new();
        it.send(it.peer, 1);
        it.acts.full = true;
        it.core.set_now(MS / 2);
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 2);
        it.core.set_now(time * MS);
        it.reject_dial(Reason::Busy);
        it.tick((time + 2) * MS);
        assert_eq!(it.acts.dials.len(), 1);
        it.acts.full = false;
        it.tick((time + 4) * MS);
        assert_eq!(it.dialled_ports(), order, "{time}");
    }
}

/// A peer of the session has a position although its request is rejected.
#[test]
fn a_rejected_request_of_the_session_gives_a_position() {
    for session in [true, false] {
        let mut it = Scene::new();
        it.acts.places = 1;
        let mut token = None;
        if session {
            it.send(it.peer, 1);
            token = Some(it.acts.dials[0].1.gives);
            let link = it.reply();
            it.core.sent(link, Number::new(0), &mut it.acts);
            it.end(link);
        }
        // the place is that of a dial, and the id of the peer is the greater one
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 2);
        it.acts.full = true;
        it.request(1, token);
        assert_eq!(it.acts.rejects[0].reason, Reason::Busy);
        it.core.set_now(MS / 2);
        let third = it.core.peer_at(place(4)).expect("a peer");
        it.send(third, 3);
        it.core.set_now(MS);
        it.send(it.peer, 4);
        it.reject_dial(Reason::Foreign);
        it.acts.full = false;
        it.tick(3 * MS);
        let first = if session { 2 } else { 4 };
        assert_eq!(it.dialled_ports(), [first], "{session}");
    }
}

/// Nothing states that a dialler has ended its link before the reply.
#[test]
fn the_places_of_a_link_without_hello_are_given_to_others() {
    let mut it = Scene::on_circuits();
    it.acts.places = 2;
    it.request(1, None);
    let (link, Reply { gives, .. }) = it.acts.accepts[0];
    it.core.accepted(link);
    let other = it.core.peer_at(place(23)).expect("a peer");
    it.send(other, 1);
    it.tick(249 * MS);
    assert_eq!(it.acts.ends, []);
    it.tick(252 * MS);
    assert_eq!(it.acts.ends, [link]);
    it.core.half_ended(link, &mut it.acts);
    it.tick(254 * MS);
    assert_eq!(it.dialled_ports(), [23]);
    it.reject_dial(Reason::Foreign);

    // HELLO was late: the next one is awaited for the whole time
    it.hello(1, 0);
    it.request(2, Some(gives));
    assert_eq!(it.acts.closes, [link]);
    it.core.ended(link, &mut it.acts);
    let (link, _) = it.acts.accepts[1];
    it.core.accepted(link);
    it.send(other, 2);
    it.tick((254 + 1_999) * MS);
    assert_eq!(it.acts.ends.len(), 1);
    it.tick((254 + 2_000) * MS);
    assert_eq!(it.acts.ends[1..], [link]);
}

#[test]
fn hello_is_awaited_while_no_other_peer_waits() {
    let mut it = Scene::on_circuits();
    it.acts.places = 2;
    it.request(1, None);
    let (link, _) = it.acts.accepts[0];
    it.core.accepted(link);
    it.tick(1_999 * MS);
    assert_eq!(it.acts.ends, []);
    it.tick(2_000 * MS);
    assert_eq!(it.acts.ends, [link]);
}

impl Scene {
    /// An idle peer on a circuit whose link has no room, and that link.
    fn with_crowded_link(places: usize) -> (Self, LinkKey) {
        let mut it = Self::on_circuits();
        it.acts.places = places;
        it.send(it.peer, 1);
        let link = it.reply();
        it.core.sent(link, Number::new(0), &mut it.acts);
        it.settle(link);
        assert_eq!(it.acts.completed, [(1, Ok(()))]);
        it.acts.crowded.push(link);
        (it, link)
    }
}

/// CLOSE to the peer that is idle for longest finds no room: the next one is asked.
#[test]
fn an_idle_link_without_room_does_not_delay_evictions() {
    let (mut it, _) = Scene::with_crowded_link(4);
    let busy = it.core.peer_at(place(13)).expect("a peer");
    it.send(busy, 2);
    let link = it.reply_of(id(3), 0);
    let waits = it.core.peer_at(place(23)).expect("a peer");
    it.send(waits, 3);
    it.tick(52 * MS);
    assert_eq!(it.posted_closes(), [(link, Close::Demand)]);
    assert_eq!(it.acts.downs, [link]);
}

#[test]
fn the_only_link_is_evicted_although_it_has_no_room() {
    let (mut it, link) = Scene::with_crowded_link(2);
    let waits = it.core.peer_at(place(23)).expect("a peer");
    it.send(waits, 3);
    it.tick(52 * MS);
    assert_eq!(
        (it.posted_closes(), &it.acts.downs[..]),
        (vec![], &[link][..])
    );
    while let Some(next) = it.core.deadline().filter(|at| *at < 1_000 * MS) {
        it.tick(next);
    }
    assert_eq!(it.acts.ends, [link]);
    it.core.half_ended(link, &mut it.acts);
    it.tick(1_000 * MS);
    assert_eq!(it.dialled_ports().last(), Some(&23));
}
