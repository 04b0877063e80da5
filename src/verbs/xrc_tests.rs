//! Extended reliable connections from end to end on softverbs: two sides in one process, with a
//! circuit in each direction and exchanges of requests for services.

#![allow(unsafe_code, reason = "posts receives and sends on its own memory")]

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdma_core_sys as sys;

use super::*;
use crate::errno::FiErrno;

const PATIENCE: Duration = Duration::from_secs(20);
const LEN: usize = 256;
const PARAM: ConnParam<'static> = ConnParam {
    private_data: &[],
    retry_count: 7,
    rnr_retry_count: 7,
};
const RNR_TIMER: u8 = 14;

/// One process of a node, with a listener in both port spaces.
pub(crate) struct Side {
    device: Arc<Device>,
    pd: Arc<Pd>,
    xrcd: Arc<Xrcd>,
    cq: Arc<Cq>,
    srq: Srq,
    channel: Arc<EventChannel>,
    circuits: CmId,
    services: CmId,
    addr: SocketAddr,
    mr: Option<Mr>,
    buf: Buf,
}

impl Drop for Side {
    fn drop(&mut self) {
        // before its memory
        self.mr = None;
    }
}

impl Side {
    pub(crate) fn new() -> Self {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let xrcd = Arc::new(Xrcd::open(&device, None, libc::O_CREAT).unwrap());
        Self::of_node(xrcd)
    }

    fn of_node(xrcd: Arc<Xrcd>) -> Self {
        let device = Arc::clone(xrcd.device());
        let pd = Pd::alloc(&device).unwrap();
        let cq = Arc::new(Cq::create(&device, 64, None, 0).unwrap());
        let srq = Srq::create_xrc(&pd, &xrcd, &cq, 16, 1).unwrap();
        let channel = EventChannel::create(device.backend()).unwrap();
        let (circuits, services, addr) = listeners(&channel);
        let buf = Buf::alloc(&pd, 2 * LEN);
        let access = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: the buffer lives until the registration has ended.
        let mr = unsafe { Mr::register(&pd, buf.addr.cast(), 2 * LEN, access) }.unwrap();
        Self {
            device,
            pd,
            xrcd,
            cq,
            srq,
            channel,
            circuits,
            services,
            addr,
            mr: Some(mr),
            buf,
        }
    }

    fn srq(&self) -> SrqNumber {
        self.srq.number().unwrap()
    }

    fn initiator(&self) -> Qp {
        Qp::create_initiator(&self.pd, &self.cq, &QpConfig::SMALL).unwrap()
    }

    /// The next event.
    fn event(&self) -> CmEvent {
        let start = Instant::now();
        loop {
            match self.channel.next_event() {
                Ok(event) => return event,
                Err(error) => assert_eq!(error, FiErrno::EAGAIN),
            }
            assert!(start.elapsed() < PATIENCE, "no event");
            std::thread::yield_now();
        }
    }

    /// The next event, of this kind and identifier.
    fn expect(&self, kind: CmEventKind, id: &CmId) -> CmEvent {
        let event = self.event();
        assert_eq!((event.kind, event.object), (kind, id.object()), "{event:?}");
        event
    }

    /// The identifier and the data of the next request to a listener of this side.
    fn request(&self, listener: &CmId) -> (CmId, PrivateData) {
        let event = self.expect(CmEventKind::ConnectRequest, listener);
        (event.new_id.unwrap(), event.private_data)
    }

    /// An identifier of `make` whose route to `peer` is resolved.
    fn resolved(
        &self,
        make: fn(&Arc<EventChannel>) -> crate::errno::Result<CmId>,
        peer: &Self,
    ) -> CmId {
        let id = make(&self.channel).unwrap();
        id.resolve_addr(None, peer.addr).unwrap();
        self.expect(CmEventKind::AddrResolved, &id);
        id.resolve_route().unwrap();
        self.expect(CmEventKind::RouteResolved, &id);
        id
    }

    /// The part of the buffer for sends (0) or receives (1).
    fn sge(&self, part: usize, len: usize) -> Sge {
        Sge {
            addr: self.buf.addr as u64 + (part * LEN) as u64,
            length: len as u32,
            lkey: self.mr.as_ref().unwrap().lkey(),
        }
    }

    fn post_recv(&self, wr_id: u64) {
        let sges = [self.sge(1, LEN)];
        let sges = &sges;
        // SAFETY: the buffer lives longer than the queue's receives are awaited.
        unsafe { self.srq.post_recv(&RecvRequest { wr_id, sges }) }.unwrap();
    }

