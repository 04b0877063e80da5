//! `fid_pep`: passive endpoints, which listen.

use std::sync::Arc;

use libfabric_sys::fid;
use parking_lot::Mutex;
use weft::conn::ConnectRequest;
use weft::errno::{FiErrno, Result};
use weft::msg::PassiveEndpoint;

use crate::addr::Format;
use crate::ffi::fid::User;
use crate::ffi::info::Info;
use crate::{connreq, getinfo};

/// An open passive endpoint.
pub(crate) struct Pep {
    pub(crate) engine: Arc<PassiveEndpoint>,
    pub(crate) format: Format,
    pub(crate) eq: Mutex<Option<User>>,
    pub(crate) _fabric: User,
}

/// From which the `fi_info` of each request is built. Each request owns it with the passive
/// endpoint, which may be closed while another thread reads the request.
pub(crate) struct Template {
    pub(crate) api_version: u32,
    /// What the `fi_info` of the passive endpoint determines of those of its requests.
    pub(crate) seed: getinfo::Seed,
}

/// The `fi_info` of an incoming request; its handle holds the request.
///
/// # Errors
/// Those of building the `fi_info`: no endpoint could answer the request, which is then refused.
pub(crate) fn request_info(request: ConnectRequest) -> Result<Info> {
    let template = request
        .template()
        .and_then(|it| it.downcast::<Template>().ok());
    let template = template.ok_or(FiErrno::EOTHER)?;
    let device = request.device().ok_or(FiErrno::ENODEV)?;
    let (local, peer) = (request.local_addr()?, request.peer_addr()?);
    let connreq = connreq::open(request).as_ptr().cast::<fid>();
    let info = getinfo::for_request(
        template.api_version,
        &template.seed,
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
