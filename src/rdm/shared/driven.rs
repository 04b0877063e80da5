//! What the driver's thread does for an endpoint, and the connection requests to it.

#[cfg(test)]
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Shared, State};
use crate::conn::{CmSink, Dispatcher, Driven, Driver, Outcome};
use crate::errno::FiErrno;
use crate::rdm::core::link::LinkKey;
use crate::rdm::cq_source::CqSource;
use crate::rdm::link::parked_ids::is_port_down;
use crate::rdm::step::Step;
use crate::verbs::CmId;
use crate::{
    Token,
    log::{info_log, warn_log},
};

/// Period at which the driver polls while it ends links, and at which it examines whether an
/// application with automatic progress polls.
const PERIOD: Duration = Duration::from_millis(1);

/// The driver's part in requests that wait for a further operation (`FI_MORE`): it posts them if
/// the application makes no further call for [`PERIOD`] to two times that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DelayWatch {
    Off,
    /// The driver was woken.
    Begun,
    /// The driver waits for [`PERIOD`].
    Waits,
}

impl DelayWatch {
    /// Begins it. Returns whether the driver must be woken.
    pub(super) fn begins(&mut self) -> bool {
        let off = *self == Self::Off;
        if off {
            *self = Self::Begun;
        }
        off
    }
}

impl Shared {
    /// Whether RMA of a link that the peer may have disconnected has not completed, and its results
    /// may still arrive ([`REFUSAL_WAIT`](crate::conn::REFUSAL_WAIT)).
    pub(in crate::rdm) fn awaits_answers(&self, link: LinkKey, disconnected: Instant) -> bool {
        let mut state = self.lock();
        let Some(io) = state.as_mut().map(|state| &mut state.io) else {
            return false;
        };
        if !io
            .links
            .get_mut(link)
            .is_some_and(|record| record.has_rma())
        {
            return false;
        }
        let awaited = Instant::now() < disconnected + io.answer;
        if !awaited && !io.answer.is_zero() {
            info_log!(
                EpData,
                "RMA on {link:?} has had no result for {} ms since the end of the link began",
                io.answer.as_millis()
            );
        }
        awaited
    }

    /// Whether the driver was woken only for requests that wait for a further operation, which
    /// still may follow.
    fn waits_for_more(&self) -> bool {
        let idle = self.driver_requests.lock().is_empty();
        let sleeps = |source: &Arc<CqSource>| source.is_armed();
        if !idle || self.cq_sources.lock().iter().any(sleeps) {
            return false;
        }
        let mut guard = self.lock_for_rma();
        let Some(state) = guard.as_mut() else {
            return false;
        };
        let begun = state.delay_watch == DelayWatch::Begun;
        let waits = begun && state.io.rma.delayed.is_some() && state.io.steps.is_empty();
        if waits {
            (state.delay_watch, state.woken) = (DelayWatch::Waits, false);
        }
        waits
    }

    /// Requests the next event of the device queue; `polls`: the application has polled since the
    /// last call. Returns whether a thread sleeps on a completion queue.
    fn arm_queue(&self, state: &State, polls: bool) -> bool {
        let cq = state.device_queue();
        // The event that the driver has taken may be that for which a reader has armed the queue,
        // and the reader's completion may come later than those that are polled next.
        let armed = |source: &Arc<CqSource>| source.is_armed();
        let sleeper = self.cq_sources.lock().iter().any(armed);
        let armed = match self.config.auto {
            _ if sleeper => cq.arm(),
            true if polls => Ok(()),
            true => cq.arm(),
            false => cq.arm_solicited(),
        };
        if let Err(error) = armed {
            warn_log!(EpData, "ibv_req_notify_cq: {error}");
        }
        sleeper
    }

    /// Executes steps, without the endpoint's lock. Those that are not complete are executed again
    /// by the next call of the driver.
    fn execute_steps(&self, steps: Vec<(u64, Step)>) {
        let mut left = Step::execute_all(steps, self);
        if !left.is_empty()
            && let Some(state) = self.lock().as_mut()
        {
            state.io.withdrawing.append(&mut left);
        }
    }
}

impl State {
    /// Ends the links, and the halves of links on circuits, of which nothing is under way any more.
    /// `empty`: whether the last poll has found the device queue and the rings empty. Returns when
    /// the driver is to call it next.
    fn end_links(&mut self, empty: &mut bool) -> Option<Instant> {
        for link in self.io.half_ended_links(Instant::now()) {
            self.io.end_rma(link);
            self.run_todo();
            self.core.half_ended(link, &mut self.io);
            match self.core.peer_of(link) {
                Some(_) => self.io.linger(link),
                None => self.io.remove_link(link),
            }
            self.run_todo();
        }
        let seen = self.io.polled;
        let (drained, next) = self.io.links.drained(Instant::now(), seen);
        if !drained.is_empty() && *empty {
            *empty = self.poll_all();
        }
        for link in drained {
            // peers that send without a pause do not delay the end of other links
            let ended = *empty || self.is_polled(link);
            if ended {
                // what is repeated precedes what the core posts to the next link
                self.io.end_rma(link);
                self.run_todo();
                self.core.ended(link, &mut self.io);
                self.io.remove_link(link);
            }
        }
        next
    }
}

