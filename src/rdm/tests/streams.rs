//! Long messages as parts through rings, and those that both sides copy, while one side stops to
//! poll or the link breaks.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use super::Random;
use super::endpoints::{End, config, wait};
use super::pull::{break_links, domain};
use crate::av::FiAddr;
use crate::rdm::EndpointConfig;
use crate::rdm::core::Origin;
use crate::rdm::executor::Executor;
use crate::rdm::long::paces::Way;

const LEN: usize = (1 << 20) + 5;

fn bytes_of(seed: usize, len: usize) -> Vec<u8> {
    let byte = |at: usize| (at * 11 + seed + (at >> 8)) as u8;
    (0..len).map(byte).collect()
}

/// What is counted at an endpoint: messages asked for in parts by choice, and those of them that
/// were read after all.
fn counts(end: &End) -> (u32, u32) {
    let mut found = (0, 0);
    end.ep
        .shared()
        .apply_event(|_, io| found = (io.streams.begun, io.streams.stalled));
    found
}

fn pair() -> (End, End, FiAddr) {
    pair_with(&config(), Way::Stream)
}

/// The ways in which both sides take part.
const WAYS: [Way; 2] = [Way::Stream, Way::Both];

fn pair_with(config: &EndpointConfig, way: Way) -> (End, End, FiAddr) {
    let domain = domain();
    let open = || End::with(&domain, config.clone(), 0);
    let (a, b) = (open(), open());
    for end in [&a, &b] {
        let fix = |io: &mut Executor| io.paces.fixed = Some(way);
        end.ep.shared().apply_event(|_, io| fix(io));
    }
    let to_b = a.knows(&b);
    // both have polled, and are connected
    let mut small = [0; 8];
    b.recv(Some((0, 0)), &mut small, 1);
    a.send(to_b, Some(0), &[1; 8], 1);
    wait([&a, &b], [1, 1]);
    (a, b, to_b)
}

/// Polls one side until it has an entry, or for so many times.
fn poll(end: &End, times: usize) -> bool {
    (0..times).any(|_| end.poll().is_some())
}

/// Polls both sides so many times. Returns the number of their entries.
fn poll_both(a: &End, b: &End, times: usize) -> [usize; 2] {
    let mut done = [0; 2];
    for _ in 0..times {
        done[1] += usize::from(poll(b, 1));
        done[0] += usize::from(poll(a, 1));
    }
    done
}

#[test]
fn messages_arrive_while_both_sides_poll() {
    for way in WAYS {
        let (a, b, to_b) = pair_with(&config(), way);
        for round in 0..50 {
            let len = [16 << 10, LEN, 8193, 100_000, 3 << 20][round % 5];
            let bytes = bytes_of(round, len);
            let mut target = vec![0; len + round % 2];
            b.recv(Some((1, 0)), &mut target, 2);
            a.send(to_b, Some(1), &bytes, 1);
            wait([&a, &b], [1, 1]);
            assert!(target[..len] == bytes, "{way:?}, round {round}");
        }
        assert_eq!(counts(&b), (50, 0), "{way:?}");
        let pushed = a.state(|state| state.io.tests.pushed);
        assert_eq!(pushed, if way == Way::Both { 50 } else { 0 });
        let (begun, ended) = b.state(|state| state.io.tests.both_in_ring);
        // the first ones enlarge the ring
        match way {
            Way::Both => assert!(begun > 40 && ended == 50, "{begun}, {ended}"),
            _ => assert_eq!((begun, ended), (0, 0)),
        }
    }
}

