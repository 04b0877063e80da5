//! Peers that do not exist, do not read their events, end, or do not answer.

use super::*;

#[test]
fn nobody_listens_and_nobody_is_there() {
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 1);
    listener.destroy();
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"")), 0);
    channel.expect(RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
    // the attempt has failed, and the id cannot be used again
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
    // one request too many: its sender gets no answer, and retries by itself
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
    // its name ends with the process
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
    // before the reply
    let mut second = Second::start("dial", &[("CM_TO", &at), ("CM_DATA", "one")]);
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.listener, listener);
    second.kill();
    channel.expect(RDMA_CM_EVENT_REJECTED, GAVE_UP);
    assert_eq!(said.id.accept(&mut param(b"")), libc::EINVAL);
    said.id.destroy();
    // after the reply, which the process never reads
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
    // established
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
    // before the listener has read any event: the request is still reported, and so is its end
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
fn silence_after_the_answer_ends_it_too() {
    if skip_on_hardware("its timeout can't be set") {
        return;
    }
    let second = Second::start(
        "serve",
        &[
            ("CM_BIND", &on_device(0)),
            ("CM_ANSWER", "accept"),
            ("SOFTVERBS_CM_TIMEOUT_MS", "200"),
        ],
    );
    let to = second.line();
    let to = to.strip_prefix("listening on ").unwrap().parse().unwrap();
    let channel = Channel::new();
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"hello")), 0);
    assert!(second.line().starts_with("request hello"));
    second.expect(&format!("UNREACHABLE {} qp 3", -libc::ETIMEDOUT));
    // the reply arrives too late
    channel.expect(RDMA_CM_EVENT_CONNECT_ERROR, -libc::ECONNRESET);
    assert_eq!(id.qp_state(), IBV_QPS_ERR);
    channel.expect_silence();
    id.destroy();
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
fn a_listener_goes_with_those_who_have_asked() {
    let (one, two) = (Channel::new(), Channel::new());
    let (listener, to) = two.listener(&on_device(0), 8);
    let ids: Vec<_> = (0..3).map(|_| one.routed(to)).collect();
    for id in &ids {
        assert_eq!(id.connect(&mut param(b"")), 0);
    }
    // one request is with the application, one is an unread event, one is in the socket
    let taken = two.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    listener.destroy();
    for _ in 0..2 {
        let said = one.next();
        assert_eq!(said.kind, RDMA_CM_EVENT_REJECTED);
        // on a network the last request may arrive when no process listens any more
        assert!(said.status == CONSUMER || !softverbs() && said.status == NOBODY_LISTENS);
    }
    assert_eq!(taken.accept(&mut param(b"")), 0);
    one.expect(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    two.expect_silence();
    taken.destroy();
    one.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    ids.into_iter().for_each(Id::destroy);
    one.destroy();
    two.destroy();
}

/// The child lives on, and has not called execve(2).
#[test]
fn a_listener_goes_although_a_forked_child_has_its_socket() {
    if skip_on_hardware("fork needs ibv_fork_init there") {
        return;
    }
    let mut second = Second::start("fork_listening", &[("CM_BIND", &on_device(0))]);
    let to = second.line();
    let to = to.strip_prefix("listening on ").unwrap().parse().unwrap();
    let channel = Channel::new();
    let ids = [(); 2].map(|()| channel.routed(to));
    for id in ids {
        assert_eq!(id.connect(&mut param(b"")), 0);
    }
    // both connections are in the queue of the socket
    second.tell("go");
    second.expect("destroyed");
    for _ in ids {
        channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    }
    ids.into_iter().for_each(Id::destroy);
    channel.destroy();
    second.finish();
}

/// Its client is woken for each attempt, and not between two of them.
#[test]
fn a_full_backlog_keeps_no_channel_readable() {
    if skip_on_hardware("the library does not process the messages of the protocol") {
        return;
    }
    let (server, channel) = (Channel::new(), Channel::new());
    let (listener, to) = server.listener(&on_device(0), 1);
    let ids = [(); 2].map(|()| channel.routed(to));
    for id in ids {
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"full")), 0);
    }
    // after 1, 3, 7, 15, 31 and 63 ms
    let wakes = channel.wakes(Duration::from_millis(100));
    assert!((1..=8).contains(&wakes), "{wakes} wakes in 100 ms");
    // there is room now: the second request is sent, and its deadline is a minute away
    let mut requests = Vec::new();
    let until = Instant::now() + PATIENCE;
    while requests.len() < 2 {
        assert!(Instant::now() < until, "{} requests", requests.len());
        requests.extend(server.next_within(Duration::from_millis(5)));
        channel.wakes(Duration::ZERO);
    }
    assert_eq!(channel.wakes(Duration::from_millis(100)), 0);
    for request in requests {
        assert_eq!(request.kind, RDMA_CM_EVENT_CONNECT_REQUEST);
        request.id.destroy();
    }
    ids.into_iter().for_each(Id::destroy);
    listener.destroy();
    server.destroy();
    channel.destroy();
}
