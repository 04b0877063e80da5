//! `fid_fabric`: the network that domains, passive endpoints and event queues belong to.

/// An open fabric.
pub(crate) struct Fabric {
    /// The API version that the application requested: it determines the layout of the
    /// application's structures.
    pub(crate) api_version: u32,
    pub(crate) name: String,
}
