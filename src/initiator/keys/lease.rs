//! The lease of keys: an initiator holds keys from its announcement until it returns them.

#![allow(unsafe_code, reason = "posts requests")]

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::PeerKeys;
use super::lookup::Step;
use crate::errno::{FiErrno, Result};
use crate::initiator::Initiator;
use crate::initiator::link::Link;
use crate::initiator::sq::Sq;
use crate::mr::lookup::Lookup;
use crate::queue::EngineLink;
use crate::queue::slots::{EngineRequest, Lease, Progress};
use crate::verbs::{SendOpcode, Sge};
use crate::wire::records::Block;

/// Time limit for returning the keys at the end of a connection.
const RETURN_WAIT: Duration = Duration::from_millis(1);

impl<L: Link> PeerKeys<L> {
    /// Announces to the peer that this side holds keys, before `key` is looked up, and starts the
    /// lease timer. [`Step::UnderWay`]: the write that ended the previous lease is still
    /// outstanding.
    pub(super) fn announce(&mut self, key: u64) -> Step {
        if self.acknowledged != 0
            || !self.link.has_room()
            || self
                .link
                .engine_requests()
                .is_under_way(EngineRequest::Acknowledge)
        {
            self.acknowledge();
            return Step::UnderWay;
        }
        self.holds_keys = true;
        // replaces `Block::HOLDS_NONE` before the first read of the directory
        self.block.show_settled(0);
        fence(Ordering::SeqCst);
        self.acknowledge();
        if self.acknowledged == 0 {
            // the directory may be read only after an announcement
            self.holds_keys = false;
            return Step::Ended(Err(FiErrno::EIO));
        }
        if !self.returned.is_empty() {
            self.lookup = Lookup::check(key, &self.map);
        }
        self.used_at_lease = !self.last_used;
        self.link.set_holds_keys(true);
        self.link.start_lease();
        Step::Ended(Ok(()))
    }

    /// Processes the directory's header, read after an announcement, with its revocation count:
    /// reuses the returned keys if the count is unchanged, and drops them otherwise. Result as
    /// [`Self::look_up`].
    pub(super) fn checked(&mut self, count: u64, key: u64) -> Option<Result<()>> {
        if count == self.acted {
            self.cache = std::mem::take(&mut self.returned);
        } else {
            self.returned.clear();
            self.acted = self.acted.max(count);
            self.acknowledge();
        }
        self.lookup = None;
        if self.cache.get(key).is_some() {
            return Some(Ok(()));
        }
        self.lookup = Some(Lookup::new(key, &self.map));
        None
    }

    /// The value that the peer's *acknowledged* must have.
    fn word(&self) -> u64 {
        match self.holds_keys {
            true => self.acted.saturating_add(1),
            false => 0,
        }
    }

    /// Writes the current value to the peer's *acknowledged* if it differs from the last one
    /// written, ordered behind all earlier requests. At most one such write is outstanding. The
    /// caller has posted the delayed requests ([`Sq::post_delayed`]).
    ///
    /// It is fenced only if a read or an atomic is outstanding, and no look-up is posted behind a
    /// fenced one: rxe retransmits a request with a fence only when no read is outstanding, also
    /// none behind it, so both would wait for each other (`rxe_req.c`, `rxe_wqe_is_fenced`).
    pub(crate) fn acknowledge(&mut self) {
        let word = self.word();
        self.publish_settled();
        // the event of a compare and swap is not posted yet
        let counts = self.compare_swap.is_some();
        if counts
            || word == self.acknowledged
            || self
                .link
                .engine_requests()
                .is_under_way(EngineRequest::Acknowledge)
        {
            return;
        }
        let (addr, lkey) = self.block.store_acknowledged(word);
        let sge = Sge {
            addr,
            length: 8,
            lkey,
        };
        let to = self
            .introduction
            .block_addr
            .wrapping_add(Block::ACKNOWLEDGED as u64 * 8);
        let to = (to, self.introduction.block_rkey);
        let looks_up = self
            .link
            .engine_requests()
            .is_under_way(EngineRequest::Lookup);
        self.fenced = looks_up || self.link.is_outstanding(self.last_read);
        let (kind, write) = (EngineRequest::Acknowledge, SendOpcode::Write);
        // SAFETY: the directory owns the allocation of the block, and ends its registration before
        // its memory. This side overwrites the word only after this request has completed. A
        // request that is left on a circuit of XRC (`await_flush`) may read a word of the block's
        // next user, for a connection that has ended.
        let posted = unsafe {
            self.link
                .post_engine_request(kind, write, sge, to, 0, self.fenced)
        };
        if posted {
            self.acknowledged = word;
            self.link.set_holds_keys(word != 0);
        }
    }

