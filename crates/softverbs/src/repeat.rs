//! Actions towards peers that have failed for a passing reason, for example without a free
//! descriptor: this process repeats them.
//!
//! The lists of these actions are elsewhere. Here is the time of the next try, one for all of them:
//! 1 ms after a failure, twice as long after each further one, at most 1 s; and at least 4 times
//! the duration of the try that failed, which may have waited for the agent of a stopped peer.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Arc;
use crate::sys::{self, Errno, Timer};

/// The first and the longest pause between two tries, in nanoseconds.
const FIRST_NS: u64 = 1_000_000;
const LONGEST_NS: u64 = 1_000_000_000;
/// The smallest pause as a multiple of the duration of the last try.
const REST: u64 = 4;

/// Whether an action towards a peer can succeed later: the error does not mean that the peer has
/// ended (`ENOENT`, `ESRCH`), that its descriptor is another file by now (`ESTALE`), or that the
/// peer must not be used (`EPERM`, `EPROTO`).
pub(crate) fn may_pass(error: Errno) -> bool {
    !matches!(
        error.0,
        libc::ENOENT | libc::ESRCH | libc::ESTALE | libc::EPROTO | libc::EPERM
    )
}

/// The time of the next try.
#[derive(Debug)]
pub(crate) struct Repeats {
    /// In nanoseconds of the monotonic clock; 0: nothing is to be repeated. Changed under `pause`.
    due: AtomicU64,
    /// The last pause in nanoseconds; 0 after a try without a failure.
    pause: Mutex<u64>,
    timer: Arc<Timer>,
}

impl Repeats {
    /// `timer` wakes the threads of this process that sleep.
    pub(crate) fn new(timer: Arc<Timer>) -> Self {
        Self {
            due: AtomicU64::new(0),
            pause: Mutex::new(0),
            timer,
        }
    }

    /// Time of the next try; 0 if there is none. A caller that sleeps arms the timer for it.
    pub(crate) fn due(&self) -> u64 {
        self.due.load(Ordering::Relaxed)
    }

    /// To be called after an action has failed and was entered in its list; `began`: the time at
    /// which the action began. Takes no lock that another lock is taken under, so a caller may hold
    /// any.
    #[cold]
    pub(crate) fn add(&self, began: u64) {
        let now = sys::now_ns();
        let mut pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        if self.due.load(Ordering::Relaxed) == 0 {
            *pause = next_pause(*pause, now.saturating_sub(began));
            self.due.store(now + *pause, Ordering::Relaxed);
        }
        let due = self.due.load(Ordering::Relaxed);
        drop(pause);
        self.timer.arm(due);
    }

    /// Whether it is time for the next try. The caller that gets true repeats all actions in the
    /// lists, each of which calls [`Self::add`] if it fails again, and then calls
    /// [`Self::end_round`].
    #[inline]
    pub(crate) fn begin_round(&self) -> bool {
        self.due() != 0 && self.take(sys::now_ns())
    }

    #[cold]
    fn take(&self, now: u64) -> bool {
        let _pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        let due = self.due.load(Ordering::Relaxed);
        let begins = due != 0 && now >= due;
        if begins {
            self.due.store(0, Ordering::Relaxed);
        }
        begins
    }

    /// Without a failure in this round, the next failure is repeated after the first pause.
    pub(crate) fn end_round(&self) {
        let mut pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        if self.due.load(Ordering::Relaxed) == 0 {
            *pause = 0;
        }
    }
}

/// The pause behind a try that took `took` ns, if the one before it was `last`, in nanoseconds.
fn next_pause(last: u64, took: u64) -> u64 {
    let longer = (2 * last).clamp(FIRST_NS, LONGEST_NS);
    longer.max(REST.saturating_mul(took).min(60 * LONGEST_NS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repeats() -> Repeats {
        Repeats::new(Arc::try_new(Timer::new().unwrap()).unwrap())
    }

    #[test]
    fn the_pause_grows_with_each_failure_and_with_the_duration_of_a_try() {
        assert_eq!(next_pause(0, 0), FIRST_NS);
        assert_eq!(next_pause(FIRST_NS, 0), 2 * FIRST_NS);
        assert_eq!(next_pause(LONGEST_NS, 0), LONGEST_NS);
        assert_eq!(next_pause(60 * LONGEST_NS, 0), LONGEST_NS);
        assert_eq!(next_pause(0, 2 * LONGEST_NS), 8 * LONGEST_NS);
        assert_eq!(next_pause(0, u64::MAX), 60 * LONGEST_NS);
    }

    #[test]
    fn one_round_for_all_failures() {
        let repeats = repeats();
        assert!(!repeats.begin_round());
        let now = sys::now_ns();
        repeats.add(now);
        let due = repeats.due();
        assert!(due >= now + FIRST_NS);
        repeats.add(now);
        assert_eq!(repeats.due(), due);
        assert!(!repeats.take(due - 1));
        assert!(repeats.take(due));
        // another thread that found it due
        assert!(!repeats.take(due));
        // the action fails again
        repeats.add(sys::now_ns());
        repeats.end_round();
        assert!(repeats.take(repeats.due()));
        assert_eq!(*repeats.pause.lock().unwrap(), 2 * FIRST_NS);
        repeats.end_round();
        assert_eq!((repeats.due(), *repeats.pause.lock().unwrap()), (0, 0));
    }

    #[test]
    fn a_thread_that_sleeps_is_woken_for_it() {
        let repeats = repeats();
        repeats.add(sys::now_ns());
        let set = sys::Epoll::new().unwrap();
        set.add(repeats.timer.fd(), 7).unwrap();
        assert_eq!(set.wait(-1).unwrap().0[0], 7);
        assert!(repeats.begin_round());
    }

    #[test]
    fn an_error_of_the_peer_does_not_pass() {
        for error in [
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOMEM,
            libc::EINTR,
            libc::ENOSPC,
            libc::ETIMEDOUT,
            libc::EACCES,
            libc::EAGAIN,
        ] {
            assert!(may_pass(Errno(error)), "{error}");
        }
        for error in [
            libc::ENOENT,
            libc::ESRCH,
            libc::ESTALE,
            libc::EPROTO,
            libc::EPERM,
        ] {
            assert!(!may_pass(Errno(error)), "{error}");
        }
    }
}
