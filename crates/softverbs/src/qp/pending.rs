//! Pending messages: messages that wait for a receive are shown to the other end, which takes them
//! when a receive is posted, without any action of this process. `docs/softverbs.md` has the
//! protocol.
//!
//! One shared word decides ([`super::pending_word`]). The receiver copies the first message and
//! then swaps the word to one message fewer; only this swap delivers the message. The sender
//! withdraws all messages by swapping the word to the next generation.

use rdma_core_sys::{
    IBV_SEND_INLINE, IBV_SEND_SOLICITED, IBV_WC_SUCCESS, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM,
};

use super::pending_word::{self, Offer};
use super::request::IovecList;
use super::waiting::stored_len;
use super::{Qp, SendQueue};
use crate::limits::{MAX_MESSAGE, MAX_SGE};
use crate::segment::Mapping;
use crate::segment::layout::{
    PendingWord, SEGMENT_SIZE, arena, fits, pending as layout, qp as qp_layout,
};
use crate::sync::atomic::Ordering;

/// The pending messages of a send queue. Positions are those of the send queue, wrapping.
#[derive(Debug)]
pub(super) struct PendingSends {
    /// Entries in the segment: offset, total length and stride, in bytes.
    place: Option<(usize, usize, usize)>,
    offer: Offer,
    /// Position behind the last written entry.
    to: u32,
    /// Message number minus position, for the written entries, and the receiver's incarnation that
    /// they are for.
    number: u32,
    incarnation: u32,
    /// The receiver took messages while another one was added.
    pub(super) news: bool,
}

impl PendingSends {
    pub(super) const fn new() -> Self {
        Self {
            place: None,
            offer: Offer::new(),
            to: 0,
            number: 0,
            incarnation: 0,
            news: false,
        }
    }

    /// Restarts the positions at 0.
    pub(super) fn rewind(&mut self) {
        self.to = 0;
    }

    /// Continues the generation of `old`, for the next queue pair at the same index.
    pub(super) fn continue_after(&mut self, old: &Self) {
        self.offer.continue_after(&old.offer);
    }

    /// Position behind the last message that has an entry.
    pub(super) fn end(&self) -> u32 {
        self.to
    }

    #[inline]
    pub(super) fn live(&self) -> bool {
        self.offer.is_live()
    }

    /// Takes out offset and length of the entries, for returning the memory to the segment.
    pub(super) fn take_place(&mut self) -> Option<(usize, usize)> {
        self.place.take().map(|(at, len, _)| (at, len))
    }
}

impl SendQueue {
    /// Number of the next message of this connection.
    pub(super) fn next_number(&self) -> u32 {
        let shared = self.conn.as_ref().is_some_and(|conn| conn.srq.is_some());
        if shared { self.sent } else { self.claimed }
    }

    fn count_taken(&mut self, count: u32) {
        let Some(conn) = &self.conn else { return };
        if conn.srq.is_some() {
            self.sent = self.sent.wrapping_add(count);
        } else {
            self.claimed = self.claimed.wrapping_add(count);
            // The taken messages consumed receives that are newer than the cached credit.
            self.credit = conn.credit();
        }
    }
}

impl Qp {
    fn pending_at(&self) -> usize {
        self.at() + qp_layout::PENDING
    }

    /// Shows the waiting messages to the other end. Returns false if there is no message that the
    /// receiver could take.
    pub(super) fn publish_pending(&self, sq: &mut SendQueue) -> bool {
        let Some(incarnation) = sq.conn.as_ref().map(|conn| conn.word.incarnation()) else {
            return false;
        };
        // An XRC target has no owning process that would take messages.
        let nobody = sq.route.is_some() || sq.claim.is_some();
        if nobody || !can_be_pending(sq, sq.executed) || !self.place_entries(sq) {
            return false;
        }
        // Entries that were written before are still valid for the same messages.
        let number = sq.next_number().wrapping_sub(sq.executed);
        let written = sq.pending.to.wrapping_sub(sq.executed);
        if sq.pending.incarnation != incarnation
            || sq.pending.number != number
            || written > self.runs_to(sq).wrapping_sub(sq.executed)
        {
            sq.pending.to = sq.executed;
            sq.pending.incarnation = incarnation;
            sq.pending.number = number;
        }
        let end = self.runs_to(sq);
        while sq.pending.to != end && self.write_entry(sq, sq.pending.to) {
            sq.pending.to = sq.pending.to.wrapping_add(1);
        }
        let count = sq.pending.to.wrapping_sub(sq.executed);
        if count == 0 {
            return false;
        }
        let first = sq.executed;
        let offer = &mut sq.pending.offer;
        offer.show(self.map(), self.pending_at(), count, first);
        true
    }

