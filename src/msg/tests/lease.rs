//! Leases of keys at an initiator: `docs/protocol.md`, "Stale keys".

use super::keys::{TARGET, in_form};
use super::*;
use crate::initiator::Transmit;
use crate::verbs::SendOpcode;

const FORM: Mode = Mode::ALLOCATED.union(Mode::LOCAL);
const KEY: u64 = 7;

/// Waits until the domain holds no keys of its peers.
fn until_given_back(side: &Side) {
    let start = Instant::now();
    while side.domain.queues().helper().has_holders() {
        assert!(start.elapsed() < LIMIT, "keys are never given back");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write(client: &Side, source: &Buffer) {
    client.write(source, 64, 0, KEY, 1).unwrap();
    client.completion().unwrap();
}

#[test]
fn a_domain_that_holds_no_keys_never_wakes_up() {
    let (client, server) = in_form(FORM);
    let source = Buffer::all(&client.domain, 64);
    let _target = Buffer::with_key(&server.domain, 64, TARGET, KEY);
    for _ in 0..3 {
        write(&client, &source);
        assert!(client.domain.queues().helper().has_holders());
        until_given_back(&client);
        let woken = client.domain.queues().helper().woken();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(client.domain.queues().helper().woken(), woken);
    }
    assert_eq!(
        server.domain.queues().helper().woken(),
        0,
        "a target has no timer"
    );
}

/// After the keys were returned, one round trip makes the valid ones usable again, and the
/// initiator looks the others up.
#[test]
fn what_was_given_back_is_good_again_or_forgotten() {
    let (client, server) = in_form(FORM);
    let mut source = Buffer::all(&client.domain, 64);
    let mut old = Buffer::with_key(&server.domain, 64, TARGET, KEY);
    for round in 0..20 {
        source.fill(round);
        write(&client, &source);
        assert!(old.memory == source.memory);
        until_given_back(&client);
        if round % 2 == 0 {
            source.fill(round + 100);
            write(&client, &source);
            assert!(old.memory == source.memory);
            until_given_back(&client);
        }
        // closing sends no revocation and waits for no acknowledgement, for which a close waits 1 s
        let before = old.memory.clone();
        let start = Instant::now();
        old.region.close().unwrap();
        let took = start.elapsed();
        assert!(took < Duration::from_millis(900), "{took:?}");
        client.write(&source, 64, 0, KEY, 2).unwrap();
        assert_eq!(client.refused(2), FiErrno::EKEYREJECTED);
        assert!(old.memory == before);
        drop(old);
        old = Buffer::with_key(&server.domain, 64, TARGET, KEY);
    }
}

/// Both sides repeatedly close regions that the peer has used, at the same time.
#[test]
fn two_sides_that_close_regions_wait_for_each_other() {
    let (client, server) = in_form(FORM);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (one, key, other) in [(&client, 1, 2), (&server, 2, 1)] {
            scope.spawn(move || {
                let source = Buffer::all(&one.domain, 64);
                for _ in 0..200 {
                    let own = Buffer::with_key(&one.domain, 64, TARGET, key);
                    one.write(&source, 64, 0, other, 1).unwrap();
                    if let Err(error) = one.completion() {
                        assert_eq!(error.err, FiErrno::EKEYREJECTED);
                    }
                    own.region.close().unwrap();
                }
            });
        }
    });
    assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
    for side in [&client, &server] {
        assert!(side.ep.peer_addr().is_ok());
        let nothing: Result<()> = side.eq.read(false, |event| panic!("{event:?}"));
        assert_eq!(nothing, Err(FiErrno::EAGAIN));
    }
}

