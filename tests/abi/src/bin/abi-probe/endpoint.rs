//! Tests of connected endpoints, one file per part of the man pages.

mod atomics;
mod closing;
mod ends;
mod errors;
mod levels;
mod manage;
mod misuse;
mod options;
mod shared;
mod threads;
mod waiting;

use abi_tests::fabric::{Infos, hints};
use abi_tests::load::Lib;
use abi_tests::objects::Setup;
use libfabric_sys::*;

/// A setup from hints after `change`.
fn setup(lib: &Lib, change: impl Fn(&mut fi_info)) -> Setup {
    let hints: Infos = hints(lib);
    // SAFETY: made by this libfabric, and nobody else's.
    unsafe { change(&mut *hints.first()) };
    Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints)
}

pub(crate) fn run(lib: &Lib) {
    shared::run(lib);
    options::run(lib);
    waiting::run(lib);
    atomics::run(lib);
    levels::run(lib);
    manage::run(lib);
    misuse::run(lib);
    errors::run(lib);
    closing::run(lib);
    threads::run(lib);
    println!("endpoints do what the man pages say");
}
