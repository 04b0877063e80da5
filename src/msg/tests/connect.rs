//! Connections: establishing, refusing and ending them.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::atomic::Ordering;

use super::*;
use crate::msg::LengthOption;
use crate::queue::Counter;
use crate::queue::slots::{Failures, Slot};
use crate::verbs::{AsyncEvent, AsyncListener as _};
use crate::wire::cm_data::MAX_CM_DATA;

#[test]
fn a_device_is_listed_with_its_addresses() {
    let device = device();
    let addresses = device.addresses();
    assert!(!addresses.is_empty());
    assert!(device.has_address(addresses[0].addr.ip()));
    assert!(!device.has_address("192.0.2.1".parse().unwrap()));
    assert!(device.port(1).unwrap().active);
    assert!(device.port(77).is_err());
    assert!(device.attr().max_qp_wr > 0);
}

#[test]
fn two_ends_know_each_other_and_part() {
    let (client, server) = connected(false, |_| {});
    assert_eq!(
        client.ep.peer_addr().unwrap().ip(),
        server.ep.local_addr().unwrap().ip()
    );
    assert_eq!(
        client.ep.local_addr().unwrap(),
        server.ep.peer_addr().unwrap()
    );
    client.ep.shutdown().unwrap();
    assert_eq!(client.ep.shutdown(), Err(FiErrno::ENOTCONN));
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(SERVER)));
    let soon = Some(Duration::from_millis(50));
    let again = server
        .eq
        .sread(false, soon, |event| Ok(format!("{event:?}")));
    assert_eq!(again, Err(FiErrno::EAGAIN), "told twice");
    let buffer = Buffer::all(&client.domain, 8);
    assert_eq!(client.send(&buffer, 8, 0), Err(FiErrno::ESHUTDOWN));
}

#[test]
fn closing_one_end_is_told_to_the_other() {
    let (client, server) = connected(false, |_| {});
    let posted = Buffer::all(&server.domain, 8);
    server.recv(&posted, 8, 77).unwrap();
    drop(client);
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(SERVER)));
    // the receive was flushed before the event was written
    let mut nothing = |_: &Completion| panic!("completed");
    assert_eq!(server.cq.read(1, &mut nothing), Err(FiErrno::EAVAIL));
    let error = server.cq.read_error().unwrap();
    assert_eq!(
        (error.completion.context, error.err),
        (77, FiErrno::ECANCELED)
    );
    assert_eq!(error.completion.flags, Flags::RECV | Flags::MSG);
    assert!(!server.cq.strerror(error.prov_errno).is_empty());
}

/// The peer has disconnected because its device has refused a request, and the answer of the device
/// comes later than that. In ERR the device of this side would ignore it.
#[test]
fn requests_are_answered_before_a_disconnected_queue_pair_is_in_error() {
    for (limit, answers) in [(LIMIT, true), (Duration::from_millis(600), false)] {
        let (client, server) = connected(false, |_| {});
        let shared = &client.ep.shared;
        shared.answer.set(limit).unwrap();
        let request = shared.slots.tx.push(Slot::default());
        let begin = Instant::now();
        server.ep.shutdown().unwrap();
        std::thread::scope(|scope| {
            let end = scope.spawn(|| next_event(&client.eq));
            if answers {
                std::thread::sleep(LIMIT / 50);
                assert!(!end.is_finished(), "before the answer");
                shared.slots.tx.complete(request).unwrap();
            }
            assert_eq!(end.join().unwrap(), Ok(Told::Shutdown(CLIENT)));
        });
        assert!(begin.elapsed() >= limit || answers, "before the limit");
        assert!(begin.elapsed() < LIMIT, "after the answer");
        let _ = shared.slots.tx.complete(request);
    }
    // the last wait was in vain, so a further connection that ends soon does not wait
    let (client, server) = connected(false, |_| {});
    client.ep.shared.answer.set(LIMIT).unwrap();
    let request = client.ep.shared.slots.tx.push(Slot::default());
    let begin = Instant::now();
    server.ep.shutdown().unwrap();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    assert!(begin.elapsed() < LIMIT);
    let _ = client.ep.shared.slots.tx.complete(request);
}