impl Driven for Shared {
    fn drive(&self) -> Option<Instant> {
        if self.waits_for_more() {
            return Some(Instant::now() + PERIOD);
        }
        #[cfg(test)]
        assert!(!self.panics.load(Ordering::Relaxed), "planted");
        let requests = std::mem::take(&mut *self.driver_requests.lock());
        let mut guard = self.lock();
        let state = guard.as_mut()?;
        state.woken = false;
        state.delay_watch = DelayWatch::Off;
        #[cfg(test)]
        {
            state.drives += 1;
        }
        state.core.set_now(self.now());
        let polls = state.progress_calls
            != std::mem::replace(&mut state.progress_calls_seen, state.progress_calls);
        let sleeper = self.arm_queue(state, polls);
        let now = self.now();
        if polls {
            state.polled_at = now;
        }
        // with manual progress only the application continues
        let auto = self.config.auto;
        let polled = auto && now - state.polled_at < PERIOD.as_nanos() as u64;
        if sleeper || auto && !polled {
            state.stop_streams();
        }
        let mut empty = state.poll_all();
        for request in requests {
            state.io.serve_driver_request(&mut state.core, request);
            state.run_todo();
        }
        let lease = state.io.tend_leases(Instant::now());
        let mut next = state.end_links(&mut empty);
        let circuits = state
            .io
            .tend_circuits(&mut state.core, empty, Instant::now());
        state.run_todo();
        state.io.post_again(&state.core);
        state.run_todo();
        state.core.tick(&mut state.io);
        state.forget_freed();
        for (stored, target) in state.io.rx.take_pending() {
            state.io.deliver_stored(stored, target);
        }
        state.run_todo();
        state.post_receives();
        self.update_context(state);
        // this thread sees its own changes of times and steps below
        self.wake_readers(state);
        let steps = state.io.take_steps();
        // the polls of a failed endpoint return before they do it
        let live = state.failed.is_none();
        let reads = state.io.reads_wait || live && state.io.copies();
        let deadline = state.core.deadline();
        // operations wait for the completion of look-ups, for room or for credit
        let rma = live && state.io.rma.progresses(&state.core);
        state.io.rma.called = state.io.rma.has_work();
        next = next.into_iter().chain(lease).chain(circuits).min();
        let again = rma
            || state.io.links.is_ending()
            || state.io.ends_on_circuits()
            || polled && (polls || !state.io.streams.is_empty())
            || !steps.is_empty()
            || !empty
            || state.io.results.holds_credit()
            || state.io.fins.holds_credit()
            || state.io.posts_again()
            || reads;
        drop(guard);
        self.execute_steps(steps);
        let down = |id: &CmId| is_port_down(self.domain.device(), id);
        let parked = self.parked.tend(Instant::now(), down);
        next = next.into_iter().chain(parked).min();
        if again {
            let pause = if reads { Duration::ZERO } else { PERIOD };
            let soon = Instant::now() + pause;
            next = Some(next.map_or(soon, |next| next.min(soon)));
        }
        let deadline = deadline.map(|time| self.begin + Duration::from_nanos(time));
        [next, deadline].into_iter().flatten().min()
    }

    fn fail(&self) {
        Shared::fail(self, FiErrno::EOTHER);
    }
}

/// Receives the connection requests of an endpoint's listener.
#[derive(Debug)]
pub(in crate::rdm) struct RequestSink {
    shared: Weak<Shared>,
    driver: Arc<Driver>,
    /// The requests are those for links on circuits.
    sidr: bool,
}

impl RequestSink {
    pub(in crate::rdm) fn new(shared: &Shared, sidr: bool) -> Arc<Self> {
        Arc::new(Self {
            shared: shared.weak(),
            driver: Arc::clone(&shared.driver),
            sidr,
        })
    }
}

impl CmSink for RequestSink {
    fn dispatcher(&self) -> &Dispatcher {
        self.driver.dispatcher()
    }

    fn report(&self, _: Token, outcome: Outcome) {
        if let (Outcome::Requested(request), Some(shared)) = (outcome, self.shared.upgrade()) {
            shared.requested(request, self.sidr);
        }
    }

    fn forget(&self, _: Token) {}
}
