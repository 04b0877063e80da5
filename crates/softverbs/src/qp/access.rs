//! Fast path of RDMA READ and WRITE: consecutive requests of one opcode through one key are copied
//! by one system call (`docs/softverbs.md`, "Lists of requests"). It has the same effect as the
//! general path ([`super::send`]), to which it leaves every request that is not executed here.

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::copy_list::{List, MAX_REQUESTS, Source, Stop};
use super::{Qp, SendQueue};
use crate::key::Key;
use crate::region::{Direction, Target};

/// Result of executing the first requests of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Executed {
    /// The first request that was not executed; NULL if all were.
    pub(super) rest: *mut ibv_send_wr,
    /// The copy ended before this request, so the general path executes it and finds the error.
    pub(super) stopped: bool,
}

/// The shared receive queue that a request on an XRC queue pair names; 0 on other queue pairs.
///
/// # Safety
/// `wr` must be a valid request.
#[inline(always)]
unsafe fn queue_of(wr: &ibv_send_wr, kind: u32) -> u32 {
    match kind {
        // SAFETY: a request on an XRC queue pair names a queue.
        IBV_QPT_XRC_SEND => unsafe { wr.qp_type.xrc.remote_srqn },
        _ => 0,
    }
}

impl Qp {
    /// Executes the READs, or the WRITEs, with which a chain begins, as far as one system call can
    /// execute them.
    ///
    /// # Safety
    /// `first` must be a valid chain.
    #[inline(always)]
    pub(super) unsafe fn access_fast(
        &self,
        sq: &mut SendQueue,
        first: *mut ibv_send_wr,
    ) -> Executed {
        let none = Executed {
            rest: first,
            stopped: false,
        };
        // SAFETY: the caller promises a valid chain.
        let wr = unsafe { &*first };
        let Some(conn) = &sq.conn else {
            return none;
        };
        let way = match wr.opcode {
            IBV_WR_RDMA_WRITE => Direction::Write,
            _ => Direction::Read,
        };
        let used = sq.head.wrapping_sub(self.send_done.load(Ordering::Acquire));
        let room = sq.max_wr.saturating_sub(used) as usize;
        let idle = matches!(sq.kind, IBV_QPT_RC | IBV_QPT_XRC_SEND)
            && self.state() == IBV_QPS_RTS
            && sq.executed == sq.head;
        // SAFETY: the caller promises a valid chain.
        let (queue, rkey) = unsafe { (queue_of(wr, sq.kind), wr.wr.rdma.rkey) };
        if !idle || !conn.may_access(queue, way.right()) || conn.peer.refuses() {
            return none;
        }
        let process = self.process();
        // A request may read what an earlier one wrote to this process's memory, which the kernel
        // may refuse to copy at once.
        let most = match conn.peer.slot == process.slot {
            true => 1,
            false => MAX_REQUESTS,
        };
        let mut from = Source {
            regions: &process.regions,
            last_region: &mut sq.last_region,
            pd: sq.pd,
            max_sge: sq.max_sge,
            max_inline: sq.max_inline,
        };
        let peer = &conn.peer;
        let mut list = List::new(true);
        let gate = conn.gate();
        let Some(entered) = gate.enter(way.right()) else {
            return none;
        };
        let used = gate.used(Key(rkey), way.right());
        let hazard = conn.hazard.publish(&peer.map, process.slot, used);
        if !gate.is_open() {
            return none;
        }
        let mut next = first;
        // SAFETY: the caller promises a valid chain.
        while let Some(request) = unsafe { next.as_ref() } {
            // SAFETY: the union's members are read by opcode, and all bytes are initialised.
            let (rdma, on) = unsafe { (request.wr.rdma, queue_of(request, sq.kind)) };
            let same = request.opcode == wr.opcode && rdma.rkey == rkey && on == queue;
            if !same || list.len() == room.min(most) {
                break;
            }
            let target = Target {
                key: Key(rkey),
                addr: rdma.remote_addr,
                pd: conn.pd,
                qp: sq.dest,
            };
            // SAFETY: a valid request, with an opcode of this path.
            if !unsafe { list.add(request, &mut from, peer, target, way) } {
                break;
            }
            next = request.next;
        }
        let copied = list.copy(peer, way);
        drop((hazard, entered));
        match copied {
            // SAFETY: the caller promises a valid chain.
            Ok(()) => unsafe { self.complete_list(sq, first, list.ends()) },
            Err(stop) => {
                // SAFETY: as above.
                unsafe { self.complete_stopped(sq, first, &list, &stop) }
            }
        }
    }

    /// Completes as many requests of a chain as `ends` has. Returns the rest of the chain.
    ///
    /// # Safety
    /// `first` must be a valid chain with at least that many requests, which were executed.
    #[inline(always)]
    unsafe fn complete_list(
        &self,
        sq: &mut SendQueue,
        first: *mut ibv_send_wr,
        ends: &[u32],
    ) -> Executed {
        let (mut next, mut begin) = (first, 0);
        for &end in ends {
            // SAFETY: the caller promises a chain that is long enough.
            let wr = unsafe { &*next };
            sq.counts.add(wr.opcode);
            self.finish_posted(sq, wr, u64::from(end - begin), IBV_WC_SUCCESS);
            (next, begin) = (wr.next, end);
        }
        Executed {
            rest: next,
            stopped: false,
        }
    }

    /// As [`Self::complete_list`], for a list of which the kernel has not copied all.
    ///
    /// # Safety
    /// `first` must be a valid chain that begins with the requests of the list.
    #[cold]
    unsafe fn complete_stopped(
        &self,
        sq: &mut SendQueue,
        first: *mut ibv_send_wr,
        list: &List,
        stop: &Stop,
    ) -> Executed {
        let (whole, begun) = list.stopped_at(stop);
        // SAFETY: as this function.
        let executed = unsafe { self.complete_list(sq, first, &list.ends()[..whole]) };
        // the general path repeats the request that the kernel has begun
        sq.begun |= begun;
        Executed {
            stopped: true,
            ..executed
        }
    }
}
