//! Unanswered connection requests.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::errno::{FiErrno, Result};
use crate::verbs::{CmId, Device, known_device};
use crate::wire::cm_data::CmData;
use crate::wire::introduction::Introduction;

/// The identifier of a request, and the peer's introduction.
pub(crate) type Taken = (CmId, Option<Introduction>);

/// A peer's request for a connection. It is answered by making an endpoint from it and accepting
/// there, or by [`Self::reject`]; dropping it rejects without data.
#[derive(Debug)]
pub struct ConnectRequest {
    /// `None` once the request is answered.
    id: Option<CmId>,
    /// The peer's introduction.
    introduction: Option<Introduction>,
}

impl ConnectRequest {
    pub(crate) fn new(id: CmId, introduction: Option<Introduction>) -> Self {
        Self {
            id: Some(id),
            introduction,
        }
    }

    fn id(&self) -> Result<&CmId> {
        self.id.as_ref().ok_or(FiErrno::EINVAL)
    }

    /// Whether an endpoint on this device can accept the request.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.id.as_ref().is_some_and(|id| id.is_on(device))
    }

    /// Moves the identifier and the peer's introduction to the accepting endpoint.
    pub(crate) fn take(mut self) -> Option<Taken> {
        Some((self.id.take()?, self.introduction))
    }

    /// Rejects the request and sends `data` to the peer.
    ///
    /// # Errors
    /// `EINVAL`: `data` is too long. The request is rejected nevertheless, without data.
    pub fn reject(mut self, data: &[u8]) -> Result<()> {
        let data = CmData::new(data)?;
        let id = self.id.take().ok_or(FiErrno::EINVAL)?;
        id.reject(data.encoded())
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
            // the peer may have gone already
            let _ = id.reject(CmData::EMPTY.encoded());
        }
    }
}
