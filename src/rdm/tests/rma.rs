//! RMA whose requests fail or do not complete, on the embedded device, in one process.
//!
//! In one file, because the tests share the endpoints and the ways to make a request fail.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::breaks::{Memory, add, domain, pattern};
use super::endpoints::{End, Transport, give_up_circuits, queue_pair, wait, wait_for};
use super::outcomes::send;
use crate::av::FiAddr;
use crate::domain::Domain;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::{Access, Buffer, Desc, Peer as _, Region, RegionConfig};
use crate::queue::{Completion, CompletionError};
use crate::rdm::completions::Side as Direction;
use crate::rdm::core::Io as _;
use crate::rdm::core::link::LinkKey;
use crate::rdm::executor::{CALL, Executor};
use crate::rdm::iov::Iov;
use crate::rdm::link::block::LinkBlock;
use crate::rdm::link::outlet::CIRCUIT_RMA;
use crate::rdm::rma::{Request, RmaOp};
use crate::rdm::shared::{Shared, State};
use crate::rdm::{EndpointConfig, LocalIov, RemoteIov};
use crate::verbs::{AsyncEvent, AsyncListener as _, Qp, SendOpcode};
use crate::wire::rdm::Listener;

const SECOND: Duration = Duration::from_secs(1);

/// An endpoint with a region.
pub(super) struct Side {
    pub(super) end: End,
    pub(super) region: Arc<Region>,
    pub(super) memory: Memory,
}

impl Side {
    pub(super) fn config(transport: Transport) -> EndpointConfig {
        EndpointConfig {
            rma: true,
            target: true,
            atomics: true,
            accepts_data: true,
            peer_atomics: Access::REMOTE_READ | Access::REMOTE_WRITE,
            rma_after_sends: true,
            sends_after_rma: true,
            ..transport.config()
        }
    }

    /// Without rings.
    pub(super) fn open(domain: &Arc<Domain>, transport: Transport) -> Self {
        Self::with(domain, Self::config(transport))
    }

    /// On XRC, with this connect timeout.
    pub(super) fn on_circuits(domain: &Arc<Domain>, connect_timeout: Duration) -> Self {
        let config = EndpointConfig {
            connect_timeout: Some(connect_timeout),
            ..Self::config(Transport::Xrc)
        };
        Self::with(domain, config)
    }

    pub(super) fn with(domain: &Arc<Domain>, config: EndpointConfig) -> Self {
        Self::with_region(domain, config, 4096)
    }

    /// With a region of `len` bytes.
    pub(super) fn with_region(domain: &Arc<Domain>, config: EndpointConfig, len: usize) -> Self {
        let end = End::with_rings(domain, config, 0, false);
        let memory = Memory::new(len);
        let buffer = Buffer {
            addr: memory.addr() as *const _,
            len,
        };
        let config = RegionConfig {
            buffers: &[buffer],
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            requested_key: (memory.addr() as u64) >> 4,
            ..RegionConfig::default()
        };
        // SAFETY: the memory is dropped behind the region.
        let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
        Self {
            end,
            region,
            memory,
        }
    }

    pub(super) fn range(&self, at: usize, len: usize) -> RemoteIov {
        RemoteIov {
            addr: (self.memory.addr() + at) as u64,
            len,
            key: self.region.key(),
        }
    }

    fn read(&self, from: FiAddr, range: RemoteIov, to: &Memory, context: usize) {
        let iov = to.iov();
        let local = LocalIov::single(&iov, &Desc::NULL);
        let ep = &self.end.ep;
        // SAFETY: the callers keep the memory until the completion.
        unsafe { ep.read(from, local, &[range], context, Some(Flags::COMPLETION)) }.unwrap();
    }

    pub(super) fn write(
        &self,
        to: FiAddr,
        range: RemoteIov,
        from: &Memory,
        context: usize,
        inject: bool,
    ) {
        let iov = from.iov();
        let local = LocalIov::single(&iov, &Desc::NULL);
        let inject = if inject {
            Flags::INJECT
        } else {
            Flags::empty()
        };
        let flags = Some(Flags::COMPLETION | inject);
        let ep = &self.end.ep;
        // SAFETY: as above.
        unsafe { ep.write(to, local, &[range], None, context, flags) }.unwrap();
    }

    /// The only link.
    pub(super) fn key(&self) -> LinkKey {
        self.end
            .state(|state| state.io.links.keys().next().unwrap())
    }

    /// The only link, through which this side can send.
    fn link(&self) -> (LinkKey, Arc<Qp>) {
        let key = self.key();
        let queue_pair = self.end.state(|state| queue_pair(&mut state.io, key));
        (key, queue_pair.unwrap())
    }

