//! Shared receive contexts.

use super::*;
use crate::queue::Counter;

const SIZE: usize = 8;

fn open(domain: &Arc<Domain>) -> Arc<SharedRx> {
    let config = SharedRxConfig {
        size: SIZE,
        iov_limit: 2,
        op_flags: Flags::empty(),
        xrc: false,
    };
    SharedRx::open(domain, config).expect("a shared receive context")
}

fn sharing(token: Token) -> EndpointConfig {
    let mut config = config(token);
    config.shared_rx = true;
    config
}

fn post(srx: &SharedRx, buffer: &Buffer, piece: usize, context: usize) -> Result<()> {
    let (iov, desc) = buffer.part(piece * 64, 64);
    // SAFETY: tests keep their buffers until the context is gone.
    unsafe { srx.recv(LocalIov::single(&iov, &desc), context) }
}

/// `count` connections: clients of their own, servers of one domain that share `srx`, prepared by
/// `prepare` before they are enabled.
fn connections(
    count: usize,
    selective: bool,
    prepare: impl Fn(&Side),
) -> (Vec<Side>, Vec<Side>, Arc<SharedRx>) {
    connections_in(DomainConfig::default(), count, selective, prepare)
}

/// As [`connections`], with servers in a domain with this configuration.
fn connections_in(
    kind: DomainConfig,
    count: usize,
    selective: bool,
    prepare: impl Fn(&Side),
) -> (Vec<Side>, Vec<Side>, Arc<SharedRx>) {
    connections_on(&device(), kind, count, selective, prepare)
}

/// As [`connections_in`], on a device.
fn connections_on(
    device: &Arc<Device>,
    kind: DomainConfig,
    count: usize,
    selective: bool,
    prepare: impl Fn(&Side),
) -> (Vec<Side>, Vec<Side>, Arc<SharedRx>) {
    let domain = Domain::open(device, kind).unwrap();
    let srx = open(&domain);
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(device, &eq);
    let mut sides = (Vec::new(), Vec::new());
    for _ in 0..count {
        let client = Side::new(device, config(CLIENT), false);
        client.ep.connect(Some(addr), b"hello").unwrap();
        let request = pump(&client, || {
            eq.read(false, |event| match event {
                Event::ConnReq { request, .. } => Ok(request.take()),
                other => panic!("{other:?}"),
            })
            .ok()
            .flatten()
        });
        let ep = Endpoint::from_request(&domain, sharing(SERVER), request);
        let ep = ep.map_err(|(error, _)| error).unwrap();
        let server = Side::bound_as(Arc::clone(&domain), ep, false, selective);
        prepare(&server);
        server.ep.bind_shared_rx(&srx).unwrap();
        server.ep.accept(b"").unwrap();
        assert!(matches!(
            next_event(&client.eq),
            Ok(Told::Connected(CLIENT, _))
        ));
        assert!(matches!(
            next_event(&server.eq),
            Ok(Told::Connected(SERVER, _))
        ));
        sides.0.push(client);
        sides.1.push(server);
    }
    (sides.0, sides.1, srx)
}

#[test]
fn receives_go_to_whichever_endpoint_a_message_comes_to() {
    let (clients, servers, srx) = connections(3, false, |_| {});
    let target = Buffer::all(&servers[0].domain, SIZE * 64);
    let mut source = Buffer::all(&clients[0].domain, 64);
    let mut sources: Vec<_> = clients
        .iter()
        .map(|client| Buffer::all(&client.domain, 64))
        .collect();
    source.fill(1);
    // more rounds than slots, so that each slot is reused; out of order, because each endpoint has
    // its own completion queue
    for round in 0..4 * SIZE {
        let first = round % 3;
        for i in 0..3 {
            post(&srx, &target, i, round * 3 + i).unwrap();
        }
        for i in [first, (first + 2) % 3, (first + 1) % 3] {
            sources[i].fill((round * 3 + i) as u8);
            let length = 10 + i;
            clients[i].send(&sources[i], length, 0).unwrap();
            clients[i].completion().unwrap();
        }
        let mut contexts = Vec::new();
        for i in 0..3 {
            let got = servers[i].completion().unwrap();
            assert_eq!(got.len, 10 + i, "the message of another endpoint");
            assert_eq!(got.flags, Flags::RECV | Flags::MSG);
            let piece = got.context - round * 3;
            let landed = &target.memory[piece * 64..][..10 + i];
            assert_eq!(landed, &sources[i].memory[..10 + i]);
            contexts.push(piece);
        }
        contexts.sort_unstable();
        assert_eq!(contexts, [0, 1, 2]);
    }
}

