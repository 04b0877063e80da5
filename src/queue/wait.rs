//! Objects that a thread can wait on.

#![allow(unsafe_code, reason = "epoll(7) and eventfd(2)")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use crate::errno::{FiErrno, Result};

/// How a queue can be waited on (`enum fi_wait_obj`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitKind {
    /// No wait object: the queue can only be read.
    None,
    /// The queue has a blocking read; the application gets no object.
    #[default]
    Unspec,
    /// As `Unspec`; the application has requested that a waiting thread yields its processor
    /// (`FI_WAIT_YIELD`).
    Yield,
    /// The queue has a blocking read, and a file descriptor that the application may poll.
    Fd,
}

/// One descriptor that is readable when any of a set of descriptors is, or after
/// [`Self::wake`].
#[derive(Debug)]
pub(crate) struct WaitSet {
    epoll: OwnedFd,
    event: WakeEvent,
}

impl WaitSet {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: no pointers; the descriptor that it returns is new.
        let epoll = unsafe { own(libc::epoll_create1(libc::EPOLL_CLOEXEC)) }?;
        let event = WakeEvent::new()?;
        let this = Self { epoll, event };
        this.add(this.event.fd())?;
        Ok(this)
    }

    /// Adds a descriptor to the set, until it is closed.
    pub(crate) fn add(&self, fd: RawFd) -> Result<()> {
        let mut interest = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 0,
        };
        // SAFETY: `interest` lives through the call.
        FiErrno::from_call(unsafe {
            libc::epoll_ctl(
                self.epoll.as_raw_fd(),
                libc::EPOLL_CTL_ADD,
                fd,
                &raw mut interest,
            )
        })
    }

    /// As [`Self::add`], for a descriptor that may be in the set already.
    pub(crate) fn add_again(&self, fd: RawFd) -> Result<()> {
        match self.add(fd) {
            Err(FiErrno::EEXIST) => Ok(()),
            result => result,
        }
    }

    /// Reverts [`Self::add`].
    pub(crate) fn remove(&self, fd: RawFd) {
        let epoll = self.epoll.as_raw_fd();
        let none = std::ptr::null_mut();
        // SAFETY: no pointers. The call fails only if `fd` is not in the set.
        unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, none) };
    }

    /// Whether a descriptor of the set counts from now on. A thread that waits is woken if it
    /// counts again and is readable.
    pub(crate) fn watch(&self, fd: RawFd, counts: bool) {
        let mut interest = libc::epoll_event {
            events: if counts { libc::EPOLLIN as u32 } else { 0 },
            u64: 0,
        };
        let epoll = self.epoll.as_raw_fd();
        // SAFETY: `interest` lives through the call, which fails only if `fd` is not in the set.
        unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_MOD, fd, &raw mut interest) };
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Makes the descriptor readable until [`Self::clear`].
    pub(crate) fn wake(&self) {
        self.event.wake();
    }

    /// Reverts [`Self::wake`].
    pub(crate) fn clear(&self) {
        self.event.clear();
    }

    /// Whether the descriptor is readable now.
    pub(crate) fn is_ready(&self) -> bool {
        self.wait_millis(0).unwrap_or(true)
    }

    /// Waits until the descriptor is readable, at most until the deadline; `None`: no limit.
    /// Returns whether it is readable.
    ///
    /// # Errors
    /// `EINTR`: a signal handler ran.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        let millis = match deadline {
            None => -1,
            Some(deadline) => {
                // rounded up, so that a wait without an event ends after the deadline
                let left = deadline.saturating_duration_since(Instant::now());
                let left = left
                    .saturating_add(Duration::from_nanos(999_999))
                    .as_millis();
                i32::try_from(left).unwrap_or(i32::MAX)
            }
        };
        self.wait_millis(millis)
    }

    fn wait_millis(&self, millis: i32) -> Result<bool> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event is passed.
        let ret = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), &raw mut event, 1, millis) };
        FiErrno::from_call(ret)?;
        Ok(ret > 0)
    }
}

/// A descriptor that is readable after [`Self::wake`].
#[derive(Debug)]
pub(crate) struct WakeEvent(OwnedFd);

impl WakeEvent {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: no pointers; the descriptor that it returns is new.
        unsafe { own(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }.map(Self)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes the descriptor readable until [`Self::clear`].
    pub(crate) fn wake(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes are passed. The call fails only if the counter is at its maximum, and
        // then the descriptor is readable.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// Reverts [`Self::wake`].
    pub(crate) fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: eight bytes are writable. The call fails if `wake` was not called before, which
        // is harmless.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }
}

/// A descriptor that becomes readable when the time of the last [`Self::set`] has passed.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    pub(crate) fn new() -> Result<Self> {
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: no pointers; the descriptor that it returns is new.
        unsafe { own(libc::timerfd_create(libc::CLOCK_MONOTONIC, flags)) }.map(Self)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes the descriptor readable once, when `after` (less than 1 s) has passed, and cancels the
    /// previous setting. An `after` of 0 only cancels.
    pub(crate) fn set(&self, after: Duration) {
        let never = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let setting = libc::itimerspec {
            it_interval: never,
            it_value: libc::timespec {
                tv_sec: 0,
                // less than 10^9
                tv_nsec: i64::from(after.subsec_nanos()),
            },
        };
        // SAFETY: the timer is live and the setting readable. The call cannot fail with a valid
        // time.
        unsafe { libc::timerfd_settime(self.fd(), 0, &raw const setting, std::ptr::null_mut()) };
    }
}

/// Time between two checks of a condition whose change wakes no thread.
const PAUSE: Duration = Duration::from_micros(20);

/// Waits for a short time, and returns whether the deadline has not passed.
pub(crate) fn pause(deadline: Option<Instant>) -> bool {
    let left = deadline.is_none_or(|deadline| Instant::now() < deadline);
    if left {
        std::thread::sleep(PAUSE);
    }
    left
}

/// The end of a wait of `timeout`; `None`: no limit.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Owns the descriptor that a system call returned.
///
/// # Safety
/// `fd` is negative, or a new descriptor without another owner.
pub(crate) unsafe fn own(fd: RawFd) -> Result<OwnedFd> {
    FiErrno::from_call(fd)?;
    // SAFETY: the caller promises a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_and_wakes() {
        let set = WaitSet::new().unwrap();
        assert!(!set.is_ready());
        let start = Instant::now();
        let soon = deadline(Some(Duration::from_millis(20)));
        assert_eq!(set.wait(soon), Ok(false));
        assert!(start.elapsed() >= Duration::from_millis(20));
        set.wake();
        set.wake();
        assert_eq!(set.wait(None), Ok(true));
        set.clear();
        assert!(!set.is_ready());
    }

    #[test]
    fn a_descriptor_that_does_not_count_wakes_no_thread() {
        let (set, event) = (WaitSet::new().unwrap(), WakeEvent::new().unwrap());
        set.add(event.fd()).unwrap();
        event.wake();
        assert!(set.is_ready());
        set.watch(event.fd(), false);
        assert!(!set.is_ready());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| set.wait(None));
            std::thread::sleep(Duration::from_millis(10));
            set.watch(event.fd(), true);
            assert_eq!(waits.join().unwrap(), Ok(true));
        });
    }
}
