//! A monitor of the application's: what libfabric's core has too, and imports by `fi_import_fid(3)`.

#![allow(unsafe_code, reason = "leaves the monitor alone in a forked child")]

use std::fmt::Debug;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::{Gate, Listed, fork, list};
use crate::errno::{FiErrno, Result};
use crate::mr::cache::{Index, Watch};

/// Who says when memory changes, by [`memory_changed`]. Thread safe. Called by threads that post, with a lock of their endpoint held, and
/// by who closes: so a call must not wait for another thread that uses this domain. No lock of the cache is held.
pub trait Monitor: Debug + Send + Sync {
    /// From now on changes of this range, of whole pages, are told. Subscriptions count: the same range, or one that overlaps it, can be
    /// subscribed to again before it is unsubscribed from.
    ///
    /// # Errors
    /// The range can't be watched: it is registered for each operation.
    fn subscribe(&self, addr: u64, len: u64) -> Result<()>;

    /// Undoes one [`Self::subscribe`] of just this range. Each is undone once, the last ones when the domain is closed.
    fn unsubscribe(&self, addr: u64, len: u64);

    /// Whether nothing happened to this range, as it was subscribed to, that was not told yet. Called before each use of what was kept:
    /// must not block, or allocate.
    fn is_valid(&self, addr: u64, len: u64) -> bool;
}

/// How a monitor tells: memory of this range changes, or has just changed and nobody can have used it since. What any cache of the
/// process kept of it is used by no operation that is posted after this returns.
///
/// May be called by any thread, at any time, for any range, with any lock that [`Monitor::subscribe`] does not take, and from within the
/// calls of a monitor; not from a signal handler. Neither allocates nor waits for anything but short locks. In a forked child, where
/// nothing is kept, it does nothing.
pub fn memory_changed(addr: u64, len: u64) {
    // in a child the locks may be ones that nobody opens any more
    if len != 0 && Gate::get().is_some_and(|gate| !gate.is_forked()) {
        list::kill(addr, addr.saturating_add(len));
    }
}

/// A cache's use of a foreign monitor.
#[derive(Debug)]
pub(crate) struct Foreign {
    monitor: ManuallyDrop<Box<dyn Monitor>>,
    gate: Gate,
    _listed: Listed,
}

impl Foreign {
    /// Makes the monitor when nothing else can fail.
    ///
    /// # Errors
    /// `ENOSYS`: a fork could not be noticed here. `ENOSPC`: too many caches. Those of `make`.
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
    /// A child leaves the monitor alone, which is its parent's.
    fn drop(&mut self) {
        if !self.gate.is_forked() {
            // SAFETY: dropped here alone, and not used behind.
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
