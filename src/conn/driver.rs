//! The thread that serves the connections of endpoints which have no event queue: it takes the
//! events of the connection manager and does what is due at a time. It sleeps without a timeout
//! when nothing is due. A thread of the application that polls does this work when it finds it
//! undone, because spinning threads can keep the driver from a processor for seconds.
//!
//! A panic fails the object whose call has panicked, or all objects if an event of the connection
//! manager has, and does not end the thread ([`Driven::fail`]).
//!
//! The completion queues of all its endpoints use one completion channel. With a channel for each
//! endpoint, a process could have about 95 endpoints: the kernel limits the paths by which one
//! descriptor wakes nested epoll descriptors, and each channel of the embedded device contains the
//! descriptor that peers make readable.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Dispatcher, Found};
use crate::errno::Result;
use crate::log::warn_log;
use crate::queue::Assisted;
use crate::verbs::{CompChannel, Cq, Device};

/// The least time between two looks of polling threads at what the driver has to do.
const LOOK: Duration = Duration::from_micros(200);
/// The driver is woken to sleep again, if it would wake for nothing so long before it is needed:
/// soon after a process ceases to poll, no thread of it wakes.
const EARLY: Duration = Duration::from_millis(100);
/// How long a polling thread waits for the driver, which may need a lock that the thread acquires
/// again and again, and for the processor of the thread.
const SERVING_WAIT: Duration = Duration::from_millis(1);
/// Time between two looks of a driver that has failed for the end of its domain.
const FAILED_PAUSE: Duration = Duration::from_millis(100);

/// An object that a [`Driver`] serves.
pub(crate) trait Driven: Send + Sync {
    /// Does what is due, and returns the time of the next call; `None`: after the next event of
    /// its completion queue or [`Driver::wake`]. Called without a lock, by one thread at a time:
    /// the driver's, or one that polls.
    fn drive(&self) -> Option<Instant>;

    /// A call for it has panicked, or the driver cannot serve it any more: its calls fail from now
    /// on, and threads that wait for it are woken. Called once, without a lock; the object is not
    /// driven afterwards.
    fn fail(&self);
}

/// When an object is to be driven.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// At once.
    called: AtomicBool,
    due: Mutex<Option<Instant>>,
}

impl Turn {
    fn call(&self) {
        self.called.store(true, Ordering::Release);
    }

    fn is_due(&self, now: Instant) -> bool {
        self.called.load(Ordering::Acquire) || self.due.lock().is_some_and(|due| due <= now)
    }
}

/// The objects that a thread drives.
#[derive(Default)]
struct Driving {
    all: Vec<(Arc<Turn>, Weak<dyn Driven>)>,
    /// The turns of the objects by the identity of their completion queues.
    queues: HashMap<usize, Arc<Turn>>,
}

/// The thread and its dispatcher. Thread safe. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread; a forked child does not.
    owner: forks::Owner,
}

struct Shared {
    dispatcher: Dispatcher,
    driven: Mutex<Driving>,
    /// Created with the first completion queue.
    channel: Mutex<Option<Arc<CompChannel>>>,
    stopped: AtomicBool,
    /// An event of the connection manager has panicked: no object is served any more.
    failed: AtomicBool,
    /// Held while events are taken and what is due is done.
    serving: Mutex<()>,
    begin: Instant,
    /// When the thread calls [`Driven::drive`] next, unless it is woken before, in ns since
    /// `begin`; the maximum: no time. Changed under `serving`.
    due: AtomicU64,
    /// When polling threads look next, in the same unit.
    look: AtomicU64,
    /// The next look at events panics.
    #[cfg(test)]
    panics: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

/// Fails an object, unless that panics too.
#[cold]
fn fail(driven: &Weak<dyn Driven>) {
    if let Some(driven) = driven.upgrade() {
        // the panic is logged, and nothing is left to do
        let _ = catch_unwind(AssertUnwindSafe(|| driven.fail()));
    }
}

impl Driver {
    /// Starts the thread.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`, `EAGAIN`: resources of the process.
    pub(crate) fn start() -> Result<Self> {
        let mut driver = Self::without_thread()?;
        let of_thread = Arc::clone(&driver.shared);
        let thread = std::thread::Builder::new()
            .name("weft-driver".to_owned())
            .spawn(move || {
                biased_lock::visitor();
                of_thread.run();
            })?;
        driver.thread = Some(thread);
        Ok(driver)
    }

