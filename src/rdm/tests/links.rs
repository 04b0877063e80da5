//! Links, listening, sleeping and the end of endpoints on the embedded device, in one process.
//!
//! In one file, because the tests share the ways to make links and to break them.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::endpoints::{End, Transport, config, domain, queue, wait, wait_for};
use crate::av::FiAddr;
use crate::conn::CmTarget;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::{BindFlags, Completion, CompletionError};
use crate::rdm::completions::Side;
use crate::rdm::core::Core;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::executor::Executor;
use crate::rdm::operations::Kind;
use crate::rdm::shared::State;
use crate::rdm::{AddressVector, Endpoint, EndpointConfig, LocalIov};
use crate::verbs::{CmEvent, CmEventKind, PrivateData};
use crate::wire::rdm::Listener;

const SECOND: Duration = Duration::from_secs(1);

impl End {
    /// Uses the state of the endpoint.
    pub(super) fn state<R>(&self, using: impl FnOnce(&mut State) -> R) -> R {
        using(self.ep.shared().lock().as_mut().unwrap())
    }

    /// Calls the core as an event does. There is one peer.
    fn call(&self, call: impl FnOnce(&mut Core<Executor>, PeerKey, &mut Executor)) {
        self.ep.shared().apply_event(|core, io| {
            let peer = core.peer_keys().next().unwrap();
            call(core, peer, io);
        });
    }

    /// From now on, packets of the present links go through the queue pairs.
    fn leave_rings(&self) {
        self.state(|state| {
            let links: Vec<_> = state.io.links.keys().collect();
            for link in links {
                let link = state.io.links.get_mut(link).unwrap();
                if let Some(ring) = &mut link.ring {
                    ring.attached = Some(false);
                }
            }
        });
    }

    /// Waits for an error.
    fn error(&self) -> CompletionError {
        let limit = Instant::now() + 20 * SECOND;
        loop {
            match self.cq.read(1, &mut |_: &Completion| {}) {
                Err(FiErrno::EAGAIN) => assert!(Instant::now() < limit, "no error"),
                Err(FiErrno::EAVAIL) => return self.cq.read_error().unwrap(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn inject(&self, to: FiAddr, tag: Option<u64>, bytes: &[u8]) -> Result<(), FiErrno> {
        // SAFETY: the buffer is readable during the call.
        unsafe {
            let buf = bytes.as_ptr().cast();
            self.ep.inject(to, tag, buf, bytes.len(), None)
        }
    }
}

/// Waits until a condition holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + 20 * SECOND;
    while !holds() {
        assert!(Instant::now() < limit, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// One message, so that the two are connected; then both sides are idle.
fn connect(a: &End, b: &End) -> FiAddr {
    let to_b = a.knows(b);
    let mut bytes = [0; 8];
    b.recv(Some((77, 0)), &mut bytes, 2);
    a.send(to_b, Some(77), &[1; 8], 1);
    wait([a, b], [1, 1]);
    std::thread::sleep(Duration::from_millis(20));
    to_b
}

/// Two threads wait for the same device queue: the sleeping reader and the driver. Completions
/// without an entry for the reader wake both, and the driver may take their event.
#[test]
fn the_driver_takes_no_wake_up_from_a_sleeping_reader() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = connect(&a, &b);
    for round in 0..100_u64 {
        let mut bytes = [0; 8];
        let sent = round.to_ne_bytes();
        b.recv(Some((1, 0)), &mut bytes, 2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let read =
                    b.cq.sread(1, 1, Some(10 * SECOND), &mut |_: &Completion| {});
                assert_eq!(read, Ok(1), "round {round}");
            });
            std::thread::sleep(Duration::from_millis(1));
            for _ in 0..2 {
                // stored without an entry
                a.send(to_b, Some(99), &sent, 1);
                wait_for(&a, 1);
                std::thread::sleep(Duration::from_micros(300));
            }
            a.send(to_b, Some(1), &sent, 1);
            wait_for(&a, 1);
        });
        assert_eq!(u64::from_ne_bytes(bytes), round);
    }
}

/// An endpoint with a queue for each direction.
fn with_two_queues(domain: &Arc<crate::domain::Domain>) -> (End, End) {
    let config = EndpointConfig {
        tx_size: 256,
        ..config()
    };
    let ep = Endpoint::new(domain, config).unwrap();
    let (tx, rx) = (queue(domain, 0), queue(domain, 0));
    let av = AddressVector::open(4).unwrap();
    ep.bind_vector(&av).unwrap();
    ep.bind_cq(&tx, BindFlags::TRANSMIT).unwrap();
    ep.bind_cq(&rx, BindFlags::RECV).unwrap();
    ep.enable().unwrap();
    let end = |cq| End {
        ep: Arc::clone(&ep),
        cq,
        av: Arc::clone(&av),
    };
    (end(tx), end(rx))
}

/// A thread that waits on one queue takes the event and polls the completion for which another
/// thread sleeps on the other queue.
#[test]
fn the_reader_of_one_queue_wakes_that_of_the_other() {
    let domain = domain();
    let a = End::open(&domain);
    let (tx, rx) = with_two_queues(&domain);
    let to_b = connect(&a, &rx);
    for round in 0..20_u64 {
        let mut bytes = [0; 8];
        let sent = round.to_ne_bytes();
        let woken = AtomicBool::new(false);
        rx.recv(None, &mut bytes, 2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let read = rx
                    .cq
                    .sread(1, 1, Some(10 * SECOND), &mut |_: &Completion| {});
                woken.store(true, Ordering::Relaxed);
                assert_eq!(read, Ok(1), "round {round}");
            });
            a.send(to_b, None, &sent, 1);
            while !woken.load(Ordering::Relaxed) {
                let short = Some(Duration::from_millis(1));
                let read = tx.cq.sread(1, 1, short, &mut |_: &Completion| {});
                assert_eq!(read, Err(FiErrno::EAGAIN));
            }
        });
        wait_for(&a, 1);
        assert_eq!(u64::from_ne_bytes(bytes), round);
    }
}