#[test]
fn as_many_as_its_size_can_be_posted_and_an_endpoint_that_goes_takes_none_along() {
    let (mut clients, mut servers, srx) = connections(2, false, |_| {});
    let target = Buffer::all(&servers[0].domain, SIZE * 64);
    for piece in 0..SIZE {
        post(&srx, &target, piece, piece).unwrap();
    }
    assert_eq!(post(&srx, &target, 0, 99), Err(FiErrno::EAGAIN));
    // the completion queue of the closed endpoint has one unread message
    let source = Buffer::all(&clients[0].domain, 64);
    clients[0].send(&source, 8, 0).unwrap();
    clients[0].completion().unwrap();
    let gone = servers.remove(0);
    gone.ep.close();
    assert_eq!(gone.completion().unwrap().len, 8);
    let (client, server) = (clients.remove(1), servers.remove(0));
    let source = Buffer::all(&client.domain, 64);
    for _ in 1..SIZE {
        client.send(&source, 9, 0).unwrap();
        client.completion().unwrap();
        assert_eq!(server.completion().unwrap().len, 9);
    }
    for piece in 0..SIZE {
        post(&srx, &target, piece, piece).unwrap();
    }
    assert_eq!(post(&srx, &target, 0, 99), Err(FiErrno::EAGAIN));
    assert_eq!(server.recv(&target, 8, 0), Err(FiErrno::EOPNOTSUPP));
}

#[test]
fn counters_and_selective_completion_are_the_endpoint_s() {
    let counters = std::cell::RefCell::new(Vec::new());
    let (clients, servers, srx) = connections(2, true, |side| {
        let counter = Counter::open(side.domain.queues(), WaitKind::Unspec).unwrap();
        side.ep.bind_counter(&counter, Flags::RECV).unwrap();
        counters.borrow_mut().push(counter);
    });
    let counters = counters.into_inner();
    let target = Buffer::all(&servers[0].domain, SIZE * 64);
    let source = Buffer::all(&clients[0].domain, 64);
    for context in 0..3 {
        post(&srx, &target, context, context).unwrap();
    }
    for _ in 0..3 {
        clients[0].send(&source, 8, 0).unwrap();
    }
    assert_eq!(counters[0].wait(3, Some(LIMIT)), Ok(()));
    assert_eq!(counters[1].read(), 0);
    let mut nothing = |c: &Completion| panic!("{c:?}");
    assert_eq!(
        servers[0].cq.read(1, &mut nothing),
        Err(FiErrno::EAGAIN),
        "not selected"
    );
    let (iov, desc) = target.part(0, 64);
    // SAFETY: the buffer outlives the context.
    unsafe { srx.recv_msg(LocalIov::single(&iov, &desc), 7, Flags::COMPLETION) }.unwrap();
    let source = Buffer::all(&clients[1].domain, 64);
    clients[1].send(&source, 8, 0).unwrap();
    assert_eq!(servers[1].completion().unwrap().context, 7);
    assert_eq!((counters[0].read(), counters[1].read()), (3, 1));
}

