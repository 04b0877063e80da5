//! The sender's view of the other end's queue pair.

use std::sync::atomic::Ordering;

use rdma_core_sys::{IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET};

use super::request::IovecList;
use super::{Qp, SendQueue, entry_at};
use crate::delivery::receives;
use crate::hazard::{Accessor, Gate, OwnHazard, Through, Use};
use crate::key::Key;
use crate::limits::MAX_SGE;
use crate::peer::Peer;
use crate::segment::Mapping;
use crate::segment::layout::{
    Credit, MAX_QPS, SEGMENT_SIZE, StateWord, arena, desc, fits, qp as layout, region,
    split_qp_num, xrc,
};
use crate::signal;
use crate::srq::Shared;
use crate::sync::Arc;

/// The other end at the time when its state word was read: copied once from shared memory and
/// checked.
#[derive(Debug)]
pub(super) struct Connection {
    /// The owner of the memory and of the receives.
    pub(super) peer: Arc<Peer>,
    /// For accesses to the owner's memory.
    pub(super) hazard: OwnHazard,
    /// What the hazards of accesses name.
    through: Through,
    /// The mapping with the state word: the peer's segment, or an XRC target's domain.
    state: Arc<Mapping>,
    /// Index of the queue pair, and offset of its entry in `state`.
    pub(super) index: u32,
    pub(super) at: usize,
    pub(super) word: StateWord,
    pub(super) pd: u32,
    pub(super) recv_cq: u32,
    /// The shared receive queue of the other end, if it uses one.
    pub(super) srq: Option<Shared>,
    /// The message ring to the process ([`crate::ring`]) existed when it was last checked.
    pub(super) has_message_ring: bool,
    /// The shared receive queue of an XRC request.
    pub(super) delivery: Delivery,
    desc_at: usize,
    desc_mask: u32,
    desc_stride: usize,
    /// Turn in which the owner of the shared queue was last asked to ring.
    turn: u32,
}

/// The shared receive queue that an XRC request names, and the stamp that shows that it is still
/// the same one. All 0 for other connections.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delivery {
    pub(super) number: u32,
    pub(super) stamp_at: usize,
    pub(super) stamp: u32,
    /// The process of this end.
    pub(super) initiator: Accessor,
}

impl Delivery {
    /// The part of the stamp that messages carry, so that a late message is not delivered to the
    /// queue's next incarnation.
    #[inline]
    pub(super) fn life(&self) -> u8 {
        self.stamp as u8
    }
}

/// Reason why the other end can't be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreachable {
    /// It is not ready yet, and may become ready.
    Yet,
    /// It will never be ready again.
    Gone,
    /// The shared receive queue that the request names can't be reached through it.
    Invalid,
}

/// Destination of a payload: ranges of the owner's memory, and the lkeys with which they were
/// posted.
pub(super) struct Receive {
    pub(super) iovecs: IovecList,
    pub(super) keys: [u32; MAX_SGE as usize],
}

impl Connection {
    #[expect(clippy::too_many_arguments, reason = "all of it was read at once")]
    pub(super) fn through_target(
        (peer, own_slot): (Arc<Peer>, u32),
        state: Arc<Mapping>,
        at: usize,
        word: StateWord,
        srq: Shared,
        pd: u32,
        recv_cq: u32,
        delivery: Delivery,
    ) -> Self {
        Self {
            hazard: OwnHazard::new(&peer.hazards, own_slot),
            through: Through::TARGET,
            peer,
            state,
            index: 0,
            at,
            word,
            pd,
            recv_cq,
            desc_at: srq.desc_at,
            desc_mask: srq.desc_mask(),
            desc_stride: srq.desc_stride,
            turn: 0,
            srq: Some(srq),
            has_message_ring: false,
            delivery,
        }
    }

    /// Whether the state word is that of an XRC target.
    #[inline(always)]
    fn is_through_target(&self) -> bool {
        self.delivery.stamp_at != 0
    }

    /// Whether the connection leads to the shared receive queue with this number.
    #[inline]
    pub(super) fn leads_to(&self, number: u32) -> bool {
        self.delivery.number == number
    }

    /// Whether the shared receive queue that an XRC request names is still the same one; true for
    /// other connections.
    #[inline(always)]
    pub(super) fn still_delivers(&self) -> bool {
        let Delivery {
            stamp_at, stamp, ..
        } = self.delivery;
        stamp_at == 0 || self.peer.map.u32(stamp_at).load(Ordering::Acquire) == stamp
    }

