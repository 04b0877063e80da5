//! The caches of the process that are told when memory changes.
//!
//! The lock is the monitor's thread's too: nobody who holds it allocates, frees, or calls anything foreign.

use std::sync::{Arc, Mutex, MutexGuard};

use super::Gate;
use crate::errno::{FiErrno, Result};
use crate::mr::cache::Index;

/// How many there can be.
const MOST: usize = 64;

type Cell = Option<Arc<dyn Index + Send>>;

static LIST: Mutex<[Cell; MOST]> = Mutex::new([const { None }; MOST]);

fn list() -> MutexGuard<'static, [Cell; MOST]> {
    match LIST.lock() {
        Ok(list) => list,
        // nothing panics under it; and if, the cells are whole
        Err(poisoned) => poisoned.into_inner(),
    }
}

/// A cache's place in the list, until it is dropped.
#[derive(Debug)]
pub(crate) struct Listed {
    at: usize,
    gate: Gate,
}

impl Listed {
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
        // in a child the lock may be one that nobody opens any more
        if !self.gate.is_forked() {
            let index = list()[self.at].take();
            // the last reference may be this one: not under the lock
            drop(index);
        }
    }
}

/// Keeps the lock, for a test that forks meanwhile.
#[cfg(test)]
pub(super) fn hold() -> impl Drop {
    struct Held(#[allow(dead_code, reason = "dropped")] MutexGuard<'static, [Cell; MOST]>);
    impl Drop for Held {
        fn drop(&mut self) {}
    }
    Held(list())
}

/// Tells all of them.
pub(super) fn kill(start: u64, end: u64) {
    for index in list().iter().flatten() {
        index.kill(start, end);
    }
}
