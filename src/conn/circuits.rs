//! The circuits of a domain's connected endpoints on XRC, and the requests that make them or name
//! them. `docs/protocol-xrc.md`, "MSG endpoints".
//!
//! The domain's driver thread takes the events of the connection manager, and executes the steps
//! that need the dispatcher's lock, or none: a step never runs inside an event.
//!
//! In one file: the steps are queued by calls and events, and executed here alone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::answered::Answered;
use super::circuit::{Circuit, CircuitUser};
use super::circuit_dial::Dial;
use super::dial_config::{DialConfig, Shape};
use super::driver::{Driven, Turn};
use super::end_notice::{Keep, Notice};
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
/// How long a notice of the end may take, and how long the close of the domain, or of a context,
/// waits for notices.
const NOTICE: Duration = Duration::from_secs(1);
/// When a notice without an answer is repeated, and the target of its peer is looked for. The time
/// doubles up to the second.
const REPEAT: Duration = Duration::from_secs(1);
const LONGEST_REPEAT: Duration = Duration::from_secs(64);
/// Maximum number of such notices. Beyond it, the peer of the oldest one is cut off.
const LINGERING: usize = 1024;
/// How often the driver examines whether a notice can be answered.
const LOOK: Duration = Duration::from_millis(1);
/// How long the identifiers of answered requests stay.
const RETIRED: Duration = Duration::from_secs(1);
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
    /// The circuit of a user has failed, or its peer has told the end: the peer is told.
    TellEnd(Weak<dyn CircuitUser>),
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
    notices: Vec<(Arc<Notice>, Instant)>,
    /// Notices without an answer, whose peers may still access what is kept for them; oldest first.
    lingering: Vec<Lingering>,
    /// Notices of peers that are not answered yet.
    unanswered: Vec<Unanswered>,
    peer_queues: PeerQueues,
    /// The identifiers of requests that are answered.
    retired: Vec<(Retired, Instant)>,
    closed: bool,
    /// The driver has failed: nothing is connected any more.
    failed: bool,
}

impl State {
    /// Without a driver, what is kept for a peer stays until the domain is closed.
    fn keep(&mut self, notice: Arc<Notice>) {
        if let Some(keep) = notice.keep() {
            keep.give_up();
            self.lingering.push(Lingering::new(notice));
        }
    }

    /// The peer of a user has sent its request, or the user has ended.
    fn end_expectation(&mut self, tag: u32) {
        self.awaiting.retain(|(awaiting, _)| *awaiting != tag);
        self.probes.retain(|(awaiting, _)| *awaiting != tag);
    }
}

/// A notice that is repeated. Nothing waits for it.
#[derive(Debug)]
struct Lingering {
    notice: Arc<Notice>,
    due: Instant,
    /// The time from then to the next repetition.
    pause: Duration,
}

impl Lingering {
    fn new(notice: Arc<Notice>) -> Self {
        Self {
            notice,
            due: Instant::now() + REPEAT,
            pause: 2 * REPEAT,
        }
    }
}

/// A peer's notice of the end. When it is answered, the peer may end its receive queue, which
/// breaks the circuit of a request to it: so the requests of the endpoint complete before, if they
/// can.
#[derive(Debug)]
struct Unanswered {
    id: CmId,
    end: End,
    user: Weak<dyn CircuitUser>,
    due: Instant,
}

