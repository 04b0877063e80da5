//! Endpoints on XRC, in one process: two domains, whose endpoints share receive contexts.

use super::*;
use crate::conn::{CircuitUser, State};
use crate::queue::Counter;

const LEN: usize = 64;

/// A domain with a shared receive context, and the queues of all its endpoints.
struct Host {
    domain: Arc<Domain>,
    eq: Arc<EventQueue>,
    cq: Arc<CompletionQueue>,
    srx: Arc<SharedRx>,
}

impl Host {
    fn new(device: &Arc<Device>) -> Self {
        let domain = Domain::open(device, DomainConfig::default()).unwrap();
        let config = SharedRxConfig {
            size: 16,
            iov_limit: 2,
            op_flags: Flags::empty(),
            xrc: true,
        };
        Self {
            eq: EventQueue::open(EqConfig::default()).unwrap(),
            cq: open_cq(&domain),
            srx: SharedRx::open(&domain, config).unwrap(),
            domain,
        }
    }

    fn bound(&self, ep: &Endpoint) {
        ep.bind_eq(&self.eq).unwrap();
        let both = BindFlags::TRANSMIT | BindFlags::RECV;
        ep.bind_cq(&self.cq, both).unwrap();
        ep.bind_shared_rx(&self.srx).unwrap();
    }

    fn endpoint(&self, config: EndpointConfig) -> Arc<Endpoint> {
        let ep = Endpoint::open(&self.domain, config).unwrap();
        self.bound(&ep);
        ep
    }

    fn accept(&self, request: ConnectRequest, config: EndpointConfig) -> Arc<Endpoint> {
        let ep = Endpoint::from_request(&self.domain, config, request);
        let ep = ep.map_err(|(error, _)| error).unwrap();
        self.bound(&ep);
        ep.accept(b"welcome").unwrap();
        ep
    }

    fn completion(&self) -> Completion {
        let mut result = None;
        let mut writer = |completion: &Completion| result = Some(*completion);
        assert_eq!(self.cq.sread(1, 1, Some(LIMIT), &mut writer), Ok(1));
        result.unwrap()
    }

    fn post(&self, buffer: &Buffer) {
        let (iov, desc) = buffer.part(0, LEN);
        // SAFETY: tests keep their buffers until completion.
        unsafe { self.srx.recv(LocalIov::single(&iov, &desc), 7) }.unwrap();
    }
}

fn on_xrc(token: usize) -> EndpointConfig {
    EndpointConfig {
        shared_rx: true,
        xrc: true,
        ..config(Token(token))
    }
}

fn xrc_listener(device: &Arc<Device>, host: &Host) -> (Arc<PassiveEndpoint>, SocketAddr) {
    let config = PepConfig {
        addr: Some(address(device)),
        token: PEP,
        xrc: true,
        ..PepConfig::default()
    };
    let pep = PassiveEndpoint::open(device, config).unwrap();
    pep.bind_eq(&host.eq).unwrap();
    pep.listen().unwrap();
    let addr = pep.local_addr().unwrap();
    (pep, addr)
}

/// A connected pair: endpoint `10 + n` of the client, `20 + n` of the server.
fn connect(
    (client, server): (&Host, &Host),
    addr: SocketAddr,
    n: usize,
    change: impl Fn(&mut EndpointConfig),
) -> (Arc<Endpoint>, Arc<Endpoint>) {
    let with = |token| {
        let mut config = on_xrc(token);
        change(&mut config);
        config
    };
    let dials = client.endpoint(with(10 + n));
    dials.connect(Some(addr), b"hello").unwrap();
    let (request, data) = next_request(&server.eq);
    assert_eq!(data, b"hello");
    let accepts = server.accept(request, with(20 + n));
    let welcome = Told::Connected(Token(10 + n), b"welcome".to_vec());
    assert_eq!(next_event(&client.eq), Ok(welcome));
    let connected = Told::Connected(Token(20 + n), Vec::new());
    assert_eq!(next_event(&server.eq), Ok(connected));
    (dials, accepts)
}

fn circuit(ep: &Endpoint) -> Arc<crate::conn::Circuit> {
    ep.core.own_circuit().expect("a circuit")
}

fn transfer(from: (&Host, &Endpoint), to: &Host, seed: u8) {
    let mut source = Buffer::all(&from.0.domain, LEN);
    let target = Buffer::all(&to.domain, LEN);
    source.fill(seed);
    to.post(&target);
    let (iov, desc) = source.part(0, LEN);
    // SAFETY: the buffers live until both have completed.
    unsafe { from.1.send(LocalIov::single(&iov, &desc), 3) }.unwrap();
    assert_eq!(from.0.completion().context, 3);
    let received = to.completion();
    assert_eq!((received.context, received.len), (7, LEN));
    assert_eq!(source.memory, target.memory);
}