    /// The next entry: the context, and the error of a failure.
    pub(super) fn entry(&self) -> (usize, Option<CompletionError>) {
        let limit = Instant::now() + 20 * SECOND;
        loop {
            let mut found = None;
            match self
                .end
                .cq
                .read(1, &mut |it: &Completion| found = Some(it.context))
            {
                Err(FiErrno::EAGAIN) => assert!(Instant::now() < limit, "no entry"),
                Err(FiErrno::EAVAIL) => {
                    let error = self.end.cq.read_error().unwrap();
                    return (error.completion.context, Some(error));
                }
                other => {
                    other.unwrap();
                    return (found.unwrap(), None);
                }
            }
        }
    }
}

/// Two sides with one link, and the address of the second.
pub(super) fn connected(domain: &Arc<Domain>, transport: Transport) -> (Side, Side, FiAddr) {
    let (a, b) = (Side::open(domain, transport), Side::open(domain, transport));
    let to_b = a.end.knows(&b.end);
    let mut bytes = [0; 8];
    b.end.recv(None, &mut bytes, 2);
    a.end.send(to_b, None, &[1; 8], 1);
    wait([&a.end, &b.end], [1, 1]);
    (a, b, to_b)
}

pub(super) fn memory(seed: usize, len: usize) -> Memory {
    let memory = Memory::new(len);
    memory.set(0, &pattern(seed, len));
    memory
}

/// Breaks the only link of a side.
fn break_link(side: &Side) {
    let link = side.key();
    side.end
        .ep
        .shared()
        .apply_event(|core, io| core.broken(link, io));
}

/// The device of these tests executes a write while it is posted. The driver may post it earlier.
#[test]
fn delayed_operations_are_posted_on_request() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        let mut delayed = 0;
        for round in 0..200 {
            let source = memory(round, 8);
            let iov = source.iov();
            let local = LocalIov::single(&iov, &Desc::NULL);
            let flags = Some(Flags::COMPLETION | Flags::MORE);
            let (ep, range) = (&a.end.ep, b.range(0, 8));
            // SAFETY: the memory is dropped behind the completion.
            unsafe { ep.write(to_b, local, &[range], None, round, flags) }.unwrap();
            delayed += usize::from(!b.memory.is(0, &pattern(round, 8)));
            ep.post_delayed();
            assert!(b.memory.is(0, &pattern(round, 8)), "round {round}");
            assert_eq!(a.entry().0, round);
        }
        assert_ne!(delayed, 0);
    });
}

/// A device that flushes no requests can write to the buffer of a READ until the queue pair is
/// destroyed. The READ is repeated before later operations.
#[test]
fn a_read_that_is_not_flushed_ends_with_its_queue_pair() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        b.memory.set(0, &pattern(1, 100));
        let link = a.link().0;
        let qp = Arc::downgrade(&a.link().1);
        let silent = |io: &mut Executor| {
            io.links.get_mut(link).unwrap().silent = true;
        };
        a.end.ep.shared().apply_event(|_, io| silent(io));
        let (target, source) = (Memory::new(100), memory(2, 100));
        a.read(to_b, b.range(0, 100), &target, 5);
        break_link(&a);
        a.write(to_b, b.range(0, 100), &source, 6, false);
        let begin = Instant::now();
        assert_eq!(a.entry().0, 5);
        assert!(
            begin.elapsed() > SECOND / 2,
            "reported before the device is known to have ended"
        );
        assert!(qp.upgrade().is_none(), "the queue pair exists");
        assert!(
            target.is(0, &pattern(1, 100)),
            "the later write was executed first"
        );
        assert_eq!(a.entry().0, 6);
        assert!(b.memory.is(0, &pattern(2, 100)));
    });
}

