//! The credit that one peer can take.

use super::super::super::credit::{Pool, SMALLEST};
use super::*;

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

/// A peer sends messages that have no receive, ends its session, and begins the next one, again and
/// again. The messages of all its sessions together are bounded, and what they hold returns when
/// they get their receives.
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
        let session = it.core.peers.get(it.peer).unwrap().session;
        let has_credit = |it: &Scene| {
            let inbound = it.core.peers.get(it.peer).unwrap().inbound;
            inbound.unwrap().has(Credit::new(1, 1))
        };
        let mut number = 0;
        while has_credit(&it) {
            let message = Message::default();
            let payload = Payload { offset: 32, len: 0 };
            it.packet(link, number, 99, Body::Eager { message, payload });
            it.core.flush(&mut it.acts);
            number += 1;
        }
        assert!(number >= SMALLEST.blocks, "{round}: no window");
        stored.push((session, number));
        it.core.fail(it.peer, FiErrno::ECONNABORTED, &mut it.acts);
        it.end(link);
        it.core.check();
    }
    let all: u32 = stored.iter().map(|(_, count)| count).sum();
    assert_eq!(it.acts.delivered, all as usize);
    // the pool, its reserve, and the smallest windows
    assert!(all <= 1500 + ROUNDS * SMALLEST.blocks, "{all}");
    for (session, count) in stored {
        let from = Origin {
            peer: it.peer,
            session,
        };
        it.core.give_back(from, Credit::new(count, 0));
    }
    assert_eq!(
        (it.core.pool.taken(), it.core.pool.lent()),
        (Credit::ZERO, 0)
    );
}
