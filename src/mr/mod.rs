//! Memory regions: libfabric's access and mode bits turned into verbs registrations.

mod access;
mod local;
mod mode;
mod region;

pub use access::Access;
pub(crate) use local::{LocalKeys, Use, implicit_region};
pub use mode::{DescRule, Form, Mode};
pub use region::{Desc, Region, RegionConfig};
