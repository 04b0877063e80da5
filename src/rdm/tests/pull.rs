//! Messages that are read from the memory of their sender, on the embedded device, when links
//! break, keys are wrong and sessions end.

#![allow(unsafe_code, reason = "registers buffers as C does")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::endpoints::{End, Transport, give_up_circuits, queue_pair, wait, wait_for};
use crate::av::FiAddr;
use crate::domain::{Domain, DomainConfig};
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::{Access, Buffer, Desc, Form, Mode, MrConfig, Region, RegionConfig};
use crate::queue::{Completion, CompletionError};
use crate::rdm::LocalIov;
use crate::rdm::completions::Side;
use crate::rdm::core::Core;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::executor::Executor;
use crate::rdm::receives::AtSender;
use crate::rdm::step::Step;
use crate::rdm::xrc::circuit_cm::XrcStep;
use crate::verbs::{RemoteAddr, Rkey};

const LEN: usize = (3 << 20) + 17;

/// A domain whose buffers need no descriptors.
pub(super) fn domain() -> Arc<Domain> {
    domain_with(Mode::NATIVE)
}

pub(super) fn domain_with(mode: Mode) -> Arc<Domain> {
    let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
    let mr = MrConfig {
        form: Form::new(mode, false),
        ..MrConfig::default()
    };
    let config = DomainConfig {
        mr,
        ..DomainConfig::default()
    };
    Domain::open(&device, config).unwrap()
}

/// An endpoint that streams no messages: it reads them.
pub(super) fn reader(domain: &Arc<Domain>, transport: Transport) -> End {
    let end = reader_at_once(domain, transport);
    end.ep
        .shared()
        .apply_event(|_, io| io.tests.posts_reads = true);
    end
}

/// As [`reader`], which reads without requests where the device can.
pub(super) fn reader_at_once(domain: &Arc<Domain>, transport: Transport) -> End {
    let end = End::with(domain, transport.config(), 0);
    end.ep.shared().apply_event(|_, io| io.streams.off = true);
    end
}

/// Calls `test` for each transport, with READs by requests and without.
pub(super) fn each_reader(test: impl Fn(Transport, fn(&Arc<Domain>, Transport) -> End)) {
    Transport::each(|transport| {
        test(transport, reader);
        test(transport, reader_at_once);
    });
}

pub(super) fn bytes_of(seed: usize) -> Vec<u8> {
    (0..LEN).map(|i| (i * 7 + seed + (i >> 9)) as u8).collect()
}

/// Ends all links of an endpoint, as if they had broken.
pub(super) fn break_links(end: &End) {
    end.ep.shared().apply_event(|core, io| {
        let links: Vec<LinkKey> = io.links.keys().collect();
        for link in links {
            core.broken(link, io);
        }
    });
}

pub(super) fn pull_failures(end: &End) -> (u32, u32) {
    end.ep
        .shared()
        .lock()
        .as_ref()
        .unwrap()
        .io
        .tests
        .pull_failures
}

/// Polls the receiver until RTS has arrived, the only message that is stored.
fn wait_for_rts(a: &End, b: &End) {
    let stored = || {
        let mut state = b.ep.shared().lock();
        let rx = &mut state.as_mut().unwrap().io.rx;
        rx.own().unwrap().stored_len()
    };
    while stored() == 0 {
        assert_eq!((a.poll(), b.poll()), (None, None));
    }
}

/// A receive with flags; its context is the address of `context`.
fn recv_with(end: &End, tag: u64, bytes: &mut [u8], context: &mut [u64; 4], flags: Flags) {
    let iov = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let local = LocalIov::single(&iov, &Desc::NULL);
    let context = (&raw mut *context).expose_provenance();
    // SAFETY: the callers keep the buffer and the context until the completion.
    unsafe {
        end.ep.recv(
            FiAddr(u64::MAX),
            Some((tag, 0)),
            local,
            context,
            Some(flags),
        )
    }
    .unwrap();
}

