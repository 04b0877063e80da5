//! Unreliable datagrams: each message names its receiver, and consumes a receive when the owner
//! takes it from the ring. A message that can't be delivered is dropped silently, as the
//! specification requires.

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::request::Request;
use super::waiting::{Reason, Step};
use super::{Qp, RecvQueue, SendQueue, entry_at};
use crate::cq::{Cqe, Retires};
use crate::delivery::receives;
use crate::gid;
use crate::limits::MAX_DATAGRAM;
use crate::peer::{Peer, WithoutRing};
use crate::ring::{Consumer, Header, Message, Pushed, flag, op};
use crate::segment::layout::{qp as layout, split_qp_num};
use crate::srq::Srq;
use crate::sync::{Arc, Guard};
use crate::sys::{self, Errno};

/// Length of the GRH before the payload in a datagram's receive, in bytes.
const GRH: usize = 40;
/// Time that destroying a queue pair waits for its datagrams to be sent, in nanoseconds. A stopped
/// receiver takes none.
const DRAIN_NS: u64 = 200_000_000;
/// If a work request has this bit in its qkey, the queue pair's own qkey is sent.
const OWN_QKEY: u32 = 1 << 31;

/// Rings the receiver of a published datagram, if it sleeps.
pub(crate) fn notify(peer: &Peer, header: &Header) {
    if header.flags & flag::DATAGRAM != 0 {
        let (_, index) = split_qp_num(header.dst_qpn);
        let cq = peer.map.u32(entry_at(index) + layout::RECV_CQ);
        let solicited = header.flags & flag::SOLICITED != 0;
        peer.notify_cq(cq.load(Ordering::Relaxed), solicited);
    }
}

impl Qp {
    /// Opens the process that a datagram is for. A process whose agent does not answer is left to a
    /// repetition; datagrams for it are dropped until then.
    #[cold]
    fn open_receiver(&self, slot: u32) -> Option<Arc<Peer>> {
        let process = self.process();
        // A queue pair with several destinations comes here for each datagram. Those to a process
        // that has taken its slot since the last look at the former one are lost.
        let living = process.mapped_peer(slot).filter(|peer| peer.check_alive());
        if living.is_some() {
            return living;
        }
        let opened = process.open_now(slot);
        if let Err(error @ Errno(libc::EACCES | libc::ETIMEDOUT)) = opened
            && process.may_open_later(error)
        {
            process.call_later(slot);
        }
        opened.ok()
    }

    pub(super) fn run_datagram(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        if request.len > MAX_DATAGRAM {
            return Step::Done(IBV_WC_LOC_LEN_ERR);
        }
        let to = &request.operands;
        let (slot, _) = split_qp_num(to.qpn);
        let known = sq
            .peer
            .as_ref()
            .is_some_and(|peer| peer.slot == slot && peer.check_alive());
        if !known {
            sq.peer = self.open_receiver(slot);
        }
        let Some(peer) = sq.peer.as_ref().filter(|peer| peer.node == to.node) else {
            return Step::Done(IBV_WC_SUCCESS);
        };
        let solicited = request.flags & IBV_SEND_SOLICITED != 0;
        let header = Header {
            op: if request.opcode == IBV_WR_SEND_WITH_IMM {
                op::SEND_IMM
            } else {
                op::SEND
            },
            flags: flag::DATAGRAM | if solicited { flag::SOLICITED } else { 0 },
            dst_qpn: to.qpn,
            incarnation: to.flow,
            len: request.len as u32,
            imm: request.imm,
            msn: if to.qkey & OWN_QKEY != 0 {
                sq.qkey
            } else {
                to.qkey
            },
            src_qpn: self.number(),
            life: 0,
        };
        let process = self.process();
        let pushed = if process.has_late() && process.has_late_for(peer) {
            None
        } else {
            peer.push_datagram(process.signature(), self.number(), &header, |to| {
                // SAFETY: the ring reserved room for the message.
                unsafe { request.gather(to) };
            })
        };
        match pushed {
            Some(Pushed::Sent | Pushed::SentInTurn) => {
                if pushed == Some(Pushed::SentInTurn) {
                    process.note_turn();
                }
                peer.set_without_ring(WithoutRing::Waits);
                notify(peer, &header);
                Step::Done(IBV_WC_SUCCESS)
            }
            Some(Pushed::Full) => Step::Wait(Reason::Room),
            Some(Pushed::Lost) => Step::Done(IBV_WC_SUCCESS),
            None => {
                let peer = Arc::clone(peer);
                self.run_without_ring(sq, &peer, header, request)
            }
        }
    }

