//! What is kept for the requests of a connection that has ended, and which ends are told.

use std::sync::atomic::{AtomicBool, Ordering};

use super::super::keys::{TARGET, kind};
use super::ends::{Pair, await_free_keys, await_notices, waits_for_notices};
use super::*;
use crate::verbs::{AsyncEvent, AsyncListener};

/// Two connections on one circuit of the client, with application keys. Notices wait for requests
/// longer than a busy machine delays a test.
fn two_pairs(device: &Arc<Device>) -> ([Host; 2], [Pair; 2]) {
    let form = Mode::ALLOCATED | Mode::LOCAL;
    let [client, server] = [0, 1].map(|_| Host::with(device, kind(form)));
    for host in [&client, &server] {
        host.domain.circuits().unwrap().set_notice_limit(LIMIT);
    }
    let (_pep, addr) = xrc_listener(device, &server);
    let pairs = [0, 1].map(|n| connect((&client, &server), addr, n, |_| {}));
    assert!(Arc::ptr_eq(&circuit(&pairs[0].0), &circuit(&pairs[1].0)));
    ([client, server], pairs)
}

/// Registered buffers of the client and the server, with keys that those of [`transfer`] do not
/// have.
fn source_and_sink([client, server]: [&Host; 2]) -> [Buffer; 2] {
    let buffer = |host: &Host, key| Buffer::with_key(&host.domain, LEN, Access::all(), key);
    [buffer(client, 1), buffer(server, 2)]
}

/// Messages are transferred in both directions.
fn works([client, server]: [&Host; 2], pair: &Pair) {
    transfer((client, &pair.0), server, 1);
    transfer((server, &pair.1), client, 2);
}

/// Posts a message, which waits for a receive of the peer.
fn send(ep: &Endpoint, source: &Buffer, context: usize) {
    let (iov, desc) = source.part(0, LEN);
    // SAFETY: tests keep their buffers until completion.
    unsafe { ep.send(LocalIov::single(&iov, &desc), context) }.unwrap();
}

/// Posts a write with key 5.
fn write(ep: &Endpoint, source: &Buffer, context: usize) {
    let (iov, desc) = source.part(0, LEN);
    // SAFETY: as in `send`.
    unsafe { ep.write(LocalIov::single(&iov, &desc), 0, 5, context) }.unwrap();
}

/// Waits for a completion, or for the error of an operation that was cancelled.
fn completed_or_cancelled(host: &Host) {
    match host.cq.sread(1, 1, Some(LIMIT), &mut |_: &Completion| {}) {
        Ok(1) => {}
        Err(FiErrno::EAVAIL) => {
            let error = host.cq.read_error().unwrap();
            assert_eq!(error.err, FiErrno::ECANCELED);
        }
        other => panic!("{other:?}"),
    }
}

/// The requests of the engine that look a key up wait on a circuit that others use. The peer closes
/// its endpoint meanwhile: its block is not free before they have been executed.
#[test]
fn a_notice_is_answered_behind_the_requests_of_the_engine() {
    let ([client, server], pairs) = two_pairs(&device());
    let _target = Buffer::with_key(&server.domain, LEN, TARGET, 5);
    let [source, sink] = source_and_sink([&client, &server]);
    send(&pairs[1].0, &source, 3);
    write(&pairs[0].0, &source, 4);
    let slots = &pairs[0].0.shared.slots;
    assert!(slots.has_engine_requests());
    pairs[0].1.close();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
    // the time in which a notice is answered, if nothing is under way
    std::thread::sleep(Duration::from_millis(200));
    server.post(&sink);
    assert_eq!(client.completion().context, 3);
    assert_eq!(server.completion().context, 7);
    let failed = client.cq.sread(1, 1, Some(LIMIT), &mut |_: &Completion| {});
    assert_eq!(failed, Err(FiErrno::EAVAIL));
    let error = client.cq.read_error().unwrap();
    let cancelled = (4, FiErrno::ECANCELED);
    assert_eq!((error.completion.context, error.err), cancelled);
    await_notices(&server, |notices| notices == (0, 0));
    assert!(!slots.has_requests());
    works([&client, &server], &pairs[1]);
}

/// The side that ends a connection has requests under way on a circuit that others use. The other
/// side closes its endpoint and its region: both stay until the requests have been executed.
#[test]
fn what_late_requests_access_is_kept_by_the_side_that_is_told() {
    let ([client, server], pairs) = two_pairs(&device());
    let target = Buffer::with_key(&server.domain, LEN, TARGET, 5);
    let [source, sink] = source_and_sink([&client, &server]);
    write(&pairs[0].0, &source, 1);
    assert_eq!(client.completion().context, 1);
    send(&pairs[0].0, &source, 3);
    write(&pairs[0].0, &source, 4);
    pairs[0].0.shutdown().unwrap();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
    pairs[0].1.close();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| target.region.close());
        std::thread::sleep(Duration::from_millis(100));
        server.post(&sink);
        assert_eq!(client.completion().context, 3);
        assert_eq!(server.completion().context, 7);
        // if the keys were returned before the second write, it was not posted
        completed_or_cancelled(&client);
        closing.join().unwrap().unwrap();
    });
    await_free_keys(&server);
    await_notices(&server, |notices| notices == (0, 0));
    works([&client, &server], &pairs[1]);
}

