//! The end of a process that has not closed its endpoints.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::endpoint::LINGER;
use super::shared::{LINGER_PERIOD, Shared};

/// How long the wait for the peers may make no progress. If a signal interrupts a thread inside a
/// call, and its handler calls `exit(3)`, this thread never releases the lock that the wait needs.
/// Other threads release it, after at most 2 s if a device waits for another process.
const STUCK: Duration = Duration::from_millis(2500);
/// Time between two looks whether the wait makes progress.
const LOOK: Duration = Duration::from_millis(50);

/// Waits until the peers of all endpoints of the process have received what was injected, at most
/// 10 s. Called when the process ends: endpoints that were not closed lose nothing.
///
/// Another thread waits, because the calling one may have a lock of an endpoint already. Endpoints
/// whose locks are not released within 2.5 s are left out.
pub fn linger_all() {
    let endpoints = Shared::all();
    if !endpoints.is_empty() {
        within(STUCK, move |gone_on| linger(endpoints, gone_on));
    }
}

/// Waits for the peers of endpoints. Calls `gone_on` in each round that has found one unlocked.
fn linger(mut endpoints: Vec<Arc<Shared>>, gone_on: &dyn Fn()) {
    let limit = Instant::now() + LINGER;
    loop {
        let mut found = false;
        endpoints.retain(|endpoint| {
            let owes = endpoint.owes();
            found |= owes.is_some();
            owes != Some(false)
        });
        if endpoints.is_empty() || Instant::now() >= limit {
            return;
        }
        if found {
            gone_on();
        }
        std::thread::sleep(LINGER_PERIOD);
    }
}

/// Runs `wait` in another thread until it returns, or has not called its argument for a time.
fn within(time: Duration, wait: impl FnOnce(&dyn Fn()) + Clone + Send + 'static) {
    let rounds = Arc::new(AtomicU32::new(0));
    let (ended, end) = channel::<()>();
    let (counter, again) = (Arc::clone(&rounds), wait.clone());
    let waits = std::thread::Builder::new()
        .name("weft-end".to_owned())
        .spawn(move || {
            wait(&|| {
                counter.fetch_add(1, Ordering::Relaxed);
            });
            // the receiver is notified, also of a panic
            drop(ended);
        });
    if waits.is_err() {
        // without a thread the wait ends by its own limit
        return again(&|| ());
    }
    let mut seen = (rounds.load(Ordering::Relaxed), Instant::now());
    while end.recv_timeout(LOOK.min(time)) == Err(RecvTimeoutError::Timeout) {
        let (now, time_now) = (rounds.load(Ordering::Relaxed), Instant::now());
        if now != seen.0 {
            seen = (now, time_now);
        } else if time_now.saturating_duration_since(seen.1) >= time {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn a_wait_that_goes_on_is_awaited() {
        let done = Arc::new(AtomicU32::new(0));
        let waits = Arc::clone(&done);
        // longer than the test may lose the processor
        within(Duration::from_secs(1), move |gone_on| {
            for _ in 0..30 {
                std::thread::sleep(Duration::from_millis(50));
                gone_on();
            }
            waits.store(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_wait_for_a_lock_of_the_calling_thread_ends() {
        let lock = Arc::new(Mutex::new(()));
        let held = lock.lock();
        let other = Arc::clone(&lock);
        let begin = Instant::now();
        within(Duration::from_millis(20), move |gone_on| {
            gone_on();
            drop(other.lock());
        });
        assert!(begin.elapsed() < Duration::from_secs(10));
        drop(held);
    }
}
