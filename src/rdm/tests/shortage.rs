//! What peers hold of an endpoint's memory and credit, and operations that find no memory.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::contexts::{begin_long, connect, context, members, recv, wait_entry};
use super::endpoints::{End, Transport, config, domain, wait, wait_for};
use super::pull::error;
use crate::av::FiAddr;
use crate::errno::{FiErrno, Result};
use crate::mr::{Desc, Withdrawn};
use crate::queue::Completion;
use crate::rdm::core::ops::Form;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::executor::PacketMemoryRef;
use crate::rdm::long::pulls::{Push, Sink};
use crate::rdm::operations::{Atomic, Kind, Operation};
use crate::rdm::{EndpointConfig, LocalIov};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::packet::{Message, Payload};
use crate::wire::rdm::{Body, Credit, Header, OpId, Packet, PeerIndex};

/// Waits until a condition holds, while an end polls.
fn until(end: &End, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert_eq!(end.poll(), None);
        assert!(Instant::now() < limit);
    }
}

/// The only peer of an end, and the count of its session.
fn peer(end: &End) -> (PeerKey, u32) {
    end.state(|state| {
        let peer = state.core.peer_keys().next().unwrap();
        (peer, state.core.peers.get(peer).unwrap().session)
    })
}

/// The session of the only peer ends.
fn fail(end: &End) {
    let (peer, _) = peer(end);
    let shared = end.ep.shared();
    shared.apply_event(|core, io| core.fail(peer, FiErrno::ETIMEDOUT, io));
}

/// Blocks of messages that have outlived their sessions.
fn left(end: &End) -> u32 {
    end.state(|state| state.core.left())
}

/// Messages that have arrived as a whole outlive the session, and keep their blocks until they get
/// their receives. Those that were announced go, and so do their blocks.
#[test]
fn messages_that_outlive_their_session_keep_their_blocks() {
    let domain = domain();
    Transport::each(|transport| {
        let (a, b) = (
            End::with(&domain, transport.config(), 0),
            End::with(&domain, transport.config(), 0),
        );
        let to_b = a.knows(&b);
        let long = vec![5; 10_000];
        a.send(to_b, None, &[7; 100], 1);
        a.send(to_b, None, &long, 2);
        let stored = || b.state(|state| state.io.rx.own().unwrap().stored_len());
        until(&b, || stored() == 2);
        let (_, session) = peer(&b);
        fail(&b);
        until(&b, || peer(&b).1 != session);
        assert_eq!((stored(), left(&b)), (1, 3));
        let mut bytes = [0; 100];
        b.recv(None, &mut bytes, 3);
        wait_for(&b, 1);
        assert_eq!((bytes, left(&b)), ([7; 100], 0));
    });
}

/// A message that cannot be stored is lost although its SEND has completed: its session ends. The
/// next one is as good as any.
#[test]
fn a_message_that_cannot_be_stored_ends_its_session() {
    let domain = domain();
    for len in [100, 10_000] {
        let (a, b) = (End::open(&domain), End::open(&domain));
        let to_b = a.knows(&b);
        let mut bytes = [0; 8];
        b.recv(None, &mut bytes, 2);
        a.send(to_b, None, &[1; 8], 1);
        wait([&a, &b], [1, 1]);
        let full = |full| b.state(|state| state.io.rx.own().unwrap().full = full);
        full(true);
        let (_, session) = peer(&b);
        let lost = vec![5; len];
        a.send(to_b, None, &lost, 3);
        until(&b, || peer(&b).1 != session);
        assert_eq!(left(&b), 0);
        if len > 8192 {
            // an announced one fails at its sender
            let limit = Instant::now() + Duration::from_secs(20);
            while a.cq.read(1, &mut |_: &Completion| {}) != Err(FiErrno::EAVAIL) {
                assert!(Instant::now() < limit);
            }
            assert_eq!(a.cq.read_error().unwrap().completion.context, 3);
        } else {
            wait_for(&a, 1);
        }
        full(false);
        until(&a, || {
            a.state(|state| state.io.links.keys().next().is_none())
        });
        b.recv(None, &mut bytes, 4);
        a.send(to_b, None, &[9; 8], 5);
        wait([&a, &b], [1, 1]);
        assert_eq!(bytes, [9; 8]);
    }
}