/// More messages than one progress call writes are asked for at the same time, and messages of
/// which a call does not write half.
#[test]
fn both_sides_copy_many_long_messages() {
    let (a, b, to_b) = pair_with(&config(), Way::Both);
    for round in 0..3 {
        let len = [(3 << 20) + 1, 12 << 20, 100_001][round];
        let bytes: Vec<_> = (0..6).map(|at| bytes_of(round + at, len)).collect();
        let mut targets = vec![vec![0; len]; 6];
        for (at, target) in targets.iter_mut().enumerate() {
            let (first, second) = target.split_at_mut(if at == 4 { 70_000 } else { 0 });
            b.recv_into((at as u64, 0), &mut [first, second], 2);
        }
        for (at, bytes) in bytes.iter().enumerate() {
            a.send(to_b, Some(at as u64), bytes, 1);
        }
        wait([&a, &b], [6, 6]);
        assert!(targets == bytes, "round {round}");
    }
    let pushed = a.state(|state| state.io.tests.pushed);
    // one whose end is in two buffers is read
    assert_eq!((pushed, counts(&b)), (17, (17, 0)));
}

/// A hostile receiver that asks repeatedly causes one answer.
#[test]
fn the_end_of_a_message_is_asked_for_once() {
    let (a, b, to_b) = pair_with(&config(), Way::Both);
    for round in 0..5 {
        let (bytes, mut target) = (bytes_of(round, LEN), vec![0; LEN]);
        b.recv(Some((1, 0)), &mut target, 2);
        a.send(to_b, Some(1), &bytes, 1);
        a.ep.shared().apply_event(|core, io| {
            let peer = core.peer_keys().next().unwrap();
            assert_eq!(io.is_asked(Origin::of_test(peer), 100), 1);
        });
        wait([&a, &b], [1, 1]);
        assert!(target == bytes, "round {round}");
    }
    // PUSHED names no arrival, and what the receiver asks for itself is a second PUSH: it reads the
    // message, and the next ones too
    assert_eq!(a.state(|state| state.io.tests.pushed), 0);
    assert_eq!(counts(&b), (1, 1));
}

/// The sender posts some parts, or nothing, and then computes. What it does later does not change
/// the receive.
#[test]
fn a_receiver_reads_what_the_sender_does_not_post() {
    for way in WAYS {
        let (a, b, to_b) = pair_with(&config(), way);
        for round in 0..60 {
            let bytes = bytes_of(round, LEN);
            let mut target = vec![0; LEN];
            b.recv(Some((1, 0)), &mut target, 2);
            a.send(to_b, Some(1), &bytes, 1);
            let mut done = poll_both(&a, &b, round % 7);
            let until = Instant::now() + Duration::from_secs(30);
            while done[1] == 0 {
                assert!(Instant::now() < until, "the sender was needed");
                done[1] += usize::from(poll(&b, 10_000));
            }
            assert!(target == bytes, "{way:?}, round {round}");
            target.fill(0xee);
            wait([&a, &b], [1 - done[0], 0]);
            poll_both(&a, &b, 10);
            assert!(
                target.iter().all(|byte| *byte == 0xee),
                "{way:?}, round {round}"
            );
        }
        let stalled = counts(&b).1;
        assert!(stalled > 1, "{way:?}, {:?}", counts(&b));
    }
}

/// One side sleeps, or is served by the driver, in the middle of a message.
#[test]
fn a_message_goes_on_when_a_side_sleeps() {
    for way in WAYS {
        let (a, b, to_b) = pair_with(&config(), way);
        for round in 0..60 {
            let bytes = bytes_of(round, LEN);
            let mut target = vec![0; LEN];
            b.recv(Some((1, 0)), &mut target, 2);
            a.send(to_b, Some(1), &bytes, 1);
            let done = poll_both(&a, &b, round % 11);
            let sleeper = if round % 2 == 0 { &a } else { &b };
            sleeper.ep.shared().apply_event(|_, io| io.stop_streams());
            wait([&a, &b], done.map(|count| 1 - count));
            assert!(target == bytes, "{way:?}, round {round}");
        }
    }
}

fn memory(end: &End) -> (usize, usize) {
    let mut left = (0, 0);
    end.ep.shared().apply_event(|_, io: &mut Executor| {
        left = (io.rx.arrivals.len(), io.outstanding());
    });
    left
}

