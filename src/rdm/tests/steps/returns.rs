//! RETURN step by step, and CREDIT that follows it.

use super::*;

impl Scene {
    /// A peer with two links, the own one of which is the out-link, and a message with ACK on it.
    fn with_message_with_ack() -> (Self, LinkKey, LinkKey) {
        let mut it = Self::new();
        it.send(it.peer, 1);
        let own = it.reply();
        it.core.sent(own, Number::new(0), &mut it.acts);
        let (_, request) = it.acts.dials[0];
        it.request(1, Some(request.gives));
        let accepted = it.hello(1, 1);
        it.settle(accepted);
        let send = SendOp {
            op: 2,
            uses: Uses::Message(8),
            ack: true,
        };
        let sent = it.core.send(it.peer, send, &mut it.acts);
        sent.expect("room");
        it.core.sent(own, Number::new(1), &mut it.acts);
        it.acts.packets.clear();
        (it, own, accepted)
    }

    /// The peer grants credit, and has seen this grant.
    fn receive_credit(&mut self, link: LinkKey, seen: u16) {
        let grant = self.grant();
        let recall = false;
        self.packet(link, 0, seen, Body::Credit { grant, recall });
    }

    /// The packets since the last call: RETURN or CREDIT.
    fn take_reports(&mut self) -> Vec<(LinkKey, Packet)> {
        let reports = std::mem::take(&mut self.acts.packets);
        for (_, packet) in &reports {
            assert!(matches!(packet.body, Body::Return(_) | Body::Credit { .. }));
        }
        reports
    }
}

/// The number of the grant of CREDIT.
fn granted(packet: &Packet) -> GrantNumber {
    match packet.body {
        Body::Credit { grant, .. } => grant.number,
        _ => panic!("no CREDIT"),
    }
}

/// RETURN without RECALL carries *processed* of a packet with ACK, and can get lost, while the peer
/// has another link. This side has no operation for which it would dial. CREDIT follows: if the
/// peer has seen it, nothing is to be repeated when the link ends, and the other link stays.
#[test]
fn an_acknowledgement_by_a_lost_return_is_repeated() {
    for arrives in [false, true] {
        let (mut it, own, accepted) = Scene::with_message_with_ack();
        it.receive_credit(accepted, 99);
        it.packet(accepted, 0, 99, eager(true));
        it.core.flush(&mut it.acts);
        let reports = it.take_reports();
        let [(first, lost), (second, credit)] = &reports[..] else {
            panic!("{reports:?}");
        };
        assert!(matches!(lost.body, Body::Return(_)));
        let granted = granted(credit);
        assert_eq!((*first, *second), (own, own));
        let processed = Number::new(1);
        assert_eq!(
            (lost.header.processed, credit.header.processed),
            (processed, processed)
        );
        assert!(!it.core.owes());
        // the peer has processed the operation of this side, which has nothing under way any more
        let header = Header {
            number: Number::new(1),
            processed: Number::new(2),
            seen: match arrives {
                true => granted,
                false => GrantNumber::new(granted.get() - 1),
            },
            to: PeerIndex::new(it.peer.number()),
        };
        let packet = Packet {
            header,
            body: eager(false),
        };
        it.core.arrived(accepted, &packet, (), &mut it.acts);
        assert_eq!(it.acts.completed, [(1, Ok(())), (2, Ok(()))]);
        it.end(own);
        assert_eq!(it.acts.ends, [own]);
        assert_eq!(it.acts.dials.len(), if arrives { 1 } else { 2 });
        assert_eq!(it.core.links_to(it.peer), if arrives { 1 } else { 2 });
        it.core.check();
    }
}

/// At most one CREDIT that the peer has not seen is under way: *processed* that only RETURN has
/// carried meanwhile is repeated by the next one.
#[test]
fn an_acknowledgement_behind_a_credit_is_repeated_when_that_was_seen() {
    let (mut it, own, accepted) = Scene::with_message_with_ack();
    it.packet(accepted, 0, 99, eager(true));
    it.core.flush(&mut it.acts);
    let reports = it.take_reports();
    assert_eq!(reports.len(), 1);
    let first = granted(&reports[0].1);
    let before = first.get() - 1;
    it.receive_credit(accepted, before);
    it.packet(accepted, 1, before, eager(true));
    it.core.flush(&mut it.acts);
    let reports = it.take_reports();
    assert_eq!(reports.len(), 1);
    let (_, lost) = &reports[0];
    assert!(matches!(lost.body, Body::Return(_)));
    assert_eq!(
        (lost.header.processed, it.core.owes()),
        (Number::new(2), false)
    );
    it.packet(accepted, 2, first.get(), eager(false));
    it.core.flush(&mut it.acts);
    let reports = it.take_reports();
    assert_eq!(reports.len(), 1);
    let (link, credit) = &reports[0];
    assert_eq!((*link, granted(credit)), (own, first.next()));
    assert_eq!(credit.header.processed, Number::new(3));
    it.core.check();
}

#[test]
fn a_lost_return_is_repeated() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    let (_, request) = it.acts.dials[0];
    it.request(1, Some(request.gives));
    let accepted = it.hello(1, 1);
    it.settle(accepted);
    // a packet with ACK, and a recall: RETURN answers both
    let message = Message {
        ack: true,
        ..Message::default()
    };
    let payload = Payload { offset: 32, len: 8 };
    it.packet(accepted, 0, 99, Body::Eager { message, payload });
    let grant = it.grant();
    it.packet(
        accepted,
        0,
        2,
        Body::Credit {
            grant,
            recall: true,
        },
    );
    it.acts.packets.clear();
    it.core.flush(&mut it.acts);
    let (link, packet) = &it.acts.packets[0];
    assert!(matches!(packet.body, Body::Return(_)));
    assert_eq!((*link, packet.header.processed), (own, Number::new(1)));
    // CREDIT follows, because it is repeated if *processed* gets lost
    let (link, packet) = &it.acts.packets[1];
    assert!(matches!(packet.body, Body::Credit { .. }));
    assert_eq!((*link, it.acts.packets.len()), (own, 2));
    // the link of both is lost. The peer still has its own, and waits for *processed*
    it.end(own);
    assert_eq!(it.acts.dials.len(), 2);
    // a peer without another link dials itself if it needs something
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    let grant = it.grant();
    it.packet(
        own,
        0,
        1,
        Body::Credit {
            grant,
            recall: true,
        },
    );
    it.core.flush(&mut it.acts);
    it.end(own);
    assert_eq!(it.acts.dials.len(), 1);
}
