//! Active endpoints: their life from creation to close.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bitflags::bitflags;

use super::core::{Core, CqBinding};
use super::enable::OWN_REQUESTS;
use super::local::MAX_IOV;
use super::request::Taken;
use super::state::State;
use crate::Token;
use crate::auth::AuthKey;
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::{Event, Mode};
use crate::msg::{ConnectRequest, LengthOption, SharedRx};
use crate::queue::{CompletionQueue, Counter, Counters, EventQueue};
use crate::verbs::{Device, Pd};

bitflags! {
    /// What a completion queue is bound for, with libfabric's values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct BindFlags: u64 {
        /// `FI_RECV`
        const RECV = 1 << 10;
        /// `FI_TRANSMIT`
        const TRANSMIT = 1 << 11;
        /// `FI_SELECTIVE_COMPLETION`
        const SELECTIVE_COMPLETION = 1 << 59;
    }
}

/// What to make an endpoint with. Sizes are clipped to what the device has.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Handed back in events.
    pub token: Token,
    /// How many transmit operations may be under way.
    pub tx_size: usize,
    /// How many receives may be posted.
    pub rx_size: usize,
    /// Buffers per transmit operation.
    pub tx_iov_limit: usize,
    /// Buffers per receive.
    pub rx_iov_limit: usize,
    /// Whether receives come from a shared context, which must be bound then, and not from a queue of
    /// its own (`ep_attr->rx_ctx_cnt` of `FI_SHARED_CONTEXT`).
    pub shared_rx: bool,
    /// Whether it has atomics: the device must have them.
    pub atomics: bool,
    /// Whether writes can be made durable (`FI_RMA_PMEM`): the device must have flushes.
    pub durable: bool,
    /// Bytes that inject must take.
    pub inject_size: usize,
    /// Default flags of transmit operations (`tx_attr->op_flags`).
    pub tx_op_flags: Flags,
    /// Default flags of receives (`rx_attr->op_flags`).
    pub rx_op_flags: Flags,
    /// Whether its capabilities include sending or initiating RMA: enabling needs a completion
    /// queue for that then.
    pub needs_tx: bool,
    /// Whether its capabilities include receiving: enabling needs a completion queue for that
    /// then.
    pub needs_rx: bool,
    /// Its authorization key, if it is not the domain's. Connects with endpoints of the same one only.
    pub auth: Option<AuthKey>,
    /// This side's address, if it was chosen.
    pub src: Option<SocketAddr>,
    /// The peer's address, if it is known.
    pub dst: Option<SocketAddr>,
}

/// A connected endpoint on an RC queue pair, or an alias of one. Thread safe.
///
/// Dropping it closes it, unless it is an alias.
#[derive(Debug)]
pub struct Endpoint {
    pub(super) core: Arc<Core>,
    alias: bool,
    tx_op_flags: AtomicU64,
    rx_op_flags: AtomicU64,
}

/// The most that an application can have of an endpoint on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Transmit operations under way: the device's work requests less those of the engine's own.
    pub tx_size: usize,
    /// Receives posted.
    pub rx_size: usize,
    /// Buffers per transmit operation.
    pub tx_iov_limit: usize,
    /// Buffers per receive.
    pub rx_iov_limit: usize,
    /// Receives posted to a shared context; 0 where the device has no shared receive queues.
    pub shared_rx_size: usize,
    /// Buffers per receive of a shared context.
    pub shared_rx_iov_limit: usize,
}

impl Limits {
    /// Those of a device.
    pub fn of(device: &Device) -> Self {
        let attr = device.attr();
        let iov = |most: usize| most.clamp(1, MAX_IOV);
        let shared = attr.max_srq != 0;
        Self {
            tx_size: attr.max_qp_wr.saturating_sub(OWN_REQUESTS).max(1),
            rx_size: attr.max_qp_wr.max(1),
            tx_iov_limit: iov(attr.max_sge.min(attr.max_sge_rd.max(1))),
            rx_iov_limit: iov(attr.max_sge),
            shared_rx_size: if shared { attr.max_srq_wr.max(1) } else { 0 },
            shared_rx_iov_limit: iov(attr.max_srq_sge),
        }
    }
}