/// The application reads the end of a connection and closes a region before the driver has sent the
/// notice of the end: the peer, which holds keys, may have requests under way.
#[test]
fn a_region_that_is_closed_before_the_peer_is_told_is_kept() {
    let ([client, server], pairs) = two_pairs(&device());
    let target = Buffer::with_key(&server.domain, LEN, TARGET, 5);
    let source = Buffer::with_key(&client.domain, LEN, Access::all(), 1);
    let peer = &pairs[0].0.shared;
    let holds_keys = || {
        let control = pairs[0].1.shared.control.lock();
        let block = control.block.as_ref().unwrap();
        block.holds_keys() && !peer.slots.has_engine_requests()
    };
    // without this lock the peer returns its keys after a time
    let keeps_keys = loop {
        write(&pairs[0].0, &source, 1);
        assert_eq!(client.completion().context, 1);
        let keeps_keys = peer.tx.lock();
        if holds_keys() {
            break keeps_keys;
        }
    };
    let own = server.domain.driver().unwrap();
    let own_events = own.dispatcher().registry();
    circuit(&pairs[0].1).fail();
    while next_event(&server.eq) != Ok(Told::Shutdown(Token(20))) {}
    std::thread::scope(|scope| {
        let begin = Instant::now();
        let closing = scope.spawn(|| target.region.close());
        std::thread::sleep(Duration::from_millis(100));
        // it waits at most 1 s
        assert!(!closing.is_finished() || begin.elapsed() > Duration::from_millis(900));
        drop((own_events, keeps_keys));
        closing.join().unwrap().unwrap();
    });
    await_free_keys(&server);
    await_notices(&server, |notices| notices == (0, 0));
}

/// The end of a connection waits for a thread that posts, also if the application has closed the
/// endpoint: what that thread posts is recorded before the notice of the peer is answered.
#[test]
fn the_end_of_a_closed_endpoint_waits_for_a_thread_that_posts() {
    let (_hosts, pairs) = two_pairs(&device());
    let shared = &pairs[0].0.shared;
    let posting = shared.tx.lock();
    shared.conn.state.set(State::Closed);
    std::thread::scope(|scope| {
        let end = scope.spawn(|| shared.send_end_notice());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!end.is_finished());
        drop(posting);
    });
    shared.conn.state.set(State::Connected);
}

/// A context that is closed waits for the peer that has ended a connection: its message must not
/// find a queue that has ended.
#[test]
fn a_context_waits_for_the_late_requests_of_a_peer_that_has_told_its_end() {
    let ([client, server], pairs) = two_pairs(&device());
    let [source, sink] = source_and_sink([&client, &server]);
    send(&pairs[0].0, &source, 3);
    pairs[0].0.shutdown().unwrap();
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
    pairs[0].1.close();
    waits_for_notices(&server, || {
        server.post(&sink);
        assert_eq!(client.completion().context, 3);
        assert_eq!(server.completion().context, 7);
    });
    transfer((&client, &pairs[1].0), &server, 1);
}

/// The circuit fails, and the application closes its endpoint before the driver has told the peer.
#[test]
fn the_close_behind_a_failure_is_told() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let (dials, _accepts) = connect((&client, &server), addr, 0, |_| {});
    let own = client.domain.driver().unwrap();
    let own_events = own.dispatcher().registry();
    circuit(&dials).fail();
    dials.close();
    drop(own_events);
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
}

/// A connection has ended while its message waits, alone on its circuit: the notice is answered at
/// once. A connection that is made before the application reads the end, which flushes the message,
/// does not join the circuit.
#[test]
fn no_connection_joins_the_requests_of_one_that_has_ended() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    client.domain.circuits().unwrap().set_notice_limit(LIMIT);
    let (_pep, addr) = xrc_listener(&device, &server);
    let ended = connect((&client, &server), addr, 0, |_| {});
    let source = Buffer::all(&client.domain, LEN);
    send(&ended.0, &source, 3);
    ended.1.shutdown().unwrap();
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(Token(20))));
    await_notices(&server, |notices| notices == (0, 0));
    assert!(ended.0.shared.slots.has_requests());
    let dials = client.endpoint(on_xrc(11));
    dials.connect(Some(addr), b"").unwrap();
    let (request, _) = next_request(&server.eq);
    let accepts = server.accept(request, on_xrc(21));
    let connected = Told::Connected(Token(21), Vec::new());
    assert_eq!(next_event(&server.eq), Ok(connected));
    assert!(!Arc::ptr_eq(&circuit(&dials), &circuit(&ended.0)));
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
    let welcome = Told::Connected(Token(11), b"welcome".to_vec());
    assert_eq!(next_event(&client.eq), Ok(welcome));
    let failed = client.cq.sread(1, 1, Some(LIMIT), &mut |_: &Completion| {});
    assert_eq!(failed, Err(FiErrno::EAVAIL));
    assert_eq!(client.cq.read_error().unwrap().completion.context, 3);
    works([&client, &server], &(dials, accepts));
}