/// An initiator is stopped after it has checked its keys and before it writes. The target waits one
/// second for it. Then the device refuses the write, and both sides report the end of the
/// connection.
#[test]
fn a_write_that_comes_too_late_ends_the_connection_on_both_sides() {
    let (client, server) = in_form(FORM);
    let source = Buffer::all(&client.domain, 64);
    let target = Buffer::with_key(&server.domain, 64, TARGET, KEY);
    write(&client, &source);
    let shared = &client.ep.shared;
    let mut tx = shared.tx.lock();
    let side = tx.as_mut().unwrap();
    let fragment = side.peer_keys().unwrap().cached_fragment(KEY).unwrap();
    let before = target.memory.clone();
    let start = Instant::now();
    target.region.close().unwrap();
    let took = start.elapsed();
    assert!(
        took >= Duration::from_millis(900) && took < LIMIT,
        "{took:?}"
    );
    // closing further regions does not wait again
    for key in 100..200 {
        drop(Buffer::with_key(&server.domain, 64, TARGET, key));
    }
    assert!(start.elapsed() < took + Duration::from_millis(500));
    let (iov, desc) = source.part(0, 64);
    let op = Transmit {
        opcode: SendOpcode::Write,
        completion_flags: Flags::RMA | Flags::WRITE,
        ..Transmit::send(LocalIov::single(&iov, &desc), 3, Flags::COMPLETION)
    };
    // SAFETY: the buffer outlives the operation.
    unsafe { side.post(&op, 64, (fragment.addr, fragment.rkey)) }.unwrap();
    drop(tx);
    assert_eq!(client.refused(3), FiErrno::EKEYREJECTED);
    assert!(target.memory == before);
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(SERVER)));
}

/// An acknowledgement is fenced only if a read or an atomic with an older key is outstanding, and
/// no look-up is posted behind a fenced one. Otherwise rxe never retransmits the two.
#[test]
fn an_acknowledgement_is_fenced_behind_reads_alone() {
    let (client, server) = in_form(FORM);
    let source = Buffer::all(&client.domain, 64);
    let shared = &client.ep.shared;
    let is_fenced = || {
        let control = shared.control.lock();
        let fences = &control.qp.as_ref().unwrap().posted_fences;
        fences.load(std::sync::atomic::Ordering::Relaxed) & 1 != 0
    };
    for reads in [false, true] {
        // the thread that returns keys can poll the read's completion before the acknowledgement
        for round in 0.. {
            let target = Buffer::with_key(&server.domain, 64, TARGET, KEY);
            write(&client, &source);
            // its completion is not polled yet
            match reads {
                true => client.read(&source, 64, 0, KEY, 2).unwrap(),
                false => client.write(&source, 64, 0, KEY, 2).unwrap(),
            }
            let decided = std::thread::scope(|scope| {
                let close = scope.spawn(|| target.region.close().unwrap());
                let start = Instant::now();
                let mut tx = shared.tx.lock();
                let peer = tx.as_mut().unwrap().peer_keys().unwrap();
                while peer.cached_fragment(KEY).is_some() {
                    assert!(start.elapsed() < LIMIT, "no revocation");
                    peer.catch_up();
                }
                peer.acknowledge();
                let fenced = is_fenced();
                let looks_up = peer.begin_look_up(KEY);
                let decided = peer.is_reading() == reads;
                if decided {
                    assert_eq!((fenced, looks_up), (reads, !reads));
                }
                drop(tx);
                while !close.is_finished() {
                    let _ = client.cq.read(0, &mut |_: &Completion| {});
                }
                decided
            });
            assert_eq!(client.completion().unwrap().context, 2);
            client.write(&source, 64, 0, KEY, 3).unwrap();
            assert_eq!(client.refused(3), FiErrno::EKEYREJECTED);
            if decided {
                break;
            }
            assert!(round < 1_000, "the read always completes before");
        }
    }
}

/// A revocation could not be sent because too many were outstanding. The helper thread sends it
/// later, although meanwhile a post finds that no operation is deferred.
#[test]
fn a_revocation_stays_to_be_sent_when_operations_resume() {
    let (client, _server) = connected(false, |_| {});
    let shared = &client.ep.shared;
    // no thread sends it yet
    let control = shared.control.lock();
    shared.slots.engine_requests.want(true);
    shared.slots.set_needs_progress();
    let slots = Arc::downgrade(&shared.slots);
    client.domain.queues().helper().add(slots, &client.cq);
    shared.tx.lock().as_mut().unwrap().resume();
    std::thread::sleep(Duration::from_millis(5));
    drop(control);
    let start = Instant::now();
    while shared.slots.engine_requests.is_wanted() {
        assert!(start.elapsed() < LIMIT, "the revocation is not sent");
        std::thread::sleep(Duration::from_millis(1));
    }
    // and the helper thread stops afterwards
    while shared.slots.needs_progress() {
        assert!(start.elapsed() < LIMIT, "the helper thread does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}
