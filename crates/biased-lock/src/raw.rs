//! The protocol of the mutex. There are two ways to lock it: `enter`, which `leave` ends, and
//! `lock_others` or `try_lock_others`, which `unlock_others` ends.

use crate::platform::{barriers_work, heavy_fence, light_fence};
use crate::sync::{
    AtomicBool, AtomicUsize, Ordering, Ordinary, lock_ordinary, try_ordinary, unlock_ordinary,
};
#[cfg(not(all(test, loom)))]
use crate::sync::{is_locked, ordinary};

/// How many times in a row a thread locks the mutex before it gets the first bias.
pub const BIAS_RUN: usize = if cfg!(all(test, loom)) { 1 } else { 64 };

/// The longest run that a bias can need.
const MAX_BIAS_RUN: usize = 1 << 16;

/// Slots for threads that have had the bias.
const SLOTS: usize = if cfg!(all(test, loom)) { 2 } else { 8 };

/// The slot of one thread.
struct ThreadSlot {
    /// The thread, or 0: written once, under `others`.
    owner: AtomicUsize,
    /// Written by the owner: it has the mutex, or is about to find out that it has not.
    inside: AtomicBool,
}

/// The mutex of [`Mutex`](crate::Mutex).
pub struct RawMutex {
    /// The thread that needs neither `others` nor an atomic operation, or 0.
    bias: AtomicUsize,
    slots: [ThreadSlot; SLOTS],
    /// The mutex of all threads without the bias. Protects what follows.
    others: Ordinary,
    /// The thread that has locked `others` last, and how many times in a row.
    last: AtomicUsize,
    run: AtomicUsize,
    /// The run that the next bias needs. 0: [`BIAS_RUN`]; `usize::MAX`: there is no barrier.
    needed: AtomicUsize,
    /// The thread that gets the bias when the mutex is unlocked, or 0.
    returned: AtomicUsize,
}

impl std::fmt::Debug for RawMutex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RawMutex")
    }
}

/// The slot that a thread may have.
#[inline(always)]
const fn slot(thread: usize) -> usize {
    const BITS: u32 = SLOTS.trailing_zeros();
    // the golden ratio: thread pointers differ in few bits
    (thread as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) as usize >> (usize::BITS - BITS)
}

