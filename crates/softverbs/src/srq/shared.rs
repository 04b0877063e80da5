//! The sender's view of a shared receive queue: the words by which receives are claimed.

use crate::segment::Mapping;
use crate::segment::layout::{MAX_SRQS, SEGMENT_SIZE, arena, desc, fits, order, srq as layout};
use crate::signal;
use crate::sync::atomic::Ordering;
use crate::sync::light_fence;

/// A word of the order: position (32 bits), claimant's slot (14), state (2), descriptor (16). In
/// state `POSTED`, the 14 bits hold the receive's room instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(pub(super) u64);

const POSTED: u64 = 1;
const CLAIMED: u64 = 2;
/// No receive: the word of the round in front of the first one. A word of a destroyed queue is 0.
const NONE: u64 = 3;
/// The largest room that a word can hold, in bytes: larger than the largest payload in a ring.
const MOST_ROOM: u32 = 0x3fff;
const _: () = assert!(MOST_ROOM as usize > crate::ring::MAX_PAYLOAD);

/// Number of words in a cache line.
pub(super) const LINE: u32 = 64 / 8;

impl Word {
    /// The word of a posted receive of `room` bytes, capped at [`MOST_ROOM`].
    pub(super) fn posted(position: u32, index: u32, room: u32) -> Self {
        let room = u64::from(room.min(MOST_ROOM));
        Self(u64::from(position) << 32 | room << 18 | POSTED << 16 | u64::from(index & 0xffff))
    }

    /// The word of a position in front of the first receive.
    pub(super) fn none(position: u32) -> Self {
        Self(u64::from(position) << 32 | NONE << 16)
    }

    /// Whether the word still holds this posted, unclaimed receive, with any room.
    pub(super) fn is_still(self, position: u32, index: u32) -> bool {
        self.is_posted() && self.position() == position && self.index() == index & 0xffff
    }

    fn room(self) -> u32 {
        self.claimant()
    }

    fn claimed(self, slot: u32) -> Self {
        Self(self.0 & !(0xffff << 16) | u64::from(slot & 0x3fff) << 18 | CLAIMED << 16)
    }

    fn position(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn is_posted(self) -> bool {
        self.0 >> 16 & 3 == POSTED
    }

    pub(super) fn claimant(self) -> u32 {
        (self.0 >> 18) as u32 & 0x3fff
    }

    fn index(self) -> u32 {
        self.0 as u32 & 0xffff
    }
}

/// A claimed receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) index: u32,
    /// Minimum length of the receive in bytes; the descriptor has the exact length.
    pub(crate) room: u32,
    /// Its position in the order.
    pub(crate) position: u32,
}

/// Location of a queue in its owner's segment; copied once and then checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    pub(crate) number: u32,
    at: usize,
    order_at: usize,
    /// Mask of positions in the order.
    mask: u32,
    /// Mask of descriptor indices.
    desc_mask: u32,
    pub(crate) desc_at: usize,
    pub(crate) desc_stride: usize,
}

impl Shared {
    pub(crate) fn read(map: &Mapping, number: u32) -> Option<Self> {
        if number as usize >= MAX_SRQS {
            return None;
        }
        let at = layout::AT + layout::STRIDE * number as usize;
        let order_at = map.u64(at + layout::ORDER_AT).load(Ordering::Acquire) as usize;
        let desc_at = map.u64(at + layout::DESC_AT).load(Ordering::Relaxed) as usize;
        let count = map.u32(at + layout::COUNT).load(Ordering::Relaxed);
        let desc_count = map.u32(at + layout::DESC_COUNT).load(Ordering::Relaxed);
        let desc_stride = map.u32(at + layout::DESC_STRIDE).load(Ordering::Relaxed) as usize;
        let good = count.is_power_of_two()
            && count <= 1 << 16
            && desc_count.is_power_of_two()
            && desc_count <= 1 << 16
            && desc_stride >= desc::stride(1)
            && desc_stride.is_multiple_of(32)
            && desc_stride <= 4096
            && order_at.is_multiple_of(32)
            && fits(order::AT..order::END, order_at, count, 8)
            && desc_at.is_multiple_of(32)
            && fits(arena::AT..SEGMENT_SIZE, desc_at, desc_count, desc_stride);
        // not `then_some`: a count of 0 has no mask
        good.then(|| Self {
            number,
            at,
            order_at,
            mask: count - 1,
            desc_mask: desc_count - 1,
            desc_at,
            desc_stride,
        })
    }

