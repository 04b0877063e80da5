//! The order of operations that wait, when some of them become operations of another kind, or to
//! another peer.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use super::breaks::{Memory, domain, pattern};
use super::endpoints::{Transport, wait};
use super::outcomes::{link, send, store};
use super::rma::{Side, connected, memory};
use crate::av::FiAddr;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::rdm::LocalIov;
use crate::rdm::operations::Kind;

/// Writes 8 bytes with a fence, from memory that the caller keeps.
fn write_fenced(side: &Side, to: FiAddr, of: &Side, from: &Memory, context: usize) {
    let iov = from.iov();
    let local = LocalIov::single(&iov, &Desc::NULL);
    let flags = Some(Flags::COMPLETION | Flags::FENCE);
    let (ep, range) = (&side.end.ep, [of.range(8, 8)]);
    // SAFETY: the caller keeps the memory until the entry.
    unsafe { ep.write(to, local, &range, None, context, flags) }.unwrap();
}

/// An atomic waits behind a write, and becomes a packet when it is its turn: the device of the peer
/// executes none. A message that was posted behind it, and waits already, stays behind it.
#[test]
fn a_message_stays_behind_an_atomic_that_becomes_a_packet() {
    for fence in [false, true] {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, Transport::Rc);
        // the write waits for the end of a message without receive
        let (long, word, short) = (memory(2, 10_000), memory(3, 8), memory(4, 8));
        send(&a, to_b, &long, 4, Flags::empty());
        write_fenced(&a, to_b, &b, &word, 5);
        store(&a, to_b, &b, 1, 6);
        assert_eq!(a.end.state(|state| state.io.rma.ops.len()), 2);
        link(&a, |link| link.device_atomics = false);
        let flags = if fence { Flags::FENCE } else { Flags::empty() };
        send(&a, to_b, &short, 7, flags);
        let (mut first, mut second) = (vec![0; 10_000], [0; 8]);
        b.end.recv(None, &mut first, 2);
        b.end.recv(None, &mut second, 3);
        // nothing of it is posted before the atomic has become a packet
        link(&a, |link| link.refuse(&vec![FiErrno::EAGAIN; 1 << 20]));
        let limit = Instant::now() + Duration::from_secs(20);
        let (mut contexts, mut arrived) = (Vec::new(), 0);
        while a.end.state(|state| state.io.rma.ops.len()) != 0 {
            contexts.extend(a.end.poll().map(|it| it.context));
            arrived += usize::from(b.end.poll().is_some());
            assert!(Instant::now() < limit, "{contexts:?}");
        }
        let atomic_is_first = a.end.state(|state| {
            let peer = state.core.peer_keys().next().unwrap();
            let first = state.core.first_unposted(peer, |_| true).unwrap();
            matches!(state.io.tx.get(first).unwrap().kind, Kind::Atomic(_))
        });
        assert!(atomic_is_first, "fence: {fence}");
        link(&a, |link| link.refuse(&[]));
        let [ended, _] = wait([&a.end, &b.end], [4 - contexts.len(), 2 - arrived]);
        contexts.extend(ended.iter().map(|it| it.context));
        contexts.sort_unstable();
        assert_eq!(contexts, [4, 5, 6, 7]);
        assert!(first == pattern(2, 10_000) && second[..] == pattern(4, 8));
        assert!(b.memory.is(0, &1_u64.to_ne_bytes()) && b.memory.is(8, &pattern(3, 8)));
    }
}

/// Operations to two addresses wait when these turn out to be addresses of one endpoint. Those with
/// a fence wait for all earlier ones, to either address.
#[test]
fn operations_to_two_addresses_of_a_peer_have_one_order() {
    let domain = domain(true);
    let (a, b, to_b) = connected(&domain, Transport::Rc);
    let of_b = a.end.state(|state| state.core.peer_keys().next().unwrap());
    let other = a.end.knows_at("127.0.0.9:9".parse().unwrap());
    let shared = a.end.ep.shared();
    let mut dials = 0;
    shared.apply_event(|core, _| dials = std::mem::take(&mut core.config.dials));
    // without receive
    let (long, word) = (memory(2, 10_000), memory(3, 8));
    let (short, last) = (memory(4, 8), memory(5, 8));
    send(&a, to_b, &long, 4, Flags::empty());
    send(&a, other, &short, 5, Flags::empty());
    write_fenced(&a, other, &b, &word, 6);
    send(&a, to_b, &last, 7, Flags::FENCE);
    let alias = a.end.state(|state| state.peer_of(other).unwrap());
    shared.apply_event(|core, io| {
        core.merge(alias, of_b, io);
        core.config.dials = dials;
        core.advance_changed(io);
    });
    let (mut first, mut second, mut third) = (vec![0; 10_000], [0; 8], [0; 8]);
    b.end.recv(None, &mut first, 2);
    b.end.recv(None, &mut second, 2);
    b.end.recv(None, &mut third, 2);
    let [ended, _] = wait([&a.end, &b.end], [4, 3]);
    let contexts: Vec<_> = ended.iter().map(|it| it.context).collect();
    assert_eq!(contexts[2..], [6, 7], "{contexts:?}");
    assert!(first == pattern(2, 10_000) && second[..] == pattern(4, 8));
    assert!(third[..] == pattern(5, 8) && b.memory.is(8, &pattern(3, 8)));
}
