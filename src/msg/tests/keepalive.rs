//! Silent peers: which endpoints probe them, and that the application does not see the probes.

use std::sync::atomic::Ordering;

use super::transfer::{no_completion, readable};
use super::*;

const PERIOD: Duration = Duration::from_millis(20);

fn watched() -> DomainConfig {
    DomainConfig {
        keepalive: Some(PERIOD),
        ..DomainConfig::default()
    }
}

fn answered(side: &Side) -> u32 {
    side.ep.shared.slots.probe.answered.load(Ordering::Relaxed)
}

/// Calls `step` until the peer has answered `count` more probes.
fn await_probes(side: &Side, count: u32, mut step: impl FnMut()) {
    let (start, before) = (Instant::now(), answered(side));
    while answered(side) < before + count {
        step();
        assert!(start.elapsed() < LIMIT, "only {} probes", answered(side));
    }
}

fn no_event(side: &Side) {
    let event = side.eq.read(true, |event| Ok(format!("{event:?}")));
    assert_eq!(event.err(), Some(FiErrno::EAGAIN));
}

/// The embedded device reports the death of a peer, so it needs no keepalive thread.
#[test]
fn only_devices_that_do_not_tell_are_watched() {
    let device = device();
    let domain = Domain::open(&device, DomainConfig::default()).unwrap();
    assert_eq!(
        domain.queues().keepalive().is_some(),
        device.needs_keepalive()
    );
    let never = DomainConfig {
        keepalive: Some(Duration::ZERO),
        ..DomainConfig::default()
    };
    assert!(
        Domain::open(&device, never)
            .unwrap()
            .queues()
            .keepalive()
            .is_none()
    );
    if device.backend().name == "softverbs" {
        assert!(!device.needs_keepalive());
    }
}

#[test]
fn a_silent_peer_is_probed_and_nobody_sees_it() {
    let (client, server) = connected_in(watched(), false, |_| {});
    let mut source = Buffer::all(&client.domain, 64);
    let target = Buffer::all(&server.domain, 64);
    server.recv(&target, 64, 1).unwrap();
    await_probes(&client, 3, || no_completion(&client));
    no_event(&client);
    no_event(&server);
    no_completion(&server);
    // probes use neither receives nor send slots of the application
    source.fill(5);
    let depth = client.ep.shared.slots.tx.depth() as usize;
    for context in 2..=depth {
        server.recv(&target, 64, context).unwrap();
    }
    await_probes(&client, 1, || no_completion(&client));
    for context in 1..=depth {
        client.send(&source, 64, context).unwrap();
    }
    for context in 1..=depth {
        assert_eq!(client.completion().unwrap().context, context);
        assert_eq!(server.completion().unwrap().context, context);
    }
    assert_eq!(target.memory, source.memory);
    await_probes(&client, 2, || no_completion(&client));
    no_completion(&server);
}

/// When sends that wait for a receive occupy every slot of the application in the send queue, the
/// probe has a slot of its own behind them.
#[test]
fn a_probe_fits_behind_a_full_queue() {
    let (client, server) = connected_in(watched(), false, |_| {});
    let source = Buffer::all(&client.domain, 64);
    let target = Buffer::all(&server.domain, 64);
    let depth = client.ep.shared.slots.tx.depth() as usize;
    for context in 0..depth {
        client.send(&source, 64, context).unwrap();
    }
    let start = Instant::now();
    while !client.ep.shared.slots.probe.pending.load(Ordering::Relaxed) {
        no_completion(&client);
        assert!(start.elapsed() < LIMIT);
    }
    for context in 0..depth {
        server.recv(&target, 64, context).unwrap();
        assert_eq!(server.completion().unwrap().context, context);
        assert_eq!(client.completion().unwrap().context, context);
    }
    await_probes(&client, 1, || no_completion(&client));
}

#[test]
fn who_sleeps_on_the_completion_queue_probes_and_sleeps_on() {
    let (client, _server) = connected_in(watched(), false, |_| {});
    await_probes(&client, 2, || {
        let start = Instant::now();
        let timeout = Duration::from_millis(100);
        let mut nothing = |c: &Completion| panic!("{c:?}");
        let got = client.cq.sread(1, 1, Some(timeout), &mut nothing);
        assert_eq!(got, Err(FiErrno::EAGAIN));
        assert!(start.elapsed() >= timeout);
    });
}

#[test]
fn who_sleeps_on_a_descriptor_is_woken_for_the_probe_and_can_sleep_again() {
    let (client, _server) = connected_in(watched(), false, |_| {});
    let fd = client.cq.fd().unwrap();
    let (mut woken, mut tried) = (0, 0);
    await_probes(&client, 3, || {
        tried += 1;
        if client.cq.trywait().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
            woken += u32::from(readable(fd));
        }
    });
    assert!(woken > 0 && woken < tried, "{woken} of {tried}");
}

#[test]
fn who_sleeps_on_the_event_queue_probes_too() {
    let (client, _server) = connected_in(watched(), false, |_| {});
    await_probes(&client, 2, || {
        let timeout = Some(Duration::from_millis(100));
        let got = client
            .eq
            .sread(false, timeout, |event| Ok(format!("{event:?}")));
        assert_eq!(got, Err(FiErrno::EAGAIN));
    });
    no_completion(&client);
}

/// The peer's queue pair is destroyed without a message, as when its machine fails, and this side
/// only waits.
fn lose_peer(kind: DomainConfig) -> (Side, Side, Buffer) {
    let (client, server) = connected_in(kind, false, |_| {});
    let target = Buffer::all(&client.domain, 64);
    client.recv(&target, 64, 7).unwrap();
    let control = server.ep.shared.control.lock();
    control.qp.as_ref().unwrap().set_error().unwrap();
    drop(control);
    (client, server, target)
}

/// Whether a polling thread reads the end of the connection within this time.
fn told_within(side: &Side, time: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < time {
        // the checks below find any further error
        let mut nothing = |c: &Completion| panic!("{c:?}");
        let _ = side.cq.read(1, &mut nothing);
        let shutdown = |event: &mut Event| Ok(matches!(event, Event::Shutdown { .. }));
        match side.eq.read(false, shutdown) {
            Ok(shutdown) => return shutdown,
            Err(error) => assert_eq!(error, FiErrno::EAGAIN),
        }
    }
    false
}

#[test]
fn a_peer_that_went_without_a_word_is_noticed() {
    let (client, _server, _target) = lose_peer(watched());
    assert!(told_within(&client, LIMIT));
    let flushed = client.completion().unwrap_err();
    assert_eq!(flushed.completion.context, 7);
    assert_eq!(flushed.err, FiErrno::ECANCELED);
    no_completion(&client);
    let never = DomainConfig {
        keepalive: Some(Duration::ZERO),
        ..DomainConfig::default()
    };
    let (client, _server, _target) = lose_peer(never);
    assert!(
        !told_within(&client, PERIOD * 20),
        "noticed without a probe: this test shows nothing"
    );
}