/// Messages of all lengths in both directions, with links that break and sides that do not poll for
/// a while.
#[test]
fn streams_survive_what_happens_between_their_parts() {
    for (at, seed) in super::seeds(24).enumerate() {
        let (a, b, to_b) = pair_with(&config(), WAYS[at % 2]);
        let to_a = b.knows(&a);
        let mut random = Random(seed);
        let mut all = [0; 2];
        for round in 0..20 {
            let count = 1 + random.below(3) as usize;
            let len = |random: &mut Random| match random.below(3) {
                0 => random.below(9_000) as usize,
                1 => 8_192 + random.below(60_000) as usize,
                _ => 100_000 + random.below(900_000) as usize,
            };
            let bytes: Vec<_> = (0..2 * count)
                .map(|at| bytes_of(round + at, len(&mut random)))
                .collect();
            let mut targets: Vec<_> = bytes.iter().map(|bytes| vec![0; bytes.len()]).collect();
            for (at, target) in targets.iter_mut().enumerate() {
                let end = if at % 2 == 0 { &b } else { &a };
                end.recv(Some((at as u64, 0)), target, 2);
            }
            for (at, bytes) in bytes.iter().enumerate() {
                let (end, to) = if at % 2 == 0 { (&a, to_b) } else { (&b, to_a) };
                end.send(to, Some(at as u64), bytes, 1);
            }
            let mut done = [0; 2];
            let until = Instant::now() + Duration::from_secs(60);
            while done != [2 * count; 2] {
                assert!(Instant::now() < until, "seed {seed}: {done:?}");
                let which = random.below(2) as usize;
                let end = [&a, &b][which];
                match random.below(400) {
                    0 => break_links(end),
                    1 => end.ep.shared().apply_event(|_, io| io.stop_streams()),
                    2 => done[which] += usize::from(poll(end, 6_000)),
                    _ => done[which] += usize::from(poll(end, 1 + random.below(4) as usize)),
                }
            }
            assert!(targets == bytes, "seed {seed}, round {round}");
            all = [all[0] + count, all[1] + count];
        }
        assert_eq!((memory(&a), memory(&b)), ((0, 0), (0, 0)), "seed {seed}");
        let (begun, _) = counts(&a);
        assert!(begun > 0, "seed {seed}: {all:?}");
    }
}

/// Requests of the queue pair under way keep the parts from the ring.
#[test]
fn a_stream_does_not_wait_for_the_queue_pair() {
    let (a, b, to_b) = pair();
    for round in 0..3 {
        let bytes = bytes_of(round, LEN);
        let mut target = vec![0; LEN];
        b.recv(Some((1, 0)), &mut target, 2);
        a.send(to_b, Some(1), &bytes, 1);
        let done = poll_both(&a, &b, 2 + round);
        a.ep.shared().apply_event(|_, io| {
            let links: Vec<_> = io.links.keys().collect();
            for link in links {
                io.links.get_mut(link).unwrap().occupy();
            }
        });
        // a receiver that cannot read
        b.ep.shared().apply_event(|_, io| io.streams.forget_spare());
        wait([&a, &b], done.map(|count| 1 - count));
        assert!(target == bytes, "round {round}");
        assert_eq!(counts(&b).1, 0);
        break_links(&a);
    }
}

/// Messages that are in a ring are read without an empty read between them.
#[test]
fn a_read_of_one_entry_leaves_the_others_to_the_next_one() {
    // with sources, entries do not go directly to the reader
    let without = EndpointConfig {
        source: false,
        ..config()
    };
    let (a, b, to_b) = pair_with(&without, Way::Stream);
    for round in 0..12 {
        let mut targets = [[0_u8; 8]; 10];
        for target in &mut targets {
            b.recv(Some((1, 0)), target, 2);
        }
        for _ in 0..10 {
            a.send(to_b, Some(1), &[5; 8], 1);
        }
        // until the window has grown, some messages wait for credit
        let found = match round < 8 {
            true => 0,
            false => (0..10).filter(|_| poll(&b, 1)).count(),
        };
        assert_eq!(found, if round < 8 { 0 } else { 10 });
        wait([&a, &b], [10, 10 - found]);
        assert_eq!(targets, [[5; 8]; 10]);
    }
}

