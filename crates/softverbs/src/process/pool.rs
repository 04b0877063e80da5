//! Objects with an index that other threads may look up at any time. Their memory is never freed;
//! the next object with the same index reuses it.

use std::collections::VecDeque;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::sys::{Errno, Grow, Res, list, room};

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

/// Fresh indices are preferred up to this one, so that an index is reused late.
const FRESH: u32 = 512;

impl<T> Pool<T> {
    /// Indices from `first` to below `count`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(first: u32, count: usize) -> Res<Self> {
        Ok(Self {
            slots: list(count, |_| OnceLock::new())?,
            free: Mutex::new(Free {
                next: first,
                used: VecDeque::new(),
            }),
        })
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
            if (free.next as usize) < self.slots.len()
                && (free.next < FRESH || free.used.is_empty())
            {
                // Room for all indices is reserved here, so that `give` allocates no memory.
                let out = free.next as usize + 1 - free.used.len();
                free.used.make_room(out)?;
                free.next += 1;
                free.next - 1
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
}