/// More completions wait than the two progress calls of a thread poll before it sleeps, and those
/// in front have no entry for it.
#[test]
fn a_long_device_queue_does_not_delay_a_sleeping_reader() {
    let domain = domain();
    let (tx, rx) = with_two_queues(&domain);
    let peers: Vec<End> = (0..44).map(|_| End::open(&domain)).collect();
    let mut addrs = Vec::new();
    for peer in &peers {
        let addr = rx.knows(peer);
        tx.send(addr, Some(5), &[1; 8], 1);
        let mut bytes = [0; 8];
        peer.recv(Some((5, 0)), &mut bytes, 2);
        wait([&tx, peer], [1, 1]);
        addrs.push(addr);
    }
    let to_rx = peers[0].knows(&rx);
    std::thread::sleep(Duration::from_millis(50));
    let mut bytes = [0; 8];
    rx.recv(None, &mut bytes, 2);
    for addr in addrs {
        for _ in 0..3 {
            tx.send(addr, Some(6), &[1; 8], 1);
        }
    }
    peers[0].send(to_rx, None, &[7; 8], 1);
    wait_for(&peers[0], 1);
    let begin = Instant::now();
    let read = rx
        .cq
        .sread(1, 1, Some(10 * SECOND), &mut |_: &Completion| {});
    assert_eq!((read, bytes), (Ok(1), [7; 8]));
    assert!(begin.elapsed() < 5 * SECOND);
}

