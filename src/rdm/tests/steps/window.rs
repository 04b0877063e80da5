//! The credit that one peer can take.

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
