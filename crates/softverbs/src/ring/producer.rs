//! The sender's side of a ring.

use std::sync::atomic::Ordering;

use super::turn::Line;
use super::{
    CONSUMED_AT, COOKIE_AT, HEADER, Header, MAGIC_AT, SHORT, SLOT, SLOTS, WAITING_AT, copy, fits,
    op, sequence, slot_at, slots_for,
};
use crate::segment::{Mapping, layout};
use crate::signal;
use crate::sync::{heavy_fence, light_fence};
use crate::sys;

/// Writes messages.
#[derive(Debug)]
pub(crate) struct Producer {
    map: Mapping,
    /// Slots written so far, wrapping.
    head: u32,
    /// What the receiver said last that it is done with, less what is reserved.
    consumed: u32,
    stale: Stale,
    /// Datagrams that wait for room.
    line: Line,
    /// Slots for the datagram that has the turn: for all others the ring is as much shorter.
    reserved: u32,
}

/// What became of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    Sent,
    /// Its turn is over with that: others of the process may go on.
    SentInTurn,
    /// It waits for its turn, or for room; the receiver will ring this process.
    Full,
    /// The receiver is not waited for any more.
    Lost,
}

/// Slots whose first word may be taken for a message's: payload went over it, or an earlier round's word was
/// passed over. A bit each. All other words are 0 or have an earlier round's sequence number.
#[derive(Debug, Default)]
struct Stale([u64; (SLOTS as usize).div_ceil(64)]);

impl Stale {
    #[inline]
    fn place(position: u32) -> (usize, u64) {
        let slot = position % SLOTS;
        (slot as usize / 64, 1 << (slot % 64))
    }

    /// Notes the slots behind the first one of a message at `position`. They don't cross the ring's end.
    fn note(&mut self, position: u32, slots: u32) {
        for slot in 1..slots {
            let (word, bit) = Self::place(position.wrapping_add(slot));
            self.0[word] |= bit;
        }
    }

    /// Whether the slot at `position` has to be cleared, after which it is not stale.
    #[inline(always)]
    fn take(&mut self, position: u32) -> bool {
        let (word, bit) = Self::place(position);
        let stale = self.0[word] & bit != 0;
        if stale {
            self.0[word] &= !bit;
        }
        stale
    }
}

impl Producer {
    /// Takes the ring that was made for the sender with this cookie; `None` where it is not that.
    pub(crate) fn new(map: Mapping, cookie: u64) -> Option<Self> {
        let good = fits(&map)
            && map.u64(MAGIC_AT).load(Ordering::Acquire) == layout::RING_MAGIC
            && map.u64(COOKIE_AT).load(Ordering::Relaxed) == cookie;
        good.then_some(Self {
            map,
            head: 0,
            consumed: 0,
            stale: Stale::default(),
            line: Line::new(),
            reserved: 0,
        })
    }

