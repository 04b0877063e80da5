//! Receives of a shared receive context, between posting and completion.
//!
//! Receives complete in any order and in any completion queue of the domain, so they are not in a
//! ring: a posted receive uses a slot from a list of free slots until it completes. One thread at a
//! time takes slots: the poster, under the context's lock. Several threads return them: the
//! pollers, each under the lock of its queue. Because only one thread takes slots, the first slot
//! of the list cannot be taken and returned between that thread's load and its exchange.

use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::errno::{FiErrno, Result};
use crate::sync::{AtomicBool, AtomicU32, AtomicUsize};

/// No slot.
const END: u32 = u32::MAX;

/// Identifies a shared receive context in its domain; a part of a `wr_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedId {
    pub(crate) index: u16,
    /// Incremented when the identity is released.
    pub(crate) generation: u16,
}

/// The identities of a domain's shared receive contexts.
#[derive(Debug, Default)]
pub(crate) struct SharedIds {
    state: Mutex<Ids>,
}

#[derive(Debug, Default)]
struct Ids {
    /// The current generation of each index.
    generations: Vec<u16>,
    /// Unused indices.
    free: Vec<u16>,
}

impl SharedIds {
    /// # Errors
    /// `ENOSPC`: 65,536 identities are in use.
    pub(crate) fn take(&self) -> Result<SharedId> {
        let mut state = self.state.lock();
        let index = match state.free.pop() {
            Some(index) => index,
            None => {
                let new = u16::try_from(state.generations.len()).map_err(|_| FiErrno::ENOSPC)?;
                state.generations.push(0);
                new
            }
        };
        Ok(SharedId {
            index,
            generation: state.generations[usize::from(index)],
        })
    }

    /// Releases an identity that [`Self::take`] returned.
    pub(crate) fn give_back(&self, id: SharedId) {
        let mut state = self.state.lock();
        if let Some(generation) = state.generations.get_mut(usize::from(id.index)) {
            *generation = generation.wrapping_add(1);
            state.free.push(id.index);
        }
    }
}

#[derive(Debug, Default)]
struct SharedSlot {
    context: AtomicUsize,
    /// Whether the receive was posted with `FI_COMPLETION`: on an endpoint with selective
    /// completion, only such receives produce entries.
    selected: AtomicBool,
    posted: AtomicBool,
    /// Index of the next free slot.
    next: AtomicU32,
}

/// The records of the posted receives of a shared receive context, and their free list.
#[derive(Debug)]
pub(crate) struct SharedSlots {
    id: SharedId,
    slots: Box<[SharedSlot]>,
    /// Index of the first free slot.
    free: AtomicU32,
}

/// The state of a posted receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedRecv {
    pub(crate) context: usize,
    pub(crate) selected: bool,
}

impl SharedSlots {
    pub(crate) fn new(id: SharedId, depth: usize) -> Self {
        let depth = depth.min(END as usize - 1) as u32;
        let slots: Box<[_]> = (0..depth)
            .map(|number| SharedSlot {
                next: AtomicU32::new(if number + 1 == depth { END } else { number + 1 }),
                ..SharedSlot::default()
            })
            .collect();
        Self {
            id,
            free: AtomicU32::new(if depth == 0 { END } else { 0 }),
            slots,
        }
    }

    pub(crate) fn id(&self) -> SharedId {
        self.id
    }

