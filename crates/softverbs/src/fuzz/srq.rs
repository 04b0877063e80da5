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
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let map = &segment.map;
    segment.back_halves(layout::AT, layout::STRIDE).unwrap();
    let count = 1u32 << (input.u8() % 6);
    let stride = desc::stride(1);
    let ring_at = segment.take_order(8 * count as usize).unwrap();
    let desc_at = segment.take(stride * count as usize).unwrap();
    // Positions as after long use, so that they wrap.
    let mut order = Order::starting(
        map,
        ring_at,
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
    map.u64(layout::AT + layout::RING_AT)
        .store(ring_at as u64, Ordering::Release);

    let mut free: Vec<u32> = (0..count).collect();
    let mut posted = VecDeque::new();
    let mut claimed = VecDeque::new();
    let mut honest = true;
    while !input.is_empty() {
        match input.u8() % 10 {
            0..=2 => {
                if order.is_full() {
                    // The queue is full only because of claims that the owner has not read.
                    assert!(!honest || posted.len() + claimed.len() == count as usize);
                    continue;
                }
                let Some(index) = free.pop() else { continue };
                let room = u32::from(input.u16());
                order.append(map, index, room);
                // The queue publishes at most this room.
                posted.push_back((index, room.min(0x3fff)));
            }
            3..=4 => {
                let Some(shared) = Shared::read(map, 0) else {
                    assert!(!honest);
                    continue;
                };
                let slot = u32::from(input.u16() % 1024);
                let got = shared.claim(map, slot);
                assert!(got.is_none_or(|claim| claim.index <= shared.desc_mask()));
                if honest {
                    let first = posted.pop_front();
                    assert_eq!(got, first.map(|(index, room)| Claim { index, room }));
                    claimed.extend(got.map(|claim| (claim.index, slot)));
                }
            }
            5..=6 => {
                let followed = order.follow(map);
                if honest {
                    assert_eq!(followed, claimed.pop_front());
                }
                if let Some((index, slot)) = followed {
                    assert!(index < count && slot < 1 << 14);
                    free.push(index);
                }
            }
            7 => {
                // A message for the next receive. A peer that does not follow the protocol sends it
                // without a claim.
                let next = order.next();
                if !honest || !claimed.is_empty() {
                    if honest {
                        assert_eq!(next, claimed.pop_front().map(|(index, _)| index));
                    }
                    if let Some(index) = next {
                        assert!(index < count);
                        order.skip();
                        free.push(index);
                    }
                }
            }
            8 => {
                let which = input.below(count as usize) as u32;
                order.hide_room(map, |index| index == which);
                for (index, room) in &mut posted {
                    if *index == which {
                        *room = 0;
                    }
                }
            }
            _ => {
                // From here on the peer writes arbitrary bytes.
                if !input.u8().is_multiple_of(16) {
                    continue;
                }
                honest = false;
                let at = match input.u8() % 4 {
                    0 => ring_at + 8 * input.below(count as usize),
                    1 => layout::AT + 8 * input.below(layout::STRIDE / 8),
                    2 => OWNED + layout::AT + 8 * input.below(layout::STRIDE / 8),
                    _ => order::AT + 8 * input.below(64),
                };
                assert!(at < SEGMENT_SIZE);
                map.u64(at).store(input.edgy(), Ordering::Relaxed);
            }
        }
    }
}
