//! Endpoints on the embedded device, in one process.
//!
//! In one file, because the tests share the endpoints, and the ways to send and to wait.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::Token;
use crate::auth::AuthKey;
use crate::av::FiAddr;
use crate::domain::{Domain, DomainConfig};
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::{Access, Desc, Form, Mode, MrConfig};
use crate::queue::{BindFlags, Completion, CompletionQueue, CqConfig, WaitKind};
use crate::rdm::core::Core;
use crate::rdm::core::link::LinkKey;
use crate::rdm::executor::{CALL, Executor};
use crate::rdm::operations::Kind;
use crate::rdm::{AddressVector, Directed, Endpoint, EndpointConfig, Limits, LocalIov};
use crate::verbs::{Qp, devices, replaced};

/// What the links of an endpoint are made of. Tests of both run on each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Rc,
    Xrc,
}

impl Transport {
    /// Runs a test on each transport.
    pub(super) fn each(mut test: impl FnMut(Self)) {
        for transport in [Self::Rc, Self::Xrc] {
            eprintln!("on {transport:?}");
            test(transport);
        }
    }

    /// Attributes of an endpoint without RMA.
    pub(super) fn config(self) -> EndpointConfig {
        EndpointConfig {
            xrc: self == Self::Xrc,
            ..config()
        }
    }
}

/// The queue pair to which a link posts: its own one, or that of its circuit.
pub(super) fn queue_pair(io: &mut Executor, link: LinkKey) -> Option<Arc<Qp>> {
    let record = io.links.get_mut(link)?;
    let Some(port) = &record.port else {
        return record.qp.clone();
    };
    let circuit = port.circuit?;
    io.xrc.as_mut()?.queue_mut(circuit)?.qp.clone()
}

/// As the driver when the requests of all circuits have not completed within the limit of time.
pub(super) fn give_up_circuits(core: &mut Core<Executor>, io: &mut Executor) {
    for circuit in io.xrc.as_ref().unwrap().keys() {
        io.break_circuit(circuit);
        io.circuit_failed(circuit);
    }
    io.tend_circuits(core, false, Instant::now() + Duration::from_secs(5));
}

/// An endpoint with its own queue.
pub(super) struct End {
    pub(super) ep: Arc<Endpoint>,
    pub(super) cq: Arc<CompletionQueue>,
    pub(super) av: Arc<AddressVector>,
}

pub(in crate::rdm) fn domain() -> Arc<Domain> {
    let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
    Domain::open(&device, DomainConfig::default()).unwrap()
}

pub(super) fn config() -> EndpointConfig {
    EndpointConfig {
        token: Token(0),
        context: 0,
        tx_size: 64,
        rx_size: 256,
        inject_size: 4096,
        tx_op_flags: Flags::empty(),
        rx_op_flags: Flags::empty(),
        needs_tx: true,
        needs_rx: true,
        rma: false,
        target: false,
        durable: false,
        atomics: false,
        accepts_data: false,
        peer_atomics: Access::empty(),
        rma_after_sends: false,
        sends_after_rma: false,
        shared_rx: false,
        directed: Directed::ALL,
        source: true,
        xrc: false,
        auto: false,
        auth: None,
        traffic_class: None,
        src: Some("127.0.0.1:0".parse().unwrap()),
        max_links: None,
        connect_timeout: None,
        ipv4: None,
    }
}

/// A completion queue with a wait object.
pub(super) fn queue(domain: &Arc<Domain>, size: usize) -> Arc<CompletionQueue> {
    let config = CqConfig {
        size,
        wait: WaitKind::Unspec,
        sources_only: true,
        ..CqConfig::default()
    };
    CompletionQueue::open(domain.queues(), config).unwrap()
}

impl End {
    pub(super) fn open(domain: &Arc<Domain>) -> Self {
        Self::with(domain, config(), 0)
    }

    /// With these attributes and a completion queue of this size.
    pub(super) fn with(domain: &Arc<Domain>, config: EndpointConfig, size: usize) -> Self {
        Self::with_rings(domain, config, size, true)
    }

    /// As [`Self::with`]; its links have rings or not.
    pub(super) fn with_rings(
        domain: &Arc<Domain>,
        config: EndpointConfig,
        size: usize,
        rings: bool,
    ) -> Self {
        // a peer may dial the address as soon as the endpoint is enabled
        Self::before(domain, config, size, |ep| {
            ep.shared().no_rings.store(!rings, Ordering::Relaxed);
        })
    }

