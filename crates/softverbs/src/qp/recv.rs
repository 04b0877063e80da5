//! Posting receives, and turning messages into completions.

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::{Flow, Posted, Qp, RecvQueue};
use crate::cq::{Cqe, Retires};
use crate::delivery::{Inbox, Receive, post_receives, receives};
use crate::peer::Peer;
use crate::process::Process;
use crate::region::Places;
use crate::ring::{Consumer, Header, Message, flag, op};
use crate::segment::layout::{Credit, StateWord, desc, qp as layout, split_qp_num, xrc};
use crate::signal;
use crate::srq::{Srq, deliver_xrc};
use crate::sync::{Arc, light_fence};
use crate::sys::{Errno, Res};

/// `ibv_post_recv`.
///
/// # Safety
/// `qp` must be live, `wr` a valid chain, `bad` writable.
pub(crate) unsafe fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> i32 {
    // SAFETY: the caller promises a live queue pair.
    let this = unsafe { Qp::from_ptr(qp) };
    if this.process().forked() {
        // SAFETY: the caller promises a writable pointer.
        unsafe { *bad = wr };
        return libc::EIO;
    }
    let mut rq = this.rq.lock();
    let post = |receive: &ibv_recv_wr| {
        // SAFETY: the caller promises a valid chain.
        if unsafe { this.receive_fast(&mut rq, receive) } {
            return Ok(());
        }
        this.post_one_recv(&mut rq, receive)
    };
    // SAFETY: the caller promises a valid chain and a writable pointer.
    let (_, ret) = unsafe { post_receives(wr, bad, post) };
    let credit = Credit {
        posted: rq.head,
        least: rq.least,
    };
    let at = this.at();
    let map = this.map();
    map.u64(at + layout::CREDIT)
        .store(credit.to_word(), Ordering::Release);
    // A peer that was not open when the queue pair was connected may exist by now, possibly without
    // barriers: then a full fence is used.
    let barriers = match &rq.peer {
        Some(peer) => peer.barriers,
        None => rq.dest == 0,
    };
    light_fence(barriers);
    if signal::asks(map, at + layout::WAITING) {
        this.sender_waits(&mut rq);
    }
    ret
}

impl Qp {
    /// Rings the other end's process after a change of state, if it asked to be rung.
    #[inline]
    pub(super) fn wake_sender(&self, rq: &mut RecvQueue) {
        light_fence(rq.peer.as_ref().is_some_and(|peer| peer.barriers));
        if signal::asks(self.map(), self.at() + layout::WAITING)
            && let Some(peer) = self.sender(rq)
        {
            peer.ring_process();
        }
    }

