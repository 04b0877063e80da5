//! Shared receive contexts whose endpoints close, in one process.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::endpoints::{End, config, domain, queue, wait_for};
use crate::av::FiAddr;
use crate::domain::Domain;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::{Desc, Withdrawn};
use crate::queue::{BindFlags, Completion};
use crate::rdm::long::pulls::{Push, Sink};
use crate::rdm::{
    AddressVector, Directed, Endpoint, EndpointConfig, LocalIov, SharedRx, SharedRxConfig,
};

/// Endpoints of one context and one address vector.
pub(super) fn members(domain: &Arc<Domain>, context: &Arc<SharedRx>) -> [End; 2] {
    let av = AddressVector::open(4).unwrap();
    [(); 2].map(|()| member(domain, context, &av))
}

fn member(domain: &Arc<Domain>, context: &Arc<SharedRx>, av: &Arc<AddressVector>) -> End {
    let member = bound(domain, context, av, true);
    member.ep.enable().unwrap();
    member
}

/// An endpoint that is bound, first to the vector or to the context, and not enabled.
pub(super) fn bound(
    domain: &Arc<Domain>,
    context: &Arc<SharedRx>,
    av: &Arc<AddressVector>,
    vector_first: bool,
) -> End {
    let config = EndpointConfig {
        shared_rx: true,
        ..config()
    };
    let ep = Endpoint::new(domain, config).unwrap();
    let cq = queue(domain, 0);
    if vector_first {
        ep.bind_vector(av).unwrap();
    }
    ep.bind_shared_rx(context).unwrap();
    if !vector_first {
        ep.bind_vector(av).unwrap();
    }
    ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
        .unwrap();
    End {
        ep,
        cq,
        av: Arc::clone(av),
    }
}

pub(super) fn context(domain: &Arc<Domain>, size: usize) -> Arc<SharedRx> {
    let config = SharedRxConfig {
        size,
        op_flags: Flags::empty(),
        directed: Directed {
            untagged: false,
            tagged: false,
        },
    };
    SharedRx::open(domain, config).unwrap()
}

/// No address vector is known before the first endpoint: an address that none could have is
/// refused, and memory does not depend on the address.
#[test]
fn directed_receives_without_an_address_vector() {
    let domain = domain();
    let config = SharedRxConfig {
        size: 8,
        op_flags: Flags::empty(),
        directed: Directed::ALL,
    };
    let context = SharedRx::open(&domain, config).unwrap();
    let byte = [0; 1];
    let from = |addr, number| {
        let (list, tag) = (iov(&byte), Some((1, 0)));
        let local = LocalIov::single(&list, &Desc::NULL);
        // SAFETY: the buffer lives until the context is dropped.
        unsafe { context.recv(FiAddr(addr), tag, local, number, None) }
    };
    for addr in [1 << 32, 1 << 40, u64::MAX - 1] {
        assert_eq!(from(addr, 1), Err(FiErrno::EINVAL), "{addr:#x}");
    }
    let begin = resident();
    for addr in [0, 1, u64::from(u32::MAX)] {
        from(addr, 1).unwrap();
    }
    assert!(resident() - begin < 16 << 20, "bytes for three receives");
    context.cancel(1).unwrap();
}

/// The source of a receive of the other kind is ignored, also one that no address vector can have.
#[test]
fn the_source_of_receives_that_are_not_directed_is_ignored() {
    let domain = domain();
    for directed in [false, true] {
        let config = SharedRxConfig {
            size: 8,
            op_flags: Flags::empty(),
            directed: Directed {
                untagged: directed,
                tagged: true,
            },
        };
        let context = SharedRx::open(&domain, config).unwrap();
        let mut byte = [0; 1];
        let list = libc::iovec {
            iov_base: byte.as_mut_ptr().cast(),
            iov_len: byte.len(),
        };
        let post = |tag, number| {
            let local = LocalIov::single(&list, &Desc::NULL);
            // SAFETY: the buffer lives until the context is dropped.
            unsafe { context.recv(FiAddr(1 << 32), tag, local, number, None) }
        };
        assert_eq!(post(Some((1, 0)), 1), Err(FiErrno::EINVAL));
        if directed {
            assert_eq!(post(None, 2), Err(FiErrno::EINVAL));
            continue;
        }
        assert_eq!(post(None, 2), Ok(()));
        let av = AddressVector::open(4).unwrap();
        let (member, a) = (member(&domain, &context, &av), End::open(&domain));
        let to_member = a.knows(&member);
        a.send(to_member, None, &[9], 3);
        assert_eq!(wait_for(&member, 1)[0].context, 2);
        wait_for(&a, 1);
        assert_eq!(byte, [9]);
    }
}