/// The entry of a message whose sender is lost stays for the holder of its claim, and fails.
#[test]
fn claimed_messages_of_a_lost_peer_fail() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        let bytes = bytes_of(1);
        for tag in 1..=3 {
            a.send(to_b, Some(tag), &bytes, tag as usize);
        }
        let stored = || b.state(|state| state.io.rx.own().unwrap().stored_len());
        while stored() < 3 {
            assert_eq!((a.poll(), b.poll()), (None, None));
        }
        let mut claims = [[0_u64; 4]; 2];
        for (tag, claim) in (1..).zip(&mut claims) {
            recv_with(&b, tag, &mut [], claim, Flags::PEEK | Flags::CLAIM);
            let found = &wait_for(&b, 1)[0];
            assert_eq!((found.tag, found.len), (tag, LEN));
        }
        b.ep.shared().apply_event(|core, io| {
            let peer = core.peer_keys().next().unwrap();
            core.fail(peer, FiErrno::ECONNABORTED, io);
        });
        // the one that is not claimed is dropped
        assert_eq!(stored(), 2);
        let mut target = vec![0; LEN];
        recv_with(&b, 1, &mut target, &mut claims[0], Flags::CLAIM);
        let failed = error(&b);
        assert_eq!(
            (failed.err, failed.completion.tag, failed.completion.len),
            (FiErrno::ECONNABORTED, 1, 0)
        );
        let context = (&raw const claims[0]).addr();
        assert_eq!(failed.completion.context, context);
        let flags = Flags::CLAIM | Flags::DISCARD;
        recv_with(&b, 2, &mut [], &mut claims[1], flags);
        let context = (&raw const claims[1]).addr();
        assert_eq!(wait_for(&b, 1)[0].context, context);
        assert_eq!(stored(), 0);
    });
}

/// Ends what peers post through the targets of an endpoint, if it is on XRC.
fn break_targets(end: &End) {
    end.ep.shared().apply_event(|_, io| {
        let targets = io.xrc.iter().flat_map(|xrc| xrc.targets.keys().copied());
        for target in targets.collect::<Vec<_>>() {
            io.break_target(target);
        }
    });
}

/// Polls until the peer may post to all links of the first endpoint.
fn wait_for_attach(a: &End, b: &End) {
    let waits = || {
        a.state(|state| {
            let keys: Vec<LinkKey> = state.io.links.keys().collect();
            let waits = |key: &LinkKey| {
                let port = state.io.port_mut(*key);
                port.is_some_and(|port| port.from.is_none())
            };
            keys.iter().any(waits)
        })
    };
    while waits() {
        assert_eq!((a.poll(), b.poll()), (None, None));
    }
}

/// READs that are posted to a link that the sender has ended fail, and are repeated on the next
/// link.
#[test]
fn reads_are_repeated_on_the_next_link() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        for round in 0..60 {
            let bytes = bytes_of(round);
            let mut target = vec![0; LEN];
            a.send(to_b, Some(1), &bytes, 1);
            wait_for_rts(&a, &b);
            match round % 3 {
                0 => break_links(&b),
                1 => {
                    break_links(&a);
                    break_targets(&a);
                }
                // the device and the connection manager have not yet informed the receiver
                _ => a.ep.shared().apply_event(|_, io| {
                    let keys: Vec<LinkKey> = io.links.keys().collect();
                    for key in keys {
                        let _ = queue_pair(io, key).map(|qp| qp.set_error());
                    }
                    for held in io.xrc.iter().flat_map(|xrc| xrc.targets.values()) {
                        let _ = held.target.as_ref().map(|target| target.set_error());
                    }
                }),
            }
            b.recv(Some((1, 0)), &mut target, 2);
            if round % 2 == 0 {
                break_links(&b);
            }
            wait([&a, &b], [1, 1]);
            assert!(target == bytes, "round {round}");
        }
        let (repeated, refused) = pull_failures(&b);
        assert!(repeated > 0, "no READ has failed");
        assert_eq!(refused, 0);
    });
}

