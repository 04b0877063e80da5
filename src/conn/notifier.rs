//! Notifies the peer of revocations, for the key directory of this side.

#![allow(unsafe_code, reason = "posts requests")]

use std::sync::Arc;

use crate::mr::{ConnectionBlock, Look, Peer};
use crate::queue::OwnLink;
use crate::queue::slots::{Own, Progress};
use crate::verbs::{SendOpcode, Sge};
use crate::wire::introduction::Introduction;
use crate::wire::records::Block;

/// Maximum number of polls for the end of an earlier notification, before the next one is left to
/// [`RevocationNotifier::notify_again`].
const EARLIER_POLLS: u32 = 256;

/// Notifies a peer of revocations.
#[derive(Debug)]
pub(crate) struct RevocationNotifier<L> {
    link: L,
    peer: Introduction,
    block: Arc<ConnectionBlock>,
}

impl<L: OwnLink> RevocationNotifier<L> {
    /// `peer` is the peer's introduction, `block` this side's connection block.
    pub(crate) fn new(link: L, peer: Introduction, block: &Arc<ConnectionBlock>) -> Self {
        Self {
            link,
            peer,
            block: Arc::clone(block),
        }
    }

    /// Sends a notification that could not be posted at the time of the revocation.
    pub(crate) fn notify_again(&self) {
        if self.link.own().is_wanted() {
            self.tell_revocations();
        }
    }

    /// Reads the peer's count of settled revocations. The read is needed because the peer's write
    /// of *acknowledged* may be queued behind sends for which this side has posted no receives.
    fn ask(&self) -> bool {
        let (addr, lkey) = self.block.sink();
        let sge = Sge {
            addr,
            length: 8,
            lkey,
        };
        let from = self.peer.block_addr.wrapping_add(Block::SETTLED as u64 * 8);
        let from = (from, self.peer.block_rkey);
        // SAFETY: the block lives as long as the queue pair, and at most one such read is
        // outstanding.
        unsafe {
            self.link
                .post_own(Own::Settled, SendOpcode::Read, sge, from, 0)
        }
    }
}

impl<L: OwnLink> Peer for RevocationNotifier<L> {
    fn tell_revocations(&self) {
        let own = self.link.own();
        // set before the check, so that the thread that polls the completion of an earlier
        // notification sends this one
        own.want(true);
        let mut polls = 0;
        while !own.begin_revocation() {
            if polls == EARLIER_POLLS {
                self.link.request_progress();
                return;
            }
            polls += 1;
            // polls, because the application may not read this queue
            self.link.poll();
        }
        own.want(false);
        let (addr, lkey) = self.block.revocations();
        let sge = Sge {
            addr,
            length: 8,
            lkey,
        };
        let to = self
            .peer
            .block_addr
            .wrapping_add(Block::REVISION as u64 * 8);
        // SAFETY: the domain owns the directory's header and outlives the queue pair.
        unsafe {
            let to = (to, self.peer.block_rkey);
            self.link
                .post_own(Own::Revocation, SendOpcode::Write, sge, to, 0);
        }
    }

    fn look(&self) -> Look {
        // polls, so that a failed request ends the connection
        self.link.poll();
        self.notify_again();
        let up = self.link.owner().is_some_and(|owner| owner.is_up());
        let progress = self.link.own().take(Own::Settled);
        Look {
            up,
            answer: (progress == Progress::Done).then(|| self.block.sunk()),
            asked: up && progress != Progress::UnderWay && self.ask(),
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
