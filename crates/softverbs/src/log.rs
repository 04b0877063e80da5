//! Messages of the device: at most one line of each kind per process, and none on the fast path.

use std::sync::OnceLock;

static SINK: OnceLock<fn(&str)> = OnceLock::new();

/// Sends the device's messages to `sink`, one line without its newline per call, from any thread.
/// Without a sink they go to the standard error stream, as those of libibverbs do. Later calls have
/// no effect.
pub fn set_log(sink: fn(&str)) {
    let _ = SINK.set(sink);
}

pub(crate) fn say(line: &str) {
    match SINK.get() {
        Some(sink) => sink(line),
        None => eprintln!("{line}"),
    }
}
