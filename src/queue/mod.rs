//! Completion queues and event queues, and what waits on them.

mod completion;
mod cq;
mod eq;
mod wait;

pub use completion::{Completion, CompletionError, EntryWriter};
pub use cq::{CompletionQueue, CqConfig};
pub use eq::{EqConfig, EqError, Event, EventQueue};
pub use wait::WaitKind;
