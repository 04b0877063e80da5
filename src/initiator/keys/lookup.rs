//! The initiator's reads of its peer's directory.

#![allow(unsafe_code, reason = "posts requests")]

use std::time::{Duration, Instant};

use rdma_core_sys as sys;

use super::PeerKeys;
use crate::errno::{FiErrno, Result};
use crate::initiator::link::Link;
use crate::mr::lookup::{Lookup, Outcome, READ_WORDS};
use crate::queue::slots::{EngineRequest, Progress};
use crate::verbs::{SendOpcode, Sge, Words};

/// An operation fails with `EIO` after more than this number of reads of incomplete or changed
/// records and more than this time. Both must be exceeded, because the owner may be suspended while
/// it writes.
const MAX_TORN: u32 = 100;
const TORN_FOR: Duration = Duration::from_secs(1);
/// Maximum number of completed reads in one call, before the operation is deferred.
const READS: u32 = 1024;

/// State of a look-up after one call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// The look-up has ended.
    Ended(Result<()>),
    /// One of the engine's own requests is outstanding; the look-up continues after its completion.
    UnderWay,
    /// The look-up has completed [`READS`] reads in this call.
    Exhausted,
}

/// Number of polls and reads of one call for a look-up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Effort {
    /// Polls for completions since the last completed read ([`Link::poll_once_more`]).
    pub(super) polls: u32,
    /// Completed reads.
    reads: u32,
}

impl<L: Link> PeerKeys<L> {
    /// Drops the cached keys if the peer has revoked any key since the last call.
    pub(crate) fn catch_up(&mut self) {
        let revision = self.block.revision();
        if revision != self.revision && !self.ignores_revocations() {
            self.revision = revision;
            self.acted = self.acted.max(revision);
            self.cache.clear();
            self.returned.clear();
            if let Some(lookup) = &self.lookup {
                // The look-up may have read records from before the revocation and is restarted. A
                // look-up of a block of segments ends, because its key is dropped.
                let again = lookup.block().is_none();
                self.lookup = again.then(|| Lookup::new(lookup.key(), &self.map));
                self.stale_read = true;
            }
        }
    }

    /// As [`Self::catch_up`], and counts a restart of the look-up for the operation.
    fn catch_up_counted(&mut self) {
        let before = self.revision;
        self.catch_up();
        self.restarts += u32::from(self.revision != before);
    }

    /// Posts the next read of the look-up in progress.
    fn post_read(&mut self) -> Result<()> {
        self.stale_read = false;
        let Some(lookup) = &self.lookup else {
            return Ok(());
        };
        if self.scratch.is_none() {
            let rights = sys::IBV_ACCESS_LOCAL_WRITE;
            self.scratch = Some(Words::new(self.link.pd(), READ_WORDS + 1, rights)?);
        }
        let Some(scratch) = &self.scratch else {
            return Ok(());
        };
        let read = lookup.read(&self.map);
        let sge = Sge {
            addr: scratch.addr(0),
            length: read.words as u32 * 8,
            lkey: scratch.lkey(),
        };
        // SAFETY: `self` owns the words. Their registration ends before their memory, so a request
        // that is under way then, on a circuit of XRC, does not access it.
        let posted = unsafe {
            let (kind, from) = (EngineRequest::Lookup, (read.addr, read.rkey));
            let opcode = if read.claim {
                SendOpcode::CompareSwap
            } else {
                SendOpcode::Read
            };
            self.link
                .post_engine_request(kind, opcode, sge, from, self.map.token, false)
        };
        if posted { Ok(()) } else { Err(FiErrno::EIO) }
    }

    /// Continues the look-up of `key` as far as its reads have completed. Never polls.
    pub(super) fn look_up(&mut self, key: u64, effort: &mut Effort) -> Step {
        self.catch_up_counted();
        if !self.holds_keys {
            match self.announce(key) {
                Step::Ended(Ok(())) => {}
                step => return step,
            }
        }
        self.acknowledge();
        if self.cache.get(key).is_some() {
            return Step::Ended(Ok(())); // the returned keys were still valid
        }
        if self.lookup.is_none() {
            self.lookup = Some(Lookup::new(key, &self.map));
        }
        self.advance(key, None, effort)
    }