    /// The stamp that the shared receive queue of an XRC request has now; 0 while there is none.
    #[cold]
    pub(super) fn present_stamp(&self) -> u32 {
        let map = &self.peer.map;
        map.u32(self.delivery.stamp_at).load(Ordering::Acquire)
    }

    /// The resource that a hazard names while the receive is written.
    pub(super) fn used_receive(&self, key: Key) -> Use {
        match &self.srq {
            Some(srq) if self.is_through_target() => Use::of_shared_receive(srq.number, key),
            _ => Use::of_receive(self.index, key),
        }
    }

    /// Whether an access that needs these rights may be executed now, on an idle queue pair, if
    /// [`Self::gate`] is open behind its hazard. `queue`: the shared receive queue that a request
    /// on an XRC queue pair names; otherwise 0.
    #[inline(always)]
    pub(super) fn may_access(&self, queue: u32, rights: u32) -> bool {
        self.word.access() & rights == rights
            && !self.peer.is_given_up()
            && self.leads_to(queue)
            && self.still_delivers()
    }

    /// For accesses through the other end's queue pair.
    #[inline(always)]
    pub(super) fn gate(&self) -> Gate<'_> {
        let state = self.state.u64(self.at + layout::STATE);
        let gate = Gate::new(state, self.word, self.through);
        if self.is_through_target() {
            gate.of_target(&self.state, self.at + xrc::USED, self.delivery.initiator)
        } else {
            gate
        }
    }

    /// Whether the state word has not changed since it was read.
    #[inline(always)]
    pub(super) fn current(&self) -> bool {
        let word = self.state.u64(self.at + layout::STATE);
        word.load(Ordering::Acquire) == self.word.0 && !self.peer.is_given_up()
    }

    /// Whether the other end is still the connected one and takes messages, possibly in another
    /// state.
    #[cold]
    pub(super) fn lives_on(&self) -> bool {
        let word = self.state.u64(self.at + layout::STATE);
        let word = StateWord(word.load(Ordering::Acquire));
        word.incarnation() == self.word.incarnation()
            && word.dest() == self.word.dest()
            && receives(word.state())
            && !self.peer.is_given_up()
            && self.still_delivers()
    }

    /// Whether the other end was destroyed or reset, also if its process has ended since.
    #[cold]
    pub(super) fn was_reset(&self) -> bool {
        let word = self.state.u64(self.at + layout::STATE);
        let word = StateWord(word.load(Ordering::Acquire));
        word.state() == IBV_QPS_RESET
            || word.dest() != self.word.dest()
            || word.incarnation() != self.word.incarnation()
    }

    /// Number of messages that the other end took, if it takes no more and has published the
    /// number.
    #[cold]
    pub(super) fn taken(&self) -> Option<u32> {
        // An XRC target takes no messages itself, and the owner of the shared queue counts messages
        // of other senders too.
        if self.is_through_target() {
            return None;
        }
        let word = self.peer.map.u64(self.at + layout::TAKEN);
        let word = word.load(Ordering::Acquire);
        ((word >> 32) as u32 == self.word.incarnation()).then_some(word as u32)
    }

    #[inline]
    pub(super) fn credit(&self) -> Credit {
        Credit::from_word(
            self.peer
                .map
                .u64(self.at + layout::CREDIT)
                .load(Ordering::Acquire),
        )
    }

    /// Asks the owner to ring when it posts a receive or changes the state. Returns true if it was
    /// not asked before: the caller must then execute a heavy fence and check once more.
    pub(super) fn ask_to_ring(&mut self, own: u32) -> bool {
        let fresh = signal::ask_as_one(&self.state, self.at + layout::WAITING, own);
        // The owner of a shared queue rings the processes that wait, and searches for the queue
        // pairs that do.
        let (own_slot, _) = split_qp_num(own);
        let shared = self
            .srq
            .as_ref()
            .is_some_and(|srq| srq.ask_to_ring(&self.peer.map, own_slot, &mut self.turn));
        fresh || shared
    }

    /// Withdraws the request to ring of the queue pair `own`. If the other end is not connected to
    /// `own` any more, the word may belong to another queue pair and is left.
    pub(super) fn stop_asking(&self, own: u32) {
        let word = self.state.u64(self.at + layout::STATE);
        let word = StateWord(word.load(Ordering::Acquire));
        if word.dest() == own && word.incarnation() == self.word.incarnation() {
            signal::stop_asking(&self.state, self.at + layout::WAITING, own);
        }
    }

    pub(super) fn rnr_timer(&self) -> u32 {
        let timer = if self.is_through_target() {
            self.state.u32(self.at + xrc::RNR_TIMER)
        } else {
            self.peer.map.u32(self.at + layout::RNR_TIMER)
        };
        timer.load(Ordering::Relaxed)
    }

    /// Length of the receive with this number, or `None` if it can't be written.
    pub(super) fn receive_len(&self, number: u32) -> Option<u32> {
        let at = self.descriptor(number);
        let map = &self.peer.map;
        let num_sge = map.u32(at + desc::NUM_SGE).load(Ordering::Relaxed);
        (num_sge != desc::POISONED).then(|| map.u32(at + desc::TOTAL).load(Ordering::Relaxed))
    }

    /// The sges for the first `len` bytes of the receive with this number, copied once from shared
    /// memory.
    pub(super) fn receive(&self, number: u32, len: usize) -> Receive {
        let at = self.descriptor(number);
        let map = &self.peer.map;
        let most = ((self.desc_stride - desc::FIRST) / desc::SGE_STRIDE).min(MAX_SGE as usize);
        let count = map.u32(at + desc::NUM_SGE).load(Ordering::Relaxed) as usize;
        let mut left = len;
        let mut list = IovecList::new();
        let mut keys = [0; MAX_SGE as usize];
        let mut used = 0;
        for i in 0..count.min(most) {
            let sge_at = at + desc::FIRST + desc::SGE_STRIDE * i;
            let addr = map.u64(sge_at).load(Ordering::Relaxed);
            let room = map.u32(sge_at + 8).load(Ordering::Relaxed) as usize;
            let take = room.min(left);
            if take > 0 {
                keys[used] = map.u32(sge_at + desc::LKEY).load(Ordering::Relaxed);
                used += 1;
                list.push(addr, take);
                left -= take;
            }
        }
        Receive { iovecs: list, keys }
    }

    /// Whether the receive with this number may still be written through the sge with this key. The
    /// caller has published a hazard.
    pub(super) fn still_named(&self, number: u32, key: u32) -> bool {
        let map = &self.peer.map;
        let entry = region::AT + region::STRIDE * Key(key).index();
        // When a region changes, its owner first poisons the receives, and then makes the key valid
        // again.
        let valid = key != 0 && map.u32(entry + region::KEY).load(Ordering::Acquire) == key;
        let num_sge = map.u32(self.descriptor(number) + desc::NUM_SGE);
        valid && num_sge.load(Ordering::Relaxed) != desc::POISONED
    }

    #[inline]
    fn descriptor(&self, number: u32) -> usize {
        self.desc_at + self.desc_stride * (number & self.desc_mask) as usize
    }
}

