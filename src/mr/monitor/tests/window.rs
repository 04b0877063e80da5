//! What the kernel says of a change whose event was not read.

#![allow(unsafe_code, reason = "changes memory")]

use std::time::{Duration, Instant};

use super::super::userfault;
use super::{PAGE, map};

/// Between the unmapping and its event another thread is given the addresses: the kernel says so.
pub(super) fn window() {
    let (reader, fd) = userfault::without_thread();
    let place = map(std::ptr::null_mut(), 4, 0);
    let end = place as u64 + 4 * PAGE as u64;
    reader.watch_range(place as u64, end).unwrap();
    assert!(!reader.is_changing());
    std::thread::scope(|scope| {
        let at = place as usize;
        scope.spawn(move || {
            // waits until its event is read, which is never, or the descriptor ends
            // SAFETY: the mapping is the test's.
            unsafe { libc::munmap(std::ptr::without_provenance_mut(at), 4 * PAGE) };
        });
        let start = Instant::now();
        while !reader.is_changing() {
            assert!(start.elapsed() < Duration::from_secs(60), "never seen");
        }
        // the addresses are free, and can be had
        map(place, 4, libc::MAP_FIXED_NOREPLACE);
        assert!(reader.is_changing());
        fd.end();
    });
}
