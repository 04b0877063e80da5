//! Objects with an index that other threads may look up at any time: their memory stays, and is
//! used again for the next object of that index.

use std::collections::VecDeque;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Up to a fixed number of objects.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    slots: Box<[OnceLock<Box<T>>]>,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    next: u32,
    used: VecDeque<u32>,
}

/// Fresh indices are preferred up to this one, so that an index comes back late.
const FRESH: u32 = 512;

impl<T> Pool<T> {
    /// Indices from `first` to below `count`.
    pub(crate) fn new(first: u32, count: usize) -> Self {
        Self {
            slots: (0..count).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(Free {
                next: first,
                used: VecDeque::new(),
            }),
        }
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

    /// An object out of use; `make` makes it if none was there. `None` where all are in use.
    pub(crate) fn take(&self, make: impl FnOnce(u32) -> T) -> Option<&T> {
        let index = {
            let mut free = self.free();
            if (free.next as usize) < self.slots.len()
                && (free.next < FRESH || free.used.is_empty())
            {
                free.next += 1;
                free.next - 1
            } else {
                free.used.pop_front()?
            }
        };
        Some(self.slots[index as usize].get_or_init(|| Box::new(make(index))))
    }

    /// Gives an object back.
    pub(crate) fn give(&self, index: u32) {
        self.free().used.push_back(index);
    }

    /// All objects that ever were in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let next = self.free().next as usize;
        self.slots[..next]
            .iter()
            .filter_map(|slot| slot.get().map(|object| &**object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_unique_and_come_back_late() {
        let pool = Pool::new(2, 600);
        let all: Vec<u32> = (2..600).map(|_| *pool.take(|i| i).unwrap()).collect();
        assert!(all.iter().copied().eq(2..600));
        assert!(pool.take(|i| i).is_none());
        pool.give(9);
        pool.give(3);
        assert_eq!(pool.take(|_| 0), Some(&9));
        assert_eq!(pool.take(|_| 0), Some(&3));
        assert_eq!(pool.iter().count(), 598);
        assert_eq!(pool.get(1), None);
        assert_eq!(pool.get(60_000), None);
    }
}
