//! The receive rings of the queue pairs that receive through a completion queue.

use std::sync::atomic::Ordering;

use super::{Cq, layout};
use crate::receive_ring::{ARRIVALS_LEN, Arrivals};
use crate::sys::Res;

impl Cq {
    /// Allocates the arrivals of the queue, unless they exist.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn make_arrivals(&self) -> Res<()> {
        if self.arrivals.load(Ordering::Acquire) != 0 {
            return Ok(());
        }
        let segment = &self.process().segment;
        let at = segment.take_ring(ARRIVALS_LEN)?;
        Arrivals::at(&segment.map, at).clear();
        let first = self
            .arrivals
            .compare_exchange(0, at, Ordering::AcqRel, Ordering::Acquire);
        if first.is_err() {
            // another thread has allocated them
            segment.give_ring(at, ARRIVALS_LEN);
            return Ok(());
        }
        let entry = layout::AT + layout::STRIDE * self.index as usize;
        segment
            .map
            .u64(entry + layout::ARRIVALS_AT)
            .store(at as u64, Ordering::Release);
        Ok(())
    }

    /// Frees the arrivals of a queue without queue pairs: no sender writes into them any more.
    pub(super) fn free_arrivals(&self) {
        let at = self.arrivals.swap(0, Ordering::AcqRel);
        if at != 0 {
            let segment = &self.process().segment;
            let entry = layout::AT + layout::STRIDE * self.index as usize;
            segment
                .map
                .u64(entry + layout::ARRIVALS_AT)
                .store(0, Ordering::Relaxed);
            segment.give_ring(at, ARRIVALS_LEN);
        }
    }

    /// Calls `take` with the index of each queue pair whose cold ring has got a message since the
    /// last call, until `take` returns false; the rest stays for the next call.
    #[inline]
    pub(crate) fn drain_arrivals(&self, take: impl FnMut(u32) -> bool) {
        let at = self.arrivals.load(Ordering::Acquire);
        if at != 0 {
            Arrivals::at(&self.process().segment.map, at).drain(take);
        }
    }
}
