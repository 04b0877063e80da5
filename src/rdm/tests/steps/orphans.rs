//! The end of a session on circuits, step by step, and what its links outlive it for.

use super::*;
use crate::verbs::QpNumber;
use crate::wire::rdm::packet::Attach;
use crate::wire::rdm::xrc::CircuitNumber;

impl Scene {
    /// A session on circuits that ends while its link waits for ATTACH, because the peer does not
    /// answer.
    fn with_orphan() -> (Self, LinkKey) {
        Self::on_circuits().end_with_orphan()
    }

    fn end_with_orphan(self) -> (Self, LinkKey) {
        let mut it = self;
        it.send(it.peer, 1);
        let own = it.reply();
        it.send(it.peer, 2);
        it.core.broken(own, &mut it.acts);
        it.core.half_ended(own, &mut it.acts);
        it.acts.packets.clear();
        let mut time = 0;
        while it.acts.failed.is_empty() {
            time += 100_000_000;
            it.core.set_now(time);
            it.core.tick(&mut it.acts);
            let (link, _) = *it.acts.dials.last().expect("a dial");
            it.core.dial_failed(link, Failure::Silent, &mut it.acts);
        }
        assert_eq!(it.core.session(it.peer), None);
        assert_eq!((&it.acts.silences[..], it.core.link_count()), (&[][..], 1));
        it.core.check();
        (it, own)
    }

    fn attach(&mut self, link: LinkKey) {
        let number = QpNumber::new(1).expect("a number");
        let attach = Attach {
            circuit: CircuitNumber::FIRST,
            initiator: number,
            target: number,
        };
        self.packet(link, 0, 1, Body::Attach(attach));
    }

    fn message(&mut self, link: LinkKey, number: u32) {
        let payload = Payload { offset: 32, len: 8 };
        let message = Message::default();
        self.packet(link, number, 1, Body::Eager { message, payload });
    }
}

/// A SEND of the peer that has completed has arrived, although this side has ended the session. It
/// is delivered, and the target of the peer fails as soon as it is known.
#[test]
fn what_has_arrived_behind_attach_is_delivered_after_the_session() {
    let (mut it, own) = Scene::with_orphan();
    it.attach(own);
    assert_eq!(it.acts.silences, [own]);
    it.message(own, 0);
    // repeated, and one that is not the next
    it.message(own, 0);
    it.message(own, 2);
    assert_eq!((it.acts.delivered, it.acts.discarded), (1, 3));
    it.message(own, 1);
    assert_eq!(it.acts.delivered, 2);
    // no answer to an RTS would reach the peer
    let rts = Body::Rts {
        message: Message::default(),
        op: OpId::new(1),
        addr: RemoteAddr::NULL,
        len: 20_000,
        rkey: Rkey::default(),
    };
    it.packet(own, 2, 1, rts);
    assert_eq!((it.acts.delivered, it.acts.discarded), (2, 4));
    // no more than was granted: 4 slots
    for number in 3..40 {
        it.message(own, number);
    }
    assert_eq!(it.acts.delivered, 3);
    it.core.silenced(own, &mut it.acts);
    assert_eq!(it.acts.closes, [own]);
    it.core.ended(own, &mut it.acts);
    it.core.check();
    assert_eq!((it.core.link_count(), it.core.violations), (0, 0));
}

/// What such a message holds is charged to the host of a stranger, like what a session leaves.
#[test]
fn messages_of_the_orphan_of_a_stranger_are_charged_to_its_host() {
    let mut it = Scene::on_circuits();
    it.core.unkeep(it.peer);
    let (mut it, own) = it.end_with_orphan();
    assert!(it.core.hosts.is_empty());
    it.attach(own);
    let blocks = |it: &Scene| {
        it.core
            .hosts
            .values()
            .map(|host| host.left().0)
            .sum::<u32>()
    };
    let peer = it.peer;
    for number in 0..2 {
        it.message(own, number);
        it.core.check_hosts();
        let held = it.core.left();
        assert!(held != 0 && blocks(&it) == held, "{number}: {held}");
        let session = it
            .core
            .peers
            .get(peer)
            .expect("a peer")
            .session
            .wrapping_sub(1);
        it.core
            .give_back(Origin { peer, session }, Credit::new(held, 0));
        assert!(it.core.hosts.is_empty());
    }
    // a peer that the application names is no stranger
    it.core.keep(peer);
    it.message(own, 2);
    assert!(it.core.hosts.is_empty() && it.core.left() != 0);
    it.core.check();
}

/// The next reply states that the peer posts nothing more on earlier links. What has arrived on
/// them is before the next session.
#[test]
fn the_next_session_begins_when_the_orphan_has_ended() {
    let (mut it, own) = Scene::with_orphan();
    it.send(it.peer, 3);
    let (_, request) = *it.acts.dials.last().expect("a dial");
    assert!(request.fresh && it.acts.closes.is_empty());
    let next = it.reply();
    assert_eq!(
        (&it.acts.closes[..], it.acts.packets.len()),
        (&[own][..], 0)
    );
    it.message(own, 0);
    assert_eq!(it.acts.delivered, 1);
    it.core.ended(own, &mut it.acts);
    it.core.check();
    let (link, packet) = &it.acts.packets[0];
    assert!(matches!(packet.body, Body::Hello(_)) && *link == next);
    assert_eq!(it.acts.ups.last().expect("a link").0, next);
    // numbers of the next session are its own
    it.attach(next);
    it.message(next, 0);
    assert_eq!(it.acts.delivered, 2);
    assert_eq!((&it.acts.silences[..], it.core.violations), (&[][..], 0));
}

