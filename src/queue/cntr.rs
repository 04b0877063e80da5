//! Counters of completed operations.
//!
//! A thread that polls a completion queue advances the counters of the queue's endpoints. Reading a
//! counter, or waiting for it, polls these queues; completions for the application are queued in
//! their backlogs.
//!
//! A thread that sleeps on a counter is woken by the channels of those queues and the descriptors
//! of their sources, and by each change of the counter that a poller of the queues or the
//! application makes. The device queue of a queue without a wait object has no channel (the kernel
//! limits the channels of a process to a few hundred). For such a queue, and for the event cells of
//! regions (`event_cell.rs`), which peers change without a notification, the sleeping thread wakes
//! every millisecond; also for a queue with a source without a descriptor, and for one with a
//! descriptor that cannot be added to the counter's wait object.
//!
//! Several threads may sleep on one counter. Those in [`Counter::wait`] and those that poll
//! [`Counter::fd`] are two kinds of sleepers with a wait object each ([`Sleepers`]), so that a
//! thread clears no wake-up of the other kind. A thread in [`Counter::wait`] that wakes clears the
//! wake-up unless a change has met the condition of another one ([`Goal`]), which may not have been
//! scheduled yet: that thread finds the wait object readable, and leaves. Those that poll
//! [`Counter::fd`] have the same by `pollers.rs`.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::log::info_log;

use crate::queue::event_cell::{Cell, Event, Watch};
use crate::queue::pollers::{Answer, Pollers};
use crate::queue::wait::{Timer, WaitSet, deadline, pause};
use crate::queue::{CompletionQueue, QueueDomain, WaitKind};

/// Number of reads of a counter between two checks of the keepalive clock.
const READS: u32 = 32;
/// The period at which a sleeping thread polls queues without a channel.
const LOOK: Duration = Duration::from_millis(1);

/// The condition that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Goal {
    threshold: u64,
    /// [`Counter::error_changes`] when the wait began.
    error_changes: u64,
}

/// A goal in [`Counter::goals`].
struct Waiting<'a>(&'a Counter, Goal);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut goals = self.0.goals.lock();
        // threads with equal goals have equal entries
        if let Some(at) = goals.iter().position(|goal| *goal == self.1) {
            goals.swap_remove(at);
        }
    }
}

/// The sleepers of one kind, and what wakes them.
#[derive(Debug)]
struct Sleepers {
    wait: WaitSet,
    /// Whether a thread of this kind sleeps, or is about to.
    armed: AtomicBool,
}

impl Sleepers {
    fn open(domain: &QueueDomain) -> Result<Self> {
        let wait = WaitSet::new()?;
        if let Some(keepalive) = domain.keepalive() {
            wait.add(keepalive.fd())?;
        }
        let armed = AtomicBool::new(false);
        Ok(Self { wait, armed })
    }

    /// Wakes the sleepers after a change of a value, if none was woken since the counter was last
    /// armed for them. The caller has executed a `SeqCst` fence behind the change.
    #[inline]
    fn wake_armed(&self) {
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            self.wait.wake();
        }
    }
}

/// A queue whose polling advances a counter.
#[derive(Debug)]
struct Watched {
    queue: Weak<CompletionQueue>,
    /// Number of calls of [`Counter::watch`] without one of [`Counter::unwatch`].
    uses: usize,
    /// Whether each completion of the queue wakes the threads that sleep on the counter.
    wakes: bool,
}

impl Watched {
    fn is(&self, queue: &Arc<CompletionQueue>) -> bool {
        std::ptr::eq(self.queue.as_ptr(), Arc::as_ptr(queue))
    }
}

/// The state of a counter that was armed.
struct Armed {
    /// Whether the queues can be polled.
    queues: Result<()>,
    /// Whether the timer runs, if the counter needs it.
    timer: Result<()>,
}

