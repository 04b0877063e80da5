//! Ends: of circuits, connections, processes, dials, drivers and domains, and what waits for them.

use std::sync::atomic::Ordering;

use super::super::keys::{TARGET, kind};
use super::*;
use crate::verbs::replaced::{CONFIRMATIONS_LOST, TARGETS_FAIL};

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

/// The circuit that a dial has joined fails before the request is sent. The process that is dialled
/// has its target, which lives: the connection gets a circuit of its own.
#[test]
fn a_request_names_no_circuit_that_has_failed() {
    let device = device();
    let directory = Directory::new("joined");
    let client = Host::of(&device, directory.places("a"));
    let hosts = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let [(_pep, first_at), (_other, second_at)] =
        hosts.each_ref().map(|h| xrc_listener(&device, h));
    let first = connect((&client, &hosts[0]), first_at, 0, |_| {});
    let dials = client.endpoint(on_xrc(11));
    let driver = client.domain.driver().unwrap();
    let events = driver.dispatcher().registry();
    dials.connect(Some(second_at), b"").unwrap();
    circuit(&first.0).fail();
    drop(events);
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
    let (request, _) = next_request(&hosts[1].eq);
    let accepts = hosts[1].accept(request, on_xrc(21));
    let welcome = Told::Connected(Token(11), b"welcome".to_vec());
    assert_eq!(next_event(&client.eq), Ok(welcome));
    let connected = Told::Connected(Token(21), Vec::new());
    assert_eq!(next_event(&hosts[1].eq), Ok(connected));
    transfer((&client, &dials), &hosts[1], 1);
    transfer((&hosts[1], &accepts), &client, 2);
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
    assert!(accepts.shared.conn.state.is(State::Accepted));
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

/// Connects two endpoints. Calls a function with the accepting one when the other side has answered
/// its reciprocal request and reported the connection, before it takes the answer.
fn connect_but_for_the_answer(
    (client, server): (&Host, &Host),
    addr: SocketAddr,
    meanwhile: impl FnOnce(&Endpoint),
) -> (Arc<Endpoint>, Arc<Endpoint>) {
    let dials = client.endpoint(on_xrc(10));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    let [peer, own] = [client, server].map(|host| host.domain.driver().unwrap());
    let peer_events = peer.dispatcher().registry();
    let accepts = server.accept(request, on_xrc(20));
    await_reciprocal(&accepts);
    let own_events = own.dispatcher().registry();
    drop(peer_events);
    let welcome = Told::Connected(Token(10), b"welcome".to_vec());
    assert_eq!(next_event(&client.eq), Ok(welcome));
    meanwhile(&accepts);
    drop(own_events);
    (dials, accepts)
}

/// The accepting process ends when it has sent its reciprocal request, and before it has the
/// answer: the peer, which has reported the connection, is told by the end of the exchange.
#[test]
fn the_end_of_a_request_that_was_answered_is_the_end_of_the_connection() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let mut begin = Instant::now();
    let _connection = connect_but_for_the_answer((&client, &server), addr, |accepts| {
        // as the kernel does for a process that ends
        let dial = accepts.shared.control.lock().xrc.test_dial();
        begin = Instant::now();
        dial.end();
    });
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
    // otherwise it waits 10 s
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// The connecting process ends when it has reported the connection, and before the accepting side
/// takes its answer, which therefore cannot be confirmed.
#[test]
fn an_answer_whose_sender_has_ended_is_a_connection_that_has_ended() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let (_dials, accepts) = connect_but_for_the_answer((&client, &server), addr, |_| {
        client.domain.circuits().unwrap().end_retired();
    });
    let connected = Told::Connected(Token(20), Vec::new());
    assert_eq!(next_event(&server.eq), Ok(connected));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
    assert!(accepts.shared.conn.state.is(State::Disconnected));
    // the client lives after all
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
}