/// The peer has disconnected because its device has refused a request, and the answer of the device
/// comes later than that. The queue pair of this side is moved to ERR when the requests have
/// completed, or after a limit.
#[test]
fn a_link_that_is_disconnected_waits_for_the_answers_to_its_requests() {
    let limits = [Duration::from_millis(200), 10 * SECOND, Duration::ZERO];
    for (limit, answers) in limits.into_iter().zip([false, true, false]) {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, Transport::Rc);
        let link = a.link().0;
        let shared = a.end.ep.shared();
        shared.apply_event(|_, io| {
            io.answer = limit;
            io.links.get_mut(link).unwrap().silent = true;
        });
        let source = memory(3, 100);
        a.write(to_b, b.range(0, 100), &source, 5, false);
        let begin = Instant::now();
        break_link(&b);
        let seen = |what: &dyn Fn(&mut Executor) -> bool| {
            while !shared.lock().as_mut().is_some_and(|it| what(&mut it.io)) {
                assert!(begin.elapsed() < 5 * SECOND);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let drains = |io: &mut Executor| io.links.get_mut(link).is_none_or(|it| it.is_draining());
        seen(&|io| io.links.ends(link));
        if answers {
            std::thread::sleep(SECOND / 5);
            shared.apply_event(|_, io| {
                assert!(!drains(io), "before the answer");
                let block = io.links.get_mut(link).unwrap().block.as_ref().unwrap();
                block.poster.complete(0).unwrap();
            });
        }
        seen(&drains);
        assert!(begin.elapsed() >= limit || answers, "before the limit");
    }
}

/// A link stands while requests are under way and none of them completes.
#[test]
fn a_link_stands_while_nothing_completes() {
    let domain = domain(true);
    let (a, b, to_b) = connected(&domain, Transport::Rc);
    let link = a.link().0;
    let shared = a.end.ep.shared();
    let poll = || {
        assert_eq!(
            a.end.cq.read(1, &mut |_: &Completion| ()),
            Err(FiErrno::EAGAIN)
        )
    };
    let probe = || {
        poll();
        shared.lock().as_mut().unwrap().io.probe(link)
    };
    assert_eq!([probe(), probe()], [false; 2], "the device completes it");
    poll();
    shared.apply_event(|_, io| io.links.get_mut(link).unwrap().silent = true);
    let source = memory(3, 100);
    a.write(to_b, b.range(0, 100), &source, 5, false);
    assert_eq!([probe(), probe(), probe()], [false, true, true]);
    shared.apply_event(|_, io| {
        let block = io.links.get_mut(link).unwrap().block.as_ref().unwrap();
        block.poster.complete(0).unwrap();
    });
    assert_eq!([probe(), probe()], [false, true]);
}

/// As the first one, when the session ends: the failure is reported behind the queue pair too.
#[test]
fn a_failed_read_that_is_not_flushed_ends_with_its_queue_pair() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        let link = a.link().0;
        let qp = Arc::downgrade(&a.link().1);
        let target = Memory::new(100);
        let shared = a.end.ep.shared();
        shared.apply_event(|_, io| io.links.get_mut(link).unwrap().silent = true);
        a.read(to_b, b.range(0, 100), &target, 5);
        {
            // as the driver after the time limit
            let mut state = shared.lock();
            let state = state.as_mut().unwrap();
            let peer = state.core.peer_of(link).unwrap();
            state.core.fail(peer, FiErrno::ECONNABORTED, &mut state.io);
            state.run_todo();
            match transport {
                Transport::Rc => {
                    state.io.end_rma(link);
                    state.run_todo();
                    state.core.ended(link, &mut state.io);
                    state.io.remove_link(link);
                }
                Transport::Xrc => give_up_circuits(&mut state.core, &mut state.io),
            }
            state.run_todo();
            assert!(
                state.io.completions.is_empty(),
                "reported before the queue pair is destroyed"
            );
            assert_eq!(state.io.rma.ops.len(), 1);
        }
        // the driver destroys it
        shared.apply_event(|_, _| {});
        let (context, error) = a.entry();
        assert_eq!((context, error.unwrap().err), (5, FiErrno::ECONNABORTED));
        assert!(qp.upgrade().is_none(), "the queue pair exists");
    });
}

