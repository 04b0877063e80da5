//! What an initiator reads out of its peer's directory, and tells it of that.

#![allow(unsafe_code, reason = "posts requests")]

use rdma_core_sys as sys;

use super::{Remote, polls};
use crate::errno::{FiErrno, Result};
use crate::mr::Words;
use crate::mr::lookup::{Lookup, Outcome, READ_WORDS};
use crate::queue::slots::{Own, Progress};
use crate::verbs::{SendOpcode, Sge};

impl Remote {
    /// Forgets what the peer may have revoked.
    pub(in crate::msg) fn catch_up(&mut self) {
        let revision = self.block.revision();
        if revision != self.revision {
            self.revision = revision;
            self.acted = self.acted.max(revision);
            self.kept.clear();
            self.given_back.clear();
            if let Some(lookup) = &self.lookup {
                // what it has read may be from before
                self.lookup = Some(Lookup::new(lookup.key(), &self.map));
                self.astray = true;
            }
        }
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
        // SAFETY: the words live as long as the transmit side, which outlives its queue pair's requests.
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

    /// Goes on with looking `key` up, and waits a little: `Some` when it has come to an end.
    pub(super) fn look_up(&mut self, key: u64) -> Option<Result<()>> {
        self.catch_up();
        if !self.holds
            && let Err(error) = self.announce(key)?
        {
            return Some(Err(error));
        }
        self.acknowledge();
        if self.kept.get(key).is_some() {
            return Some(Ok(())); // not given back after all
        }
        if self.lookup.is_none() {
            self.lookup = Some(Lookup::new(key, &self.map));
        }
        let mut polls = 0;
        loop {
            match self.rings.own.take(Own::Lookup) {
                // nothing has been read for this one yet, or what was is not of use any more
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
                    if let Some(end) = self.took_in(key) {
                        return Some(end);
                    }
                }
            }
        }
    }

    /// A read has come: what it says, if that is the end.
    pub(super) fn took_in(&mut self, key: u64) -> Option<Result<()>> {
        let revision = self.block.revision();
        if revision != self.revision {
            self.catch_up();
            return None;
        }
        let (Some(lookup), Some(scratch)) = (&mut self.lookup, &self.scratch) else {
            return Some(Err(FiErrno::EIO));
        };
        let count = lookup.read(&self.map).words;
        let words: [u64; READ_WORDS] = scratch.read(0);
        let outcome = lookup.feed(&mut self.map, &words[..count]);
        let found = lookup.key() == key;
        if self.kept.is_empty()
            && self.given_back.is_empty()
            && let Some(count) = self.map.revocations()
        {
            // whatever is read from here on takes them into account
            self.acted = self.acted.max(count);
        }
        match outcome {
            Outcome::More => return None,
            Outcome::Checked(count) => return self.checked(count, key),
            Outcome::Found(resolved) => self.kept.insert(resolved),
            Outcome::Missing if found => {
                self.lookup = None;
                return Some(Err(FiErrno::EKEYREJECTED));
            }
            Outcome::Broken if found => {
                self.lookup = None;
                return Some(Err(FiErrno::EIO));
            }
            Outcome::Missing | Outcome::Broken => {}
        }
        self.lookup = (!found).then(|| Lookup::new(key, &self.map));
        found.then_some(Ok(()))
    }
}