    fn without_thread() -> Result<Self> {
        let shared = Arc::new(Shared {
            dispatcher: Dispatcher::new()?,
            driven: Mutex::default(),
            channel: Mutex::default(),
            stopped: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            serving: Mutex::default(),
            begin: Instant::now(),
            due: AtomicU64::new(u64::MAX),
            look: AtomicU64::new(0),
            #[cfg(test)]
            panics: AtomicBool::new(false),
        });
        Ok(Self {
            shared,
            thread: None,
            owner: forks::Owner::this_process(),
        })
    }

    /// The dispatcher of the identifiers that the thread serves.
    pub(crate) fn dispatcher(&self) -> &Dispatcher {
        &self.shared.dispatcher
    }

    /// The channel of the completion queues of the driver's objects. Its events wake the driver's
    /// thread. This thread takes them, or an application's thread that does the driver's work.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`, `ENOSPC`.
    pub(crate) fn channel(&self, device: &Arc<Device>) -> Result<Arc<CompChannel>> {
        let mut channel = self.shared.channel.lock();
        if let Some(channel) = &*channel {
            return Ok(Arc::clone(channel));
        }
        let created = Arc::new(CompChannel::create(device)?);
        self.shared.dispatcher.wait().add(created.fd())?;
        Ok(Arc::clone(channel.insert(created)))
    }

    /// Adds an object, which is driven at once, then in its turns and after the events of its
    /// completion queue.
    pub(crate) fn add(&self, driven: Weak<dyn Driven>, turn: &Arc<Turn>, cq: Option<&Cq>) {
        let mut driving = self.shared.driven.lock();
        if self.shared.failed.load(Ordering::Acquire) {
            drop(driving);
            return fail(&driven);
        }
        driving.all.push((Arc::clone(turn), driven));
        if let Some(cq) = cq {
            driving.queues.insert(cq.object(), Arc::clone(turn));
        }
        drop(driving);
        self.wake(turn);
    }

    /// Reverts [`Self::add`]. Waits for a call of [`Driven::drive`] that is under way, so it must
    /// not be called by one.
    pub(crate) fn remove(&self, turn: &Arc<Turn>) {
        self.forget(turn);
        drop(self.shared.serving.lock());
    }

    /// As [`Self::remove`], without a wait: a call of [`Driven::drive`] may be under way.
    pub(crate) fn forget(&self, turn: &Arc<Turn>) {
        self.shared.forget(turn);
    }

    /// Whether this process has the thread: a forked child has none.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.owner.is_this_process()
    }

