//! The circuits of a domain's connected endpoints on XRC, and the requests that make them or name
//! them. `docs/protocol-xrc.md`, "MSG endpoints".
//!
//! The domain's driver thread takes the events of the connection manager, and executes the steps
//! that need the dispatcher's lock, or none: a step never runs inside an event.
//!
//! Here are the circuits, the dials that wait for one, the users and the listeners. The notices of
//! ends (`notices.rs`) and the identifiers of answered requests (`retired.rs`) have structures of
//! their own under the same lock.

mod notices;
mod retired;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use self::notices::Notices;
use self::retired::{Retired, RetiredIds};
use super::circuit::{Circuit, CircuitUser};
use super::circuit_dial::Dial;
use super::dial_config::{DialConfig, Shape};
use super::driver::{Driven, Turn};
use super::end_notice::Notice;
use super::incoming::Incoming;
use super::peer_queues::PeerQueues;
use super::{CmSink, ConnectRequest, Dispatcher, Driver, Listener, Outcome, Tuning, is_in_use};
use crate::Token;
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{CmId, Device, QpNumber, SrqNumber, Target, Xrcd};
use crate::wire::cm_data::CmData;
use crate::wire::msg_xrc::{End, Kind};

/// How long an endpoint waits for a circuit that another one makes, before it makes its own: the
/// peer's application may be slow to accept.
const CIRCUIT_WAIT: Duration = Duration::from_millis(100);
/// How long the connecting side waits for the peer's reciprocal request.
const RECIPROCAL: Duration = Duration::from_secs(10);
/// How often it looks meanwhile whether the peer's process lives. The request of one that lives
/// follows its answer at once.
const PROBE: Duration = Duration::from_millis(250);
/// Maximum number of requests that a listener queues, and of notices of peers without an answer.
const BACKLOG: usize = 1024;
/// Targets beyond which those that are not held any more are looked for.
const SERVED: usize = 64;
/// Free ports that are tried until one is free in both port spaces.
const PORTS: usize = 32;
const CONNECTIONS: Token = Token(1);
const SERVICES: Token = Token(2);

/// A circuit that exists, or is being made.
#[derive(Debug)]
struct CircuitEntry {
    shape: Shape,
    /// The dial that makes it, until it is up.
    maker: Option<Arc<Dial>>,
    circuit: Weak<Circuit>,
    waiting: Vec<(Arc<Dial>, Instant)>,
    /// Addresses whose processes do not have its target.
    elsewhere: Vec<SocketAddr>,
}

/// Work for the driver.
#[derive(Debug)]
pub(super) enum Step {
    /// Create the identifier of a dial, and resolve the address.
    Resolve(Arc<Dial>),
    /// Listen at the dial's local address, and resolve the route.
    Listen(Arc<Dial>),
    /// End an identifier.
    EndId(Arc<CmId>),
    /// Send a notice.
    Notify(Arc<Notice>),
    /// A notice has been answered.
    EndNotice(Arc<Notice>),
    /// A notice cannot be sent, or is refused.
    FailNotice(Arc<Notice>),
    /// The circuit of a user has failed, or its peer has sent a notice of the end: the user sends
    /// its own.
    SendEndNotice(Weak<dyn CircuitUser>),
    /// Move a target to its error state.
    FailTarget(Arc<Xrcd>, QpNumber),
}

#[derive(Debug, Default)]
struct State {
    places: Vec<CircuitEntry>,
    steps: VecDeque<Step>,
    users: HashMap<u32, Weak<dyn CircuitUser>>,
    /// Targets that this side's endpoints hold, and the receive queue to which each delivers.
    served: HashMap<QpNumber, Vec<(Weak<Target>, SrqNumber)>>,
    /// With so many of them, those that are not held any more are removed.
    served_limit: usize,
    /// Users that wait for a reciprocal request.
    awaiting: Vec<(u32, Instant)>,
    /// The same users, with the time of the next probe of each one's peer.
    probes: Vec<(u32, Instant)>,
    listeners: Vec<Listening>,
    notices: Notices,
    peer_queues: PeerQueues,
    retired: RetiredIds,
    closed: bool,
    /// The driver has failed: nothing is connected any more.
    failed: bool,
}

