//! Requests that can't be executed yet: the condition that they wait for, the deadline, and the
//! retries.

use std::time::Duration;

use rdma_core_sys::*;

use super::agent_request::answer_wait_ns;
use super::remote_qp::{Connection, rnr_delay_ns};
use super::request::{IovecList, Request, fetches};
use super::{Qp, SendQueue};
use crate::agent::Link;
use crate::limits::{MAX_DATAGRAM, PEER_WAIT_NS};
use crate::peer::Peer;
use crate::region;
use crate::sync::heavy_fence;
use crate::sys;

/// Result of trying to execute a request.
pub(super) enum Step {
    Done(ibv_wc_status),
    /// The other end has refused the request, and was moved to ERR. The status is final, whatever
    /// the other end does then.
    Refused(ibv_wc_status),
    Wait(Reason),
}

/// Result of trying to execute the waiting requests of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Went {
    /// No request waits.
    Through,
    /// The first request waits.
    Waits,
    /// The first request can be executed, but other waiting queue pairs of the process have their
    /// turn first.
    Yields,
}

/// The condition that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The other end has no receive posted.
    Receive,
    /// The other end is not connected yet.
    Connection,
    /// There is no room in the ring.
    Room,
    /// A peer still uses the key that the request invalidates.
    Hazard,
    /// There is no ring for a datagram.
    Ring,
    /// The other end's agent executes the request.
    Agent,
    /// A resource whose release wakes no process: the lock of an atomic's word, which another
    /// process holds, possibly a stopped one; memory of the kernel for a request to the agent;
    /// memory or a descriptor for the line to it or for a file to flush; a place in the agent's
    /// queue of connections.
    Resource,
}

/// The wait of the first request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    reason: Reason,
    /// In nanoseconds of the monotonic clock; 0 for no deadline.
    deadline: u64,
    left: u8,
}

impl Wait {
    /// No retries are allowed.
    pub(super) fn is_over(&self) -> bool {
        self.deadline == u64::MAX
    }
}

impl SendQueue {
    /// What the first request waits for while [`Qp::by_agent`] has no result.
    #[cold]
    pub(super) fn agent_wait(&self) -> Reason {
        match self.agent_lacks_memory() {
            true => Reason::Resource,
            false => Reason::Agent,
        }
    }
}

impl Qp {
    /// The first request waits for a place at an agent. While the agent answers other requests, the
    /// time limit of an answer begins again.
    #[cold]
    pub(super) fn wait_for_place(&self, sq: &mut SendQueue, link: &Link) {
        let longest = answer_wait_ns(sq.kind);
        let wait = sq.wait.as_mut();
        let Some(wait) = wait.filter(|wait| wait.reason == Reason::Agent && longest != 0) else {
            return;
        };
        // Answers may have arrived that no thread has read.
        if sys::now_ns() >= wait.deadline && link.look() {
            self.process().wake_up();
        }
        wait.deadline = wait.deadline.max(link.answered() + longest);
    }

