//! The posted receives of packets: their number and its limit.
//!
//! On XRC, and on devices without rings, a packet without a receive waits in its sender's queue.

use super::Executor;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::rdm::packet_memory::Slot;
use crate::verbs::RecvRequest;
use crate::wire::rdm::packet::SLOT_SIZE;

/// Limit of posted receives of a new endpoint (see [`Executor::is_behind`]). On XRC a packet
/// without a receive delays those to other processes, so the limit grows before there is none
/// ([`Executor::receives_low`]).
pub(in crate::rdm) const FEWEST_RECEIVES: usize = 128;

/// The limit is doubled when polls that have not emptied the device queue have taken so many times
/// as many completions. With 1 the peers that connect at once, with five packets each, would double
/// it, and the receives stay posted when the peers are idle.
const BEHIND: usize = 4;

/// Receives for each link after a burst. They stay posted and resident, and take 8.5 KiB of the
/// 16 KiB that an idle connected peer may need.
const IN_BURST: usize = 2;

#[derive(Debug)]
pub(super) struct PacketReceives {
    /// Number of those that are posted.
    posted: usize,
    /// The limit of their number at present. 1,000 idle peers do not need 5,000 receives.
    limit: usize,
    /// The largest limit.
    most: usize,
}

impl PacketReceives {
    /// No receive is posted. Never more than `most` are.
    pub(super) fn new(most: usize) -> Self {
        Self {
            posted: 0,
            limit: FEWEST_RECEIVES.min(most),
            most,
        }
    }

    /// A posted receive has completed. Returns its slot, from the number in its `wr_id`.
    #[inline(always)]
    pub(super) fn completed(&mut self, number: u32) -> Slot {
        self.posted -= 1;
        Slot::of_completed_receive(number)
    }

    /// Doubles the limit.
    fn double(&mut self) {
        self.limit = (self.limit * 2).min(self.most);
    }

    /// A burst has taken three quarters of the receives: raises the limit to [`IN_BURST`] for each
    /// of so many links, and at least twice [`FEWEST_RECEIVES`].
    pub(super) fn raise(&mut self, links: usize) {
        let burst = (IN_BURST * links).max(2 * FEWEST_RECEIVES);
        self.limit = self.limit.max(burst.min(self.most));
    }
}

impl Executor {
    /// A poll has taken so many completions, and the device queue has more. Doubles the limit of
    /// receives when such polls have taken [`BEHIND`] times as many: packets may wait for receives.
    #[cold]
    pub(in crate::rdm) fn is_behind(&mut self, completions: usize) {
        self.backlog += completions;
        if self.backlog >= BEHIND * self.receives.limit {
            self.receives.double();
            self.backlog = 0;
        }
    }

    /// Posts receives until so many are posted, or as many as the limit allows.
    ///
    /// # Errors
    /// `ENOMEM`: no memory for packets.
    #[inline]
    pub(in crate::rdm) fn post_receives(&mut self, wanted: usize) -> Result<()> {
        while self.receives.posted < wanted.min(self.receives.limit) {
            let slot = self.memory.take()?;
            if !self.post_receive(slot) {
                return Err(FiErrno::ENOMEM);
            }
        }
        if wanted > self.receives.limit {
            self.ask_to_arm();
        }
        Ok(())
    }

    /// Posts the receive of a packet.
    #[inline]
    pub(super) fn post_receive(&mut self, slot: Slot) -> bool {
        let sges = [self.memory.sge(&slot, 0, SLOT_SIZE)];
        let request = RecvRequest {
            wr_id: slot.number().into(),
            sges: &sges,
        };
        // SAFETY: the slot lives until the shared receive queue is destroyed, and no other code
        // uses it before the receive has completed.
        let posted = unsafe { self.objects.srq.post_recv(&request) };
        match posted {
            Ok(()) => self.receives.posted += 1,
            Err(error) => {
                warn_log!(EpData, "ibv_post_srq_recv: {error}");
                self.memory.give_back(slot);
            }
        }
        posted.is_ok()
    }

    /// A quarter of the posted receives, if that is not too few to be armed.
    pub(super) fn receives_quarter(&self) -> Option<u32> {
        let quarter = (self.receives.posted / 4) as u32;
        (quarter >= 4).then_some(quarter)
    }

    /// Largest number of posted receives.
    pub(in crate::rdm) fn max_receives(&self) -> usize {
        self.receives.most
    }

    #[cfg(test)]
    pub(in crate::rdm) fn limit_receives(&mut self, limit: usize) {
        (self.receives.limit, self.receives.most) = (limit, limit);
    }

    /// The limit of receives, and its maximum.
    #[cfg(test)]
    pub(in crate::rdm) fn receives_limits(&self) -> (usize, usize) {
        (self.receives.limit, self.receives.most)
    }

    #[cfg(test)]
    pub(in crate::rdm) fn receives_posted(&self) -> usize {
        self.receives.posted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_raises_the_limit_with_the_number_of_links() {
        let mut receives = PacketReceives::new(4096);
        receives.raise(1);
        assert_eq!(receives.limit, 2 * FEWEST_RECEIVES);
        receives.raise(500);
        assert_eq!(receives.limit, 1000);
        receives.raise(500);
        receives.raise(10);
        assert_eq!(receives.limit, 1000);
        receives.raise(1_000_000);
        assert_eq!(receives.limit, 4096);
        assert_eq!(PacketReceives::new(100).limit, 100);
    }
}
