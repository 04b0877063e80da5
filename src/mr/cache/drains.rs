//! Which threads deregister dead registrations. A thread that begins to do so never waits: it may
//! hold the lock of an endpoint.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// Time between two looks of a thread that waits.
const PAUSE: Duration = Duration::from_micros(50);

/// The threads that deregister, counted by the parity of the generation in which they have begun.
#[derive(Debug, Default)]
pub(super) struct Drains {
    generation: AtomicU32,
    active: [AtomicU32; 2],
    /// Held by the thread that has begun the generation, until those of the earlier one are done.
    waiting: Mutex<()>,
}

/// One thread that deregisters.
pub(super) struct Drain<'a>(&'a AtomicU32);

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Drains {
    fn of(&self, generation: u32) -> &AtomicU32 {
        &self.active[(generation % 2) as usize]
    }

    /// The thread is about to take the list of dead registrations.
    pub(super) fn begin(&self) -> Drain<'_> {
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            self.of(generation).fetch_add(1, Ordering::SeqCst);
            let drain = Drain(self.of(generation));
            // otherwise the thread that has begun the next generation may have seen 0
            if self.generation.load(Ordering::SeqCst) == generation {
                return drain;
            }
        }
    }

    /// Waits until the threads that have begun before are done. Later ones do not extend the wait.
    pub(super) fn await_earlier(&self) {
        let _waiting = self.waiting.lock();
        let earlier = self.generation.fetch_add(1, Ordering::SeqCst);
        while self.of(earlier).load(Ordering::SeqCst) != 0 {
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_for_those_that_have_begun_before_it() {
        let drains = Drains::default();
        let first = drains.begin();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| drains.await_earlier());
            while drains.generation.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let later = drains.begin();
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished());
            drop(first);
            waits.join().unwrap();
            drop(later);
        });
        drains.await_earlier();
    }
}
