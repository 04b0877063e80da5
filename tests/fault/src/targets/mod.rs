//! XRC: kills a process at every instruction of a call that opens or creates a domain, creates,
//! opens, connects or destroys a target or a shared queue, or sends through a target. The surviving
//! processes continue in the same domain.

mod survivor;
pub(crate) mod victim;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::guard;
use crate::options::Options;
use crate::random::Random;
use survivor::Survivor;

/// One call of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Creates a domain.
    Make,
    /// Opens the survivor's domain.
    Join,
    Leave,
    Target,
    /// Opens the survivor's target.
    Hold,
    /// INIT, RTR and RTS of the survivor's target.
    Connect,
    /// Closes a handle on the survivor's target.
    Release,
    /// Closes the last handle on a target.
    Destroy,
    Queue,
    EndQueue,
    Send,
    SendLarge,
    Write,
    /// The number is not that of a shared queue: the target fails.
    Refused,
}

impl Path {
    const ALL: [Self; 14] = [
        Self::Make,
        Self::Join,
        Self::Leave,
        Self::Target,
        Self::Hold,
        Self::Connect,
        Self::Release,
        Self::Destroy,
        Self::Queue,
        Self::EndQueue,
        Self::Send,
        Self::SendLarge,
        Self::Write,
        Self::Refused,
    ];

    fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }

    fn name(self) -> String {
        format!("{self:?}")
    }

    /// Whether the victim is connected through the survivor's target.
    fn sends(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendLarge | Self::Write | Self::Refused
        )
    }

    /// Number of bytes that it sends or writes.
    fn len(self) -> usize {
        match self {
            Self::SendLarge => 100_000,
            Self::Write => 20_000,
            _ => 48,
        }
    }

    /// Instructions between two kills of a full walk.
    fn stride(self) -> usize {
        match self {
            // most instructions check the objects that a domain may contain
            Self::Make | Self::Join | Self::Target | Self::Queue => 97,
            Self::Hold | Self::Connect | Self::Release | Self::Destroy | Self::EndQueue => 7,
            _ => 1,
        }
    }
}

/// As [`crate::steps::run`].
pub(crate) fn run(options: &Options) -> bool {
    println!("xrc: seed {}", options.seed);
    let mut random = Random::new(options.seed);
    let (mut passed, mut failed) = (0, 0);
    for path in Path::ALL {
        let name = path.name();
        if options.path.as_ref().is_some_and(|wanted| *wanted != name) {
            continue;
        }
        let begin = Instant::now();
        let walked = catch_unwind(AssertUnwindSafe(|| walk(path, options, &mut random)));
        let verdict = if walked.is_ok() { "ok    " } else { "FAILED" };
        println!(
            "{verdict} {name:20} {} ({:.1} s)",
            walked.as_deref().unwrap_or_default(),
            begin.elapsed().as_secs_f64()
        );
        passed += u32::from(walked.is_ok());
        failed += u32::from(walked.is_err());
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    failed == 0
}

fn walk(path: Path, options: &Options, random: &mut Random) -> String {
    let mut survivor = Survivor::new();
    let mut round = |steps: usize, random: &mut Random| {
        guard::expect(&format!("xrc path {}, instruction {steps}", path.name()));
        let tag = random.next() >> 32 & !3;
        let outcome = catch_unwind(AssertUnwindSafe(|| survivor.round(path, steps, tag)));
        outcome.unwrap_or_else(|panic| {
            println!("path {}, killed after {steps} instructions", path.name());
            std::panic::resume_unwind(panic)
        })
    };
    // the first round runs to the end of the call, to count its instructions
    let whole = round(usize::MAX, random);
    assert!(whole.ended);
    let stride = match options.sample {
        // fewer kills of calls that take seconds
        Some(count) => (whole.steps / (count * 4000 / whole.steps).clamp(2, count)).max(1),
        None => path.stride(),
    };
    let (mut kills, mut delivered) = (0u64, 0);
    let mut at = random.below(stride as u64) as usize;
    while at <= whole.steps {
        delivered += u64::from(round(at, random).delivered);
        kills += 1;
        at += stride;
    }
    guard::expect("nothing");
    survivor.end();
    format!(
        "{} instructions, {kills} victims, {delivered} delivered",
        whole.steps
    )
}
