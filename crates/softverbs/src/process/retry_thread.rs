//! The retry thread: continues the waiting requests of this process's XRC initiators, and rings
//! initiators that wait for receives of this process, while the application makes no call of the
//! device. `docs/softverbs-xrc.md`, "Requests that wait", has its states.
//!
//! The thread is a further thread that sleeps in the device ([`Process::prepare_sleep`]), and has
//! no other access to requests. The mutex is acquired before all locks of queues.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::Process;
use super::waiting::Waiting;
use crate::qp::Qp;
use crate::sys::{self, Errno};

/// Time without a retry by another thread, after which the thread serves. Threads of the
/// application that wait for a processor need no help.
const IDLE_BEFORE_SERVING: Duration = Duration::from_millis(250);
/// Time without waiting requests after which the thread parks.
const IDLE: Duration = Duration::from_secs(1);
/// Time that threads of the application have to react to a wake-up first.
const GRACE: Duration = Duration::from_micros(200);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// There is no thread.
    #[default]
    None,
    /// As `None`; the kernel has refused a thread, which was logged.
    Refused,
    Parked,
    Runs,
}

/// The thread's state.
#[derive(Debug, Default)]
pub(super) struct RetryThread {
    state: Mutex<State>,
    unparked: Condvar,
    /// Number of rounds over the waiting requests of this process, or over the processes that are
    /// to be rung, by any thread; wrapping.
    rounds: AtomicU32,
}

impl RetryThread {
    /// Counts a round.
    pub(super) fn note_round(&self) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    fn rounds(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed)
    }
}

impl Process {
    /// Makes the retry thread watch, and starts it if it does not exist. To be called after there
    /// is something to serve. The caller holds no lock of a queue.
    #[cold]
    pub(super) fn unpark_retry_thread(&self) {
        let Some(process) = Self::current().filter(|process| std::ptr::eq(*process, self)) else {
            return;
        };
        let thread = &process.retry_thread;
        let mut state = thread.state.lock().unwrap_or_else(PoisonError::into_inner);
        match *state {
            State::Runs => {}
            State::Parked => {
                *state = State::Runs;
                thread.unparked.notify_one();
            }
            State::None | State::Refused => match sys::start_thread(process) {
                Ok(()) => *state = State::Runs,
                Err(Errno(_)) if *state == State::Refused => {}
                Err(error) => {
                    *state = State::Refused;
                    drop(state);
                    crate::log::say(&format!(
                        "softverbs: no retry thread ({error:?}): requests on XRC that wait continue only when this process calls the device"
                    ));
                }
            },
        }
    }

    /// Whether a request of an XRC initiator waits.
    fn initiators_wait(&self) -> bool {
        Waiting::each(&self.waiting)
            .any(|index| self.qps.get(index).is_some_and(Qp::is_waiting_initiator))
    }

    /// Whether requests of initiators wait, or processes that wait for receives of this one are not
    /// rung yet.
    fn has_to_serve(&self) -> bool {
        self.rings_later() || self.initiators_wait()
    }

    /// Parks the thread unless it has to serve.
    fn park_retry_thread(&self) {
        let thread = &self.retry_thread;
        let mut state = thread.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A request that begins to wait later is in the list before its thread acquires the mutex.
        if self.has_to_serve() {
            return;
        }
        *state = State::Parked;
        while *state == State::Parked {
            let woken = thread.unparked.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns when the thread has to serve and no other one has done so for
    /// [`IDLE_BEFORE_SERVING`].
    fn watch_waiting(&self) {
        let mut rounds = self.retry_thread.rounds();
        let mut idle = Duration::ZERO;
        loop {
            std::thread::sleep(IDLE_BEFORE_SERVING);
            let (last, waits) = (rounds, self.has_to_serve());
            rounds = self.retry_thread.rounds();
            if waits && rounds == last {
                return;
            }
            idle = if waits {
                Duration::ZERO
            } else {
                idle + IDLE_BEFORE_SERVING
            };
            if idle >= IDLE {
                self.park_retry_thread();
                idle = Duration::ZERO;
                rounds = self.retry_thread.rounds();
            }
        }
    }

    /// Continues the requests, and rings, until a thread of the application does so, or there is
    /// nothing left.
    fn serve_waiting(&self) {
        loop {
            self.prepare_sleep();
            let rounds = self.retry_thread.rounds();
            if !self.has_to_serve() {
                return;
            }
            // An error is an interruption: the next round finds what there is to do.
            let _ = self.wake.wait(-1);
            std::thread::sleep(GRACE);
            if self.retry_thread.rounds() != rounds {
                return;
            }
        }
    }
}

impl sys::Thread for Process {
    const NAME: &CStr = c"softverbs-retry";

    fn run(&'static self) {
        loop {
            self.watch_waiting();
            self.serve_waiting();
        }
    }

    fn has_panicked(&'static self) {
        let thread = &self.retry_thread;
        *thread.state.lock().unwrap_or_else(PoisonError::into_inner) = State::None;
        crate::log::say(
            "softverbs: the retry thread has panicked: the next request on XRC that waits starts another one",
        );
    }
}
