//! Registers changed pages of a region again, and publishes the change.

use rdma_core_sys as sys;

use super::Registration;
use super::record::Record;
use super::reg_mr::explain;
use super::segments::{Change, Segments, Unused};
use crate::errno::{FiErrno, Result};
use crate::mr::Buffer;
use crate::mr::revocation::Retired;
use crate::verbs::Words;
use crate::wire::records::{MAX_LIST_WORDS, MAX_SEGMENTS};

impl Registration {
    /// Registers the present pages of these ranges, publishes them, and ends the replaced
    /// registrations after peers have acknowledged the change; blocks until then. Those that local
    /// operations use end with these operations. The ranges lie in the region's buffers.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering: nothing has changed. `EOPBADSTATE`: the region is
    /// closed, or its closing has begun.
    pub(in crate::mr) fn refresh(&self, ranges: &[Buffer]) -> Result<()> {
        let Some(segments) = &self.segments else {
            return Ok(());
        };
        let mut record = self.record.lock();
        if record.withdrawn {
            return Err(FiErrno::EOPBADSTATE);
        }
        let change = segments.refresh(ranges).inspect_err(|&error| {
            let len = ranges
                .iter()
                .fold(0, |sum: u64, range| sum.saturating_add(range.len as u64));
            explain(error, len);
        })?;
        let Some(directory) = &self.directory else {
            segments.end_local(segments.make(change));
            return Ok(());
        };
        let (replaced, lists) = self.change(&mut record, segments, change)?;
        let revocation = directory.await_acknowledgements(directory.replace(&record.entry));
        if replaced.is_published_used() {
            // such a registration keeps its rights until the last local operation is complete
            revocation.cut_off();
        }
        let free = segments.end_published(replaced);
        let keys = revocation.deregister_replaced(free, self.entry.generation);
        revocation.retire(Retired {
            keys,
            lists,
            ..Retired::default()
        });
        Ok(())
    }

    /// Changes the segments and the record. Returns the registrations and the lists that peers may
    /// use until they have processed the revocation.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering a longer list: nothing has changed.
    fn change(
        &self,
        record: &mut Record,
        current: &Segments,
        change: Change<'_>,
    ) -> Result<(Unused, Vec<Words>)> {
        let Some(mut list) = record.long_list.take() else {
            return self.change_short(record, current, change);
        };
        let changed: Vec<_> = change
            .ranges()
            .flat_map(|(start, end)| current.offsets(start, end))
            .collect();
        // all steps that can fail come before the change
        if let Err(error) = list.reserve(change.most_segments(), changed.len()) {
            record.long_list = Some(list);
            return Err(error);
        }
        let replaced = current.make(change);
        let outgrown = list.update(&changed, |from, to| current.range(from, to - from));
        let mut lists: Vec<_> = outgrown.into_iter().collect();
        let cell = record.cell.take();
        let only = list.is_short().then(|| current.all());
        *record = match only.as_deref() {
            Some(&[one]) if !one.absent => {
                lists.extend(list.into_words());
                self.record_of_one(&one, cell)
            }
            _ => self.record_with_long_list(list, cell),
        };
        Ok((replaced, lists))
    }

    /// As [`Self::change`], for a region with at most [`MAX_SEGMENTS`] segments.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering a list: nothing has changed.
    fn change_short(
        &self,
        record: &mut Record,
        current: &Segments,
        change: Change<'_>,
    ) -> Result<(Unused, Vec<Words>)> {
        let most = current.all().len() + change.most_segments();
        let long = if most > MAX_SEGMENTS {
            Some(self.list(most)?)
        } else {
            None
        };
        let short = Words::new(&self.pd, MAX_LIST_WORDS, sys::IBV_ACCESS_REMOTE_READ)?;
        // no step below can fail
        let replaced = current.make(change);
        let segments = current.all();
        let cell = record.cell.take();
        let new = match (long, &*segments) {
            (_, [one]) if !one.absent => self.record_of_one(one, cell),
            (Some(mut list), segments) if segments.len() > MAX_SEGMENTS => {
                list.update(&[(0, self.entry.len)], |from, to| {
                    current.range(from, to - from)
                });
                self.record_with_long_list(list, cell)
            }
            (_, segments) => self.record_with_short_list(segments, short, cell),
        };
        let old = std::mem::replace(record, new);
        Ok((replaced, old.short_list.into_iter().collect()))
    }
}
