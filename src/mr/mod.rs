//! Memory regions: libfabric's access and mode bits turned into verbs registrations.

mod access;
mod directory;
pub(crate) mod keys;
mod local;
pub(crate) mod lookup;
mod mapped;
mod mode;
mod region;
mod table;
mod words;

pub use access::Access;
pub(crate) use directory::{ConnectionBlock, Directory, Parked, Peer};
pub(crate) use local::{LocalKeys, Use, implicit_region};
pub(crate) use mapped::Mapped;
pub use mode::{DescRule, Form, Mode};
pub use region::{Buffer, Desc, Region, RegionConfig};
pub(crate) use words::Words;