/// Parts of a long message wait for credit when the session ends. The application gets the error,
/// and may unmap the buffer: nothing reads it any more.
#[test]
fn parts_of_a_failed_message_are_not_read() {
    const LEN: usize = 1 << 20;
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = connect(&a, &b);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), LEN, access, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    // SAFETY: mapped above, and not used after it is unmapped.
    let bytes = unsafe { std::slice::from_raw_parts(memory.cast::<u8>(), LEN) };
    let mut target = vec![0; LEN];
    b.recv(None, &mut target, 2);
    a.send(to_b, None, bytes, 3);
    let cts = |state: &mut State| state.io.rx.arrivals.len() == 1;
    until("no RTS", || {
        assert_eq!((a.poll(), b.poll()), (None, None));
        b.state(cts)
    });
    let parts = |state: &mut State| state.io.tx.any(|op| matches!(op.kind, Kind::Data { .. }));
    until("no CTS", || {
        assert_eq!(a.poll(), None);
        a.state(parts)
    });
    // b ends the session; a learns of it when it connects again
    b.call(|core, peer, io| core.fail(peer, FiErrno::ECONNABORTED, io));
    assert_eq!(b.error().completion.context, 2);
    let error = a.error();
    assert_eq!(
        (error.completion.context, error.err),
        (3, FiErrno::ECONNABORTED)
    );
    assert!(!a.state(parts), "parts are left");
    // SAFETY: mapped above.
    assert_eq!(unsafe { libc::munmap(memory, LEN) }, 0);
    let mut next = [0; 8];
    b.recv(Some((4, 0)), &mut next, 5);
    a.send(to_b, Some(4), &[9; 8], 6);
    let [sent, got] = wait([&a, &b], [1, 1]);
    assert_eq!((sent[0].context, got[0].context, next), (6, 5, [9; 8]));
}

/// The device may still send from the slot of an operation that has failed.
#[test]
fn the_slot_of_a_failed_send_is_not_reused_before_its_link_has_ended() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = connect(&a, &b);
    a.leave_rings();
    let mut seen = None;
    while seen.is_none() {
        assert_eq!(a.inject(to_b, Some(1), &[5; 3000]), Ok(()));
        a.call(|core, peer, io| {
            if io.tx.any(|op| matches!(op.kind, Kind::Message)) {
                let free = io.memory.free_slots();
                core.fail(peer, FiErrno::ECONNABORTED, io);
                assert_eq!(io.memory.free_slots(), free, "reused at once");
                seen = Some(free);
            }
        });
    }
    let free = |state: &mut State| Some(state.io.memory.free_slots()) > seen;
    until("kept for ever", || a.state(free));
}

/// A link is ended while its dial is under way, whose result comes later. The peer is dialled
/// again.
#[test]
fn a_link_that_ends_during_its_dial_is_replaced() {
    let domain = domain();
    for round in 0..40 {
        let (a, b) = (End::open(&domain), End::open(&domain));
        let to_b = a.knows(&b);
        let mut bytes = [0; 8];
        b.recv(None, &mut bytes, 2);
        a.send(to_b, None, &[3; 8], 1);
        std::thread::sleep(Duration::from_micros(50 * round));
        a.call(|core, peer, io| core.end_links(peer, io));
        wait([&a, &b], [1, 1]);
        assert_eq!(bytes, [3; 8]);
    }
}

/// An acceptor that ends a link before the last message of the handshake has arrived rejects it,
/// although the dialler has the reply. The link has broken then: nothing is posted to a link
/// without a queue pair, and the peer is dialled again.
#[test]
fn a_rejection_after_the_reply_breaks_the_link() {
    let domain = domain();
    for kind in [CmEventKind::Rejected, CmEventKind::Unreachable] {
        let (a, b) = (End::open(&domain), End::open(&domain));
        let to_b = connect(&a, &b);
        let first = a.state(|state| state.io.links.keys().next()).unwrap();
        let cm = a.ep.shared().cm_of(first).unwrap();
        cm.cm_event(CmEvent {
            kind,
            object: 0,
            new_id: None,
            peer_qp: None,
            status: 110,
            private_data: PrivateData::EMPTY,
        });
        let mut bytes = [0; 8];
        b.recv(None, &mut bytes, 2);
        a.send(to_b, None, &[7; 8], 1);
        wait([&a, &b], [1, 1]);
        assert_eq!(bytes, [7; 8]);
        until("the link has ended", || {
            a.state(|state| state.io.links.keys().all(|link| link != first))
        });
    }
}