/// Reports the failure of a link's queue pair, whose device `answers` 20 ms later, or not. Returns
/// whether the link then ends within 1 s.
fn ends_within_a_second(domain: &Arc<Domain>, answers: bool) -> bool {
    let (a, _b, _) = connected(domain, Transport::Rc);
    let (link, qp) = a.link();
    let cm = a.end.ep.shared().cm_of(link).unwrap();
    let begin = Instant::now();
    cm.async_event(AsyncEvent::QpError);
    std::thread::sleep(Duration::from_millis(20));
    let late = begin.elapsed() > SECOND / 10;
    assert!(late || qp.is_in_error() == Ok(false), "before the answer");
    if answers {
        qp.set_error().unwrap();
    }
    while Arc::strong_count(&qp) != 1 {
        assert!(begin.elapsed() < 20 * SECOND, "the link does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let took = begin.elapsed();
    assert_eq!(qp.is_in_error(), Ok(true));
    !late && took < SECOND
}

/// A device can report that it has refused a request before it answers it, and answers nothing when
/// its queue pair is in ERR.
#[test]
fn a_queue_pair_is_not_moved_to_err_before_its_device_has_answered() {
    let domain = domain(true);
    for answers in [true, false] {
        // a link that waits for the 1 s in which its requests have to complete does so each time
        assert!(
            (0..5).any(|_| ends_within_a_second(&domain, answers)),
            "the link does not end"
        );
    }
}

/// The peer can read the source of a message until its queue pair has ended. This one waits for the
/// answer of its device.
#[test]
fn a_failed_message_is_reported_behind_the_end_of_its_link() {
    let domain = domain(true);
    let reported_behind = || {
        let (a, _b, to_b) = connected(&domain, Transport::Rc);
        let source = memory(1, 100_000);
        send(&a, to_b, &source, 5, Flags::empty());
        assert!(a.end.poll().is_none());
        let (link, qp) = a.link();
        let shared = a.end.ep.shared();
        shared.cm_of(link).unwrap().async_event(AsyncEvent::QpError);
        let begin = Instant::now();
        shared.apply_event(|core, io| {
            let peer = core.peer_keys().next().unwrap();
            core.fail(peer, FiErrno::ECONNABORTED, io);
        });
        let (context, error) = a.entry();
        assert_eq!((context, error.unwrap().err), (5, FiErrno::ECONNABORTED));
        assert_eq!(qp.is_in_error(), Ok(true), "reported before the end");
        // otherwise it had ended before the message failed
        begin.elapsed() > SECOND / 50
    };
    assert!((0..5).any(|_| reported_behind()));
}

/// RMA and messages that are ordered behind an operation wait until the queue pair of its link is
/// destroyed, because it may be repeated.
#[test]
fn operations_wait_for_one_that_ends_with_its_queue_pair() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        let (link, _) = a.link();
        let mut ending = None;
        a.end.ep.shared().apply_event(|core, io| {
            let request = Request {
                opcode: SendOpcode::Read,
                flags: Flags::empty(),
                completion_flags: Flags::RMA | Flags::READ,
                compare_add: 0,
                swap: 0,
            };
            let peer = core.peer_of(link).unwrap();
            let mut op = RmaOp::new(request, peer, io.rma.next_order());
            (op.context, op.wanted, op.parts, op.again) = (5, true, 1, true);
            let key = io.rma.ops.insert(op).unwrap();
            io.rma.ending.push(key);
            ending = Some(key);
        });
        let (source, mut bytes) = (memory(2, 100), [0; 8]);
        b.end.recv(None, &mut bytes, 2);
        a.write(to_b, b.range(0, 100), &source, 6, false);
        a.end.send(to_b, None, &[9; 8], 7);
        for _ in 0..2_000 {
            assert_eq!((a.end.poll(), b.end.poll()), (None, None));
        }
        assert!(b.memory.is(0, &[0; 100]));
        let key = ending.unwrap();
        a.end
            .ep
            .shared()
            .apply_event(|core, io| io.rma_ended(core, &[key]));
        let [ended, _] = wait([&a.end, &b.end], [3, 1]);
        let contexts: Vec<_> = ended.iter().map(|it| it.context).collect();
        assert_eq!((contexts, bytes), (vec![5, 6, 7], [9; 8]));
        assert!(b.memory.is(0, &pattern(2, 100)));
    });
}

/// The device executes a read or write in the call if nothing is in front of it, and the entry is
/// there without a poll. The first one makes the link's initiator.
#[test]
fn an_operation_that_is_executed_in_its_call_has_its_entry() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        let source = memory(1, 100);
        a.write(to_b, b.range(0, 100), &source, 1, false);
        assert_eq!(a.entry().0, 1);
        // operations that are under way, and entries
        let state = || {
            let mut guard = a.end.ep.shared().lock();
            let io = &mut guard.as_mut().unwrap().io;
            (io.rma.ops.len(), io.completions.len(Direction::Tx))
        };
        for inject in [false, true] {
            a.write(to_b, b.range(200, 100), &source, 2, inject);
            assert_eq!(state(), (0, 1));
            assert!(b.memory.is(200, &pattern(1, 100)));
            assert_eq!(a.entry().0, 2);
            b.memory.set(200, &[0; 100]);
        }
        let target = Memory::new(100);
        a.read(to_b, b.range(0, 100), &target, 3);
        assert_eq!(state(), (0, 1));
        assert!(target.is(0, &pattern(1, 100)));
        assert_eq!(a.entry().0, 3);
        // Behind a request that waits for its completion. The driver's thread, which has connected
        // the link, may poll between the calls; then nothing waits, and the attempt shows nothing.
        // Each attempt ends with a new link, whose thread is awake then: the pause lets it sleep.
        let wrong = RemoteIov {
            key: b.region.key() ^ 0x5a00,
            ..b.range(0, 100)
        };
        let behind = |attempt: u64| {
            std::thread::sleep(Duration::from_millis(5 * attempt));
            b.memory.set(300, &[0; 100]);
            a.write(to_b, wrong, &source, 4, false);
            a.write(to_b, b.range(300, 100), &source, 5, false);
            let both_wait = state() == (2, 0);
            let ended = [a.entry(), a.entry()].map(|(context, it)| (context, it.map(|it| it.err)));
            assert_eq!(ended, [(4, Some(FiErrno::EKEYREJECTED)), (5, None)]);
            assert!(b.memory.is(300, &pattern(1, 100)));
            both_wait
        };
        assert!((0..20).any(behind));
        // the key of a region that is closed
        let gone = b.range(0, 100);
        drop(b.region);
        a.write(to_b, gone, &source, 6, false);
        let (context, error) = a.entry();
        assert_eq!((context, error.unwrap().err), (6, FiErrno::EKEYREJECTED));
    });
}

