//! The region that a queue used last. Most requests of a queue use the same region; for these, a
//! comparison replaces the table look-up.

use rdma_core_sys::{IBV_ACCESS_LOCAL_WRITE, ibv_sge};

use super::Regions;
use crate::key::Key;
use crate::sync::atomic::Ordering;

/// The result of the last look-up; `changes` is 0 if there is none.
#[derive(Debug, Default)]
pub(crate) struct LastRegion {
    /// The value of [`Regions::changes`] before the look-up.
    changes: u64,
    start: u64,
    len: u64,
    addr: u64,
    lkey: u32,
    pd: u32,
    writable: bool,
}

impl Regions {
    /// As [`Self::local`], with the caller's cached look-up `last_region`. An invalidated key is
    /// detected as in that function.
    #[inline(always)]
    pub(crate) fn local_again(
        &self,
        last_region: &mut LastRegion,
        sge: &ibv_sge,
        pd: u32,
        write: bool,
    ) -> Option<u64> {
        match self.cached(last_region, sge, pd, write) {
            None => self.local_first(last_region, sge, pd, write),
            found => found,
        }
    }

    /// As [`Self::local_again`], for the memory of a receive that is posted:
    /// [`Self::is_received`] is true for its key from then on.
    #[inline(always)]
    pub(crate) fn receive_again(
        &self,
        last_region: &mut LastRegion,
        sge: &ibv_sge,
        pd: u32,
    ) -> Option<u64> {
        match self.cached(last_region, sge, pd, true) {
            None => self.receive_first(last_region, sge, pd),
            found => found,
        }
    }

    /// The memory of `sge`, if it is in the cached region.
    #[inline(always)]
    fn cached(&self, last_region: &LastRegion, sge: &ibv_sge, pd: u32, write: bool) -> Option<u64> {
        let offset = sge.addr.wrapping_sub(last_region.start);
        // `kill` increments `changes` after it has made the key invalid, so the numbers differ
        // after a `kill`.
        let same = last_region.lkey == sge.lkey
            && last_region.changes == self.changes.load(Ordering::Acquire)
            && last_region.pd == pd
            && (last_region.writable || !write)
            && offset <= last_region.len
            && u64::from(sge.length) <= last_region.len - offset;
        same.then(|| last_region.addr.wrapping_add(offset))
    }

    /// The receive queue's cached look-up is that of a receive that was posted, so that its key is
    /// marked already.
    #[inline(never)]
    fn receive_first(&self, last_region: &mut LastRegion, sge: &ibv_sge, pd: u32) -> Option<u64> {
        let found = self.local_first(last_region, sge, pd, true);
        if found.is_some() {
            self.mark_received(sge);
        }
        found
    }

    #[inline(never)]
    fn local_first(
        &self,
        last_region: &mut LastRegion,
        sge: &ibv_sge,
        pd: u32,
        write: bool,
    ) -> Option<u64> {
        let changes = self.changes.load(Ordering::Acquire);
        let found = self.local(sge, pd, write);
        // Null regions have no description and are not cached.
        if found.is_some()
            && let Some(region) = self.describe(Key(sge.lkey))
        {
            *last_region = LastRegion {
                changes,
                start: region.range.iova,
                len: region.range.len,
                addr: region.range.addr,
                lkey: sge.lkey,
                pd: region.pd,
                writable: region.access & IBV_ACCESS_LOCAL_WRITE != 0,
            };
        }
        found
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::Range;
    use super::*;
    use crate::segment::OwnSegment;

    #[test]
    fn what_was_seen_is_as_good_as_a_look_up() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        let range = Range {
            addr: 0x5000,
            len: 0x100,
            iova: 0x9000,
        };
        let register = |access| regions.register(&segment, 7, range, access).unwrap();
        let (first, second) = (register(IBV_ACCESS_LOCAL_WRITE), register(0));
        let mut last_region = LastRegion::default();
        let mut ask = |key: Key, addr, length, pd, write| {
            let sge = ibv_sge {
                addr,
                length,
                lkey: key.0,
            };
            let found = regions.local_again(&mut last_region, &sge, pd, write);
            assert_eq!(found, regions.local(&sge, pd, write));
            found
        };
        for key in [first, second] {
            for _ in 0..2 {
                assert_eq!(ask(key, 0x9010, 0xf0, 7, false), Some(0x5010));
                assert_eq!(ask(key, 0x9010, 0xf1, 7, false), None);
                assert_eq!(ask(key, 0x8fff, 2, 7, false), None);
                assert_eq!(ask(key, u64::MAX, 2, 7, false), None);
                assert_eq!(ask(key, 0x9000, 1, 8, false), None);
                assert_eq!(ask(Key(key.0 ^ 1), 0x9000, 1, 7, false), None);
                assert_eq!(ask(Key(0), 0x9000, 1, 7, false), None);
                assert_eq!(ask(key, 0x9010, 8, 7, true).is_some(), key == first);
            }
        }
        assert_eq!(ask(first, 0x9010, 8, 7, true), Some(0x5010));
        regions.deregister(&segment, first, |_| true).unwrap();
        assert_eq!(ask(first, 0x9010, 8, 7, true), None);
        assert_eq!(ask(second, 0x9010, 8, 7, false), Some(0x5010));
        // A changed region keeps its key.
        let mut to = regions.describe(second).unwrap();
        to.range.addr = 0x7000;
        regions
            .change(&segment, second, &to, |_| true, || Ok(()))
            .unwrap();
        assert_eq!(ask(second, 0x9010, 8, 7, false), Some(0x7010));
    }

    /// A receive marks the key of its memory, also one of no bytes, whose region is cached. The
    /// destination of a READ does not.
    #[test]
    fn receives_alone_mark_their_keys() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        let range = Range {
            addr: 0x5000,
            len: 0x100,
            iova: 0x5000,
        };
        let access = IBV_ACCESS_LOCAL_WRITE;
        let key = regions.register(&segment, 7, range, access).unwrap();
        let sge = |length| ibv_sge {
            addr: 0x5000,
            length,
            lkey: key.0,
        };
        let (mut reads, mut receives) = (LastRegion::default(), LastRegion::default());
        for length in [8, 8] {
            assert!(
                regions
                    .local_again(&mut reads, &sge(length), 7, true)
                    .is_some()
            );
            assert!(!regions.is_received(key));
        }
        for length in [0, 8] {
            assert!(
                regions
                    .receive_again(&mut receives, &sge(length), 7)
                    .is_some()
            );
            assert!(regions.is_received(key));
        }
        regions.deregister(&segment, key, |_| true).unwrap();
        let key = regions.register(&segment, 7, range, access).unwrap();
        assert!(!regions.is_received(key));
    }
}