    /// Maximum number of posted receives.
    pub(crate) fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Stores a receive *before* it is posted, and returns its number. `None`: no slot is free.
    /// Poster only.
    #[inline]
    pub(crate) fn take(&self, recv: SharedRecv) -> Option<u32> {
        let mut number = self.free.load(Ordering::Acquire);
        loop {
            let slot = self.slots.get(number as usize)?;
            let next = slot.next.load(Ordering::Relaxed);
            match self.free.compare_exchange_weak(
                number,
                next,
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    slot.context.store(recv.context, Ordering::Relaxed);
                    slot.selected.store(recv.selected, Ordering::Relaxed);
                    slot.posted.store(true, Ordering::Release);
                    return Some(number);
                }
                Err(other) => number = other,
            }
        }
    }

    /// Whether receive `number` is posted. Poster only: another thread's answer may be out of date.
    pub(crate) fn is_posted(&self, number: u32) -> bool {
        let slot = self.slots.get(number as usize);
        slot.is_some_and(|slot| slot.posted.load(Ordering::Acquire))
    }

    /// Removes receive `number`, which is complete or could not be posted. `None`: no receive of
    /// this number is posted.
    #[inline]
    pub(crate) fn complete(&self, number: u32) -> Option<SharedRecv> {
        let slot = self.slots.get(number as usize)?;
        if !slot.posted.swap(false, Ordering::Acquire) {
            return None;
        }
        let recv = SharedRecv {
            context: slot.context.load(Ordering::Relaxed),
            selected: slot.selected.load(Ordering::Relaxed),
        };
        let mut first = self.free.load(Ordering::Relaxed);
        loop {
            slot.next.store(first, Ordering::Relaxed);
            match self.free.compare_exchange_weak(
                first,
                number,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(recv),
                Err(other) => first = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: SharedId = SharedId {
        index: 3,
        generation: 1,
    };

    fn recv(context: usize) -> SharedRecv {
        SharedRecv {
            context,
            selected: context.is_multiple_of(2),
        }
    }

    #[test]
    fn each_receive_completes_once_in_any_order() {
        let slots = SharedSlots::new(ID, 3);
        let numbers: Vec<_> = (0..3).map(|i| slots.take(recv(i)).unwrap()).collect();
        assert_eq!(slots.take(recv(9)), None, "full");
        for i in [1, 2, 0] {
            assert!(slots.is_posted(numbers[i]));
            assert_eq!(slots.complete(numbers[i]), Some(recv(i)));
            assert!(!slots.is_posted(numbers[i]));
            assert_eq!(slots.complete(numbers[i]), None, "twice");
        }
        for number in [3, END - 1, END] {
            assert_eq!(slots.complete(number), None);
        }
        assert!((0..3).all(|i| slots.take(recv(i)).is_some()));
    }

    #[test]
    fn an_index_that_is_used_again_has_another_generation() {
        let ids = SharedIds::default();
        let (first, second) = (ids.take().unwrap(), ids.take().unwrap());
        assert_ne!(first.index, second.index);
        ids.give_back(first);
        let third = ids.take().unwrap();
        assert_eq!(third.index, first.index);
        assert_ne!(third.generation, first.generation);
    }

    #[test]
    fn several_threads_give_back_while_one_takes() {
        const COUNT: usize = 20_000;
        let slots = SharedSlots::new(ID, 8);
        let (to, from) = std::sync::mpsc::sync_channel::<u32>(8);
        let from = Mutex::new(from);
        let seen = Mutex::new(vec![0_u8; COUNT]);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    loop {
                        let next = from.lock().recv();
                        let Ok(number) = next else { return };
                        let done = slots.complete(number).expect("posted");
                        seen.lock()[done.context] += 1;
                    }
                });
            }
            for context in 0..COUNT {
                let number = loop {
                    match slots.take(recv(context)) {
                        Some(number) => break number,
                        None => std::thread::yield_now(),
                    }
                };
                to.send(number).unwrap();
            }
            drop(to);
        });
        assert!(seen.lock().iter().all(|&count| count == 1));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use std::sync::Arc;

    const ID: SharedId = SharedId {
        index: 0,
        generation: 0,
    };

    fn recv(context: usize) -> SharedRecv {
        SharedRecv {
            context,
            selected: context.is_multiple_of(2),
        }
    }

    fn check(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    /// Posts a receive, retrying until a slot is free.
    fn post(slots: &SharedSlots, context: usize) -> u32 {
        loop {
            match slots.take(recv(context)) {
                Some(number) => return number,
                None => loom::thread::yield_now(),
            }
        }
    }

    /// Two pollers return slots while the poster takes them again: no slot is lost, and none is
    /// taken while its receive is posted.
    #[test]
    fn returned_slots_of_shared_receives_are_taken_once() {
        check(|| {
            let slots = Arc::new(SharedSlots::new(ID, 2));
            let pollers: Vec<_> = [10, 11]
                .into_iter()
                .map(|context| {
                    let number = post(&slots, context);
                    let slots = Arc::clone(&slots);
                    (number, context, slots)
                })
                .collect();
            let pollers: Vec<_> = pollers
                .into_iter()
                .map(|(number, context, slots)| {
                    loom::thread::spawn(move || {
                        assert_eq!(slots.complete(number), Some(recv(context)));
                    })
                })
                .collect();
            let numbers = [post(&slots, 12), post(&slots, 13)];
            assert_ne!(numbers[0], numbers[1]);
            assert_eq!(slots.take(recv(14)), None);
            for poller in pollers {
                poller.join().unwrap();
            }
            assert_eq!(slots.complete(numbers[0]), Some(recv(12)));
            assert_eq!(slots.complete(numbers[1]), Some(recv(13)));
        });
    }

    /// A poller that finds a receive reads it as it was posted, although the device imposes no
    /// memory order. The poller may find none: loom permits its exchange to precede the poster's
    /// store.
    #[test]
    fn a_completed_shared_receive_is_the_posted_one() {
        check(|| {
            let slots = Arc::new(SharedSlots::new(ID, 1));
            let theirs = Arc::clone(&slots);
            let poster = loom::thread::spawn(move || {
                theirs.take(recv(10)).expect("a free slot");
                let _ = theirs.take(recv(11));
            });
            let done: Vec<_> = (0..3).filter_map(|_| slots.complete(0)).collect();
            assert!([recv(10), recv(11)].starts_with(&done), "{done:?}");
            poster.join().unwrap();
        });
    }

    /// If two completions have the number of one receive, only one of them completes it.
    #[test]
    fn a_shared_receive_completes_once() {
        check(|| {
            let slots = Arc::new(SharedSlots::new(ID, 2));
            let number = post(&slots, 10);
            let theirs = Arc::clone(&slots);
            let other = loom::thread::spawn(move || theirs.complete(number));
            let done = [slots.complete(number), other.join().unwrap()];
            assert_eq!(done.into_iter().flatten().collect::<Vec<_>>(), [recv(10)]);
            assert_ne!(post(&slots, 11), post(&slots, 12));
            assert_eq!(slots.take(recv(13)), None);
        });
    }
}