    /// Also shows the request that was just added behind the pending messages.
    #[cold]
    pub(super) fn publish_another_pending(&self, sq: &mut SendQueue) {
        if !sq.pending.live() {
            return;
        }
        let last = sq.head.wrapping_sub(1);
        if sq.pending.to != last || !self.write_entry(sq, last) {
            return;
        }
        sq.pending.to = sq.head;
        if !sq.pending.offer.add(self.map(), self.pending_at()) {
            sq.pending.news = true;
        }
    }

    /// Whether the receiver took nothing since the word was written.
    pub(super) fn pending_untouched(&self, sq: &SendQueue) -> bool {
        let offer = &sq.pending.offer;
        offer.is_untouched(self.map(), self.pending_at())
    }

    /// Withdraws the pending messages, and completes those that the receiver took. Returns their
    /// number, or `None` while the receiver copies a message into a receive that this process would
    /// also write.
    pub(super) fn take_back(&self, sq: &mut SendQueue) -> Option<u32> {
        let offer = &mut sq.pending.offer;
        let taken = offer.take_back(self.map(), self.pending_at())?;
        self.finish_taken(sq, taken);
        Some(taken)
    }

    /// As [`Self::take_back`], for a queue pair that sends no more: a copy in progress is
    /// discarded.
    pub(super) fn take_all_back(&self, sq: &mut SendQueue) {
        let offer = &mut sq.pending.offer;
        let taken = offer.withdraw(self.map(), self.pending_at());
        self.finish_taken(sq, taken);
    }

    /// As a receiver that is killed while it copies the first pending message. Returns whether
    /// there is one.
    #[cfg(test)]
    pub(crate) fn hold_pending(&self) -> bool {
        let map = self.map();
        let seen = PendingView::read(map, self.at());
        let held = seen.and_then(|seen| seen.hold(map, seen.word(map)));
        held.is_some_and(|word| word.count() > 0)
    }

    /// Whether messages are shown to the receiver.
    #[cfg(test)]
    pub(crate) fn has_pending(&self) -> bool {
        self.sq.lock().pending.live()
    }

    /// Completes the `count` messages that the receiver took.
    fn finish_taken(&self, sq: &mut SendQueue, count: u32) {
        sq.pending.news = false;
        for _ in 0..count {
            self.finish_first(sq, IBV_WC_SUCCESS);
        }
        if count > 0 {
            sq.count_taken(count);
        }
    }

    /// As [`Self::take_all_back`], for a queue that is emptied without completions.
    pub(super) fn forget_pending(&self, sq: &mut SendQueue) {
        sq.pending.news = false;
        let offer = &mut sq.pending.offer;
        let _ = offer.withdraw(self.map(), self.pending_at());
    }

    /// Allocates the entries, when the first message becomes pending.
    fn place_entries(&self, sq: &mut SendQueue) -> bool {
        if sq.pending.place.is_some() {
            return true;
        }
        let stride = layout::stride(sq.max_sge as usize);
        let len = stride * sq.stored.len();
        // Without the entries the sender itself must send when a receive is posted.
        let Ok(at) = self.process().segment.take(len) else {
            return false;
        };
        let map = self.map();
        let entry = self.at();
        map.u32(entry + qp_layout::PENDING_COUNT)
            .store(sq.stored.len() as u32, Ordering::Relaxed);
        map.u32(entry + qp_layout::PENDING_STRIDE)
            .store(stride as u32, Ordering::Relaxed);
        map.u64(entry + qp_layout::PENDING_AT)
            .store(at as u64, Ordering::Release);
        sq.pending.place = Some((at, len, stride));
        sq.pending.to = sq.executed;
        true
    }

    /// Writes the entry of the message at this position. Returns false if the receiver can't take
    /// the message.
    fn write_entry(&self, sq: &SendQueue, position: u32) -> bool {
        let Some((at, _, stride)) = sq.pending.place else {
            return false;
        };
        if !can_be_pending(sq, position) {
            return false;
        }
        let slot = position as usize & (sq.stored.len() - 1);
        let stored = &sq.stored[slot];
        let map = self.map();
        let at = at + stride * slot;
        let put_sge = |i: usize, addr: u64, len: u32| {
            let sge_at = at + layout::FIRST + layout::SGE_STRIDE * i;
            map.u64(sge_at).store(addr, Ordering::Relaxed);
            map.u32(sge_at + 8).store(len, Ordering::Relaxed);
        };
        let num_sge = if stored.flags & IBV_SEND_INLINE != 0 {
            let inline = &sq.inline[slot * sq.max_inline as usize..];
            put_sge(0, inline.as_ptr() as u64, stored.inline_len);
            1
        } else {
            let first = slot * sq.max_sge as usize;
            let sges = &sq.sges[first..first + stored.num_sge as usize];
            for (i, sge) in sges.iter().enumerate() {
                let Some(addr) = self.process().regions.local(sge, sq.pd, false) else {
                    return false;
                };
                put_sge(i, addr, sge.length);
            }
            stored.num_sge
        };
        let mut flags = 0;
        if stored.opcode == IBV_WR_SEND_WITH_IMM {
            flags |= layout::WITH_IMM;
        }
        if stored.flags & IBV_SEND_SOLICITED != 0 {
            flags |= layout::SOLICITED;
        }
        let number = sq.pending.number.wrapping_add(position);
        let put = |offset: usize, value: u32| map.u32(at + offset).store(value, Ordering::Relaxed);
        put(layout::LEN, stored_len(sq, slot) as u32);
        put(layout::NUM_SGE, num_sge);
        put(layout::IMM, stored.imm);
        put(layout::FLAGS, flags);
        put(layout::NUMBER, number);
        put(layout::INCARNATION, sq.pending.incarnation);
        true
    }
}