/// Messages of each length are read without requests: into one buffer and several, truncated, and
/// those longer than one call reads.
#[test]
fn messages_are_read_without_requests() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (
            reader_at_once(&domain, transport),
            reader_at_once(&domain, transport),
        );
        let to_b = a.knows(&b);
        let most = 5 << 20;
        let bytes: Vec<u8> = (0..most)
            .map(|at: usize| (at * 7 + (at >> 9)) as u8)
            .collect();
        for (round, len) in [16 << 10, 8_200, 100_000, LEN, (1 << 20) + 1, most]
            .into_iter()
            .enumerate()
        {
            let cut = 4096 * round;
            for room in [len, len - 5, len + 5] {
                let mut target = vec![0; room + 1];
                let (first, second) = target.split_at_mut(cut);
                let second_len = second.len() - 1;
                b.recv_into((1, 0), &mut [first, &mut second[..second_len]], 2);
                a.send(to_b, Some(1), &bytes[..len], 1);
                let truncated = room < len;
                if truncated {
                    let failed = error(&b);
                    assert_eq!((failed.err, failed.completion.len), (FiErrno::ETRUNC, room));
                }
                wait([&a, &b], [1, usize::from(!truncated)]);
                let arrived = len.min(room);
                assert!(target[..arrived] == bytes[..arrived], "{len} into {room}");
                assert!(
                    target[arrived..].iter().all(|byte| *byte == 0),
                    "{len} into {room}"
                );
            }
        }
        let copied = b.state(|state| state.io.tests.read_at_once);
        assert!(copied >= 18, "{copied} READs without requests");
        assert_eq!(pull_failures(&b), (0, 0));
    });
}

/// An announcement in a ring whose receive is one buffer is read and answered where it is found;
/// others take the way through the tables, in any order.
#[test]
fn announced_messages_are_read_where_they_are_found() {
    let domain = domain();
    let ends = [(); 2].map(|()| reader_at_once(&domain, Transport::Rc));
    let [a, b] = &ends;
    let to_b = a.knows(b);
    let rings = std::env::var_os("SOFTVERBS_RING").is_none_or(|value| value != "0");
    let in_ring = || b.state(|state| state.io.tests.read_in_ring);
    let (mut target, mut possible) = (vec![0; LEN], 0);
    for round in 0..400 {
        let bytes = bytes_of(round);
        let len = [16 << 10, 8_193, 100_000, LEN][round / 8 % 4];
        let before = in_ring();
        let (posted, short, several) = (round % 2 == 0, round % 4 == 1, round % 8 == 2);
        let room = if short { len - 1 } else { len };
        let post = |target: &mut [u8]| match several {
            true => {
                let (first, second) = target[..room].split_at_mut(5000);
                b.recv_into((1, 0), &mut [first, second], 2);
            }
            false => b.recv(Some((1, 0)), &mut target[..room], 2),
        };
        target.fill(0);
        if posted {
            post(&mut target);
        }
        a.send(to_b, Some(1), &bytes[..len], 1);
        if !posted {
            wait_for_rts(a, b);
            post(&mut target);
        }
        if short {
            assert_eq!(error(b).err, FiErrno::ETRUNC);
        }
        let [sent, received] = wait([a, b], [1, usize::from(!short)]);
        assert_eq!(sent.len(), 1);
        if let Some(received) = received.first() {
            assert_eq!((received.len, received.tag, received.context), (len, 1, 2));
        }
        assert!(target[..room] == bytes[..room], "round {round}");
        let may = rings && posted && !several;
        assert!(in_ring() - before <= u32::from(may), "round {round}");
        possible += u32::from(may);
    }
    // the first packet, and those that have seen a new grant, take the other way
    assert!(
        in_ring() >= possible - possible / 4,
        "{} of {possible}",
        in_ring()
    );
    assert_eq!(pull_failures(b), (0, 0));
}

