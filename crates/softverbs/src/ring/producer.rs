//! The sender's side of a ring.

use std::sync::atomic::Ordering;

use super::datagram_turn::Turn;
use super::{
    CONSUMED_AT, COOKIE_AT, HEADER, Header, MAGIC_AT, SHORT, SLOT, SLOTS, WAITING_AT, copy, fits,
    op, sequence, slot_at, slots_for,
};
use crate::segment::lines::{Payload, Payloads};
use crate::segment::{Mapping, layout, set_bits};
use crate::signal;
use crate::sync::{heavy_fence, light_fence};
use crate::sys;

/// The sender's state of one ring.
#[derive(Debug)]
pub(crate) struct Producer {
    map: Mapping,
    /// Slots written so far, wrapping.
    head: u32,
    /// Slots that the receiver has consumed, as last read, minus `reserved`.
    consumed: u32,
    stale: Stale,
    payloads: Payloads,
    /// The turn of datagrams that wait for room.
    turn: Turn,
    /// Slots reserved for the datagram that has the turn: all other messages have that many slots
    /// less.
    reserved: u32,
}

/// Result of pushing a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    Sent,
    /// Sent, and the turn of its queue pair is over: other queue pairs of the process can retry.
    SentInTurn,
    /// The datagram waits for its turn or for room; the receiver will ring this process.
    Full,
    /// The datagram is dropped: the receiver's account is used up.
    Lost,
}

/// One bit for each slot whose first word the receiver could take for a message header: payload was
/// written over it, or the word of an earlier round was not overwritten. The first words of all
/// other slots are 0 or hold the sequence number of an earlier round.
#[derive(Debug, Default)]
struct Stale([u64; (SLOTS as usize).div_ceil(64)]);

impl Stale {
    #[inline]
    fn place(position: u32) -> (usize, u64) {
        let slot = position % SLOTS;
        (slot as usize / 64, 1 << (slot % 64))
    }

    /// Marks the slots after the first slot of a message at `position` as stale. A message does not
    /// cross the ring's end.
    fn note(&mut self, position: u32, slots: u32) {
        set_bits(&mut self.0, position.wrapping_add(1) % SLOTS, slots - 1);
    }

    /// Whether the slot at `position` must be cleared; also removes its mark.
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
    /// Opens the ring that was made for the sender with this cookie; `None` if the mapping holds no
    /// such ring.
    pub(crate) fn new(map: Mapping, cookie: u64) -> Option<Self> {
        let good = fits(&map)
            && map.u64(MAGIC_AT).load(Ordering::Acquire) == layout::RING_MAGIC
            && map.u64(COOKIE_AT).load(Ordering::Relaxed) == cookie;
        good.then_some(Self {
            map,
            head: 0,
            consumed: 0,
            stale: Stale::default(),
            payloads: Payloads::new(),
            turn: Turn::new(),
            reserved: 0,
        })
    }

