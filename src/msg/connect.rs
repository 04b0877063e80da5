//! Connecting and accepting: the steps of the connection manager.

use std::net::SocketAddr;
use std::sync::Arc;

use super::core::{Control, Core};
use crate::auth::AuthKey;
use crate::conn::State;
use crate::eq::{CmTarget, EqError, Event, EventQueue};
use crate::errno::{FiErrno, Result};
use crate::log::{self, Level, Subsystem, info_log, warn_log};
use crate::mr::Mode;
use crate::verbs::{CmEvent, CmEventKind, CmId, ConnParam};
use crate::wire::cm_data::{CM_DATA_SIZE, CmData, KEYED_CM_DATA_SIZE};
use crate::wire::introduction::Introduction;

impl Core {
    fn conn_param<'a>(&self, data: &'a CmData) -> ConnParam<'a> {
        let tuning = &self.domain.config().tuning;
        ConnParam {
            private_data: data.encoded(),
            retry_count: tuning.retry_count,
            rnr_retry_count: tuning.rnr_retry_count,
        }
    }

    /// The application's data, followed by this side's introduction.
    fn introducing(&self, control: &Control, data: CmData) -> CmData {
        match &control.block {
            Some(block) => data.introducing(Introduction {
                application_keys: !self.domain.mr().config().form.mode.contains(Mode::PROV_KEY),
                block_addr: block.addr(),
                block_rkey: block.rkey(),
                auth: self.auth().map(AuthKey::tag),
            }),
            None => data,
        }
    }

    /// The endpoint's authorization key, or the domain's.
    pub(super) fn auth(&self) -> Option<&AuthKey> {
        let of_domain = self.domain.mr().config().auth.as_ref();
        self.config.auth.as_ref().or(of_domain)
    }

    pub(super) fn cm_data_size(&self) -> usize {
        match self.auth() {
            Some(_) => KEYED_CM_DATA_SIZE,
            None => CM_DATA_SIZE,
        }
    }

    /// The application's data for the peer.
    fn data(&self, data: &[u8]) -> Result<CmData> {
        if data.len() > self.cm_data_size() {
            return Err(FiErrno::EINVAL);
        }
        CmData::new(data)
    }

    /// Whether the peer's introduction carries another authorization key than this side's, or only
    /// one side has a key.
    fn is_stranger(&self, peer: Option<&Introduction>) -> bool {
        peer.and_then(|peer| peer.auth) != self.auth().map(AuthKey::tag)
    }

    /// Starts to connect.
    pub(crate) fn connect(&self, peer: Option<SocketAddr>, data: &[u8]) -> Result<()> {
        let data = self.data(data)?;
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

    /// Accepts the request that the endpoint was made from.
    pub(crate) fn accept(&self, data: &[u8]) -> Result<()> {
        let data = self.data(data)?;
        {
            let control = self.control.lock();
            if !control.passive {
                return Err(FiErrno::EOPBADSTATE);
            }
            if self.is_stranger(control.introduction.as_ref()) {
                return self.refuse(&control);
            }
        }
        self.enable()?;
        let mut control = self.control.lock();
        if !self.state.change(State::Enabled, State::Accepting) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let id = Arc::clone(control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?);
        self.tune(&id);
        // The peer may send as soon as it has the reply, before this side has read its
        // confirmation. So everything that an answer needs is set up first; `may_post` waits for
        // the lock held here.
        let peer = control.introduction;
        self.introduced(&mut control, peer);
        let data = self.introducing(&control, data);
        id.accept(&self.conn_param(&data)).inspect_err(|error| {
            info_log!(EpCtrl, "rdma_accept: {error}");
            self.state.set(State::Disconnected);
        })?;
        // fails if another thread has already ended the connection; that state stays
        self.state.change(State::Accepting, State::Accepted);
        Ok(())
    }

    /// Whether an operation may be posted in a state other than `Connected`.
    ///
    /// A message can arrive as soon as the queue pair can receive: while another thread sends the
    /// reply (accepting side) or reads it (connecting side). That thread holds the lock of its
    /// step; once the lock was acquired here, the state is the one that the arrival implies.
    ///
    /// # Errors
    /// `EOPBADSTATE`: not enabled, or closed. `ESHUTDOWN`: no longer connected. `ENOTCONN`: not yet.
    #[cold]
    pub(super) fn may_post(&self) -> Result<()> {
        match self.state.get() {
            State::Accepting => drop(self.control.lock()),
            State::Connecting => {
                if let Some(eq) = self.eq.get() {
                    drop(eq.registry());
                }
            }
            _ => {}
        }
        match self.state.get() {
            State::Accepted | State::Connected => Ok(()),
            State::Idle | State::Closed => Err(FiErrno::EOPBADSTATE),
            State::Disconnected | State::Broken => Err(FiErrno::ESHUTDOWN),
            State::Enabled | State::Connecting | State::Accepting => Err(FiErrno::ENOTCONN),
        }
    }

    /// Rejects a peer that has another authorization key.
    fn refuse(&self, control: &Control) -> Result<()> {
        let early = |from| self.state.change(from, State::Disconnected);
        if !early(State::Idle) && !early(State::Enabled) {
            return Err(FiErrno::EOPBADSTATE);
        }
        warn_log!(EpCtrl, "a peer with another authorization key is refused");
        if let Some(id) = &control.id {
            // the peer may have gone already
            let _ = id.reject(CmData::EMPTY.encoded());
        }
        Err(FiErrno::EACCES)
    }

    /// Disconnects at once from a peer that has accepted without a check of authorization keys.
    fn leave_stranger(&self) -> Result<()> {
        warn_log!(
            EpCtrl,
            "the accepting peer has another authorization key: its connection is ended"
        );
        if let Some(id) = &self.control.lock().id {
            let _ = id.disconnect();
        }
        Err(FiErrno::ECONNREFUSED)
    }

    /// Connection parameters of an accepting side. A connecting side sets the traffic class
    /// earlier, for its route.
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

    fn push_error(&self, eq: &EventQueue, err: FiErrno, event: &CmEvent) {
        eq.push_error(EqError {
            owner: self.config.token,
            err,
            prov_errno: event.status,
            data: CmData::decode(event.private_data.bytes()),
            context: 0,
        });
    }

    /// Reports that connecting has failed, once.
    fn fail_connecting(&self, eq: &EventQueue, err: FiErrno, event: &CmEvent) {
        let failed = [
            State::Connecting,
            State::Accepting,
            State::Accepted,
            State::Broken,
        ]
        .into_iter()
        .any(|from| self.state.change(from, State::Disconnected));
        if failed {
            self.push_error(eq, err, event);
        }
    }

    fn established(&self, eq: &EventQueue, data: CmData) {
        let qp = {
            let mut control = self.control.lock();
            if !control.passive {
                // the accepting side has the peer's introduction from the request
                self.introduced(&mut control, data.introduction());
            }
            control.qp.clone()
        };
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
        let ep = self.config.token;
        if self.state.change(State::Connecting, State::Connected)
            || self.state.change(State::Accepted, State::Connected)
        {
            eq.push(Event::Connected { ep, data });
            if let Some(keepalive) = self.domain.queues().keepalive() {
                keepalive.join(self.weak());
            }
        } else if self.state.change(State::Broken, State::Disconnected) {
            eq.push(Event::Connected { ep, data });
            self.push_shutdown();
        }
    }

    /// Next step after the peer's address is resolved: makes the queue pair and resolves the route.
    fn addr_resolved(&self) -> Result<()> {
        let mut control = self.control.lock();
        if control.qp.is_none() {
            self.create_qp(&mut control)?;
        }
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        id.resolve_route()
    }

    /// Next step after the route is resolved: connects.
    fn route_resolved(&self) -> Result<()> {
        let control = self.control.lock();
        let id = control.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        self.set_ack_timeout(id);
        let data = self.introducing(&control, control.data);
        id.connect(&self.conn_param(&data))
    }
}

impl CmTarget for Core {
    fn cm_event(&self, event: CmEvent, eq: &EventQueue) {
        let data = CmData::decode(event.private_data.bytes());
        let result = match event.kind {
            CmEventKind::AddrResolved => self.addr_resolved(),
            CmEventKind::RouteResolved => self.route_resolved(),
            CmEventKind::Established
                if self.state.is(State::Connecting)
                    && self.is_stranger(data.introduction().as_ref()) =>
            {
                self.leave_stranger()
            }
            CmEventKind::Established => {
                self.established(eq, data);
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
                // answers the peer's disconnect, or initiates one if this side detected the end
                // first
                let _ = id.disconnect();
            }
        }
        self.settle();
    }
}

/// The errno for an unreachable peer. The connection manager's status is a positive errno here,
/// except that some versions report the kernel's own reason codes.
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
