//! The order of a shared receive queue, claimed by several processes.

use loom::thread;

use super::check;
use crate::segment::Mapping;
use crate::segment::layout::{SEGMENT_SIZE, arena, desc, order, qp, srq};
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
    map.u64(srq::AT + srq::ORDER_AT)
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

/// A sender that finds no receive asks, and looks once more if it has to. Returns whether it has a
/// receive; if not, it sleeps.
fn claim_or_ask(map: &Mapping, slot: u32, turn: &mut u32) -> bool {
    let shared = Shared::read(map, 0).unwrap();
    if shared.claim(map, slot).is_some() {
        return true;
    }
    let fresh = shared.ask_to_ring(map, slot, turn);
    if fresh {
        heavy_fence();
    }
    fresh && shared.claim(map, slot).is_some()
}

/// The names of the processes that wait, if there is a request.
fn waiters(map: &Mapping) -> u64 {
    let at = (srq::AT + srq::WAITING, srq::AT + srq::WAITERS);
    signal::waiters_in_turn(map, at.0, at.1).map_or(0, |words| words[0])
}

/// A queue whose requests, of the sender in slot 3, have been taken once.
fn asked_once(count: u32) -> (Mapping, Order, u32) {
    let (map, order) = queue(count);
    map.prepare([srq::AT + srq::WAITING], [srq::AT + srq::WAITERS]);
    let mut turn = 0;
    assert!(!claim_or_ask(&map, 3, &mut turn));
    assert_eq!(waiters(&map), 1 << 3);
    (map, order, turn)
}

/// Two senders find no receive and request one, while the owner posts a receive for each and checks
/// for requests once: it finds the request of the first sender, of the second sender, or neither.
#[test]
fn senders_without_a_shared_receive_find_one_or_are_rung() {
    check(|| {
        let (map, mut order, turn) = asked_once(2);
        let senders: Vec<_> = [3, 4]
            .into_iter()
            .map(|slot| {
                let (map, mut turn) = (map.again(), turn);
                thread::spawn(move || (slot, claim_or_ask(&map, slot, &mut turn)))
            })
            .collect();
        order.append(&map, 0, 100);
        order.append(&map, 1, 200);
        light_fence_towards_all(&false.into());
        let rung = waiters(&map);
        for sender in senders {
            let (slot, claimed) = sender.join().unwrap();
            assert!(claimed || rung & 1 << slot != 0, "{slot}");
        }
    });
}

/// A sender asks while the owner posts a receive, for which another sender waits, and then another
/// receive.
#[test]
fn a_sender_that_sleeps_is_rung_by_a_later_receive() {
    check(|| {
        let (map, mut order, mut turn) = asked_once(2);
        assert!(!claim_or_ask(&map, 3, &mut turn));
        let other = map.again();
        let sender = thread::spawn(move || claim_or_ask(&other, 4, &mut 0));
        post(&map, &mut order, 0, 100);
        light_fence_towards_all(&false.into());
        let mut rung = waiters(&map);
        let took = claim(&map, 3).is_some();
        post(&map, &mut order, 1, 200);
        light_fence_towards_all(&false.into());
        // a sender that the first receive has rung looks again, as in the next model
        rung |= waiters(&map);
        assert!(sender.join().unwrap() || rung & 1 << 4 != 0, "{took}");
    });
}

/// A thread of the owner takes the names while a sender asks again, and another thread posts a
/// receive. The sender looks again when it is rung.
#[test]
fn a_sender_whose_name_is_taken_late_is_rung() {
    check(|| {
        let (map, mut order, mut turn) = asked_once(2);
        assert!(!claim_or_ask(&map, 3, &mut turn));
        let doorbell = loom::sync::Arc::new(loom::sync::atomic::AtomicU32::new(0));
        let late = {
            let (map, doorbell) = (map.again(), doorbell.clone());
            thread::spawn(move || {
                if waiters(&map) != 0 {
                    doorbell.fetch_add(1, Ordering::AcqRel);
                }
            })
        };
        let sender = {
            let (map, doorbell) = (map.again(), doorbell.clone());
            thread::spawn(move || {
                let again = claim_or_ask(&map, 3, &mut turn);
                let rung = doorbell.swap(0, Ordering::AcqRel) != 0;
                again || rung && claim_or_ask(&map, 3, &mut turn)
            })
        };
        post(&map, &mut order, 0, 100);
        light_fence_towards_all(&false.into());
        if waiters(&map) != 0 {
            doorbell.fetch_add(1, Ordering::AcqRel);
        }
        late.join().unwrap();
        let claimed = sender.join().unwrap();
        assert!(claimed || doorbell.load(Ordering::Acquire) != 0);
    });
}

/// Two queue pairs of one process ask in the turn of their last calls, after the name of the
/// process has been taken late.
#[test]
fn both_queue_pairs_of_a_process_find_a_receive_or_are_rung() {
    check(|| {
        let (map, mut order, mut turn) = asked_once(2);
        assert!(!claim_or_ask(&map, 3, &mut turn));
        map.u64(srq::AT + srq::WAITERS).store(0, Ordering::Relaxed);
        let senders: Vec<_> = (0..2)
            .map(|_| {
                let (map, mut turn) = (map.again(), turn);
                thread::spawn(move || claim_or_ask(&map, 3, &mut turn))
            })
            .collect();
        post(&map, &mut order, 0, 100);
        post(&map, &mut order, 1, 200);
        light_fence_towards_all(&false.into());
        let rung = waiters(&map) != 0;
        for sender in senders {
            assert!(sender.join().unwrap() || rung);
        }
    });
}

/// A pull has found no sender that waits and withdraws the request; meanwhile a sender that has
/// seen this turn before begins to wait, and another thread of the owner posts a receive.
#[test]
fn a_sender_that_waits_while_a_pull_ends_finds_a_receive_or_is_rung() {
    const WAITS: usize = qp::AT + qp::WAITING;
    check(|| {
        let (map, mut order, mut turn) = asked_once(1);
        map.prepare([WAITS], []);
        assert!(!claim_or_ask(&map, 3, &mut turn));
        let sender = {
            let map = map.again();
            thread::spawn(move || {
                let fresh = signal::ask_as_one(&map, WAITS, 3);
                let shared = Shared::read(&map, 0).unwrap();
                let fresh = shared.ask_to_ring(&map, 3, &mut turn) || fresh;
                if fresh {
                    heavy_fence();
                }
                fresh && shared.claim(&map, 3).is_some()
            })
        };
        let puller = {
            let map = map.again();
            thread::spawn(move || {
                let waits = || signal::asks(&map, WAITS);
                signal::stop_asking_in_turn(&map, srq::AT + srq::WAITING, waits)
            })
        };
        post(&map, &mut order, 0, 100);
        light_fence_towards_all(&false.into());
        let rung = signal::asked_in_turn(&map, srq::AT + srq::WAITING);
        let claimed = sender.join().unwrap();
        assert!(puller.join().unwrap() || rung || claimed);
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