    fn send(&self, qp: &Qp, to: SrqNumber, imm: u32, text: &[u8]) {
        assert!(text.len() <= LEN);
        // SAFETY: inside the buffer, which no request uses now.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.buf.addr, text.len());
        }
        let sges = [self.sge(0, text.len())];
        let mut request = SendRequest::new(SendOpcode::SendImm, &sges);
        request.wr_id(1).signaled(true).imm(imm).to_srq(to);
        // SAFETY: the buffer lives until the completion, for which each test waits.
        unsafe { qp.post_send(&mut request) }.unwrap();
    }

    fn received(&self, len: usize) -> Vec<u8> {
        // SAFETY: inside the buffer, of a receive that has completed.
        unsafe { std::slice::from_raw_parts(self.buf.addr.add(LEN), len) }.to_vec()
    }

    /// Polls one completion.
    fn wc(&self, peers: &[&Self]) -> Done {
        let start = Instant::now();
        loop {
            let mut buffer = [const { MaybeUninit::uninit() }; 1];
            if let [wc] = self.cq.poll(&mut buffer, 1).unwrap() {
                return Done {
                    wr_id: wc.wr_id(),
                    status: wc.status(),
                    len: wc.byte_len(),
                    imm: wc.imm(),
                    qp: wc.qp_num(),
                };
            }
            assert!(start.elapsed() < PATIENCE, "no completion of {peers:?}");
            std::thread::yield_now();
        }
    }
}

impl std::fmt::Debug for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Side({})", self.addr)
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Done {
    wr_id: u64,
    status: u32,
    len: usize,
    imm: Option<u32>,
    qp: u32,
}