/// A refused ATOMIC breaks its link, and uses no slot of the session any more.
#[test]
fn a_refused_atomic_gives_its_credit_back() {
    let domain = domain();
    let open = || {
        let config = EndpointConfig {
            atomics: true,
            rma: true,
            target: true,
            ..config()
        };
        End::with_rings(&domain, config, 0, false)
    };
    let (a, b) = (open(), open());
    let to_b = a.knows(&b);
    let mut bytes = [0; 8];
    b.recv(None, &mut bytes, 2);
    a.send(to_b, None, &[1; 8], 1);
    wait([&a, &b], [1, 1]);
    let (peer, _) = peer(&b);
    b.ep.shared().apply_event(|core, io| {
        let link = core.out_link(peer).unwrap();
        let slot = io.memory.take().unwrap();
        let header = Header {
            number: core.audit(peer).unwrap().expected,
            to: PeerIndex::new(peer.number()),
            ..Header::default()
        };
        // one element of 8 bytes, with an operand of 4
        let body = Body::Atomic {
            op: OpId::new(1),
            addr: 0,
            key: 0,
            operator: atomic_ops::Op::Sum as u8,
            datatype: atomic_ops::Datatype::Uint64 as u8,
            count: 1,
            fetches: false,
            last: true,
            operands: Payload { offset: 64, len: 4 },
        };
        core.arrived(
            link,
            &Packet { header, body },
            PacketMemoryRef::Slot(slot),
            io,
        );
    });
    b.state(|state| {
        assert_eq!(state.core.out_link(peer), None, "it was not refused");
        assert_eq!(state.core.audit(peer).unwrap().stored, Credit::ZERO);
    });
}

/// A link waits for memory only if an operation that has some ends without a further packet of this
/// side: that packet may need memory too.
#[test]
fn operations_that_wait_for_memory_themselves_free_none() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let mut bytes = [0; 8];
    b.recv(None, &mut bytes, 2);
    a.send(a.knows(&b), None, &[1; 8], 1);
    wait([&a, &b], [1, 1]);
    let (peer, _) = peer(&a);
    a.ep.shared().apply_event(|_, io| {
        let atomic = Kind::Atomic(Atomic {
            addr: 0,
            key: 0,
            operator: 0,
            datatype: 0,
            count: 1,
            fetches: false,
            ranged: false,
            last: true,
        });
        let mut frees = |kind, change: &dyn Fn(&mut Operation)| {
            let mut op = Operation::new(kind, peer);
            (op.slot, op.copied) = (Some(io.memory.take().unwrap()), true);
            change(&mut op);
            let key = io.tx.insert(op).unwrap();
            let frees = io.frees_memory();
            let op = io.tx.remove(key).unwrap();
            io.release(op);
            frees
        };
        assert!(!frees(atomic, &|_| {}), "an ATOMIC that was never posted");
        assert!(frees(atomic, &|op| op.posted = true));
        assert!(!frees(Kind::Message, &|_| {}), "a message never posted");
        let announced = |op: &mut Operation| (op.form, op.in_core) = (Form::Rts, false);
        assert!(frees(Kind::Message, &announced));
        let asked = |op: &mut Operation| {
            announced(op);
            op.receiver = Some(OpId::new(1));
        };
        assert!(!frees(Kind::Message, &asked), "its parts need memory");
        let answered = |op: &mut Operation| {
            asked(op);
            op.fin = Some(0);
        };
        assert!(frees(Kind::Message, &answered));
    });
}

/// A peer that takes its answers slowly has the credit of its messages until it has taken the
/// answers, but for the first ones. All of it returns with the session.
#[test]
fn answers_that_are_not_taken_hold_credit() {
    const FREE: u32 = 1024;
    let domain = domain();
    let open = || End::with_rings(&domain, config(), 0, false);
    let (a, b) = (open(), open());
    let to_b = a.knows(&b);
    let mut byte = [0; 1];
    let mut exchange = || {
        b.recv(None, &mut byte, 2);
        a.send(to_b, None, &[1], 1);
        wait([&a, &b], [1, 1]);
    };
    exchange();
    let (peer, session) = peer(&b);
    b.ep.shared().apply_event(|core, _| {
        (0..9).for_each(|_| core.grow(peer));
    });
    // a grant for the larger window
    (0..8).for_each(|_| exchange());
    b.state(|state| {
        let link = state.core.out_link(peer).unwrap();
        state.io.links.get_mut(link).unwrap().silent = true;
    });
    let announce = |len| {
        b.recv(None, &mut [], 3);
        b.ep.shared().apply_event(|core, io| {
            let link = core.out_link(peer).unwrap();
            let slot = io.memory.take().unwrap();
            let header = Header {
                number: core.audit(peer).unwrap().expected,
                to: PeerIndex::new(peer.number()),
                ..Header::default()
            };
            let body = Body::Rts {
                message: Message::default(),
                op: OpId::new(1),
                addr: RemoteAddr::NULL,
                len,
                rkey: Rkey::default(),
            };
            core.arrived(
                link,
                &Packet { header, body },
                PacketMemoryRef::Slot(slot),
                io,
            );
            core.check();
        });
    };
    let held = || b.state(|state| state.core.audit(peer).unwrap().stored);
    for _ in 0..FREE + 100 {
        announce(0);
        wait_for(&b, 1);
    }
    assert_eq!(held(), Credit::new(100, 0));
    // one that arrives in parts
    announce(10);
    assert_eq!(held(), Credit::new(101, 0));
    fail(&b);
    assert_eq!(error(&b).err, FiErrno::ECONNABORTED);
    until(&b, || self::peer(&b).1 != session);
    assert_eq!(left(&b), 0);
    b.state(|state| state.core.check());
}

