//! XRC domains and their target queue pairs; `docs/softverbs-xrc.md` has who owns what, and what happens at each death.
//!
//! A domain is a file of its own that its members map, found by the registry; who is a member says a lock that the
//! kernel takes back when the process ends. A target lies in its domain and belongs to all that hold it. Nobody works for
//! one: initiators look at its state and deliver to the owner of a shared receive queue.

mod directory;
mod domain;
mod object;
mod target;

pub(crate) use domain::{Domain, Domains, Membership};
pub(crate) use object::{Xrcd, close, open};
pub(crate) use target::{Attr, Target};
