//! Endpoints with many peers, `fi_endpoint(3)`: creation, binding, enabling and close.
//! `calls.rs` has the operations. In one file: the steps from creation to close, which undo each
//! other.

mod atomics;
mod calls;
mod device_queue;
mod rma;

pub use self::atomics::{AtomicCall, MAX_ATOMIC_SIZE, max_atomic_count};

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::completions::{Completions, Side};
use super::config::{EndpointConfig, MIN_MULTI_RECV};
use super::context::{SharedRx, VectorUse};
use super::core::{Config, Core};
use super::cq_source::CqSource;
use super::executor::{Accepts, Executor, Objects, Registrations, RmaConfig, Sizes};
use super::limits::Limits;
use super::listening::Listening;
use super::packet_memory::PacketMemory;
use super::receives::Receives;
use super::shared::{CqEvents, RequestSink, Shared, SrqEvents, State};
use super::step::Step;
use super::vector::{AddressVector, VectorUser};
use crate::auth::AuthKey;
use crate::conn::{CmSink, Driven, Renamed, rename};
use crate::domain::Domain;
use crate::eq::EventQueue;
use crate::errno::{FiErrno, Result};
use crate::flags::{Flags, OpFlags};
use crate::log::{info_log, refused};
use crate::mr::{Access, Mode, Paging, Scope, SourceKeys, random};
use crate::queue::keepalive::PERIOD;
use crate::queue::source::Source;
use crate::queue::{BindFlags, CompletionQueue, Counter, Counters, CqBinding, CqConfig, WaitKind};
use crate::rdm::long::pulls::Pulls;
use crate::rdm::xrc::ports::Xrc;
use crate::verbs::{AsyncListener, Pd, Srq};
use crate::wire::rdm::terms::MAX_EAGER;
use crate::wire::rdm::{self, Credit, EndpointId};
use crate::xrc::XrcDomain;
use crate::xrc::file::Endpoints;

/// Receives of the shared receive queue.
const RECEIVES: usize = 4096;
/// Credit of all peers together beyond their smallest windows: 16 MiB of unexpected messages.
const POOL: Credit = Credit::new(1 << 18, 8192);
/// Dials under way, and peers.
const DIALS: usize = 32;
const PEERS: usize = 1 << 20;
/// How long an unreachable address is dialled.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a dial to a peer with a session remains without answer before it is repeated: at least
/// this time, and this part of the time above.
const REDIAL: (Duration, u32) = (Duration::from_secs(2), 5);
/// How long a close waits until the peers have received what was sent.
pub(super) const LINGER: Duration = Duration::from_secs(10);
/// How long a close waits for the peers of an endpoint on XRC to end their halves of the links.
const LEAVE: Duration = Duration::from_secs(1);
/// How long a close waits until its peers have received the notice of it.
const END: Duration = Duration::from_millis(100);
/// How long a peer without links is kept, if it has a session and if it may have one: at least this
/// time, and at least this number of connect timeouts. By then the peer has failed its operations.
const IDLE: [(Duration, u32); 2] = [(Duration::from_secs(3600), 6), (Duration::from_secs(30), 3)];
/// The rights of atomics of all families.
const ALL_ATOMICS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Objects that are bound before enabling.
#[derive(Default)]
struct Control {
    tx: Option<CqBinding>,
    rx: Option<CqBinding>,
    /// The queue of an endpoint that has only counters.
    own: Option<Arc<CompletionQueue>>,
    vector: Option<Arc<AddressVector>>,
    context: Option<Arc<SharedRx>>,
    /// Of an enabled endpoint with a context.
    vector_use: Option<VectorUse>,
    xrc: Option<Arc<XrcDomain>>,
    /// Whether an event queue is bound.
    has_eq: bool,
    src: Option<SocketAddr>,
    /// The application has set the address by `fi_setname(3)`, and gets no other one: `src` has the
    /// port.
    named: bool,
    /// The listeners of that address, before enabling.
    listening: Option<Listening>,
    enabled: bool,
    closed: bool,
    /// The device's objects whose events are received, and their receivers: the completion queue,
    /// and on XRC the receive queue.
    events: Vec<(usize, Arc<dyn AsyncListener>)>,
    /// The endpoint as a source of its queues.
    sources: Vec<(Arc<CompletionQueue>, Arc<dyn Source>)>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}

