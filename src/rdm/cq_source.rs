//! An endpoint as a source of completion queues: a read of a queue makes progress at the endpoint,
//! and takes its entries.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use biased_lock::MutexGuard;

use super::completions::{Reader, Side};
use super::rings::{First, Work};
use super::shared::{Shared, State};
use crate::errno::Result;
use crate::queue::WakeEvent;
use crate::queue::source::{Sink, Source};

/// Number of progress calls after which a queue counts as polled, not as slept on: it is not armed
/// again, and a thread that sleeps nevertheless is woken once.
const ARMED: u32 = 4096;

/// Number of progress calls between two looks at the revocations of peers.
const LOOK: u32 = 32;

/// An endpoint as a source of one completion queue.
pub(super) struct CqSource {
    /// The endpoint, whose close removes the source from the queue and from `Shared::cq_sources`.
    shared: Arc<Shared>,
    /// The directions whose completions the queue gets.
    sides: Vec<Side>,
    /// Sends are one of them.
    sends: bool,
    /// Receives are one of them.
    receives: bool,
    /// Absent if no thread sleeps on the queue, nor on a counter of the endpoint.
    wait: OnceLock<WakeEvent>,
    /// Not 0: a thread sleeps on the queue, or is about to. Set to [`ARMED`] by such a thread, and
    /// decremented by each progress call, so that a queue that is polled again is not armed any
    /// more. When it becomes 0, the thread has been woken.
    armed: AtomicU32,
}

impl std::fmt::Debug for CqSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CqSource").finish_non_exhaustive()
    }
}

impl CqSource {
    /// `waits`: threads sleep on the queue, or on a counter of the endpoint.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`: resources of the process.
    pub(super) fn new(shared: &Arc<Shared>, sides: Vec<Side>, waits: bool) -> Result<Arc<Self>> {
        let source = Self {
            shared: Arc::clone(shared),
            receives: sides.contains(&Side::Rx),
            sends: sides.contains(&Side::Tx),
            sides,
            wait: OnceLock::new(),
            armed: AtomicU32::new(0),
        };
        if waits {
            source.make_wakeable()?;
        }
        Ok(Arc::new(source))
    }

    /// Gives the source a descriptor, for threads that will sleep on a counter. The caller has the
    /// lock of the endpoint's control state.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`: resources of the process.
    pub(super) fn make_wakeable(&self) -> Result<()> {
        if self.wait.get().is_none() {
            // not set meanwhile: the caller has the lock
            let _ = self.wait.set(WakeEvent::new()?);
        }
        Ok(())
    }

    pub(super) fn has(&self, state: &State) -> bool {
        let mut sides = self.sides.iter();
        sides.any(|side| state.io.completions.len(*side) != 0)
    }

    /// Passes on at most `max` entries of the queue's directions. Returns their number.
    #[inline(always)]
    fn pass(&self, state: &mut State, sink: &mut Sink<'_>, max: usize) -> usize {
        if max == 0 || state.io.completions.is_empty() {
            return 0;
        }
        self.pass_some(state, sink, max)
    }

    fn pass_some(&self, state: &mut State, sink: &mut Sink<'_>, max: usize) -> usize {
        let has_sources = self.shared.config.source;
        if let [side] = self.sides[..] {
            return state.pass(side, has_sources, sink, max);
        }
        let mut count = 0;
        while count < max
            && let Some(side) = state.io.completions.first_side()
        {
            count += state.pass(side, has_sources, sink, 1);
        }
        count
    }

    /// Whether the next `max` entries get the addresses of the senders.
    #[inline(always)]
    fn finds_sources(&self, sink: &Sink<'_>, max: usize) -> bool {
        self.shared.config.source && sink.uses_sources(max)
    }

    /// The state in which the reader gets entries of received messages directly.
    #[inline(always)]
    fn reader<'a, 'b>(&self, sink: &'a mut Sink<'b>, max: usize) -> Option<Reader<'a, 'b>> {
        if !self.receives || self.finds_sources(sink, max) {
            return None;
        }
        Reader::new(sink, max, self.sends)
    }

