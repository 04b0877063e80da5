//! Queue pairs in ERR and RESET: flushing, and reacting to failures that peers caused.

use std::sync::atomic::{Ordering, fence};

use rdma_core_sys::*;

use super::copies::Copies;
use super::drain::Drain;
use super::recv::sender_slot;
use super::remote_qp::Connection;
use super::{DESTROYED, Flow, Qp, RecvQueue, SendQueue, TARGET};
use crate::events::{AsyncQueue, Element};
use crate::hazard::{RIGHTS, await_accesses, await_receive, queue_pair_in_use, receive_in_use};
use crate::limits::PEER_WAIT_NS;
use crate::peer::{Peer, Push};
use crate::ring::{Header, flag, op};
use crate::segment::layout::{Credit, Fault, StateWord, qp as layout, split_qp_num};
use crate::srq::Claim;
use crate::sync::Arc;
use crate::sys::{self, Res};

/// The message that returns a claimed receive to its shared queue. `claim`: number of the queue and
/// index of the receive; `stamp`: that of the queue if it is one of XRC.
pub(crate) fn return_header(dest: u32, from: u32, claim: (u32, u32), stamp: u32) -> Header {
    Header {
        op: op::RETURN,
        flags: flag::SHARED,
        dst_qpn: dest,
        msn: claim.0 << 16 | claim.1,
        src_qpn: from,
        // the part of the stamp that messages have
        life: stamp as u8,
        ..Header::default()
    }
}

impl Qp {
    /// Moves the queue pair to ERR and flushes both queues; the first waiting request, if there
    /// is one, completes with `first`.
    pub(super) fn fail(&self, sq: &mut SendQueue, first: ibv_wc_status) {
        let mut rq = self.rq.lock();
        self.fail_locked(sq, &mut rq, first);
    }

    pub(super) fn fail_locked(&self, sq: &mut SendQueue, rq: &mut RecvQueue, first: ibv_wc_status) {
        if matches!(self.state(), IBV_QPS_RESET | DESTROYED) {
            return;
        }
        self.set_state(IBV_QPS_ERR);
        let error = StateWord(self.word.load(Ordering::Relaxed)).with_state(IBV_QPS_ERR);
        self.map()
            .u64(self.at() + layout::STATE)
            .store(error.0, Ordering::Release);
        self.word.store(error.0, Ordering::Relaxed);
        self.flush_sends(sq, first);
        if rq.peer.is_none() {
            // The process may have been opened since the queue pair was connected: from then on it
            // can have a ring, with messages whose requests were successful.
            self.adopt_sender(rq);
        }
        if rq.peer.is_none() {
            self.flush_receives(rq);
        } else if rq.flow == Flow::Open {
            // The ring's lock comes before the held locks in the lock order, so the rest is left to
            // the next progress.
            rq.flow = Flow::Closing;
            self.process().request_flush();
        }
        // Wakes the other end, if it waits for this queue pair or its receive ring.
        self.wake_sender(rq);
        self.wake_receive_ring_sender(rq);
    }

    /// Adds the queue pair to a round of flushes if it has failed and its last messages are to be
    /// taken. Returns whether it is added: the caller then runs a heavy fence and calls
    /// [`Self::flush_closing`]. The caller holds no lock.
    pub(crate) fn enter_flush(&self, round: u64) -> bool {
        let mut rq = self.rq.lock();
        match rq.flow {
            // If it is in an earlier round, the thread of that round flushes it.
            Flow::Closing if rq.flush_round == 0 => {
                rq.flush_round = round;
                return true;
            }
            Flow::Refusing => self.flush_unless_written(&mut rq),
            Flow::Open | Flow::Closing | Flow::Closed => {}
        }
        false
    }

    /// Delivers the messages that were in the ring before the queue pair failed, and flushes its
    /// other receives. Only if it is in this round. The caller holds no lock.
    pub(crate) fn flush_closing(&self, round: u64) {
        let slot = {
            let rq = self.rq.lock();
            if rq.flush_round != round {
                return;
            }
            split_qp_num(rq.dest).0
        };
        #[cfg(test)]
        meanwhile::run(meanwhile::At::Drain);
        self.process().drain_ring_of(slot);
        let mut rq = self.rq.lock();
        // a reset has ended this incarnation's part in the round
        if rq.flush_round != round {
            return;
        }
        rq.flush_round = 0;
        if matches!(rq.flow, Flow::Closing | Flow::Refusing) {
            self.flush_unless_written(&mut rq);
        }
    }

