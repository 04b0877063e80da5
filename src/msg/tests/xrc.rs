//! Endpoints on XRC, in one process: two domains, whose endpoints share receive contexts.

mod ends;
mod notices;

use super::*;
use crate::conn::{CircuitUser, DialConfig, Driven, Listener, State};
use crate::mr::Mode;
use crate::queue::Counter;
use crate::verbs::replaced::{self, LISTENER_FAILS};
use crate::verbs::{SendOpcode, SendRequest, SrqNumber};
use crate::xrc::Places;

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
        Self::of(device, Places::default())
    }

    fn of(device: &Arc<Device>, xrc: Places) -> Self {
        let config = DomainConfig {
            xrc,
            ..DomainConfig::default()
        };
        Self::with(device, config)
    }

    /// A node of its own.
    fn private(device: &Arc<Device>) -> Self {
        let places = Places {
            demanded: Some("private".into()),
            runtime_dir: None,
        };
        Self::of(device, places)
    }

    fn with(device: &Arc<Device>, config: DomainConfig) -> Self {
        let domain = Domain::open(device, config).unwrap();
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

#[test]
fn a_name_that_cannot_be_used_leaves_the_old_one() {
    let device = device();
    let (client, host) = (Host::new(&device), Host::new(&device));
    let config = PepConfig {
        addr: Some(address(&device)),
        token: PEP,
        xrc: true,
        ..PepConfig::default()
    };
    let pep = PassiveEndpoint::open(&device, config).unwrap();
    pep.bind_eq(&host.eq).unwrap();
    let old = pep.local_addr().unwrap();
    // the port of the other listener is free for connections, and not for services
    let taken = Listener::open_service(&device, address(&device), 1, Token(99)).unwrap();
    let addr = taken.local_addr().unwrap();
    assert_eq!(pep.set_name(addr), Err(FiErrno::EADDRINUSE));
    assert_eq!(pep.local_addr(), Ok(old));
    pep.listen().unwrap();
    connect((&client, &host), old, 1, |_| {});
}

/// Another listener has the port for services, at the wildcard address.
#[test]
fn a_free_port_is_free_in_both_port_spaces() {
    let device = devices(&[replaced::with_taken_ports()], false).remove(0);
    let config = PepConfig {
        addr: Some(address(&device)),
        token: PEP,
        xrc: true,
        ..PepConfig::default()
    };
    replaced::BIND_FAILS.set(2);
    let pep = PassiveEndpoint::open(&device, config).unwrap();
    assert_eq!(replaced::BIND_FAILS.get(), 0);
    pep.local_addr().unwrap();
}

/// A call of which one of the two listeners executes its part and the other one fails is as if it
/// had not been made, and can be repeated.
#[test]
fn a_call_that_fails_half_way_can_be_repeated() {
    let device = devices(&[replaced::with_failing_listeners()], false).remove(0);
    let (client, host) = (Host::new(&device), Host::new(&device));
    let fails = |failing: u32, call: &dyn Fn() -> Result<()>| {
        LISTENER_FAILS.set(failing);
        assert_eq!(call(), Err(FiErrno::ENOMEM), "{failing}");
        LISTENER_FAILS.set(0);
    };
    let config = PepConfig {
        addr: Some(address(&device)),
        token: PEP,
        xrc: true,
        ..PepConfig::default()
    };
    let pep = PassiveEndpoint::open(&device, config).unwrap();
    for failing in [1, 2] {
        fails(failing, &|| pep.bind_eq(&host.eq));
    }
    pep.bind_eq(&host.eq).unwrap();
    assert_eq!(pep.bind_eq(&host.eq), Err(FiErrno::EINVAL));
    let addr = pep.local_addr().unwrap();
    for failing in [1, 2] {
        fails(failing, &|| pep.listen());
        assert_eq!(pep.local_addr(), Ok(addr));
    }
    pep.listen().unwrap();
    assert_eq!(pep.listen(), Err(FiErrno::EOPBADSTATE));
    // by a new circuit, and by the same one: one request for each listener
    let first = connect((&client, &host), addr, 1, |_| {});
    let second = connect((&client, &host), addr, 2, |_| {});
    drop((first, second));
}

/// Of the two listeners of a domain none stays if one of them cannot be started.
#[test]
fn a_domain_has_both_listeners_or_none() {
    let device = devices(&[replaced::with_failing_listeners()], false).remove(0);
    let host = Host::new(&device);
    let circuits = host.domain.circuits().unwrap();
    let local = address(&device);
    // each of them is bound, and started
    for failing in 1..=4 {
        LISTENER_FAILS.set(failing);
        let port = circuits.listen_at(local);
        assert_eq!((port, LISTENER_FAILS.get()), (Err(FiErrno::ENOMEM), 0));
        assert_eq!(circuits.identifiers(), 0, "{failing}");
    }
    let port = circuits.listen_at(local).unwrap();
    assert_eq!(circuits.port_at(local), Some(port));
    assert_eq!(circuits.identifiers(), 2);
}

/// Waits until an endpoint that has accepted has a circuit for its reciprocal request.
fn await_reciprocal(accepts: &Endpoint) {
    let start = Instant::now();
    while accepts.shared.own_circuit().is_none() {
        assert!(start.elapsed() < LIMIT, "no reciprocal request");
        std::thread::yield_now();
    }
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

/// A place for files of XRC domains, removed when it is dropped.
struct Directory(std::path::PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let name = format!("weft-msg-xrc-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn places(&self, file: &str) -> Places {
        Places {
            demanded: Some(self.0.join(file)),
            runtime_dir: None,
        }
    }

    fn files(&self) -> usize {
        std::fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn srq_of(host: &Host) -> SrqNumber {
    host.srx.number().unwrap()
}

/// Sends 8 bytes on a circuit to any receive queue, as an endpoint does that has an old number.
fn send_to(circuit: &crate::conn::Circuit, srq: SrqNumber) {
    let word = 0x5eed_5eed_5eed_5eed_u64;
    let sges = [crate::verbs::Sge {
        addr: (&raw const word) as u64,
        length: 8,
        lkey: crate::verbs::Lkey::new(0),
    }];
    let mut request = SendRequest::new(SendOpcode::Send, &sges);
    // no endpoint has this number
    request.wr_id(0xffff << 47).inline(true).to_srq(srq);
    // SAFETY: the data is copied by the post.
    unsafe { circuit.qp().post_send(&mut request) }.unwrap();
}

/// Polls a queue that gets nothing.
fn nothing(host: &Host) {
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        let got = host.cq.read(1, &mut |_: &Completion| {});
        assert_eq!(got, Err(FiErrno::EAGAIN));
    }
}

fn circuit(ep: &Endpoint) -> Arc<crate::conn::Circuit> {
    ep.shared.own_circuit().expect("a circuit")
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
    await_reciprocal(&accepts);
    let own_events = own.dispatcher().registry();
    drop(peer_events);
    let connected = |token| Told::Connected(Token(token), Vec::new());
    let welcome = Told::Connected(Token(10), b"welcome".to_vec());
    assert_eq!(next_event(&client.eq), Ok(welcome));
    let state = || accepts.shared.conn.state.get();
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
    let start = Instant::now();
    while state() == State::Accepted {
        assert!(start.elapsed() < LIMIT, "the target has not failed");
        device.dispatch_async();
    }
    assert!(!accepts.shared.conn.state.can_post());
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
    await_reciprocal(&accepts);
    CircuitUser::peer_ended(&*accepts.shared);
    assert!(!accepts.shared.conn.state.can_post());
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

/// Two processes of a node: the second one is reached by the target that the first one has created,
/// also when the first one has ended.
#[test]
fn a_second_process_of_a_node_is_joined_without_a_circuit() {
    let device = device();
    let directory = Directory::new("node");
    let client = Host::of(&device, directory.places("a"));
    let hosts = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let [(pep, first_at), (_pep, second_at)] = hosts.each_ref().map(|h| xrc_listener(&device, h));
    let [first, second] = &hosts;
    let to_first = connect((&client, first), first_at, 0, |_| {});
    let to_second = connect((&client, second), second_at, 1, |_| {});
    assert!(Arc::ptr_eq(&circuit(&to_first.0), &circuit(&to_second.0)));
    for (host, pair) in [(first, &to_first), (second, &to_second)] {
        transfer((&client, &pair.0), host, 1);
        transfer((host, &pair.1), &client, 2);
    }
    assert_eq!(directory.files(), 2);
    // the creator of the target ends
    to_first.1.close();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
    to_first.0.close();
    pep.close();
    drop(to_first);
    let [first, second] = hosts;
    first.srx.await_notices();
    drop(first);
    transfer((&client, &to_second.0), &second, 3);
    transfer((&second, &to_second.1), &client, 4);
    let again = connect((&client, &second), second_at, 2, |_| {});
    assert!(Arc::ptr_eq(&circuit(&again.0), &circuit(&to_second.0)));
    transfer((&client, &again.0), &second, 5);
    for ep in [to_second.0, to_second.1, again.0, again.1] {
        ep.close();
    }
    drop((client, second));
    // by the driver, which may hold the last notice of the end for a moment
    let begin = Instant::now();
    while directory.files() != 0 {
        assert!(begin.elapsed() < LIMIT, "the files are not collected");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process without a file is a node of its own.
#[test]
fn private_domains_share_nothing() {
    let device = device();
    let client = Host::new(&device);
    let hosts = [0, 1].map(|_| Host::private(&device));
    let mut circuits = Vec::new();
    for (n, host) in hosts.iter().enumerate() {
        let (_pep, addr) = xrc_listener(&device, host);
        let pair = connect((&client, host), addr, n, |_| {});
        transfer((&client, &pair.0), host, 1);
        circuits.push((circuit(&pair.0), pair));
    }
    assert!(!Arc::ptr_eq(&circuits[0].0, &circuits[1].0));
    assert!(!std::path::Path::new("private.msg").exists());
}

/// The number of a target that has ended can be that of another circuit's.
#[test]
fn the_target_of_another_circuit_is_not_used() {
    let device = device();
    let directory = Directory::new("reused");
    let hosts = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let clients = [0, 1].map(|_| Host::of(&device, directory.places("a")));
    let [(_pep, first_at), (_other, second_at)] =
        hosts.each_ref().map(|h| xrc_listener(&device, h));
    let pairs = [0, 1].map(|n| connect((&clients[n], &hosts[0]), first_at, n, |_| {}));
    let [mine, other] = pairs.each_ref().map(|(dials, _)| circuit(dials));
    mine.set_target(crate::verbs::QpNumber::new(other.target()).unwrap());
    let pair = connect((&clients[0], &hosts[1]), second_at, 2, |_| {});
    assert!(!Arc::ptr_eq(&circuit(&pair.0), &mine));
    transfer((&clients[0], &pair.0), &hosts[1], 7);
}

/// A message to the number of a queue that has ended does not reach the receives of the queue that
/// has this number now, and its sender finds out.
#[test]
fn a_message_of_a_stranger_is_dropped() {
    let device = device();
    let directory = Directory::new("strangers");
    let hosts = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let clients = [0, 1].map(|_| Host::of(&device, directory.places("a")));
    let [(_pep, first_at), (_other, second_at)] =
        hosts.each_ref().map(|h| xrc_listener(&device, h));
    let old = connect((&clients[0], &hosts[0]), first_at, 0, |_| {});
    let new = connect((&clients[1], &hosts[1]), second_at, 1, |_| {});
    let target = Buffer::all(&hosts[1].domain, LEN);
    hosts[1].post(&target);
    send_to(&circuit(&old.0), srq_of(&hosts[1]));
    nothing(&hosts[1]);
    // the target goes to its error state, and the next request of the sender fails
    let (sink, next) = [&hosts[0].domain, &clients[0].domain]
        .map(|domain| Buffer::all(domain, LEN))
        .into();
    let start = Instant::now();
    loop {
        hosts[0].post(&sink);
        let (iov, desc) = next.part(0, LEN);
        // SAFETY: the buffers live until the endpoints have ended.
        unsafe { old.0.send(LocalIov::single(&iov, &desc), 3) }.unwrap();
        let sent = clients[0]
            .cq
            .sread(1, 1, Some(LIMIT), &mut |_: &Completion| {});
        if sent == Err(FiErrno::EAVAIL) {
            break;
        }
        assert_eq!(hosts[0].completion().context, 7);
        assert!(start.elapsed() < LIMIT, "the target stays");
    }
    assert_eq!(next_event(&clients[0].eq), Ok(Told::Shutdown(Token(10))));
    assert_eq!(next_event(&hosts[0].eq), Ok(Told::Shutdown(Token(20))));
    let mut source = Buffer::all(&clients[1].domain, LEN);
    source.fill(9);
    let (iov, desc) = source.part(0, LEN);
    // SAFETY: the buffers live until both have completed.
    unsafe { new.0.send(LocalIov::single(&iov, &desc), 3) }.unwrap();
    assert_eq!(clients[1].completion().context, 3);
    let received = hosts[1].completion();
    assert_eq!((received.context, received.len), (7, LEN));
    assert_eq!(source.memory, target.memory);
}

/// A message that is late, because its sender has not got the notice of the end, is delivered as
/// those before it, and the circuit stays.
#[test]
fn a_late_message_breaks_no_circuit() {
    let device = device();
    let directory = Directory::new("late");
    let hosts = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let client = Host::of(&device, directory.places("a"));
    let [(_pep, first_at), (_other, second_at)] =
        hosts.each_ref().map(|h| xrc_listener(&device, h));
    let stays = connect((&client, &hosts[0]), first_at, 0, |_| {});
    let leaves = connect((&client, &hosts[1]), second_at, 1, |_| {});
    let shared = circuit(&stays.0);
    assert!(Arc::ptr_eq(&circuit(&leaves.0), &shared));
    let target = Buffer::all(&hosts[1].domain, LEN);
    hosts[1].post(&target);
    leaves.1.close();
    send_to(&shared, srq_of(&hosts[1]));
    let late = hosts[1].completion();
    assert_eq!((late.context, late.len), (7, 8));
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(11))));
    leaves.0.close();
    for (seed, back) in [(1, 2), (3, 4)] {
        transfer((&client, &stays.0), &hosts[0], seed);
        transfer((&hosts[0], &stays.1), &client, back);
    }
    let again = connect((&client, &hosts[1]), second_at, 2, |_| {});
    assert!(Arc::ptr_eq(&circuit(&again.0), &shared));
    transfer((&client, &again.0), &hosts[1], 5);
}
