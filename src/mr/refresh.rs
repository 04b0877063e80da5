//! `fi_mr_refresh(3)`: the application reports that pages of a region have changed or are now
//! present.

use super::region::not_enabled;
use super::{Buffer, Paging, Region};
use crate::errno::{FiErrno, Result};
use crate::log::refused;

impl Region {
    /// Number of pages that the device has prefetched by advice or by [`Self::refresh`] since the
    /// region was enabled. Each request counts each page, also one that was present. It is the
    /// device's count, not the engine's.
    ///
    /// # Errors
    /// - `EOPBADSTATE`: not enabled.
    /// - `EOPNOTSUPP`: the region is not on demand, or the device has no count that verbs can read:
    ///   only softverbs has one.
    pub fn prefetched(&self) -> Result<u64> {
        let registration = self.registration.get().ok_or(FiErrno::EOPBADSTATE)?;
        if !self.is_on_demand() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        registration.prefetched()
    }

    /// Updates the registration for the present pages of these ranges; no range: of all buffers.
    /// The pages of an on-demand region are prefetched. Those of a pinned region are registered
    /// again and published; then the previous registrations end. Blocks until the pages are pinned,
    /// and allocates.
    ///
    /// # Errors
    /// - `EINVAL`: a range is empty, or lies outside every buffer of the region; nothing has
    ///   changed.
    /// - `EOPBADSTATE`: not enabled, or being closed.
    /// - `EOPNOTSUPP`: pinned at registration: the mode is without
    ///   [`Mode::MMU_NOTIFY`](super::Mode::MMU_NOTIFY).
    /// - `EFAULT`: a page of a range of an on-demand region is not mapped, or must be writable and
    ///   is not; pages before it may have been prefetched. Others of the device.
    /// - `EMFILE`, `ENFILE`: no descriptor is free to read which pages are present; nothing has
    ///   changed.
    /// - `ENOMEM`: the limit of locked memory, or more segments with gaps between them than a
    ///   region can have. A region that is a local buffer in several protection domains has a
    ///   registration in each: one that fails is unchanged, and the others are refreshed. The
    ///   caller can repeat the call.
    pub fn refresh(&self, ranges: &[Buffer]) -> Result<()> {
        let inside = |range: &Buffer| {
            let (addr, len) = (range.start(), range.len as u64);
            len != 0 && self.buffers.iter().any(|buffer| buffer.contains(addr, len))
        };
        if let Some(range) = ranges.iter().find(|range| !inside(range)) {
            return Err(refused!(
                Mr,
                EINVAL,
                "the range of {} bytes at {:?} is empty, or no buffer of the region contains it",
                range.len,
                range.addr
            ));
        }
        let ranges = if ranges.is_empty() {
            &self.buffers
        } else {
            ranges
        };
        let registration = self.registration.get().ok_or_else(not_enabled)?;
        if registration.is_ending() {
            return Err(refused!(Mr, EOPBADSTATE, "the region is being closed"));
        }
        match self.domain().paging() {
            Paging::Pinned => Err(refused!(
                Mr,
                EOPNOTSUPP,
                "the pages are pinned until fi_close: the domain was opened without mr_mode FI_MR_MMU_NOTIFY"
            )),
            Paging::OnDemand if self.is_on_demand() => registration.prefetch(self, ranges),
            // nothing pins or unpins its pages
            Paging::OnDemand | Paging::Unregistered => Ok(()),
            Paging::Refreshed { .. } => {
                let own = registration.refresh(ranges);
                own.and(self.elsewhere.refresh(ranges))
            }
        }
    }
}
