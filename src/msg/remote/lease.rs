//! The lease of keys: an initiator holds keys from its announcement until it returns them.

#![allow(unsafe_code, reason = "posts requests")]

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::{Remote, polls};
use crate::errno::{FiErrno, Result};
use crate::mr::lookup::Lookup;
use crate::msg::tx::TxSide;
use crate::queue::slots::{Lease, Own, Progress};
use crate::verbs::{SendOpcode, Sge};
use crate::wire::records::Block;

/// Time limit for returning the keys at the end of a connection.
const GIVING_BACK: Duration = Duration::from_millis(1);

impl Remote {
    /// Announces to the peer that this side holds keys, before `key` is looked up, and starts the
    /// lease timer. `None`: the write that ended the previous lease is still under way.
    pub(super) fn announce(&mut self, key: u64) -> Option<Result<()>> {
        let mut count = 0;
        while self.posted != 0 || self.rings.own.is_under_way(Own::Acknowledge) {
            if count >= polls() {
                return None;
            }
            count += 1;
            self.acknowledge();
            let _ = self.poster.cq.poll_quietly();
        }
        self.holds = true;
        // withdraws "holds none" before the first read of the directory
        self.block.show_settled(0);
        fence(Ordering::SeqCst);
        self.acknowledge();
        if self.posted == 0 {
            // without an announcement nothing may be read
            self.holds = false;
            return Some(Err(FiErrno::EIO));
        }
        if !self.given_back.is_empty() {
            self.lookup = Lookup::check(key, &self.map);
        }
        self.tended = !self.last_used;
        self.rings.set_holds_keys(true);
        let rings = Arc::downgrade(&self.rings);
        let domain = self.poster.cq.domain();
        domain.helper().hold(rings, &self.poster.cq);
        Some(Ok(()))
    }

    /// The directory's header was read after an announcement and has this revocation count:
    /// returned keys are reused if the count is unchanged, otherwise dropped. Result as
    /// [`Self::look_up`].
    pub(super) fn checked(&mut self, count: u64, key: u64) -> Option<Result<()>> {
        if count == self.acted {
            self.kept = std::mem::take(&mut self.given_back);
        } else {
            self.given_back.clear();
            self.acted = self.acted.max(count);
            self.acknowledge();
        }
        self.lookup = None;
        if self.kept.get(key).is_some() {
            return Some(Ok(()));
        }
        self.lookup = Some(Lookup::new(key, &self.map));
        None
    }

    /// The current value for the peer's *acknowledged*.
    fn word(&self) -> u64 {
        match self.holds {
            true => self.acted.saturating_add(1),
            false => 0,
        }
    }

    /// Writes the current value to the peer's *acknowledged* if it differs from the last one
    /// written, ordered behind all requests posted before. At most one such request is under way.
    pub(in crate::msg) fn acknowledge(&mut self) {
        let word = self.word();
        self.settle();
        // the event of a compare and swap is not posted yet
        let counts = self.comparing.is_some();
        if counts || word == self.posted || self.rings.own.is_under_way(Own::Acknowledge) {
            return;
        }
        let (addr, lkey) = self.block.stage(word);
        let sge = Sge {
            addr,
            length: 8,
            lkey,
        };
        let to = self
            .peer
            .block_addr
            .wrapping_add(Block::ACKNOWLEDGED as u64 * 8);
        let to = (to, self.peer.block_rkey);
        // SAFETY: the block lives as long as the queue pair, and this side overwrites the word only
        // after this request has completed.
        let posted = unsafe {
            self.poster
                .post(&self.rings, Own::Acknowledge, SendOpcode::Write, sge, to, 0)
        };
        if posted {
            self.posted = word;
            self.rings.set_holds_keys(word != 0);
        }
    }

    /// The first byte's target of a cached key, for tests.
    #[cfg(test)]
    pub(in crate::msg) fn kept_piece(&self, key: u64) -> Option<crate::mr::keys::Piece> {
        self.kept.get(key)?.piece(0, 1).ok()
    }

    /// Publishes in this side's memory how many of the peer's revocations are settled: no request
    /// that was posted with older records is under way.
    fn settle(&self) {
        let reads = self.rings.own.is_under_way(Own::Lookup);
        let counts = self.comparing.is_some();
        if reads || counts || self.rings.tx.is_outstanding(self.last_used) {
            return;
        }
        let value = match self.holds {
            true => self.acted.saturating_add(Block::SETTLED_COUNT),
            false => Block::HOLDS_NONE,
        };
        self.block.show_settled(value);
    }

    /// Returns the keys to the peer, unless a read of a look-up is under way.
    fn give_back(&mut self) {
        if !self.holds || self.rings.own.take(Own::Lookup) == Progress::UnderWay {
            return;
        }
        self.lookup = None;
        self.astray = false;
        self.holds = false;
        self.given_back = std::mem::take(&mut self.kept);
    }
}

impl TxSide {
    /// Handles an expired lease timer: returns the keys if none was used since the timer was
    /// started and no operation is pending.
    pub(in crate::msg) fn tend_keys(&mut self) -> Lease {
        let idle = self.waiting.is_empty();
        let Some(remote) = &mut self.remote else {
            return Lease::Over;
        };
        remote.catch_up();
        let used = std::mem::replace(&mut remote.tended, remote.last_used) != remote.last_used;
        if idle && !used {
            remote.give_back();
        }
        remote.acknowledge();
        match (remote.holds, remote.posted) {
            (false, 0) => Lease::Over,
            (true, posted) if posted == remote.word() => Lease::Held,
            _ => Lease::Busy,
        }
    }

    /// Returns the keys at the end of a connection, and waits at most [`GIVING_BACK`] for the write
    /// to complete.
    pub(in crate::msg) fn give_keys_back(&mut self) {
        let Some(remote) = &mut self.remote else {
            return;
        };
        let deadline = Instant::now() + GIVING_BACK;
        loop {
            remote.give_back();
            remote.acknowledge();
            let done = !remote.rings.own.is_under_way(Own::Acknowledge);
            if (remote.posted == 0 && done) || Instant::now() >= deadline {
                return;
            }
            let _ = remote.poster.cq.poll_quietly();
        }
    }
}