/// An index of the address vector is inserted when receives from it were posted already, before the
/// first endpoint was enabled. They match, and later ones too.
#[test]
fn a_receive_from_an_address_that_is_inserted_later() {
    for later in [false, true] {
        receive_before_the_address(later);
    }
}

fn receive_before_the_address(later: bool) {
    let domain = domain();
    let config = SharedRxConfig {
        size: 8,
        op_flags: Flags::empty(),
        directed: Directed::ALL,
    };
    let context = SharedRx::open(&domain, config).unwrap();
    let mut buffers = [[0_u8; 8]; 2];
    let lists = buffers.each_mut().map(|buffer| libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    });
    let post = |number: usize| {
        let (list, tag) = (lists[number], Some((1, 0)));
        let local = LocalIov::single(&list, &Desc::NULL);
        // SAFETY: the buffer lives until the completion.
        unsafe { context.recv(FiAddr(0), tag, local, number, None) }.unwrap();
    };
    post(0);
    if !later {
        post(1);
    }
    let av = AddressVector::open(4).unwrap();
    let (member, a) = (member(&domain, &context, &av), End::open(&domain));
    assert_eq!(member.knows(&a), FiAddr(0));
    if later {
        post(1);
    }
    let to_member = a.knows(&member);
    for number in 0..2 {
        a.send(to_member, Some(1), &[number as u8 + 1; 8], 2);
        assert_eq!(wait_for(&member, 1)[0].context, number);
    }
    wait_for(&a, 2);
    assert_eq!(buffers, [[1; 8], [2; 8]]);
}

/// An address is removed before the first endpoint is enabled, and another one gets its index. A
/// receive from the first one does not match messages of the second one.
#[test]
fn a_receive_from_an_address_that_is_removed_before_an_endpoint_is_enabled() {
    let domain = domain();
    for vector_first in [true, false] {
        let config = SharedRxConfig {
            size: 8,
            op_flags: Flags::empty(),
            directed: Directed::ALL,
        };
        let context = SharedRx::open(&domain, config).unwrap();
        let av = AddressVector::open(4).unwrap();
        let (a, b) = (End::open(&domain), End::open(&domain));
        let member = bound(&domain, &context, &av, vector_first);
        let mut bytes = [0_u8; 8];
        let list = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let post = |number| {
            let local = LocalIov::single(&list, &Desc::NULL);
            // SAFETY: the buffer lives until the context is dropped.
            unsafe { context.recv(FiAddr(0), Some((1, 0)), local, number, None) }.unwrap();
        };
        assert_eq!(member.knows(&a), FiAddr(0));
        post(1);
        av.remove(FiAddr(0)).unwrap();
        assert_eq!(member.knows(&b), FiAddr(0));
        member.ep.enable().unwrap();
        b.send(b.knows(&member), Some(1), &[7; 8], 0);
        wait_stored(&b, &member, 1);
        post(2);
        assert_eq!(wait_entry(&member), (2, None));
        assert_eq!(bytes, [7; 8]);
        assert_eq!(context.cancel(1), Ok(()));
        assert_eq!(wait_entry(&member), (1, Some(FiErrno::ECANCELED)));
    }
}