/// Reads of one entry find that of a receive, although each write has one too.
#[test]
fn entries_of_writes_do_not_hide_those_of_receives() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        let to_a = b.end.knows(&a.end);
        let source = memory(1, 100);
        let mut bytes = [0; 8];
        // the first message waits until the driver has found a link for it
        a.end.recv(None, &mut bytes, 2);
        b.end.send(to_a, None, &[1; 8], 1);
        wait([&a.end, &b.end], [1, 1]);
        a.end.recv(None, &mut bytes, 99);
        b.end.send(to_a, None, &[1; 8], 1);
        assert_eq!(b.entry().0, 1);
        let read = || {
            a.write(to_b, b.range(0, 100), &source, 5, false);
            a.entry().0
        };
        assert!((0..200).any(|_| read() == 99));
    });
}

/// Requests of both directions are on the link when one with a wrong key is refused. It alone
/// fails.
#[test]
fn a_wrong_key_fails_its_operation_alone() {
    Transport::each(|transport| {
        let domain = domain(true);
        for round in 0..20 {
            let (a, b, to_b) = connected(&domain, transport);
            let to_a = b.end.knows(&a.end);
            let wrong = RemoteIov {
                key: b.region.key() ^ 0x5a00,
                ..b.range(0, 16)
            };
            let (source, target) = (memory(round, 100), Memory::new(100));
            // both queue pairs fail with the request; their ends are not yet known
            a.write(to_b, b.range(0, 100), &source, 1, false);
            a.write(to_b, wrong, &memory(1, 16), 2, false);
            a.write(to_b, b.range(200, 100), &source, 3, false);
            a.read(to_b, b.range(200, 100), &target, 4);
            b.write(to_a, a.range(0, 100), &source, 5, false);
            b.write(to_a, a.range(200, 100), &source, 6, false);
            let mut all: Vec<_> = (0..4).map(|_| a.entry()).collect();
            all.extend((0..2).map(|_| b.entry()));
            all.sort_by_key(|(context, _)| *context);
            for (context, error) in all {
                let refused = (context == 2).then_some(FiErrno::EKEYREJECTED);
                assert_eq!(
                    error.map(|error| error.err),
                    refused,
                    "{context} of {round}"
                );
            }
            for (side, at) in [(&b, 0), (&b, 200), (&a, 0), (&a, 200)] {
                assert!(side.memory.is(at, &pattern(round, 100)), "{round}");
            }
            assert!(target.is(0, &pattern(round, 100)), "{round}");
        }
    });
}

/// `FI_MR_SINGLE_USE`: the ranges of one operation are one use, also with a range of another region
/// between them.
#[test]
fn the_ranges_of_an_operation_are_one_use_of_a_region() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        let (source, target) = (memory(3, 100), Memory::new(4096));
        let buffer = Buffer {
            addr: target.addr() as *const _,
            len: 4096,
        };
        let config = RegionConfig {
            buffers: &[buffer],
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            requested_key: 77,
            once: true,
            ..RegionConfig::default()
        };
        // SAFETY: the memory is dropped behind the region.
        let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
        let range = |at: usize, len: usize| RemoteIov {
            addr: (target.addr() + at) as u64,
            len,
            key: region.key(),
        };
        let remote = [
            range(0, 40),
            b.range(8, 20),
            range(1000, 30),
            range(4090, 6),
            b.range(90, 4),
        ];
        for (count, context) in [(4, 3), (2, 4)] {
            let iov = source.iov();
            let len = remote[..count].iter().map(|range| range.len).sum();
            let iov = libc::iovec {
                iov_len: len,
                ..iov
            };
            let local = LocalIov::single(&iov, &Desc::NULL);
            let flags = Some(Flags::COMPLETION);
            let ep = &a.end.ep;
            // SAFETY: the memory lives until the entry.
            unsafe { ep.write(to_b, local, &remote[..count], None, context, flags) }.unwrap();
            let (done, error) = a.entry();
            let used = (context == 4).then_some(FiErrno::EKEYREJECTED);
            assert_eq!((done, error.map(|error| error.err)), (context, used));
        }
        let expected = pattern(3, 100);
        assert!(target.is(0, &expected[..40]) && b.memory.is(8, &expected[40..60]));
        assert!(target.is(1000, &expected[60..90]) && target.is(4090, &expected[90..96]));
        a.write(to_b, range(0, 8), &memory(1, 8), 5, false);
        let (_, error) = a.entry();
        assert_eq!(error.unwrap().err, FiErrno::EKEYREJECTED);
        assert!(target.is(0, &expected[..40]));
        drop(region);
    });
}