    /// Starts at the receiver's published position, as if this producer had sent all earlier
    /// messages.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn resume(map: Mapping, cookie: u64) -> Option<Self> {
        let mut this = Self::new(map, cookie)?;
        this.consumed = this.map.u32(CONSUMED_AT).load(Ordering::Acquire);
        this.head = this.consumed;
        Some(this)
    }

    /// Publishes a message. `fill` receives the address of the payload, if the message has payload
    /// in the ring. Returns false, with no state changed, if the ring has no room.
    #[inline(always)]
    pub(crate) fn push(&mut self, header: &Header, fill: impl FnOnce(*mut u8)) -> bool {
        if header.inside() <= SLOT - HEADER {
            self.push_one(header, fill)
        } else {
            self.push_many(*header, fill)
        }
    }

    /// As [`Self::push`], for a message of one slot with `len` bytes at `from`. Returns false if
    /// the ring has no room according to the last position that was read from the receiver; the
    /// caller can then call [`Self::push`], which reads the position again. The header is written
    /// directly into the ring and is never stored elsewhere in memory.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes; `len` is at most [`SHORT`].
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
        // SAFETY: the slot has room for [`SHORT`] bytes after the header; the caller promises the
        // source.
        unsafe { copy(from, to, len.min(SHORT)) };
        self.clear(self.head.wrapping_add(1));
        self.publish(header, 1);
        true
    }

    /// Publishes a message of one slot, which never crosses the ring's end. The header is written
    /// directly into the ring and is never stored elsewhere in memory.
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
        // One more slot must be free: its first word, after the message, may have to be cleared.
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
        let behind = Payload {
            at: slot_at(self.head) + SLOT,
            len: SLOT * (slots - 1) as usize,
        };
        fill(self.map.bytes(slot_at(self.head) + HEADER, inside));
        self.clear(self.head.wrapping_add(slots));
        self.publish(&header, slots);
        let next = Payload {
            at: slot_at(self.head) + SLOT,
            len: behind.len.min(SLOT * self.free_in_row() as usize),
        };
        self.payloads.published(&self.map, behind, next);
        true
    }

    /// Slots behind the next one that are free according to the last position that was read from
    /// the receiver, and that follow it in the mapping.
    #[inline(always)]
    fn free_in_row(&self) -> u32 {
        let used = self.used().max(self.head % SLOTS);
        SLOTS.saturating_sub(used).saturating_sub(1)
    }

    #[inline(always)]
    fn room(&mut self, slots: u32) -> bool {
        if self.used().saturating_add(slots) <= SLOTS {
            return true;
        }
        self.look();
        self.used().saturating_add(slots) <= SLOTS
    }

    /// Reads the receiver's published position.
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

    /// Slots in use. If the receiver publishes a position ahead of `head`, the difference wraps to
    /// a large value and the ring counts as full: only that receiver is affected.
    #[inline(always)]
    fn used(&self) -> u32 {
        self.head.wrapping_sub(self.consumed)
    }

    /// Clears the first word after a message if that slot is stale. In the common case it is not
    /// stale, and the sender writes only the message's own cache line.
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
        // Written out: the compiler does not always unroll a loop here.
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

    /// As [`Self::push`]. If the ring has no room, asks the receiver to ring this process after it
    /// has consumed messages. `may_sleep` returns whether this process may sleep and so depends on
    /// that ring.
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
        if self.turn.is_empty() && self.push(header, &fill) {
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
        let had_turn = self.turn.is_turn_of(qpn);
        if !had_turn {
            if !self.turn.is_empty() {
                // The queue pair that has the turn has asked to be rung.
                return Pushed::Full;
            }
            let now = sys::now_ns();
            if !self.turn.take(qpn, now, self.received(), self.head) {
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
        // The datagram may need padding of less than `slots` up to the ring's end, and one more
        // slot stays free.
        self.reserve(slots + slots);
        Pushed::Full
    }

    fn end_turn(&mut self) {
        self.reserve(0);
        self.turn.leave(sys::now_ns(), self.received(), self.head);
    }

    /// Whether it is the turn of this queue pair.
    pub(crate) fn is_turn_of(&self, qpn: u32) -> bool {
        self.turn.is_turn_of(qpn)
    }

    /// The datagram of `qpn` no longer waits. Returns true if `qpn` had the turn: the caller then
    /// retries other queue pairs.
    pub(crate) fn leave(&mut self, qpn: u32) -> bool {
        let had_turn = self.turn.is_turn_of(qpn);
        if had_turn {
            self.end_turn();
        }
        had_turn
    }

    /// Time at which the receiver's account ends, in nanoseconds of the monotonic clock.
    /// The caller's queue pair has the turn.
    pub(crate) fn patient_until(&mut self) -> u64 {
        self.turn.until(self.received(), self.head)
    }

    /// Uses up the account: no datagram waits for this receiver until the receiver consumes a
    /// slot.
    pub(crate) fn give_up(&mut self) {
        self.turn.give_up();
    }

    #[cold]
    #[inline(never)]
    fn push_again(&mut self, header: Header, fill: impl Fn(*mut u8)) -> bool {
        self.push(&header, fill)
    }

    /// Asks the receiver to ring. Returns true if the caller must try the push again: this request
    /// is new and the process may sleep, so the receiver may have made room before it could see the
    /// request.
    #[cold]
    fn ask(&self, may_sleep: impl FnOnce() -> bool) -> bool {
        if !signal::ask(&self.map, WAITING_AT, signal::ANYBODY) {
            return false;
        }
        // A thread that stores `SLEEPS` after this check runs a heavy fence and checks the ring
        // itself.
        light_fence(true);
        let look = may_sleep();
        if look {
            heavy_fence();
        }
        look
    }
}