/// A process can end when it has closed an endpoint and before its driver has sent the notice of
/// the end: the peer then finds the end of the process by that of the initiator.
#[test]
fn the_initiator_of_a_closed_endpoint_lives_until_the_end_is_told() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    for shuts_down in [false, true] {
        let (dials, _accepts) = connect((&client, &server), addr, 0, |_| {});
        let initiator = Arc::downgrade(&circuit(&dials));
        let own = client.domain.driver().unwrap();
        let own_events = own.dispatcher().registry();
        if shuts_down {
            dials.shutdown().unwrap();
        }
        dials.close();
        assert!(initiator.strong_count() != 0);
        drop(own_events);
        assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
        let until = Instant::now() + LIMIT;
        while initiator.strong_count() != 0 {
            assert!(Instant::now() < until, "the initiator is kept");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The confirmation of the last answer is lost: the end of the peer's identifier, which has sent
/// it, is not the end of the connection.
#[test]
fn a_lost_confirmation_is_not_the_end_of_the_connection() {
    let device = devices(&[replaced::with_lost_confirmations()], false).remove(0);
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let (dials, accepts) = connect_but_for_the_answer((&client, &server), addr, |_| {
        // the client's own one has arrived
        CONFIRMATIONS_LOST.store(true, Ordering::Release);
    });
    let connected = Told::Connected(Token(20), Vec::new());
    assert_eq!(next_event(&server.eq), Ok(connected));
    let until = Instant::now() + Duration::from_secs(5);
    while client.domain.circuits().unwrap().retired() != 0 {
        assert!(Instant::now() < until, "an identifier stays");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(dials.shared.conn.state.is(State::Connected));
    transfer((&client, &dials), &server, 1);
    transfer((&server, &accepts), &client, 2);
}

/// A target fails before its endpoint listens for that: the event finds no listener.
#[test]
fn a_target_that_fails_at_once_connects_nothing() {
    let device = devices(&[replaced::with_failing_targets()], false).remove(0);
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let dials = client.endpoint(on_xrc(10));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    let peer = client.domain.driver().unwrap();
    let peer_events = peer.dispatcher().registry();
    let _accepts = server.accept(request, on_xrc(20));
    TARGETS_FAIL.store(true, Ordering::Release);
    drop(peer_events);
    let error = next_error(&client.eq);
    assert_eq!((error.owner, error.err), (Token(10), FiErrno::ECONNABORTED));
    assert_eq!(next_error(&server.eq).owner, Token(20));
}

/// The identifiers of a connection end 1 s after it is complete, which is not its end.
#[test]
fn a_connection_outlives_its_identifiers() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let (dials, accepts) = connect((&client, &server), addr, 0, |_| {});
    let until = Instant::now() + Duration::from_secs(5);
    while [&client, &server].map(|host| host.domain.circuits().unwrap().retired()) != [0, 0] {
        assert!(Instant::now() < until, "an identifier stays");
        std::thread::sleep(Duration::from_millis(10));
    }
    transfer((&client, &dials), &server, 1);
    transfer((&server, &accepts), &client, 2);
}

/// A circuit that has ended keeps no queue.
#[test]
fn the_place_of_an_ended_circuit_keeps_no_queue() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let (dials, accepts) = connect((&client, &server), addr, 0, |_| {});
    dials.close();
    accepts.close();
    drop(dials);
    let Host {
        domain, cq, srx, ..
    } = client;
    let queue = Arc::downgrade(&cq);
    drop((srx, cq));
    let until = Instant::now() + LIMIT;
    while queue.strong_count() != 0 {
        assert!(Instant::now() < until, "the queue is kept");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(domain);
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
    assert!(accepts.shared.conn.state.is(State::Accepting), "redirected");
    aborted(&hosts[1], 21, begin);
    drop(events);
    // it lives after all
    let error = next_error(&client.eq);
    let refused = (Token(11), FiErrno::ECONNREFUSED);
    assert_eq!((error.owner, error.err), refused);
    transfer((&client, &stays.0), &hosts[0], 1);
    transfer((&hosts[0], &stays.1), &client, 2);
}

/// The target that a request names fails while the request is answered, and the peer is asked for a
/// new circuit: the endpoint does not stay without a result.
#[test]
fn a_failure_of_a_redirected_endpoint_is_reported() {
    let device = device();
    let client = Host::new(&device);
    let hosts = [0, 1].map(|_| Host::private(&device));
    let [(_pep, first_at), (_other, second_at)] =
        hosts.each_ref().map(|h| xrc_listener(&device, h));
    let stays = connect((&client, &hosts[0]), first_at, 0, |_| {});
    let dials = client.endpoint(on_xrc(11));
    dials.connect(Some(second_at), b"").unwrap();
    let (request, _) = next_request(&hosts[1].eq);
    let driver = client.domain.driver().unwrap();
    let events = driver.dispatcher().registry();
    let begin = Instant::now();
    let accepts = hosts[1].accept(request, on_xrc(21));
    assert!(accepts.shared.conn.state.is(State::Accepting), "redirected");
    // as the event of the target, which another thread takes
    accepts.shared.note_target_failure();
    assert!(accepts.shared.conn.state.is(State::Broken));
    drop(events);
    aborted(&hosts[1], 21, begin);
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
    let user: std::sync::Weak<dyn CircuitUser> = client.endpoint(on_xrc(10)).shared.weak();
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
    let user: std::sync::Weak<dyn CircuitUser> = pairs[0].0.shared.weak();
    let circuits = client.domain.circuits().unwrap();
    circuits.add_connection(srq_of(&server), successor, user);
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
    waits_for_notices(&server, || drop(peer_events));
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
}

/// The call that waits for the notices under way does not return before `answered`, which lets the
/// peer answer.
pub(super) fn waits_for_notices(host: &Host, answered: impl FnOnce()) {
    let returned = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            host.srx.await_notices();
            returned.store(true, Ordering::Release);
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!returned.load(Ordering::Acquire));
        answered();
    });
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
        let peer_keys = dials.shared.tx.lock();
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
        await_free_keys(&server);
    }
}

