//! Connections without errors.

use super::*;

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
    // each side's depth is the peer's answer
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
    // a second disconnect is permitted and has no event
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
    // disconnecting flushes the posted requests
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

/// rdma_get_recv_comp(3) and rdma_get_send_comp(3) require it.
#[test]
fn the_context_of_an_ids_completion_queues_is_the_id() {
    let channel = Channel::new();
    let id = channel.routed(on_device(9).parse().unwrap());
    assert_eq!(id.create_qp(), 0);
    for cq in [id.c().send_cq, id.c().recv_cq] {
        // SAFETY: a live completion queue.
        assert_eq!(unsafe { (*cq).cq_context }, id.0.cast());
    }
    id.destroy();
    channel.destroy();
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
    // the peer destroys its id without disconnecting
    for id in [id, passive, listener] {
        id.destroy();
    }
    one.destroy();
    two.destroy();
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
        // the kernel returns the attributes for INIT
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
fn an_id_without_a_channel_waits_by_itself() {
    let (second, to) = server(&on_device(0), "accept");
    // NULL asks for a channel of the id's own
    let id = Channel(std::ptr::null_mut()).id();
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

/// So does the id of a request to a listener without a channel, which outlives the listener.
#[test]
fn a_request_to_a_listener_without_a_channel_has_its_own() {
    let listener = Channel(std::ptr::null_mut()).id();
    assert_eq!(listener.bind(&on_device(0)), 0);
    assert_eq!(listener.listen(4), 0);
    let to = listener.source().unwrap();
    let dialler = Second::start("dial", &[("CM_TO", &to.to_string()), ("CM_SAY", "1")]);
    dialler.expect("connecting");
    let requests = Channel(listener.c().channel);
    assert!(requests.readable(PATIENCE));
    let said = requests.next();
    assert_eq!(said.kind, RDMA_CM_EVENT_CONNECT_REQUEST);
    let passive = said.id;
    assert_ne!(passive.c().channel, listener.c().channel);
    listener.destroy();
    assert_eq!(passive.create_qp(), 0);
    assert_eq!(passive.accept(&mut param(b"")), 0);
    assert_eq!(read(passive.c().event).kind, RDMA_CM_EVENT_ESTABLISHED);
    dialler.expect("ESTABLISHED 0 data ");
    assert_eq!(passive.disconnect(), 0);
    passive.destroy();
    dialler.expect("DISCONNECTED 0 data ");
    if softverbs() {
        dialler.expect("TIMEWAIT_EXIT 0 data ");
    }
    dialler.finish();
}

/// The request has been sent: a call that ended would leave its event to the next one.
#[test]
fn a_signal_does_not_end_a_call_that_waits() {
    if skip_on_hardware("the library returns EINTR") {
        return;
    }
    extern "C" fn handler(_signal: libc::c_int) {}
    // without SA_RESTART
    // SAFETY: all zeros is a value of it.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    // SAFETY: a readable structure and a handler that does nothing.
    let set = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    let at = on_device(0);
    let answer = [
        ("CM_BIND", &at[..]),
        ("CM_ANSWER", "accept"),
        ("CM_PAUSED", "1"),
    ];
    let mut second = Second::start("serve", &answer);
    let line = second.line();
    let to = line.strip_prefix("listening on ").unwrap().parse().unwrap();
    let id = Channel(std::ptr::null_mut()).id();
    assert_eq!(id.resolve(None, to), 0);
    assert_eq!(id.resolve_route(), 0);
    assert_eq!(id.create_qp(), 0);
    let (send, receive) = std::sync::mpsc::channel();
    let caller = std::thread::spawn(move || {
        let id = id;
        // SAFETY: no arguments.
        send.send(unsafe { libc::pthread_self() }).unwrap();
        id.connect(&mut param(b"signal"))
    });
    let thread = receive.recv().unwrap();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(30));
        // SAFETY: a thread that has not been joined.
        assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
    }
    second.tell("go");
    assert_eq!(caller.join().unwrap(), 0);
    assert_eq!(read(id.c().event).kind, RDMA_CM_EVENT_ESTABLISHED);
    id.destroy();
    second.finish();
}

#[test]
fn requests_that_arrive_together_are_all_delivered() {
    // more than the connections that may be without a request
    const MANY: usize = 200;
    let (near, far) = (Channel::new(), Channel::new());
    let (listener, to) = far.listener(&on_device(0), 1000);
    let ids: Vec<Id> = (0..MANY).map(|_| near.routed(to)).collect();
    for id in &ids {
        assert_eq!(id.connect(&mut param(b"")), 0);
    }
    for _ in 0..MANY {
        far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id.destroy();
    }
    for id in ids {
        id.destroy();
    }
    listener.destroy();
}
