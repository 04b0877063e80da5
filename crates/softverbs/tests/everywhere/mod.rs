//! The tests of other files that pass under all conditions.

#![allow(
    clippy::duplicate_mod,
    reason = "each suite is a program of its own elsewhere"
)]

#[path = "../direct.rs"]
mod direct;
#[path = "../elements.rs"]
mod elements;
#[path = "../ended_rights.rs"]
mod ended_rights;
#[path = "../pending.rs"]
mod pending;
#[path = "../queues.rs"]
mod queues;
#[path = "../regions.rs"]
mod regions;
#[path = "../sleepers.rs"]
mod sleepers;
#[path = "../two_processes.rs"]
mod two_processes;
#[path = "../types.rs"]
mod types;
#[path = "../windows.rs"]
mod windows;
#[path = "../withdrawn.rs"]
mod withdrawn;

pub(crate) use two_processes::common;

use common::suites::Suite;

pub(crate) const SUITES: [Suite; 11] = [
    ("two_processes", two_processes::main),
    ("types", types::main),
    ("regions", regions::main),
    ("windows", windows::main),
    ("direct", direct::main),
    ("elements", elements::main),
    ("pending", pending::main),
    ("queues", queues::main),
    ("withdrawn", withdrawn::main),
    ("ended_rights", ended_rights::main),
    ("sleepers", sleepers::main),
];
