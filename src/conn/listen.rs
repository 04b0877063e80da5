//! Listening for the requests of peers.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::{CmSink, CmTarget, ConnectRequest, Outcome};
use crate::Token;
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{CmEvent, CmEventKind, CmId, Device, EventChannel};

/// Default maximum number of unanswered requests.
const DEFAULT_BACKLOG: usize = 128;

/// A listening identifier; passes each request to its sink. Thread safe. A listener with a sink
/// must be closed ([`Self::close`]) before it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Identifies the listener in reports.
    token: Token,
    device: Arc<Device>,
    /// The port space is `RDMA_PS_UDP`.
    sidr: bool,
    /// Private data of the rejection of requests that are dropped unanswered.
    refusal: &'static [u8],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` after closing.
    id: Option<CmId>,
    sink: Option<Arc<dyn CmSink>>,
    backlog: usize,
    listening: bool,
}

/// Whether binding to an address of this host has failed because the port is in use. The kernel's
/// connection manager has `EADDRNOTAVAIL` if either address is a wildcard (`cma_check_port`); for
/// an address of another host it has `ENODEV`.
pub(crate) fn is_in_use(error: FiErrno) -> bool {
    matches!(error, FiErrno::EADDRINUSE | FiErrno::EADDRNOTAVAIL)
}

/// Whether an identifier that is bound to `own` is the cause of this error of binding another one
/// to `addr`.
pub(super) fn is_in_the_way(own: SocketAddr, addr: SocketAddr, error: FiErrno) -> bool {
    // without a wildcard, the second one is the error of an address of another host
    let wild = own.ip().is_unspecified() || addr.ip().is_unspecified();
    let same = own.ip() == addr.ip() && error == FiErrno::EADDRINUSE;
    own.port() == addr.port() && (same || wild && is_in_use(error))
}

/// A new identifier on a channel, bound to an address.
fn bound_id(channel: &Arc<EventChannel>, addr: SocketAddr, sidr: bool) -> Result<CmId> {
    let id = match sidr {
        true => channel.create_sidr_id()?,
        false => channel.create_id()?,
    };
    id.bind_addr(addr)?;
    Ok(id)
}

impl Listener {
    /// Binds an identifier of the connection manager of `device` to an address; `None` is the
    /// wildcard address of IPv4 with any port. A wildcard address accepts requests on every device
    /// of that manager. `backlog`: see [`Self::set_backlog`]. `refusal`: private data, at most 148
    /// bytes, of the rejection of a request that is dropped unanswered.
    ///
    /// # Errors
    /// - `EADDRINUSE`, `EADDRNOTAVAIL`: the address cannot be used.
    /// - `ENOMEM`, `EMFILE`: no resources left.
    pub(crate) fn open(
        device: &Arc<Device>,
        addr: Option<SocketAddr>,
        backlog: usize,
        token: Token,
        refusal: &'static [u8],
    ) -> Result<Arc<Self>> {
        Self::open_in(device, addr, backlog, token, (false, refusal))
    }

