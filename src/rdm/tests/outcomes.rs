//! Operations whose outcome is known, or becomes known, when their link or the session has ended,
//! and the order of those that are posted again.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use atomic_ops::{Datatype, Family, Op as Operator, Operation as Arithmetic};

use super::breaks::{Memory, add, counting_domain, domain, pattern};
use super::endpoints::{End, Transport, wait};
use super::pull::domain_with;
use super::rma::{Side, connected, memory};
use crate::av::FiAddr;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::{Access, Buffer, Desc, Mode, Region, RegionConfig};
use crate::queue::{Completion, Counter, WaitKind};
use crate::rdm::endpoint::AtomicCall;
use crate::rdm::link::links::LinkRecord;
use crate::rdm::rma::{Request, RmaOp};
use crate::rdm::shared::State;
use crate::rdm::{EndpointConfig, LocalIov, RemoteIov};
use crate::verbs::SendOpcode;

/// Elements of an atomic whose packet is not inline.
const WORDS: usize = 64;

/// Polls both ends until a condition of the first one holds.
fn until(ends: [&End; 2], mut holds: impl FnMut(&mut State) -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !ends[0].state(&mut holds) {
        assert_eq!(ends[0].poll(), None);
        ends[1].poll();
        assert!(Instant::now() < limit);
    }
}

/// Uses the only link of a side.
pub(super) fn link<R>(side: &Side, using: impl FnOnce(&mut LinkRecord) -> R) -> R {
    let key = side.key();
    side.end
        .state(|state| using(state.io.links.get_mut(key).unwrap()))
}

/// The session with the only peer ends.
fn fail(side: &Side) {
    side.end.ep.shared().apply_event(|core, io| {
        let peer = core.peer_keys().next().unwrap();
        core.fail(peer, FiErrno::ECONNABORTED, io);
    });
}

/// Sends a message from memory that the caller keeps.
pub(super) fn send(side: &Side, to: FiAddr, from: &Memory, context: usize, flags: Flags) {
    let iov = from.iov();
    let local = LocalIov::single(&iov, &Desc::NULL);
    let flags = Some(Flags::COMPLETION | flags);
    let ep = &side.end.ep;
    // SAFETY: the caller keeps the memory until the entry.
    unsafe { ep.send(to, None, local, None, context, flags) }.unwrap();
}

/// Adds to the words at the begin of the peer's region, and fetches their earlier values.
fn fetch_and_add(side: &Side, to: FiAddr, of: &Side, result: &Memory, context: usize) {
    let ones = [1_u64; WORDS];
    let operands = libc::iovec {
        iov_base: ones.as_ptr().cast_mut().cast(),
        iov_len: 8 * WORDS,
    };
    let result = result.iov();
    let call = AtomicCall {
        family: Family::Fetch,
        operation: Arithmetic::new(Operator::Sum, Datatype::Uint64).unwrap(),
        count: WORDS,
        operands: LocalIov::single(&operands, &Desc::NULL),
        compare: LocalIov::NONE,
        result: LocalIov::single(&result, &Desc::NULL),
        targets: &[of.range(0, 8 * WORDS)],
        context,
        flags: Some(Flags::COMPLETION),
        injected: false,
    };
    // SAFETY: the operands are copied, and the caller keeps the memory of the results.
    unsafe { side.end.ep.atomic(to, &call) }.unwrap();
}

/// The peer has answered a message and an atomic, and stated that it has processed another message,
/// but the acknowledgements of their packets are lost. They succeed although the session ends then.
#[test]
fn answered_operations_succeed_although_their_sends_have_not_completed() {
    let domain = domain(true);
    let (a, b, to_b) = connected(&domain, Transport::Rc);
    a.end.ep.shared().apply_event(|_, io| io.send_atomics());
    link(&a, |link| link.silent = true);
    b.memory.set(0, &pattern(1, 8 * WORDS));
    let (long, short, result) = (memory(2, 10_000), memory(3, 2_000), Memory::new(8 * WORDS));
    let (mut long_at, mut short_at) = (vec![0; 10_000], vec![0; 2_000]);
    b.end.recv(None, &mut long_at, 2);
    b.end.recv(None, &mut short_at, 2);
    send(&a, to_b, &long, 5, Flags::empty());
    send(&a, to_b, &short, 6, Flags::DELIVERY_COMPLETE);
    fetch_and_add(&a, to_b, &b, &result, 7);
    until([&a.end, &b.end], |state| {
        let answered = state.io.tx.keys_where(|op| op.fin.is_some()).len();
        answered == 2 && state.core.ops.any(|entry| entry.ack && entry.acked)
    });
    assert!(long_at == pattern(2, 10_000) && short_at == pattern(3, 2_000));
    fail(&a);
    // the device may repeat the packets that were not inline
    assert_eq!(link(&a, |link| link.kept()), 2);
    let mut contexts = [(); 3].map(|()| {
        let (context, error) = a.entry();
        assert!(error.is_none(), "{error:?}");
        context
    });
    contexts.sort_unstable();
    assert_eq!(contexts, [5, 6, 7]);
    assert!(result.is(0, &pattern(1, 8 * WORDS)));
}