/// The address vector is closed with the last endpoint of a context, and an endpoint with another
/// one follows; or the first one stays open. A receive from an address of the first vector does not
/// match messages of the same address in the second one; one that is posted behind the end of the
/// first endpoint does.
#[test]
fn a_receive_from_an_address_of_another_vector() {
    let domain = domain();
    for closes in [true, false] {
        let config = SharedRxConfig {
            size: 8,
            op_flags: Flags::empty(),
            directed: Directed::ALL,
        };
        let context = SharedRx::open(&domain, config).unwrap();
        let (a, b) = (End::open(&domain), End::open(&domain));
        let mut bytes = [0_u8; 8];
        let list = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let post = |number| {
            let local = LocalIov::single(&list, &Desc::NULL);
            // SAFETY: the buffer lives until the context is dropped.
            unsafe { context.recv(FiAddr(0), Some((1, 0)), local, number, None) }.unwrap();
        };
        let first = AddressVector::open(4).unwrap();
        let member = bound(&domain, &context, &first, true);
        assert_eq!(member.knows(&a), FiAddr(0));
        member.ep.enable().unwrap();
        post(1);
        drop(member);
        let kept = (!closes).then_some(first);
        if closes {
            post(2);
        }
        let second = AddressVector::open(4).unwrap();
        let member = bound(&domain, &context, &second, true);
        assert_eq!(member.knows(&b), FiAddr(0));
        if !closes {
            post(2);
        }
        member.ep.enable().unwrap();
        b.send(b.knows(&member), Some(1), &[7; 8], 0);
        assert_eq!(wait_entry(&member), (2, None));
        assert_eq!(bytes, [7; 8]);
        assert_eq!(context.cancel(1), Ok(()));
        assert_eq!(wait_entry(&member), (1, Some(FiErrno::ECANCELED)));
        let third = bound(&domain, &context, &AddressVector::open(4).unwrap(), true);
        assert_eq!(third.ep.enable(), Err(FiErrno::EINVAL));
        drop(kept);
    }
}

/// The resident memory of the process in bytes.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: i64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Posts a tagged receive from any source, with the lowest 4 bits of the tag ignored.
pub(super) fn recv(
    context: &SharedRx,
    tag: u64,
    bytes: &mut [u8],
    number: usize,
) -> Result<(), FiErrno> {
    let (list, any) = (iov(bytes), FiAddr(u64::MAX));
    let local = LocalIov::single(&list, &Desc::NULL);
    // SAFETY: the buffer lives until the completion.
    unsafe { context.recv(any, Some((tag, 0xf)), local, number, None) }
}

/// Posts an untagged multi-receive buffer.
fn recv_multi(context: &SharedRx, bytes: &mut [u8], number: usize) {
    let (list, any) = (iov(bytes), FiAddr(u64::MAX));
    let local = LocalIov::single(&list, &Desc::NULL);
    let flags = Some(Flags::MULTI_RECV);
    // SAFETY: the buffer lives until the completions.
    unsafe { context.recv(any, None, local, number, flags) }.unwrap();
}

/// The next entry: the context, and the error.
fn entry(end: &End) -> Option<(usize, Option<FiErrno>)> {
    let mut found = None;
    let mut take = |completion: &Completion| found = Some((completion.context, None));
    match end.cq.read(1, &mut take) {
        Ok(_) => found,
        Err(FiErrno::EAVAIL) => {
            let error = end.cq.read_error().unwrap();
            Some((error.completion.context, Some(error.err)))
        }
        Err(error) => {
            assert_eq!(error, FiErrno::EAGAIN);
            None
        }
    }
}

pub(super) fn wait_entry(end: &End) -> (usize, Option<FiErrno>) {
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(entry) = entry(end) {
            return entry;
        }
        assert!(Instant::now() < limit, "no entry");
    }
}

/// The next entry: the error, and whether it reports the release of a multi-receive buffer.
fn wait_released(end: &End) -> (Option<FiErrno>, bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        let mut flags = Flags::empty();
        let mut take = |completion: &Completion| flags = completion.flags;
        let read = end.cq.read(1, &mut take);
        match read {
            Ok(_) => return (None, flags.contains(Flags::MULTI_RECV)),
            Err(FiErrno::EAVAIL) => {
                let error = end.cq.read_error().unwrap();
                let released = error.completion.flags.contains(Flags::MULTI_RECV);
                return (Some(error.err), released);
            }
            Err(error) => assert_eq!(error, FiErrno::EAGAIN),
        }
        assert!(Instant::now() < limit, "no entry");
    }
}

/// Polls two endpoints until the context has stored so many messages.
fn wait_stored(from: &End, member: &End, count: usize) {
    let limit = Instant::now() + Duration::from_secs(20);
    while member.state(|state| state.io.rx.stored_in_context()) != count {
        let _ = (from.poll(), member.poll());
        assert!(Instant::now() < limit, "no message");
    }
}

