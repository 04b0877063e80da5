//! The thread that serves the connections of endpoints which have no event queue: it takes the
//! events of the connection manager and does what is due at a time. It sleeps without a timeout
//! when nothing is due.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;

use super::Dispatcher;
use crate::errno::Result;
use crate::log::warn_log;

/// An object that a [`Driver`] serves.
pub(crate) trait Driven: Send + Sync {
    /// Does what is due, and returns the time of the next call; `None`: after the next event or
    /// [`Driver::wake`]. Called by the driver's thread without a lock.
    fn drive(&self) -> Option<Instant>;
}

/// The thread and its dispatcher. Thread safe. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread; a forked child does not.
    process: u32,
}

struct Shared {
    dispatcher: Dispatcher,
    driven: Mutex<Vec<Weak<dyn Driven>>>,
    stopped: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// Starts the thread.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`, `EAGAIN`: resources of the process.
    pub(crate) fn start() -> Result<Self> {
        let shared = Arc::new(Shared {
            dispatcher: Dispatcher::new()?,
            driven: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("weft-driver".to_owned())
            .spawn(move || of_thread.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
            process: std::process::id(),
        })
    }

    /// The dispatcher of the identifiers that the thread serves.
    pub(crate) fn dispatcher(&self) -> &Dispatcher {
        &self.shared.dispatcher
    }

    /// Adds an object, and a descriptor that wakes the thread while it is readable.
    ///
    /// # Errors
    /// `ENOMEM`, `ENOSPC`.
    pub(crate) fn add(&self, driven: Weak<dyn Driven>, fd: Option<RawFd>) -> Result<()> {
        if let Some(fd) = fd {
            self.shared.dispatcher.wait().add(fd)?;
        }
        self.shared.driven.lock().push(driven);
        self.wake();
        Ok(())
    }

    /// Reverts [`Self::add`]. A call of [`Driven::drive`] may still be under way.
    pub(crate) fn remove(&self, driven: &Weak<dyn Driven>, fd: Option<RawFd>) {
        self.shared
            .driven
            .lock()
            .retain(|known| !known.ptr_eq(driven));
        if let Some(fd) = fd {
            self.shared.dispatcher.wait().remove(fd);
        }
    }

    /// Wakes the thread: it calls each [`Driven::drive`]. A system call.
    pub(crate) fn wake(&self) {
        self.shared.dispatcher.wait().wake();
    }
}

impl Shared {
    fn run(&self) {
        let wait = self.dispatcher.wait();
        loop {
            // a later wake-up ends the wait below; an earlier one is seen by what follows
            wait.clear();
            if self.stopped.load(Ordering::Acquire) {
                return;
            }
            self.dispatcher.progress(|| false);
            let driven = self.driven.lock().clone();
            let due = driven.iter().filter_map(Weak::upgrade);
            let due = due.filter_map(|driven| driven.drive()).min();
            if let Err(error) = wait.wait(due)
                && error != crate::errno::FiErrno::EINTR
            {
                warn_log!(EpCtrl, "epoll_wait: {error}");
            }
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        self.shared.stopped.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // the thread has no result
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Each call asks for the next one at once, so that the thread is seldom asleep.
    struct Busy;

    impl Driven for Busy {
        fn drive(&self) -> Option<Instant> {
            Some(Instant::now())
        }
    }

    /// The end of a driver is not lost among other wake-ups.
    #[test]
    fn a_busy_driver_ends() {
        let (done, ended) = mpsc::channel();
        std::thread::spawn(move || {
            let busy: Arc<dyn Driven> = Arc::new(Busy);
            for _ in 0..3_000 {
                let driver = Driver::start().unwrap();
                driver.add(Arc::downgrade(&busy), None).unwrap();
                drop(driver);
                // the test waits for each one
                let _ = done.send(());
            }
        });
        for count in 0..3_000 {
            let limit = Duration::from_secs(20);
            assert_eq!(ended.recv_timeout(limit), Ok(()), "after {count}");
        }
    }
}
