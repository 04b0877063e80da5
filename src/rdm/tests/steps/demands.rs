//! Evictions of links in use, step by step.

use super::*;

const MS: u64 = 1_000_000;

impl Scene {
    /// A peer with a link on which a message is under way, and an operation for another peer that
    /// finds no place. The link has had its turn.
    fn with_link_in_use() -> (Self, LinkKey, PeerKey) {
        let mut it = Self::new();
        it.send(it.peer, 1);
        let link = it.reply();
        it.settle(link);
        assert_eq!((it.acts.posts, it.acts.completed.len()), (1, 0));
        it.acts.full = true;
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 5);
        it.at(49 * MS);
        assert_eq!((it.acts.dials.len(), it.acts.downs.len()), (1, 0));
        (it, link, other)
    }

    fn at(&mut self, time: u64) {
        self.core.set_now(time);
        self.core.tick(&mut self.acts);
    }

    fn closes(&self) -> Vec<(LinkKey, Close)> {
        let close = |(link, packet): &(LinkKey, Packet)| match packet.body {
            Body::Close(close) => Some((*link, close)),
            _ => None,
        };
        self.acts.packets.iter().filter_map(close).collect()
    }

    /// The link has ended, and has left its place.
    fn ended(&mut self, link: LinkKey) {
        assert_eq!(self.acts.ends, [link]);
        self.core.ended(link, &mut self.acts);
        self.acts.full = false;
        self.at(self.core.now + MS);
    }
}

#[test]
fn the_place_of_a_link_in_use_is_demanded_after_its_turn() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.at(52 * MS);
    assert_eq!(
        (it.closes(), &it.acts.downs),
        (vec![(link, Close::Demand)], &vec![link])
    );
    // nothing is posted meanwhile
    it.send(it.peer, 2);
    assert_eq!(it.acts.posts, 1);
    it.packet(link, 0, 99, Body::Close(Close::Accept));
    // the peer that has waited dials first, then the evicted one, without a pause
    it.core.ended(link, &mut it.acts);
    assert_eq!(it.acts.dials.len(), 1);
    it.acts.full = false;
    it.at(54 * MS);
    let ports: Vec<_> = it.acts.dials.iter().map(|dial| dial.0).collect();
    let peers = ports.iter().map(|link| it.core.peer_of(*link));
    assert_eq!(peers.collect::<Vec<_>>()[1..].len(), 2);
    assert_ne!(it.core.peer_of(ports[1]), Some(it.peer));
    assert_eq!(it.core.peer_of(ports[2]), Some(it.peer));
    assert!(it.acts.failed.is_empty());
    // what has not arrived is repeated on the next link
    let link = it.reply_with(0);
    assert_eq!((it.acts.posts, it.acts.ups.len()), (3, 2));
    it.core.sent(link, Number::new(1), &mut it.acts);
    assert_eq!(it.acts.completed, [(1, Ok(())), (2, Ok(()))]);
}

#[test]
fn a_demand_follows_rma_that_is_under_way() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.acts.rma = true;
    it.at(52 * MS);
    assert_eq!((it.closes(), it.acts.downs.len()), (vec![], 1));
    it.at(300 * MS);
    assert_eq!(it.closes(), []);
    it.acts.rma = false;
    it.at(302 * MS);
    assert_eq!(it.closes(), [(link, Close::Demand)]);
    // no answer
    it.at(1_303 * MS);
    it.ended(link);
}

#[test]
fn a_link_with_long_rma_stays() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.acts.rma = true;
    it.at(52 * MS);
    it.send(it.peer, 2);
    it.at(552 * MS);
    assert_eq!((it.closes(), it.acts.ends.len()), (vec![], 0));
    assert_eq!((it.acts.ups.len(), it.acts.posts), (2, 2));
    // and has another turn
    it.at(600 * MS);
    assert_eq!(it.acts.downs, [link]);
    it.at(610 * MS);
    assert_eq!(it.acts.downs, [link, link]);
}

#[test]
fn a_peer_that_refuses_is_asked_again_after_a_turn() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.at(52 * MS);
    it.packet(link, 0, 99, Body::Close(Close::Refuse));
    it.send(it.peer, 2);
    assert_eq!((it.acts.ups.len(), it.acts.posts), (2, 2));
    it.at(90 * MS);
    assert_eq!(it.closes().len(), 1);
    it.at(104 * MS);
    assert_eq!(it.closes().len(), 2);
}

