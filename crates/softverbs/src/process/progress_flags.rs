//! Progress flags: one word with the work besides taking messages, so that the usual case of no
//! such work costs one load.

use std::sync::atomic::{AtomicU32, Ordering};

/// A completion queue was overrun, and its queue pairs have not failed yet.
pub(super) const OVERRUN: u32 = 1;
/// Requests wait.
pub(super) const WAITING: u32 = 1 << 1;
/// Messages that belong to no request found no room.
pub(super) const LATE: u32 = 1 << 2;
/// Completion queues hold events back.
pub(super) const MODERATED: u32 = 1 << 3;
/// Dead peers are not cleaned up yet.
pub(super) const DEAD_PEERS: u32 = 1 << 4;
/// A queue pair has failed, and its receives are not flushed yet.
pub(super) const CLOSING: u32 = 1 << 5;
/// There may be pending messages to pull.
pub(super) const PULLS: u32 = 1 << 6;
/// Processes that wait for receives of shared receive queues are not rung yet.
pub(super) const UNRUNG: u32 = 1 << 7;

/// One bit for each kind of work. The bit of a list is changed under the list's lock, so that it
/// agrees with the list.
#[derive(Debug, Default)]
pub(super) struct ProgressFlags(AtomicU32);

impl ProgressFlags {
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    pub(super) fn has(&self, flag: u32) -> bool {
        self.0.load(Ordering::Relaxed) & flag != 0
    }

    /// Sets a flag. Returns whether it was not set.
    pub(super) fn raise(&self, flag: u32) -> bool {
        self.0.fetch_or(flag, Ordering::AcqRel) & flag == 0
    }

    pub(super) fn set(&self, flag: u32, there: bool) {
        if there {
            self.0.fetch_or(flag, Ordering::Release);
        } else {
            self.0.fetch_and(!flag, Ordering::AcqRel);
        }
    }
}
