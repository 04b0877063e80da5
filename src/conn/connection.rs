//! One side of a connection: its state and the order of its steps.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::{AtomicState, CmSink, CmTarget, Outcome, Registry, Renamed, State, Tuning, rename};
use crate::Token;
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::queue::keepalive::Keepalive;
use crate::verbs::{CmEvent, CmEventKind, CmId, Device, EventChannel, PrivateData, Qp};

/// The owner of a connection has the queue pair, and performs the steps that need it. The calls
/// come from [`Connection::advance`], with the dispatcher's lock held.
pub(crate) trait Owner {
    /// The peer's address is resolved. The owner creates its queue pair on the identifier, which
    /// has a device now, and continues with [`Connection::resolve_route`].
    ///
    /// # Errors
    /// The connection fails with the error.
    fn addr_resolved(&self) -> Result<()>;

    /// The route is resolved. The owner continues with [`Connection::request`].
    ///
    /// # Errors
    /// The connection fails with the error.
    fn route_resolved(&self) -> Result<()>;

    /// The connection manager has established the connection; `private_data` is that of the reply
    /// on the side that dialled. Called before the connection's state changes.
    ///
    /// # Errors
    /// The owner does not accept the peer and has disconnected. The connection fails with the
    /// error.
    fn established(&self, private_data: &PrivateData) -> Result<()>;

    /// Called after the state has changed to [`State::Connected`] and the result was reported.
    fn after_connected(&self) {}
}

/// The identifier of a connection and its addresses, under the lock of the connection's owner.
#[derive(Debug, Default)]
pub(crate) struct Side {
    pub(crate) id: Option<Arc<CmId>>,
    /// Whether the identifier came with a connection request.
    pub(crate) passive: bool,
    /// Whether the identifier is bound to a local address.
    pub(crate) bound: bool,
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
    /// The connection uses circuits (XRC): the identifiers are those of their requests.
    pub(crate) on_circuits: bool,
    /// Of a connection on circuits: keeps the address of `fi_setname(3)` from other endpoints.
    pub(crate) reserved: Option<CmId>,
}

impl Side {
    /// A side that will dial or, with the identifier of a request, accept that request.
    pub(crate) fn new(id: Option<CmId>, src: Option<SocketAddr>, dst: Option<SocketAddr>) -> Self {
        Self {
            passive: id.is_some(),
            bound: id.is_some(),
            id: id.map(Arc::new),
            src,
            dst,
            on_circuits: false,
            reserved: None,
        }
    }

    /// # Errors
    /// `EOPBADSTATE`: the side has no identifier, before binding or after closing.
    pub(crate) fn id(&self) -> Result<&Arc<CmId>> {
        self.id.as_ref().ok_or(FiErrno::EOPBADSTATE)
    }

    /// The address to which the side is bound.
    fn bound_addr(&self) -> Option<SocketAddr> {
        match self.on_circuits {
            true => self.reserved.as_ref()?.local_addr(),
            false => self.id.as_ref().filter(|_| self.bound)?.local_addr(),
        }
    }
}

/// The receiver of a connection's results, and the target of its events.
#[derive(Debug)]
struct Bound {
    sink: Arc<dyn CmSink>,
    target: Weak<dyn CmTarget>,
}

/// One side of a connection, except the state that the lock of its owner protects ([`Side`]). A
/// caller that passes a side holds that lock.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Read by every post.
    pub(crate) state: AtomicState,
    pub(super) device: Arc<Device>,
    pub(super) tuning: Tuning,
    token: Token,
    /// Set once, when a sink is bound.
    bound: OnceLock<Bound>,
    /// Set by closing. Held while a result is reported: a thread that has changed the state before
    /// the connection was closed reports nothing afterwards, because the application may free the
    /// context of a closed endpoint. The result [`Outcome::Connected`] is reported under the same
    /// guard under which the state changes, so the end of the connection follows it.
    pub(super) closed: Mutex<bool>,
    /// When the peer has disconnected.
    pub(super) disconnected: OnceLock<Instant>,
}

impl Connection {
    /// `token` identifies the connection in reports.
    pub(crate) fn new(device: &Arc<Device>, tuning: Tuning, token: Token) -> Self {
        Self {
            state: AtomicState::new(State::Idle),
            device: Arc::clone(device),
            tuning,
            token,
            bound: OnceLock::new(),
            closed: Mutex::new(false),
            disconnected: OnceLock::new(),
        }
    }

