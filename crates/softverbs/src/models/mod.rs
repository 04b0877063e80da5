//! Models of the data that processes share without a lock: loom runs each in every order that the
//! memory model allows, up to a bound of preemptions (`make check-loom`).
//!
//! The models run the shipped code. Only [`Mapping`](crate::segment::Mapping) supplies loom's words
//! instead of memory, and a ring has 4 slots. A lock is released by an exchange instead of a store
//! (`Guard` in `crate::sync`). Two things are not modelled. A barrier of `membarrier(2)` is a fence
//! on both sides here, which also orders two light fences with each other; no protocol has light
//! fences on both sides. And payload is a cell of the model instead of bytes.
//!
//! Each model fails when one of its orderings is weakened: `tests/loom/weakened.py` has the list,
//! and `make check-loom OPTIONS=--planted` runs it.

mod buffers;
mod closing;
mod lock;
mod pending;
mod receive_ring;
mod region;
mod ring;
mod signal;
mod srq;

use std::sync::Arc;

use loom::cell::UnsafeCell;

/// Runs a model. Three preemptions are enough to find all planted bugs.
fn check(model: impl Fn() + Send + Sync + 'static) {
    check_within(3, model);
}

/// As [`check`], with at most so many changes of the thread at steps that do not block.
fn check_within(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Plain memory, for which loom detects data races.
#[derive(Clone)]
struct Memory(Arc<UnsafeCell<u64>>);

// SAFETY: loom fails the model if two threads use it at the same time.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(value: u64) -> Self {
        Self(Arc::new(UnsafeCell::new(value)))
    }

    fn read(&self) -> u64 {
        // SAFETY: loom checks it.
        self.0.with(|cell| unsafe { *cell })
    }

    fn write(&self, value: u64) {
        // SAFETY: loom checks it.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }
}
