//! The memory of a receive, part by part, with the key of each part.

use rdma_core_sys::ibv_sge;

use super::Regions;
use crate::key::Key;
use crate::limits::MAX_SGE;

/// Sges of a receive, each with the lkey that it was posted with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) list: [(u64, u32, Key); MAX_SGE as usize],
    pub(crate) count: usize,
}

impl Places {
    /// Destination of `len` bytes from byte `skip` of `sges`; `None` if `sges` are too short or a
    /// key is not valid.
    pub(crate) fn of(
        regions: &Regions,
        sges: &[ibv_sge],
        pd: u32,
        mut skip: u64,
        len: u32,
    ) -> Option<Self> {
        let mut places = Self::default();
        let mut left = len;
        for sge in sges {
            let before = skip.min(u64::from(sge.length));
            skip -= before;
            let here = left.min(sge.length - before as u32);
            if here > 0 {
                let addr = regions.local(sge, pd, true)?;
                places.push(addr.wrapping_add(before), here, Key(sge.lkey))?;
                left -= here;
            }
        }
        (left == 0).then_some(places)
    }

    fn push(&mut self, addr: u64, len: u32, key: Key) -> Option<()> {
        *self.list.get_mut(self.count)? = (addr, len, key);
        self.count += 1;
        Some(())
    }
}
