//! The memory that registrations would lock on a device that pins it. Nothing is locked here. With
//! **`SOFTVERBS_MEMLOCK=1`** the pages are counted and limited as in the kernel (`ib_umem_get`):
//! each registration counts its pages, a page in two registrations counts twice; `RLIMIT_MEMLOCK`
//! limits the sum, unless the process has `CAP_IPC_LOCK`.

use rdma_core_sys::IBV_ACCESS_ON_DEMAND;

use super::Description;
use crate::environment;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sys::{self, Errno, Res};

/// Count of the pages of all registrations of this process. Thread safe.
#[derive(Debug)]
pub(super) struct Locked {
    counts: bool,
    pages: AtomicU64,
}

impl Locked {
    pub(super) fn new() -> Self {
        Self {
            counts: environment::MEMLOCK.is_on(),
            pages: AtomicU64::new(0),
        }
    }

    /// Counts the pages of a registration; returns their number.
    ///
    /// # Errors
    /// `ENOMEM`: the sum would exceed the limit. The count is unchanged.
    pub(super) fn charge(&self, what: &Description) -> Res<u64> {
        // pages of on-demand regions and device memory are not locked
        let locks = what.access & IBV_ACCESS_ON_DEMAND == 0 && what.direct.stamp == 0;
        if !self.counts || !locks {
            return Ok(0);
        }
        let pages = sys::pages_of(what.range.addr, what.range.len);
        let all = self.pages.fetch_add(pages, Ordering::Relaxed) + pages;
        let bytes = all.saturating_mul(sys::page_end(1));
        if sys::memlock().is_some_and(|limit| bytes > limit) && !sys::may_exceed_memlock() {
            self.give_back(pages);
            return Err(Errno(libc::ENOMEM));
        }
        Ok(pages)
    }

    pub(super) fn give_back(&self, pages: u64) {
        if pages != 0 {
            self.pages.fetch_sub(pages, Ordering::Relaxed);
        }
    }
}
