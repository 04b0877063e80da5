//! Connection requests that wait for an answer.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::errno::{FiErrno, Result};
use crate::verbs::{CmId, Device, known_device};
use crate::wire::cm_data::CmData;
use crate::wire::introduction::Introduction;

/// An identifier, and what the peer said of itself.
pub(crate) type Taken = (CmId, Option<Introduction>);

/// A peer's request for a connection. Answered by making an endpoint of it and accepting there,
/// or by [`Self::reject`]; dropping it rejects without data.
#[derive(Debug)]
pub struct ConnectRequest {
    /// `None` once it is answered.
    id: Option<CmId>,
    /// What the peer says of itself.
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

    /// Whether an endpoint of this device can accept it.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.id.as_ref().is_some_and(|id| id.is_on(device))
    }

    /// Hands the identifier, and what the peer said of itself, to who accepts.
    pub(crate) fn take(mut self) -> Option<Taken> {
        Some((self.id.take()?, self.introduction))
    }

    /// Turns the peer down and hands it `data`.
    ///
    /// # Errors
    /// `EINVAL`: more data than fits (the request is dropped, hence rejected, all the same).
    pub fn reject(mut self, data: &[u8]) -> Result<()> {
        let data = CmData::new(data)?;
        let id = self.id.take().ok_or(FiErrno::EINVAL)?;
        id.reject(&data)
    }

    /// The device that the request came in by: the accepting endpoint's domain must be of it.
    pub fn device(&self) -> Option<Arc<Device>> {
        known_device(self.id.as_ref()?)
    }

    /// This side's address.
    ///
    /// # Errors
    /// `EINVAL`: it isn't an IP address.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.id()?.local_addr().ok_or(FiErrno::EINVAL)
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `EINVAL`: it isn't an IP address.
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        self.id()?.peer_addr().ok_or(FiErrno::EINVAL)
    }
}

impl Drop for ConnectRequest {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            // the peer may have gone already
            let _ = id.reject(&CmData::EMPTY);
        }
    }
}
