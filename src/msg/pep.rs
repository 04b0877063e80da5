//! Passive endpoints, `fi_passive_ep(3)`, which listen for connection requests.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::Token;
use crate::conn::{CmSink, ConnectRequest, Listener};
use crate::eq::EventQueue;
use crate::errno::Result;
use crate::verbs::Device;
use crate::wire::cm_data::CmData;

/// Attributes of a new passive endpoint (`fi_passive_ep(3)`).
#[derive(Clone, Copy, Debug, Default)]
pub struct PepConfig {
    /// Address to listen on. Port 0 selects any free port; `None` is the wildcard address of IPv4
    /// with any port.
    pub addr: Option<SocketAddr>,
    /// Maximum number of unanswered requests; 0 for the default of 128.
    pub backlog: usize,
    /// Identifies the passive endpoint in events.
    pub token: Token,
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
        Ok(Arc::new(Self { listener }))
    }

    /// Changes the address (`fi_setname(3)`), before listening.
    ///
    /// # Errors
    /// `EOPBADSTATE`: listening already, or closed. `EADDRINUSE`, `EADDRNOTAVAIL`: the address
    /// cannot be used; the endpoint keeps its old one.
    pub fn set_name(&self, addr: SocketAddr) -> Result<()> {
        self.listener.set_addr(addr)
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
        let sink: Arc<dyn CmSink> = Arc::clone(eq) as _;
        self.listener.bind(&sink)
    }

    /// Sets the maximum number of unanswered requests (`FI_BACKLOG`, `fi_control(3)`), before
    /// listening; 0 for the default of 128.
    ///
    /// # Errors
    /// `EOPBADSTATE`: listening already.
    pub fn set_backlog(&self, backlog: usize) -> Result<()> {
        self.listener.set_backlog(backlog)
    }

    /// Starts listening (`fi_listen(3)`).
    ///
    /// # Errors
    /// `ENOEQ`: no event queue is bound, or the endpoint is closed. `EOPBADSTATE`: listening
    /// already.
    pub fn listen(&self) -> Result<()> {
        self.listener.listen()
    }

    /// Rejects a request and sends `data` to the peer's application (`fi_reject(3)`).
    ///
    /// # Errors
    /// `EINVAL`: `data` is too long. The request is rejected nevertheless, without data.
    pub fn reject(request: ConnectRequest, data: &[u8]) -> Result<()> {
        request.reject(CmData::new(data)?.encoded())
    }

    /// The device that the endpoint was opened with.
    pub fn device(&self) -> &Arc<Device> {
        self.listener.device()
    }

    /// Stops listening and discards the endpoint's unread events (`fi_close(3)`). Later calls fail
    /// or have no effect. Idempotent.
    pub fn close(&self) {
        self.listener.close();
    }
}

impl Drop for PassiveEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}
