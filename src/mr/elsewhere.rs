//! Registrations of regions for local use in protection domains other than their own: before a
//! region is enabled, or at an endpoint other than the one that the region is bound to.
//!
//! A registration ends with its region or with its protection domain, whichever ends first.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::registration::{InUse, Registration};
use super::{Buffer, Region};
use crate::errno::Result;
use crate::verbs::{Lkey, Pd};

/// The registrations of one region, by the address of their protection domain, which each of them
/// keeps alive. Thread safe.
#[derive(Debug, Default)]
pub(super) struct Elsewhere(Mutex<HashMap<usize, Registration>>);

impl Elsewhere {
    /// The lkey of a local buffer in `pd`. The first use there registers the region. `hold` as for
    /// [`Registration::lkey`].
    ///
    /// # Errors
    /// `EINVAL`: no buffer of the region has all bytes. Those of registering (`ibv_reg_mr(3)`).
    fn lkey(
        self: &Arc<Self>,
        region: &Region,
        pd: &Arc<Pd>,
        iov: &libc::iovec,
        hold: impl FnOnce(InUse),
    ) -> Result<Lkey> {
        let mut all = self.0.lock();
        if let Some(known) = all.get(&address(pd)) {
            return known.lkey(iov, hold);
        }
        let new = Registration::local(region, pd)?;
        let lkey = new.lkey(iov, hold)?;
        region.domain().visited().insert(pd, self);
        all.insert(address(pd), new);
        Ok(lkey)
    }

    /// Ends all registrations. Continues after a failure, so that none permits a new access.
    ///
    /// # Errors
    /// Those of [`Registration::end`]; the first one.
    pub(super) fn end(&self) -> Result<()> {
        let all = self.0.lock();
        let mut result = Ok(());
        for registration in all.values() {
            result = result.and(registration.end());
        }
        result
    }

    /// Registers the pages of `ranges` again.
    ///
    /// # Errors
    /// Those of [`Registration::refresh`].
    pub(super) fn refresh(&self, ranges: &[Buffer]) -> Result<()> {
        let all = self.0.lock();
        all.values().try_for_each(|local| local.refresh(ranges))
    }
}

/// A protection domain as the key of a table whose entries keep it alive.
fn address(pd: &Arc<Pd>) -> usize {
    Arc::as_ptr(pd).addr()
}

/// The regions of a domain that have registrations in each protection domain of an endpoint.
/// Thread safe.
#[derive(Debug, Default)]
pub(super) struct Visited(Mutex<HashMap<usize, Vec<Weak<Elsewhere>>>>);

impl Visited {
    /// Records that a region has a registration in `pd`. Amortized over the insertions, this
    /// removes the regions that are closed.
    fn insert(&self, pd: &Arc<Pd>, region: &Arc<Elsewhere>) {
        let mut all = self.0.lock();
        let regions = all.entry(address(pd)).or_default();
        if regions.len() == regions.capacity() {
            regions.retain(|region| region.strong_count() > 0);
            regions.reserve(regions.len() + 1);
        }
        regions.push(Arc::downgrade(region));
    }

    /// Ends all registrations in `pd`, whose endpoint is closed and has no request under way.
    pub(super) fn leave(&self, pd: &Arc<Pd>) {
        let regions = self.0.lock().remove(&address(pd));
        for region in regions.into_iter().flatten().filter_map(|of| of.upgrade()) {
            // dropping a registration ends it; not under the lock, because the device may wait
            drop(region.0.lock().remove(&address(pd)));
        }
    }
}

impl Region {
    /// The lkey in a protection domain other than the region's own.
    #[cold]
    pub(super) fn lkey_elsewhere(
        &self,
        pd: &Arc<Pd>,
        iov: &libc::iovec,
        hold: impl FnOnce(InUse),
    ) -> Result<Lkey> {
        self.elsewhere.lkey(self, pd, iov, hold)
    }

    /// Number of protection domains in which the region has such a registration.
    #[cfg(test)]
    pub(crate) fn registrations_elsewhere(&self) -> usize {
        self.elsewhere.0.lock().len()
    }
}
