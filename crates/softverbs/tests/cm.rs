//! The connection manager between two processes, and what one process can see of it.
#![allow(unsafe_code, reason = "drives a C interface")]

#[path = "cm/harness.rs"]
mod harness;
#[path = "cm/second.rs"]
mod second;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use harness::*;
use rdma_core_sys::*;

/// InfiniBand's reasons to reject.
const NOBODY_LISTENS: i32 = 8;
const CONSUMER: i32 = 28;
const GAVE_UP: i32 = 4;

fn server(on: &str, answer: &str) -> (Second, SocketAddr) {
    let second = Second::start("serve", &[("CM_BIND", on), ("CM_ANSWER", answer)]);
    let line = second.line();
    let address = line.strip_prefix("listening on ").unwrap().parse().unwrap();
    (second, address)
}

/// An established connection to `to`, and the event that said so.
fn connected(channel: Channel, to: SocketAddr) -> (Id, Said) {
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"hello")), 0);
    let said = channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    (id, said)
}

#[test]
#[ignore = "the other process of the tests here, started by them"]
fn second_process() {
    second::run();
}

#[test]
fn a_connection_over_ipv4() {
    let (second, to) = server(&on_device(0), "accept");
    let channel = Channel::new();
    let id = channel.routed(to);
    let c = id.c();
    assert!(!c.verbs.is_null());
    assert!(!c.pd.is_null());
    assert_eq!((c.port_num, c.route.num_paths), (1, 1));
    assert_eq!(id.destination(), Some(to));
    let from = id.source().unwrap();
    assert!(from.ip() == to.ip() && from.port() != 0);
    // SAFETY: a live id.
    let ports = unsafe {
        (
            (cm().rdma_get_src_port)(id.0),
            (cm().rdma_get_dst_port)(id.0),
        )
    };
    assert_eq!(ports, (from.port().to_be(), to.port().to_be()));

    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.qp_state(), IBV_QPS_INIT);
    assert_eq!(id.connect(&mut param(b"hello")), 0);
    let said = channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    assert_padded(&said.data, b"welcome", 196);
    assert_eq!(id.qp_state(), IBV_QPS_RTS);
    // The peer's depth is what this side answers, and the reverse.
    assert_eq!(
        (said.conn.responder_resources, said.conn.initiator_depth),
        (2, 3)
    );
    second.expect(&format!(
        "request hello 56 from {from} resources 2 depth 3 retry 6 rnr 5"
    ));
    second.expect("ESTABLISHED 0 qp 3");

    assert_eq!(id.disconnect(), 0);
    assert_eq!(id.qp_state(), IBV_QPS_ERR);
    channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
    channel.expect_timewait();
    second.expect("DISCONNECTED 0 qp 3");
    second.expect_timewait();
    // A second time is allowed, and says nothing.
    assert_eq!(id.disconnect(), 0);
    channel.expect_silence();
    id.destroy();
    channel.destroy();
    second.finish();
}

#[test]
fn a_connection_carries_messages() {
    let (second, to) = server(&on_device(0), "echo");
    let channel = Channel::new();
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    let (mut incoming, mut outgoing) = (Buffer::new(id, b""), Buffer::new(id, b"ping"));
    incoming.post_recv(id);
    assert_eq!(id.connect(&mut param(b"hello")), 0);
    channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    outgoing.post_send(id);
    let completion = wait_for_completion(id.c().recv_cq);
    assert_eq!(
        (completion.status, completion.byte_len),
        (IBV_WC_SUCCESS, 64)
    );
    assert_eq!(&incoming.bytes()[..9], b"ping back");
    assert_eq!(wait_for_completion(id.c().send_cq).status, IBV_WC_SUCCESS);
    // Disconnecting flushes what was posted.
    incoming.post_recv(id);
    assert_eq!(id.disconnect(), 0);
    assert_eq!(
        wait_for_completion(id.c().recv_cq).status,
        IBV_WC_WR_FLUSH_ERR
    );
    drop((incoming, outgoing));
    id.destroy();
    channel.destroy();
    second.finish();
}

