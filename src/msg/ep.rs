//! Active endpoints, `fi_endpoint(3)`: creation, binding, state changes and close.

use std::net::SocketAddr;
use std::sync::Arc;

use super::enable::ENGINE_REQUESTS;
use super::shared::{Origin, Shared};
use crate::Token;
use crate::auth::AuthKey;
use crate::conn::{CmSink, ConnectRequest, Incoming, Side, State};
use crate::domain::Domain;
use crate::eq::EventQueue;
use crate::errno::{FiErrno, Result};
use crate::flags::{Flags, OpFlags};
use crate::initiator::local::MAX_IOV;
use crate::initiator::sq::Sq as _;
use crate::mr::{Mode, Scope};
use crate::msg::{LengthOption, PassiveEndpoint, SharedRx};
pub use crate::queue::BindFlags;
use crate::queue::event_cell::Event;
use crate::queue::{CompletionQueue, Counter, Counters, CqBinding};
use crate::verbs::{Device, Pd, Xrcd};

/// Attributes of a new endpoint (`fi_endpoint(3)`). Sizes are clipped to the device's limits.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Identifies the endpoint in events.
    pub token: Token,
    /// The context with which the application has opened the endpoint: that of the errors of
    /// operations without a context of their own.
    pub context: usize,
    /// Maximum number of transmit operations under way.
    pub tx_size: usize,
    /// Maximum number of posted receives.
    pub rx_size: usize,
    /// Buffers per transmit operation.
    pub tx_iov_limit: usize,
    /// Buffers per receive.
    pub rx_iov_limit: usize,
    /// Whether receives come from a shared context (`ep_attr->rx_ctx_cnt` of `FI_SHARED_CONTEXT`)
    /// instead of the endpoint's own queue. The context must be bound before enabling.
    pub shared_rx: bool,
    /// Whether the endpoint is on XRC (`FI_PROTO_RDMA_CM_IB_XRC`); requires `shared_rx`, and a
    /// device whose XRC is usable ([`Device::xrc_behaviour`]).
    pub xrc: bool,
    /// Whether the endpoint has atomics; requires a device with atomics.
    pub atomics: bool,
    /// Whether writes can be made durable (`FI_RMA_PMEM`); requires a device with flush operations.
    pub durable: bool,
    /// Maximum length of injected data, in bytes.
    pub inject_size: usize,
    /// Default flags of transmit operations (`tx_attr->op_flags`).
    pub tx_op_flags: Flags,
    /// Default flags of receives (`rx_attr->op_flags`).
    pub rx_op_flags: Flags,
    /// Whether the capabilities include sending or initiating RMA; enabling then requires a
    /// completion queue for transmits.
    pub needs_tx: bool,
    /// Whether the capabilities include receiving; enabling then requires a completion queue for
    /// receives.
    pub needs_rx: bool,
    /// Authorization key, if it is not the domain's. The endpoint connects only with endpoints that
    /// have the same key.
    pub auth: Option<AuthKey>,
    /// Traffic class of the packets; `None`: the domain's, which endpoints on XRC have in any case,
    /// because they share queue pairs.
    pub traffic_class: Option<u8>,
    /// Local address, if the application has set one.
    pub src: Option<SocketAddr>,
    /// The peer's address, if the application has set one.
    pub dst: Option<SocketAddr>,
}

/// An endpoint of type `FI_EP_MSG` on an RC queue pair (`fi_endpoint(3)`), or an alias of one.
/// Thread safe.
///
/// Dropping an endpoint closes it. Dropping an alias closes nothing.
#[derive(Debug)]
pub struct Endpoint {
    pub(super) shared: Arc<Shared>,
    alias: bool,
    op_flags: OpFlags,
}

/// Upper limits of an endpoint's attributes on a device (`fi_endpoint(3)`, `fi_srx_context(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Transmit operations under way: the device's `max_qp_wr` less the engine's own requests.
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
    /// The limits of a device.
    pub fn of(device: &Device) -> Self {
        let attr = device.attr();
        let iov = |most: usize| most.clamp(1, MAX_IOV);
        let shared = attr.max_srq != 0;
        Self {
            tx_size: attr.max_qp_wr.saturating_sub(ENGINE_REQUESTS).max(1),
            rx_size: attr.max_qp_wr.max(1),
            tx_iov_limit: iov(attr.max_sge.min(attr.max_sge_rd.max(1))),
            rx_iov_limit: iov(attr.max_sge),
            shared_rx_size: if shared { attr.max_srq_wr.max(1) } else { 0 },
            shared_rx_iov_limit: iov(attr.max_srq_sge),
        }
    }
}