/// A process that listens can end a request without an answer: it has no room for requests, or
/// cannot accept this one. The session continues with the next dial. It ends if no process listens.
#[test]
fn a_rejection_without_private_data_ends_no_session() {
    // reasons of the InfiniBand specification: timeout, stale connection, defined by the consumer;
    // invalid service
    for (status, listens) in [(4, true), (10, true), (28, true), (8, false)] {
        // each domain has a driver thread of its own
        let (a, b) = (End::open(&domain()), End::open(&domain()));
        let to_b = connect(&a, &b);
        let silent = b.ep.shared().lock();
        let first = a.state(|state| state.io.links.keys().next()).unwrap();
        a.call(|core, peer, io| core.end_links(peer, io));
        a.send(to_b, None, &[7; 8], 1);
        let second = || a.state(|state| state.io.links.keys().find(|link| *link != first));
        until("the peer is dialled again", || second().is_some());
        let cm = a.ep.shared().cm_of(second().unwrap()).unwrap();
        cm.cm_event(CmEvent {
            kind: CmEventKind::Rejected,
            object: 0,
            new_id: None,
            peer_qp: None,
            status,
            private_data: PrivateData::EMPTY,
        });
        drop(silent);
        if listens {
            let mut bytes = [0; 8];
            b.recv(None, &mut bytes, 2);
            wait([&a, &b], [1, 1]);
            assert_eq!(bytes, [7; 8]);
        } else {
            assert_eq!(a.error().err, FiErrno::ECONNABORTED);
        }
    }
}

/// A post begins a period after which a silent peer is probed. The driver sees it.
#[test]
fn the_driver_sees_times_that_a_post_has_set() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = connect(&a, &b);
    // as of a device that does not report the end of a peer
    a.state(|state| state.core.config.beat = Some(20_000_000));
    let bytes = vec![0; 100_000];
    // announced, and not answered
    a.send(to_b, None, &bytes, 1);
    let first = a.state(|state| state.core.deadline()).unwrap();
    until("the driver sleeps", || {
        a.state(|state| state.core.deadline()) > Some(first)
    });
}

/// A driver without work sleeps without a timeout.
#[test]
fn an_idle_driver_sleeps() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    connect(&a, &b);
    std::thread::sleep(Duration::from_millis(100));
    let drives = |end: &End| end.state(|state| state.drives);
    let before = [drives(&a), drives(&b)];
    std::thread::sleep(Duration::from_millis(500));
    let after = [drives(&a), drives(&b)];
    assert!(
        after[0] - before[0] <= 2 && after[1] - before[1] <= 2,
        "{before:?} {after:?}"
    );
}

/// A close keeps the entries for which the completion queue has no room.
#[test]
fn a_close_loses_no_entries() {
    let domain = domain();
    let a = End::open(&domain);
    let b = End::with(&domain, config(), 4);
    let to_b = connect(&a, &b);
    let mut bytes = [[0_u8; 8]; 10];
    for bytes in &mut bytes {
        b.recv(None, bytes, 2);
    }
    for _ in 0..10 {
        a.send(to_b, None, &[4; 8], 1);
    }
    let all = |state: &mut State| {
        state.poll().unwrap();
        state.io.completions.len(Side::Rx) == 10
    };
    let mut sent = 0;
    until("no entries", || {
        sent += usize::from(a.poll().is_some());
        b.state(all) && sent == 10
    });
    b.ep.close();
    let mut found = 0;
    while b.poll().is_some() {
        found += 1;
    }
    assert_eq!(found, 10);
}

