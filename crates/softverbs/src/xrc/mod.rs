//! XRC domains and their target queue pairs; `docs/softverbs-xrc.md` describes the ownership, and
//! the effects of the end of each process.
//!
//! A domain is a separate file that its members map and find through the registry. Membership is a
//! file lock, which the kernel releases when the process ends. A target is an entry of its domain
//! and belongs to all its holders. No process executes work for a target: initiators read its state
//! and deliver to the owner of a shared receive queue.

mod accesses;
mod directory;
mod domain;
mod object;
mod target;

pub(crate) use accesses::AgentAccess;
#[cfg(test)]
pub(crate) use directory::hold_domain;
pub(crate) use domain::{Domain, Domains, Membership};
pub(crate) use object::{Xrcd, close, open};
#[cfg(test)]
pub(crate) use target::in_reset;
#[cfg(test)]
pub(crate) use target::tests::membership as test_membership;
pub(crate) use target::{Attr, Target, TargetWords};
