//! The life cycle of a connection and of its owner's queue pair.

use std::sync::atomic::{AtomicU8, Ordering};

/// The life cycle of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// The connection has no queue pair.
    Idle,
    /// The owner is enabled: it has a queue pair, or creates one when the peer's address is
    /// resolved.
    Enabled,
    /// The connection is being requested, from address resolution to the peer's answer.
    Connecting,
    /// The reply to the peer's request is being prepared and sent.
    Accepting,
    /// The reply is sent and the queue pair can send, but the event of the peer's confirmation has
    /// not been read. The peer may already have sent messages.
    Accepted,
    /// As [`Self::Accepting`] or [`Self::Accepted`], but the queue pair has failed, or the peer has
    /// ended the connection. The event of the peer's confirmation, or of a failure, has not been
    /// read.
    Broken,
    /// The connection is established.
    Connected,
    /// The connection has ended, or could not be established.
    Disconnected,
    /// The connection is closed.
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