/// The close of the only endpoint of a circuit does not retire it if nothing is under way: a
/// connection that is made before the endpoint has left it uses the same circuit.
#[test]
fn a_connection_joins_the_circuit_of_an_idle_endpoint_that_is_being_closed() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let first = connect((&client, &server), addr, 0, |_| {});
    transfer((&client, &first.0), &server, 1);
    let shared = &first.0.shared;
    assert!(!shared.slots.has_requests());
    // the part of a close before it gives the share of the circuit back
    shared.conn.state.set(State::Closed);
    shared.await_flush();
    let second = connect((&client, &server), addr, 1, |_| {});
    assert!(Arc::ptr_eq(&circuit(&first.0), &circuit(&second.0)));
    shared.conn.state.set(State::Connected);
    works([&client, &server], &second);
}

/// A circuit has failed, and the device has not flushed its requests yet: the close of an endpoint
/// waits for them, because the device may access its buffers until then.
#[test]
fn the_close_behind_a_failure_waits_for_the_flush() {
    let device = device();
    let waits = |_| {
        let ([client, server], pairs) = two_pairs(&device);
        let [source, _sink] = source_and_sink([&client, &server]);
        let dials = &pairs[0].0;
        send(dials, &source, 3);
        let circuit = circuit(dials);
        // as on a device whose event precedes the completions
        circuit.async_event(AsyncEvent::QpError);
        let flushes = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !dials.shared.conn.state.is(State::Closed) {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(20));
                // set first: the close can see the flush before `set_error` returns
                flushes.store(true, Ordering::Release);
                circuit.qp().set_error().unwrap();
            });
            dials.close();
            flushes.load(Ordering::Acquire)
        })
    };
    // a test machine can be busy for longer than a close waits
    assert!((0..5).any(waits), "no close waits");
}

/// The device was removed: it flushes nothing, so the close of an endpoint does not wait for that.
#[test]
fn the_close_behind_a_removal_waits_for_no_flush() {
    let device = device();
    let close = |_| {
        let ([client, server], pairs) = two_pairs(&device);
        let [source, _sink] = source_and_sink([&client, &server]);
        let dials = &pairs[0].0;
        send(dials, &source, 3);
        let circuit = circuit(dials);
        circuit.async_event(AsyncEvent::DeviceFatal);
        dials.shared.async_event(AsyncEvent::DeviceFatal);
        let begin = Instant::now();
        dials.close();
        let time = begin.elapsed();
        // the emulated device is still there
        circuit.qp().set_error().unwrap();
        time
    };
    // a test machine can be busy
    let least = (0..5).map(close).min().unwrap();
    assert!(least < Duration::from_millis(200), "{least:?}");
}

/// An idle endpoint is closed while its write that returns the keys waits behind a message of
/// another endpoint: the other one is told the end of the circuit.
#[test]
fn a_circuit_that_ends_with_a_request_of_the_engine_is_reported() {
    let ([client, server], pairs) = two_pairs(&device());
    let _target = Buffer::with_key(&server.domain, LEN, TARGET, 5);
    let source = Buffer::with_key(&client.domain, LEN, Access::all(), 1);
    let shared = &pairs[0].0.shared;
    loop {
        write(&pairs[0].0, &source, 1);
        assert_eq!(client.completion().context, 1);
        // no keys are returned with this lock held
        let _posting = shared.tx.lock();
        if shared.slots.holds_keys() && !shared.slots.has_engine_requests() {
            send(&pairs[1].0, &source, 3);
            break;
        }
    }
    let begin = Instant::now();
    while !shared.slots.has_engine_requests() {
        assert!(begin.elapsed() < LIMIT, "the keys are not returned");
        std::thread::sleep(Duration::from_millis(1));
    }
    pairs[0].0.close();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(11))));
}

fn is_probing(ep: &Endpoint) -> bool {
    ep.shared.slots.probe.pending.load(Ordering::Acquire)
}

