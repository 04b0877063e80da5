//! How long an initiator holds keys: from its announcement until they are given back.
//! `docs/protocol.md`, "Stale keys".

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

/// How long the end of a connection waits until the keys are given back.
const GIVING_BACK: Duration = Duration::from_millis(1);

impl Remote {
    /// Announces that `key` is to be looked up, and starts the timer. None: the end of
    /// the last time is still under way to the peer.
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
        // no more that it holds none, before it reads anything
        self.block.show_settled(0);
        fence(Ordering::SeqCst);
        self.acknowledge();
        if self.posted == 0 {
            // nothing may be read before
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

    /// The header has come behind an announcement, with this count: what was given back is good, or
    /// forgotten. As [`Self::look_up`].
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

    /// What belongs into the peer's *acknowledged*.
    fn word(&self) -> u64 {
        match self.holds {
            true => self.acted.saturating_add(1),
            false => 0,
        }
    }

    /// Writes to the peer's *acknowledged* what belongs there, if that is something else than was
    /// written last: behind everything that was posted before. Only one such request is under way
    /// at a time.
    pub(in crate::msg) fn acknowledge(&mut self) {
        let word = self.word();
        self.settle();
        // the event of a compare and swap is still to be posted
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
        // SAFETY: the block lives as long as the queue pair, and the word is written again only
        // when this has completed.
        let posted = unsafe {
            self.poster
                .post(&self.rings, Own::Acknowledge, SendOpcode::Write, sge, to, 0)
        };
        if posted {
            self.posted = word;
            self.rings.set_holds_keys(word != 0);
        }
    }

    /// Where a kept key leads, for tests.
    #[cfg(test)]
    pub(in crate::msg) fn kept_piece(&self, key: u64) -> Option<crate::mr::keys::Piece> {
        self.kept.get(key)?.piece(0, 1).ok()
    }

    /// Shows in this side's own memory how far the peer's revocations are settled: nothing that was
    /// posted with what was known before is under way.
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

    /// Gives the keys back, unless a look-up still reads.
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
    /// The timer of the keys has expired.
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

    /// Gives the keys back although they may be used again, and waits for a short time until the
    /// peer has them.
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
