//! Requests of the engine's own, and what a peer is told by them: that keys were revoked.

#![allow(unsafe_code, reason = "posts requests")]

use std::sync::Arc;

use super::Remote;
use crate::log::info_log;
use crate::mr::{ConnectionBlock, Look, Peer};
use crate::msg::core::{Control, Core};
use crate::queue::slots::{FailureListener, Own, Progress, Rings};
use crate::queue::{CompletionQueue, WrId};
use crate::verbs::{Qp, SendOpcode, SendRequest, Sge};
use crate::wire::introduction::Introduction;
use crate::wire::records::Block;

/// The parts of a transmit side that the engine's own requests need.
#[derive(Clone, Debug)]
pub(super) struct Poster {
    pub(super) qp: Arc<Qp>,
    pub(super) cq: Arc<CompletionQueue>,
    pub(super) place: WrId,
}

impl Poster {
    /// Posts a request of the engine's own; says whether it could be.
    ///
    /// # Safety
    /// The buffer stays until it is complete.
    pub(super) unsafe fn post(
        &self,
        rings: &Rings,
        own: Own,
        opcode: SendOpcode,
        sge: Sge,
        to: (u64, u32),
        swap: u64,
    ) -> bool {
        if own != Own::Revocation {
            rings.own.begin(own);
        }
        let request = SendRequest {
            wr_id: self.place.own(own),
            opcode,
            sges: &[sge],
            inline: false,
            signaled: true,
            // behind the reads and atomics before it, too
            fence: own == Own::Acknowledge,
            imm: 0,
            remote_addr: to.0,
            rkey: to.1,
            compare_add: 0,
            swap,
        };
        // SAFETY: the caller's promise.
        let posted = unsafe { self.qp.post_send(&request) };
        if let Err(error) = posted {
            rings.own.end(own, false);
            info_log!(EpCtrl, "{own:?} could not be posted: {error}");
        }
        posted.is_ok()
    }
}

impl Core {
    /// Takes what the peer said of itself in its request or reply.
    pub(in crate::msg) fn introduced(&self, control: &mut Control, peer: Option<Introduction>) {
        let (Some(peer), Some(block), Some(qp)) = (peer, control.block.clone(), control.qp.clone())
        else {
            return;
        };
        let side = match (&control.tx, control.tx_place) {
            (Some(binding), Some(place)) => Some((binding, place)),
            _ => control.rx.as_ref().zip(control.rx_place),
        };
        if let Some((binding, place)) = side {
            let poster = Poster {
                qp,
                cq: Arc::clone(&binding.cq),
                place,
            };
            if let Some(side) = self.tx.lock().as_mut() {
                side.application_keys = peer.application_keys;
                let remote = Remote::new(peer, &block, poster.clone(), &self.rings);
                side.remote = Some(Box::new(remote));
            }
            let teller = Arc::new(Teller {
                poster,
                peer,
                block: Arc::clone(&block),
                rings: Arc::clone(&self.rings),
            });
            let weak = Arc::downgrade(&teller);
            block.join(weak);
            control.teller = Some(teller);
        }
    }
}

/// Tells a peer of revocations.
#[derive(Debug)]
pub(crate) struct Teller {
    poster: Poster,
    peer: Introduction,
    block: Arc<ConnectionBlock>,
    rings: Arc<Rings>,
}

impl Teller {
    /// Tells what could not be told when it happened.
    pub(in crate::msg) fn tell_again(&self) {
        if self.rings.own.is_wanted() {
            self.tell_revocations();
        }
    }

    /// Reads how far the peer has settled revocations: its own requests may wait for receives of
    /// this side.
    fn ask(&self) -> bool {
        let (addr, lkey) = self.block.sink();
        let sge = Sge {
            addr,
            length: 8,
            lkey,
        };
        let from = self.peer.block_addr.wrapping_add(Block::SETTLED as u64 * 8);
        let from = (from, self.peer.block_rkey);
        // SAFETY: the block lives as long as the queue pair, and one such read is under way at a
        // time.
        unsafe {
            self.poster
                .post(&self.rings, Own::Settled, SendOpcode::Read, sge, from, 0)
        }
    }

    fn owner(&self) -> Option<Arc<dyn FailureListener>> {
        self.rings.owner.get()?.upgrade()
    }
}

impl Peer for Teller {
    fn tell_revocations(&self) {
        let own = &self.rings.own;
        // before looking, so that whoever ends the one under way tells again
        own.want(true);
        let mut polls = 0;
        while !own.begin_revocation() {
            if polls == 256 {
                self.rings.set_waiting(true);
                let rings = Arc::downgrade(&self.rings);
                self.poster.cq.domain().helper().add(rings, &self.poster.cq);
                return;
            }
            polls += 1;
            // the application may have no reason to read this queue
            let _ = self.poster.cq.poll_quietly();
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
        // SAFETY: the directory's header lives as long as its domain, which outlives the queue pair.
        unsafe {
            let to = (to, self.peer.block_rkey);
            self.poster
                .post(&self.rings, Own::Revocation, SendOpcode::Write, sge, to, 0);
        }
    }

    fn look(&self) -> Look {
        // a request that failed shows that the connection has ended
        let _ = self.poster.cq.poll_quietly();
        self.tell_again();
        let up = self.owner().is_some_and(|owner| owner.is_up());
        let progress = self.rings.own.take(Own::Settled);
        Look {
            up,
            answer: (progress == Progress::Done).then(|| self.block.sunk()),
            asked: up && progress != Progress::UnderWay && self.ask(),
        }
    }

    fn acknowledge(&self) {
        if let Some(owner) = self.owner() {
            owner.acknowledge();
        }
    }

    fn sever(&self) {
        let _ = self.poster.qp.set_error();
        // nothing may be posted that the device could flush
        self.rings.tell_failure();
    }
}