/// Without `FI_MR_LOCAL` each receive has its own registration, and reusing a slot closes the old
/// one.
#[test]
fn buffers_that_nobody_registered_are_received_into() {
    let kind = DomainConfig {
        mr: MrConfig {
            form: Form::new(Mode::NATIVE, true),
            local: LocalMemory::Each,
            ..MrConfig::default()
        },
        ..DomainConfig::default()
    };
    let (clients, servers, srx) = connections_in(kind, 1, false, |_| {});
    let mut source = Buffer::all(&clients[0].domain, 64);
    let memory = vec![0_u8; SIZE * 64];
    for context in 0..3 * SIZE {
        let iov = libc::iovec {
            iov_base: memory[context % SIZE * 64..].as_ptr().cast_mut().cast(),
            iov_len: 64,
        };
        source.fill(context as u8);
        // SAFETY: the memory outlives the context.
        unsafe { srx.recv(LocalIov::single(&iov, &Desc::NULL), context) }.unwrap();
        clients[0].send(&source, 64, 0).unwrap();
        assert_eq!(servers[0].completion().unwrap().context, context);
        assert_eq!(memory[context % SIZE * 64..][..64], source.memory);
    }
}

/// A buffer at NULL has 0 bytes.
#[test]
fn a_receive_without_memory_takes_a_message_without_data_only() {
    let (clients, servers, srx) = connections(1, false, |_| {});
    let iov = libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 1024,
    };
    let source = Buffer::all(&clients[0].domain, 64);
    for context in 0..2 {
        // SAFETY: there is no buffer.
        unsafe { srx.recv(LocalIov::single(&iov, &Desc::NULL), context) }.unwrap();
    }
    clients[0].send(&source, 0, 0).unwrap();
    assert_eq!(servers[0].completion().unwrap().len, 0);
    clients[0].send(&source, 1, 0).unwrap();
    let error = servers[0].completion().unwrap_err();
    assert_eq!((error.completion.context, error.err), (1, FiErrno::ETRUNC));
}

/// A message that is too long for the receive ends its connection, and no other.
#[test]
fn a_message_that_is_too_long_is_an_error_of_one_endpoint() {
    let (clients, servers, srx) = connections(2, false, |_| {});
    let target = Buffer::all(&servers[0].domain, SIZE * 64);
    for piece in 0..2 {
        post(&srx, &target, piece, piece).unwrap();
    }
    let source = Buffer::all(&clients[0].domain, 65);
    clients[0].send(&source, 65, 0).unwrap();
    assert!(clients[0].completion().is_err());
    let error = servers[0].completion().unwrap_err();
    assert_eq!((error.completion.context, error.err), (0, FiErrno::ETRUNC));
    assert_eq!(next_event(&servers[0].eq), Ok(Told::Shutdown(SERVER)));
    let source = Buffer::all(&clients[1].domain, 64);
    clients[1].send(&source, 64, 0).unwrap();
    assert_eq!(servers[1].completion().unwrap().context, 1);
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let device = device();
    let own = Side::new(&device, config(CLIENT), false);
    let srx = open(&own.domain);
    assert_eq!(own.ep.bind_shared_rx(&srx), Err(FiErrno::EINVAL));
    let side = Side::new_in(Arc::clone(&own.domain), sharing(CLIENT), false);
    assert_eq!(side.ep.enable(), Err(FiErrno::EOPBADSTATE), "none is bound");
    let other = Domain::open(&device, DomainConfig::default()).unwrap();
    let foreign = open(&other);
    assert_eq!(side.ep.bind_shared_rx(&foreign), Err(FiErrno::EDOMAIN));
    assert_eq!(side.ep.bind_shared_rx(&srx), Ok(()));
    assert_eq!(side.ep.bind_shared_rx(&srx), Err(FiErrno::EINVAL));
    let attr = device.attr();
    for (size, iov_limit) in [(0, 1), (1, 0), (attr.max_srq_wr + 1, 1), (1, 1000)] {
        let config = SharedRxConfig {
            size,
            iov_limit,
            op_flags: Flags::empty(),
            xrc: false,
        };
        let opened = SharedRx::open(&own.domain, config);
        assert_eq!(opened.err(), Some(FiErrno::EINVAL), "{config:?}");
    }
    let buffer = Buffer::all(&own.domain, 64);
    let pieces = [buffer.part(0, 8), buffer.part(8, 8), buffer.part(16, 8)];
    let (iov, desc): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
    // SAFETY: the arrays and the buffer outlive the calls.
    unsafe {
        let local = LocalIov::from_raw(iov.as_ptr(), desc.as_ptr().cast(), 3).unwrap();
        assert_eq!(srx.recv(local, 0), Err(FiErrno::EINVAL));
        let local = LocalIov::single(&iov[0], &desc[0]);
        let bad = srx.recv_msg(local, 0, Flags::FENCE);
        assert_eq!(bad, Err(FiErrno::EBADFLAGS));
    }
}

