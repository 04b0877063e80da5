//! Monitors: report changes of memory to the registration caches. `docs/registration-cache.md` has
//! the order of events.

mod foreign;
mod fork;
mod gate;
mod list;
mod maps;
mod userfault;

#[cfg(test)]
pub(crate) mod tests;

pub(crate) use foreign::Foreign;
pub use foreign::{Monitor, memory_changed};
pub(crate) use fork::count_forks;
pub(crate) use gate::Gate;
pub(crate) use list::Listed;
pub(crate) use userfault::{Watching, refused};
