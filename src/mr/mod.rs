//! Memory regions: libfabric's access and mode bits turned into verbs registrations.

mod access;
mod region;

pub use access::Access;
pub use region::{Desc, Region, RegionConfig};