    /// Flushes the receives of a failed queue pair; if a sender writes into one, a later progress
    /// does it.
    fn flush_unless_written(&self, rq: &mut RecvQueue) {
        let process = self.process();
        let may_write = rq.peer.as_ref().is_some_and(|peer| !peer.is_given_up());
        let lives = |visitor| process.lives(visitor);
        // The hazard can be that of an ended process, whose slot the sender has now.
        if may_write && receive_in_use(&process.segment, self.index, lives) {
            let now = sys::now_ns();
            if rq.flush_deadline == 0 {
                rq.flush_deadline = now + PEER_WAIT_NS;
            }
            // A stopped sender is awaited for 5 s, as long as by a deregistration, which then
            // reports `EBUSY`.
            if now < rq.flush_deadline {
                process.flush_again();
                return;
            }
        }
        self.flush_receives(rq);
    }

    fn flush_receives(&self, rq: &mut RecvQueue) {
        if rq.flow == Flow::Closed {
            return;
        }
        rq.flow = Flow::Closed;
        rq.flush_deadline = 0;
        self.publish_taken(rq);
        while rq.next != rq.head {
            let posted = rq.posted[rq.next as usize & (rq.posted.len() - 1)];
            rq.next = rq.next.wrapping_add(1);
            self.complete_recv(rq, posted.wr_id, IBV_WC_WR_FLUSH_ERR);
        }
        if rq.shared().is_some() {
            // The queue pair consumes no more shared receives.
            self.raise(IBV_EVENT_QP_LAST_WQE_REACHED);
        }
    }

    /// Publishes to the other end the final number of messages taken.
    fn publish_taken(&self, rq: &RecvQueue) {
        let count = if rq.srq.is_null() {
            rq.next
        } else {
            rq.received
        };
        let word = u64::from(rq.incarnation) << 32 | u64::from(count);
        self.map()
            .u64(self.at() + layout::TAKEN)
            .store(word, Ordering::Release);
    }

    /// A request of an unreliable queue pair failed: moves the queue pair to SQE, in which it sends
    /// no more but still receives.
    pub(super) fn fail_sends(&self, sq: &mut SendQueue) {
        let rq = self.rq.lock();
        if self.state() == IBV_QPS_RTS {
            let word = StateWord(self.word.load(Ordering::Relaxed));
            if self.publish(word.with_state(IBV_QPS_SQE)) {
                self.set_state(IBV_QPS_SQE);
            }
        }
        drop(rq);
        self.flush_sends(sq, IBV_WC_WR_FLUSH_ERR);
    }

    fn flush_sends(&self, sq: &mut SendQueue, first: ibv_wc_status) {
        self.take_all_back(sq);
        let mut status = first;
        while sq.executed != sq.head {
            let stored = sq.stored[sq.executed as usize & (sq.stored.len() - 1)];
            sq.executed = sq.executed.wrapping_add(1);
            self.complete_send(sq, stored.wr_id, stored.opcode, status, 0);
            status = IBV_WC_WR_FLUSH_ERR;
        }
        sq.copies = Copies::default();
        self.end_wait(sq);
        sq.pushed = false;
        sq.may_have_changed = false;
        self.give_claim_back(sq);
    }

    /// Returns the receive of a shared queue that was claimed for a request that will not be sent.
    pub(super) fn give_claim_back(&self, sq: &mut SendQueue) {
        let claim = sq.claim.take();
        let shared = sq.conn.as_ref().and_then(|conn| conn.srq.as_ref());
        let claimed = claim.zip(shared).map(|(index, srq)| (srq.number, index));
        if self.drop_agent_request(sq, claimed) {
            return;
        }
        if let (Some(index), Some(conn)) = (claim, &sq.conn) {
            self.send_return(sq.dest, conn, index, conn.delivery.stamp);
        }
    }

    /// Returns a receive that was claimed after the shared receive queue of an XRC request had
    /// ended: the receive is one of the queue that has this number now. The stamp of that queue was
    /// set before the receive was posted, and an unchanged claim shows that it has not ended
    /// either.
    #[cold]
    pub(super) fn return_late_claim(&self, dest: u32, conn: &Connection, claim: &Claim) {
        let stamp = conn.present_stamp();
        let (map, slot) = (&conn.peer.map, self.process().slot);
        let srq = conn.srq.as_ref().filter(|_| stamp != 0);
        if let Some(index) = srq.and_then(|srq| srq.still_claimed(map, claim, slot)) {
            self.send_return(dest, conn, index, stamp);
        }
    }