#[test]
fn a_connection_over_ipv6_and_through_a_listener_of_both() {
    if skip_on_hardware("the loopback addresses are not its") {
        return;
    }
    let (second, to) = server("[::1]:0", "accept");
    let channel = Channel::new();
    let (id, _) = connected(channel, to);
    assert!(id.source().unwrap().is_ipv6());
    second.expect(&format!(
        "request hello 56 from {} resources 2 depth 3 retry 6 rnr 5",
        id.source().unwrap()
    ));
    id.destroy();
    second.finish();

    let (second, both) = server("[::]:0", "accept");
    for host in ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"] {
        let to = format!("{host}:{}", both.port()).parse().unwrap();
        let (id, _) = connected(channel, to);
        assert!(second.line().starts_with("request hello"));
        second.expect("ESTABLISHED 0 qp 3");
        id.destroy();
        second.expect("DISCONNECTED 0 qp 3");
        second.expect_timewait();
    }
    second.finish();
    channel.destroy();
}

#[test]
fn a_listener_of_ipv6_only_is_not_there_for_ipv4() {
    if skip_on_hardware("the port is somebody's, so the reason is 28") {
        return;
    }
    let channel = Channel::new();
    let listener = channel.id();
    assert_eq!(
        listener.set_option(RDMA_OPTION_ID_AFONLY, &1i32.to_ne_bytes()),
        0
    );
    assert_eq!(listener.bind("[::]:0"), 0);
    assert_eq!(listener.listen(4), 0);
    let port = listener.source().unwrap().port();
    let id = channel.routed(on_device(port).parse().unwrap());
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"")), 0);
    channel.expect(RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
    id.destroy();
    listener.destroy();
    channel.destroy();
}

#[test]
fn a_rejection_carries_data() {
    let (second, to) = server(&on_device(0), "reject");
    let channel = Channel::new();
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(&[9; 56])), 0);
    let said = channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    assert_padded(&said.data, b"not today", 148);
    assert_eq!(id.qp_state(), IBV_QPS_ERR);
    id.destroy();
    channel.destroy();
    second.finish();
}

#[test]
fn nobody_listens_and_nobody_is_there() {
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 1);
    listener.destroy();
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"")), 0);
    channel.expect(RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
    // That attempt is over, and so is the id.
    assert_eq!(id.connect(&mut param(b"")), libc::EINVAL);
    id.destroy();

    if skip_on_hardware("without a route the call itself fails") {
        return;
    }
    let id = channel.id();
    assert_eq!(id.resolve(None, "192.0.2.1:5".parse().unwrap()), 0);
    channel.expect(RDMA_CM_EVENT_ADDR_ERROR, -libc::ENETUNREACH);
    assert_eq!(id.resolve(None, on_device(5).parse().unwrap()), 0);
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    id.destroy();
    channel.destroy();
}

#[test]
fn a_listener_that_does_not_look_holds_a_backlog() {
    let second = Second::start(
        "serve",
        &[
            ("CM_BIND", &on_device(0)),
            ("CM_ANSWER", "accept"),
            ("CM_BACKLOG", "2"),
            ("CM_PAUSED", "1"),
        ],
    );
    let to: SocketAddr = second
        .line()
        .strip_prefix("listening on ")
        .unwrap()
        .parse()
        .unwrap();
    let channels: Vec<_> = (0..3).map(|_| Channel::new()).collect();
    let ids: Vec<_> = channels.iter().map(|channel| channel.routed(to)).collect();
    for id in &ids {
        assert_eq!(id.create_qp(), 0);
        let began = Instant::now();
        assert_eq!(id.connect(&mut param(b"x")), 0);
        assert!(
            began.elapsed() < Duration::from_secs(1),
            "connecting waited for the peer"
        );
    }
    channels[0].expect_silence();
    // One too many: it is told nothing, and tries again by itself.
    channels[2].expect_silence();
    let mut second = second;
    second.tell("go");
    channels[0].expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    channels[1].expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    channels[2].expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    ids.into_iter().for_each(Id::destroy);
    channels.into_iter().for_each(Channel::destroy);
    second.finish();
}

