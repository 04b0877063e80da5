//! Completion channels and asynchronous events: the descriptors that applications sleep on.

mod asynchronous;
mod channel;

pub(crate) use asynchronous::{AsyncQueue, Element};
pub(crate) use channel::{Channel, ack_cq_events, create_channel, destroy_channel, get_cq_event};
