//! A process that ends itself in the middle of a post. A kill from outside rarely hits the few
//! microseconds in which the process holds a receive of a shared queue or a lock.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Number of started posts that hold a receive or a lock of another process for a time.
static POSTS: AtomicU32 = AtomicU32::new(0);
/// Limit of the wait for the next such post.
const PATIENCE: Duration = Duration::from_millis(100);

/// Counts the start of such a post.
pub(crate) fn note_post() {
    POSTS.fetch_add(1, Ordering::Relaxed);
}

/// Ends this process the given number of nanoseconds after the start of the next such post; called
/// by another thread.
pub(crate) fn end_in_a_post(nanoseconds: u64) -> ! {
    let before = POSTS.load(Ordering::Relaxed);
    let begin = Instant::now();
    while POSTS.load(Ordering::Relaxed) == before && begin.elapsed() < PATIENCE {
        std::hint::spin_loop();
    }
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_nanos(nanoseconds) {
        std::hint::spin_loop();
    }
    loop {
        // SAFETY: no memory is passed.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
}
