//! Objects with an index that other threads may look up at any time. Their memory is never freed;
//! the next object with the same index reuses it.

use std::collections::VecDeque;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::sys::{Errno, Grow, Res, list, room};

/// Up to a fixed number of objects.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    slots: Box<[OnceLock<Box<T>>]>,
    /// The lowest index, and the one that is used first; behind the highest index follows the
    /// lowest one.
    first: u32,
    start: u32,
    /// Fresh indices are preferred up to this number of them, so that an index is reused late.
    fresh: u32,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    /// Number of indices that have ever been in use.
    next: u32,
    used: VecDeque<u32>,
}

/// [`Pool::fresh`] of all pools that do not reuse an index at once.
const FRESH: u32 = 512;

impl<T> Pool<T> {
    /// Indices from `first` to below `count`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(first: u32, count: usize) -> Res<Self> {
        Ok(Self {
            slots: list(count, |_| OnceLock::new())?,
            first,
            start: first,
            fresh: FRESH,
            free: Mutex::new(Free {
                next: 0,
                used: VecDeque::new(),
            }),
        })
    }

    /// The same pool, in which the index that is used first follows from a random number.
    pub(crate) fn starting(mut self, random: u64) -> Self {
        self.start = self.first + (random % u64::from(self.len())) as u32;
        self
    }

    /// The same pool, in which an index that is free again is used before all others.
    pub(crate) fn reusing(mut self) -> Self {
        self.fresh = 0;
        self
    }

    /// Number of indices.
    fn len(&self) -> u32 {
        // fits: indices have 32 bits
        self.slots.len() as u32 - self.first
    }

    /// The index that is used as number `number`, counted from 0.
    fn index(&self, number: u32) -> u32 {
        self.first + (self.start - self.first + number) % self.len()
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object of this index, which may be out of use.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.slots
            .get(index as usize)?
            .get()
            .map(|object| &**object)
    }

    /// Acquires an unused object; `make` creates it if none exists at its index.
    ///
    /// # Errors
    /// `ENOMEM`: no memory, or all objects are in use.
    pub(crate) fn take(&self, make: impl FnOnce(u32) -> T) -> Res<&T> {
        let index = {
            let mut free = self.free();
            if free.next < self.len() && (free.next < self.fresh || free.used.is_empty()) {
                // Room for all indices is reserved here, so that `give` allocates no memory.
                let out = free.next as usize + 1 - free.used.len();
                free.used.make_room(out)?;
                free.next += 1;
                self.index(free.next - 1)
            } else {
                free.used.pop_front().ok_or(Errno(libc::ENOMEM))?
            }
        };
        let slot = &self.slots[index as usize];
        if slot.get().is_none() {
            let room = room().inspect_err(|_| self.give(index))?;
            // No other thread has this index.
            let _ = slot.set(Box::write(room, make(index)));
        }
        self.get(index).ok_or(Errno(libc::ENOMEM))
    }

    /// Returns an object to the pool.
    pub(crate) fn give(&self, index: u32) {
        self.free().used.push_back(index);
    }

    /// All objects that have ever been in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let next = self.free().next;
        (0..next).filter_map(|number| self.get(self.index(number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_unique_and_come_back_late() {
        let pool = Pool::new(2, 600).unwrap();
        let all: Vec<u32> = (2..600).map(|_| *pool.take(|i| i).unwrap()).collect();
        assert!(all.iter().copied().eq(2..600));
        assert!(pool.take(|i| i).is_err());
        pool.give(9);
        pool.give(3);
        assert_eq!(pool.take(|_| 0), Ok(&9));
        assert_eq!(pool.take(|_| 0), Ok(&3));
        assert_eq!(pool.iter().count(), 598);
        assert_eq!(pool.get(1), None);
        assert_eq!(pool.get(60_000), None);
    }

    #[test]
    fn a_random_start_leaves_no_index_out() {
        let pool = Pool::new(1, 700).unwrap().starting(699 * 5 + 690);
        let all: Vec<u32> = (1..700).map(|_| *pool.take(|i| i).unwrap()).collect();
        assert!(all.iter().copied().eq((691..700).chain(1..691)));
        assert!(pool.take(|i| i).is_err());
        assert_eq!(pool.iter().count(), 699);
        assert!(pool.iter().copied().eq(all));
    }

    #[test]
    fn a_pool_that_reuses_gives_the_last_index_again() {
        let pool = Pool::new(1, 700).unwrap().reusing();
        assert_eq!(pool.take(|i| i), Ok(&1));
        assert_eq!(pool.take(|i| i), Ok(&2));
        pool.give(1);
        assert_eq!(pool.take(|i| i), Ok(&1));
        assert_eq!(pool.take(|i| i), Ok(&3));
    }
}
