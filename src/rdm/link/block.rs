//! The connection block of a link, in the key directory.

use std::sync::{Arc, Weak};

use super::endpoint::LinkEndpoint;
use super::initiator_sq::{InitiatorLink, LinkSq};
use super::poster::{DirectoryLink, LinkPoster};
use crate::conn::RevocationNotifier;
use crate::mr::{ConnectionBlock, Peer};
use crate::rdm::core::link::LinkKey;
use crate::verbs::{Qp, RemoteAddr, Rkey};
use crate::wire::records::Block;

/// What a block without an event cell keeps until it leaves the directory: its peer counts nothing.
pub(in crate::rdm) type Uncounted = Arc<()>;

/// The connection block of a link, in the key directory, which the peer accesses.
#[derive(Debug)]
pub(in crate::rdm) struct LinkBlock {
    pub(in crate::rdm) poster: Arc<LinkPoster>,
    block: Arc<ConnectionBlock>,
    notifier: Arc<RevocationNotifier<DirectoryLink>>,
    _uncounted: Option<Uncounted>,
}

impl LinkBlock {
    /// Adds the link to the key directory, before the address of the block is sent. No lock is held
    /// that is after the directory's. `qp`: that of the link, which has none on a circuit.
    pub(in crate::rdm) fn new(
        endpoint: Weak<dyn LinkEndpoint>,
        key: LinkKey,
        qp: Option<&Arc<Qp>>,
        block: ConnectionBlock,
        uncounted: Option<Uncounted>,
    ) -> Self {
        let poster = Arc::new(LinkPoster::new(endpoint, key, qp));
        let block = Arc::new(block);
        let link = DirectoryLink(Arc::clone(&poster));
        let notifier = Arc::new(RevocationNotifier::new(link, &block));
        let weak = Arc::downgrade(&notifier);
        let weak: Weak<dyn Peer> = weak;
        block.join(weak);
        Self {
            poster,
            block,
            notifier,
            _uncounted: uncounted,
        }
    }

    /// Address and rkey of the connection block.
    pub(in crate::rdm) fn block(&self) -> (RemoteAddr, Rkey) {
        (self.block.addr(), self.block.rkey())
    }

    pub(in crate::rdm) fn connection_block(&self) -> &Arc<ConnectionBlock> {
        &self.block
    }

    pub(in crate::rdm) fn notifier(&self) -> &Arc<RevocationNotifier<DirectoryLink>> {
        &self.notifier
    }

    /// On a circuit: nothing is posted any more, and all that was posted has completed. No key of
    /// the peer is held, which the peer may read here.
    pub(in crate::rdm) fn shut(&self) {
        self.poster.shut();
        if !self.poster.is_abandoned() {
            self.block.show_settled(Block::HOLDS_NONE);
        }
    }

    /// The send queue of an initiator. At most one is made. `None`: nothing can be posted.
    pub(in crate::rdm) fn sq(&self) -> Option<LinkSq> {
        let outlet = self.poster.outlet()?;
        let poster = Arc::clone(&self.poster);
        Some(LinkSq::new(InitiatorLink { outlet, poster }))
    }

    /// Leaves the key directory: the queue pair executes no operation of the peer any more. The
    /// block is returned, to be dropped behind the queue pair. Acquires the directory's lock.
    pub(in crate::rdm) fn leave(self) -> Arc<ConnectionBlock> {
        self.block.leave();
        // behind `leave`: the directory does not use the notifier any more
        self.poster.shut();
        drop((self.notifier, self.poster));
        self.block
    }
}
