//! Where in its life an endpoint is.

use std::sync::atomic::{AtomicU8, Ordering};

/// Where in its life an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Not enabled.
    Idle,
    /// Enabled, not connected.
    Enabled,
    /// Connecting, from resolution to the peer's answer.
    Connecting,
    /// Accepted, not confirmed.
    Accepting,
    /// Connected.
    Connected,
    /// Was connected, or failed to become so.
    Disconnected,
    /// Closed.
    Closed,
}

impl State {
    fn from_u8(value: u8) -> Self {
        [
            Self::Idle,
            Self::Enabled,
            Self::Connecting,
            Self::Accepting,
            Self::Connected,
            Self::Disconnected,
        ]
        .get(usize::from(value))
        .copied()
        .unwrap_or(Self::Closed)
    }
}

/// A state that threads read without a lock.
#[derive(Debug)]
pub(crate) struct AtomicState(AtomicU8);

impl AtomicState {
    pub(crate) fn new(state: State) -> Self {
        Self(AtomicU8::new(state as u8))
    }

    #[inline]
    pub(crate) fn get(&self) -> State {
        State::from_u8(self.0.load(Ordering::Acquire))
    }

    #[inline]
    pub(crate) fn is(&self, state: State) -> bool {
        self.0.load(Ordering::Acquire) == state as u8
    }

    pub(crate) fn set(&self, state: State) {
        self.0.store(state as u8, Ordering::Release);
    }

    /// Goes from one state to another, if it is in the first.
    pub(crate) fn change(&self, from: State, to: State) -> bool {
        self.0
            .compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}