#[test]
fn a_server_that_is_killed() {
    let channel = Channel::new();
    let (mut second, to) = server(&on_device(0), "hold");
    let asked = channel.routed(to);
    assert_eq!(asked.create_qp(), 0);
    assert_eq!(asked.connect(&mut param(b"hello")), 0);
    assert!(second.line().starts_with("request hello"));
    channel.expect_silence();
    second.kill();
    channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    asked.destroy();

    let (mut second, to) = server(&on_device(0), "accept");
    let (id, _) = connected(channel, to);
    second.kill();
    channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
    channel.expect_timewait();
    id.destroy();
    // Its name has gone with it.
    let (listener, _) = channel.listener(&to.to_string(), 1);
    listener.destroy();
    channel.destroy();
}

#[test]
fn a_client_that_is_killed() {
    if skip_on_hardware("a listener does not hear of a request's end before it answers") {
        return;
    }
    let channel = Channel::new();
    let (listener, at) = channel.listener(&on_device(0), 8);
    let at = at.to_string();
    // Before the answer.
    let mut second = Second::start("dial", &[("CM_TO", &at), ("CM_DATA", "one")]);
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.listener, listener);
    second.kill();
    channel.expect(RDMA_CM_EVENT_REJECTED, GAVE_UP);
    assert_eq!(said.id.accept(&mut param(b"")), libc::EINVAL);
    said.id.destroy();
    // After the answer, which it never looks at.
    let mut second = Second::start(
        "dial",
        &[("CM_TO", &at), ("CM_DATA", "two"), ("CM_PAUSED", "1")],
    );
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.id.create_qp(), 0);
    assert_eq!(said.id.accept(&mut param(b"")), 0);
    channel.expect_silence();
    second.kill();
    channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    said.id.destroy();
    // Established.
    let mut second = Second::start("dial", &[("CM_TO", &at), ("CM_DATA", "three")]);
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.id.create_qp(), 0);
    assert_eq!(said.id.accept(&mut param(b"yes")), 0);
    channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    second.expect("ESTABLISHED 0 data yes");
    second.kill();
    channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
    channel.expect_timewait();
    said.id.destroy();
    // Before the listener looked at all: the request is still told, and so is its end.
    let mut second = Second::start(
        "dial",
        &[("CM_TO", &at), ("CM_DATA", "four"), ("CM_SAY", "1")],
    );
    second.expect("connecting");
    second.kill();
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_padded(&said.data, b"four", 56);
    channel.expect(RDMA_CM_EVENT_REJECTED, GAVE_UP);
    said.id.destroy();
    listener.destroy();
    channel.destroy();
}

#[test]
fn silence_ends_an_attempt() {
    if skip_on_hardware("its timeout can't be set") {
        return;
    }
    let channel = Channel::new();
    let (listener, at) = channel.listener(&on_device(0), 8);
    let at = at.to_string();
    let second = Second::start(
        "dial",
        &[
            ("CM_TO", &at),
            ("CM_DATA", "x"),
            ("SOFTVERBS_CM_TIMEOUT_MS", "200"),
        ],
    );
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    second.expect(&format!("UNREACHABLE {} data ", -libc::ETIMEDOUT));
    channel.expect(RDMA_CM_EVENT_REJECTED, GAVE_UP);
    said.id.destroy();
    listener.destroy();
    channel.destroy();
    second.finish();
}

#[test]
fn an_attempt_that_finds_no_room_ends_too() {
    if skip_on_hardware("its timeout can't be set") {
        return;
    }
    let (one, two) = (Channel::new(), Channel::new());
    let (listener, to) = two.listener(&on_device(0), 1);
    let first = one.routed(to);
    assert_eq!(first.connect(&mut param(b"first")), 0);
    let second = Second::start(
        "dial",
        &[
            ("CM_TO", &to.to_string()),
            ("CM_DATA", "x"),
            ("SOFTVERBS_CM_TIMEOUT_MS", "200"),
        ],
    );
    second.expect(&format!("UNREACHABLE {} data ", -libc::ETIMEDOUT));
    second.finish();
    let waiting = one.routed(to);
    assert_eq!(waiting.connect(&mut param(b"waiting")), 0);
    one.expect_silence();
    listener.destroy();
    let ends = [one.next(), one.next()].map(|end| (end.id, end.kind, end.status));
    assert!(
        ends.contains(&(first, RDMA_CM_EVENT_REJECTED, CONSUMER)),
        "{ends:?}"
    );
    assert!(
        ends.contains(&(waiting, RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS)),
        "{ends:?}"
    );
    one.expect_silence();
    first.destroy();
    waiting.destroy();
    one.destroy();
    two.destroy();
}

