//! Kills a victim at every instruction of every path.

pub(crate) mod bystander;
mod path;
mod survivor;
pub(crate) mod trace;
pub(crate) mod victim;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::guard;
use crate::notice::{LIMIT, Times, Way};
use crate::options::Options;
use crate::random::Random;
use path::Path;
use survivor::{Round, Survivor, Work};

/// Walks all paths, or those that `--path` names; at every instruction, or at `--sample`
/// instructions of each. Returns whether all checks succeeded.
pub(crate) fn run(options: &Options) -> bool {
    println!("steps: seed {}", options.seed);
    let mut random = Random::new(options.seed);
    let mut times = Times::default();
    let (mut passed, mut failed) = (0, 0);
    for path in Path::ALL {
        if options
            .path
            .as_ref()
            .is_some_and(|name| *name != path.name())
        {
            continue;
        }
        let begin = Instant::now();
        let walked = catch_unwind(AssertUnwindSafe(|| {
            walk(path, options, &mut random, &mut times)
        }));
        let verdict = if walked.is_ok() { "ok    " } else { "FAILED" };
        let said = walked.unwrap_or_default();
        println!(
            "{verdict} {:20} {said} ({:.1} s)",
            path.name(),
            begin.elapsed().as_secs_f64()
        );
        if verdict == "FAILED" {
            failed += 1;
        } else {
            passed += 1;
        }
    }
    times.print();
    if times.longest() > LIMIT {
        println!("FAILED a survivor was left without notice for more than {LIMIT:?}");
        failed += 1;
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    failed == 0
}

fn walk(path: Path, options: &Options, random: &mut Random, times: &mut Times) -> String {
    let mut survivor = Survivor::new();
    let mut round = |steps: usize, number: u64, random: &mut Random| {
        let round = Round {
            path,
            steps,
            way: Way::of(number),
            work: [Work::Never, Work::Before, Work::After][random.below(3) as usize],
            tag: random.next() >> 32 & !3,
        };
        guard::expect(&format!("path {}, instruction {steps}", path.name()));
        let outcome = catch_unwind(AssertUnwindSafe(|| survivor.round(&round)));
        let outcome = outcome.unwrap_or_else(|panic| {
            println!(
                "path {}, killed after {steps} instructions, {:?}, work {:?}",
                path.name(),
                round.way,
                round.work
            );
            std::panic::resume_unwind(panic)
        });
        if let Some(notice) = outcome.notice {
            times.add(round.way, notice);
        }
        outcome
    };
    // the first round runs to the end of the call, to count its instructions
    let whole = round(usize::MAX, 0, random);
    assert!(whole.ended);
    let stride = match options.sample {
        // fewer kills of calls that take seconds
        Some(count) => (whole.steps / (count * 4000 / whole.steps).clamp(2, count)).max(1),
        None => path.stride(),
    };
    let (mut kills, mut delivered, mut ended) = (0u64, 0, 0);
    let mut at = random.below(stride as u64) as usize;
    // a few more than counted, as the number of instructions varies
    while at <= whole.steps {
        let outcome = round(at, kills, random);
        kills += 1;
        delivered += u64::from(outcome.delivered);
        ended += u64::from(outcome.ended);
        at += stride;
    }
    guard::expect("nothing");
    format!(
        "{} instructions, {kills} victims, {delivered} delivered, {ended} at the end",
        whole.steps
    )
}
