//! Progress of a domain's endpoints that does not depend on calls of the application: one thread of
//! the domain, made when first needed. It sleeps without a timeout while there is nothing to do.
//!
//! - *Waiting operations.* Operations wait while their keys are looked up (`initiator/keys/`), which
//!   takes a round trip; a thread that posts or reads completions posts them. The helper does it
//!   for applications that do neither (`FI_PROGRESS_AUTO`), at intervals of 0.1 to 2 ms while
//!   operations wait.
//! - *Leases of keys.* An endpoint that holds keys of its peer's directory has one-shot timers of
//!   [`LEASE`]. When one expires the endpoint acknowledges revocations, or gives its keys back if
//!   it has not used them. `docs/protocol.md`, "Stale keys".

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::CompletionQueue;
use super::slots::{Lease, Rings};
use crate::log::warn_log;

/// Interval between two looks at waiting operations: at first, and at most.
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_millis(2);
/// From the first use of a peer's keys to the look at whether they are still used.
const LEASE: Duration = Duration::from_millis(5);
/// The same where a lock was taken, or the last acknowledgement is still under way.
const AGAIN: Duration = Duration::from_micros(500);

/// See the module. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Helper {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Endpoints that hold keys; changed with `state` locked.
    holders: AtomicUsize,
}

/// An endpoint, and the queue of its requests.
#[derive(Clone, Debug)]
struct Member {
    rings: Weak<Rings>,
    cq: Weak<CompletionQueue>,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Member>,
    /// Endpoints that hold keys, and when their timers expire.
    holders: Vec<(Member, Instant)>,
    /// When the thread wakes up by itself.
    wakes: Option<Instant>,
    /// How often it has woken up.
    #[cfg(test)]
    woken: usize,
    stopped: bool,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    /// Posts the operations that wait at an endpoint, until none does. A leaf: may be called with
    /// any lock held.
    pub(crate) fn add(&self, rings: Weak<Rings>, cq: &Arc<CompletionQueue>) {
        let mut state = self.shared.state.lock();
        if state.waiting.iter().any(|known| known.rings.ptr_eq(&rings)) {
            return;
        }
        let cq = Arc::downgrade(cq);
        state.waiting.push(Member { rings, cq });
        if !self.shared.start(&mut state, Instant::now() + SHORTEST) {
            state.waiting.pop();
        }
    }

    /// Starts the timer of an endpoint whose [`Rings::holds_keys`] was set; it is started again
    /// until that is cleared. A leaf: may be called with any lock held.
    pub(crate) fn hold(&self, rings: Weak<Rings>, cq: &Arc<CompletionQueue>) {
        let mut state = self.shared.state.lock();
        let mut holders = state.holders.iter();
        if holders.any(|(known, _)| known.rings.ptr_eq(&rings)) {
            return;
        }
        let due = Instant::now() + LEASE;
        let cq = Arc::downgrade(cq);
        state.holders.push((Member { rings, cq }, due));
        if !self.shared.start(&mut state, due) {
            state.holders.pop();
        }
        self.shared.count(&state);
    }

    /// Whether an endpoint of the domain holds keys.
    #[inline]
    pub(crate) fn has_holders(&self) -> bool {
        self.shared.holders.load(Ordering::Relaxed) != 0
    }

    /// How often the thread has woken up, for tests.
    #[cfg(test)]
    pub(crate) fn woken(&self) -> usize {
        self.shared.state.lock().woken
    }
}

impl Member {
    /// The same endpoint and queue, if both are still there.
    fn upgrade(&self) -> Option<(Arc<Rings>, Arc<CompletionQueue>)> {
        Some((self.rings.upgrade()?, self.cq.upgrade()?))
    }

    fn resume(&self) {
        let Some((rings, cq)) = self.upgrade() else {
            return;
        };
        // the readers of a failed queue get the error
        let _ = cq.progress();
        if let Some(owner) = rings.owner.get().and_then(Weak::upgrade) {
            owner.resume();
        }
    }

    /// The timer has expired.
    fn tend(&self) -> Lease {
        let Some((rings, cq)) = self.upgrade() else {
            return Lease::Over;
        };
        // the last acknowledgement may be complete
        let _ = cq.progress_own();
        let owner = rings.owner.get().and_then(Weak::upgrade);
        owner.map_or(Lease::Over, |owner| owner.tend_keys())
    }
}

impl Shared {
    /// Makes the thread wake at `at` or earlier; returns whether there is a thread.
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
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("weft-helper".to_owned())
            .spawn(move || shared.run());
        match thread {
            Ok(thread) => {
                state.thread = Some(thread);
                true
            }
            Err(error) => {
                warn_log!(EpData, "no thread for operations that wait: {error}");
                false
            }
        }
    }

    fn count(&self, state: &State) {
        self.holders.store(state.holders.len(), Ordering::Relaxed);
    }

    fn run(&self) {
        let mut pause = SHORTEST;
        let mut resume_at = None;
        let mut state = self.state.lock();
        while !state.stopped {
            state.waiting.retain(|member| {
                member
                    .rings
                    .upgrade()
                    .is_some_and(|rings| rings.is_waiting())
            });
            let now = Instant::now();
            if state.waiting.is_empty() {
                (pause, resume_at) = (SHORTEST, None);
            } else if resume_at.is_none_or(|at| at <= now) {
                if resume_at.is_some() {
                    let waiting = state.waiting.clone();
                    MutexGuard::unlocked(&mut state, || waiting.iter().for_each(Member::resume));
                    pause = (pause * 2).min(LONGEST);
                }
                resume_at = Some(Instant::now() + pause);
                continue;
            }
            if self.tend(&mut state, now) {
                continue;
            }
            let expirations = state.holders.iter().map(|(_, due)| *due);
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

    /// Handles the endpoints whose timers have expired; returns whether there were any.
    fn tend(&self, state: &mut MutexGuard<'_, State>, now: Instant) -> bool {
        let expired = state.holders.iter().filter(|(_, due)| *due <= now);
        let expired: Vec<Member> = expired.map(|(member, _)| member.clone()).collect();
        if expired.is_empty() {
            return false;
        }
        for member in expired {
            let lease = MutexGuard::unlocked(state, || member.tend());
            let next = match lease {
                Lease::Busy => AGAIN,
                Lease::Held | Lease::Over => LEASE,
            };
            let same = |(known, _): &mut (Member, Instant)| known.rings.ptr_eq(&member.rings);
            // taken by an announcement in between, it is held again, and was not added a second
            // time
            let held = member
                .rings
                .upgrade()
                .is_some_and(|rings| rings.holds_keys());
            if !held {
                state.holders.retain_mut(|holder| !same(holder));
            } else if let Some((_, due)) = state
                .holders
                .iter_mut()
                .find_map(|holder| same(holder).then_some(holder))
            {
                *due = Instant::now() + next;
            }
        }
        self.count(state);
        true
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
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