impl Qp {
    /// Makes `sq.conn` the current connection, if the other end takes messages from this one now.
    #[inline]
    pub(super) fn reach(&self, sq: &mut SendQueue) -> Result<(), Unreachable> {
        if sq.conn.as_ref().is_some_and(Connection::current) {
            return Ok(());
        }
        self.reach_slowly(sq)
    }

    #[cold]
    fn reach_slowly(&self, sq: &mut SendQueue) -> Result<(), Unreachable> {
        let (slot, index) = split_qp_num(sq.dest);
        if sq.peer.is_none() {
            // A thread that opens the process later lets the request try again.
            sq.peer = self.process().open_now_or_later(slot);
        }
        let Some(peer) = sq.peer.clone() else {
            return Err(Unreachable::Yet);
        };
        if !peer.check_alive() {
            // If the other end was destroyed or reset before its process ended, the request waits
            // as on a wire. Otherwise the request fails and the queue pair goes to ERR.
            return Err(if self.other_end_was_reset(&peer, sq.dest) {
                Unreachable::Yet
            } else {
                Unreachable::Gone
            });
        }
        if sq.dest_node.is_some_and(|node| node != peer.node) {
            return Err(Unreachable::Yet);
        }
        let known = sq.conn.as_ref().map(|conn| conn.word.incarnation());
        let conn = read((&peer, self.process().slot), index, self.number())?;
        if known != Some(conn.word.incarnation()) {
            if sq.may_have_changed {
                return Err(Unreachable::Gone);
            }
            self.give_claim_back(sq);
            // Payload that was copied went to a receive of another incarnation.
            sq.pushed = false;
            sq.claimed = 0;
            sq.sent = 0;
            sq.credit = Credit {
                posted: 0,
                least: 0,
            };
        }
        if conn.word.has_ended_keys() {
            sq.credit.least = 0;
        }
        sq.conn = Some(conn);
        Ok(())
    }

