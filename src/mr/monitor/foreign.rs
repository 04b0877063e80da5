//! A monitor of the application's: what libfabric's core has too, and imports by `fi_import_fid(3)`.

use std::fmt::Debug;
use std::sync::Arc;

use super::{Gate, Listed, fork};
use crate::errno::{FiErrno, Result};
use crate::mr::cache::{Index, Watch};

/// Who says when memory changes. Thread safe.
pub trait Monitor: Debug + Send + Sync {
    /// From now on changes of this range are told by [`Notify::changed`]. Not called with a lock of the cache held.
    ///
    /// # Errors
    /// The range can't be watched: it is registered for each operation.
    fn subscribe(&self, addr: u64, len: u64) -> Result<()>;

    /// A registration of this range is over. Others of the same memory may still be there.
    fn unsubscribe(&self, addr: u64, len: u64);

    /// Whether nothing happened to this range that was not told yet. Called before each use of what was kept: must
    /// not block, allocate, or call weft.
    fn is_valid(&self, addr: u64, len: u64) -> bool;
}

/// How a monitor tells. May be called by any thread, with any lock that [`Monitor::subscribe`] does not take; neither allocates
/// nor waits for anything but a short lock.
#[derive(Clone)]
pub struct Notify(Arc<dyn Index + Send>);

impl Debug for Notify {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notify")
    }
}

impl Notify {
    pub(crate) fn new(index: Arc<dyn Index + Send>) -> Self {
        Self(index)
    }

    /// Memory of this range changes, or has just changed and nobody can have used it since. What was kept of it is used by
    /// no operation that is posted after this returns.
    pub fn changed(&self, addr: u64, len: u64) {
        self.0.kill(addr, addr.saturating_add(len));
    }
}

/// A cache's use of a foreign monitor.
#[derive(Debug)]
pub(crate) struct Foreign {
    monitor: Box<dyn Monitor>,
    gate: Gate,
    _listed: Listed,
}

impl Foreign {
    /// # Errors
    /// `ENOSYS`: a fork could not be noticed here. `ENOSPC`: too many caches.
    pub(crate) fn new(monitor: Box<dyn Monitor>, index: Arc<dyn Index + Send>) -> Result<Self> {
        let gate = Gate::get().filter(|gate| !gate.is_forked());
        let gate = gate.ok_or(FiErrno::ENOSYS)?;
        fork::notice();
        Ok(Self {
            monitor,
            gate,
            _listed: Listed::new(index, gate)?,
        })
    }
}

impl Watch for Foreign {
    #[inline]
    fn is_current(&self, start: u64, end: u64) -> bool {
        self.monitor.is_valid(start, end - start) && self.gate.is_open()
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
