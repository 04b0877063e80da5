//! The queue pairs of this process whose first request waits, and rounds over them, which several
//! threads make at the same time.
//!
//! Each entry has a number, in the order of the list. A round goes by the numbers: entries that
//! other threads remove or append meanwhile make it neither skip nor repeat another one.

use crate::qp::Went;
use crate::sync::Lock;
use crate::sys::{self, Res};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    number: u64,
    index: u32,
}

/// The list, in the order in which the queue pairs began to wait or had their last turn.
#[derive(Debug)]
pub(super) struct Waiting {
    entries: Vec<Entry>,
    /// Number of the next entry.
    next: u64,
}

impl Waiting {
    /// Room for `count` queue pairs.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn with_room(count: usize) -> Res<Self> {
        Ok(Self {
            entries: sys::with_room(count)?,
            next: 0,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Appends a queue pair that is not in the list. Returns whether it was appended. There is room
    /// for each queue pair of the process.
    pub(super) fn add(&mut self, index: u32) -> bool {
        let is_new = self.entries.iter().all(|entry| entry.index != index);
        if is_new {
            let number = self.next;
            self.next += 1;
            self.entries.push(Entry { number, index });
        }
        is_new
    }

    fn remove(&mut self, index: u32) -> bool {
        let at = self.entries.iter().position(|entry| entry.index == index);
        at.map(|at| self.entries.remove(at)).is_some()
    }

    /// The first entry whose number is in `from..until`.
    fn first(&self, from: u64, until: u64) -> Option<Entry> {
        let at = self.entries.partition_point(|entry| entry.number < from);
        let entry = self.entries.get(at).copied();
        entry.filter(|entry| entry.number < until)
    }

    /// The queue pairs that are in the list now, unless they are removed before they are reached.
    pub(super) fn each(list: &Lock<Self>) -> impl Iterator<Item = u32> {
        let (mut from, until) = (0, list.lock().next);
        std::iter::from_fn(move || {
            // The list is locked for one lookup at a time: the caller may take other locks.
            let entry = list.lock().first(from, until)?;
            from = entry.number + 1;
            Some(entry.index)
        })
    }

    /// Gives a turn to each queue pair that waits now. `changed` is called after each change of the
    /// list, under its lock. `waits_again` is called for a queue pair that has left the list: it
    /// adds the queue pair if a request waits again, and returns whether it does.
    ///
    /// A wake-up since the turn of that queue pair may have been taken by a thread that has not
    /// found it in the list. So `wake` is called, which makes a thread retry it.
    pub(super) fn round(
        list: &Lock<Self>,
        have_turn: impl Fn(u32) -> Went,
        changed: impl Fn(&Self),
        waits_again: impl Fn(u32) -> bool,
        wake: impl Fn(),
    ) {
        for index in Self::each(list) {
            let went = have_turn(index);
            if went == Went::Waits {
                continue;
            }
            let mut waiting = list.lock();
            if waiting.remove(index) && went == Went::Yields {
                // There is room: an entry was just removed.
                waiting.add(index);
            }
            changed(&waiting);
            drop(waiting);
            // A request of the queue pair may have begun to wait again in between.
            if went == Went::Through && waits_again(index) {
                wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    fn list(queue_pairs: &[u32]) -> Lock<Waiting> {
        let mut list = Waiting::with_room(8).unwrap();
        for &index in queue_pairs {
            assert!(list.add(index));
            assert!(!list.add(index));
        }
        Lock::new(list)
    }

    fn members(list: &Lock<Waiting>) -> Vec<u32> {
        Waiting::each(list).collect()
    }

    /// Makes a round, and returns the queue pairs that had a turn.
    fn round(list: &Lock<Waiting>, have_turn: impl Fn(u32) -> Went) -> Vec<u32> {
        let turns = RefCell::new(Vec::new());
        let turn = |index| {
            turns.borrow_mut().push(index);
            have_turn(index)
        };
        Waiting::round(list, turn, |_| {}, |_| false, || unreachable!());
        turns.into_inner()
    }

    #[test]
    fn each_has_one_turn_in_order() {
        let list = list(&[5, 3, 9, 4]);
        let went = |index| match index {
            3 => Went::Through,
            9 => Went::Yields,
            _ => Went::Waits,
        };
        assert_eq!(round(&list, went), [5, 3, 9, 4]);
        assert_eq!(members(&list), [5, 4, 9]);
        assert_eq!(round(&list, went), [5, 4, 9]);
    }

    /// Another thread removes an entry in front of the next one, and appends others.
    #[test]
    fn a_removal_by_another_thread_skips_none() {
        let list = list(&[1, 2, 3]);
        let went = |index| {
            if index == 1 {
                list.lock().remove(1);
                list.lock().add(4);
            } else if index == 2 {
                list.lock().remove(3);
                list.lock().add(3);
            }
            Went::Waits
        };
        assert_eq!(round(&list, went), [1, 2]);
        assert_eq!(members(&list), [2, 4, 3]);
        assert_eq!(round(&list, |_| Went::Waits), [2, 4, 3]);
    }

    /// A request begins to wait after the turn of its queue pair, and is ready before the queue
    /// pair is in the list again. The thread that takes the wake-up does not find it there.
    #[test]
    fn a_wake_up_while_a_queue_pair_is_not_in_the_list_is_not_lost() {
        let list = list(&[1]);
        let (waits, retried) = (Cell::new(false), Cell::new(false));
        let removals = Cell::new(0);
        Waiting::round(
            &list,
            |_| {
                // the thread that posts the request finds the entry, and the request waits
                assert!(!list.lock().add(1));
                waits.set(true);
                Went::Through
            },
            |now| {
                // the wake-up: another thread's round has no entry
                assert!(now.is_empty());
                removals.set(removals.get() + 1);
            },
            |index| {
                assert!(list.lock().add(index));
                waits.get()
            },
            || retried.set(members(&list) == [1]),
        );
        assert_eq!(removals.get(), 1);
        assert!(retried.get(), "no thread retries it");
    }
}
