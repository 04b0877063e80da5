//! While a change is being reported, the gate is closed.

#![allow(unsafe_code, reason = "changes memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::super::{Gate, Listed, userfault};
use super::{PAGE, map};
use crate::mr::cache::Index;

/// Reads the gate when a change is reported.
struct Told {
    place: u64,
    closed: AtomicUsize,
    open: AtomicUsize,
}

impl Index for Told {
    fn kill(&self, start: u64, end: u64) {
        if start <= self.place && self.place < end {
            let is_open = Gate::get().is_some_and(Gate::is_open);
            let count = if is_open { &self.open } else { &self.closed };
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

pub(super) fn closed() {
    let monitor = userfault::Userfault::get().expect("userfaultfd");
    let place = map(std::ptr::null_mut(), 4, 0);
    let told = Arc::new(Told {
        place: place as u64,
        closed: AtomicUsize::new(0),
        open: AtomicUsize::new(0),
    });
    let _listed = Listed::new(Arc::clone(&told) as _, Gate::get().unwrap()).unwrap();
    let end = place as u64 + 4 * PAGE as u64;
    monitor.watch_range(place as u64, end).unwrap();
    let start = Instant::now();
    for round in 1..=50 {
        // SAFETY: the mapping is the test's.
        unsafe {
            place.write(1);
            libc::madvise(place.cast(), PAGE, libc::MADV_DONTNEED);
        }
        // the call waits until its event is read, not until the change is reported
        while told.closed.load(Ordering::SeqCst) < round {
            assert_eq!(told.open.load(Ordering::SeqCst), 0, "the gate is open");
            assert!(start.elapsed() < Duration::from_secs(60), "not told");
        }
    }
    // the gate opens again
    while !Gate::get().is_some_and(Gate::is_open) {
        assert!(start.elapsed() < Duration::from_secs(60), "it stays closed");
    }
}