    /// The rest of a progress call for at most `max` entries, of which `left` are left, that has
    /// found a packet in a hot ring, and has nothing else to do ([`State::read_first`]).
    #[inline(never)]
    fn progress_ring(
        &self,
        mut guard: MutexGuard<'_, Option<State>>,
        sink: &mut Sink<'_>,
        (max, left): (usize, usize),
    ) -> Result<()> {
        let Some(state) = guard.as_mut() else {
            return Ok(());
        };
        state.progress_calls = state.progress_calls.wrapping_add(1);
        let room = sink.room();
        let rest = state.read_on(left != 0, self.reader(sink, left).as_mut());
        if rest || !state.io.completions.is_empty() {
            let left = left - (room - sink.room());
            return self.finish(state, sink, (max, left), rest);
        }
        if self.shared.may_wake(state) {
            self.shared.wake_driver_and_readers(state);
        }
        Ok(())
    }

    /// A progress call that may have anything to do.
    #[inline(never)]
    fn progress_any(
        &self,
        mut guard: MutexGuard<'_, Option<State>>,
        sink: &mut Sink<'_>,
        max: usize,
    ) -> Result<()> {
        let Some(state) = guard.as_mut() else {
            return Ok(());
        };
        if let Some(error) = state.failed {
            // the entries of operations that have completed before
            return match self.pass(state, sink, max) {
                0 => Err(error),
                _ => Ok(()),
            };
        }
        state.progress_calls = state.progress_calls.wrapping_add(1);
        // under the endpoint's lock, as all changes of it
        let armed = self.armed.load(Ordering::Relaxed);
        match armed {
            0 => {}
            // another thread polls, and may stop: the sleeping one arms the queue again
            1 => self.wake_sleeper(state),
            armed => self.armed.store(armed - 1, Ordering::Relaxed),
        }
        let mut left = max - self.pass(state, sink, max);
        let mut rest = false;
        if left == 0 && max != 0 {
            state.skip_poll();
        } else if armed != 0 {
            state.stop_streams();
            let polled = state.poll();
            let empty = polled.inspect_err(|_| self.shared.wake_sources(state))?;
            if (!empty || state.io.reads_wait) && self.is_armed() {
                // the caller may sleep, and the completions that are left make no event
                self.wake_sleeper(state);
            }
        } else {
            let room = sink.room();
            rest = state.read_all(self.reader(sink, left).as_mut());
            left -= room - sink.room();
        }
        self.finish(state, sink, (max, left), rest)
    }

    /// A progress call while another thread has the endpoint's lock.
    #[cold]
    #[inline(never)]
    fn progress_contended(&self, sink: &mut Sink<'_>, max: usize) -> Result<()> {
        self.progress_any(self.shared.lock(), sink, max)
    }

    /// The end of a progress call for at most `max` entries, of which `left` are left. `rest`:
    /// [`State::poll_rest`] has something to do.
    #[inline(never)]
    fn finish(
        &self,
        state: &mut State,
        sink: &mut Sink<'_>,
        (max, mut left): (usize, usize),
        rest: bool,
    ) -> Result<()> {
        if state.progress_calls.wrapping_sub(state.looked) >= LOOK {
            Self::look(state);
        }
        if rest {
            let polled = state.poll_rest();
            polled.inspect_err(|_| self.shared.wake_sources(state))?;
        }
        left -= self.pass(state, sink, left);
        if self.shared.config.auto && state.core.has_reports() {
            // credit of entries that were passed since the poll: the driver may sleep
            state.report();
        }
        if left != max && self.is_armed() {
            // this thread may leave the entries in the queue, and another one sleeps
            self.wake_sleeper(state);
        }
        if self.shared.may_wake(state) {
            self.shared.wake_driver_and_readers(state);
        }
        match state.failed {
            Some(error) if left == max => Err(error),
            _ => Ok(()),
        }
    }

