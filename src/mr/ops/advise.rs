//! `ibv_advise_mr(3)` with regions for keys.

use std::sync::Arc;

use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::mr::Region;
use crate::verbs::{Advised, FLUSH, NO_FAULT, Pd, advise};

/// Bytes of a region that an advice is about.
#[derive(Clone, Copy, Debug)]
pub struct AdvisedRange<'a> {
    /// The region.
    pub region: &'a Region,
    /// The virtual address of the first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

/// Bytes of the smallest page.
const PAGE: u64 = 1 << 12;
/// Most bytes that one element of a verbs list is given, of 32 bits of length.
const PART: u64 = 1 << 30;

impl AdvisedRange<'_> {
    /// The protection domain and the key that the device knows the range by. One that lies in no buffer of the region has a
    /// key of it too: it is for the device to say what that means.
    fn key(&self, domain: &Arc<Domain>) -> Result<(Arc<Pd>, u32)> {
        let (region, of) = (self.region, self.region.domain());
        if !Arc::ptr_eq(of.device(), domain.device()) {
            return Err(FiErrno::EINVAL);
        }
        let exposed = region.exposed.get().ok_or(FiErrno::EOPBADSTATE)?;
        let pd = if Arc::ptr_eq(of, domain) {
            exposed.pd() // an endpoint's, maybe
        } else {
            domain.pd()
        };
        Ok((Arc::clone(pd), exposed.lkey_at(self.addr, self.len)))
    }

    /// Whether a buffer of the region has it all, counted in whole pages as devices do. No bytes lie anywhere.
    fn is_inside(&self) -> bool {
        let Some(end) = self.addr.checked_add(self.len) else {
            return false;
        };
        let page = |addr: u64| addr & !(PAGE - 1);
        self.len == 0
            || self.region.buffers.iter().any(|buffer| {
                let last = buffer.addr + (buffer.len - 1);
                page(buffer.addr) <= self.addr && page(end - 1) <= page(last)
            })
    }

    /// The range as elements of a verbs list.
    fn parts(self, lkey: u32) -> impl Iterator<Item = Advised> {
        let parts = self.len.div_ceil(PART).max(1);
        (0..parts).map(move |part| Advised {
            addr: self.addr.wrapping_add(part * PART),
            // at most PART
            length: (self.len - part * PART).min(PART) as u32,
            lkey,
        })
    }
}

/// Why a list with a region that is not on demand is refused: the device says whether it has advice at all. Such regions
/// are not shown to it: mlx5 answers `ENOENT`, but rxe takes every region for one on demand, and the kernel (Linux 7.2)
/// ends with a page fault of its own.
fn pinned(pd: &Pd, advice: u32, flags: u32) -> FiErrno {
    match advise(pd, advice, flags, &[]) {
        Err(FiErrno::EOPNOTSUPP) => FiErrno::EOPNOTSUPP,
        _ if flags & !FLUSH != 0 => FiErrno::EINVAL,
        _ if advice > NO_FAULT => FiErrno::EOPNOTSUPP,
        _ => FiErrno::ENOENT,
    }
}

impl Domain {
    /// Gives the device an advice about ranges of regions (`ibv_advise_mr(3)`), with verbs' values of advice and flags.
    /// Regions of several endpoints' protection domains need a call for each, in the order of the ranges; else it is one.
    /// Blocks as the device does.
    ///
    /// # Errors
    /// - `EINVAL`: a region of another device.
    /// - `EOPBADSTATE`: a region that is not enabled.
    /// - `ENOENT`: a region that is not on demand; nothing is done.
    /// - `EFAULT`: a range that lies in no buffer of its region. Devices say so only with the flag to wait ("when the range
    ///   requested is out of the MR bounds": the page has it for both), so without it nothing is done.
    /// - those of the device.
    pub fn advise(
        self: &Arc<Self>,
        advice: u32,
        flags: u32,
        ranges: &[AdvisedRange<'_>],
    ) -> Result<()> {
        let keys = ranges.iter().map(|range| range.key(self));
        let keys = keys.collect::<Result<Vec<_>>>()?;
        if !ranges.iter().all(|range| range.region.is_on_demand()) {
            return Err(pinned(self.pd(), advice, flags));
        }
        let known = flags & !FLUSH == 0 && advice <= NO_FAULT;
        if known && flags == 0 && !ranges.iter().all(AdvisedRange::is_inside) {
            return Err(FiErrno::EFAULT);
        }
        let mut list = Vec::with_capacity(ranges.len());
        let mut at = self.pd();
        for (range, (pd, lkey)) in ranges.iter().zip(&keys) {
            if !Arc::ptr_eq(at, pd) {
                if !list.is_empty() {
                    advise(at, advice, flags, &list)?;
                    list.clear();
                }
                at = pd;
            }
            // the length of a range that lies in no buffer bounds no list
            let inside = range.is_inside();
            if known && !inside {
                if !list.is_empty() {
                    advise(at, advice, flags, &list)?; // the ranges before it are followed, as devices do
                }
                return Err(FiErrno::EFAULT);
            }
            let most = if inside { usize::MAX } else { 1 };
            list.extend(range.parts(*lkey).take(most));
        }
        // none at all is for the device to refuse
        advise(at, advice, flags, &list)
    }
}