/// As above, without answers: the operations fail, and their packets are kept as well.
#[test]
fn operations_without_answer_fail_with_their_session() {
    let domain = domain(true);
    let (a, _b, to_b) = connected(&domain, Transport::Rc);
    a.end.ep.shared().apply_event(|_, io| io.send_atomics());
    link(&a, |link| link.silent = true);
    let (long, short) = (memory(2, 10_000), memory(3, 2_000));
    send(&a, to_b, &long, 5, Flags::empty());
    send(&a, to_b, &short, 6, Flags::DELIVERY_COMPLETE);
    fail(&a);
    assert_eq!(link(&a, |link| link.kept()), 1);
    let mut contexts = [(); 2].map(|()| {
        let (context, error) = a.entry();
        assert_eq!(error.unwrap().err, FiErrno::ECONNABORTED);
        context
    });
    contexts.sort_unstable();
    assert_eq!(contexts, [5, 6]);
}

/// The packets that the peer had processed when the link of a write was lost show whether it was
/// executed. What it has processed on later links shows nothing.
#[test]
fn a_write_is_decided_by_the_next_link() {
    let domain = domain(true);
    let config = EndpointConfig {
        rma: true,
        target: true,
        ..Transport::Rc.config()
    };
    let open = || End::with_rings(&domain, config.clone(), 0, false);
    let (a, b) = (open(), open());
    let to_b = a.knows(&b);
    let message = || {
        let mut bytes = [0; 8];
        b.recv(None, &mut bytes, 2);
        a.send(to_b, None, &[1; 8], 1);
        wait([&a, &b], [1, 1]);
    };
    let break_link = || {
        let key = a.state(|state| state.io.links.keys().next().unwrap());
        a.ep.shared().apply_event(|core, io| core.broken(key, io));
        until([&a, &b], |state| state.io.links.keys().next().is_none());
        key
    };
    message();
    let lost = break_link();
    // a write on this link, behind the last packet; its requests have not been flushed
    let mut ending = None;
    a.ep.shared().apply_event(|core, io| {
        let request = Request {
            opcode: SendOpcode::Write,
            flags: Flags::empty(),
            completion_flags: Flags::RMA | Flags::WRITE,
            compare_add: 0,
            swap: 0,
        };
        let peer = core.peer_keys().next().unwrap();
        let mut op = RmaOp::new(request, peer, io.rma.next_order());
        (op.context, op.wanted, op.parts) = (5, true, 1);
        (op.link, op.uncertain) = (Some(lost), true);
        op.first_packet_after = Some(core.next_number(peer));
        let key = io.rma.ops.insert(op).unwrap();
        io.rma.ending.push(key);
        ending = Some(key);
    });
    message();
    break_link();
    message();
    let ended = [ending.unwrap()];
    a.ep.shared()
        .apply_event(|core, io| io.rma_ended(core, &ended));
    assert_eq!(
        a.cq.read(1, &mut |it: &Completion| panic!("{it:?}")),
        Err(FiErrno::EAVAIL)
    );
    let error = a.cq.read_error().unwrap();
    assert_eq!(
        (error.completion.context, error.err),
        (5, FiErrno::ECONNABORTED)
    );
}

/// The key of a link is that of another one 256 links later. A write on the first one is decided by
/// the second one too.
#[test]
fn a_write_is_decided_by_a_link_with_the_same_key() {
    let domain = domain(true);
    let config = EndpointConfig {
        rma: true,
        target: true,
        ..Transport::Rc.config()
    };
    let open = || End::with_rings(&domain, config.clone(), 0, false);
    let (a, b) = (open(), open());
    let to_b = a.knows(&b);
    let mut bytes = [0; 8];
    b.recv(None, &mut bytes, 2);
    a.send(to_b, None, &[1; 8], 1);
    wait([&a, &b], [1, 1]);
    let key = a.state(|state| state.io.links.keys().next().unwrap());
    let (mut dials, mut link) = (0, None);
    a.ep.shared().apply_event(|core, io| {
        let request = Request {
            opcode: SendOpcode::Write,
            flags: Flags::empty(),
            completion_flags: Flags::RMA | Flags::WRITE,
            compare_add: 0,
            swap: 0,
        };
        let peer = core.peer_of(key).unwrap();
        let mut op = RmaOp::new(request, peer, io.rma.next_order());
        (op.context, op.wanted, op.held, op.parts) = (5, true, true, 1);
        op.link = Some(key);
        io.rma.ops.insert(op).unwrap();
        core.hold(peer, io);
        dials = std::mem::take(&mut core.config.dials);
        link = core.links.get(key).copied();
        core.broken(key, io);
    });
    // its queue pair is destroyed
    until([&a, &b], |state| {
        state.io.links.keys().next().is_none() && !state.io.rma.doubtful.is_empty()
    });
    a.ep.shared().apply_event(|core, io| {
        for _ in 0..255 {
            let other = core.links.insert(link.unwrap()).unwrap();
            core.links.remove(other);
        }
        core.config.dials = dials;
        core.advance_changed(io);
    });
    let error = super::pull::error(&a);
    assert_eq!(
        (error.completion.context, error.err),
        (5, FiErrno::ECONNABORTED)
    );
    assert_eq!(a.state(|state| state.io.links.keys().next()), Some(key));
}

