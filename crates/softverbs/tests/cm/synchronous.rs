//! Ids without a channel of the application, whose calls wait for their events.

use super::refuse::{Rule, refuse_by};
use super::repeats::with_descriptors;
use super::*;

/// An id without a channel.
fn synchronous() -> Id {
    Channel(std::ptr::null_mut()).id()
}

/// The result of a call, which must return within [`PATIENCE`].
fn returned(id: Id, call: impl FnOnce(Id) -> i32 + Send + 'static) -> i32 {
    let (send, receive) = std::sync::mpsc::channel();
    let caller = std::thread::spawn(move || {
        let id = id;
        // fails only after the test has failed
        let _ = send.send(call(id));
    });
    let result = receive.recv_timeout(PATIENCE).expect("the call waits");
    caller.join().unwrap();
    result
}

/// The kind of the event that a call has left in the id.
fn last(id: Id) -> rdma_cm_event_type {
    read(id.c().event).kind
}

#[test]
fn a_disconnection_that_has_no_event_does_not_wait() {
    if skip_on_hardware("the library waits for an event that never comes") {
        return;
    }
    let (mut second, to) = server(&on_device(0), "quiet");
    let connected = || {
        let id = synchronous();
        assert_eq!(id.resolve(None, to), 0);
        assert_eq!(id.resolve_route(), 0);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"hello")), 0);
        id
    };
    // the application has got the event of the peer's disconnection itself
    let ended_by_peer = |second: &mut Second| {
        let id = connected();
        let events = Channel(id.c().channel);
        second.tell("disconnect");
        events.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
        (id, events)
    };
    // this side disconnects, several times
    let id = connected();
    for kind in [
        RDMA_CM_EVENT_DISCONNECTED,
        RDMA_CM_EVENT_TIMEWAIT_EXIT,
        RDMA_CM_EVENT_TIMEWAIT_EXIT,
    ] {
        assert_eq!(returned(id, Id::disconnect), 0);
        assert_eq!(last(id), kind);
        assert_eq!(id.qp_state(), IBV_QPS_ERR);
    }
    id.destroy();
    // the peer has disconnected, and the application has got both events itself
    let (id, events) = ended_by_peer(&mut second);
    events.expect_timewait();
    assert_eq!(returned(id, Id::disconnect), 0);
    assert_eq!(last(id), RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(id.qp_state(), IBV_QPS_ERR);
    id.destroy();
    // or one of them
    let (id, _) = ended_by_peer(&mut second);
    for _ in 0..2 {
        assert_eq!(returned(id, Id::disconnect), 0);
        assert_eq!(last(id), RDMA_CM_EVENT_TIMEWAIT_EXIT);
    }
    id.destroy();
    second.finish();
}

#[test]
fn an_attempt_that_has_failed_is_disconnected_at_once() {
    if skip_on_hardware("the library waits for an event that never comes") {
        return;
    }
    let (second, to) = server(&on_device(0), "reject");
    let id = synchronous();
    assert_eq!(id.resolve(None, to), 0);
    assert_eq!(id.resolve_route(), 0);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"hello")), libc::ECONNREFUSED);
    assert_eq!(returned(id, Id::disconnect), 0);
    assert_eq!(last(id), RDMA_CM_EVENT_REJECTED);
    assert_eq!(id.qp_state(), IBV_QPS_ERR);
    id.destroy();
    second.finish();
}

/// A request that is not answered, and one to a datagram service, which has no connection.
#[test]
fn a_request_is_disconnected_at_once() {
    if skip_on_hardware("the library waits for an event that never comes") {
        return;
    }
    for space in [RDMA_PS_TCP, RDMA_PS_UDP] {
        let listener = Channel(std::ptr::null_mut()).id_in(space);
        assert_eq!(listener.bind(&on_device(0)), 0);
        assert_eq!(listener.listen(4), 0);
        let to = listener.source().unwrap();
        let channel = Channel::new();
        let id = channel.route(channel.id_in(space), to);
        assert_eq!(id.connect(&mut param(b"")), 0);
        let passive = Channel(listener.c().channel).next().id;
        if space == RDMA_PS_UDP {
            assert_eq!(returned(passive, |id| id.accept(&mut param(b""))), 0);
            channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
        }
        assert_eq!(returned(passive, Id::disconnect), 0);
        assert!(passive.c().event.is_null());
        for id in [passive, id, listener] {
            id.destroy();
        }
        channel.destroy();
    }
}

type Call = fn(Id) -> i32;

/// A call that is refused has begun nothing that it could wait for.
#[test]
fn refused_calls_do_not_wait() {
    if skip_on_hardware("the library follows pointers that are not there yet") {
        return;
    }
    let (listener, to) = synchronous().listening();
    let refused = |id: Id, but: &[&str]| {
        let calls: [(&str, Call); 6] = [
            ("resolve_route", Id::resolve_route),
            ("connect", |id| id.connect(&mut param(b""))),
            ("accept", |id| id.accept(&mut param(b""))),
            ("reject", |id| id.reject(b"")),
            ("disconnect", Id::disconnect),
            ("listen", |id| id.listen(1)),
        ];
        for (name, call) in calls {
            if !but.contains(&name) {
                assert_eq!(returned(id, call), libc::EINVAL, "{name}");
            }
        }
    };
    refused(listener, &[]);
    let id = synchronous();
    refused(id, &["listen"]);
    assert_eq!(id.bind(&on_device(0)), 0);
    refused(id, &["listen"]);
    assert_eq!(id.resolve(None, to), 0);
    refused(id, &["resolve_route"]);
    assert_eq!(returned(id, move |id| id.resolve(None, to)), libc::EINVAL);
    assert_eq!(id.resolve_route(), 0);
    refused(id, &["connect"]);
    id.destroy();
    listener.destroy();
    // a second attempt
    let (second, to) = server(&on_device(0), "quiet");
    let id = synchronous();
    assert_eq!(id.resolve(None, to), 0);
    assert_eq!(id.resolve_route(), 0);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"")), 0);
    refused(id, &["disconnect"]);
    assert_eq!(last(id), RDMA_CM_EVENT_ESTABLISHED);
    id.destroy();
    second.finish();
}

