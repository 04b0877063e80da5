//! Fast path: a single-SGE send on an idle connection into a posted single-SGE receive that is
//! large enough. It has the same effect as the general path ([`super::send`], [`super::recv`]) with
//! a third of the instructions. In any other case a function returns false with the request not
//! done, and the general path does it.

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::remote_qp::Connection;
use super::send::{outcome, unanswered};
use super::{Posted, Qp, RecvQueue, SendQueue};
use crate::cq::{Cqe, Poll, Retires};
use crate::delivery::store_descriptor;
use crate::peer::{Peer, Push};
use crate::process::Process;
use crate::region::LastRegion;
use crate::ring::{Consumer, Header, MAX_PAYLOAD, Message, SHORT, copy, flag, op};
use crate::segment::layout::xrc;
use crate::signal;
use crate::srq::{complete_fast, deliver_xrc_fast};

/// The payload of a request: `len` bytes at `addr`, which this process may read.
#[derive(Clone, Copy)]
struct Payload {
    addr: u64,
    len: u32,
}

/// The receive that a message consumes, as the header of the message names it.
#[derive(Clone, Copy)]
struct Consumed {
    msn: u32,
    flags: u8,
    life: u8,
}

/// Result of publishing a message.
enum Published {
    /// Nothing was published.
    No,
    /// The message in the ring belongs to an ended incarnation, and its receiver drops it. The
    /// general path waits for the next incarnation.
    Unanswered,
    Done(ibv_wc_status),
}

impl Qp {
    /// Sends `wr`; or returns false, with `wr` not sent: the general path sends it.
    ///
    /// # Safety
    /// `wr` must be a valid request.
    #[inline(always)]
    pub(super) unsafe fn send_fast(&self, sq: &mut SendQueue, wr: &ibv_send_wr) -> bool {
        let Some(conn) = &sq.conn else {
            return false;
        };
        let plain = matches!(wr.opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM)
            && wr.num_sge == 1
            && sq.max_sge > 0
            && matches!(sq.kind, IBV_QPT_RC | IBV_QPT_XRC_SEND)
            && self.state() == IBV_QPS_RTS
            && sq.executed == sq.head
            && sq.head.wrapping_sub(self.send_done.load(Ordering::Acquire)) < sq.max_wr
            && conn.current();
        if !plain {
            return false;
        }
        if conn.srq.is_some() {
            // SAFETY: the caller promises a valid request, and the checks above hold.
            return unsafe { self.send_to_shared_fast(sq, wr) };
        }
        if sq.claimed == sq.credit.posted {
            return false;
        }
        let (last_region, most) = (&mut sq.last_region, sq.credit.least);
        // SAFETY: the caller promises a valid request, and it has one sge.
        let payload = unsafe { self.payload(last_region, sq.pd, sq.max_inline, wr, most) };
        let Some(payload) = payload else {
            return false;
        };
        let consumed = Consumed {
            msn: sq.claimed,
            flags: 0,
            life: 0,
        };
        let Published::Done(status) =
            self.publish_sent(sq, conn, wr, consumed, payload, sq.claimed)
        else {
            return false;
        };
        sq.claimed = sq.claimed.wrapping_add(1);
        self.finish_sent(sq, wr, payload.len, status);
        true
    }

    /// As [`Self::send_fast`], into a receive of a shared queue, which other senders may claim
    /// too. If the send fails after the claim, the claim stays in the send queue for the general
    /// path.
    ///
    /// # Safety
    /// As for [`Self::send_fast`], which has checked its conditions.
    #[inline(never)]
    unsafe fn send_to_shared_fast(&self, sq: &mut SendQueue, wr: &ibv_send_wr) -> bool {
        let Some(conn) = &sq.conn else {
            return false;
        };
        let Some(srq) = conn.srq.as_ref().filter(|_| conn.has_message_ring) else {
            return false;
        };
        if sq.kind == IBV_QPT_XRC_SEND {
            // SAFETY: a request on an XRC queue pair names a queue.
            let number = unsafe { wr.qp_type.xrc.remote_srqn };
            if !conn.leads_to(number) || !conn.still_delivers() {
                return false;
            }
        }
        if sq.claim.is_some() {
            return false;
        }
        let (last_region, most) = (&mut sq.last_region, MAX_PAYLOAD as u32);
        // SAFETY: the caller promises a valid request, and it has one sge.
        let payload = unsafe { self.payload(last_region, sq.pd, sq.max_inline, wr, most) };
        let Some(payload) = payload else {
            return false;
        };
        let Some(claim) = srq.claim_fast(&conn.peer.map, self.process().slot) else {
            return false;
        };
        if !conn.still_delivers() {
            self.return_late_claim(sq.dest, conn, &claim);
            return false;
        }
        sq.claim = Some(claim.index);
        let published = if payload.len <= claim.room {
            let consumed = Consumed {
                msn: srq.number << 16 | claim.index,
                flags: flag::SHARED,
                life: conn.delivery.life(),
            };
            self.publish_sent(sq, conn, wr, consumed, payload, sq.sent)
        } else {
            Published::No
        };
        // Only now, because both read words that the receiver has written: its message is not
        // delayed.
        if srq.passes_limit(&conn.peer.map, claim.position, conn.peer.barriers) {
            self.report_limit(&conn.peer);
        }
        srq.prefetch_next(&conn.peer.map, claim.position);
        let status = match published {
            Published::No => return false,
            Published::Unanswered => {
                // The owner that finds the message in the ring gives the claim back.
                sq.claim = None;
                return false;
            }
            Published::Done(status) => status,
        };
        sq.claim = None;
        sq.sent = sq.sent.wrapping_add(1);
        self.finish_sent(sq, wr, payload.len, status);
        true
    }

