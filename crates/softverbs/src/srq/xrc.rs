//! XRC shared receive queues: they belong to an XRC domain, have their own completion queue, and
//! receive messages from every initiator that is connected to a target of the domain.
//!
//! A stamp in the owner's segment marks the queue as in use. To end a queue, the owner clears the
//! stamp, runs a heavy fence, waits for the processes that copy into its receives, and drains its
//! rings. A sender checks the stamp after it has published a message.

use std::sync::atomic::Ordering;

use rdma_core_sys::{IBV_EVENT_SRQ_ERR, IBV_WC_SUCCESS, ibv_context, ibv_cq, ibv_xrcd};

use super::Srq;
use crate::cq::{Cq, Cqe, Poll};
use crate::delivery::{Inbox, receives};
use crate::hazard::await_shared_receive;
use crate::peer::Peer;
use crate::process::Process;
use crate::ring::{Consumer, Message, flag, op};
use crate::segment::layout::{
    Fault, MAX_PLACES, MAX_SRQS, StateWord, qp, split_qp_num, srq as layout, xrc,
};
use crate::sync::{Arc, heavy_fence};
use crate::sys::{Errno, Res};
use crate::xrc::{AgentAccess, Domain, Xrcd};

const SRQ_BITS: u32 = MAX_SRQS.trailing_zeros();

/// The SRQ number that requests carry.
pub(crate) fn srq_num(slot: u32, index: u32) -> u32 {
    slot << SRQ_BITS | index
}

/// Slot and index of an SRQ number; `None` if no SRQ can have that number.
pub(crate) fn split_srq_num(num: u32) -> Option<(u32, u32)> {
    let (slot, index) = (num >> SRQ_BITS, num & (MAX_SRQS as u32 - 1));
    ((slot as usize) < MAX_PLACES && index != 0).then_some((slot, index))
}

/// Objects that an XRC SRQ is created with.
pub(crate) struct XrcInit {
    pub(crate) xrcd: *mut ibv_xrcd,
    pub(crate) cq: *mut ibv_cq,
}

/// Additional state of an XRC SRQ.
#[derive(Default)]
pub(super) struct Part {
    xrcd: Option<&'static Xrcd>,
    cq: Option<&'static Cq>,
    stamp: u32,
    /// The SRQ is being destroyed: no process may begin to write into a receive.
    ends: bool,
}

impl Srq {
    /// Publishes the SRQ to senders.
    ///
    /// # Safety
    /// The objects in `init` must be live.
    pub(super) unsafe fn begin_xrc(&self, init: &XrcInit, pd: u32) {
        let (xrcd, cq): (&'static Xrcd, &'static Cq) =
            // SAFETY: the caller promises live objects. The application cannot close the XRC domain
            // handle while this queue counts as its child, and a completion queue's memory is never
            // freed.
            unsafe { (Xrcd::from_ptr(init.xrcd), Cq::from_ptr(init.cq)) };
        xrcd.children.fetch_add(1, Ordering::Relaxed);
        cq.users.fetch_add(1, Ordering::Relaxed);
        let stamp = {
            let mut xrc = self.xrc.lock();
            xrc.xrcd = Some(xrcd);
            xrc.cq = Some(cq);
            xrc.ends = false;
            xrc.stamp = xrc.stamp.wrapping_add(1).max(1);
            xrc.stamp
        };
        let (map, at) = (&self.process().segment.map, self.at());
        let put = |part: usize, value: u32| map.u32(at + part).store(value, Ordering::Relaxed);
        put(layout::XRCD, xrcd.membership.domain.number);
        put(layout::PD, pd);
        put(layout::CQ, cq.index());
        map.u32(at + layout::STAMP).store(stamp, Ordering::Release);
    }

    /// Whether this is an XRC SRQ.
    pub(crate) fn is_xrc(&self) -> bool {
        self.xrc.lock().xrcd.is_some()
    }