fn answer_notice(id: &CmId, end: &End) {
    // the peer has nothing to do with an error
    let _ = id.answer_service(&end.encode());
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
    /// Replaces [`NOTICE`].
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

    fn notice_limit(&self) -> Duration {
        #[cfg(test)]
        if let Some(limit) = self.notice_limit.get() {
            return *limit;
        }
        NOTICE
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

    /// The user gets [`CircuitUser::not_answered`] unless [`Self::end_expectation`] is called within
    /// 10 s, and [`CircuitUser::probe`] meanwhile.
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

    /// Keeps the identifier of an answered request until the peer has the answer.
    pub(crate) fn retire(&self, request: Incoming) {
        self.add_retired(Retired::Request(Arc::new(request)), RETIRED);
    }

    /// As [`Self::retire`], of a reciprocal request that makes a circuit, of a `weft` peer: until
    /// the peer has confirmed the answer, at most 10 s. The user gets [`CircuitUser::peer_ended`]
    /// if the exchange fails before. Inside an event.
    pub(crate) fn await_confirmation(&self, request: Incoming, user: Weak<dyn CircuitUser>) {
        let object = request.object();
        let answered = Answered::new(&self.this, request, user);
        let target: Weak<Answered> = Arc::downgrade(&answered);
        self.driver.dispatcher().insert(object, target);
        self.add_retired(Retired::Answered(answered), RECIPROCAL);
    }

    /// The peer has confirmed an answer, or the exchange has ended: the identifier of the request
    /// ends like those of other requests.
    pub(super) fn note_confirmation(&self, answered: &Answered) {
        let due = Instant::now() + RETIRED;
        let mut state = self.state.lock();
        let mut retired = state.retired.iter_mut();
        if let Some((_, at)) = retired.find(|(retired, _)| retired.keeps(answered)) {
            *at = due;
        }
        drop(state);
        self.driver.wake(&self.turn);
    }

    /// As [`Self::retire`], of a request of this side. libfabric's provider requires that the side
    /// with the target disconnects first.
    pub(super) fn retire_id(&self, id: Arc<CmId>) {
        self.add_retired(Retired::Dial(id), RETIRED);
    }

    fn add_retired(&self, retired: Retired, span: Duration) {
        let due = Instant::now() + span;
        self.state.lock().retired.push((retired, due));
        self.driver.wake(&self.turn);
    }

    pub(super) fn push(&self, step: Step) {
        self.state.lock().steps.push_back(step);
        self.driver.wake(&self.turn);
    }

    /// Tells the peer at this address that a connection has ended. `keep` lives until the peer has
    /// answered, or after 1 s until it is not [needed](Keep::is_needed) any more: memory that the
    /// peer may access until then. `circuit`: the connection's, to which nothing is posted any
    /// more; it lives until the peer has answered, at most 1 s.
    pub(crate) fn notify(
        &self,
        (from, to): (Option<SocketAddr>, SocketAddr),
        end: End,
        keep: Option<Box<dyn Keep>>,
        circuit: Option<Arc<Circuit>>,
    ) {
        self.send(Notice::new(
            &self.this,
            (from, to),
            end,
            None,
            keep,
            circuit,
        ));
    }

    /// No notice under way prolongs the life of the circuit: requests are posted to it that the
    /// device has not flushed, so it ends with its users.
    pub(crate) fn release(&self, circuit: &Arc<Circuit>) {
        let notices: Vec<_> = {
            let state = self.state.lock();
            let notices = state.notices.iter().map(|(notice, _)| notice);
            let notices = notices.filter(|notice| notice.retains(circuit));
            notices.map(Arc::clone).collect()
        };
        notices.iter().for_each(|notice| notice.release());
    }

    /// Asks whether the process lives that takes notices at the second address: a living one
    /// answers a notice that names no endpoint. If it has ended, the user gets
    /// [`CircuitUser::process_ended`].
    pub(crate) fn ask(&self, path: (Option<SocketAddr>, SocketAddr), user: Weak<dyn CircuitUser>) {
        let nobody = End { to: 0, from: 0 };
        let notice = Notice::new(&self.this, path, nobody, Some(user), None, None);
        self.send(notice);
    }

    /// Where the process of a peer's receive queue takes notices, if a connection to the queue has
    /// shown that.
    pub(crate) fn process_of(&self, ip: IpAddr, srq: SrqNumber) -> Option<SocketAddr> {
        self.state.lock().peer_queues.process(ip, srq)
    }

    fn send(&self, notice: Arc<Notice>) {
        let mut state = self.state.lock();
        // a forked child has no driver
        if state.closed || !self.driver.is_of_this_process() {
            return;
        }
        if state.failed {
            state.keep(Arc::clone(&notice));
            drop(state);
            return notice.release();
        }
        let due = Instant::now() + self.notice_limit();
        state.notices.push((Arc::clone(&notice), due));
        state.steps.push_back(Step::Notify(notice));
        drop(state);
        self.driver.wake(&self.turn);
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

    /// Sets the limit of notices, once.
    #[cfg(test)]
    pub(crate) fn set_notice_limit(&self, limit: Duration) {
        self.notice_limit.set(limit).expect("not set yet");
    }

    /// [`Self::place`], as if the dial had not ended meanwhile.
    #[cfg(test)]
    pub(crate) fn place_ended(&self, dial: &Arc<Dial>) {
        self.place(dial, false);
    }

    /// The number of identifiers of answered requests that have not ended.
    #[cfg(test)]
    pub(crate) fn retired(&self) -> usize {
        self.state.lock().retired.len()
    }

    /// Ends the identifiers of answered requests, as a process that ends.
    #[cfg(test)]
    pub(crate) fn end_retired(&self) {
        let retired = std::mem::take(&mut self.state.lock().retired);
        let mut registry = self.driver.dispatcher().registry();
        for (retired, _) in &retired {
            if let Retired::Answered(answered) = retired {
                registry.remove(answered.object());
            }
        }
        drop(registry);
        drop(retired);
    }

    /// The numbers of notices that are awaited, and of those that linger.
    #[cfg(test)]
    pub(crate) fn notices(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.notices.len(), state.lingering.len())
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
            let mut state = self.state.lock();
            // each connection has one; a peer that sends more does not use up the memory
            let Some(user) = user.filter(|_| state.unanswered.len() < BACKLOG) else {
                drop(state);
                return answer_notice(&id, &end);
            };
            // answered behind the user's `tell_end`
            state.unanswered.push(Unanswered {
                id,
                end,
                user: Arc::downgrade(&user),
                due: Instant::now() + self.notice_limit(),
            });
            drop(state);
            self.driver.wake(&self.turn);
            return;
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
            Step::TellEnd(user) => {
                if let Some(user) = user.upgrade() {
                    user.tell_end();
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

    /// The connection of a user has ended, and its peer has not been told: the driver calls
    /// [`CircuitUser::tell_end`]. May be called with the lock of a completion queue held.
    pub(crate) fn tell_end(&self, user: Weak<dyn CircuitUser>) {
        self.push(Step::TellEnd(user));
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

    /// Waits until all notices are answered, at most 1 s. Not inside an event, and not in the
    /// driver's thread.
    pub(crate) fn await_notices(&self) {
        let deadline = Instant::now() + self.notice_limit();
        let mut state = self.state.lock();
        while !state.notices.is_empty() && self.driver.is_of_this_process() {
            if self.ended.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
    }

    fn end_notice(&self, notice: &Arc<Notice>) {
        if let Some(id) = notice.take_id() {
            self.drop_id(id);
        }
        notice.release();
        let mut state = self.state.lock();
        state
            .notices
            .retain(|(other, _)| !Arc::ptr_eq(other, notice));
        state
            .lingering
            .retain(|other| !Arc::ptr_eq(&other.notice, notice));
        drop(state);
        self.ended.notify_all();
    }

    fn fail_notice(&self, notice: &Arc<Notice>) {
        if let Some(id) = notice.take_id() {
            self.drop_id(id);
        }
        let awaited = {
            let state = self.state.lock();
            let mut awaited = state.notices.iter();
            awaited.any(|(other, _)| Arc::ptr_eq(other, notice))
        };
        if awaited {
            self.linger(notice);
        }
    }

    /// A notice has no answer. While requests of the peer may arrive, it stays, and is repeated.
    fn linger(&self, notice: &Arc<Notice>) {
        // before `is_needed`, which may wait for other processes
        notice.release();
        let Some(keep) = notice.keep().filter(|keep| keep.is_needed()) else {
            return self.end_notice(notice);
        };
        keep.give_up();
        let mut state = self.state.lock();
        state
            .notices
            .retain(|(other, _)| !Arc::ptr_eq(other, notice));
        let mut oldest = None;
        if !state.closed {
            state.lingering.push(Lingering::new(Arc::clone(notice)));
            if state.lingering.len() > LINGERING {
                oldest = Some(state.lingering.remove(0).notice);
            }
        }
        drop(state);
        self.ended.notify_all();
        if let Some(oldest) = oldest {
            if let Some(keep) = oldest.keep() {
                keep.cut_off();
            }
            self.end_notice(&oldest);
        }
    }

    /// Ends the notices whose peers' requests cannot arrive any more, and repeats the others that
    /// are due. Returns the time of the next call.
    fn repeat_notices(&self, now: Instant) -> Option<Instant> {
        let mut due = Vec::new();
        for lingering in &mut self.state.lock().lingering {
            if lingering.due <= now {
                lingering.due = now + lingering.pause;
                lingering.pause = LONGEST_REPEAT.min(2 * lingering.pause);
                due.push(Arc::clone(&lingering.notice));
            }
        }
        for notice in due {
            if notice.keep().is_none_or(|keep| !keep.is_needed()) {
                self.end_notice(&notice);
                continue;
            }
            if let Some(id) = notice.take_id() {
                self.drop_id(id);
            }
            notice.send(self);
        }
        let state = self.state.lock();
        state.lingering.iter().map(|lingering| lingering.due).min()
    }

    fn drop_id(&self, id: Arc<CmId>) {
        self.driver.dispatcher().registry().remove(id.object());
        drop(id);
    }

    /// Answers the notices of peers to which nothing is under way any more. Returns the time of the
    /// next look.
    fn answer_notices(&self, now: Instant) -> Option<Instant> {
        let mut held = std::mem::take(&mut self.state.lock().unanswered);
        let has_requests = |user: Arc<dyn CircuitUser>| {
            if user.has_requests() {
                user.progress_requests();
            }
            user.has_requests()
        };
        held.retain(|notice| {
            let waits = notice.due > now && notice.user.upgrade().is_some_and(has_requests);
            if !waits {
                answer_notice(&notice.id, &notice.end);
            }
            waits
        });
        let waits = !held.is_empty();
        self.state.lock().unanswered.append(&mut held);
        waits.then(|| now + LOOK)
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
        due.notices = overdue(&mut state.notices, now);
        due.retired = overdue(&mut state.retired, now);
        let waiting = state.places.iter().flat_map(|place| &place.waiting);
        let next = waiting.map(|(_, at)| *at);
        let next = next.chain(state.awaiting.iter().map(|(_, at)| *at));
        let next = next.chain(state.probes.iter().map(|(_, at)| *at));
        let next = next.chain(state.notices.iter().map(|(_, at)| *at));
        let next = next.chain(state.retired.iter().map(|(_, at)| *at));
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
        while !state.notices.is_empty() {
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

/// The identifier of a request that is answered.
#[derive(Clone, Debug)]
enum Retired {
    Request(#[allow(dead_code, reason = "ends when it is dropped")] Arc<Incoming>),
    Answered(Arc<Answered>),
    Dial(Arc<CmId>),
}

impl Retired {
    fn keeps(&self, answered: &Answered) -> bool {
        match self {
            Self::Answered(kept) => std::ptr::eq(Arc::as_ptr(kept), answered),
            Self::Request(_) | Self::Dial(_) => false,
        }
    }
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
        for retired in due.retired {
            match retired {
                Retired::Request(_) => {}
                Retired::Answered(answered) => {
                    let mut registry = self.driver.dispatcher().registry();
                    // a confirmation that is still missing may be lost: no end of the connection
                    registry.remove(answered.object());
                }
                Retired::Dial(id) => self.drop_id(id),
            }
        }
        next.into_iter().chain(held).chain(repeat).min()
    }

    /// Endpoints that are being connected are not connected. Those that are connected need no
    /// driver until they close.
    fn fail(&self) {
        let (users, notices) = {
            let mut state = self.state.lock();
            state.failed = true;
            let users: Vec<_> = state.users.values().filter_map(Weak::upgrade).collect();
            let notices = std::mem::take(&mut state.notices);
            for (notice, _) in &notices {
                state.keep(Arc::clone(notice));
            }
            (users, notices)
        };
        notices.iter().for_each(|(notice, _)| notice.release());
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
