//! Calls that change registered memory, one after the other, with a cache hit before each.

#![allow(unsafe_code, reason = "changes memory")]

use std::time::{Duration, Instant};

use super::super::userfault;
use super::device::{Tested, transfer};
use super::{BOUNDS, PAGE, map, open};
use crate::errno::FiErrno;

const LEN: usize = 4 * PAGE;
/// Constants of linux/mman.h, some of which the C library's declarations lack.
const MADV_DONTNEED_LOCKED: libc::c_int = 24;
const MREMAP_DONTUNMAP: libc::c_int = 4;

/// Changes memory; returns the new address of the place.
type Way = fn(*mut u8) -> *mut u8;

/// Transfers until the cache has a registration; none is cached while an event is processed.
pub(super) fn kept(cache: &Tested, place: *mut u8) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        transfer(cache, place, LEN);
        if hit(cache, place) {
            return true;
        }
    }
    false
}

pub(super) fn hit(cache: &Tested, place: *mut u8) -> bool {
    let addr = place as u64;
    let held = cache.find(addr, addr + 1, false, None);
    held.inspect(|held| cache.release(held)).is_some()
}

fn fill(place: *mut u8, byte: u8) {
    // SAFETY: the mapping is the test's.
    unsafe { place.write_bytes(byte, LEN) };
}

fn advise(place: *mut u8, len: usize, advice: libc::c_int) -> libc::c_int {
    // SAFETY: as above.
    unsafe { libc::madvise(place.cast(), len, advice) }
}

fn moved(from: *mut u8, len: usize, more: libc::c_int, to: *mut u8) -> *mut u8 {
    // SAFETY: as above.
    unsafe {
        let new = libc::mremap(from.cast(), LEN, len, libc::MREMAP_MAYMOVE | more, to);
        assert_ne!(new, libc::MAP_FAILED);
        new.cast()
    }
}

fn moved_to(from: *mut u8, to: *mut u8) {
    moved(from, LEN, libc::MREMAP_FIXED, to);
}

fn somewhere() -> *mut u8 {
    map(std::ptr::null_mut(), 4, 0)
}

const LOSE: [(&str, Way); 14] = [
    ("munmap and mmap", |at| {
        // SAFETY: as above.
        unsafe { libc::munmap(at.cast(), LEN) };
        map(at, 4, libc::MAP_FIXED)
    }),
    ("mmap over it", |at| map(at, 4, libc::MAP_FIXED)),
    ("munmap of one page", |at| {
        // SAFETY: as above.
        unsafe { libc::munmap(at.wrapping_add(3 * PAGE).cast(), PAGE) };
        map(at.wrapping_add(3 * PAGE), 1, libc::MAP_FIXED);
        at
    }),
    ("mremap and mmap", |at| {
        moved_to(at, somewhere());
        map(at, 4, libc::MAP_FIXED)
    }),
    ("where mremap moved it", |at| {
        moved(at, 2 * LEN, 0, std::ptr::null_mut())
    }),
    ("mremap onto it", |at| {
        moved_to(somewhere(), at);
        at
    }),
    ("mremap without unmapping", |at| {
        moved(at, LEN, MREMAP_DONTUNMAP, std::ptr::null_mut());
        at
    }),
    ("mremap to one page and mmap", |at| {
        assert_eq!(moved(at, PAGE, 0, std::ptr::null_mut()), at);
        map(at.wrapping_add(PAGE), 3, libc::MAP_FIXED);
        at
    }),
    ("DONTNEED", |at| {
        assert_eq!(advise(at, PAGE, libc::MADV_DONTNEED), 0);
        at
    }),
    ("DONTNEED of the last page", |at| {
        let last = at.wrapping_add(3 * PAGE);
        assert_eq!(advise(last, PAGE, libc::MADV_DONTNEED), 0);
        at
    }),
    ("DONTNEED_LOCKED", |at| {
        // from Linux 5.18 on
        if advise(at, PAGE, MADV_DONTNEED_LOCKED) != 0 {
            assert_eq!(advise(at, PAGE, libc::MADV_DONTNEED), 0);
        }
        at
    }),
    ("FREE", |at| {
        assert_eq!(advise(at, LEN, libc::MADV_FREE), 0);
        at
    }),
    ("fork", |at| {
        // SAFETY: the child ends at once.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(0);
            }
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        at
    }),
    ("brk", |_| {
        // SAFETY: nothing else in this process moves the break meanwhile.
        unsafe {
            libc::sbrk(-(LEN as isize));
            libc::sbrk(LEN as isize).cast()
        }
    }),
];

