//! Connections without an event queue: a sink of the test receives the results, and the private
//! data does not have the format of connected endpoints.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{
    CmSink, CmTarget, ConnectRequest, Connection, Dispatcher, Listener, Outcome, Owner, Side,
    State, Tuning,
};
use crate::Token;
use crate::errno::{FiErrno, Result};
use crate::verbs::{
    CmEvent, CmEventKind, Cq, Device, Pd, PrivateData, Qp, QpConfig, Transport, devices,
};

const LISTENER: Token = Token(1);
const DIALLED: Token = Token(2);
const ACCEPTED: Token = Token(3);

/// Private data of the rejection of unanswered requests.
const REFUSAL: &[u8] = &[0x5a, 0x17, 0xff];

/// A sink that stores the reported results.
#[derive(Debug)]
struct Results {
    dispatcher: Dispatcher,
    list: Mutex<Vec<(Token, Outcome)>>,
}

impl Results {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            dispatcher: Dispatcher::new().unwrap(),
            list: Mutex::default(),
        })
    }

    /// Waits for a result.
    fn arrive(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let any = || !self.list.lock().is_empty();
            self.dispatcher.progress(any);
            if any() {
                return;
            }
            assert!(self.dispatcher.wait().wait(Some(deadline)).unwrap());
        }
    }

    /// Returns the next result, which must be of `owner`.
    fn next(&self, owner: Token) -> Outcome {
        self.arrive();
        let (of, outcome) = self.list.lock().remove(0);
        assert_eq!(of, owner, "{outcome:?}");
        outcome
    }

    fn request(&self) -> ConnectRequest {
        match self.next(LISTENER) {
            Outcome::Requested(request) => request,
            other => panic!("{other:?}"),
        }
    }
}

impl CmSink for Results {
    fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    fn report(&self, owner: Token, outcome: Outcome) {
        self.list.lock().push((owner, outcome));
    }

    fn forget(&self, owner: Token) {
        self.list.lock().retain(|(of, _)| *of != owner);
    }
}

/// An owner of a connection with a queue pair, which posts nothing.
struct Link {
    conn: Connection,
    side: Mutex<Side>,
    qp: Mutex<Option<Qp>>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    /// The private data of its request or reply.
    sends: Vec<u8>,
}

impl Link {
    fn new(results: &Arc<Results>, token: Token, side: Side, sends: Vec<u8>) -> Arc<Self> {
        let device = device();
        let link = Arc::new(Self {
            conn: Connection::new(&device, Tuning::default(), token),
            side: Mutex::new(side),
            qp: Mutex::default(),
            pd: Pd::alloc(&device).unwrap(),
            cq: Arc::new(Cq::create(&device, 16, None, 0).unwrap()),
            sends,
        });
        let target: Weak<dyn CmTarget> = Arc::downgrade(&link) as _;
        let sink: Arc<dyn CmSink> = Arc::clone(results) as _;
        let mut registry = results.dispatcher.registry();
        link.conn
            .bind(&mut link.side.lock(), sink, &mut registry, None, target)
            .unwrap();
        link.conn.state.set(State::Enabled);
        link
    }

    fn create_qp(&self, side: &Side) {
        let id = side.id().unwrap();
        let transport = Transport::Rc {
            send_cq: &self.cq,
            recv_cq: &self.cq,
            srq: None,
        };
        let qp = Qp::create(id, &self.pd, transport, &QpConfig::SMALL);
        *self.qp.lock() = Some(qp.unwrap());
    }

    fn accept(&self) {
        let side = self.side.lock();
        self.create_qp(&side);
        self.conn.begin_accept().unwrap();
        self.conn.accept(&side, &self.sends).unwrap();
    }

    fn close(&self, results: &Results) {
        {
            let mut registry = results.dispatcher.registry();
            let mut side = self.side.lock();
            let mut begin = || self.conn.begin_close(&side, Some(&mut registry), REFUSAL);
            begin().unwrap();
            assert_eq!(begin(), None);
            self.conn.disconnect(&side);
            *self.qp.lock() = None;
            side.id = None;
        }
        assert_eq!(self.conn.begin_shutdown(), Err(FiErrno::ENOTCONN));
    }
}

impl Owner for Link {
    fn addr_resolved(&self) -> Result<()> {
        let side = self.side.lock();
        self.create_qp(&side);
        self.conn.resolve_route(&side)
    }

    fn route_resolved(&self) -> Result<()> {
        self.conn.request(&self.side.lock(), &self.sends)
    }

    fn established(&self, _: &PrivateData) -> Result<()> {
        Ok(())
    }
}

impl CmTarget for Link {
    fn cm_event(&self, event: CmEvent) {
        self.conn.advance(self, &event);
    }
}

fn device() -> Arc<Device> {
    let devices = devices(&[softverbs::backend()], false);
    devices.into_iter().next().expect("soft0")
}

