//! Ends: of circuits, connections, processes, dials, drivers and domains, and what waits for them.

use super::super::keys::{TARGET, kind};
use super::*;

/// The peers of a circuit that fails at its initiator are told.
#[test]
fn the_failure_of_a_circuit_is_told_to_the_peers() {
    let device = device();
    let directory = Directory::new("failure");
    let hosts = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let client = Host::of(&device, directory.places("a"));
    let mut pairs = Vec::new();
    let mut peps = Vec::new();
    for (n, host) in hosts.iter().enumerate() {
        let (pep, addr) = xrc_listener(&device, host);
        peps.push(pep);
        pairs.push(connect((&client, host), addr, n, |_| {}));
    }
    circuit(&pairs[0].0).fail();
    for (n, host) in hosts.iter().enumerate() {
        assert_eq!(next_event(&host.eq), Ok(Told::Shutdown(Token(20 + n))));
    }
    let mut ended = [0, 1].map(|_| next_event(&client.eq).unwrap());
    ended.sort_by_key(|told| format!("{told:?}"));
    assert_eq!(ended, [10, 11].map(|token| Told::Shutdown(Token(token))));
}

/// The circuit to another process, which a request under way names, fails: the connection gets a
/// circuit of its own, in each direction.
#[test]
fn the_failure_of_a_circuit_does_not_end_a_request_under_way() {
    let device = device();
    let hosts = [0, 1].map(|_| Host::new(&device));
    let [other, own] = &hosts;
    let server = Host::new(&device);
    let (_pep, addr) = xrc_listener(&device, &server);
    let first = connect((other, &server), addr, 0, |_| {});
    let dials = own.endpoint(on_xrc(11));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    // the peer cannot answer the reciprocal request while its events are not taken
    let peer = own.domain.driver().unwrap();
    let peer_events = peer.dispatcher().registry();
    let accepts = server.accept(request, on_xrc(21));
    await_reciprocal(&accepts);
    let shared = circuit(&first.1);
    assert!(Arc::ptr_eq(&circuit(&accepts), &shared));
    shared.fail();
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
    drop(peer_events);
    let welcome = Told::Connected(Token(11), b"welcome".to_vec());
    assert_eq!(next_event(&own.eq), Ok(welcome));
    let connected = Told::Connected(Token(21), Vec::new());
    assert_eq!(next_event(&server.eq), Ok(connected));
    transfer((own, &dials), &server, 1);
    transfer((&server, &accepts), own, 2);
    // the dialling side: the circuit to one listener is named in the request to another one
    let second = Host::new(&device);
    let (_pep, second_at) = xrc_listener(&device, &second);
    let dials_again = own.endpoint(on_xrc(12));
    dials_again.connect(Some(second_at), b"").unwrap();
    let (request, _) = next_request(&second.eq);
    circuit(&dials).fail();
    assert_eq!(next_event(&own.eq), Ok(Told::Shutdown(Token(11))));
    let accepts_again = second.accept(request, on_xrc(22));
    let welcome = Told::Connected(Token(12), b"welcome".to_vec());
    assert_eq!(next_event(&own.eq), Ok(welcome));
    let connected = Told::Connected(Token(22), Vec::new());
    assert_eq!(next_event(&second.eq), Ok(connected));
    transfer((own, &dials_again), &second, 3);
    transfer((&second, &accepts_again), own, 4);
}

/// The accepting side closes its endpoint while the peer's answer, which completes the connection,
/// is missing.
#[test]
fn the_close_of_an_accepted_endpoint_is_told() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let stays = connect((&client, &server), addr, 0, |_| {});
    let dials = client.endpoint(on_xrc(11));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    let own = server.domain.driver().unwrap();
    // this side sends no reciprocal request
    let own_events = own.dispatcher().registry();
    let accepts = server.accept(request, on_xrc(21));
    assert!(accepts.core.conn.state.is(State::Accepted));
    let begin = Instant::now();
    accepts.close();
    drop(own_events);
    let error = next_error(&client.eq);
    assert_eq!((error.owner, error.err), (Token(11), FiErrno::ECONNABORTED));
    // without the notice the client waits 10 s
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    transfer((&client, &stays.0), &server, 1);
    transfer((&server, &stays.1), &client, 2);
}

