//! The order of a shared receive queue.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use super::Input;
use crate::segment::OwnSegment;
use crate::segment::layout::{OWNED, SEGMENT_SIZE, desc, order, srq as layout};
use crate::srq::{Claim, Order, Shared};

/// Receives are claimed in the order in which they were posted, each once, and the claimant reads
/// their room. The owner reads the claims in that order, with their claimants. For any content of
/// the words, a claimed receive is a descriptor of the queue.
///
/// # Panics
/// If this property does not hold.
pub fn srq(data: &[u8]) {
    let mut input = Input::new(data);
    let mut case = Case::new(&mut input);
    while !input.is_empty() {
        match input.u8() % 10 {
            0..=2 => case.append(&mut input),
            3..=4 => case.claim(&mut input),
            5..=6 => case.follow(),
            7 => case.take_next(),
            8 => case.hide_room(&mut input),
            _ => case.corrupt(&mut input),
        }
    }
}

/// A queue, and the model of it.
struct Case {
    segment: OwnSegment,
    count: u32,
    order_at: usize,
    order: Order,
    free: Vec<u32>,
    /// Descriptors and room of the posted receives, in their order.
    posted: VecDeque<(u32, u32)>,
    /// Descriptors and claimants of the claims that the owner has not read.
    claimed: VecDeque<(u32, u32)>,
    /// No peer has written arbitrary bytes.
    honest: bool,
}

impl Case {
    fn new(input: &mut Input<'_>) -> Self {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        segment.back_halves(layout::AT, layout::STRIDE).unwrap();
        let count = 1u32 << (input.u8() % 6);
        let stride = desc::stride(1);
        let order_at = segment.take_order(8 * count as usize).unwrap();
        let desc_at = segment.take(stride * count as usize).unwrap();
        let map = &segment.map;
        // Positions as after long use, so that they wrap.
        let order = Order::starting(
            map,
            order_at,
            vec![0; count as usize].into(),
            input.edgy() as u32 | 1,
        );
        map.u32(layout::AT + layout::HINT)
            .store(order.position(), Ordering::Relaxed);
        map.u32(layout::AT + layout::COUNT)
            .store(count, Ordering::Relaxed);
        map.u32(layout::AT + layout::DESC_COUNT)
            .store(count, Ordering::Relaxed);
        map.u32(layout::AT + layout::DESC_STRIDE)
            .store(stride as u32, Ordering::Relaxed);
        map.u64(layout::AT + layout::DESC_AT)
            .store(desc_at as u64, Ordering::Relaxed);
        map.u64(layout::AT + layout::ORDER_AT)
            .store(order_at as u64, Ordering::Release);
        Self {
            segment,
            count,
            order_at,
            order,
            free: (0..count).collect(),
            posted: VecDeque::new(),
            claimed: VecDeque::new(),
            honest: true,
        }
    }

    fn append(&mut self, input: &mut Input<'_>) {
        if self.order.is_full() {
            // The queue is full only because of claims that the owner has not read.
            let used = self.posted.len() + self.claimed.len();
            assert!(!self.honest || used == self.count as usize);
            return;
        }
        let Some(index) = self.free.pop() else {
            return;
        };
        let room = u32::from(input.u16());
        self.order.append(&self.segment.map, index, room);
        // The queue publishes at most this room.
        self.posted.push_back((index, room.min(0x3fff)));
    }

    fn claim(&mut self, input: &mut Input<'_>) {
        let map = &self.segment.map;
        let Some(shared) = Shared::read(map, 0) else {
            assert!(!self.honest);
            return;
        };
        let slot = u32::from(input.u16() % 1024);
        let claim = shared.claim(map, slot);
        assert!(claim.is_none_or(|claim| claim.index <= shared.desc_mask()));
        if self.honest {
            let first = self.posted.pop_front();
            let claimed = claim.map(|Claim { index, room, .. }| (index, room));
            assert_eq!(claimed, first);
            self.claimed.extend(claim.map(|claim| (claim.index, slot)));
        }
    }

    fn follow(&mut self) {
        let followed = self.order.follow(&self.segment.map);
        if self.honest {
            assert_eq!(followed, self.claimed.pop_front());
        }
        if let Some((index, slot)) = followed {
            assert!(index < self.count && slot < 1 << 14);
            self.free.push(index);
        }
    }

    /// A message for the next receive. A peer that does not follow the protocol sends it without a
    /// claim.
    fn take_next(&mut self) {
        if self.honest && self.claimed.is_empty() {
            return;
        }
        let next = self.order.next();
        if self.honest {
            assert_eq!(next, self.claimed.pop_front().map(|(index, _)| index));
        }
        if let Some(index) = next {
            assert!(index < self.count);
            self.order.skip();
            self.free.push(index);
        }
    }

    fn hide_room(&mut self, input: &mut Input<'_>) {
        let which = input.below(self.count as usize) as u32;
        self.order
            .hide_room(&self.segment.map, |index| index == which);
        for (index, room) in &mut self.posted {
            if *index == which {
                *room = 0;
            }
        }
    }

    /// From here on the peer writes arbitrary bytes.
    fn corrupt(&mut self, input: &mut Input<'_>) {
        if !input.u8().is_multiple_of(16) {
            return;
        }
        self.honest = false;
        let at = match input.u8() % 4 {
            0 => self.order_at + 8 * input.below(self.count as usize),
            1 => layout::AT + 8 * input.below(layout::STRIDE / 8),
            2 => OWNED + layout::AT + 8 * input.below(layout::STRIDE / 8),
            _ => order::AT + 8 * input.below(64),
        };
        assert!(at < SEGMENT_SIZE);
        self.segment
            .map
            .u64(at)
            .store(input.edgy(), Ordering::Relaxed);
    }
}
