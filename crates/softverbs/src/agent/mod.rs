//! Access to memory and files that the kernel denies to peers: a thread in the owning process
//! executes it.
//!
//! `docs/softverbs-agent.md` has the protocol: how the denial is detected, when the thread runs,
//! and which checks it does. This is the requesting side: [`link`] a line to a peer's agent,
//! [`files`] the opening of peers' files. The thread is [`crate::agent_thread`].

mod client;
mod files;
mod policy;
mod wire;

pub(crate) use client::{Broken, Due, Link, Return};
pub(crate) use files::Opener;
pub(crate) use policy::{allow_tracers, log_once, needed_for, needed_from_start};
pub(crate) use wire::{Kind, Outcome, PLACE, PLACES, REPLY, REQUEST, Reply, Request};

use crate::sys::Identity;

/// The process at the other end of a line to this process's agent: the slot that it has named, and
/// the pid that the kernel reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester {
    pub(crate) slot: u32,
    pub(crate) pid: u32,
}

/// The socket name of a process's agent, unique among all earlier names.
pub(crate) fn name(slot: u32, identity: &Identity) -> String {
    let Identity { pid, cookie, .. } = identity;
    format!("softverbs.{slot}.{pid}.{cookie:016x}")
}