    /// The receiver has made no ring yet: a datagram waits 1 s for it and is then copied to the
    /// list of late messages, so that the queue continues. If that list has no room for it, the
    /// datagram waits as long as for room in a ring.
    #[cold]
    fn run_without_ring(
        &self,
        sq: &mut SendQueue,
        peer: &Arc<Peer>,
        header: Header,
        request: &Request<'_>,
    ) -> Step {
        let over = self.waited_for_ring(sq);
        match peer.without_ring() {
            WithoutRing::Waits if !over => return Step::Wait(Reason::Ring),
            WithoutRing::Waits => peer.set_without_ring(WithoutRing::Kept),
            WithoutRing::Kept => {}
            WithoutRing::Lost => return Step::Done(IBV_WC_SUCCESS),
        }
        let kept = self.process().keep_datagram(peer, header, |to| {
            // SAFETY: `keep_datagram` passes room for the message.
            unsafe { request.gather(to) };
        });
        if !kept {
            if !over || self.waits_on_for_ring(sq) && !peer.is_stopped() {
                return Step::Wait(Reason::Ring);
            }
            peer.set_without_ring(WithoutRing::Lost);
        }
        Step::Done(IBV_WC_SUCCESS)
    }

    /// Waits at most 200 ms for datagrams that found no ring or no room: a device would have sent
    /// them before. The caller holds no lock.
    pub(super) fn finish_datagrams(&self) {
        let process = self.process();
        let until = sys::now_ns() + DRAIN_NS;
        let waits = || self.waits() || process.has_late();
        while waits() && sys::now_ns() < until {
            process.prepare_sleep();
            if !waits() {
                break;
            }
            // The receiver that creates the ring or frees room rings this process.
            let _ = process.wake.wait(10);
        }
    }

    /// Completes a receive with a datagram addressed to this queue pair.
    pub(super) fn deliver_datagram(&self, from: &Arc<Peer>, ring: &Consumer, message: &Message) {
        let header = &message.header;
        let mut rq = self.rq.lock();
        let meant = rq.kind == IBV_QPT_UD
            && receives(self.state())
            && header.msn == rq.qkey
            && split_qp_num(header.src_qpn).0 == from.slot
            && matches!(header.op, op::SEND | op::SEND_IMM)
            && header.flags & flag::PUSHED == 0;
        if !meant {
            return;
        }
        if let Some(srq) = rq.shared() {
            self.deliver_datagram_shared(rq, srq, from, ring, message);
            return;
        }
        if rq.next == rq.head {
            return;
        }
        let slot = rq.next as usize & (rq.posted.len() - 1);
        let posted = rq.posted[slot];
        let len = header.len.saturating_add(GRH as u32);
        if len > posted.total {
            return;
        }
        let grh = self.grh(from, header);
        let first = slot * rq.max_sge as usize;
        let sges = &rq.sges[first..first + posted.num_sge as usize];
        let status = self.scatter_datagram(sges, rq.pd, &grh, ring, message);
        rq.next = rq.next.wrapping_add(1);
        let cqe = Cqe {
            done: rq.next,
            retires: Retires::Recv,
            ..self.datagram_completion(posted.wr_id, header, status)
        };
        // SAFETY: a queue pair in use holds a reference to its completion queues.
        unsafe { &*rq.cq }.push(cqe, header.flags & flag::SOLICITED != 0);
        let incarnation = rq.incarnation;
        drop(rq);
        if status != IBV_WC_SUCCESS {
            self.fail_quietly(incarnation);
        }
    }

