//! The peer's keys that are not rkeys of its device: reads a key's records in the peer's directory,
//! caches and resolves them, and preserves the order of the operations that follow a look-up.
//! `docs/protocol.md`, "The key directory".
//!
//! A look-up is a state machine that never polls. The thread that polls the completion of a read
//! records it in [`crate::queue::slots::EngineRequests`]. While a read is outstanding, the
//! operation is deferred, unless the send queue polls for its completion
//! ([`Link::poll_once_more`]). [`super::Initiator::resume`] retries the deferred operations; its
//! callers are the posting thread, the thread that reads the completion queue, and, while an
//! operation is deferred, the domain's helper thread.
//!
//! All functions run under the transmit lock.

#![allow(unsafe_code, reason = "posts requests")]

mod compare;
mod deferred;
mod lease;
mod lookup;
mod resolve;
mod submit;

use std::sync::Arc;
use std::time::Instant;

use super::link::Link;
use crate::mr::ConnectionBlock;
use crate::mr::key_cache::KeyCache;
use crate::mr::lookup::{Lookup, Map};
use crate::verbs::Words;
use crate::wire::introduction::Introduction;

use self::compare::CompareSwap;
pub(crate) use self::deferred::Deferred;
pub(super) use self::submit::EventTarget;
pub(crate) use self::submit::FURTHER_REQUESTS;

/// The initiator's state for a peer that has sent its introduction.
#[derive(Debug)]
pub(crate) struct PeerKeys<L> {
    link: L,
    introduction: Introduction,
    block: Arc<ConnectionBlock>,
    /// The last value of the peer's revocation count that this side has processed.
    revision: u64,
    /// The cached records are at least as new as this revocation count of the peer; at least
    /// `revision`.
    acted: u64,
    /// Whether this side holds keys of the peer: the peer then notifies this side of revocations
    /// and waits for its acknowledgement.
    holds_keys: bool,
    /// The last value of the peer's *acknowledged* that was posted.
    acknowledged: u64,
    /// `last_used`: number of the last request that was posted with a key. `used_at_lease`: the
    /// value of `last_used` when the lease timer was started.
    last_used: u32,
    used_at_lease: u32,
    /// Number of the last request that is a read or an atomic and was posted with a key.
    last_read: u32,
    /// Whether the last acknowledgement waits for reads and atomics before it.
    fenced: bool,
    map: Map,
    cache: KeyCache,
    /// Cached keys that were returned to the peer; reused if the peer's revocation count has not
    /// changed since.
    returned: KeyCache,
    lookup: Option<Lookup>,
    /// Destination of directory reads; the word behind it receives the previous values of event
    /// cells. Allocated by the first look-up.
    scratch: Option<Words>,
    /// Whether the outstanding read belongs to an abandoned look-up.
    stale_read: bool,
    /// Number of directory reads for the operation at the head of the queue that found an
    /// incomplete or changed record.
    torn: u32,
    /// Time of the first such read.
    torn_since: Option<Instant>,
    /// Number of restarts of that operation's look-ups because keys were revoked.
    restarts: u32,
    /// The compare and swap at the head of the queue, while it is posted and its event is not.
    compare_swap: Option<CompareSwap>,
}

impl<L: Link> PeerKeys<L> {
    /// `introduction` is the peer's, `block` this side's connection block.
    pub(crate) fn new(link: L, introduction: Introduction, block: &Arc<ConnectionBlock>) -> Self {
        let (addr, rkey) = (introduction.block_addr, introduction.block_rkey);
        Self {
            link,
            introduction,
            block: Arc::clone(block),
            revision: block.revision(),
            acted: block.revision(),
            holds_keys: false,
            acknowledged: 0,
            last_used: u32::MAX,
            used_at_lease: u32::MAX,
            last_read: u32::MAX,
            fenced: false,
            map: Map::new(addr, rkey, block.token()),
            cache: KeyCache::default(),
            returned: KeyCache::default(),
            lookup: None,
            scratch: None,
            stale_read: false,
            torn: 0,
            torn_since: None,
            restarts: 0,
            compare_swap: None,
        }
    }

    /// Whether the operation at the head of the queue uses the records that were read for it
    /// although keys were revoked meanwhile. This is safe: the operation was posted before the
    /// revocation, and the memory stays registered until this side has acknowledged.
    fn ignores_revocations(&self) -> bool {
        self.restarts >= MAX_RESTARTS
    }

    /// Resets the counters of the operation at the head of the queue, after it is resolved.
    fn reset_counters(&mut self) {
        (self.torn, self.restarts) = (0, 0);
        self.torn_since = None;
    }
}

/// Maximum number of restarts of one operation's look-ups because of revocations, so that a peer
/// that changes its regions continuously does not delay the operation without limit.
const MAX_RESTARTS: u32 = 8;
