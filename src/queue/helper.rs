//! The helper thread of a domain: makes progress for endpoints without calls of the application. It
//! is created at the first need, and sleeps without a timeout when it has no work.
//!
//! - *Deferred operations.* An operation is deferred while its key is looked up
//!   (`initiator/keys/`), which takes a round trip. A thread that posts, or that reads completions,
//!   posts deferred operations. For applications that do neither (`FI_PROGRESS_AUTO`), the helper
//!   thread retries them at intervals of 0.1 to 2 ms.
//! - *Leases of keys.* An endpoint that holds keys of its peer's directory has one-shot timers of
//!   [`LEASE_CHECK`]. When a timer expires, the endpoint acknowledges revocations, or returns the
//!   keys if it has not used them since the timer was started. `docs/protocol.md`, "Stale keys".

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::CompletionQueue;
use super::slots::{EndpointSlots, LEASE_CHECK, LEASE_RETRY, Lease};
use crate::log::warn_log;

/// First and maximum interval between two retries of deferred operations.
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_millis(2);
/// Maximum number of steps of an endpoint per retry. A device may complete the request of one step,
/// for instance a read of a look-up, before the next step.
const STEPS: usize = 16;

#[cfg(test)]
thread_local! {
    /// Tests emulate a process that can have no further thread, for the calls of this thread.
    pub(crate) static NO_THREAD: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// See the module. Thread safe.
#[derive(Debug)]
pub(crate) struct Helper {
    shared: Arc<Shared>,
    /// The process that has the thread.
    owner: forks::Owner,
}

impl Default for Helper {
    fn default() -> Self {
        Self {
            shared: Arc::default(),
            owner: forks::Owner::this_process(),
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of endpoints that hold keys; changed with `state` locked.
    holders: AtomicUsize,
}

/// An endpoint, and the completion queue of its transmit requests.
#[derive(Clone, Debug)]
struct HelpedEndpoint {
    slots: Weak<EndpointSlots>,
    cq: Weak<CompletionQueue>,
}

/// The address of an endpoint's slots. No other endpoint has it while a `Weak` of them exists.
fn address(slots: &Weak<EndpointSlots>) -> usize {
    slots.as_ptr().addr()
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<HelpedEndpoint>,
    /// Endpoints that hold keys, and when their timers expire, by [`address`].
    holders: HashMap<usize, (HelpedEndpoint, Instant)>,
    /// Time at which the sleeping thread wakes; `None`: no timeout.
    wakes: Option<Instant>,
    /// Number of times that the thread has woken up.
    #[cfg(test)]
    woken: usize,
    /// The thread waits here twice while it holds references to endpoints.
    #[cfg(test)]
    pause: Option<Arc<std::sync::Barrier>>,
    stopped: bool,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    /// Makes the thread retry an endpoint's deferred operations until none is left. Acquires a leaf
    /// lock only, so a caller may hold any other lock.
    pub(crate) fn add(&self, slots: Weak<EndpointSlots>, cq: &Arc<CompletionQueue>) {
        let mut state = self.shared.state.lock();
        if state.waiting.iter().any(|known| known.slots.ptr_eq(&slots)) {
            return;
        }
        let cq = Arc::downgrade(cq);
        state.waiting.push(HelpedEndpoint { slots, cq });
        if !self.shared.start(&mut state, Instant::now() + SHORTEST) {
            state.waiting.pop();
        }
    }

    /// Starts the lease timer of an endpoint whose [`EndpointSlots::holds_keys`] was set; the timer
    /// is restarted until the flag is cleared. Acquires a leaf lock only, so a caller may hold any
    /// other lock.
    ///
    /// Without a thread the endpoint stays listed: reads of empty completion queues acknowledge for
    /// it ([`Self::has_holders`]), and the thread that a later call creates tends it.
    pub(crate) fn hold(&self, slots: Weak<EndpointSlots>, cq: &Arc<CompletionQueue>) {
        let mut state = self.shared.state.lock();
        let due = Instant::now() + LEASE_CHECK;
        let at = address(&slots);
        let known = state.holders.contains_key(&at);
        if !known {
            let cq = Arc::downgrade(cq);
            if state.thread.is_none() {
                // no one else removes the endpoints that are gone
                state
                    .holders
                    .retain(|_, (known, _)| known.slots.strong_count() != 0);
            }
            state
                .holders
                .insert(at, (HelpedEndpoint { slots, cq }, due));
        } else if state.thread.is_some() {
            return;
        }
        self.shared.start(&mut state, due);
        self.shared.count(&state);
    }

    /// Whether an endpoint of the domain holds keys.
    #[inline]
    pub(crate) fn has_holders(&self) -> bool {
        self.shared.holders.load(Ordering::Relaxed) != 0
    }

    /// Number of times that the thread has woken up, for tests.
    #[cfg(test)]
    pub(crate) fn woken(&self) -> usize {
        self.shared.state.lock().woken
    }
}

impl HelpedEndpoint {
    /// The endpoint and the queue, if both still exist.
    fn upgrade(&self) -> Option<(Arc<EndpointSlots>, Arc<CompletionQueue>)> {
        Some((self.slots.upgrade()?, self.cq.upgrade()?))
    }

    fn resume(&self) {
        let Some((slots, cq)) = self.upgrade() else {
            return;
        };
        for _ in 0..STEPS {
            // The completion that the endpoint waits for may be behind those of a queue that the
            // application does not read. A reader of a failed queue gets the error.
            let _ = cq.progress_engine_requests();
            if let Some(owner) = slots.owner.get().and_then(Weak::upgrade) {
                owner.resume();
            }
            if !slots.needs_progress() {
                return;
            }
        }
    }

    /// Handles the expired timer of the endpoint.
    fn tend(&self) -> Lease {
        let Some((slots, cq)) = self.upgrade() else {
            return Lease::Over;
        };
        // the last acknowledgement may be complete
        let _ = cq.progress_engine_requests();
        let owner = slots.owner.get().and_then(Weak::upgrade);
        owner.map_or(Lease::Over, |owner| owner.tend_keys())
    }
}

impl Shared {
    /// Makes the thread wake at `at` or earlier, and creates it if necessary. Returns false if
    /// there is no thread.
    fn start(self: &Arc<Self>, state: &mut State, at: Instant) -> bool {
        if state.stopped {
            return false;
        }
        if state.thread.is_some() {
            if state.wakes.is_none_or(|wakes| at < wakes) {
                self.changed.notify_one();
            }
            return true;
        }
        match self.create_thread() {
            Ok(thread) => {
                state.thread = Some(thread);
                true
            }
            Err(error) => {
                warn_log!(
                    EpData,
                    "no helper thread could be created: {error}; deferred operations continue \
                     only in calls that post or read completions"
                );
                false
            }
        }
    }

    fn create_thread(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        #[cfg(test)]
        if NO_THREAD.get() {
            return Err(std::io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let shared = Arc::clone(self);
        std::thread::Builder::new()
            .name("weft-helper".to_owned())
            .spawn(move || {
                biased_lock::visitor();
                shared.run();
            })
    }

    fn count(&self, state: &State) {
        self.holders.store(state.holders.len(), Ordering::Relaxed);
    }

    fn run(&self) {
        let mut pause = SHORTEST;
        let mut resume_at = None;
        let mut state = self.state.lock();
        loop {
            Self::retain_waiting(&mut state);
            if state.stopped {
                return;
            }
            let now = Instant::now();
            if state.waiting.is_empty() {
                (pause, resume_at) = (SHORTEST, None);
            } else if resume_at.is_none_or(|at| at <= now) {
                if resume_at.is_some() {
                    let waiting = state.waiting.clone();
                    MutexGuard::unlocked(&mut state, || {
                        waiting.iter().for_each(HelpedEndpoint::resume)
                    });
                    pause = (pause * 2).min(LONGEST);
                }
                resume_at = Some(Instant::now() + pause);
                continue;
            }
            if self.tend(&mut state, now) {
                continue;
            }
            let expirations = state.holders.values().map(|(_, due)| *due);
            state.wakes = expirations.chain(resume_at).min();
            match state.wakes {
                Some(at) => {
                    self.changed.wait_until(&mut state, at);
                }
                None => self.changed.wait(&mut state),
            }
            #[cfg(test)]
            {
                state.woken += 1;
            }
        }
    }

    /// Removes the endpoints that have no deferred operations any more.
    fn retain_waiting(state: &mut MutexGuard<'_, State>) {
        let mut upgraded = Vec::new();
        state.waiting.retain(|member| {
            let slots = member.slots.upgrade();
            let waits = slots.as_ref().is_some_and(|slots| slots.needs_progress());
            upgraded.extend(slots);
            waits
        });
        if !upgraded.is_empty() {
            Self::release(state, upgraded);
        }
    }

    /// Drops references to endpoints without the lock: the last one may drop the domain and with it
    /// the [`Helper`], which acquires the lock.
    fn release(
        state: &mut MutexGuard<'_, State>,
        slots: impl IntoIterator<Item = Arc<EndpointSlots>>,
    ) {
        #[cfg(test)]
        if let Some(pause) = &state.pause {
            pause.wait();
            pause.wait();
        }
        MutexGuard::unlocked(state, || drop(slots));
    }

    /// Handles the endpoints whose timers have expired. Returns false if no timer has expired.
    fn tend(&self, state: &mut MutexGuard<'_, State>, now: Instant) -> bool {
        let expired = state.holders.values().filter(|(_, due)| *due <= now);
        let expired: Vec<HelpedEndpoint> = expired.map(|(member, _)| member.clone()).collect();
        if expired.is_empty() {
            return false;
        }
        for member in expired {
            let lease = MutexGuard::unlocked(state, || member.tend());
            let next = match lease {
                Lease::Busy => LEASE_RETRY,
                Lease::Held | Lease::Over => LEASE_CHECK,
            };
            let at = address(&member.slots);
            // while the lock was released, the endpoint may have announced keys again; `hold` did
            // not add it a second time
            let slots = member.slots.upgrade();
            let held = slots.as_ref().is_some_and(|slots| slots.holds_keys());
            if !held {
                state.holders.remove(&at);
            } else if let Some((_, due)) = state.holders.get_mut(&at) {
                *due = Instant::now() + next;
            }
            Self::release(state, slots);
        }
        self.count(state);
        true
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if !self.owner.is_this_process() {
            // a forked child: it has no such thread, which may have held the lock at the fork
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let thread = {
            let mut state = self.shared.state.lock();
            state.stopped = true;
            self.shared.changed.notify_one();
            state.thread.take()
        };
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

#[allow(unsafe_code, reason = "forks")]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::flags::Flags;
    use crate::queue::{Counter, CqConfig, WaitKind};
    use std::sync::Barrier;

    /// The thread drops the last reference to an endpoint's slots, whose counter has the last
    /// reference to the domain. `add`: [`Helper::add`] or [`Helper::hold`].
    fn drops_the_domain(
        prepare: fn(&EndpointSlots),
        add: fn(&Helper, Weak<EndpointSlots>, &Arc<CompletionQueue>),
    ) {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let queues = Arc::clone(domain.queues());
        let cq = CompletionQueue::open(&queues, CqConfig::default()).unwrap();
        let slots = Arc::new(EndpointSlots::new(4, 4));
        let counter = Counter::open(&queues, WaitKind::None).unwrap();
        slots.bind_counter(&counter, Flags::SEND).unwrap();
        prepare(&slots);
        let pause = Arc::new(Barrier::new(2));
        queues.helper().shared.state.lock().pause = Some(Arc::clone(&pause));
        add(queues.helper(), Arc::downgrade(&slots), &cq);
        let thread = Arc::downgrade(&queues.helper().shared);
        pause.wait();
        drop((domain, queues, cq, counter, slots));
        pause.wait();
        let limit = Instant::now() + Duration::from_secs(10);
        while thread.strong_count() != 0 {
            assert!(Instant::now() < limit, "the thread does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The thread cannot be created when an endpoint gets keys: reads of its queue acknowledge for
    /// it. The thread that is created for the next endpoint tends both.
    #[test]
    fn an_endpoint_without_a_thread_is_tended_by_a_later_one() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let cq = CompletionQueue::open(domain.queues(), CqConfig::default()).unwrap();
        let helper = domain.queues().helper();
        let endpoint = || {
            let slots = Arc::new(EndpointSlots::new(4, 4));
            slots.set_holds_keys(true);
            helper.hold(Arc::downgrade(&slots), &cq);
            slots
        };
        NO_THREAD.set(true);
        let first = endpoint();
        assert!(helper.has_holders());
        drop(endpoint());
        let second = endpoint();
        assert_eq!(helper.shared.holders.load(Ordering::Relaxed), 2);
        NO_THREAD.set(false);
        // also by an endpoint that is known
        helper.hold(Arc::downgrade(&first), &cq);
        let third = endpoint();
        for slots in [&first, &second, &third] {
            slots.set_holds_keys(false);
        }
        let limit = Instant::now() + Duration::from_secs(10);
        while helper.has_holders() {
            assert!(Instant::now() < limit, "the thread tends nobody");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Timers of 2,000 endpoints expire at about the same time.
    #[test]
    fn all_endpoints_whose_timers_expire_are_tended() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let cq = CompletionQueue::open(domain.queues(), CqConfig::default()).unwrap();
        let helper = domain.queues().helper();
        let endpoints: Vec<_> = (0..2000)
            .map(|_| {
                let slots = Arc::new(EndpointSlots::new(1, 1));
                slots.set_holds_keys(true);
                for _ in 0..2 {
                    helper.hold(Arc::downgrade(&slots), &cq);
                }
                slots
            })
            .collect();
        let holders = || helper.shared.holders.load(Ordering::Relaxed);
        let until = |count| {
            let limit = Instant::now() + Duration::from_secs(20);
            while holders() != count {
                assert!(Instant::now() < limit, "{} instead of {count}", holders());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        assert_eq!(holders(), 2000);
        for slots in &endpoints[..1500] {
            slots.set_holds_keys(false);
        }
        until(500);
        std::thread::sleep(4 * LEASE_CHECK);
        assert_eq!(holders(), 500);
        drop(endpoints);
        until(0);
    }

    /// At the fork the thread exists, with and without the lock.
    #[test]
    fn a_forked_child_waits_for_no_helper() {
        for locked in [false, true] {
            let helper = Helper::default();
            let shared = Arc::clone(&helper.shared);
            let (release, released) = std::sync::mpsc::channel::<()>();
            shared.state.lock().thread = Some(std::thread::spawn(move || {
                let _ = released.recv();
            }));
            let held = locked.then(|| shared.state.lock());
            // SAFETY: the child drops its copy, and exits; the alarm ends one that waits.
            unsafe {
                let pid = libc::fork();
                if pid == 0 {
                    libc::alarm(10);
                    drop(helper);
                    libc::_exit(0);
                }
                let mut status = -1;
                assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                assert_eq!(status, 0, "locked: {locked}");
            }
            drop((held, release));
        }
    }

    #[test]
    fn the_thread_can_drop_the_domain() {
        drops_the_domain(EndpointSlots::set_needs_progress, Helper::add);
        drops_the_domain(|slots| slots.set_holds_keys(true), Helper::hold);
    }
}
