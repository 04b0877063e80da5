//! The objects behind the pointers of C programs that other objects refer to: queue pairs and
//! queues refer to their context and protection domain. Completion queues, queue pairs, shared
//! receive queues and XRC domains are in separate modules, above this one.

mod ah;
mod buf;
mod context;
mod dm;
mod mr;
mod pd;
mod td;

pub(crate) use ah::Ah;
pub(crate) use buf::Buf;
pub(crate) use context::{Context, origin_peer};
pub(crate) use dm::{Dm, MAX_DM};
pub(crate) use mr::region_object;
pub(crate) use pd::{Import, Pd};
pub(crate) use td::Td;