/// Two messages in one buffer have arrived at two endpoints. The entry that is read last reports
/// the release of the buffer, whichever message was the first one.
#[test]
fn a_multi_receive_buffer_is_released_by_the_entry_that_is_read_last() {
    let domain = domain();
    // the length of the buffer and of the second message, and whether the receive is cancelled
    for (size, len, cancelled) in [(200, 60, false), (200, 300, false), (1000, 60, true)] {
        for later_first in [true, false] {
            let (mut buffer, bytes) = (vec![0; size], vec![1; len]);
            let context = context(&domain, 16);
            context.set_min_multi_recv(100);
            let [first, second] = members(&domain, &context);
            let (a, b) = (End::open(&domain), End::open(&domain));
            let (to_first, to_second) = (a.knows(&first), b.knows(&second));
            b.send(to_second, None, &[2; 60], 0);
            wait_stored(&b, &second, 1);
            a.send(to_first, None, &bytes, 0);
            wait_stored(&a, &first, 2);
            recv_multi(&context, &mut buffer, 7);
            if cancelled {
                assert_eq!(context.cancel(7), Ok(()));
            }
            let error = (len > size).then_some(FiErrno::ETRUNC);
            let (ends, errors) = match later_first {
                true => ([&first, &second], [error, None]),
                false => ([&second, &first], [None, error]),
            };
            assert_eq!(wait_released(ends[0]), (errors[0], false));
            assert_eq!(entry(ends[0]), None);
            assert_eq!(wait_released(ends[1]), (errors[1], !cancelled));
            if cancelled {
                assert_eq!(wait_released(ends[1]), (Some(FiErrno::ECANCELED), true));
            }
            assert_eq!((entry(ends[0]), entry(ends[1])), (None, None));
            assert_eq!(buffer[..60], [2; 60]);
            assert_eq!(buffer[60..120], [1; 60]);
        }
    }
}

/// Connects two pairs of endpoints; the second ones are members of the context.
pub(super) fn connect(context: &SharedRx, pairs: [(&End, FiAddr, &End); 2]) {
    for (from, to, member) in pairs {
        let mut byte = [0; 1];
        recv(context, 0x90, &mut byte, 1).unwrap();
        from.send(to, Some(0x90), &[1], 0);
        let limit = Instant::now() + Duration::from_secs(20);
        let (mut sent, mut received) = (0, 0);
        while (sent, received) != (1, 1) {
            sent += usize::from(from.poll().is_some());
            received += usize::from(member.poll().is_some());
            assert!(Instant::now() < limit, "{sent} {received}");
        }
    }
}

/// A message of two buffers, which has no source that could be read, begins to arrive.
pub(super) fn begin_long(from: &End, to: FiAddr, member: &End, bytes: &[u8], arrivals: usize) {
    let half = bytes.len() / 2;
    let list = [iov(&bytes[..half]), iov(&bytes[half..])];
    let local = LocalIov::borrowed(&list, &[Desc::NULL; 2]);
    // SAFETY: the buffer lives until the end of the test.
    unsafe { from.ep.send(to, Some(0x55), local, None, 5, None) }.unwrap();
    let begin = Instant::now();
    while member.state(|state| state.io.rx.arrivals.len()) != arrivals {
        assert_eq!(member.poll(), None);
        assert!(begin.elapsed() < Duration::from_secs(20), "no message");
    }
}