    /// Binds the receiver of the results, and creates or migrates the identifier on the channel of
    /// its dispatcher, to which `registry` belongs. A side on circuits has no identifier.
    /// `keepalive` wakes the threads that sleep on the dispatcher.
    ///
    /// # Errors
    /// `EINVAL`: a sink is bound already. `EOPBADSTATE`: the connection is enabled. Others: the
    /// connection manager's.
    pub(crate) fn bind(
        &self,
        side: &mut Side,
        sink: Arc<dyn CmSink>,
        registry: &mut Registry<'_>,
        keepalive: Option<&Arc<Keepalive>>,
        target: Weak<dyn CmTarget>,
    ) -> Result<()> {
        if self.is_bound() {
            return Err(FiErrno::EINVAL);
        }
        if !self.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let channel = registry.channel(&self.device)?;
        if let Some(keepalive) = keepalive {
            registry.watch(keepalive)?;
        }
        if !side.on_circuits {
            let id = match &side.id {
                Some(id) => {
                    id.migrate(&channel)?;
                    Arc::clone(id)
                }
                None => Arc::new(channel.create_id()?),
            };
            registry.insert(id.object(), Weak::clone(&target));
            side.id = Some(id);
        }
        // cannot fail: the lock has been held since the check above
        let _ = self.bound.set(Bound { sink, target });
        Ok(())
    }

    /// Binds the side to an address, in place of the one to which it is bound, by [`rename`].
    /// `registry`: that of the sink, if one is bound.
    ///
    /// # Errors
    /// `EADDRINUSE`, `EADDRNOTAVAIL`, or others of the connection manager: the address cannot be
    /// used, or belongs to another device. The side keeps its earlier address; but if that was in
    /// the way and another process has taken its port meanwhile, the side has no address.
    pub(crate) fn rename(
        &self,
        side: &mut Side,
        mut registry: Option<&mut Registry<'_>>,
        addr: SocketAddr,
    ) -> Result<()> {
        let channel = match &mut registry {
            Some(registry) if !side.on_circuits => registry.channel(&self.device)?,
            // left when the sink is bound
            _ => EventChannel::create(self.device.backend())?,
        };
        let open = |addr| {
            let id = channel.create_id()?;
            id.bind_addr(addr)?;
            if id.has_device() {
                self.check_device(&id)?;
            }
            Ok(id)
        };
        let own = side.bound_addr();
        let renamed = rename(own, addr, open, || {
            self.replace_id(side, &mut registry, None)
        })?;
        let (new, result) = match renamed {
            Renamed::Same => return Ok(()),
            Renamed::To(new) => (Some(new), Ok(())),
            Renamed::Back(old, error) => (old, Err(error)),
        };
        side.bound = new.is_some();
        side.src = new.as_ref().and_then(CmId::local_addr);
        let new = match new {
            // the events of one that is not bound have a receiver too
            None if registry.is_some() && !side.on_circuits => channel.create_id().ok(),
            new => new,
        };
        self.replace_id(side, &mut registry, new);
        result
    }

    /// Replaces the identifier of a side that is not enabled, or the one that reserves its address.
    fn replace_id(
        &self,
        side: &mut Side,
        registry: &mut Option<&mut Registry<'_>>,
        new: Option<CmId>,
    ) {
        if side.on_circuits {
            side.reserved = new;
            return;
        }
        let new = new.map(Arc::new);
        if let (Some(registry), Some(bound)) = (registry, self.bound.get()) {
            if let Some(old) = &side.id {
                registry.remove(old.object());
            }
            if let Some(new) = &new {
                registry.insert(new.object(), Weak::clone(&bound.target));
            }
        }
        side.id = new;
    }

    /// # Errors
    /// `EADDRNOTAVAIL`: the identifier is on another device.
    pub(crate) fn check_device(&self, id: &CmId) -> Result<()> {
        if id.is_on(&self.device) {
            return Ok(());
        }
        info_log!(
            EpCtrl,
            "the local address {:?} belongs to device {:?}; the domain's device is {}",
            id.local_addr(),
            id.device_name(),
            self.device.name()
        );
        Err(FiErrno::EADDRNOTAVAIL)
    }

    /// Whether a receiver of the results is bound.
    pub(crate) fn is_bound(&self) -> bool {
        self.bound.get().is_some()
    }

    /// The bound receiver of the results.
    pub(crate) fn sink(&self) -> Option<&Arc<dyn CmSink>> {
        self.bound.get().map(|bound| &bound.sink)
    }

