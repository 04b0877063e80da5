//! Datagrams that find a full ring: the order in which queue pairs get room, and how long a sender
//! waits for a receiver.
//!
//! The queue pairs of a process share one ring to each other process. At a full ring one of them
//! has the turn. Slots are reserved for its datagram, so that neither short datagrams of other
//! queue pairs nor messages of connections delay a long datagram without bound. The other queue
//! pairs wait until the turn is over.
//!
//! Each receiver has an account of waiting time, in nanoseconds. Waiting subtracts from the
//! account; each slot that the receiver consumes adds to it. A receiver that consumes nothing
//! delays its sender by [`PEER_WAIT_NS`] once, for any number of queue pairs and datagrams.

use super::SLOTS;
use crate::limits::PEER_WAIT_NS;

/// Nanoseconds that each consumed slot adds. A receiver that consumes 50 slots in a second never
/// uses up its account.
const EARNED_NS: u64 = 20_000_000;

/// The queue pair that has the turn, and the account that is left.
#[derive(Debug)]
pub(super) struct Turn {
    /// Number of the queue pair that has the turn; 0 for none.
    qpn: u32,
    /// Start of the turn, in nanoseconds of the monotonic clock.
    since: u64,
    /// Balance of the account, in nanoseconds.
    account: u64,
    /// The furthest valid position that the receiver has published.
    taken: u32,
}

impl Turn {
    pub(super) const fn new() -> Self {
        Self {
            qpn: 0,
            since: 0,
            account: PEER_WAIT_NS,
            taken: 0,
        }
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.qpn == 0
    }

    pub(super) fn is_turn_of(&self, qpn: u32) -> bool {
        self.qpn == qpn && qpn != 0
    }

    /// The queue pair `qpn` found no room at `now`, with the receiver at `consumed` and the sender
    /// at `head`. `qpn` gets the turn if no queue pair has it and the account is not empty. Returns
    /// whether `qpn` has the turn.
    pub(super) fn take(&mut self, qpn: u32, now: u64, consumed: u32, head: u32) -> bool {
        self.earn(consumed, head);
        if self.is_empty() && self.account > 0 {
            (self.qpn, self.since) = (qpn, now);
        }
        self.is_turn_of(qpn)
    }

    /// The turn is over at `now`.
    pub(super) fn leave(&mut self, now: u64, consumed: u32, head: u32) {
        let waited = now.saturating_sub(self.since);
        self.account = self.account.saturating_sub(waited);
        self.qpn = 0;
        self.earn(consumed, head);
    }

    /// Time at which the receiver's account ends. Only valid while a queue pair has the
    /// turn.
    pub(super) fn until(&mut self, consumed: u32, head: u32) -> u64 {
        self.earn(consumed, head);
        self.since.saturating_add(self.account)
    }

    /// Empties the account: no datagram waits for this receiver until the receiver consumes a slot.
    pub(super) fn give_up(&mut self) {
        self.account = 0;
    }

    /// Adds to the account for the slots consumed since the last call. The receiver may write any
    /// position: a position counts only if it is ahead of all earlier positions and not ahead of
    /// the sender.
    fn earn(&mut self, consumed: u32, head: u32) {
        let moved = consumed.wrapping_sub(self.taken);
        if moved <= head.wrapping_sub(self.taken) && head.wrapping_sub(consumed) <= SLOTS {
            self.taken = consumed;
            let earned = u64::from(moved).saturating_mul(EARNED_NS);
            self.account = self.account.saturating_add(earned).min(PEER_WAIT_NS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_that_takes_nothing_is_waited_for_once() {
        let mut turn = Turn::new();
        assert!(turn.take(7, 1000, 0, SLOTS));
        assert!(turn.is_turn_of(7) && !turn.is_turn_of(8));
        assert_eq!(turn.until(0, SLOTS), 1000 + PEER_WAIT_NS);
        turn.leave(1000 + PEER_WAIT_NS, 0, SLOTS);
        assert!(turn.is_empty());
        assert!(!turn.take(8, PEER_WAIT_NS + 2000, 0, SLOTS));
        assert!(turn.is_empty());
    }

    #[test]
    fn what_is_taken_adds_to_the_account() {
        let mut turn = Turn::new();
        assert!(turn.take(7, 0, 0, SLOTS));
        turn.give_up();
        turn.leave(10, 0, SLOTS);
        assert!(turn.take(7, 100, 2, SLOTS));
        assert_eq!(turn.until(2, SLOTS), 100 + 2 * EARNED_NS);
        turn.leave(100 + EARNED_NS, 2, SLOTS);
        assert!(turn.take(8, 0, 2, SLOTS));
        assert_eq!(turn.until(2, SLOTS), EARNED_NS);
        // The account never exceeds its initial balance.
        assert_eq!(turn.until(SLOTS, 2 * SLOTS), PEER_WAIT_NS);
    }

    #[test]
    fn positions_that_are_none_add_nothing() {
        let mut turn = Turn::new();
        assert!(turn.take(7, 0, 100, SLOTS));
        turn.give_up();
        for consumed in [100, 99, 0, SLOTS + 1, u32::MAX, 1 << 31] {
            assert_eq!(turn.until(consumed, SLOTS), 0, "{consumed}");
        }
        // A position that moves back and forward again adds nothing.
        assert_eq!(turn.until(101, SLOTS), EARNED_NS);
        assert_eq!(turn.until(100, SLOTS), EARNED_NS);
        assert_eq!(turn.until(101, SLOTS), EARNED_NS);
    }

    #[test]
    fn positions_wrap() {
        let mut turn = Turn::new();
        let mut head = 0u32;
        // Each round the sender fills the ring and `taken` follows.
        for _ in 0..(1u64 << 32) / u64::from(SLOTS) {
            head = head.wrapping_add(SLOTS);
            turn.earn(head, head);
        }
        assert_eq!((head, turn.taken), (0, 0));
        assert!(turn.take(7, 0, 0, SLOTS));
        turn.give_up();
        assert_eq!(turn.until(3, SLOTS), 3 * EARNED_NS);
    }
}
