//! The atomics of verbs as an application requests them, `fi_atomic(3)`.

/// The operation on the target (`fi_atomic(3)`), a 64-bit integer in the byte order of the target's
/// host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds, wrapping.
    Add(u64),
    /// Stores `swap` if the target equals `compare`.
    CompareSwap {
        /// Value that the target is compared with.
        compare: u64,
        /// Value that is stored if they are equal.
        swap: u64,
    },
}

/// The kind of call that posts an atomic; determines the flags of its completion and its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    /// `fi_atomic`, `fi_atomicv`, `fi_atomicmsg`, `fi_inject_atomic`: counted as a write.
    Base,
    /// `fi_fetch_atomic`, `fi_compare_atomic`: counted as a read.
    Fetch,
}