/// Messages without data use no room of a multi-receive buffer. While the application does not read
/// their entries, the credit of the sender bounds their number.
#[test]
fn entries_of_a_multi_receive_buffer_are_bounded() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = connect(&a, &b);
    let mut buffer = vec![0; 4096];
    let iov = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let halves = [iov, iov];
    let any = FiAddr(u64::MAX);
    let multi = Some(Flags::MULTI_RECV | Flags::COMPLETION);
    // SAFETY: two readable entries without descriptors.
    let two = unsafe { LocalIov::from_raw(halves.as_ptr(), std::ptr::null(), 2) }.unwrap();
    // SAFETY: refused.
    let refused = unsafe { b.ep.recv(any, None, two, 2, multi) };
    assert_eq!(refused, Err(FiErrno::EINVAL));
    let local = LocalIov::single(&iov, &Desc::NULL);
    // SAFETY: the buffer lives until the endpoint is closed.
    unsafe { b.ep.recv(any, None, local, 2, multi) }.unwrap();
    let (mut sent, mut refused) = (0, 0);
    while refused < 300 {
        match a.inject(to_b, None, &[]) {
            Ok(()) => sent += 1,
            Err(FiErrno::EAGAIN) => refused += 1,
            Err(error) => panic!("{error}"),
        }
        b.state(|state| state.poll().unwrap());
        assert_eq!(a.poll(), None);
        assert!(sent < 400_000, "not bounded");
    }
    // the credit comes back with the entries
    let mut read = 0;
    let limit = Instant::now() + 60 * SECOND;
    while read < sent {
        read += usize::from(b.poll().is_some());
        assert_eq!(a.poll(), None);
        assert!(Instant::now() < limit, "{read} of {sent}");
    }
    assert_eq!(a.inject(to_b, None, &[]), Ok(()));
    wait([&a, &b], [0, 1]);
}

/// An endpoint without a source address is reached at each address of its device, and all of them
/// are one peer.
#[test]
fn an_endpoint_listens_at_each_address_of_its_device() {
    let domain = domain();
    let anywhere = || EndpointConfig {
        src: None,
        ..config()
    };
    let b = End::with(&domain, anywhere(), 0);
    let listening = b.ep.shared().listening.get().unwrap();
    let all: Vec<_> = listening.addresses().collect();
    assert_eq!(all.len(), domain.device().addresses().len());
    assert_eq!(all[0], b.ep.name().unwrap());
    assert!(all.iter().all(|addr| addr.port() == all[0].port()));
    let mut bytes = [0; 8];
    for (number, addr) in all.iter().enumerate() {
        let sent = [number as u8; 8];
        let a = End::with(&domain, anywhere(), 0);
        let from_a = b.knows(&a);
        let (to_b, by_name) = (a.knows_at(*addr), a.knows(&b));
        for to in [to_b, by_name] {
            b.recv(None, &mut bytes, 2);
            a.send(to, None, &sent, 1);
            let [_, got] = wait([&a, &b], [1, 1]);
            assert_eq!((bytes, got[0].src_addr), (sent, from_a.0), "{addr}");
        }
        let links = a.state(|state| {
            let mut keys = state.core.peer_keys();
            let first = keys.next().unwrap();
            assert_eq!(keys.next(), None, "{addr}: two peers");
            drop(keys);
            state.core.links_to(first)
        });
        assert_eq!(links, 1);
    }
    // a message to each own address stays inside
    for addr in &all {
        let own = b.knows_at(*addr);
        b.recv(None, &mut bytes, 2);
        b.send(own, None, &[9; 8], 1);
        wait_for(&b, 2);
    }
    let ipv6 = EndpointConfig {
        src: None,
        ipv4: Some(false),
        ..config()
    };
    let ipv6 = End::with(&domain, ipv6, 0);
    assert!(ipv6.ep.name().unwrap().is_ipv6());
}