#[test]
fn a_demand_is_accepted_when_rma_has_completed() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.acts.rma = true;
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    it.send(it.peer, 2);
    assert_eq!(
        (it.closes(), it.acts.posts, it.acts.downs.len()),
        (vec![], 1, 1)
    );
    it.acts.rma = false;
    it.at(51 * MS);
    assert_eq!(it.closes(), [(link, Close::Accept)]);
    // the peer disconnects
    it.core.broken(link, &mut it.acts);
    it.ended(link);
    assert_eq!(it.acts.dials.len(), 3);
}

/// CLOSE is read by a call of the application, long after the last event.
#[test]
fn the_limits_of_an_eviction_begin_when_close_is_read() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.acts.rma = true;
    it.acts.clock = Some(2_000 * MS);
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    it.at(2_499 * MS);
    assert_eq!(it.closes(), []);
    it.at(2_500 * MS);
    assert_eq!(it.closes(), [(link, Close::Refuse)]);
    it.acts.rma = false;
    it.acts.clock = Some(4_000 * MS);
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    assert_eq!(it.closes().last(), Some(&(link, Close::Accept)));
    it.at(4_999 * MS);
    assert_eq!(it.acts.ends, []);
    it.at(5_000 * MS);
    assert_eq!(it.acts.ends, [link]);
}

#[test]
fn a_demand_is_refused_after_a_while() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.acts.rma = true;
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    it.send(it.peer, 2);
    it.at(548 * MS);
    assert_eq!(it.closes(), []);
    it.at(549 * MS);
    assert_eq!(it.closes(), [(link, Close::Refuse)]);
    assert_eq!((it.acts.ups.len(), it.acts.posts), (2, 2));
}

#[test]
fn demands_of_both_sides_meet() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.at(52 * MS);
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    assert_eq!((it.closes().len(), &it.acts.ends), (1, &vec![link]));
    // this side drains, and answers instead of asking
    let (mut it, link, _) = Scene::with_link_in_use();
    it.acts.rma = true;
    it.at(52 * MS);
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    it.acts.rma = false;
    it.at(53 * MS);
    assert_eq!(it.closes(), [(link, Close::Accept)]);
    assert_eq!((it.acts.downs.len(), it.core.violations), (1, 0));
}

#[test]
fn a_peer_that_has_accepted_ends_the_link_without_the_other_side() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    it.at(1_048 * MS);
    assert!(it.acts.ends.is_empty());
    it.at(1_050 * MS);
    it.ended(link);
}

/// A peer whose answers do not come is dialled after a pause, which grows; a new operation ends it.
#[test]
fn links_on_which_nothing_passes_have_pauses_between_them() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let first = it.reply();
    it.core.sent(first, Number::new(0), &mut it.acts);
    it.core.hold(it.peer, &mut it.acts);
    let mut time = 0;
    for pause in [100, 200, 400, 800, 1_600, 3_200, 3_200].map(|ms| ms * MS) {
        let dials = it.acts.dials.len();
        let link = match dials {
            1 => {
                // its link has been used: it is replaced without a pause
                it.end(first);
                it.reply_with(1)
            }
            _ => it.reply_with(1),
        };
        it.acts.ends.clear();
        it.packet(link, 0, 99, Body::Close(Close::Demand));
        it.core.broken(link, &mut it.acts);
        it.core.ended(link, &mut it.acts);
        let dials = it.acts.dials.len();
        it.at(time + pause - MS);
        assert_eq!(it.acts.dials.len(), dials);
        time += pause;
        it.at(time);
        assert_eq!(it.acts.dials.len(), dials + 1, "{pause}");
    }
    let link = it.reply_with(1);
    it.packet(link, 0, 99, Body::Close(Close::Demand));
    it.end(link);
    let dials = it.acts.dials.len();
    it.send(it.peer, 2);
    assert_eq!(it.acts.dials.len(), dials + 1);
}

/// With one place a request waits for it, and gets it before operations of this side that are
/// later.
#[test]
fn a_request_waits_for_a_place() {
    let (mut it, link, _) = Scene::with_link_in_use();
    it.request_of(7, 1);
    assert!(it.acts.rejects.is_empty() && it.acts.accepts.is_empty());
    it.at(52 * MS);
    it.packet(link, 0, 99, Body::Close(Close::Accept));
    it.ended(link);
    assert_eq!(it.acts.accepts.len(), 1);
}