/// A listener, and a link that dials it.
fn dialling(results: &Arc<Results>, sends: Vec<u8>) -> (Arc<Listener>, Arc<Link>) {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = Listener::open(&device(), Some(any), 0, LISTENER, REFUSAL).unwrap();
    let sink: Arc<dyn CmSink> = Arc::clone(results) as _;
    listener.bind(&sink).unwrap();
    listener.listen().unwrap();
    let link = Link::new(results, DIALLED, Side::default(), sends);
    let peer = listener.local_addr().unwrap();
    link.conn.dial(&mut link.side.lock(), Some(peer)).unwrap();
    (listener, link)
}

/// Private data of `len` bytes that does not have the format of connected endpoints.
fn data(len: usize) -> Vec<u8> {
    (0..len).map(|at| 0x81 ^ at as u8).collect()
}

/// A link for the side that accepts a request.
fn accepting(results: &Arc<Results>, request: ConnectRequest) -> Arc<Link> {
    let (id, _) = request.take().unwrap();
    Link::new(
        results,
        ACCEPTED,
        Side::new(Some(id), None, None),
        data(196),
    )
}

/// Waits until `count` results are reported, and returns them.
fn collect(results: &Results, count: usize) -> Vec<(Token, Outcome)> {
    let mut list = Vec::new();
    while list.len() < count {
        results.arrive();
        list.append(&mut results.list.lock());
    }
    list
}

/// Processes events for 20 ms, in which no result may be reported.
fn nothing_follows(results: &Results) {
    let until = Instant::now() + Duration::from_millis(20);
    while results.dispatcher.wait().wait(Some(until)).unwrap() {
        results.dispatcher.progress(|| false);
        if Instant::now() >= until {
            break;
        }
    }
    let list = results.list.lock();
    assert!(list.is_empty(), "{list:?}");
}

/// A thread has changed the state because the connection has ended. Before it reports the end, the
/// connection is closed: the application may free the endpoint's context.
#[test]
fn a_closed_connection_reports_nothing() {
    let results = Results::new();
    let (listener, dialled) = dialling(&results, data(1));
    let accepted = accepting(&results, results.request());
    accepted.accept();
    collect(&results, 2);
    dialled.conn.begin_shutdown().unwrap();
    dialled.close(&results);
    dialled.conn.report_end();
    match results.next(ACCEPTED) {
        Outcome::Ended(_) => {}
        other => panic!("{other:?}"),
    }
    nothing_follows(&results);
    accepted.close(&results);
    listener.close();
}

#[test]
fn a_queue_pair_that_fails_while_connecting_is_reported_once() {
    let results = Results::new();
    let (listener, dialled) = dialling(&results, data(1));
    let accepted = accepting(&results, results.request());
    dialled.conn.note_failure();
    dialled.conn.note_failure();
    match results.next(DIALLED) {
        Outcome::Failed { err, .. } => assert_eq!(err, FiErrno::ECONNABORTED),
        other => panic!("{other:?}"),
    }
    assert!(!dialled.conn.state.can_post());
    // the peer's reply changes nothing
    accepted.accept();
    assert_eq!(collect(&results, 1)[0].0, ACCEPTED);
    nothing_follows(&results);
    assert!(dialled.conn.state.is(State::Disconnected));
    dialled.close(&results);
    accepted.close(&results);
    listener.close();
}

/// The peer has the reply when the failure is known here: both ends of the connection are reported.
#[test]
fn a_queue_pair_that_fails_while_accepting_ends_the_connection() {
    let results = Results::new();
    let (listener, dialled) = dialling(&results, data(1));
    let accepted = accepting(&results, results.request());
    {
        let side = accepted.side.lock();
        accepted.create_qp(&side);
        accepted.conn.begin_accept().unwrap();
        accepted.conn.note_failure();
        accepted.conn.accept(&side, &data(1)).unwrap();
    }
    assert!(!accepted.conn.state.can_post());
    let reported = collect(&results, 3);
    let of = |owner| reported.iter().filter(move |(of, _)| *of == owner);
    let of_accepted: Vec<_> = of(ACCEPTED).map(|(_, outcome)| outcome).collect();
    assert!(
        matches!(of_accepted[..], [Outcome::Connected(_), Outcome::Ended(_)]),
        "{reported:?}"
    );
    assert_eq!(of(DIALLED).count(), 1);
    accepted.close(&results);
    dialled.close(&results);
    listener.close();
}