/// Clips the requested sizes to the device's limits.
fn clip(domain: &Domain, mut config: EndpointConfig) -> EndpointConfig {
    let limits = Limits::of(domain.device());
    config.tx_size = config.tx_size.clamp(1, limits.tx_size);
    config.rx_size = config.rx_size.clamp(1, limits.rx_size);
    config.tx_iov_limit = config.tx_iov_limit.clamp(1, limits.tx_iov_limit);
    config.rx_iov_limit = config.rx_iov_limit.clamp(1, limits.rx_iov_limit);
    config
}

impl Endpoint {
    /// Makes an endpoint that will connect to a peer (`fi_endpoint(3)`).
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

    /// Makes an endpoint that will connect from the address of a passive endpoint, which is closed
    /// (`fi_endpoint(3)`, `fi_info.handle`). `config.src` is that address. It stays bound; but if
    /// the passive endpoint listens, or one of both is on XRC, it is free until the new endpoint
    /// binds to it.
    ///
    /// # Errors
    /// As [`Self::open`]. The passive endpoint stays open.
    pub fn replace(
        domain: &Arc<Domain>,
        config: EndpointConfig,
        pep: &PassiveEndpoint,
    ) -> Result<Arc<Self>> {
        let pd = Self::pd_for(domain, &config)?;
        let id = match config.xrc {
            true => None,
            false => pep.take_id(domain.device()),
        };
        pep.close();
        Ok(Self::new(domain, pd, config, id.map(Origin::Bound)))
    }

    /// The protection domain of a new endpoint.
    fn pd_for(domain: &Arc<Domain>, config: &EndpointConfig) -> Result<Arc<Pd>> {
        if domain.mr().config().form.mode.contains(Mode::ENDPOINT) {
            Pd::alloc(domain.device())
        } else {
            domain.mr().pd_of(config.auth.as_ref())
        }
    }

    fn new(
        domain: &Arc<Domain>,
        pd: Arc<Pd>,
        config: EndpointConfig,
        origin: Option<Origin>,
    ) -> Arc<Self> {
        let config = clip(domain, config);
        Arc::new(Self {
            alias: false,
            op_flags: OpFlags::new(config.tx_op_flags, config.rx_op_flags),
            shared: Shared::new(domain, pd, config, origin),
        })
    }

    /// Posts the operations that were delayed for further ones (`FI_MORE`).
    #[cold]
    pub fn post_delayed(&self) {
        if let Some(side) = self.shared.tx.lock().as_mut() {
            side.sq.post_delayed();
        }
    }

