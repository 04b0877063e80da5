//! Work slots: the state of a request between its post and its completion.
//!
//! An endpoint has one ring per direction, allocated once. The poster (under the endpoint's lock of
//! that direction) advances the head, the poller (under the completion queue's lock) advances the
//! tail. A request's number, which is incremented per request and wraps, is part of its `wr_id`, so
//! that the poller detects a completion without a request.
//!
//! An unsignaled request is complete when a later request of the queue is complete.

#![allow(unsafe_code, reason = "slots are shared without a lock")]

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::queue::{Counter, Counters};
use crate::sync::{AtomicU32, UnsafeCell};
use crate::wire::records::MAX_SEGMENTS;

/// The failures of a request that produce an error entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Failures {
    #[default]
    None,
    /// Those of the operation itself: it was refused, here or by the peer. Not those of the
    /// connection, which the event queue reports ([`is_of_connection`]).
    Refusals,
    All,
}

impl Failures {
    /// Whether a failure with this errno produces an entry.
    pub(crate) fn include(self, err: FiErrno) -> bool {
        match self {
            Self::None => false,
            Self::Refusals => !is_of_connection(err),
            Self::All => true,
        }
    }
}

/// Whether the errno is that of a request whose connection has ended or cannot reach the peer.
fn is_of_connection(err: FiErrno) -> bool {
    let ends = [
        FiErrno::ECANCELED,
        FiErrno::ETIMEDOUT,
        FiErrno::ENORX,
        FiErrno::EIO,
    ];
    ends.contains(&err)
}

/// The state of a posted request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    pub(crate) context: usize,
    /// Flags of its completion entry.
    pub(crate) flags: Flags,
    /// Whether success produces a completion entry.
    pub(crate) visible: bool,
    pub(crate) failures: Failures,
    /// Whether the device reports success.
    pub(crate) signaled: bool,
    /// Whether another request of the same operation follows it.
    pub(crate) more: bool,
    /// The errno with which the operation fails, although its empty request succeeds.
    pub(crate) refused: Option<FiErrno>,
    /// Whether the request's completion was polled; set by the poller.
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

// SAFETY: only the poller accesses a slot between tail and head, and only the poster every other
// slot. The locks of the two sides admit one thread each. A release store to head or tail, read
// with acquire, passes the slot to the other side.
unsafe impl Send for SlotRing {}
// SAFETY: as above.
unsafe impl Sync for SlotRing {}

impl SlotRing {
    /// A ring for `depth` requests of the application and one of the engine.
    pub(crate) fn new(depth: usize) -> Self {
        Self::with_more(depth, 1)
    }

