//! Unanswered connection requests.

use std::any::Any;
use std::net::SocketAddr;
use std::sync::Arc;

use super::incoming::Incoming;
use crate::errno::{FiErrno, Result};
use crate::verbs::{CmId, Device, PrivateData, known_device};
use crate::wire::cm_data::CmData;
use crate::wire::msg_xrc;

/// What the provider attaches to a passive endpoint; each of its requests shares the ownership.
pub type Template = Arc<dyn Any + Send + Sync>;

/// The identifier of a request and its private data.
pub(crate) type RequestParts = (CmId, PrivateData);

/// A peer's request for a connection. An endpoint that is created from the request accepts it;
/// [`PassiveEndpoint::reject`](crate::msg::PassiveEndpoint::reject) rejects it. Dropping an
/// unanswered request rejects it too.
#[derive(Debug)]
pub struct ConnectRequest {
    /// `None` once the request is answered.
    id: Option<CmId>,
    private_data: Box<PrivateData>,
    /// Private data of the rejection by the drop.
    refusal: &'static [u8],
    /// The request is one for a service (SIDR).
    sidr: bool,
    /// The request is one of an endpoint on XRC.
    xrc: bool,
    /// That of the passive endpoint, which may be closed before the request is answered.
    template: Option<Template>,
}

impl ConnectRequest {
    /// `refusal`: private data of the rejection if the request is dropped, at most 148 bytes.
    pub(crate) fn new(id: CmId, private_data: PrivateData, refusal: &'static [u8]) -> Self {
        Self {
            id: Some(id),
            private_data: Box::new(private_data),
            refusal,
            sidr: false,
            xrc: false,
            template: None,
        }
    }

    /// What the provider has attached to the passive endpoint
    /// ([`PepConfig::template`](crate::msg::PepConfig::template)). Stays valid when the passive
    /// endpoint is closed.
    pub fn template(&self) -> Option<Template> {
        self.template.clone()
    }

    pub(crate) fn set_template(&mut self, template: Option<Template>) {
        self.template = template;
    }

    /// Whether the request is one of an endpoint on XRC.
    pub(crate) fn is_xrc(&self) -> bool {
        self.xrc
    }

    /// Whether the request is one for a service (SIDR).
    pub(crate) fn is_sidr(&self) -> bool {
        self.sidr
    }

    pub(super) fn set_sidr(&mut self) {
        self.sidr = true;
    }

    /// The request is one of an endpoint on XRC. `refusal`: as in [`Self::new`].
    pub(crate) fn set_xrc(&mut self, refusal: &'static [u8]) {
        self.xrc = true;
        self.refusal = refusal;
    }

    /// The length byte of the application's data, and what follows it.
    pub(crate) fn data(&self) -> &[u8] {
        match self.xrc {
            true => msg_xrc::data_of(self.private_data.bytes()),
            false => self.private_data.bytes(),
        }
    }

    /// Rejects the request, with this data of the application.
    ///
    /// # Errors
    /// The connection manager's.
    pub(crate) fn refuse(self, data: &CmData) -> Result<()> {
        if !self.xrc {
            return self.reject(data.encoded());
        }
        if let Some(incoming) = Incoming::of(self) {
            incoming.reject(data);
        }
        Ok(())
    }

    /// The peer's private data.
    pub(crate) fn private_data(&self) -> &PrivateData {
        &self.private_data
    }

    fn id(&self) -> Result<&CmId> {
        self.id.as_ref().ok_or(FiErrno::EINVAL)
    }

    /// Whether an endpoint on this device can accept the request.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.id.as_ref().is_some_and(|id| id.is_on(device))
    }

    /// Moves the identifier and the private data to the accepting endpoint.
    pub(crate) fn take(mut self) -> Option<RequestParts> {
        Some((self.id.take()?, *self.private_data))
    }

    /// Rejects the request, with at most 148 bytes of private data.
    ///
    /// # Errors
    /// The connection manager's, for instance because the peer has ended the connection.
    pub(crate) fn reject(mut self, private_data: &[u8]) -> Result<()> {
        let id = self.id.take().ok_or(FiErrno::EINVAL)?;
        id.reject(private_data)
    }

    /// The device on which the request arrived. The accepting endpoint's domain must be on this
    /// device.
    pub fn device(&self) -> Option<Arc<Device>> {
        known_device(self.id.as_ref()?)
    }

    /// This side's address.
    ///
    /// # Errors
    /// `EINVAL`: the address is not an IP address.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.id()?.local_addr().ok_or(FiErrno::EINVAL)
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `EINVAL`: the address is not an IP address.
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        self.id()?.peer_addr().ok_or(FiErrno::EINVAL)
    }
}

impl Drop for ConnectRequest {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            // an error is ignored: the peer may have ended the connection
            let _ = id.reject(self.refusal);
        }
    }
}