/// The parts that aliases share.
#[derive(Debug)]
struct Common {
    shared: Arc<Shared>,
    control: Mutex<Control>,
    min_multi_recv: AtomicUsize,
    /// Whether every success has an entry (no `FI_SELECTIVE_COMPLETION`), by direction.
    tx_all: std::sync::atomic::AtomicBool,
    rx_all: std::sync::atomic::AtomicBool,
}

/// An endpoint of type `FI_EP_RDM`, or an alias of one. Thread safe. Dropping an endpoint closes
/// it; dropping an alias closes nothing.
#[derive(Debug)]
pub struct Endpoint {
    common: Arc<Common>,
    alias: bool,
    op_flags: OpFlags,
}

impl Endpoint {
    /// Makes an endpoint.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the device has no [`Limits`]. `EINVAL`: peers are to access regions, and those
    /// of the domain have no registration, because their mode needs on-demand paging that the
    /// device does not have; logged. `ENOMEM`, `EMFILE`: resources of the process or the device.
    pub fn new(domain: &Arc<Domain>, mut config: EndpointConfig) -> Result<Arc<Self>> {
        let limits = Limits::of(domain.device()).ok_or(FiErrno::EOPNOTSUPP)?;
        if config.target && domain.mr().paging() == Paging::Unregistered {
            let reason = "peers cannot access regions of this domain: it was opened for messages \
                          alone, and the device has no on-demand paging that works";
            return Err(refused!(EpCtrl, EINVAL, "{reason}"));
        }
        config.tx_size = config.tx_size.clamp(1, limits.tx_size);
        config.rx_size = config.rx_size.clamp(1, limits.rx_size);
        config.inject_size = config.inject_size.min(limits.inject_size);
        let of_domain = domain.mr().config().auth.as_ref();
        config.auth = config.auth.or_else(|| of_domain.cloned());
        // a region that is bound to the endpoint is not accessible through others
        let pd = match domain.mr().config().form.mode.contains(Mode::ENDPOINT) {
            true => Pd::alloc(domain.device())?,
            false => domain.mr().pd_of(config.auth.as_ref())?,
        };
        let control = Control {
            src: config.src,
            ..Control::default()
        };
        let op_flags = OpFlags::new(config.tx_op_flags, config.rx_op_flags);
        let common = Arc::new(Common {
            shared: Shared::new(domain, pd, config)?,
            control: Mutex::new(control),
            min_multi_recv: AtomicUsize::new(MIN_MULTI_RECV),
            tx_all: true.into(),
            rx_all: true.into(),
        });
        Ok(Arc::new(Self {
            common,
            alias: false,
            op_flags,
        }))
    }

    /// An alias with its own default flags (`fi_ep_alias(3)`), initially those of this endpoint.
    /// The alias must not outlive the endpoint.
    pub fn alias(&self) -> Arc<Self> {
        Arc::new(Self {
            common: Arc::clone(&self.common),
            alias: true,
            op_flags: self.op_flags.clone(),
        })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.common.shared
    }

