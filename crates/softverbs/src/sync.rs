//! The crate's atomics and lock, and its fences between processes.
//!
//! A sender publishes a message and then looks whether the receiver sleeps; a receiver says that
//! it will sleep and then looks for messages. One of the two must have a full fence, and it is the
//! one that goes to sleep: [`heavy_fence`] runs a barrier on every processor that runs a registered
//! process, so that [`light_fence`] need only stop the compiler. Where the kernel refuses,
//! a process says so in its segment and peers use full fences towards it.

mod arc;

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;

pub(crate) use arc::{Arc, Weak};
use atomic::{AtomicU32, Ordering, fence};

/// What everything takes that is shared without a lock: the processor's atomics, and in the models
/// (`crate::models`) loom's, which try every order that the memory model allows.
pub(crate) mod atomic {
    #[cfg(all(test, loom))]
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    #[cfg(not(all(test, loom)))]
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

/// A mutual exclusion for sections of some hundred nanoseconds: one atomic operation to take, a
/// store to release. It spins for a short time and then yields the processor.
pub(crate) struct Lock<T> {
    held: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands `T` to one thread at a time.
unsafe impl<T: Send> Send for Lock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> std::fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lock")
    }
}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            held: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.held
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
            // not `then_some`: a guard made in vain would release the holder's lock when dropped
            .then(|| Guard { lock: self })
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self.try_lock() {
            Some(guard) => guard,
            None => self.lock_slow(),
        }
    }

    #[cold]
    fn lock_slow(&self) -> Guard<'_, T> {
        let mut round = 0u32;
        loop {
            if self.held.load(Ordering::Relaxed) == 0
                && let Some(guard) = self.try_lock()
            {
                return guard;
            }
            pause(round);
            round = round.saturating_add(1);
        }
    }
}

/// One round of waiting for somebody else: spins, then yields the processor, then sleeps.
pub(crate) fn pause(round: u32) {
    #[cfg(all(test, loom))]
    loom::thread::yield_now();
    if cfg!(all(test, loom)) {
    } else if round < 64 {
        std::hint::spin_loop();
    } else if round < 1024 {
        std::thread::yield_now();
    } else {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

/// Holds a [`Lock`].
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard is the only way to the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(0, Ordering::Release);
    }
}

/// Set where this process could not register for barriers of others, so that its own light fences
/// must be full.
static FULL_FENCES: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

const MEMBARRIER_CMD_GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Whether this process takes part in barriers; registers it on the first call, which must come
/// before anything is shared.
pub(crate) fn barriers_work() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        let works = crate::environment::NO_MEMBARRIER.value().is_none()
            && membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED)
            && membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
        FULL_FENCES.store(!works, Ordering::SeqCst);
        works
    })
}

/// Orders this thread's earlier stores before its later loads, as seen by a process that runs
/// [`heavy_fence`]. `peer_has_barriers` is what that process says about itself.
#[inline]
pub(crate) fn light_fence(peer_has_barriers: bool) {
    // A barrier of the other side stands for a fence here (membarrier(2), its table of pairs): that is
    // how the models see it.
    if !cfg!(all(test, loom)) && peer_has_barriers && !FULL_FENCES.load(Ordering::Relaxed) {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// As [`light_fence`], towards whoever it may be: full once `somebody_has_none` says that one of them has no barriers. Who sets
/// that runs [`heavy_fence`] before that one may rely on it.
#[inline]
pub(crate) fn light_fence_towards_all(somebody_has_none: &std::sync::atomic::AtomicBool) {
    // What was stored before must not sink below the look: the barrier behind the flag comes before or after both.
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    light_fence(!somebody_has_none.load(Ordering::Relaxed));
}

/// The other half of [`light_fence`]: takes about a microsecond, for those who go to sleep.
pub(crate) fn heavy_fence() {
    fence(Ordering::SeqCst);
    // The models run without: there light fences are full ones.
    if !cfg!(all(test, loom)) && barriers_work() {
        membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
    }
    fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_lock_excludes() {
        let lock = Arc::new(Lock::new(0u64));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = Arc::clone(&lock);
                std::thread::spawn(move || {
                    for _ in 0..20_000 {
                        *lock.lock() += 1;
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*lock.lock(), 80_000);
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
    }
}
