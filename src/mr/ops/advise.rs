//! `ibv_advise_mr(3)` with regions in place of lkeys.

use std::sync::Arc;

use crate::errno::{FiErrno, Result};
use crate::mr::MrDomain;
use crate::mr::Region;
use crate::verbs::{Advised, FLUSH, Lkey, NO_FAULT, Pd, advise};

/// Bytes of a region for an advice.
#[derive(Clone, Copy, Debug)]
pub struct AdvisedRange<'a> {
    /// The region.
    pub region: &'a Region,
    /// Virtual address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Size of the smallest page in bytes.
const PAGE: u64 = 1 << 12;
/// Maximum length of one element of a verbs list, whose length field has 32 bits.
const ELEMENT: u64 = 1 << 30;
/// Most elements that are passed to the device at once: a range of a region of the whole address
/// space has up to 2^34.
const MOST_AT_ONCE: usize = 1024;

impl AdvisedRange<'_> {
    /// The protection domain and lkey of the range. A range outside every buffer of the region gets
    /// the lkey of one of its buffers: the device decides about it.
    fn key(&self, domain: &Arc<MrDomain>) -> Result<(Arc<Pd>, Lkey)> {
        let (region, of) = (self.region, self.region.domain());
        if !Arc::ptr_eq(of.device(), domain.device()) {
            return Err(FiErrno::EINVAL);
        }
        let registration = region.registration.get().ok_or(FiErrno::EOPBADSTATE)?;
        let pd = if Arc::ptr_eq(of, domain) {
            registration.pd() // may be an endpoint's
        } else {
            domain.pd()
        };
        Ok((Arc::clone(pd), registration.lkey_at(self.addr, self.len)))
    }

    /// Whether a buffer of the region contains the range, in whole pages as devices count. An empty
    /// range is always inside.
    fn is_inside(&self) -> bool {
        let Some(end) = self.addr.checked_add(self.len) else {
            return false;
        };
        let page = |addr: u64| addr & !(PAGE - 1);
        self.len == 0
            || self.region.buffers.iter().any(|buffer| {
                page(buffer.start()) <= self.addr && page(end - 1) <= page(buffer.end() - 1)
            })
    }

    /// Splits the range into elements of a verbs list.
    fn elements(self, lkey: Lkey) -> impl Iterator<Item = Advised> {
        let count = self.len.div_ceil(ELEMENT).max(1);
        (0..count).map(move |index| Advised {
            addr: self.addr.wrapping_add(index * ELEMENT),
            // at most ELEMENT
            length: (self.len - index * ELEMENT).min(ELEMENT) as u32,
            lkey,
        })
    }
}

/// The error for a list with a region that is not on demand. An empty list is passed to the device,
/// which shows whether it supports advice at all; such regions are not passed to it: mlx5 returns
/// `ENOENT`, but rxe treats every region as on demand, and the kernel (Linux 7.2) crashes with a
/// page fault.
fn not_on_demand(pd: &Pd, advice: u32, flags: u32) -> FiErrno {
    match advise(pd, advice, flags, &[]) {
        Err(FiErrno::EOPNOTSUPP) => FiErrno::EOPNOTSUPP,
        _ if flags & !FLUSH != 0 => FiErrno::EINVAL,
        _ if advice > NO_FAULT => FiErrno::EOPNOTSUPP,
        _ => FiErrno::ENOENT,
    }
}

impl MrDomain {
    /// Gives the device advice about ranges of regions (`ibv_advise_mr(3)`), with verbs' values of
    /// advice and flags. One call of the device, or one for each run of ranges with the same
    /// protection domain, in the order of the ranges. Blocks as the device does.
    ///
    /// # Errors
    /// - `EINVAL`: a region of another device, or unknown flags.
    /// - `EOPBADSTATE`: a region that is not enabled.
    /// - `ENOENT`: a region that is not on demand; nothing is done.
    /// - `EOPNOTSUPP`: the device has no such advice.
    /// - `EFAULT`: a range outside every buffer of its region. With `IBV_ADVISE_MR_FLAG_FLUSH` the
    ///   ranges before it have been advised, as devices do; without it nothing is done.
    /// - Those of the device.
    pub fn advise(
        self: &Arc<Self>,
        advice: u32,
        flags: u32,
        ranges: &[AdvisedRange<'_>],
    ) -> Result<()> {
        let keys = ranges.iter().map(|range| range.key(self));
        let keys = keys.collect::<Result<Vec<_>>>()?;
        if !ranges.iter().all(|range| range.region.is_on_demand()) {
            return Err(not_on_demand(self.pd(), advice, flags));
        }
        let known = flags & !FLUSH == 0 && advice <= NO_FAULT;
        if known && flags == 0 && !ranges.iter().all(AdvisedRange::is_inside) {
            return Err(FiErrno::EFAULT);
        }
        let mut list = Vec::with_capacity(ranges.len());
        let mut at = self.pd();
        let mut sent = false;
        for (range, (pd, lkey)) in ranges.iter().zip(&keys) {
            if !Arc::ptr_eq(at, pd) {
                if !list.is_empty() {
                    advise(at, advice, flags, &list)?;
                    list.clear();
                }
                at = pd;
            }
            // a range outside the buffers may have any length: one element stands for it
            let inside = range.is_inside();
            if known && !inside {
                if !list.is_empty() {
                    // the ranges before it take effect, as on devices
                    advise(at, advice, flags, &list)?;
                }
                return Err(FiErrno::EFAULT);
            }
            let most = if inside { usize::MAX } else { 1 };
            for element in range.elements(*lkey).take(most) {
                list.push(element);
                if list.len() >= MOST_AT_ONCE {
                    advise(at, advice, flags, &list)?;
                    sent = true;
                    list.clear();
                }
            }
        }
        // the device refuses an empty list of the caller
        if sent && list.is_empty() {
            return Ok(());
        }
        advise(at, advice, flags, &list)
    }
}