    /// As [`Self::with`], after `early` with the endpoint, which is not enabled yet.
    pub(super) fn before(
        domain: &Arc<Domain>,
        config: EndpointConfig,
        size: usize,
        early: impl FnOnce(&Arc<Endpoint>),
    ) -> Self {
        let ep = Endpoint::new(domain, config).unwrap();
        early(&ep);
        let cq = queue(domain, size);
        let av = AddressVector::open(4).unwrap();
        ep.bind_vector(&av).unwrap();
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
            .unwrap();
        ep.enable().unwrap();
        Self { ep, cq, av }
    }

    pub(super) fn knows(&self, other: &Self) -> FiAddr {
        self.knows_at(other.ep.name().unwrap())
    }

    pub(super) fn knows_at(&self, addr: SocketAddr) -> FiAddr {
        let mut found = None;
        self.av.insert_all([Ok(addr)], |_, addr| found = addr.ok());
        found.unwrap()
    }

    pub(super) fn send(&self, to: FiAddr, tag: Option<u64>, bytes: &[u8], context: usize) {
        self.send_from(to, tag, bytes, Desc::NULL, context);
    }

    pub(super) fn send_from(
        &self,
        to: FiAddr,
        tag: Option<u64>,
        bytes: &[u8],
        desc: Desc,
        context: usize,
    ) {
        let iov = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let local = LocalIov::single(&iov, &desc);
        // SAFETY: the callers keep the buffer until the completion.
        unsafe { self.ep.send(to, tag, local, None, context, None) }.unwrap();
    }

    pub(super) fn recv_at(&self, tag: (u64, u64), bytes: &mut [u8], desc: Desc, context: usize) {
        let iov = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let local = LocalIov::single(&iov, &desc);
        let any = FiAddr(u64::MAX);
        // SAFETY: the callers keep the buffer until the completion.
        unsafe { self.ep.recv(any, Some(tag), local, context, None) }.unwrap();
    }

    pub(super) fn recv(&self, tag: Option<(u64, u64)>, bytes: &mut [u8], context: usize) {
        let iov = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let local = LocalIov::single(&iov, &Desc::NULL);
        let any = FiAddr(u64::MAX);
        // SAFETY: the callers keep the buffer until the completion.
        unsafe { self.ep.recv(any, tag, local, context, None) }.unwrap();
    }

    /// Posts a receive of several buffers.
    pub(super) fn recv_into(&self, tag: (u64, u64), buffers: &mut [&mut [u8]], context: usize) {
        let of = |bytes: &mut &mut [u8]| libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let iovs: Vec<_> = buffers.iter_mut().map(of).collect();
        let descs = vec![Desc::NULL; iovs.len()];
        let local = LocalIov::borrowed(&iovs, &descs);
        let any = FiAddr(u64::MAX);
        // SAFETY: the callers keep the buffers until the completion.
        unsafe { self.ep.recv(any, Some(tag), local, context, None) }.unwrap();
    }

    pub(super) fn poll(&self) -> Option<Completion> {
        let mut found = None;
        match self
            .cq
            .read(1, &mut |completion: &Completion| found = Some(*completion))
        {
            Ok(_) => found,
            Err(FiErrno::EAGAIN) => None,
            Err(error) => panic!("{error}: {:?}", self.cq.read_error()),
        }
    }
}

/// Polls an end until it has so many completions.
pub(super) fn wait_for(end: &End, count: usize) -> Vec<Completion> {
    let limit = Instant::now() + Duration::from_secs(20);
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(end.poll());
        assert!(Instant::now() < limit, "{all:?}");
    }
    all
}

/// Polls both ends until each has so many completions.
pub(super) fn wait(ends: [&End; 2], counts: [usize; 2]) -> [Vec<Completion>; 2] {
    let limit = Instant::now() + Duration::from_secs(20);
    let mut all = [Vec::new(), Vec::new()];
    while all[0].len() < counts[0] || all[1].len() < counts[1] {
        for (end, found) in ends.iter().zip(&mut all) {
            found.extend(end.poll());
        }
        assert!(Instant::now() < limit, "{all:?}");
    }
    all
}

