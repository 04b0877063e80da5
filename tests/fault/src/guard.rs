//! Ends this process if it makes no progress, with a message that names the current step.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Seconds; longer than every other limit.
const PATIENCE: u64 = 60;

static NOW: Mutex<String> = Mutex::new(String::new());
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Starts the watching thread.
pub(crate) fn start() {
    std::thread::spawn(|| {
        let mut last = (0, 0);
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let count = COUNT.load(Ordering::Relaxed);
            last = if last.0 == count {
                (count, last.1 + 1)
            } else {
                (count, 0)
            };
            if last.1 >= PATIENCE {
                let what = NOW.lock().map(|now| now.clone()).unwrap_or_default();
                println!("FAILED nothing moved for {PATIENCE} s: {what}");
                println!("0 passed, 1 failed, 0 skipped");
                std::process::exit(1);
            }
        }
    });
}

/// Names the next step, and restarts the time.
pub(crate) fn expect(what: &str) {
    COUNT.fetch_add(1, Ordering::Relaxed);
    if let Ok(mut now) = NOW.lock() {
        what.clone_into(&mut now);
    }
}