    pub(crate) fn desc_mask(&self) -> u32 {
        self.desc_mask
    }

    /// Finds the first unclaimed receive: the offset of its word, and the word.
    fn find(&self, map: &Mapping) -> Option<(usize, Word)> {
        let hint = map.u32(self.at + layout::HINT);
        let mut position = hint.load(Ordering::Relaxed);
        // The hint may be behind by any number. A sender that finds a word of a later round
        // continues at the earliest position at which the order can begin.
        for _ in 0..=2 * self.mask + 1 {
            let place = self.order_at + 8 * (position & self.mask) as usize;
            let word = Word(map.u64(place).load(Ordering::Relaxed));
            let ahead = word.position().wrapping_sub(position).cast_signed();
            if ahead < 0 || word.0 == 0 {
                return None;
            }
            if ahead > 0 {
                position = word.position().wrapping_sub(self.mask);
                continue;
            }
            if word.is_posted() {
                return Some((place, word));
            }
            position = position.wrapping_add(1);
        }
        None
    }

    /// Whether an unclaimed receive is available.
    pub(crate) fn available(&self, map: &Mapping) -> bool {
        self.find(map).is_some()
    }

    /// Claims the first available receive for the process in `slot`.
    #[inline(never)]
    pub(crate) fn claim(&self, map: &Mapping, slot: u32) -> Option<Claim> {
        #[cfg(test)]
        before_claim::run();
        self.claim_if(map, slot, |_| true)
    }

