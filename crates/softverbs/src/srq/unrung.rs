//! Which of the processes that wait for a receive of an SRQ are rung, and when.
//!
//! The words [`WAITERS`](layout::WAITERS) can name any number of processes, and a receive is for
//! one of them. If all of them were rung for each receive, n waiting processes would be woken n
//! times for each message of each of them. So a post rings as many processes as receives were
//! posted, and at least [`AT_ONCE`]. The owner keeps the other names, and rings further processes
//!
//! - when it posts further receives;
//! - in its progress, and before it sleeps, while receives are available [`PAUSE_TICKS`] after the
//!   last rings of the queue: a process that was rung may have ended, be stopped or wait no more;
//! - by its retry thread if no thread makes progress for 250 ms.
//!
//! Invariant: while names are kept and receives are available, the progress flag is set, or will be
//! set by the thread that has changed the names, which then unparks the retry thread.
//!
//! Where a receive is published again, which is rare and happens under locks, all processes are
//! rung. Queue pairs of the SRQ's own process have pending messages, for which this does not apply.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Srq;
use crate::process::ticks;
use crate::segment::layout::srq::{self as layout, WAITER_WORDS};
use crate::signal;
use crate::sync::{Lock, light_fence_towards_all};

/// Least number of processes that are rung for a post, if so many wait.
const AT_ONCE: u32 = 4;
/// Time that processes that were rung have to claim receives: about 100 microseconds, more on slow
/// clocks.
pub(crate) const PAUSE_TICKS: u64 = 250_000;

/// Number of receives for which all processes that wait are rung.
pub(super) const ALL: u32 = u32::MAX;

/// One bit for the slot of each process that waits.
pub(super) type Names = [u64; WAITER_WORDS];

/// The processes of an SRQ that are not rung yet.
#[derive(Debug, Default)]
pub(super) struct Unrung {
    state: Lock<State>,
    /// When processes of this queue were rung last, in [`ticks`].
    rung: AtomicU64,
}

#[derive(Debug)]
struct State {
    names: Names,
    /// The slot at which the next choice begins, so that each process has its turn.
    next: u32,
}

impl Default for State {
    fn default() -> Self {
        Self {
            names: [0; WAITER_WORDS],
            next: 0,
        }
    }
}

impl State {
    fn is_empty(&self) -> bool {
        self.names.iter().all(|&word| word == 0)
    }

    fn add(&mut self, names: &Names) {
        for (word, further) in self.names.iter_mut().zip(names) {
            *word |= further;
        }
    }

    /// Removes at most `most` names, in the order of the slots, from the one behind the last choice
    /// on.
    fn choose(&mut self, most: u32) -> Names {
        let mut chosen = [0; WAITER_WORDS];
        let places = 64 * WAITER_WORDS as u32;
        let (first, from) = (self.next / 64, self.next % 64);
        let mut left = most;
        // the word of the first slot has a turn for its higher and one for its lower bits
        for turn in 0..=WAITER_WORDS as u32 {
            let at = ((first + turn) % WAITER_WORDS as u32) as usize;
            let mut bits = self.names[at];
            if turn == 0 {
                bits &= u64::MAX << from;
            }
            while bits != 0 && left != 0 {
                let bit = bits & bits.wrapping_neg();
                bits ^= bit;
                left -= 1;
                self.names[at] ^= bit;
                chosen[at] |= bit;
                self.next = (64 * at as u32 + bit.trailing_zeros() + 1) % places;
            }
        }
        chosen
    }
}

impl Srq {
    /// Rings processes that wait for a receive, after `posted` receives were published; [`ALL`]:
    /// all of them.
    #[inline]
    pub(super) fn wake_senders(&self, posted: u32) {
        let process = self.process();
        light_fence_towards_all(&process.unfenced);
        let (map, at) = (&process.segment.map, self.at());
        let waiting = (at + layout::WAITING, at + layout::WAITERS);
        match signal::waiters_in_turn(map, waiting.0, waiting.1) {
            Some(names) => self.ring_senders(&names, posted),
            None if self.any_unrung.load(Ordering::Relaxed) => {
                self.ring_some(&Names::default(), posted)
            }
            None => {}
        }
    }

    /// Rings `posted`, and at least [`AT_ONCE`], of the processes with these slots and of those
    /// that are not rung yet; all, if the queue takes no messages of initiators any more. The
    /// caller holds no lock of a queue, unless `posted` is [`ALL`].
    #[cold]
    pub(super) fn ring_some(&self, names: &Names, posted: u32) {
        let process = self.process();
        self.unrung.state.lock().add(names);
        // read behind the names: the end of the queue rings those that it finds
        let mut left = match self.serves_initiators() {
            true => posted.max(AT_ONCE),
            false => ALL,
        };
        while left != 0 {
            let chosen = self.unrung.state.lock().choose(left);
            if chosen == Names::default() {
                break;
            }
            // A ring is a system call, so the list is not locked. Names of others do not count.
            left = left.saturating_sub(process.ring_peers(&chosen));
        }
        let rung = ticks();
        self.unrung.rung.store(rung, Ordering::Relaxed);
        let any = {
            let unrung = self.unrung.state.lock();
            let any = !unrung.is_empty();
            self.any_unrung.store(any, Ordering::Relaxed);
            any
        };
        // After all were rung, the names are those of a thread that adds them now; it calls
        // `ring_later`.
        if any && posted != ALL {
            process.ring_later(rung);
        }
    }