/// A device can report that it has refused a request before it answers it, and answers nothing when
/// its queue pair is in ERR.
#[test]
fn a_queue_pair_is_not_moved_to_err_before_its_device_has_answered() {
    for ends in [
        (|side: &Side| drop(next_event(&side.eq))) as fn(&Side),
        |side| side.ep.close(),
    ] {
        for answers in [true, false] {
            let (_client, server) = connected(false, |_| {});
            let shared = &server.ep.shared;
            let qp = shared.control.lock().qp.clone().unwrap();
            shared.async_event(AsyncEvent::QpError);
            std::thread::scope(|scope| {
                let end = scope.spawn(|| ends(&server));
                std::thread::sleep(Duration::from_millis(20));
                assert!(!end.is_finished(), "before the answer");
                assert_eq!(qp.is_in_error(), Ok(false), "before the answer");
                if answers {
                    qp.set_error().unwrap();
                }
                end.join().unwrap();
            });
            assert_eq!(qp.is_in_error(), Ok(true));
        }
    }
}

#[test]
fn a_name_that_was_given_is_known_before_the_connection() {
    let device = device();
    let domain = Domain::open(&device, DomainConfig::default()).unwrap();
    for xrc in [false, true] {
        let config = EndpointConfig {
            xrc,
            shared_rx: xrc,
            ..config(CLIENT)
        };
        let ep = Endpoint::open(&domain, config.clone()).unwrap();
        assert_eq!(ep.local_addr(), Err(FiErrno::EOPBADSTATE));
        let mut name = address(&device);
        ep.set_name(name).unwrap();
        let given = ep.local_addr().unwrap();
        assert_eq!(given.ip(), name.ip());
        assert_ne!(given.port(), 0);
        ep.set_name(name).unwrap();
        assert_eq!(ep.local_addr(), Ok(given), "it has a port");
        let other = Endpoint::open(&domain, config.clone()).unwrap();
        assert_eq!(other.set_name(given), Err(FiErrno::EADDRINUSE));
        assert_eq!(other.local_addr(), Err(FiErrno::EOPBADSTATE));
        other.set_name(name).unwrap();
        name = other.local_addr().unwrap();
        other.close();
        ep.set_name(name).unwrap();
        assert_eq!(ep.local_addr(), Ok(name));
        // the earlier address is free, and stays free of what has failed
        let other = Endpoint::open(&domain, config).unwrap();
        other.set_name(given).unwrap();
        let foreign = "203.0.113.1:0".parse().unwrap();
        for ep in [&ep, &other] {
            assert_eq!(ep.set_name(foreign), Err(FiErrno::EADDRNOTAVAIL));
        }
        assert_eq!((ep.local_addr(), other.local_addr()), (Ok(name), Ok(given)));
        // the wildcard address of the same port, and back
        let wildcard = match name {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        for ip in [wildcard, name.ip()] {
            ep.set_name(SocketAddr::new(ip, 0)).unwrap();
            assert_eq!(ep.local_addr(), Ok(SocketAddr::new(ip, name.port())));
        }
        ep.close();
        other.set_name(name).unwrap();
        assert_eq!(ep.local_addr(), Err(FiErrno::EOPBADSTATE));
    }
}

/// The kernel can destroy the queue pairs of a device that is removed: nothing is flushed.
#[test]
fn requests_of_a_device_that_was_removed_are_reported() {
    for removed in [true, false] {
        let (client, server) = connected(false, |_| {});
        let shared = &client.ep.shared;
        for (ring, context) in [(&shared.slots.rx, 7), (&shared.slots.tx, 8)] {
            ring.push(Slot {
                context,
                signaled: true,
                visible: true,
                failures: Failures::All,
                ..Slot::default()
            });
        }
        shared.removed.store(removed, Ordering::Relaxed);
        server.ep.shutdown().unwrap();
        assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
        if removed {
            let errors = [0; 2].map(|_| client.completion().unwrap_err());
            let contexts = errors.map(|error| (error.completion.context, error.err));
            assert_eq!(contexts, [(8, FiErrno::ECANCELED), (7, FiErrno::ECANCELED)]);
        }
        // a device that stays may still flush them
        assert_eq!(shared.slots.rx.outstanding(), u32::from(!removed));
        super::transfer::no_completion(&client);
    }
}

#[test]
fn closing_flushes_to_a_queue_that_stays() {
    let (client, server) = connected(false, |_| {});
    let posted = Buffer::all(&client.domain, 8);
    for context in 0..3 {
        client.recv(&posted, 8, context).unwrap();
    }
    client.ep.close();
    client.ep.close();
    for context in 0..3 {
        let error = client.completion().unwrap_err();
        assert_eq!(
            (error.completion.context, error.err),
            (context, FiErrno::ECANCELED)
        );
    }
    assert_eq!(client.recv(&posted, 8, 0), Err(FiErrno::EOPBADSTATE));
    assert_eq!(client.ep.enable(), Err(FiErrno::EOPBADSTATE));
    drop(server);
}

#[test]
fn a_request_is_rejected_with_data() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let client = Side::new(&device, config(CLIENT), false);
    client.ep.connect(Some(addr), &[7; CM_DATA_SIZE]).unwrap();
    let request = pump(&client, || {
        eq.read(false, |event| match event {
            Event::ConnReq { request, data, .. } => {
                assert_eq!(data.data(), [7; CM_DATA_SIZE]);
                Ok(request.take())
            }
            other => panic!("{other:?}"),
        })
        .ok()
    });
    let request = request.unwrap();
    assert_eq!(request.device().unwrap().name(), device.name());
    assert_eq!(request.local_addr().unwrap(), addr);
    PassiveEndpoint::reject(request, b"go away").unwrap();
    let error = next_error(&client.eq);
    assert_eq!((error.owner, error.err), (CLIENT, FiErrno::ECONNREFUSED));
    assert_eq!(error.cm_data.data(), b"go away");
    assert_eq!(client.ep.peer_addr(), Err(FiErrno::ENOTCONN));
}

