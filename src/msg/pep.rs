//! Passive endpoints, `fi_passive_ep(3)`, which listen for connection requests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::Token;
use crate::conn::{CmSink, ConnectRequest, Dispatcher, Listener, Outcome, Template, is_in_use};
use crate::eq::EventQueue;
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::verbs::{CmId, Device};
use crate::wire::cm_data::CmData;
use crate::wire::msg_xrc::{self, HEADER_SIZE, Header, Kind};

/// Attributes of a new passive endpoint (`fi_passive_ep(3)`).
#[derive(Clone, Debug, Default)]
pub struct PepConfig {
    /// Address to listen on. Port 0 selects any free port; `None` is the wildcard address of IPv4
    /// with any port.
    pub addr: Option<SocketAddr>,
    /// Maximum number of unanswered requests; 0 for the default of 128.
    pub backlog: usize,
    /// Identifies the passive endpoint in events.
    pub token: Token,
    /// Whether the endpoint takes requests of endpoints on XRC, instead of those on RC.
    pub xrc: bool,
    /// Passed on with each request ([`ConnectRequest::template`]): the reader of a request needs
    /// nothing of the passive endpoint itself, which another thread may close meanwhile.
    pub template: Option<Template>,
}

/// Private data of a rejection without data of the application: the length byte.
pub(super) fn no_data() -> &'static [u8] {
    static NO_DATA: CmData = CmData::EMPTY;
    NO_DATA.encoded()
}

/// A passive endpoint (`fi_passive_ep(3)`). Thread safe. Dropping it stops listening; requests that
/// the application has read from the event queue stay valid.
#[derive(Debug)]
pub struct PassiveEndpoint {
    listener: Arc<Listener>,
    xrc: bool,
    template: Option<Template>,
    /// Of an endpoint on XRC: takes the requests of peers that have a circuit, at the same address.
    services: Mutex<Option<Arc<Listener>>>,
    token: Token,
    backlog: AtomicUsize,
}

/// Free ports that are tried until one is free in both port spaces.
const PORTS: usize = 32;

/// The private data of the rejection of an unanswered request of an endpoint on XRC: a header
/// without numbers, and the length byte.
fn no_data_on_xrc() -> &'static [u8] {
    static NO_DATA: [u8; HEADER_SIZE + 1] = {
        let mut data = [0; HEADER_SIZE + 1];
        data[0] = msg_xrc::VERSION;
        data
    };
    &NO_DATA
}

/// Passes the requests of endpoints on the same transport to a sink, with the template.
#[derive(Debug)]
struct Admission {
    sink: Arc<dyn CmSink>,
    xrc: bool,
    template: Option<Template>,
}

impl Admission {
    /// The request, if an endpoint of this transport can answer it; otherwise it is rejected.
    fn admit(&self, mut request: ConnectRequest) -> Option<ConnectRequest> {
        let data = request.private_data().bytes();
        let other = match self.xrc {
            true => CmData::decode(data).introduction().is_some(),
            false => msg_xrc::mark(data).is_some(),
        };
        if other {
            let peer = request.peer_addr();
            let (own, peers) = match self.xrc {
                true => (
                    "XRC (FI_PROTO_RDMA_CM_IB_XRC)",
                    "RC (FI_PROTO_RDMA_CM_IB_RC)",
                ),
                false => (
                    "RC (FI_PROTO_RDMA_CM_IB_RC)",
                    "XRC (FI_PROTO_RDMA_CM_IB_XRC)",
                ),
            };
            warn_log!(
                EpCtrl,
                "a request of {} is refused: the endpoint there is on {peers}, this one on {own}",
                peer.map_or_else(|_| "an unknown address".to_owned(), |peer| peer.to_string())
            );
            // an error is ignored: the peer may have ended the connection
            let _ = request.reject(msg_xrc::other_transport(self.xrc));
            return None;
        }
        if self.xrc {
            let header = Header::decode(data);
            let original = header.filter(|header| header.kind == Kind::Original);
            if original.is_none_or(|header| request.is_sidr() != (header.target != 0)) {
                info_log!(EpCtrl, "a request that is none of XRC is rejected");
                return None;
            }
            request.set_xrc(no_data_on_xrc());
        }
        request.set_template(self.template.clone());
        Some(request)
    }
}

impl CmSink for Admission {
    fn dispatcher(&self) -> &Dispatcher {
        self.sink.dispatcher()
    }

    fn report(&self, owner: Token, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Requested(request) => match self.admit(request) {
                Some(request) => Outcome::Requested(request),
                None => return,
            },
            other => other,
        };
        self.sink.report(owner, outcome);
    }

    fn forget(&self, owner: Token) {
        self.sink.forget(owner);
    }
}

impl PassiveEndpoint {
    /// Opens a passive endpoint on the connection manager of `device`, and binds it to its address.
    /// A wildcard address accepts requests on every device of that manager.
    ///
    /// # Errors
    /// - `EADDRINUSE`, `EADDRNOTAVAIL`: the address cannot be used.
    /// - `ENOMEM`, `EMFILE`: no resources left.
    pub fn open(device: &Arc<Device>, config: PepConfig) -> Result<Arc<Self>> {
        let (backlog, token) = (config.backlog, config.token);
        let listener = Listener::open(device, config.addr, backlog, token, no_data())?;
        let this = Arc::new(Self {
            listener,
            xrc: config.xrc,
            template: config.template,
            services: Mutex::default(),
            token,
            backlog: AtomicUsize::new(backlog),
        });
        if config.xrc {
            this.open_services(config.addr)?;
        }
        Ok(this)
    }