/// Injected data is lost with the request that had the only copy.
#[test]
fn an_injected_write_that_is_lost_is_reported() {
    Transport::each(|transport| {
        let domain = domain(true);
        let (a, b, to_b) = connected(&domain, transport);
        let (_, qp) = a.link();
        // the core does not know it yet
        qp.set_error().unwrap();
        a.write(to_b, b.range(0, 100), &memory(1, 100), 7, true);
        let (context, error) = a.entry();
        assert_eq!((context, error.unwrap().err), (7, FiErrno::ECONNABORTED));
        assert!(b.memory.is(0, &[0; 100]));
        // one that waits for the next link has a copy
        a.write(to_b, b.range(0, 100), &memory(2, 100), 8, true);
        let (context, error) = a.entry();
        assert!(context == 8 && error.is_none());
        assert!(b.memory.is(0, &pattern(2, 100)));
    });
}

/// A link breaks while operations wait for the look-up of a key. Nothing of them was posted, so
/// they are posted to the next link, also if the device does not report what was not executed.
#[test]
fn operations_that_wait_for_a_key_are_posted_to_the_next_link() {
    Transport::each(|transport| {
        let domain = domain(false);
        let (a, b, to_b) = connected(&domain, transport);
        let link = a.key();
        a.end.ep.shared().apply_event(|_, io| {
            io.not_executed = None;
            io.links.get_mut(link).unwrap().loses = true;
        });
        let source = memory(1, 100);
        for (at, context) in [(0, 5), (200, 6)] {
            let range = RemoteIov {
                addr: at as u64,
                ..b.range(at, 100)
            };
            a.write(to_b, range, &source, context, false);
        }
        for (_, error) in [a.entry(), a.entry()] {
            assert!(error.is_none(), "{error:?}");
        }
        for at in [0, 200] {
            assert!(b.memory.is(at, &pattern(1, 100)));
        }
        let record = |state: &mut State| state.io.links.get(link).is_none_or(|it| it.is_ending());
        assert!(a.end.state(record), "the link has not broken");
    });
}

/// A link breaks while the request without effect is under way that has the place of an operation
/// with a wrong key. The operation is repeated, and refused again.
#[test]
fn a_refused_operation_on_a_link_that_breaks_is_refused() {
    let domain = domain(false);
    let (a, b, _) = connected(&domain, Transport::Rc);
    let (link, source) = (a.key(), memory(1, 100));
    let limit = Instant::now() + 20 * SECOND;
    a.end.state(|state| {
        let (core, io) = (&mut state.core, &mut state.io);
        io.not_executed = None;
        let request = Request {
            opcode: SendOpcode::Write,
            flags: Flags::empty(),
            completion_flags: Flags::RMA | Flags::WRITE,
            compare_add: 0,
            swap: 0,
        };
        let mut op = RmaOp::new(request, core.peer_of(link).unwrap(), io.rma.next_order());
        let iov = source.iov();
        let local = LocalIov::single(&iov, &Desc::NULL);
        (op.iov, op.count) = (Iov::of_transfer(&local).unwrap(), 1);
        (op.context, op.wanted, op.ranges) = (5, true, 1);
        op.remote[0] = RemoteIov {
            addr: 0,
            key: b.region.key() ^ 0x5a00,
            ..b.range(0, 100)
        };
        // SAFETY: the memory lives until the entry.
        unsafe { io.begin_rma(core, op) }.unwrap();
        // until the look-up has ended
        while !state.io.links.get_mut(link).unwrap().has_rma() {
            state.poll().unwrap();
            assert!(Instant::now() < limit, "the look-up does not end");
        }
        state.io.links.get_mut(link).unwrap().loses = true;
    });
    let (context, error) = a.entry();
    assert_eq!((context, error.unwrap().err), (5, FiErrno::EKEYREJECTED));
}

/// A peer is cut off by the targets through which it may send. Its next operation breaks its
/// circuit, and is executed on another one.
#[test]
fn a_peer_that_is_cut_off_on_xrc_dials_another_circuit() {
    let domain = domain(true);
    let (a, b, to_b) = connected(&domain, Transport::Xrc);
    let source = memory(1, 100);
    a.write(to_b, b.range(0, 100), &source, 1, false);
    assert_eq!(a.entry().0, 1);
    // its own circuit need not be up yet
    let link = b.key();
    let targets = |io: &mut Executor| io.targets_of(link);
    let before: Vec<_> = b.end.state(|state| targets(&mut state.io));
    let numbers: Vec<_> = before.iter().map(|target| target.number()).collect();
    assert_eq!(numbers.len(), 1);
    drop(before);
    let notifier = b.end.state(|state| {
        let block = state.io.links.get_mut(link).unwrap().block.as_ref();
        Arc::clone(block.unwrap().notifier())
    });
    notifier.sever();
    a.write(to_b, b.range(200, 100), &source, 2, false);
    let (context, error) = a.entry();
    assert!(context == 2 && error.is_none(), "{error:?}");
    assert!(b.memory.is(200, &pattern(1, 100)));
    b.end.state(|state| {
        let held = &state.io.xrc.as_ref().unwrap().targets;
        let former = held.get(&numbers[0]);
        assert!(former.is_none_or(|held| held.failing.is_some()));
        assert!(held.values().any(|held| held.failing.is_none()));
    });
}