    /// Protection domain and access rights of a request that names this SRQ, from the queue pair
    /// `from` of the process in `slot`, through the target with this number. `None` unless that
    /// target is connected to `from` in this incarnation. All members of the XRC domain can write
    /// the connection state; the other state is private.
    pub(crate) fn granted_through(
        &self,
        target: u32,
        from: u32,
        incarnation: u32,
        slot: u32,
    ) -> Option<(u32, u32)> {
        let xrc = self.xrc.lock();
        let xrcd = xrc.xrcd.filter(|_| !xrc.ends)?;
        let domain = &xrcd.membership.domain;
        let (number, index) = xrc::split_target(target)?;
        let at = domain.entry(index).filter(|_| number == domain.number)?;
        let word = StateWord(domain.map.u64(at + qp::STATE).load(Ordering::Acquire));
        let connected = receives(word.state())
            && word.dest() == from
            && word.incarnation() == incarnation
            && split_qp_num(from).0 == slot;
        connected.then(|| (self.queue.lock().pd, word.access()))
    }

    /// Publishes an access of this process's agent through the target with this number. `None`: the
    /// target is not of the domain of this SRQ.
    pub(crate) fn enter_target(&self, target: u32, rights: u32) -> Option<AgentAccess> {
        let (map, at) = {
            let xrc = self.xrc.lock();
            let domain = &xrc.xrcd?.membership.domain;
            let (number, index) = xrc::split_target(target)?;
            let at = domain.entry(index).filter(|_| number == domain.number)?;
            (Arc::clone(&domain.map), at)
        };
        AgentAccess::enter(self.process(), &map, at, rights)
    }

    /// As [`Srq::give_back`], for a receive that was claimed while the SRQ had this stamp; 0: it
    /// was not one of XRC.
    pub(crate) fn give_back_to(&self, stamp: u32, index: u32, slot: u32) {
        // held meanwhile: the SRQ cannot get another stamp
        let xrc = self.xrc.lock();
        if stamp == xrc.xrcd.map_or(0, |_| xrc.stamp) {
            self.give_back(index, slot);
        }
    }

    /// Hides the SRQ from senders and delivers the messages that they had published.
    ///
    /// # Errors
    /// `EBUSY`: a process still writes into a receive after 5 seconds; the caller can repeat the
    /// call.
    pub(super) fn end_xrc(&self) -> Res<()> {
        if !self.is_xrc() {
            return Ok(());
        }
        let process = self.process();
        self.hide();
        // This process's agent checks `ends` after it has set its hazard.
        self.xrc.lock().ends = true;
        heavy_fence();
        await_shared_receive(&process.segment, self.index, |slot| process.lives(slot))?;
        process.drain_all_rings();
        Ok(())
    }

    /// Ends the SRQ for senders. Those that wait for a receive are rung: their requests fail.
    fn hide(&self) {
        let stamp = self.process().segment.map.u32(self.at() + layout::STAMP);
        stamp.store(0, Ordering::SeqCst);
        self.wake_senders(super::unrung::ALL);
    }

