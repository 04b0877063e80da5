//! Between an unmapping and its event another thread may get the addresses: the kernel reports
//! that, and the cache serves none.

#![allow(unsafe_code, reason = "changes memory")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::{Watching, userfault};
use super::device::Pipes;
use super::ways::{hit, kept};
use super::{BOUNDS, PAGE, map};
use crate::mr::cache::Cache;

/// A mapping of four pages that the kernel does not merge with others: unmapping those would wait
/// too.
pub(super) fn alone() -> *mut u8 {
    let all = map(std::ptr::null_mut(), 6, 0);
    // SAFETY: the mapping is the test's.
    unsafe {
        for edge in [all, all.wrapping_add(5 * PAGE)] {
            assert_eq!(libc::mprotect(edge.cast(), PAGE, libc::PROT_NONE), 0);
        }
    }
    all.wrapping_add(PAGE)
}

pub(super) fn window() {
    let (monitor, reader) = userfault::without_thread();
    let monitor = Arc::new(monitor);
    // a cache without the check shows the error that the check prevents
    let caches = [true, false].map(|check| {
        let by = Arc::clone(&monitor);
        let cache = Cache::new(Pipes, BOUNDS, |index| {
            let index = Arc::clone(index);
            Ok(Box::new(Watching::by(by, index, check)?))
        });
        cache.unwrap()
    });
    let place = alone();
    // SAFETY: the mapping is the test's.
    unsafe { place.write_bytes(1, 4 * PAGE) };
    assert!(caches.iter().all(|cache| kept(cache, place)));
    assert!(!monitor.is_changing());
    std::thread::scope(|scope| {
        let at = place as usize;
        scope.spawn(move || {
            // the call waits until its event is read, or the descriptor ends; no thread reads it
            // SAFETY: as above.
            unsafe { libc::munmap(std::ptr::without_provenance_mut(at), 4 * PAGE) };
        });
        let start = Instant::now();
        while !monitor.is_changing() {
            assert!(start.elapsed() < Duration::from_secs(60), "never seen");
        }
        // the addresses are free and can be mapped
        map(place, 4, libc::MAP_FIXED_NOREPLACE);
        assert!(monitor.is_changing());
        assert_eq!(
            caches.each_ref().map(|cache| hit(cache, place)),
            [false, true]
        );
        reader.end();
    });
}
