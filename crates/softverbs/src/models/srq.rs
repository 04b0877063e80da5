//! The order of a shared receive queue, claimed by several processes.

use loom::thread;

use super::check;
use crate::segment::Mapping;
use crate::segment::layout::{SEGMENT_SIZE, arena, desc, order, srq};
use crate::signal;
use crate::srq::{Claim, Order, Shared};
use crate::sync::atomic::Ordering;
use crate::sync::{heavy_fence, light_fence_towards_all};

const DESC_AT: usize = arena::AT + 4096;

fn queue(count: u32) -> (Mapping, Order) {
    let map = Mapping::model(SEGMENT_SIZE);
    let order = Order::starting(&map, order::AT, vec![0; count as usize].into(), 1);
    for index in 0..count as usize {
        map.prepare([DESC_AT + desc::stride(1) * index + desc::TOTAL], []);
    }
    map.u32(srq::AT + srq::HINT).store(1, Ordering::Relaxed);
    map.u32(srq::AT + srq::COUNT)
        .store(count, Ordering::Relaxed);
    map.u32(srq::AT + srq::DESC_COUNT)
        .store(count, Ordering::Relaxed);
    map.u32(srq::AT + srq::DESC_STRIDE)
        .store(desc::stride(1) as u32, Ordering::Relaxed);
    map.u64(srq::AT + srq::DESC_AT)
        .store(DESC_AT as u64, Ordering::Relaxed);
    map.u64(srq::AT + srq::RING_AT)
        .store(order::AT as u64, Ordering::Release);
    (map, order)
}

fn post(map: &Mapping, order: &mut Order, index: u32, len: u32) {
    let at = DESC_AT + desc::stride(1) * index as usize;
    map.u32(at + desc::TOTAL).store(len, Ordering::Relaxed);
    order.append(map, index, len);
}

/// Claims one receive. Returns its descriptor and the length in it. One claimant uses the fast
/// path.
fn claim(map: &Mapping, slot: u32) -> Option<(u32, u32)> {
    let shared = Shared::read(map, 0).unwrap();
    let Claim { index, .. } = if slot == 3 {
        shared.claim_fast(map, slot)?
    } else {
        shared.claim(map, slot)?
    };
    let at = DESC_AT + desc::stride(1) * index as usize;
    let len = map.u32(at + desc::TOTAL).load(Ordering::Relaxed);
    Some((index, len))
}

#[test]
fn each_receive_is_claimed_once_and_the_owner_knows_by_whom() {
    check(|| {
        let (map, mut order) = queue(2);
        post(&map, &mut order, 1, 100);
        let claimants: Vec<_> = [3, 4]
            .into_iter()
            .map(|slot| {
                let map = map.again();
                thread::spawn(move || (slot, claim(&map, slot)))
            })
            .collect();
        post(&map, &mut order, 0, 200);
        let mut claimed: Vec<_> = claimants
            .into_iter()
            .filter_map(|claimant| {
                let (slot, claim) = claimant.join().unwrap();
                let (index, len) = claim?;
                assert_eq!(len, if index == 1 { 100 } else { 200 });
                Some((index, slot))
            })
            .collect();
        claimed.sort_unstable_by_key(|&(index, _)| std::cmp::Reverse(index));
        let followed: Vec<_> = std::iter::from_fn(|| order.follow(&map)).collect();
        assert_eq!(followed, claimed);
        assert!(!claimed.is_empty());
    });
}