#[test]
fn endpoints_to_one_address_share_a_circuit_in_each_direction() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let pairs: Vec<_> = (0..3)
        .map(|n| connect((&client, &server), addr, n, |_| {}))
        .collect();
    let (first, other) = (circuit(&pairs[0].0), circuit(&pairs[0].1));
    assert!(!Arc::ptr_eq(&first, &other));
    for (seed, (dials, accepts)) in (1..).zip(&pairs) {
        assert!(Arc::ptr_eq(&circuit(dials), &first));
        assert!(Arc::ptr_eq(&circuit(accepts), &other));
        transfer((&client, dials), &server, seed);
        transfer((&server, accepts), &client, seed + 10);
    }
    // the end of one is told, and the others work
    pairs[1].0.close();
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(21))));
    for (dials, accepts) in [&pairs[0], &pairs[2]] {
        transfer((&client, dials), &server, 30);
        transfer((&server, accepts), &client, 31);
    }
    pairs[2].1.shutdown().unwrap();
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(22))));
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(12))));
    transfer((&client, &pairs[0].0), &server, 32);
}

/// A circuit whose send queue has no room for a further endpoint is not used.
#[test]
fn a_circuit_is_shared_as_far_as_its_send_queue_has_room() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let most = crate::msg::Limits::of(&device).tx_size;
    let pairs =
        [0, 1].map(|n| connect((&client, &server), addr, n, |config| config.tx_size = most));
    assert!(!Arc::ptr_eq(&circuit(&pairs[0].0), &circuit(&pairs[1].0)));
    for (dials, _) in &pairs {
        transfer((&client, dials), &server, 4);
    }
}

#[test]
fn what_a_context_on_xrc_requires() {
    let device = device();
    let host = Host::new(&device);
    let first = host.endpoint(on_xrc(1));
    first.enable().unwrap();
    // another queue of receives
    let second = Endpoint::open(&host.domain, on_xrc(2)).unwrap();
    second.bind_eq(&host.eq).unwrap();
    second.bind_cq(&host.cq, BindFlags::TRANSMIT).unwrap();
    let other = open_cq(&host.domain);
    second.bind_cq(&other, BindFlags::RECV).unwrap();
    second.bind_shared_rx(&host.srx).unwrap();
    assert_eq!(second.enable(), Err(FiErrno::EINVAL));
    // an endpoint on RC
    let third = host.endpoint(EndpointConfig {
        xrc: false,
        ..on_xrc(3)
    });
    let enabled = third
        .enable()
        .and_then(|()| third.connect(Some(address(&device)), b""));
    assert!(enabled.is_err() || next_error(&host.eq).owner == Token(3));
    // an authorization key of its own
    let key = crate::auth::AuthKey::new(b"other").unwrap();
    let fourth = host.endpoint(EndpointConfig {
        auth: Some(key),
        ..on_xrc(4)
    });
    assert_eq!(fourth.enable(), Err(FiErrno::EINVAL));
    // no context
    let fifth = Endpoint::open(&host.domain, on_xrc(5)).unwrap();
    fifth.bind_eq(&host.eq).unwrap();
    let both = BindFlags::TRANSMIT | BindFlags::RECV;
    fifth.bind_cq(&host.cq, both).unwrap();
    assert_eq!(fifth.enable(), Err(FiErrno::EOPBADSTATE));
    // an XRC domain of the application, only for endpoints on XRC
    let xrcd = Arc::new(crate::verbs::Xrcd::open(&device, None, libc::O_CREAT).unwrap());
    assert_eq!(first.bind_xrcd(&xrcd), Err(FiErrno::EOPBADSTATE));
    assert!(third.bind_xrcd(&xrcd).is_err());
    assert_eq!(fifth.bind_xrcd(&xrcd), Ok(()));
    assert_eq!(fifth.bind_xrcd(&xrcd), Err(FiErrno::EINVAL));
}

