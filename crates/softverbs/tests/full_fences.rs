//! The tests of `two_processes.rs` on a kernel without membarrier(2).

#![allow(unsafe_code, reason = "verbs is a C interface")]

#[path = "two_processes.rs"]
mod two_processes;

fn main() {
    // SAFETY: there is no other thread yet. The child inherits it.
    unsafe { std::env::set_var("SOFTVERBS_NO_MEMBARRIER", "1") };
    two_processes::main();
}