    /// Drops the references to the XRC domain and the completion queue.
    pub(super) fn leave_xrc(&self) {
        let mut xrc = self.xrc.lock();
        if let Some(xrcd) = xrc.xrcd.take() {
            xrcd.children.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(cq) = xrc.cq.take() {
            cq.users.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Disables the SRQ and raises `IBV_EVENT_SRQ_ERR` if its completion queue has overrun.
    pub(crate) fn notice_overrun(&self) {
        let xrc = self.xrc.lock();
        if xrc.ends || !xrc.cq.is_some_and(Cq::is_overrun) {
            return;
        }
        let at = self.at() + layout::STAMP;
        if self.process().segment.map.u32(at).swap(0, Ordering::SeqCst) == 0 {
            return;
        }
        // with the lock held: a thread that destroys the SRQ has not begun to forget its events
        self.raise(IBV_EVENT_SRQ_ERR);
        drop(xrc);
        self.wake_senders(super::unrung::ALL);
    }
}

/// Disables the XRC SRQs of a context that the application closes without destroying them.
pub(crate) fn abandon(process: &Process, context: *mut ibv_context) {
    for srq in process.srqs.iter() {
        // SAFETY: the queue is live or in the pool; `create` writes the context before it returns
        // the queue.
        if unsafe { (*srq.as_ptr()).context } == context && srq.is_xrc() {
            srq.hide();
            srq.leave_xrc();
        }
    }
}

/// Completes the receive that a message through a target consumes, also if the target's state has
/// changed since the message was published.
pub(crate) fn deliver(
    process: &Process,
    srq: &Srq,
    from: &Arc<Peer>,
    ring: &Consumer,
    message: &Message,
) {
    let header = &message.header;
    let index = header.msn & 0xffff;
    // Held until the message is delivered: the XRC domain handle cannot be closed during that time.
    let part = srq.xrc.lock();
    let number = xrc::split_target(header.dst_qpn).map(|(domain, _)| domain);
    let (Some(xrcd), Some(cq)) = (part.xrcd, part.cq) else {
        // The sender claimed the receive in an earlier life of the SRQ, or never.
        return;
    };
    if header.life != part.stamp as u8 {
        return;
    }
    let domain = &xrcd.membership.domain;
    if header.op == op::RETURN || number != Some(domain.number) {
        srq.give_back(index, from.slot);
        return;
    }
    // A sender that has not claimed the receive cannot return it.
    let Some(taken) = srq.take(index, from.slot) else {
        return;
    };
    let receive = taken.receive();
    let inbox = Inbox {
        process,
        cq,
        number: header.dst_qpn,
    };
    if inbox.complete_message(&receive, ring, message, |_| false) != IBV_WC_SUCCESS {
        let domain = Arc::clone(domain);
        drop(part);
        fail_target(process, &domain, header.dst_qpn, header.incarnation);
    }
}

/// As [`deliver`], on the fast path of [`crate::qp::deliver_fast`]: returns false, with no state
/// changed, if the fast path does not apply.
#[inline(never)]
pub(crate) fn deliver_fast(
    srq: &Srq,
    from: &Peer,
    ring: &Consumer,
    message: &Message,
    poll: &mut Poll,
) -> bool {
    let header = &message.header;
    let part = srq.xrc.lock();
    let number = xrc::split_target(header.dst_qpn).map(|(domain, _)| domain);
    let (Some(xrcd), Some(cq)) = (part.xrcd, part.cq) else {
        return false;
    };
    if number != Some(xrcd.membership.domain.number) || header.life != part.stamp as u8 {
        return false;
    }
    complete_fast(srq, cq, header.dst_qpn, from, ring, message, poll)
}

/// Completes the receive that a short message consumes. The caller's lock excludes other messages
/// for the same connection or XRC domain handle.
#[inline(always)]
pub(crate) fn complete_fast(
    srq: &Srq,
    cq: &Cq,
    number: u32,
    from: &Peer,
    ring: &Consumer,
    message: &Message,
    poll: &mut Poll,
) -> bool {
    let header = &message.header;
    let len = message.inside;
    let filled = srq.fill_fast(header.msn & 0xffff, from.slot, len, |addr| {
        let to = std::ptr::without_provenance_mut(addr as usize);
        // SAFETY: `fill_fast` has checked that the address lies in a region that the application
        // registered with local write; the application keeps that memory valid until it deregisters
        // the region.
        unsafe { ring.copy_payload(message, 0, to, len) };
    });
    let Some(wr_id) = filled else {
        return false;
    };
    let cqe = Cqe::of_receive(wr_id, number, header);
    match poll.wc_slot(cq) {
        Some(slot) => slot.put(&cqe),
        None => cq.push_in_place(cqe, header.flags & flag::SOLICITED != 0),
    }
    true
}

/// Moves the target to ERR after a failed message, if the target is still in the same incarnation.
#[cold]
fn fail_target(process: &Process, domain: &Domain, number: u32, incarnation: u32) {
    let entry = xrc::split_target(number).and_then(|(_, index)| domain.entry(index));
    if let Some(at) = entry {
        let word = StateWord(domain.map.u64(at + qp::STATE).load(Ordering::Acquire));
        if word.incarnation() == incarnation && word.state() != rdma_core_sys::IBV_QPS_ERR {
            domain.fail_target(process, at, word, Fault::Request);
        }
    }
}

/// `ibv_get_srq_num`.
///
/// # Errors
/// `EINVAL`: not an XRC SRQ.
pub(crate) fn number_of(srq: &Srq) -> Res<u32> {
    if srq.is_xrc() {
        Ok(srq_num(srq.process().slot, srq.index))
    } else {
        Err(Errno(libc::EINVAL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_name_their_owner() {
        for (slot, index) in [(0, 1), (895, 16_383), (5, 77)] {
            let num = srq_num(slot, index);
            assert!(num < 1 << 24);
            assert_eq!(split_srq_num(num), Some((slot, index)));
        }
        for none in [0, 7 << SRQ_BITS, 896 << SRQ_BITS | 1, u32::MAX] {
            assert_eq!(split_srq_num(none), None);
        }
    }
}
