//! Registrations of regions for local use in protection domains other than their own: before a
//! region is enabled, or at an endpoint other than the one that the region is bound to.
//!
//! A registration ends with its region or with its protection domain, whichever ends first.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::registration::{InUse, Registration};
use super::{Buffer, Region};
use crate::errno::{FiErrno, Result};
use crate::verbs::{Lkey, Pd};

/// The registrations of one region, by the address of their protection domain, which each of them
/// keeps alive. Thread safe.
#[derive(Debug, Default)]
pub(super) struct Elsewhere(Mutex<HashMap<usize, Arc<Registration>>>);

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
        all.insert(address(pd), Arc::new(new));
        Ok(lkey)
    }

    /// Calls `f` for each registration, without the lock: the device may wait, and other threads
    /// look for lkeys meanwhile. Continues after a failure; returns the first error.
    fn each(&self, f: impl Fn(&Registration) -> Result<()>) -> Result<()> {
        let all: Vec<_> = self.0.lock().values().map(Arc::clone).collect();
        let results = all.iter().map(|registration| f(registration));
        results.fold(Ok(()), Result::and)
    }

    /// Ends all registrations. Continues after a failure, so that none permits a new access.
    ///
    /// # Errors
    /// Those of [`Registration::end`]; the first one.
    pub(super) fn end(&self) -> Result<()> {
        self.each(Registration::end)
    }

    /// Registers the pages of `ranges` again. Continues after a failure.
    ///
    /// # Errors
    /// Those of [`Registration::refresh`]; the first one.
    pub(super) fn refresh(&self, ranges: &[Buffer]) -> Result<()> {
        self.each(|registration| match registration.refresh(ranges) {
            // it ends with its endpoint
            Err(FiErrno::EOPBADSTATE) => Ok(()),
            result => result,
        })
    }

    /// Ends the registration in `pd`. If that fails, the end of the region repeats it.
    fn leave(&self, pd: &Arc<Pd>) {
        // stays in the table until it has ended, so that the end of the region waits for that
        let Some(registration) = self.0.lock().get(&address(pd)).map(Arc::clone) else {
            return;
        };
        if registration.end().is_ok() {
            self.0.lock().remove(&address(pd));
        }
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
            region.leave(pd);
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::mr::{Access, Mode, tests};
    use crate::verbs::devices;
    use crate::verbs::observed::{ON_END, SUCCEED, backend};

    /// One test for both, because the state of the device is global.
    #[test]
    fn refreshes_go_on_after_a_failure_and_ends_do_not_hold_the_lock() {
        let device = devices(&[backend()], false).remove(0);
        let mode = Mode::ALLOCATED | Mode::MMU_NOTIFY | Mode::LOCAL;
        let domain = tests::domain(&device, mode, false);
        let memory = vec![0_u8; 4096];
        let region = tests::region(&domain, &memory, Access::SEND, 0);
        let iov = tests::iov(&memory);
        let pds: Vec<_> = (0..6).map(|_| Pd::alloc(&device).unwrap()).collect();
        let lkeys = || -> Vec<_> {
            let lkeys = pds.iter().map(|pd| region.lkey_elsewhere(pd, &iov, drop));
            lkeys.map(Result::unwrap).collect()
        };
        let before = lkeys();
        // the region's own registration succeeds, and every second one of the others
        *SUCCEED.lock() = 1;
        assert_eq!(region.refresh(&[]), Err(FiErrno::ENOMEM));
        *SUCCEED.lock() = usize::MAX;
        let after = lkeys();
        let changed = before
            .iter()
            .zip(&after)
            .filter(|(one, other)| one != other);
        assert_eq!(changed.count(), 3, "{before:?} {after:?}");
        // the region's own registration fails, and every second one of the others
        *SUCCEED.lock() = 0;
        assert_eq!(region.refresh(&[]), Err(FiErrno::ENOMEM));
        *SUCCEED.lock() = usize::MAX;
        let changed = lkeys()
            .iter()
            .zip(&after)
            .filter(|(one, other)| one != other)
            .count();
        assert_eq!(changed, 3);

        let (free, locked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        *ON_END.lock() = Some(Box::new({
            let table = Arc::clone(&region.elsewhere);
            let (free, locked) = (Arc::clone(&free), Arc::clone(&locked));
            move || {
                let count = if table.0.try_lock().is_some() {
                    &free
                } else {
                    &locked
                };
                count.fetch_add(1, Ordering::Relaxed);
            }
        }));
        let ends = || (free.load(Ordering::Relaxed), locked.load(Ordering::Relaxed));
        for pd in &pds[..3] {
            domain.mr().forget(pd);
        }
        assert_eq!(region.registrations_elsewhere(), 3);
        assert_eq!(ends(), (3, 0));
        region.close().unwrap();
        assert_eq!(ends(), (7, 0));
        *ON_END.lock() = None;
    }
}
