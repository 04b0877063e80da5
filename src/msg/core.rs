//! What an endpoint and those who call it back share.
//!
//! Callbacks (events of the connection manager, failed operations, asynchronous events) may hold
//! the last reference for a moment, with locks held; so nothing here has a drop that takes one.
//! [`Core::close`] takes everything apart, and the owning endpoint calls it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::lengths::Lengths;
use super::recv::RxSide;
use super::remote::{OTHER_PARTS, Teller};
use super::request::Taken;
use super::send::TxSide;
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::log::{self, Level, Subsystem, info_log, warn_log};
use crate::mr::{ConnectionBlock, Mode};
use crate::msg::{EndpointConfig, SharedRx};
use crate::queue::slots::{FailureListener, Own, Rings};
use crate::queue::{CmTarget, CompletionQueue, EqError, Event, EventQueue, WrId};
use crate::verbs::{
    AsyncEvent, AsyncListener, CmEvent, CmEventKind, CmId, ConnParam, Qp, QpConfig, Sge,
};
use crate::wire::cm_data::CmData;
use crate::wire::introduction::Introduction;

/// Requests of the engine's own that the send queue has room for: the marker behind all others at
/// the end, the probe of a silent peer, what key directories need, and further parts of an operation.
pub(super) const OWN_REQUESTS: usize = 2 + Own::MOST + OTHER_PARTS;
/// How long the end of a connection waits for the device to flush what was posted.
const FLUSH_WAIT: Duration = Duration::from_millis(200);

/// Where in its life an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Not enabled.
    Idle,
    /// Enabled, not connected.
    Enabled,
    /// Connecting, from resolution to the peer's answer.
    Connecting,
    /// Accepted, not confirmed.
    Accepting,
    /// Connected.
    Connected,
    /// Was connected, or failed to become so.
    Disconnected,
    /// Closed.
    Closed,
}

impl State {
    fn from_u8(value: u8) -> Self {
        [
            Self::Idle,
            Self::Enabled,
            Self::Connecting,
            Self::Accepting,
            Self::Connected,
            Self::Disconnected,
        ]
        .get(usize::from(value))
        .copied()
        .unwrap_or(Self::Closed)
    }
}

/// A state that threads read without a lock.
#[derive(Debug)]
pub(crate) struct AtomicState(AtomicU8);

impl AtomicState {
    pub(crate) fn new(state: State) -> Self {
        Self(AtomicU8::new(state as u8))
    }

    #[inline]
    pub(crate) fn get(&self) -> State {
        State::from_u8(self.0.load(Ordering::Acquire))
    }

    #[inline]
    pub(crate) fn is(&self, state: State) -> bool {
        self.0.load(Ordering::Acquire) == state as u8
    }

    pub(crate) fn set(&self, state: State) {
        self.0.store(state as u8, Ordering::Release);
    }