/// The peer of a link may use keys before its terms have arrived here. Until the link ends, a close
/// waits for this peer.
#[test]
fn a_link_without_terms_has_not_ended() {
    let domain = domain(true);
    let directory = domain.mr().directory(domain.pd()).unwrap();
    let link = || {
        let block = directory.block(None).unwrap();
        LinkBlock::new(
            Weak::<Shared>::new(),
            LinkKey::from_number(1),
            None,
            block,
            None,
        )
    };
    let (severed, ended) = (link(), link());
    assert!(severed.notifier().look().up && ended.notifier().look().up);
    severed.notifier().sever();
    ended.poster.set_ended();
    for link in [severed, ended] {
        assert!(!link.notifier().look().up);
        drop(link.leave());
    }
}

/// Operations wait while the requests of all links fill the circuit.
#[test]
fn operations_wait_for_room_on_a_circuit() {
    let domain = domain(true);
    let (a, b, to_b) = connected(&domain, Transport::Xrc);
    let (link, source) = (a.link().0, memory(1, 100));
    let room = a.end.state(|state| {
        let circuit = state.io.port_mut(link).unwrap().circuit.unwrap();
        let xrc = state.io.xrc.as_mut().unwrap();
        Arc::clone(&xrc.queue_mut(circuit).unwrap().room)
    });
    room.occupy(CIRCUIT_RMA);
    // a fence: it is not executed in its call
    let iov = source.iov();
    let local = LocalIov::single(&iov, &Desc::NULL);
    let flags = Some(Flags::COMPLETION | Flags::FENCE);
    let range = [b.range(0, 100)];
    // SAFETY: the source lives until the entry.
    unsafe { a.end.ep.write(to_b, local, &range, None, 3, flags) }.unwrap();
    for _ in 0..200 {
        assert!(a.end.poll().is_none());
    }
    assert!(b.memory.is(0, &[0; 100]));
    room.give(CIRCUIT_RMA);
    assert_eq!(a.entry().0, 3);
    assert!(b.memory.is(0, &pattern(1, 100)));
    a.end.state(|_| assert!(room.is_empty()));
}

/// A side whose half of a link has ended holds no keys of the peer, which does not wait for it.
#[test]
fn a_link_that_lingers_holds_no_keys() {
    let domain = domain(false);
    let (a, b, to_b) = connected(&domain, Transport::Xrc);
    let source = memory(1, 100);
    let range = RemoteIov {
        addr: 0,
        ..b.range(0, 100)
    };
    a.write(to_b, range, &source, 1, false);
    let (context, error) = a.entry();
    assert!(context == 1 && error.is_none(), "{error:?}");
    let link = a.link().0;
    break_link(&a);
    let limit = Instant::now() + 20 * SECOND;
    while a.end.state(|state| {
        let port = state.io.port_mut(link);
        port.is_some_and(|port| port.circuit.is_some())
    }) {
        assert!(Instant::now() < limit);
    }
    let begin = Instant::now();
    b.region.close().unwrap();
    assert!(begin.elapsed() < SECOND, "{:?}", begin.elapsed());
}

/// The peer has ended the session when there was no link. RMA, atomics and messages that this side
/// posts then are posted to the next session, in their order, with keys that are looked up again.
#[test]
fn operations_that_were_never_posted_wait_for_the_next_session() {
    Transport::each(|transport| {
        for (native, packets) in [(true, false), (false, false), (false, true)] {
            let domain = domain(native);
            let (a, b, to_b) = connected(&domain, transport);
            if packets {
                a.end.ep.shared().apply_event(|_, io| io.send_atomics());
            }
            b.memory.set(0, &pattern(1, 100));
            let base = if native { b.memory.addr() as u64 } else { 0 };
            let range = |at: usize, len| RemoteIov {
                addr: base + at as u64,
                ..b.range(at, len)
            };
            let (target, source) = (Memory::new(100), memory(2, 100));
            a.read(to_b, range(0, 100), &target, 4);
            assert!(a.entry().1.is_none() && target.is(0, &pattern(1, 100)));
            b.end.ep.shared().apply_event(|core, io| {
                let peer = core.peer_keys().next().unwrap();
                core.fail(peer, FiErrno::ETIMEDOUT, io);
            });
            let limit = Instant::now() + 20 * SECOND;
            // on XRC this side learns it by its next packet, and halves linger until then
            a.end.ep.shared().apply_event(|core, io| {
                let peer = core.peer_keys().next().unwrap();
                core.end_links(peer, io);
            });
            let linked = |side: &Side| {
                side.end.state(|state| {
                    let peer = state.core.peer_keys().next().unwrap();
                    state.core.links_to(peer) != 0
                })
            };
            while linked(&a) || linked(&b) {
                assert!(Instant::now() < limit, "a link remains");
            }
            let mut bytes = [0; 8];
            b.end.recv(None, &mut bytes, 2);
            let target = Memory::new(100);
            a.read(to_b, range(0, 100), &target, 5);
            a.write(to_b, range(0, 100), &source, 6, false);
            a.write(to_b, range(200, 100), &source, 7, true);
            let (word, flags) = ([range(304, 8)], Flags::COMPLETION | Flags::FENCE);
            // SAFETY: the operands are copied.
            unsafe { add(&a.end.ep, to_b, &word, LocalIov::NONE, (8, flags)) }.unwrap();
            a.end.send(to_b, None, &[9; 8], 9);
            let mut all = [(); 5].map(|()| a.entry());
            all.sort_by_key(|(context, _)| *context);
            for (number, (context, error)) in (5..).zip(all) {
                assert!(error.is_none(), "{native} {packets} {context}: {error:?}");
                assert_eq!(context, number);
            }
            wait_for(&b.end, 1);
            assert!(target.is(0, &pattern(1, 100)), "the later write was first");
            assert!(b.memory.is(0, &pattern(2, 100)) && b.memory.is(200, &pattern(2, 100)));
            assert_eq!(bytes, [9; 8]);
            assert!(b.memory.is(304, &1_u64.to_ne_bytes()));
        }
    });
}

