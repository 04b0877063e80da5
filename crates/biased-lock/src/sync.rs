//! Atomics, and the ordinary mutex below the bias: the usual ones, or loom's in the models.

#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[cfg(all(test, loom))]
pub(crate) use model::{Ordinary, lock_ordinary, try_ordinary, unlock_ordinary};
#[cfg(not(all(test, loom)))]
pub(crate) use real::{
    Ordinary, is_locked, lock_ordinary, ordinary, try_ordinary, unlock_ordinary,
};

#[cfg(not(all(test, loom)))]
mod real {
    #![allow(unsafe_code)] // unlock without a guard

    pub(crate) use parking_lot::RawMutex as Ordinary;
    use parking_lot::lock_api::{GuardNoSend, RawMutex as _};

    pub(crate) const fn ordinary() -> Ordinary {
        Ordinary::INIT
    }

    pub(crate) fn lock_ordinary(mutex: &Ordinary) {
        let _: GuardNoSend = mutex.lock();
    }

    pub(crate) fn try_ordinary(mutex: &Ordinary) -> bool {
        mutex.try_lock().is_some()
    }

    pub(crate) fn is_locked(mutex: &Ordinary) -> bool {
        mutex.is_locked()
    }

    /// For the thread that has locked it.
    pub(crate) fn unlock_ordinary(mutex: &Ordinary) {
        // SAFETY: the callers, all in `raw.rs`, have locked it.
        unsafe { mutex.unlock(GuardNoSend::new()) };
    }
}

/// A mutex for the models: loom's own has no calls without a guard.
#[cfg(all(test, loom))]
mod model {
    use super::{AtomicBool, Ordering};

    pub(crate) type Ordinary = AtomicBool;

    pub(crate) fn lock_ordinary(mutex: &Ordinary) {
        while !try_ordinary(mutex) {
            loom::thread::yield_now();
        }
    }

    pub(crate) fn try_ordinary(mutex: &Ordinary) -> bool {
        mutex
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// For the thread that has locked it.
    pub(crate) fn unlock_ordinary(mutex: &Ordinary) {
        mutex.store(false, Ordering::Release);
    }
}
