//! Fast path of a shared receive queue, as [`crate::qp`]'s own: receives of one sge, usually with
//! the lkey of the previous receive and consumed in the order in which they were posted. If a
//! receive does not qualify, these functions return without a change of state, and the caller uses
//! the general path.

use rdma_core_sys::ibv_recv_wr;

use super::{Posted, Queue, Srq, State};
use crate::delivery::store_descriptor;

impl Srq {
    /// Posts a receive. Returns false, with no state changed, if the fast path does not apply. The
    /// caller wakes senders afterwards.
    ///
    /// # Safety
    /// `wr` must be a valid receive.
    #[inline(always)]
    pub(super) unsafe fn post_fast(&self, queue: &mut Queue, wr: &ibv_recv_wr) -> bool {
        if wr.num_sge != 1 || queue.order.is_full() {
            return false;
        }
        let Some(&index) = queue.free.last() else {
            return false;
        };
        // SAFETY: the caller promises a valid receive, and `num_sge` is 1.
        let sge = unsafe { &*wr.sg_list };
        let process = self.process();
        let last_region = &mut queue.last_region;
        let Some(addr) = process.regions.receive_again(last_region, sge, queue.pd) else {
            return false;
        };
        let at = index as usize;
        let (Some(posted), Some(kept)) = (
            queue.posted.get_mut(at),
            queue.sges.get_mut(at * queue.max_sge as usize),
        ) else {
            return false;
        };
        queue.free.pop();
        *kept = *sge;
        *posted = Posted {
            wr_id: wr.wr_id,
            total: sge.length,
            num_sge: 1,
            room: sge.length,
            state: State::Posted,
        };
        let shared = queue.desc_at + queue.desc_stride * at;
        let map = &process.segment.map;
        store_descriptor(map, shared, sge, addr);
        queue.order.append(map, index, sge.length);
        true
    }

    /// Consumes the receive with this descriptor for a message of `len` bytes from the process in
    /// `slot`, and returns its `wr_id`. `copy` gets the receive's address and copies the payload.
    /// Returns `None`, with no state changed, if the fast path does not apply.
    ///
    /// The word of the next receive in the order is not read, because its cache line is at the
    /// claimant's processor: a message for this receive, in this life of the queue, implies the
    /// claim. A forged message can consume only a receive that its sender was free to claim, and
    /// corrupts this SRQ no worse than overwriting its shared words would.
    #[inline(always)]
    pub(crate) fn fill_fast(
        &self,
        index: u32,
        slot: u32,
        len: usize,
        copy: impl FnOnce(u64),
    ) -> Option<u64> {
        let process = self.process();
        let mut queue = self.queue.lock();
        let queue = &mut *queue;
        let posted = queue.posted.get_mut(index as usize)?;
        let next = match posted.state {
            // Near the limit, the general path follows the order and checks the limit.
            State::Posted => queue.order.left() > queue.limit && queue.order.next() == Some(index),
            State::Claimed(claimant) if claimant == slot => false,
            _ => return None,
        };
        let there = next || posted.state != State::Posted;
        if !there || posted.num_sge != 1 || len > posted.total as usize {
            return None;
        }
        let sge = queue.sges.get(index as usize * queue.max_sge as usize)?;
        if len > 0 {
            // The region may have been deregistered since the receive was posted.
            let last_region = &mut queue.last_region;
            copy(
                process
                    .regions
                    .local_again(last_region, sge, queue.pd, true)?,
            );
        }
        if next {
            queue.order.skip();
        }
        posted.state = State::Free;
        queue.free.push(index);
        Some(posted.wr_id)
    }
}
