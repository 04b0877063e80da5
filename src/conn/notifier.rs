//! Notifies the peer of revocations, for the key directory of this side.
//!
//! The peer can look keys up as soon as it has the address of this side's connection block. The
//! side that dials sends the address before it receives the peer's introduction. A revocation in
//! between is sent when the introduction arrives.

#![allow(unsafe_code, reason = "posts requests")]

use std::sync::Arc;

use parking_lot::Mutex;

use crate::mr::{ConnectionBlock, Look, Peer};
use crate::queue::EngineLink;
use crate::queue::slots::{EngineRequest, Progress};
use crate::verbs::{Lkey, RemoteAddr, Rkey, SendOpcode, Sge};
use crate::wire::introduction::Introduction;
use crate::wire::records::Block;

/// Maximum number of polls for the end of an earlier notification, before the next one is left to
/// [`RevocationNotifier::notify_again`].
const EARLIER_POLLS: u32 = 256;

/// Notifies a peer of revocations.
#[derive(Debug)]
pub(crate) struct RevocationNotifier<L> {
    link: L,
    /// `None` until the peer's introduction is received.
    peer: Mutex<Option<Introduction>>,
    block: Arc<ConnectionBlock>,
}

impl<L: EngineLink> RevocationNotifier<L> {
    /// `block` is this side's connection block.
    pub(crate) fn new(link: L, block: &Arc<ConnectionBlock>) -> Self {
        Self {
            link,
            peer: Mutex::new(None),
            block: Arc::clone(block),
        }
    }

    /// Sets the peer's introduction, and sends the notification of earlier revocations. The queue
    /// pair can send.
    pub(crate) fn introduce(&self, peer: Introduction) {
        *self.peer.lock() = Some(peer);
        self.notify_again();
    }

    /// Address and rkey of a word of the peer's connection block, once introduced.
    fn word(&self, index: usize) -> Option<(RemoteAddr, Rkey)> {
        let peer = (*self.peer.lock())?;
        Some((
            peer.block_addr.wrapping_add(index as u64 * 8),
            peer.block_rkey,
        ))
    }

    /// Sends a notification that could not be posted at the time of the revocation.
    pub(crate) fn notify_again(&self) {
        if self.link.engine_requests().is_wanted() {
            self.notify_revocations();
        }
    }

    /// Reads the peer's count of settled revocations. The read is needed because the peer's write
    /// of *acknowledged* may be queued behind sends for which this side has posted no receives.
    fn ask(&self) -> bool {
        let Some(from) = self.word(Block::SETTLED) else {
            return false;
        };
        let sge = word(self.block.sink());
        // SAFETY: the directory owns the allocation of the block, and ends its registration before
        // its memory. At most one such read of an endpoint is outstanding.
        unsafe {
            self.link.post_engine_request(
                EngineRequest::Settled,
                SendOpcode::Read,
                sge,
                from,
                0,
                false,
            )
        }
    }
}

/// The sge of a local word.
fn word((addr, lkey): (u64, Lkey)) -> Sge {
    Sge {
        addr,
        length: 8,
        lkey,
    }
}

impl<L: EngineLink> Peer for RevocationNotifier<L> {
    fn notify_revocations(&self) {
        let requests = self.link.engine_requests();
        // set before the check, so that the thread that polls the completion of an earlier
        // notification sends this one
        requests.want(true);
        // behind `want`: `introduce` sends this notification if the introduction follows
        let Some(to) = self.word(Block::REVISION) else {
            return;
        };
        let mut polls = 0;
        while !requests.begin_revocation() {
            if polls == EARLIER_POLLS {
                self.link.request_progress();
                return;
            }
            polls += 1;
            // polls, because the application may not read this queue
            self.link.poll();
        }
        requests.want(false);
        let sge = word(self.block.revocations());
        // SAFETY: the domain owns the directory's header and outlives the queue pair.
        let posted = unsafe {
            self.link.post_engine_request(
                EngineRequest::Revocation,
                SendOpcode::Write,
                sge,
                to,
                0,
                false,
            )
        };
        if !posted {
            // the link calls `notify_again` when it can
            requests.want(true);
        }
    }

    fn look(&self) -> Look {
        // polls, so that a failed request ends the connection
        self.link.poll();
        self.notify_again();
        let owner = self.link.owner();
        let may_ask = owner.as_ref().is_some_and(|owner| owner.is_up());
        let progress = self.link.engine_requests().take(EngineRequest::Settled);
        Look {
            up: owner.is_some_and(|owner| owner.peer_has_access()),
            answer: (progress == Progress::Done).then(|| self.block.peer_settled()),
            asked: may_ask && progress != Progress::UnderWay && self.ask(),
        }
    }

    fn acknowledge(&self) {
        if let Some(owner) = self.link.owner() {
            owner.acknowledge();
        }
    }

    fn sever(&self) {
        self.link.sever();
    }
}