/// What is posted behind a write of unknown outcome, a message or another write, waits until the
/// outcome is known: the write may have to be posted again.
#[test]
fn nothing_overtakes_a_write_of_unknown_outcome() {
    let domain = domain(true);
    let (a, b, to_b) = connected(&domain, Transport::Rc);
    let lost = a.key();
    let mut dials = 0;
    a.end.ep.shared().apply_event(|core, io| {
        dials = std::mem::take(&mut core.config.dials);
        core.broken(lost, io);
    });
    until([&a.end, &b.end], |state| {
        state.io.links.keys().next().is_none()
    });
    let (first, second) = (memory(2, 100), memory(3, 100));
    let mut bytes = [0; 8];
    b.end.recv(None, &mut bytes, 2);
    a.write(to_b, b.range(0, 100), &first, 5, false);
    // as if it had been posted to the lost link, behind a packet that did not arrive
    a.end.ep.shared().apply_event(|core, io| {
        let peer = core.peer_keys().next().unwrap();
        let key = io.rma.first(peer).unwrap();
        io.rma.pop(peer);
        let op = io.rma.ops.get_mut(key).unwrap();
        (op.link, op.next, op.uncertain) = (Some(lost), (1, 0), true);
        op.packets_before = Some(core.next_number(peer).next());
        io.rma.doubtful.entry(peer.number()).or_default().push(key);
    });
    a.end.send(to_b, None, &[9; 8], 6);
    a.write(to_b, b.range(0, 100), &second, 7, false);
    a.end.ep.shared().apply_event(|core, io| {
        core.config.dials = dials;
        core.advance_changed(io);
    });
    let [ended, _] = wait([&a.end, &b.end], [3, 1]);
    let contexts: Vec<_> = ended.iter().map(|it| it.context).collect();
    assert_eq!((contexts, bytes), (vec![5, 6, 7], [9; 8]));
    assert!(b.memory.is(0, &pattern(3, 100)));
}

/// The link of an atomic breaks when the atomic was executed, and before the region has counted it.
#[test]
fn a_counted_atomic_is_executed_once() {
    let domain = counting_domain();
    let (a, b, to_b) = connected(&domain, Transport::Rc);
    let counter = Counter::open(domain.queues(), WaitKind::None).unwrap();
    b.region
        .bind_counter(&counter, Flags::REMOTE_WRITE)
        .unwrap();
    let word = [RemoteIov {
        addr: 0,
        ..b.range(0, 8)
    }];
    let add_one = |context| {
        let call = (context, Flags::COMPLETION);
        // SAFETY: the operands are copied, and there is no result.
        unsafe { add(&a.end.ep, to_b, &word, LocalIov::NONE, call) }.unwrap();
        let (found, error) = a.entry();
        assert_eq!(found, context);
        error.map(|error| error.err)
    };
    assert_eq!(add_one(5), None);
    a.end
        .ep
        .shared()
        .apply_event(|_, io| io.tests.breaks_begun = true);
    assert_eq!(add_one(6), Some(FiErrno::ECONNABORTED));
    assert!(
        !a.end.state(|state| state.io.tests.breaks_begun),
        "no event"
    );
    assert!(b.memory.is(0, &2_u64.to_ne_bytes()), "executed twice");
    assert_eq!(add_one(7), None);
    assert!(b.memory.is(0, &3_u64.to_ne_bytes()));
}

/// The link of a write to many registrations of a region breaks when the first ones are written,
/// and the requests for the others wait for room. The first ones are not written again.
#[test]
fn a_write_that_was_executed_in_part_is_not_repeated() {
    // the driver may end the operation before this thread looks
    assert!((0..20).any(|_| is_found_between()));
}

