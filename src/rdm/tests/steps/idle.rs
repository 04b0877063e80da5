//! Peers without links, and when they are freed.

use super::*;

const S: u64 = 1_000_000_000;

impl Scene {
    /// Calls the endpoint when it wants to be called, until this time. Dials have no answer, and
    /// links that it ends have ended at once.
    fn run_until(&mut self, time: u64) {
        self.run_dialling(time, true);
    }

    /// As above. `awaits`: the dials are passed to the connection manager, and end without an
    /// answer.
    fn run_dialling(&mut self, time: u64, awaits: bool) {
        while let Some(next) = self.core.deadline().filter(|next| *next <= time) {
            let (dials, ends) = (self.acts.dials.len(), self.acts.ends.len());
            self.core.set_now(next);
            self.core.tick(&mut self.acts);
            for (link, _) in self.acts.dials[dials..].iter().filter(|_| awaits) {
                self.core.requesting(*link);
            }
            for link in self.acts.ends.split_off(ends) {
                self.core.ended(link, &mut self.acts);
            }
        }
        self.core.set_now(time);
    }

    /// Another endpoint dials, says HELLO on its link, and this side ends the link.
    fn visit(&mut self, other: u64, ends: bool) {
        self.visit_from(other, place(100), ends);
    }

    fn request_from(&mut self, other: u64, from: Listener) {
        let request = Request {
            listener: from,
            id: id(other),
            auth: 0,
            epoch: epoch(1),
            ended: None,
            gives: Secret::new(7).expect("not 0"),
            shows: None,
            fresh: false,
        };
        self.core.requested((), &request.encode(), &mut self.acts);
    }

    fn visit_from(&mut self, other: u64, from: Listener, ends: bool) {
        let accepts = self.acts.accepts.len();
        self.request_from(other, from);
        let (link, reply) = self.acts.accepts[accepts];
        self.core.accepted(link);
        let terms = self.terms(0);
        let mut packet = |body| {
            let header = Header {
                number: Number::new(0),
                processed: Number::new(0),
                seen: GrantNumber::new(0),
                to: reply.terms.index,
            };
            let packet = Packet { header, body };
            self.core.arrived(link, &packet, (), &mut self.acts);
        };
        packet(Body::Hello(Box::new(Hello::new(
            epoch(1),
            terms,
            std::iter::empty(),
        ))));
        if ends {
            packet(Body::Close(Close::End));
        }
        self.core.broken(link, &mut self.acts);
        self.core.ended(link, &mut self.acts);
    }
}

/// Clients that come and go, each with an id and an address of its own, and close their endpoints.
#[test]
fn peers_whose_endpoints_close_are_freed_at_once() {
    let mut it = Scene::new();
    let before = it.core.unfreed();
    let receives = it.core.receives_needed(0);
    let mut most = 0;
    for client in 0..10_000 {
        let from = place(1000 + (client % 60_000) as u16);
        it.visit_from(100 + client, from, true);
        most = most.max(it.core.unfreed());
        let now = it.core.now;
        it.run_until(now + S);
    }
    // id, address, peer, token, and its place in the list
    assert_eq!((it.core.unfreed(), most - before), (before, 5));
    assert_eq!(it.core.receives_needed(0), receives);
    it.core.check();
}

/// As above, but they are killed.
#[test]
fn peers_without_links_are_freed_after_a_time() {
    let mut it = Scene::new();
    let before = it.core.unfreed();
    it.visit(100, false);
    it.run_until(IDLE.0 - S);
    assert_ne!(it.core.unfreed(), before);
    it.run_until(IDLE.0 + S);
    assert_eq!((it.core.unfreed(), it.core.deadline()), (before, None));
}

/// As above, and nothing listens at their addresses any more, which a dial shows.
#[test]
fn peers_that_are_killed_are_freed_after_a_refused_dial() {
    let mut it = Scene::new();
    let before = it.core.unfreed();
    let mut most = 0;
    for client in 0..2_000 {
        let from = place(1000 + client as u16);
        it.visit_from(100 + client, from, false);
        most = most.max(it.core.unfreed());
        let dials = it.acts.dials.len();
        it.run_until(it.core.now + 3 * S / 2);
        assert_eq!(it.acts.dials.len(), dials + 1);
        let (link, _) = it.acts.dials[dials];
        it.core.dial_failed(link, Failure::Refused, &mut it.acts);
        it.run_until(it.core.now + S);
    }
    assert_eq!((it.core.unfreed(), most - before), (before, 5));
    it.core.check();
}

/// As above, but their address does not answer: one dial, and their session stays for its time.
#[test]
fn peers_that_do_not_answer_are_dialled_once() {
    let mut it = Scene::new();
    let before = it.core.unfreed();
    it.visit(100, false);
    let dials = it.acts.dials.len();
    it.run_until(IDLE.0 - S);
    assert_ne!(it.core.unfreed(), before);
    assert_eq!(it.acts.dials.len(), dials + 1);
    it.run_until(IDLE.0 + S);
    assert_eq!((it.core.unfreed(), it.core.deadline()), (before, None));
}

