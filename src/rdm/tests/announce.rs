//! Messages that are announced in the call that sends them, on the embedded device.

use super::endpoints::{Transport, wait};
use super::pull::{bytes_of, domain, reader_at_once};
use crate::queue::Completion;
use crate::rdm::core::link::LinkKey;

/// Messages of one buffer are announced without the lists of the core, others and those behind a
/// waiting packet with them. All are answered, and no peer is held afterwards.
#[test]
fn messages_are_announced_in_their_call() {
    let domain = domain();
    let ends = [(); 2].map(|()| reader_at_once(&domain, Transport::Rc));
    let [a, b] = &ends;
    let to_b = a.knows(b);
    let rings = std::env::var_os("SOFTVERBS_RING").is_none_or(|value| value != "0");
    let announced = || a.state(|state| state.io.tests.announced);
    let bytes = bytes_of(5);
    let (mut targets, mut possible) = (vec![vec![0; 1 << 16]; 40], 0);
    for round in 0..40 {
        let before = announced();
        let lens: Vec<usize> = (0..40).map(|i| 8_193 + 1000 * i + round).collect();
        for (len, target) in lens.iter().zip(&mut targets) {
            target.fill(0);
            b.recv(Some((1, 0)), &mut target[..*len], 2);
        }
        // more than the credit of a connection that has just begun
        for len in &lens {
            a.send(to_b, Some(1), &bytes[round..][..*len], 1);
        }
        wait([a, b], [40, 40]);
        for (len, target) in lens.iter().zip(&targets) {
            assert!(target[..*len] == bytes[round..][..*len], "{len}");
        }
        possible += 40;
        assert!(announced() - before <= 40);
    }
    if rings {
        assert!(announced() > possible / 4, "{} of {possible}", announced());
    }
    let holds = a.state(|state| {
        let peer = state.known_peer(to_b).unwrap();
        let core = &state.core;
        let peer = core.peers.get(core.resolve(peer)).unwrap();
        assert_eq!(state.io.outstanding(), 0);
        (peer.holds, peer.is_clear())
    });
    assert_eq!(holds, (0, true));
}

/// A link that ends during an announcement: whether the packet has arrived or not, the message
/// arrives once, and so do those behind it.
#[test]
fn an_announcement_at_the_end_of_its_link_is_repeated() {
    let domain = domain();
    if std::env::var_os("SOFTVERBS_RING").is_some_and(|value| value == "0") {
        return;
    }
    for arrives in [false, true] {
        let ends = [(); 2].map(|()| reader_at_once(&domain, Transport::Rc));
        let [a, b] = &ends;
        let to_b = a.knows(b);
        let bytes = bytes_of(7);
        let mut targets = vec![vec![0; 1 << 16]; 4];
        // the ring is attached, and its credit was seen
        for target in &mut targets {
            b.recv(Some((1, 0)), target, 2);
            a.send(to_b, Some(1), &bytes[..1 << 16], 1);
            wait([a, b], [1, 1]);
        }
        for (i, target) in targets.iter_mut().enumerate() {
            target.fill(0);
            b.recv(Some((1, 0)), target, 10 + i);
        }
        a.ep.shared().apply_event(|_, io| {
            let links: Vec<LinkKey> = io.links.keys().collect();
            for link in links {
                let ring = io.links.get_mut(link).and_then(|link| link.ring.as_mut());
                ring.unwrap().ends_next = Some(arrives);
            }
        });
        for i in 0..4 {
            a.send(to_b, Some(1), &bytes[i..][..1 << 16], 20 + i);
        }
        let [sent, received] = wait([a, b], [4, 4]);
        let contexts = |entries: &[Completion]| entries.iter().map(|it| it.context).sum::<usize>();
        assert_eq!(contexts(&sent), 20 + 21 + 22 + 23);
        assert_eq!(contexts(&received), 10 + 11 + 12 + 13);
        for (i, target) in targets.iter().enumerate() {
            assert!(target[..] == bytes[i..][..1 << 16], "{i}, {arrives}");
        }
        let left = a.state(|state| (state.io.outstanding(), state.io.tx.len()));
        assert_eq!(left, (0, 0));
    }
}