/// Listeners at one port in both port spaces.
fn listeners(channel: &Arc<EventChannel>) -> (CmId, CmId, SocketAddr) {
    for _ in 0..100 {
        let circuits = channel.create_id().unwrap();
        circuits.bind_addr("127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = circuits.local_addr().unwrap();
        let services = channel.create_sidr_id().unwrap();
        if services.bind_addr(addr).is_ok() {
            circuits.listen(8).unwrap();
            services.listen(8).unwrap();
            return (circuits, services, addr);
        }
    }
    panic!("no port is free in both spaces");
}

/// Connects an initiator of `from` to a new target of `to`'s node. The identifiers are destroyed.
pub(crate) fn circuit(from: &Side, to: &Side) -> (Qp, Target) {
    let id = from.resolved(EventChannel::create_id, to);
    let initiator = from.initiator();
    initiator.advance_to_init(&id).unwrap();
    let asks = ConnParam {
        private_data: b"circuit",
        ..PARAM
    };
    id.connect_with(initiator.qp_number(), &asks).unwrap();

    let (request, data) = to.request(&to.circuits);
    assert!(data.bytes().starts_with(b"circuit\0"));
    let target = Target::create(&to.xrcd).unwrap();
    target.advance_to_rts(&request, RNR_TIMER).unwrap();
    let state = TargetState {
        receives: true,
        peer: initiator.qp_number(),
    };
    assert_eq!(target.query(), Ok(state));
    let answer = ConnParam {
        private_data: b"target",
        ..PARAM
    };
    request.accept_with(target.number(), &answer).unwrap();

    let event = from.expect(CmEventKind::ConnectResponse, &id);
    assert!(event.private_data.bytes().starts_with(b"target\0"));
    initiator.advance_to_rts(&id).unwrap();
    id.establish().unwrap();
    to.expect(CmEventKind::Established, &request);
    drop(id);
    to.expect(CmEventKind::Disconnected, &request);
    (initiator, target)
}

/// Sends one message on the circuit, and checks what arrives at `to`.
fn exchange(from: &Side, (initiator, target): (&Qp, &Target), to: &Side, imm: u32, text: &[u8]) {
    to.post_recv(77);
    from.send(initiator, to.srq(), imm, text);
    let received = Done {
        wr_id: 77,
        status: 0,
        len: text.len(),
        imm: Some(imm),
        qp: target.number().get(),
    };
    assert_eq!(to.wc(&[from, to]), received);
    assert_eq!(to.received(text.len()), text);
    let sent = from.wc(&[from, to]);
    assert_eq!((sent.wr_id, sent.status), (1, 0));
    assert_eq!(sent.qp, initiator.qp_number().get());
}

#[test]
fn circuits_in_both_directions_outlive_their_identifiers() {
    let (a, b) = (Side::new(), Side::new());
    let there = circuit(&a, &b);
    let back = circuit(&b, &a);
    for round in 0..20 {
        let imm = 0xfeed_0000 + round;
        exchange(&a, (&there.0, &there.1), &b, imm, b"from a to b");
        exchange(&b, (&back.0, &back.1), &a, !imm, b"and back");
    }
    // the RNR retry count and the timer are those that the engine asks for
    assert_eq!(there.0.query().unwrap().rnr_retry, 7);
    // what the target was connected with
    let mut attr = sys::ibv_qp_attr::default();
    let mut init = sys::ibv_qp_init_attr::default();
    let mask = (sys::IBV_QP_MIN_RNR_TIMER | sys::IBV_QP_ACCESS_FLAGS) as i32;
    let query = a.device.backend().verbs.ibv_query_qp;
    // SAFETY: a live queue pair, and writable attributes.
    let ret = unsafe {
        let raw = there.1.object() as *mut sys::ibv_qp;
        query(raw, &raw mut attr, mask, &raw mut init)
    };
    assert_eq!((ret, attr.min_rnr_timer), (0, RNR_TIMER));
    let access =
        sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
    // the connection manager of soft0 grants flushes
    let flush = sys::IBV_ACCESS_FLUSH_GLOBAL | sys::IBV_ACCESS_FLUSH_PERSISTENT;
    assert_eq!(attr.qp_access_flags, access | flush);
}

#[test]
fn a_link_is_made_by_a_request_for_a_service() {
    let (a, b) = (Side::new(), Side::new());
    let (initiator, target) = circuit(&a, &b);
    // b's queue is learned by SIDR, with the longest data of each message
    let id = a.resolved(EventChannel::create_sidr_id, &b);
    let asked: Vec<u8> = (1..=180).collect();
    id.request_service(&asked).unwrap();
    let (request, data) = b.request(&b.services);
    assert_eq!(data.bytes(), asked);
    let mut answer = b.srq().get().to_le_bytes().to_vec();
    answer.resize(136, 0xa5);
    request.answer_service(&answer).unwrap();
    let event = a.expect(CmEventKind::Established, &id);
    let answered = event.private_data.bytes();
    assert_eq!(answered, answer);
    drop((id, request));
    let number = u32::from_le_bytes(answered[..4].try_into().unwrap());
    assert_eq!(SrqNumber::new(number), Some(b.srq()));
    exchange(
        &a,
        (&initiator, &target),
        &b,
        5,
        b"by the number of the answer",
    );
}

#[test]
fn a_second_process_of_a_node_receives_through_the_same_target() {
    let a = Side::new();
    let b = Side::new();
    let c = Side::of_node(Arc::clone(&b.xrcd));
    let (initiator, target) = circuit(&a, &b);
    let second = Target::open(&c.xrcd, target.number()).unwrap();
    assert_eq!(second.number(), target.number());
    assert_eq!(second.query(), target.query());
    exchange(&a, (&initiator, &second), &c, 1, b"to c");
    exchange(&a, (&initiator, &target), &b, 2, b"to b");
    // the creator's handle is not needed any more
    drop(target);
    exchange(&a, (&initiator, &second), &c, 3, b"to c again");
    exchange(&a, (&initiator, &second), &b, 4, b"to b again");
}

#[test]
fn only_targets_of_the_domain_are_opened() {
    let (a, b) = (Side::new(), Side::new());
    let (initiator, target) = circuit(&a, &b);
    let refused = |number| Target::open(&a.xrcd, number).err();
    let known = [Some(FiErrno::EINVAL), Some(FiErrno::ENOENT)];
    assert!(known.contains(&refused(target.number())));
    assert!(known.contains(&refused(initiator.qp_number())));
    let number = target.number();
    drop(target);
    let ended = Target::open(&b.xrcd, number).err();
    assert!(known.contains(&ended), "{ended:?}");
}

#[test]
fn a_refused_circuit_leaves_the_queue_pair_to_its_owner() {
    let (a, b) = (Side::new(), Side::new());
    let id = a.resolved(EventChannel::create_id, &b);
    let initiator = a.initiator();
    initiator.advance_to_init(&id).unwrap();
    id.connect_with(initiator.qp_number(), &PARAM).unwrap();
    let (request, _) = b.request(&b.circuits);
    request.reject(b"no").unwrap();
    let event = a.expect(CmEventKind::Rejected, &id);
    assert!(event.private_data.bytes().starts_with(b"no\0"));
    assert_eq!(initiator.advance_to_rts(&id), Err(FiErrno::EINVAL));
}

#[test]
fn a_service_without_listener_is_told_from_silence() {
    let (a, b) = (Side::new(), Side::new());
    let port = a.resolved(EventChannel::create_sidr_id, &b);
    let gone = a.resolved(EventChannel::create_sidr_id, &b);
    // a listener that has refused
    port.request_service(b"?").unwrap();
    let (request, _) = b.request(&b.services);
    request.reject(&[]).unwrap();
    let event = a.expect(CmEventKind::Unreachable, &port);
    assert!(!event.is_no_service());
    // no listener
    drop((request, b));
    gone.request_service(b"?").unwrap();
    let event = a.expect(CmEventKind::Unreachable, &gone);
    assert!(event.is_no_service(), "{event:?}");
}

/// Counts the events of an object.
#[derive(Default)]
struct Events {
    failed: AtomicUsize,
    limits: AtomicUsize,
}

impl AsyncListener for Events {
    fn async_event(&self, event: AsyncEvent) {
        let count = match event {
            AsyncEvent::QpError => &self.failed,
            AsyncEvent::SrqLimit => &self.limits,
            _ => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

fn listen(device: &Device, object: usize) -> Arc<Events> {
    let events = Arc::new(Events::default());
    let weak = Arc::downgrade(&events);
    device.listen(object, weak);
    events
}

/// Waits until `count` is `expected`.
fn await_events(device: &Device, count: &AtomicUsize, expected: usize) {
    let start = Instant::now();
    while count.load(Ordering::Relaxed) < expected {
        device.dispatch_async();
        assert!(start.elapsed() < PATIENCE, "no event");
        std::thread::yield_now();
    }
    device.dispatch_async();
    assert_eq!(count.load(Ordering::Relaxed), expected);
}

#[test]
fn the_end_of_a_circuit_is_an_event_of_each_handle() {
    let (a, b) = (Side::new(), Side::new());
    let c = Side::of_node(Arc::clone(&b.xrcd));
    let (initiator, target) = circuit(&a, &b);
    let second = Target::open(&c.xrcd, target.number()).unwrap();
    let events = [target.object(), second.object()].map(|object| listen(&b.device, object));
    // a number that no queue has
    let missing = SrqNumber::new(b.srq().get() ^ 0xf00).unwrap();
    a.send(&initiator, missing, 0, b"lost");
    let sent = a.wc(&[&a]);
    assert_ne!(sent.status, 0);
    for events in &events {
        await_events(&b.device, &events.failed, 1);
    }
    assert!(!second.query().unwrap().receives);
    for handle in [&target, &second] {
        b.device.unlisten(handle.object());
    }
}

#[test]
fn a_target_in_error_refuses_its_sender() {
    let (a, b) = (Side::new(), Side::new());
    let (initiator, target) = circuit(&a, &b);
    exchange(&a, (&initiator, &target), &b, 1, b"first");
    target.set_error().unwrap();
    // again, as by a second holder
    target.set_error().unwrap();
    b.post_recv(9);
    a.send(&initiator, b.srq(), 2, b"late");
    assert_ne!(a.wc(&[&a]).status, 0);
    initiator.set_error().unwrap();
}

#[test]
fn the_limit_of_a_queue_is_reported_once() {
    let (a, b) = (Side::new(), Side::new());
    let (initiator, target) = circuit(&a, &b);
    let events = listen(&b.device, b.srq.object());
    for _ in 0..4 {
        b.post_recv(77);
    }
    b.srq.arm_limit(3).unwrap();
    for imm in 0..3 {
        exchange(&a, (&initiator, &target), &b, imm, b"x");
        b.post_recv(77);
    }
    // `exchange` posts one and consumes one: never below 4
    b.device.dispatch_async();
    assert_eq!(events.limits.load(Ordering::Relaxed), 0);
    for _ in 0..6 {
        a.send(&initiator, b.srq(), 1, b"y");
        assert_eq!(b.wc(&[&b]).status, 0);
        assert_eq!(a.wc(&[&a]).status, 0);
    }
    await_events(&b.device, &events.limits, 1);
    b.device.unlisten(b.srq.object());
}

#[test]
fn a_domain_stays_open_while_it_has_queues_and_targets() {
    let device = devices(&[softverbs::backend()], false).remove(0);
    let xrcd = Arc::new(Xrcd::open(&device, None, libc::O_CREAT).unwrap());
    let pd = Pd::alloc(&device).unwrap();
    let cq = Arc::new(Cq::create(&device, 4, None, 0).unwrap());
    let srq = Srq::create_xrc(&pd, &xrcd, &cq, 4, 1).unwrap();
    let plain = Srq::create(&pd, 4, 1).unwrap();
    assert!(srq.number().is_some() && plain.number().is_none());
    assert_eq!(xrcd.close(), Err(FiErrno::EBUSY));
    drop(srq);
    let target = Target::create(&xrcd).unwrap();
    assert_eq!(xrcd.close(), Err(FiErrno::EBUSY));
    drop(target);
    xrcd.close().unwrap();
    assert_eq!(Target::create(&xrcd).err(), Some(FiErrno::EINVAL));
    let late = Srq::create_xrc(&pd, &xrcd, &cq, 4, 1);
    assert_eq!(late.err(), Some(FiErrno::EINVAL));
}