fn iov(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// The first message of a receive is arriving in parts when its endpoint closes. The receive gets
/// the next message that it matches, at the other endpoint; `early`: this one is stored already.
fn closes_during_a_message(early: bool) {
    let domain = domain();
    let context = context(&domain, 16);
    let [first, second] = members(&domain, &context);
    let (a, b) = (End::open(&domain), End::open(&domain));
    let (to_first, to_second) = (a.knows(&first), b.knows(&second));
    let mut target = vec![0; 30_000];
    connect(&context, [(&a, to_first, &first), (&b, to_second, &second)]);
    recv(&context, 0x50, &mut target, 7).unwrap();
    let (long, short) = (vec![3; 10_000], [4; 100]);
    begin_long(&a, to_first, &first, &long, 1);
    if early {
        b.send(to_second, Some(0x5a), &short, 6);
        for _ in 0..100 {
            assert_eq!(second.poll(), None);
        }
    }
    drop(first);
    if !early {
        b.send(to_second, Some(0x5a), &short, 6);
    }
    let found = wait_for(&second, 1);
    assert_eq!(
        (found[0].context, found[0].len, found[0].tag),
        (7, 100, 0x5a)
    );
    assert_eq!(target[..100], short);
    // its place in the context is free again
    for number in 0..16 {
        recv(&context, 0x70, &mut [0; 0], number).unwrap();
    }
}

#[test]
fn a_receive_survives_the_endpoint_of_its_message() {
    closes_during_a_message(false);
}

#[test]
fn a_receive_that_survives_its_endpoint_gets_a_stored_message() {
    closes_during_a_message(true);
}

/// The session of a message has ended while its sender writes to the receive, and the endpoint
/// closes. The receive is posted again when the sender does not write any more. If it is stopped,
/// the receive ends after 5 s, and its registration stays, because its end would take as long
/// again.
#[test]
fn a_receive_survives_a_sender_that_writes_to_it() {
    for ends in [true, false] {
        let domain = domain();
        let context = context(&domain, 16);
        let [first, second] = members(&domain, &context);
        let (a, b) = (End::open(&domain), End::open(&domain));
        let (to_first, to_second) = (a.knows(&first), b.knows(&second));
        let mut target = vec![0; 30_000];
        connect(&context, [(&a, to_first, &first), (&b, to_second, &second)]);
        recv(&context, 0x50, &mut target, 7).unwrap();
        let (long, short) = (vec![3; 10_000], [4; 100]);
        begin_long(&a, to_first, &first, &long, 1);
        let used = Arc::new(AtomicBool::new(true));
        first.ep.shared().apply_event(|_, io| {
            let key = io.rx.arrivals.keys_where(|_| true)[0];
            let sink = Sink::Ends(Withdrawn::of_test(&used));
            io.rx.arrivals.get_mut(key).unwrap().push = Some(Push { offset: 0, sink });
            io.fail_arrival(key, true);
        });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                used.store(!ends, Ordering::Relaxed);
            });
            let begin = Instant::now();
            drop(first);
            assert!(begin.elapsed() < Duration::from_secs(8), "{ends}");
        });
        b.send(to_second, Some(0x5a), &short, 6);
        let expected = if ends { None } else { Some(FiErrno::ECANCELED) };
        assert_eq!(wait_entry(&second), (7, expected));
        assert_eq!(target[..100] == short, ends);
        // one that is dropped would be waited for
        assert_eq!(Arc::strong_count(&used), if ends { 1 } else { 2 });
    }
}

#[test]
fn a_receive_that_survives_its_endpoint_keeps_its_place() {
    let long = vec![3; 10_000];
    let mut targets = [(); 5].map(|()| vec![0; 10_000]);
    let domain = domain();
    let context = context(&domain, 16);
    let [first, second] = members(&domain, &context);
    let (a, b) = (End::open(&domain), End::open(&domain));
    let (to_first, to_second) = (a.knows(&first), b.knows(&second));
    connect(&context, [(&a, to_first, &first), (&b, to_second, &second)]);
    for (number, target) in targets.iter_mut().enumerate() {
        recv(&context, 0x50, target, 10 + number).unwrap();
    }
    // the messages of the first two arrive; a third receive is taken by a message at the other one
    begin_long(&a, to_first, &first, &long, 1);
    begin_long(&a, to_first, &first, &long, 2);
    b.send(to_second, Some(0x50), &[0], 0);
    assert_eq!(wait_entry(&second), (12, None));
    assert_eq!(context.cancel(11), Err(FiErrno::ENOENT), "it has a message");
    drop(first);
    // the cancelled one has no message any more
    assert_eq!(wait_entry(&second), (11, Some(FiErrno::ECANCELED)));
    for (number, context) in [(1, 10), (2, 13), (3, 14)] {
        b.send(to_second, Some(0x50), &[number; 20], 0);
        assert_eq!(wait_entry(&second), (context, None));
        assert_eq!(targets[context - 10][..20], [number; 20]);
    }
}

#[test]
fn the_next_endpoint_reports_what_was_cancelled_without_one() {
    let domain = domain();
    let context = context(&domain, 16);
    recv(&context, 0x50, &mut [], 3).unwrap();
    assert_eq!(context.cancel(3), Ok(()));
    assert_eq!(context.cancel(3), Err(FiErrno::ENOENT));
    let av = AddressVector::open(4).unwrap();
    let first = member(&domain, &context, &av);
    assert_eq!(entry(&first), Some((3, Some(FiErrno::ECANCELED))));
    recv(&context, 0x50, &mut [], 4).unwrap();
    drop(first);
    assert_eq!(context.cancel(4), Ok(()));
    let second = member(&domain, &context, &av);
    assert_eq!(entry(&second), Some((4, Some(FiErrno::ECANCELED))));
    assert_eq!(entry(&second), None);
}