/// The source of messages is looked up again when an address turns out to be one of their sender.
#[test]
fn the_source_of_a_peer_follows_its_names() {
    let domain = domain();
    let anywhere = || EndpointConfig {
        src: None,
        ..config()
    };
    let (a, b) = (
        End::with(&domain, anywhere(), 0),
        End::with(&domain, anywhere(), 0),
    );
    let listening = a.ep.shared().listening.get().unwrap();
    let Some(other) = listening.addresses().nth(1) else {
        eprintln!("skipped: the device has one address");
        return;
    };
    let (by_other, to_b) = (b.knows_at(other), a.knows(&b));
    let mut dials = 0;
    let ep = b.ep.shared();
    ep.apply_event(|core, _| dials = std::mem::take(&mut core.config.dials));
    // the address is used
    let (mut directed, mut bytes) = ([0; 8], [0; 8]);
    let iov = libc::iovec {
        iov_base: directed.as_mut_ptr().cast(),
        iov_len: 8,
    };
    let local = LocalIov::single(&iov, &Desc::NULL);
    // SAFETY: the buffer lives until the completion.
    unsafe { b.ep.recv(by_other, None, local, 3, None) }.unwrap();
    b.recv(None, &mut bytes, 2);
    a.send(to_b, None, &[1; 8], 1);
    let [_, got] = wait([&a, &b], [1, 1]);
    assert_eq!((got[0].context, got[0].src_addr), (2, u64::MAX));
    ep.apply_event(|core, io| {
        core.config.dials = dials;
        core.advance_changed(io);
    });
    let limit = Instant::now() + Duration::from_secs(20);
    while b.state(|state| state.core.peer_keys().count()) != 1 {
        b.poll();
        assert!(Instant::now() < limit, "two peers");
    }
    a.send(to_b, None, &[2; 8], 1);
    let [_, got] = wait([&a, &b], [1, 1]);
    assert_eq!((got[0].context, got[0].src_addr), (3, by_other.0));
}

/// The driver has slept for longer than the connect timeout when the application uses an address
/// that a peer has stated as a further one. It is dialled for its time all the same.
#[test]
fn a_stated_address_is_dialled_long_after_the_last_event() {
    let domain = domain();
    let impatient = EndpointConfig {
        connect_timeout: Some(SECOND),
        ..config()
    };
    let a = End::with(&domain, impatient, 0);
    let (b, other) = (End::open(&domain), End::open(&domain));
    connect(&a, &b);
    let addr = other.ep.name().unwrap();
    let stated = Listener::new(addr.ip(), addr.port()).unwrap();
    a.call(|core, peer, _| core.state_further(peer, &[stated]));
    std::thread::sleep(3 * SECOND / 2);
    let mut bytes = [0; 8];
    other.recv(None, &mut bytes, 2);
    a.send(a.knows_at(addr), None, &[7; 8], 1);
    wait([&a, &other], [1, 1]);
    assert_eq!(bytes, [7; 8]);
}

/// The source of a peer's messages follows what its addresses are found to be.
#[test]
fn the_source_of_a_peer_follows_its_addresses() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let mut bytes = [0; 8];
    let mut source = || {
        b.recv(None, &mut bytes, 2);
        a.send(to_b, None, &[1; 8], 1);
        let [_, got] = wait([&a, &b], [1, 1]);
        got[0].src_addr
    };
    assert_eq!(source(), Completion::NO_ADDR);
    let places = [
        Listener::new([127, 0, 0, 9].into(), 9),
        Listener::new([127, 0, 0, 9].into(), 10),
    ];
    let [stated, used] = places.map(Option::unwrap);
    let [to_stated, to_used] = [stated, used].map(|at| b.knows_at(at.socket_addr()));
    let of_a = b.state(|state| state.core.peer_keys().next().unwrap());
    assert_eq!(source(), Completion::NO_ADDR);
    // HELLO states one
    let states = |further: &[Listener]| {
        let shared = b.ep.shared();
        shared.apply_event(|core, _| core.state_further(of_a, further));
    };
    states(&[stated]);
    assert_eq!(source(), to_stated.0);
    // which leads to another endpoint, perhaps
    b.state(|state| state.peer_of(to_stated).unwrap());
    assert_eq!(source(), Completion::NO_ADDR);
    states(&[]);
    // one that was used before is found to be an address of the peer
    let alias = b.state(|state| state.peer_of(to_used).unwrap());
    assert_eq!(source(), Completion::NO_ADDR);
    // many others are known
    for port in 1..100 {
        let other = Listener::new([127, 0, 0, 8].into(), port).unwrap();
        b.state(|state| state.core.peer_at(other).unwrap());
    }
    let examined = || b.state(|state| state.core.examined.take());
    b.ep.shared()
        .apply_event(|core, io| core.merge(alias, of_a, io));
    examined();
    assert_eq!(source(), to_used.0);
    assert_eq!(examined(), 2);
    assert_eq!(source(), to_used.0);
    assert_eq!(examined(), 0);
}

