//! Counters of completed operations.
//!
//! Whoever polls a completion queue moves the counters of the endpoints on it: reading a counter,
//! or waiting for it, polls those queues. What it finds for the application to read stays in
//! their backlogs.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::queue::CompletionQueue;
use crate::queue::wait::deadline;

/// Reads of a counter between two looks at the clock, for silent peers.
const READS: u32 = 32;
/// How long a waiting thread only gives way before it begins to sleep.
const AWAKE: Duration = Duration::from_micros(200);
/// Its longest sleep: completions of queues that have no channel wake nobody.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// A counter. Thread safe.
#[derive(Debug)]
pub struct Counter {
    domain: Arc<Domain>,
    waitable: bool,
    value: AtomicU64,
    errors: AtomicU64,
    reads: AtomicU32,
    /// The queues whose polling moves it.
    queues: Mutex<Vec<Weak<CompletionQueue>>>,
}

impl Counter {
    /// Opens a counter; `waitable` if [`Self::wait`] shall work.
    pub fn open(domain: &Arc<Domain>, waitable: bool) -> Arc<Self> {
        Arc::new(Self {
            domain: Arc::clone(domain),
            waitable,
            value: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            reads: AtomicU32::new(0),
            queues: Mutex::default(),
        })
    }

    /// Operations that succeeded (`fi_cntr_read(3)`). Makes progress; never blocks.
    pub fn read(&self) -> u64 {
        self.progress();
        self.value.load(Ordering::Acquire)
    }

    /// Operations that failed (`fi_cntr_readerr(3)`). Makes progress; never blocks.
    pub fn read_errors(&self) -> u64 {
        self.progress();
        self.errors.load(Ordering::Acquire)
    }

    /// Adds to the value. It wraps.
    pub fn add(&self, value: u64) {
        self.value.fetch_add(value, Ordering::AcqRel);
    }

    /// Adds to the number of failures.
    pub fn add_errors(&self, value: u64) {
        self.errors.fetch_add(value, Ordering::AcqRel);
    }

    /// Sets the value.
    pub fn set(&self, value: u64) {
        self.value.store(value, Ordering::Release);
    }

    /// Sets the number of failures.
    pub fn set_errors(&self, value: u64) {
        self.errors.store(value, Ordering::Release);
    }

    /// Waits until the value is at least `threshold`. `None` waits for ever.
    ///
    /// # Errors
    /// - `EAVAIL`: the number of failures has changed meanwhile.
    /// - `ETIMEDOUT`: the time is over.
    /// - `EINVAL`: the counter was opened without waiting.
    pub fn wait(&self, threshold: u64, timeout: Option<Duration>) -> Result<()> {
        if !self.waitable {
            return Err(FiErrno::EINVAL);
        }
        let deadline = deadline(timeout);
        let errors = self.errors.load(Ordering::Acquire);
        let start = Instant::now();
        loop {
            if self.read() >= threshold {
                return Ok(());
            }
            if self.errors.load(Ordering::Acquire) != errors {
                return Err(FiErrno::EAVAIL);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(FiErrno::ETIMEDOUT);
            }
            let waited = now - start;
            if waited < AWAKE {
                std::thread::yield_now();
            } else {
                // an eighth of the time is the most that a completion is found too late
                std::thread::sleep((waited / 8).min(LONGEST_SLEEP));
            }
        }
    }

    /// The domain it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Polling this queue moves the counter from now on.
    pub(crate) fn watch(&self, queue: &Arc<CompletionQueue>) {
        let mut queues = self.queues.lock();
        let new = Arc::downgrade(queue);
        if !queues.iter().any(|known| known.ptr_eq(&new)) {
            queues.push(new);
        }
    }

    fn progress(&self) {
        self.queues.lock().retain(|queue| {
            let queue = queue.upgrade();
            if let Some(queue) = &queue {
                // a queue that has failed tells who reads it
                let _ = queue.progress();
            }
            queue.is_some()
        });
        if let Some(keepalive) = self.domain.keepalive()
            && self
                .reads
                .fetch_add(1, Ordering::Relaxed)
                .is_multiple_of(READS)
        {
            keepalive.poll();
        }
    }
}

/// The counters of an endpoint, by what they count.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    send: OnceLock<Arc<Counter>>,
    recv: OnceLock<Arc<Counter>>,
    read: OnceLock<Arc<Counter>>,
    write: OnceLock<Arc<Counter>>,
}

impl Counters {
    /// What can be counted.
    pub(crate) const KINDS: Flags = Flags::SEND
        .union(Flags::RECV)
        .union(Flags::READ)
        .union(Flags::WRITE);

    /// The place of the first kind among `flags`.
    fn place(&self, flags: Flags) -> Option<&OnceLock<Arc<Counter>>> {
        if flags.contains(Flags::SEND) {
            Some(&self.send)
        } else if flags.contains(Flags::RECV) {
            Some(&self.recv)
        } else if flags.contains(Flags::WRITE) {
            Some(&self.write)
        } else if flags.contains(Flags::READ) {
            Some(&self.read)
        } else {
            None
        }
    }

    /// Lets `counter` count these kinds.
    ///
    /// # Errors
    /// `EINVAL`: one of them has a counter.
    pub(crate) fn bind(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        let places = || kinds.iter().filter_map(|kind| self.place(kind));
        if places().any(|place| place.get().is_some()) {
            return Err(FiErrno::EINVAL);
        }
        for place in places() {
            // it was empty, and binding is done under a lock
            let _ = place.set(Arc::clone(counter));
        }
        Ok(())
    }

    /// An operation has ended; `flags` say which.
    pub(crate) fn count(&self, flags: Flags, success: bool) {
        if let Some(counter) = self.place(flags).and_then(OnceLock::get) {
            if success {
                counter.add(1);
            } else {
                counter.add_errors(1);
            }
        }
    }

    /// Those of the transmit side.
    pub(crate) fn tx(&self) -> impl Iterator<Item = &Arc<Counter>> {
        [&self.send, &self.read, &self.write]
            .into_iter()
            .filter_map(OnceLock::get)
    }

    /// That of the receive side.
    pub(crate) fn rx(&self) -> Option<&Arc<Counter>> {
        self.recv.get()
    }
}