/// The receives for the answers to a message stay until it is answered: its packet is complete long
/// before.
#[test]
fn receives_for_answers_stay_until_these_arrive() {
    let domain = domain();
    Transport::each(|transport| {
        let open = || End::with(&domain, transport.config(), 0);
        let (a, b) = (open(), open());
        let to_b = a.knows(&b);
        let mut byte = [0; 1];
        b.recv(None, &mut byte, 2);
        a.send(to_b, None, &[1], 1);
        wait([&a, &b], [1, 1]);
        let needed = || a.state(|state| state.receives_needed());
        let before = needed();
        let (long, mut target) = (vec![5; 10_000], vec![0; 10_000]);
        a.send(to_b, None, &long, 1);
        until(&b, || {
            b.state(|state| state.io.rx.own().unwrap().stored_len() == 1)
        });
        until(&a, || a.state(|state| state.core.ops.len() == 0));
        assert_eq!(needed(), before + 2);
        b.recv(None, &mut target, 2);
        wait([&a, &b], [1, 1]);
        assert_eq!(needed(), before);
        assert!(target == long);
    });
}

/// The receives of a test, and the message.
struct Buffers {
    first: Vec<u8>,
    second: Vec<u8>,
    message: Vec<u8>,
}

impl Buffers {
    fn new() -> Self {
        Self {
            first: vec![0; 10_000],
            second: vec![0; 10_000],
            message: vec![3; 10_000],
        }
    }
}

/// A message that arrives at an endpoint fails while its sender writes to the receive, which is the
/// only one that `post` can post. Another one can be posted when the entry was read.
fn fails_while_written(
    buffers: &mut Buffers,
    (from, to, at): (&End, FiAddr, &End),
    post: impl Fn(&mut [u8]) -> Result<()>,
) {
    post(&mut buffers.first).unwrap();
    begin_long(from, to, at, &buffers.message, 1);
    let used = Arc::new(AtomicBool::new(true));
    at.ep.shared().apply_event(|_, io| {
        let key = io.rx.arrivals.keys_where(|_| true)[0];
        let sink = Sink::Ends(Withdrawn::of_test(&used));
        io.rx.arrivals.get_mut(key).unwrap().push = Some(Push { offset: 0, sink });
        io.fail_arrival(key, true);
    });
    assert_eq!(post(&mut buffers.second), Err(FiErrno::EAGAIN));
    used.store(false, Ordering::Relaxed);
    assert_eq!(wait_entry(at), (7, Some(FiErrno::ECONNABORTED)));
    post(&mut buffers.second).unwrap();
}

#[test]
fn a_failed_receive_keeps_its_place_while_its_sender_writes() {
    // dropped behind the endpoints
    let mut buffers = [Buffers::new(), Buffers::new()];
    let mut bytes = [0; 8];
    let domain = domain();
    let config = EndpointConfig {
        rx_size: 1,
        ..config()
    };
    let (a, b) = (End::open(&domain), End::with(&domain, config, 0));
    let to_b = a.knows(&b);
    b.recv(None, &mut bytes, 2);
    a.send(to_b, None, &[1; 8], 1);
    wait([&a, &b], [1, 1]);
    fails_while_written(&mut buffers[0], (&a, to_b, &b), |bytes| {
        let iov = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let local = LocalIov::single(&iov, &Desc::NULL);
        let (any, tag) = (FiAddr(u64::MAX), Some((0x50, 0xf)));
        // SAFETY: the buffer is dropped behind the endpoint.
        unsafe { b.ep.recv(any, tag, local, 7, None) }
    });
    let context = context(&domain, 1);
    let [first, second] = members(&domain, &context);
    let (to_first, to_second) = (a.knows(&first), a.knows(&second));
    connect(&context, [(&a, to_first, &first), (&a, to_second, &second)]);
    fails_while_written(&mut buffers[1], (&a, to_first, &first), |bytes| {
        recv(&context, 0x50, bytes, 7)
    });
}