/// Announcements that are in a ring together are read together, and reported in their order; one
/// whose receive is too short, has several buffers or is not there ends such a list and arrives
/// another way.
#[test]
fn messages_that_are_announced_together_are_read_together() {
    let domain = domain();
    let ends = [(); 2].map(|()| reader_at_once(&domain, Transport::Rc));
    let [a, b] = &ends;
    let to_b = a.knows(b);
    let rings = std::env::var_os("SOFTVERBS_RING").is_none_or(|value| value != "0");
    let source = bytes_of(3);
    let any = (0, u64::MAX);
    let mut targets = vec![vec![0; 64 << 10]; 16];
    // the first messages connect, and see new grants
    for round in 0..200 {
        let (count, len) = (1 + round % 16, [16 << 10, 8_193, 50_000][round % 3]);
        let odd = (round / 16 % 4, round % 7);
        targets.iter_mut().for_each(|target| target.fill(0));
        let post = |at: usize, target: &mut Vec<u8>| match odd {
            (1, which) if which == at => b.recv(Some(any), &mut target[..len - 1], at),
            (2, which) if which == at => {
                let (first, second) = target[..len].split_at_mut(5000);
                b.recv_into(any, &mut [first, second], at);
            }
            _ => b.recv(Some(any), &mut target[..len], at),
        };
        let posted = if odd.0 == 3 { odd.1.min(count) } else { count };
        for (at, target) in targets.iter_mut().enumerate().take(posted) {
            post(at, target);
        }
        for at in 0..count {
            a.send(to_b, Some(at as u64), &source[at..at + len], at);
        }
        let limit = Instant::now() + Duration::from_secs(20);
        let (mut found, mut failed, mut sent) = (Vec::new(), Vec::new(), 0);
        let mut late = posted..count;
        while found.len() + failed.len() < count || sent < count {
            let entry = &mut |it: &Completion| found.push((it.context, it.tag as usize, it.len));
            match b.cq.read(16, entry) {
                Ok(_) | Err(FiErrno::EAGAIN) => {}
                Err(_) => failed.push(b.cq.read_error().unwrap().completion.context),
            }
            if let Some(at) = late.next() {
                post(at, &mut targets[at]);
            }
            sent += usize::from(a.poll().is_some());
            assert!(Instant::now() < limit, "round {round}");
        }
        let short = (odd.0 == 1 && odd.1 < count).then_some(odd.1);
        assert_eq!(failed, short.into_iter().collect::<Vec<_>>());
        let mut contexts: Vec<usize> = found.iter().map(|(context, ..)| *context).collect();
        if odd.0 != 0 && odd.0 != 1 {
            // the one that arrives another way can be reported later
            contexts.sort_unstable();
        }
        let wanted: Vec<usize> = (0..count).filter(|at| Some(*at) != short).collect();
        assert_eq!(contexts, wanted, "round {round}");
        for (context, tag, got) in found {
            assert_eq!((tag, got), (context, len));
            assert!(targets[context][..len] == source[context..context + len]);
            assert!(targets[context][len..].iter().all(|byte| *byte == 0));
        }
    }
    let listed = b.state(|state| state.io.tests.read_in_lists);
    assert!(!rings || listed > 300, "{listed} read together");
    assert_eq!(pull_failures(b), (0, 0));
}

/// Registers memory that lives longer than the region.
pub(super) fn region(domain: &Domain, bytes: &[u8], access: Access) -> Arc<Region> {
    let buffer = Buffer {
        addr: bytes.as_ptr().cast(),
        len: bytes.len(),
    };
    let config = RegionConfig {
        buffers: &[buffer],
        access,
        ..RegionConfig::default()
    };
    // SAFETY: the caller's promise.
    unsafe { Region::register(domain.mr(), &config) }.unwrap()
}

/// Receives with descriptors, which the device checks: a message for a buffer that is not wholly in
/// the region of its descriptor arrives in parts.
#[test]
fn messages_are_read_without_requests_by_descriptors() {
    Transport::each(|transport| {
        let domain = domain_with(Mode::NATIVE | Mode::LOCAL);
        let (a, b) = (
            reader_at_once(&domain, transport),
            reader_at_once(&domain, transport),
        );
        let to_b = a.knows(&b);
        let bytes = bytes_of(1);
        let mut target = vec![0u8; LEN];
        let source = region(&domain, &bytes, Access::SEND);
        let (whole, half) = (
            region(&domain, &target, Access::RECV),
            region(&domain, &target[..LEN / 2], Access::RECV),
        );
        for (sink, at_once) in [(&whole, true), (&half, false), (&whole, true)] {
            target.fill(0);
            let before = b.state(|state| state.io.tests.read_at_once);
            b.recv_at((1, 0), &mut target, Desc(sink.desc()), 2);
            a.send_from(to_b, Some(1), &bytes, Desc(source.desc()), 1);
            wait([&a, &b], [1, 1]);
            assert!(target == bytes);
            let reads = b.state(|state| state.io.tests.read_at_once) - before;
            assert_eq!(reads, u32::from(at_once));
        }
    });
}

