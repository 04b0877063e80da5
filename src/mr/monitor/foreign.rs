//! A memory monitor of the application, such as those that libfabric's core imports by
//! `fi_import_fid(3)`.

#![allow(unsafe_code, reason = "leaves the monitor alone in a forked child")]

use std::fmt::Debug;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::{Gate, Listed, fork, list};
use crate::errno::{FiErrno, Result};
use crate::mr::cache::{Index, Watch};

/// A source of memory changes, which it reports by [`memory_changed`]. Thread safe. Its functions
/// are called by threads that post, with their endpoint's lock held, and by threads that close
/// objects; so they must not wait for another thread that uses this domain. The caller holds no
/// lock of the cache.
pub trait Monitor: Debug + Send + Sync {
    /// Subscribes to a range of whole pages: the monitor reports its changes from now on.
    /// Subscriptions count: a range, or one that overlaps it, can be subscribed to again before it
    /// is unsubscribed.
    ///
    /// # Errors
    /// The range cannot be watched; its memory is then registered for each operation.
    fn subscribe(&self, addr: u64, len: u64) -> Result<()>;

    /// Undoes one [`Self::subscribe`] of exactly this range. Called once for each, at the latest
    /// when the domain is closed.
    fn unsubscribe(&self, addr: u64, len: u64);

    /// False if a change of this range, as it was subscribed to, has not been reported yet. Called
    /// before each use of a cached registration: must not block or allocate.
    fn is_valid(&self, addr: u64, len: u64) -> bool;
}

/// Reports that memory of this range is about to change, or has changed and no thread can have used
/// it since. No operation that is posted after the return of this call uses a registration that a
/// cache of the process has of the range.
///
/// May be called by any thread, at any time, for any range, by the functions of a monitor, and with
/// any lock held that [`Monitor::subscribe`] does not take; not by a signal handler. Does not
/// allocate, and blocks only on short locks. Does nothing in a forked child, where no registration
/// is cached.
pub fn memory_changed(addr: u64, len: u64) {
    // in a child another thread of the parent may have held the locks at the fork
    if len != 0 && Gate::get().is_some_and(|gate| !gate.is_forked()) {
        list::kill(addr, addr.saturating_add(len));
    }
}

/// Connects one cache to a monitor of the application.
#[derive(Debug)]
pub(crate) struct Foreign {
    monitor: ManuallyDrop<Box<dyn Monitor>>,
    gate: Gate,
    _listed: Listed,
}

impl Foreign {
    /// Registers the cache for changes, then calls `make`.
    ///
    /// # Errors
    /// `ENOSYS`: forks cannot be detected, or this process is a forked child. `ENOSPC`: too many
    /// caches. Those of `make`.
    pub(crate) fn new(
        index: Arc<dyn Index + Send>,
        make: impl FnOnce() -> Result<Box<dyn Monitor>>,
    ) -> Result<Self> {
        let gate = Gate::get().filter(|gate| !gate.is_forked());
        let gate = gate.ok_or(FiErrno::ENOSYS)?;
        fork::notice();
        let listed = Listed::new(index, gate)?;
        Ok(Self {
            monitor: ManuallyDrop::new(make()?),
            gate,
            _listed: listed,
        })
    }
}

impl Drop for Foreign {
    /// A forked child does not drop the monitor: its resources are the parent's.
    fn drop(&mut self) {
        if !self.gate.is_forked() {
            // SAFETY: the only drop of the field, which is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.monitor) };
        }
    }
}

impl Watch for Foreign {
    #[inline]
    fn is_current(&self, start: u64, end: u64) -> bool {
        self.monitor.is_valid(start, end - start) && self.gate.is_open()
    }

    fn asks_of_registrations(&self) -> bool {
        true
    }

    fn is_quiet(&self) -> bool {
        self.gate.is_open()
    }

    fn watch(&self, start: u64, end: u64) -> Result<()> {
        self.monitor.subscribe(start, end - start)
    }

    fn unwatch(&self, start: u64, end: u64) {
        self.monitor.unsubscribe(start, end - start);
    }

    fn tells_all(&self, _: u64, _: u64) -> bool {
        true
    }

    fn is_forked(&self) -> bool {
        self.gate.is_forked()
    }
}