#[test]
fn messages_of_every_length() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let from_a = b.knows(&a);
    for (number, len) in [0, 1, 100, 500, 5_000, 8_192, 8_193, 100_000, 3 << 20]
        .into_iter()
        .enumerate()
    {
        for early in [true, false] {
            for tagged in [true, false] {
                let bytes: Vec<u8> = (0..len).map(|i: usize| (i * 7 + number) as u8).collect();
                let mut target = vec![0; len + 3];
                let tag = tagged.then_some(5);
                let want = tagged.then_some((4, 1));
                if early {
                    b.recv(want, &mut target, 2);
                }
                a.send(to_b, tag, &bytes, 1);
                if !early {
                    for _ in 0..100 {
                        assert_eq!(b.poll(), None);
                    }
                    b.recv(want, &mut target, 2);
                }
                let [sent, got] = wait([&a, &b], [1, 1]);
                assert_eq!((sent[0].context, got[0].context), (1, 2));
                assert_eq!((got[0].len, got[0].tag), (len, tag.unwrap_or(0)));
                assert_eq!(got[0].src_addr, from_a.0);
                assert!(target[..len] == bytes && target[len..] == [0; 3], "{len}");
            }
        }
    }
}

/// The source of a receive of the other kind is ignored, also one that is in no address vector.
#[test]
fn the_source_of_receives_that_are_not_directed_is_ignored() {
    let domain = domain();
    for directed in [false, true] {
        let config = EndpointConfig {
            directed: Directed {
                untagged: directed,
                tagged: true,
            },
            ..config()
        };
        let (a, b) = (End::open(&domain), End::with(&domain, config, 0));
        let mut byte = [0; 1];
        let list = libc::iovec {
            iov_base: byte.as_mut_ptr().cast(),
            iov_len: byte.len(),
        };
        let post = |tag, context| {
            let local = LocalIov::single(&list, &Desc::NULL);
            // SAFETY: the buffer is dropped behind the endpoint.
            unsafe { b.ep.recv(FiAddr(77), tag, local, context, None) }
        };
        assert_eq!(post(Some((1, 0)), 1), Err(FiErrno::EINVAL));
        if directed {
            assert_eq!(post(None, 2), Err(FiErrno::EINVAL));
            continue;
        }
        assert_eq!(post(None, 2), Ok(()));
        let to_b = a.knows(&b);
        a.send(to_b, None, &[9], 3);
        let [_, got] = wait([&a, &b], [1, 1]);
        assert_eq!((got[0].context, byte), (2, [9]));
    }
}

#[test]
fn a_message_to_itself() {
    let domain = domain();
    let a = End::open(&domain);
    let to_a = a.knows(&a);
    for len in [0, 10, 5_000, 100_000] {
        for early in [true, false] {
            let bytes: Vec<u8> = (0..len).map(|i: usize| i as u8).collect();
            let mut target = vec![0; len];
            if early {
                a.recv(Some((1, 0)), &mut target, 2);
            }
            a.send(to_a, Some(1), &bytes, 1);
            if !early {
                a.recv(Some((1, 0)), &mut target, 2);
            }
            let found = wait_for(&a, 2);
            let mut contexts = [found[0].context, found[1].context];
            contexts.sort_unstable();
            assert_eq!(contexts, [1, 2]);
            assert!(target == bytes);
        }
    }
}

/// The application has the rest of a message that is sent in parts, and its receiver is stopped.
#[test]
fn a_close_does_not_send_the_rest_of_a_message() {
    let domain = domain();
    Transport::each(|transport| {
        // dropped behind the endpoints
        let (bytes, mut target) = (vec![7_u8; 4 << 20], vec![0; 4 << 20]);
        let open = || End::with(&domain, transport.config(), 0);
        let (a, b) = (open(), open());
        let to_b = a.knows(&b);
        b.recv(Some((1, 0)), &mut target, 2);
        // several buffers are no source that could be read
        let list = [&bytes[..1000], &bytes[1000..]].map(|part| libc::iovec {
            iov_base: part.as_ptr().cast_mut().cast(),
            iov_len: part.len(),
        });
        let local = LocalIov::borrowed(&list, &[Desc::NULL; 2]);
        // SAFETY: the buffers live until the endpoint is closed.
        unsafe { a.ep.send(to_b, Some(1), local, None, 1, None) }.unwrap();
        let limit = Instant::now() + Duration::from_secs(20);
        let parts = || a.state(|state| state.io.tx.any(|op| matches!(op.kind, Kind::Data { .. })));
        while !parts() {
            assert_eq!((a.poll(), b.poll()), (None, None));
            assert!(Instant::now() < limit);
        }
        for _ in 0..1_000 {
            assert_eq!(a.poll(), None);
        }
        assert!(parts(), "the receiver takes all parts");
        let begin = Instant::now();
        a.ep.close();
        assert!(begin.elapsed() < Duration::from_secs(5), "waits");
    });
}

