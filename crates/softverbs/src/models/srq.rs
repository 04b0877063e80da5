//! The order of a shared receive queue, claimed by several processes.

use loom::thread;

use super::check;
use crate::segment::Mapping;
use crate::segment::layout::{SEGMENT_SIZE, arena, desc, srq};
use crate::srq::{Order, Shared};
use crate::sync::atomic::Ordering;

const DESC_AT: usize = arena::AT + 4096;

fn queue(count: u32) -> (Mapping, Order) {
    let map = Mapping::model(SEGMENT_SIZE);
    let order = Order::starting(&map, arena::AT, vec![0; count as usize].into(), 1);
    for index in 0..count as usize {
        map.prepare([DESC_AT + desc::stride(1) * index + desc::TOTAL], []);
    }
    map.u32(srq::AT + srq::HINT).store(1, Ordering::Relaxed);
    map.u32(srq::AT + srq::COUNT)
        .store(count, Ordering::Relaxed);
    map.u32(srq::AT + srq::DESC_STRIDE)
        .store(desc::stride(1) as u32, Ordering::Relaxed);
    map.u64(srq::AT + srq::DESC_AT)
        .store(DESC_AT as u64, Ordering::Relaxed);
    map.u64(srq::AT + srq::RING_AT)
        .store(arena::AT as u64, Ordering::Release);
    (map, order)
}

fn post(map: &Mapping, order: &mut Order, index: u32, len: u32) {
    let at = DESC_AT + desc::stride(1) * index as usize;
    map.u32(at + desc::TOTAL).store(len, Ordering::Relaxed);
    order.append(map, index);
}

/// Claims one receive; its descriptor and the length that it says.
fn claim(map: &Mapping, slot: u32) -> Option<(u32, u32)> {
    let index = Shared::read(map, 0).unwrap().claim(map, slot)?;
    let at = DESC_AT + desc::stride(1) * index as usize;
    Some((index, map.u32(at + desc::TOTAL).load(Ordering::Relaxed)))
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

/// The words go round while a claimant is at an old place.
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