/// The endpoint that was enabled first only sends, and has no queue of receives.
#[test]
fn an_endpoint_with_a_queue_of_receives_reports_what_has_no_endpoint() {
    let domain = domain();
    let context = context(&domain, 16);
    let av = AddressVector::open(4).unwrap();
    let sends = sender(&domain, &context, &av);
    recv(&context, 0x50, &mut [], 3).unwrap();
    assert_eq!(context.cancel(3), Ok(()));
    assert_eq!(peek(&context, 0x50, 4), Err(FiErrno::EOPBADSTATE));
    let second = member(&domain, &context, &av);
    assert_eq!(entry(&second), Some((3, Some(FiErrno::ECANCELED))));
    recv(&context, 0x50, &mut [], 5).unwrap();
    assert_eq!(context.cancel(5), Ok(()));
    assert_eq!(entry(&second), Some((5, Some(FiErrno::ECANCELED))));
    assert_eq!(peek(&context, 0x50, 6), Ok(()));
    assert_eq!(entry(&second), Some((6, Some(FiErrno::ENOMSG))));
    assert_eq!((entry(&sends), entry(&second)), (None, None));
}

/// Calls of a context do not return the error of one of its endpoints. After a panic its state is
/// not used: another one reports.
#[test]
fn the_other_endpoints_of_a_context_outlive_one_that_fails() {
    let domain = domain();
    for failure in [FiErrno::EOVERRUN, FiErrno::EOTHER] {
        let mut target = [0; 8];
        let context = context(&domain, 2);
        let [first, second] = members(&domain, &context);
        let (a, b) = (End::open(&domain), End::open(&domain));
        let (to_first, to_second) = (a.knows(&first), b.knows(&second));
        for tag in [0x50, 0x60, 0x70] {
            a.send(to_first, Some(tag), &[1; 8], 0);
        }
        wait_stored(&a, &first, 3);
        b.send(to_second, Some(0x60), &[2; 8], 0);
        wait_stored(&b, &second, 4);
        first.ep.shared().fail(failure);
        let panicked = failure == FiErrno::EOTHER;
        let reporter = if panicked { &second } else { &first };
        // the stored message of the failed endpoint is complete
        recv(&context, 0x50, &mut target, 3).unwrap();
        if panicked {
            assert_eq!(context.cancel(3), Ok(()));
            assert_eq!(entry(reporter), Some((3, Some(FiErrno::ECANCELED))));
        } else {
            assert_eq!(entry(reporter), Some((3, None)));
        }
        assert_eq!(peek(&context, 0x60, 4), Ok(()));
        assert_eq!(entry(reporter), Some((4, None)));
        assert_eq!(peek(&context, 0x80, 5), Ok(()));
        assert_eq!(entry(reporter), Some((5, Some(FiErrno::ENOMSG))));
        // a full context polls
        for number in [6, 7] {
            recv(&context, 0x90, &mut target, number).unwrap();
        }
        assert_eq!(recv(&context, 0x90, &mut [], 8), Err(FiErrno::EAGAIN));
        b.send(to_second, Some(0x90), &[3; 8], 0);
        assert_eq!(wait_entry(&second), (6, None));
        assert_eq!(target, [3; 8]);
        assert_eq!(context.cancel(7), Ok(()));
        assert_eq!(entry(reporter), Some((7, Some(FiErrno::ECANCELED))));
        let mut ignore = |_: &Completion| {};
        assert_eq!(first.cq.read(1, &mut ignore), Err(failure));
        // no endpoint is left that could serve the context
        second.ep.shared().fail(failure);
        assert_eq!(peek(&context, 0x80, 9), Err(failure));
    }
}