/// Replaced registrations end with their receives, although the last slots that become free are
/// used first.
#[test]
fn receives_keep_replaced_registrations() {
    use crate::mr::Mode;
    let form = super::keys::kind(Mode::LOCAL | Mode::ALLOCATED | Mode::MMU_NOTIFY);
    let (clients, servers, srx) = connections_in(form, 1, false, |_| {});
    let target = Buffer::with_key(&servers[0].domain, 64, Access::all(), 1);
    let mut source = Buffer::all(&clients[0].domain, 64);
    for round in 0..SIZE {
        post(&srx, &target, 0, round).unwrap();
        target.region.refresh(&[]).unwrap();
    }
    assert_eq!(target.region.registrations(), SIZE + 1);
    let mut receive = |seed: usize| {
        source.fill(seed as u8);
        clients[0].send(&source, 64, 1).unwrap();
        clients[0].completion().unwrap();
        servers[0].completion().unwrap();
        assert_eq!(target.memory, source.memory);
    };
    for round in 0..SIZE {
        receive(round);
    }
    for round in 0..SIZE {
        post(&srx, &target, 0, round).unwrap();
        receive(round);
    }
    assert_eq!(target.region.registrations(), 1);
}

/// A device may report the last receive after the queue pair is in its error state, and write the
/// completion of a receive that a message has taken before.
#[test]
fn a_close_awaits_the_last_receive_of_the_queue_pair() {
    use crate::verbs::replaced::{LAST_RECEIVES, with_late_last_receives};
    use std::sync::atomic::Ordering;

    let device = devices(&[with_late_last_receives()], false).remove(0);
    let kind = DomainConfig::default();
    let (clients, servers, srx) = connections_on(&device, kind, 2, false, |_| {});
    let target = Buffer::all(&servers[0].domain, SIZE * 64);
    post(&srx, &target, 0, 7).unwrap();
    for (number, server) in (1..).zip(&servers) {
        server.ep.close();
        assert_eq!(LAST_RECEIVES.load(Ordering::Relaxed), number);
    }
    drop(clients);
}

/// After a burst of receives, the registrations of their buffers end although the later receives,
/// one at a time, use one slot.
#[test]
fn registrations_of_a_burst_of_receives_end() {
    let target = vec![0_u8; SIZE * 64];
    for local in [LocalMemory::Each, LocalMemory::Cached] {
        let kind = DomainConfig {
            mr: MrConfig {
                form: Form::new(Mode::NATIVE, false),
                local,
                ..MrConfig::default()
            },
            ..DomainConfig::default()
        };
        let (clients, servers, srx) = connections_in(kind, 1, false, |_| {});
        let (client, server) = (&clients[0], &servers[0]);
        let source = Buffer::all(&client.domain, 64);
        let receive = |place: usize| {
            let iov = libc::iovec {
                iov_base: target[place * 64..].as_ptr().cast_mut().cast(),
                iov_len: 64,
            };
            // SAFETY: the memory outlives the context.
            unsafe { srx.recv(LocalIov::single(&iov, &Desc::NULL), place) }.unwrap();
        };
        let complete = |place: usize| {
            client.send(&source, 64, 0).unwrap();
            client.completion().unwrap();
            assert_eq!(server.completion().unwrap().context, place);
        };
        (0..SIZE).for_each(receive);
        assert_eq!(srx.registrations(), SIZE, "{local:?}");
        (0..SIZE).for_each(complete);
        for _ in 0..SIZE {
            receive(0);
            complete(0);
        }
        assert_eq!(srx.registrations(), 1, "{local:?}");
    }
}