    /// The process of the other end, which asked to be rung. Opens it if it did not exist when the
    /// queue pair was connected. If it cannot be opened now, the repetition does that, and rings
    /// it.
    pub(super) fn sender<'a>(&self, rq: &'a mut RecvQueue) -> Option<&'a Arc<Peer>> {
        if rq.peer.is_none() {
            rq.peer = sender_slot(rq).and_then(|slot| self.process().open_now_or_later(slot));
        }
        rq.peer.as_ref()
    }

    /// Whether the process opened in `slot` may own the other end of this queue pair, or hold the
    /// target of it, and not be recorded here. Takes no lock.
    pub(crate) fn may_miss(&self, slot: u32) -> bool {
        if self.lacks_holder() {
            return true;
        }
        let word = StateWord(self.word.load(Ordering::Relaxed));
        receives(word.state()) && split_qp_num(word.dest()).0 == slot
    }

    /// A process was opened that may own the other end. The caller holds no lock of a queue.
    pub(crate) fn find_sender(&self) {
        if !receives(self.state()) {
            return;
        }
        let mut rq = self.rq.lock();
        if rq.peer.is_some() {
            return;
        }
        self.adopt_sender(&mut rq);
        if rq.peer.is_some() && signal::asks(self.map(), self.at() + layout::WAITING) {
            self.sender_waits(&mut rq);
        }
    }

    /// Records the process of the other end, if it is open by now.
    pub(super) fn adopt_sender(&self, rq: &mut RecvQueue) {
        rq.peer = sender_slot(rq).and_then(|slot| self.process().mapped_peer(slot));
    }

    /// A receive was posted that a sender waits for. Rings the sender; if it does not react in
    /// time, a later progress of this process takes its pending messages.
    #[cold]
    fn sender_waits(&self, rq: &mut RecvQueue) {
        std::sync::atomic::fence(Ordering::SeqCst);
        if let Some(peer) = self.sender(rq) {
            peer.ring_process();
            self.pull_later(rq);
            // SAFETY: a queue pair in use holds a reference to its completion queues.
            if unsafe { &*rq.cq }.is_armed() {
                // A thread that sleeps on the completion queue must check again.
                self.process().wake_up();
            }
        }
    }

    /// Whether a sender waits for a receive of this shared queue.
    pub(crate) fn has_waiting_sender(&self, srq: &Srq) -> bool {
        // A queue pair that never was in use has no process.
        self.state() != super::DESTROYED
            && signal::asks(self.map(), self.at() + layout::WAITING)
            && std::ptr::eq(self.rq.lock().srq, srq)
    }

    #[inline(never)]
    fn post_one_recv(&self, rq: &mut RecvQueue, wr: &ibv_recv_wr) -> Res<()> {
        let num_sge = wr.num_sge.cast_unsigned();
        let state = self.state();
        if state == IBV_QPS_RESET
            || state > IBV_QPS_ERR
            || num_sge > rq.max_sge
            || rq.shared().is_some()
        {
            return Err(Errno(libc::EINVAL));
        }
        if rq.head.wrapping_sub(self.recv_done.load(Ordering::Acquire)) >= rq.max_wr {
            return Err(Errno(libc::ENOMEM));
        }
        if state == IBV_QPS_ERR && rq.flow == Flow::Closed {
            rq.head = rq.head.wrapping_add(1);
            rq.next = rq.head;
            self.complete_recv(rq, wr.wr_id, IBV_WC_WR_FLUSH_ERR);
            return Ok(());
        }
        let sges = if num_sge == 0 {
            &[]
        } else {
            // SAFETY: the caller promises a valid list of `num_sge` sges.
            unsafe { std::slice::from_raw_parts(wr.sg_list, num_sge as usize) }
        };
        let slot = rq.head as usize & (rq.posted.len() - 1);
        let shared = rq.desc_at + rq.desc_stride * slot;
        let first = slot * rq.max_sge as usize;
        let regions = &self.process().regions;
        let map = self.map();
        let mut total = 0u32;
        let mut good = true;
        for (i, sge) in sges.iter().enumerate() {
            rq.sges[first + i] = *sge;
            total = total.saturating_add(sge.length);
            let sge_at = shared + desc::FIRST + desc::SGE_STRIDE * i;
            match regions.local_of_receive(sge, rq.pd) {
                Some(addr) => {
                    map.u64(sge_at).store(addr, Ordering::Relaxed);
                    map.u32(sge_at + 8).store(sge.length, Ordering::Relaxed);
                    map.u32(sge_at + desc::LKEY)
                        .store(sge.lkey, Ordering::Relaxed);
                }
                None => good = false,
            }
        }
        rq.posted[slot] = Posted {
            wr_id: wr.wr_id,
            total,
            num_sge,
        };
        map.u32(shared + desc::TOTAL)
            .store(total, Ordering::Relaxed);
        let num_sge = if good { num_sge } else { desc::POISONED };
        map.u32(shared + desc::NUM_SGE)
            .store(num_sge, Ordering::Relaxed);
        rq.least = rq.least.min(if good { total } else { 0 });
        rq.head = rq.head.wrapping_add(1);
        Ok(())
    }

    /// Marks the receives that name a key that changes or ends as unwritable in their descriptors,
    /// so that senders see it.
    pub(crate) fn poison_receives(&self, lkey: u32) {
        let mut rq = self.rq.lock();
        let mut number = rq.next;
        let mut any = false;
        while number != rq.head {
            let slot = number as usize & (rq.posted.len() - 1);
            let first = slot * rq.max_sge as usize;
            let sges = &rq.sges[first..first + rq.posted[slot].num_sge as usize];
            if sges.iter().any(|sge| sge.lkey == lkey && sge.length > 0) {
                let at = rq.desc_at + rq.desc_stride * slot + desc::NUM_SGE;
                self.map().u32(at).store(desc::POISONED, Ordering::Relaxed);
                any = true;
            }
            number = number.wrapping_add(1);
        }
        if any {
            rq.least = 0;
            let credit = Credit {
                posted: rq.head,
                least: 0,
            };
            self.map()
                .u64(self.at() + layout::CREDIT)
                .store(credit.to_word(), Ordering::Release);
            // A sender that has read the credit before finds a changed state word, and reads the
            // descriptors from then on.
            let word = StateWord(self.word.load(Ordering::Relaxed));
            if matches!(word.state(), IBV_QPS_INIT..=IBV_QPS_SQE)
                && !word.has_ended_keys()
                && self.publish(word.with_ended_keys())
            {
                // a request that has found a changed word waits for a ring
                self.wake_sender(&mut rq);
            }
        }
    }

    /// Destination of `len` bytes from byte `skip` of a receive: the receive with this number, or,
    /// of a shared queue, the receive with this index that the process in `slot` claimed. `None` if
    /// the receive does not exist or is too short, or a key is not valid.
    pub(crate) fn receive_places(
        &self,
        number: u32,
        skip: u64,
        len: u32,
        slot: u32,
    ) -> Option<Places> {
        let rq = self.rq.lock();
        let taken;
        let (sges, pd) = match rq.shared() {
            Some(srq) => {
                taken = srq.claimed(number, slot)?;
                (taken.sges(), taken.pd)
            }
            None if number.wrapping_sub(rq.next) < rq.head.wrapping_sub(rq.next) => {
                let at = number as usize & (rq.posted.len() - 1);
                let first = at * rq.max_sge as usize;
                (
                    &rq.sges[first..first + rq.posted[at].num_sge as usize],
                    rq.pd,
                )
            }
            None => return None,
        };
        Places::of(&self.process().regions, sges, pd, skip, len)
    }

    /// Adds a completion without data for the receive that ended at `next`.
    pub(super) fn complete_recv(&self, rq: &RecvQueue, wr_id: u64, status: ibv_wc_status) {
        let cqe = Cqe {
            wr_id,
            qp_num: self.number(),
            opcode: IBV_WC_RECV,
            status,
            done: rq.next,
            retires: Retires::Recv,
            ..Cqe::default()
        };
        // SAFETY: a queue pair in use holds a reference to its completion queues.
        unsafe { &*rq.cq }.push(cqe, true);
    }
}

