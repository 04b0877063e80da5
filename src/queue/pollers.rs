//! The threads that poll the descriptor of a counter ([`Counter::fd`](super::Counter::fd)).
//!
//! They share one descriptor, and each waits for a value of its own. A change makes the descriptor
//! readable, and a thread that sleeps again clears it, perhaps before another thread that was woken
//! by the same change has been scheduled: that thread would find nothing to read, and sleep on. So
//! each thread has an entry with the numbers that it has read, and whether it was told to wait. A
//! thread is not told to wait while another one was, has not called the counter since, and does not
//! have the present numbers: the descriptor stays readable until that thread has come back.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Number of times that a thread which was told to wait keeps others from it. Each of them pauses
/// then, so that these are about 1 s; afterwards the thread counts as one that waits no longer.
const PATIENCE: u32 = 10_000;

thread_local! {
    /// Identifies a thread that has polled a counter, and lives as long as the thread.
    static THREAD: OnceCell<Arc<()>> = const { OnceCell::new() };
}

/// A thread.
#[derive(Debug)]
struct Poller {
    thread: Weak<()>,
    /// The two numbers that the thread has last read, or that were reported to it; `None`: the
    /// application has changed the number since.
    read: [Option<u64>; 2],
    /// The number of times that the thread may yet keep others from waiting, if it was told to wait
    /// and has not called the counter since; otherwise 0.
    patience: u32,
}

impl Poller {
    /// Whether the thread may sleep, and a change has to wake it.
    fn is_to_wake(&mut self, numbers: [u64; 2]) -> bool {
        let is_to_wake = self.patience != 0 && self.read != numbers.map(Some);
        self.patience -= u32::from(is_to_wake);
        is_to_wake
    }
}

/// The answer to a thread that is about to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// A number has changed since the thread has read it.
    Changed,
    /// Another thread has to wake up first.
    Busy,
    /// The numbers are those that the thread has read.
    Unchanged,
}

#[derive(Debug)]
struct Threads {
    /// The numbers that a thread without an entry has read.
    first: [Option<u64>; 2],
    entries: Vec<Poller>,
}

/// The threads of one counter. Thread safe.
#[derive(Debug)]
pub(super) struct Pollers {
    /// Whether any thread has an entry.
    any: AtomicBool,
    threads: Mutex<Threads>,
}

impl Pollers {
    /// For a counter whose numbers are 0.
    pub(super) fn new() -> Self {
        Self {
            any: AtomicBool::new(false),
            threads: Mutex::new(Threads {
                first: [Some(0); 2],
                entries: Vec::new(),
            }),
        }
    }

    /// Returns one of the numbers, which the calling thread reads.
    #[inline]
    pub(super) fn read(&self, which: usize, number: &AtomicU64) -> u64 {
        if self.any.load(Ordering::Relaxed) {
            return self.read_as_poller(which, number);
        }
        number.load(Ordering::Acquire)
    }

    #[cold]
    fn read_as_poller(&self, which: usize, number: &AtomicU64) -> u64 {
        let mut read = None;
        self.with_own(|own| {
            // under the lock: a later change by the application is one that the thread has not read
            let value = number.load(Ordering::Acquire);
            own.read[which] = Some(value);
            read = Some(value);
        });
        read.unwrap_or_else(|| number.load(Ordering::Acquire))
    }

    /// The calling thread calls the counter, so it does not sleep.
    #[inline]
    pub(super) fn come_back(&self) {
        if self.any.load(Ordering::Relaxed) {
            self.with_own(|_| ());
        }
    }

    /// Changes the entry of the calling thread, if it has one. It does not sleep.
    #[cold]
    fn with_own(&self, change: impl FnOnce(&mut Poller)) {
        // while the thread ends, it has no entry
        let _ = THREAD.try_with(|thread| {
            let Some(thread) = thread.get() else { return };
            let mut threads = self.threads.lock();
            let mut entries = threads.entries.iter_mut();
            if let Some(own) = entries.find(|entry| entry.thread.as_ptr() == Arc::as_ptr(thread)) {
                own.patience = 0;
                change(own);
            }
        });
    }

    /// The application has changed a number: no thread has read it.
    pub(super) fn forget(&self, which: usize) {
        let mut threads = self.threads.lock();
        threads.first[which] = None;
        for entry in &mut threads.entries {
            entry.read[which] = None;
        }
    }

    /// Answers the calling thread, which has armed the counter and is about to wait if the numbers
    /// are unchanged and `waits`. After [`Answer::Changed`] it has the present numbers.
    #[cold]
    pub(super) fn ask(&self, numbers: impl FnOnce() -> [u64; 2], waits: bool) -> Answer {
        // without an identity, while it ends, a thread gets a new entry each time
        let thread = THREAD.try_with(|thread| Arc::downgrade(thread.get_or_init(Arc::default)));
        let thread = thread.unwrap_or_default();
        let mut threads = self.threads.lock();
        // under the lock: a change that these numbers do not have is behind the entry of this
        // thread, so that the next thread that asks finds that this one has to wake up
        let numbers = numbers();
        // those of threads that have ended keep nobody from waiting
        let entries = &mut threads.entries;
        entries.retain(|entry| entry.thread.strong_count() != 0);
        let own = entries
            .iter()
            .position(|entry| entry.thread.ptr_eq(&thread));
        let own = own.map(|at| entries.swap_remove(at));
        let mut busy = false;
        for entry in entries.iter_mut() {
            busy |= entry.is_to_wake(numbers);
        }
        let read = own.map_or(threads.first, |own| own.read);
        let answer = if read != numbers.map(Some) {
            Answer::Changed
        } else if busy {
            Answer::Busy
        } else {
            Answer::Unchanged
        };
        threads.entries.push(Poller {
            thread,
            read: numbers.map(Some),
            patience: match waits && answer == Answer::Unchanged {
                true => PATIENCE,
                false => 0,
            },
        });
        self.any.store(true, Ordering::Relaxed);
        answer
    }
}
