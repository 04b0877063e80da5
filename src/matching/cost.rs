//! Counts the lines and entries that an operation reads, in tests. Nothing otherwise.

#[cfg(test)]
thread_local! {
    static VISITS: std::cell::Cell<Visits> = const { std::cell::Cell::new(Visits { lines: 0, entries: 0 }) };
}

/// What the operations of this thread have read.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Visits {
    /// Lines of hash tables.
    pub(super) lines: u64,
    /// Entries, and their links.
    pub(super) entries: u64,
}

/// Returns the counts and sets them to 0.
#[cfg(test)]
pub(super) fn take() -> Visits {
    VISITS.take()
}

/// One line of a table is read.
#[inline(always)]
pub(super) fn line() {
    #[cfg(test)]
    VISITS.with(|visits| {
        let mut now = visits.get();
        now.lines += 1;
        visits.set(now);
    });
}

/// One entry is read.
#[inline(always)]
pub(super) fn entry() {
    #[cfg(test)]
    VISITS.with(|visits| {
        let mut now = visits.get();
        now.entries += 1;
        visits.set(now);
    });
}