/// A counter. Thread safe.
#[derive(Debug)]
pub struct Counter {
    domain: Arc<QueueDomain>,
    kind: WaitKind,
    /// The process that has made the wait objects. A forked child shares them.
    owner: forks::Owner,
    /// The threads in [`Self::wait`], if the counter has a wait object.
    waiting: Option<Sleepers>,
    /// The threads that poll [`Self::fd`], if the wait object is a descriptor.
    polling: Option<Sleepers>,
    /// Whether one of `queues` wakes no thread, so that the counter needs the timer. It needs it
    /// also while it `follows` event cells.
    polls: AtomicBool,
    /// Created when the counter is armed and needs it.
    timer: OnceLock<Timer>,
    /// The threads that call [`Self::trywait`].
    pollers: Pollers,
    /// The value and the number of failures that [`Self::poll`] has last reported; after the
    /// application has changed one, a number that it does not have.
    polled: [AtomicU64; 2],
    value: AtomicU64,
    errors: AtomicU64,
    /// How often `errors` has changed: a wait ends at each change, also if another one has restored
    /// the number. Both change with `goals` locked.
    error_changes: AtomicU64,
    /// Called between the two changes.
    #[cfg(test)]
    between: OnceLock<fn()>,
    reads: AtomicU32,
    /// The goals of the threads that sleep in [`Self::wait`], or are about to.
    goals: Mutex<Vec<Goal>>,
    queues: Mutex<Vec<Watched>>,
    /// Whether `watches` is in use.
    follows: AtomicBool,
    /// The words of event cells whose changes the counter adds.
    watches: Mutex<Vec<Watch>>,
}

impl Counter {
    /// Opens a counter with a wait object of `kind`.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`: resources of the process.
    pub fn open(domain: &Arc<QueueDomain>, kind: WaitKind) -> Result<Arc<Self>> {
        let sleepers = |exist: bool| exist.then(|| Sleepers::open(domain)).transpose();
        let waiting = sleepers(kind != WaitKind::None)?;
        let polling = sleepers(kind == WaitKind::Fd)?;
        Ok(Arc::new(Self {
            domain: Arc::clone(domain),
            kind,
            owner: forks::Owner::this_process(),
            waiting,
            polling,
            polls: AtomicBool::new(false),
            timer: OnceLock::new(),
            pollers: Pollers::new(),
            polled: Default::default(),
            value: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            error_changes: AtomicU64::new(0),
            #[cfg(test)]
            between: OnceLock::new(),
            reads: AtomicU32::new(0),
            goals: Mutex::default(),
            queues: Mutex::default(),
            follows: AtomicBool::new(false),
            watches: Mutex::default(),
        }))
    }

    /// Operations that succeeded (`fi_cntr_read(3)`). Makes progress; never blocks.
    pub fn read(&self) -> u64 {
        let _ = self.progress();
        self.pollers.read(0, &self.value)
    }

    /// Operations that failed (`fi_cntr_readerr(3)`). Makes progress; never blocks.
    pub fn read_errors(&self) -> u64 {
        let _ = self.progress();
        self.pollers.read(1, &self.errors)
    }

    /// Replaces the time for which a polling thread that was told to wait can keep others from
    /// waiting.
    #[cfg(test)]
    pub(crate) fn set_patience(&self, patience: Duration) {
        self.pollers.set_patience(patience);
    }

    fn numbers(&self) -> [u64; 2] {
        [&self.value, &self.errors].map(|number| number.load(Ordering::Acquire))
    }

    /// The application has changed one of the two values: operations may change it to the one that
    /// was read last, which would hide them. So it counts as changed until it is read again.
    fn forget(&self, which: usize) {
        self.polled[which].store(!self.numbers()[which], Ordering::Relaxed);
        if self.waits() {
            self.pollers.forget(which);
        }
    }

