//! `fid_pep`: passive endpoints, which listen.

use std::sync::Arc;

use libfabric_sys::fid;
use parking_lot::Mutex;
use weft::Token;
use weft::conn::ConnectRequest;
use weft::errno::{FiErrno, Result};
use weft::msg::PassiveEndpoint;

use crate::addr::Format;
use crate::ffi::fid::{User, object};
use crate::ffi::info::Info;
use crate::{connreq, getinfo};

/// An open passive endpoint.
pub(crate) struct Pep {
    pub(crate) engine: Arc<PassiveEndpoint>,
    pub(crate) format: Format,
    pub(crate) api_version: u32,
    /// Maximum length in bytes of the application's data in a connection message, for endpoints
    /// that have the authorization keys of this passive endpoint.
    pub(crate) cm_data_size: usize,
    /// The `fi_info` with which the passive endpoint was opened: the template for those of
    /// requests.
    pub(crate) seed: Info,
    pub(crate) eq: Mutex<Option<User>>,
    pub(crate) _fabric: User,
}

/// The `fi_info` of an incoming request; its handle holds the request.
///
/// # Errors
/// Those of building the `fi_info`: no endpoint could answer the request, which is then refused.
///
/// # Safety
/// `pep` is the token of an open passive endpoint.
pub(crate) unsafe fn request_info(pep: Token, request: ConnectRequest) -> Result<Info> {
    let handle: *mut fid = std::ptr::with_exposed_provenance_mut(pep.0);
    // SAFETY: the caller passes the token of an open passive endpoint.
    let pep = unsafe { object::<Pep>(handle)? };
    let device = request.device().ok_or(FiErrno::ENODEV)?;
    let (local, peer) = (request.local_addr()?, request.peer_addr()?);
    let connreq = connreq::open(request).as_ptr().cast::<fid>();
    let info = getinfo::for_request(
        pep.api_version,
        &pep.seed,
        &device,
        local,
        peer,
        connreq.expose_provenance(),
    );
    if info.is_err() {
        // SAFETY: made above, and not shared. The call refuses the request.
        let _ = unsafe { connreq::finish(connreq) };
    }
    info
}
