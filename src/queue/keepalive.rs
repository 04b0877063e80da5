//! Probes silent peers.
//!
//! A network does not report that a peer's machine has failed. The device detects it by a request
//! that is not acknowledged, and an idle endpoint has no outstanding request. On devices without
//! other detection, [`Probed::beat`] of each connected endpoint is called periodically. An endpoint
//! for which no request has completed since the last beat posts a probe, and the device detects a
//! missing acknowledgement.
//!
//! The keepalive has no thread of its own. A thread that reads an empty queue checks a coarse clock
//! periodically. A sleeping thread is woken by a timer that all wait objects of the domain watch;
//! the timer runs only while an endpoint is connected.

#![allow(unsafe_code, reason = "timerfd_create(2) and clock_gettime(2)")]

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::wait::own;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// Default period of the beats. A peer is probed after one to two periods of silence, at most
/// three. `docs/protocol.md` has the total time until a dead peer is detected.
pub(crate) const PERIOD: Duration = Duration::from_millis(750);

/// A connected endpoint. Dropping the last reference must acquire no lock.
pub(crate) trait Probed: Send + Sync {
    /// Probes the peer if no request has completed since the last beat. Returns whether the
    /// endpoint is still connected. Called without a lock; concurrent calls are possible but rare.
    fn beat(&self) -> bool;
}

#[derive(Default)]
struct Members {
    list: Vec<Weak<dyn Probed>>,
    /// Whether the timer runs.
    running: bool,
}

/// The connected endpoints of a domain, and the time of their beats.
pub(crate) struct Keepalive {
    period: Duration,
    timer: OwnedFd,
    /// Time of the last beat by the coarse clock, in nanoseconds.
    last: AtomicU64,
    members: Mutex<Members>,
}

impl std::fmt::Debug for Keepalive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keepalive")
            .field("period", &self.period)
            .finish_non_exhaustive()
    }
}

/// Time of the kernel's last tick in nanoseconds, up to 10 ms old. Read without a system call.
fn coarse_now() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the structure is writable, and the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    // neither field is negative
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Keepalive {
    /// # Errors
    /// `EMFILE`.
    pub(crate) fn new(period: Duration) -> Result<Self> {
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: no pointers; the descriptor that it returns is new.
        let timer = unsafe { own(libc::timerfd_create(libc::CLOCK_MONOTONIC, flags)) }?;
        Ok(Self {
            period,
            timer,
            last: AtomicU64::new(coarse_now()),
            members: Mutex::default(),
        })
    }

    /// The timer's descriptor: readable when [`Self::woken`] is to be called.
    pub(crate) fn fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Adds an endpoint: its `beat` is called periodically until that returns false.
    pub(crate) fn join(&self, member: Weak<dyn Probed>) {
        let mut members = self.members.lock();
        members.list.push(member);
        self.adjust(&mut members);
    }

    /// Starts the timer if the list has a member, and stops it otherwise.
    fn adjust(&self, members: &mut Members) {
        let wanted = !members.list.is_empty();
        if wanted == members.running {
            return;
        }
        let period = if wanted { self.period } else { Duration::ZERO };
        let period = libc::timespec {
            // periods are short
            tv_sec: period.as_secs() as libc::time_t,
            tv_nsec: period.subsec_nanos().into(),
        };
        let setting = libc::itimerspec {
            it_interval: period,
            it_value: period,
        };
        // SAFETY: the timer is live and the setting readable.
        let ret = unsafe {
            libc::timerfd_settime(self.fd(), 0, &raw const setting, std::ptr::null_mut())
        };
        match FiErrno::from_call(ret) {
            Ok(()) => members.running = wanted,
            Err(error) => warn_log!(
                EpCtrl,
                "timerfd_settime: {error}; the keepalive timer is unchanged"
            ),
        }
    }

    /// Beats if the period has passed since the last beat. Called periodically by a thread that
    /// does not sleep, without a lock.
    pub(crate) fn poll(&self) {
        self.beat_after(self.period);
    }

    /// Clears the timer of [`Self::fd`], and beats unless another thread has done so in the last
    /// half period. A thread calls this before it sleeps, without a lock.
    pub(crate) fn woken(&self) {
        let mut expirations = 0_u64;
        // SAFETY: eight bytes are writable. The call fails if the timer has not expired.
        let ret = unsafe { libc::read(self.fd(), (&raw mut expirations).cast(), 8) };
        if ret == 8 {
            // half the period, because the clock is coarse: with the whole period every second beat
            // could be missed
            self.beat_after(self.period / 2);
        }
    }

    fn beat_after(&self, age: Duration) {
        let now = coarse_now();
        let last = self.last.load(Ordering::Relaxed);
        // periods are short
        if now.saturating_sub(last) < age.as_nanos() as u64 {
            return;
        }
        let mine = self
            .last
            .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed);
        if mine.is_ok() {
            self.beat();
        }
    }

    fn beat(&self) {
        let mut list = std::mem::take(&mut self.members.lock().list);
        list.retain(|member| member.upgrade().is_some_and(|member| member.beat()));
        let mut members = self.members.lock();
        // members that were added meanwhile are in `members.list`
        members.list.append(&mut list);
        self.adjust(&mut members);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32};
    use std::time::Instant;

    #[derive(Default)]
    struct Counter {
        beats: AtomicU32,
        gone: AtomicBool,
    }

    impl Probed for Counter {
        fn beat(&self) -> bool {
            self.beats.fetch_add(1, Ordering::Relaxed);
            !self.gone.load(Ordering::Relaxed)
        }
    }

    fn expires(keepalive: &Keepalive, millis: i32) -> bool {
        let mut entry = libc::pollfd {
            fd: keepalive.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry is passed.
        unsafe { libc::poll(&raw mut entry, 1, millis) > 0 }
    }

    #[test]
    fn the_timer_runs_while_somebody_is_connected() {
        let keepalive = Keepalive::new(Duration::from_millis(20)).unwrap();
        assert!(!expires(&keepalive, 60), "nobody is there");
        let member = Arc::new(Counter::default());
        let weak: Weak<dyn Probed> = Arc::downgrade(&member) as _;
        keepalive.join(weak);
        let beat = |wanted| {
            let before = member.beats.load(Ordering::Relaxed);
            // after a late wake-up the next expiration follows soon and is skipped
            while member.beats.load(Ordering::Relaxed) == before {
                assert!(expires(&keepalive, 5000));
                keepalive.woken();
            }
            assert_eq!(member.beats.load(Ordering::Relaxed), wanted);
        };
        (1..4).for_each(beat);
        member.gone.store(true, Ordering::Relaxed);
        beat(4);
        keepalive.woken();
        assert!(!expires(&keepalive, 60), "nobody is there any more");
        assert_eq!(member.beats.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn who_polls_beats_once_a_period() {
        let keepalive = Keepalive::new(Duration::from_millis(50)).unwrap();
        let member = Arc::new(Counter::default());
        let weak: Weak<dyn Probed> = Arc::downgrade(&member) as _;
        keepalive.join(weak);
        let start = Instant::now();
        while member.beats.load(Ordering::Relaxed) < 3 {
            keepalive.poll();
            assert!(start.elapsed() < Duration::from_secs(20));
        }
        // the coarse clock's ticks are at most 10 ms apart
        assert!(start.elapsed() >= Duration::from_millis(130));
        drop(member);
        std::thread::sleep(Duration::from_millis(70));
        keepalive.poll();
        assert!(keepalive.members.lock().list.is_empty());
    }
}
