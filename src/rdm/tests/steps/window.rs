//! The credit that one peer can take.

use super::*;
use crate::rdm::core::credit::{FIRST, Pool, SMALLEST};

/// A peer announces short messages without end, answers each recall, and gives nothing back.
#[test]
fn a_peer_that_only_takes_leaves_credit_to_others() {
    let mut it = Scene::new();
    it.request(1, None);
    let link = it.hello(1, 0);
    let body = Body::Rts {
        message: Message::default(),
        op: OpId::new(1),
        addr: RemoteAddr::NULL,
        len: 1,
        rkey: Rkey::new(0),
    };
    let whole = it.core.config.pool;
    let quarter = Credit::new(whole.blocks / 4, whole.slots / 4);
    let mut number = 0;
    while number < 2000 {
        it.packet(link, number, 99, body.clone());
        assert_eq!(it.core.links_to(it.peer), 1, "{number}");
        it.core.flush(&mut it.acts);
        assert!(quarter.covers(it.core.pool.taken()), "{number}");
        number += 1;
    }
    // it has got what it may have, and takes nothing away from others
    assert!(it.core.pool.taken().blocks > quarter.blocks / 2);
    let recalls = |packet: &Packet| matches!(packet.body, Body::Credit { recall: true, .. });
    assert!(!it.acts.packets.iter().any(|(_, packet)| recalls(packet)));
}

/// A peer sends messages that have no receive as long as it has credit, then its session ends.
/// Returns the session and the number of messages.
fn fill_and_end(it: &mut Scene, link: LinkKey) -> (u32, u32) {
    let session = it.core.peers.get(it.peer).unwrap().session;
    let mut number = 0;
    while has_credit(it) {
        let message = Message::default();
        let payload = Payload { offset: 32, len: 0 };
        it.packet(link, number, 99, Body::Eager { message, payload });
        it.core.flush(&mut it.acts);
        number += 1;
    }
    it.core.fail(it.peer, FiErrno::ECONNABORTED, &mut it.acts);
    it.end(link);
    it.core.check();
    (session, number)
}

/// Whether the peer may send a message of one block.
fn has_credit(it: &Scene) -> bool {
    let inbound = it.core.peers.get(it.peer).unwrap().inbound;
    inbound.unwrap().has(Credit::new(1, 1))
}

/// A message gets its receive, or several do.
fn give_back(it: &mut Scene, peer: PeerKey, (session, blocks): (u32, u32)) {
    let from = Origin { peer, session };
    it.core.give_back(from, Credit::new(blocks, 0));
    it.core.flush(&mut it.acts);
    it.core.check();
}

/// A peer sends messages that have no receive, ends its session, and begins the next one, again and
/// again. All its sessions together have one share of the pool, and one of the reserve. The peer
/// gets credit again when its messages get their receives.
#[test]
fn the_sessions_of_a_peer_have_one_share() {
    const ROUNDS: u32 = 40;
    let mut it = Scene::new();
    it.core.pool = Pool::new(Credit::new(1000, 100));
    it.acts.unused = Credit::new(0, 1);
    let mut stored = Vec::new();
    for round in 1..=ROUNDS {
        it.request(round, None);
        let link = it.hello(round, 0);
        stored.push(fill_and_end(&mut it, link));
    }
    let all: u32 = stored.iter().map(|(_, count)| count).sum();
    assert_eq!(it.acts.delivered, all as usize);
    // a quarter of the pool, half of the reserve
    assert!(all <= 250 + 250 + SMALLEST.blocks, "{all}");
    it.request(ROUNDS + 1, None);
    let link = it.hello(ROUNDS + 1, 0);
    assert!(!has_credit(&it));
    it.acts.packets.clear();
    for of in stored {
        let peer = it.peer;
        give_back(&mut it, peer, of);
    }
    // it learns of the first ones
    let credit = |(_, packet): &(LinkKey, Packet)| match packet.body {
        Body::Credit { grant, .. } => Some(grant.limit.blocks),
        _ => None,
    };
    assert!(it.acts.packets.iter().find_map(credit) > Some(0));
    it.settle(link);
    assert!(has_credit(&it));
    it.core.fail(it.peer, FiErrno::ECONNABORTED, &mut it.acts);
    it.end(link);
    assert_eq!(
        (it.core.pool.taken(), it.core.pool.lent()),
        (Credit::ZERO, 0)
    );
}

/// The request of another endpoint than that with id 2, and HELLO on its link. It is `it.peer`
/// then.
fn begin(it: &mut Scene, number: u16, host: [u8; 4]) -> LinkKey {
    let id = id(u64::from(number) + 100);
    let request = Request {
        listener: Listener::new(host.into(), 1000 + number).unwrap(),
        id,
        auth: 0,
        epoch: epoch(1),
        ended: None,
        gives: Secret::new(7).unwrap(),
        shows: None,
        fresh: false,
    };
    it.core.requested((), &request.encode(), &mut it.acts);
    it.peer = it.core.ids[&id];
    it.hello(1, 0)
}

const HERE: [u8; 4] = [127, 0, 0, 1];
const THERE: [u8; 4] = [10, 0, 0, 7];