    /// Binds the second listener of an endpoint on XRC to the port of the first one. `addr`: that
    /// of the application; with port 0 another free port is tried if this one is in use.
    fn open_services(&self, addr: Option<SocketAddr>) -> Result<()> {
        let backlog = self.backlog.load(Ordering::Relaxed);
        for attempt in 1.. {
            let bound = self.listener.local_addr()?;
            let opened = Listener::open_service(self.device(), bound, backlog, self.token);
            let free = addr.is_none_or(|addr| addr.port() == 0) && attempt < PORTS;
            match opened {
                Err(error) if free && is_in_use(error) => {
                    let mut other = bound;
                    other.set_port(0);
                    self.listener.set_addr(other)?;
                }
                Err(error) => return Err(error),
                Ok(services) => {
                    *self.services.lock() = Some(services);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Changes the address (`fi_setname(3)`), before listening.
    ///
    /// # Errors
    /// `EOPBADSTATE`: listening already, or closed. `EADDRINUSE`, `EADDRNOTAVAIL`: the address
    /// cannot be used; the endpoint keeps its old one.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        let old = self.listener.local_addr()?;
        self.listener.set_addr(addr)?;
        if !self.xrc {
            return Ok(());
        }
        self.close_services();
        let opened = self.open_services(Some(addr));
        if opened.is_err() {
            // without services, `listen` fails
            self.listener.set_addr(old)?;
            self.open_services(Some(old))?;
        }
        self.bind_services()?;
        opened
    }

    fn close_services(&self) {
        let services = self.services.lock().take();
        if let Some(services) = services {
            services.close();
        }
    }

    /// Binds the second listener to the sink of the first one, if that has one.
    fn bind_services(&self) -> Result<()> {
        let services = self.services.lock().clone();
        match (services, self.listener.sink()) {
            (Some(services), Some(sink)) => services.bind(&sink),
            _ => Ok(()),
        }
    }

    /// Replaces the second listener after a call that only it has executed: the endpoint is as
    /// before the call, which can be repeated.
    fn renew_services(&self) {
        self.close_services();
        let bound = self.listener.local_addr();
        let opened = bound.and_then(|bound| self.open_services(Some(bound)));
        if let Err(error) = opened.and_then(|()| self.bind_services()) {
            // without services, `listen` fails
            self.close_services();
            warn_log!(EpCtrl, "a listener cannot be opened again: {error}");
        }
    }

    /// The bound address, with the actual port (`fi_getname(3)`).
    ///
    /// # Errors
    /// `EOPBADSTATE`: closed.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Binds the event queue that receives the requests (`fi_pep_bind(3)`).
    ///
    /// # Errors
    /// `EINVAL`: an event queue is bound already. `EOPBADSTATE`: closed.
    pub fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let (sink, xrc) = (Arc::clone(eq) as _, self.xrc);
        let template = self.template.clone();
        let sink: Arc<dyn CmSink> = Arc::new(Admission {
            sink,
            xrc,
            template,
        });
        let services = self.services.lock().clone();
        let Some(services) = services else {
            return self.listener.bind(&sink);
        };
        services.bind(&sink)?;
        let bound = self.listener.bind(&sink);
        bound.inspect_err(|_| self.renew_services())
    }

    /// Sets the maximum number of unanswered requests (`FI_BACKLOG`, `fi_control(3)`), before
    /// listening; 0 for the default of 128.
    ///
    /// # Errors
    /// `EOPBADSTATE`: listening already.
    pub fn set_backlog(&self, backlog: usize) -> Result<()> {
        self.listener.set_backlog(backlog)?;
        self.backlog.store(backlog, Ordering::Relaxed);
        let services = self.services.lock().clone();
        services.map_or(Ok(()), |services| services.set_backlog(backlog))
    }

    /// Starts listening (`fi_listen(3)`).
    ///
    /// # Errors
    /// `ENOEQ`: no event queue is bound, or the endpoint is closed. `EOPBADSTATE`: listening
    /// already. `EADDRNOTAVAIL`: [`Self::set_name`] has failed, and another process uses the
    /// earlier address.
    pub fn listen(&self) -> Result<()> {
        let services = self.services.lock().clone();
        if self.xrc && services.is_none() {
            return Err(FiErrno::EADDRNOTAVAIL);
        }
        let Some(services) = services else {
            return self.listener.listen();
        };
        // Its requests are of peers that have a circuit. They find the other listener later, if at
        // all.
        services.listen()?;
        let listens = self.listener.listen();
        listens.inspect_err(|_| self.renew_services())
    }

    /// Rejects a request and sends `data` to the peer's application (`fi_reject(3)`).
    ///
    /// # Errors
    /// `EINVAL`: `data` is longer than [`MAX_CM_DATA`](crate::wire::cm_data::MAX_CM_DATA) bytes.
    /// The request is rejected nevertheless, without data.
    pub fn reject(request: ConnectRequest, data: &[u8]) -> Result<()> {
        request.refuse(&CmData::new(data)?)
    }

    /// The device that the endpoint was opened with.
    pub fn device(&self) -> &Arc<Device> {
        self.listener.device()
    }

    /// Closes the endpoint, and returns its identifier for an endpoint of `device`, bound to its
    /// address. `None`, and not closed: it is listening, closed, or on XRC, or the device belongs
    /// to another connection manager.
    pub(super) fn take_id(&self, device: &Device) -> Option<CmId> {
        if self.xrc || !std::ptr::eq(self.device().backend(), device.backend()) {
            return None;
        }
        self.listener.take_id()
    }

    /// Stops listening and discards the endpoint's unread events (`fi_close(3)`). Later calls fail
    /// or have no effect. Idempotent.
    pub fn close(&self) {
        self.close_services();
        self.listener.close();
    }
}

impl Drop for PassiveEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}
