//! Evictions step by step, of a peer with two links: the out-link of each side is its own.

use super::*;

impl Scene {
    /// An idle peer with two links: the accepted one, which is the out-link, and the own one.
    fn with_two_links() -> (Self, LinkKey, LinkKey) {
        Self::new().dialled_by_both()
    }

    fn dialled_by_both(self) -> (Self, LinkKey, LinkKey) {
        let mut it = self;
        it.send(it.peer, 1);
        it.request(1, None);
        let accepted = it.hello(1, 0);
        it.core.sent(accepted, Number::new(0), &mut it.acts);
        let own = it.reply();
        it.settle(accepted);
        assert_eq!((it.core.links_to(it.peer), it.acts.ups.len()), (2, 1));
        (it, accepted, own)
    }

    /// The last packet: its link, and what it says about the end of the links.
    fn last_close(&self) -> (LinkKey, Option<Close>) {
        let (link, packet) = self.acts.packets.last().expect("a packet");
        match packet.body {
            Body::Close(close) => (*link, Some(close)),
            _ => (*link, None),
        }
    }

    /// Both links have ended, in an order; the next operation dials at once.
    fn expect_eviction(mut self, first: LinkKey, second: LinkKey) {
        assert_eq!(self.acts.ends.len(), 2);
        self.core.ended(first, &mut self.acts);
        self.core.ended(second, &mut self.acts);
        self.core.flush(&mut self.acts);
        assert_eq!(self.core.links_to(self.peer), 0);
        self.send(self.peer, 2);
        assert_eq!(self.acts.dials.len(), 2);
        assert!(self.acts.failed.is_empty() && self.acts.completed == [(1, Ok(()))]);
    }
}

#[test]
fn both_links_of_an_idle_peer_end() {
    let (mut it, accepted, own) = Scene::with_two_links();
    assert!(it.core.evict(it.peer, &mut it.acts));
    assert_eq!(it.last_close(), (accepted, Some(Close::Ask)));
    assert_eq!(it.acts.downs, [accepted]);
    it.packet(accepted, 0, 99, Body::Close(Close::Accept));
    it.expect_eviction(own, accepted);
}

/// On circuits: CLOSE concerns both links of a peer, which may use the keys of this side on the
/// other one. Notices of revocations are held back on both before CLOSE is posted, and posted again
/// if there was no room for CLOSE, if the peer refuses, or if the link of CLOSE breaks.
#[test]
fn notices_are_held_back_on_both_links() {
    for answer in [Some(Close::Accept), Some(Close::Refuse), None] {
        let (mut it, accepted, own) = Scene::on_circuits().dialled_by_both();
        it.acts.crowded = vec![accepted];
        assert!(!it.core.evict(it.peer, &mut it.acts) && it.acts.held.is_empty());
        it.acts.crowded.clear();
        assert!(it.core.evict(it.peer, &mut it.acts));
        let held = |it: &Scene| [accepted, own].map(|link| it.acts.held.contains(&link));
        assert_eq!(held(&it), [true; 2]);
        match answer {
            Some(answer) => it.packet(accepted, 0, 99, Body::Close(answer)),
            None => it.core.broken(accepted, &mut it.acts),
        }
        // nothing more is posted to a link that ends
        let expected = match answer {
            Some(Close::Accept) => [true; 2],
            Some(_) => [false; 2],
            None => [true, false],
        };
        assert_eq!(held(&it), expected, "{answer:?}");
    }
}

/// On circuits: the peer leaves, and there is no room for the answer. It accepts nothing more.
#[test]
fn nothing_is_released_for_a_peer_that_leaves() {
    let (mut it, accepted, own) = Scene::on_circuits().dialled_by_both();
    it.acts.crowded = vec![accepted, own];
    it.acts.released.clear();
    it.packet(accepted, 0, 99, Body::Close(Close::End));
    assert_eq!(it.acts.ends.len(), 2);
    assert_eq!(it.acts.released, []);
}

