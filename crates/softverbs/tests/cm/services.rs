//! Datagram services (RDMA_PS_UDP), and types of queue pairs in RDMA_PS_IB.

use super::*;

/// Status of a datagram service's answer, InfiniBand's SIDR_REP.
const UNSUPPORTED: i32 = 1;
const REFUSED: i32 = 2;

/// The queue key of the port space, RDMA_UDP_QKEY.
const QKEY: u32 = 0x0123_4567;

fn service(channel: Channel) -> (Id, SocketAddr) {
    let id = channel.id_in(RDMA_PS_UDP);
    assert_eq!(id.bind(&on_device(0)), 0);
    assert_eq!(id.listen(8), 0);
    (id, id.source().unwrap())
}

fn client(channel: Channel, to: SocketAddr) -> Id {
    channel.route(channel.id_in(RDMA_PS_UDP), to)
}

/// The next event, which must be ESTABLISHED: queue pair, key, address, and data.
fn answer(channel: Channel) -> (u32, u32, ibv_ah_attr, Vec<u8>) {
    assert!(channel.readable(PATIENCE));
    let event = channel.raw().unwrap();
    let said = read(event);
    assert_eq!((said.kind, said.status), (RDMA_CM_EVENT_ESTABLISHED, 0));
    // SAFETY: a live event of a datagram service.
    let found = unsafe {
        let ud = (*event).param.ud.as_ref();
        (
            ud.qp_num,
            ud.qkey,
            std::ptr::read(&raw const ud.ah_attr),
            said.data,
        )
    };
    // SAFETY: an event not acknowledged before.
    assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
    found
}

#[test]
fn a_service_answers_with_its_queue_pair() {
    let (near, far) = (Channel::new(), Channel::new());
    let (listener, to) = service(far);
    let id = client(near, to);
    assert_eq!(id.connect(&mut param(b"hello")), 0);
    let request = far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(request.listener, listener);
    assert_padded(&request.data, b"hello", 180);
    assert_eq!(request.id.destination(), id.source());
    let mut own = param(b"me");
    own.qp_num = 0x0012_3456;
    assert_eq!(request.id.accept(&mut own), 0);
    let (qp_num, qkey, ah, data) = answer(near);
    assert_eq!((qp_num, qkey), (0x0012_3456, QKEY));
    assert_eq!((ah.is_global, ah.port_num), (1, id.c().port_num));
    assert_padded(&data, b"me", 136);
    // no connection: neither side has an end
    request.id.destroy();
    near.expect_silence();
    id.destroy();
    far.expect_silence();
    listener.destroy();
}

#[test]
fn a_service_can_refuse_or_be_missing() {
    let (near, far) = (Channel::new(), Channel::new());
    let (listener, to) = service(far);
    let id = client(near, to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    let request = far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert_eq!(request.reject(b"no"), 0);
    let said = near.expect(RDMA_CM_EVENT_UNREACHABLE, REFUSED);
    assert_padded(&said.data, b"no", 136);
    request.destroy();
    id.destroy();
    // the service ends before it answers
    let id = client(near, to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id.destroy();
    near.expect(RDMA_CM_EVENT_UNREACHABLE, REFUSED);
    id.destroy();
    listener.destroy();
    let id = client(near, to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    near.expect(RDMA_CM_EVENT_UNREACHABLE, UNSUPPORTED);
    id.destroy();
}

#[test]
fn a_client_that_ends_leaves_a_request_that_can_be_answered() {
    let (near, far) = (Channel::new(), Channel::new());
    let (listener, to) = service(far);
    let id = client(near, to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    let request = far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    id.destroy();
    far.expect_silence();
    assert_eq!(request.accept(&mut param(b"")), 0);
    request.destroy();
    listener.destroy();
}

#[test]
fn private_data_of_a_service_has_limits() {
    let (near, far) = (Channel::new(), Channel::new());
    let (listener, to) = service(far);
    for (asked, answered) in (0..=180).map(|len| (len, len * 136 / 180)) {
        let id = client(near, to);
        let question = vec![0x5a; asked];
        assert_eq!(id.connect(&mut param(&[7; 181])), libc::EINVAL);
        assert_eq!(id.connect(&mut param(&question)), 0);
        let request = far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
        assert_padded(&request.data, &question, 180);
        let reply = vec![0xa5; answered];
        assert_eq!(request.id.accept(&mut param(&[7; 137])), libc::EINVAL);
        assert_eq!(request.id.accept(&mut param(&reply)), 0);
        assert_padded(&answer(near).3, &reply, 136);
        request.id.destroy();
        id.destroy();
    }
    listener.destroy();
}

#[test]
fn port_spaces_do_not_meet() {
    let (near, far) = (Channel::new(), Channel::new());
    let (datagrams, to) = service(far);
    let tcp = far.id();
    assert_eq!(tcp.bind(&to.to_string()), 0);
    assert_eq!(tcp.listen(8), 0);
    let id = near.routed(to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    let request = far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(request.listener, tcp);
    id.destroy();
    request.id.destroy();
    tcp.destroy();
    datagrams.destroy();
}

#[test]
fn a_listener_has_one_type_of_queue_pairs() {
    if skip_on_hardware("librdmacm passes the type to the kernel only in rdma_create_ep") {
        return;
    }
    let (near, far) = (Channel::new(), Channel::new());
    let listener = far.id_in(RDMA_PS_IB);
    listener.c().qp_type = IBV_QPT_XRC_RECV;
    assert_eq!(listener.bind(&on_device(0)), 0);
    assert_eq!(listener.listen(8), 0);
    let to = listener.source().unwrap();
    let connect = |qp_type| {
        let id = near.route(near.id_in(RDMA_PS_IB), to);
        id.c().qp_type = qp_type;
        (id, id.connect(&mut param(b"")))
    };
    let (rc, status) = connect(IBV_QPT_RC);
    assert_eq!(status, 0);
    far.expect_silence();
    near.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    let (uc, status) = connect(IBV_QPT_UC);
    assert_eq!(status, libc::EINVAL);
    let (xrc, status) = connect(IBV_QPT_XRC_SEND);
    assert_eq!(status, 0);
    let request = far.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert_eq!(request.c().qp_type, IBV_QPT_XRC_RECV);
    for id in [rc, uc, xrc, request, listener] {
        id.destroy();
    }
}
