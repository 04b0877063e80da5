//! Operations whose outcome is known although the SENDs of their packets have not completed, at the
//! end of the session.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use atomic_ops::{Datatype, Family, Op as Operator, Operation as Arithmetic};

use super::super::endpoint::AtomicCall;
use super::super::links::LinkQp;
use super::super::shared::State;
use super::breaks::{Memory, domain, pattern};
use super::endpoints::{End, Transport};
use super::rma::{Side, connected, memory};
use crate::av::FiAddr;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::rdm::LocalIov;

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
fn link<R>(side: &Side, using: impl FnOnce(&mut LinkQp) -> R) -> R {
    let key = side.key();
    side.end
        .state(|state| using(state.io.links.get_mut(key).unwrap()))
}

/// The session with the only peer ends.
fn fail(side: &Side) {
    side.end.ep.shared().change(|core, io| {
        let peer = core.peer_keys().next().unwrap();
        core.fail(peer, FiErrno::ECONNABORTED, io);
    });
}

/// Sends a message from memory that the caller keeps.
fn send(side: &Side, to: FiAddr, from: &Memory, context: usize, flags: Flags) {
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
    a.end.ep.shared().change(|_, io| io.send_atomics());
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
    a.end.ep.shared().change(|_, io| io.send_atomics());
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