    /// Sends the owner of a shared receive queue the message that returns a claimed receive.
    fn send_return(&self, dst_qpn: u32, conn: &Connection, index: u32, stamp: u32) {
        let Some(srq) = &conn.srq else { return };
        let header = return_header(dst_qpn, self.number(), (srq.number, index), stamp);
        let process = self.process();
        let pushed = conn.peer.push(process.signature(), &header, |_| {});
        if matches!(pushed, Push::Full | Push::Unmade) {
            process.push_later(&conn.peer, header);
        }
    }

    /// Fails the queue pair for a reason other than its own requests, and raises `event`. Does
    /// nothing if another incarnation has begun since the caller found the reason in `incarnation`.
    #[cold]
    pub(crate) fn fail_asynchronously(&self, incarnation: u32, event: ibv_event_type) {
        #[cfg(test)]
        meanwhile::run(meanwhile::At::Fail);
        let mut sq = self.sq.lock();
        if incarnation != self.incarnation()
            || matches!(self.state(), IBV_QPS_RESET | IBV_QPS_ERR | DESTROYED)
        {
            return;
        }
        self.fail(&mut sq, IBV_WC_WR_FLUSH_ERR);
        self.raise(event);
    }

    /// Fails the queue pair for a message that could not be delivered and that a completion has
    /// already reported. The messages behind it are not delivered either. Does nothing if another
    /// incarnation than that of the message has begun.
    #[cold]
    pub(super) fn fail_quietly(&self, incarnation: u32) {
        #[cfg(test)]
        meanwhile::run(meanwhile::At::Fail);
        let mut sq = self.sq.lock();
        let mut rq = self.rq.lock();
        if incarnation != rq.incarnation {
            return;
        }
        self.fail_locked(&mut sq, &mut rq, IBV_WC_WR_FLUSH_ERR);
        if self.state() == IBV_QPS_ERR && rq.flow != Flow::Closed {
            rq.flow = Flow::Refusing;
            self.flush_unless_written(&mut rq);
        }
    }

    /// Events that peers cause are raised under a lock of the queue pair, so that none is raised
    /// after it is destroyed.
    pub(crate) fn raise(&self, event: ibv_event_type) {
        self.raise_by(AsyncQueue::push, event);
    }

    /// As [`Self::raise`], unless such an event of this queue pair is unread: for events of which
    /// another process can cause any number.
    pub(super) fn raise_once(&self, event: ibv_event_type) {
        self.raise_by(AsyncQueue::push_once, event);
    }

