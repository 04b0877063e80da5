//! Connection requests that wait for an answer.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::errno::{FiErrno, Result};
use crate::verbs::{CmId, Device};

/// A peer's request for a connection. Answered by making an endpoint of it and accepting there,
/// or by [`Self::reject`]; dropping it rejects without data.
#[derive(Debug)]
pub struct ConnectRequest {
    _id: CmId,
}

impl ConnectRequest {
    /// Turns the peer down and hands it `data`.
    ///
    /// # Errors
    /// `EINVAL`: more data than fits (the request is dropped, hence rejected, all the same).
    pub fn reject(self, data: &[u8]) -> Result<()> {
        let _ = data;
        Err(FiErrno::ENOSYS)
    }

    /// The device that the request came in by: the accepting endpoint's domain must be of it.
    pub fn device(&self) -> Option<Arc<Device>> {
        None
    }

    /// This side's address.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        Err(FiErrno::ENOSYS)
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        Err(FiErrno::ENOSYS)
    }
}
