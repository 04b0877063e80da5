//! What a process still holds of others: descriptors, and mappings of their segments and rings.

use std::fs;

/// Counts of an earlier time, which later ones must not exceed.
#[derive(Default)]
pub(crate) struct Leftovers {
    rounds: usize,
    most: Option<(usize, usize)>,
}

/// Descriptors, and mappings of the device's shared memory.
pub(crate) fn count() -> (usize, usize) {
    let fds = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let maps = maps
        .lines()
        .filter(|line| line.contains("softverbs"))
        .count();
    (fds, maps)
}

impl Leftovers {
    /// To be called when everything that concerned a dead process was destroyed.
    pub(crate) fn check(&mut self) {
        self.rounds += 1;
        // The first rounds open what stays, such as doorbells between those that live.
        if self.rounds < 8 {
            return;
        }
        let now = count();
        let most = *self.most.get_or_insert(now);
        assert!(
            now.0 <= most.0 && now.1 <= most.1,
            "descriptors and mappings: {now:?}, and {most:?} after eight rounds"
        );
    }
}
