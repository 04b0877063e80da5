//! Receives of a shared receive context, between posting and completion.
//!
//! Any completion queue of the domain may find the completion of any of them, in any order. So they
//! are not in a ring: a receive takes a free slot and gives it back when it completes. The poster
//! (one at a time, under the context's lock) takes from the list of free slots, pollers (each under
//! its queue's lock) give back. With one taker, an entry that is compared and swapped can't have
//! been away in between.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::errno::{FiErrno, Result};

/// No slot.
const END: u32 = u32::MAX;

/// Identifies a shared receive context in its domain; a part of a `wr_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedId {
    pub(crate) index: u16,
    /// Of those that had the index before.
    pub(crate) generation: u16,
}

/// The identities of a domain's shared receive contexts.
#[derive(Debug, Default)]
pub(crate) struct SharedIds {
    /// By index: the generation, and whether it is in use.
    known: Mutex<Vec<(u16, bool)>>,
}

impl SharedIds {
    /// # Errors
    /// `ENOSPC`: 65,536 are in use.
    pub(crate) fn take(&self) -> Result<SharedId> {
        let mut known = self.known.lock();
        let free = known.iter().position(|(_, used)| !used);
        let index = free.unwrap_or(known.len());
        let short = u16::try_from(index).map_err(|_| FiErrno::ENOSPC)?;
        if free.is_none() {
            known.push((0, false));
        }
        let entry = &mut known[index];
        entry.1 = true;
        Ok(SharedId {
            index: short,
            generation: entry.0,
        })
    }

    pub(crate) fn give_back(&self, id: SharedId) {
        if let Some(entry) = self.known.lock().get_mut(usize::from(id.index)) {
            *entry = (entry.0.wrapping_add(1), false);
        }
    }
}

#[derive(Debug, Default)]
struct SharedSlot {
    context: AtomicUsize,
    /// Whether it completes visibly where only selected receives do (`FI_COMPLETION`).
    selected: AtomicBool,
    posted: AtomicBool,
    /// The next free one.
    next: AtomicU32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct SharedSlots {
    id: SharedId,
    slots: Box<[SharedSlot]>,
    /// The first free one.
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

    /// How many receives may be posted.
    pub(crate) fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Enters a receive *before* it is posted; gives its number. `None` where all are posted.
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
            assert_eq!(slots.complete(numbers[i]), Some(recv(i)));
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