/// No introduction follows the data of a rejection.
#[test]
fn a_rejection_has_room_for_more_data_than_a_request() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    for (data, arrives) in [
        (&[7; MAX_CM_DATA][..], true),
        (&[7; MAX_CM_DATA + 1], false),
    ] {
        let client = Side::new(&device, config(CLIENT), false);
        client.ep.connect(Some(addr), b"hello").unwrap();
        let request = pump(&client, || {
            let taken = eq.read(false, |event| match event {
                Event::ConnReq { request, .. } => Ok(request.take()),
                other => panic!("{other:?}"),
            });
            taken.ok()
        });
        let rejected = PassiveEndpoint::reject(request.unwrap(), data);
        assert_eq!(rejected.is_ok(), arrives);
        let error = next_error(&client.eq);
        assert_eq!(error.err, FiErrno::ECONNREFUSED);
        assert_eq!(error.cm_data.data(), if arrives { data } else { b"" });
    }
}

#[test]
fn a_dropped_request_is_rejected() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let client = Side::new(&device, config(CLIENT), false);
    client.ep.connect(Some(addr), b"").unwrap();
    // the event is consumed without taking the request out
    pump(&client, || eq.read(false, |_| Ok(())).ok());
    let error = next_error(&client.eq);
    assert_eq!(error.err, FiErrno::ECONNREFUSED);
    assert_eq!(error.cm_data.data(), b"");
}