/// Clips what the application asked for to what the device has.
fn clip(domain: &Domain, mut config: EndpointConfig) -> EndpointConfig {
    let limits = Limits::of(domain.device());
    config.tx_size = config.tx_size.clamp(1, limits.tx_size);
    config.rx_size = config.rx_size.clamp(1, limits.rx_size);
    config.tx_iov_limit = config.tx_iov_limit.clamp(1, limits.tx_iov_limit);
    config.rx_iov_limit = config.rx_iov_limit.clamp(1, limits.rx_iov_limit);
    config
}

impl Endpoint {
    /// Makes an endpoint that will connect to a peer.
    ///
    /// # Errors
    /// `ENOMEM`: the device has no protection domain left for an endpoint that needs its own.
    pub fn open(domain: &Arc<Domain>, config: EndpointConfig) -> Result<Arc<Self>> {
        Ok(Self::new(
            domain,
            Self::pd_for(domain, &config)?,
            config,
            None,
        ))
    }

    /// The protection domain of a new endpoint.
    fn pd_for(domain: &Arc<Domain>, config: &EndpointConfig) -> Result<Arc<Pd>> {
        if domain.config().form.mode.contains(Mode::ENDPOINT) {
            Pd::alloc(domain.device())
        } else {
            domain.pd_of(config.auth.as_ref())
        }
    }

    fn new(
        domain: &Arc<Domain>,
        pd: Arc<Pd>,
        config: EndpointConfig,
        request: Option<Taken>,
    ) -> Arc<Self> {
        let config = clip(domain, config);
        Arc::new(Self {
            alias: false,
            tx_op_flags: AtomicU64::new(config.tx_op_flags.bits()),
            rx_op_flags: AtomicU64::new(config.rx_op_flags.bits()),
            core: Core::new(domain, pd, config, request),
        })
    }

    /// The same endpoint with default flags of its own (`fi_ep_alias(3)`): this one's, to begin with. It
    /// must not outlive what it is an alias of, and closes nothing.
    pub fn alias(&self) -> Arc<Self> {
        Arc::new(Self {
            core: Arc::clone(&self.core),
            alias: true,
            tx_op_flags: AtomicU64::new(self.tx_op_flags().bits()),
            rx_op_flags: AtomicU64::new(self.rx_op_flags().bits()),
        })
    }

    /// Makes an endpoint that will accept a request.
    ///
    /// # Errors
    /// Gives the request back: with `EDOMAIN` if it came in by another device than the domain's, with `ENOMEM`
    /// if the device has no protection domain left for an endpoint that needs its own.
    pub fn from_request(
        domain: &Arc<Domain>,
        config: EndpointConfig,
        request: ConnectRequest,
    ) -> std::result::Result<Arc<Self>, (FiErrno, ConnectRequest)> {
        if !request.is_on(domain.device()) {
            return Err((FiErrno::EDOMAIN, request));
        }
        match Self::pd_for(domain, &config) {
            Ok(pd) => Ok(Self::new(domain, pd, config, request.take())),
            Err(error) => Err((error, request)),
        }
    }