    /// Records that the first request can't be executed now. Returns true if this call has newly
    /// asked the other end to ring: then the caller must check the condition once more after a
    /// heavy fence.
    #[cold]
    pub(super) fn note_wait(&self, sq: &mut SendQueue, reason: Reason) -> bool {
        if reason != Reason::Agent {
            // For example the other end was reset. The queue pairs behind this one do not wait for
            // its next connection.
            self.leave_agent_queue(sq);
        }
        let fresh = match (&mut sq.conn, reason) {
            (Some(conn), Reason::Receive) => conn.ask_to_ring(self.number()),
            (_, Reason::Connection) => self.ask_for_state(sq),
            _ => false,
        };
        if let Some(wait) = sq.wait.as_mut().filter(|wait| wait.reason == reason) {
            if reason == Reason::Room && sq.kind == IBV_QPT_UD {
                // The queue pair may have the turn by now, with an earlier deadline.
                let now = sys::now_ns();
                let until = room_until(sq.peer.as_deref(), self.number(), now, false);
                wait.deadline = wait.deadline.min(until.unwrap_or(now));
            }
            return fresh;
        }
        let now = sys::now_ns();
        let (deadline, left) = match reason {
            Reason::Room if sq.kind == IBV_QPT_UD => {
                let until = room_until(sq.peer.as_deref(), self.number(), now, false);
                (until.unwrap_or(now), 0)
            }
            Reason::Receive | Reason::Room if !Self::is_reliable(sq.kind) => (now + LOSS_NS, 0),
            Reason::Receive if sq.rnr_retry == 7 => (0, 0),
            Reason::Receive if sq.rnr_retry == 0 => (u64::MAX, 0),
            Reason::Receive => (now + self.rnr_ns(sq), sq.rnr_retry - 1),
            Reason::Connection if sq.timeout == 0 => (0, 0),
            Reason::Connection => {
                let once = 4096u64 << sq.timeout.min(31);
                (now + once * (u64::from(sq.retry_cnt) + 1), 0)
            }
            Reason::Ring => (now + RING_NS, (PEER_WAIT_NS / RING_NS) as u8 - 1),
            Reason::Room => (0, 0),
            Reason::Agent => match answer_wait_ns(sq.kind) {
                0 => (0, 0),
                longest => (now + longest, 0),
            },
            Reason::Hazard => (now + HAZARD_DELAY_NS, HAZARD_ROUNDS),
            Reason::Resource => (now + RESOURCE_DELAY_NS, 0),
        };
        sq.wait = Some(Wait {
            reason,
            deadline,
            left,
        });
        fresh
    }

    fn rnr_ns(&self, sq: &SendQueue) -> u64 {
        sq.conn
            .as_ref()
            .map_or(0, |conn| rnr_delay_ns(conn.rnr_timer()))
    }

    /// Executes waiting requests until one must wait. If a turn at a full ring ended, wakes the
    /// sleeping threads, as other queue pairs may wait for the end of the turn.
    pub(crate) fn run_waiting(&self) {
        let process = self.process();
        let turns = process.turns();
        while self.have_turn() == Went::Yields {}
        if process.turns() != turns {
            process.wake_up();
        }
    }

    /// Executes waiting requests until one must wait; of datagrams at most one turn.
    pub(crate) fn have_turn(&self) -> Went {
        let mut sq = self.sq.lock();
        let sq = &mut *sq;
        let turns = self.process().turns();
        let mut left = if sq.kind == IBV_QPT_UD {
            TURN
        } else {
            u32::MAX
        };
        let mut again = 0;
        while self.may_execute(sq) {
            self.sq.let_pass();
            if left == 0 || left < TURN && self.process().turns() != turns {
                self.process().note_turn();
                return Went::Yields;
            }
            if sq.pending.live() {
                let mut over = None;
                if self.pending_untouched(sq) && !receive_there(sq) {
                    over = self.expired(sq);
                    if over.is_none() {
                        return Went::Waits;
                    }
                }
                match (self.take_back(sq), over) {
                    // The receiver is copying the message, and rings when it has finished.
                    (None, _) => return Went::Waits,
                    (Some(0), Some(status)) => self.finish_first(sq, status),
                    (Some(_), _) => {}
                }
                continue;
            }
            let reason = match self.run_first(sq) {
                Step::Done(status) | Step::Refused(status) => {
                    self.finish_first(sq, status);
                    if sq.kind == IBV_QPT_UD {
                        left -= 1;
                    }
                    continue;
                }
                Step::Wait(reason) => reason,
            };
            let fresh = self.note_wait(sq, reason);
            if let Some(status) = self.expired(sq) {
                self.finish_first(sq, status);
                continue;
            }
            let pending = reason == Reason::Receive && self.publish_pending(sq);
            // Either this sender sees a receive that was posted meanwhile, or the receiver sees the
            // request to ring or the pending messages.
            if fresh {
                heavy_fence();
            } else if pending {
                std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            } else {
                return Went::Waits;
            }
            // Another process may write these words all the time. Then the next progress checks.
            again += 1;
            if again > CHECKS {
                self.process().wake_up();
                return Went::Waits;
            }
        }
        if sq.executed == sq.head
            && let Some(conn) = &sq.conn
        {
            conn.stop_asking(self.number());
        }
        self.note_drained(sq);
        Went::Through
    }

