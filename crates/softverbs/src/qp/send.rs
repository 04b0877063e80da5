//! Executing send requests: the general path. A request that waits continues in the steps by which
//! it was begun.

use rdma_core_sys::*;

use super::agent_request::What;
use super::push::Unpushed;
use super::remote_qp::{Connection, Unreachable};
use super::request::{Request, accesses, completion_opcode};
use super::waiting::{Reason, Step, no_receive};
use super::{Qp, SendQueue};
use crate::NOT_EXECUTED;
use crate::cq::{Cqe, Retires};
use crate::hazard::MOST_AT_ONCE;
use crate::key::Key;
use crate::peer::{Peer, Push};
use crate::region::{self, AccessError, Direction, Flush, Target};
use crate::ring::{Header, MAX_PAYLOAD, flag, op};
use crate::segment::layout::{Fault, qp_access};
use crate::sync::{barriers_work, light_fence};

impl Qp {
    /// Counts a request as executed and completes it. If the request failed, moves the queue pair
    /// to ERR (reliable) or SQE (unreliable).
    #[inline]
    pub(super) fn finish(
        &self,
        sq: &mut SendQueue,
        wr_id: u64,
        opcode: u32,
        flags: u32,
        len: u64,
        status: ibv_wc_status,
    ) {
        sq.executed = sq.executed.wrapping_add(1);
        sq.may_have_changed = false;
        if status != IBV_WC_SUCCESS {
            self.complete_send(sq, wr_id, opcode, status, 0);
            if Self::is_reliable(sq.kind) {
                self.fail(sq, IBV_WC_WR_FLUSH_ERR);
            } else {
                self.fail_sends(sq);
            }
        } else {
            sq.begun = false;
            if sq.signal_all || flags & IBV_SEND_SIGNALED != 0 {
                self.complete_send(sq, wr_id, opcode, status, len as u32);
            }
        }
    }

    /// Counts a request of the present post as posted and executed, and completes it, as
    /// [`Self::finish`].
    #[inline(always)]
    pub(super) fn finish_posted(
        &self,
        sq: &mut SendQueue,
        wr: &ibv_send_wr,
        len: u64,
        status: ibv_wc_status,
    ) {
        sq.head = sq.head.wrapping_add(1);
        self.finish(sq, wr.wr_id, wr.opcode, wr.send_flags, len, status);
    }

    /// Makes a completion of the request that ended at `executed`.
    #[inline]
    pub(super) fn complete_send(
        &self,
        sq: &mut SendQueue,
        wr_id: u64,
        opcode: u32,
        status: ibv_wc_status,
        byte_len: u32,
    ) {
        sq.signaled = sq.executed;
        let begun = std::mem::take(&mut sq.begun);
        let untouched = status != IBV_WC_SUCCESS && !begun && accesses(opcode);
        let cqe = Cqe {
            wr_id,
            qp_num: self.number(),
            byte_len,
            opcode: completion_opcode(opcode),
            status,
            vendor_err: if untouched { NOT_EXECUTED } else { 0 },
            done: sq.executed,
            retires: Retires::Send,
            ..Cqe::default()
        };
        // SAFETY: a queue pair in use holds a reference to its completion queues.
        unsafe { &*sq.cq }.push(cqe, false);
    }

