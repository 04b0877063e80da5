//! Completion queues, counters and event queues, and what waits on them.

mod cntr;
mod completion;
mod cq;
mod eq;
pub(crate) mod shared;
pub(crate) mod slots;
mod wait;

pub use cntr::Counter;
pub(crate) use cntr::Counters;
pub use completion::{Completion, CompletionError, EntryWriter};
pub(crate) use cq::WrId;
pub use cq::{CompletionQueue, CqConfig};
pub(crate) use eq::CmTarget;
pub use eq::{EqConfig, EqError, Event, EventQueue};
pub use wait::WaitKind;
pub(crate) use wait::own;
