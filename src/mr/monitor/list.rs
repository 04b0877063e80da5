//! The caches of the process, to which changes of memory are reported.
//!
//! The monitor's thread takes the lock too: its holder must not allocate, free, or call foreign
//! code.

use std::sync::{Arc, Mutex, MutexGuard};

use super::Gate;
use crate::errno::{FiErrno, Result};
use crate::mr::cache::Index;

/// Maximum number of caches in a process.
const MOST: usize = 64;

type Cell = Option<Arc<dyn Index + Send>>;

static LIST: Mutex<[Cell; MOST]> = Mutex::new([const { None }; MOST]);

fn list() -> MutexGuard<'static, [Cell; MOST]> {
    match LIST.lock() {
        Ok(list) => list,
        // no code panics under this lock; the cells would be complete if it did
        Err(poisoned) => poisoned.into_inner(),
    }
}

/// A cache's place in the list; removed on drop.
#[derive(Debug)]
pub(crate) struct Listed {
    at: usize,
    gate: Gate,
}

impl Listed {
    /// Adds a cache to the list.
    ///
    /// # Errors
    /// `ENOSPC`: the list is full.
    pub(crate) fn new(index: Arc<dyn Index + Send>, gate: Gate) -> Result<Self> {
        let mut list = list();
        let at = list.iter().position(Option::is_none);
        let at = at.ok_or(FiErrno::ENOSPC)?;
        list[at] = Some(index);
        Ok(Self { at, gate })
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // in a child another thread of the parent may have held the lock at the fork
        if !self.gate.is_forked() {
            let index = list()[self.at].take();
            // may be the last reference, which frees the cache: not under the lock
            drop(index);
        }
    }
}

/// Holds the lock, for a test that forks meanwhile.
#[cfg(test)]
pub(super) fn hold() -> impl Drop {
    struct Held(#[allow(dead_code, reason = "dropped")] MutexGuard<'static, [Cell; MOST]>);
    impl Drop for Held {
        fn drop(&mut self) {}
    }
    Held(list())
}

/// Reports a change of a range to all caches.
pub(super) fn kill(start: u64, end: u64) {
    for index in list().iter().flatten() {
        index.kill(start, end);
    }
}