    /// The control state of an endpoint that is not enabled.
    ///
    /// # Errors
    /// `EOPBADSTATE`: enabled or closed.
    fn idle(&self) -> Result<parking_lot::MutexGuard<'_, Control>> {
        let control = self.common.control.lock();
        if control.enabled || control.closed {
            Err(FiErrno::EOPBADSTATE)
        } else {
            Ok(control)
        }
    }

    /// Binds the address vector (`fi_ep_bind(3)`).
    ///
    /// # Errors
    /// `EINVAL`: one is bound. `EOPBADSTATE`: enabled already.
    pub fn bind_vector(self: &Arc<Self>, av: &Arc<AddressVector>) -> Result<()> {
        let mut control = self.idle()?;
        if control.vector.is_some() {
            return Err(FiErrno::EINVAL);
        }
        control.vector = Some(Arc::clone(av));
        if let Some(context) = &control.context {
            context.attach(av);
        }
        let user: Weak<dyn VectorUser> = self.shared().weak();
        av.attach(user);
        Ok(())
    }

    /// Binds a shared receive context (`fi_ep_bind(3)`).
    ///
    /// # Errors
    /// - `EINVAL`: one is bound, or the endpoint was opened without
    ///   [`EndpointConfig::shared_rx`].
    /// - `EDOMAIN`: a context of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_shared_rx(&self, context: &Arc<SharedRx>) -> Result<()> {
        if !Arc::ptr_eq(context.domain(), &self.shared().domain) {
            return Err(FiErrno::EDOMAIN);
        }
        let mut control = self.idle()?;
        if !self.shared().config.shared_rx || control.context.is_some() {
            return Err(FiErrno::EINVAL);
        }
        control.context = Some(Arc::clone(context));
        if let Some(vector) = &control.vector {
            context.attach(vector);
        }
        Ok(())
    }

    /// Binds an XRC domain of the application, instead of that which the user's processes share
    /// (`weft_mr_ops.xrcd_open`).
    ///
    /// # Errors
    /// - `EINVAL`: one is bound, or the endpoint is not on XRC.
    /// - `EDOMAIN`: a domain of another device.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_xrc(&self, xrc: &Arc<XrcDomain>) -> Result<()> {
        if !Arc::ptr_eq(xrc.xrcd().device(), self.shared().domain.device()) {
            return Err(FiErrno::EDOMAIN);
        }
        let mut control = self.idle()?;
        if !self.shared().config.xrc || control.xrc.is_some() {
            return Err(FiErrno::EINVAL);
        }
        control.xrc = Some(Arc::clone(xrc));
        Ok(())
    }

    /// Binds a completion queue for one direction or both (`fi_ep_bind(3)`).
    ///
    /// # Errors
    /// - `EINVAL`: no direction, or one that has a queue already.
    /// - `EDOMAIN`: a queue of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_cq(self: &Arc<Self>, cq: &Arc<CompletionQueue>, flags: BindFlags) -> Result<()> {
        if !Arc::ptr_eq(cq.domain(), self.shared().domain.queues()) {
            return Err(FiErrno::EDOMAIN);
        }
        let mut control = self.idle()?;
        let tx = flags.contains(BindFlags::TRANSMIT);
        let rx = flags.contains(BindFlags::RECV);
        if (!tx && !rx) || (tx && control.tx.is_some()) || (rx && control.rx.is_some()) {
            return Err(FiErrno::EINVAL);
        }
        let binding = CqBinding {
            cq: Arc::clone(cq),
            selective: flags.contains(BindFlags::SELECTIVE_COMPLETION),
        };
        if tx {
            self.common
                .tx_all
                .store(!binding.selective, Ordering::Relaxed);
            control.tx = Some(binding.clone());
        }
        if rx {
            self.common
                .rx_all
                .store(!binding.selective, Ordering::Relaxed);
            control.rx = Some(binding);
        }
        Ok(())
    }

    /// Makes a counter count completed operations of these kinds: `SEND`, `RECV`, `READ`, `WRITE`,
    /// and the peers' operations on regions of this side, `REMOTE_READ` and `REMOTE_WRITE`. Empty
    /// `kinds` bind nothing: fabtests bind so, and libfabric's own providers accept it.
    ///
    /// An enabled endpoint accepts a counter too, as libfabric's own providers do: Sandia OpenSHMEM
    /// binds those of its only endpoint so. The counter counts the operations that complete later.
    ///
    /// # Errors
    /// - `EINVAL`: a kind has a counter already.
    /// - `EOPNOTSUPP`: `REMOTE_READ` or `REMOTE_WRITE` in a domain without events.
    /// - `EBADFLAGS`: any other flag.
    /// - `EDOMAIN`: a counter of another domain.
    /// - `EOPBADSTATE`: closed; or a kind is one of the peers' operations, and a connection exists
    ///   that was begun while the endpoint had no counter of either; or the process has not opened
    ///   the enabled endpoint, but is a child of that which has.
    /// - `EMFILE`, `ENOMEM`: resources of the process.
    pub fn bind_counter(self: &Arc<Self>, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        if !Arc::ptr_eq(counter.domain(), self.shared().domain.queues()) {
            return Err(FiErrno::EDOMAIN);
        }
        let remote = Flags::REMOTE_READ | Flags::REMOTE_WRITE;
        if kinds.intersects((Counters::KINDS | remote).complement()) {
            return Err(FiErrno::EBADFLAGS);
        }
        if kinds.intersects(remote) && !self.shared().domain.mr().counts() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        let control = self.common.control.lock();
        if control.closed || control.enabled && !self.shared().is_of_this_process() {
            return Err(FiErrno::EOPBADSTATE);
        }
        self.shared().bind_counter(counter, kinds)?;
        for _ in (kinds & Counters::KINDS).iter() {
            for (cq, _) in &control.sources {
                counter.watch(cq);
            }
        }
        Ok(())
    }

    /// Accepts an event queue, to which an RDM endpoint reports nothing (`fi_ep_bind(3)`).
    ///
    /// # Errors
    /// `EINVAL`: one was accepted. `EOPBADSTATE`: enabled already.
    pub fn accept_eq(&self, _: &Arc<EventQueue>) -> Result<()> {
        let mut control = self.idle()?;
        match std::mem::replace(&mut control.has_eq, true) {
            true => Err(FiErrno::EINVAL),
            false => Ok(()),
        }
    }

    /// Binds the local address (`fi_setname(3)`), in place of that of an earlier call. Port 0
    /// stands for the port of the earlier call, or for a free one; a wildcard address for all
    /// addresses of the device of its family. Does not block.
    ///
    /// # Errors
    /// - `EOPBADSTATE`: enabled already, closed, or in a child of the process that has opened the
    ///   endpoint.
    /// - `EADDRINUSE`, `EADDRNOTAVAIL`: the address cannot be used. The endpoint keeps its earlier
    ///   address; but if that has the same port and another process has taken it meanwhile,
    ///   enabling fails.
    /// - `ENOMEM`, `EMFILE`: resources of the process.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        let mut control = self.idle()?;
        let shared = self.shared();
        if !shared.is_of_this_process() {
            return Err(FiErrno::EOPBADSTATE);
        }
        let control = &mut *control;
        let own = control.src.filter(|_| control.listening.is_some());
        let open = |at| self.listen_at(Some(at), true);
        let close = || control.listening.take().iter().for_each(Listening::close);
        let (new, result) = match rename(own, addr, open, close)? {
            Renamed::Same => return Ok(()),
            Renamed::To(new) => (Some(new), Ok(())),
            Renamed::Back(old, error) => (old, Err(error)),
        };
        if let (Some(new), Ok(())) = (&new, &result) {
            let mut src = addr;
            src.set_port(new.name()?.port());
            (control.src, control.named) = (Some(src), true);
        }
        let old = std::mem::replace(&mut control.listening, new);
        old.iter().for_each(Listening::close);
        result
    }

    /// Binds the listeners of a local address. `fixed`: as [`Listening::open`].
    fn listen_at(&self, src: Option<SocketAddr>, fixed: bool) -> Result<Listening> {
        let shared = self.shared();
        let form = (shared.config.ipv4, shared.config.xrc);
        Listening::open(
            shared.domain.device(),
            src,
            form,
            fixed,
            shared.config.token,
        )
    }

    /// The local address, with the actual port (`fi_getname(3)`). Before the endpoint is enabled it
    /// is that of [`Self::set_name`].
    ///
    /// # Errors
    /// `EOPBADSTATE`: the endpoint has no address yet, or is closed.
    pub fn name(&self) -> Result<SocketAddr> {
        if let Some(listening) = self.shared().listening.get() {
            return listening.name();
        }
        let control = self.common.control.lock();
        let listening = control.listening.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        listening.name()
    }

    /// Enables the endpoint (`fi_enable(3)`): it listens, and operations can be posted.
    ///
    /// # Errors
    /// - `ENOCQ`: a required completion queue is not bound, and no counter is.
    /// - `ENOAV`: no address vector is bound.
    /// - `EINVAL`: another endpoint of the shared receive context has another address vector.
    /// - `EOPBADSTATE`: closed, or the shared receive context is not bound.
    /// - `EADDRNOTAVAIL`, `EADDRINUSE`: the local address cannot be used.
    /// - `EACCES`: the path of the XRC domain that the user demands is not safe.
    /// - `ENOMEM`, `EMFILE`: resources of the process or the device.
    pub fn enable(self: &Arc<Self>) -> Result<()> {
        let shared = self.shared();
        let mut control = self.common.control.lock();
        if control.closed {
            return Err(FiErrno::EOPBADSTATE);
        }
        if control.enabled {
            return Ok(());
        }
        self.check_queues(&control)?;
        let vector = control.vector.as_ref().ok_or(FiErrno::ENOAV)?;
        let vector_use = match &control.context {
            Some(context) => Some(context.check_vector(vector)?),
            None if shared.config.shared_rx => return Err(FiErrno::EOPBADSTATE),
            None => None,
        };
        let listening = match control.listening.take() {
            Some(named) => named,
            None => self.listen_at(control.src, control.named)?,
        };
        if let Err(error) = self.open(&mut control, &listening) {
            listening.close();
            self.release(&mut control);
            if control.named {
                // the endpoint keeps its name, unless another process is faster
                control.listening = self.listen_at(control.src, true).ok();
            }
            return Err(error);
        }
        // set once: the endpoint is enabled once
        let _ = shared.listening.set(listening);
        control.vector_use = vector_use;
        control.enabled = true;
        Ok(())
    }

    /// As [`Self::enable`] after an error of its last step.
    #[cfg(test)]
    pub(super) fn fail_to_enable(&self) -> Result<()> {
        let mut control = self.common.control.lock();
        let listening = self.listen_at(control.src, control.named)?;
        let opened = self.open(&mut control, &listening);
        listening.close();
        self.release(&mut control);
        opened
    }

    /// Creates the objects of an enabled endpoint. After an error the caller releases them.
    fn open(&self, control: &mut Control, listening: &Listening) -> Result<()> {
        let shared = self.shared();
        let (rx, owner) = match &control.context {
            None => (Receives::new(random()?), 0),
            Some(context) => {
                let all = self.common.rx_all.load(Ordering::Relaxed);
                let membership = context.membership(all);
                let owner = membership.owner();
                (Receives::of_context(membership), owner)
            }
        };
        let bound = (control.vector.clone(), control.xrc.clone());
        let state = self.open_state(listening, bound, rx)?;
        let (srq, cq) = (state.io.objects.srq.object(), state.device_queue());
        *shared.lock() = Some(state);
        control.events = vec![(cq.object(), Arc::new(CqEvents(shared.weak())))];
        if shared.config.xrc {
            control
                .events
                .push((srq, Arc::new(SrqEvents(shared.weak()))));
        }
        for (object, events) in &control.events {
            shared
                .domain
                .device()
                .listen(*object, Arc::downgrade(events));
        }
        self.attach(control)?;
        if let Some(context) = &control.context {
            // set once, unless an earlier attempt to enable has failed
            let _ = shared.context.set(Arc::clone(context));
            context.join(owner, shared);
        }
        let sink: Arc<dyn CmSink> = RequestSink::new(shared, false);
        let sidr: Arc<dyn CmSink> = RequestSink::new(shared, true);
        listening.listen(&sink, &sidr)?;
        let driven: Weak<dyn Driven> = shared.weak();
        shared.driver().add(driven, &shared.driver_turn, Some(&cq));
        Ok(())
    }

    /// Releases what [`Self::open`] has created.
    fn release(&self, control: &mut Control) {
        let shared = self.shared();
        // until the endpoint has left the context
        let _vector_use = control.vector_use.take();
        shared.driver().remove(&shared.driver_turn);
        // from here on nothing completes at the endpoint, so no entry is lost
        let mut ended = shared.end();
        let sources = std::mem::take(&mut *shared.cq_sources.lock());
        for ((cq, object), source) in control.sources.drain(..).zip(sources) {
            // keeps the entries that the application has not read
            cq.finish_source(&object, |sink| {
                if let Some((state, _)) = &mut ended {
                    source.finish_with(state, sink);
                }
            });
            let counters = shared.counters.tx().chain(shared.counters.rx());
            counters.for_each(|counter| counter.unwatch(&cq));
        }
        control.own = None;
        for (object, _) in control.events.drain(..) {
            shared.domain.device().unlisten(object);
        }
        let Some((state, left)) = ended else {
            return;
        };
        if let Some(context) = &control.context {
            context.report_ended_with(&left);
        }
        let counts = state.io.counts();
        info_log!(EpCtrl, "counts: {counts}");
        shared.domain.note_counts(&counts);
        let entries = state.kept_receives();
        let left = state.io.close(|steps| Step::execute_all(steps, shared));
        shared.leave_cell();
        if let Some(context) = &control.context {
            context.leave(shared);
            context.report_ended_with(&left);
            context.return_places(entries);
        }
    }

    /// # Errors
    /// `ENOCQ`, as [`Self::enable`].
    fn check_queues(&self, control: &Control) -> Result<()> {
        let config = &self.shared().config;
        let counters = &self.shared().counters;
        let has_tx = control.tx.is_some() || counters.tx().next().is_some();
        let has_rx = control.rx.is_some() || counters.rx().is_some();
        let lacks = config.needs_tx && !has_tx || config.needs_rx && !has_rx;
        if lacks || !has_tx && !has_rx {
            Err(FiErrno::ENOCQ)
        } else {
            Ok(())
        }
    }

    fn open_state(
        &self,
        listening: &Listening,
        (vector, bound): (Option<Arc<AddressVector>>, Option<Arc<XrcDomain>>),
        rx: Receives,
    ) -> Result<State> {
        let shared = self.shared();
        let domain = &shared.domain;
        let device = domain.device();
        let addresses = listening.addresses();
        let mut addresses = addresses.filter_map(|addr| rdm::Listener::new(addr.ip(), addr.port()));
        let address = addresses.next().ok_or(FiErrno::EADDRNOTAVAIL)?;
        let further = addresses.collect();
        let receives = RECEIVES.min(device.attr().max_srq_wr);
        let channel = shared.driver().channel(device)?;
        let (cq, entries) = device_queue::create(device, receives, &channel)?;
        let auth = shared.config.auth.as_ref();
        let tag = auth.map_or(0, AuthKey::tag);
        let node = match (shared.config.xrc, bound) {
            (false, _) => None,
            (true, Some(bound)) => Some(bound),
            (true, None) => Some(domain.xrc(Endpoints::Rdm, tag)?),
        };
        let srq = Arc::new(match &node {
            Some(node) => Srq::create_xrc(shared.pd(), node.xrcd(), &cq, receives, 1)?,
            None => Srq::create(shared.pd(), receives, 1)?,
        });
        let number = srq.number();
        let config = &shared.config;
        let sizes = Sizes {
            max_receives: receives,
            max_inline: device.max_inline(),
            max_links: self.max_links(entries - receives),
            rma: shared.rma_config(),
            accepts: Accepts {
                data: config.accepts_data,
                atomics: config.peer_atomics,
            },
        };
        let mut io = Executor::new(
            shared.weak(),
            Objects {
                srq,
                cq,
                pd: Arc::clone(shared.pd()),
                mr: Arc::clone(domain.mr()),
                _node: node.clone(),
            },
            PacketMemory::new(shared.pd()),
            Registrations {
                sources: SourceKeys::new(domain.mr(), shared.pd()),
                pulls: Pulls::new(domain.mr(), shared.pd()),
            },
            Completions::new(&shared.counters),
            rx,
            sizes,
        );
        io.post_receives(64)?;
        let id = loop {
            if let Some(id) = EndpointId::new(random()?) {
                break id;
            }
        };
        if let Some((node, srq)) = node.zip(number) {
            io.xrc = Some(Box::new(Xrc::new(node, srq, (id, tag))));
        }
        let core = Core::new(shared.core_config(id, (address, further), tag));
        io.vector = vector.map(|vector| (vector, listening.scope()));
        Ok(State::new(core, io))
    }

    /// Makes the endpoint a source of its completion queues.
    fn attach(&self, control: &mut Control) -> Result<()> {
        let shared = self.shared();
        let (tx, rx) = (control.tx.clone(), control.rx.clone());
        if let Some(state) = shared.lock().as_mut() {
            state.io.completions.bound = [tx.is_some(), rx.is_some()];
        }
        let mut queues: Vec<(Arc<CompletionQueue>, Vec<Side>)> = Vec::new();
        for (binding, side) in [(tx, Side::Tx), (rx, Side::Rx)] {
            let Some(binding) = binding else {
                continue;
            };
            match queues
                .iter_mut()
                .find(|(cq, _)| Arc::ptr_eq(cq, &binding.cq))
            {
                Some((_, sides)) => sides.push(side),
                None => queues.push((binding.cq, vec![side])),
            }
        }
        if queues.is_empty() {
            // reading a counter polls this queue
            let config = CqConfig {
                wait: WaitKind::None,
                sources_only: true,
                ..CqConfig::default()
            };
            let own = CompletionQueue::open(shared.domain.queues(), config)?;
            control.own = Some(Arc::clone(&own));
            queues.push((own, Vec::new()));
        }
        let counters = &shared.counters;
        let counters = || counters.tx().chain(counters.rx());
        let counts = counters().any(|counter| counter.waits());
        for (cq, sides) in queues {
            let source = CqSource::new(shared, sides, counts || cq.waits())?;
            let object: Arc<dyn Source> = Arc::clone(&source) as _;
            cq.add_source(Arc::clone(&object))?;
            shared.cq_sources.lock().push(source);
            for counter in counters() {
                counter.watch(&cq);
            }
            control.sources.push((cq, object));
        }
        Ok(())
    }

    /// Ends the endpoint (`fi_close(3)`): delivers what was sent from copies (`fi_inject(3)`),
    /// disconnects, and releases the device's resources. Later operations fail. Idempotent.
    pub fn close(&self) {
        let shared = self.shared();
        if !shared.is_of_this_process() {
            // Destroying the objects would act on those of the parent, whose locks may be held for
            // ever here: they stay until the child ends.
            std::mem::forget(Arc::clone(&self.common));
            return;
        }
        let mut control = self.common.control.lock();
        if std::mem::replace(&mut control.closed, true) {
            return;
        }
        if let Some(listening) = control.listening.take() {
            listening.close();
        }
        if control.enabled {
            shared.linger(Instant::now() + LINGER);
            if let Some(listening) = shared.listening.get() {
                listening.close();
            }
            if shared.config.xrc {
                shared.leave(Instant::now() + LEAVE);
            } else {
                shared.announce_end(Instant::now() + END);
            }
            self.release(&mut control);
        }
        // Regions that are bound to the endpoint have their records in the directory of its own
        // protection domain, also before the endpoint is enabled.
        let mr = shared.domain.mr();
        if mr.config().form.mode.contains(Mode::ENDPOINT) {
            mr.forget(shared.pd());
        }
    }

    /// The registration scope of this endpoint (`FI_MR_ENDPOINT`, `fi_mr(3)`).
    pub fn scope(&self) -> Scope<'_> {
        let shared = self.shared();
        Scope {
            domain: shared.domain.mr(),
            pd: shared.pd(),
            auth: shared.config.auth.as_ref(),
        }
    }

    /// Whether writes of this endpoint can be made durable.
    pub fn is_durable(&self) -> bool {
        self.shared().config.durable
    }

    /// The default flags of operations.
    #[inline]
    pub fn op_flags(&self) -> &OpFlags {
        &self.op_flags
    }

    /// Minimum free space of a multi-receive buffer in bytes (`FI_OPT_MIN_MULTI_RECV`).
    pub fn min_multi_recv(&self) -> usize {
        self.common.min_multi_recv.load(Ordering::Relaxed)
    }

    /// Changes what [`Self::min_multi_recv`] returns, for buffers that are posted later.
    pub fn set_min_multi_recv(&self, bytes: usize) {
        self.common.min_multi_recv.store(bytes, Ordering::Relaxed);
    }
}

