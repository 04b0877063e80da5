//! Passive endpoints, which listen for connection requests.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::Token;
use crate::conn::ConnectRequest;
use crate::eq::{CmTarget, EqError, Event, EventQueue};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{CmEvent, CmEventKind, CmId, Device, EventChannel};
use crate::wire::cm_data::CmData;

/// Default number of unanswered requests.
const DEFAULT_BACKLOG: usize = 128;

/// Attributes of a new passive endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct PepConfig {
    /// Address to listen on. Port 0 selects any free port; `None` is the wildcard address of IPv4
    /// with any port.
    pub addr: Option<SocketAddr>,
    /// Maximum number of unanswered requests; 0 for the default.
    pub backlog: usize,
    /// Returned in events.
    pub token: Token,
}

/// A passive endpoint. Thread safe. Dropping it stops listening; requests that were read from
/// the event queue stay valid.
#[derive(Debug)]
pub struct PassiveEndpoint {
    core: Arc<Core>,
    device: Arc<Device>,
    backlog: AtomicUsize,
}

#[derive(Debug)]
struct Core {
    token: Token,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` after closing.
    id: Option<CmId>,
    eq: Option<Arc<EventQueue>>,
    listening: bool,
}

/// A new identifier on a channel, bound to an address.
fn bound_id(channel: &Arc<EventChannel>, addr: SocketAddr) -> Result<CmId> {
    let id = channel.create_id()?;
    id.bind_addr(addr)?;
    Ok(id)
}

impl PassiveEndpoint {
    /// Opens a passive endpoint on the connection manager of `device`, and binds it to its address.
    /// A wildcard address accepts requests on every device of that manager.
    ///
    /// # Errors
    /// - `EADDRINUSE`, `EADDRNOTAVAIL`: the address cannot be used.
    /// - `ENOMEM`, `EMFILE`: no resources left.
    pub fn open(device: &Arc<Device>, config: PepConfig) -> Result<Arc<Self>> {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        // moved to the event queue's channel when one is bound
        let channel = EventChannel::create(device.backend())?;
        let id = bound_id(&channel, config.addr.unwrap_or(any))?;
        Ok(Arc::new(Self {
            core: Arc::new(Core {
                token: config.token,
                state: Mutex::new(State {
                    id: Some(id),
                    eq: None,
                    listening: false,
                }),
            }),
            device: Arc::clone(device),
            backlog: AtomicUsize::new(config.backlog),
        }))
    }

    /// Changes the address (`fi_setname(3)`), before listening.
    ///
    /// # Errors
    /// `EOPBADSTATE`: listening already, or closed. `EADDRINUSE`, `EADDRNOTAVAIL`: the address
    /// cannot be used; the endpoint keeps its old one.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        let eq = self.core.state.lock().eq.clone();
        let mut registry = eq.as_ref().map(|eq| eq.registry());
        let mut state = self.core.state.lock();
        let old = state.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?.object();
        if state.listening {
            return Err(FiErrno::EOPBADSTATE);
        }
        let channel = match &mut registry {
            Some(registry) => registry.channel(&self.device)?,
            None => EventChannel::create(self.device.backend())?,
        };
        let id = bound_id(&channel, addr)?;
        if let Some(registry) = &mut registry {
            registry.remove(old, self.core.token);
            registry.insert(id.object(), self.core.target());
        }
        state.id = Some(id);
        Ok(())
    }

    /// The bound address, with the actual port.
    ///
    /// # Errors
    /// `EOPBADSTATE`: closed.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        let state = self.core.state.lock();
        let addr = state.id.as_ref().and_then(CmId::local_addr);
        addr.ok_or(FiErrno::EOPBADSTATE)
    }

    /// Binds the event queue that receives the requests.
    ///
    /// # Errors
    /// `EINVAL`: one is bound already.
    pub fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let mut registry = eq.registry();
        let mut state = self.core.state.lock();
        if state.eq.is_some() {
            return Err(FiErrno::EINVAL);
        }
        let id = state.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        id.migrate(&registry.channel(&self.device)?)?;
        registry.insert(id.object(), self.core.target());
        state.eq = Some(Arc::clone(eq));
        Ok(())
    }

    /// Sets the maximum number of unanswered requests (`FI_BACKLOG`), before listening; 0 for the
    /// default.
    ///
    /// # Errors
    /// `EOPBADSTATE`: it listens already.
    pub fn set_backlog(&self, backlog: usize) -> Result<()> {
        let state = self.core.state.lock();
        if state.listening {
            return Err(FiErrno::EOPBADSTATE);
        }
        self.backlog.store(backlog, Ordering::Relaxed);
        Ok(())
    }

    /// Starts listening.
    ///
    /// # Errors
    /// `ENOEQ`: no event queue is bound. `EOPBADSTATE`: it listens already.
    pub fn listen(&self) -> Result<()> {
        let mut state = self.core.state.lock();
        if state.eq.is_none() {
            return Err(FiErrno::ENOEQ);
        }
        let id = state.id.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        if state.listening {
            return Err(FiErrno::EOPBADSTATE);
        }
        let backlog = match self.backlog.load(Ordering::Relaxed) {
            0 => DEFAULT_BACKLOG,
            backlog => backlog,
        };
        id.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
        info_log!(EpCtrl, "listening on {:?}", id.local_addr());
        state.listening = true;
        Ok(())
    }

    /// The device that the endpoint was opened with.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Stops listening and discards its events. Every later call fails. Idempotent.
    pub fn close(&self) {
        let eq = self.core.state.lock().eq.clone();
        let mut registry = eq.as_ref().map(|eq| eq.registry());
        let mut state = self.core.state.lock();
        if let (Some(registry), Some(id)) = (&mut registry, &state.id) {
            registry.remove(id.object(), self.core.token);
        }
        state.id = None;
        state.eq = None;
    }
}

impl Drop for PassiveEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}

impl Core {
    fn target(self: &Arc<Self>) -> Weak<dyn CmTarget> {
        let target: Weak<Self> = Arc::downgrade(self);
        target
    }
}

impl CmTarget for Core {
    fn cm_event(&self, mut event: CmEvent, eq: &EventQueue) {
        match event.kind {
            CmEventKind::ConnectRequest => {
                if let Some(id) = event.new_id.take() {
                    let data = CmData::decode(event.private_data.bytes());
                    eq.push(Event::ConnReq {
                        pep: self.token,
                        request: Some(ConnectRequest::new(id, data.introduction())),
                        data,
                        attachment: None,
                    });
                }
            }
            CmEventKind::DeviceRemoval => eq.push_error(EqError {
                owner: self.token,
                err: FiErrno::ENODEV,
                prov_errno: event.status,
                data: CmData::EMPTY,
                context: 0,
            }),
            // other events have no meaning for a listener
            _ => {}
        }
    }
}