/// Whether the target has found the first bytes before the operation has ended.
fn is_found_between() -> bool {
    const PAGE: usize = 4096;
    const LEN: usize = 100 * PAGE;
    let domain = domain_with(Mode::ALLOCATED | Mode::MMU_NOTIFY);
    let (a, _b, to_b) = connected(&domain, Transport::Rc);
    let (source, target) = (memory(1, LEN), Memory::new(LEN + PAGE));
    let begin = target.addr().next_multiple_of(PAGE) - target.addr();
    let buffer = |at: usize, len: usize| Buffer {
        addr: (target.addr() + begin + at) as *const _,
        len,
    };
    let config = RegionConfig {
        buffers: &[buffer(0, LEN)],
        access: Access::REMOTE_READ | Access::REMOTE_WRITE,
        requested_key: 77,
        ..RegionConfig::default()
    };
    // SAFETY: the memory is dropped behind the region.
    let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
    for at in (0..LEN).step_by(PAGE) {
        region.refresh(&[buffer(at, PAGE)]).unwrap();
    }
    a.end
        .ep
        .shared()
        .apply_event(|_, io| io.tests.breaks_begun = true);
    let iov = source.iov();
    let local = LocalIov::single(&iov, &Desc::NULL);
    let range = RemoteIov {
        addr: 0,
        len: LEN,
        key: region.key(),
    };
    let flags = Some(Flags::COMPLETION);
    // SAFETY: the memory lives until the entry.
    unsafe { a.end.ep.write(to_b, local, &[range], None, 5, flags) }.unwrap();
    let first = pattern(1, PAGE);
    let mut taken = false;
    let limit = Instant::now() + Duration::from_secs(20);
    while a.end.state(|state| state.io.rma.ops.len()) != 0 {
        if !taken && target.is(begin, &first) {
            // as the application of the target, which has found the bytes
            target.set(begin, &[0; PAGE]);
            taken = true;
        }
        let _ = a.end.state(|state| state.poll());
        assert!(Instant::now() < limit);
    }
    let (context, error) = a.entry();
    assert_eq!((context, error.unwrap().err), (5, FiErrno::ECONNABORTED));
    assert!(
        !a.end.state(|state| state.io.tests.breaks_begun),
        "no break"
    );
    assert!(!taken || target.is(begin, &[0; PAGE]), "written twice");
    drop(region);
    taken
}

/// Stores a value in the first word of the peer's region.
pub(super) fn store(side: &Side, to: FiAddr, of: &Side, value: u64, context: usize) {
    let operand = libc::iovec {
        iov_base: (&raw const value).cast_mut().cast(),
        iov_len: 8,
    };
    let call = AtomicCall {
        family: Family::Base,
        operation: Arithmetic::new(Operator::Write, Datatype::Uint64).unwrap(),
        count: 1,
        operands: LocalIov::single(&operand, &Desc::NULL),
        compare: LocalIov::NONE,
        result: LocalIov::NONE,
        targets: &[of.range(0, 8)],
        context,
        flags: Some(Flags::COMPLETION),
        injected: false,
    };
    // SAFETY: the operand is copied.
    unsafe { side.end.ep.atomic(to, &call) }.unwrap();
}

/// An atomic waits although the link turns out to be one to a peer whose device executes none: as
/// a packet it is executed behind those that were posted before there was a link.
#[test]
fn an_atomic_does_not_overtake_one_that_waits() {
    let domain = domain(true);
    let (a, b, to_b) = connected(&domain, Transport::Rc);
    // a fence behind a message without receive
    let (long, source) = (memory(2, 10_000), memory(3, 8));
    send(&a, to_b, &long, 4, Flags::empty());
    let iov = source.iov();
    let local = LocalIov::single(&iov, &Desc::NULL);
    let flags = Some(Flags::COMPLETION | Flags::FENCE);
    let ep = &a.end.ep;
    // SAFETY: the memory lives until the entry.
    unsafe { ep.write(to_b, local, &[b.range(8, 8)], None, 5, flags) }.unwrap();
    store(&a, to_b, &b, 1, 6);
    assert_eq!(a.end.state(|state| state.io.rma.ops.len()), 2);
    link(&a, |link| link.device_atomics = false);
    store(&a, to_b, &b, 2, 7);
    let mut bytes = vec![0; 10_000];
    b.end.recv(None, &mut bytes, 2);
    let [ended, _] = wait([&a.end, &b.end], [4, 1]);
    let contexts: Vec<_> = ended.iter().map(|it| it.context).collect();
    assert_eq!(contexts, [4, 5, 6, 7]);
    assert!(b.memory.is(0, &2_u64.to_ne_bytes()), "overtaken");
}