/// An endpoint of a context that has no queue of receives.
fn sender(domain: &Arc<Domain>, context: &Arc<SharedRx>, av: &Arc<AddressVector>) -> End {
    let config = EndpointConfig {
        shared_rx: true,
        needs_rx: false,
        ..config()
    };
    let ep = Endpoint::new(domain, config).unwrap();
    let cq = queue(domain, 0);
    ep.bind_vector(av).unwrap();
    ep.bind_shared_rx(context).unwrap();
    ep.bind_cq(&cq, BindFlags::TRANSMIT).unwrap();
    ep.enable().unwrap();
    End {
        ep,
        cq,
        av: Arc::clone(av),
    }
}

/// As [`recv`], of no bytes, with `FI_PEEK`.
fn peek(context: &SharedRx, tag: u64, number: usize) -> Result<(), FiErrno> {
    let (list, any) = (iov(&[]), FiAddr(u64::MAX));
    let local = LocalIov::single(&list, &Desc::NULL);
    let flags = Some(Flags::PEEK);
    // SAFETY: a peek uses no buffer.
    unsafe { context.recv(any, Some((tag, 0xf)), local, number, flags) }
}

/// Each receive that is posted while endpoints close has one entry: that of a message, or of its
/// cancel.
#[test]
fn no_receive_is_lost_while_endpoints_close() {
    const ROUNDS: usize = 40;
    const SIZE: usize = 4096;
    let domain = domain();
    let context = context(&domain, SIZE);
    let av = AddressVector::open(4).unwrap();
    let stays = member(&domain, &context, &av);
    for round in 0..ROUNDS {
        let closes = member(&domain, &context, &av);
        let a = End::open(&domain);
        let to = a.knows(&closes);
        // as many as the first window permits are stored
        for _ in 0..60 {
            a.send(to, Some(0x50), &[], 0);
        }
        let begin = Instant::now();
        while closes.state(|state| state.io.rx.stored_in_context()) < 60 {
            let _ = (a.poll(), closes.poll());
            assert!(begin.elapsed() < Duration::from_secs(20));
        }
        let (posted, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) && posted.load(Ordering::Relaxed) < 2000 {
                    let number = posted.load(Ordering::Relaxed);
                    if recv(&context, 0x50, &mut [], number).is_ok() {
                        posted.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            // the close begins at another moment in each round
            while posted.load(Ordering::Relaxed) < round % 20 * 2 {}
            closes.ep.close();
            stop.store(true, Ordering::Relaxed);
        });
        let posted = posted.into_inner();
        let mut seen = vec![0; posted];
        while let Some((number, error)) = entry(&closes) {
            assert_eq!(error, None);
            seen[number] += 1;
        }
        for (number, seen) in seen.iter_mut().enumerate() {
            if context.cancel(number).is_ok() {
                assert_eq!(wait_entry(&stays), (number, Some(FiErrno::ECANCELED)));
                *seen += 1;
            }
        }
        assert!(seen.iter().all(|seen| *seen == 1), "{round}: {seen:?}");
        assert_eq!(entry(&stays), None);
    }
}

/// A post that frees the credit of a sender reports it, though no thread makes progress at the
/// sender's endpoint.
#[test]
fn a_post_reports_the_credit_that_it_frees() {
    let mut target = vec![0; 1000];
    let domain = domain();
    let context = context(&domain, 1024);
    let [first, second] = members(&domain, &context);
    let (a, b) = (End::open(&domain), End::open(&domain));
    let (to_first, to_second) = (a.knows(&first), b.knows(&second));
    connect(&context, [(&a, to_first, &first), (&b, to_second, &second)]);
    // the messages behind the window wait for credit, and are not announced
    first.state(|state| state.core.pool.take_reserve());
    let mut sent = 0;
    let mut idle = 0;
    while idle < 1000 {
        let count = sent;
        if a.ep.shared().lock().as_ref().unwrap().io.outstanding() < 60 {
            a.send(to_first, Some(0x50), &[7; 1000], 0);
            sent += 1;
        }
        let _ = (a.poll(), first.poll());
        idle = if sent == count { idle + 1 } else { 0 };
    }
    // nothing polls at `first` from here on
    let before = a.state(|state| state.io.outstanding());
    for number in 0..500 {
        recv(&context, 0x50, &mut target, number).unwrap();
    }
    assert!(!first.state(|state| state.core.has_reports()));
    let begin = Instant::now();
    while a.state(|state| state.io.outstanding()) >= before {
        a.poll();
        assert!(begin.elapsed() < Duration::from_secs(20), "no credit");
    }
}
