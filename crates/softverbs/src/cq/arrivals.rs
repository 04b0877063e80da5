//! The receive rings of the queue pairs that receive through a completion queue.

use std::sync::atomic::Ordering;

use super::{Cq, layout};
use crate::receive_ring::{ARRIVALS_LEN, Arrivals};
use crate::sys::Res;

impl Cq {
    /// Allocates the arrivals of the queue, unless they exist, and publishes their place.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn make_arrivals(&self) -> Res<()> {
        let segment = &self.process().segment;
        // Each thread publishes the place: one that finds the arrivals may publish a ring before
        // the thread that has allocated them runs again.
        let publish = |at: usize| {
            let place = segment.map.u64(self.at() + layout::ARRIVALS_AT);
            place.store(at as u64, Ordering::Release);
        };
        let found = self.arrivals.load(Ordering::Acquire);
        if found != 0 {
            publish(found);
            return Ok(());
        }
        let at = segment.take_ring(ARRIVALS_LEN)?;
        Arrivals::at(&segment.map, at).clear();
        let first = self
            .arrivals
            .compare_exchange(0, at, Ordering::AcqRel, Ordering::Acquire);
        publish(match first {
            Ok(_) => at,
            Err(found) => {
                segment.give_ring(at, ARRIVALS_LEN);
                found
            }
        });
        Ok(())
    }

    /// Whether queue pairs with receive rings complete here, or did.
    pub(super) fn has_arrivals(&self) -> bool {
        self.arrivals.load(Ordering::Relaxed) != 0
    }

    /// Frees the arrivals of a queue without queue pairs: no sender writes into them any more.
    pub(super) fn free_arrivals(&self) {
        let at = self.arrivals.swap(0, Ordering::AcqRel);
        if at != 0 {
            let segment = &self.process().segment;
            segment
                .map
                .u64(self.at() + layout::ARRIVALS_AT)
                .store(0, Ordering::Relaxed);
            segment.give_ring(at, ARRIVALS_LEN);
        }
    }

    /// Calls `take` with the index of each queue pair whose cold ring has got a message since the
    /// last call, until `take` returns false; the rest stays for the next call, which begins with
    /// it.
    #[inline]
    pub(crate) fn drain_arrivals(&self, take: impl FnMut(u32) -> bool) {
        let at = self.arrivals.load(Ordering::Acquire);
        if at == 0 {
            return;
        }
        let first = self.first_arrival.load(Ordering::Relaxed);
        let arrivals = Arrivals::at(&self.process().segment.map, at);
        if let Some(refused) = arrivals.drain(first, take) {
            self.first_arrival.store(refused, Ordering::Relaxed);
        }
    }
}