    /// Wakes the thread, which drives the object with this turn. A system call.
    pub(crate) fn wake(&self, turn: &Turn) {
        turn.call();
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
            let (due, found) = {
                let _serving = self.serving.lock();
                let (due, found) = self.serve();
                self.due.store(self.time(due), Ordering::Relaxed);
                (due, found)
            };
            if self.failed.load(Ordering::Acquire) {
                // no thread takes the events that keep the descriptors readable
                std::thread::sleep(FAILED_PAUSE);
                continue;
            }
            if let Err(error) = self.dispatcher.wait_after(found, due)
                && error != crate::errno::FiErrno::EINTR
            {
                warn_log!(EpCtrl, "epoll_wait: {error}");
            }
        }
    }

    /// Takes the events of the completion queues, and calls their objects.
    fn take_events(&self) {
        let channel = self.channel.lock().clone();
        if let Some(channel) = channel {
            channel.drain(|cq| {
                // the event of a queue whose object was removed has no effect
                if let Some(turn) = self.driven.lock().queues.get(&cq) {
                    turn.call();
                }
            });
        }
    }

    /// Drives the objects whose turn it is. Returns the time of the next turn.
    fn drive(&self) -> Option<Instant> {
        let now = Instant::now();
        let driving = self.driven.lock();
        let due = driving.all.iter().filter(|(turn, _)| turn.is_due(now));
        let due: Vec<_> = due.cloned().collect();
        drop(driving);
        for (turn, driven) in due {
            // a later call leads to another turn; the object sees what preceded the earlier ones
            turn.called.swap(false, Ordering::AcqRel);
            let drive = || driven.upgrade().and_then(|driven| driven.drive());
            let Ok(next) = catch_unwind(AssertUnwindSafe(drive)) else {
                warn_log!(EpCtrl, "an endpoint has failed by a panic of its driver");
                self.forget(&turn);
                fail(&driven);
                continue;
            };
            *turn.due.lock() = next;
        }
        let driving = self.driven.lock();
        let times = driving.all.iter().filter_map(|(turn, _)| *turn.due.lock());
        times.min()
    }

    /// Takes events, and does what is due. Returns the time of the next call, and what the
    /// dispatcher has found. A panic fails the objects concerned: that of a call of
    /// [`Driven::drive`], or all of them.
    fn serve(&self) -> (Option<Instant>, Found) {
        if self.failed.load(Ordering::Acquire) {
            return (None, Found::Events);
        }
        let events = || {
            #[cfg(test)]
            assert!(!self.panics.load(Ordering::Relaxed), "planted");
            let found = self.dispatcher.progress(|| false);
            self.take_events();
            found
        };
        let Ok(found) = catch_unwind(AssertUnwindSafe(events)) else {
            self.fail_all();
            return (None, Found::Events);
        };
        (self.drive(), found)
    }

    /// The object is not driven any more.
    fn forget(&self, turn: &Arc<Turn>) {
        let mut driving = self.driven.lock();
        driving.all.retain(|(known, _)| !Arc::ptr_eq(known, turn));
        driving.queues.retain(|_, known| !Arc::ptr_eq(known, turn));
    }

    /// The event that has panicked may have left the dispatcher and any object in the middle of a
    /// change.
    #[cold]
    fn fail_all(&self) {
        warn_log!(
            EpCtrl,
            "all endpoints of the domain have failed by a panic of the driver"
        );
        self.failed.store(true, Ordering::Release);
        let driving = std::mem::take(&mut *self.driven.lock());
        for (_, driven) in driving.all {
            fail(&driven);
        }
    }

    /// A time in ns since `begin`; the maximum for none.
    fn time(&self, of: Option<Instant>) -> u64 {
        // 2^64 ns are 584 years
        of.map_or(u64::MAX, |of| (of - self.begin).as_nanos() as u64)
    }
}

impl Assisted for Driver {
    fn assist(&self) {
        let shared = &*self.shared;
        let now = shared.time(Some(Instant::now()));
        if now < shared.look.load(Ordering::Relaxed) || !self.is_of_this_process() {
            return;
        }
        // two threads that look at the same time do no harm
        let next = now + LOOK.as_nanos() as u64;
        shared.look.store(next, Ordering::Relaxed);
        let wait = shared.dispatcher.wait();
        let overdue = shared.due.load(Ordering::Relaxed) <= now;
        if !overdue && !shared.serving.is_locked() && !wait.is_ready() {
            return;
        }
        let Some(_serving) = shared.serving.try_lock_for(SERVING_WAIT) else {
            return;
        };
        wait.clear();
        let sleeps_until = shared.due.load(Ordering::Relaxed);
        let (due, _) = shared.serve();
        let due = shared.time(due);
        if sleeps_until <= now {
            // the thread is about to wake
            shared.due.store(due, Ordering::Relaxed);
        } else if due < sleeps_until || due - sleeps_until > EARLY.as_nanos() as u64 {
            wait.wake();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.is_of_this_process() {
            return;
        }
        self.shared.stopped.store(true, Ordering::Release);
        self.shared.dispatcher.wait().wake();
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
        fn fail(&self) {}
    }

    /// Counts its calls, and asks for the next one after a time.
    struct Counting(AtomicU64, Duration);

    impl Driven for Counting {
        fn drive(&self) -> Option<Instant> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Some(Instant::now() + self.1)
        }
        fn fail(&self) {
            self.0.store(FAILED, Ordering::Relaxed);
        }
    }

    const FAILED: u64 = 1 << 32;

    /// Panics in its first call.
    #[derive(Default)]
    struct Panicking(AtomicU64);

    impl Driven for Panicking {
        fn drive(&self) -> Option<Instant> {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("planted");
        }
        fn fail(&self) {
            self.0.fetch_add(FAILED, Ordering::Relaxed);
        }
    }

