//! How one process requests a wakeup from another process.
//!
//! The waiter stores a word, runs [`heavy_fence`](crate::sync::heavy_fence), and checks its wait
//! condition once more. The supplier publishes the awaited state, runs [`light_fence`], and reads
//! the word. At least one of the two sees the other's store. The supplier that changes the word to
//! 0 has the duty to ring, so only one supplier rings.

use crate::segment::Mapping;
use crate::segment::layout::{
    ARMED_ANY, ARMED_NOT, ARMED_SOLICITED, StateWord, cq, header, qp, srq,
};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::light_fence;

/// Publishes in the process's own segment that the process may sleep.
pub(crate) fn will_sleep(own: &Mapping) {
    own.u32(header::SLEEPS).store(1, Ordering::SeqCst);
}

/// Whether the process has published in its own segment that it may sleep.
pub(crate) fn may_sleep(own: &Mapping) -> bool {
    own.u32(header::SLEEPS).load(Ordering::Relaxed) != 0
}

/// Whether the process of this segment may sleep and the caller has to ring it. The caller has
/// already published the state that the process may wait for.
pub(crate) fn must_ring(map: &Mapping) -> bool {
    fence(Ordering::SeqCst);
    take(map.u32(header::SLEEPS))
}

/// Undoes a [`must_ring`] that returned true, by a caller that cannot ring the process yet: other
/// suppliers ring it. The caller tries again later, which begins with [`must_ring`].
#[cold]
pub(crate) fn must_still_ring(map: &Mapping) {
    map.u32(header::SLEEPS).store(1, Ordering::SeqCst);
}

/// As [`must_still_ring`], of a [`must_notify`]. The request becomes the strongest one, as the word
/// no longer has the former one: at most, the owner wakes up once in vain.
#[cold]
pub(crate) fn must_still_notify(map: &Mapping, at: usize) {
    map.u32(at + cq::ARMED)
        .fetch_max(ARMED_ANY, Ordering::SeqCst);
}

/// Publishes in the caller's own CQ entry, at `at`, which messages must wake the owner, unless a
/// stronger request is published. The caller then runs a heavy fence and checks the CQ once more.
pub(crate) fn arm(own: &Mapping, at: usize, armed: u32) {
    // One step: a thread that is late with a weaker request must not replace a stronger one.
    own.u32(at + cq::ARMED).fetch_max(armed, Ordering::SeqCst);
}

/// Publishes in the caller's own CQ entry that no message must wake the owner.
pub(crate) fn disarm(own: &Mapping, at: usize) {
    own.u32(at + cq::ARMED).store(ARMED_NOT, Ordering::SeqCst);
}

/// Whether a supplier has taken the request in the caller's own CQ entry, or there was none.
pub(crate) fn is_disarmed(own: &Mapping, at: usize) -> bool {
    own.u32(at + cq::ARMED).load(Ordering::Acquire) == ARMED_NOT
}

/// Whether the caller has to wake the owner of the CQ whose entry is at `at`, for a message that
/// the caller has already published. `barriers`: the owner's segment states that the owner runs
/// barriers.
#[inline(always)]
pub(crate) fn must_notify(map: &Mapping, at: usize, solicited: bool, barriers: bool) -> bool {
    light_fence(barriers);
    takes_notice(map, at, solicited)
}

/// As [`must_notify`], for a caller that has run the light fence.
#[inline(always)]
pub(crate) fn takes_notice(map: &Mapping, at: usize, solicited: bool) -> bool {
    takes_notice_of(map.u32(at + cq::ARMED), solicited)
}

/// As [`takes_notice`], of the word `ARMED` of a CQ entry.
#[inline(always)]
pub(crate) fn takes_notice_of(word: &AtomicU32, solicited: bool) -> bool {
    let armed = word.load(Ordering::Relaxed);
    armed != ARMED_NOT && takes_armed(word, armed, solicited)
}

#[cold]
fn takes_armed(word: &AtomicU32, armed: u32, solicited: bool) -> bool {
    // An invalid value, which a hostile neighbour has stored, counts as the strongest request:
    // [`arm`] does not replace it.
    (armed != ARMED_SOLICITED || solicited) && word.swap(ARMED_NOT, Ordering::AcqRel) != ARMED_NOT
}