/// Whether a receiver can take the request at this position.
fn can_be_pending(sq: &SendQueue, position: u32) -> bool {
    let slot = position as usize & (sq.stored.len() - 1);
    matches!(sq.stored[slot].opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM)
}

/// A sender's pending messages as the receiver reads them: copied once from shared memory and
/// checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingView {
    word_at: usize,
    at: usize,
    mask: u32,
    stride: usize,
}

/// One pending message.
pub(crate) struct Entry {
    pub(crate) len: u32,
    pub(super) imm: Option<u32>,
    pub(super) solicited: bool,
    pub(super) number: u32,
    pub(super) incarnation: u32,
    /// Addresses in the sender's process, `len` bytes in total.
    pub(crate) iovecs: IovecList,
}

impl PendingView {
    /// Reads the pending messages of the queue pair with its entry at `entry`.
    pub(crate) fn read(map: &Mapping, entry: usize) -> Option<Self> {
        let at = map
            .u64(entry + qp_layout::PENDING_AT)
            .load(Ordering::Acquire) as usize;
        let count = map
            .u32(entry + qp_layout::PENDING_COUNT)
            .load(Ordering::Relaxed);
        let stride = map
            .u32(entry + qp_layout::PENDING_STRIDE)
            .load(Ordering::Relaxed) as usize;
        let good = count.is_power_of_two()
            && count <= 1 << 16
            && stride.is_multiple_of(32)
            && (layout::stride(1)..=4096).contains(&stride)
            && at.is_multiple_of(32)
            && fits(arena::AT..SEGMENT_SIZE, at, count, stride);
        // Not `then_some`: a count of 0 has no mask.
        good.then(|| Self {
            word_at: entry + qp_layout::PENDING,
            at,
            mask: count - 1,
            stride,
        })
    }

    pub(crate) fn word(&self, map: &Mapping) -> PendingWord {
        pending_word::look(map, self.word_at)
    }

    /// The first message, if its entry is valid.
    pub(crate) fn first(&self, map: &Mapping, word: PendingWord) -> Option<Entry> {
        let at = self.at + self.stride * (word.first() & self.mask) as usize;
        let get = |offset: usize| map.u32(at + offset).load(Ordering::Relaxed);
        let len = get(layout::LEN);
        let count = get(layout::NUM_SGE) as usize;
        let most = (self.stride - layout::FIRST) / layout::SGE_STRIDE;
        if count > most.min(MAX_SGE as usize) || u64::from(len) > MAX_MESSAGE {
            return None;
        }
        let mut left = len as usize;
        let mut iovecs = IovecList::new();
        for i in 0..count {
            let sge_at = at + layout::FIRST + layout::SGE_STRIDE * i;
            let addr = map.u64(sge_at).load(Ordering::Relaxed);
            let len = map.u32(sge_at + 8).load(Ordering::Relaxed) as usize;
            left = left.checked_sub(len)?;
            if len > 0 {
                iovecs.push(addr, len);
            }
        }
        let flags = get(layout::FLAGS);
        (left == 0).then(|| Entry {
            len,
            imm: (flags & layout::WITH_IMM != 0).then(|| get(layout::IMM)),
            solicited: flags & layout::SOLICITED != 0,
            number: get(layout::NUMBER),
            incarnation: get(layout::INCARNATION),
            iovecs,
        })
    }

    /// [`pending_word::hold`].
    pub(super) fn hold(&self, map: &Mapping, word: PendingWord) -> Option<PendingWord> {
        pending_word::hold(map, self.word_at, word)
    }

    /// [`pending_word::release`].
    pub(super) fn release(&self, map: &Mapping, held: PendingWord) {
        pending_word::release(map, self.word_at, held);
    }

    /// [`pending_word::commit`].
    pub(super) fn commit(&self, map: &Mapping, seen: PendingWord) -> bool {
        pending_word::commit(map, self.word_at, seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::OwnSegment;

    #[test]
    fn nothing_was_pending_ever() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        segment
            .back_halves(qp_layout::AT, qp_layout::STRIDE)
            .unwrap();
        assert!(PendingView::read(&segment.map, qp_layout::AT).is_none());
    }
}