/// Endpoints of one host that no address of the application leads to fill what they get and end,
/// one after the other. Returns their messages.
fn flood(it: &mut Scene, rounds: u16) -> Vec<(PeerKey, (u32, u32))> {
    it.core.pool = Pool::new(Credit::new(8000, 1000));
    it.core.config.peers = 1 << 20;
    it.acts.unused = Credit::new(0, 1);
    let mut stored = Vec::new();
    for number in 0..rounds {
        let link = begin(it, number, HERE);
        let of = fill_and_end(it, link);
        stored.push((it.peer, of));
    }
    stored
}

/// A process that starts again and again has another endpoint id each time. Its messages that have
/// no receive are bounded, and peers of other hosts, and those of its host that the application
/// names, have the first window and further ones.
#[test]
fn the_endpoints_of_a_host_have_one_share() {
    const ROUNDS: u16 = 2000;
    let mut it = Scene::new();
    let named = it.peer;
    let stored = flood(&mut it, ROUNDS);
    let all: u32 = stored.iter().map(|(_, (_, count))| count).sum();
    assert_eq!(it.acts.delivered, all as usize);
    // a quarter of the pool, half of the reserve
    assert!(all <= 2000 + 2000 + 2 * SMALLEST.blocks, "{all}");
    let window = |it: &Scene| {
        it.core
            .peers
            .get(it.peer)
            .unwrap()
            .inbound
            .unwrap()
            .window()
    };
    let link = begin(&mut it, ROUNDS, THERE);
    assert_eq!(window(&it), FIRST);
    let (_, count) = fill_and_end(&mut it, link);
    assert!(count > 2000, "{count}");
    it.peer = named;
    it.request(1, None);
    it.hello(1, 0);
    assert_eq!(window(&it), FIRST);
}

/// An endpoint of a host that has used up its share gets credit when messages of the others get
/// their receives, or when the application names it.
#[test]
fn a_stranger_waits_for_the_share_of_its_host() {
    const ROUNDS: u16 = 2000;
    for names in [false, true] {
        let mut it = Scene::new();
        let stored = flood(&mut it, ROUNDS);
        let link = begin(&mut it, ROUNDS, HERE);
        let waits = it.peer;
        assert!(!has_credit(&it));
        if names {
            it.core.keep(waits);
            it.core.flush(&mut it.acts);
            it.core.check();
        } else {
            let limit = stored.len();
            for (peer, of) in stored.into_iter().take(limit) {
                give_back(&mut it, peer, of);
            }
        }
        assert!(has_credit(&it));
        let (_, count) = fill_and_end(&mut it, link);
        assert!(count > 500, "{count}");
    }
}

/// A stranger is found to be an address of a peer that the application names, or names later. What
/// its messages hold does not count for the strangers of its host any more.
#[test]
fn what_an_alias_has_left_is_that_of_a_named_peer() {
    for late in [false, true] {
        let mut it = Scene::new();
        it.acts.unused = Credit::new(0, 1);
        let named = it.peer;
        if late {
            it.core.unkeep(named);
        }
        let link = begin(&mut it, 5, HERE);
        let alias = it.peer;
        let (_, count) = fill_and_end(&mut it, link);
        assert!(count != 0 && !it.core.hosts.is_empty());
        it.core.merge(alias, named, &mut it.acts);
        assert_eq!(it.core.hosts.is_empty(), !late);
        it.core.check_hosts();
        it.core.keep(named);
        assert!(it.core.hosts.is_empty());
        it.core.check_hosts();
    }
}

/// Live sessions of one host leave half of the first windows to others, and have smallest ones up
/// to the share of the host.
#[test]
fn many_strangers_of_a_host_leave_first_windows() {
    let mut it = Scene::new();
    it.core.pool = Pool::new(Credit::new(8000, 1000));
    it.core.config.peers = 1 << 20;
    let window = |it: &Scene| {
        it.core
            .peers
            .get(it.peer)
            .unwrap()
            .inbound
            .unwrap()
            .window()
    };
    let mut windows = Vec::new();
    for number in 0..1000 {
        begin(&mut it, number, HERE);
        windows.push(window(&it));
    }
    let first = windows.iter().filter(|window| **window == FIRST).count();
    assert_eq!(first, 8000 / 2 / 64);
    // 500 smallest windows are a quarter of the pool. Further ones are of the reserve
    let credit = windows.iter().filter(|window| **window == SMALLEST).count();
    assert_eq!(credit, 500 - first);
    begin(&mut it, 1000, THERE);
    assert_eq!(window(&it), FIRST);
    it.core.check();
}

/// *processed* of a packet with ACK is reported once, however many packets without ACK follow.
#[test]
fn an_acknowledgement_is_reported_once() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let link = it.reply();
    it.core.sent(link, Number::new(0), &mut it.acts);
    it.settle(link);
    it.packet(link, 0, 99, eager(true));
    assert!(it.core.owes());
    it.acts.packets.clear();
    it.settle(link);
    assert_eq!((it.acts.packets.len(), it.core.owes()), (1, false));
    // 2^31 packets later, of which messages have told the peer
    let expected = Number::new(1 + (1 << 31));
    it.core.peers.get_mut(it.peer).expect("the peer").expected = expected;
    it.send(it.peer, 2);
    it.packet(link, expected.get(), 99, eager(false));
    it.send(it.peer, 3);
    it.acts.packets.clear();
    it.core.flush(&mut it.acts);
    assert_eq!((it.acts.packets.len(), it.core.owes()), (0, false));
}