    /// As [`Self::claim`], with one attempt at the hint's position first. If that attempt fails,
    /// for example because another sender has claimed, calls [`Self::claim`].
    #[inline(always)]
    pub(crate) fn claim_fast(&self, map: &Mapping, slot: u32) -> Option<Claim> {
        #[cfg(test)]
        before_claim::run();
        let hint = map.u32(self.at + layout::HINT);
        let position = hint.load(Ordering::Relaxed);
        let cell = map.u64(self.order_at + 8 * (position & self.mask) as usize);
        let word = Word(cell.load(Ordering::Relaxed));
        let claimed = word.claimed(slot).0;
        let first = word.is_posted()
            && word.position() == position
            && cell
                .compare_exchange(word.0, claimed, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if !first {
            return self.claim(map, slot);
        }
        hint.store(position.wrapping_add(1), Ordering::Relaxed);
        Some(Claim {
            index: word.index() & self.desc_mask,
            room: word.room(),
            position,
        })
    }

    /// The descriptor of the receive that the process in `slot` has claimed, if the word of the
    /// claim is unchanged. Then the queue to which the receive belongs has not been destroyed.
    #[cold]
    pub(crate) fn still_claimed(&self, map: &Mapping, claim: &Claim, slot: u32) -> Option<u32> {
        let place = self.order_at + 8 * (claim.position & self.mask) as usize;
        let word = Word(map.u64(place).load(Ordering::Acquire));
        (word.position() == claim.position && word == word.claimed(slot)).then(|| word.index())
    }

    /// The receive at `position` was claimed. The owner has written the words of the next cache
    /// line too, so a claim there would wait for the line.
    #[inline(always)]
    pub(crate) fn prefetch_next(&self, map: &Mapping, position: u32) {
        if position.is_multiple_of(LINE) {
            let next = position.wrapping_add(LINE);
            map.prefetch_to_write(self.order_at + 8 * (next & self.mask) as usize);
        }
    }

    /// Whether the claim of the receive at `position` leaves fewer receives than the owner's limit,
    /// and the caller has to call the owner, as the first one that finds this. `barriers`: the
    /// owner runs barriers.
    #[inline(always)]
    pub(crate) fn passes_limit(&self, map: &Mapping, position: u32, barriers: bool) -> bool {
        // The owner publishes a limit, runs a heavy fence, and reads the claims.
        light_fence(barriers);
        let limit = map.u32(self.at + layout::LIMIT).load(Ordering::Relaxed);
        limit != 0 && self.is_short_of(map, position, limit)
    }

    #[cold]
    fn is_short_of(&self, map: &Mapping, position: u32, limit: u32) -> bool {
        let last = position.wrapping_add(limit);
        let place = self.order_at + 8 * (last & self.mask) as usize;
        let word = Word(map.u64(place).load(Ordering::Relaxed));
        let posted = word.0 != 0 && word.position().wrapping_sub(last).cast_signed() >= 0;
        let limit = map.u32(self.at + layout::LIMIT);
        !posted && limit.swap(0, Ordering::AcqRel) != 0
    }

    /// As [`Self::claim`], if `good` accepts the descriptor of the first receive.
    #[inline]
    pub(crate) fn claim_if(
        &self,
        map: &Mapping,
        slot: u32,
        good: impl Fn(u32) -> bool,
    ) -> Option<Claim> {
        // Other senders may win the compare-and-swap each time, but each of them consumes a
        // receive, so the number of rounds is bounded.
        for _ in 0..=2 * self.mask + 1 {
            let (place, word) = self.find(map)?;
            let index = word.index() & self.desc_mask;
            if !good(index) {
                return None;
            }
            let claimed = word.claimed(slot).0;
            if map
                .u64(place)
                .compare_exchange(word.0, claimed, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                map.u32(self.at + layout::HINT)
                    .store(word.position().wrapping_add(1), Ordering::Relaxed);
                return Some(Claim {
                    index,
                    room: word.room(),
                    position: word.position(),
                });
            }
        }
        None
    }

    /// Asks the owner to ring the process in `slot`, the caller's own, when the owner posts a
    /// receive; `turn` holds the turn of the last call. Returns true if the caller has to run a
    /// heavy fence and check once more.
    pub(crate) fn ask_to_ring(&self, map: &Mapping, slot: u32, turn: &mut u32) -> bool {
        // In this order: the owner takes the names after it has seen the turn.
        signal::name_waiter(map, self.at + layout::WAITERS, slot);
        let now = signal::ask_in_turn(map, self.at + layout::WAITING);
        std::mem::replace(turn, now) != now
    }
}

/// What a test does while a sender is about to claim a receive.
#[cfg(test)]
pub(crate) mod before_claim {
    use std::cell::Cell;

    type Action = Box<dyn FnOnce()>;

    thread_local!(static NEXT: Cell<Option<Action>> = const { Cell::new(None) });

    /// Runs `action` once, in this thread's next claim.
    pub(crate) fn once(action: impl FnOnce() + 'static) {
        NEXT.set(Some(Box::new(action)));
    }

    /// Whether the action has not run yet.
    pub(crate) fn is_left() -> bool {
        let action = NEXT.take();
        let left = action.is_some();
        NEXT.set(action);
        left
    }

