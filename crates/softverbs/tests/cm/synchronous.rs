//! Ids without a channel of the application, whose calls wait for their events.

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
    let id = connected();
    let events = Channel(id.c().channel);
    second.tell("disconnect");
    events.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
    events.expect_timewait();
    assert_eq!(returned(id, Id::disconnect), 0);
    assert_eq!(last(id), RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(id.qp_state(), IBV_QPS_ERR);
    id.destroy();
    // or one of them
    let id = connected();
    let events = Channel(id.c().channel);
    second.tell("disconnect");
    events.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
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
