//! The crate's atomics and lock, and its fences between processes.
//!
//! A sender publishes a message and then checks whether the receiver sleeps; a receiver publishes
//! that it will sleep and then checks for messages. One of the two needs a full fence. It is the
//! receiver that goes to sleep: [`heavy_fence`] runs a barrier (membarrier(2)) on every processor
//! that runs a registered process, so that [`light_fence`] is only a compiler fence. If the kernel
//! refuses membarrier, the process publishes that in its segment, and its peers use full fences
//! towards it. If the kernel refuses it later, [`heavy_fence`] waits instead.

mod arc;

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};

pub(crate) use arc::{Arc, Weak};
use atomic::{AtomicU32, Ordering, fence};

use crate::sys;

/// The atomics for all state that is shared without a lock: the processor's, and in the models
/// (`crate::models`) loom's, which try every order that the memory model allows.
pub(crate) mod atomic {
    #[cfg(all(test, loom))]
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    #[cfg(not(all(test, loom)))]
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

/// A spin lock for sections of less than a microsecond: one atomic operation to acquire, one store
/// to release. A waiting thread spins 64 rounds, then yields the processor, then sleeps 50
/// microseconds at a time.
///
/// A thread can also wait for the present holder alone ([`Self::mark_holder`]), however often other
/// threads acquire the lock then.
pub(crate) struct Lock<T> {
    /// 0: free; [`HELD`]; or held, with the [`Mark`] of a thread that waits for the holder.
    held: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives access to `T` to one thread at a time.
unsafe impl<T: Send> Send for Lock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Lock<T> {}

/// What the word of a lock has while the lock is held and its holder has no mark.
const HELD: u32 = 1;

/// Whether acquiring a lock is a full fence: on x86-64 each locked instruction is one. The models
/// run a fence behind it instead.
const ACQUIRING_FENCES: bool = cfg!(any(target_arch = "x86_64", all(test, loom)));

/// What a thread stores in a lock's word to recognize the holder: another value than [`HELD`], and
/// than the marks of the 2^31 calls before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(u32);

impl Mark {
    pub(crate) fn new() -> Self {
        // not a word of the models: only its values matter, not their order
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) | 1 << 31)
    }
}

/// A thread that held a lock when it was marked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder<'a> {
    held: &'a AtomicU32,
    mark: u32,
}

impl Holder<'_> {
    /// Whether the thread still holds the lock, and has not called [`Lock::let_pass`] since. If
    /// not, the caller runs an acquire fence before it relies on that.
    pub(crate) fn stays(&self) -> bool {
        self.held.load(Ordering::Relaxed) == self.mark
    }
}

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

    /// Marks the thread that holds the lock; `None` if none does. Costs a holder nothing. The
    /// caller has stored what later holders are to find, and has run a full fence since. A thread
    /// that acquires the lock after this call finds it, also before [`Holder::stays`] is false.
    ///
    /// Why a later holder finds it. If the lock is free: acquiring it is a full fence, or reads
    /// what the exchange of zeros below has stored. If it is held: the holder's release follows
    /// this call's load of the word, and the later holder has read that release. On x86-64 and
    /// AArch64 a store that one other processor can read is visible to all, so the caller's earlier
    /// stores are too.
    pub(crate) fn mark_holder(&self, mark: Mark) -> Option<Holder<'_>> {
        let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
        let found = match ACQUIRING_FENCES {
            true => self.held.load(relaxed),
            false => {
                let exchanged = self.held.compare_exchange(0, 0, release, relaxed);
                exchanged.unwrap_or_else(|found| found)
            }
        };
        let mark = match found {
            0 => return None,
            HELD => match self.held.compare_exchange(HELD, mark.0, release, relaxed) {
                Ok(_) => mark.0,
                Err(0) => return None,
                // the mark of another thread, or of a later holder
                Err(other) => other,
            },
            other => other,
        };
        let held = &self.held;
        Some(Holder { held, mark })
    }

    /// To be called by the thread that holds the lock, where it uses nothing that it has found
    /// under the lock before: threads that wait for the present holder need not wait for the rest
    /// of a long section. One load if none waits.
    #[inline(always)]
    pub(crate) fn let_pass(&self) {
        if self.held.load(Ordering::Relaxed) > HELD {
            self.pass_marked();
        }
    }

    /// Whether a thread waits for the present holder.
    #[cfg(test)]
    pub(crate) fn is_awaited(&self) -> bool {
        self.held.load(Ordering::Relaxed) > HELD
    }

    #[cold]
    fn pass_marked(&self) {
        self.held.swap(HELD, Ordering::AcqRel);
        // before the later look-ups, as acquiring the lock is
        fence(Ordering::SeqCst);
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

/// One round of waiting for another thread or process: spins for 64 rounds, yields the processor up
/// to round 1024, then sleeps 50 microseconds.
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
        // SAFETY: while the guard lives, the lock admits no other access to the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: while the guard lives, the lock admits no other access to the value.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        const RELEASE: Ordering = Ordering::Release;
        if cfg!(all(test, loom)) {
            // `mark_holder` exchanges the holder's own value, so its mark precedes this store in
            // the order of the word; loom does not order a store behind such an exchange
            self.lock.held.swap(0, RELEASE);
        } else {
            self.lock.held.store(0, RELEASE);
        }
    }
}

/// Set if this process could not register for barriers of other processes: its own light fences
/// must be full fences.
static FULL_FENCES: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
/// [`register_for_barriers`] has returned.
static REGISTERED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