    /// Ends the wait of the first request. If it had the turn at a full ring, the turn passes to
    /// other queue pairs. A datagram keeps the turn while it waits for another reason than room.
    pub(super) fn end_wait(&self, sq: &mut SendQueue) {
        self.leave_agent_queue(sq);
        if sq.wait.take().is_some()
            && sq.kind == IBV_QPT_UD
            && let Some(peer) = &sq.peer
            && peer.leave_turn(self.number())
        {
            self.process().note_turn();
            self.process().wake_up();
        }
    }

    /// Copies the payload of a datagram that will wait in `slot`. A device reads the buffer
    /// microseconds after the post. UCX relies on this: it reuses the buffer of its connection
    /// request when the peer's own request arrives, and does not wait for the completion.
    ///
    /// Without memory, or with a key that the request fails for later, the buffer is read when the
    /// datagram is sent.
    #[cold]
    pub(super) fn copy_payload(&self, sq: &mut SendQueue, slot: usize, sges: &[ibv_sge], len: u64) {
        sq.copies.free(slot);
        if len > MAX_DATAGRAM {
            return;
        }
        let mut list = IovecList::new();
        for sge in sges {
            match self.process().regions.local(sge, sq.pd, false) {
                Some(addr) => list.push(addr, sge.length as usize),
                None => return,
            }
        }
        let count = sq.stored.len();
        // SAFETY: the ranges are the application's registered buffers, which the device may read
        // until the request completes (`ibv_post_send(3)`). Their lengths add up to `len`.
        let _ = unsafe { sq.copies.put(slot, count, list.as_slice(), len as usize) };
    }

    /// Tries to execute the first waiting request.
    fn run_first(&self, sq: &mut SendQueue) -> Step {
        let slot = sq.executed as usize & (sq.stored.len() - 1);
        let stored = sq.stored[slot];
        let mut list = IovecList::new();
        let mut readable = true;
        let mut len = 0;
        if stored.flags & IBV_SEND_INLINE != 0 {
            let at = slot * sq.max_inline as usize;
            let bytes = &sq.inline[at..at + stored.inline_len as usize];
            len = bytes.len() as u64;
            list.push(bytes.as_ptr() as u64, bytes.len());
        } else if let Some(copy) = sq.copies.get(slot) {
            len = copy.len() as u64;
            list.push(copy.as_ptr() as u64, copy.len());
        } else {
            let first = slot * sq.max_sge as usize;
            for sge in &sq.sges[first..first + stored.num_sge as usize] {
                // The region may have been deregistered in the meantime.
                let write = fetches(stored.opcode);
                match self.process().regions.local(sge, sq.pd, write) {
                    Some(addr) => list.push(addr, sge.length as usize),
                    None => readable = false,
                }
                len += u64::from(sge.length);
            }
        }
        if !readable {
            return Step::Done(IBV_WC_LOC_PROT_ERR);
        }
        let request = Request {
            opcode: stored.opcode,
            flags: stored.flags,
            imm: stored.imm,
            operands: stored.operands,
            iovecs: list.as_slice(),
            len,
        };
        self.run(sq, &request)
    }

    /// Completes the first waiting request with `status`.
    pub(super) fn finish_first(&self, sq: &mut SendQueue, status: ibv_wc_status) {
        let slot = sq.executed as usize & (sq.stored.len() - 1);
        let stored = sq.stored[slot];
        let len = stored_len(sq, slot);
        self.end_wait(sq);
        // If its payload was already in a receive and the request failed, that does not apply to
        // the next request.
        sq.pushed = false;
        sq.copies.free(slot);
        self.finish(sq, stored.wr_id, stored.opcode, stored.flags, len, status);
        Self::leave_unwatched(sq);
    }

