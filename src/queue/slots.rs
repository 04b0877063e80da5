//! Work slots: the state of a request between its post and its completion.
//!
//! A ring per direction of an endpoint, allocated once. The poster (under the endpoint's lock of
//! that direction) moves the head, the poller (under the completion queue's lock) moves the tail.
//! A request's number, which counts up and wraps, is part of its `wr_id`, so that a completion
//! without a request is detected.
//!
//! Requests of one queue complete in order; an unsignaled one is complete when a later one is.

#![allow(unsafe_code, reason = "slots are shared without a lock")]

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::queue::{Counter, Counters};
use crate::sync::{AtomicU32, UnsafeCell};
use crate::wire::records::MAX_SEGMENTS;

/// The state of a posted request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    pub(crate) context: usize,
    /// Flags of its completion entry.
    pub(crate) flags: Flags,
    /// Whether success makes an entry.
    pub(crate) visible: bool,
    /// Whether failure makes an entry: not for inject, which has no context to identify it.
    pub(crate) reports_failure: bool,
    /// Whether the device reports success.
    pub(crate) signaled: bool,
    /// Whether another request of the same operation follows it.
    pub(crate) part: bool,
    /// The operation fails although its request does nothing and succeeds.
    pub(crate) refused: Option<FiErrno>,
    /// Set by the poller.
    pub(crate) done: bool,
}

/// Slots of one direction.
#[derive(Debug)]
pub(crate) struct SlotRing {
    slots: Box<[UnsafeCell<Slot>]>,
    mask: u32,
    depth: u32,
    /// Number of the next request; written by the poster.
    head: AtomicU32,
    /// Number of the oldest request that isn't complete; written by the poller.
    tail: AtomicU32,
}

// SAFETY: a slot between tail and head is read and written by the poller alone, every other one
// by the poster alone; each side is one thread at a time, and moving head or tail with release
// and reading it with acquire hands slots over.
unsafe impl Send for SlotRing {}
// SAFETY: as above.
unsafe impl Sync for SlotRing {}

impl SlotRing {
    /// A ring for `depth` requests, and one of the engine's own besides.
    pub(crate) fn new(depth: usize) -> Self {
        Self::with_more(depth, 1)
    }

    /// The same, and for further parts of the last operation: writes, flushes, remote data, events.
    pub(crate) fn for_parts(depth: usize) -> Self {
        Self::with_more(depth, 2 * MAX_SEGMENTS + 3)
    }

    fn with_more(depth: usize, more: usize) -> Self {
        let size = (depth + more).next_power_of_two();
        Self {
            slots: (0..size).map(|_| UnsafeCell::default()).collect(),
            mask: size as u32 - 1,
            depth: depth as u32,
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
        }
    }

    /// How many requests may be under way.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// How many are under way.
    pub(crate) fn outstanding(&self) -> u32 {
        let tail = self.tail.load(Ordering::Acquire);
        self.head.load(Ordering::Acquire).wrapping_sub(tail)
    }

    /// Moves whenever a request completes.
    fn progress_mark(&self) -> u32 {
        self.tail.load(Ordering::Acquire)
    }

    /// The number of the oldest request that isn't complete.
    #[inline]
    pub(crate) fn tail(&self) -> u32 {
        self.tail.load(Ordering::Acquire)
    }

    /// The number of the next request. Poster only.
    #[inline]
    pub(crate) fn next_number(&self) -> u32 {
        self.head.load(Ordering::Relaxed)
    }

    /// Whether the request of this number is outstanding.
    pub(crate) fn is_outstanding(&self, number: u32) -> bool {
        let tail = self.tail.load(Ordering::Acquire);
        number.wrapping_sub(tail) < self.head.load(Ordering::Acquire).wrapping_sub(tail)
    }

