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

/// On circuits: the refusal of a question waits for room on its link when this side asks, or
/// demands, on its out-link. Both ask, and nothing is posted behind that.
#[test]
fn a_refusal_that_waits_for_room_is_not_posted_behind_a_question() {
    for asked in [Close::Ask, Close::Demand] {
        let (mut it, accepted, own) = Scene::on_circuits().dialled_by_both();
        it.acts.crowded = vec![own];
        it.send(it.peer, 2);
        it.packet(own, 0, 99, Body::Close(Close::Ask));
        if asked == Close::Ask {
            it.core.sent(accepted, Number::new(1), &mut it.acts);
        }
        it.core.set_now(60 * MS);
        it.core.make_room(&mut it.acts);
        assert_eq!(it.last_close(), (accepted, Some(asked)));
        assert_eq!(it.acts.ends.len(), 2);
        it.acts.crowded.clear();
        it.core.flush(&mut it.acts);
        assert_eq!(it.last_close(), (accepted, Some(asked)));
        assert!(it.acts.failed.is_empty());
        it.core.check();
    }
}

impl Scene {
    fn at_time(&mut self, time: u64) {
        self.core.set_now(time);
        self.core.tick(&mut self.acts);
    }

    /// The out-link of an idle peer with two links has broken. The other one is none: its terms
    /// were stated before. Another peer needs the place.
    fn without_out_link() -> (Self, LinkKey) {
        let (mut it, accepted, own) = Self::with_two_links();
        it.end(accepted);
        it.acts.ends.clear();
        assert_eq!((it.core.links_to(it.peer), it.acts.dials.len()), (1, 1));
        assert_eq!(it.core.out_link(it.peer), None);
        it.acts.full = true;
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 5);
        (it, own)
    }
}

/// CLOSE (demand) is lost with its link, and with it the only *processed* of a packet with ACK. If
/// the peer has answered, it has arrived.
#[test]
fn an_acknowledgement_by_a_lost_demand_is_repeated() {
    for answered in [false, true] {
        let (mut it, accepted, own) = Scene::with_two_links();
        it.send(it.peer, 2);
        (it.acts.full, it.acts.rma) = (true, true);
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 5);
        it.at_time(52 * MS);
        it.packet(own, 0, 99, eager(true));
        it.core.flush(&mut it.acts);
        it.acts.rma = false;
        it.at_time(54 * MS);
        assert_eq!(it.last_close(), (accepted, Some(Close::Demand)));
        it.core.sent(accepted, Number::new(1), &mut it.acts);
        assert_eq!((it.acts.completed.len(), it.core.owes()), (2, false));
        if answered {
            it.packet(accepted, 0, 99, Body::Close(Close::Refuse));
        }
        it.end(accepted);
        match answered {
            // the other link is ended in order to dial
            false => assert_eq!(it.acts.ends, [accepted, own]),
            true => assert_eq!(it.acts.ends, [accepted]),
        }
    }
}

/// CLOSE (refuse) has no answer.
#[test]
fn credit_follows_a_refusal_that_has_carried_an_acknowledgement() {
    let (mut it, accepted, own) = Scene::with_two_links();
    it.packet(own, 0, 99, eager(true));
    it.packet(accepted, 0, 99, Body::Close(Close::Ask));
    assert_eq!(it.last_close(), (accepted, Some(Close::Refuse)));
    it.core.flush(&mut it.acts);
    let (link, packet) = it.acts.packets.last().expect("a packet");
    assert!(matches!(packet.body, Body::Credit { .. }));
    assert_eq!((*link, packet.header.processed), (accepted, Number::new(1)));
    assert!(!it.core.owes());
}

/// A link that is no out-link, and has no room for CLOSE, is ended after 500 ms.
#[test]
fn a_side_without_out_link_waits_for_room_for_a_demand() {
    for room in [true, false] {
        let (mut it, own) = Scene::without_out_link();
        it.packet(own, 0, 99, Body::Close(Close::Refuse));
        it.acts.crowded = vec![own];
        it.at_time(52 * MS);
        assert_eq!(it.last_close(), (own, Some(Close::Ask)));
        // operations wait
        it.send(it.peer, 2);
        it.core.check();
        it.at_time(551 * MS);
        assert_eq!((it.acts.ends.len(), it.acts.dials.len()), (0, 1));
        if room {
            it.acts.crowded.clear();
        }
        it.at_time(553 * MS);
        if room {
            assert_eq!(it.last_close(), (own, Some(Close::Demand)));
            it.packet(own, 0, 99, Body::Close(Close::Accept));
        }
        assert_eq!(it.acts.ends, [own], "{room}");
        it.core.ended(own, &mut it.acts);
        it.acts.full = false;
        it.at_time(555 * MS);
        assert_eq!(it.acts.dials.len(), 3, "{room}");
        it.core.check();
    }
}