#[test]
fn an_endpoint_that_never_accepts_rejects() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let client = Side::new(&device, config(CLIENT), false);
    client.ep.connect(Some(addr), b"").unwrap();
    let request = pump(&client, || {
        eq.read(false, |event| match event {
            Event::ConnReq { request, .. } => Ok(request.take()),
            other => panic!("{other:?}"),
        })
        .ok()
    });
    drop(Side::accepting(&device, request.unwrap(), config(SERVER)));
    assert_eq!(next_error(&client.eq).err, FiErrno::ECONNREFUSED);
}

#[test]
fn nobody_listens() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (pep, addr) = listener(&device, &eq);
    drop(pep);
    let client = Side::new(&device, config(CLIENT), false);
    client.ep.connect(Some(addr), b"").unwrap();
    let error = next_error(&client.eq);
    assert_eq!((error.owner, error.err), (CLIENT, FiErrno::ECONNREFUSED));
}

#[test]
fn a_port_is_taken_once() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (pep, addr) = listener(&device, &eq);
    let second = PepConfig {
        addr: Some(addr),
        ..PepConfig::default()
    };
    // depending on the connection manager, binding or listening is refused
    let refused = PassiveEndpoint::open(&device, second).and_then(|second| {
        second.bind_eq(&eq)?;
        second.listen()
    });
    assert_eq!(refused, Err(FiErrno::EADDRINUSE));
    assert_eq!(pep.listen(), Err(FiErrno::EOPBADSTATE));
    assert_eq!(pep.set_name(addr), Err(FiErrno::EOPBADSTATE));
    assert_eq!(pep.bind_eq(&eq), Err(FiErrno::EINVAL));
    drop(pep);
    let third = PepConfig {
        addr: Some(addr),
        ..PepConfig::default()
    };
    assert_eq!(
        PassiveEndpoint::open(&device, third).unwrap().local_addr(),
        Ok(addr)
    );
}

#[test]
fn a_listener_without_a_queue_does_not_listen() {
    let device = device();
    let pep = PassiveEndpoint::open(&device, PepConfig::default()).unwrap();
    assert_eq!(pep.listen(), Err(FiErrno::ENOEQ));
    pep.set_name(address(&device)).unwrap();
    assert_eq!(pep.local_addr().unwrap().ip(), address(&device).ip());
    pep.close();
    assert_eq!(pep.local_addr(), Err(FiErrno::EOPBADSTATE));
}

#[test]
fn endpoints_take_their_domains_event_queue() {
    let device = device();
    let domain = Domain::open(&device, DomainConfig::default()).unwrap();
    let [of_domain, own] = [(); 2].map(|()| EventQueue::open(EqConfig::default()).unwrap());
    domain.bind_eq(&of_domain).unwrap();
    assert_eq!(domain.bind_eq(&own), Err(FiErrno::EINVAL));
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (nobody, addr) = listener(&device, &eq);
    drop(nobody);
    for (token, bound, hears) in [(CLIENT, None, &of_domain), (SERVER, Some(&own), &own)] {
        let ep = Endpoint::open(&domain, config(token)).unwrap();
        // a call that fails binds none
        assert_eq!(ep.enable(), Err(FiErrno::ENOCQ));
        if let Some(eq) = bound {
            ep.bind_eq(eq).unwrap();
        }
        let cq = open_cq(&domain);
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
            .unwrap();
        ep.connect(Some(addr), b"").unwrap();
        assert_eq!(ep.bind_eq(&own), Err(FiErrno::EINVAL), "it has one");
        let error = next_error(hears);
        assert_eq!((error.owner, error.err), (token, FiErrno::ECONNREFUSED));
    }
    drop(of_domain);
    let ep = Endpoint::open(&domain, config(CLIENT)).unwrap();
    assert_eq!(
        ep.enable(),
        Err(FiErrno::ENOEQ),
        "the domain keeps no queue alive"
    );
}