/// Publishes in the word at `at` that a process waits; many processes may use one word, and none of
/// them withdraws the request. Returns the turn: an odd number that changes each time
/// [`asked_in_turn`] returns true. A caller that sees another turn than at its last call has to run
/// a heavy fence and check its condition once more, even if another process has set the word
/// before: a supplier that has missed the earlier request need not see this one either.
pub(crate) fn ask_in_turn(map: &Mapping, at: usize) -> u32 {
    let word = map.u32(at);
    let turn = word.load(Ordering::Relaxed);
    if turn & 1 != 0 {
        return turn;
    }
    word.fetch_or(1, Ordering::AcqRel) | 1
}

/// Whether a process has called [`ask_in_turn`] since the last call; clears the request. The caller
/// runs a fence between publishing the awaited state and this call.
#[inline]
pub(crate) fn asked_in_turn(map: &Mapping, at: usize) -> bool {
    let word = map.u32(at);
    let turn = word.load(Ordering::Relaxed);
    turn & 1 != 0
        && word
            .compare_exchange(
                turn,
                turn.wrapping_add(1),
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
}

/// Whether a request of [`ask_in_turn`] is published. The caller runs a fence between publishing
/// the awaited state and this call.
pub(crate) fn is_asked_in_turn(map: &Mapping, at: usize) -> bool {
    map.u32(at).load(Ordering::Relaxed) & 1 != 0
}

/// Withdraws the request of [`ask_in_turn`] on behalf of all, unless one of them still waits. Each
/// of them has published that it waits by [`ask_as_one`], which is what `waits` looks for. Returns
/// true if one began to wait meanwhile: the request is published again, and the caller has the duty
/// to ring, as a supplier may have found no request.
pub(crate) fn stop_asking_in_turn(map: &Mapping, at: usize, waits: impl Fn() -> bool) -> bool {
    if waits() {
        return false;
    }
    asked_in_turn(map, at);
    fence(Ordering::SeqCst);
    if !waits() {
        return false;
    }
    ask_in_turn(map, at);
    true
}

/// As [`ask`], by one of those that also call [`ask_in_turn`] afterwards: either it finds a changed
/// turn there, or [`stop_asking_in_turn`] finds the request of this call.
pub(crate) fn ask_as_one(map: &Mapping, at: usize, waiter: u32) -> bool {
    let fresh = ask(map, at, waiter);
    if fresh {
        fence(Ordering::SeqCst);
    }
    fresh
}

/// Names the process in `slot` in the waiters' words at `at`. The caller then calls
/// [`ask_in_turn`].
pub(crate) fn name_waiter(map: &Mapping, at: usize, slot: u32) {
    let (word, bit) = (slot as usize / 64, 1 << (slot % 64));
    if word >= srq::WAITER_WORDS {
        return;
    }
    let word = map.u64(at + 8 * word);
    // Acquire: if a supplier has taken the names since the caller's last call, the caller must see
    // that supplier's turn, also if another thread has named the process again.
    if word.load(Ordering::Acquire) & bit == 0 {
        word.fetch_or(bit, Ordering::AcqRel);
    }
}

/// As [`asked_in_turn`], of the word at `at`; takes the names in the waiters' words at `names`, and
/// returns them as one bit for each slot. The caller rings the processes. The words can hold any
/// bits: the name of a process that does not wait causes a superfluous ring.
#[inline]
pub(crate) fn waiters_in_turn(
    map: &Mapping,
    at: usize,
    names: usize,
) -> Option<[u64; srq::WAITER_WORDS]> {
    // The turn comes first: a sender whose name is added behind the exchange finds it changed.
    asked_in_turn(map, at).then(|| take_waiters(map, names))
}

#[cold]
fn take_waiters(map: &Mapping, at: usize) -> [u64; srq::WAITER_WORDS] {
    // Each word is exchanged, also if it is 0: a later waiter acquires the turn by it.
    map.words::<{ srq::WAITER_WORDS }>(at)
        .map(|word| word.swap(0, Ordering::AcqRel))
}

/// Whether the owner of a segment has made a ring for the sender with this cookie. `granted` and
/// `wanted` are the sender's words there. If there is none, requests it, and at the first request
/// calls `call`, which notifies the owner.
pub(crate) fn is_granted(
    granted: &AtomicU64,
    wanted: &AtomicU64,
    cookie: u64,
    call: impl FnOnce(),
) -> bool {
    let there = || granted.load(Ordering::Acquire) == cookie;
    if there() {
        return true;
    }
    if wanted.swap(cookie, Ordering::AcqRel) == cookie {
        return false;
    }
    // The owner may have made the ring for another reason before this request, and has then rung
    // nobody: either this load finds the ring, or `grant` finds the request.
    fence(Ordering::SeqCst);
    if there() {
        return true;
    }
    call();
    false
}

/// Publishes that there is a ring for the sender with this cookie. Returns whether the sender has
/// requested it, and has to be rung.
pub(crate) fn grant(granted: &AtomicU64, wanted: &AtomicU64, cookie: u64) -> bool {
    granted.store(cookie, Ordering::Release);
    fence(Ordering::SeqCst);
    wanted.load(Ordering::Relaxed) == cookie
}

/// Value for [`ask`] where many processes use one word and none of them withdraws its request.
pub(crate) const ANYBODY: u32 = 1;

/// Publishes in the owner's segment, in the word at `at`, that `who` (not 0) waits. Returns true if
/// the word did not hold `who` before: the caller then runs a heavy fence and checks its condition
/// once more.
pub(crate) fn ask(map: &Mapping, at: usize, who: u32) -> bool {
    let word = map.u32(at);
    word.load(Ordering::Relaxed) != who && word.swap(who, Ordering::AcqRel) != who
}

/// Withdraws [`ask`], unless the word names another waiter by now.
pub(crate) fn stop_asking(map: &Mapping, at: usize, who: u32) {
    let word = map.u32(at);
    let _ = word.compare_exchange(who, 0, Ordering::Relaxed, Ordering::Relaxed);
}

/// Whether a process waits. The caller runs a fence between publishing the awaited state and this
/// call.
#[inline]
pub(crate) fn asks(map: &Mapping, at: usize) -> bool {
    map.u32(at).load(Ordering::Relaxed) != 0
}

#[inline]
fn take(word: &AtomicU32) -> bool {
    word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::AcqRel) != 0
}