    /// A ring for `depth` requests of the application and the further requests of the last
    /// operation: writes, flushes, remote data, events.
    pub(crate) fn for_sends(depth: usize) -> Self {
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

    /// Maximum number of outstanding requests of the application.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// Number of outstanding requests.
    pub(crate) fn outstanding(&self) -> u32 {
        let tail = self.tail.load(Ordering::Acquire);
        self.head.load(Ordering::Acquire).wrapping_sub(tail)
    }

    /// Changes when the oldest outstanding request completes.
    pub(crate) fn progress_mark(&self) -> u32 {
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

    /// Whether the ring has no room for a request of the application.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        let tail = self.tail.load(Ordering::Acquire);
        self.head.load(Ordering::Relaxed).wrapping_sub(tail) >= self.depth
    }

    /// Index of the slot of the next request, for arrays with one element per slot.
    #[inline]
    pub(crate) fn next_index(&self) -> usize {
        (self.head.load(Ordering::Relaxed) & self.mask) as usize
    }

    /// Number of slots.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Stores a request *before* it is posted, because its completion may be polled before the post
    /// returns. Returns its number. Poster only; the ring must have a free slot.
    #[inline(always)]
    pub(crate) fn push(&self, slot: Slot) -> u32 {
        let head = self.head.load(Ordering::Relaxed);
        // SAFETY: there is room, so the slot is the poster's.
        self.slot(head).with_mut(|place| unsafe { *place = slot });
        self.head.store(head.wrapping_add(1), Ordering::Release);
        head
    }

    /// Removes the last request, which the device refused. Poster only.
    #[inline]
    pub(crate) fn unpush(&self) {
        let head = self.head.load(Ordering::Relaxed);
        self.head.store(head.wrapping_sub(1), Ordering::Release);
    }

    /// Removes request `number`, the last one, if the device has refused it. Poster only.
    ///
    /// # Errors
    /// The error of the post.
    #[inline(always)]
    pub(crate) fn unpush_if_refused(&self, number: u32, posted: Result<()>) -> Result<u32> {
        if let Err(error) = posted {
            self.unpush();
            return Err(error);
        }
        Ok(number)
    }

    #[inline]
    fn slot(&self, number: u32) -> &UnsafeCell<Slot> {
        // the mask bounds the index
        &self.slots[(number & self.mask) as usize]
    }

    /// Completes the request of this number and the unsignaled requests before it. `None` if no
    /// such request is outstanding. Poller only.
    #[inline]
    pub(crate) fn complete(&self, number: u32) -> Option<Slot> {
        let mut tail = self.tail.load(Ordering::Relaxed);
        let head = self.head.load(Ordering::Acquire);
        if number.wrapping_sub(tail) >= head.wrapping_sub(tail) {
            return None;
        }
        let result = self.slot(number).with_mut(|slot| {
            // SAFETY: the slot is between tail and head, so only the poller accesses it.
            let slot = unsafe { &mut *slot };
            (!std::mem::replace(&mut slot.done, true)).then_some(*slot)
        })?;
        let after = number.wrapping_add(1);
        while tail != head {
            // SAFETY: the slot is between tail and head, so only the poller accesses it.
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
/// the last reference must acquire no lock.
pub(crate) trait FailureListener: Send + Sync {
    /// An operation completed in error. Called with the completion queue's lock held.
    fn operation_failed(&self);
    /// Resumes pending operations. Called without a lock, or with that of a counter's queues alone
    /// (3a in `docs/locking.md`): waits for no lock with a smaller number.
    fn resume(&self) {}
    /// Handles the expired lease timer of the endpoint's keys. Called without a lock.
    fn tend_keys(&self) -> Lease {
        Lease::Over
    }
    /// Acknowledges the peer's revocations, unless the transmit lock is taken. The caller holds at
    /// most the lock of a directory.
    fn acknowledge(&self) {}
    /// Whether the connection is up: this side has detected no end of it.
    fn is_up(&self) -> bool {
        true
    }
    /// Whether requests of the peer may still be executed at this side.
    fn peer_has_access(&self) -> bool {
        self.is_up()
    }
    /// Ends the peer's access, if the queue pair of this side does not. The caller holds at most
    /// the lock of a directory.
    fn sever(&self) {}
}

/// Time after which an endpoint checks whether it still uses its peer's keys.
pub(crate) const LEASE_CHECK: Duration = Duration::from_millis(5);
/// The same after [`Lease::Busy`], or if the last acknowledgement is still outstanding.
pub(crate) const LEASE_RETRY: Duration = Duration::from_micros(500);

/// The state of the keys that an endpoint holds of its peer's directory, when their timer has
/// expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    /// The keys are in use.
    Held,
    /// The transmit lock was taken, or a write to the peer could not be posted yet: the caller
    /// repeats the call soon.
    Busy,
    /// The keys were returned to the peer.
    Over,
}

/// The part of an endpoint that its completion queues access: both rings, and the state of the
/// engine's own requests.
pub(crate) struct EndpointSlots {
    pub(crate) tx: SlotRing,
    pub(crate) rx: SlotRing,
    pub(crate) owner: OnceLock<Weak<dyn FailureListener>>,
    pub(crate) probe: Probe,
    /// Number of receives of a shared context that completed for this endpoint; wraps.
    shared_done: AtomicU32,
    pub(crate) engine_requests: EngineRequests,
    /// Whether operations are deferred, or a revocation is still to be sent: the polling thread
    /// then resumes the endpoint.
    waiting: AtomicBool,
    /// Whether this endpoint has announced to its peer that it holds keys of the peer's directory.
    /// Changed under the transmit lock.
    holds_keys: AtomicBool,
    /// Whether an operation with requests still to complete was reported as failed. Poller only.
    broken_off: AtomicBool,
    counted: AtomicBool,
    counters: Counters,
    /// Whether the endpoint is on XRC.
    xrc: bool,
}

/// The keepalive probe of a silent peer. It has no slot, so it uses no room of the application's
/// requests.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// Whether the probe is outstanding; at most one is.
    pub(crate) pending: AtomicBool,
    /// Number of successful probes; wraps.
    pub(crate) answered: AtomicU32,
}

/// The kinds of the engine's own requests (`docs/protocol.md`, "The connection block"). At most one
/// of each kind is outstanding, except revocations: a revocation is posted while up to 7 others are
/// outstanding, so that requests posted after it stay behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum EngineRequest {
    /// Reads the peer's key directory, or claims a single-use region there (compare and swap).
    Lookup = 1,
    /// Writes *acknowledged* to the peer: the number of the peer's revocations that this side has
    /// processed, plus 1; 0 if it holds no keys.
    Acknowledge = 2,
    /// Writes *revision* to the peer: the revocation count of this side's directory.
    Revocation = 3,
    /// Reads *settled* of the peer: the revocations for which the peer has no outstanding request
    /// with an older key.
    Settled = 4,
}

impl EngineRequest {
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
        .find(|kind| *kind as u32 == number)
    }
}

