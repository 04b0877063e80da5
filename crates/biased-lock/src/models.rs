//! Models of the mutex: loom tries each order that the memory model allows.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::raw::RawMutex;

/// A counter under the mutex. loom's cell fails the model if two threads are inside.
struct Counter {
    mutex: RawMutex,
    value: UnsafeCell<u32>,
}

// SAFETY: the mutex admits one thread at a time, which loom checks.
#[expect(unsafe_code, reason = "the counter of the models")]
unsafe impl Sync for Counter {}

impl Counter {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            mutex: RawMutex::new(),
            value: UnsafeCell::new(0),
        })
    }

    fn lock(&self, thread: usize, visitor: bool) -> Option<usize> {
        let visits: fn() -> bool = if visitor { || true } else { || false };
        let place = self.mutex.enter(thread);
        if place.is_none() {
            self.mutex.lock_others(thread, visits);
        }
        place
    }

    fn unlock(&self, place: Option<usize>) {
        match place {
            Some(place) => self.mutex.leave(place),
            None => self.mutex.unlock_others(),
        }
    }

    #[expect(unsafe_code, reason = "loom's cell")]
    fn add(&self) {
        // SAFETY: the caller has the mutex, which loom checks.
        self.value.with_mut(|value| unsafe { *value += 1 });
    }

    fn count(&self, thread: usize, visitor: bool) {
        let place = self.lock(thread, visitor);
        self.add();
        self.unlock(place);
    }

    fn try_count(&self, thread: usize, visitor: bool) -> bool {
        let visits: fn() -> bool = if visitor { || true } else { || false };
        let place = self.mutex.enter(thread);
        if place.is_none() && !self.mutex.try_lock_others(thread, visits) {
            return false;
        }
        self.add();
        self.unlock(place);
        true
    }

    /// The value, after the end of all other threads.
    fn total(&self, thread: usize) -> u32 {
        let place = self.lock(thread, true);
        #[expect(unsafe_code, reason = "loom's cell")]
        // SAFETY: as `add`.
        let value = self.value.with(|value| unsafe { *value });
        self.unlock(place);
        value
    }
}

// identifiers of threads; 1 and 2 have different places
const A: usize = 1;
const B: usize = 2;
const C: usize = 3;

/// Tries all executions with at most this many preemptions.
fn model(preemptions: usize, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(run);
}

/// A thread with the bias, and a visitor.
#[test]
fn a_visitor_excludes_the_owner_of_the_bias() {
    model(4, || {
        let counter = Counter::new();
        counter.count(A, false);
        let theirs = Arc::clone(&counter);
        let visitor = thread::spawn(move || theirs.count(B, true));
        counter.count(A, false);
        counter.count(A, false);
        visitor.join().unwrap();
        assert_eq!(counter.total(C), 4);
        // the visitor has returned the bias
        assert!(counter.mutex.enter(A).is_some());
    });
}

/// The bias moves from one thread to another, which both lock the mutex.
#[test]
fn the_bias_moves() {
    model(4, || {
        let counter = Counter::new();
        counter.count(A, false);
        let theirs = Arc::clone(&counter);
        let other = thread::spawn(move || {
            for _ in 0..2 {
                theirs.count(B, false);
            }
        });
        counter.count(A, false);
        counter.count(A, false);
        other.join().unwrap();
        assert_eq!(counter.total(C), 5);
    });
}

/// Threads that do not wait.
#[test]
fn a_trial_excludes_the_owner_of_the_bias() {
    model(4, || {
        let counter = Counter::new();
        counter.count(A, false);
        let theirs = Arc::clone(&counter);
        let visitor = thread::spawn(move || u32::from(theirs.try_count(B, true)));
        let mine = u32::from(counter.try_count(A, false));
        counter.count(A, false);
        let other = visitor.join().unwrap();
        assert_eq!(counter.total(C), 2 + mine + other);
    });
}

/// A visitor, and a thread that takes the bias away.
#[test]
fn a_visitor_returns_no_bias_that_another_thread_has_taken() {
    model(2, || {
        let counter = Counter::new();
        counter.count(A, false);
        let (theirs, others) = (Arc::clone(&counter), Arc::clone(&counter));
        let visitor = thread::spawn(move || theirs.count(C, true));
        let other = thread::spawn(move || others.count(B, false));
        counter.count(A, false);
        visitor.join().unwrap();
        other.join().unwrap();
        assert_eq!(counter.total(C), 4);
    });
}