impl Shared {
    /// Whether the device executes atomics of all lengths.
    fn has_device_atomics(&self) -> bool {
        self.domain.device().max_elements() >= MAX_ATOMIC_SIZE
    }

    fn rma_config(&self) -> RmaConfig {
        let config = &self.config;
        RmaConfig {
            device_atomics: config.rma && self.has_device_atomics(),
            inject_size: config.inject_size,
            max_inline: self.domain.device().max_inline(),
            max_len: self.domain.max_msg_size(),
            atomics: config.atomics,
            after_sends: config.rma_after_sends,
            before_sends: config.sends_after_rma,
        }
    }

    /// `tag`: of the authorization key. The endpoint listens at `listener` and the further
    /// addresses.
    fn core_config(
        &self,
        id: EndpointId,
        (listener, further): (rdm::Listener, Vec<rdm::Listener>),
        tag: u64,
    ) -> Config {
        let mode = self.domain.mr().config().form.mode;
        // the device of a peer compares the rights of regions, and knows none of an endpoint
        let peer_rights = self.config.peer_atomics;
        let timeout = self.config.connect_timeout.unwrap_or(TIMEOUT);
        Config {
            id,
            listener,
            further,
            auth: tag,
            random: Box::new(random),
            circuits: self.config.xrc,
            device_atomics: peer_rights.contains(ALL_ATOMICS) && self.has_device_atomics(),
            application_keys: self.has_rma() && !mode.contains(Mode::PROV_KEY),
            eager: MAX_EAGER,
            dials: DIALS,
            peers: PEERS,
            // less than 2^32 s
            timeout: timeout.as_nanos() as u64,
            answer: REDIAL.0.max(timeout / REDIAL.1).as_nanos() as u64,
            idle: IDLE
                .map(|(least, times)| least.max(timeout * times).as_nanos() as u64)
                .into(),
            pool: POOL,
            // 750 ms. The end of a process is reported by its circuit, which may have ended before
            beat: (self.config.xrc || self.domain.device().needs_keepalive())
                .then_some(PERIOD.as_nanos() as u64),
            retries: self.domain.tuning().retries().as_nanos() as u64,
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.alias {
            self.close();
        }
    }
}
