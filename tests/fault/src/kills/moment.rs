//! A process that ends itself in the middle of a post: from outside nobody hits the few microseconds in which
//! it holds a receive of a shared queue or a lock.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Posts of this process in which it holds something of another one for a while.
static POSTS: AtomicU32 = AtomicU32::new(0);
/// How long the next one is waited for.
const PATIENCE: Duration = Duration::from_millis(100);

/// Such a post begins.
pub(crate) fn note_post() {
    POSTS.fetch_add(1, Ordering::Relaxed);
}

/// Ends this process so many nanoseconds after the next such post has begun; called by another thread.
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
