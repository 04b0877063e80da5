//! Event channels, threads, and the release of resources.

use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;

use super::*;

#[test]
fn the_descriptor_tells_when_there_is_an_event() {
    let channel = Channel::new();
    assert_eq!(channel.raw().unwrap_err(), libc::EAGAIN);
    assert!(!channel.readable(Duration::ZERO));
    let id = channel.id();
    assert_eq!(id.resolve(None, on_device(9).parse().unwrap()), 0);
    assert!(channel.readable(PATIENCE));
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    assert!(!channel.readable(Duration::ZERO));
    // the event of a destroyed id is dropped
    assert_eq!(id.resolve_route(), 0);
    assert!(channel.readable(PATIENCE));
    id.destroy();
    assert!(!channel.readable(Duration::ZERO));
    assert_eq!(channel.raw().unwrap_err(), libc::EAGAIN);
    // SAFETY: the channel's descriptor.
    let flags = unsafe { libc::fcntl(channel.fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    channel.destroy();
}

/// A program that calls `rdma_get_cm_event` when the descriptor is readable gets an event each time.
#[test]
fn a_connection_makes_its_channels_readable_for_events_only() {
    if skip_on_hardware("the last event comes seconds later there") {
        return;
    }
    let (near, far) = (Channel::new(), Channel::new());
    let expect = |channel: Channel, kind| {
        assert!(channel.readable(PATIENCE));
        let event = channel.raw().expect("an event");
        let said = read(event);
        // SAFETY: an event not acknowledged before.
        assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
        assert_eq!(said.kind, kind, "{} came", said.name());
        said.id
    };
    let (listener, to) = far.listener(&on_device(0), 8);
    for _ in 0..3 {
        let id = near.routed(to);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"")), 0);
        let passive = expect(far, RDMA_CM_EVENT_CONNECT_REQUEST);
        assert_eq!(passive.create_qp(), 0);
        assert_eq!(passive.accept(&mut param(b"")), 0);
        expect(near, RDMA_CM_EVENT_ESTABLISHED);
        expect(far, RDMA_CM_EVENT_ESTABLISHED);
        assert_eq!(id.disconnect(), 0);
        for channel in [near, far] {
            expect(channel, RDMA_CM_EVENT_DISCONNECTED);
            expect(channel, RDMA_CM_EVENT_TIMEWAIT_EXIT);
        }
        id.destroy();
        assert!(!far.readable(Duration::ZERO));
        passive.destroy();
        assert!(!near.readable(Duration::ZERO) && !far.readable(Duration::ZERO));
    }
    listener.destroy();
    near.destroy();
    far.destroy();
}

#[test]
fn a_blocking_channel_wakes_up() {
    let channel = Channel::new();
    // SAFETY: the channel's descriptor.
    assert_eq!(unsafe { libc::fcntl(channel.fd(), libc::F_SETFL, 0) }, 0);
    let id = channel.id();
    let waiter = std::thread::spawn(move || {
        let channel = channel;
        let event = channel.raw().unwrap();
        let kind = read(event).kind;
        // SAFETY: not acknowledged before.
        assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
        kind
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiter.is_finished());
    assert_eq!(id.resolve(None, on_device(9).parse().unwrap()), 0);
    assert_eq!(waiter.join().unwrap(), RDMA_CM_EVENT_ADDR_RESOLVED);
    id.destroy();
    channel.destroy();
}

#[test]
fn ids_move_among_channels_with_their_events() {
    let (first, other) = (Channel::new(), Channel::new());
    let (listener, to) = first.listener(&on_device(0), 8);
    // an unread event
    let id = first.id();
    assert_eq!(id.resolve(None, to), 0);
    assert!(first.readable(PATIENCE));
    assert_eq!(id.migrate(other), 0);
    assert!(!first.readable(Duration::ZERO));
    other.expect(RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    assert_eq!(id.c().channel, other.0);
    assert_eq!(id.resolve_route(), 0);
    other.expect(RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"move")), 0);
    // a listener with a request whose event was not read
    assert!(first.readable(PATIENCE));
    if skip_on_hardware("the kernel loses a request that waits while its listener moves") {
        return;
    }
    assert_eq!(listener.migrate(other), 0);
    assert!(!first.readable(Duration::ZERO));
    let said = other.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.id.c().channel, other.0);
    // the request's id migrates to a channel of its own, as in servers with threads
    assert_eq!(said.id.migrate(first), 0);
    assert_eq!(said.id.create_qp(), 0);
    assert_eq!(said.id.accept(&mut param(b"")), 0);
    other.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    first.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    // so does an established connection
    assert_eq!(id.migrate(first), 0);
    assert_eq!(said.id.disconnect(), 0);
    both_ends(first);
    other.expect_silence();
    for id in [id, said.id, listener] {
        id.destroy();
    }
    first.destroy();
    other.destroy();
}

