//! One registration of a region whose pages may change, and the number of local operations that use
//! it.
//!
//! A refresh replaces registrations while operations with their lkeys are under way, for instance
//! posted receives. Such a registration ends with the last of these operations.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::sync::AtomicUsize;
use crate::verbs::{Lkey, Mr, Rkey};

/// Set in [`ReplaceableMr::uses`] when the registration is replaced.
const REPLACED: usize = 1 << (usize::BITS - 1);

/// A registration. Thread safe.
#[derive(Debug)]
pub(super) struct ReplaceableMr {
    lkey: Lkey,
    rkey: Rkey,
    /// Length in bytes.
    len: u64,
    /// Number of operations that use the lkey, and [`REPLACED`].
    uses: AtomicUsize,
    /// `None` after the end of the registration.
    mr: Mutex<Option<Mr>>,
}

/// A local operation's use of a registration: the registration does not end because of a refresh
/// until this is dropped. The end of the region ends it in any case.
///
/// Dropping the last use of a replaced registration deregisters it, without waiting for a request
/// that is being executed.
#[derive(Debug)]
pub(crate) struct InUse(Arc<ReplaceableMr>);

impl ReplaceableMr {
    pub(super) fn new(mr: Mr, len: u64) -> Self {
        Self {
            lkey: mr.lkey(),
            rkey: mr.rkey(),
            len,
            uses: AtomicUsize::new(0),
            mr: Mutex::new(Some(mr)),
        }
    }

    pub(super) fn lkey(&self) -> Lkey {
        self.lkey
    }

    pub(super) fn rkey(&self) -> Rkey {
        self.rkey
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Adds a use. The caller holds a lock under which the registration is not replaced.
    pub(super) fn hold(self: &Arc<Self>) -> InUse {
        // the caller's lock orders this before `replace`
        let before = self.uses.fetch_add(1, Ordering::Relaxed);
        debug_assert!(before & REPLACED == 0);
        InUse(Arc::clone(self))
    }

    /// Whether an operation uses the registration.
    pub(super) fn is_used(&self) -> bool {
        self.uses.load(Ordering::Acquire) & !REPLACED != 0
    }

    /// Marks a registration that [`Self::hold`] is not called for any more. Returns the
    /// registration if no operation uses it; otherwise the last operation ends it.
    pub(super) fn replace(&self) -> Option<Mr> {
        let uses = self.uses.fetch_or(REPLACED, Ordering::AcqRel);
        if uses == 0 { self.take() } else { None }
    }

    /// Takes the registration, unless it has ended. Waits until a thread that is ending it has done
    /// so.
    pub(super) fn take(&self) -> Option<Mr> {
        self.mr.lock().take()
    }

    /// As [`Self::replace`], of a registration that peers do not use; ends it if no operation uses
    /// it. Returns whether it has ended.
    pub(super) fn end_replaced(&self) -> bool {
        let uses = self.uses.fetch_or(REPLACED, Ordering::AcqRel);
        uses == 0 && self.end()
    }

    /// Ends a registration, without waiting for a request that is being executed. Returns whether
    /// it has ended; if not, the caller can repeat the call.
    pub(super) fn end(&self) -> bool {
        let mut mr = self.mr.lock();
        *mr = mr.take().and_then(|mr| mr.deregister_now().err());
        mr.is_none()
    }

    #[cfg(test)]
    pub(super) fn is_over(&self) -> bool {
        self.mr.lock().is_none()
    }
}

impl InUse {
    /// Whether both are uses of one registration.
    #[inline]
    pub(in crate::mr) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if self.0.uses.fetch_sub(1, Ordering::AcqRel) == REPLACED | 1 {
            self.0.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::verbs::devices;

    #[allow(unsafe_code, reason = "registers memory")]
    fn replaceable(domain: &Domain, memory: &[u8]) -> Arc<ReplaceableMr> {
        // SAFETY: tests drop the registration before the memory.
        let mr = unsafe { Mr::register(domain.pd(), memory.as_ptr().cast(), memory.len(), 0) };
        Arc::new(ReplaceableMr::new(mr.unwrap(), memory.len() as u64))
    }

    #[test]
    fn the_last_use_ends_a_replaced_registration() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let memory = [0; 64];
        let mr = replaceable(&domain, &memory);
        drop(mr.hold());
        assert!(!mr.is_over(), "it is not replaced");
        let uses = [mr.hold(), mr.hold()];
        assert!(mr.replace().is_none());
        let [first, second] = uses;
        drop(first);
        assert!(mr.is_used() && !mr.is_over());
        drop(second);
        assert!(!mr.is_used() && mr.is_over());

        let mr = replaceable(&domain, &memory);
        assert!(mr.replace().is_some(), "without uses it is the caller's");
        assert!(mr.is_over());

        // the end of the region does not wait for uses
        let mr = replaceable(&domain, &memory);
        let used = mr.hold();
        assert!(mr.take().is_some());
        drop(used);
        assert!(mr.take().is_none());
    }

    /// Uses end while the registration is replaced: exactly one thread ends it.
    #[test]
    fn one_thread_ends_it() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let memory = [0; 64];
        for _ in 0..200 {
            let mr = replaceable(&domain, &memory);
            let uses = [mr.hold(), mr.hold()];
            let replaced = std::thread::scope(|scope| {
                for used in uses {
                    scope.spawn(move || drop(used));
                }
                mr.replace()
            });
            drop(replaced);
            assert!(mr.is_over());
        }
    }
}