    #[inline]
    pub(super) fn run(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        if sq.kind == IBV_QPT_UD {
            return self.run_datagram(sq, request);
        }
        if matches!(request.opcode, IBV_WR_BIND_MW | IBV_WR_LOCAL_INV) {
            return self.run_window(sq, request);
        }
        let reached = if sq.kind == IBV_QPT_XRC_SEND {
            self.reach_shared(sq, request.operands.qpn)
        } else {
            self.reach(sq)
        };
        match reached {
            Ok(()) => {}
            // An unreliable sender is not notified of a lost message.
            Err(_) if sq.kind == IBV_QPT_UC => return Step::Done(IBV_WC_SUCCESS),
            Err(Unreachable::Yet) => return Step::Wait(Reason::Connection),
            Err(Unreachable::Gone) => return Step::Done(IBV_WC_RETRY_EXC_ERR),
            Err(Unreachable::Invalid) => {
                self.refuse_route(sq);
                return Step::Done(IBV_WC_REM_INV_REQ_ERR);
            }
        }
        let step = match request.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => self.run_message(sq, request),
            IBV_WR_SEND_WITH_INV => self.run_send_inv(sq, request),
            IBV_WR_RDMA_WRITE => self.run_access(sq, request, Direction::Write),
            IBV_WR_RDMA_READ => self.run_access(sq, request, Direction::Read),
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_WRITE => {
                self.run_atomic(sq, request)
            }
            IBV_WR_FLUSH => self.run_flush(sq, request),
            SOFTDV_WR_ATOMIC => self.run_elements(sq, request),
            _ => self.run_write_imm(sq, request),
        };
        match step {
            Step::Done(status) if unanswered(sq, status) => Step::Wait(Reason::Connection),
            Step::Done(IBV_WC_SUCCESS) => {
                sq.counts.add(request.opcode);
                step
            }
            step => step,
        }
    }

    /// The other end refuses a request: moves it to ERR. It can have been reset before, and then
    /// the caller of the request repeats it.
    #[cold]
    pub(super) fn refused(&self, sq: &SendQueue, fault: Fault, status: ibv_wc_status) -> Step {
        // The other end's process can reset the queue pair as soon as it is moved.
        if self.fail_other_end(sq, fault) {
            Step::Refused(status)
        } else {
            Step::Done(status)
        }
    }

    /// As [`Self::refused`], for a key, range or right.
    #[cold]
    pub(super) fn refused_access(&self, sq: &SendQueue) -> Step {
        self.refused(sq, Fault::Access, IBV_WC_REM_ACCESS_ERR)
    }

    /// RDMA READ or WRITE.
    fn run_access(&self, sq: &mut SendQueue, request: &Request<'_>, way: Direction) -> Step {
        match self.copy_request(sq, request, way) {
            Ok(()) => Step::Done(IBV_WC_SUCCESS),
            Err(step) => step,
        }
    }

    /// The copy of a READ or WRITE: executed by this thread, without the other end.
    ///
    /// # Errors
    /// The step of a request whose bytes were not all copied. That of an unreliable connection can
    /// have success.
    fn copy_request(
        &self,
        sq: &mut SendQueue,
        request: &Request<'_>,
        way: Direction,
    ) -> Result<(), Step> {
        let Some(conn) = &sq.conn else {
            return Err(Step::Wait(Reason::Connection));
        };
        let right = way.right();
        let process = self.process();
        let target = Target {
            key: Key(request.operands.rkey),
            addr: request.operands.remote_addr,
            pd: conn.pd,
            qp: sq.dest,
        };
        let mut result = if conn.word.access() & right == 0 {
            Err(AccessError::Remote)
        } else if sq.agent_request.is_some() {
            Err(AccessError::Refused)
        } else {
            let through = (target, conn.gate());
            region::copy(&conn.peer, process.slot, through, request.iovecs, way)
        };
        if result == Err(AccessError::Moved) {
            sq.begun |= request.len > MOST_AT_ONCE as u64;
            return Err(self.moved(sq));
        }
        // the kernel can begin to refuse behind the first part of a longer request
        sq.begun |= result != Err(AccessError::Refused) || request.len > MOST_AT_ONCE as u64;
        if result == Err(AccessError::Refused) {
            let what = match way {
                Direction::Write => What::Write(target.key, target.addr),
                Direction::Read => What::Read(target.key, target.addr),
            };
            match self.by_agent(sq, what, request.iovecs, request.len) {
                Some(done) => {
                    sq.begun = true;
                    result = done.map(drop);
                }
                None => {
                    sq.begun |= sq.agent_request.is_some();
                    return Err(Step::Wait(sq.agent_wait()));
                }
            }
        }
        result.map_err(|error| match error {
            // lost: an unreliable sender is not notified
            AccessError::Remote | AccessError::Dead if sq.kind == IBV_QPT_UC => {
                Step::Done(IBV_WC_SUCCESS)
            }
            AccessError::Remote => self.refused_access(sq),
            AccessError::Local => Step::Done(IBV_WC_LOC_PROT_ERR),
            AccessError::Dead => Step::Done(IBV_WC_RETRY_EXC_ERR),
            // refused; a copy takes no lock, and was not moved
            _ => Step::Done(IBV_WC_LOC_QP_OP_ERR),
        })
    }

    /// A flush. It covers the earlier requests of this connection, because requests are executed in
    /// order.
    #[cold]
    fn run_flush(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        let Some(conn) = &sq.conn else {
            return Step::Wait(Reason::Connection);
        };
        let operands = &request.operands;
        let (placement, level) = (operands.swap as u32, (operands.swap >> 32) as u32);
        let flush = Flush {
            placement,
            len: (level == IBV_FLUSH_RANGE).then_some(operands.compare_add),
        };
        let target = Target {
            key: Key(operands.rkey),
            addr: operands.remote_addr,
            pd: conn.pd,
            qp: sq.dest,
        };
        let right = flush.right().map(qp_access);
        let allowed = right.is_some_and(|right| conn.word.access() & right == right);
        let result = if allowed && level <= IBV_FLUSH_MR {
            region::flush(&conn.peer, self.process().slot, target, flush)
        } else {
            Err(AccessError::Remote)
        };
        Step::Done(match result {
            Ok(()) => IBV_WC_SUCCESS,
            Err(AccessError::Remote) => return self.refused_access(sq),
            Err(AccessError::Dead) => IBV_WC_RETRY_EXC_ERR,
            Err(AccessError::Unavailable) => return Step::Wait(Reason::Resource),
            Err(_) => IBV_WC_LOC_QP_OP_ERR,
        })
    }

    /// Claims the receive that the next message consumes, if none is claimed. Returns the step of
    /// the request if it gets no receive now.
    #[inline(always)]
    fn claim_receive(&self, sq: &mut SendQueue) -> Option<Step> {
        let Some(conn) = &sq.conn else {
            return Some(Step::Wait(Reason::Connection));
        };
        if sq.claimed == sq.credit.posted {
            if conn.srq.is_some() {
                if let Some(step) = self.claim_shared(sq) {
                    return Some(step);
                }
            } else {
                sq.credit = conn.credit();
                if sq.claimed == sq.credit.posted {
                    return Some(no_receive(sq));
                }
            }
            sq.lossy = false;
        }
        None
    }

    fn run_write_imm(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        // first: the data must not be written if no receive can take the immediate
        if let Some(step) = self.claim_receive(sq) {
            return step;
        }
        if !sq.pushed {
            if let Err(step) = self.copy_request(sq, request, Direction::Write) {
                // not published: the receive stays for the next message
                return step;
            }
            sq.pushed = true;
        }
        let mut header = self.header(sq, request);
        header.op = op::WRITE_IMM;
        header.flags |= flag::PUSHED;
        self.publish_message(sq, request, header)
    }

    #[inline]
    fn header(&self, sq: &SendQueue, request: &Request<'_>) -> Header {
        let srq = sq.conn.as_ref().and_then(|conn| conn.srq.as_ref());
        let (flags, msn) = match (srq, sq.claim) {
            (Some(srq), Some(index)) => (flag::SHARED, srq.number << 16 | index),
            _ => (0, sq.claimed),
        };
        Header {
            op: match request.opcode {
                IBV_WR_SEND_WITH_IMM => op::SEND_IMM,
                IBV_WR_SEND_WITH_INV => op::SEND_INV,
                _ => op::SEND,
            },
            flags,
            dst_qpn: sq.dest,
            incarnation: sq.conn.as_ref().map_or(0, |conn| conn.word.incarnation()),
            len: request.len as u32,
            imm: request.imm,
            msn,
            src_qpn: self.number(),
            life: sq.conn.as_ref().map_or(0, |conn| conn.delivery.life()),
        }
    }

    #[inline]
    pub(super) fn run_message(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        if let Some(step) = self.claim_receive(sq) {
            return step;
        }
        let Some(conn) = &sq.conn else {
            return Step::Wait(Reason::Connection);
        };
        let mut header = self.header(sq, request);
        if request.len > u64::from(sq.credit.least) {
            let error = match conn.receive_len(sq.claim.unwrap_or(sq.claimed)) {
                None => Some((op::UNWRITABLE, IBV_WC_REM_OP_ERR)),
                Some(room) if u64::from(room) < request.len => {
                    Some((op::TOO_LONG, IBV_WC_REM_INV_REQ_ERR))
                }
                Some(_) => None,
            };
            if let Some((op, status)) = error {
                if op == op::TOO_LONG && sq.kind == IBV_QPT_UC {
                    // Class D of 9.9.3: dropped, and the receive stays for the next one.
                    return Step::Done(IBV_WC_SUCCESS);
                }
                header.op = op;
                return self.refuse(sq, request, header, status);
            }
        }
        if request.len > MAX_PAYLOAD as u64 {
            match self.push_payload(sq, request) {
                Ok(()) => header.flags |= flag::PUSHED,
                // The other end's new state decides the result of the request.
                Err(Unpushed::Moved) if Self::is_reliable(sq.kind) => {
                    return Step::Wait(Reason::Connection);
                }
                Err(Unpushed::Moved) => return Step::Done(IBV_WC_SUCCESS),
                Err(Unpushed::Asked) => return Step::Wait(sq.agent_wait()),
                Err(Unpushed::Access(error)) => match error {
                    AccessError::Remote => {
                        header.op = op::UNWRITABLE;
                        return self.refuse(sq, request, header, IBV_WC_REM_OP_ERR);
                    }
                    AccessError::Dead if sq.kind == IBV_QPT_UC => {
                        return Step::Done(IBV_WC_SUCCESS);
                    }
                    AccessError::Local => return Step::Done(IBV_WC_LOC_PROT_ERR),
                    AccessError::Dead => return Step::Done(IBV_WC_RETRY_EXC_ERR),
                    AccessError::Refused | AccessError::Unavailable | AccessError::Moved => {
                        return Step::Done(IBV_WC_LOC_QP_OP_ERR);
                    }
                },
            }
        }
        self.publish_message(sq, request, header)
    }

    /// Claims a receive of the other end's shared receive queue, unless one is already claimed.
    /// Returns the step to take if none can be claimed. The caller checks the receive's length for
    /// each message.
    ///
    /// Nothing is claimed before the ring to the owner exists. The owner that makes the ring has
    /// opened this process, so it notices the end of this process; and it has already posted again
    /// the receives that an ended process of this slot had claimed. A process without barriers does
    /// not wait for a shared receive before the ring exists either: the owner uses full fences for
    /// posts to a shared queue once it has made a ring for such a process.
    fn claim_shared(&self, sq: &mut SendQueue) -> Option<Step> {
        let process = self.process();
        if sq.claim.is_none()
            && let Some(conn) = &mut sq.conn
            && let Some(srq) = &conn.srq
            && (conn.has_message_ring || !barriers_work() || srq.available(&conn.peer.map))
        {
            if !conn.has_message_ring {
                match conn.peer.has_ring(process.signature()) {
                    Ok(true) => conn.has_message_ring = true,
                    Ok(false) => return Some(Step::Wait(Reason::Room)),
                    Err(_) => return Some(Step::Done(unopened(&conn.peer))),
                }
            }
            let claim = srq.claim(&conn.peer.map, process.slot);
            if let Some(claim) = &claim
                && !conn.still_delivers()
            {
                self.return_late_claim(sq.dest, conn, claim);
                return Some(Step::Wait(Reason::Connection));
            }
            let passed = claim.is_some_and(|claim| {
                srq.passes_limit(&conn.peer.map, claim.position, conn.peer.barriers)
            });
            sq.claim = claim.map(|claim| claim.index);
            if passed {
                self.report_limit(&conn.peer);
            }
        }
        sq.claim.is_none().then(|| no_receive(sq))
    }

    /// Publishes a message that reports to the other end's owner that its receive could not take
    /// the payload, and fails the request.
    #[cold]
    fn refuse(
        &self,
        sq: &mut SendQueue,
        request: &Request<'_>,
        header: Header,
        status: ibv_wc_status,
    ) -> Step {
        match self.publish_message(sq, request, header) {
            Step::Done(IBV_WC_SUCCESS) if Self::is_reliable(sq.kind) => {
                if sq.route.is_some() {
                    // A target has no owning process that would move it to ERR, so the initiator
                    // does.
                    return self.refused(sq, Fault::Request, status);
                }
                Step::Done(status)
            }
            other => other,
        }
    }

    /// Writes a message to the ring, and rings the other end's doorbell if it sleeps.
    #[inline]
    fn publish_message(
        &self,
        sq: &mut SendQueue,
        request: &Request<'_>,
        mut header: Header,
    ) -> Step {
        let Some(conn) = &sq.conn else {
            return Step::Wait(Reason::Connection);
        };
        let solicited = request.flags & IBV_SEND_SOLICITED != 0;
        if solicited {
            header.flags |= flag::SOLICITED;
        }
        let pushed = conn.peer.push(self.process().signature(), &header, |to| {
            // SAFETY: the ring reserved room for the message.
            unsafe { request.gather(to) };
        });
        match pushed {
            Push::Sent => {
                let status = outcome(conn, sq.kind, sq.next_number());
                // A receive that completes with an error also counts as solicited.
                let fails = matches!(header.op, op::TOO_LONG | op::UNWRITABLE);
                conn.peer.notify_cq(conn.recv_cq, solicited || fails);
                if sq.claim.take().is_none() {
                    sq.claimed = sq.claimed.wrapping_add(1);
                } else {
                    sq.sent = sq.sent.wrapping_add(1);
                }
                sq.pushed = false;
                sq.lossy = false;
                Step::Done(status)
            }
            Push::Full if sq.kind == IBV_QPT_UC && sq.lossy => {
                sq.pushed = false;
                Step::Done(IBV_WC_SUCCESS)
            }
            Push::Full | Push::Unmade => Step::Wait(Reason::Room),
            Push::NoMemory => Step::Done(unopened(&conn.peer)),
        }
    }
}

