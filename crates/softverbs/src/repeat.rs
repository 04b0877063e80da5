//! Actions towards peers that have failed for a passing reason, for example without a free
//! descriptor: this process repeats them.
//!
//! The lists of these actions are elsewhere. Here is the time of the next try, one for all of them:
//! 1 ms after a failure, twice as long after each further one, at most 1 s; and at least 4 times
//! the duration of the tries before, which may have waited for the agents of stopped peers. A peer
//! that cannot be reached is given up after about a minute.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sync::Arc;
use crate::sys::{self, Errno, Timer};

/// The first and the longest pause between two tries, in nanoseconds.
const FIRST_NS: u64 = 1_000_000;
const LONGEST_NS: u64 = 1_000_000_000;
/// The smallest pause as a multiple of the duration of the last tries.
const REST: u64 = 4;
/// Number of rounds of tries after which peers that cannot be reached are given up: a minute.
const ROUNDS: u32 = 70;

/// The time of the next try.
#[derive(Debug)]
pub(crate) struct Repeats {
    /// In nanoseconds of the monotonic clock; 0: nothing is to be repeated. Changed under `last`.
    due: AtomicU64,
    last: Mutex<Last>,
    timer: Arc<Timer>,
}

/// The last tries.
#[derive(Debug, Default)]
struct Last {
    /// The pause behind them in nanoseconds; 0 after a round without a failure.
    pause: u64,
    /// When the present round has begun, in nanoseconds of the monotonic clock.
    began: u64,
    /// Number of rounds with a failure, without one between that had none.
    rounds: u32,
}

impl Repeats {
    /// `timer` wakes the threads of this process that sleep.
    pub(crate) fn new(timer: Arc<Timer>) -> Self {
        Self {
            due: AtomicU64::new(0),
            last: Mutex::default(),
            timer,
        }
    }

    /// Time of the next try; 0 if there is none. A caller that sleeps arms the timer for it.
    pub(crate) fn due(&self) -> u64 {
        self.due.load(Ordering::Relaxed)
    }

    /// Whether an action towards a peer can succeed later. `EACCES` and `ETIMEDOUT`: its agent does
    /// not answer, or there is none, which counts for a minute. Other errors than these and those
    /// of a shortage ([`sys::is_shortage`]) mean that the peer has ended, that its descriptor is
    /// another file by now, or that the peer must not be used.
    pub(crate) fn may_pass(&self, error: Errno) -> bool {
        match error.0 {
            _ if sys::is_shortage(error) => true,
            libc::EINTR | libc::EAGAIN => true,
            libc::EACCES | libc::ETIMEDOUT => self.last().rounds < ROUNDS,
            _ => false,
        }
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called after an action has failed and was entered in its list; `began`: the time at
    /// which the action began. Takes no lock that another lock is taken under, so a caller may hold
    /// any.
    #[cold]
    pub(crate) fn add(&self, began: u64) {
        let now = sys::now_ns();
        let mut last = self.last();
        if self.due.load(Ordering::Relaxed) == 0 {
            last.pause = next_pause(last.pause, now.saturating_sub(began));
            self.due.store(now + last.pause, Ordering::Relaxed);
        }
        let due = self.due.load(Ordering::Relaxed);
        drop(last);
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
        let mut last = self.last();
        let due = self.due.load(Ordering::Relaxed);
        let begins = due != 0 && now >= due;
        if begins {
            self.due.store(0, Ordering::Relaxed);
            last.began = now;
        }
        begins
    }

    /// Without a failure in this round, the next failure is repeated after the first pause.
    pub(crate) fn end_round(&self) {
        self.end_round_at(sys::now_ns());
    }

    fn end_round_at(&self, now: u64) {
        let mut last = self.last();
        let due = self.due.load(Ordering::Relaxed);
        if due == 0 {
            (last.pause, last.rounds) = (0, 0);
            return;
        }
        last.rounds = last.rounds.saturating_add(1);
        let rest = REST.saturating_mul(now.saturating_sub(last.began));
        let rested = now.saturating_add(rest.min(60 * LONGEST_NS));
        // an earlier timer wakes up in vain
        self.due.store(due.max(rested), Ordering::Relaxed);
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
        assert_eq!(repeats.last().pause, 2 * FIRST_NS);
        repeats.end_round();
        assert_eq!((repeats.due(), repeats.last().pause), (0, 0));
    }

    /// Tries for which peers make this process wait have a fifth of its time.
    #[test]
    fn a_long_round_is_followed_by_a_longer_pause() {
        let repeats = repeats();
        repeats.add(sys::now_ns());
        let begin = repeats.due();
        assert!(repeats.take(begin));
        repeats.add(sys::now_ns());
        repeats.end_round_at(begin + 10 * LONGEST_NS);
        assert_eq!(repeats.due(), begin + 50 * LONGEST_NS);
    }

    #[test]
    fn a_peer_that_cannot_be_reached_is_given_up() {
        let repeats = repeats();
        let mut time = 0;
        while repeats.may_pass(Errno(libc::EACCES)) {
            repeats.add(sys::now_ns());
            time += repeats.last().pause;
            assert!(repeats.take(repeats.due()));
            repeats.add(sys::now_ns());
            repeats.end_round();
        }
        assert!((50 * LONGEST_NS..70 * LONGEST_NS).contains(&time), "{time}");
        assert!(repeats.may_pass(Errno(libc::EMFILE)));
        // a round without a failure
        assert!(repeats.take(repeats.due()));
        repeats.end_round();
        assert!(repeats.may_pass(Errno(libc::EACCES)));
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
        let repeats = repeats();
        for error in [
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOMEM,
            libc::EINTR,
            libc::ENOSPC,
            libc::ENOBUFS,
            libc::ETOOMANYREFS,
            libc::ETIMEDOUT,
            libc::EACCES,
            libc::EAGAIN,
        ] {
            assert!(repeats.may_pass(Errno(error)), "{error}");
        }
        for error in [
            libc::ENOENT,
            libc::ESRCH,
            libc::ESTALE,
            libc::EPROTO,
            libc::EPERM,
        ] {
            assert!(!repeats.may_pass(Errno(error)), "{error}");
        }
    }
}