    fn raise_by(
        &self,
        push: impl FnOnce(&AsyncQueue, ibv_event_type, Element) -> bool,
        event: ibv_event_type,
    ) {
        if !self.raises_events.load(Ordering::Relaxed) {
            return;
        }
        self.events.fetch_add(1, Ordering::Relaxed);
        let events = &self.context().events;
        if !push(events, event, Element::Qp(self.as_ptr())) {
            self.events.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// No event of a new queue pair was raised yet.
    pub(super) fn begin_events(&self) {
        self.events.store(0, Ordering::Relaxed);
        self.raises_events.store(true, Ordering::Relaxed);
    }

    /// Completes the transition after a peer moved the shared state to ERR.
    pub(crate) fn notice_failure(&self) {
        if self.state() == DESTROYED || self.notice_target() {
            return;
        }
        let shared = StateWord(
            self.map()
                .u64(self.at() + layout::STATE)
                .load(Ordering::Acquire),
        );
        let ours = StateWord(self.word.load(Ordering::Relaxed));
        if shared.state() == IBV_QPS_ERR
            && ours.state() != IBV_QPS_ERR
            && shared.incarnation() == ours.incarnation()
        {
            let event = match shared.fault() {
                Fault::Access => IBV_EVENT_QP_ACCESS_ERR,
                Fault::Request => IBV_EVENT_QP_REQ_ERR,
                Fault::Fatal | Fault::Asked => IBV_EVENT_QP_FATAL,
            };
            self.fail_asynchronously(ours.incarnation(), event);
        }
        self.notice_holder();
    }

    /// Fails the queue pair if one of its completion queues was overrun.
    pub(crate) fn notice_overrun(&self) {
        if self.state() == DESTROYED {
            return;
        }
        let (cqs, incarnation) = {
            let sq = self.sq.lock();
            let rq = self.rq.lock();
            ([sq.cq, rq.cq], rq.incarnation)
        };
        let overrun = cqs
            .iter()
            // SAFETY: NULL, or a completion queue, whose memory is never freed.
            .any(|cq| unsafe { cq.as_ref() }.is_some_and(crate::cq::Cq::is_overrun));
        if overrun {
            self.fail_asynchronously(incarnation, IBV_EVENT_QP_FATAL);
        }
    }

    /// Handles the end of the other end's process: the first waiting request completes as
    /// unanswered.
    pub(crate) fn peer_died(&self, peer: &Arc<Peer>) {
        if self.state() == DESTROYED {
            return;
        }
        self.initiator_died(peer);
        let mut sq = self.sq.lock();
        if sq.route.is_some() {
            self.route_lost(&mut sq, peer);
            return;
        }
        let mut rq = self.rq.lock();
        let is_it =
            |known: &Option<Arc<Peer>>| known.as_ref().is_some_and(|p| Arc::ptr_eq(p, peer));
        if !is_it(&sq.peer) && !is_it(&rq.peer) {
            return;
        }
        if is_it(&sq.peer) {
            if sq.pending.live() {
                // The peer may have ended while it held one, which only this call takes back.
                self.take_all_back(&mut sq);
            }
            sq.peer = None;
            sq.conn = None;
        }
        if is_it(&rq.peer) {
            rq.peer = None;
        }
        // An unreliable queue pair is not notified, and its messages are lost. If the other end was
        // destroyed or reset before its process ended, only requests detect it; they wait as long
        // as on a wire.
        if sq.kind != IBV_QPT_RC || self.other_end_was_reset(peer, sq.dest) {
            if rq.peer.is_none() {
                // Another process may already have the slot.
                self.adopt_sender(&mut rq);
            }
            return;
        }
        let live = matches!(
            self.state(),
            IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE
        );
        if live {
            self.fail_locked(&mut sq, &mut rq, IBV_WC_RETRY_EXC_ERR);
            self.raise(IBV_EVENT_QP_FATAL);
        }
    }

    /// Empties both queues and removes their completions. A new incarnation begins.
    pub(super) fn reset(&self) {
        let mut sq = self.sq.lock();
        let mut rq = self.rq.lock();
        self.give_claim_back(&mut sq);
        self.forget_pending(&mut sq);
        let number = self.number();
        self.process()
            .with_windows(|windows, owner| windows.release(owner, number));
        if rq.flow != Flow::Closed {
            self.publish_taken(&rq);
        }
        let old = StateWord(self.word.load(Ordering::Relaxed));
        let word = StateWord::new(IBV_QPS_RESET, 0, 0, old.incarnation().wrapping_add(1));
        let (map, at) = (self.map(), self.at());
        map.u64(at + layout::STATE).store(word.0, Ordering::Release);
        self.word.store(word.0, Ordering::Relaxed);
        self.set_state(IBV_QPS_RESET);
        map.u64(at + layout::CREDIT).store(
            Credit {
                posted: 0,
                least: u32::MAX,
            }
            .to_word(),
            Ordering::Release,
        );
        sq.head = 0;
        sq.executed = 0;
        sq.signaled = 0;
        sq.claimed = 0;
        sq.sent = 0;
        sq.pending.rewind();
        sq.credit = Credit {
            posted: 0,
            least: 0,
        };
        sq.pushed = false;
        sq.begun = false;
        sq.may_have_changed = false;
        sq.agent_request = None;
        sq.lossy = false;
        sq.copies = Copies::default();
        self.end_wait(&mut sq);
        sq.drain = Drain::default();
        sq.peer = None;
        sq.conn = None;
        if let Some(route) = &mut sq.route {
            route.forget();
            self.lacks_holder.store(false, Ordering::Relaxed);
        }
        sq.dest = 0;
        rq.head = 0;
        rq.next = 0;
        rq.least = u32::MAX;
        self.close_receive_ring(&rq);
        let (slot, dest) = (sender_slot(&rq), rq.dest);
        let sender = rq.peer.take();
        rq.dest = 0;
        rq.incarnation = word.incarnation();
        rq.flow = Flow::Open;
        rq.flush_round = 0;
        rq.flush_deadline = 0;
        rq.received = 0;
        #[cfg(test)]
        meanwhile::run(meanwhile::At::Purge);
        for cq in [sq.cq, rq.cq] {
            // SAFETY: NULL, or a completion queue, whose memory is never freed.
            if let Some(cq) = unsafe { cq.as_ref() } {
                cq.purge(self.number());
            }
        }
        // Behind the removal: until then, a thread that polls can take a completion of the queue
        // pair and store its count.
        self.send_done.store(0, Ordering::Relaxed);
        self.recv_done.store(0, Ordering::Relaxed);
        let waits = map.u32(at + layout::WAITING).swap(0, Ordering::SeqCst) != 0;
        fence(Ordering::SeqCst);
        let waits_for_ring = self.receive_ring_is_awaited();
        if (waits || waits_for_ring)
            && let Some(sender) = sender.or_else(|| self.process().open_now_or_later(slot?))
        {
            if waits {
                sender.ring_process();
            }
            if waits_for_ring {
                sender.notify_cq_of(dest);
            }
        }
    }

    /// Waits until no sender writes into receives or the receive ring of the previous incarnation.
    /// Only after [`Self::reset`].
    ///
    /// # Errors
    /// `EBUSY`: a sender still writes after the timeout. The call can be repeated.
    pub(super) fn await_writers(&self) -> Res<()> {
        let process = self.process();
        let lives = |visitor| process.lives(visitor);
        await_receive(&process.segment, self.index, lives)?;
        self.reopen_receive_ring()
    }

    /// Waits until no initiator accesses memory through the queue pair, or the target of this
    /// handle, by a request that needs one
    /// of `rights`, which it does not grant any more. The caller holds no lock.
    ///
    /// # Errors
    /// `EBUSY`: an initiator still does after the timeout. The call can be repeated.
    pub(super) fn await_accesses(&self, rights: u32) -> Res<()> {
        if !self.awaits_accesses.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.state() == TARGET {
            let words = self.target_words();
            return words.map_or(Ok(()), |words| words.await_accesses(rights));
        }
        let process = self.process();
        let lives = |visitor| process.lives(visitor);
        await_accesses(&process.segment, self.index, rights, lives)
    }

    /// Whether another process still accesses memory through the queue pair or the target of this
    /// handle, or writes into its receives or its receive ring. It is in RESET. Does not wait.
    pub(super) fn is_in_use(&self) -> bool {
        if self.state() == TARGET {
            let words = self.target_words();
            return words.is_some_and(|words| words.has_accesses(RIGHTS));
        }
        let process = self.process();
        let lives = |visitor| process.lives(visitor);
        queue_pair_in_use(&process.segment, self.index, lives) || self.is_receive_ring_in_use()
    }

    /// Sets whether the calls that end rights wait for accesses of initiators.
    pub(crate) fn set_access_wait(&self, waits: bool) {
        self.awaits_accesses.store(waits, Ordering::Relaxed);
    }

    pub(super) fn set_state(&self, state: u32) {
        self.state.store(state, Ordering::Relaxed);
        // SAFETY: the object is live; `ibv_qp.state` is a hint that C code reads without a lock.
        unsafe { (*self.as_ptr()).state = state };
    }
}

/// What another thread does at a moment of a reset or of a failure, for tests.
#[cfg(test)]
pub(crate) mod meanwhile {
    use std::cell::Cell;

    /// The moment, in the thread that resets the queue pair or fails it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum At {
        /// A reset, before it removes completions. Both queues are locked.
        Purge,
        /// It has found a reason to fail the queue pair, and has no lock of it.
        Fail,
        /// A flush of the receives, before it takes the last messages. It has no lock.
        Drain,
    }

    type Action = Box<dyn FnOnce()>;

    thread_local!(static NEXT: Cell<Option<(At, Action)>> = const { Cell::new(None) });

    /// Runs `action` once, when this thread is there next.
    pub(crate) fn once(at: At, action: impl FnOnce() + 'static) {
        NEXT.set(Some((at, Box::new(action))));
    }

    /// Whether the action has not run yet.
    pub(crate) fn is_left() -> bool {
        let next = NEXT.take();
        let left = next.is_some();
        NEXT.set(next);
        left
    }

    pub(super) fn run(at: At) {
        match NEXT.take() {
            Some((there, action)) if there == at => action(),
            other => NEXT.set(other),
        }
    }
}