/// A range that loses its pages is not used again.
pub(super) fn lost() {
    let cache = open(BOUNDS);
    for (name, lose) in LOSE {
        let place = if name == "brk" {
            // SAFETY: as above.
            unsafe {
                let end = libc::sbrk(0) as usize;
                libc::sbrk(((PAGE - end % PAGE) % PAGE) as isize);
                libc::sbrk(LEN as isize).cast()
            }
        } else {
            somewhere()
        };
        fill(place, 1);
        assert!(kept(&cache, place), "not kept before {name}");
        fill(place, 2);
        let place = lose(place);
        // also parts that the call did not touch, page by page
        for page in 0..4 {
            let at = place.wrapping_add(page * PAGE);
            assert!(!hit(&cache, at), "page {page} kept over {name}");
        }
        fill(place, 3);
        assert!(kept(&cache, place), "not kept after {name}");
        println!("{name}");
    }
}

/// A range that keeps its pages stays cached: the device finds bytes that are written later.
pub(super) fn stays() {
    let cache = open(BOUNDS);
    let stay: [(&str, Way); 5] = [
        ("mprotect", |at| {
            // SAFETY: as above.
            unsafe {
                assert_eq!(libc::mprotect(at.cast(), LEN, libc::PROT_NONE), 0);
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                assert_eq!(libc::mprotect(at.cast(), LEN, rights), 0);
            }
            at
        }),
        ("REMOVE, which is for shared memory", |at| {
            assert_eq!(advise(at, LEN, libc::MADV_REMOVE), -1);
            at
        }),
        ("COLD", |at| {
            advise(at, LEN, libc::MADV_COLD);
            at
        }),
        ("PAGEOUT", |at| {
            advise(at, LEN, libc::MADV_PAGEOUT);
            at
        }),
        ("unmapping beside it", |at| {
            let other = somewhere();
            // SAFETY: as above.
            unsafe { libc::munmap(other.cast(), LEN) };
            at
        }),
    ];
    for (name, change) in stay {
        let place = somewhere();
        fill(place, 1);
        assert!(kept(&cache, place), "not kept before {name}");
        let place = change(place);
        for byte in 2..10 {
            fill(place, byte);
            transfer(&cache, place, LEN);
        }
        assert!(hit(&cache, place), "not kept over {name}");
        println!("{name}");
    }
}

/// Memory whose changes would not be reported is never cached.
pub(super) fn untold() {
    let cache = open(BOUNDS);
    let never = |place: *mut u8| {
        for byte in 1..10 {
            fill(place, byte);
            transfer(&cache, place, LEN);
            assert!(!hit(&cache, place));
        }
    };
    // SAFETY: new mappings, of the test.
    unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, LEN, 0o600);
        let segment: *mut u8 = libc::shmat(id, std::ptr::null(), 0).cast();
        libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut());
        never(segment);
        // other memory at the address of a detached segment
        assert_eq!(libc::shmdt(segment.cast()), 0);
        map(segment, 4, libc::MAP_FIXED);
        fill(segment, 1);
        assert!(kept(&cache, segment));

        let file = libc::memfd_create(c"weft-test".as_ptr(), libc::MFD_CLOEXEC);
        libc::ftruncate(file, LEN as i64);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let file_at = |flags| {
            let new = libc::mmap(std::ptr::null_mut(), LEN, prot, flags, file, 0);
            assert_ne!(new, libc::MAP_FAILED);
            new.cast::<u8>()
        };
        let shared = file_at(libc::MAP_SHARED);
        never(shared);
        // a hole in the file, made by the file and by the mapping
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!(libc::fallocate(file, flags, 0, PAGE as i64), 0);
        transfer(&cache, shared, LEN);
        assert_eq!(advise(shared, LEN, libc::MADV_REMOVE), 0);
        transfer(&cache, shared, LEN);
        never(shared);
        // private mappings: pages are the file's until they are written
        never(file_at(libc::MAP_PRIVATE));

        // the check of the pages agrees
        let monitor = userfault::Userfault::get().expect("userfaultfd");
        let own = |at: *mut u8| monitor.is_anonymous(at as u64, at as u64 + LEN as u64);
        assert!(!own(shared), "a file's");
        let place = somewhere();
        assert!(!own(place), "not there");
        fill(place, 1);
        assert!(own(place));
        assert_eq!(advise(place, PAGE, libc::MADV_DONTNEED), 0);
        assert!(!own(place), "not there any more");
    }
}

/// A second descriptor, as of the application, cannot watch a mapping that the monitor watches.
pub(super) fn taken() {
    let monitor = userfault::Userfault::get().expect("userfaultfd");
    let place = somewhere() as u64;
    monitor.watch_range(place, place + PAGE as u64).unwrap();
    let (other, reader) = userfault::without_thread();
    let beside = place + 2 * PAGE as u64;
    let refused = other.watch_range(beside, beside + PAGE as u64);
    assert_eq!(refused, Err(FiErrno::EBUSY));
    reader.end();
}
