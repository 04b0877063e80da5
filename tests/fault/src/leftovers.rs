//! Resources of other processes that this process holds: descriptors, and mappings of their
//! segments and rings.

use std::fs;

/// Counts of an earlier round, which later ones must not exceed.
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
    /// The caller has destroyed all objects that belonged to a dead process.
    pub(crate) fn check(&mut self) {
        self.rounds += 1;
        // the first rounds open descriptors that stay, such as doorbells of living processes
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