/// No call copies more of them than a limit, whether the application polls or not; what is behind
/// them does not wait.
#[test]
fn long_messages_to_itself_are_divided() {
    const LEN: usize = 2 * CALL + 5000;
    let domain = domain();
    for (early, polls) in [(true, true), (true, false), (false, true), (false, false)] {
        let a = End::open(&domain);
        let to_a = a.knows(&a);
        let bytes: Vec<u8> = (0..LEN).map(|i| (i >> 9) as u8).collect();
        // the second one is truncated
        let mut targets = [vec![0; LEN], vec![0; CALL + 9]];
        let (mut short, mut contexts) = ([0; 8], Vec::new());
        for tag in [1, 2] {
            if early {
                a.recv(
                    Some((tag, 0)),
                    &mut targets[tag as usize - 1],
                    10 + tag as usize,
                );
            }
            a.send(to_a, Some(tag), &bytes, tag as usize);
        }
        if !early {
            for tag in [1, 2] {
                a.recv(
                    Some((tag, 0)),
                    &mut targets[tag as usize - 1],
                    10 + tag as usize,
                );
            }
        }
        a.recv(Some((3, 0)), &mut short, 13);
        a.send(to_a, Some(3), &[7; 8], 3);
        let limit = Instant::now() + Duration::from_secs(20);
        if !polls {
            while a.state(|state| state.io.copies()) {
                assert!(Instant::now() < limit, "the driver does not go on");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        while contexts.len() != 6 {
            match a
                .cq
                .read(1, &mut |it: &Completion| contexts.push(it.context))
            {
                Ok(_) => {}
                Err(FiErrno::EAGAIN) => assert!(Instant::now() < limit, "{contexts:?}"),
                Err(_) => {
                    let error = a.cq.read_error().unwrap();
                    assert_eq!((error.err, error.olen), (FiErrno::ETRUNC, LEN - CALL - 9));
                    contexts.push(error.completion.context);
                }
            }
        }
        let parts = a.state(|state| state.io.tests.own_parts);
        assert!((5..8).contains(&parts), "{parts} parts");
        contexts.sort_unstable();
        assert_eq!(contexts, [1, 2, 3, 11, 12, 13]);
        assert!(targets[0] == bytes && targets[1] == bytes[..CALL + 9]);
        assert_eq!(short, [7; 8]);
    }
}

/// A message of more than `max_msg_size` bytes is refused.
#[test]
fn messages_longer_than_the_maximum() {
    let domain = domain();
    Transport::each(|transport| {
        let end = End::with(&domain, transport.config(), 0);
        let to_itself = end.knows(&end);
        let mut byte = 0_u8;
        let iov = libc::iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: Limits::max_msg_size(transport == Transport::Xrc) + 1,
        };
        for tag in [None, Some(1)] {
            let local = LocalIov::single(&iov, &Desc::NULL);
            // SAFETY: a message that is refused is not read.
            let sent = unsafe { end.ep.send(to_itself, tag, local, None, 1, None) };
            assert_eq!(sent, Err(FiErrno::EMSGSIZE));
        }
    });
}

/// An endpoint without an authorization key has that of its domain (`fi_endpoint(3)`, *auth_key*).
#[test]
fn endpoints_have_the_key_of_their_domain() {
    let key = |bytes: &[u8]| Some(AuthKey::new(bytes).unwrap());
    let domain_with = |auth| {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let mut config = DomainConfig::default();
        config.mr.auth = auth;
        Domain::open(&device, config).unwrap()
    };
    Transport::each(|transport| {
        let (keyed, same) = (domain_with(key(b"one")), domain_with(key(b"one")));
        let (other, none) = (domain_with(key(b"two")), domain_with(None));
        let open = |domain: &Arc<Domain>, auth: Option<AuthKey>| {
            let config = EndpointConfig {
                auth,
                ..transport.config()
            };
            End::with(domain, config, 0)
        };
        for (peer, auth, meets) in [
            (&same, None, true),
            (&none, key(b"one"), true),
            (&other, key(b"one"), true),
            (&other, None, false),
            (&none, None, false),
            (&same, key(b"two"), false),
        ] {
            let (a, b) = (open(&keyed, None), open(peer, auth.clone()));
            let mut target = [0; 8];
            b.recv(None, &mut target, 2);
            a.send(a.knows(&b), None, &[7; 8], 1);
            if meets {
                wait([&a, &b], [1, 1]);
                assert_eq!(target, [7; 8], "{auth:?}");
                continue;
            }
            let limit = Instant::now() + Duration::from_secs(20);
            let read = || {
                a.cq.read(1, &mut |sent: &Completion| panic!("{auth:?}: {sent:?}"))
            };
            while read() != Err(FiErrno::EAVAIL) {
                assert_eq!(b.poll(), None);
                assert!(Instant::now() < limit, "{auth:?}");
            }
            assert_eq!(a.cq.read_error().unwrap().err, FiErrno::EACCES);
        }
    });
}

/// `fi_setname(3)` binds the address: before the endpoint is enabled, and also if that fails.
#[test]
fn a_name_is_bound_when_it_is_given() {
    let folder = std::env::temp_dir().join(format!("weft-names-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let permit = |mode| {
        let mode = PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&folder, mode).unwrap();
    };
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    Transport::each(|transport| {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let mut config = DomainConfig::default();
        config.xrc.demanded = Some(folder.join("domain"));
        let domain = Domain::open(&device, config).unwrap();
        let new = || Endpoint::new(&domain, transport.config()).unwrap();
        let (ep, other) = (new(), new());
        assert_eq!(ep.name(), Err(FiErrno::EOPBADSTATE));
        ep.set_name(any).unwrap();
        let name = ep.name().unwrap();
        assert_eq!(name.ip(), any.ip());
        assert_ne!(name.port(), 0);
        ep.set_name(any).unwrap();
        assert_eq!(ep.name(), Ok(name), "it has a port");
        assert_eq!(other.set_name(name), Err(FiErrno::EADDRINUSE));
        let foreign = SocketAddr::new("203.0.113.1".parse().unwrap(), name.port());
        for unnamed in [&ep, &other] {
            let refused = unnamed.set_name(foreign);
            assert_eq!(refused, Err(FiErrno::EADDRNOTAVAIL));
        }
        assert_eq!(ep.name(), Ok(name));
        assert_eq!(other.name(), Err(FiErrno::EOPBADSTATE));
        // all addresses with the same port, and back
        ep.set_name("0.0.0.0:0".parse().unwrap()).unwrap();
        assert_eq!(ep.name().unwrap().port(), name.port());
        ep.set_name(name).unwrap();
        assert_eq!(ep.name(), Ok(name));
        // enabling keeps it
        assert_eq!(ep.enable(), Err(FiErrno::ENOCQ));
        let cq = queue(&domain, 0);
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
            .unwrap();
        ep.bind_vector(&AddressVector::open(4).unwrap()).unwrap();
        if transport == Transport::Xrc {
            permit(0o777);
            assert_eq!(ep.enable(), Err(FiErrno::EACCES));
            permit(0o755);
            assert_eq!(ep.name(), Ok(name));
            assert_eq!(other.set_name(name), Err(FiErrno::EADDRINUSE));
        }
        ep.enable().unwrap();
        assert_eq!(ep.name(), Ok(name));
        assert_eq!(ep.set_name(any), Err(FiErrno::EOPBADSTATE));
        // the port is free when the endpoint is closed, enabled or not
        ep.close();
        other.set_name(name).unwrap();
        other.close();
        assert_eq!(other.name(), Err(FiErrno::EOPBADSTATE));
        assert_eq!(other.set_name(any), Err(FiErrno::EOPBADSTATE));
        new().set_name(name).unwrap();
    });
    std::fs::remove_dir_all(folder).unwrap();
}

/// The links of an endpoint with a traffic class of its own have that, and others the domain's.
#[test]
fn packets_have_the_traffic_class_of_their_endpoint() {
    Transport::each(|transport| {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let mut config = DomainConfig::default();
        config.tuning.traffic_class = Some(0x68);
        let domain = Domain::open(&device, config).unwrap();
        for (asked, class) in [(None, 0x68), (Some(0xb8), 0xb8)] {
            let config = EndpointConfig {
                traffic_class: asked,
                ..transport.config()
            };
            let (a, b) = (
                End::with(&domain, config, 0),
                End::with(&domain, transport.config(), 0),
            );
            let mut target = [0; 8];
            b.recv(None, &mut target, 2);
            a.send(a.knows(&b), None, &[7; 8], 1);
            wait([&a, &b], [1, 1]);
            let classes = a.state(|state| {
                let links: Vec<_> = state.io.links.keys().collect();
                let qps = links
                    .into_iter()
                    .filter_map(|key| queue_pair(&mut state.io, key));
                qps.map(|qp| qp.query().unwrap().traffic_class)
                    .collect::<Vec<_>>()
            });
            assert!(!classes.is_empty());
            assert!(classes.iter().all(|of| *of == class), "{classes:?}");
        }
    });
}

/// Both sides send first at the same time, so that both may dial.
#[test]
fn both_dial_at_once() {
    let domain = domain();
    for _ in 0..30 {
        let (a, b) = (End::open(&domain), End::open(&domain));
        let (to_b, to_a) = (a.knows(&b), b.knows(&a));
        let (mut at_a, mut at_b) = ([0; 8], [0; 8]);
        a.recv(None, &mut at_a, 2);
        b.recv(None, &mut at_b, 2);
        let (from_a, from_b) = ([7; 8], [9; 8]);
        a.send(to_b, None, &from_a, 1);
        b.send(to_a, None, &from_b, 1);
        wait([&a, &b], [2, 2]);
        assert_eq!((at_a, at_b), (from_b, from_a));
    }
}

/// Messages that nobody receives yet are bounded at both sides and arrive in order later.
#[test]
fn a_flood_waits_for_its_receives() {
    // the pool has 2^18 blocks, and the reserve 2^17, of which a message uses 2
    const COUNT: usize = 200_000;
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let mut sent = 0;
    let mut taken = 0;
    let mut refused = 0;
    while refused < 2_000 {
        let bytes = (sent as u64).to_ne_bytes();
        // SAFETY: injected.
        let posted = unsafe { a.ep.inject(to_b, None, bytes.as_ptr().cast(), 8, None) };
        match posted {
            Ok(()) => sent += 1,
            Err(error) => {
                assert_eq!(error, FiErrno::EAGAIN);
                refused += 1;
                std::thread::sleep(Duration::from_micros(10));
            }
        }
        assert_eq!(b.poll(), None);
        assert!(sent < COUNT, "not bounded");
    }
    while taken < COUNT {
        let mut bytes = [0; 8];
        b.recv(None, &mut bytes, 0);
        while b.poll().is_none() {
            assert_eq!(a.poll(), None);
        }
        assert_eq!(u64::from_ne_bytes(bytes), taken as u64);
        taken += 1;
        if sent < COUNT {
            let bytes = (sent as u64).to_ne_bytes();
            // SAFETY: injected.
            let posted = unsafe { a.ep.inject(to_b, None, bytes.as_ptr().cast(), 8, None) };
            sent += usize::from(posted.is_ok());
        }
    }
}

/// An endpoint that is closed right after an inject, before any connection.
#[test]
fn a_close_after_an_inject_loses_nothing() {
    let domain = domain();
    let b = End::open(&domain);
    for count in 0..10_u64 {
        let a = End::open(&domain);
        let to_b = a.knows(&b);
        let mut bytes = [0; 8];
        b.recv(None, &mut bytes, 0);
        let number = count.to_ne_bytes();
        // SAFETY: injected.
        unsafe { a.ep.inject(to_b, None, number.as_ptr().cast(), 8, None) }.unwrap();
        drop(a);
        wait_for(&b, 1);
        assert_eq!(bytes, number);
    }
    // an empty message, the last one of a barrier, has no slot
    for _ in 0..10 {
        let a = End::open(&domain);
        let to_b = a.knows(&b);
        b.recv(None, &mut [], 0);
        // SAFETY: injected.
        unsafe { a.ep.inject(to_b, None, std::ptr::null(), 0, None) }.unwrap();
        drop(a);
        wait_for(&b, 1);
    }
}

/// As above, for a message that is too long for the credit of a new peer: it is announced first,
/// and then sent in parts from its copy.
#[test]
fn a_close_after_a_long_inject_loses_nothing() {
    let domain = domain();
    let b = End::open(&domain);
    for _ in 0..5 {
        let a = End::open(&domain);
        let to_b = a.knows(&b);
        let bytes: Vec<u8> = (0..4096).map(|i: usize| (i * 3) as u8).collect();
        let mut target = vec![0; 4096];
        b.recv(None, &mut target, 0);
        // SAFETY: injected.
        unsafe { a.ep.inject(to_b, None, bytes.as_ptr().cast(), 4096, None) }.unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(a));
            wait_for(&b, 1);
        });
        assert!(target == bytes);
    }
}