/// No probe is posted behind another endpoint's message. So the close of a silent endpoint waits
/// for nothing, and when the peer's process has ended with its receive queue, no request to that
/// queue is left, which would break the circuit of a connection to another process.
#[test]
fn no_probe_waits_behind_the_message_of_another_endpoint() {
    let device = device();
    let directory = Directory::new("probes");
    let watched = DomainConfig {
        keepalive: Some(Duration::from_millis(20)),
        xrc: directory.places("a"),
        ..DomainConfig::default()
    };
    let client = Host::with(&device, watched);
    let [first, second] = [0, 1].map(|_| Host::of(&device, directory.places("b")));
    let (pep, first_at) = xrc_listener(&device, &first);
    let (_pep, second_at) = xrc_listener(&device, &second);
    let silent = [0, 1].map(|n| connect((&client, &first), first_at, n, |_| {}));
    let busy = connect((&client, &second), second_at, 2, |_| {});
    for (dials, _) in &silent {
        assert!(Arc::ptr_eq(&circuit(dials), &circuit(&busy.0)));
    }
    let [source, sink] = [&client, &second].map(|host| Buffer::all(&host.domain, LEN));
    send(&busy.0, &source, 3);
    let begin = Instant::now();
    // the endpoint that sends is as silent as the others, and is probed behind its own message
    while !is_probing(&busy.0) || begin.elapsed() < Duration::from_millis(200) {
        assert!(begin.elapsed() < LIMIT, "no probe");
        // readers of an empty queue find when a probe is due
        let period = Some(Duration::from_millis(5));
        let entry = client.cq.sread(1, 1, period, &mut |_: &Completion| {});
        assert_eq!(entry, Err(FiErrno::EAGAIN));
    }
    let mut times = Vec::new();
    for (dials, accepts) in &silent {
        assert!(!is_probing(dials));
        let begin = Instant::now();
        dials.close();
        times.push(begin.elapsed());
        accepts.close();
    }
    // a test machine can be busy
    let least = times.iter().min().unwrap();
    assert!(*least < Duration::from_millis(500), "{times:?}");
    pep.close();
    drop(silent);
    first.srx.await_notices();
    drop(first);
    second.post(&sink);
    assert_eq!(client.completion().context, 3);
    assert_eq!(second.completion().context, 7);
    works([&client, &second], &busy);
}

/// A probe of a closed endpoint is left behind another endpoint's message, which was posted at the
/// same moment. The circuit stays.
#[test]
fn a_probe_that_is_left_ends_no_circuit() {
    let device = device();
    let (client, server) = (Host::new(&device), Host::new(&device));
    let (_pep, addr) = xrc_listener(&device, &server);
    let pairs = [0, 1].map(|n| connect((&client, &server), addr, n, |_| {}));
    assert!(Arc::ptr_eq(&circuit(&pairs[0].0), &circuit(&pairs[1].0)));
    let [source, sink] = [&client, &server].map(|host| Buffer::all(&host.domain, LEN));
    send(&pairs[1].0, &source, 3);
    let shared = &pairs[0].0.shared;
    // a beat that has found no operation
    shared.probe_silent(&shared.control.lock());
    assert!(is_probing(&pairs[0].0));
    pairs[0].0.close();
    server.post(&sink);
    assert_eq!(client.completion().context, 3);
    assert_eq!(server.completion().context, 7);
    works([&client, &server], &pairs[1]);
}

/// A circuit breaks by a request of an endpoint whose connection has ended, or which is being
/// closed: the others that use the circuit are told.
#[test]
fn a_circuit_that_an_ended_endpoint_breaks_is_reported() {
    let device = device();
    for closes in [false, true] {
        let ([client, server], pairs) = two_pairs(&device);
        let source = Buffer::with_key(&client.domain, LEN, Access::all(), 1);
        let short = Buffer::with_key(&server.domain, LEN, Access::all(), 2);
        let refuse = || {
            let (iov, desc) = short.part(0, LEN / 8);
            // SAFETY: as in `send`.
            unsafe { server.srx.recv(LocalIov::single(&iov, &desc), 7) }.unwrap();
        };
        send(&pairs[0].0, &source, 3);
        if closes {
            std::thread::scope(|scope| {
                scope.spawn(|| pairs[0].0.close());
                while !pairs[0].0.shared.conn.state.is(State::Closed) {
                    std::thread::yield_now();
                }
                refuse();
            });
        } else {
            pairs[0].0.shutdown().unwrap();
            assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
            refuse();
        }
        let failed = client.cq.sread(1, 1, Some(LIMIT), &mut |_: &Completion| {});
        assert_eq!(failed, Err(FiErrno::EAVAIL));
        assert_eq!(client.cq.read_error().unwrap().completion.context, 3);
        let told = next_event(&client.eq);
        assert_eq!(told, Ok(Told::Shutdown(Token(11))), "{closes}");
    }
}