    /// Performs the step for an event of the identifier.
    pub(crate) fn advance(&self, owner: &impl Owner, event: &CmEvent) {
        let result = match event.kind {
            CmEventKind::AddrResolved => owner.addr_resolved(),
            CmEventKind::RouteResolved => owner.route_resolved(),
            CmEventKind::Established => {
                let accepted = owner.established(&event.private_data);
                if accepted.is_ok() && self.report_connected(event.private_data) {
                    owner.after_connected();
                }
                accepted
            }
            CmEventKind::Disconnected => {
                self.note_disconnect();
                let replied = [State::Accepting, State::Accepted, State::Broken];
                if replied.contains(&self.state.get()) {
                    // Only a peer that has the reply disconnects. The event of its confirmation is
                    // missing: the confirmation is lost, or the connection manager has discarded it
                    // at the end of the connection. In `Accepting` the reply is sent, but the
                    // thread that has sent it has not changed the state.
                    self.note_failure();
                    self.report_connected(PrivateData::EMPTY);
                } else if !self.end() {
                    self.not_connected(FiErrno::ECONNABORTED, event.status, event.private_data);
                }
                Ok(())
            }
            CmEventKind::Rejected => Err(FiErrno::ECONNREFUSED),
            CmEventKind::Unreachable => Err(unreachable_errno(event.status)),
            CmEventKind::DeviceRemoval => {
                warn_log!(EpCtrl, "{}: device removed", self.device.name());
                if self.end() {
                    Ok(())
                } else {
                    Err(FiErrno::ENODEV)
                }
            }
            CmEventKind::AddrChange => {
                info_log!(
                    EpCtrl,
                    "{}: the network interface of a connection has a new address",
                    self.device.name()
                );
                Ok(())
            }
            CmEventKind::ConnectRequest | CmEventKind::ConnectResponse | CmEventKind::Other => {
                Ok(())
            }
        };
        if let Err(error) = result {
            self.not_connected(error, event.status, event.private_data);
        }
    }

    /// Reports, at most once, that the connection could not be established. Returns whether it was
    /// being established.
    pub(crate) fn not_connected(&self, err: FiErrno, status: i32, data: PrivateData) -> bool {
        let failed = [
            State::Connecting,
            State::Accepting,
            State::Accepted,
            State::Broken,
        ]
        .into_iter()
        .any(|from| self.state.change(from, State::Disconnected));
        if failed {
            self.report_failure(err, status, data);
        }
        failed
    }

    /// Reports an established connection (on circuits: in both directions), and its end too if it
    /// has ended meanwhile. Returns whether it is connected: it was being established, and has not
    /// ended.
    pub(crate) fn report_connected(&self, private_data: PrivateData) -> bool {
        let closed = self.closed.lock();
        let connected = self.state.change(State::Connecting, State::Connected)
            || self.state.change(State::Accepted, State::Connected);
        let broken = !connected && self.state.change(State::Broken, State::Disconnected);
        if connected || broken {
            self.report_under(&closed, Outcome::Connected(private_data));
        }
        drop(closed);
        if broken {
            self.report_end();
        }
        connected
    }

    /// Reports that the connection could not be established. The caller has changed the state, so
    /// the failure is reported once.
    pub(crate) fn report_failure(&self, err: FiErrno, status: i32, private_data: PrivateData) {
        self.report(Outcome::Failed {
            err,
            status,
            private_data,
        });
    }

    /// Sets the parameters of a connected queue pair that the connection manager does not set.
    pub(crate) fn tune(&self, qp: &Qp) {
        self.tuning.set_rnr_timer(qp);
    }

    /// Reports the end of the connection. The caller has changed the state, so the end is reported
    /// once.
    pub(crate) fn report_end(&self) {
        if let Some(bound) = self.bound.get() {
            self.report(Outcome::Ended(Weak::clone(&bound.target)));
        }
    }

    /// Reports a result, unless the connection is closed.
    fn report(&self, outcome: Outcome) {
        self.report_under(&self.closed.lock(), outcome);
    }

    /// As [`Self::report`]. `closed`: the value under its guard.
    fn report_under(&self, closed: &bool, outcome: Outcome) {
        if let Some(bound) = self.bound.get()
            && !*closed
        {
            bound.sink.report(self.token, outcome);
        }
    }

    /// Discards the events of the identifier and the untaken results. No result is reported
    /// afterwards.
    pub(super) fn unbind(&self, side: &Side, registry: Option<&mut Registry<'_>>) {
        *self.closed.lock() = true;
        if let (Some(bound), Some(registry)) = (self.bound.get(), registry) {
            if let Some(id) = &side.id {
                registry.remove(id.object());
            }
            bound.sink.forget(self.token);
        }
    }
}

/// The errno of a step of an exchange whose parameters are valid: `EINVAL` is that of an identifier
/// whose peer has ended the exchange (Linux: `ib_send_cm_rep` and `ib_send_cm_rtu` of
/// `drivers/infiniband/core/cm.c`, in the state to which the rejection has led), before its event
/// is read.
pub(super) fn ended_errno(error: FiErrno) -> FiErrno {
    match error {
        FiErrno::EINVAL => FiErrno::ECONNRESET,
        error => error,
    }
}

/// The errno for an unreachable peer. The connection manager's status is a positive errno, or, in
/// some versions, a reason code of the kernel.
pub(super) fn unreachable_errno(status: i32) -> FiErrno {
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
