//! Runs the tests of several files in one program, under special conditions.

use std::process::Command;

/// The cases of a file: its name, and the function that runs them.
pub type Suite = (&'static str, fn());

const SUITE: &str = "SOFTVERBS_TEST_SUITE";

/// Runs the cases that the command line names, `suite::case`, or all. Each suite has its own
/// process, because some suites change the environment. `prepare` sets the conditions there.
/// `skipped` lists cases, separated by spaces.
pub fn run_suites(suites: &[Suite], prepare: fn(), skipped: &str) {
    if let Ok(name) = std::env::var(SUITE) {
        prepare();
        let suite = suites.iter().find(|suite| suite.0 == name);
        return (suite.expect("a known suite").1)();
    }
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let list = arguments.iter().any(|a| a == "--list");
    let mut failed = Vec::new();
    for (name, _) in suites {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(SUITE, name).env(super::SKIPPED, skipped);
        let mut mine = true;
        for argument in &arguments {
            match argument.split_once("::") {
                Some((suite, case)) => {
                    mine = suite == *name;
                    command.arg(case);
                }
                None => {
                    command.arg(argument);
                }
            }
        }
        if list {
            let output = command.output().unwrap();
            for line in String::from_utf8(output.stdout).unwrap().lines() {
                println!("{name}::{line}");
            }
        } else if mine {
            println!("{name}:");
            if !command.status().unwrap().success() {
                failed.push(name);
            }
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}