/// A message whose rkey is wrong arrives in parts, on the next link.
#[test]
fn a_wrong_key_costs_a_link_and_no_message() {
    each_reader(|transport, reader| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        for round in 0..3 {
            let bytes = [bytes_of(round), bytes_of(round + 100)];
            let mut targets = [vec![0; LEN], vec![0; LEN]];
            a.send(to_b, Some(1), &bytes[0], 1);
            wait_for_rts(&a, &b);
            let revoke = |_: &mut _, io: &mut Executor| io.revoke_sources();
            a.ep.shared().apply_event(revoke);
            // the second message can be read
            a.send(to_b, Some(2), &bytes[1], 1);
            b.recv(Some((1, 0)), &mut targets[0], 2);
            b.recv(Some((2, 0)), &mut targets[1], 3);
            wait([&a, &b], [2, 2]);
            assert!(targets == bytes, "round {round}");
            assert_eq!(pull_failures(&b).1, round as u32 + 1);
        }
    });
}

/// A message whose RTS names other memory arrives in parts. After two such messages without a
/// message that was read between them, the next 16 arrive in parts at once.
#[test]
fn a_wrong_source_costs_a_link_and_no_message() {
    each_reader(|transport, reader| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        let one = |round: usize, change: &dyn Fn(&mut AtSender)| {
            let bytes = bytes_of(round);
            let mut target = vec![0; LEN];
            a.send(to_b, Some(1), &bytes, 1);
            wait_for_rts(&a, &b);
            let change = |_: &mut _, io: &mut Executor| io.rx.own().unwrap().move_sources(change);
            b.ep.shared().apply_event(change);
            b.recv(Some((1, 0)), &mut target, 2);
            wait([&a, &b], [1, 1]);
            assert!(target == bytes, "round {round}");
            pull_failures(&b).1
        };
        let wrong: [&dyn Fn(&mut AtSender); 4] = [
            &|at| at.addr = RemoteAddr::new(1),
            &|at| at.addr = at.addr.wrapping_add(4096),
            &|at| at.rkey = Rkey::default(),
            &|at| at.rkey = Rkey::new(!0),
        ];
        for (round, change) in wrong.iter().enumerate() {
            assert_eq!(one(round, change), round as u32 + 1);
            // is read
            assert_eq!(one(round + 100, &|_| {}), round as u32 + 1);
        }
        assert_eq!(one(4, wrong[0]), 5);
        assert_eq!(one(5, wrong[0]), 6);
        for round in 6..22 {
            assert_eq!(one(round, wrong[0]), 6, "a further message was read");
        }
        // this one is read, and all begins anew
        assert_eq!(one(22, &|_| {}), 6);
        for (round, refused) in [(23, 7), (24, 8), (25, 8)] {
            assert_eq!(one(round, wrong[0]), refused);
        }
    });
}

/// A device that refuses READs costs two links of a session.
#[test]
fn a_device_without_reads_receives_in_parts() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        b.ep.shared()
            .apply_event(|_, io| io.tests.refuse_reads = Some(FiErrno::EINVAL));
        for round in 0..5 {
            let bytes = bytes_of(round);
            let mut target = vec![0; LEN];
            b.recv(Some((1, 0)), &mut target, 2);
            a.send(to_b, Some(1), &bytes, 1);
            wait([&a, &b], [1, 1]);
            assert!(target == bytes, "round {round}");
            assert_eq!(pull_failures(&b).1, (round as u32 + 1).min(2));
        }
    });
}