    /// Binds the event queue for connection events.
    ///
    /// # Errors
    /// `EINVAL`: one is bound already. `EOPBADSTATE`: enabled already.
    pub fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        self.core.bind_eq(eq)
    }

    /// Binds a completion queue for one direction or both.
    ///
    /// # Errors
    /// - `EINVAL`: no direction, or one that has a queue already.
    /// - `EDOMAIN`: a queue of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_cq(&self, cq: &Arc<CompletionQueue>, flags: BindFlags) -> Result<()> {
        if !Arc::ptr_eq(cq.domain(), self.domain()) {
            return Err(FiErrno::EDOMAIN);
        }
        let mut control = self.core.control.lock();
        if !self.core.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
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
            control.tx = Some(binding.clone());
        }
        if rx {
            control.rx = Some(binding);
        }
        Ok(())
    }

    /// Binds the shared receive context that it takes its receives from.
    ///
    /// # Errors
    /// - `EINVAL`: the endpoint was made with a receive queue of its own, or has a context.
    /// - `EDOMAIN`: a context of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_shared_rx(&self, shared: &Arc<SharedRx>) -> Result<()> {
        if !Arc::ptr_eq(shared.domain(), self.domain()) {
            return Err(FiErrno::EDOMAIN);
        }
        let mut control = self.core.control.lock();
        if !self.core.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        if !self.core.config.shared_rx || control.srx.is_some() {
            return Err(FiErrno::EINVAL);
        }
        control.srx = Some(Arc::clone(shared));
        Ok(())
    }

    /// Lets a counter count the operations of these kinds that end: `SEND`, `RECV`, `READ`, `WRITE`, and those of the peer on
    /// regions of this side, `REMOTE_READ` and `REMOTE_WRITE`. None at all binds nothing. Completion queues are needed all the same (`fi_endpoint(3)`, `fi_ep_bind`); bound with selective
    /// completion they stay empty.
    ///
    /// # Errors
    /// - `EINVAL`: a kind has a counter already.
    /// - `EOPNOTSUPP`: what the peer does to this side's memory, in a domain without events.
    /// - `EBADFLAGS`: anything else.
    /// - `EDOMAIN`: a counter of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_counter(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        if !Arc::ptr_eq(counter.domain(), self.domain()) {
            return Err(FiErrno::EDOMAIN);
        }
        let remote = Flags::REMOTE_READ | Flags::REMOTE_WRITE;
        if kinds.intersects((Counters::KINDS | remote).complement()) {
            return Err(FiErrno::EBADFLAGS);
        }
        if kinds.intersects(remote) && !self.domain().counts() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        let mut control = self.core.control.lock();
        if !self.core.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let events = Event::of(kinds);
        let mut bound = control.remote_counters.iter();
        if bound.any(|(event, _)| events.clone().any(|new| new == *event)) {
            return Err(FiErrno::EINVAL);
        }
        if kinds.intersects(Counters::KINDS) {
            let own = kinds & Counters::KINDS;
            self.core.rings.bind_counter(counter, own)?;
        }
        let events = events.map(|event| (event, Arc::clone(counter)));
        control.remote_counters.extend(events);
        Ok(())
    }

    /// Makes it ready: receives can be posted from now on. Connecting and accepting do it too.
    ///
    /// # Errors
    /// - `ENOEQ`, `ENOCQ`: what must be bound isn't.
    /// - `EOPBADSTATE`: nor is the shared receive context that it was made for.
    /// - `EADDRNOTAVAIL`: the source address is not one of the device.
    /// - `ENOMEM`, `EINVAL`: the device refuses a queue pair of this size.
    pub fn enable(&self) -> Result<()> {
        self.core.enable()
    }

    /// Begins to connect to `peer` (or the address that it was made with); the event queue tells
    /// how it ends.
    ///
    /// # Errors
    /// - `EINVAL`: no address, or more data than [`Self::cm_data_size`].
    /// - `EOPBADSTATE`: it is connecting, connected, or made from a request.
    /// - as [`Self::enable`].
    pub fn connect(&self, peer: Option<SocketAddr>, data: &[u8]) -> Result<()> {
        self.core.connect(peer, data)
    }

    /// Accepts the request that it was made from; the event queue tells when it is connected.
    ///
    /// # Errors
    /// - `EINVAL`: more data than [`Self::cm_data_size`].
    /// - `EACCES`: the peer has another authorization key; it is refused.
    /// - `EOPBADSTATE`: not made from a request, or accepted or refused already.
    /// - `ECONNABORTED` and others of the connection manager: the peer has gone.
    /// - as [`Self::enable`].
    pub fn accept(&self, data: &[u8]) -> Result<()> {
        self.core.accept(data)
    }

    /// Ends the connection. Operations under way complete with `ECANCELED`.
    ///
    /// # Errors
    /// `ENOTCONN`: there is none.
    pub fn shutdown(&self) -> Result<()> {
        self.core.shutdown()
    }

    /// Disconnects, flushes every operation to its completion queue, and gives the device's
    /// resources back; nothing else works afterwards. Idempotent.
    pub fn close(&self) {
        self.core.close();
    }

    /// Takes another source address (`fi_setname(3)`).
    ///
    /// # Errors
    /// `EOPBADSTATE`: enabled already.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        let mut control = self.core.control.lock();
        if !self.core.state.is(State::Idle) || control.passive {
            return Err(FiErrno::EOPBADSTATE);
        }
        control.src = Some(addr);
        Ok(())
    }

    /// This side's address (`fi_getname(3)`).
    ///
    /// # Errors
    /// `EOPBADSTATE`: it has none before it is enabled.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        let control = self.core.control.lock();
        if !control.bound && matches!(self.core.state.get(), State::Idle | State::Enabled) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        id.local_addr().ok_or(FiErrno::EOPBADSTATE)
    }

    /// The peer's address (`fi_getpeer(3)`).
    ///
    /// # Errors
    /// `ENOTCONN`: not connected.
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        let control = self.core.control.lock();
        let id = control.id.as_ref().ok_or(FiErrno::ENOTCONN)?;
        if !self.core.state.can_post() {
            return Err(FiErrno::ENOTCONN);
        }
        id.peer_addr().ok_or(FiErrno::ENOTCONN)
    }

    /// Bytes of data that can go along when it connects.
    pub fn cm_data_size(&self) -> usize {
        self.core.cm_data_size()
    }

    /// Its authorization key.
    pub(crate) fn auth(&self) -> Option<&AuthKey> {
        self.core.auth()
    }

    /// Whether its writes can be made durable.
    pub fn is_durable(&self) -> bool {
        self.core.config.durable
    }

    /// Whether it was made with atomics.
    pub fn has_atomics(&self) -> bool {
        self.core.config.atomics
    }

    /// Default flags of transmit operations.
    #[inline]
    pub fn tx_op_flags(&self) -> Flags {
        Flags::from_bits_retain(self.tx_op_flags.load(Ordering::Relaxed))
    }

    /// Changes them (`FI_SETOPSFLAG`).
    pub fn set_tx_op_flags(&self, flags: Flags) {
        self.tx_op_flags.store(flags.bits(), Ordering::Relaxed);
    }

    /// Default flags of receives.
    #[inline]
    pub fn rx_op_flags(&self) -> Flags {
        Flags::from_bits_retain(self.rx_op_flags.load(Ordering::Relaxed))
    }

    /// Changes them (`FI_SETOPSFLAG`).
    pub fn set_rx_op_flags(&self, flags: Flags) {
        self.rx_op_flags.store(flags.bits(), Ordering::Relaxed);
    }

    /// The length that its operations, of the kind that `option` names, may have, in bytes.
    pub fn length(&self, option: LengthOption) -> usize {
        self.core.lengths.get(option)
    }

    /// Makes that smaller (`fi_setopt(3)`).
    ///
    /// # Errors
    /// `EINVAL`: more than the endpoint was made with. `EOPBADSTATE`: enabled already.
    pub fn set_length(&self, option: LengthOption, value: usize) -> Result<()> {
        let _control = self.core.control.lock();
        if !self.core.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        self.core.lengths.set(option, value)
    }

    /// The protection domain of its queue pair.
    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.core.pd
    }

    /// The domain it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.core.domain
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.alias {
            self.core.close();
        }
    }
}