    /// Whether there is no room for an application's request.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        let tail = self.tail.load(Ordering::Acquire);
        self.head.load(Ordering::Relaxed).wrapping_sub(tail) >= self.depth
    }

    /// The index of the slot of the next request, for storage that runs along.
    #[inline]
    pub(crate) fn next_index(&self) -> usize {
        (self.head.load(Ordering::Relaxed) & self.mask) as usize
    }

    /// How many slots there are.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Enters a request *before* it is posted, because its completion may be polled before
    /// posting returns. Gives its number. Poster only, and only where there is room.
    #[inline(always)]
    pub(crate) fn push(&self, slot: Slot) -> u32 {
        let head = self.head.load(Ordering::Relaxed);
        // SAFETY: there is room, so the slot is the poster's.
        self.slot(head).with_mut(|place| unsafe { *place = slot });
        self.head.store(head.wrapping_add(1), Ordering::Release);
        head
    }

    /// Takes back the request entered last, which the device refused. Poster only.
    #[inline]
    pub(crate) fn unpush(&self) {
        let head = self.head.load(Ordering::Relaxed);
        self.head.store(head.wrapping_sub(1), Ordering::Release);
    }

    #[inline]
    fn slot(&self, number: u32) -> &UnsafeCell<Slot> {
        // the mask bounds it
        &self.slots[(number & self.mask) as usize]
    }

    /// The request of this number is complete, and so are unsignaled ones before it. `None` if
    /// there is no such request. Poller only.
    #[inline]
    pub(crate) fn complete(&self, number: u32) -> Option<Slot> {
        let mut tail = self.tail.load(Ordering::Relaxed);
        let head = self.head.load(Ordering::Acquire);
        if number.wrapping_sub(tail) >= head.wrapping_sub(tail) {
            return None;
        }
        let result = self.slot(number).with_mut(|slot| {
            // SAFETY: between tail and head, so it is the poller's.
            let slot = unsafe { &mut *slot };
            (!std::mem::replace(&mut slot.done, true)).then_some(*slot)
        })?;
        let after = number.wrapping_add(1);
        while tail != head {
            // SAFETY: as above.
            let slot = self.slot(tail).with(|slot| unsafe { *slot });
            // the device may complete signaled requests out of order
            let implied = !slot.signaled && (after.wrapping_sub(tail) as i32) > 0;
            if !slot.done && !implied {
                break;
            }
            tail = tail.wrapping_add(1);
        }
        self.tail.store(tail, Ordering::Release);
        Some(result)
    }

    /// Takes the oldest request that is not complete, when the device will complete no more
    /// requests. Poller only.
    pub(crate) fn abandon(&self) -> Option<Slot> {
        let tail = self.tail.load(Ordering::Relaxed);
        (tail != self.head.load(Ordering::Acquire))
            .then(|| self.complete(tail))
            .flatten()
    }
}

/// The owner of an endpoint's rings: it is notified when operations fail or can resume. Dropping
/// the last reference to one must take no lock.
pub(crate) trait FailureListener: Send + Sync {
    /// An operation completed in error. Called with the completion queue's lock held.
    fn operation_failed(&self);
    /// Resumes pending operations. Called without a lock.
    fn resume(&self) {}
    /// The timer of the endpoint's keys has expired. Called without a lock.
    fn tend_keys(&self) -> Lease {
        Lease::Over
    }
    /// Acknowledges the peer's revocations, unless the transmit lock is taken. The caller holds at
    /// most the lock of a directory.
    fn acknowledge(&self) {}
    /// Whether this side has not seen the connection end.
    fn is_up(&self) -> bool {
        true
    }
}

/// The state of the keys that an endpoint holds of its peer's directory, when their timer has
/// expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    /// They are in use.
    Held,
    /// A lock was taken, or a write to the peer is still to be posted: the call is to be repeated
    /// soon.
    Busy,
    /// They were given back.
    Over,
}

/// Both rings of an endpoint, as its completion queues see it.
pub(crate) struct Rings {
    pub(crate) tx: SlotRing,
    pub(crate) rx: SlotRing,
    pub(crate) owner: OnceLock<Weak<dyn FailureListener>>,
    pub(crate) probe: Probe,
    /// Receives of a shared context that completed here, wrapping.
    shared_done: AtomicU32,
    pub(crate) own: OwnRequests,
    /// Whether operations are pending, or a revocation is to be sent: the polling thread resumes
    /// them.
    waiting: AtomicBool,
    /// Whether the peer believes that this endpoint holds keys of its directory. Changed with the
    /// transmit side locked.
    holds_keys: AtomicBool,
    /// Whether an operation with parts still to complete was reported as failed. Poller only.
    broken_off: AtomicBool,
    counted: AtomicBool,
    counters: Counters,
}

/// The request that asks a silent peer for a sign of life. It has no slot: it is not one of the
/// application's, and takes the place of none.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// Whether it is under way: there is one at a time.
    pub(crate) pending: AtomicBool,
    /// How many were answered.
    pub(crate) answered: AtomicU32,
}

/// A request of the engine's own (`docs/protocol.md`, "The connection block"). At most one of each
/// kind is outstanding, except revocations: a revocation is posted while up to 7 others are
/// outstanding, so that requests posted after it stay behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Own {
    /// Reads the peer's key directory, or claims a single-use region there (compare and swap).
    Lookup = 1,
    /// Writes *acknowledged* to the peer: this side acts upon that many of the peer's revocations.
    Acknowledge = 2,
    /// Writes *revision* to the peer: this side's count of revocations.
    Revocation = 3,
    /// Reads *settled* of the peer: no request of the peer under an older key is outstanding.
    Settled = 4,
}