/// A READ that the device refuses because its send queue is full is posted again, on the same link.
#[test]
fn a_read_waits_for_room_in_the_device() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        let mut byte = [0; 1];
        b.recv(Some((1, 0)), &mut byte, 2);
        a.send(to_b, Some(1), &[1], 1);
        wait([&a, &b], [1, 1]);
        for round in 0..4 {
            b.ep.shared()
                .apply_event(|_, io| io.tests.refuse_reads = Some(FiErrno::EAGAIN));
            let (bytes, mut target) = (bytes_of(round), vec![0; LEN]);
            b.recv(Some((1, 0)), &mut target, 2);
            a.send(to_b, Some(1), &bytes, 1);
            let until = Instant::now() + Duration::from_millis(20);
            while Instant::now() < until {
                assert!(a.poll().is_none() && b.poll().is_none());
            }
            b.ep.shared().apply_event(|core, io| {
                let peer = core.peer_keys().next().unwrap();
                assert!(core.open_link(peer).is_some(), "the link has broken");
                assert_eq!(io.is_reading(peer), (false, true));
                (io.tests.refuse_reads, io.tests.posts_reads) = (None, true);
            });
            wait([&a, &b], [1, 1]);
            assert!(target == bytes, "round {round}");
            assert_eq!(pull_failures(&b), (0, 0), "round {round}");
        }
    });
}

/// Runs `check` at an endpoint whose READ of a message has been posted and not been completed.
/// Returns after the first such message; others have arrived before.
fn while_reading(a: &End, b: &End, check: impl Fn(&mut Core<Executor>, &mut Executor, PeerKey)) {
    let to_b = a.knows(b);
    for round in 0..1000 {
        let bytes = bytes_of(round);
        let mut target = vec![0; LEN];
        a.send(to_b, Some(1), &bytes, 1);
        wait_for_rts(a, b);
        b.recv(Some((1, 0)), &mut target, 2);
        let mut under_way = false;
        b.ep.shared().apply_event(|core, io| {
            let peer = core.peer_keys().next().unwrap();
            under_way = io.is_reading(peer).0;
            if under_way {
                check(core, io, peer);
            }
        });
        wait([a, b], [1, 1]);
        assert!(target == bytes, "round {round}");
        if under_way {
            return;
        }
    }
    panic!("the driver is always faster");
}

/// A link is removed after its time limit, before its READs have completed: they may write to the
/// receive until the queue pair is destroyed.
#[test]
fn reads_end_with_their_queue_pair() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        while_reading(&a, &b, |core, io, peer| {
            let links: Vec<LinkKey> = io.links.keys().collect();
            for link in links {
                core.broken(link, io);
                if transport == Transport::Rc {
                    core.ended(link, io);
                    io.remove_link(link);
                }
            }
            if transport == Transport::Xrc {
                give_up_circuits(core, io);
            }
            assert!(
                io.is_reading(peer).0,
                "a READ has ended before its queue pair"
            );
            let reads = |step: &Step| match step {
                Step::Destroy(_, _, _, ended) => !ended.reads.is_empty(),
                Step::Xrc(XrcStep::DestroyCircuit(_, _, unfinished)) => {
                    unfinished.iter().any(|it| !it.2.reads.is_empty())
                }
                _ => false,
            };
            assert!(io.steps.iter().any(reads));
        });
    });
}

/// A send that has failed is reported when no peer can read its source any more.
#[test]
fn a_failed_send_is_reported_after_its_source_has_ended() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        let bytes = bytes_of(1);
        a.send(to_b, Some(1), &bytes, 1);
        wait_for_rts(&a, &b);
        wait_for_attach(&a, &b);
        a.ep.shared().apply_event(|core, io| {
            let peer = core.peer_keys().next().unwrap();
            core.fail(peer, FiErrno::EHOSTUNREACH, io);
            assert_eq!(io.completions.len(Side::Tx), 0);
            assert_eq!(io.outstanding(), 1);
            // steps after which the peer reads nothing
            let ends = |step: &Step| match step {
                Step::End(..) => true,
                Step::Xrc(step) => matches!(step, XrcStep::FailTarget(_)),
                _ => false,
            };
            let ends = io.steps.iter().any(ends);
            let last = io.steps.iter().filter(|step| step.is_last()).count();
            assert!(ends && last == 1, "{:?}", io.steps);
        });
        let failed = error(&a);
        assert_eq!(
            (failed.completion.context, failed.err),
            (1, FiErrno::EHOSTUNREACH)
        );
        assert_eq!(a.ep.shared().lock().as_ref().unwrap().io.outstanding(), 0);
    });
}