impl State {
    /// The peer of a user has sent its request, or the user has ended.
    fn end_expectation(&mut self, tag: u32) {
        self.awaiting.retain(|(awaiting, _)| *awaiting != tag);
        self.probes.retain(|(awaiting, _)| *awaiting != tag);
    }
}

/// The listeners at one local address, at one port in both port spaces.
#[derive(Debug)]
struct Listening {
    ip: IpAddr,
    port: u16,
    both: [Arc<Listener>; 2],
}

/// The circuits of a domain. Thread safe.
#[derive(Debug)]
pub(crate) struct Circuits {
    this: Weak<Self>,
    device: Arc<Device>,
    driver: Arc<Driver>,
    pub(super) tuning: Tuning,
    turn: Arc<Turn>,
    /// A leaf, held while a circuit is found; not during calls of the connection manager.
    state: Mutex<State>,
    /// Held while listeners are opened. It precedes the dispatcher's lock.
    listening: Mutex<()>,
    /// Notified when a notice has ended.
    ended: Condvar,
    counts: Counts,
    /// Replaces the limit of notices.
    #[cfg(test)]
    notice_limit: std::sync::OnceLock<Duration>,
}

/// What a domain has made, for tests.
#[derive(Debug, Default)]
struct Counts {
    circuits: AtomicU32,
    created: AtomicU32,
    opened: AtomicU32,
}