    /// Makes progress, and returns whether a value has changed since the last call (`fi_poll(3)`),
    /// also if the application has read it since: another thread may have.
    pub fn poll(&self) -> bool {
        self.pollers.come_back();
        let _ = self.progress();
        let before = [0, 1].map(|which| self.polled[which].load(Ordering::Relaxed));
        let numbers = self.numbers();
        for (which, polled) in self.polled.iter().enumerate() {
            let (old, new) = (before[which], numbers[which]);
            if old != new {
                // unless the application has changed the counter since (`forget`)
                let _ = polled.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        before != numbers
    }

    /// Counts operations that succeeded; wraps.
    pub(crate) fn count(&self, operations: u64) {
        self.value.fetch_add(operations, Ordering::AcqRel);
        self.changed();
    }

    /// Counts operations that failed.
    pub(crate) fn count_errors(&self, operations: u64) {
        self.change_errors(|errors| errors.wrapping_add(operations));
        self.changed();
    }

    /// Changes the number of failures, and records that. A wait that begins meanwhile has either
    /// both for changes before it, or neither: it does not end for a failure that its caller has
    /// read before.
    fn change_errors(&self, change: impl FnOnce(u64) -> u64) {
        let _goals = self.goals.lock();
        let before = self.errors.load(Ordering::Acquire);
        let errors = change(before);
        self.errors.store(errors, Ordering::Release);
        #[cfg(test)]
        if let Some(between) = self.between.get() {
            between();
        }
        self.error_changes
            .fetch_add(u64::from(errors != before), Ordering::Release);
    }

    /// Adds to the value (`fi_cntr_add(3)`); wraps.
    pub fn add(&self, value: u64) {
        self.value.fetch_add(value, Ordering::AcqRel);
        self.forget(0);
        self.changed();
    }

    /// Adds to the number of failures (`fi_cntr_adderr(3)`).
    pub fn add_errors(&self, value: u64) {
        self.change_errors(|errors| errors.wrapping_add(value));
        self.forget(1);
        self.changed();
    }

    /// Sets the value (`fi_cntr_set(3)`). Peers' operations before the call are discarded, later
    /// ones are counted.
    pub fn set(&self, value: u64) {
        self.take_events();
        self.value.store(value, Ordering::Release);
        self.forget(0);
        self.changed();
    }

    /// Sets the number of failures (`fi_cntr_seterr(3)`).
    pub fn set_errors(&self, value: u64) {
        self.change_errors(|_| value);
        self.forget(1);
        self.changed();
    }

    /// Waits until the value is at least `threshold`; a `timeout` of `None` is no limit. A counter
    /// without a wait object is checked every 20 µs: `fi_cntr(3)` does not require that, but
    /// programs rely on it (fabtests' `fi_multi_mr`), and other providers support it.
    ///
    /// # Errors
    /// - `EAVAIL`: the number of failures has changed meanwhile, and may be the same again.
    /// - `ETIMEDOUT`: the timeout has passed.
    /// - `EINTR`: a signal handler ran. Not without a wait object: a handler may run between two
    ///   sleeps, so no check could find each one.
    /// - `EOVERRUN`: a queue of the counter has lost completions.
    pub fn wait(&self, threshold: u64, timeout: Option<Duration>) -> Result<()> {
        self.pollers.come_back();
        let deadline = deadline(timeout);
        let goal = Goal {
            threshold,
            error_changes: self.error_changes(),
        };
        let Some(waiting) = &self.waiting else {
            return self.look_until(goal, deadline);
        };
        let wait = &waiting.wait;
        let _ = self.progress();
        if let Some(result) = self.result_of(goal) {
            return result;
        }
        self.goals.lock().push(goal);
        let _waiting = Waiting(self, goal);
        let mut over = false;
        loop {
            if !self.ends_a_wait() {
                wait.clear();
            }
            let armed = self.arm(waiting);
            // a change before the fence may have woken no thread, or its wake-up was cleared: the
            // wait object is readable until the thread whose wait ends has left
            let ends_a_wait = self.ends_a_wait();
            if ends_a_wait {
                wait.wake();
            }
            if let Some(result) = self.result_of(goal) {
                return result;
            }
            armed.queues?;
            if over {
                return Err(FiErrno::ETIMEDOUT);
            }
            // the last check after the timeout finds changes that have not woken the thread, of
            // event cells for instance
            let woken = if ends_a_wait {
                pause(deadline)
            } else if armed.timer.is_err() {
                let next = Instant::now() + LOOK;
                wait.wait(Some(deadline.map_or(next, |deadline| deadline.min(next))))?;
                true
            } else {
                wait.wait(deadline)?
            };
            over = !woken || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        }
    }

    /// As [`Self::wait`], for a counter without a wait object.
    fn look_until(&self, goal: Goal, deadline: Option<Instant>) -> Result<()> {
        loop {
            let progress = self.progress();
            if let Some(result) = self.result_of(goal) {
                return result;
            }
            progress?;
            if !pause(deadline) {
                return Err(FiErrno::ETIMEDOUT);
            }
        }
    }

    /// [`Self::error_changes`], for a wait that begins.
    fn error_changes(&self) -> u64 {
        let _goals = self.goals.lock();
        self.error_changes.load(Ordering::Acquire)
    }

    /// The result of a wait for `goal`; `None`: the wait continues.
    fn result_of(&self, goal: Goal) -> Option<Result<()>> {
        if self.value.load(Ordering::Acquire) >= goal.threshold {
            Some(Ok(()))
        } else if self.error_changes.load(Ordering::Acquire) != goal.error_changes {
            Some(Err(FiErrno::EAVAIL))
        } else {
            None
        }
    }

    /// Whether the wait of a thread in [`Self::wait`] ends.
    fn ends_a_wait(&self) -> bool {
        let goals = self.goals.lock();
        goals.iter().any(|goal| self.result_of(*goal).is_some())
    }

    /// Prepares for waiting on [`Self::fd`] (`fi_trywait(3)`).
    ///
    /// # Errors
    /// - `EAGAIN`: a value has changed since the thread has read it, or a change has yet to wake
    ///   another thread, for which the call then pauses; the caller does not wait.
    /// - `EINVAL`: no wait object.
    /// - `EMFILE`, `ENOMEM`, `ENOSPC`: no resources for a timer without which a change may not make
    ///   the descriptor readable.
    /// - `EOVERRUN`: a queue of the counter has lost completions.
    pub fn trywait(&self) -> Result<()> {
        // without a descriptor the caller has nothing to wait on
        let sleepers = self.polling.as_ref().or(self.waiting.as_ref());
        let sleepers = sleepers.ok_or(FiErrno::EINVAL)?;
        self.domain.help_from_poll();
        if self.polling.is_some() {
            sleepers.wait.clear();
        }
        let armed = self.arm(sleepers);
        let ready = armed.queues.and(armed.timer);
        let sleeps = ready.is_ok() && self.polling.is_some();
        let answer = self.pollers.ask(|| self.numbers(), sleeps);
        let result = match answer {
            Answer::Changed => Err(FiErrno::EAGAIN),
            Answer::Busy => ready.and(Err(FiErrno::EAGAIN)),
            Answer::Unchanged => ready,
        };
        if result.is_err() {
            // the call has cleared a wake-up that another thread may need, which was told to wait
            sleepers.wait.wake();
        }
        if answer == Answer::Busy {
            pause(None);
        }
        result
    }

    /// Reverts [`Self::trywait`]: the calling thread does not wait, because another object of the
    /// same `fi_trywait(3)` has refused it. No change has to wake it.
    pub fn come_back(&self) {
        self.pollers.come_back();
    }

    /// The descriptor to poll for reading, if the wait object is one ([`WaitKind::Fd`]). The
    /// counter owns it.
    pub fn fd(&self) -> Option<RawFd> {
        self.polling.as_ref().map(|polling| polling.wait.fd())
    }

    /// Whether the counter has a wait object, so that the sources of its queues need a descriptor.
    pub(crate) fn waits(&self) -> bool {
        self.waiting.is_some()
    }

    /// The sleepers of both kinds.
    fn sleepers(&self) -> impl Iterator<Item = &Sleepers> {
        self.waiting.iter().chain(&self.polling)
    }

    /// Wakes all threads that sleep on the counter; each arms it again, or leaves. Acquires no
    /// lock.
    pub(crate) fn wake(&self) {
        self.sleepers().for_each(|sleepers| sleepers.wait.wake());
    }

    /// The kind of the counter's wait object.
    pub fn wait_kind(&self) -> WaitKind {
        self.kind
    }

    /// Arms the counter: the next change wakes these sleepers, whose wait object the caller has
    /// cleared. Then adds the changes made before.
    fn arm(&self, sleepers: &Sleepers) -> Armed {
        if let Some(keepalive) = self.domain.keepalive() {
            keepalive.woken();
        }
        sleepers.armed.store(true, Ordering::Relaxed);
        // either this thread reads the new value, or the thread that changes it reads `armed`
        fence(Ordering::SeqCst);
        let queues = self.for_queues(CompletionQueue::arm_for_counter);
        if queues.is_err() {
            // the other threads find the failure too
            self.wake();
        }
        self.take_events();
        let timer = self.set_timer();
        Armed { queues, timer }
    }

    /// Starts the timer, if the counter needs it, or else stops it.
    fn set_timer(&self) -> Result<()> {
        let needed = || self.polls.load(Ordering::Acquire) || self.follows.load(Ordering::Acquire);
        if !needed() {
            let Some(timer) = self.timer.get() else {
                return Ok(());
            };
            // an expired timer would stay readable
            timer.set(Duration::ZERO);
            // if it is needed again: another thread, which relies on it, may sleep already
            if !needed() {
                return Ok(());
            }
        }
        if self.timer.get().is_none() {
            // one thread creates it
            let _queues = self.queues.lock();
            if self.timer.get().is_none() {
                let timer = Timer::new()?;
                for sleepers in self.sleepers() {
                    sleepers.wait.add(timer.fd())?;
                }
                let _ = self.timer.set(timer);
            }
        }
        if let Some(timer) = self.timer.get() {
            timer.set(LOOK);
        }
        Ok(())
    }

    /// Follows a change of a value: wakes the sleepers.
    #[inline]
    fn changed(&self) {
        if let Some(waiting) = &self.waiting {
            fence(Ordering::SeqCst);
            waiting.wake_armed();
            // a counter with a descriptor has both
            if let Some(polling) = &self.polling {
                polling.wake_armed();
            }
        }
    }

    /// The part of the domain that the counter belongs to.
    pub fn domain(&self) -> &Arc<QueueDomain> {
        &self.domain
    }

    /// Adds a queue, whose polling advances the counter, for an endpoint: once for each kind of its
    /// operations that the counter counts, behind the endpoint's place or source in the queue.
    pub(crate) fn watch(&self, queue: &Arc<CompletionQueue>) {
        {
            let mut queues = self.queues.lock();
            // under the lock, so that the last result is that for all of the queue's sources
            let wakes = !self.waits() || self.is_woken_by(queue);
            if let Some(watched) = queues.iter_mut().find(|watched| watched.is(queue)) {
                watched.uses += 1;
                watched.wakes = wakes;
            } else {
                queues.push(Watched {
                    queue: Arc::downgrade(queue),
                    uses: 1,
                    wakes,
                });
            }
            self.set_polls(&queues);
        }
        // a thread that sleeps already arms the queue
        self.wake();
    }

    /// Reverts one call of [`Self::watch`]. The endpoint has left the queue, after all of its
    /// completions were counted. No effect in a forked child: it would remove the descriptors from
    /// the wait objects of its parent (`epoll(7)`).
    pub(crate) fn unwatch(&self, queue: &Arc<CompletionQueue>) {
        if !self.owner.is_this_process() {
            return;
        }
        let mut queues = self.queues.lock();
        let Some(at) = queues.iter().position(|watched| watched.is(queue)) else {
            return;
        };
        queues[at].uses -= 1;
        if queues[at].uses != 0 {
            return;
        }
        queues.swap_remove(at);
        // the counter does not arm them any more, so they could stay readable
        queue.for_wake_fds(|fd| {
            if let Some(fd) = fd {
                self.sleepers().for_each(|from| from.wait.remove(fd));
            }
        });
        self.set_polls(&queues);
    }

    fn set_polls(&self, queues: &[Watched]) {
        let polls = queues.iter().any(|watched| !watched.wakes);
        self.polls.store(polls, Ordering::Release);
    }

    /// Adds the descriptors of a queue to the wait objects. Returns whether each completion of the
    /// queue makes one of them readable.
    fn is_woken_by(&self, queue: &CompletionQueue) -> bool {
        let mut woken = true;
        queue.for_wake_fds(|fd| {
            let add = |fd| self.sleepers().try_for_each(|to| to.wait.add_again(fd));
            let added = fd.map_or(Err(FiErrno::EINVAL), add);
            if let (Some(_), Err(error)) = (fd, &added) {
                info_log!(
                    Cq,
                    "the channel of a queue cannot wake threads in fi_cntr_wait: {error}"
                );
            }
            woken &= added.is_ok();
        });
        woken
    }

    /// Adds a word of an event cell, whose changes the counter adds to its value.
    pub(crate) fn follow(&self, watch: Watch) {
        self.watches.lock().push(watch);
        self.follows.store(true, Ordering::Release);
        // a thread that sleeps already starts the timer
        self.wake();
    }

    /// Adds the last changes of a cell, and removes the cell's words.
    pub(crate) fn leave(&self, cell: &Arc<Cell>) {
        self.take_events();
        let mut watches = self.watches.lock();
        watches.retain(|watch| !watch.is_of(cell));
        self.follows.store(!watches.is_empty(), Ordering::Release);
    }

    /// Number of words of event cells that the counter watches, for tests.
    #[cfg(test)]
    pub(crate) fn watched(&self) -> usize {
        self.watches.lock().len()
    }

    /// Adds the changes of the event cells.
    #[inline]
    fn take_events(&self) {
        if self.follows.load(Ordering::Acquire) {
            let mut watches = self.watches.lock();
            let count = watches.iter_mut().map(Watch::take);
            let count = count.fold(0_u64, u64::wrapping_add);
            if count != 0 {
                // under the lock, so that `set`, which takes the changes first, overwrites all that
                // were taken before
                self.count(count);
            }
        }
    }

    /// Calls a function of each queue. Returns the first failure; a read of that queue returns it
    /// too.
    fn for_queues(&self, each: impl Fn(&CompletionQueue) -> Result<()>) -> Result<()> {
        let mut result = Ok(());
        for watched in self.queues.lock().iter() {
            if let Some(queue) = watched.queue.upgrade() {
                result = result.and(each(&queue));
            }
        }
        result
    }

    /// Polls the queues that advance the counter, and adds the changes of its event cells. Never
    /// blocks.
    ///
    /// # Errors
    /// `EOVERRUN`: a queue has lost completions. Others: those of a device queue. All queues were
    /// polled nevertheless, and a read of the queue returns the error too.
    pub fn progress(&self) -> Result<()> {
        let result = self.for_queues(|queue| queue.progress_for_counter().map(drop));
        self.take_events();
        let reads = self.reads.fetch_add(1, Ordering::Relaxed);
        if reads.is_multiple_of(READS) {
            self.domain.help_from_poll();
        }
        result
    }
}

/// The counters of an endpoint, by the kind of operation.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    send: OnceLock<Arc<Counter>>,
    recv: OnceLock<Arc<Counter>>,
    read: OnceLock<Arc<Counter>>,
    write: OnceLock<Arc<Counter>>,
    /// Counters of the peers' operations, by [`Event`]. Connected endpoints have theirs in
    /// `msg::Control`, because they are bound before the endpoint is enabled, never later.
    remote: [OnceLock<Arc<Counter>>; Event::ALL.len()],
}

impl Counters {
    /// The kinds of operation that can be counted.
    pub(crate) const KINDS: Flags = Flags::SEND
        .union(Flags::RECV)
        .union(Flags::READ)
        .union(Flags::WRITE);