/// Moves the id in a thread, whose result is that of the call. The receiver gets a message when the
/// call has returned.
fn moving(id: Id, to: Channel) -> (JoinHandle<i32>, Receiver<()>) {
    let (send, receive) = std::sync::mpsc::channel();
    let mover = std::thread::spawn(move || {
        let (id, to) = (id, to);
        let moved = id.migrate(to);
        send.send(()).unwrap();
        moved
    });
    (mover, receive)
}

#[test]
fn moving_waits_for_acknowledgements() {
    let (first, other) = (Channel::new(), Channel::new());
    let id = first.id();
    assert_eq!(id.resolve(None, on_device(9).parse().unwrap()), 0);
    assert!(first.readable(PATIENCE));
    let event = first.raw().unwrap();
    let (mover, receive) = moving(id, other);
    assert!(
        receive.recv_timeout(Duration::from_millis(100)).is_err(),
        "it did not wait"
    );
    // SAFETY: not acknowledged before.
    assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
    receive.recv_timeout(PATIENCE).unwrap();
    assert_eq!(mover.join().unwrap(), 0);
    id.destroy();
    first.destroy();
    other.destroy();
}

#[test]
fn destroying_waits_for_acknowledgements() {
    let channel = Channel::new();
    let id = channel.id();
    assert_eq!(id.resolve(None, on_device(9).parse().unwrap()), 0);
    assert!(channel.readable(PATIENCE));
    let event = channel.raw().unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    let destroyer = std::thread::spawn(move || {
        let id = id;
        id.destroy();
        send.send(()).unwrap();
    });
    assert!(
        receive.recv_timeout(Duration::from_millis(100)).is_err(),
        "it did not wait"
    );
    // SAFETY: not acknowledged before.
    assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
    receive.recv_timeout(PATIENCE).unwrap();
    destroyer.join().unwrap();
    channel.destroy();
}

#[test]
fn threads_connect_at_the_same_time() {
    let (second, to) = server(&on_device(0), "quiet");
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                let channel = Channel::new();
                for _ in 0..25 {
                    let (id, _) = connected(channel, to);
                    id.destroy();
                }
                channel.destroy();
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    second.finish();
}

#[test]
fn one_channel_serves_several_threads() {
    let (second, to) = server(&on_device(0), "quiet");
    let channel = Channel::new();
    let ids: Vec<_> = (0..40)
        .map(|_| {
            let id = channel.id();
            assert_eq!(id.resolve(None, to), 0);
            id
        })
        .collect();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                let channel = channel;
                let mut established = 0;
                while let Some(said) = channel.next_within(Duration::from_millis(500)) {
                    assert_eq!(said.status, 0, "{}", said.name());
                    match said.kind {
                        RDMA_CM_EVENT_ADDR_RESOLVED => {
                            assert_eq!(said.id.resolve_route(), 0);
                        }
                        RDMA_CM_EVENT_ROUTE_RESOLVED => {
                            assert_eq!(said.id.create_qp(), 0);
                            assert_eq!(said.id.connect(&mut param(b"t")), 0);
                        }
                        RDMA_CM_EVENT_ESTABLISHED => established += 1,
                        _ => panic!("{}", said.name()),
                    }
                }
                established
            })
        })
        .collect();
    let established: usize = threads.into_iter().map(|t| t.join().unwrap()).sum();
    assert_eq!(established, ids.len());
    ids.into_iter().for_each(Id::destroy);
    channel.destroy();
    second.finish();
}

