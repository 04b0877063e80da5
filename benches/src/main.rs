//! Measures weft and its peers in one run, and prints ratios.
//!
//! `weft-bench [--list] [--rounds N] [--tsv] [--no-peers] [FILTER...]` runs the cases of the
//! [`registry`] whose names contain one of the filters, or are the filters. Each subject is a pair
//! of processes, one pinned to each of the first two processors. The pair exists for the whole run
//! and sleeps while other pairs are measured.
//!
//! `weft-bench count` runs each call for callgrind ([`count`]), `weft-bench regions` measures
//! registration and keys ([`regions`]), `weft-bench pages` new pages and shared memory ([`pages`]),
//! `weft-bench cache` the registration cache ([`cache`]), `weft-bench matching` receives and
//! messages by their tags ([`matching`]), `weft-bench polls` polls beside idle peers
//! ([`idle_peers`]). `docs/performance.md` has the method and the results.

#![allow(unsafe_code, reason = "calls C libraries as applications do")]

mod cache;
mod count;
mod idle_peers;
mod matching;
mod memory;
mod op;
mod pages;
mod regions;
mod registry;
mod run;
mod stats;
mod subject;
mod worker;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("worker") => {
            worker::main(&arguments[1..]);
            ExitCode::SUCCESS
        }
        Some("regions") => {
            regions::main();
            ExitCode::SUCCESS
        }
        Some("pages") => {
            pages::main();
            ExitCode::SUCCESS
        }
        Some("cache") => {
            cache::main();
            ExitCode::SUCCESS
        }
        Some("matching") => {
            matching::main();
            ExitCode::SUCCESS
        }
        Some("polls") => {
            idle_peers::main();
            ExitCode::SUCCESS
        }
        Some("idle-peers") => {
            idle_peers::peers(&arguments[1..]);
            ExitCode::SUCCESS
        }
        Some("count") => {
            count::main(&arguments[1..]);
            ExitCode::SUCCESS
        }
        _ => run::main(&arguments),
    }
}
