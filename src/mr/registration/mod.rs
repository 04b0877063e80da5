//! A region's registration in one protection domain: its registrations with the device (`reg_mr`,
//! and `segments` if its pages may change), its key (`key`), its record in the key directory
//! (`record`, changed by `refresh`), the lkeys of local buffers (`lkeys`), and its end
//! (`deregister`).

mod cover;
mod deregister;
mod key;
mod lkeys;
mod record;
mod refresh;
mod reg_mr;
mod replaceable_mr;
mod segment_list;
mod segments;

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rdma_core_sys as sys;

use self::key::Key;
use self::lkeys::Lkeys;
use self::record::Record;
use self::reg_mr::{Registered, reg_mr};
pub(crate) use self::replaceable_mr::InUse;
use self::segments::Segments;
use super::{Buffer, Directory, Region};
use crate::errno::Result;
use crate::queue::event_cell::Cell;
use crate::verbs::{Mr, Pd, RemoteAddr, Rkey};
use crate::wire::raw_key::RawKey;
use crate::wire::records::{Entry, Segment};

/// The registration of one region in one protection domain. Thread safe.
#[derive(Debug)]
pub(crate) struct Registration {
    /// The lkeys of fixed registrations.
    lkeys: Lkeys,
    pd: Arc<Pd>,
    /// One registration with the device per buffer, unless `segments` is set. After a failed
    /// [`Self::end`]: those that have not ended.
    mrs: RwLock<Vec<Mr>>,
    /// The registrations of a region whose pages may change.
    segments: Option<Segments>,
    /// The directory record. The lock is held from the start of a change until the record is
    /// published.
    record: Mutex<Record>,
    /// The key, and the directory record of a region of one buffer.
    entry: Entry,
    /// The directory that contains the record.
    directory: Option<Arc<Directory>>,
}

impl Registration {
    /// Registers a region for local operations only.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(super) fn local(region: &Region, pd: &Arc<Pd>) -> Result<Self> {
        let rights = region.access().verbs_rights(false) & sys::IBV_ACCESS_LOCAL_WRITE;
        let registered = reg_mr(region, pd, rights)?;
        Ok(Self::of(region, pd, registered, Key::Unused(0), 0))
    }

    /// Registers a region with all its access rights and publishes its key. `cell`: the event cell
    /// in which peers count.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(super) fn new(region: &Region, pd: &Arc<Pd>, cell: Option<Arc<Cell>>) -> Result<Self> {
        let mut rights = region.access().verbs_rights(region.atomics());
        if region.persistent {
            rights |= sys::IBV_ACCESS_FLUSH_GLOBAL | sys::IBV_ACCESS_FLUSH_PERSISTENT;
        }
        let registered = reg_mr(region, pd, rights)?;
        let generation = region.domain().next_generation();
        let key = Key::of(region, registered.only_rkey(), generation);
        let mut this = Self::of(region, pd, registered, key, generation);
        if let Key::Published(_) = key {
            this.publish(region, cell)?;
        }
        Ok(this)
    }

    fn of(
        region: &Region,
        pd: &Arc<Pd>,
        registered: Registered,
        key: Key,
        generation: u64,
    ) -> Self {
        let (mrs, segments) = match registered {
            Registered::Fixed(mrs) => (mrs, None),
            Registered::Segments(segments) => (Vec::new(), Some(segments)),
        };
        let lkeys = Lkeys::new(&region.buffers, &mrs);
        Self {
            pd: Arc::clone(pd),
            segments,
            record: Mutex::default(),
            entry: Entry {
                key: key.number(),
                addr: RemoteAddr::new(region.start()),
                len: region.len(),
                rkey: mrs.first().map_or(Rkey::default(), Mr::rkey),
                access: record::access(region),
                // the number of buffers is at most MAX_SEGMENTS
                segments: lkeys.buffers.len() as u16,
                once: region.once,
                generation,
                start: region.first_address(),
                cell: RemoteAddr::NULL,
            },
            mrs: RwLock::new(mrs),
            lkeys,
            directory: None,
        }
    }

    /// Makes the device fetch the pages of these ranges, which lie in the region's buffers.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn prefetch(&self, region: &Region, ranges: &[Buffer]) -> Result<()> {
        let write = region.access().verbs_rights(false) & sys::IBV_ACCESS_LOCAL_WRITE != 0;
        let mrs = self.mrs.read();
        for range in ranges {
            let (addr, len) = (range.start(), range.len as u64);
            let mut buffers = region.buffers.iter().zip(&*mrs);
            if let Some((_, mr)) = buffers.find(|(buffer, _)| buffer.contains(addr, len)) {
                mr.prefetch(addr, len, write)?;
            }
        }
        Ok(())
    }

    /// Number of pages of all buffers that the device has made present by advice.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn prefetched(&self) -> Result<u64> {
        let mrs = self.mrs.read();
        mrs.iter().try_fold(0, |sum, mr| Ok(sum + mr.prefetched()?))
    }

    /// Number of the device's registrations, of a region whose pages may change.
    #[cfg(test)]
    pub(super) fn alive(&self) -> usize {
        self.segments.as_ref().map_or(0, Segments::alive)
    }

    /// The segments of a region with several buffers, as peers address them; otherwise empty.
    fn buffer_segments(&self) -> Vec<Segment> {
        let mrs = self.mrs.read();
        let buffers = self.lkeys.buffers.iter().zip(&*mrs);
        buffers
            .map(|((buffer, _), mr)| Segment {
                addr: RemoteAddr::new(buffer.start()),
                len: buffer.len as u64,
                rkey: mr.rkey(),
                absent: false,
            })
            .collect()
    }

    pub(super) fn raw_key(&self, region: &Region) -> Result<RawKey> {
        Ok(RawKey {
            domain: region.domain().directory(&self.pd)?.number(),
            published: self.directory.is_some(),
            entry: Entry {
                once: false, // the directory record has the flag
                ..self.entry
            },
            segments: self.buffer_segments(),
        })
    }

    #[inline]
    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The number of the registration, unique in the domain.
    pub(super) fn generation(&self) -> u64 {
        self.entry.generation
    }

    pub(super) fn key(&self) -> u64 {
        self.entry.key
    }
}