/// A port of the device at which nothing listens.
fn dead_port(device: &Arc<Device>) -> u16 {
    let listener = Listener::open_service(device, address(device), 1, Token(99)).unwrap();
    listener.local_addr().unwrap().port()
}

/// The failure of the connection of an endpoint, whose peer's process does not listen any more.
fn aborted(host: &Host, token: usize, begin: Instant) {
    let error = next_error(&host.eq);
    let expected = (Token(token), FiErrno::ECONNABORTED);
    assert_eq!((error.owner, error.err), expected);
    // otherwise it waits 10 s
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// A process is killed when it has accepted a connection on a circuit that others use, and which
/// another process of its node keeps: nothing but its port shows that.
#[test]
fn the_end_of_a_process_that_has_accepted_on_a_shared_circuit_is_found() {
    let device = device();
    let directory = Directory::new("accepted");
    let client = Host::of(&device, directory.places("a"));
    let hosts = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let [(_pep, first_at), (_other, second_at)] =
        hosts.each_ref().map(|h| xrc_listener(&device, h));
    let stays = connect((&client, &hosts[0]), first_at, 0, |_| {});
    let dials = client.endpoint(on_xrc(11));
    dials.connect(Some(second_at), b"").unwrap();
    let (request, _) = next_request(&hosts[1].eq);
    let circuits = hosts[1].domain.circuits().unwrap();
    circuits.listen_at(second_at).unwrap();
    circuits.state_port(dead_port(&device));
    let driver = hosts[1].domain.driver().unwrap();
    // it sends no reciprocal request
    let events = driver.dispatcher().registry();
    let begin = Instant::now();
    let _accepts = hosts[1].accept(request, on_xrc(21));
    aborted(&client, 11, begin);
    drop(events);
    transfer((&client, &stays.0), &hosts[0], 1);
    transfer((&hosts[0], &stays.1), &client, 2);
}

/// A client is killed when a process that does not have the target of its circuit has answered, so
/// that the client's request for a new circuit does not come.
#[test]
fn the_end_of_a_redirected_client_is_found() {
    let device = device();
    let client = Host::new(&device);
    let hosts = [0, 1].map(|_| Host::private(&device));
    let [(_pep, first_at), (_other, second_at)] =
        hosts.each_ref().map(|h| xrc_listener(&device, h));
    let stays = connect((&client, &hosts[0]), first_at, 0, |_| {});
    let circuits = client.domain.circuits().unwrap();
    circuits.state_port(dead_port(&device));
    let dials = client.endpoint(on_xrc(11));
    dials.connect(Some(second_at), b"").unwrap();
    let (request, _) = next_request(&hosts[1].eq);
    let driver = client.domain.driver().unwrap();
    let events = driver.dispatcher().registry();
    let begin = Instant::now();
    let accepts = hosts[1].accept(request, on_xrc(21));
    assert!(accepts.core.conn.state.is(State::Accepting), "redirected");
    aborted(&hosts[1], 21, begin);
    drop(events);
    // it lives after all
    let error = next_error(&client.eq);
    let refused = (Token(11), FiErrno::ECONNREFUSED);
    assert_eq!((error.owner, error.err), refused);
    transfer((&client, &stays.0), &hosts[0], 1);
    transfer((&hosts[0], &stays.1), &client, 2);
}

/// A dial ends while the circuit for it is looked for: no other one waits for its circuit.
#[test]
fn an_ended_dial_makes_no_circuit() {
    let device = device();
    let client = Host::new(&device);
    let user: std::sync::Weak<dyn CircuitUser> = client.endpoint(on_xrc(10)).core.weak();
    let circuits = client.domain.circuits().unwrap();
    let config = DialConfig {
        from: None,
        to: address(&device),
        pd: Arc::clone(client.domain.pd()),
        cq: Arc::clone(&client.cq),
        qp: crate::verbs::QpConfig::SMALL,
    };
    let dial = circuits.dial(user, config, false);
    dial.end();
    circuits.place_ended(&dial);
    let start = Instant::now();
    while circuits.making() != 0 {
        assert!(start.elapsed() < LIMIT, "it is still being made");
        std::thread::yield_now();
    }
}

/// The driver has failed: what is being connected fails, and so does what is connected later.
#[test]
fn nothing_is_connected_without_a_driver() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let first = connect((&client, &server), addr, 0, |_| {});
    let dials = client.endpoint(on_xrc(11));
    dials.connect(Some(addr), b"").unwrap();
    let (_request, _) = next_request(&server.eq);
    Driven::fail(&**client.domain.circuits().unwrap());
    assert_eq!(next_error(&client.eq).owner, Token(11));
    let again = client.endpoint(on_xrc(12));
    let connected = again.connect(Some(addr), b"");
    assert_eq!(connected, Err(FiErrno::EOTHER));
    transfer((&client, &first.0), &server, 1);
}

