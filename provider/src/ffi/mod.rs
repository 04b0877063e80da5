//! The C boundary: the layer of all entry points, and the only place that calls the host.

pub(crate) mod alloc;
pub(crate) mod fid;
pub(crate) mod guard;
pub(crate) mod host;
pub(crate) mod info;
pub(crate) mod log;
pub(crate) mod nic;
pub(crate) mod param;
pub(crate) mod stub;
