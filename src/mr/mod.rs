//! Memory regions: maps libfabric's access and mode bits to verbs registrations.

mod access;
mod backed;
mod buffer;
pub(crate) mod cache;
mod connection_block;
mod desc;
mod directory;
mod directory_peers;
mod directory_table;
mod domain;
mod elsewhere;
mod fetch;
mod following;
pub(crate) mod key_cache;
pub mod lkey_probe;
mod local;
mod local_cache;
pub(crate) mod lookup;
pub(crate) mod mapped_keys;
mod mode;
pub(crate) mod monitor;
mod ops;
mod own_access;
mod own_copy;
mod page;
mod pending;
mod procmap;
mod recent;
mod refresh;
mod region;
mod registration;
mod revocation;
mod source;
#[cfg(test)]
mod tests;
mod workers;

pub use access::Access;
#[cfg(test)]
pub(crate) use backed::{NO_DESCRIPTOR, OLD_KERNEL};
pub use buffer::Buffer;
pub(crate) use connection_block::ConnectionBlock;
pub use desc::Desc;
pub(crate) use desc::DescScope;
pub(crate) use directory::{Directory, Look, Peer};
pub(crate) use domain::random;
pub use domain::{MrConfig, MrDomain, Scope};
pub(crate) use following::Following;
#[cfg(test)]
pub(crate) use following::stops;
pub(crate) use local::{COPIED, Kept, LocalKeys, Use, implicit_region};
pub use local_cache::{CacheConfig, LocalMemory};
pub(crate) use local_cache::{LocalCache, SourceCache};
pub(crate) use mapped_keys::{Mapped, mapped_key};
pub(crate) use mode::Paging;
pub use mode::{DescRule, Form, Mode};
pub use monitor::{Monitor, memory_changed};
pub use ops::{AdvisedRange, HANDLE_SIZE, Hint, SharedMemory};
pub(crate) use own_access::{AccessibleRegions, ElementsAccess, RemainingRange};
pub use region::{Dmabuf, Region, RegionConfig};
pub(crate) use source::{Source, SourceKeys, Withdrawn};
pub(crate) use workers::Workers;