    /// The status of the first request if its deadline has passed; extends the deadline if retries
    /// are left.
    fn expired(&self, sq: &mut SendQueue) -> Option<ibv_wc_status> {
        let delay = match sq.wait.as_ref()?.reason {
            Reason::Hazard => HAZARD_DELAY_NS,
            _ => self.rnr_ns(sq),
        };
        let wait = sq.wait.as_mut()?;
        let lost = !Self::is_reliable(sq.kind) && wait.reason != Reason::Hazard;
        if wait.is_over() {
            return Some(give_up(wait.reason));
        }
        if wait.deadline == 0 {
            return None;
        }
        let now = sys::now_ns();
        if now < wait.deadline {
            return None;
        }
        if wait.reason == Reason::Resource {
            wait.left = (wait.left + 1).min(RESOURCE_DOUBLINGS);
            wait.deadline = now + (RESOURCE_DELAY_NS << wait.left);
            return None;
        }
        if wait.reason == Reason::Ring {
            // The request itself checks this when it is tried.
            return None;
        }
        if lost && sq.kind == IBV_QPT_UD {
            return match room_until(sq.peer.as_deref(), self.number(), now, true) {
                Some(until) => {
                    wait.deadline = until;
                    None
                }
                None => Some(IBV_WC_SUCCESS),
            };
        }
        if lost {
            sq.lossy = true;
            return Some(IBV_WC_SUCCESS);
        }
        if wait.left == 0 {
            return Some(give_up(wait.reason));
        }
        wait.left -= 1;
        wait.deadline = now + delay;
        None
    }

    /// The other end's queue pair has left the state in which it was read, before the access began:
    /// the request is executed again from its beginning.
    #[cold]
    pub(super) fn moved(&self, sq: &SendQueue) -> Step {
        if let Some((domain, at)) = sq.route.as_ref().and_then(|route| route.target()) {
            // or no word of the target was free
            domain.tidy_accesses(self.process(), *at);
        }
        Step::Wait(Reason::Connection)
    }

    /// Whether the deadline of the first request's wait for a ring has passed.
    pub(super) fn waited_for_ring(&self, sq: &SendQueue) -> bool {
        sq.wait
            .is_some_and(|wait| wait.reason == Reason::Ring && sys::now_ns() >= wait.deadline)
    }

    /// Prolongs the first request's wait for a ring by [`RING_NS`]; false after [`PEER_WAIT_NS`].
    pub(super) fn waits_on_for_ring(&self, sq: &mut SendQueue) -> bool {
        let Some(wait) = sq.wait.as_mut().filter(|wait| wait.left > 0) else {
            return false;
        };
        wait.left -= 1;
        wait.deadline = sys::now_ns() + RING_NS;
        true
    }

    /// Whether requests wait.
    pub(crate) fn waits(&self) -> bool {
        self.may_execute(&self.sq.lock())
    }

    /// Whether this is an XRC initiator with requests that wait.
    pub(crate) fn is_waiting_initiator(&self) -> bool {
        let sq = self.sq.lock();
        sq.route.is_some() && self.may_execute(&sq)
    }

    /// Deadline of the first request, if it has one.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let sq = self.sq.lock();
        let deadline = sq.wait.as_ref()?.deadline;
        (deadline != 0 && self.may_execute(&sq)).then_some(deadline)
    }

    /// The status of a request whose queue pair allows no retries.
    pub(super) fn give_up_at_once(sq: &mut SendQueue) -> Option<ibv_wc_status> {
        let wait = sq.wait.filter(Wait::is_over)?;
        sq.wait = None;
        Some(give_up(wait.reason))
    }
}

