//! Pending messages of a sender: the word that both ends use, with two ends that follow the
//! protocol, and with arbitrary bytes in the sender's segment.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::Input;
use crate::limits::{MAX_MESSAGE, MAX_SGE};
use crate::qp::PendingView;
use crate::qp::pending_word::{self, Offer};
use crate::segment::layout::{arena, pending as layout, qp};
use crate::segment::{Mapping, OwnSegment};

const QP: usize = qp::AT + qp::STRIDE;
const WORD: usize = QP + qp::PENDING;
/// Bytes of the arena in which entries may be.
const ROOM: usize = 1 << 16;

fn segment() -> &'static Mutex<OwnSegment> {
    static SEGMENT: OnceLock<Mutex<OwnSegment>> = OnceLock::new();
    SEGMENT.get_or_init(|| {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        segment.back_halves(qp::AT, 2 * qp::STRIDE).unwrap();
        segment.back(arena::AT, ROOM).unwrap();
        Mutex::new(segment)
    })
}

/// For any content of a sender's segment, the result is a message of a valid length, in at most as
/// many sges as a request has. If both ends follow the protocol, each message is delivered once, in
/// order.
///
/// # Panics
/// If this property does not hold.
pub fn pending(data: &[u8]) {
    let segment = segment().lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input::new(data);
    if input.u8().is_multiple_of(2) {
        strange(&segment.map, &mut input);
    } else {
        honest(&segment.map, &mut input);
    }
}

fn strange(map: &Mapping, input: &mut Input<'_>) {
    let stride = layout::stride(1 + input.below(4));
    let at = arena::AT + 32 * input.below(64);
    map.u64(QP + qp::PENDING_AT)
        .store(at as u64, Ordering::Relaxed);
    map.u32(QP + qp::PENDING_COUNT).store(8, Ordering::Relaxed);
    map.u32(QP + qp::PENDING_STRIDE)
        .store(stride as u32, Ordering::Relaxed);
    while !input.is_empty() {
        match input.u8() % 12 {
            0 => map.u64(QP + qp::PENDING_AT).store(
                (arena::AT as u64).wrapping_add(input.edgy()),
                Ordering::Relaxed,
            ),
            1 => map
                .u32(QP + qp::PENDING_COUNT)
                .store(input.edgy() as u32, Ordering::Relaxed),
            2 => map
                .u32(QP + qp::PENDING_STRIDE)
                .store(input.edgy() as u32 & !31, Ordering::Relaxed),
            3 => map.u64(WORD).store(input.edgy(), Ordering::Relaxed),
            _ => {
                let at = at + stride * input.below(8) + 4 * input.below(stride / 4);
                map.u32(at).store(input.edgy() as u32, Ordering::Relaxed);
            }
        }
        let Some(seen) = PendingView::read(map, QP) else {
            continue;
        };
        let Some(entry) = seen.first(map, seen.word(map)) else {
            continue;
        };
        let iovecs = entry.iovecs.as_slice();
        let total: usize = iovecs.iter().map(|iovec| iovec.iov_len).sum();
        assert_eq!(total, entry.len as usize);
        assert!(u64::from(entry.len) <= MAX_MESSAGE && iovecs.len() <= MAX_SGE as usize);
    }
}

fn honest(map: &Mapping, input: &mut Input<'_>) {
    map.u64(WORD).store(0, Ordering::Relaxed);
    let mut offer = Offer::new();
    // Numbers of the shown messages, and the word that the receiver read last, possibly long ago.
    let mut shown: VecDeque<u32> = VecDeque::new();
    let (mut first, mut next, mut taken) = (0u32, 0u32, 0u32);
    let mut seen = pending_word::look(map, WORD);
    while !input.is_empty() {
        match input.u8() % 7 {
            0 if !offer.is_live() => {
                let count = 1 + input.below(3) as u32;
                offer.show(map, WORD, count, first);
                shown = (next..next + count).collect();
                next += count;
            }
            1 if offer.is_live() => {
                let untouched = offer.is_untouched(map, WORD);
                if offer.add(map, WORD) {
                    shown.push_back(next);
                    next += 1;
                } else {
                    assert!(!untouched && taken > 0);
                }
            }
            2 | 3 => {
                let held = pending_word::look(map, WORD).is_held();
                let back = if input.u8().is_multiple_of(2) {
                    offer.take_back(map, WORD)
                } else {
                    Some(offer.withdraw(map, WORD))
                };
                let Some(count) = back else {
                    assert!(held);
                    continue;
                };
                assert_eq!(count, taken, "what was taken and what was taken back");
                first = first.wrapping_add(count);
                next -= shown.len() as u32;
                shown.clear();
                taken = 0;
            }
            4 => seen = pending_word::look(map, WORD),
            5 => {
                let now = pending_word::look(map, WORD);
                if seen.count() > 0 && !seen.is_held() {
                    let held = pending_word::hold(map, WORD, seen);
                    assert_eq!(held.is_some(), now == seen);
                    seen = held.unwrap_or(seen);
                } else if seen.is_held() {
                    pending_word::release(map, WORD, seen);
                    seen = pending_word::look(map, WORD);
                }
            }
            _ => {
                if seen.count() == 0 {
                    continue;
                }
                let now = pending_word::look(map, WORD);
                let good = now == seen || now.has_grown_from(seen);
                assert_eq!(pending_word::commit(map, WORD, seen), good);
                if good {
                    assert_eq!(seen.first(), first.wrapping_add(taken) & 0xffff);
                    shown.pop_front().unwrap();
                    taken += 1;
                }
                seen = pending_word::look(map, WORD);
            }
        }
    }
}
