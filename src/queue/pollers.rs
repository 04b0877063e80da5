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
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a thread that was told to wait can keep other threads from waiting. The time begins
/// with the first thread that is refused for it. Afterwards it counts as a thread that does not
/// wait.
const PATIENCE: Duration = Duration::from_secs(1);

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
    /// Whether the thread was told to wait, and has not called the counter since.
    sleeps: bool,
    /// When another thread was first refused for it, since it was told to wait.
    since: Option<Instant>,
}

impl Poller {
    /// The thread calls the counter.
    fn come_back(&mut self) {
        self.sleeps = false;
        self.since = None;
    }

    /// Whether the thread may sleep, and a change has to wake it. It then keeps another thread from
    /// waiting, at most for `patience`.
    fn is_to_wake(&mut self, numbers: [u64; 2], patience: Duration) -> bool {
        self.sleeps
            && self.read != numbers.map(Some)
            && self.since.get_or_insert_with(Instant::now).elapsed() < patience
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
    /// [`PATIENCE`], except in tests.
    patience: Duration,
}

impl Threads {
    /// Threads that have ended keep no other one from waiting.
    fn drop_ended(&mut self) {
        self.entries
            .retain(|entry| entry.thread.strong_count() != 0);
    }
}

/// The threads of one counter. Thread safe.
#[derive(Debug)]
pub(super) struct Pollers {
    /// Whether any thread has an entry; changed with `threads` locked.
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
                patience: PATIENCE,
            }),
        }
    }

    /// Replaces [`PATIENCE`].
    #[cfg(test)]
    pub(super) fn set_patience(&self, patience: Duration) {
        self.threads.lock().patience = patience;
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
                own.come_back();
                change(own);
            } else {
                threads.drop_ended();
                // without entries, reads are fast again
                let any = !threads.entries.is_empty();
                self.any.store(any, Ordering::Relaxed);
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
        threads.drop_ended();
        let Threads {
            first,
            entries,
            patience,
        } = &mut *threads;
        let own = entries
            .iter()
            .position(|entry| entry.thread.ptr_eq(&thread));
        let own = own.map(|at| entries.swap_remove(at));
        // asks each of them: its time begins, if it has not begun
        let is_busy = |busy, other: &mut Poller| other.is_to_wake(numbers, *patience) || busy;
        let answer = if own.map_or(*first, |own| own.read) != numbers.map(Some) {
            Answer::Changed
        } else if entries.iter_mut().fold(false, is_busy) {
            Answer::Busy
        } else {
            Answer::Unchanged
        };
        entries.push(Poller {
            thread,
            read: numbers.map(Some),
            sleeps: waits && answer == Answer::Unchanged,
            since: None,
        });
        self.any.store(true, Ordering::Relaxed);
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Asks for a thread that waits for a change of the first number.
    fn ask(pollers: &Pollers, value: u64) -> Answer {
        pollers.ask(|| [value, 0], true)
    }

    /// Runs a test while another thread lives, which was told to wait, and then did `last`.
    fn beside_another(last: fn(&Pollers), test: impl FnOnce(&Pollers)) {
        let pollers = Pollers::new();
        std::thread::scope(|scope| {
            let ((ready, begin), (end, ended)) = (channel(), channel::<()>());
            let pollers = &pollers;
            scope.spawn(move || {
                assert_eq!(ask(pollers, 0), Answer::Unchanged);
                last(pollers);
                ready.send(()).unwrap();
                let _ = ended.recv();
            });
            begin.recv().unwrap();
            test(pollers);
            drop(end);
        });
    }

    /// The thread that was told to wait may not be scheduled while another one, which does not
    /// sleep, asks behind each of many changes.
    #[test]
    fn changes_that_are_reported_use_up_no_patience() {
        beside_another(
            |_| (),
            |pollers| {
                for value in 1..=20_000 {
                    assert_eq!(ask(pollers, value), Answer::Changed);
                }
                assert_eq!(ask(pollers, 20_000), Answer::Busy);
            },
        );
    }

    #[test]
    fn a_thread_that_comes_back_keeps_no_other_one_from_waiting() {
        beside_another(Pollers::come_back, |pollers| {
            assert_eq!(ask(pollers, 1), Answer::Changed);
            assert_eq!(ask(pollers, 1), Answer::Unchanged);
        });
    }

    /// When the threads that have polled a counter have ended, others read it without a lock.
    #[test]
    fn the_entries_of_ended_threads_are_removed() {
        let pollers = Pollers::new();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&pollers, 0)).join();
            assert_eq!(asked.unwrap(), Answer::Unchanged);
        });
        // this thread polls another counter
        assert_eq!(ask(&Pollers::new(), 0), Answer::Unchanged);
        assert!(pollers.any.load(Ordering::Relaxed));
        assert_eq!(pollers.read(0, &AtomicU64::new(5)), 5);
        assert!(!pollers.any.load(Ordering::Relaxed));
    }
}