    /// Calls the owner of a shared receive queue whose limit a claim has passed.
    #[cold]
    pub(super) fn report_limit(&self, owner: &Peer) {
        let process = self.process();
        if owner.slot == process.slot {
            signal::call_attention(&process.segment.map);
            process.wake_up();
        } else {
            owner.call_attention();
        }
    }

    /// The payload of `wr`; `None` if it is longer than `most` or cannot be read.
    ///
    /// # Safety
    /// `wr` must be a valid request with one sge.
    #[inline(always)]
    unsafe fn payload(
        &self,
        last_region: &mut LastRegion,
        pd: u32,
        max_inline: u32,
        wr: &ibv_send_wr,
        most: u32,
    ) -> Option<Payload> {
        // SAFETY: the caller promises a valid list of one sge.
        let sge = unsafe { &*wr.sg_list };
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        let room = if inline {
            max_inline
        } else {
            MAX_PAYLOAD as u32
        };
        if sge.length > room.min(MAX_PAYLOAD as u32).min(most) {
            return None;
        }
        let addr = if inline {
            sge.addr
        } else {
            let regions = &self.process().regions;
            regions.local_again(last_region, sge, pd, false)?
        };
        Some(Payload {
            addr,
            len: sge.length,
        })
    }

    /// Publishes the message of `wr`, the message with this number of the connection, and rings
    /// the receiver if it sleeps.
    #[inline(always)]
    fn publish_sent(
        &self,
        sq: &SendQueue,
        conn: &Connection,
        wr: &ibv_send_wr,
        consumed: Consumed,
        payload: Payload,
        number: u32,
    ) -> Published {
        let with_imm = wr.opcode == IBV_WR_SEND_WITH_IMM;
        let solicited = wr.send_flags & IBV_SEND_SOLICITED != 0;
        let header = Header {
            op: if with_imm { op::SEND_IMM } else { op::SEND },
            flags: consumed.flags | if solicited { flag::SOLICITED } else { 0 },
            dst_qpn: sq.dest,
            incarnation: conn.word.incarnation(),
            len: payload.len,
            imm: wr.__bindgen_anon_1.bindgen_union_field,
            msn: consumed.msn,
            src_qpn: self.number(),
            life: consumed.life,
        };
        // SAFETY: the payload is inside the application's registered buffer, or is its inline data.
        if !unsafe { publish(self.process(), conn, &header, payload) } {
            return Published::No;
        }
        let status = outcome(conn, sq.kind, number);
        if unanswered(sq, status) {
            return Published::Unanswered;
        }
        conn.peer.notify_cq(conn.recv_cq, solicited);
        Published::Done(status)
    }

    /// Counts a sent request and completes it.
    #[inline(always)]
    fn finish_sent(&self, sq: &mut SendQueue, wr: &ibv_send_wr, len: u32, status: ibv_wc_status) {
        sq.head = sq.head.wrapping_add(1);
        if status != IBV_WC_SUCCESS {
            self.finish(sq, wr.wr_id, wr.opcode, wr.send_flags, len.into(), status);
            return;
        }
        sq.executed = sq.head;
        if sq.signal_all || wr.send_flags & IBV_SEND_SIGNALED != 0 {
            self.complete_send(sq, wr.wr_id, wr.opcode, IBV_WC_SUCCESS, len);
        }
    }

    /// Posts a receive; or returns false, with no state changed. The caller publishes it to peers.
    ///
    /// # Safety
    /// `wr` must be a valid receive.
    #[inline(always)]
    pub(super) unsafe fn receive_fast(&self, rq: &mut RecvQueue, wr: &ibv_recv_wr) -> bool {
        let number = rq.head;
        let plain = wr.num_sge == 1
            && matches!(self.state(), IBV_QPS_INIT..=IBV_QPS_SQE)
            && rq.srq.is_null()
            && number.wrapping_sub(self.recv_done.load(Ordering::Acquire)) < rq.max_wr;
        if !plain {
            return false;
        }
        // SAFETY: the caller promises a valid list of one sge.
        let sge = unsafe { &*wr.sg_list };
        let regions = &self.process().regions;
        let Some(addr) = regions.receive_again(&mut rq.last_region, sge, rq.pd) else {
            return false;
        };
        let slot = number as usize & rq.posted.len().wrapping_sub(1);
        let (Some(posted), Some(kept)) = (
            rq.posted.get_mut(slot),
            rq.sges.get_mut(slot * rq.max_sge as usize),
        ) else {
            return false;
        };
        *kept = *sge;
        *posted = Posted {
            wr_id: wr.wr_id,
            total: sge.length,
            num_sge: 1,
        };
        let shared = rq.desc_at + rq.desc_stride * slot;
        store_descriptor(self.map(), shared, sge, addr);
        rq.least = rq.least.min(sge.length);
        rq.head = number.wrapping_add(1);
        true
    }
}