/// Progress of one of the engine's own requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Progress {
    Idle,
    UnderWay,
    Done,
    Failed,
}

/// Progress of the engine's own requests. Posters begin them, pollers end them.
#[derive(Debug, Default)]
pub(crate) struct EngineRequests {
    states: [AtomicU8; EngineRequest::COUNT],
    telling: AtomicU32,
    wanted: AtomicBool,
}

impl EngineRequests {
    fn state(&self, kind: EngineRequest) -> &AtomicU8 {
        &self.states[kind as usize - 1]
    }

    /// Records a request as under way, before it is posted.
    pub(crate) fn begin(&self, kind: EngineRequest) {
        let under_way = Progress::UnderWay as u8;
        self.state(kind).store(under_way, Ordering::Release);
    }

    /// Counts a revocation before it is posted. Returns false if [`EngineRequest::REVOCATIONS`] are
    /// outstanding.
    pub(crate) fn begin_revocation(&self) -> bool {
        let more = |count: u32| (count < EngineRequest::REVOCATIONS).then_some(count + 1);
        self.telling
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .is_ok()
    }

    /// Records the completion of a request.
    pub(crate) fn end(&self, kind: EngineRequest, success: bool) {
        if kind == EngineRequest::Revocation {
            self.telling.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let end = if success {
            Progress::Done
        } else {
            Progress::Failed
        };
        self.state(kind).store(end as u8, Ordering::Release);
    }

    pub(crate) fn is_under_way(&self, kind: EngineRequest) -> bool {
        self.state(kind).load(Ordering::Acquire) == Progress::UnderWay as u8
    }

    /// Whether any request is outstanding.
    pub(crate) fn are_under_way(&self) -> bool {
        let of_kind = |state: &AtomicU8| state.load(Ordering::Acquire) == Progress::UnderWay as u8;
        self.telling.load(Ordering::Acquire) != 0 || self.states.iter().any(of_kind)
    }

    /// The progress of a request; `Done` and `Failed` are returned once, then `Idle`.
    pub(crate) fn take(&self, kind: EngineRequest) -> Progress {
        let state = self.state(kind);
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

impl std::fmt::Debug for EndpointSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EndpointSlots")
            .field("tx", &self.tx.outstanding())
            .field("rx", &self.rx.outstanding())
            .field("engine", &self.has_engine_requests())
            .finish()
    }
}

impl EndpointSlots {
    pub(crate) fn new(tx: usize, rx: usize) -> Self {
        Self {
            tx: SlotRing::for_sends(tx),
            rx: SlotRing::new(rx),
            owner: OnceLock::new(),
            probe: Probe::default(),
            shared_done: AtomicU32::new(0),
            engine_requests: EngineRequests::default(),
            waiting: AtomicBool::new(false),
            holds_keys: AtomicBool::new(false),
            broken_off: AtomicBool::new(false),
            counted: AtomicBool::new(false),
            counters: Counters::default(),
            xrc: false,
        }
    }

    /// The same for an endpoint on XRC, or not.
    pub(crate) fn on_xrc(self, xrc: bool) -> Self {
        Self { xrc, ..self }
    }

    /// The endpoint's counters, if any is bound.
    #[inline]
    pub(crate) fn counters(&self) -> Option<&Counters> {
        self.counted
            .load(Ordering::Relaxed)
            .then_some(&self.counters)
    }