    /// Goes from one state to another, if it is in the first.
    pub(crate) fn change(&self, from: State, to: State) -> bool {
        self.0
            .compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

/// A bound completion queue.
#[derive(Clone, Debug)]
pub(crate) struct CqBinding {
    pub(crate) cq: Arc<CompletionQueue>,
    pub(crate) selective: bool,
}

/// A receive that waits for the queue pair.
#[derive(Debug)]
pub(crate) struct EarlyRecv {
    pub(crate) number: u32,
    pub(crate) context: usize,
    pub(crate) sges: Vec<Sge>,
}

/// The slow side: everything about connections.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) id: Option<Arc<CmId>>,
    /// Whether the identifier came with a request.
    pub(crate) passive: bool,
    /// Whether a local address was asked for.
    pub(crate) bound: bool,
    pub(crate) qp: Option<Arc<Qp>>,
    pub(crate) tx: Option<CqBinding>,
    pub(crate) rx: Option<CqBinding>,
    /// Where its receives come from, if they are not its own.
    pub(crate) srx: Option<Arc<SharedRx>>,
    /// Places in the tables of the queues, once enabled.
    pub(crate) tx_place: Option<WrId>,
    pub(crate) rx_place: Option<WrId>,
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
    pub(crate) data: CmData,
    /// This side's connection block, once there is a queue pair.
    pub(super) block: Option<Arc<ConnectionBlock>>,
    /// What the peer of a request said of itself.
    pub(super) introduction: Option<Introduction>,
    /// Tells the peer of revocations, once connected.
    pub(super) teller: Option<Arc<Teller>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Core {
    this: Weak<Self>,
    pub(crate) domain: Arc<Domain>,
    pub(crate) config: EndpointConfig,
    pub(crate) state: AtomicState,
    pub(crate) rings: Arc<Rings>,
    /// How far both rings were when the peer was last looked after.
    pub(super) last_seen: AtomicU64,
    /// Lengths that operations may have.
    pub(crate) lengths: Lengths,
    /// Set when it is bound, never changed.
    pub(crate) eq: OnceLock<Arc<EventQueue>>,
    pub(crate) control: Mutex<Control>,
    pub(crate) tx: Mutex<Option<TxSide>>,
    pub(crate) rx: Mutex<Option<RxSide>>,
}

impl Core {
    pub(crate) fn new(
        domain: &Arc<Domain>,
        config: EndpointConfig,
        request: Option<Taken>,
    ) -> Arc<Self> {
        let (id, introduction) = request.unzip();
        let introduction = introduction.flatten();
        let rx_size = if config.shared_rx { 0 } else { config.rx_size };
        let rings = Arc::new(Rings::new(config.tx_size, rx_size));
        let control = Control {
            passive: id.is_some(),
            bound: id.is_some(),
            id: id.map(Arc::new),
            qp: None,
            tx: None,
            rx: None,
            srx: None,
            tx_place: None,
            rx_place: None,
            src: config.src,
            dst: config.dst,
            data: CmData::EMPTY,
            block: None,
            introduction,
            teller: None,
        };
        let core = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            domain: Arc::clone(domain),
            state: AtomicState::new(State::Idle),
            lengths: Lengths::new(domain.max_msg_size(), config.inject_size),
            config,
            rings,
            last_seen: AtomicU64::new(0),
            eq: OnceLock::new(),
            control: Mutex::new(control),
            tx: Mutex::new(None),
            rx: Mutex::new(None),
        });
        let listener: Weak<dyn FailureListener> = core.weak();
        // new rings have no owner yet
        let _ = core.rings.owner.set(listener);
        core
    }

    fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    fn conn_param(&self, data: CmData) -> ConnParam {
        let tuning = &self.domain.config().tuning;
        ConnParam {
            data,
            retry_count: tuning.retry_count,
            rnr_retry_count: tuning.rnr_retry_count,
        }
    }

