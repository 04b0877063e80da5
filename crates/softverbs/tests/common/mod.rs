//! Common parts of tests with two processes: starting the other one, and one end of a connection.

#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    unused_imports,
    missing_debug_implementations,
    reason = "shared by tests, each of which uses a part"
)]

mod buffer;
mod datagrams;
mod end;
mod link;
pub mod refuse;
mod ring;
pub mod suites;
mod traffic;

use std::time::Instant;

pub use buffer::Buffer;
pub use datagrams::*;
pub use end::{Address, End, open, verbs};
pub use link::Link;
pub use ring::{Received, Ring};
pub use traffic::{Wc, post_srq};

const CASE: &str = "SOFTVERBS_TEST_CASE";
/// Names of cases that are skipped, or [`ALL`]; the program that sets it prints the reason.
pub const SKIPPED: &str = "SOFTVERBS_TEST_SKIPPED";
pub const ALL: &str = "*";

/// A test: its name, and the functions of the two processes.
pub type Case = (&'static str, fn(&mut Link), fn(&mut Link));

/// Runs the cases that the command line names (without names all), or one child's part.
pub fn run(cases: &[Case]) {
    if let Ok(name) = std::env::var(CASE) {
        let case = cases
            .iter()
            .find(|case| case.0 == name)
            .expect("a known case");
        (case.2)(&mut Link::of_child());
        // returns without destructors, as programs end
        return;
    }
    let arguments: Vec<_> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    if std::env::args().any(|a| a == "--list") {
        // A runner asks twice: for all cases, and for the ignored ones, which it counts.
        let ignored = std::env::args().any(|a| a == "--ignored");
        for case in cases.iter().filter(|case| !ignored || is_skipped(case.0)) {
            println!("{}: test", case.0);
        }
        return;
    }
    let exact = std::env::args().any(|a| a == "--exact");
    let mut failed = Vec::new();
    let (mut count, mut skipped) = (0, 0);
    for case in cases {
        let asked = |a: &String| {
            if exact {
                case.0 == a
            } else {
                case.0.contains(a.as_str())
            }
        };
        if !arguments.is_empty() && !arguments.iter().any(asked) {
            continue;
        }
        if is_skipped(case.0) {
            println!("test {} ... ignored", case.0);
            skipped += 1;
            continue;
        }
        count += 1;
        let begin = Instant::now();
        let result = std::panic::catch_unwind(|| {
            let mut link = Link::of_parent(case.0);
            (case.1)(&mut link);
            link.finish();
        });
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!(
            "test {} ... {verdict} ({} ms)",
            case.0,
            begin.elapsed().as_millis()
        );
        if result.is_err() {
            failed.push(case.0);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
    println!("test result: ok. {count} passed; 0 failed; {skipped} ignored");
}

/// Whether the program skips this case, and has printed the reason.
pub fn is_skipped(case: &str) -> bool {
    let skipped = std::env::var(SKIPPED).unwrap_or_default();
    skipped.split(' ').any(|name| name == case || name == ALL)
}
