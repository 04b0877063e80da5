//! Registrations that stay after the messages whose sources or sinks they were: an application
//! sends from, and receives into, the same buffers again.
//!
//! Only for a device that registers on demand without a call of the kernel. There a registration
//! holds no pages and translates no address: each access finds the memory that is at the addresses
//! then. So it stays correct when the application unmaps the buffer, and needs no monitor.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::verbs::{Mr, Rkey};

/// Registrations that an endpoint keeps.
const KEPT: usize = 128;

/// A registration that operations and the table share.
#[derive(Debug)]
pub(super) struct Recent {
    rkey: Rkey,
    /// Address and length.
    range: (u64, usize),
    /// It has ended, or is to be ended: nothing else uses it.
    ends: AtomicBool,
    /// `None`: it has ended.
    mr: Mutex<Option<Mr>>,
}

impl Recent {
    pub(super) fn new(mr: Mr, range: (u64, usize)) -> Arc<Self> {
        Arc::new(Self {
            rkey: mr.rkey(),
            range,
            ends: AtomicBool::new(false),
            mr: Mutex::new(Some(mr)),
        })
    }

    #[inline]
    pub(super) const fn rkey(&self) -> Rkey {
        self.rkey
    }

    /// Address and length.
    #[cfg(test)]
    pub(super) const fn range(&self) -> (u64, usize) {
        self.range
    }

    #[cfg(test)]
    pub(super) fn is_registered(&self) -> bool {
        self.mr.lock().is_some()
    }

    /// Ends the registration without a wait.
    ///
    /// # Errors
    /// A peer executes a READ or a WRITE, and no other one can begin. The caller repeats the call.
    pub(super) fn end(&self) -> Result<(), ()> {
        // the owner of the table has the lock of its endpoint, as whoever ends a sink
        self.ends.store(true, Ordering::Relaxed);
        let mut held = self.mr.lock();
        let ended = held.take().map_or(Ok(()), Mr::deregister_now);
        ended.map_err(|mr| *held = Some(mr))
    }
}

/// The table: each range has one place.
#[derive(Debug)]
pub(super) struct RecentSources {
    /// Allocated with the first registration.
    places: Vec<Option<Arc<Recent>>>,
}

impl RecentSources {
    pub(super) const fn new() -> Self {
        Self { places: Vec::new() }
    }

    #[inline]
    fn place(range: (u64, usize)) -> usize {
        // Fibonacci hashing; buffers differ in the bits from 6 on
        let mixed = (range.0 >> 6 ^ range.1 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> (64 - KEPT.ilog2())) as usize
    }

    /// The registration of exactly this range.
    #[inline]
    pub(super) fn find(&self, range: (u64, usize)) -> Option<&Arc<Recent>> {
        let recent = self.places.get(Self::place(range))?.as_ref()?;
        (recent.range == range && !recent.ends.load(Ordering::Relaxed)).then_some(recent)
    }

    /// Keeps a registration. Returns the one that had its place; it is to be ended when no
    /// operation uses it.
    pub(super) fn keep(&mut self, recent: &Arc<Recent>) -> Option<Arc<Recent>> {
        if self.places.is_empty() {
            self.places.resize(KEPT, None);
        }
        self.places[Self::place(recent.range)].replace(Arc::clone(recent))
    }

    /// Forgets a registration that is to be ended, so that no other operation uses it.
    pub(super) fn forget(&mut self, recent: &Arc<Recent>) {
        if let Some(place) = self.places.get_mut(Self::place(recent.range)) {
            place.take_if(|kept| Arc::ptr_eq(kept, recent));
        }
    }

    /// All that are kept; the table is empty then.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Arc<Recent>> {
        std::mem::take(&mut self.places).into_iter().flatten()
    }
}
