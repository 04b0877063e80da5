//! Further addresses, which HELLO states and only a dial proves.

use super::*;

impl Scene {
    /// The peer has a session, in which its HELLO states these addresses. Returns the link.
    fn states(&mut self, number: u32, shows: Option<Secret>, further: &[Listener]) -> LinkKey {
        self.request(number, shows);
        let (link, _) = *self.acts.accepts.last().expect("an accepted link");
        let terms = self.terms(0);
        let hello = Hello::new(epoch(number), terms, further.iter().copied());
        self.packet(link, 0, 1, Body::Hello(Box::new(hello)));
        self.core.flush(&mut self.acts);
        link
    }

    /// The peer answers the dial with this number that it has this endpoint's session.
    fn answers_known(&mut self, dial: usize) {
        let (link, request) = self.acts.dials[dial];
        let known = Rejection {
            version: VERSION,
            epoch: Some(request.epoch),
            id: id(2),
            newest: None,
            reason: Reason::Known,
        };
        self.core.rejected(link, &known.encode(), &mut self.acts);
    }

    /// The endpoint at this place requests a connection for the first time.
    fn is_requested_by(&mut self, number: u16) {
        let request = Request {
            listener: place(number),
            id: id(number.into()),
            auth: 0,
            epoch: epoch(1),
            ended: None,
            gives: Secret::new(9).expect("not 0"),
            shows: None,
            fresh: false,
        };
        let acts = &mut self.acts;
        self.core.requested((), &request.encode(), acts);
    }

    /// The address to which a dial leads.
    fn dialled_to(&self, dial: usize) -> Option<std::net::SocketAddr> {
        let peer = self.core.peer_of(self.acts.dials[dial].0);
        self.core.address(peer.expect("a dial"))
    }
}

/// The application uses an address that a peer has stated, long after the last event: the dial has
/// the connect timeout from then on.
#[test]
fn the_time_of_a_dial_begins_with_the_call_that_needs_it() {
    const S: u64 = 1_000_000_000;
    let mut it = Scene::new();
    let link = it.states(1, None, &[place(3)]);
    it.acts.clock = Some(20 * S);
    it.core.peer_at(place(3)).expect("a peer");
    it.core.flush(&mut it.acts);
    assert_eq!((it.acts.dials.len(), it.core.deadline()), (1, Some(30 * S)));
    // one that cannot be dialled yet
    it.acts.clock = Some(40 * S);
    it.core.end_link(link, &mut it.acts);
    it.send(it.peer, 1);
    assert_eq!(it.acts.dials.len(), 1);
    it.core.set_now(49 * S);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.completed, []);
    it.core.set_now(50 * S);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.completed, [(1, Err(FiErrno::EHOSTUNREACH))]);
}

#[test]
fn a_further_address_is_one_of_the_peer_when_the_peer_answers_there() {
    let mut it = Scene::new();
    // one that is being dialled, and one from which receives are posted
    let other = it.core.peer_at(place(3)).expect("a peer");
    it.send(other, 1);
    let third = it.core.peer_at(place(5)).expect("a peer");
    it.states(1, None, &[place(3), place(4), place(1), place(5)]);
    assert!(it.acts.ends.is_empty() && it.acts.posts == 0);
    assert_ne!(it.core.resolve(other), it.peer);
    it.answers_known(0);
    assert_eq!((it.core.resolve(other), it.acts.posts), (it.peer, 1));
    // HELLO is a reason to dial this one
    assert_eq!(it.acts.dials.len(), 2);
    assert_eq!(it.dialled_to(1), Some(place(5).socket_addr()));
    it.answers_known(1);
    assert_eq!(it.core.resolve(third), it.peer);
    // the first use is one for an address that HELLO has stated before
    let fourth = it.core.peer_at(place(4)).expect("a peer");
    assert!(fourth != it.peer && it.core.is_doubtful(fourth));
    it.core.flush(&mut it.acts);
    assert_eq!(it.dialled_to(2), Some(place(4).socket_addr()));
    it.answers_known(2);
    assert_eq!(it.core.resolve(fourth), it.peer);
    assert!(!it.core.is_doubtful(fourth));
    // this endpoint's own address stays its own
    let own = it.core.peer_at(place(1)).expect("a peer");
    it.send(own, 2);
    assert_eq!(it.acts.own, [2]);
}

