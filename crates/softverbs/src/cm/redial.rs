//! Connection requests that are repeated.

use std::net::SocketAddr;

use super::wire::Message;
use crate::sys;

/// A connection request that the listener's queue had no room for. The active side repeats it until
/// the deadline of the attempt, as a real device does.
#[derive(Debug)]
pub(super) struct Redial {
    pub(super) request: Message,
    pub(super) destination: SocketAddr,
    /// Nanoseconds until the next attempt.
    pause: u64,
    /// Time of the next attempt in nanoseconds of the monotonic clock.
    at: u64,
}

impl Redial {
    const FIRST_PAUSE: u64 = 1_000_000;
    const LONGEST_PAUSE: u64 = 250_000_000;

    pub(super) fn new(request: Message, destination: SocketAddr) -> Self {
        Self {
            request,
            destination,
            pause: Self::FIRST_PAUSE,
            at: 0,
        }
    }

    /// Whether the next attempt is due.
    pub(super) fn is_due(&self) -> bool {
        sys::now_ns() >= self.at
    }

    /// Schedules the next attempt. Returns the nanoseconds until then; each time they double, up to
    /// a quarter of a second.
    pub(super) fn postpone(&mut self) -> u64 {
        let pause = self.pause;
        self.at = sys::now_ns().saturating_add(pause);
        self.pause = (pause * 2).min(Self::LONGEST_PAUSE);
        pause
    }
}
