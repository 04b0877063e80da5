//! Connecting and accepting: the endpoint's part in each step of its connection.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use super::pep::no_data;
use super::shared::{Shared, introduction_in};
use crate::auth::AuthKey;
use crate::conn::introduction::Introducer;
use crate::conn::{CmTarget, Owner, State};
use crate::errno::{FiErrno, Result};
use crate::log::{self, Level, Subsystem, info_log, warn_log};
use crate::mr::Mode;
use crate::verbs::{CmEvent, CmEventKind, PrivateData};
use crate::wire::msg_xrc;

impl Shared {
    /// The endpoint's authorization key, or the domain's.
    pub(super) fn auth(&self) -> Option<&AuthKey> {
        let of_domain = self.domain.mr().config().auth.as_ref();
        self.config.auth.as_ref().or(of_domain)
    }

    /// The key mode and the authorization key for the endpoint's introduction.
    pub(super) fn introducer(&self) -> Introducer<'_> {
        let mode = self.domain.mr().config().form.mode;
        Introducer {
            application_keys: !mode.contains(Mode::PROV_KEY),
            auth: self.auth(),
        }
    }

    /// Starts to connect.
    pub(crate) fn connect(&self, peer: Option<SocketAddr>, data: &[u8]) -> Result<()> {
        let data = self.introducer().data(data)?;
        {
            let control = self.control.lock();
            if control.side.passive {
                return Err(FiErrno::EOPBADSTATE);
            }
            // before the endpoint is enabled: it remains free to be configured
            if peer.or(control.side.dst).is_none() {
                return Err(FiErrno::EINVAL);
            }
        }
        self.enable()?;
        if self.config.xrc {
            return self.connect_xrc(peer, data);
        }
        let mut control = self.control.lock();
        self.conn.dial(&mut control.side, peer)?;
        // `route_resolved` reads the data under the same lock, which is held since before `dial`
        control.data = data;
        Ok(())
    }

    /// Accepts the request that the endpoint was made from.
    pub(crate) fn accept(&self, data: &[u8]) -> Result<()> {
        let introducer = self.introducer();
        let data = introducer.data(data)?;
        {
            let control = self.control.lock();
            if !control.side.passive {
                return Err(FiErrno::EOPBADSTATE);
            }
            if self.config.xrc {
                self.check_stranger_xrc(&control)?;
            } else if introducer.is_stranger(control.introduction.as_ref()) {
                self.conn.refuse(&control.side, no_data())?;
                warn_log!(EpCtrl, "a peer with another authorization key is refused");
                return Err(FiErrno::EACCES);
            }
        }
        self.enable()?;
        if self.config.xrc {
            return self.accept_xrc(data);
        }
        let mut control = self.control.lock();
        self.conn.begin_accept()?;
        // The peer may send as soon as it has the reply, before this side has read the peer's
        // confirmation. So the endpoint processes the introduction before it sends the reply, and
        // `may_post` waits for the lock held here.
        let peer = control.introduction;
        self.join_directory(&mut control);
        self.process_introduction(&mut control, peer);
        let data = introducer.introduce(data, control.block.as_deref());
        self.received.store(true, Ordering::Relaxed);
        self.conn.accept(&control.side, data.encoded())?;
        if let Some(qp) = &control.qp {
            // the peer may send before this side has read `Established`
            self.conn.tune(qp);
        }
        Ok(())
    }

    /// Whether an operation may be posted in a state other than `Connected`.
    ///
    /// A message can arrive as soon as the queue pair can receive: while another thread sends the
    /// reply (accepting side) or reads it (connecting side). That thread holds the lock of its
    /// step; once this function has acquired the lock, the step is complete and its state is set.
    ///
    /// # Errors
    /// - `EAGAIN`: an endpoint on XRC that has no answer to its reciprocal request yet.
    /// - `EOPBADSTATE`: not enabled, or closed.
    /// - `ESHUTDOWN`: no longer connected.
    /// - `ENOTCONN`: not connected yet.
    #[cold]
    pub(super) fn may_post(&self) -> Result<()> {
        if self.config.xrc {
            self.may_post_xrc()?;
        }
        match self.conn.state.get() {
            State::Accepting => drop(self.control.lock()),
            State::Connecting if !self.config.xrc => {
                if let Some(sink) = self.conn.sink() {
                    drop(sink.dispatcher().registry());
                }
            }
            _ => {}
        }
        match self.conn.state.get() {
            State::Accepted | State::Connected => Ok(()),
            State::Idle | State::Closed => Err(FiErrno::EOPBADSTATE),
            State::Disconnected | State::Broken => Err(FiErrno::ESHUTDOWN),
            State::Enabled | State::Connecting | State::Accepting => Err(FiErrno::ENOTCONN),
        }
    }

    /// Disconnects from an accepting peer that has another authorization key and did not check it.
    fn leave_stranger(&self) -> FiErrno {
        warn_log!(
            EpCtrl,
            "a connection is ended: the accepting peer has another authorization key"
        );
        self.conn.disconnect(&self.control.lock().side);
        FiErrno::ECONNREFUSED
    }
}