/// An endpoint that may have 3 links has 10 idle peers, and connects to each again.
#[test]
fn idle_peers_do_not_keep_others_out() {
    let domain = domain();
    let few = EndpointConfig {
        max_links: Some(3),
        ..config()
    };
    let hub = End::with(&domain, few, 0);
    let peers: Vec<End> = (0..10).map(|_| End::open(&domain)).collect();
    for round in 0..3_u8 {
        for peer in &peers {
            let (to_hub, to_peer) = (peer.knows(&hub), hub.knows(peer));
            let (sent, mut bytes) = ([round; 8], [0; 8]);
            if round % 2 == 0 {
                hub.recv(None, &mut bytes, 2);
                peer.send(to_hub, None, &sent, 1);
            } else {
                peer.recv(None, &mut bytes, 2);
                hub.send(to_peer, None, &sent, 1);
            }
            wait([&hub, peer], [1, 1]);
            assert_eq!(bytes, sent);
            let links = hub.state(|state| state.io.links.len());
            assert!(links <= 3, "{links} links");
        }
    }
}

/// Without registered memory, sends that need some fail, and others do not.
#[test]
fn a_send_without_memory_fails() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = connect(&a, &b);
    a.leave_rings();
    a.state(|state| state.io.memory.exhaust(0));
    let bytes = [5; 2000];
    a.send(to_b, None, &bytes, 3);
    let error = a.error();
    assert_eq!((error.completion.context, error.err), (3, FiErrno::ENOMEM));
    assert_eq!(a.inject(to_b, None, &bytes), Err(FiErrno::ENOMEM));
    let mut target = vec![0; 2000];
    b.recv(None, &mut target, 2);
    a.send(to_b, None, &[6; 8], 1);
    wait([&a, &b], [1, 1]);
    assert_eq!(target[..8], [6; 8]);
}

/// A send waits while packets under way to another peer have the memory.
#[test]
fn a_send_waits_for_memory_that_comes_back() {
    let domain = domain();
    let (a, b, c) = (End::open(&domain), End::open(&domain), End::open(&domain));
    let (to_b, to_c) = (connect(&a, &b), connect(&a, &c));
    a.leave_rings();
    a.state(|state| state.io.memory.exhaust(1));
    for round in 0..20_u8 {
        let (mut at_b, mut at_c) = ([0; 1000], [0; 1000]);
        b.recv(None, &mut at_b, 2);
        c.recv(None, &mut at_c, 2);
        let (for_b, for_c) = ([round; 1000], [round + 100; 1000]);
        a.send(to_b, None, &for_b, 1);
        a.send(to_c, None, &for_c, 1);
        wait([&a, &b], [2, 1]);
        wait_for(&c, 1);
        assert!((at_b, at_c) == (for_b, for_c));
    }
}

/// An endpoint with idle peers posts few receives; polls that find more completions than four times
/// the receives raise their number to that which the peers' credit needs.
#[test]
fn receives_follow_the_backlog() {
    let domain = domain();
    let end = End::open(&domain);
    end.state(|state| {
        let mut posted = |completions: &[usize]| {
            for count in completions {
                state.io.is_behind(*count);
            }
            state.io.post_receives(1000).unwrap();
            state.io.receives_posted()
        };
        assert_eq!(posted(&[]), 128);
        assert_eq!(posted(&[64; 7]), 128);
        assert_eq!(posted(&[64]), 256);
        assert_eq!(posted(&[64; 15]), 256);
        assert_eq!(posted(&[64]), 512);
        assert_eq!(posted(&[64; 32]), 1000);
    });
}

