//! A random mixture of changes of memory and transfers, on two threads.

#![allow(unsafe_code, reason = "changes memory")]

use std::sync::atomic::{AtomicU64, Ordering};

use super::device::{HITS, Tested, transfer};
use super::{BOUNDS, OPS, PAGE, map, open};
use crate::mr::cache::Bounds;

/// Number of calls of `mremap(2)` that the kernel refused.
static TORN: AtomicU64 = AtomicU64::new(0);

/// Memory of one thread.
enum Area {
    Mapped(*mut u8, usize),
    Allocated(Vec<u8>),
}

impl Area {
    fn place(&mut self) -> (*mut u8, usize) {
        match self {
            Self::Mapped(at, pages) => (*at, *pages * PAGE),
            Self::Allocated(bytes) => (bytes.as_mut_ptr(), bytes.len()),
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % end
    }
}

fn fill(place: *mut u8, len: usize, random: &mut Random) {
    for at in (0..len).step_by(512) {
        // SAFETY: the area is this thread's.
        unsafe { place.add(at).write(random.below(256) as u8) };
    }
}

/// One thread's part of the mixture.
fn mix(cache: &Tested, ops: usize, seed: u64) {
    let mut random = Random(seed | 1);
    let mut areas: Vec<Area> = Vec::new();
    for _ in 0..ops {
        let choice = random.below(200);
        if areas.len() < 3 || (choice < 12 && areas.len() < 12) {
            let area = if choice.is_multiple_of(2) {
                let pages = 1 + random.below(12);
                Area::Mapped(map(std::ptr::null_mut(), pages, 0), pages)
            } else {
                // below and above the sizes that allocators unmap at once
                Area::Allocated(vec![1; 1 + random.below(300_000)])
            };
            areas.push(area);
            continue;
        }
        let at = random.below(areas.len());
        match (&mut areas[at], choice) {
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 12..20) => unsafe {
                libc::munmap((*place).cast(), *pages * PAGE);
                areas.swap_remove(at);
            },
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 20..24) if *pages > 1 => unsafe {
                *pages -= 1;
                libc::munmap((*place).add(*pages * PAGE).cast(), PAGE);
            },
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 24..30) => unsafe {
                let new = 1 + random.below(12);
                let (old, len) = ((*place).cast(), *pages * PAGE);
                let moved = libc::mremap(old, len, new * PAGE, libc::MREMAP_MAYMOVE);
                if moved == libc::MAP_FAILED {
                    // now two mappings: the other thread's were watched while this one was mapped
                    // next to them
                    TORN.fetch_add(1, Ordering::Relaxed);
                } else {
                    (*place, *pages) = (moved.cast(), new);
                }
            },
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 30..36) => unsafe {
                let from = random.below(*pages);
                let len = (*pages - from) * PAGE;
                libc::madvise((*place).add(from * PAGE).cast(), len, libc::MADV_DONTNEED);
            },
            (Area::Mapped(place, pages), 36..40) => {
                map(*place, *pages, libc::MAP_FIXED);
            }
            (Area::Allocated(_), 12..24) => {
                areas.swap_remove(at);
            }
            (Area::Allocated(bytes), 24..36) => bytes.resize(1 + random.below(300_000), 2),
            // SAFETY: the child ends at once.
            (_, 40) if random.below(40) == 0 => unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(0);
                }
                assert!(child > 0);
                // the parent writes before the child ends, and after
                let (place, len) = areas[at].place();
                fill(place, len, &mut random);
                transfer(cache, place, len.min(12 * PAGE));
                assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
            },
            (area, _) => {
                let (place, len) = area.place();
                let from = random.below(len);
                let part = 1 + random.below((len - from).min(12 * PAGE));
                // SAFETY: inside the area.
                let place = unsafe { place.add(from) };
                fill(place, part, &mut random);
                transfer(cache, place, part);
            }
        }
    }
    for area in areas {
        if let Area::Mapped(place, pages) = area {
            // SAFETY: as above.
            unsafe { libc::munmap(place.cast(), pages * PAGE) };
        }
    }
}

pub(super) fn mixture() {
    let ops: usize = std::env::var(OPS).map_or(10_000, |ops| ops.parse().unwrap());
    for merge in [false, true] {
        let cache = open(Bounds { merge, ..BOUNDS });
        std::thread::scope(|scope| {
            for thread in 1..=2 {
                let cache = &cache;
                scope.spawn(move || mix(cache, ops / 4, thread * 0x9e37_79b9 + u64::from(merge)));
            }
        });
        cache.drain();
    }
    let hits = HITS.load(Ordering::Relaxed);
    println!(
        "{ops} operations, {hits} hits, {} torn",
        TORN.load(Ordering::Relaxed)
    );
    let torn = TORN.load(Ordering::Relaxed);
    assert!(torn <= ops as u64 / 1000, "mremap was refused {torn} times");
    assert!(hits > ops as u64 / 100, "the cache was hardly used: {hits}");
}