impl Owner for Shared {
    fn addr_resolved(&self) -> Result<()> {
        let mut control = self.control.lock();
        if control.qp.is_none() {
            self.create_qp(&mut control)?;
        }
        self.conn.resolve_route(&control.side)
    }

    fn route_resolved(&self) -> Result<()> {
        let mut control = self.control.lock();
        self.join_directory(&mut control);
        let data = self
            .introducer()
            .introduce(control.data, control.block.as_deref());
        self.conn.request(&control.side, data.encoded())
    }

    fn established(&self, private_data: &PrivateData) -> Result<()> {
        self.received.store(true, Ordering::Relaxed);
        if self.conn.state.is(State::Disconnected) {
            // the queue pair has failed meanwhile, which is reported
            self.conn.disconnect(&self.control.lock().side);
            return Ok(());
        }
        let peer = introduction_in(private_data);
        if self.conn.state.is(State::Connecting) && self.introducer().is_stranger(peer.as_ref()) {
            return Err(self.leave_stranger());
        }
        let qp = {
            let mut control = self.control.lock();
            if !control.side.passive {
                // the accepting side has read the peer's introduction in the request
                self.process_introduction(&mut control, peer);
            }
            control.qp.clone()
        };
        if let Some(qp) = &qp {
            self.conn.tune(qp);
            if log::enabled(Level::Info, Subsystem::EpCtrl)
                && let Ok(attr) = qp.query()
            {
                info_log!(EpCtrl, "queue pair {}: connected: {attr:?}", qp.number());
            }
        }
        Ok(())
    }

    fn after_connected(&self) {
        if let Some(keepalive) = self.domain.queues().keepalive() {
            keepalive.join(self.weak());
        }
    }
}

impl CmTarget for Shared {
    fn cm_event(&self, event: CmEvent) {
        if event.kind == CmEventKind::Rejected
            && msg_xrc::is_other_transport(event.private_data.bytes(), false)
        {
            let peer = self.control.lock().side.dst;
            warn_log!(
                EpCtrl,
                "{} refuses a connection: the endpoint there is on XRC \
                 (FI_PROTO_RDMA_CM_IB_XRC), this one on RC (FI_PROTO_RDMA_CM_IB_RC)",
                peer.map_or_else(|| "a peer".to_owned(), |peer| peer.to_string())
            );
        }
        if event.kind == CmEventKind::DeviceRemoval {
            self.removed.store(true, Ordering::Relaxed);
        }
        self.conn.advance(self, &event);
    }

    fn before_shutdown(&self) {
        {
            let control = self.control.lock();
            if self.conn.state.is(State::Closed) {
                return;
            }
            Self::take_in(&control);
        }
        self.await_answers();
        self.await_device();
        {
            let control = self.control.lock();
            if self.conn.state.is(State::Closed) {
                return;
            }
            // answers the peer's disconnect, or initiates one if this side detected the end first
            self.conn.disconnect(&control.side);
        }
        self.await_flush();
    }
}