    fn deliver_datagram_shared(
        &self,
        rq: Guard<'_, RecvQueue>,
        srq: &Srq,
        from: &Arc<Peer>,
        ring: &Consumer,
        message: &Message,
    ) {
        let header = &message.header;
        let Some(taken) = srq.take_next(header.len.saturating_add(GRH as u32)) else {
            return;
        };
        let grh = self.grh(from, header);
        let status = self.scatter_datagram(taken.sges(), taken.pd, &grh, ring, message);
        let cqe = self.datagram_completion(taken.wr_id, header, status);
        // SAFETY: a queue pair in use holds a reference to its completion queues.
        unsafe { &*rq.cq }.push(cqe, header.flags & flag::SOLICITED != 0);
        let incarnation = rq.incarnation;
        drop(rq);
        if status != IBV_WC_SUCCESS {
            self.fail_quietly(incarnation);
        }
    }

    fn datagram_completion(&self, wr_id: u64, header: &Header, status: ibv_wc_status) -> Cqe {
        let mut flags = IBV_WC_GRH;
        if header.op == op::SEND_IMM {
            flags |= IBV_WC_WITH_IMM;
        }
        Cqe {
            wr_id,
            qp_num: self.number(),
            src_qp: header.src_qpn,
            byte_len: header.len.saturating_add(GRH as u32),
            imm: header.imm,
            wc_flags: flags,
            opcode: IBV_WC_RECV,
            status,
            ..Cqe::default()
        }
    }

    /// The global route header, as it would arrive over a wire.
    fn grh(&self, from: &Peer, header: &Header) -> [u8; GRH] {
        let mut grh = [0; GRH];
        // Version 6, traffic class and flow label.
        grh[0..4].copy_from_slice(&(6 << 28 | header.incarnation & 0xfff_ffff).to_be_bytes());
        // The length includes the headers and the checksum behind the GRH.
        grh[4..6].copy_from_slice(&(header.len as u16 + 24).to_be_bytes());
        grh[6] = 0x1b;
        grh[7] = 64;
        grh[8..24].copy_from_slice(&gid::of_node(from.node));
        grh[24..40].copy_from_slice(&gid::of_node(self.process().node));
        grh
    }

    /// Copies the header and the payload to a receive. The kernel copies, not this thread: peers
    /// send datagrams also while the application unmaps the memory of its receives, and a device
    /// would write to pinned pages.
    fn scatter_datagram(
        &self,
        sges: &[ibv_sge],
        pd: u32,
        grh: &[u8; GRH],
        ring: &Consumer,
        message: &Message,
    ) -> ibv_wc_status {
        let piece = |base: *mut u8, len| libc::iovec {
            iov_base: base.cast(),
            iov_len: len,
        };
        let pid = self.process().identity.pid;
        let total = GRH + message.inside;
        let mut offset = 0;
        for sge in sges {
            let len = (sge.length as usize).min(total - offset);
            if len == 0 {
                continue;
            }
            let Some(addr) = self.process().regions.local(sge, pd, true) else {
                return IBV_WC_LOC_PROT_ERR;
            };
            let head = &grh[offset.min(GRH)..(offset + len).min(GRH)];
            let at = (offset + head.len()).saturating_sub(GRH);
            let (payload, rest) = ring.payload(message, at, len - head.len());
            let from = [
                piece(head.as_ptr().cast_mut(), head.len()),
                piece(payload, rest),
            ];
            let to = piece(std::ptr::without_provenance_mut(addr as usize), len);
            if sys::vm_write(pid, &from, &[to]).ok() != Some(len) {
                return IBV_WC_LOC_PROT_ERR;
            }
            offset += len;
        }
        IBV_WC_SUCCESS
    }
}

impl RecvQueue {
    pub(super) fn set_qkey(&mut self, qkey: u32) {
        self.qkey = qkey;
    }
}