/// A long operation of an endpoint on itself is copied by parts, under the lock for a short time
/// each. What is posted behind it is executed behind it; the driver goes on without the
/// application.
#[test]
fn a_long_copy_within_an_endpoint_is_divided() {
    const LEN: usize = 2 * CALL;
    for polls in [true, false] {
        let domain = domain(true);
        let a = Side::open(&domain, Transport::Rc);
        let to_a = a.end.knows(&a.end);
        let (source, target, read) = (memory(1, LEN), Memory::new(LEN), Memory::new(LEN));
        let buffer = Buffer {
            addr: target.addr() as *const _,
            len: LEN,
        };
        let config = RegionConfig {
            buffers: &[buffer],
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            requested_key: (target.addr() as u64) >> 4,
            ..RegionConfig::default()
        };
        // SAFETY: the memory is dropped behind the region.
        let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
        let range = |at: usize, len: usize| RemoteIov {
            addr: (target.addr() + at) as u64,
            len,
            key: region.key(),
        };
        let mut bytes = [0; 8];
        a.end.recv(None, &mut bytes, 1);
        // no other thread makes progress before the operations are posted
        a.end.ep.shared().apply_event(|core, io| {
            let peer = core
                .peer_at({
                    let name = a.end.ep.name().unwrap();
                    Listener::new(name.ip(), name.port()).unwrap()
                })
                .unwrap();
            for (opcode, kind, memory, context) in [
                (SendOpcode::Write, Flags::WRITE, &source, 5),
                (SendOpcode::Read, Flags::READ, &read, 6),
            ] {
                let request = Request {
                    opcode,
                    flags: Flags::empty(),
                    completion_flags: Flags::RMA | kind,
                    compare_add: 0,
                    swap: 0,
                };
                let mut op = RmaOp::new(request, peer, io.rma.next_order());
                let iov = memory.iov();
                let local = LocalIov::single(&iov, &Desc::NULL);
                (op.iov, op.count) = (Iov::of_transfer(&local).unwrap(), 1);
                (op.context, op.wanted, op.ranges) = (context, true, 2);
                op.remote[0] = range(0, CALL + 5000);
                op.remote[1] = range(CALL + 5000, CALL - 5000);
                // SAFETY: the memory lives until the entries.
                unsafe { io.begin_rma(core, op) }.unwrap();
                let first = io.rma.first(peer).expect("copied in one call");
                assert_eq!(io.rma.ops.get(first).unwrap().next, (0, CALL));
            }
            // the write ends with the bytes of the call, and the read has not begun
            io.run_rma(core);
            let first = io.rma.first(peer).expect("copied in one call");
            assert_eq!((io.rma.ops.len(), io.copies()), (1, true));
            assert_eq!(io.rma.ops.get(first).unwrap().next, (0, 0));
        });
        a.end.send(to_a, None, &[9; 8], 7);
        if !polls {
            let limit = Instant::now() + 20 * SECOND;
            while a.end.state(|state| state.io.rma.ops.len()) != 0 {
                assert!(Instant::now() < limit, "the driver does not go on");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let mut contexts = Vec::new();
        while contexts.len() != 4 {
            let (context, error) = a.entry();
            assert!(error.is_none(), "{error:?}");
            if context == 1 {
                assert!(read.is(0, &pattern(1, LEN)), "the message was first");
            }
            contexts.push(context);
        }
        contexts.retain(|context| *context != 1);
        assert_eq!((contexts, bytes), (vec![5, 6, 7], [9; 8]));
        assert!(target.is(0, &pattern(1, LEN)));
        region.close().unwrap();
    }
}