#[test]
fn what_must_be_bound_is_asked_for() {
    let device = device();
    let domain = Domain::open(&device, DomainConfig::default()).unwrap();
    let ep = Endpoint::open(&domain, config(CLIENT)).unwrap();
    assert_eq!(ep.enable(), Err(FiErrno::ENOEQ));
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    ep.bind_eq(&eq).unwrap();
    assert_eq!(ep.bind_eq(&eq), Err(FiErrno::EINVAL));
    assert_eq!(ep.enable(), Err(FiErrno::ENOCQ));
    // Counters are not sufficient: fi_endpoint(3) requires a completion queue for errors, "even if
    // the endpoint is configured to suppress successful completions".
    let counter = Counter::open(domain.queues(), WaitKind::None).unwrap();
    let kinds = Flags::SEND | Flags::RECV | Flags::READ | Flags::WRITE;
    ep.bind_counter(&counter, kinds).unwrap();
    assert_eq!(ep.enable(), Err(FiErrno::ENOCQ));
    let cq = open_cq(&domain);
    assert_eq!(
        ep.bind_cq(&cq, BindFlags::SELECTIVE_COMPLETION),
        Err(FiErrno::EINVAL)
    );
    ep.bind_cq(&cq, BindFlags::TRANSMIT).unwrap();
    assert_eq!(ep.bind_cq(&cq, BindFlags::TRANSMIT), Err(FiErrno::EINVAL));
    assert_eq!(ep.enable(), Err(FiErrno::ENOCQ));
    let foreign = open_cq(&Domain::open(&device, DomainConfig::default()).unwrap());
    assert_eq!(ep.bind_cq(&foreign, BindFlags::RECV), Err(FiErrno::EDOMAIN));
    ep.bind_cq(&cq, BindFlags::RECV).unwrap();
    assert_eq!(ep.local_addr(), Err(FiErrno::EOPBADSTATE));
    ep.enable().unwrap();
    ep.enable().unwrap();
    assert_eq!(ep.bind_cq(&cq, BindFlags::RECV), Err(FiErrno::EOPBADSTATE));
}

#[test]
fn posting_at_the_wrong_time_is_refused() {
    let device = device();
    let side = Side::new(&device, config(CLIENT), false);
    let buffer = Buffer::all(&side.domain, 8);
    assert_eq!(side.send(&buffer, 8, 0), Err(FiErrno::EOPBADSTATE));
    assert_eq!(side.recv(&buffer, 8, 0), Err(FiErrno::EOPBADSTATE));
    side.ep.enable().unwrap();
    assert_eq!(side.send(&buffer, 8, 0), Err(FiErrno::ENOTCONN));
    assert_eq!(side.ep.shutdown(), Err(FiErrno::ENOTCONN));
    assert_eq!(side.ep.accept(b""), Err(FiErrno::EOPBADSTATE));
    assert_eq!(side.ep.connect(None, b""), Err(FiErrno::EINVAL));
    let long = [0; CM_DATA_SIZE + 1];
    assert_eq!(
        side.ep.connect(Some(address(&device)), &long),
        Err(FiErrno::EINVAL)
    );
    // a receive that was never posted to a queue pair is flushed
    side.recv(&buffer, 8, 5).unwrap();
    side.ep.close();
    assert_eq!(side.completion().unwrap_err().completion.context, 5);
}

#[test]
fn a_connect_without_an_address_does_not_enable() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let client = Side::new(&device, config(CLIENT), false);
    assert_eq!(client.ep.connect(None, b"hello"), Err(FiErrno::EINVAL));
    let mut name = address(&device);
    name.set_port(0);
    client.ep.set_name(name).unwrap();
    client.ep.set_length(LengthOption::InjectMsg, 8).unwrap();
    client.ep.connect(Some(addr), b"hello").unwrap();
    let _server = accept(&device, &client, &eq);
    assert!(matches!(next_event(&client.eq), Ok(Told::Connected(..))));
}

#[test]
fn an_address_of_another_host_is_refused() {
    let device = device();
    let mut config = config(CLIENT);
    config.src = Some("192.0.2.1:0".parse().unwrap());
    let side = Side::new(&device, config, false);
    let refused = side.ep.enable().unwrap_err();
    assert!(
        matches!(refused, FiErrno::EADDRNOTAVAIL | FiErrno::ENODEV),
        "{refused:?}"
    );
}

