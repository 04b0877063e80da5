//! The fast path allocates nothing and makes no system call: posting, polling, sending and writing
//! through the shared object, between two endpoints on `soft0`.

use std::collections::BTreeMap;

use abi_tests::outside::{must, probe, provider_dir, system};

const PROBE: &str = env!("CARGO_BIN_EXE_fast-path");

/// System calls that the device makes about once per millisecond: `epoll_wait` for peers that wait
/// for a wake-up, `poll` for the end of a peer.
const NOW_AND_THEN: [i64; 4] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_poll,
    libc::SYS_ppoll,
];

/// Runs the probe. Returns milliseconds, number of allocations, and number of calls by system call.
fn run(role: &str) -> (u64, u64, BTreeMap<i64, u64>) {
    let mut command = probe(PROBE, &system(), &provider_dir(), role);
    command
        .env("FI_PROVIDER", "weft")
        .env("FI_WEFT_DEVICE", "soft0");
    let output = must(command);
    let (mut milliseconds, mut allocations, mut calls) = (None, None, BTreeMap::new());
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let words: Vec<_> = line.split(' ').collect();
        let number = |i: usize| words[i].parse().expect("a number");
        match words[0] {
            "milliseconds" => milliseconds = Some(number(1)),
            "allocations" => allocations = Some(number(1)),
            "call" => {
                calls.insert(words[1].parse().expect("a number"), number(2));
            }
            _ => {}
        }
    }
    let said = "the probe says it";
    (milliseconds.expect(said), allocations.expect(said), calls)
}

#[test]
fn the_fast_path_allocates_nothing_and_makes_no_system_call() {
    let (milliseconds, allocations, mut calls) = run("measured");
    assert_eq!(allocations, 0);
    let rare: u64 = NOW_AND_THEN
        .iter()
        .filter_map(|number| calls.remove(number))
        .sum();
    assert!(calls.is_empty(), "system calls by number: {calls:?}");
    // at most 4 of these calls per millisecond, so not one for each operation
    let most = 4 * milliseconds + 20;
    assert!(rare <= most, "{rare} looks at peers in {milliseconds} ms");
}

#[test]
fn the_probe_sees_what_is_planted() {
    let (_, allocations, calls) = run("planted");
    assert_eq!(allocations, 1000, "500 allocated and freed");
    assert_eq!(calls.get(&libc::SYS_getppid), Some(&500));
}