impl Circuits {
    /// [`Self::close`] ends it.
    pub(crate) fn new(device: &Arc<Device>, driver: Arc<Driver>, tuning: Tuning) -> Arc<Self> {
        let circuits = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            device: Arc::clone(device),
            driver,
            tuning,
            turn: Arc::default(),
            state: Mutex::default(),
            listening: Mutex::new(()),
            ended: Condvar::new(),
            counts: Counts::default(),
            #[cfg(test)]
            notice_limit: std::sync::OnceLock::new(),
        });
        let driven: Weak<Self> = Weak::clone(&circuits.this);
        circuits.driver.add(driven, &circuits.turn, None);
        circuits
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// A circuit of this side is up.
    pub(super) fn count_circuit(&self) {
        self.counts.circuits.fetch_add(1, Ordering::Relaxed);
    }

    /// An endpoint has created a target, or has opened one.
    pub(crate) fn count_target(&self, created: bool) {
        let count = match created {
            true => &self.counts.created,
            false => &self.counts.opened,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// What was made so far, as an object of JSON.
    pub(crate) fn counts(&self) -> String {
        let [circuits, created, opened] = [
            &self.counts.circuits,
            &self.counts.created,
            &self.counts.opened,
        ]
        .map(|count| count.load(Ordering::Relaxed));
        format!(
            "{{\"msg_circuits\": {circuits}, \"msg_targets_created\": {created}, \
             \"msg_targets_opened\": {opened}}}"
        )
    }

    /// Waits until the event of the connection manager that is being processed has been.
    pub(crate) fn await_current_event(&self) {
        drop(self.driver.dispatcher().registry());
    }

    /// A number by which peers find this user; not 0.
    ///
    /// # Errors
    /// `EOTHER`: the driver has failed. Those of getrandom(2).
    pub(crate) fn register(&self, user: Weak<dyn CircuitUser>) -> Result<u32> {
        let mut state = self.state.lock();
        if state.failed {
            return Err(FiErrno::EOTHER);
        }
        loop {
            // the low half is as random as the whole
            let tag = crate::mr::random()? as u32;
            if tag != 0 && !state.users.contains_key(&tag) {
                state.users.insert(tag, user);
                return Ok(tag);
            }
        }
    }

    /// The user is found no more.
    pub(crate) fn forget(&self, tag: u32) {
        let mut state = self.state.lock();
        state.users.remove(&tag);
        state.end_expectation(tag);
    }

    /// The user gets [`CircuitUser::not_answered`] unless [`Self::end_expectation`] is called
    /// within 10 s, and [`CircuitUser::probe`] meanwhile.
    pub(crate) fn expect(&self, tag: u32) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.awaiting.push((tag, now + RECIPROCAL));
        state.probes.push((tag, now + PROBE));
        drop(state);
        self.driver.wake(&self.turn);
    }

    /// The reciprocal request has arrived.
    pub(crate) fn end_expectation(&self, tag: u32) {
        self.state.lock().end_expectation(tag);
    }

    /// Begins to connect: on a circuit that is up, or with a new one. `alone`: with a new one,
    /// which has no other user.
    pub(crate) fn dial(
        &self,
        user: Weak<dyn CircuitUser>,
        config: DialConfig,
        alone: bool,
    ) -> Arc<Dial> {
        let dial = Dial::new(&self.this, user, config);
        self.place(&dial, alone);
        dial
    }

    /// Finds the circuit of a dial. `alone`: it makes its own one.
    pub(super) fn place(&self, dial: &Arc<Dial>, alone: bool) {
        let mut state = self.state.lock();
        state
            .places
            .retain(|place| place.maker.is_some() || place.circuit.strong_count() != 0);
        let (room, user) = (dial.config().room(), dial.user());
        let to = dial.config().to;
        let suitable = |place: &&mut CircuitEntry| {
            !alone && place.shape.suits(dial.config()) && !place.elsewhere.contains(&to)
        };
        let mut making = None;
        // the newest first: the targets of older ones may have ended with their holders
        for place in state.places.iter_mut().rev().filter(suitable) {
            if place.maker.is_some() {
                making.get_or_insert(place);
            } else if let Some(circuit) = place.circuit.upgrade()
                && circuit.is_used()
                && let Some(share) = circuit.share(room, user)
            {
                dial.join(share);
                making = None;
                break;
            }
        }
        if let Some(place) = making {
            place
                .waiting
                .push((Arc::clone(dial), Instant::now() + CIRCUIT_WAIT));
        } else {
            if !dial.has_share() {
                state.places.push(CircuitEntry {
                    shape: Shape::of(dial.config()),
                    maker: Some(Arc::clone(dial)),
                    circuit: Weak::new(),
                    waiting: Vec::new(),
                    elsewhere: Vec::new(),
                });
            }
            state.steps.push_back(Step::Resolve(Arc::clone(dial)));
        }
        drop(state);
        self.driver.wake(&self.turn);
    }

    /// The circuit that `dial` makes is up, or with `None` has failed or is not needed: the dials
    /// that wait for it continue.
    pub(super) fn made(&self, dial: &Arc<Dial>, circuit: Option<&Arc<Circuit>>) {
        let mut waiting = Vec::new();
        let mut state = self.state.lock();
        let is_maker = |place: &CircuitEntry| {
            let maker = place.maker.as_ref();
            maker.is_some_and(|maker| Arc::ptr_eq(maker, dial))
        };
        if let Some(place) = state.places.iter_mut().find(|place| is_maker(place)) {
            place.maker = None;
            place.circuit = circuit.map(Arc::downgrade).unwrap_or_default();
            waiting = std::mem::take(&mut place.waiting);
        }
        for place in &mut state.places {
            place.waiting.retain(|(other, _)| !Arc::ptr_eq(other, dial));
        }
        drop(state);
        for (dial, _) in waiting {
            self.place(&dial, false);
        }
    }

    /// The process at this address does not have the target of the circuit, or not for all its
    /// endpoints.
    pub(super) fn is_elsewhere(&self, circuit: &Arc<Circuit>, to: SocketAddr) {
        let mut state = self.state.lock();
        let is_this =
            |place: &&mut CircuitEntry| std::ptr::eq(place.circuit.as_ptr(), Arc::as_ptr(circuit));
        if let Some(place) = state.places.iter_mut().find(is_this) {
            place.elsewhere.push(to);
        }
    }

    /// Notes that an endpoint with this receive queue holds a target. False: another endpoint of
    /// the domain holds it, with another receive queue. A message that waits for a receive in one
    /// queue would delay all messages to the other.
    pub(crate) fn serve(&self, target: &Arc<Target>, srq: SrqNumber) -> bool {
        let mut state = self.state.lock();
        let is_held = |(held, _): &(Weak<Target>, SrqNumber)| held.strong_count() != 0;
        if state.served.len() >= state.served_limit {
            state.served.retain(|_, of| of.iter().any(is_held));
            state.served_limit = 2 * state.served.len().max(SERVED);
        }
        let of = state.served.entry(target.number()).or_default();
        of.retain(is_held);
        if of.iter().any(|(_, queue)| *queue != srq) {
            return false;
        }
        of.push((Arc::downgrade(target), srq));
        true
    }

    pub(super) fn push(&self, step: Step) {
        self.state.lock().steps.push_back(step);
        self.driver.wake(&self.turn);
    }

    /// Where the process of a peer's receive queue takes notices, if a connection to the queue has
    /// shown that.
    pub(crate) fn process_of(&self, ip: IpAddr, srq: SrqNumber) -> Option<SocketAddr> {
        self.state.lock().peer_queues.process(ip, srq)
    }

    /// The port of the listeners at a local address, which are opened for it. The caller holds no
    /// lock.
    pub(crate) fn listen_at(&self, local: SocketAddr) -> Result<u16> {
        let _listening = self.listening.lock();
        if let Some(port) = self.port_at(local) {
            return Ok(port);
        }
        // kept until a port is found: each attempt gets another one
        let mut attempts = Vec::new();
        let mut last = FiErrno::EADDRINUSE;
        for _ in 0..PORTS {
            let mut at = local;
            at.set_port(0);
            let device = &self.device;
            let connections = Listener::open(device, Some(at), BACKLOG, CONNECTIONS, &[])?;
            let port = connections.local_addr()?.port();
            at.set_port(port);
            let services = match Listener::open_service(device, at, BACKLOG, SERVICES) {
                Err(error) if is_in_use(error) => {
                    attempts.push(connections);
                    last = error;
                    continue;
                }
                services => services?,
            };
            let both = [connections, services];
            let sink = self.this.upgrade().ok_or(FiErrno::EOPBADSTATE)?;
            let sink: Arc<dyn CmSink> = sink;
            let start = |listener: &Arc<Listener>| {
                listener.bind(&sink)?;
                listener.listen()
            };
            if let Err(error) = both.iter().try_for_each(start) {
                both.iter().for_each(|listener| listener.close());
                return Err(error);
            }
            let ip = local.ip();
            self.state
                .lock()
                .listeners
                .push(Listening { ip, port, both });
            return Ok(port);
        }
        Err(last)
    }

    /// The number of identifiers whose events the driver takes.
    #[cfg(test)]
    pub(crate) fn identifiers(&self) -> usize {
        self.driver.dispatcher().registry().targets()
    }

    /// This side states that it listens at this port, as one whose process has ended.
    #[cfg(test)]
    pub(crate) fn state_port(&self, port: u16) {
        for at in &mut self.state.lock().listeners {
            at.port = port;
        }
    }

    /// [`Self::place`], as if the dial had not ended meanwhile.
    #[cfg(test)]
    pub(crate) fn place_ended(&self, dial: &Arc<Dial>) {
        self.place(dial, false);
    }

    /// The number of circuits that are being made.
    #[cfg(test)]
    pub(crate) fn making(&self) -> usize {
        let state = self.state.lock();
        let making = state.places.iter().filter(|place| place.maker.is_some());
        making.count()
    }

    /// The port of the listeners at a local address, if they are open.
    pub(crate) fn port_at(&self, local: SocketAddr) -> Option<u16> {
        let state = self.state.lock();
        let mut known = state.listeners.iter();
        known.find(|at| at.ip == local.ip()).map(|at| at.port)
    }

    fn user(&self, tag: u32) -> Option<Arc<dyn CircuitUser>> {
        self.state.lock().users.get(&tag).and_then(Weak::upgrade)
    }

    /// A request at one of the domain's listeners.
    fn take_request(&self, request: ConnectRequest) {
        if let Some(end) = End::decode(request.private_data().bytes()) {
            let user = self.user(end.to);
            if let Some(user) = &user {
                user.peer_ended();
            }
            let Some((id, _)) = request.take() else {
                return;
            };
            return self.take_notice(id, end, user.as_ref());
        }
        let Some(incoming) = Incoming::of(request) else {
            info_log!(
                EpCtrl,
                "an unknown message of the connection manager is rejected"
            );
            return;
        };
        let header = *incoming.header();
        match self.user(header.tag) {
            Some(user) if header.kind == Kind::Reciprocal => user.reciprocal(incoming),
            Some(user) if header.kind == Kind::OtherDomain => user.redirected(incoming),
            _ => {
                info_log!(EpCtrl, "no connection has the number {:#x}", header.tag);
                incoming.reject(&CmData::EMPTY);
            }
        }
    }

    fn execute(&self, step: Step) {
        match step {
            Step::Resolve(dial) => dial.resolve(self),
            Step::Listen(dial) => dial.listen(self),
            Step::EndId(id) => self.drop_id(id),
            Step::Notify(notice) => notice.send(self),
            Step::EndNotice(notice) => self.end_notice(&notice),
            Step::FailNotice(notice) => self.fail_notice(&notice),
            Step::SendEndNotice(user) => {
                if let Some(user) = user.upgrade() {
                    user.send_end_notice();
                }
            }
            Step::FailTarget(xrcd, number) => {
                // it may have ended meanwhile
                if let Ok(target) = Target::open(&xrcd, number) {
                    let _ = target.set_error();
                }
            }
        }
    }

    /// The connection of a user has ended, and no notice was sent to its peer: the driver calls
    /// [`CircuitUser::send_end_notice`]. May be called with the lock of a completion queue held.
    pub(crate) fn queue_end_notice(&self, user: Weak<dyn CircuitUser>) {
        self.push(Step::SendEndNotice(user));
    }

    /// A target is of no use to its initiator: it goes to its error state. May be called with the
    /// lock of a completion queue held.
    pub(crate) fn fail_target(&self, xrcd: &Arc<Xrcd>, number: QpNumber) {
        self.push(Step::FailTarget(Arc::clone(xrcd), number));
    }

    /// A user is connected to the receive queue with this number, of the process that takes notices
    /// at this address. Connections to an ended queue with the same number end.
    pub(crate) fn add_connection(
        &self,
        srq: SrqNumber,
        process: SocketAddr,
        user: Weak<dyn CircuitUser>,
    ) {
        let ended = self.state.lock().peer_queues.add(srq, process, user);
        for user in ended.iter().filter_map(Weak::upgrade) {
            info_log!(
                EpCtrl,
                "a connection is ended: its receive queue {:#x} at {} has the number of a newer one",
                srq.get(),
                process.ip()
            );
            user.peer_ended();
        }
    }

    fn drop_id(&self, id: Arc<CmId>) {
        self.driver.dispatcher().registry().remove(id.object());
        drop(id);
    }

    /// What is due at this time, and the time of the next call.
    fn take_due(&self, now: Instant) -> (Due, Option<Instant>) {
        let mut state = self.state.lock();
        let mut due = Due::default();
        for place in &mut state.places {
            due.dials.extend(overdue(&mut place.waiting, now));
        }
        let tags = overdue(&mut state.awaiting, now);
        let users = tags
            .iter()
            .filter_map(|tag| state.users.get(tag)?.upgrade());
        due.users = users.collect();
        let probes = overdue(&mut state.probes, now);
        let awaiting = state.awaiting.iter().filter(|_| !probes.is_empty());
        let awaiting: HashSet<u32> = awaiting.map(|(of, _)| *of).collect();
        let waits = |tag: &u32| awaiting.contains(tag);
        let again: Vec<_> = probes.into_iter().filter(waits).collect();
        let probed = again
            .iter()
            .filter_map(|tag| state.users.get(tag)?.upgrade());
        due.probed = probed.collect();
        state
            .probes
            .extend(again.into_iter().map(|tag| (tag, now + PROBE)));
        due.notices = state.notices.overdue(now);
        due.retired = state.retired.overdue(now);
        let waiting = state.places.iter().flat_map(|place| &place.waiting);
        let next = waiting.map(|(_, at)| *at);
        let next = next.chain(state.awaiting.iter().map(|(_, at)| *at));
        let next = next.chain(state.probes.iter().map(|(_, at)| *at));
        let next = next.chain(state.notices.deadlines());
        let next = next.chain(state.retired.deadlines());
        let next = next.min();
        (due, next)
    }

    /// Ends the domain's circuits: waits at most 1 s for the notices under way. No endpoint is
    /// left. Idempotent; the first call acquires the dispatcher's lock. In a forked child it does
    /// nothing: a thread of the parent may have held a lock at the fork.
    pub(crate) fn close(&self) {
        if !self.driver.is_of_this_process() {
            return;
        }
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.closed, true) {
            return;
        }
        let deadline = Instant::now() + self.notice_limit();
        while state.notices.are_awaited() {
            if self.ended.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        let listeners = std::mem::take(&mut state.listeners);
        let left = std::mem::take(&mut *state);
        state.closed = true;
        drop(state);
        for listener in listeners.iter().flat_map(|at| &at.both) {
            listener.close();
        }
        // this thread may be one that drives: it does not wait for the end of that
        self.driver.forget(&self.turn);
        drop(left);
    }
}