/// A process that has sent a request.
fn dialler(to: SocketAddr) -> Second {
    let dialler = Second::start("dial", &[("CM_TO", &to.to_string()), ("CM_SAY", "1")]);
    dialler.expect("connecting");
    dialler
}

/// Accepts a request whose id has no channel of the application.
fn accept_and_wait(id: Id) {
    assert_eq!(id.create_qp(), 0);
    assert_eq!(returned(id, |id| id.accept(&mut param(b""))), 0);
    assert_eq!(last(id), RDMA_CM_EVENT_ESTABLISHED);
}

#[test]
fn a_listener_that_loses_its_channel_keeps_its_requests() {
    if skip_on_hardware("the kernel loses a request that waits while its listener moves") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    // one request has been read, one is queued, one is in the socket
    let two = [dialler(to), dialler(to)];
    let first = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    let third = dialler(to);
    assert_eq!(listener.migrate(Channel(std::ptr::null_mut())), 0);
    assert!(!channel.readable(Duration::ZERO));
    assert_eq!(first.c().channel, channel.0);
    let own = Channel(listener.c().channel);
    let waiting = [(); 2].map(|()| own.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id);
    for id in waiting {
        assert!(![own.0, channel.0].contains(&id.c().channel));
    }
    listener.destroy();
    waiting.into_iter().for_each(accept_and_wait);
    assert_eq!(first.create_qp(), 0);
    assert_eq!(first.accept(&mut param(b"")), 0);
    channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    for dialler in two.into_iter().chain([third]) {
        dialler.expect("ESTABLISHED 0 data ");
        dialler.finish();
    }
    waiting.into_iter().for_each(Id::destroy);
    first.destroy();
    channel.destroy();
}

#[test]
fn a_listener_does_not_lose_its_channel_without_one_for_each_request() {
    if skip_on_hardware("the kernel loses a request that waits while its listener moves") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let two = [dialler(to), dialler(to)];
    let first = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    // the channel of the listener, and not that of the second request
    let none = Channel(std::ptr::null_mut());
    let moved = with_descriptors(2, || listener.migrate(none));
    assert_eq!((moved, listener.c().channel), (libc::EMFILE, channel.0));
    let second = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    for id in [first, second] {
        assert_eq!(id.c().channel, channel.0);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.accept(&mut param(b"")), 0);
        channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    }
    for dialler in two {
        dialler.expect("ESTABLISHED 0 data ");
        dialler.finish();
    }
    for id in [first, second, listener] {
        id.destroy();
    }
    channel.destroy();
}

#[test]
fn a_listener_that_gets_a_channel_keeps_its_requests() {
    if skip_on_hardware("the kernel loses a request that waits while its listener moves") {
        return;
    }
    let (listener, to) = synchronous().listening();
    let two = [dialler(to), dialler(to)];
    let own = Channel(listener.c().channel);
    let first = own.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    let third = dialler(to);
    let before = open_descriptors();
    let channel = Channel::new();
    assert_eq!(listener.migrate(own), libc::EINVAL);
    assert_eq!(listener.migrate(channel), 0);
    // those of the listener's channel, and of the channel of the request that was queued
    assert_eq!(open_descriptors(), before + 2 - 4);
    let moved = [(); 2].map(|()| channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id);
    for id in moved {
        assert_eq!(id.c().channel, channel.0);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(returned(id, |id| id.accept(&mut param(b""))), 0);
        assert!(id.c().event.is_null());
        assert_eq!(channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0).id, id);
        id.destroy();
    }
    accept_and_wait(first);
    for dialler in two.into_iter().chain([third]) {
        dialler.expect("ESTABLISHED 0 data ");
        dialler.finish();
    }
    first.destroy();
    listener.destroy();
    channel.destroy();
}

/// Refuses to this thread that a descriptor is added to an epoll set, as the kernel does when the
/// user has reached its limit.
fn refuse_watching() {
    refuse_by(&[Rule {
        call: libc::SYS_epoll_ctl,
        argument: Some((1, libc::EPOLL_CTL_ADD.cast_unsigned())),
        errno: libc::ENOSPC,
    }]);
}

/// The id of a request gets a channel of its own. If its socket cannot be watched there, the
/// request ends: neither side would notice any more what the other one does.
#[test]
fn a_request_that_cannot_be_watched_ends() {
    if skip_on_hardware("the kernel watches ids itself") {
        return;
    }
    let (listener, to) = synchronous().listening();
    let channel = Channel::new();
    let active = [(); 2].map(|()| {
        let id = channel.routed(to);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"hello")), 0);
        id
    });
    let events = Channel(listener.c().channel);
    // the call that returns the first request has received both
    let first = events.next().id;
    let second = std::thread::spawn(move || {
        refuse_watching();
        events.next().id
    });
    let second = second.join().unwrap();
    channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    let own = Channel(second.c().channel);
    assert_eq!(own.expect(RDMA_CM_EVENT_REJECTED, GAVE_UP).id, second);
    assert_ne!(returned(second, |id| id.accept(&mut param(b""))), 0);
    for id in [first, second, listener].into_iter().chain(active) {
        id.destroy();
    }
}