    /// Whether an acknowledgement waits for reads and atomics before it.
    pub(super) fn is_fence_under_way(&self) -> bool {
        let requests = self.link.engine_requests();
        self.fenced && requests.is_under_way(EngineRequest::Acknowledge)
    }

    /// Whether the last read or atomic that was posted with a key is outstanding.
    #[cfg(test)]
    pub(crate) fn is_reading(&self) -> bool {
        self.link.is_outstanding(self.last_read)
    }

    /// Begins the look-up of a key without a poll. Returns whether its read was posted.
    #[cfg(test)]
    pub(crate) fn begin_look_up(&mut self, key: u64) -> bool {
        self.look_up(key, &mut super::lookup::Effort::default());
        self.link
            .engine_requests()
            .is_under_way(EngineRequest::Lookup)
    }

    /// The first byte's target of a cached key, for tests.
    #[cfg(test)]
    pub(crate) fn cached_fragment(&self, key: u64) -> Option<crate::mr::key_cache::Fragment> {
        self.cache.get(key)?.fragment(0, 1).ok()
    }

    /// Publishes in this side's memory how many of the peer's revocations are settled: those for
    /// which no request with older records is outstanding.
    fn publish_settled(&self) {
        let reads = self
            .link
            .engine_requests()
            .is_under_way(EngineRequest::Lookup);
        let counts = self.compare_swap.is_some();
        if reads || counts || self.link.is_outstanding(self.last_used) {
            return;
        }
        let value = match self.holds_keys {
            true => self.acted.saturating_add(Block::SETTLED_COUNT),
            false => Block::HOLDS_NONE,
        };
        self.block.show_settled(value);
    }

    /// Returns the keys to the peer, unless a read of a look-up is outstanding.
    fn return_keys(&mut self) {
        if !self.holds_keys
            || self.link.engine_requests().take(EngineRequest::Lookup) == Progress::UnderWay
        {
            return;
        }
        self.lookup = None;
        self.stale_read = false;
        self.holds_keys = false;
        self.returned = std::mem::take(&mut self.cache);
    }
}

impl<Q: Sq> Initiator<Q> {
    /// Handles an expired lease timer: returns the keys if none was used since the timer was
    /// started and no operation is deferred.
    pub(crate) fn lease_expired(&mut self) -> Lease {
        // an acknowledgement is posted behind all requests that use the keys from before
        self.sq.post_delayed();
        let idle = self.deferred.is_empty();
        let Some(peer) = &mut self.peer else {
            return Lease::Over;
        };
        peer.catch_up();
        let used = std::mem::replace(&mut peer.used_at_lease, peer.last_used) != peer.last_used;
        if idle && !used {
            peer.return_keys();
        }
        peer.acknowledge();
        match (peer.holds_keys, peer.acknowledged) {
            (false, 0) => Lease::Over,
            (true, posted) if posted == peer.word() => Lease::Held,
            _ => Lease::Busy,
        }
    }

    /// Returns the keys at the end of a connection, and waits at most [`RETURN_WAIT`] for the write
    /// to complete.
    pub(crate) fn return_keys_and_wait(&mut self) {
        // as in `lease_expired`
        self.sq.post_delayed();
        let Some(peer) = &mut self.peer else {
            return;
        };
        let deadline = Instant::now() + RETURN_WAIT;
        loop {
            peer.return_keys();
            peer.acknowledge();
            let done = !peer
                .link
                .engine_requests()
                .is_under_way(EngineRequest::Acknowledge);
            if (peer.acknowledged == 0 && done) || Instant::now() >= deadline {
                return;
            }
            peer.link.poll();
        }
    }
}
