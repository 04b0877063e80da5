//! Posts the engine's own requests, and notifies the peer of revocations with them.

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

/// The parts of a transmit side that post the engine's own requests.
#[derive(Clone, Debug)]
pub(super) struct Poster {
    pub(super) qp: Arc<Qp>,
    pub(super) cq: Arc<CompletionQueue>,
    pub(super) place: WrId,
}

impl Poster {
    /// Posts one of the engine's own requests. Returns whether it was posted.
    ///
    /// # Safety
    /// The buffer stays valid until the request completes.
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
            // also ordered behind earlier reads and atomics
            fence: own == Own::Acknowledge,
            imm: 0,
            remote_addr: to.0,
            rkey: to.1,
            compare_add: 0,
            swap,
        };
        // SAFETY: as this function: the caller keeps the buffer valid until completion.
        let posted = unsafe { self.qp.post_send(&request) };
        if let Err(error) = posted {
            rings.own.end(own, false);
            info_log!(EpCtrl, "{own:?} could not be posted: {error}");
        }
        posted.is_ok()
    }
}

impl Core {
    /// Processes the peer's introduction from its request or reply.
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

/// Notifies a peer of revocations.
#[derive(Debug)]
pub(crate) struct Teller {
    poster: Poster,
    peer: Introduction,
    block: Arc<ConnectionBlock>,
    rings: Arc<Rings>,
}

impl Teller {
    /// Sends a notification that could not be sent at the time of the revocation.
    pub(in crate::msg) fn tell_again(&self) {
        if self.rings.own.is_wanted() {
            self.tell_revocations();
        }
    }

    /// Reads the peer's count of settled revocations. Needed because the peer's write of
    /// *acknowledged* may be queued behind sends that wait for receives of this side.
    fn ask(&self) -> bool {
        let (addr, lkey) = self.block.sink();
        let sge = Sge {
            addr,
            length: 8,
            lkey,
        };
        let from = self.peer.block_addr.wrapping_add(Block::SETTLED as u64 * 8);
        let from = (from, self.peer.block_rkey);
        // SAFETY: the block lives as long as the queue pair, and at most one such read is under
        // way.
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
        // set before the check, so that the thread that completes the request under way sends again
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
            // the application may not read this queue
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
        // SAFETY: the domain owns the directory's header and outlives the queue pair.
        unsafe {
            let to = (to, self.peer.block_rkey);
            self.poster
                .post(&self.rings, Own::Revocation, SendOpcode::Write, sge, to, 0);
        }
    }

    fn look(&self) -> Look {
        // polls so that a failed request is noticed as the end of the connection
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
        // reported here, because there may be no request that the device flushes
        self.rings.notify_failure();
    }
}