#[test]
fn the_listener_goes_while_a_request_waits() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (pep, addr) = listener(&device, &eq);
    let client = Side::new(&device, config(CLIENT), false);
    client.ep.connect(Some(addr), b"hello").unwrap();
    pump(&client, || eq.read(true, |_| Ok(())).ok());
    drop(pep);
    assert_eq!(
        eq.read(false, |_| Ok(())),
        Err(FiErrno::EAGAIN),
        "its events are forgotten"
    );
    assert_eq!(next_error(&client.eq).err, FiErrno::ECONNREFUSED);
}

#[test]
fn connections_come_and_go() {
    for _ in 0..20 {
        let (client, server) = connected(false, |_| {});
        drop(server);
        assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    }
}

#[test]
fn everything_else_may_be_dropped_before_the_endpoint() {
    let (client, server) = connected(false, |_| {});
    let Side { domain, eq, cq, ep } = client;
    drop(domain);
    drop(eq);
    drop(cq);
    drop(ep);
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(SERVER)));
}

/// A thread that reads a request and one that closes the passive endpoint are not ordered: all that
/// the reader uses of the passive endpoint belongs to the request.
#[test]
fn a_request_owns_the_template_of_its_passive_endpoint() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let template: crate::conn::Template = Arc::new(String::from("seed"));
    let freed = Arc::downgrade(&template);
    let with_template = PepConfig {
        addr: Some(address(&device)),
        token: PEP,
        template: Some(template),
        ..PepConfig::default()
    };
    let pep = PassiveEndpoint::open(&device, with_template).unwrap();
    pep.bind_eq(&eq).unwrap();
    pep.listen().unwrap();
    let client = Side::new(&device, config(CLIENT), false);
    client
        .ep
        .connect(Some(pep.local_addr().unwrap()), b"")
        .unwrap();
    let request = pump(&client, || {
        eq.read(false, |event| match event {
            Event::ConnReq { request, .. } => Ok(request.take().unwrap()),
            other => panic!("{other:?}"),
        })
        .ok()
    });
    pep.close();
    drop(pep);
    let of_request = request.template().unwrap();
    assert_eq!(of_request.downcast_ref(), Some(&String::from("seed")));
    drop((of_request, request));
    assert!(freed.upgrade().is_none(), "nothing else owns it");
}

/// The descriptor of a queue stays readable until the events of the connection manager are taken.
#[test]
fn a_reader_takes_events_of_the_connection_manager_during_a_peek() {
    let device = device();
    let eq = EventQueue::open(EqConfig { wait: WaitKind::Fd }).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let clients = [(); 2].map(|()| Side::new(&device, config(CLIENT), false));
    clients[0].ep.connect(Some(addr), b"").unwrap();
    let peek = |event: &mut Event| match event {
        Event::ConnReq { id, request, .. } => Ok((*id, request.take())),
        other => panic!("{other:?}"),
    };
    let (id, request) = pump(&clients[0], || eq.read(true, peek).ok());
    clients[1].ep.connect(Some(addr), b"").unwrap();
    // its request has arrived, and makes the descriptor readable
    let begin = Instant::now();
    let limit = Duration::from_millis(200);
    pump(&clients[1], || (begin.elapsed() > limit).then_some(()));
    let nothing = eq.sread(false, Some(limit), |_| Ok(()));
    assert_eq!(nothing, Err(FiErrno::EAGAIN));
    let mut fd = libc::pollfd {
        fd: eq.fd().unwrap(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid structure.
    assert_eq!(unsafe { libc::poll(&raw mut fd, 1, 0) }, 0, "readers spin");
    eq.end_peek(id, None).unwrap();
    eq.read(false, |_| Ok(())).unwrap();
    drop(request);
}