    /// Passes on all entries of an endpoint that has ended.
    pub(super) fn finish_with(&self, state: &mut State, sink: &mut Sink<'_>) {
        for side in &self.sides {
            state.pass(*side, self.shared.config.source, sink, usize::MAX);
        }
    }

    /// Looks at the revocations of peers.
    #[cold]
    fn look(state: &mut State) {
        state.looked = state.progress_calls;
        if !state.io.rma.leases.is_empty() {
            state.io.acknowledge_all();
        }
    }

    pub(super) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed) != 0
    }

    /// As [`Self::wake`]. If no other source is armed, messages are read as by threads that do not
    /// sleep ([`State::sleepers`]).
    #[cold]
    #[inline(never)]
    fn wake_sleeper(&self, state: &mut State) {
        self.wake();
        let sources = self.shared.cq_sources.lock();
        state.sleepers = sources.iter().any(|source| source.is_armed());
    }

    pub(super) fn wake(&self) {
        self.armed.store(0, Ordering::Relaxed);
        if let Some(wait) = self.wait.get() {
            wait.wake();
        }
    }
}

impl Drop for CqSource {
    /// A child of the process may have a copy of the descriptor, which keeps it in the wait objects
    /// of counters: there it would be readable until the child ends.
    fn drop(&mut self) {
        if let Some(wait) = self.wait.get().filter(|_| self.shared.is_of_this_process()) {
            wait.clear();
        }
    }
}

impl Source for CqSource {
    fn progress(&self, sink: &mut Sink<'_>, max: usize) -> Result<()> {
        // without a call in front of its end, an empty read saves no registers
        let Some(mut guard) = self.shared.try_lock() else {
            return self.progress_contended(sink, max);
        };
        if let Some(state) = guard.as_mut()
            && max != 0
            && self.armed.load(Ordering::Relaxed) == 0
        {
            match state.work() {
                Work::Nothing => {
                    state.progress_calls = state.progress_calls.wrapping_add(1);
                    return Ok(());
                }
                Work::Ring(at) => {
                    if !self.receives && max == 1 && state.read_first_announced(at) {
                        let passed = state.pass_sent(sink, false);
                        if self.shared.may_wake(state) {
                            self.shared.wake_driver_and_readers(state);
                        }
                        if passed {
                            return Ok(());
                        }
                    }
                    let room = sink.room();
                    let mut reader = self.reader(sink, max);
                    let read = reader.as_mut().map(|reader| state.read_first(at, reader));
                    if matches!(read, Some(First::Done)) {
                        state.progress_calls = state.progress_calls.wrapping_add(1);
                        if !state.io.steps.is_empty() {
                            self.shared.wake_driver_and_readers(state);
                        }
                        return Ok(());
                    }
                    // announcements that are read together have several entries
                    let left = max - (room - sink.room());
                    return self.progress_ring(guard, sink, (max, left));
                }
                Work::Entries if max == 1 && self.sends && state.pass_sent(sink, self.receives) => {
                    return Ok(());
                }
                Work::Entries | Work::Any => {}
            }
        }
        self.progress_any(guard, sink, max)
    }

    fn arm(&self) -> Result<()> {
        let mut guard = self.shared.lock();
        let Some(state) = guard.as_mut() else {
            return Ok(());
        };
        if state.failed.is_some() {
            // a failure makes one event alone, for all threads that sleep on the queue and on
            // counters: the descriptor stays readable
            self.wake();
            return Ok(());
        }
        if let Some(wait) = self.wait.get() {
            wait.clear();
        }
        self.armed.store(ARMED, Ordering::Relaxed);
        state.sleepers = true;
        // the driver takes the event
        state.io.objects.cq.arm()
    }

    fn fd(&self) -> Option<std::os::fd::RawFd> {
        self.wait.get().map(WakeEvent::fd)
    }
}
