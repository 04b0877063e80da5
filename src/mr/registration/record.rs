//! The record of a region in the key directory (`docs/protocol.md`, "The key directory"), and the
//! memory that it refers to.

use std::sync::Arc;

use rdma_core_sys as sys;

use super::Registration;
use super::segment_list::List;
use crate::errno::Result;
use crate::mr::Region;
use crate::queue::event_cell::Cell;
use crate::verbs::{Mr, RemoteAddr, Words};
use crate::wire::records::{self, Entry, MAX_LIST_WORDS, MAX_SEGMENTS, Segment};

/// The directory record of a region, and the memory that it refers to.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) entry: Entry,
    /// The segment list, if the record refers to one with at most [`MAX_SEGMENTS`] segments.
    pub(super) short_list: Option<Words>,
    /// The segment list, if the region has more than [`MAX_SEGMENTS`] segments.
    pub(super) long_list: Option<List>,
    /// The event cell that counts peers' operations.
    pub(super) cell: Option<Arc<Cell>>,
    /// Whether the record is withdrawn from the directory. A withdrawn record does not change.
    pub(super) withdrawn: bool,
    /// The revocation count at the withdrawal.
    pub(super) revoked: u64,
    /// Whether all registrations have ended, so that no peer can access the memory.
    pub(super) over: bool,
    /// Registrations that only reserve their keys, kept here until the other registrations have
    /// ended too.
    pub(super) key_holders: Vec<Mr>,
}

/// The access bits of a region in its directory record.
pub(super) fn access(region: &Region) -> u8 {
    let flush = match region.persistent {
        true => records::access::FLUSH,
        false => 0,
    };
    region.access().published(region.atomics()) | flush
}

impl Record {
    /// A record without a list. `entry` has the region's one segment.
    fn new(entry: Entry, cell: Option<Arc<Cell>>) -> Self {
        Self {
            entry: Entry {
                cell: cell.as_ref().map_or(RemoteAddr::NULL, |cell| cell.addr()),
                ..entry
            },
            cell,
            ..Self::default()
        }
    }
}

impl Registration {
    /// Publishes the record in the directory.
    pub(super) fn publish(&mut self, region: &Region, cell: Option<Arc<Cell>>) -> Result<()> {
        let directory = region.domain().directory(&self.pd)?;
        let segments = match &self.segments {
            Some(segments) => segments.all(),
            None if region.once && self.entry.segments == 0 => vec![self.whole()],
            None => self.buffer_segments(),
        };
        let record = match &self.segments {
            Some(current) if segments.len() > MAX_SEGMENTS => {
                let mut list = self.list(segments.len())?;
                list.update(&[(0, self.entry.len)], |from, to| {
                    current.range(from, to - from)
                });
                self.record_with_long_list(list, cell)
            }
            _ => self.record_of(&segments, cell)?,
        };
        directory.insert(&record.entry)?;
        self.record = record.into();
        self.directory = Some(directory);
        Ok(())
    }

    /// The segment of a region with one buffer.
    fn whole(&self) -> Segment {
        Segment {
            addr: self.entry.addr,
            len: self.entry.len,
            rkey: self.entry.rkey,
            absent: false,
        }
    }

    /// The record of a region with at most [`MAX_SEGMENTS`] segments; empty if it has one buffer.
    fn record_of(&self, segments: &[Segment], cell: Option<Arc<Cell>>) -> Result<Record> {
        match segments {
            [] => return Ok(self.record_of_one(&self.whole(), cell)),
            [one] if !one.absent && !self.entry.once => return Ok(self.record_of_one(one, cell)),
            _ => {}
        }
        let (mut len, mut rights) = (MAX_LIST_WORDS, sys::IBV_ACCESS_REMOTE_READ);
        if self.entry.once {
            // one more word for the claim
            len += 1;
            rights |= sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
        }
        let list = Words::new(&self.pd, len, rights)?;
        Ok(self.record_with_short_list(segments, list, cell))
    }

    /// The record of a region with one segment.
    pub(super) fn record_of_one(&self, one: &Segment, cell: Option<Arc<Cell>>) -> Record {
        let entry = Entry {
            addr: one.addr,
            rkey: one.rkey,
            segments: 0,
            ..self.entry
        };
        Record::new(entry, cell)
    }

    /// The record of a region with a short list, which has room for [`MAX_SEGMENTS`] segments.
    pub(super) fn record_with_short_list(
        &self,
        segments: &[Segment],
        list: Words,
        cell: Option<Arc<Cell>>,
    ) -> Record {
        list.write(0, &Segment::encode_list(self.entry.generation, segments));
        let entry = Entry {
            addr: list.remote_addr(0),
            rkey: list.rkey(),
            segments: segments.len() as u16,
            ..self.entry
        };
        Record {
            short_list: Some(list),
            ..Record::new(entry, cell)
        }
    }

    /// A list with room for `segments` segments.
    pub(super) fn list(&self, segments: usize) -> Result<List> {
        List::new(&self.pd, self.entry.generation, self.entry.len, segments)
    }

    /// The record of a region with a long list.
    pub(super) fn record_with_long_list(&self, list: List, cell: Option<Arc<Cell>>) -> Record {
        let (addr, rkey) = list.at();
        let entry = Entry {
            addr,
            rkey,
            segments: Entry::LONG,
            ..self.entry
        };
        Record {
            long_list: Some(list),
            ..Record::new(entry, cell)
        }
    }

    /// Publishes an event cell, and waits until the peers that hold keys have acknowledged it: they
    /// count the operations that they post afterwards. A peer that does not acknowledge in time
    /// counts from its next look-up on.
    pub(in crate::mr) fn publish_cell(&self, cell: &Arc<Cell>) {
        if let Some(directory) = &self.directory {
            let mut record = self.record.lock();
            record.entry.cell = cell.addr();
            record.cell = Some(Arc::clone(cell));
            directory.await_acknowledgements(directory.replace(&record.entry));
        }
    }
}