#[test]
fn two_hundred_connections_leave_nothing_behind() {
    if skip_on_hardware("it takes minutes in a virtual machine") {
        return;
    }
    // both sides are separate processes, so that each can count all of its descriptors
    let (mut server, to) = server(&on_device(0), "quiet");
    let to = to.to_string();
    let mut client = Second::start("dial_many", &[("CM_TO", &to)]);
    let count = |line: &str| line.split(' ').next().unwrap().parse::<usize>().unwrap();
    // The descriptors that the device opens once per peer exist after the first connection; the
    // server may not have opened all of them yet.
    client.expect("one");
    server.tell("descriptors");
    let before = server.line();
    client.tell("go");
    let line = client.line();
    let (first, last) = line.split_once(' ').unwrap();
    assert_eq!(first, last, "the client's descriptors");
    let until = Instant::now() + PATIENCE;
    loop {
        // the server may not have processed the last disconnection yet
        server.tell("descriptors");
        let now = server.line();
        if count(&now) <= count(&before) {
            break;
        }
        assert!(
            Instant::now() < until,
            "the server's descriptors: {before}, then {now}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    client.finish();
    server.finish();
}

#[test]
fn a_forked_child_connects_on_its_own() {
    if skip_on_hardware("fork needs ibv_fork_init there") {
        return;
    }
    let (second, to) = server(&on_device(0), "quiet");
    let forking = Second::start("fork", &[("CM_TO", &to.to_string())]);
    forking.expect("forked");
    second.finish();
}

/// As rdma_migrate_id(3) says: for the events of the channel that the id leaves. A thread may
/// already hold a later one, of the new channel.
#[test]
fn moving_does_not_wait_for_the_events_of_the_new_channel() {
    let acknowledge = |event| {
        // SAFETY: not acknowledged before.
        assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
    };
    let (first, other) = (Channel::new(), Channel::new());
    let id = first.id();
    assert_eq!(id.resolve(None, on_device(9).parse().unwrap()), 0);
    assert!(first.readable(PATIENCE));
    let earlier = first.raw().unwrap();
    assert_eq!(id.resolve_route(), 0);
    let (mover, receive) = moving(id, other);
    // the second event has moved, and the call waits for the first one
    assert!(other.readable(PATIENCE));
    let later = other.raw().unwrap();
    assert_eq!(read(later).kind, RDMA_CM_EVENT_ROUTE_RESOLVED);
    assert!(
        receive.recv_timeout(Duration::from_millis(100)).is_err(),
        "it did not wait"
    );
    acknowledge(earlier);
    receive.recv_timeout(PATIENCE).expect("it still waits");
    assert_eq!(mover.join().unwrap(), 0);
    acknowledge(later);
    id.destroy();
    first.destroy();
    other.destroy();
}

/// As a debugger or a shell does. `epoll_wait(2)` ends with EINTR then, without any handler.
#[test]
fn a_process_that_was_stopped_still_waits() {
    if skip_on_hardware("an event of the device may come") {
        return;
    }
    let mut second = Second::start("wait", &[]);
    second.expect("waiting");
    for _ in 0..3 {
        second.stop_and_continue();
        std::thread::sleep(Duration::from_millis(50));
    }
    second.tell("go");
    second.expect("ended: false false false");
    second.finish();
}