    /// An alias with its own default flags (`fi_ep_alias(3)`), initially those of this endpoint.
    /// The alias must not outlive the endpoint; dropping the alias closes nothing.
    pub fn alias(&self) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(&self.shared),
            alias: true,
            op_flags: self.op_flags.clone(),
        })
    }

    /// Makes an endpoint that will accept a request (`fi_endpoint(3)`, `fi_info.handle`).
    ///
    /// # Errors
    /// The request is returned with the errno, unless it is rejected.
    /// - `EDOMAIN`: the request arrived on another device than the domain's.
    /// - `EINVAL`: the request is one of the other transport; or it is none that an endpoint can
    ///   accept, and is rejected.
    /// - `ENOMEM`: the device has no protection domain left for an endpoint that needs its own.
    pub fn from_request(
        domain: &Arc<Domain>,
        config: EndpointConfig,
        request: ConnectRequest,
    ) -> std::result::Result<Arc<Self>, (FiErrno, Option<ConnectRequest>)> {
        if !request.is_on(domain.device()) {
            return Err((FiErrno::EDOMAIN, Some(request)));
        }
        if request.is_xrc() != config.xrc {
            return Err((FiErrno::EINVAL, Some(request)));
        }
        match Self::pd_for(domain, &config) {
            Ok(pd) => {
                let request = match config.xrc {
                    true => Incoming::of(request).map(Origin::XrcRequest),
                    false => request.take().map(|(id, data)| Origin::Request(id, data)),
                };
                // without the request it would be an endpoint that connects
                match request {
                    Some(request) => Ok(Self::new(domain, pd, config, Some(request))),
                    None => Err((FiErrno::EINVAL, None)),
                }
            }
            Err(error) => Err((error, Some(request))),
        }
    }

    /// Binds the event queue for connection events (`fi_ep_bind(3)`).
    ///
    /// # Errors
    /// `EINVAL`: an event queue is bound already, also that of the domain, which [`Self::enable`]
    /// binds even if it fails afterwards. `EOPBADSTATE`: enabled already.
    pub fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let sink: Arc<dyn CmSink> = Arc::clone(eq) as _;
        self.shared.bind_sink(&sink)
    }

    /// Binds a completion queue for one direction or both (`fi_ep_bind(3)`).
    ///
    /// # Errors
    /// - `EINVAL`: no direction, or a direction that has a queue already; a queue without a device
    ///   queue.
    /// - `EDOMAIN`: a queue of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_cq(&self, cq: &Arc<CompletionQueue>, flags: BindFlags) -> Result<()> {
        if !Arc::ptr_eq(cq.domain(), self.domain().queues()) {
            return Err(FiErrno::EDOMAIN);
        }
        cq.device_cq()?;
        let mut control = self.shared.control.lock();
        if !self.shared.conn.state.is(State::Idle) {
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

    /// Binds the shared receive context that supplies the endpoint's receives (`fi_ep_bind(3)`).
    ///
    /// # Errors
    /// - `EINVAL`: the endpoint was made with a receive queue of its own, or has a context.
    /// - `EDOMAIN`: a context of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_shared_rx(&self, shared: &Arc<SharedRx>) -> Result<()> {
        if !Arc::ptr_eq(shared.domain(), self.domain()) {
            return Err(FiErrno::EDOMAIN);
        }
        let mut control = self.shared.control.lock();
        if !self.shared.conn.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        if !self.shared.config.shared_rx || control.srx.is_some() {
            return Err(FiErrno::EINVAL);
        }
        control.srx = Some(Arc::clone(shared));
        Ok(())
    }

    /// Binds the XRC domain of an endpoint on XRC, instead of that of the engine (`fi_ep_bind(3)`,
    /// `weft_mr_ops.xrcd_open`). The shared receive context has the XRC domain of the first of its
    /// endpoints that is enabled.
    ///
    /// # Errors
    /// - `EINVAL`: an endpoint on RC, an XRC domain of another device, or a second one.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_xrcd(&self, xrcd: &Arc<Xrcd>) -> Result<()> {
        let mut control = self.shared.control.lock();
        if !self.shared.conn.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let other = !Arc::ptr_eq(xrcd.device(), self.domain().device());
        if !self.shared.config.xrc || other || control.xrc.bound.is_some() {
            return Err(FiErrno::EINVAL);
        }
        control.xrc.bound = Some(Arc::clone(xrcd));
        Ok(())
    }

    /// Makes a counter count completed operations of these kinds: `SEND`, `RECV`, `READ`, `WRITE`,
    /// and the peer's operations on regions of this side, `REMOTE_READ` and `REMOTE_WRITE`. Empty
    /// `kinds` bind nothing. Completion queues are required nevertheless (`fi_endpoint(3)`,
    /// `fi_ep_bind`); bound with selective completion they stay empty.
    ///
    /// # Errors
    /// - `EINVAL`: a kind has a counter already.
    /// - `EOPNOTSUPP`: `REMOTE_READ` or `REMOTE_WRITE` in a domain without events.
    /// - `EBADFLAGS`: any other flag.
    /// - `EDOMAIN`: a counter of another domain.
    /// - `EOPBADSTATE`: enabled already.
    pub fn bind_counter(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        if !Arc::ptr_eq(counter.domain(), self.domain().queues()) {
            return Err(FiErrno::EDOMAIN);
        }
        let remote = Flags::REMOTE_READ | Flags::REMOTE_WRITE;
        if kinds.intersects((Counters::KINDS | remote).complement()) {
            return Err(FiErrno::EBADFLAGS);
        }
        if kinds.intersects(remote) && !self.domain().mr().counts() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        let mut control = self.shared.control.lock();
        if !self.shared.conn.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let events = Event::of(kinds);
        let mut bound = control.remote_counters.iter();
        if bound.any(|(event, _)| events.clone().any(|new| new == *event)) {
            return Err(FiErrno::EINVAL);
        }
        if kinds.intersects(Counters::KINDS) {
            let own = kinds & Counters::KINDS;
            self.shared.slots.bind_counter(counter, own)?;
        }
        let events = events.map(|event| (event, Arc::clone(counter)));
        control.remote_counters.extend(events);
        Ok(())
    }

    /// Enables the endpoint (`fi_enable(3)`): receives can be posted afterwards. Connecting and
    /// accepting enable it too.
    ///
    /// # Errors
    /// - `ENOEQ`, `ENOCQ`: a required event queue or completion queue is not bound.
    /// - `EOPBADSTATE`: the endpoint is closed, or was made for a shared receive context and none
    ///   is bound.
    /// - `EADDRNOTAVAIL`: the source address does not belong to the device.
    /// - `ENOMEM`, `EINVAL`: the device refuses a queue pair of this size.
    /// - `ENOSPC`: a completion queue has no room for the endpoint's completions, and the device
    ///   cannot make it larger.
    pub fn enable(&self) -> Result<()> {
        self.shared.enable()
    }

    /// Starts to connect to `peer`, or to [`EndpointConfig::dst`] if `peer` is `None`
    /// (`fi_connect(3)`). The event queue reports the result.
    ///
    /// # Errors
    /// - `EINVAL`: no address, or more data than [`Self::cm_data_size`].
    /// - `EOPBADSTATE`: the endpoint is connecting or disconnected, or was made from a request.
    /// - `EISCONN`: connected already.
    /// - the errors of [`Self::enable`].
    pub fn connect(&self, peer: Option<SocketAddr>, data: &[u8]) -> Result<()> {
        self.shared.connect(peer, data)
    }

    /// Accepts the request that the endpoint was made from (`fi_accept(3)`). The event queue
    /// reports the connection.
    ///
    /// # Errors
    /// - `EINVAL`: more data than [`Self::cm_data_size`].
    /// - `EACCES`: the peer has another authorization key; its request was rejected.
    /// - `EOPBADSTATE`: not made from a request, or accepted or refused already.
    /// - `ECONNRESET`: the peer has ended the request, or its process has ended. `ECONNABORTED`: on
    ///   XRC, the request of another provider names a target that this process does not have.
    /// - errors of the connection manager.
    /// - the errors of [`Self::enable`].
    pub fn accept(&self, data: &[u8]) -> Result<()> {
        self.shared.accept(data)
    }

    /// Ends the connection (`fi_shutdown(3)`). Operations under way complete with `ECANCELED`.
    ///
    /// # Errors
    /// `ENOTCONN`: the endpoint is not connected.
    pub fn shutdown(&self) -> Result<()> {
        self.shared.shutdown()
    }

    /// Disconnects, flushes every operation to its completion queue, and releases the device's
    /// resources (`fi_close(3)`). Later operations and state changes fail. Idempotent.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Binds the source address (`fi_setname(3)`), in place of the earlier one. Port 0 stands for
    /// the port of the endpoint, or for a free one. Does not block.
    ///
    /// Connections on XRC share the queue pairs and the ports of a process: the address is
    /// reserved, and its host is that of the endpoint's requests.
    ///
    /// # Errors
    /// - `EOPBADSTATE`: enabled already, closed, or made from a request.
    /// - `EADDRINUSE`, `EADDRNOTAVAIL`: the address cannot be used, or belongs to another device.
    ///   The endpoint keeps its earlier address; but if that has the same port and another process
    ///   has taken it meanwhile, the endpoint has no address.
    /// - `ENOMEM`, `EMFILE`: no resources left.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        let conn = &self.shared.conn;
        loop {
            let sink = conn.sink();
            let mut registry = sink.map(|sink| sink.dispatcher().registry());
            let mut control = self.shared.control.lock();
            if !conn.state.is(State::Idle) || control.side.passive {
                return Err(FiErrno::EOPBADSTATE);
            }
            if conn.is_bound() != sink.is_some() {
                continue; // another thread has bound one, whose registry's lock precedes this one
            }
            return conn.rename(&mut control.side, registry.as_mut(), addr);
        }
    }

    /// This side's address (`fi_getname(3)`).
    ///
    /// Connections on XRC share the ports of a process. An enabled endpoint on XRC whose source has
    /// no port reserves a free one in this call; once its request is sent, the address is that of
    /// the request, which the peer sees.
    ///
    /// # Errors
    /// `EOPBADSTATE`: the endpoint has no local address yet, or is closed. On XRC also those of
    /// [`Self::set_name`].
    pub fn local_addr(&self) -> Result<SocketAddr> {
        let mut control = self.shared.control.lock();
        let state = self.shared.conn.state.get();
        // the address of fi_setname(3) or of the info
        let given = control.side.src.filter(|addr| addr.port() != 0);
        if self.shared.config.xrc {
            let known = control.xrc.local.or(given);
            if known.is_some() || matches!(state, State::Idle | State::Closed) {
                let known = known.filter(|_| state != State::Closed);
                return known.ok_or(FiErrno::EOPBADSTATE);
            }
            return self.reserve_addr(&mut control.side);
        }
        if !control.side.bound && matches!(state, State::Idle | State::Enabled) {
            return given.ok_or(FiErrno::EOPBADSTATE);
        }
        let id = control.side.id()?;
        id.local_addr().ok_or(FiErrno::EOPBADSTATE)
    }

    /// Reserves a free port at the source of an endpoint on XRC, if that is an address of a host.
    fn reserve_addr(&self, side: &mut Side) -> Result<SocketAddr> {
        let src = side.src.filter(|src| !src.ip().is_unspecified());
        let src = src.ok_or(FiErrno::EOPBADSTATE)?;
        self.shared.conn.rename(side, None, src)?;
        side.src.ok_or(FiErrno::EOPBADSTATE)
    }

    /// The peer's address (`fi_getpeer(3)`).
    ///
    /// # Errors
    /// `ENOTCONN`: not connected.
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        let control = self.shared.control.lock();
        if !self.shared.conn.state.can_post() {
            return Err(FiErrno::ENOTCONN);
        }
        if self.shared.config.xrc {
            return control.xrc.remote.ok_or(FiErrno::ENOTCONN);
        }
        let id = control.side.id.as_ref().ok_or(FiErrno::ENOTCONN)?;
        id.peer_addr().ok_or(FiErrno::ENOTCONN)
    }

    /// Maximum length in bytes of the application's data in a connection request or reply
    /// (`FI_OPT_CM_DATA_SIZE`, `fi_endpoint(3)`).
    pub fn cm_data_size(&self) -> usize {
        self.shared.introducer().data_size()
    }

    /// The registration scope of this endpoint: its key domain, protection domain and authorization
    /// key. A region bound to the endpoint (`FI_MR_ENDPOINT`, `fi_mr(3)`) is registered in it.
    pub fn scope(&self) -> Scope<'_> {
        Scope {
            domain: self.shared.domain.mr(),
            pd: &self.shared.pd,
            auth: self.shared.auth(),
        }
    }

    /// Whether writes of this endpoint can be made durable.
    pub fn is_durable(&self) -> bool {
        self.shared.config.durable
    }

    /// Maximum length in bytes of injected data with which the endpoint was made.
    pub fn inject_size(&self) -> usize {
        self.shared.config.inject_size
    }

    /// Whether the endpoint was made with atomics.
    pub fn has_atomics(&self) -> bool {
        self.shared.config.atomics
    }

    /// The default flags of operations.
    #[inline]
    pub fn op_flags(&self) -> &OpFlags {
        &self.op_flags
    }

    /// Maximum length in bytes of operations of the kind that `option` names.
    pub fn length(&self, option: LengthOption) -> usize {
        self.shared.lengths.get(option)
    }

    /// Reduces the length that [`Self::length`] returns (`fi_setopt(3)`).
    ///
    /// # Errors
    /// `EINVAL`: more than the length with which the endpoint was made. `EOPBADSTATE`: enabled
    /// already.
    pub fn set_length(&self, option: LengthOption, value: usize) -> Result<()> {
        let _control = self.shared.control.lock();
        if !self.shared.conn.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        self.shared.lengths.set(option, value)
    }

    /// The domain that the endpoint belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.shared.domain
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.alias {
            self.shared.close();
        }
    }
}