/// Status of the message with this number, which was just published. An owner that fails its queue
/// pair first publishes the state, then executes a heavy fence, and then delivers the messages in
/// the ring. So a sender that reads the old state after its light fence can rely on the delivery.
#[inline(always)]
pub(super) fn outcome(conn: &Connection, kind: u32, number: u32) -> ibv_wc_status {
    light_fence(conn.peer.barriers);
    if conn.current() && conn.still_delivers() {
        IBV_WC_SUCCESS
    } else {
        outcome_after_change(conn, kind, number)
    }
}

/// As on a wire, it is not known whether a message without an acknowledgement was delivered.
#[cold]
fn outcome_after_change(conn: &Connection, kind: u32, number: u32) -> ibv_wc_status {
    let taken = |count: u32| number.wrapping_sub(count).cast_signed() < 0;
    if !Qp::is_reliable(kind) || conn.lives_on() || conn.taken().is_some_and(taken) {
        IBV_WC_SUCCESS
    } else {
        IBV_WC_RETRY_EXC_ERR
    }
}

/// Whether a request failed because the other end was destroyed or reset while the request was
/// executed. On a wire no answer comes then, and the sender retransmits until its retries are
/// exhausted. So the request waits as long here, and the completions of acknowledged messages come
/// first. An atomic that an agent may have executed does not wait, as it is not executed again.
#[inline]
pub(super) fn unanswered(sq: &SendQueue, status: ibv_wc_status) -> bool {
    status != IBV_WC_SUCCESS && unanswered_slowly(sq, status)
}

#[cold]
fn unanswered_slowly(sq: &SendQueue, status: ibv_wc_status) -> bool {
    let by_other_end = matches!(
        status,
        IBV_WC_RETRY_EXC_ERR | IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR | IBV_WC_REM_INV_REQ_ERR
    );
    by_other_end
        && !sq.may_have_changed
        && Qp::is_reliable(sq.kind)
        && sq.conn.as_ref().is_some_and(Connection::was_reset)
}

/// The status of a request whose ring can't be opened. The ring of a peer that is ending can't be
/// opened either.
#[cold]
fn unopened(peer: &Peer) -> ibv_wc_status {
    if peer.has_ended() {
        IBV_WC_RETRY_EXC_ERR
    } else {
        IBV_WC_LOC_QP_OP_ERR
    }
}