/// Nothing listens at the address: the operation fails, and others go on.
#[test]
fn a_dead_address_fails_alone() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let gone = End::open(&domain);
    let to_gone = a.knows(&gone);
    drop(gone);
    let to_b = a.knows(&b);
    a.send(to_gone, None, &[1; 8], 77);
    let mut bytes = [0; 8];
    b.recv(None, &mut bytes, 2);
    a.send(to_b, None, &[5; 8], 1);
    let [sent, _] = wait([&a, &b], [1, 1]);
    assert_eq!((sent[0].context, bytes), (1, [5; 8]));
    // the address is dialled for 10 s
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        match a.cq.read(1, &mut |_: &Completion| {}) {
            Err(FiErrno::EAGAIN) => assert!(Instant::now() < limit),
            Err(FiErrno::EAVAIL) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(a.cq.read_error().unwrap().completion.context, 77);
}

/// A thread that sleeps on the completion queue wakes for a message, which no other thread polls.
#[test]
fn a_sleeping_reader_wakes() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    for round in 0..20_u64 {
        let mut bytes = [0; 8];
        let sent = round.to_ne_bytes();
        b.recv(None, &mut bytes, 2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut found = 0;
                let limit = Some(Duration::from_secs(10));
                let count = b.cq.sread(1, 1, limit, &mut |_: &Completion| found += 1);
                assert_eq!((count, found), (Ok(1), 1));
            });
            std::thread::sleep(Duration::from_millis(5));
            a.send(to_b, None, &sent, 1);
            wait_for(&a, 1);
        });
        assert_eq!(u64::from_ne_bytes(bytes), round);
    }
}