    pub(super) fn run() {
        if let Some(action) = NEXT.take() {
            action();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::OwnSegment;
    use crate::srq::Order;

    #[test]
    fn a_queue_that_can_t_be_is_none() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let map = &segment.map;
        segment.back_halves(layout::AT, layout::STRIDE).unwrap();
        let (order_at, desc_at) = (layout::AT + layout::ORDER_AT, layout::AT + layout::DESC_AT);
        map.u64(order_at).store(order::AT as u64, Ordering::Relaxed);
        map.u64(desc_at).store(arena::AT as u64, Ordering::Relaxed);
        let stride = layout::AT + layout::DESC_STRIDE;
        map.u32(stride)
            .store(desc::stride(1) as u32, Ordering::Relaxed);
        let counts = [layout::COUNT, layout::DESC_COUNT].map(|part| layout::AT + part);
        for count in counts {
            map.u32(count).store(4, Ordering::Relaxed);
        }
        assert!(Shared::read(map, 0).is_some());
        for count in counts {
            for bad in [0, 3, 1 << 17, u32::MAX] {
                map.u32(count).store(bad, Ordering::Relaxed);
                assert!(Shared::read(map, 0).is_none(), "{bad}");
            }
            map.u32(count).store(4, Ordering::Relaxed);
        }
        for bad in [0, 16, 31, 33, 8192, u32::MAX] {
            map.u32(stride).store(bad, Ordering::Relaxed);
            assert!(Shared::read(map, 0).is_none(), "{bad}");
        }
        map.u32(stride)
            .store(desc::stride(1) as u32, Ordering::Relaxed);
        // The words and the descriptors must each lie in their own part of the segment: claimants
        // would otherwise write words that belong to the owner.
        for (at, other) in [(order_at, arena::AT), (desc_at, order::AT)] {
            let good = map.u64(at).swap(other as u64, Ordering::Relaxed);
            assert!(Shared::read(map, 0).is_none());
            map.u64(at).store(good, Ordering::Relaxed);
        }
        assert!(Shared::read(map, 0).is_some());
        assert!(Shared::read(map, MAX_SRQS as u32).is_none());
    }

    /// A queue whose order has 16 words and begins at this position, with 4 descriptors.
    fn queue(position: u32) -> (OwnSegment, Order) {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        segment.back_halves(layout::AT, layout::STRIDE).unwrap();
        let words_at = segment.take_order(8 * 16).unwrap();
        let map = &segment.map;
        let places = vec![0; 16].into_boxed_slice();
        let order = Order::starting(map, words_at, places, position);
        let u32_at = |part: usize| map.u32(layout::AT + part);
        u32_at(layout::HINT).store(position, Ordering::Relaxed);
        u32_at(layout::COUNT).store(16, Ordering::Relaxed);
        u32_at(layout::DESC_COUNT).store(4, Ordering::Relaxed);
        let stride = desc::stride(1) as u32;
        u32_at(layout::DESC_STRIDE).store(stride, Ordering::Relaxed);
        let desc_at = map.u64(layout::AT + layout::DESC_AT);
        desc_at.store(arena::AT as u64, Ordering::Relaxed);
        let words = map.u64(layout::AT + layout::ORDER_AT);
        words.store(words_at as u64, Ordering::Release);
        (segment, order)
    }

    /// A sender was stopped between its claim and the store of the hint, while the owner destroyed
    /// the queue, and created the next one in the same words.
    #[test]
    fn a_hint_of_an_earlier_queue_hides_no_receive() {
        for receives in [1, 8, 15] {
            for hint in 0..=26 {
                let (segment, mut order) = queue(10 + 16);
                let map = &segment.map;
                let shared = Shared::read(map, 0).unwrap();
                for index in 0..receives {
                    order.append(map, index, 8);
                }
                let word = map.u32(layout::AT + layout::HINT);
                word.store(hint, Ordering::Relaxed);
                let claimed = shared.claim_fast(map, 5).map(|claim| claim.index);
                assert_eq!(claimed, Some(0), "{receives} receives, hint {hint}");
            }
        }
    }

    #[test]
    fn words_keep_their_parts() {
        let word = Word::posted(0xdead_beef, 32_767, 8192);
        assert!(word.is_posted());
        assert_eq!(word.room(), 8192);
        assert_eq!(Word::posted(0, 0, u32::MAX).room(), MOST_ROOM);
        assert!(word.is_still(0xdead_beef, 32_767) && !word.is_still(0xdead_beef, 32_766));
        assert!(!word.is_still(0xdead_bee0, 32_767));
        assert_eq!((word.position(), word.index()), (0xdead_beef, 32_767));
        let claimed = word.claimed(1023);
        assert!(!claimed.is_posted() && !claimed.is_still(0xdead_beef, 32_767));
        assert_eq!((claimed.position(), claimed.index()), (0xdead_beef, 32_767));
        assert_eq!(claimed.claimant(), 1023);
        assert_ne!(claimed, word);
    }
}