/// As above, and nothing but the connect timeout ends the dial: on circuits, or with a short
/// timeout.
#[test]
fn a_question_without_an_answer_ends_no_session() {
    let mut it = Scene::new();
    it.visit(100, false);
    let dials = it.acts.dials.len();
    it.run_dialling(IDLE.0 - S, false);
    let peer = it.core.peer_at(place(100)).expect("a peer");
    assert_eq!(
        (&it.acts.failed[..], it.acts.dials.len()),
        (&[][..], dials + 1)
    );
    assert!(it.core.peers.get(peer).expect("a peer").begun);
    assert_eq!(it.core.link_count(), 0);
    it.core.check();
}

/// A hostile process makes requests, each with another id, and says no HELLO. The number of peers
/// is limited by what it can make in 30 s.
#[test]
fn requests_without_hello_leave_no_peer() {
    let mut it = Scene::new();
    let before = it.core.unfreed();
    let mut most = 0;
    for other in 0..5_000_u64 {
        let accepts = it.acts.accepts.len();
        let rejects = it.acts.rejects.len();
        it.request_from(1_000 + other, place(1_000 + other as u16));
        if let Some((link, _)) = it.acts.accepts.get(accepts).copied() {
            it.core.accepted(link);
            it.core.broken(link, &mut it.acts);
            it.core.ended(link, &mut it.acts);
        } else {
            assert_eq!(it.acts.rejects[rejects].reason, Reason::Busy);
        }
        most = most.max(it.core.peers.len());
        let now = it.core.now;
        it.run_until(now + S);
    }
    // the limit of the scene
    assert_eq!(most, 8);
    it.run_until(it.core.now + IDLE.1 + S);
    assert_eq!(it.core.unfreed(), before);
    // others are served
    it.visit(9_999, true);
}

/// A peer is not freed while a `fi_addr_t`, an operation or something outside of the core names it.
#[test]
fn peers_in_use_are_not_freed() {
    let mut it = Scene::new();
    let before = it.core.unfreed();
    it.visit(100, true);
    let peer = it.core.peer_at(place(100)).expect("a peer");
    it.core.keep(peer);
    it.run_until(200 * S);
    assert_eq!(it.core.peer_at(place(100)), Ok(peer));
    it.acts.names.push(peer);
    it.core.unkeep(peer);
    it.run_until(400 * S);
    assert_eq!(it.core.peer_at(place(100)), Ok(peer));
    it.acts.names.clear();
    it.run_until(800 * S);
    assert_eq!((it.core.unfreed(), it.core.deadline()), (before, None));
    // its key names nothing, also when the place is used again
    let next = it.core.peer_at(place(101)).expect("a peer");
    assert_eq!((next.place(), next == peer), (peer.place(), false));
    assert!(it.core.address(peer).is_none());
}

/// Sessions of peers that use one place, one after the other, have different numbers: credit of a
/// message is not given back to another peer.
#[test]
fn a_place_that_is_used_again_has_other_sessions() {
    let mut it = Scene::new();
    let mut sessions = std::collections::HashSet::new();
    let mut keys = std::collections::HashSet::new();
    for client in 0..600 {
        it.visit(100 + client, true);
        let peer = it.core.peer_at(place(100)).expect("a peer");
        keys.insert(peer);
        assert!(sessions.insert(it.core.peers.get(peer).expect("a peer").session));
        let now = it.core.now;
        it.run_until(now + S);
    }
    assert!(keys.len() < 600, "the keys have wrapped");
}

/// The peer has freed this side, which has its session still, and dials: it cannot show a token,
/// and this side dials with its own, so that both learn it.
#[test]
fn a_peer_that_has_freed_this_side_is_dialled() {
    let mut it = Scene::new();
    it.visit_from(2, place(2), false);
    it.run_until(S);
    assert!(it.core.peers.get(it.peer).expect("a peer").begun);
    assert_eq!(it.acts.dials.len(), 0);
    it.request(2, None);
    assert_eq!(it.acts.rejects.last().expect("one").reason, Reason::Known);
    let (link, request) = it.acts.dials[0];
    assert_eq!(request.shows, Secret::new(7));
    let other = Rejection {
        version: VERSION,
        epoch: Some(request.epoch),
        id: id(2),
        newest: None,
        reason: Reason::Other,
    };
    it.core.rejected(link, &other.encode(), &mut it.acts);
    // the next request is accepted
    let accepts = it.acts.accepts.len();
    it.request(3, None);
    assert_eq!(it.acts.accepts.len(), accepts + 1);
}

/// The peer has freed this side, and dials it, while this side has a link to it, of whose end it
/// has not learned. This side probes the link, and dials when that has broken.
#[test]
fn a_link_is_probed_if_the_peer_may_have_freed_this_side() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    it.settle(own);
    assert_eq!(it.acts.probes, []);
    it.request(1, None);
    assert_eq!(it.acts.rejects[0].reason, Reason::Known);
    assert_eq!((&it.acts.probes[..], it.acts.ends.len()), (&[own][..], 0));
    it.core.broken(own, &mut it.acts);
    it.end(own);
    let dials = it.acts.dials.len();
    it.request(2, None);
    assert_eq!(it.acts.rejects[1].reason, Reason::Known);
    let (_, request) = it.acts.dials[dials];
    assert!(request.shows.is_some() && !request.fresh);
}