impl RawMutex {
    #[cfg(not(all(test, loom)))]
    pub(crate) const fn new() -> Self {
        Self {
            bias: AtomicUsize::new(0),
            slots: [const {
                ThreadSlot {
                    owner: AtomicUsize::new(0),
                    inside: AtomicBool::new(false),
                }
            }; SLOTS],
            others: ordinary(),
            last: AtomicUsize::new(0),
            run: AtomicUsize::new(0),
            needed: AtomicUsize::new(0),
            returned: AtomicUsize::new(0),
        }
    }

    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self {
            bias: AtomicUsize::new(0),
            slots: std::array::from_fn(|_| ThreadSlot {
                owner: AtomicUsize::new(0),
                inside: AtomicBool::new(false),
            }),
            others: Ordinary::new(false),
            last: AtomicUsize::new(0),
            run: AtomicUsize::new(0),
            needed: AtomicUsize::new(0),
            returned: AtomicUsize::new(0),
        }
    }

    /// Locks the mutex if the thread has the bias. Returns the thread's slot.
    #[inline(always)]
    pub(crate) fn enter(&self, thread: usize) -> Option<usize> {
        if self.bias.load(Ordering::Relaxed) != thread {
            return None;
        }
        let slot = slot(thread);
        let inside = &self.slots[slot].inside;
        if inside.load(Ordering::Relaxed) {
            // the thread has the mutex already: a trial fails, and a lock never returns
            return None;
        }
        inside.store(true, Ordering::Relaxed);
        light_fence();
        if self.bias.load(Ordering::Acquire) == thread {
            return Some(slot);
        }
        inside.store(false, Ordering::Release);
        None
    }

    /// Unlocks the mutex for the thread that [`Self::enter`] has given the slot.
    #[inline(always)]
    pub(crate) fn leave(&self, slot: usize) {
        self.slots[slot % SLOTS]
            .inside
            .store(false, Ordering::Release);
    }

    /// Locks the mutex for a thread without the bias.
    #[cold]
    #[inline(never)]
    pub(crate) fn lock_others(&self, thread: usize, visits: fn() -> bool) {
        lock_ordinary(&self.others);
        let bias = self.bias.load(Ordering::Relaxed);
        if bias != 0 {
            self.close(bias);
        }
        self.entered(thread, visits(), bias);
    }

    /// Locks the mutex for a thread without the bias, if no thread has it.
    #[cold]
    #[inline(never)]
    pub(crate) fn try_lock_others(&self, thread: usize, visits: fn() -> bool) -> bool {
        if !try_ordinary(&self.others) {
            return false;
        }
        let bias = self.bias.load(Ordering::Relaxed);
        if bias != 0 {
            let inside = &self.slots[slot(bias)].inside;
            // the barrier is not needed to see that the mutex is locked
            let mut locked = inside.load(Ordering::Relaxed);
            if !locked {
                self.bias.store(0, Ordering::Relaxed);
                heavy_fence();
                locked = inside.load(Ordering::Acquire);
            }
            if locked {
                self.bias.store(bias, Ordering::Release);
                unlock_ordinary(&self.others);
                return false;
            }
        }
        self.entered(thread, visits(), bias);
        true
    }

    /// Takes the bias of another thread away, and waits until it is outside.
    fn close(&self, bias: usize) {
        self.bias.store(0, Ordering::Relaxed);
        heavy_fence();
        let inside = &self.slots[slot(bias)].inside;
        let mut round = 0;
        while inside.load(Ordering::Acquire) {
            wait(round);
            round += 1;
        }
    }

    /// The thread has the mutex by `others`, and `bias` was the bias before. There is none until
    /// the thread unlocks it.
    fn entered(&self, thread: usize, visits: bool, bias: usize) {
        let set = |word: &AtomicUsize, value| word.store(value, Ordering::Relaxed);
        if visits || bias == thread {
            set(&self.returned, bias);
            return;
        }
        let needed = match self.needed.load(Ordering::Relaxed) {
            0 => BIAS_RUN,
            needed => needed,
        };
        if bias != 0 {
            set(&self.needed, MAX_BIAS_RUN.min(2 * needed));
            set(&self.run, 0);
        }
        if self.last.load(Ordering::Relaxed) != thread {
            set(&self.last, thread);
            set(&self.run, 0);
        }
        let run = self.run.load(Ordering::Relaxed) + 1;
        set(&self.run, run);
        if run >= needed {
            self.give(thread);
        }
    }

    /// Whether a thread has the mutex.
    #[cfg(not(all(test, loom)))]
    pub(crate) fn is_taken(&self) -> bool {
        let bias = self.bias.load(Ordering::Relaxed);
        let inside = &self.slots[slot(bias)].inside;
        is_locked(&self.others) || bias != 0 && inside.load(Ordering::Relaxed)
    }

    /// Gives the bias to the thread, which has the mutex by `others`.
    fn give(&self, thread: usize) {
        let set = |word: &AtomicUsize, value| word.store(value, Ordering::Relaxed);
        set(&self.run, 0);
        let slot = &self.slots[slot(thread)];
        let owner = slot.owner.load(Ordering::Relaxed);
        if owner != 0 && owner != thread {
            return;
        }
        if owner == 0 {
            if !barriers_work() {
                set(&self.needed, usize::MAX);
                return;
            }
            set(&slot.owner, thread);
        }
        set(&self.returned, thread);
    }

    /// Unlocks the mutex for a thread that has it by `others`.
    #[cold]
    #[inline(never)]
    pub(crate) fn unlock_others(&self) {
        let returned = self.returned.load(Ordering::Relaxed);
        if returned != 0 {
            self.returned.store(0, Ordering::Relaxed);
            // the thread reads what this one has written
            self.bias.store(returned, Ordering::Release);
        }
        unlock_ordinary(&self.others);
    }
}

/// One round of a wait for the owner of the bias.
fn wait(round: u32) {
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