/// Slot of the process that owns the other end of a connected queue pair.
pub(super) fn sender_slot(rq: &RecvQueue) -> Option<u32> {
    let connected = rq.dest != 0 && matches!(rq.kind, IBV_QPT_RC | IBV_QPT_UC);
    connected.then(|| split_qp_num(rq.dest).0)
}

/// Completes the receive that a message consumed. `from` is the sending process. A message for
/// another connection or incarnation is dropped; a message that does not match the next receive
/// fails the queue pair.
#[inline(never)]
pub(crate) fn deliver(process: &Process, from: &Arc<Peer>, ring: &Consumer, message: &Message) {
    let header = &message.header;
    if header.flags & flag::SHARED != 0 {
        deliver_shared(process, from, ring, message);
        return;
    }
    let Some(qp) = process.qp_by_num(header.dst_qpn) else {
        return;
    };
    if header.flags & flag::DATAGRAM != 0 {
        qp.deliver_datagram(from, ring, message);
        return;
    }
    let mut rq = qp.rq.lock();
    if !qp.accepts(&rq, from, header) || rq.shared().is_some() {
        return;
    }
    let incarnation = rq.incarnation;
    if header.msn != rq.next || rq.next == rq.head {
        drop(rq);
        qp.fail_asynchronously(incarnation, IBV_EVENT_QP_FATAL);
        return;
    }
    let status = qp.deliver_to(&mut rq, ring, message);
    drop(rq);
    if status != IBV_WC_SUCCESS {
        // The completion reports the failure; no asynchronous event is raised.
        qp.fail_quietly(incarnation);
    }
}