/// An event of the connection manager may have the last reference to a domain, with the lock of the
/// dispatcher held.
#[test]
fn a_closed_domain_ends_inside_an_event() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let (dials, accepts) = connect((&client, &server), addr, 0, |_| {});
    dials.close();
    accepts.close();
    client.domain.close();
    let driver = client.domain.driver().unwrap();
    let events = driver.dispatcher().registry();
    drop((dials, client));
    drop(events);
}

/// Two queues that live have different numbers: the peer of the older connection has ended.
#[test]
fn a_connection_to_a_queue_that_has_ended_ends() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let pairs = [0, 1].map(|n| connect((&client, &server), addr, n, |_| {}));
    transfer((&client, &pairs[0].0), &server, 1);
    let successor = SocketAddr::new(addr.ip(), 1);
    let user: std::sync::Weak<dyn CircuitUser> = pairs[0].0.core.weak();
    let circuits = client.domain.circuits().unwrap();
    circuits.connected_to(srq_of(&server), successor, user);
    let mut ended = [0, 1].map(|_| next_event(&client.eq).unwrap());
    ended.sort_by_key(|told| format!("{told:?}"));
    assert_eq!(ended, [10, 11].map(|token| Told::Shutdown(Token(token))));
}

/// Closing a context waits for the answers to the notices of its endpoints: then the peers post
/// nothing to its queue, whose end would break their circuits.
#[test]
fn a_context_is_closed_when_the_peers_have_been_told() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let (_dials, accepts) = connect((&client, &server), addr, 0, |_| {});
    let peer = client.domain.driver().unwrap();
    let peer_events = peer.dispatcher().registry();
    accepts.close();
    let settled = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            server.srx.settle();
            settled.store(true, std::sync::atomic::Ordering::Release);
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!settled.load(std::sync::atomic::Ordering::Acquire));
        drop(peer_events);
    });
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
}

/// The key of a region is not used again, and the region keeps its rights, until the peer of a
/// closed or ended connection has answered the notice: its requests may be under way on a circuit
/// that other endpoints use.
#[test]
fn a_region_ends_when_the_peers_have_been_told() {
    let device = device();
    for closes in [true, false] {
        let form = Mode::ALLOCATED | Mode::LOCAL;
        let [client, server] = [0, 1].map(|_| Host::with(&device, kind(form)));
        let (_pep, addr) = xrc_listener(&device, &server);
        let (dials, accepts) = connect((&client, &server), addr, 0, |_| {});
        let target = Buffer::with_key(&server.domain, LEN, TARGET, 5);
        let source = Buffer::all(&client.domain, LEN);
        let (iov, desc) = source.part(0, LEN);
        // SAFETY: the buffers live until the operation has completed.
        unsafe { dials.write(LocalIov::single(&iov, &desc), 0, 5, 1) }.unwrap();
        client.completion();
        let peer = client.domain.driver().unwrap();
        let peer_events = peer.dispatcher().registry();
        // nor does it return the keys because it has not used them
        let peer_keys = dials.core.tx.lock();
        if closes {
            accepts.close();
        } else {
            accepts.shutdown().unwrap();
        }
        std::thread::scope(|scope| {
            let begin = Instant::now();
            let closing = scope.spawn(|| target.region.close());
            std::thread::sleep(Duration::from_millis(100));
            let waits = !closing.is_finished();
            // the patience is 1 s
            assert!(
                waits || begin.elapsed() > Duration::from_millis(800),
                "{closes}"
            );
            drop((peer_keys, peer_events));
            closing.join().unwrap().unwrap();
        });
        let directory = server.domain.mr().directory(server.domain.pd()).unwrap();
        assert_eq!(directory.retired(), 0, "{closes}");
    }
}
