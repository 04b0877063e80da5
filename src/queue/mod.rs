//! Completion queues and counters, their wait objects, and the domain's keepalive and helper
//! thread.

mod bind_flags;
mod cntr;
mod complete;
mod completion;
mod cq;
mod cq_bind;
mod cq_put;
mod cq_wait;
mod device_queue;
mod domain;
mod engine_link;
pub(crate) mod event_cell;
pub(crate) mod helper;
pub(crate) mod keepalive;
mod pollers;
pub(crate) mod slots;
pub mod source;
pub(crate) mod srx_slots;
mod wait;
mod wr_id;
pub(crate) mod xrc_receives;

pub use bind_flags::BindFlags;
pub use cntr::Counter;
pub(crate) use cntr::Counters;
pub(crate) use complete::{is_refusal, status_errno};
pub use completion::{Completion, CompletionError, EntryWriter};
pub use cq::{CompletionQueue, CqConfig};
pub(crate) use cq_bind::{CqBinding, Direction};
pub(crate) use domain::Assisted;
pub use domain::QueueDomain;
pub(crate) use engine_link::EngineLink;
pub use wait::WaitKind;
pub(crate) use wait::{WaitSet, WakeEvent, deadline};
pub(crate) use wr_id::{CqMember, shared_recv};