/// Either side is closed while its messages are read, and the buffers are freed.
#[test]
fn endpoints_close_while_messages_are_read() {
    Transport::each(|transport| {
        let domain = domain();
        for round in 0..24 {
            let (a, b) = (reader(&domain, transport), reader(&domain, transport));
            let to_b = a.knows(&b);
            let bytes = [bytes_of(round), bytes_of(round + 1)];
            let mut targets = [vec![0; LEN], vec![0; LEN]];
            for (bytes, target) in bytes.iter().zip(&mut targets) {
                b.recv(Some((1, 0)), target, 2);
                a.send(to_b, Some(1), bytes, 1);
            }
            let reads = || b.ep.shared().lock().as_ref().unwrap().io.rx.arrivals.len() != 0;
            while !reads() && b.cq.read(1, &mut |_: &_| {}).is_err() {
                let _ = a.poll();
            }
            for _ in 0..round / 2 % 6 {
                let _ = b.poll();
            }
            let closed = if round % 2 == 0 { &a } else { &b };
            closed.ep.close();
            match round % 2 {
                0 => drop(bytes),
                _ => drop(targets),
            }
        }
    });
}

pub(super) fn error(end: &End) -> CompletionError {
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < limit);
        match end.cq.read(1, &mut |_: &_| panic!("a completion")) {
            Err(FiErrno::EAGAIN) => {}
            Err(FiErrno::EAVAIL) => break end.cq.read_error().unwrap(),
            other => panic!("{other:?}"),
        }
    }
}

/// The receive of a session that ends is not reported while a READ can write to its buffer.
#[test]
fn a_receive_fails_after_its_reads() {
    Transport::each(|transport| {
        let domain = domain();
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        let to_a = b.knows(&a);
        let bytes = bytes_of(1);
        let mut target = vec![0; LEN];
        for round in 0.. {
            a.send(to_b, Some(1), &bytes, 1);
            wait_for_rts(&a, &b);
            b.recv(Some((1, 0)), &mut target, 2);
            // the READs are posted, and their completions not polled, unless by the driver
            let mut under_way = false;
            b.ep.shared().apply_event(|core, io| {
                let peer = core.peer_keys().next().unwrap();
                // without a READ, for which there may be no link yet, the receive ends at once
                under_way = io.is_reading(peer).0;
                if under_way {
                    core.fail(peer, FiErrno::ECONNABORTED, io);
                    let reported = io.completions.len(Side::Rx) != 0;
                    assert!(!reported, "the receive is reported before its READs");
                    assert_eq!(io.rx.arrivals.len(), 1);
                    assert!(
                        !io.is_reading(peer).1,
                        "READs of an ended session wait for a link"
                    );
                }
            });
            if under_way {
                break;
            }
            assert!(round < 1000, "the driver is always faster");
            wait([&a, &b], [1, 1]);
        }
        let failed = error(&b);
        assert_eq!(
            (failed.completion.context, failed.err),
            (2, FiErrno::ECONNABORTED)
        );
        assert_eq!(
            b.ep.shared().lock().as_ref().unwrap().io.rx.arrivals.len(),
            0
        );
        // b ends the session by its next dial, and a's operation fails too: when its source has
        // ended, so b's message may be reported before
        let mut small = [0; 8];
        a.recv(Some((3, 0)), &mut small, 4);
        b.send(to_a, Some(3), &[5; 8], 3);
        let limit = Instant::now() + Duration::from_secs(20);
        let (mut failed, mut received) = (None, None);
        while failed.is_none() || received.is_none() {
            assert!(Instant::now() < limit, "{failed:?} {received:?}");
            match a
                .cq
                .read(1, &mut |it: &Completion| received = Some(it.context))
            {
                Err(FiErrno::EAVAIL) => failed = a.cq.read_error().ok(),
                result => assert!(matches!(result, Ok(1) | Err(FiErrno::EAGAIN))),
            }
        }
        let failed = failed.map(|it| (it.completion.context, it.err));
        assert_eq!(failed, Some((1, FiErrno::ECONNABORTED)));
        assert_eq!((received, small), (Some(4), [5; 8]));
    });
}
