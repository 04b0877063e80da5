//! Access to memory and files where the kernel refuses it to peers: their owner does it, in a thread of the device's.
//!
//! `docs/softverbs-agent.md` has the protocol: who finds out, when the thread runs, what it checks. [`link`] is the
//! asking side, [`serve`] the thread, [`access`] what it does with this process's memory, [`files`] opening
//! peers' files whichever way.

mod access;
mod files;
mod link;
mod policy;
mod serve;
mod wire;

pub(crate) use access::Places;
pub(crate) use files::Opener;
pub(crate) use link::{Broken, Due, Link};
pub(crate) use policy::{allow_tracers, needed_for, needed_from_start, tell};
pub(crate) use serve::Agent;
pub(crate) use wire::{Kind, Outcome, PLACE, Request};

use crate::sys::Identity;

#[cfg(any(test, fuzzing))]
pub(crate) use self::name as agent_name;

/// The name of a process's agent: unlike any that it or another one had before.
pub(crate) fn name(slot: u32, identity: &Identity) -> String {
    let Identity { pid, cookie, .. } = identity;
    format!("softverbs.{slot}.{pid}.{cookie:016x}")
}
