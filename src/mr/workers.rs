//! The threads of a domain that register regions in the background.
//!
//! A forked child has none of them: it registers in the calling thread, and waits for none.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::log::warn_log;

/// Maximum number of threads that register at the same time, or fetch the pages of one region.
const MAX_WORKERS: usize = 8;
/// Idle time after which a worker ends.
const IDLE_LIMIT: Duration = Duration::from_secs(2);

/// Number of threads that register at the same time.
pub(super) fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_WORKERS))
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that register regions, started on demand. Thread safe.
pub(crate) struct Workers {
    queue: Arc<Queue>,
    /// Maximum number of threads. Not that of the thread that submits a job, which may be bound to
    /// fewer processors.
    most: usize,
    /// The process that has the threads. A forked child does not, and a lock that one of them held
    /// is never released in it.
    owner: forks::Owner,
}

/// The jobs, and the threads that wait for them.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    running: usize,
    stopped: bool,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").finish_non_exhaustive()
    }
}

impl Default for Workers {
    fn default() -> Self {
        Self {
            queue: Arc::default(),
            most: workers(),
            owner: forks::Owner::this_process(),
        }
    }
}

impl Workers {
    /// Passes a job to a worker. If no thread can be created, the calling thread runs the job.
    pub(super) fn submit(&self, job: Job) {
        if !self.owner.is_this_process() {
            return job();
        }
        let mut state = self.queue.state.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() || state.running >= self.most {
            self.queue.changed.notify_one();
            return;
        }
        state.threads.retain(|thread| !thread.is_finished());
        let queue = Arc::clone(&self.queue);
        let thread = std::thread::Builder::new()
            .name("weft-register".to_owned())
            .spawn(move || {
                biased_lock::visitor();
                queue.run();
            });
        match thread {
            Ok(thread) => {
                state.running += 1;
                state.threads.push(thread);
            }
            Err(_) if state.running > 0 => {}
            Err(error) => {
                warn_log!(
                    Mr,
                    "no worker thread could be created: {error}; asynchronous registrations block"
                );
                let job = state.jobs.pop_back();
                drop(state);
                if let Some(job) = job {
                    job();
                }
            }
        }
    }
}

impl Queue {
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.stopped {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state.lock();
                continue;
            }
            state.idle += 1;
            let late = self.changed.wait_for(&mut state, IDLE_LIMIT).timed_out();
            state.idle -= 1;
            if late && state.jobs.is_empty() {
                break;
            }
        }
        state.running -= 1;
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if !self.owner.is_this_process() {
            // the copies of handles of threads that do not exist
            std::mem::forget(Arc::clone(&self.queue));
            return;
        }
        let (threads, jobs) = {
            let mut state = self.queue.state.lock();
            state.stopped = true;
            self.queue.changed.notify_all();
            (
                std::mem::take(&mut state.threads),
                std::mem::take(&mut state.jobs),
            )
        };
        // no open region is waiting for these jobs: a region holds a reference to its domain
        drop(jobs);
        let own = std::thread::current().id();
        for thread in threads {
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn workers_do_everything_once_and_end() {
        let count = Arc::new(AtomicUsize::new(0));
        let pool = Workers::default();
        for _ in 0..200 {
            let count = Arc::clone(&count);
            pool.submit(Box::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            }));
        }
        let begin = std::time::Instant::now();
        while count.load(Ordering::SeqCst) < 200 {
            assert!(begin.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
        assert!(pool.queue.state.lock().running <= pool.most);
        let queue = Arc::clone(&pool.queue);
        drop(pool);
        let state = queue.state.lock();
        assert_eq!((state.running, state.jobs.len()), (0, 0));
    }

    /// A pool of a thread with many processors is used by one with fewer.
    #[test]
    fn a_pool_does_not_grow_beyond_its_own_maximum() {
        let mut pool = Workers::default();
        pool.most = 2;
        for running in [2, 3, MAX_WORKERS + 1] {
            pool.queue.state.lock().running = running;
            pool.submit(Box::new(|| {}));
            let state = pool.queue.state.lock();
            assert_eq!((state.running, state.threads.len()), (running, 0));
        }
    }
}