/// Moves the queue pair whose entry is at `at` from one state word to another. Returns false if the
/// state word is not `from`.
pub(crate) fn move_state(map: &Mapping, at: usize, from: StateWord, to: StateWord) -> bool {
    map.u64(at + qp::STATE)
        .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
}

/// Notifies the process of this segment that something was changed for it, see
/// [`header::ATTENTION`].
pub(crate) fn call_attention(map: &Mapping) {
    map.u32(header::ATTENTION).fetch_add(1, Ordering::SeqCst);
}

/// Requests that the process of this segment runs its agent. Returns true if no request was
/// pending.
pub(crate) fn call_agent(map: &Mapping) -> bool {
    map.u32(header::AGENT).swap(1, Ordering::AcqRel) == 0
}

/// Whether a peer has called [`call_agent`] since the last call. The owner checks this after
/// [`Attention::called`].
pub(crate) fn agent_called(own: &Mapping) -> bool {
    take(own.u32(header::AGENT))
}

/// The number of [`call_attention`] calls that the owner has seen.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    seen: AtomicU32,
}

impl Attention {
    /// Whether there was a call since the last check. If so, the caller's earlier stores are
    /// visible afterwards.
    #[inline]
    pub(crate) fn called(&self, own: &Mapping) -> bool {
        let count = own.u32(header::ATTENTION).load(Ordering::Relaxed);
        if count == self.seen.load(Ordering::Relaxed) {
            return false;
        }
        self.seen.store(count, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::OwnSegment;

    #[test]
    fn a_weaker_request_replaces_no_stronger_one() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let (map, at) = (&segment.map, cq::AT);
        arm(map, at, ARMED_ANY);
        arm(map, at, ARMED_SOLICITED);
        assert!(must_notify(map, at, false, true));
        arm(map, at, ARMED_SOLICITED);
        assert!(!must_notify(map, at, false, true));
        assert!(must_notify(map, at, true, true));
        // a value that a neighbour has stored
        map.u32(at + cq::ARMED).store(u32::MAX, Ordering::Relaxed);
        arm(map, at, ARMED_ANY);
        assert!(must_notify(map, at, false, true));
        arm(map, at, ARMED_ANY);
        disarm(map, at);
        assert!(!must_notify(map, at, true, true));
    }

    #[test]
    fn nobody_takes_back_what_somebody_else_asks() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let (map, at) = (&segment.map, qp::AT + qp::WAITING);
        assert!(ask(map, at, 5));
        assert!(!ask(map, at, 5));
        // The entry belongs to another queue pair by now.
        assert!(ask(map, at, 6));
        stop_asking(map, at, 5);
        assert!(take(map.u32(at)));
        assert!(ask(map, at, 6));
        stop_asking(map, at, 6);
        assert!(!asks(map, at));
    }
}
