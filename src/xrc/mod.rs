//! What the processes of a node share: their XRC domain ([`XrcDomain`]) and its file ([`file`]),
//! and the id of the node ([`NodeId`]).
//!
//! `docs/protocol-xrc.md` has the rules. This module uses the device by [`crate::verbs`] alone and
//! knows neither endpoints nor messages.

mod calls;
mod domain;
pub mod file;
mod node;

pub use domain::{Places, XrcDomain};
pub use node::NodeId;
