//! Allocation of places for descriptors.

use super::Input;
use crate::segment::Arena;

/// No two places overlap, all are inside, and free space is found.
///
/// # Panics
/// If this property does not hold.
pub fn arena(data: &[u8]) {
    const START: usize = 4096;
    const ROOM: usize = 64 * Arena::GRAIN;
    let mut input = Input::new(data);
    let mut arena = Arena::new(START, ROOM).unwrap();
    // For each grain, the number of its place; 0: free.
    let mut taken = [0u32; ROOM / Arena::GRAIN];
    let mut places = Vec::new();
    let mut number = 0;
    while !input.is_empty() {
        if input.u8().is_multiple_of(2) || places.is_empty() {
            let len = input.below(20 * Arena::GRAIN);
            let grains = len.div_ceil(Arena::GRAIN).max(1);
            let fits = taken
                .windows(grains)
                .any(|grains| grains.iter().all(|&grain| grain == 0));
            let at = arena.take(len);
            assert_eq!(at.is_ok(), fits, "{len} bytes");
            if let Ok(at) = at {
                assert!(at >= START && at.is_multiple_of(Arena::GRAIN));
                let first = (at - START) / Arena::GRAIN;
                number += 1;
                for grain in &mut taken[first..first + grains] {
                    assert_eq!(std::mem::replace(grain, number), 0, "twice");
                }
                places.push((at, len, number));
            }
        } else {
            let (at, len, number) = places.swap_remove(input.below(places.len()));
            arena.give(at, len);
            for grain in taken.iter_mut().filter(|grain| **grain == number) {
                *grain = 0;
            }
        }
    }
    for (at, len, _) in places {
        arena.give(at, len);
    }
    assert_eq!(arena.take(ROOM), Ok(START), "all of it is one place again");
}