/// Prints the time of one message between two endpoints of one thread: `--run-ignored all`.
#[test]
#[ignore = "a measurement"]
fn time_of_a_message() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let mut bytes = [0; 8];
    for count in [1_000, 200_000] {
        let begin = Instant::now();
        for _ in 0..count {
            b.recv(Some((1, 2)), &mut bytes, 2);
            a.send(to_b, Some(1), &[1; 8], 1);
            wait_for(&b, 1);
            wait_for(&a, 1);
        }
        println!("{:?}", begin.elapsed() / count);
    }
}

/// A domain for messages alone, on a device whose on-demand paging does not work, registers no
/// region. So an endpoint whose regions peers access is refused, and one that only initiates is
/// not.
#[test]
fn a_domain_without_registrations_has_no_targets() {
    let device = devices(&[replaced::with_broken_paging()], false).remove(0);
    let open = |mode| {
        let mr = MrConfig {
            form: Form::new(mode, true),
            ..MrConfig::default()
        };
        let config = DomainConfig {
            mr,
            ..DomainConfig::default()
        };
        Domain::open(&device, config).unwrap()
    };
    let endpoint = |domain: &Arc<Domain>, rma, target| {
        let config = EndpointConfig {
            rma,
            target,
            ..config()
        };
        Endpoint::new(domain, config).map(drop)
    };
    let messages = open(Mode::empty());
    assert_eq!(endpoint(&messages, true, true), Err(FiErrno::EINVAL));
    assert_eq!(endpoint(&messages, false, true), Err(FiErrno::EINVAL));
    assert_eq!(endpoint(&messages, true, false), Ok(()));
    assert_eq!(endpoint(&messages, false, false), Ok(()));
    for mode in [Mode::MMU_NOTIFY, Mode::ALLOCATED] {
        assert_eq!(endpoint(&open(mode), true, true), Ok(()));
    }
}