/// Such a link does not keep the places of others from being demanded.
#[test]
fn a_link_without_room_for_a_demand_does_not_stop_other_evictions() {
    let (mut it, own) = Scene::without_out_link();
    it.packet(own, 0, 99, Body::Close(Close::Refuse));
    it.acts.crowded = vec![own];
    // the other peer gets a link, and uses it
    it.acts.full = false;
    it.at_time(4 * MS);
    let used = it.reply_of(id(3), 0);
    it.acts.full = true;
    for port in [4, 5] {
        let next = it.core.peer_at(place(port)).expect("a peer");
        it.send(next, port.into());
    }
    it.at_time(56 * MS);
    assert_eq!(it.last_close(), (used, Some(Close::Demand)));
    assert!(it.acts.ends.is_empty());
    it.core.check();
}

/// The link ends before there was room. What has waited dials.
#[test]
fn the_wait_for_room_for_a_demand_ends_with_the_link() {
    let (mut it, own) = Scene::without_out_link();
    it.packet(own, 0, 99, Body::Close(Close::Refuse));
    it.acts.crowded = vec![own];
    it.at_time(52 * MS);
    it.send(it.peer, 2);
    it.acts.full = false;
    it.end(own);
    it.at_time(60 * MS);
    assert_eq!((it.acts.ends.len(), it.acts.dials.len()), (1, 3));
    it.core.check();
}

/// On circuits the last link is ended, although its peer, which is idle, leaves no room for CLOSE.
#[test]
fn the_last_resort_ends_a_link_that_is_no_out_link() {
    let (mut it, accepted, own) = Scene::on_circuits().dialled_by_both();
    it.end(accepted);
    assert_eq!(it.core.out_link(it.peer), None);
    it.acts.crowded = vec![own];
    it.core.make_room(&mut it.acts);
    it.at_time(499 * MS);
    assert_eq!(it.acts.ends, [accepted]);
    it.at_time(501 * MS);
    assert_eq!(it.acts.ends, [accepted, own]);
    it.core.check();
}

/// A link that the peer alone may use has a place too.
#[test]
fn a_side_without_out_link_asks_on_its_other_link() {
    let (mut it, own) = Scene::without_out_link();
    assert_eq!(it.last_close(), (own, Some(Close::Ask)));
    assert!(it.acts.ends.is_empty());
    it.core.check();
    it.packet(own, 0, 99, Body::Close(Close::Accept));
    assert_eq!(it.acts.ends, [own]);
    it.core.ended(own, &mut it.acts);
    it.acts.full = false;
    it.at_time(30 * MS);
    assert_eq!(it.acts.dials.len(), 2);
    it.core.check();
}

/// The peer uses the link, so its place is demanded after a turn. Operations wait for the answer.
#[test]
fn a_side_without_out_link_demands_the_place_of_its_other_link() {
    let (mut it, own) = Scene::without_out_link();
    it.packet(own, 0, 99, Body::Close(Close::Refuse));
    it.at_time(48 * MS);
    assert_eq!(it.last_close(), (own, Some(Close::Ask)));
    it.at_time(52 * MS);
    assert_eq!(it.last_close(), (own, Some(Close::Demand)));
    it.send(it.peer, 2);
    assert_eq!((it.acts.ends.len(), it.acts.dials.len()), (0, 1));
    it.packet(own, 0, 99, Body::Close(Close::Accept));
    assert_eq!(it.acts.ends, [own]);
    it.core.ended(own, &mut it.acts);
    it.acts.full = false;
    it.at_time(54 * MS);
    assert_eq!(it.acts.dials.len(), 3);
    it.core.check();
}

/// What has waited for an answer continues after CLOSE (refuse), after the end of the link, and
/// after 1 s without an answer.
#[test]
fn operations_that_wait_for_an_answer_without_out_link_continue() {
    for case in 0..3 {
        let (mut it, own) = Scene::without_out_link();
        it.send(it.peer, 2);
        assert!(it.acts.ends.is_empty());
        match case {
            // an own link that is no use is ended in order to dial
            0 => it.packet(own, 0, 99, Body::Close(Close::Refuse)),
            1 => it.core.broken(own, &mut it.acts),
            _ => it.at_time(1_001 * MS),
        }
        assert_eq!(it.acts.ends, [own], "{case}");
        it.core.ended(own, &mut it.acts);
        it.acts.full = false;
        it.at_time(it.core.now + 30 * MS);
        assert_eq!(it.acts.dials.len(), 3, "{case}");
        it.core.check();
    }
}

#[test]
fn a_side_without_out_link_accepts_a_demand() {
    let (mut it, accepted, own) = Scene::with_two_links();
    it.end(accepted);
    it.acts.ends.clear();
    it.packet(own, 0, 99, Body::Close(Close::Demand));
    assert_eq!(it.last_close(), (own, Some(Close::Accept)));
    // operations wait for the end of the link
    it.send(it.peer, 2);
    assert_eq!((it.acts.ends.len(), it.acts.dials.len()), (0, 1));
    it.core.broken(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    it.at_time(30 * MS);
    assert_eq!((it.acts.dials.len(), it.core.violations), (2, 0));
}