/// A thread can find the failure of the queue pair as soon as the state is that of an established
/// connection. It reports the end behind the result, because the state changes under the lock of
/// the reports.
#[test]
fn the_end_of_a_connection_is_reported_behind_its_establishment() {
    let results = Results::new();
    let link = Link::new(&results, DIALLED, Side::default(), data(1));
    link.conn.state.set(State::Connecting);
    let reports = link.conn.closed.lock();
    let begins = AtomicBool::new(false);
    let early = std::thread::scope(|scope| {
        scope.spawn(|| {
            begins.store(true, Ordering::Release);
            link.conn.report_connected(PrivateData::EMPTY)
        });
        while !begins.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(50));
        let early = link.conn.state.is(State::Connected);
        drop(reports);
        early
    });
    assert!(!early, "connected before it is reported");
    link.conn.note_failure();
    assert!(matches!(results.next(DIALLED), Outcome::Connected(_)));
    assert!(matches!(results.next(DIALLED), Outcome::Ended(_)));
    link.close(&results);
}

/// The confirmation of the reply is lost, and the peer, which has reported the connection,
/// disconnects: also before the thread that has sent the reply has changed the state.
#[test]
fn a_disconnect_in_place_of_a_confirmation_ends_a_connection() {
    for state in [State::Accepted, State::Accepting] {
        let results = Results::new();
        let (listener, dialled) = dialling(&results, data(1));
        let accepted = accepting(&results, results.request());
        accepted.accept();
        accepted.conn.state.set(state);
        accepted.cm_event(CmEvent {
            kind: CmEventKind::Disconnected,
            object: 0,
            new_id: None,
            status: 0,
            private_data: PrivateData::EMPTY,
            peer_qp: None,
        });
        assert!(matches!(results.next(ACCEPTED), Outcome::Connected(_)));
        assert!(matches!(results.next(ACCEPTED), Outcome::Ended(_)));
        assert!(accepted.conn.state.is(State::Disconnected));
        // the confirmation, which is late here, changes nothing
        assert!(matches!(results.next(DIALLED), Outcome::Connected(_)));
        nothing_follows(&results);
        dialled.close(&results);
        accepted.close(&results);
        listener.close();
    }
}

#[test]
fn raw_private_data_reaches_both_sides() {
    let results = Results::new();
    let (listener, dialled) = dialling(&results, data(56));
    let request = results.request();
    assert_eq!(request.private_data().bytes(), data(56));
    let accepted = accepting(&results, request);
    accepted.accept();
    // the two events may arrive in either order
    for (owner, outcome) in collect(&results, 2) {
        match outcome {
            Outcome::Connected(reply) if owner == DIALLED => assert_eq!(reply.bytes(), data(196)),
            Outcome::Connected(_) => assert_eq!(owner, ACCEPTED),
            other => panic!("{other:?}"),
        }
    }
    assert!(dialled.conn.state.can_post() && accepted.conn.state.can_post());

    dialled.close(&results);
    match results.next(ACCEPTED) {
        Outcome::Ended(target) => assert!(target.upgrade().is_some()),
        other => panic!("{other:?}"),
    }
    accepted.close(&results);
    listener.close();
}

/// The private data of the rejection that the dialling side receives. The connection manager fills
/// it up with zeros to 148 bytes.
fn rejection(results: &Results) -> Vec<u8> {
    match results.next(DIALLED) {
        Outcome::Failed {
            err, private_data, ..
        } => {
            assert_eq!(err, FiErrno::ECONNREFUSED);
            private_data.bytes().to_vec()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_that_is_dropped_is_rejected() {
    let results = Results::new();
    let (listener, dialled) = dialling(&results, data(1));
    drop(results.request());
    assert!(rejection(&results).starts_with(REFUSAL));
    assert!(dialled.conn.state.is(State::Disconnected));
    dialled.close(&results);
    listener.close();
}

#[test]
fn a_rejection_carries_raw_private_data() {
    let results = Results::new();
    let (listener, dialled) = dialling(&results, data(1));
    results.request().reject(&data(148)).unwrap();
    assert_eq!(rejection(&results), data(148));
    dialled.close(&results);
    let (other, dialled) = dialling(&results, data(1));
    let too_long = results.request().reject(&data(149));
    assert_eq!(too_long, Err(FiErrno::EINVAL));
    dialled.close(&results);
    let (last, dialled) = dialling(&results, data(1));
    let (id, _) = results.request().take().unwrap();
    let side = Side::new(Some(id), None, None);
    Link::new(&results, ACCEPTED, side, data(1)).close(&results);
    assert!(rejection(&results).starts_with(REFUSAL));
    dialled.close(&results);
    for listener in [listener, other, last] {
        listener.close();
    }
}

#[test]
fn a_closed_listener_s_requests_are_rejected() {
    let results = Results::new();
    let (listener, dialled) = dialling(&results, data(1));
    results.arrive();
    listener.close();
    match results.next(DIALLED) {
        Outcome::Failed { err, .. } => assert_eq!(err, FiErrno::ECONNREFUSED),
        other => panic!("{other:?}"),
    }
    assert_eq!(listener.listen(), Err(FiErrno::ENOEQ));
    dialled.close(&results);
}
