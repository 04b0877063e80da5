//! An endpoint as a source of completion queues: a read of a queue makes progress at the endpoint,
//! and takes its entries.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::completions::{Reader, Side};
use super::shared::{Shared, State};
use crate::errno::{FiErrno, Result};
use crate::queue::WakeEvent;
use crate::queue::source::{Sink, Source};

/// Number of progress calls after which a queue counts as polled, not as slept on: it is not armed
/// again, and a thread that sleeps nevertheless is woken once.
const ARMED: u32 = 4096;

/// Number of progress calls between two looks at the revocations of peers.
const LOOK: u32 = 32;

/// An endpoint as a source of one completion queue.
pub(super) struct CqSource {
    /// The endpoint, whose close removes the source from the queue and from `Shared::sources`.
    shared: Arc<Shared>,
    /// The directions whose completions the queue gets.
    sides: Vec<Side>,
    /// Receives are one of them.
    receives: bool,
    wait: Option<WakeEvent>,
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
        let wait = match waits {
            true => Some(WakeEvent::new()?),
            false => None,
        };
        Ok(Arc::new(Self {
            shared: Arc::clone(shared),
            receives: sides.contains(&Side::Rx),
            sides,
            wait,
            armed: AtomicU32::new(0),
        }))
    }

    pub(super) fn has(&self, state: &State) -> bool {
        let mut sides = self.sides.iter();
        sides.any(|side| state.io.completions.len(*side) != 0)
    }

    /// Passes on at most `max` entries of the queue's directions. Returns their number.
    #[inline(always)]
    fn pass(&self, state: &mut State, sources: bool, sink: &mut Sink<'_>, max: usize) -> usize {
        if state.io.completions.is_empty() {
            return 0;
        }
        self.pass_some(state, sources, sink, max)
    }

    fn pass_some(
        &self,
        state: &mut State,
        sources: bool,
        sink: &mut Sink<'_>,
        max: usize,
    ) -> usize {
        let mut count = 0;
        for side in &self.sides {
            count += state.pass(*side, sources, sink, max - count);
        }
        count
    }

    pub(super) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed) != 0
    }

    pub(super) fn wake(&self) {
        self.armed.store(0, Ordering::Relaxed);
        if let Some(wait) = &self.wait {
            wait.wake();
        }
    }
}

impl Source for CqSource {
    fn progress(&self, sink: &mut Sink<'_>, max: usize) -> Result<()> {
        let shared = &*self.shared;
        let mut guard = shared.lock();
        let Some(state) = guard.as_mut() else {
            return Ok(());
        };
        state.calls = state.calls.wrapping_add(1);
        // under the endpoint's lock, as all changes of it
        let armed = self.armed.load(Ordering::Relaxed);
        match armed {
            0 => {}
            // another thread polls, and may stop: the sleeping one arms the queue again
            1 => self.wake(),
            armed => self.armed.store(armed - 1, Ordering::Relaxed),
        }
        if state.calls.is_multiple_of(LOOK) && !state.io.rma.leases.is_empty() {
            state.io.acknowledge_all();
        }
        let sources = shared.config.source;
        let mut left = max - self.pass(state, sources, sink, max);
        if left != 0 || max == 0 {
            let room = sink.room();
            let empty = match armed {
                0 if self.receives && !sources => {
                    state.poll_hot(Reader::new(sink, left).as_mut())?
                }
                0 => state.poll_hot(None)?,
                _ => {
                    state.stop_streams();
                    state.poll()?
                }
            };
            left -= room - sink.room();
            if (!empty || state.io.reads_wait) && self.is_armed() {
                // the caller may sleep, and the completions that are left make no event
                self.wake();
            }
            left -= self.pass(state, sources, sink, left);
        } else {
            state.skip_poll();
        }
        if left != max && self.is_armed() {
            // this thread may leave the entries in the queue, and another one sleeps
            self.wake();
        }
        shared.after(state);
        if state.failed && left == max {
            return Err(FiErrno::EOVERRUN);
        }
        Ok(())
    }

    fn arm(&self) -> Result<()> {
        let mut guard = self.shared.lock();
        let Some(state) = guard.as_mut() else {
            return Ok(());
        };
        if let Some(wait) = &self.wait {
            wait.clear();
        }
        self.armed.store(ARMED, Ordering::Relaxed);
        state.sleepers = true;
        // the driver takes the event
        state.io.objects.cq.arm()
    }

    fn fd(&self) -> Option<std::os::fd::RawFd> {
        self.wait.as_ref().map(WakeEvent::fd)
    }
}