/// As [`deliver`], with a receive that the sender claimed from a shared queue.
#[inline(never)]
fn deliver_shared(process: &Process, from: &Arc<Peer>, ring: &Consumer, message: &Message) {
    let header = &message.header;
    let (number, index) = (header.msn >> 16, header.msn & 0xffff);
    let Some(srq) = process.srqs.get(number) else {
        return;
    };
    if xrc::split_target(header.dst_qpn).is_some() {
        deliver_xrc(process, srq, from, ring, message);
        return;
    }
    let qp = process
        .qp_by_num(header.dst_qpn)
        .filter(|_| header.op != op::RETURN);
    let Some(qp) = qp else {
        srq.give_back(index, from.slot);
        return;
    };
    let mut rq = qp.rq.lock();
    let its_own = rq.shared().is_some_and(|own| std::ptr::eq(own, srq));
    if !its_own || !qp.accepts(&rq, from, header) {
        // The queue pair was connected when the message was sent, and is not any more.
        drop(rq);
        srq.give_back(index, from.slot);
        return;
    }
    let incarnation = rq.incarnation;
    let Some(taken) = srq.take(index, from.slot) else {
        drop(rq);
        qp.fail_asynchronously(incarnation, IBV_EVENT_QP_FATAL);
        return;
    };
    rq.received = rq.received.wrapping_add(1);
    let receive = taken.receive();
    let status = qp.complete_message(&rq, &receive, ring, message);
    drop(rq);
    if status != IBV_WC_SUCCESS {
        qp.fail_quietly(incarnation);
    }
}

impl Qp {
    /// Whether a message comes from the connected queue pair and is for this incarnation.
    #[inline]
    pub(super) fn accepts(&self, rq: &RecvQueue, from: &Peer, header: &Header) -> bool {
        (receives(self.state()) || rq.flow == Flow::Closing)
            && header.incarnation == rq.incarnation
            && header.src_qpn == rq.dest
            && split_qp_num(header.src_qpn).0 == from.slot
            && rq.kind != IBV_QPT_UD
    }

    #[inline(always)]
    fn deliver_to(&self, rq: &mut RecvQueue, ring: &Consumer, message: &Message) -> ibv_wc_status {
        let slot = rq.next as usize & (rq.posted.len() - 1);
        let posted = rq.posted[slot];
        let first = slot * rq.max_sge as usize;
        rq.next = rq.next.wrapping_add(1);
        let receive = Receive {
            wr_id: posted.wr_id,
            total: posted.total,
            pd: rq.pd,
            sges: &rq.sges[first..first + posted.num_sge as usize],
            done: rq.next,
            retires: Retires::Recv,
        };
        self.complete_message(rq, &receive, ring, message)
    }

    #[inline(always)]
    fn inbox(&self, rq: &RecvQueue) -> Inbox<'_> {
        Inbox {
            process: self.process(),
            // SAFETY: a queue pair in use holds a reference to its completion queues, whose memory
            // is never freed.
            cq: unsafe { &*rq.cq },
            number: self.number(),
        }
    }

    #[inline(always)]
    fn complete_message(
        &self,
        rq: &RecvQueue,
        receive: &Receive<'_>,
        ring: &Consumer,
        message: &Message,
    ) -> ibv_wc_status {
        self.inbox(rq)
            .complete_message(receive, ring, message, |rkey| {
                self.invalidate_remotely(rkey)
            })
    }

    /// Adds the completion of a message whose payload is already in the receive.
    #[inline(always)]
    pub(super) fn push_receive(
        &self,
        rq: &RecvQueue,
        receive: &Receive<'_>,
        header: &Header,
        status: ibv_wc_status,
    ) {
        self.inbox(rq).push_receive(receive, header, status);
    }
}
