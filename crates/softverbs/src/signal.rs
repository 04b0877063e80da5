//! How one process has another one wake it.
//!
//! Whoever is about to sleep says so in a word, runs [`heavy_fence`](crate::sync::heavy_fence), and looks once
//! more for what it waits for. Whoever supplies that publishes it, runs
//! [`light_fence`], and looks at the word. One of the two sees the other. Taking the word to 0 is
//! taking the duty to ring, so that only one supplier does.

use crate::segment::Mapping;
use crate::segment::layout::{ARMED_ANY, ARMED_NOT, ARMED_SOLICITED, StateWord, cq, header, qp};
use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sync::light_fence;

/// Says in its own segment that the process may sleep.
pub(crate) fn will_sleep(own: &Mapping) {
    own.u32(header::SLEEPS).store(1, Ordering::SeqCst);
}

/// Whether the process says in its own segment that it may sleep.
pub(crate) fn may_sleep(own: &Mapping) -> bool {
    own.u32(header::SLEEPS).load(Ordering::Relaxed) != 0
}

/// Whether the process of this segment may sleep and nobody else rings it. What it may wait for
/// was published before.
pub(crate) fn must_ring(map: &Mapping) -> bool {
    fence(Ordering::SeqCst);
    take(map.u32(header::SLEEPS))
}

/// Says in the own entry of a completion queue, at `at`, which messages it must be woken for. To be
/// followed by a heavy fence and one more look.
pub(crate) fn arm(own: &Mapping, at: usize, armed: u32) {
    own.u32(at + cq::ARMED).store(armed, Ordering::SeqCst);
}

/// Whether the owner of a completion queue, whose entry is at `at`, must be woken for a message
/// that was published before. `barriers` is what it says of itself.
#[inline(always)]
pub(crate) fn must_notify(map: &Mapping, at: usize, solicited: bool, barriers: bool) -> bool {
    light_fence(barriers);
    let word = map.u32(at + cq::ARMED);
    let armed = word.load(Ordering::Relaxed);
    (armed == ARMED_ANY || armed == ARMED_SOLICITED && solicited)
        && word.swap(ARMED_NOT, Ordering::AcqRel) != ARMED_NOT
}

/// Says that somebody waits for what the word at `at` is about, of which many may say so and which nobody takes back: whose
/// turn it is, an odd number that changes each time that [`asked_in_turn`] was true. Who sees another one than the last time has to run a heavy
/// fence and look once more, though somebody else had asked already: a supplier that did not see that one's question need not see this one's.
pub(crate) fn ask_in_turn(map: &Mapping, at: usize) -> u32 {
    let word = map.u32(at);
    let turn = word.load(Ordering::Relaxed);
    if turn & 1 != 0 {
        return turn;
    }
    word.fetch_or(1, Ordering::AcqRel) | 1
}

/// Whether somebody asked by [`ask_in_turn`] since the last time; nobody does any more. Behind a fence after what it waits for.
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

/// For [`ask`], where many ask by one word and nobody takes it back.
pub(crate) const ANYBODY: u32 = 1;

/// Says in the owner's segment that `who` (not 0) waits for what the word at `at` is about. True
/// where that was not said: that is to be followed by a heavy fence and one more look.
pub(crate) fn ask(map: &Mapping, at: usize, who: u32) -> bool {
    let word = map.u32(at);
    word.load(Ordering::Relaxed) != who && word.swap(who, Ordering::AcqRel) != who
}

/// Takes [`ask`] back, unless somebody else asks by now.
pub(crate) fn stop_asking(map: &Mapping, at: usize, who: u32) {
    let word = map.u32(at);
    let _ = word.compare_exchange(who, 0, Ordering::Relaxed, Ordering::Relaxed);
}

/// Whether somebody asks; behind a fence after what it waits for.
#[inline]
pub(crate) fn asks(map: &Mapping, at: usize) -> bool {
    map.u32(at).load(Ordering::Relaxed) != 0
}

#[inline]
fn take(word: &AtomicU32) -> bool {
    word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::AcqRel) != 0
}

/// Moves the queue pair whose entry is at `at` from one state word to another; false where it is
/// in another state meanwhile.
pub(crate) fn move_state(map: &Mapping, at: usize, from: StateWord, to: StateWord) -> bool {
    map.u64(at + qp::STATE)
        .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
}

/// Tells the process of this segment that one of its queue pairs was moved.
pub(crate) fn call_attention(map: &Mapping) {
    map.u32(header::ATTENTION).fetch_add(1, Ordering::SeqCst);
}

/// Asks the process of this segment to run its agent. True where nobody has yet.
pub(crate) fn call_agent(map: &Mapping) -> bool {
    map.u32(header::AGENT).swap(1, Ordering::AcqRel) == 0
}

/// Whether somebody asked for the agent of this process since the last time; after a call for attention.
pub(crate) fn agent_called(own: &Mapping) -> bool {
    take(own.u32(header::AGENT))
}

/// What the owner has seen of [`call_attention`].
#[derive(Debug, Default)]
pub(crate) struct Attention {
    seen: AtomicU32,
}

impl Attention {
    /// Whether there was a call since the last time. After it, what the caller had done is seen.
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
    fn nobody_takes_back_what_somebody_else_asks() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let (map, at) = (&segment.map, qp::AT + qp::WAITING);
        assert!(ask(map, at, 5));
        assert!(!ask(map, at, 5));
        // The entry is of another queue pair by now.
        assert!(ask(map, at, 6));
        stop_asking(map, at, 5);
        assert!(take(map.u32(at)));
        assert!(ask(map, at, 6));
        stop_asking(map, at, 6);
        assert!(!asks(map, at));
    }
}