#[test]
fn a_peer_asks_on_its_own_out_link() {
    let (mut it, accepted, own) = Scene::with_two_links();
    it.packet(own, 0, 99, Body::Close(Close::Ask));
    assert_eq!(it.last_close(), (own, Some(Close::Accept)));
    assert_eq!(it.acts.downs, [accepted]);
    // nothing is posted meanwhile
    let posts = it.acts.posts;
    it.send(it.peer, 3);
    assert_eq!((it.acts.posts, it.acts.dials.len()), (posts, 1));
    // the peer disconnects one link; the request of the other one is lost
    it.core.broken(own, &mut it.acts);
    assert_eq!(it.acts.ends.len(), 2);
    it.core.ended(own, &mut it.acts);
    it.core.ended(accepted, &mut it.acts);
    assert_eq!(it.acts.dials.len(), 2);
}

#[test]
fn a_disconnect_request_is_not_awaited_for_ever() {
    let (mut it, accepted, own) = Scene::with_two_links();
    it.packet(own, 0, 99, Body::Close(Close::Ask));
    it.core.set_now(1_000_000_000);
    it.core.tick(&mut it.acts);
    it.expect_eviction(accepted, own);
}

#[test]
fn both_sides_ask_on_their_out_links() {
    let (mut it, accepted, own) = Scene::with_two_links();
    assert!(it.core.evict(it.peer, &mut it.acts));
    it.packet(own, 0, 99, Body::Close(Close::Ask));
    it.expect_eviction(accepted, own);
}

#[test]
fn an_endpoint_with_operations_refuses_on_the_link_of_the_question() {
    let (mut it, accepted, own) = Scene::with_two_links();
    it.send(it.peer, 2);
    it.packet(own, 0, 99, Body::Close(Close::Ask));
    assert_eq!(it.last_close(), (own, Some(Close::Refuse)));
    assert!(it.acts.ends.is_empty() && it.acts.downs.is_empty());
    // the out-link is used as before
    let posts = it.acts.posts;
    it.send(it.peer, 3);
    assert_eq!(it.acts.posts, posts + 1);
    it.core.sent(accepted, Number::new(2), &mut it.acts);
    assert_eq!(it.acts.completed.len(), 3);
}

/// Another link is asked before the one whose peer has refused.
#[test]
fn a_link_whose_eviction_was_refused_counts_as_used() {
    let (mut it, accepted, _) = Scene::with_two_links();
    it.core.set_now(5);
    it.core.make_room(&mut it.acts);
    assert_eq!(it.last_close(), (accepted, Some(Close::Ask)));
    it.core.set_now(1_000);
    it.packet(accepted, 0, 99, Body::Close(Close::Refuse));
    let used = it.core.links.get(accepted).expect("a link").used;
    assert_eq!(used, 1_000);
}

const MS: u64 = 1_000_000;

impl Scene {
    fn at_time(&mut self, time: u64) {
        self.core.set_now(time);
        self.core.tick(&mut self.acts);
    }
}

/// CLOSE (demand) is lost with its link, and with it the only *processed* of a packet with ACK.
#[test]
fn an_acknowledgement_by_a_lost_demand_is_repeated() {
    let (mut it, accepted, own) = Scene::with_two_links();
    it.send(it.peer, 2);
    (it.acts.full, it.acts.rma) = (true, true);
    let other = it.core.peer_at(place(3)).expect("a peer");
    it.send(other, 5);
    it.at_time(52 * MS);
    let message = Message {
        ack: true,
        ..Message::default()
    };
    let payload = Payload { offset: 32, len: 8 };
    it.packet(own, 0, 99, Body::Eager { message, payload });
    it.core.flush(&mut it.acts);
    it.acts.rma = false;
    it.at_time(54 * MS);
    assert_eq!(it.last_close(), (accepted, Some(Close::Demand)));
    it.core.sent(accepted, Number::new(1), &mut it.acts);
    assert_eq!((it.acts.completed.len(), it.core.owes()), (2, false));
    it.end(accepted);
    // the other link is ended in order to dial
    assert_eq!(it.acts.ends, [accepted, own]);
}