    /// The counter slot of the first kind in `flags`.
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

    /// Binds a counter of these kinds, `REMOTE_READ` and `REMOTE_WRITE` included; connected
    /// endpoints pass those of [`Self::KINDS`] alone.
    ///
    /// # Errors
    /// `EINVAL`: one of the kinds has a counter.
    pub(crate) fn bind(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        let places = || {
            let own = kinds.iter().filter_map(|kind| self.place(kind));
            own.chain(Event::of(kinds).map(|event| &self.remote[event as usize]))
        };
        if places().any(|place| place.get().is_some()) {
            return Err(FiErrno::EINVAL);
        }
        for place in places() {
            // cannot fail: the slot is empty, and the caller holds a lock
            let _ = place.set(Arc::clone(counter));
        }
        Ok(())
    }

    /// Counts an operation that has ended; `flags` give its kind.
    #[inline(always)]
    pub(crate) fn count(&self, flags: Flags, success: bool) {
        if let Some(counter) = self.place(flags).and_then(OnceLock::get) {
            if success {
                counter.count(1);
            } else {
                counter.count_errors(1);
            }
        }
    }

    /// Counts an operation of a peer.
    pub(crate) fn count_remote(&self, event: Event) {
        if let Some(counter) = self.remote[event as usize].get() {
            counter.count(1);
        }
    }

