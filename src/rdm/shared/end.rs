//! The end of an endpoint: what the peers have still to receive, and the last polls.

use std::time::{Duration, Instant};

use biased_lock::MutexGuard;

use super::{Shared, State};
use crate::rdm::receives::EndedReceives;

/// Period of the polls of an endpoint that is being closed.
pub(in crate::rdm) const LINGER_PERIOD: Duration = Duration::from_micros(50);

impl Shared {
    /// Waits until the peers have received what the application cannot repeat: copied messages,
    /// answers, and *processed* of the messages that have arrived.
    pub(in crate::rdm) fn linger(&self, limit: Instant) {
        while self.owes_in(self.lock()) && Instant::now() < limit {
            std::thread::sleep(LINGER_PERIOD);
        }
    }

    /// Polls, and returns whether the peers have still to receive something, as in
    /// [`Self::linger`]. `None`: another thread, or a call that this thread has interrupted, has
    /// the lock.
    pub(in crate::rdm) fn owes(&self) -> Option<bool> {
        self.try_lock().map(|guard| self.owes_in(guard))
    }

    fn owes_in(&self, mut guard: MutexGuard<'_, Option<State>>) -> bool {
        let Some(state) = guard.as_mut() else {
            return false;
        };
        let polled = state.poll();
        self.wake_driver_and_readers(state);
        polled.is_ok() && (state.io.owes() || state.core.owes())
    }

    /// Ends the endpoint, which the driver serves no more: takes its state, after a last poll, and
    /// what its shared receive context reports. `None`: it was not enabled, or has ended.
    pub(in crate::rdm) fn end(&self) -> Option<(State, EndedReceives)> {
        let mut guard = self.lock();
        let state = guard.as_mut()?;
        state.core.set_now(self.now());
        state.poll_all();
        state.io.take_sinks();
        let left = state.io.rx.begin_leave();
        guard.take().zip(Some(left))
    }

    /// Informs the peers that the endpoint is being closed. A packet that has not arrived at
    /// `limit` may get lost.
    pub(in crate::rdm) fn announce_end(&self, limit: Instant) {
        self.apply_event(|core, io| core.announce_end(io));
        self.linger(limit);
    }

    /// Ends all links of an endpoint on XRC, and waits until the peers post nothing more, at most
    /// until `limit`. The driver ends the links.
    pub(in crate::rdm) fn leave(&self, limit: Instant) {
        self.apply_event(|core, io| {
            io.count_at_end();
            core.leave(io);
        });
        loop {
            {
                let mut guard = self.lock();
                let Some(state) = guard.as_mut() else {
                    return;
                };
                let polled = state.poll();
                self.wake_driver_and_readers(state);
                if polled.is_err() || state.io.links.len() == 0 || Instant::now() >= limit {
                    return;
                }
            }
            std::thread::sleep(LINGER_PERIOD);
        }
    }
}