/// The peer begins the next session itself. That is no statement about the link.
#[test]
fn an_orphan_stays_open_in_a_session_that_the_peer_begins() {
    let (mut it, own) = Scene::with_orphan();
    it.request(1, None);
    let accepted = it.hello(1, 0);
    assert_eq!(it.core.session(it.peer), Some(id(2)));
    it.message(accepted, 0);
    it.attach(own);
    it.message(own, 0);
    it.message(accepted, 1);
    assert_eq!((it.acts.delivered, it.core.violations), (3, 0));
    assert_eq!(
        (&it.acts.silences[..], &it.acts.closes[..]),
        (&[own][..], &[][..])
    );
    it.core.silenced(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    it.core.check();
    assert_eq!(
        (it.core.link_count(), it.core.session(it.peer)),
        (1, Some(id(2)))
    );
}

/// ATTACH arrives while the requests of the session that ends are being flushed.
#[test]
fn attach_at_the_end_of_a_session_shows_the_target_that_fails() {
    for attached in [false, true] {
        let mut it = Scene::on_circuits();
        it.send(it.peer, 1);
        let own = it.reply();
        if attached {
            it.attach(own);
        }
        // the peer violates the protocol, for the last time that a session permits
        it.core.content_violated(own, &mut it.acts);
        it.core.fail(it.peer, FiErrno::ECONNABORTED, &mut it.acts);
        assert_eq!(it.acts.failed, [FiErrno::ECONNABORTED]);
        if !attached {
            assert_eq!(it.acts.silences, []);
            it.attach(own);
        }
        assert!(it.acts.silences.contains(&own));
        it.core.half_ended(own, &mut it.acts);
        it.message(own, 0);
        assert_eq!(it.acts.delivered, 1);
        it.core.silenced(own, &mut it.acts);
        assert_eq!(it.acts.closes, [own]);
        it.core.ended(own, &mut it.acts);
        assert_eq!((it.core.session(it.peer), it.core.link_count()), (None, 0));
    }
}

/// The peer has ended the session, or its process has ended: nothing of it is under way.
#[test]
fn a_link_without_attach_closes_if_the_peer_has_no_session() {
    // its process has ended
    let (mut it, own) = Scene::with_orphan();
    it.send(it.peer, 3);
    let (link, _) = *it.acts.dials.last().expect("a dial");
    it.core.dial_failed(link, Failure::Refused, &mut it.acts);
    assert_eq!(it.acts.closes, [own]);
    // it states that it has ended the session
    let mut it = Scene::on_circuits();
    it.send(it.peer, 1);
    let own = it.reply();
    let (_, request) = it.acts.dials[0];
    it.fresh_request(1, request.gives);
    assert_eq!(it.acts.rejects[0].reason, Reason::Busy);
    it.core.half_ended(own, &mut it.acts);
    assert_eq!(
        (&it.acts.closes[..], it.acts.silences.len()),
        (&[own][..], 0)
    );
    it.core.ended(own, &mut it.acts);
    it.core.check();
    assert_eq!(it.core.link_count(), 0);
}

/// An endpoint that leaves reads nothing more.
#[test]
fn an_endpoint_that_leaves_closes_its_orphans() {
    let (mut it, own) = Scene::with_orphan();
    it.core.leave(&mut it.acts);
    assert_eq!(it.acts.closes, [own]);
    it.core.ended(own, &mut it.acts);
    assert_eq!(it.core.link_count(), 0);
}

/// The peer answers each request, and can never make its circuit: the links are ended without
/// ATTACH, again and again. That is no reason to dial it for longer than the connect timeout.
#[test]
fn a_peer_without_a_circuit_is_given_up() {
    const SECOND: u64 = 1_000_000_000;
    for attaches in [false, true] {
        let mut it = Scene::on_circuits();
        it.send(it.peer, 1);
        for round in 0..5 {
            let link = it.reply();
            for lingers in std::mem::take(&mut it.acts.closes) {
                it.core.ended(lingers, &mut it.acts);
            }
            assert_eq!(it.core.out_link(it.peer), Some(link), "{round}");
            if attaches {
                it.attach(link);
            }
            // the driver's limit
            it.core.set_now((round + 1) * 5 * SECOND);
            it.core.broken(link, &mut it.acts);
            it.core.half_ended(link, &mut it.acts);
            it.core.tick(&mut it.acts);
            if !it.acts.failed.is_empty() {
                assert_eq!((round, attaches), (1, false));
                break;
            }
        }
        let failed: &[_] = if attaches {
            &[]
        } else {
            &[FiErrno::EHOSTUNREACH]
        };
        assert_eq!(it.acts.failed, failed, "{attaches}");
        it.core.check();
    }
}

/// As above, of the side that has accepted the links and cannot make its circuit.
#[test]
fn an_acceptor_without_a_circuit_gives_up() {
    const SECOND: u64 = 1_000_000_000;
    let mut it = Scene::on_circuits();
    it.request(1, None);
    let (_, Reply { gives, .. }) = it.acts.accepts[0];
    let mut link = it.hello(1, 0);
    it.send(it.peer, 1);
    for round in 1..4_u32 {
        it.core.set_now(u64::from(round) * 5 * SECOND);
        it.request(round + 1, Some(gives));
        it.core.half_ended(link, &mut it.acts);
        for lingers in std::mem::take(&mut it.acts.closes) {
            it.core.ended(lingers, &mut it.acts);
        }
        it.core.tick(&mut it.acts);
        if !it.acts.failed.is_empty() {
            assert_eq!(round, 2);
            break;
        }
        link = it.hello(round + 1, 0);
    }
    assert_eq!(it.acts.failed, [FiErrno::EHOSTUNREACH]);
}