    /// As [`Self::open`], for requests of a service (`RDMA_PS_UDP`).
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) fn open_service(
        device: &Arc<Device>,
        addr: SocketAddr,
        backlog: usize,
        token: Token,
    ) -> Result<Arc<Self>> {
        Self::open_in(device, Some(addr), backlog, token, (true, &[]))
    }

    fn open_in(
        device: &Arc<Device>,
        addr: Option<SocketAddr>,
        backlog: usize,
        token: Token,
        (sidr, refusal): (bool, &'static [u8]),
    ) -> Result<Arc<Self>> {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        // moved to the dispatcher's channel when a sink is bound
        let channel = EventChannel::create(device.backend())?;
        let id = bound_id(&channel, addr.unwrap_or(any), sidr)?;
        Ok(Arc::new(Self {
            token,
            device: Arc::clone(device),
            sidr,
            refusal,
            state: Mutex::new(State {
                id: Some(id),
                sink: None,
                backlog,
                listening: false,
            }),
        }))
    }

    /// Changes the address, before listening. The previous one stays bound until the new one is,
    /// except at its own port, where it may be in the way.
    ///
    /// # Errors
    /// `EOPBADSTATE`: the listener is listening, or is closed. `EADDRINUSE`, `EADDRNOTAVAIL`: the
    /// address cannot be used; the listener keeps its previous address. If another process has
    /// taken its port meanwhile, the listener is closed.
    pub(crate) fn set_addr(self: &Arc<Self>, addr: SocketAddr) -> Result<()> {
        loop {
            let sink = self.state.lock().sink.clone();
            let mut registry = sink.as_ref().map(|sink| sink.dispatcher().registry());
            let mut state = self.state.lock();
            if state.sink.is_some() != sink.is_some() {
                continue; // another thread has bound one, whose registry's lock precedes this one
            }
            let id = state.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
            let (old, previous) = (id.object(), id.local_addr());
            if state.listening {
                return Err(FiErrno::EOPBADSTATE);
            }
            let channel = match &mut registry {
                Some(registry) => registry.channel(&self.device)?,
                None => EventChannel::create(self.device.backend())?,
            };
            let mut bound = bound_id(&channel, addr, self.sidr);
            let is_own = |error: &FiErrno| {
                previous.is_some_and(|previous| is_in_the_way(previous, addr, *error))
            };
            let in_the_way = bound.as_ref().is_err_and(is_own);
            if bound.is_err() && !in_the_way {
                return bound.map(drop);
            }
            if let (Some(registry), Some(sink)) = (&mut registry, &sink) {
                registry.remove(old);
                sink.forget(self.token);
            }
            let mut result = Ok(());
            if in_the_way {
                state.id = None;
                bound = bound_id(&channel, addr, self.sidr);
                if let (Err(error), Some(previous)) = (&bound, previous) {
                    result = Err(*error);
                    bound = bound_id(&channel, previous, self.sidr);
                }
            }
            state.id = bound.ok();
            if let (Some(registry), Some(id)) = (&mut registry, &state.id) {
                registry.insert(id.object(), self.target());
            }
            return result;
        }
    }

    /// The bound address, with the actual port.
    ///
    /// # Errors
    /// `EOPBADSTATE`: closed.
    pub(crate) fn local_addr(&self) -> Result<SocketAddr> {
        let state = self.state.lock();
        let addr = state.id.as_ref().and_then(CmId::local_addr);
        addr.ok_or(FiErrno::EOPBADSTATE)
    }

    /// Binds the receiver of the requests.
    ///
    /// # Errors
    /// `EINVAL`: a sink is bound already.
    pub(crate) fn bind(self: &Arc<Self>, sink: &Arc<dyn CmSink>) -> Result<()> {
        let mut registry = sink.dispatcher().registry();
        let mut state = self.state.lock();
        if state.sink.is_some() {
            return Err(FiErrno::EINVAL);
        }
        let id = state.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        id.migrate(&registry.channel(&self.device)?)?;
        registry.insert(id.object(), self.target());
        state.sink = Some(Arc::clone(sink));
        Ok(())
    }

    /// Sets the maximum number of unanswered requests, before listening; 0 for the default of 128.
    ///
    /// # Errors
    /// `EOPBADSTATE`: the listener is listening already.
    pub(crate) fn set_backlog(&self, backlog: usize) -> Result<()> {
        let mut state = self.state.lock();
        if state.listening {
            return Err(FiErrno::EOPBADSTATE);
        }
        state.backlog = backlog;
        Ok(())
    }

    /// Starts listening.
    ///
    /// # Errors
    /// `ENOEQ`: no sink is bound. `EOPBADSTATE`: the listener is listening already.
    pub(crate) fn listen(&self) -> Result<()> {
        let mut state = self.state.lock();
        if state.sink.is_none() {
            return Err(FiErrno::ENOEQ);
        }
        let id = state.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        if state.listening {
            return Err(FiErrno::EOPBADSTATE);
        }
        let backlog = match state.backlog {
            0 => DEFAULT_BACKLOG,
            backlog => backlog,
        };
        id.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
        info_log!(EpCtrl, "listening on {:?}", id.local_addr());
        state.listening = true;
        Ok(())
    }

    /// The receiver of the requests, if it is bound.
    pub(crate) fn sink(&self) -> Option<Arc<dyn CmSink>> {
        self.state.lock().sink.clone()
    }

    /// The device that the listener was opened with.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Stops listening and discards the requests that the sink has not passed on. Every later call
    /// fails. Idempotent.
    pub(crate) fn close(&self) {
        let sink = self.state.lock().sink.clone();
        let mut registry = sink.as_ref().map(|sink| sink.dispatcher().registry());
        let mut state = self.state.lock();
        if let (Some(registry), Some(sink), Some(id)) = (&mut registry, &sink, &state.id) {
            registry.remove(id.object());
            sink.forget(self.token);
        }
        state.id = None;
        state.sink = None;
    }

    /// Closes the listener, and returns its identifier, which stays bound to its address. `None`:
    /// it is listening, or closed.
    pub(crate) fn take_id(&self) -> Option<CmId> {
        let sink = self.state.lock().sink.clone();
        let mut registry = sink.as_ref().map(|sink| sink.dispatcher().registry());
        let mut state = self.state.lock();
        if state.listening || state.sink.is_some() != sink.is_some() {
            return None;
        }
        let id = state.id.take()?;
        if let (Some(registry), Some(sink)) = (&mut registry, &sink) {
            registry.remove(id.object());
            sink.forget(self.token);
        }
        state.sink = None;
        Some(id)
    }

    fn target(self: &Arc<Self>) -> Weak<dyn CmTarget> {
        let target: Weak<Self> = Arc::downgrade(self);
        target
    }
}

impl CmTarget for Listener {
    fn cm_event(&self, mut event: CmEvent) {
        let outcome = match event.kind {
            CmEventKind::ConnectRequest => match event.new_id.take() {
                Some(id) => {
                    let mut request = ConnectRequest::new(id, event.private_data, self.refusal);
                    if self.sidr {
                        request.set_sidr();
                    }
                    Outcome::Requested(request)
                }
                None => return,
            },
            CmEventKind::DeviceRemoval => Outcome::Failed {
                err: FiErrno::ENODEV,
                status: event.status,
                private_data: event.private_data,
            },
            // a listener ignores other events
            _ => return,
        };
        let sink = self.state.lock().sink.clone();
        if let Some(sink) = sink {
            sink.report(self.token, outcome);
        }
    }
}