#[test]
fn a_further_address_of_another_endpoint_is_dialled_without_a_link() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    it.is_requested_by(5);
    let (link, reply) = it.acts.accepts[0];
    let hello = Hello::new(epoch(1), it.terms(0), [place(2)]);
    let header = Header {
        to: reply.terms.index,
        ..Header::default()
    };
    let body = Body::Hello(Box::new(hello));
    it.core
        .arrived(link, &Packet { header, body }, (), &mut it.acts);
    assert_eq!(it.core.peer_at(place(2)), Ok(it.peer));
    it.end(own);
    assert_eq!(it.acts.dials.len(), 2);
}

/// A peer that states addresses of others gets none of their messages: neither those that wait, nor
/// later ones.
#[test]
fn a_peer_captures_no_address_of_others() {
    let mut it = Scene::new();
    let dialled = it.core.peer_at(place(3)).expect("a peer");
    it.send(dialled, 1);
    it.states(1, None, &[place(3), place(4)]);
    let unused = it.core.peer_at(place(4)).expect("a peer");
    it.send(unused, 2);
    assert_eq!((it.acts.posts, it.acts.dials.len()), (0, 2));
    // the endpoint at the first one replies, that at the second one dials
    let (link, request) = it.acts.dials[0];
    let reply = Reply {
        epoch: request.epoch,
        id: id(3),
        auth: 0,
        gives: Secret::new(8).expect("not 0"),
        ended: Some(epoch(1)),
        terms: it.terms(0),
    };
    it.core.replied(link, &reply.encode(), &mut it.acts);
    assert_eq!(it.acts.posts, 1);
    it.is_requested_by(4);
    let (link, _) = *it.acts.accepts.last().expect("an accepted link");
    assert_eq!(it.core.peer_of(link), Some(unused));
    assert_eq!(it.core.resolve(dialled), dialled);
}

/// A peer that states other addresses in each HELLO does not occupy more memory each time.
#[test]
fn a_peer_states_at_most_eight_further_addresses() {
    let mut it = Scene::new();
    let mut token = None;
    for number in 1..20 {
        let further: Vec<Listener> = (0..8).map(|at| place(100 + 8 * number + at)).collect();
        let link = it.states(number.into(), token, &further);
        token = Some(it.acts.accepts[0].1.gives);
        let mut found = it.core.addresses(it.peer);
        found.sort();
        let mut stated = vec![place(2).socket_addr()];
        stated.extend(further.iter().map(|at| at.socket_addr()));
        assert_eq!(found, stated);
        assert_eq!((it.core.further.len(), it.core.addresses.len()), (8, 1));
        it.end(link);
    }
}

/// Any endpoint can state the listening address of another one.
#[test]
fn the_address_of_a_connected_peer_is_no_source_of_another_one() {
    let mut it = Scene::new();
    it.states(1, None, &[]);
    let address = Some(place(2).socket_addr());
    assert_eq!(it.core.source_address(it.peer), address);
    let request = Request {
        listener: place(2),
        id: id(7),
        auth: 0,
        epoch: epoch(1),
        ended: None,
        gives: Secret::new(9).expect("not 0"),
        shows: None,
        fresh: false,
    };
    it.core.requested((), &request.encode(), &mut it.acts);
    let (link, _) = *it.acts.accepts.last().expect("an accepted link");
    let stranger = it.core.peer_of(link).expect("a peer");
    assert_ne!(stranger, it.peer);
    // it may be the successor of the peer, until a dial shows that the peer is still there
    assert_eq!(it.core.source_address(stranger), address);
    it.core.peers.get_mut(it.peer).expect("a peer").probe = false;
    assert_eq!(it.core.source_address(stranger), None);
    assert_eq!(it.core.source_address(it.peer), address);
}
