//! The life cycle of a connection and of its owner's queue pair.

use std::sync::atomic::{AtomicU8, Ordering};

/// The life cycle of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// No queue pair.
    Idle,
    /// The owner is enabled: it has a queue pair, or creates one when the peer's address is
    /// resolved.
    Enabled,
    /// Connecting, from resolution to the peer's answer.
    Connecting,
    /// Accepting: the reply to the peer's request is being sent.
    Accepting,
    /// Accepted: the reply is sent and the queue pair can send, but the peer's confirmation has not been
    /// read. The peer may have sent messages already.
    Accepted,
    /// Accepted, and the queue pair has failed since. The peer's confirmation, or the failure of the
    /// connection manager, is still to come.
    Broken,
    /// Connected.
    Connected,
    /// The connection has ended, or could not be established.
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
            Self::Accepted,
            Self::Broken,
            Self::Connected,
            Self::Disconnected,
        ]
        .get(usize::from(value))
        .copied()
        .unwrap_or(Self::Closed)
    }
}

/// A state that is read without a lock.
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

    /// Whether operations may be posted to the queue pair.
    pub(crate) fn can_post(&self) -> bool {
        matches!(self.get(), State::Accepted | State::Connected)
    }

    pub(crate) fn set(&self, state: State) {
        self.0.store(state as u8, Ordering::Release);
    }

    /// Changes the state from `from` to `to`. Returns false if the state is not `from`.
    pub(crate) fn change(&self, from: State, to: State) -> bool {
        self.0
            .compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_is_read_as_it_was_set() {
        use State::{
            Accepted, Accepting, Broken, Closed, Connected, Connecting, Disconnected, Enabled, Idle,
        };
        let state = AtomicState::new(Idle);
        for each in [
            Idle,
            Enabled,
            Connecting,
            Accepting,
            Accepted,
            Broken,
            Connected,
            Disconnected,
            Closed,
        ] {
            state.set(each);
            assert_eq!(state.get(), each);
            assert!(state.is(each));
            assert_eq!(state.can_post(), matches!(each, Accepted | Connected));
        }
    }
}
