//! The initiator's reads of its peer's directory.

#![allow(unsafe_code, reason = "posts requests")]

use std::time::{Duration, Instant};

use rdma_core_sys as sys;

use super::{Remote, polls};
use crate::errno::{FiErrno, Result};

use crate::mr::lookup::{Lookup, Outcome, READ_WORDS};
use crate::queue::slots::{Own, Progress};
use crate::verbs::{SendOpcode, Sge, Words};

/// An operation fails with `EIO` after more than this many reads of half-written or changed
/// records, and more than this time: the owner may be stopped by its system while it writes.
const IN_VAIN: u32 = 100;
const IN_VAIN_FOR: Duration = Duration::from_secs(1);
/// Completed reads in one call, before the operation becomes pending.
const READS: u32 = 1024;

impl Remote {
    /// Drops the cached keys if the peer has revoked any key since the last call.
    pub(in crate::msg) fn catch_up(&mut self) {
        let revision = self.block.revision();
        if revision != self.revision && !self.is_patient() {
            self.revision = revision;
            self.acted = self.acted.max(revision);
            self.kept.clear();
            self.given_back.clear();
            if let Some(lookup) = &self.lookup {
                // The look-up may have read records from before the revocation: it is restarted. A
                // look-up of a block of parts ends, because its key is dropped.
                let again = lookup.block().is_none();
                self.lookup = again.then(|| Lookup::new(lookup.key(), &self.map));
                self.astray = true;
            }
        }
    }

    /// As [`Self::catch_up`], during a look-up for an operation: counts the restart.
    fn catch_up_again(&mut self) {
        let before = self.revision;
        self.catch_up();
        self.disturbed += u32::from(self.revision != before);
    }

    /// Posts the next read of the look-up under way.
    pub(super) fn read_on(&mut self) -> Result<()> {
        self.astray = false;
        let Some(lookup) = &self.lookup else {
            return Ok(());
        };
        if self.scratch.is_none() {
            let rights = sys::IBV_ACCESS_LOCAL_WRITE;
            self.scratch = Some(Words::new(self.poster.qp.pd(), READ_WORDS + 1, rights)?);
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
        // SAFETY: the transmit side owns the words, and outlives the requests of its queue pair.
        let posted = unsafe {
            let from = (read.addr, read.rkey);
            let opcode = if read.claim {
                SendOpcode::CompareSwap
            } else {
                SendOpcode::Read
            };
            self.poster
                .post(&self.rings, Own::Lookup, opcode, sge, from, self.map.token)
        };
        if posted { Ok(()) } else { Err(FiErrno::EIO) }
    }

    /// Continues the look-up of `key`, within the limits of polls and reads. `Some` when the
    /// look-up has ended.
    pub(super) fn look_up(&mut self, key: u64) -> Option<Result<()>> {
        self.catch_up_again();
        if !self.holds
            && let Err(error) = self.announce(key)?
        {
            return Some(Err(error));
        }
        self.acknowledge();
        if self.kept.get(key).is_some() {
            return Some(Ok(())); // the returned keys were still valid
        }
        if self.lookup.is_none() {
            self.lookup = Some(Lookup::new(key, &self.map));
        }
        self.go_on(key, None)
    }

    /// Reads a block of a cached key's parts; ends at once if the key is not cached any more.
    /// Result as [`Self::look_up`].
    pub(super) fn read_parts(&mut self, key: u64, block: usize) -> Option<Result<()>> {
        self.catch_up_again();
        self.acknowledge();
        let Some(kept) = self.kept.get(key) else {
            return Some(Ok(()));
        };
        if self.lookup.is_none() {
            self.lookup = Lookup::of_block(kept, block);
        }
        if self.lookup.is_none() {
            return Some(Err(FiErrno::EIO)); // the region has no such block
        }
        self.go_on(key, Some(block))
    }

    /// Continues the look-up under way until the one of this key, or of this block of its parts,
    /// has ended. `None` if the limit of polls or reads is reached first.
    fn go_on(&mut self, key: u64, block: Option<usize>) -> Option<Result<()>> {
        let (mut polls, mut reads) = (0, 0);
        loop {
            if reads == READS {
                return None;
            }
            match self.rings.own.take(Own::Lookup) {
                // no read was posted for this look-up, or its result was discarded
                Progress::Idle => {
                    if let Err(error) = self.read_on() {
                        self.lookup = None;
                        return Some(Err(error));
                    }
                }
                Progress::UnderWay => {
                    if polls >= self::polls() {
                        return None;
                    }
                    polls += 1;
                    let _ = self.poster.cq.poll_quietly();
                    self.acknowledge();
                }
                Progress::Failed => {
                    self.lookup = None;
                    return Some(Err(FiErrno::EIO));
                }
                Progress::Done if self.astray => {}
                Progress::Done => {
                    if let Some(end) = self.took_in(key, block) {
                        return Some(end);
                    }
                    reads += 1;
                }
            }
        }
    }

    /// Processes a completed read. `Some` if the look-up of `key` has ended.
    pub(super) fn took_in(&mut self, key: u64, block: Option<usize>) -> Option<Result<()>> {
        let before = self.revision;
        self.catch_up_again();
        if self.revision != before {
            // a look-up of parts has ended: its key was dropped
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
        if self.kept.is_empty()
            && self.given_back.is_empty()
            && let Some(count) = self.map.revocations()
        {
            // all later reads take these revocations into account
            self.acted = self.acted.max(count);
        }
        let end = match outcome {
            Outcome::More => return None,
            Outcome::Checked(count) => return self.checked(count, key),
            Outcome::Torn => {
                let again = self.read_in_vain(true);
                if again.is_ok() {
                    return None;
                }
                again
            }
            Outcome::Found(resolved) => {
                self.kept.admit(resolved);
                Ok(())
            }
            Outcome::Parts(block, parts) => {
                let fits = self.kept.fill(read, block, parts);
                self.read_in_vain(!fits)
            }
            Outcome::Stale => {
                self.kept.clear();
                self.read_in_vain(true)
            }
            Outcome::Missing => Err(FiErrno::EKEYREJECTED),
            Outcome::Broken => Err(FiErrno::EIO),
        };
        self.lookup = None;
        if wanted {
            return Some(end);
        }
        if block.is_some() {
            // the cached key may hold other blocks by now
            return Some(Ok(()));
        }
        self.lookup = Some(Lookup::new(key, &self.map));
        None
    }

    /// Counts reads of half-written or changed records, and fails after the limits [`IN_VAIN`] and
    /// [`IN_VAIN_FOR`].
    fn read_in_vain(&mut self, in_vain: bool) -> Result<()> {
        if in_vain {
            let since = *self.vain_since.get_or_insert_with(Instant::now);
            self.vain += 1;
            if self.vain > IN_VAIN && since.elapsed() > IN_VAIN_FOR {
                return Err(FiErrno::EIO);
            }
        }
        Ok(())
    }
}