#[test]
fn the_server_disconnects() {
    let (mut second, to) = server(&on_device(0), "accept");
    let channel = Channel::new();
    let (id, _) = connected(channel, to);
    assert!(second.line().starts_with("request hello"));
    second.expect("ESTABLISHED 0 qp 3");
    second.tell("disconnect");
    channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
    channel.expect_timewait();
    assert_eq!(id.qp_state(), IBV_QPS_RTS, "only the application moves it");
    assert_eq!(id.disconnect(), 0);
    assert_eq!(id.qp_state(), IBV_QPS_ERR);
    second.expect("DISCONNECTED 0 qp 6");
    second.expect_timewait();
    id.destroy();
    channel.destroy();
    second.finish();
}

#[test]
fn ids_move_among_channels_with_their_events() {
    let (first, other) = (Channel::new(), Channel::new());
    let (listener, to) = first.listener(&on_device(0), 8);
    // An event that waits.
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
    // A listener that has been asked, but has not looked.
    assert!(first.readable(PATIENCE));
    if skip_on_hardware("the kernel loses a request that waits while its listener moves") {
        return;
    }
    assert_eq!(listener.migrate(other), 0);
    assert!(!first.readable(Duration::ZERO));
    let said = other.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.id.c().channel, other.0);
    // A request goes to a channel of its own, as servers with threads do.
    assert_eq!(said.id.migrate(first), 0);
    assert_eq!(said.id.create_qp(), 0);
    assert_eq!(said.id.accept(&mut param(b"")), 0);
    other.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    first.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    // And an established connection too.
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

/// The side that is told of a disconnection, which must answer, and the side that told, in any order.
fn both_ends(channel: Channel) {
    let mut ends = 0;
    let each = if softverbs() { 2 } else { 1 };
    while ends < 2 * each {
        let end = channel.next();
        assert!(
            matches!(
                end.kind,
                RDMA_CM_EVENT_DISCONNECTED | RDMA_CM_EVENT_TIMEWAIT_EXIT
            ),
            "{}",
            end.name()
        );
        ends += 1;
        assert_eq!(end.id.disconnect(), 0);
    }
}