/// Receives of a context are counted by the counter of its endpoints.
#[test]
fn receives_are_counted() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let dials = client.endpoint(on_xrc(10));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    let accepts = Endpoint::from_request(&server.domain, on_xrc(20), request);
    let accepts = accepts.map_err(|(error, _)| error).unwrap();
    server.bound(&accepts);
    let counter = Counter::open(server.domain.queues(), WaitKind::None).unwrap();
    accepts.bind_counter(&counter, Flags::RECV).unwrap();
    accepts.accept(b"").unwrap();
    next_event(&client.eq).unwrap();
    next_event(&server.eq).unwrap();
    for seed in 0..3 {
        transfer((&client, &dials), &server, seed);
    }
    assert_eq!(counter.read(), 3);
}

/// The peer's first message breaks the target before this side has read the answer that completes
/// the connection: the connection is reported, then its end, as on RC.
#[test]
fn a_message_that_breaks_an_accepted_connection_ends_it() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let dials = client.endpoint(on_xrc(10));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    // the peer cannot answer the reciprocal request while its events are not taken
    let (peer, own) = [&client, &server]
        .map(|host| host.domain.driver().unwrap())
        .into();
    let peer_events = peer.dispatcher().registry();
    let accepts = server.accept(request, on_xrc(20));
    let start = Instant::now();
    while accepts.core.own_circuit().is_none() {
        assert!(start.elapsed() < LIMIT, "no reciprocal request");
        std::thread::yield_now();
    }
    let own_events = own.dispatcher().registry();
    drop(peer_events);
    let connected = |token| Told::Connected(Token(token), Vec::new());
    let welcome = Told::Connected(Token(10), b"welcome".to_vec());
    assert_eq!(next_event(&client.eq), Ok(welcome));
    let state = || accepts.core.conn.state.get();
    assert_eq!(state(), State::Accepted);
    let short = Buffer::all(&server.domain, LEN);
    let long = Buffer::all(&client.domain, 2 * LEN);
    server.post(&short);
    let (iov, desc) = long.part(0, 2 * LEN);
    // SAFETY: the buffers live until the endpoints have ended.
    unsafe { dials.send(LocalIov::single(&iov, &desc), 3) }.unwrap();
    let failed = client.cq.sread(1, 1, Some(LIMIT), &mut |_: &Completion| {});
    assert_eq!(failed, Err(FiErrno::EAVAIL));
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
    while state() == State::Accepted {
        assert!(start.elapsed() < LIMIT, "the target has not failed");
        device.dispatch_async();
    }
    assert!(!accepts.core.conn.state.can_post());
    drop(own_events);
    assert_eq!(next_event(&server.eq), Ok(connected(20)));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
    let nothing = server.eq.read(true, |event| Ok(format!("{event:?}")));
    assert_eq!(nothing.err(), Some(FiErrno::EAGAIN));
    dials.close();
    accepts.close();
}

/// The peer's notice of the end arrives before the answer that completes the connection.
#[test]
fn a_notice_that_precedes_the_last_answer_ends_an_accepted_connection() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let dials = client.endpoint(on_xrc(10));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    let peer = client.domain.driver().unwrap();
    let peer_events = peer.dispatcher().registry();
    let accepts = server.accept(request, on_xrc(20));
    let start = Instant::now();
    while accepts.core.own_circuit().is_none() {
        assert!(start.elapsed() < LIMIT, "no reciprocal request");
        std::thread::yield_now();
    }
    CircuitUser::peer_ended(&*accepts.core);
    assert!(!accepts.core.conn.state.can_post());
    drop(peer_events);
    let welcome = Told::Connected(Token(10), b"welcome".to_vec());
    assert_eq!(next_event(&client.eq), Ok(welcome));
    let connected = Told::Connected(Token(20), Vec::new());
    assert_eq!(next_event(&server.eq), Ok(connected));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
}

/// The requests of a closed endpoint that find no receives are flushed at once, as on RC, if no
/// other endpoint uses the circuit.
#[test]
fn closing_does_not_wait_for_receives_of_the_peer() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let source = Buffer::all(&client.domain, LEN);
    let mut times = Vec::new();
    for round in 0..5 {
        let (dials, accepts) = connect((&client, &server), addr, round, |_| {});
        let (iov, desc) = source.part(0, LEN);
        // SAFETY: the buffer lives until the endpoint is closed.
        unsafe { dials.send(LocalIov::single(&iov, &desc), 3) }.unwrap();
        let begin = Instant::now();
        dials.close();
        times.push(begin.elapsed());
        let shutdown = Told::Shutdown(Token(20 + round));
        assert_eq!(next_event(&server.eq), Ok(shutdown));
        accepts.close();
    }
    // a test machine can be busy
    let least = times.iter().min().unwrap();
    assert!(*least < Duration::from_millis(100), "{times:?}");
}