    /// Runs `done` until it is true.
    fn until(done: impl Fn() -> bool) {
        let limit = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A panic for one object fails that object alone, once, and the thread serves the others.
    #[test]
    fn a_panic_fails_its_object() {
        let driver = Driver::start().unwrap();
        let panicking = Arc::new(Panicking::default());
        let other = Arc::new(Counting(AtomicU64::new(0), Duration::from_millis(1)));
        let objects: [Arc<dyn Driven>; 2] = [Arc::clone(&panicking) as _, Arc::clone(&other) as _];
        let turns: [Arc<Turn>; 2] = Default::default();
        for (object, turn) in objects.iter().zip(&turns) {
            driver.add(Arc::downgrade(object), turn, None);
        }
        until(|| panicking.0.load(Ordering::Relaxed) == FAILED + 1);
        driver.wake(&turns[0]);
        let calls = other.0.load(Ordering::Relaxed);
        until(|| other.0.load(Ordering::Relaxed) > calls + 2);
        assert_eq!(panicking.0.load(Ordering::Relaxed), FAILED + 1);
        driver.remove(&turns[0]);
    }

    /// A panic elsewhere fails all objects, and those that are added later.
    #[test]
    fn a_panic_of_an_event_fails_all_objects() {
        let driver = Driver::start().unwrap();
        let counting = || Arc::new(Counting(AtomicU64::new(0), Duration::from_secs(3600)));
        let all = [counting(), counting()];
        let failed = |object: &Counting| object.0.load(Ordering::Relaxed) == FAILED;
        let add = |object: &Arc<Counting>| {
            let driven: Arc<dyn Driven> = Arc::clone(object) as _;
            driver.add(Arc::downgrade(&driven), &Arc::default(), None);
        };
        all.iter().for_each(add);
        driver.shared.panics.store(true, Ordering::Relaxed);
        driver.shared.dispatcher.wait().wake();
        until(|| all.iter().all(|object| failed(object)));
        let late = counting();
        add(&late);
        assert!(failed(&late));
    }

    /// A thread that polls does what the driver's thread, which never gets a processor here, has to
    /// do: after a wake-up, and when the time has come.
    #[test]
    fn a_polling_thread_does_the_work_of_a_thread_without_processor() {
        let driver = Driver::without_thread().unwrap();
        let counting = Arc::new(Counting(AtomicU64::new(0), Duration::from_secs(3600)));
        let driven: Arc<dyn Driven> = Arc::clone(&counting) as _;
        let turn = Arc::default();
        driver.add(Arc::downgrade(&driven), &turn, None);
        driver.shared.dispatcher.wait().clear();
        let calls = || counting.0.load(Ordering::Relaxed);
        let look = || {
            std::thread::sleep(LOOK);
            driver.assist();
        };
        look();
        assert_eq!(calls(), 0, "there is nothing to do");
        driver.wake(&turn);
        look();
        assert_eq!(calls(), 1);
        // the thread, which sleeps without a limit, is woken, to sleep until that time
        assert!(driver.shared.dispatcher.wait().is_ready());
        driver.shared.dispatcher.wait().clear();
        look();
        assert_eq!(calls(), 1);
        // the time for which the thread sleeps has passed
        driver.shared.due.store(0, Ordering::Relaxed);
        *turn.due.lock() = Some(Instant::now());
        look();
        assert_eq!(calls(), 2);
        let next = driver.shared.due.load(Ordering::Relaxed);
        assert!(next > Duration::from_secs(3000).as_nanos() as u64);
        look();
        assert_eq!(calls(), 2);
        // another thread does the work
        driver.wake(&turn);
        let serving = driver.shared.serving.lock();
        look();
        drop(serving);
        assert_eq!(calls(), 2);
        look();
        assert_eq!(calls(), 3);
        // looks that follow at once do nothing
        driver.wake(&turn);
        driver.assist();
        assert_eq!(calls(), 3);
    }

    /// The end of a driver is not lost among other wake-ups.
    #[test]
    fn a_busy_driver_ends() {
        let (done, ended) = mpsc::channel();
        std::thread::spawn(move || {
            let busy: Arc<dyn Driven> = Arc::new(Busy);
            for _ in 0..3_000 {
                let driver = Driver::start().unwrap();
                driver.add(Arc::downgrade(&busy), &Arc::default(), None);
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
