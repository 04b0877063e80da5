//! Receive rings (`docs/softverbs-ring.md`): kills a sender or a receiver at every instruction of a
//! call on its ring, and checks the process at the other end.

mod path;
mod survivor;
pub(crate) mod victim;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::guard;
use crate::notice::{LIMIT, Times, Way};
use crate::options::Options;
use crate::random::{Random, pattern};
use path::Path;
use survivor::{Round, Survivor, Work};

/// Slots of every ring; all of them but one can be in use.
const SLOTS: u32 = 64;
/// Slots of a ring that has grown.
const LARGER: u32 = 256;
/// Bytes of the payload of a message that takes one slot.
const SHORT: usize = 32;

/// The words and the payload of message `number` of one direction.
fn message(tag: u64, number: u64, len: usize) -> ([u64; 3], Vec<u8>) {
    ([number, !number, tag], pattern(tag + 4 * number, len))
}

/// As [`crate::steps::run`].
pub(crate) fn run(options: &Options) -> bool {
    println!("rings: seed {}", options.seed);
    let mut random = Random::new(options.seed);
    let mut times = Times::default();
    let (mut passed, mut failed) = (0, 0);
    for path in Path::ALL {
        let name = path.name();
        if options.path.as_ref().is_some_and(|wanted| *wanted != name) {
            continue;
        }
        let begin = Instant::now();
        let walked = catch_unwind(AssertUnwindSafe(|| {
            walk(path, options, &mut random, &mut times)
        }));
        let verdict = if walked.is_ok() { "ok    " } else { "FAILED" };
        println!(
            "{verdict} {name:20} {} ({:.1} s)",
            walked.as_deref().unwrap_or_default(),
            begin.elapsed().as_secs_f64()
        );
        passed += u32::from(walked.is_ok());
        failed += u32::from(walked.is_err());
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
    let mut round = |steps: usize, way: Way, work: Work, random: &mut Random| {
        let round = Round {
            path,
            steps,
            way,
            work,
            tag: random.next() >> 32 & !3,
        };
        guard::expect(&format!("rings path {}, instruction {steps}", path.name()));
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
    // the first rounds run to the end of the call: its instructions are counted
    let mut longest = 0;
    for way in Way::ALL {
        for work in Work::ALL {
            let whole = round(usize::MAX, way, work, random);
            assert!(whole.ended);
            longest = longest.max(whole.steps);
        }
    }
    let stride = match options.sample {
        Some(count) => (longest / count).max(1),
        None => path.stride(),
    };
    let (mut kills, mut delivered) = (0u64, 0);
    let mut at = random.below(stride as u64) as usize;
    while at < longest {
        let work = Work::ALL[random.below(Work::ALL.len() as u64) as usize];
        let outcome = round(at, Way::of(kills), work, random);
        kills += 1;
        delivered += u64::from(outcome.delivered);
        at += stride;
    }
    guard::expect("nothing");
    format!("{longest} instructions, {kills} victims, {delivered} delivered")
}