const MEMBARRIER_CMD_GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the system call takes no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Registers this process for barriers, before it shares memory. Returns whether it takes part in
/// them. A forked child is registered anew, whatever it has from its parent.
pub(crate) fn register_for_barriers() -> bool {
    let works = crate::environment::NO_MEMBARRIER.value().is_none()
        && membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED)
        && membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
    FULL_FENCES.store(!works, Ordering::SeqCst);
    REGISTERED.store(true, Ordering::SeqCst);
    works
}

/// Whether this process takes part in barriers. Registers it if [`register_for_barriers`] was not
/// called.
pub(crate) fn barriers_work() -> bool {
    if REGISTERED.load(Ordering::Acquire) {
        !FULL_FENCES.load(Ordering::Relaxed)
    } else {
        register_for_barriers()
    }
}

/// Orders this thread's earlier stores before its later loads, as seen by a process that runs
/// [`heavy_fence`]. `peer_has_barriers`: that process's segment states that it runs barriers.
#[inline]
pub(crate) fn light_fence(peer_has_barriers: bool) {
    // A barrier of the other side acts as a fence here (membarrier(2), its table of pairs). The
    // models use a full fence for it.
    known_light_fence(are_light(peer_has_barriers));
}

/// Whether light fences towards a process are only compiler fences. Does not change while this
/// process shares memory.
#[inline]
pub(crate) fn are_light(peer_has_barriers: bool) -> bool {
    peer_has_barriers && !FULL_FENCES.load(Ordering::Relaxed)
}

/// As [`light_fence`], with the result of [`are_light`].
#[inline(always)]
pub(crate) fn known_light_fence(light: bool) {
    if !cfg!(all(test, loom)) && light {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// As [`light_fence`], towards any process: a full fence once `somebody_has_none` is set, that is,
/// one of the processes has no barriers. The thread that sets it runs [`heavy_fence`] before the
/// process without barriers may rely on full fences.
#[inline]
pub(crate) fn light_fence_towards_all(somebody_has_none: &std::sync::atomic::AtomicBool) {
    // The earlier stores must not move below the load of the flag: the barrier that follows the
    // store of the flag then comes before or after both.
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    light_fence(!somebody_has_none.load(Ordering::Relaxed));
}

/// The counterpart of [`light_fence`], run by the side that goes to sleep: a full barrier on every
/// processor that runs a registered process.
pub(crate) fn heavy_fence() {
    fence(Ordering::SeqCst);
    // The models do not run membarrier: there, light fences are full fences.
    if !cfg!(all(test, loom)) && barriers_work() && !membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) {
        outlast_stores();
    }
    fence(Ordering::SeqCst);
    #[cfg(test)]
    heavy_fences::note();
}

/// The heavy fences that a thread has run, for tests.
#[cfg(test)]
pub(crate) mod heavy_fences {
    use std::cell::Cell;

    thread_local!(static COUNT: Cell<u64> = const { Cell::new(0) });

    pub(super) fn note() {
        COUNT.set(COUNT.get() + 1);
    }

    /// Their number, for this thread.
    pub(crate) fn count() -> u64 {
        COUNT.get()
    }
}

/// Time after which the stores of all processors are visible to each other, in nanoseconds. A
/// processor holds a store back until it has the cache line: less than 1 µs, and some microseconds
/// if many processors write to that line. Interrupts and changes of threads do not prolong this.
const STORES_NS: u64 = 100_000;

/// Replaces a barrier that the kernel refuses, although it ran one when the process registered: a
/// filter of system calls was installed since, or the kernel has no memory. Peers have compiler
/// fences alone towards this process. So each of them has executed its earlier store before its
/// later load, and only the store may not be visible yet.
#[cold]
fn outlast_stores() {
    static SAID: std::sync::Once = std::sync::Once::new();
    let error = sys::Errno::last();
    SAID.call_once(|| {
        crate::log::say(&format!(
            "softverbs: the kernel refuses membarrier(2), which it has allowed when the device was opened (errno {}): each barrier of this process takes 0.1 ms from now on",
            error.0
        ));
    });
    let begin = sys::now_ns();
    while sys::now_ns().saturating_sub(begin) < STORES_NS {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::refuse::refuse;
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

    /// A filter that is installed later takes the barriers away from a thread.
    #[test]
    fn a_refused_barrier_is_replaced() {
        if !barriers_work() {
            println!("skipped: the kernel has no barriers, or the environment forbids them");
            return;
        }
        let shortest = || {
            let durations = (0..20).map(|_| {
                let begin = sys::now_ns();
                heavy_fence();
                sys::now_ns() - begin
            });
            durations.min().unwrap()
        };
        assert!(
            shortest() < STORES_NS,
            "a barrier takes as long as the wait"
        );
        let refused = std::thread::spawn(move || {
            refuse(&[libc::SYS_membarrier]);
            shortest()
        });
        assert!(refused.join().unwrap() >= STORES_NS);
    }

    #[test]
    fn a_mark_is_of_the_present_holder() {
        let lock = Lock::new(());
        let mark = || lock.mark_holder(Mark::new());
        assert!(mark().is_none());
        let first = lock.lock();
        let [one, same] = [mark().unwrap(), mark().unwrap()];
        assert!(one.stays() && same.stays() && lock.try_lock().is_none());
        drop(first);
        assert!(!one.stays() && lock.try_lock().is_some());
        let _second = lock.lock();
        assert!(!one.stays() && !same.stays(), "a later holder is awaited");
        let later = mark().unwrap();
        assert!(later.stays() && !one.stays());
        lock.let_pass();
        assert!(!later.stays() && lock.try_lock().is_none());
        lock.let_pass();
        assert!(lock.try_lock().is_none());
    }
}