#[test]
fn moving_waits_for_acknowledgements() {
    let (first, other) = (Channel::new(), Channel::new());
    let id = first.id();
    assert_eq!(id.resolve(None, on_device(9).parse().unwrap()), 0);
    assert!(first.readable(PATIENCE));
    let event = first.raw().unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    let mover = std::thread::spawn(move || {
        let (id, other) = (id, other);
        let moved = id.migrate(other);
        send.send(()).unwrap();
        moved
    });
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
fn the_descriptor_tells_when_there_is_an_event() {
    let channel = Channel::new();
    assert_eq!(channel.raw().unwrap_err(), libc::EAGAIN);
    assert!(!channel.readable(Duration::ZERO));
    let id = channel.id();
    assert_eq!(id.resolve(None, on_device(9).parse().unwrap()), 0);
    assert!(channel.readable(PATIENCE));
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    assert!(!channel.readable(Duration::ZERO));
    // An event of an id that is no more is no event.
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
fn two_hundred_connections_leave_nothing_behind() {
    if skip_on_hardware("it takes minutes in a virtual machine") {
        return;
    }
    // Both sides are processes of their own, so that each can count all of its descriptors.
    let (mut server, to) = server(&on_device(0), "quiet");
    let to = to.to_string();
    let mut client = Second::start("dial_many", &[("CM_TO", &to)]);
    let count = |line: &str| line.split(' ').next().unwrap().parse::<usize>().unwrap();
    // What the device opens once for a peer is open after the first connection; of the server it
    // may still be open.
    client.expect("one");
    server.tell("descriptors");
    let before = server.line();
    client.tell("go");
    let line = client.line();
    let (first, last) = line.split_once(' ').unwrap();
    assert_eq!(first, last, "the client's descriptors");
    let until = Instant::now() + PATIENCE;
    loop {
        // The server may not have seen the last end yet.
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
fn applications_may_move_their_queue_pairs_themselves() {
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let id = channel.routed(to);
    let mut asked = rdma_conn_param {
        qp_num: 0x1234,
        srq: 1,
        ..param(b"mine")
    };
    let mut attr = ibv_qp_attr::default();
    assert_eq!(
        init_qp_attr(id, IBV_QPS_INIT, &mut attr)
            .unwrap()
            .count_ones(),
        4
    );
    if softverbs() {
        // The kernel gives the attributes for INIT.
        assert_eq!(init_qp_attr(id, IBV_QPS_RTR, &mut attr), Err(libc::EINVAL));
    }
    assert_eq!(id.connect(&mut asked), 0);
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!((said.conn.qp_num, said.conn.srq), (0x1234, 1));
    let passive = said.id;
    let mut answer = rdma_conn_param {
        qp_num: 0x4321,
        responder_resources: 1,
        initiator_depth: 1,
        rnr_retry_count: 4,
        ..param(b"")
    };
    let rtr = init_qp_attr(passive, IBV_QPS_RTR, &mut attr).unwrap();
    assert_eq!(attr.dest_qp_num, 0x1234);
    assert_eq!((attr.ah_attr.is_global, attr.ah_attr.port_num), (1, 1));
    let active_psn = attr.rq_psn;
    let wanted = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    assert_eq!(rtr, wanted);
    assert_eq!(passive.accept(&mut answer), 0);
    init_qp_attr(passive, IBV_QPS_RTS, &mut attr).unwrap();
    assert_eq!(
        (attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic),
        (6, 5, 1)
    );
    let passive_psn = attr.sq_psn;

    let said = channel.expect(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    assert_eq!(said.conn.qp_num, 0x4321);
    init_qp_attr(id, IBV_QPS_RTR, &mut attr).unwrap();
    assert_eq!((attr.dest_qp_num, attr.rq_psn), (0x4321, passive_psn));
    assert_eq!(attr.max_dest_rd_atomic, 1);
    init_qp_attr(id, IBV_QPS_RTS, &mut attr).unwrap();
    assert_eq!(
        (attr.sq_psn, attr.retry_cnt, attr.rnr_retry),
        (active_psn, 6, 4)
    );
    channel.expect_silence();
    // SAFETY: a live id.
    assert_eq!(errno_of(unsafe { (cm().rdma_establish.unwrap())(id.0) }), 0);
    let said = channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    assert_eq!(said.id, passive);
    assert_eq!(id.disconnect(), 0);
    both_ends(channel);
    channel.expect_silence();
    for id in [id, passive, listener] {
        id.destroy();
    }
    channel.destroy();
}

fn init_qp_attr(id: Id, state: ibv_qp_state, attr: &mut ibv_qp_attr) -> Result<u32, i32> {
    attr.qp_state = state;
    let mut mask = 0;
    // SAFETY: a live id and writable structures.
    match errno_of(unsafe { (cm().rdma_init_qp_attr.unwrap())(id.0, attr, &raw mut mask) }) {
        0 => Ok(mask as u32),
        errno => Err(errno),
    }
}

#[test]
fn the_application_may_hear_of_the_connection_from_its_queue_pair() {
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let id = channel.routed(to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    let notify = |event| {
        // SAFETY: a live id.
        errno_of(unsafe { (cm().rdma_notify)(passive.0, event) })
    };
    assert_eq!(notify(IBV_EVENT_COMM_EST), libc::EINVAL);
    assert_eq!(passive.accept(&mut param(b"")), 0);
    channel.expect(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    assert_eq!(notify(IBV_EVENT_PATH_MIG), libc::EINVAL);
    assert_eq!(notify(IBV_EVENT_COMM_EST), 0);
    channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    assert_eq!(notify(IBV_EVENT_COMM_EST), libc::EISCONN);
    // SAFETY: a live id.
    assert_eq!(errno_of(unsafe { (cm().rdma_establish.unwrap())(id.0) }), 0);
    channel.expect_silence();
    for id in [id, passive, listener] {
        id.destroy();
    }
    channel.destroy();
}

#[test]
fn addresses_and_ports_have_one_owner() {
    let channel = Channel::new();
    let (listener, at) = channel.listener(&on_device(0), 8);
    let at = at.to_string();
    let other = channel.id();
    assert_eq!(other.bind(&at), libc::EADDRINUSE);
    let foreign = if softverbs() {
        libc::EADDRNOTAVAIL
    } else {
        libc::ENODEV
    };
    assert_eq!(other.bind("192.0.2.7:0"), foreign);
    assert_eq!(other.bind("[2001:db8::7]:0"), foreign);
    if skip_on_hardware("all who share an address must want to") {
        return;
    }
    // Nothing has changed by that.
    assert_eq!(
        other.set_option(RDMA_OPTION_ID_REUSEADDR, &1i32.to_ne_bytes()),
        0
    );
    assert_eq!(other.bind(&at), 0);
    assert_eq!(other.listen(1), libc::EADDRINUSE);
    listener.destroy();
    assert_eq!(other.listen(1), 0);
    assert_eq!(other.bind(&on_device(0)), libc::EINVAL);
    other.destroy();
    let (again, _) = channel.listener(&at, 1);
    again.destroy();
    // Without an address a listener gets one.
    let any = channel.id();
    assert_eq!(any.listen(0), 0);
    assert!(any.source().unwrap().ip().is_unspecified());
    assert_ne!(any.source().unwrap().port(), 0);
    assert!(any.c().verbs.is_null(), "any address is of no device");
    any.destroy();
    channel.destroy();
}

#[test]
fn options() {
    let channel = Channel::new();
    let id = channel.id();
    assert_eq!(id.set_option(RDMA_OPTION_ID_TOS, &[8]), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_TOS, &[8, 0]), libc::EINVAL);
    assert_eq!(id.set_option(RDMA_OPTION_ID_ACK_TIMEOUT, &[14]), 0);
    if softverbs() {
        // The kernel lets the queue pair refuse it.
        let long = id.set_option(RDMA_OPTION_ID_ACK_TIMEOUT, &[32]);
        assert_eq!(long, libc::EINVAL);
    }
    assert_eq!(id.set_option(99, &[1]), libc::ENOSYS);
    let only = &1i32.to_ne_bytes();
    assert_eq!(id.bind("[::]:0"), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_AFONLY, only), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_REUSEADDR, only), 0);
    // IPv4's half of the port is free by that.
    let port = id.source().unwrap().port();
    let other = channel.id();
    assert_eq!(other.set_option(RDMA_OPTION_ID_AFONLY, only), 0);
    assert_eq!(other.bind(&format!("0.0.0.0:{port}")), 0);
    other.destroy();
    assert_eq!(id.listen(1), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_AFONLY, only), libc::EINVAL);
    assert_eq!(id.set_option(RDMA_OPTION_ID_REUSEADDR, only), libc::EINVAL);
    id.destroy();
    channel.destroy();
}

#[test]
fn calls_out_of_turn_are_refused() {
    if skip_on_hardware("the library follows pointers that are not there yet") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let id = channel.id();
    assert_eq!(id.create_qp(), libc::EINVAL);
    assert_eq!(id.resolve_route(), libc::EINVAL);
    assert_eq!(id.connect(&mut param(b"")), libc::EINVAL);
    assert_eq!(id.accept(&mut param(b"")), libc::EINVAL);
    assert_eq!(id.reject(b""), libc::EINVAL);
    assert_eq!(id.disconnect(), libc::EINVAL);
    id.destroy();
    let id = channel.routed(to);
    assert_eq!(id.connect(&mut param(&[1; 57])), libc::EINVAL);
    let mut greedy = rdma_conn_param {
        responder_resources: 254,
        ..param(b"")
    };
    assert_eq!(id.connect(&mut greedy), libc::EINVAL);
    assert_eq!(id.resolve(None, to), libc::EINVAL);
    assert_eq!(id.connect(&mut param(&[1; 56])), 0);
    let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert_eq!(passive.accept(&mut param(&[1; 197])), libc::EINVAL);
    assert_eq!(passive.reject(&[1; 149]), libc::EINVAL);
    assert_eq!(passive.accept(&mut param(&[1; 196])), 0);
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    assert_eq!(said.data, [1; 196]);
    // The active side may refuse the answer.
    assert_eq!(id.reject(b"changed my mind"), 0);
    let said = channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    assert_eq!(said.id, passive);
    assert_padded(&said.data, b"changed my mind", 148);
    for id in [id, passive, listener] {
        id.destroy();
    }
    channel.destroy();
}

#[test]
fn both_sides_may_disconnect_at_once() {
    let (one, two) = (Channel::new(), Channel::new());
    let (listener, to) = two.listener(&on_device(0), 8);
    let id = one.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"")), 0);
    let passive = two.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert_eq!(passive.create_qp(), 0);
    assert_eq!(passive.accept(&mut param(b"")), 0);
    one.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    two.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    assert_eq!(id.disconnect(), 0);
    assert_eq!(passive.disconnect(), 0);
    for channel in [one, two] {
        channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
        channel.expect_timewait();
        channel.expect_silence();
    }
    // The peer destroys its id without a word.
    for id in [id, passive, listener] {
        id.destroy();
    }
    one.destroy();
    two.destroy();
}