    /// Whether the other end was destroyed or reset, also if its process has ended since.
    pub(super) fn other_end_was_reset(&self, peer: &Peer, dest: u32) -> bool {
        let (_, index) = split_qp_num(dest);
        let theirs = peer.map.u64(entry_at(index) + layout::STATE);
        let theirs = StateWord(theirs.load(Ordering::Acquire));
        theirs.state() == IBV_QPS_RESET || theirs.dest() != self.number()
    }

    /// Asks the other end's owner, if there is one, to ring when its queue pair's state changes.
    /// Returns as [`Connection::ask_to_ring`].
    pub(super) fn ask_for_state(&self, sq: &SendQueue) -> bool {
        if sq.route.is_some() {
            return self.ask_target(sq);
        }
        let Some(peer) = &sq.peer else { return false };
        let (_, index) = split_qp_num(sq.dest);
        signal::ask(&peer.map, entry_at(index) + layout::WAITING, self.number())
    }
}

fn read(
    (peer, own_slot): (&Arc<Peer>, u32),
    index: u32,
    own: u32,
) -> Result<Connection, Unreachable> {
    let at = entry_at(index);
    let map = &peer.map;
    let word = StateWord(map.u64(at + layout::STATE).load(Ordering::Acquire));
    match word.state() {
        state if receives(state) && word.dest() == own => {}
        IBV_QPS_ERR if word.dest() == own => return Err(Unreachable::Gone),
        // Not connected yet, or currently connected to another queue pair.
        IBV_QPS_RESET | IBV_QPS_INIT => return Err(Unreachable::Yet),
        _ => return Err(Unreachable::Yet),
    }
    let desc_at = map.u64(at + layout::DESC_AT).load(Ordering::Relaxed) as usize;
    let count = map.u32(at + layout::DESC_COUNT).load(Ordering::Relaxed);
    let desc_stride = map.u32(at + layout::DESC_STRIDE).load(Ordering::Relaxed) as usize;
    let inside = count.is_power_of_two()
        && desc_stride >= desc::stride(1)
        && desc_stride.is_multiple_of(32)
        && desc_stride <= 4096
        && desc_at.is_multiple_of(32)
        && fits(arena::AT..SEGMENT_SIZE, desc_at, count, desc_stride);
    if !inside {
        return Err(Unreachable::Gone);
    }
    let shared = map.u32(at + layout::SRQ).load(Ordering::Relaxed);
    let srq = if shared == 0 {
        None
    } else {
        Some(Shared::read(map, shared - 1).ok_or(Unreachable::Gone)?)
    };
    let (desc_at, desc_mask, desc_stride) = match &srq {
        Some(srq) => (srq.desc_at, srq.desc_mask(), srq.desc_stride),
        None => (desc_at, count - 1, desc_stride),
    };
    Ok(Connection {
        peer: Arc::clone(peer),
        hazard: OwnHazard::new(&peer.hazards, own_slot),
        through: Through::queue_pair(index),
        state: Arc::clone(map),
        has_message_ring: false,
        delivery: Delivery::default(),
        index: index % MAX_QPS as u32,
        at,
        word,
        pd: map.u32(at + layout::PD).load(Ordering::Relaxed),
        recv_cq: map.u32(at + layout::RECV_CQ).load(Ordering::Relaxed),
        srq,
        desc_at,
        desc_mask,
        desc_stride,
        turn: 0,
    })
}

/// Nanoseconds of a `min_rnr_timer` value (9.7.5.2.8, table 45).
pub(super) fn rnr_delay_ns(timer: u32) -> u64 {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    u64::from(HUNDREDTHS_OF_MS[timer as usize % 32]) * 10_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_timers() {
        assert_eq!(rnr_delay_ns(0), 655_360_000);
        assert_eq!(rnr_delay_ns(1), 10_000);
        assert_eq!(rnr_delay_ns(12), 640_000);
        assert_eq!(rnr_delay_ns(31), 491_520_000);
    }
}