    /// Reads a block of a cached key's segments. Ends at once if the key is no longer cached.
    /// Result as [`Self::look_up`].
    pub(super) fn read_segments(&mut self, key: u64, block: usize, effort: &mut Effort) -> Step {
        self.catch_up_counted();
        self.acknowledge();
        let Some(region) = self.cache.get(key) else {
            return Step::Ended(Ok(()));
        };
        if self.lookup.is_none() {
            self.lookup = Lookup::of_block(region, block);
        }
        if self.lookup.is_none() {
            return Step::Ended(Err(FiErrno::EIO)); // the region has no such block
        }
        self.advance(key, Some(block), effort)
    }

    /// Continues the look-up in progress, then that of this key or of this block of its segments,
    /// until the latter has ended or its next read is outstanding.
    fn advance(&mut self, key: u64, block: Option<usize>, effort: &mut Effort) -> Step {
        while effort.reads < READS {
            match self.link.engine_requests().take(EngineRequest::Lookup) {
                // no read is posted for this look-up, or the result was discarded
                Progress::Idle if !self.link.has_room() => return Step::Exhausted,
                Progress::Idle => {
                    if self.is_fence_under_way() {
                        return Step::UnderWay;
                    }
                    if let Err(error) = self.post_read() {
                        self.lookup = None;
                        return Step::Ended(Err(error));
                    }
                    return Step::UnderWay;
                }
                Progress::UnderWay => return Step::UnderWay,
                Progress::Failed => {
                    self.lookup = None;
                    return Step::Ended(Err(FiErrno::EIO));
                }
                Progress::Done if self.stale_read => {}
                Progress::Done => {
                    if let Some(end) = self.process_read(key, block) {
                        return Step::Ended(end);
                    }
                    effort.reads += 1;
                    effort.polls = 0;
                }
            }
        }
        Step::Exhausted
    }

    /// Processes a completed read. `Some` if the look-up of `key` has ended.
    fn process_read(&mut self, key: u64, block: Option<usize>) -> Option<Result<()>> {
        let before = self.revision;
        self.catch_up_counted();
        if self.revision != before {
            // a look-up of segments has ended, because its key was dropped
            return self.lookup.is_none().then_some(Ok(()));
        }
        let (Some(lookup), Some(scratch)) = (&mut self.lookup, &self.scratch) else {
            return Some(Err(FiErrno::EIO));
        };
        let count = lookup.read(&self.map).words;
        let words: [u64; READ_WORDS] = scratch.read(0);
        let read = lookup.key();
        let wanted = read == key && lookup.block() == block;
        let outcome = lookup.feed(&mut self.map, &words[..count]);
        if self.cache.is_empty()
            && self.returned.is_empty()
            && let Some(count) = self.map.revocations()
        {
            // all later reads are at least as new as this revocation count
            self.acted = self.acted.max(count);
        }
        let end = match outcome {
            Outcome::More => return None,
            Outcome::Checked(count) => return self.checked(count, key),
            Outcome::Torn => {
                let again = self.count_torn(true);
                if again.is_ok() {
                    return None;
                }
                again
            }
            Outcome::Found(resolved) => {
                self.cache.admit(resolved);
                Ok(())
            }
            Outcome::Segments(block, segments) => {
                let fits = self.cache.fill(read, block, segments);
                self.count_torn(!fits)
            }
            Outcome::Stale => {
                self.cache.clear();
                self.count_torn(true)
            }
            Outcome::Missing => Err(FiErrno::EKEYREJECTED),
            Outcome::Broken => Err(FiErrno::EIO),
        };
        self.lookup = None;
        if wanted {
            return Some(end);
        }
        if block.is_some() {
            // the cached key may have other blocks now
            return Some(Ok(()));
        }
        self.lookup = Some(Lookup::new(key, &self.map));
        None
    }

    /// Counts a read of an incomplete or changed record. Fails when both limits, [`MAX_TORN`] and
    /// [`TORN_FOR`], are exceeded.
    fn count_torn(&mut self, in_vain: bool) -> Result<()> {
        if in_vain {
            let since = *self.torn_since.get_or_insert_with(Instant::now);
            self.torn += 1;
            if self.torn > MAX_TORN && since.elapsed() > TORN_FOR {
                return Err(FiErrno::EIO);
            }
        }
        Ok(())
    }
}