/// Length in bytes of the request in this slot.
pub(super) fn stored_len(sq: &SendQueue, slot: usize) -> u64 {
    let stored = &sq.stored[slot];
    if stored.flags & IBV_SEND_INLINE != 0 {
        return u64::from(stored.inline_len);
    }
    let first = slot * sq.max_sge as usize;
    sq.sges[first..first + stored.num_sge as usize]
        .iter()
        .map(|sge| u64::from(sge.length))
        .sum()
}

/// Whether a request that waits for a receive should be tried: a receive is available, or the other
/// end's state has changed.
fn receive_there(sq: &SendQueue) -> bool {
    let good = |conn: &&Connection| conn.current() && conn.still_delivers();
    let Some(conn) = sq.conn.as_ref().filter(good) else {
        return true;
    };
    match &conn.srq {
        Some(srq) => srq.available(&conn.peer.map),
        None => conn.credit().posted != sq.claimed,
    }
}

/// Number of checks of the first request's condition in one call after which the call returns.
const CHECKS: u32 = 64;

/// Number of datagrams that a queue pair sends before other queue pairs have their turn.
const TURN: u32 = 16;

/// Interval at which a waiting datagram checks whether its receiver is stopped, in nanoseconds. A
/// datagram to a stopped receiver is lost.
const LOOK_NS: u64 = 100_000_000;

/// Time at which a datagram that waits for room at this peer checks again; `None` if the datagram
/// is lost.
fn room_until(peer: Option<&Peer>, qpn: u32, now: u64, looks: bool) -> Option<u64> {
    // Without a peer the request itself detects the missing process.
    let until = peer.map_or(Some(u64::MAX), |peer| peer.waits_for_room(qpn, now, looks))?;
    Some(until.min(now + LOOK_NS))
}

/// Time that a message of an unreliable connection waits for a receive or for room, in nanoseconds.
/// On a wire it would be lost at once; here the receiver may only not have been scheduled.
const LOSS_NS: u64 = 100_000_000;

/// Time that the first datagram waits for a receiver that has not made a ring yet, in nanoseconds.
/// On a wire a posted receive would take the datagram without any progress of the receiver.
const RING_NS: u64 = 1_000_000_000;

/// No receive is available for the message. An unreliable connection that has lost a message for
/// this reason loses the following messages without waiting, until a receive is available.
#[cold]
pub(super) fn no_receive(sq: &SendQueue) -> Step {
    if sq.lossy {
        Step::Done(IBV_WC_SUCCESS)
    } else {
        Step::Wait(Reason::Receive)
    }
}

/// Interval in nanoseconds at which a request checks whether a key is still in use, and the number
/// of checks: 5 s in total.
const HAZARD_DELAY_NS: u64 = 20_000_000;
const HAZARD_ROUNDS: u8 = 250;

/// Interval in nanoseconds at which a request tries again while no thread polls, and the number of
/// times that the interval is doubled: up to 64 ms. The request waits for a [`Reason::Resource`].
/// The holder of a lock is in one or two system calls, or is stopped.
const RESOURCE_DELAY_NS: u64 = 1_000_000;
const RESOURCE_DOUBLINGS: u8 = 6;

/// How long the first request waits in the call for the locks of an atomic.
pub(super) fn lock_wait(sq: &SendQueue) -> Duration {
    match sq.wait {
        Some(wait) if wait.reason == Reason::Resource => Duration::ZERO,
        _ => region::REQUEST_LOCK_WAIT,
    }
}

fn give_up(reason: Reason) -> ibv_wc_status {
    match reason {
        Reason::Receive => IBV_WC_RNR_RETRY_EXC_ERR,
        Reason::Connection | Reason::Room | Reason::Ring | Reason::Agent | Reason::Resource => {
            IBV_WC_RETRY_EXC_ERR
        }
        Reason::Hazard => IBV_WC_LOC_QP_OP_ERR,
    }
}