    /// Rings further processes if receives are available and the last rings were [`PAUSE_TICKS`]
    /// before `now`. Returns the time of these rings if it is too early: the caller calls
    /// [`Process::ring_later`]. The caller holds no lock of a queue, and has cleared the progress
    /// flag.
    ///
    /// [`Process::ring_later`]: crate::process::Process::ring_later
    pub(crate) fn ring_further(&self, now: u64) -> Option<u64> {
        if !self.any_unrung.load(Ordering::Relaxed) {
            return None;
        }
        let rung = self.unrung.rung.load(Ordering::Relaxed);
        if now.wrapping_sub(rung) < PAUSE_TICKS {
            return Some(rung);
        }
        // Without a receive the next post rings. A post after this check rings, and finds what is
        // left.
        let most = match self.serves_initiators() {
            true => self.available(),
            false => ALL,
        };
        if most != 0 {
            self.ring_some(&Names::default(), most);
        }
        None
    }

    /// The queue has ended: rings the processes that are left.
    pub(super) fn end_rings(&self) {
        self.ring_some(&Names::default(), ALL);
    }

    /// Number of receives that no process has claimed.
    fn available(&self) -> u32 {
        let mut queue = self.queue.lock();
        if queue.order.len() == 0 {
            return 0;
        }
        self.follow(&mut queue);
        queue.order.left()
    }
}

#[cfg(test)]
mod tests {
    use rdma_core_sys::ibv_srq_init_attr;

    use super::*;

    fn names(slots: impl IntoIterator<Item = u32>) -> Names {
        let mut names = Names::default();
        for slot in slots {
            names[slot as usize / 64] |= 1 << (slot % 64);
        }
        names
    }

    #[test]
    fn each_process_has_its_turn() {
        let last = 64 * WAITER_WORDS as u32 - 1;
        let mut state = State::default();
        state.add(&names([0, 1, 63, 64, 700, last]));
        assert_eq!(state.choose(2), names([0, 1]));
        // one that waits again comes behind the others
        state.add(&names([0]));
        assert_eq!(state.choose(3), names([63, 64, 700]));
        state.add(&names([63]));
        assert_eq!(state.choose(2), names([last, 0]));
        assert_eq!(state.choose(2), names([63]));
        assert!(state.is_empty());
        assert_eq!(state.choose(2), names([]));
    }

    #[test]
    fn the_slots_in_front_of_the_last_choice_are_the_last() {
        let mut state = State::default();
        state.add(&names([5]));
        assert_eq!(state.choose(1), names([5]));
        state.add(&names([3, 4, 5, 6]));
        assert_eq!(state.choose(1), names([6]));
        assert_eq!(state.choose(2), names([3, 4]));
        assert_eq!(state.choose(9), names([5]));
    }

    /// A shared receive queue of this process, with one name that is not rung yet or none.
    fn create(any: bool) -> &'static Srq {
        let verbs = &crate::backend().verbs;
        // SAFETY: all zeros is a value of it.
        let mut init: ibv_srq_init_attr = unsafe { std::mem::zeroed() };
        (init.attr.max_wr, init.attr.max_sge) = (1, 1);
        // SAFETY: live objects, which are never destroyed.
        let srq = unsafe {
            let list = (verbs.ibv_get_device_list)(std::ptr::null_mut());
            let context = (verbs.ibv_open_device)(*list);
            (verbs.ibv_free_device_list)(list);
            let pd = (verbs.ibv_alloc_pd)(context);
            Srq::from_ptr((verbs.ibv_create_srq)(pd, &raw mut init))
        };
        srq.unrung.state.lock().add(&names(any.then_some(700)));
        srq.any_unrung.store(any, Ordering::Relaxed);
        srq
    }

    #[test]
    fn a_queue_that_rings_often_does_not_delay_another_one() {
        let (busy, quiet) = (create(false), create(true));
        let process = quiet.process();
        let begin = ticks();
        process.ring_later(begin);
        loop {
            let late = ticks().wrapping_sub(begin) >= PAUSE_TICKS;
            // of this queue, all are rung at once
            busy.ring_some(&names([701]), 1);
            process.progress();
            if late {
                break;
            }
        }
        assert!(!quiet.any_unrung.load(Ordering::Relaxed));
    }

    #[test]
    fn a_queue_is_looked_at_again_after_its_own_pause() {
        let (early, late) = (create(true), create(true));
        let process = early.process();
        let now = ticks();
        late.unrung.rung.store(now, Ordering::Relaxed);
        assert_eq!(late.ring_further(now + PAUSE_TICKS - 1), Some(now));
        assert!(late.any_unrung.load(Ordering::Relaxed));
        process.ring_later(now - PAUSE_TICKS);
        while late.any_unrung.load(Ordering::Relaxed) {
            process.progress();
        }
        assert!(ticks() - now >= PAUSE_TICKS);
        assert!(!early.any_unrung.load(Ordering::Relaxed));
    }
}