impl Own {
    pub(crate) const COUNT: usize = 4;
    /// Maximum number of outstanding revocations.
    pub(crate) const REVOCATIONS: u32 = 8;
    /// Maximum number of outstanding requests of all kinds.
    pub(crate) const MOST: usize = Self::COUNT - 1 + Self::REVOCATIONS as usize;

    pub(crate) fn of(number: u32) -> Option<Self> {
        [
            Self::Lookup,
            Self::Acknowledge,
            Self::Revocation,
            Self::Settled,
        ]
        .into_iter()
        .find(|own| *own as u32 == number)
    }
}

/// How far such a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Progress {
    Idle,
    UnderWay,
    Done,
    Failed,
}

/// How far the engine's own requests are. Posters begin them, pollers end them.
#[derive(Debug, Default)]
pub(crate) struct OwnRequests {
    states: [AtomicU8; Own::COUNT],
    telling: AtomicU32,
    wanted: AtomicBool,
}

impl OwnRequests {
    fn state(&self, own: Own) -> &AtomicU8 {
        &self.states[own as usize - 1]
    }

    /// Before it is posted.
    pub(crate) fn begin(&self, own: Own) {
        let under_way = Progress::UnderWay as u8;
        self.state(own).store(under_way, Ordering::Release);
    }

    /// Before a revocation is posted; `false` where too many are under way.
    pub(crate) fn begin_revocation(&self) -> bool {
        let more = |count: u32| (count < Own::REVOCATIONS).then_some(count + 1);
        self.telling
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .is_ok()
    }

    /// It has come to its end.
    pub(crate) fn end(&self, own: Own, success: bool) {
        if own == Own::Revocation {
            self.telling.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let end = if success {
            Progress::Done
        } else {
            Progress::Failed
        };
        self.state(own).store(end as u8, Ordering::Release);
    }

    pub(crate) fn is_under_way(&self, own: Own) -> bool {
        self.state(own).load(Ordering::Acquire) == Progress::UnderWay as u8
    }

    /// The progress of a request; `Done` and `Failed` are returned once, then `Idle`.
    pub(crate) fn take(&self, own: Own) -> Progress {
        let state = self.state(own);
        let progress = match state.load(Ordering::Acquire) {
            1 => return Progress::UnderWay,
            2 => Progress::Done,
            3 => Progress::Failed,
            _ => return Progress::Idle,
        };
        state.store(Progress::Idle as u8, Ordering::Release);
        progress
    }

    /// Sets whether a revocation is still to be sent.
    pub(crate) fn want(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::SeqCst);
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }
}

impl std::fmt::Debug for Rings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rings")
            .field("tx", &self.tx.outstanding())
            .field("rx", &self.rx.outstanding())
            .finish()
    }
}