    /// The counters of the peers' operations.
    pub(crate) fn remote(&self) -> impl Iterator<Item = (Event, &Arc<Counter>)> {
        let counter = |event| Some((event, self.remote[event as usize].get()?));
        Event::ALL.into_iter().filter_map(counter)
    }

    /// The counters of the transmit side.
    pub(crate) fn tx(&self) -> impl Iterator<Item = &Arc<Counter>> {
        [&self.send, &self.read, &self.write]
            .into_iter()
            .filter_map(OnceLock::get)
    }

    /// The counter of the receive side.
    pub(crate) fn rx(&self) -> Option<&Arc<Counter>> {
        self.recv.get()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::queue::event_cell::Cells;
    use crate::verbs::Pd;

    static STEPS: Barrier = Barrier::new(2);

    /// Between the two changes of a failure another thread reads the number.
    fn between() {
        STEPS.wait();
        STEPS.wait();
        // it begins to wait for the counter
        std::thread::sleep(Duration::from_millis(20));
    }

    /// The 1 ms of event cells ends with the last cell.
    #[test]
    fn a_counter_that_follows_no_cell_any_more_wakes_nobody() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
        let cells = Cells::new(&Pd::alloc(&device).unwrap()).unwrap();
        let cell = cells.take().unwrap();
        counter.follow(Watch::new(&cell, Event::Write));
        assert_eq!(counter.trywait(), Ok(()));
        let fd = &counter.polling.as_ref().unwrap().wait;
        let limit = || Some(Instant::now() + Duration::from_secs(20));
        assert_eq!(fd.wait(limit()), Ok(true));
        counter.leave(&cell);
        for _ in 0..2 {
            assert_eq!(counter.trywait(), Ok(()));
            let soon = Instant::now() + 20 * LOOK;
            assert_eq!(fd.wait(Some(soon)), Ok(false));
        }
        // and begins again
        counter.follow(Watch::new(&cell, Event::Write));
        assert_eq!(counter.trywait(), Ok(()));
        assert_eq!(fd.wait(limit()), Ok(true));
    }

    #[test]
    fn a_wait_does_not_end_for_a_failure_that_was_read_before() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        for kind in [WaitKind::None, WaitKind::Unspec] {
            let counter = Counter::open(domain.queues(), kind).unwrap();
            counter.between.set(between).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| counter.count_errors(1));
                STEPS.wait();
                assert_eq!(counter.read_errors(), 1);
                STEPS.wait();
                let waited = counter.wait(1, Some(Duration::from_millis(100)));
                assert_eq!(waited, Err(FiErrno::ETIMEDOUT));
            });
        }
    }
}