#[test]
fn an_id_without_a_channel_waits_by_itself() {
    let (second, to) = server(&on_device(0), "accept");
    let mut id = std::ptr::null_mut();
    // SAFETY: NULL asks for a channel of the id's own; room for a pointer.
    let made = unsafe {
        (cm().rdma_create_id)(
            std::ptr::null_mut(),
            &raw mut id,
            std::ptr::null_mut(),
            RDMA_PS_TCP,
        )
    };
    assert_eq!(errno_of(made), 0);
    let id = Id(id);
    assert_eq!(id.resolve(None, to), 0);
    assert_eq!(id.resolve_route(), 0);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"hello")), 0);
    assert_padded(&read(id.c().event).data, b"welcome", 196);
    assert_eq!(id.qp_state(), IBV_QPS_RTS);
    assert_eq!(id.disconnect(), 0);
    id.destroy();
    second.finish();

    let (second, to) = server(&on_device(0), "reject");
    let channel = Channel::new();
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.migrate(Channel(std::ptr::null_mut())), 0);
    assert_eq!(id.connect(&mut param(b"hello")), libc::ECONNREFUSED);
    assert_eq!(id.migrate(channel), 0);
    id.destroy();
    channel.destroy();
    second.finish();
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
fn a_forked_child_connects_on_its_own() {
    if skip_on_hardware("fork needs ibv_fork_init there") {
        return;
    }
    let (second, to) = server(&on_device(0), "quiet");
    let forking = Second::start("fork", &[("CM_TO", &to.to_string())]);
    forking.expect("forked");
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
fn a_listener_goes_with_those_who_have_asked() {
    let (one, two) = (Channel::new(), Channel::new());
    let (listener, to) = two.listener(&on_device(0), 8);
    let ids: Vec<_> = (0..3).map(|_| one.routed(to)).collect();
    for id in &ids {
        assert_eq!(id.connect(&mut param(b"")), 0);
    }
    // One is with the application, one waits as an event, one in the socket.
    let taken = two.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    listener.destroy();
    one.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    one.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    assert_eq!(taken.accept(&mut param(b"")), 0);
    one.expect(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    two.expect_silence();
    taken.destroy();
    one.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    ids.into_iter().for_each(Id::destroy);
    one.destroy();
    two.destroy();
}

#[path = "cm/hostile.rs"]
mod hostile;
