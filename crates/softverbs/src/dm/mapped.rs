//! The device memory buffers of a peer that this process has mapped.

use super::Shown;
use crate::agent::Opener;
use crate::segment::Mapping;
use crate::sync::{Arc, Lock};
use crate::sys::{self, Grow};

/// Location of a region in a device buffer of its owner; stamp 0 for ordinary memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Direct {
    pub(crate) stamp: u64,
    /// Offset of the region's first byte in the buffer.
    pub(crate) offset: u64,
}

/// Limit of mapped buffers of one peer.
const MOST: usize = 64;

/// The mapped buffers of one peer, by stamp.
#[derive(Debug, Default)]
pub(crate) struct Directs(Lock<Vec<(u64, Arc<Mapping>)>>);

impl Directs {
    /// Returns the mapping of a buffer. `None` if the peer's descriptor cannot be opened, or the
    /// file does not match the peer's segment.
    #[inline]
    pub(crate) fn get(
        &self,
        segment: &Mapping,
        opener: &Opener,
        stamp: u64,
    ) -> Option<Arc<Mapping>> {
        let known = self.0.lock();
        if let Some((_, map)) = known.iter().find(|known| known.0 == stamp) {
            return Some(Arc::clone(map));
        }
        drop(known);
        self.open(segment, opener, stamp)
    }

    #[cold]
    fn open(&self, segment: &Mapping, opener: &Opener, stamp: u64) -> Option<Arc<Mapping>> {
        self.drop_ended(segment);
        let shown = Shown::of(segment, stamp)?;
        let file = shown.open(opener).ok()?;
        let len = sys::sealed_size(&file).ok()?;
        let map = Arc::try_new(Mapping::new(&file, len).ok()?).ok()?;
        map.prefer_huge_pages();
        let mut known = self.0.lock();
        let gone = (known.len() >= MOST).then(|| known.remove(0));
        // Without memory for the list, the buffer is mapped again at the next access.
        let _ = known.try_push((stamp, Arc::clone(&map)));
        drop(known);
        // Dropped without the lock held: this may unmap memory.
        drop(gone);
        Some(map)
    }

    /// Drops the mappings of buffers that the peer has freed: the pages of such a buffer are freed
    /// with the last mapping of its file.
    fn drop_ended(&self, segment: &Mapping) {
        loop {
            let mut known = self.0.lock();
            let ended = |&(stamp, _): &(u64, _)| Shown::of(segment, stamp).is_none();
            let Some(at) = known.iter().position(ended) else {
                return;
            };
            let gone = known.swap_remove(at);
            drop(known);
            // as above
            drop(gone);
        }
    }
}