    /// Binds a counter of operations of these kinds, before the endpoint is enabled.
    pub(crate) fn bind_counter(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        self.counters.bind(counter, kinds)?;
        self.counted.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Counts a completed receive of a shared context. Poller only.
    pub(crate) fn shared_done(&self) {
        let done = self.shared_done.load(Ordering::Relaxed);
        self.shared_done
            .store(done.wrapping_add(1), Ordering::Relaxed);
    }

    /// Changes when the oldest outstanding request of either direction completes, or a receive of a
    /// shared context.
    pub(crate) fn progress_mark(&self) -> u64 {
        let received = self
            .rx
            .progress_mark()
            .wrapping_add(self.shared_done.load(Ordering::Relaxed));
        u64::from(self.tx.progress_mark()) << 32 | u64::from(received)
    }

    /// Whether the polling thread must resume this endpoint.
    #[inline]
    pub(crate) fn needs_progress(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// As [`Self::needs_progress`]. If it returns false, the caller sees the requests that were
    /// recorded before [`Self::clear_needs_progress`].
    pub(crate) fn awaits_progress(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Makes the polling thread resume this endpoint.
    pub(crate) fn set_needs_progress(&self) {
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Reverts [`Self::set_needs_progress`], when no operation is deferred. Returns false if a
    /// revocation is still to be sent, so that the caller must set it again.
    pub(crate) fn clear_needs_progress(&self) -> bool {
        if !self.needs_progress() {
            return true;
        }
        // A thread that has a revocation to send sets `wanted` before `waiting`. Either it sets
        // `waiting` after this store, or its `wanted` is seen here.
        self.waiting.store(false, Ordering::SeqCst);
        !self.engine_requests.is_wanted()
    }

    /// Whether this endpoint holds keys of the peer, so that the peer waits for its acknowledgement
    /// of revocations.
    #[inline]
    pub(crate) fn holds_keys(&self) -> bool {
        self.holds_keys.load(Ordering::Relaxed)
    }

    pub(crate) fn set_holds_keys(&self, holds: bool) {
        self.holds_keys.store(holds, Ordering::Relaxed);
    }

    /// Whether the failure of a transmit request is to be reported: of an operation of several
    /// requests, the first that fails. Poller only.
    pub(crate) fn reports_failure(&self, slot: &Slot, err: FiErrno) -> bool {
        let reported = self.broken_off.load(Ordering::Relaxed);
        self.broken_off.store(slot.more, Ordering::Relaxed);
        if self.xrc && err == FiErrno::EREMOTEIO && slot.failures == Failures::Refusals {
            // also the status of a request to a process that has ended
            return false;
        }
        slot.failures.include(err) && !reported
    }

    /// Records the completion of the probe; a failure is reported to the endpoint.
    pub(crate) fn probe_done(&self, success: bool) {
        self.probe.pending.store(false, Ordering::Release);
        if success {
            self.probe.answered.fetch_add(1, Ordering::Relaxed);
        } else {
            self.notify_failure();
        }
    }

    /// Whether one of the engine's own requests, or the probe, is outstanding.
    pub(crate) fn has_engine_requests(&self) -> bool {
        self.has_key_requests() || self.probe.pending.load(Ordering::Acquire)
    }

    /// Whether one of the engine's own requests is outstanding that accesses the peer's memory.
    pub(crate) fn has_key_requests(&self) -> bool {
        self.engine_requests.are_under_way()
    }

    /// Whether a transmit request of any kind is outstanding.
    pub(crate) fn has_requests(&self) -> bool {
        self.has_engine_requests() || self.tx.outstanding() != 0
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

    /// On XRC a request to a process that has ended has the status of one that was refused.
    #[test]
    fn the_end_of_a_peer_on_xrc_is_no_refusal() {
        let injected = Slot {
            failures: Failures::Refusals,
            ..slot(1, true)
        };
        let whole = Slot {
            failures: Failures::All,
            ..slot(2, true)
        };
        for xrc in [false, true] {
            let slots = EndpointSlots::new(4, 4).on_xrc(xrc);
            assert_eq!(slots.reports_failure(&injected, FiErrno::EREMOTEIO), !xrc);
            assert!(slots.reports_failure(&injected, FiErrno::EKEYREJECTED));
            assert!(!slots.reports_failure(&injected, FiErrno::ETIMEDOUT));
            assert!(slots.reports_failure(&whole, FiErrno::EREMOTEIO));
        }
    }

    #[test]
    fn a_full_ring_says_so_and_recovers() {
        let ring = SlotRing::new(3);
        // the numbers wrap during the test
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
        // the unsignaled request is freed by a later completion
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

    /// A poster and a poller use a ring that is often full: each completion returns the request
    /// that was stored under its number, and no slot is accessed by both threads at a time.
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