/// Endpoints that may have one link for each peer: each pair dials from both sides, and has two
/// links at times. Idle ones make room for the next pair.
#[test]
fn links_of_both_sides_do_not_keep_others_out() {
    let domain = domain();
    // if each pair has got one link, none dials again: then other endpoints try
    let doubles = (0..100).any(|_| pairs_of_three(&domain) != 0);
    assert!(doubles, "no pair had two links");
}

/// Returns how often a pair had two links.
fn pairs_of_three(domain: &Arc<crate::domain::Domain>) -> usize {
    let few = EndpointConfig {
        max_links: Some(2),
        ..config()
    };
    let ends: Vec<End> = (0..3).map(|_| End::with(domain, few.clone(), 0)).collect();
    let mut doubles = 0;
    for round in 0..8_u8 {
        for (a, b) in [(0, 1), (1, 2), (2, 0)] {
            let (a, b) = (&ends[a], &ends[b]);
            let (to_b, to_a) = (a.knows(b), b.knows(a));
            let (mut at_a, mut at_b) = ([0; 8], [0; 8]);
            a.recv(None, &mut at_a, 2);
            b.recv(None, &mut at_b, 2);
            let message = [round; 8];
            {
                // the driver begins both dials in one turn
                let shared = a.ep.shared();
                let _events = shared.driver().dispatcher().registry();
                a.send(to_b, None, &message, 1);
                b.send(to_a, None, &message, 1);
            }
            wait([a, b], [2, 2]);
            assert_eq!((at_a, at_b), (message, message));
            let links = a.state(|state| {
                let all: Vec<_> = state.core.peer_keys().collect();
                let links = all.into_iter().map(|peer| state.core.links_to(peer));
                links.max().unwrap_or(0)
            });
            doubles += usize::from(links == 2);
            for end in &ends {
                let links = end.state(|state| state.io.links.len());
                assert!(links <= 2, "{links} links");
            }
        }
    }
    doubles
}

/// A packet that the device refuses although the send queue has room is posted again by the driver:
/// nothing else is under way on the link. After an error that does not pass, the next link has it.
#[test]
fn a_packet_that_the_device_refuses_is_posted_again() {
    Transport::each(|transport| {
        let domain = domain();
        let ends = [(); 2].map(|()| End::with_rings(&domain, transport.config(), 0, false));
        let [a, b] = &ends;
        let to_b = a.knows(b);
        let refusals: [&[FiErrno]; 4] = [
            &[],
            &[FiErrno::EAGAIN],
            &[FiErrno::EAGAIN; 5],
            &[FiErrno::EINVAL],
        ];
        // sent inline, and from the memory of a packet
        for (refused, len) in refusals.into_iter().flat_map(|it| [(it, 1), (it, 2000)]) {
            let (bytes, mut target) = (vec![3; len], vec![0; len]);
            let mut send = || {
                b.recv(Some((1, 0)), &mut target, 2);
                a.send(to_b, Some(1), &bytes, 1);
                wait([a, b], [1, 1]);
                assert!(target == bytes, "{refused:?}");
                target.fill(0);
            };
            let link = || {
                let mut link = None;
                a.call(|core, peer, _| link = core.out_link(peer));
                link
            };
            // the first one connects the link
            send();
            let before = link().unwrap();
            a.ep.shared().apply_event(|_, io| {
                io.links.get_mut(before).unwrap().refuse(refused);
            });
            send();
            let stays = link() == Some(before);
            assert_eq!(stays, !refused.contains(&FiErrno::EINVAL), "{refused:?}");
        }
    });
}
