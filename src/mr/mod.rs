//! Memory regions: libfabric's access and mode bits turned into verbs registrations.

mod access;
mod backed;
mod cover;
mod desc;
mod directory;
mod event;
mod exposed;
pub(crate) mod keys;
mod local;
pub(crate) mod lookup;
mod mapped;
mod mode;
mod ops;
mod page;
mod pending;
mod pieces;
mod refresh;
mod region;
mod table;
mod words;

pub use access::Access;
pub use desc::Desc;
pub(crate) use desc::Place;
pub(crate) use directory::{ConnectionBlock, Directory, Parked, Peer};
pub(crate) use event::{Cell, Event, Watch};
pub(crate) use local::{LocalKeys, Use, implicit_region};
pub(crate) use mapped::Mapped;
pub(crate) use mode::Paging;
pub use mode::{DescRule, Form, Mode};
pub use ops::{AdvisedRange, HANDLE_SIZE, Hint, SharedMemory};
pub(crate) use pending::Workers;
pub use region::{Buffer, Dmabuf, Region, RegionConfig};
pub(crate) use words::Words;