/// A packet of the shared receive queue is behind all those that a large ring holds.
#[test]
fn a_large_ring_is_read_before_the_receive_queue() {
    const COUNT: u64 = 700;
    let (a, b, to_b) = pair();
    let (bytes, mut target) = (bytes_of(1, LEN), vec![0; LEN]);
    b.recv(Some((0, 0)), &mut target, 2);
    a.send(to_b, Some(0), &bytes, 1);
    wait([&a, &b], [1, 1]);
    // a window of more messages than a small ring holds
    b.ep.shared().apply_event(|core, _| {
        let peer = core.peer_keys().next().unwrap();
        for _ in 0..6 {
            core.grow(peer);
        }
    });
    let mut got = [0; 8];
    let mut exchange = |tag: u64| {
        b.recv(Some((tag, 0)), &mut got, 2);
        a.send(to_b, Some(tag), &tag.to_ne_bytes(), 1);
        wait([&a, &b], [1, 1]);
    };
    for tag in 0..200 {
        exchange(tag);
    }
    let inject = |tag: u64| {
        let message = tag.to_ne_bytes();
        let from = message.as_ptr().cast();
        // SAFETY: the buffer is readable during the call.
        unsafe { a.ep.inject(to_b, Some(tag), from, 8, None) }.unwrap();
    };
    (0..COUNT).for_each(inject);
    a.ep.shared().apply_event(|_, io| {
        assert_eq!(io.outstanding(), 0, "a message waits for credit");
        let links: Vec<_> = io.links.keys().collect();
        for link in links {
            io.links.get_mut(link).unwrap().occupy();
        }
    });
    inject(COUNT);
    for tag in 0..=COUNT {
        let mut got = [0; 8];
        b.recv(Some((tag, 0)), &mut got, 2);
        wait([&a, &b], [0, 1]);
        assert_eq!(u64::from_ne_bytes(got), tag);
    }
    for end in [&a, &b] {
        end.ep.shared().apply_event(|core, _| core.check());
    }
}

/// The session ends in the middle of a message: its receive fails, and nothing is written to it
/// afterwards.
#[test]
fn a_sender_that_ends_fails_the_receive() {
    for round in 0..20 {
        let way = WAYS[round % 2];
        let (a, b, to_b) = pair_with(&config(), way);
        let bytes = bytes_of(round, 8 << 20);
        let mut target = vec![0; bytes.len()];
        b.recv(Some((1, 0)), &mut target, 2);
        a.send(to_b, Some(1), &bytes, 1);
        match way {
            Way::Both => assert!(!poll(&b, 1 + round / 4)),
            _ => assert_eq!(poll_both(&a, &b, 4 + round / 2), [0, 0]),
        }
        a.ep.shared().apply_event(|core, io| {
            let peer = core.peer_keys().next().unwrap();
            core.fail(peer, crate::errno::FiErrno::EHOSTUNREACH, io);
        });
        let failed = super::pull::error(&a);
        assert_eq!(failed.completion.context, 1);
        // the next message begins another session
        let mut small = [0; 8];
        b.recv(Some((2, 0)), &mut small, 3);
        a.send(to_b, Some(2), &[9; 8], 4);
        let failed = super::pull::error(&b);
        assert_eq!(failed.completion.context, 2);
        wait([&a, &b], [1, 1]);
        assert_eq!(small, [9; 8]);
        target.fill(0xee);
        poll_both(&a, &b, 20);
        assert!(target.iter().all(|byte| *byte == 0xee), "round {round}");
    }
}
