//! The way of most receives of a shared queue, as [`crate::qp`]'s own quick way: of one piece, whose key is that of the last one,
//! taken by a message in the order in which they were posted. What is not plain is left to the general way untouched.

use std::sync::atomic::Ordering;

use rdma_core_sys::ibv_recv_wr;

use super::{Posted, Queue, Srq, State};
use crate::segment::layout::desc;

impl Srq {
    /// Posts a receive, or does nothing and says so. The caller wakes senders.
    ///
    /// # Safety
    /// `wr` must be a valid receive.
    #[inline(always)]
    pub(super) unsafe fn post_quickly(&self, queue: &mut Queue, wr: &ibv_recv_wr) -> bool {
        if wr.num_sge != 1 || queue.order.is_full() {
            return false;
        }
        let Some(&index) = queue.free.last() else {
            return false;
        };
        // SAFETY: the caller promises a valid list of one.
        let sge = unsafe { &*wr.sg_list };
        let process = self.process();
        let seen = &mut queue.seen;
        let Some(addr) = process.regions.local_again(seen, sge, queue.pd, true) else {
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
            pieces: 1,
            room: sge.length,
            state: State::Posted,
        };
        const LEN: usize = (desc::FIRST + desc::PIECE) / 4;
        let shared = queue.desc_at + queue.desc_stride * at;
        let map = &process.segment.map;
        let words = map.u32s::<LEN>(shared);
        words[desc::TOTAL / 4].store(sge.length, Ordering::Relaxed);
        words[desc::PIECES / 4].store(1, Ordering::Relaxed);
        words[(desc::FIRST + 8) / 4].store(sge.length, Ordering::Relaxed);
        words[(desc::FIRST + desc::LKEY) / 4].store(sge.lkey, Ordering::Relaxed);
        map.u64(shared + desc::FIRST).store(addr, Ordering::Relaxed);
        queue.order.append(map, index, sge.length);
        true
    }

    /// Has `copy` put `len` bytes of a message from the process in `slot` into the receive with this descriptor, which is used up
    /// then; its `wr_id`. `None`, and nothing is done, where that is not plain.
    ///
    /// The next receive in the order needs no look at its word, which its claimant's processor has: a message for it, of this life of
    /// the queue, says that it was claimed. Who sends one without having claimed it takes what it could have claimed, and spoils the queue as who writes
    /// over its words.
    #[inline(always)]
    pub(crate) fn fill_quickly(
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
            // A limit is looked at when the order is followed.
            State::Posted => queue.limit == 0 && queue.order.next() == Some(index),
            State::Claimed(claimant) if claimant == slot => false,
            _ => return None,
        };
        let there = next || posted.state != State::Posted;
        if !there || posted.pieces != 1 || len > posted.total as usize {
            return None;
        }
        let sge = queue.sges.get(index as usize * queue.max_sge as usize)?;
        if len > 0 {
            // The region may have gone since the receive was posted.
            let seen = &mut queue.seen;
            copy(process.regions.local_again(seen, sge, queue.pd, true)?);
        }
        if next {
            queue.order.skip();
        }
        posted.state = State::Free;
        queue.free.push(index);
        Some(posted.wr_id)
    }
}
