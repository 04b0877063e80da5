//! What the device has to say: a line at most in the life of a process, and never on the fast path.

use std::sync::OnceLock;

static SINK: OnceLock<fn(&str)> = OnceLock::new();

/// Where the device's messages go: to `sink`, a line without its end at a time, from any thread. Without it they go
/// to the standard error stream, as libibverbs' do. The first call counts.
pub fn set_log(sink: fn(&str)) {
    let _ = SINK.set(sink);
}

pub(crate) fn say(line: &str) {
    match SINK.get() {
        Some(sink) => sink(line),
        None => eprintln!("{line}"),
    }
}
