//! Kills processes that use the embedded device, and checks the surviving processes. README.md has
//! the commands.

#[allow(unsafe_code, reason = "verbs is a C interface")]
mod device;
#[allow(unsafe_code, reason = "verbs is a C interface")]
mod extended;
mod guard;
#[allow(unsafe_code, reason = "a clock is a system call")]
mod kills;
mod leftovers;
#[allow(unsafe_code, reason = "pipes of this process")]
mod link;
mod notice;
mod options;
mod random;
#[allow(unsafe_code, reason = "filters and users are set by system calls")]
#[path = "../../../crates/softverbs/tests/common/refuse.rs"]
mod refuse;
mod remains;
mod rings;
#[allow(unsafe_code, reason = "signals are system calls")]
mod signals;
#[allow(unsafe_code, reason = "ptrace is a system call")]
mod steps;
mod targets;

use options::Options;

const USAGE: &str = "fault steps [--seed N] [--sample VICTIMS] [--path NAME]
fault xrc [--seed N] [--sample VICTIMS] [--path NAME]
fault rings [--seed N] [--sample VICTIMS] [--path NAME]
fault kills [--seed N] [--kills N] [--minutes M] [--processes 2-8] [--refuse copies]";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((command, rest)) = arguments.split_first() else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    match command.as_str() {
        "victim" => return steps::victim::run(rest),
        "xrc-victim" => return targets::victim::run(rest),
        "ring-victim" => return rings::victim::run(rest),
        "worker" => {
            signals::be_nice();
            return kills::worker::run(rest);
        }
        "bystander" => return steps::bystander::run(rest),
        _ => {}
    }
    let options = Options::read(rest).unwrap_or_else(|error| {
        eprintln!("{error}\n{USAGE}");
        std::process::exit(2);
    });
    if options.refuse {
        refuse::refuse_copies();
    }
    guard::start();
    let good = match command.as_str() {
        "steps" => steps::run(&options),
        "xrc" => targets::run(&options),
        "rings" => rings::run(&options),
        "kills" => kills::run(&options),
        _ => {
            eprintln!("{USAGE}");
            std::process::exit(2);
        }
    };
    std::process::exit(i32::from(!good));
}