fn retired(host: &Host) -> usize {
    let directory = host.domain.mr().directory(host.domain.pd());
    directory.unwrap().retired()
}

/// Waits until no key is reserved.
pub(super) fn await_free_keys(host: &Host) {
    let start = Instant::now();
    while retired(host) != 0 {
        assert!(start.elapsed() < LIMIT, "keys stay reserved");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the numbers of notices that are awaited, and of those that linger.
pub(super) fn await_notices(host: &Host, reached: impl Fn((usize, usize)) -> bool) {
    let start = Instant::now();
    while !reached(host.domain.circuits().unwrap().notices()) {
        assert!(start.elapsed() < LIMIT, "a notice is awaited");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) type Pair = (Arc<Endpoint>, Arc<Endpoint>);

/// Two connections on one circuit. The first client endpoint has used a key, and the client does
/// not take events. The server has closed its endpoint, and waits for the answer no longer. `then`
/// gets the client, the server, the pairs, the region of the key, and a call after which the client
/// continues.
fn with_a_silent_peer(
    device: &Arc<Device>,
    then: impl FnOnce([&Host; 2], &[Pair; 2], &Arc<Region>, &mut dyn FnMut()),
) {
    let form = Mode::ALLOCATED | Mode::LOCAL;
    let [client, server] = [0, 1].map(|_| Host::with(device, kind(form)));
    let (_pep, addr) = xrc_listener(device, &server);
    let pairs = [0, 1].map(|n| connect((&client, &server), addr, n, |_| {}));
    assert!(Arc::ptr_eq(&circuit(&pairs[0].0), &circuit(&pairs[1].0)));
    let target = Buffer::with_key(&server.domain, LEN, TARGET, 5);
    {
        let source = Buffer::all(&client.domain, LEN);
        let (iov, desc) = source.part(0, LEN);
        // SAFETY: the buffers live until the operation has completed.
        unsafe { pairs[0].0.write(LocalIov::single(&iov, &desc), 0, 5, 1) }.unwrap();
        client.completion();
    }
    let peer = client.domain.driver().unwrap();
    let mut held = Some((pairs[0].0.shared.tx.lock(), peer.dispatcher().registry()));
    pairs[0].1.close();
    await_notices(&server, |(awaited, _)| awaited == 0);
    then([&client, &server], &pairs, &target.region, &mut || {
        drop(held.take());
    });
}

/// The peer of a closed endpoint does not answer the notice, and its requests may still arrive,
/// because another endpoint holds their target: no other region gets the key. The connection of the
/// other endpoint stays.
#[test]
fn the_key_of_a_silent_peer_is_reserved_until_it_answers() {
    with_a_silent_peer(&device(), |[client, server], pairs, region, wake| {
        region.close().unwrap();
        assert_eq!(retired(server), 1);
        wake();
        await_free_keys(server);
        assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
        // the key may be free before the answer is read
        await_notices(server, |notices| notices == (0, 0));
        transfer((client, &pairs[1].0), server, 1);
        transfer((server, &pairs[1].1), client, 2);
    });
}

/// As above, until the last endpoint that holds the target is closed.
#[test]
fn the_key_of_a_silent_peer_is_reserved_until_its_target_ends() {
    with_a_silent_peer(&device(), |[_, server], pairs, region, wake| {
        region.close().unwrap();
        assert_eq!(retired(server), 1);
        pairs[1].1.close();
        await_free_keys(server);
        wake();
    });
}

/// The device cannot reserve the key: the silent peer loses its target.
#[test]
fn a_silent_peer_whose_key_cannot_be_reserved_is_cut_off() {
    let device = devices(&[replaced::with_changing_keys()], false).remove(0);
    with_a_silent_peer(&device, |[_, server], pairs, region, wake| {
        let target = pairs[1].1.shared.own_target().unwrap();
        assert!(target.query().unwrap().receives);
        region.close().unwrap();
        assert!(!target.query().unwrap().receives);
        assert_eq!(retired(server), 0);
        wake();
    });
}
