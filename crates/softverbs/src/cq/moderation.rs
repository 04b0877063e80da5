//! `ibv_modify_cq`: fewer events than completions.

use rdma_core_sys::{IBV_CQ_ATTR_MODERATE, ibv_modify_cq_attr};

use super::Cq;
use crate::sys::{self, Errno, Res};

/// Maximum number of completions per event.
pub(crate) const MAX_COUNT: u16 = u16::MAX;
/// Maximum time that an event may be held back, in microseconds.
pub(crate) const MAX_PERIOD: u16 = u16::MAX;

/// The moderation that the application set, and the event that is held back.
#[derive(Debug, Default)]
pub(super) struct Moderation {
    count: u16,
    /// Microseconds.
    period: u16,
    /// Number of completions that the held event stands for, and the time until which it is held
    /// back, in nanoseconds of the monotonic clock.
    held: u32,
    until: u64,
}

impl Moderation {
    fn is_set(&self) -> bool {
        self.count > 1 && self.period != 0
    }
}

impl Cq {
    /// `ibv_modify_cq`: an event is held back until `cq_count` completions could have raised one,
    /// or `cq_period` microseconds after the first of them. With either at 0, or a count of 1, none
    /// is.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: any attribute other than moderation. `EIO`: this is a forked child.
    pub(crate) fn moderate(&self, attr: &ibv_modify_cq_attr) -> Res<()> {
        if self.process().forked() {
            return Err(Errno(libc::EIO));
        }
        if attr.attr_mask != IBV_CQ_ATTR_MODERATE {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let mut moderation = self.moderation.lock();
        moderation.count = attr.moderate.cq_count;
        moderation.period = attr.moderate.cq_period;
        // A held event is raised now, so that no thread waits longer than the new limits allow.
        let held = std::mem::take(&mut moderation.held) > 0;
        drop(moderation);
        if held {
            self.raise();
        }
        Ok(())
    }

    /// Whether events may be held back.
    pub(super) fn is_moderated(&self) -> bool {
        self.moderation.lock().is_set()
    }

    /// Counts a completion that may raise an event. Returns whether the event must wait.
    pub(super) fn hold_back(&self) -> bool {
        let mut moderation = self.moderation.lock();
        if !moderation.is_set() {
            return false;
        }
        moderation.held += 1;
        if moderation.held >= u32::from(moderation.count) {
            moderation.held = 0;
            return false;
        }
        if moderation.held == 1 {
            let until = sys::now_ns() + u64::from(moderation.period) * 1000;
            moderation.until = until;
            drop(moderation);
            self.process().will_raise(self.index, until);
        }
        true
    }

    /// Raises the held event if its time has come. If it must still wait, returns the time until
    /// which it is held back.
    pub(crate) fn raise_if_due(&self) -> Option<u64> {
        let mut moderation = self.moderation.lock();
        if moderation.held == 0 {
            return None;
        }
        if sys::now_ns() < moderation.until {
            return Some(moderation.until);
        }
        moderation.held = 0;
        // under the lock: the channel of a queue that is destroyed may end ([`Self::forget_held`])
        self.raise();
        None
    }

    /// A queue that is destroyed raises no event that is held back. On return no thread does so.
    pub(super) fn forget_held(&self) {
        self.moderation.lock().held = 0;
    }

    /// Time until which an event is held back, if one is.
    pub(crate) fn held_until(&self) -> Option<u64> {
        let moderation = self.moderation.lock();
        (moderation.held > 0).then_some(moderation.until)
    }
}
