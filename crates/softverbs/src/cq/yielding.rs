//! When a thread that polls an empty queue yields the processor.
//!
//! If all processors are busy, a thread that polls without a pause prevents the process that it
//! waits for from running. So it yields from time to time, which costs a system call even if no
//! other thread is ready. The number of polls before the first yield follows the waits before:
//! where a yield ended the wait, the peer shares the processor, and the next wait yields earlier.
//! Where the completion came without one, the peer has a processor of its own.

use std::sync::atomic::{AtomicU32, Ordering};

/// Longest time, in empty polls, before the first yield: more than the answer of a running peer
/// takes.
const LONGEST: u32 = 4096;
/// Shortest time before the first yield, and time between yields.
const SHORTEST: u32 = 64;
/// A completion that is found in so few polls after a yield was made during the yield.
const AFTER_YIELD: u32 = 4;

/// The numbers are approximate: threads may count at the same time.
#[derive(Debug)]
pub(super) struct YieldPolicy {
    /// Empty polls since the last poll that found a completion.
    empty: AtomicU32,
    /// Empty polls before the first yield: a power of two.
    limit: AtomicU32,
}

impl Default for YieldPolicy {
    fn default() -> Self {
        Self {
            empty: AtomicU32::new(0),
            limit: AtomicU32::new(LONGEST),
        }
    }
}

impl YieldPolicy {
    /// Before a poll looks for completions: yields the processor if it is time. Not after the look:
    /// the poll would return without what peers did during the yield. The application may then take
    /// an event that follows a message, such as the end of the connection, before the message's
    /// completion.
    #[inline]
    pub(super) fn before_look(&self) {
        if self.empty.load(Ordering::Relaxed) >= self.limit.load(Ordering::Relaxed) {
            self.yield_now();
        }
    }

    /// Counts an empty poll.
    #[inline]
    pub(super) fn poll_was_empty(&self) {
        let empty = self.empty.load(Ordering::Relaxed).wrapping_add(1);
        self.empty.store(empty, Ordering::Relaxed);
    }

    #[cold]
    fn yield_now(&self) {
        if self.empty.load(Ordering::Relaxed).is_multiple_of(SHORTEST) {
            std::thread::yield_now();
        }
    }

    /// A poll has found a completion.
    #[inline]
    pub(super) fn poll_was_full(&self) {
        let empty = self.empty.load(Ordering::Relaxed);
        if empty == 0 {
            return;
        }
        self.empty.store(0, Ordering::Relaxed);
        let limit = self.limit.load(Ordering::Relaxed);
        if limit < LONGEST || empty >= limit {
            self.learn(empty, limit);
        }
    }

    #[cold]
    fn learn(&self, empty: u32, limit: u32) {
        let yielded = empty >= limit && empty % SHORTEST < AFTER_YIELD;
        let limit = if yielded { limit / 2 } else { limit * 2 };
        self.limit
            .store(limit.clamp(SHORTEST, LONGEST), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for a completion that comes after `polls` empty ones. Returns the limit of the next
    /// wait.
    fn wait(policy: &YieldPolicy, polls: u32) -> u32 {
        for _ in 0..polls {
            policy.poll_was_empty();
        }
        policy.poll_was_full();
        policy.limit.load(Ordering::Relaxed)
    }

    #[test]
    fn waits_that_a_yield_ends_become_short() {
        let policy = YieldPolicy::default();
        let mut limit = LONGEST;
        for _ in 0..6 {
            assert_eq!(wait(&policy, limit), limit / 2);
            limit /= 2;
        }
        assert_eq!(limit, SHORTEST);
        assert_eq!(wait(&policy, SHORTEST), SHORTEST);
        // the peer ran at the third yield
        assert_eq!(wait(&policy, 3 * SHORTEST + 1), SHORTEST);
    }

    #[test]
    fn waits_that_end_without_a_yield_become_long_again() {
        let policy = YieldPolicy::default();
        while wait(&policy, policy.limit.load(Ordering::Relaxed)) > SHORTEST {}
        assert_eq!(wait(&policy, 20), 2 * SHORTEST);
        // a yield in the wait that did not end it
        assert_eq!(wait(&policy, 2 * SHORTEST + 30), 4 * SHORTEST);
        while wait(&policy, 20) < LONGEST {}
        assert_eq!(wait(&policy, 20), LONGEST);
        assert_eq!(wait(&policy, 5 * LONGEST + 30), LONGEST);
    }

    #[test]
    fn completions_without_a_wait_change_nothing() {
        let policy = YieldPolicy::default();
        assert_eq!(wait(&policy, LONGEST), LONGEST / 2);
        assert_eq!(wait(&policy, 0), LONGEST / 2);
    }
}
