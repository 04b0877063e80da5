//! Actions towards peers that have failed for a passing reason, see [`crate::repeat`].

use super::Process;
use crate::segment::layout::MAX_PROCESSES;

impl Process {
    /// Repeats the actions whose time has come. The caller holds no lock.
    #[inline]
    pub(super) fn repeat_failed(&self) {
        if self.repeats.begin_round() {
            self.repeat_all();
            self.repeats.end_round();
        }
    }

    #[cold]
    fn repeat_all(&self) {
        let mut unrung = [0_u64; MAX_PROCESSES / 64];
        for (&slot, peer) in self.peers().iter() {
            if peer.has_unrung()
                && let Some(word) = unrung.get_mut(slot as usize / 64)
            {
                *word |= 1 << (slot % 64);
            }
        }
        for slot in bits(unrung) {
            if let Some(peer) = self.mapped_peer(slot) {
                peer.ring_again();
            }
        }
        self.grant_rings();
    }
}

/// The numbers of the bits that are set.
fn bits<const N: usize>(words: [u64; N]) -> impl Iterator<Item = u32> {
    (0..).zip(words).flat_map(|(at, word)| {
        (0..64)
            .filter(move |bit| word >> bit & 1 == 1)
            .map(move |bit| 64 * at + bit)
    })
}