    /// Goes on where the receiver says that it is, as if everything before had been sent from here.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn resume(map: Mapping, cookie: u64) -> Option<Self> {
        let mut this = Self::new(map, cookie)?;
        this.consumed = this.map.u32(CONSUMED_AT).load(Ordering::Acquire);
        this.head = this.consumed;
        Some(this)
    }

    /// Publishes a message; `fill` gets the place of its payload, if it has one in the ring.
    /// False, with nothing done, where the ring has no room.
    #[inline(always)]
    pub(crate) fn push(&mut self, header: &Header, fill: impl FnOnce(*mut u8)) -> bool {
        if header.inside() <= SLOT - HEADER {
            self.push_one(header, fill)
        } else {
            self.push_many(*header, fill)
        }
    }

    /// As [`Self::push`] of a message of one slot, of `len` bytes at `from`, where there is room as far as this side knows; else false, and it may
    /// be tried again by that. Everything in place: the header never is in memory but in the ring.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes, of which [`SHORT`] are the most.
    #[inline(always)]
    pub(crate) unsafe fn push_short(
        &mut self,
        header: &Header,
        from: *const u8,
        len: usize,
    ) -> bool {
        if self.used() > SLOTS - 2 {
            return false;
        }
        let to = self.map.bytes(slot_at(self.head) + HEADER, SHORT);
        // SAFETY: the place has room for that many; the caller promises the rest.
        unsafe { copy(from, to, len.min(SHORT)) };
        self.clear(self.head.wrapping_add(1));
        self.publish(header, 1);
        true
    }

    /// Of one slot, which always fits before the ring's end. In place, so that the header never is in memory but there.
    #[inline(always)]
    fn push_one(&mut self, header: &Header, fill: impl FnOnce(*mut u8)) -> bool {
        let inside = header.inside();
        if !self.room(2) {
            return false;
        }
        if inside > 0 {
            fill(self.map.bytes(slot_at(self.head) + HEADER, inside));
        }
        self.clear(self.head.wrapping_add(1));
        self.publish(header, 1);
        true
    }

    #[inline(never)]
    fn push_many(&mut self, header: Header, fill: impl FnOnce(*mut u8)) -> bool {
        let inside = header.inside();
        let slots = slots_for(inside);
        let to_end = SLOTS - self.head % SLOTS;
        let pad = if slots > to_end { to_end } else { 0 };
        // One more stays free: the first word after the message may have to be cleared.
        if !self.room(pad + slots + 1) {
            return false;
        }
        if pad > 0 {
            let filler = Header {
                op: op::PAD,
                ..Header::default()
            };
            self.clear(self.head.wrapping_add(pad));
            self.publish(&filler, pad);
        }
        fill(self.map.bytes(slot_at(self.head) + HEADER, inside));
        self.clear(self.head.wrapping_add(slots));
        self.publish(&header, slots);
        true
    }

    #[inline(always)]
    fn room(&mut self, slots: u32) -> bool {
        if self.used().saturating_add(slots) <= SLOTS {
            return true;
        }
        self.look();
        self.used().saturating_add(slots) <= SLOTS
    }

    /// Finds out how far the receiver is.
    #[inline(always)]
    fn look(&mut self) {
        self.consumed = self.received().wrapping_sub(self.reserved);
    }

    #[inline(always)]
    fn received(&self) -> u32 {
        self.map.u32(CONSUMED_AT).load(Ordering::Acquire)
    }

    fn reserve(&mut self, slots: u32) {
        self.reserved = slots;
        self.look();
    }

    /// A receiver that claims more than was written only hurts itself: the result is too much.
    #[inline(always)]
    fn used(&self) -> u32 {
        self.head.wrapping_sub(self.consumed)
    }

    /// Clears the first word behind a message where it needs that. Mostly it does not: then the only line that
    /// is taken away from the receiver is the message's own.
    #[inline(always)]
    fn clear(&mut self, position: u32) {
        if !self.stale.take(position) {
            return;
        }
        self.map.u64(slot_at(position)).store(0, Ordering::Relaxed);
    }

    #[inline(always)]
    fn publish(&mut self, header: &Header, slots: u32) {
        let [first, rest @ ..] = header.to_words(self.head, slots);
        let [first_at, rest_at @ ..] = self.map.words::<4>(slot_at(self.head));
        // Not in a loop, which is not always unrolled.
        let ([second, third, fourth], [second_at, third_at, fourth_at]) = (rest, rest_at);
        second_at.store(second, Ordering::Relaxed);
        third_at.store(third, Ordering::Relaxed);
        fourth_at.store(fourth, Ordering::Relaxed);
        first_at.store(first, Ordering::Release);
        debug_assert_eq!(first as u32, sequence(self.head));
        if slots > 1 {
            self.stale.note(self.head, slots);
        }
        self.head = self.head.wrapping_add(slots);
    }

    /// As [`Self::push`]; where there is no room, the receiver is asked to ring when it has taken
    /// something. `may_sleep` says whether this process relies on that before it tries again.
    #[inline(always)]
    pub(crate) fn push_or_ask(
        &mut self,
        header: &Header,
        fill: impl Fn(*mut u8),
        may_sleep: impl FnOnce() -> bool,
    ) -> bool {
        self.push(header, &fill) || self.ask(may_sleep) && self.push_again(*header, fill)
    }

    /// As [`Self::push_or_ask`], for a datagram of the queue pair `qpn`, which is not 0. A datagram
    /// that finds no room gets the turn if no other queue pair has it; the caller then tries again
    /// until the datagram is sent, or calls [`Self::leave`].
    #[inline(always)]
    pub(crate) fn push_datagram(
        &mut self,
        qpn: u32,
        header: &Header,
        fill: impl Fn(*mut u8),
        may_sleep: impl FnOnce() -> bool,
    ) -> Pushed {
        if self.line.is_empty() && self.push(header, &fill) {
            return Pushed::Sent;
        }
        self.push_in_turn(qpn, *header, fill, may_sleep)
    }

    #[cold]
    #[inline(never)]
    fn push_in_turn(
        &mut self,
        qpn: u32,
        header: Header,
        fill: impl Fn(*mut u8),
        may_sleep: impl FnOnce() -> bool,
    ) -> Pushed {
        let had_turn = self.line.is_turn_of(qpn);
        if !had_turn {
            if !self.line.is_empty() {
                // The queue pair that has the turn has asked to be rung.
                return Pushed::Full;
            }
            let now = sys::now_ns();
            if !self.line.take(qpn, now, self.received(), self.head) {
                return Pushed::Lost;
            }
        }
        self.reserve(0);
        if self.push_or_ask(&header, fill, may_sleep) {
            self.end_turn();
            return if had_turn {
                Pushed::SentInTurn
            } else {
                Pushed::Sent
            };
        }
        let slots = slots_for(header.inside());
        // It may not fit before the ring's end; one more stays free.
        self.reserve(slots + slots);
        Pushed::Full
    }

    fn end_turn(&mut self) {
        self.reserve(0);
        self.line.leave(sys::now_ns(), self.received(), self.head);
    }

    /// Whether it is the turn of this queue pair.
    pub(crate) fn is_turn_of(&self, qpn: u32) -> bool {
        self.line.is_turn_of(qpn)
    }

    /// The datagram of `qpn` waits no longer. True where it had the turn, so that others may go on.
    pub(crate) fn leave(&mut self, qpn: u32) -> bool {
        let had_turn = self.line.is_turn_of(qpn);
        if had_turn {
            self.end_turn();
        }
        had_turn
    }

    /// When the patience with the receiver ends, in nanoseconds of the monotonic clock. The caller's
    /// queue pair has the turn.
    pub(crate) fn patient_until(&mut self) -> u64 {
        self.line.until(self.received(), self.head)
    }

    /// The receiver is not waited for any more, until it has taken something.
    pub(crate) fn give_up(&mut self) {
        self.line.give_up();
    }

    #[cold]
    #[inline(never)]
    fn push_again(&mut self, header: Header, fill: impl Fn(*mut u8)) -> bool {
        self.push(&header, fill)
    }

    /// True where the receiver could not know before that it is asked, so that it may have made
    /// room without a ring: then the ring must be looked at once more.
    #[cold]
    fn ask(&self, may_sleep: impl FnOnce() -> bool) -> bool {
        if !signal::ask(&self.map, WAITING_AT, signal::ANYBODY) {
            return false;
        }
        // Who says meanwhile that it sleeps runs a heavy fence and looks as well.
        light_fence(true);
        let look = may_sleep();
        if look {
            heavy_fence();
        }
        look
    }
}