/// Publishes a message whose payload is contiguous; or returns false, with nothing published.
///
/// # Safety
/// `payload` must be readable.
#[inline(always)]
unsafe fn publish(process: &Process, conn: &Connection, header: &Header, payload: Payload) -> bool {
    let from = std::ptr::without_provenance(payload.addr as usize);
    let len = payload.len as usize;
    // SAFETY: the caller's promise.
    unsafe {
        if len <= SHORT {
            conn.peer.push_short(header, from, len)
        } else {
            publish_longer(process, conn, header, from, len)
        }
    }
}

/// As [`publish`], for a message that needs more than one slot.
///
/// # Safety
/// `from` must be readable for `len` bytes.
#[inline(never)]
unsafe fn publish_longer(
    process: &Process,
    conn: &Connection,
    header: &Header,
    from: *const u8,
    len: usize,
) -> bool {
    let pushed = conn.peer.push(process.signature(), header, |to| {
        // SAFETY: the ring reserved room for the message; the caller promises readable bytes.
        unsafe { copy(from, to, len) };
    });
    pushed == Push::Sent
}

/// Completes the receive that `message` consumed; or returns false, with no state changed. As
/// [`super::deliver`], but the completion may go directly to `poll`.
#[inline(always)]
pub(crate) fn deliver_fast(
    process: &Process,
    from: &Peer,
    ring: &Consumer,
    message: &Message,
    poll: &mut Poll,
) -> bool {
    let header = &message.header;
    if header.op > op::SEND_IMM || header.flags & !flag::SOLICITED != 0 {
        return header.op <= op::SEND_IMM
            && header.flags & !(flag::SOLICITED | flag::SHARED) == 0
            && message.inside == header.len as usize
            && deliver_shared_fast(process, from, ring, message, poll);
    }
    let Some(qp) = process.qp_by_num(header.dst_qpn) else {
        return false;
    };
    let mut rq = qp.rq.lock();
    let rq = &mut *rq;
    let number = rq.next;
    let plain = qp.accepts(rq, from, header)
        && rq.srq.is_null()
        && header.msn == number
        && number != rq.head;
    let slot = number as usize & rq.posted.len().wrapping_sub(1);
    let (Some(posted), Some(sge)) = (rq.posted.get(slot), rq.sges.get(slot * rq.max_sge as usize))
    else {
        return false;
    };
    let whole = message.inside == header.len as usize;
    if !plain || !whole || posted.num_sge != 1 || message.inside > sge.length as usize {
        return false;
    }
    if message.inside > 0 {
        // The region may have been deregistered since the receive was posted.
        let last_region = &mut rq.last_region;
        let Some(addr) = process.regions.local_again(last_region, sge, rq.pd, true) else {
            return false;
        };
        let to = std::ptr::without_provenance_mut(addr as usize);
        // SAFETY: inside a region that the application registered for local writes and has not
        // deregistered; the ring is a mapping that this crate owns.
        unsafe { ring.copy_payload(message, 0, to, message.inside) };
    }
    let done = number.wrapping_add(1);
    rq.next = done;
    let cqe = Cqe {
        done,
        retires: Retires::Recv,
        ..Cqe::of_receive(posted.wr_id, qp.number(), header)
    };
    // SAFETY: a queue pair in use holds a reference to its completion queues.
    let cq = unsafe { &*rq.cq };
    match poll.wc_slot(cq) {
        Some(slot) => {
            slot.put(&cqe);
            qp.recv_polled(done);
        }
        None => cq.push_in_place(cqe, header.flags & flag::SOLICITED != 0),
    }
    true
}

/// As [`deliver_fast`], with a receive that the sender claimed from a shared queue.
#[inline(never)]
fn deliver_shared_fast(
    process: &Process,
    from: &Peer,
    ring: &Consumer,
    message: &Message,
    poll: &mut Poll,
) -> bool {
    let header = &message.header;
    let Some(srq) = process.srqs.get(header.msn >> 16) else {
        return false;
    };
    if xrc::split_target(header.dst_qpn).is_some() {
        return deliver_xrc_fast(srq, from, ring, message, poll);
    }
    let Some(qp) = process.qp_by_num(header.dst_qpn) else {
        return false;
    };
    let mut rq = qp.rq.lock();
    let its_own = rq.shared().is_some_and(|own| std::ptr::eq(own, srq));
    if !its_own || !qp.accepts(&rq, from, header) {
        return false;
    }
    // SAFETY: a queue pair in use holds a reference to its completion queues.
    let cq = unsafe { &*rq.cq };
    let done = complete_fast(srq, cq, qp.number(), from, ring, message, poll);
    rq.received = rq.received.wrapping_add(u32::from(done));
    done
}