/// What has become due.
#[derive(Default)]
struct Due {
    dials: Vec<Arc<Dial>>,
    users: Vec<Arc<dyn CircuitUser>>,
    probed: Vec<Arc<dyn CircuitUser>>,
    notices: Vec<Arc<Notice>>,
    retired: Vec<Retired>,
}

/// Takes the elements whose time has come.
fn overdue<T: Clone>(list: &mut Vec<(T, Instant)>, now: Instant) -> Vec<T> {
    let mut due = Vec::new();
    list.retain(|(element, at)| {
        if *at <= now {
            due.push(element.clone());
        }
        *at > now
    });
    due
}

impl Driven for Circuits {
    fn drive(&self) -> Option<Instant> {
        loop {
            let step = self.state.lock().steps.pop_front();
            let Some(step) = step else { break };
            self.execute(step);
        }
        let held = self.answer_notices(Instant::now());
        let (due, next) = self.take_due(Instant::now());
        for dial in due.dials {
            self.place(&dial, true);
        }
        for user in due.users {
            user.not_answered();
        }
        for user in due.probed {
            user.probe();
        }
        for notice in due.notices {
            self.linger(&notice);
        }
        let repeat = self.repeat_notices(Instant::now());
        self.end_ids(due.retired);
        next.into_iter().chain(held).chain(repeat).min()
    }

    /// Endpoints that are being connected are not connected. Those that are connected need no
    /// driver until they close.
    fn fail(&self) {
        let (users, notices) = {
            let mut state = self.state.lock();
            state.failed = true;
            let users: Vec<_> = state.users.values().filter_map(Weak::upgrade).collect();
            (users, state.notices.give_up())
        };
        notices.iter().for_each(|notice| notice.release());
        users.iter().for_each(|user| user.not_answered());
        // what waits for their answers
        drop(notices);
        self.ended.notify_all();
    }
}

impl CmSink for Circuits {
    fn dispatcher(&self) -> &Dispatcher {
        self.driver.dispatcher()
    }

    fn report(&self, _: Token, outcome: Outcome) {
        if let Outcome::Requested(request) = outcome {
            self.take_request(request);
        }
    }

    fn forget(&self, _: Token) {}
}
