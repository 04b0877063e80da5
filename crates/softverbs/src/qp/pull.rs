//! Pulling: the receiver takes pending messages of the other end when a receive is posted for them.

use rdma_core_sys::*;

use super::pending::{Entry, PendingView};
use super::request::IovecList;
use super::{Qp, RecvQueue, entry_at};
use crate::cq::Retires;
use crate::delivery::{Receive, receives};
use crate::peer::Peer;
use crate::ring::{Header, MAX_PAYLOAD, flag, op};
use crate::segment::layout::{PendingWord, split_qp_num};
use crate::srq::Srq;
use crate::sync::Arc;
use crate::sys;

/// Whether more messages may be taken.
enum Outcome {
    Taken,
    /// The sender has withdrawn the message.
    Again,
    /// No message is pending, or the sender must send it itself.
    Over,
    /// Messages that the sender sent before are not delivered yet.
    Later,
}

/// Maximum number of tries in one call, as a sender may withdraw its messages each time.
const TRIES: u32 = 256;

impl Qp {
    /// Takes pending messages while receives are posted. The caller holds no lock of a queue.
    pub(crate) fn pull(&self) {
        let mut rq = self.rq.lock();
        rq.pulls = false;
        let Some(peer) = rq.peer.clone() else { return };
        let (slot, index) = split_qp_num(rq.dest);
        if slot != peer.slot || rq.kind == IBV_QPT_UD {
            return;
        }
        let Some(seen) = PendingView::read(&peer.map, entry_at(index)) else {
            return;
        };
        let mut any = false;
        for _ in 0..TRIES {
            self.rq.let_pass();
            match self.pull_one(&mut rq, &peer, &seen) {
                Outcome::Taken => any = true,
                Outcome::Again => {}
                Outcome::Over => break,
                Outcome::Later => {
                    self.pull_later(&mut rq);
                    break;
                }
            }
        }
        if any {
            // The peer's requests have completed, so its process is rung.
            peer.ring_process();
        }
    }

    /// Requests that a later progress calls [`Self::pull`].
    pub(super) fn pull_later(&self, rq: &mut RecvQueue) {
        if !rq.pulls {
            rq.pulls = true;
            self.process().request_pull(self.index);
        }
    }

    fn pull_one(&self, rq: &mut RecvQueue, peer: &Arc<Peer>, seen: &PendingView) -> Outcome {
        let word = seen.word(&peer.map);
        // A message is still held here only if an earlier holder was killed.
        if word.count() == 0 || word.is_held() || !receives(self.state()) {
            return Outcome::Over;
        }
        let Some(entry) = seen.first(&peer.map, word) else {
            return Outcome::Over;
        };
        let next = if rq.srq.is_null() {
            rq.next
        } else {
            rq.received
        };
        let ahead = entry.number.wrapping_sub(next).cast_signed();
        if entry.incarnation != rq.incarnation || ahead < 0 {
            return Outcome::Over;
        }
        if ahead > 0 {
            return Outcome::Later;
        }
        match rq.shared() {
            None => self.pull_private(rq, peer, seen, word, &entry),
            Some(srq) => self.pull_shared(rq, srq, peer, seen, word, &entry),
        }
    }

    fn pull_private(
        &self,
        rq: &mut RecvQueue,
        peer: &Arc<Peer>,
        seen: &PendingView,
        word: PendingWord,
        entry: &Entry,
    ) -> Outcome {
        if rq.next == rq.head {
            return Outcome::Over;
        }
        let slot = rq.next as usize & (rq.posted.len() - 1);
        let posted = rq.posted[slot];
        let first = slot * rq.max_sge as usize;
        let sges = &rq.sges[first..first + posted.num_sge as usize];
        if entry.len > posted.total {
            return Outcome::Over;
        }
        let mut word = word;
        if entry.len as usize > MAX_PAYLOAD {
            // Otherwise the sender could copy the message into the same receive at the same time.
            let Some(held) = seen.hold(&peer.map, word) else {
                return Outcome::Again;
            };
            word = held;
        }
        if !self.fetch(peer, entry, sges, rq.pd) {
            seen.release(&peer.map, word);
            self.send_from_there(peer);
            return Outcome::Over;
        }
        if !seen.commit(&peer.map, word) {
            return Outcome::Again;
        }
        rq.next = rq.next.wrapping_add(1);
        let receive = Receive {
            wr_id: posted.wr_id,
            total: posted.total,
            pd: rq.pd,
            sges: &[],
            done: rq.next,
            retires: Retires::Recv,
        };
        self.complete_pulled(rq, &receive, entry);
        Outcome::Taken
    }

    fn pull_shared(
        &self,
        rq: &mut RecvQueue,
        srq: &Srq,
        peer: &Arc<Peer>,
        seen: &PendingView,
        word: PendingWord,
        entry: &Entry,
    ) -> Outcome {
        let Some(claim) = srq.claim_next(entry.len) else {
            return Outcome::Over;
        };
        let own = self.process().slot;
        let fetched = srq
            .claimed(claim, own)
            .is_some_and(|taken| self.fetch(peer, entry, taken.sges(), taken.pd));
        if !fetched || !seen.commit(&peer.map, word) {
            srq.give_back(claim, own);
            return if fetched {
                Outcome::Again
            } else {
                self.send_from_there(peer);
                Outcome::Over
            };
        }
        rq.received = rq.received.wrapping_add(1);
        let Some(taken) = srq.take(claim, own) else {
            return Outcome::Over;
        };
        self.complete_pulled(rq, &taken.receive(), entry);
        Outcome::Taken
    }

    /// Copies a payload from the sender's memory into `sges`. Returns false on any error; the
    /// sender then sends the message itself and detects the error.
    fn fetch(&self, peer: &Peer, entry: &Entry, sges: &[ibv_sge], pd: u32) -> bool {
        let mut list = IovecList::new();
        let mut left = entry.len as usize;
        for sge in sges {
            let len = left.min(sge.length as usize);
            if len == 0 {
                continue;
            }
            let Some(addr) = self.process().regions.local(sge, pd, true) else {
                return false;
            };
            list.push(addr, len);
            left -= len;
        }
        if left > 0 || !peer.check_alive() {
            return false;
        }
        if entry.len == 0 {
            return true;
        }
        if peer.refuses() {
            return false;
        }
        let copied = sys::vm_read(peer.identity.pid, list.as_slice(), entry.iovecs.as_slice());
        if let Err(error) = copied
            && sys::refused(error)
        {
            peer.set_refuses(error);
        }
        copied == Ok(entry.len as usize)
    }

    /// Makes the sender send a pending message that could not be copied: wakes its process, or, if
    /// the kernel denies this process the copy, asks its agent to make progress.
    #[cold]
    fn send_from_there(&self, peer: &Arc<Peer>) {
        if peer.refuses() {
            self.process().ask_to_go_on(peer);
        }
        // its process sleeps if it has seen the message held
        peer.ring_process();
    }

    fn complete_pulled(&self, rq: &RecvQueue, receive: &Receive<'_>, entry: &Entry) {
        let header = Header {
            op: if entry.imm.is_some() {
                op::SEND_IMM
            } else {
                op::SEND
            },
            flags: flag::PUSHED | if entry.solicited { flag::SOLICITED } else { 0 },
            len: entry.len,
            imm: entry.imm.unwrap_or(0),
            src_qpn: rq.dest,
            ..Header::default()
        };
        self.push_receive(rq, receive, &header, IBV_WC_SUCCESS);
    }
}
