//! What the processes of a node share: their XRC domain ([`XrcDomain`]) and its file ([`file`]), the
//! id of the node ([`NodeId`]), and the targets that this process holds ([`Targets`]).
//!
//! `docs/protocol-xrc.md` has the rules. This module uses the device by [`crate::verbs`] alone and
//! knows neither endpoints nor messages.

mod calls;
mod domain;
pub mod file;
mod node;
mod targets;

pub use domain::{Places, XrcDomain};
pub use node::NodeId;
pub use targets::{TargetKey, Targets};