impl Rings {
    pub(crate) fn new(tx: usize, rx: usize) -> Self {
        Self {
            tx: SlotRing::for_parts(tx),
            rx: SlotRing::new(rx),
            owner: OnceLock::new(),
            probe: Probe::default(),
            shared_done: AtomicU32::new(0),
            own: OwnRequests::default(),
            waiting: AtomicBool::new(false),
            holds_keys: AtomicBool::new(false),
            broken_off: AtomicBool::new(false),
            counted: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// Its counters, if there are any.
    #[inline]
    pub(crate) fn counters(&self) -> Option<&Counters> {
        self.counted
            .load(Ordering::Relaxed)
            .then_some(&self.counters)
    }

    /// Lets `counter` count operations of these kinds. Before the endpoint is enabled.
    pub(crate) fn bind_counter(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        self.counters.bind(counter, kinds)?;
        self.counted.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// A receive of a shared context has completed here. Poller only.
    pub(crate) fn shared_done(&self) {
        let done = self.shared_done.load(Ordering::Relaxed);
        self.shared_done
            .store(done.wrapping_add(1), Ordering::Relaxed);
    }

    /// Changes whenever an operation of either direction completes.
    pub(crate) fn progress_mark(&self) -> u64 {
        let received = self
            .rx
            .progress_mark()
            .wrapping_add(self.shared_done.load(Ordering::Relaxed));
        u64::from(self.tx.progress_mark()) << 32 | u64::from(received)
    }

    /// Whether the polling thread has pending operations to resume.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(crate) fn set_waiting(&self, waiting: bool) {
        self.waiting.store(waiting, Ordering::Relaxed);
    }

    /// Whether the peer waits for acknowledgements of this endpoint when it revokes keys.
    #[inline]
    pub(crate) fn holds_keys(&self) -> bool {
        self.holds_keys.load(Ordering::Relaxed)
    }

    pub(crate) fn set_holds_keys(&self, holds: bool) {
        self.holds_keys.store(holds, Ordering::Relaxed);
    }

    /// Whether the failure of a transmit request is to be reported: of an operation of several
    /// requests, the first that fails. Poller only.
    pub(crate) fn reports_failure(&self, slot: &Slot) -> bool {
        let reported = self.broken_off.load(Ordering::Relaxed);
        self.broken_off.store(slot.part, Ordering::Relaxed);
        slot.reports_failure && !reported
    }

    /// The probe has come to its end.
    pub(crate) fn probe_done(&self, success: bool) {
        self.probe.pending.store(false, Ordering::Release);
        if success {
            self.probe.answered.fetch_add(1, Ordering::Relaxed);
        } else {
            self.notify_failure();
        }
    }

    pub(crate) fn notify_failure(&self) {
        if let Some(owner) = self.owner.get().and_then(Weak::upgrade) {
            owner.operation_failed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(context: usize, signaled: bool) -> Slot {
        Slot {
            context,
            signaled,
            visible: signaled,
            ..Slot::default()
        }
    }

    #[test]
    fn a_full_ring_says_so_and_recovers() {
        let ring = SlotRing::new(3);
        // far enough for the numbers to wrap
        ring.head.store(u32::MAX - 4, Ordering::Relaxed);
        ring.tail.store(u32::MAX - 4, Ordering::Relaxed);
        for round in 0..10 {
            let numbers: Vec<_> = (0..3)
                .map(|i| ring.push(slot(round * 10 + i, true)))
                .collect();
            assert!(ring.is_full());
            for (i, number) in numbers.into_iter().enumerate() {
                assert_eq!(ring.complete(number).unwrap().context, round * 10 + i);
                assert!(!ring.is_full());
            }
            assert_eq!(ring.outstanding(), 0);
        }
    }

    #[test]
    fn unsignaled_requests_complete_with_a_later_one() {
        let ring = SlotRing::new(8);
        for i in 0..5 {
            ring.push(slot(i, i == 4));
        }
        assert_eq!(ring.outstanding(), 5);
        assert_eq!(ring.complete(4).unwrap().context, 4);
        assert_eq!(ring.outstanding(), 0);
    }

    #[test]
    fn a_signaled_request_is_never_implied() {
        let ring = SlotRing::new(8);
        ring.push(slot(0, true));
        ring.push(slot(1, false));
        ring.push(slot(2, true));
        assert_eq!(ring.complete(2).unwrap().context, 2);
        assert_eq!(ring.outstanding(), 3);
        assert_eq!(ring.complete(0).unwrap().context, 0);
        // 1 lies before 0's successor only once 2 is known: the next completion frees it
        assert!(ring.outstanding() <= 2);
        ring.push(slot(3, true));
        assert_eq!(ring.complete(3).unwrap().context, 3);
        assert_eq!(ring.outstanding(), 0);
    }

    #[test]
    fn numbers_that_belong_to_nothing_are_refused() {
        let ring = SlotRing::new(4);
        assert!(ring.complete(0).is_none());
        let number = ring.push(slot(7, true));
        assert!(ring.complete(number.wrapping_add(1)).is_none());
        assert!(ring.complete(number).is_some());
        assert!(ring.complete(number).is_none(), "twice");
        ring.push(slot(8, true));
        ring.unpush();
        assert_eq!(ring.outstanding(), 0);
        assert!(ring.abandon().is_none());
    }

    #[test]
    fn what_is_abandoned_comes_in_order() {
        let ring = SlotRing::new(4);
        for i in 0..4 {
            ring.push(slot(i, i % 2 == 0));
        }
        let contexts: Vec<_> = std::iter::from_fn(|| ring.abandon())
            .map(|slot| slot.context)
            .collect();
        assert_eq!(contexts, [0, 1, 2, 3]);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;

    /// The poster and the poller of a ring that is full again and again: each completion is of the
    /// request that was entered under its number, and loom sees no slot used by both.
    #[test]
    fn slots_go_from_the_poster_to_the_poller_and_back() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            const REQUESTS: usize = 4;
            let ring = Arc::new(SlotRing::new(1));
            let theirs = Arc::clone(&ring);
            let poster = loom::thread::spawn(move || {
                for context in 0..REQUESTS {
                    while theirs.is_full() {
                        loom::thread::yield_now();
                    }
                    theirs.push(Slot {
                        context,
                        signaled: true,
                        ..Slot::default()
                    });
                }
            });
            let mut next = 0;
            while next < REQUESTS {
                match ring.complete(next as u32) {
                    Some(slot) => {
                        assert_eq!(slot.context, next);
                        next += 1;
                    }
                    None => loom::thread::yield_now(),
                }
            }
            poster.join().unwrap();
            assert_eq!(ring.outstanding(), 0);
        });
    }
}