    /// Binds the event queue and gives the endpoint its identifier there.
    pub(crate) fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let mut registry = eq.registry();
        let mut control = self.control.lock();
        if self.eq.get().is_some() {
            return Err(FiErrno::EINVAL);
        }
        if !self.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let channel = registry.channel(self.domain.device())?;
        if let Some(keepalive) = self.domain.keepalive() {
            registry.watch(keepalive)?;
        }
        let id = match &control.id {
            Some(id) => {
                id.migrate(&channel)?;
                Arc::clone(id)
            }
            None => Arc::new(channel.create_id()?),
        };
        let target: Weak<dyn CmTarget> = self.weak();
        registry.insert(id.object(), target);
        control.id = Some(id);
        // no other thread can have bound one: the lock is held
        let _ = self.eq.set(Arc::clone(eq));
        Ok(())
    }

    /// Goes from idle to enabled; nothing to do if it is further on.
    pub(crate) fn enable(&self) -> Result<()> {
        let mut control = self.control.lock();
        match self.state.get() {
            State::Idle => {}
            State::Closed => return Err(FiErrno::EOPBADSTATE),
            _ => return Ok(()),
        }
        if self.eq.get().is_none() {
            return Err(FiErrno::ENOEQ);
        }
        if (control.tx.is_none() && control.rx.is_none())
            || (self.config.needs_tx && control.tx.is_none())
            || (self.config.needs_rx && control.rx.is_none())
        {
            return Err(FiErrno::ENOCQ);
        }
        if self.config.shared_rx && control.srx.is_none() {
            return Err(FiErrno::EOPBADSTATE);
        }
        let id = Arc::clone(control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?);
        if let Some(src) = control.src.filter(|_| !control.bound)
            && !src.ip().is_unspecified()
        {
            id.bind_addr(src)?;
            control.bound = true;
        }
        self.attach(&mut control)?;
        let ready = if id.has_device() {
            self.create_qp(&mut control)
        } else {
            self.defer(&control)
        };
        if let Err(error) = ready {
            self.detach(&mut control);
            return Err(error);
        }
        self.state.set(State::Enabled);
        Ok(())
    }

    /// Takes places in the completion queues' tables.
    fn attach(&self, control: &mut Control) -> Result<()> {
        let tx = control.tx.as_ref().map(|b| Arc::clone(&b.cq));
        let rx = control.rx.as_ref().map(|b| Arc::clone(&b.cq));
        let shared = match (&tx, &rx) {
            (Some(tx), Some(rx)) => Arc::ptr_eq(tx, rx),
            _ => false,
        };
        if let Some(counters) = self.rings.counters() {
            let (tx, rx) = (tx.as_ref(), rx.as_ref());
            counters
                .tx()
                .for_each(|counter| tx.into_iter().for_each(|cq| counter.watch(cq)));
            if let (Some(counter), Some(cq)) = (counters.rx(), rx) {
                counter.watch(cq);
            }
        }
        let (tx_room, rx_room) = self.rooms();
        if let Some(cq) = &tx {
            let room = if shared { tx_room + rx_room } else { tx_room };
            control.tx_place = Some(cq.attach(&self.rings, room)?);
        }
        if shared {
            control.rx_place = control.tx_place;
        } else if let Some(cq) = &rx {
            match cq.attach(&self.rings, rx_room) {
                Ok(place) => control.rx_place = Some(place),
                Err(error) => {
                    self.detach(control);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Completions that each direction may have under way.
    fn rooms(&self) -> (usize, usize) {
        let rx = if self.config.shared_rx {
            0 // the context's, once per queue
        } else {
            self.config.rx_size
        };
        (self.config.tx_size + OWN_REQUESTS, rx)
    }

    /// Gives the places back; what was under way completes as flushed. The queue pair must be
    /// gone.
    fn detach(&self, control: &mut Control) {
        let tx = control.tx_place.take().zip(control.tx.as_ref());
        let rx = control.rx_place.take().zip(control.rx.as_ref());
        let (tx_room, rx_room) = self.rooms();
        match (tx, rx) {
            (Some((place, tx)), Some((_, rx))) if Arc::ptr_eq(&tx.cq, &rx.cq) => {
                tx.cq.detach(place, tx_room + rx_room, true, true);
            }
            (tx, rx) => {
                if let Some((place, binding)) = tx {
                    binding.cq.detach(place, tx_room, true, false);
                }
                if let Some((place, binding)) = rx {
                    binding.cq.detach(place, rx_room, false, true);
                }
            }
        }
    }

    /// The identifier has no device before the peer's address is resolved: receives wait here.
    fn defer(&self, control: &Control) -> Result<()> {
        if !self.config.shared_rx
            && let (Some(binding), Some(place)) = (&control.rx, control.rx_place)
        {
            let side = RxSide::new(
                &self.domain,
                binding.selective,
                place,
                None,
                Some(VecDeque::new()),
            );
            *self.rx.lock() = Some(side);
        }
        Ok(())
    }

    /// Makes the queue pair, and both sides ready for posting.
    fn create_qp(&self, control: &mut Control) -> Result<()> {
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        if !id.is_on(self.domain.device()) {
            info_log!(
                EpCtrl,
                "{:?} is not an address of {}, but of {:?}",
                id.local_addr(),
                self.domain.device().name(),
                id.device_name()
            );
            return Err(FiErrno::EADDRNOTAVAIL);
        }
        let (tx, rx) = (control.tx.as_ref(), control.rx.as_ref());
        let any = tx.or(rx).ok_or(FiErrno::ENOCQ)?;
        let send_cq = tx.unwrap_or(any).cq.cq();
        let recv_cq = rx.unwrap_or(any).cq.cq();
        let config = self.qp_config(tx.is_some(), rx.is_some());
        let srq = control.srx.as_ref().map(|srx| srx.srq());
        let qp = Qp::create(id, self.domain.pd(), send_cq, recv_cq, srq, &config)?;
        let qp = Arc::new(qp);
        let listener: Weak<dyn AsyncListener> = self.weak();
        self.domain.device().listen(qp.object(), listener);
        control.qp = Some(Arc::clone(&qp));
        let directory = self.domain.directory(self.domain.pd());
        match directory.and_then(|directory| directory.block()) {
            Ok(block) => control.block = Some(Arc::new(block)),
            Err(error) => {
                self.drop_qp(control);
                return Err(error);
            }
        }
        let ready = self.open_sides(control, &qp);
        if ready.is_err() {
            self.drop_qp(control);
        }
        ready
    }

    /// What to ask the device for. Queues have room for the engine's own requests.
    fn qp_config(&self, tx: bool, rx: bool) -> QpConfig {
        QpConfig {
            // as many as the device has at most: the configuration was clipped
            max_send_wr: self.config.tx_size + OWN_REQUESTS,
            max_recv_wr: if self.config.shared_rx {
                0
            } else if rx {
                self.config.rx_size
            } else {
                1
            },
            max_send_sge: if tx { self.config.tx_iov_limit } else { 1 },
            max_recv_sge: match (self.config.shared_rx, rx) {
                (true, _) => 0,
                (false, true) => self.config.rx_iov_limit,
                (false, false) => 1,
            },
            max_inline: self
                .config
                .inject_size
                .min(self.domain.device().max_inline()),
        }
    }

    fn open_sides(&self, control: &Control, qp: &Arc<Qp>) -> Result<()> {
        if let (Some(binding), Some(place)) = (&control.tx, control.tx_place) {
            let side = TxSide::new(self, binding, place, qp)?;
            *self.tx.lock() = Some(side);
        }
        if let (Some(binding), Some(place)) = (&control.rx, control.rx_place) {
            if let Some(srx) = &control.srx {
                binding
                    .cq
                    .share(place, qp.number(), srx.slots(), binding.selective);
                return Ok(());
            }
            let mut rx = self.rx.lock();
            let early = rx.as_mut().and_then(RxSide::take_early);
            let mut side = RxSide::new(
                &self.domain,
                binding.selective,
                place,
                Some(Arc::clone(qp)),
                None,
            );
            if let Some(old) = rx.take() {
                side.inherit(old);
            }
            side.post_early(early.unwrap_or_default())?;
            *rx = Some(side);
        }
        Ok(())
    }

    /// Destroys the queue pair.
    fn drop_qp(&self, control: &mut Control) {
        if let (Some(_), Some(block)) = (control.teller.take(), &control.block) {
            block.leave();
        }
        if let Some(qp) = control.qp.take() {
            self.domain.device().unlisten(qp.object());
            if let (Some(srx), Some(binding), Some(place)) =
                (&control.srx, &control.rx, control.rx_place)
            {
                binding.cq.unshare(place, srx.slots());
            }
        }
        // each side holds the queue pair
        let tx = self.tx.lock().take();
        drop(tx);
        *self.rx.lock() = None;
        control.block = None;
    }

    /// Application data with this side's introduction behind it.
    fn introducing(&self, control: &Control, data: CmData) -> CmData {
        match &control.block {
            Some(block) => data.introducing(Introduction {
                application_keys: !self.domain.config().form.mode.contains(Mode::PROV_KEY),
                block_addr: block.addr(),
                block_rkey: block.rkey(),
            }),
            None => data,
        }
    }

    /// Begins to connect.
    pub(crate) fn connect(&self, peer: Option<SocketAddr>, data: &[u8]) -> Result<()> {
        let data = CmData::new(data)?;
        if self.control.lock().passive {
            return Err(FiErrno::EOPBADSTATE);
        }
        self.enable()?;
        let mut control = self.control.lock();
        let peer = peer.or(control.dst).ok_or(FiErrno::EINVAL)?;
        if !self.state.change(State::Enabled, State::Connecting) {
            return Err(match self.state.get() {
                State::Connected => FiErrno::EISCONN,
                _ => FiErrno::EOPBADSTATE,
            });
        }
        control.dst = Some(peer);
        control.data = data;
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        let src = control.src.filter(|_| !control.bound);
        self.set_traffic_class(id);
        id.resolve_addr(src, peer).inspect_err(|error| {
            info_log!(EpCtrl, "rdma_resolve_addr({peer}): {error}");
            self.state.set(State::Enabled);
        })
    }

    /// Accepts the request that the endpoint was made of.
    pub(crate) fn accept(&self, data: &[u8]) -> Result<()> {
        let data = CmData::new(data)?;
        if !self.control.lock().passive {
            return Err(FiErrno::EOPBADSTATE);
        }
        self.enable()?;
        let control = self.control.lock();
        if !self.state.change(State::Enabled, State::Accepting) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        self.tune(id);
        id.accept(&self.conn_param(self.introducing(&control, data)))
            .inspect_err(|error| {
                info_log!(EpCtrl, "rdma_accept: {error}");
                self.state.set(State::Disconnected);
            })
    }

    /// What an accepting side sets; a connecting one needs the traffic class for its route already.
    fn tune(&self, id: &CmId) {
        self.set_traffic_class(id);
        self.set_ack_timeout(id);
    }

    fn set_traffic_class(&self, id: &CmId) {
        if let Some(class) = self.domain.config().tuning.traffic_class
            && let Err(error) = id.set_type_of_service(class)
        {
            warn_log!(EpCtrl, "traffic class {class} is not taken: {error}");
        }
    }

    fn set_ack_timeout(&self, id: &CmId) {
        if let Err(error) = id.set_ack_timeout(self.domain.config().tuning.ack_timeout) {
            info_log!(
                EpCtrl,
                "{}: the connection manager keeps its acknowledgement timeout: {error}",
                self.domain.device().name()
            );
        }
    }

    /// Ends the connection.
    pub(crate) fn shutdown(&self) -> Result<()> {
        let control = self.control.lock();
        if !self.state.change(State::Connected, State::Disconnected) {
            return Err(FiErrno::ENOTCONN);
        }
        Self::take_in(&control);
        if let Some(id) = &control.id {
            let _ = id.disconnect();
        }
        self.push_shutdown();
        Ok(())
    }

    /// Tells of the end of the connection. The state was changed by the caller, so it is told
    /// once.
    fn push_shutdown(&self) {
        if let Some(eq) = self.eq.get() {
            let event = Event::Shutdown {
                ep: self.config.token,
            };
            eq.push_prepared(event, self.weak());
        }
    }

    fn push_error(&self, eq: &EventQueue, err: FiErrno, event: &CmEvent) {
        eq.push_error(EqError {
            owner: self.config.token,
            err,
            prov_errno: event.status,
            data: event.data,
            context: 0,
        });
    }

    /// The connection can't be made.
    fn fail_connecting(&self, eq: &EventQueue, err: FiErrno, event: &CmEvent) {
        if self.state.change(State::Connecting, State::Disconnected)
            || self.state.change(State::Accepting, State::Disconnected)
        {
            self.push_error(eq, err, event);
        }
    }

    fn established(&self, eq: &EventQueue, data: CmData) {
        let (qp, asked) = {
            let control = self.control.lock();
            (control.qp.clone(), control.introduction)
        };
        self.introduced(data.introduction().or(asked));
        if let Some(qp) = &qp
            && !self.domain.device().attr().iwarp
            && let Err(error) = qp.set_min_rnr_timer(self.domain.config().tuning.min_rnr_timer)
        {
            info_log!(EpCtrl, "the RNR timer stays as it is: {error}");
        }
        if let Some(qp) = &qp
            && log::enabled(Level::Info, Subsystem::EpCtrl)
            && let Ok(attr) = qp.query()
        {
            info_log!(EpCtrl, "connected, queue pair {}: {attr:?}", qp.number());
        }
        if self.state.change(State::Connecting, State::Connected)
            || self.state.change(State::Accepting, State::Connected)
        {
            let ep = self.config.token;
            eq.push(Event::Connected { ep, data });
            if let Some(keepalive) = self.domain.keepalive() {
                keepalive.join(self.weak());
            }
        }
    }

    /// The next step after the peer's address was resolved.
    fn addr_resolved(&self) -> Result<()> {
        let mut control = self.control.lock();
        if control.qp.is_none() {
            self.create_qp(&mut control)?;
        }
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        id.resolve_route()
    }

    /// The next step after the route was resolved.
    fn route_resolved(&self) -> Result<()> {
        let control = self.control.lock();
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        self.set_ack_timeout(id);
        let data = self.introducing(&control, control.data);
        id.connect(&self.conn_param(data))
    }

    /// Completes what has come in, before the queue pair is moved to its error state: the peer was told
    /// that it has arrived, and a device may complete it only when it is asked.
    fn take_in(control: &Control) {
        for binding in [&control.tx, &control.rx].into_iter().flatten() {
            let _ = binding.cq.progress();
        }
    }

    /// Waits, for a short time at most, until the device has flushed what was posted, and moves
    /// that to the completion queues' backlogs.
    fn settle(&self) {
        let (tx, rx) = {
            let control = self.control.lock();
            let Some(qp) = &control.qp else {
                return;
            };
            let _ = qp.set_error();
            (control.tx.clone(), control.rx.clone())
        };
        if let Some(side) = self.tx.lock().as_mut() {
            side.give_up(&self.rings);
            side.post_marker(&self.rings.tx);
        }
        let deadline = Instant::now() + FLUSH_WAIT;
        loop {
            for binding in [&tx, &rx].into_iter().flatten() {
                let _ = binding.cq.progress();
            }
            if self.rings.tx.outstanding() + self.rings.rx.outstanding() == 0 {
                let mut tx = self.tx.lock();
                let Some(side) = tx.as_mut().filter(|side| !side.waiting.is_empty()) else {
                    return;
                };
                side.give_up(&self.rings);
                side.post_marker(&self.rings.tx);
            }
            if Instant::now() >= deadline {
                info_log!(EpCtrl, "flushing takes long: {:?}", self.rings);
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Takes everything apart. Idempotent.
    pub(crate) fn close(&self) {
        let connected = {
            let mut registry = self.eq.get().map(|eq| eq.registry());
            let control = self.control.lock();
            let old = self.state.get();
            if old == State::Closed {
                return;
            }
            self.state.set(State::Closed);
            if let (Some(registry), Some(id)) = (&mut registry, &control.id) {
                registry.remove(id.object(), self.config.token);
            }
            if control.passive
                && matches!(old, State::Idle | State::Enabled)
                && let Some(id) = &control.id
            {
                // never accepted
                let _ = id.reject(&CmData::EMPTY);
            }
            let connected = matches!(
                old,
                State::Connecting | State::Accepting | State::Connected | State::Disconnected
            );
            if connected && let Some(id) = &control.id {
                Self::take_in(&control);
                // fails where the connection never came to be, or has ended
                let _ = id.disconnect();
            }
            connected
        };
        if connected {
            self.settle();
        }
        let mut control = self.control.lock();
        self.drop_qp(&mut control);
        self.detach(&mut control);
        control.id = None;
        control.tx = None;
        control.rx = None;
        control.srx = None;
    }
}

impl CmTarget for Core {
    fn cm_event(&self, event: CmEvent, eq: &EventQueue) {
        let result = match event.kind {
            CmEventKind::AddrResolved => self.addr_resolved(),
            CmEventKind::RouteResolved => self.route_resolved(),
            CmEventKind::Established => {
                self.established(eq, event.data);
                Ok(())
            }
            CmEventKind::Disconnected => {
                if self.state.change(State::Connected, State::Disconnected) {
                    self.push_shutdown();
                } else {
                    self.fail_connecting(eq, FiErrno::ECONNABORTED, &event);
                }
                Ok(())
            }
            CmEventKind::Rejected => Err(FiErrno::ECONNREFUSED),
            CmEventKind::Unreachable => Err(unreachable_errno(event.status)),
            CmEventKind::DeviceRemoval => {
                warn_log!(EpCtrl, "{}: device removed", self.domain.device().name());
                if self.state.change(State::Connected, State::Disconnected) {
                    self.push_shutdown();
                    Ok(())
                } else {
                    Err(FiErrno::ENODEV)
                }
            }
            CmEventKind::AddrChange => {
                info_log!(
                    EpCtrl,
                    "the interface of a connection has changed its address"
                );
                Ok(())
            }
            CmEventKind::ConnectRequest | CmEventKind::Other => Ok(()),
        };
        if let Err(error) = result {
            self.fail_connecting(eq, error, &event);
        }
    }

    fn before_shutdown(&self) {
        {
            let control = self.control.lock();
            if self.state.is(State::Closed) {
                return;
            }
            Self::take_in(&control);
            if let Some(id) = &control.id {
                // answers the peer, or tells it where this side noticed first
                let _ = id.disconnect();
            }
        }
        self.settle();
    }
}

/// Why a peer was not reached: the connection manager's status is an errno here, except that some
/// versions put the kernel's own reasons there.
fn unreachable_errno(status: i32) -> FiErrno {
    match status {
        libc::EHOSTUNREACH
        | libc::ENETUNREACH
        | libc::EADDRNOTAVAIL
        | libc::ENODEV
        | libc::ECONNREFUSED
        | libc::ECONNRESET
        | libc::ENETDOWN => FiErrno::new(status),
        _ => FiErrno::ETIMEDOUT,
    }
}

impl FailureListener for Core {
    fn operation_failed(&self) {
        if self.state.change(State::Connected, State::Disconnected) {
            self.push_shutdown();
        }
    }

    fn resume(&self) {
        if !self.state.is(State::Connected) {
            return;
        }
        // who has the lock goes on by itself, or comes again
        if let Some(mut tx) = self.tx.try_lock()
            && let Some(side) = tx.as_mut()
        {
            side.resume(&self.rings);
        }
        if let Some(control) = self.control.try_lock()
            && let Some(teller) = &control.teller
        {
            teller.tell_again();
        }
    }
}

impl AsyncListener for Core {
    fn async_event(&self, event: AsyncEvent) {
        match event {
            AsyncEvent::QpError | AsyncEvent::DeviceFatal => self.operation_failed(),
            AsyncEvent::QpEstablished => {
                if let Some(id) = &self.control.lock().id {
                    let _ = id.notify_established();
                }
            }
            AsyncEvent::CqError | AsyncEvent::Other(_) => {}
        }
    }
}