/// The words are reused while a claimant is at an old position.
#[test]
fn a_late_claimant_finds_the_receive_of_the_next_round() {
    check(|| {
        let (map, mut order) = queue(2);
        post(&map, &mut order, 0, 100);
        post(&map, &mut order, 1, 200);
        let theirs = map.again();
        let other = thread::spawn(move || (claim(&theirs, 3), claim(&theirs, 3)));
        let mine = claim(&map, 4);
        let mut followed = Vec::new();
        if let Some((index, slot)) = order.follow(&map) {
            followed.push(slot);
            post(&map, &mut order, index, 300);
        }
        let (first, second) = other.join().unwrap();
        followed.extend(std::iter::from_fn(|| order.follow(&map)).map(|(_, slot)| slot));
        followed.sort_unstable();
        assert!(first.is_some() && (mine.is_some() || second.is_some()));
        let claimants = [(first, 3), (second, 3), (mine, 4)];
        let claimed = claimants
            .into_iter()
            .filter_map(|(claim, slot)| claim.map(|_| slot));
        assert!(claimed.eq(followed));
    });
}

/// A message reports a claim to the owner, which then does not read the word. The word is reused
/// while other senders claim.
#[test]
fn a_place_that_was_not_looked_at_is_used_again() {
    check(|| {
        let (map, mut order) = queue(2);
        post(&map, &mut order, 0, 100);
        post(&map, &mut order, 1, 200);
        let message = loom::sync::Arc::new(loom::sync::atomic::AtomicU32::new(0));
        let sender = {
            let (map, message) = (map.again(), message.clone());
            thread::spawn(move || {
                let first = claim(&map, 3);
                assert_eq!(first, Some((0, 100)));
                message.store(1, Ordering::Release);
                claim(&map, 3)
            })
        };
        let mut again = false;
        if message.load(Ordering::Acquire) == 1 {
            assert_eq!(order.next(), Some(0));
            order.skip();
            post(&map, &mut order, 0, 300);
            again = true;
        }
        assert_eq!(sender.join().unwrap(), Some((1, 200)));
        assert_eq!(order.follow(&map), Some((if again { 1 } else { 0 }, 3)));
        let last = claim(&map, 4);
        assert_eq!(last, again.then_some((0, 300)));
    });
}

/// Two senders find no receive and request one, while the owner posts a receive for each and checks
/// for requests once: it finds the request of the first sender, of the second sender, or neither.
#[test]
fn senders_without_a_shared_receive_find_one_or_are_rung() {
    check(|| {
        let (map, mut order) = queue(2);
        map.prepare([srq::AT + srq::WAITING], []);
        // Both senders have been rung once before.
        let mut turn = 0;
        let asked = Shared::read(&map, 0).unwrap().ask_to_ring(&map, &mut turn);
        assert!(asked && signal::asked_in_turn(&map, srq::AT + srq::WAITING));
        let senders: Vec<_> = [3, 4]
            .into_iter()
            .map(|slot| {
                let (map, mut turn) = (map.again(), turn);
                thread::spawn(move || {
                    let shared = Shared::read(&map, 0).unwrap();
                    if shared.claim(&map, slot).is_some() {
                        return true;
                    }
                    let fresh = shared.ask_to_ring(&map, &mut turn);
                    if fresh {
                        heavy_fence();
                    }
                    fresh && shared.claim(&map, slot).is_some()
                })
            })
            .collect();
        order.append(&map, 0, 100);
        order.append(&map, 1, 200);
        light_fence_towards_all(&false.into());
        let rung = signal::asked_in_turn(&map, srq::AT + srq::WAITING);
        for sender in senders {
            assert!(sender.join().unwrap() || rung);
        }
    });
}

/// The key of a receive becomes invalid during a claim: either the receive's room is 0, or it was
/// claimed before.
#[test]
fn a_receive_that_can_t_be_written_has_no_room() {
    check(|| {
        let (map, mut order) = queue(2);
        post(&map, &mut order, 0, 100);
        let sender = {
            let map = map.again();
            thread::spawn(move || Shared::read(&map, 0).unwrap().claim(&map, 3).unwrap())
        };
        order.hide_room(&map, |_| true);
        let followed = order.follow(&map);
        let claim = sender.join().unwrap();
        assert_eq!(claim.index, 0);
        if followed.is_none() {
            assert_eq!(claim.room, 0);
        }
    });
}
