//! Runs the cases: starts pairs of processes, changes the order in each round, prints a table.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use crate::op::Op;
use crate::registry::{Case, cases};
use crate::stats::{Quartiles, size, time};
use crate::subject::{Kind, VERBS_DROPIN, VERBS_LIBFABRIC};

/// Default number of measurements of each case, interleaved with those of its peers.
const ROUNDS: usize = 15;

/// A process of a pair.
struct Worker {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Worker {
    fn start(kind: Kind, side: &str, cpu: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.envs(kind.environment().iter().copied());
        command.args(["worker", &kind.to_string(), side, &cpu.to_string()]);
        if kind.needs_verbs() {
            let value = |name| std::env::var_os(name).expect("the libraries of this subject");
            command
                .env("WEFT_LIBFABRIC", value(VERBS_LIBFABRIC))
                .env("LD_LIBRARY_PATH", value(VERBS_DROPIN))
                .env_remove("FI_PROVIDER_PATH");
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, to, from }
    }

    fn say(&mut self, line: &str) -> Result<(), String> {
        let to = self.to.as_mut().ok_or("ended")?;
        writeln!(to, "{line}").map_err(|error| error.to_string())
    }

    fn hear(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(n) if n > 0 => Ok(line.trim().to_owned()),
            _ => Err(String::from("a process of the pair has ended")),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // the worker exits at the end of its input
        self.to = None;
        if std::thread::panicking() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Two connected processes, one on each of the first two processors.
struct Pair {
    first: Worker,
    second: Worker,
}

impl Pair {
    fn start(kind: Kind) -> Result<Self, String> {
        let mut pair = Self {
            first: Worker::start(kind, "first", 0),
            second: Worker::start(kind, "second", 1),
        };
        let (first, second) = (pair.first.hear()?, pair.second.hear()?);
        pair.first.say(&second)?;
        pair.second.say(&first)?;
        pair.first.hear()?;
        pair.second.hear()?;
        Ok(pair)
    }

    fn run(&mut self, op: Op, len: usize) -> Result<f64, String> {
        let line = format!("{op} {len} {}", op.count(len));
        self.second.say(&line)?;
        self.first.say(&line)?;
        let first = self.first.hear()?;
        self.second.hear()?;
        first.parse().map_err(|_| first)
    }
}

/// The pairs for the selected cases, started at the first use. After an error a pair is not used
/// any more.
#[derive(Default)]
struct Pairs(BTreeMap<Kind, Result<Pair, String>>);

impl Pairs {
    fn run(&mut self, kind: Kind, op: Op, len: usize) -> Option<f64> {
        let pair = self.0.entry(kind).or_insert_with(|| Pair::start(kind));
        let result = match pair {
            Ok(pair) => pair.run(op, len),
            Err(_) => return None,
        };
        match result {
            Ok(nanos) => Some(nanos),
            Err(error) => {
                eprintln!("weft-bench: {kind}: {op} {len}: {error}");
                *pair = Err(error);
                None
            }
        }
    }
}

/// The measurements of a case in nanoseconds: of weft, and of each peer.
struct Figures {
    own: Vec<f64>,
    peers: Vec<Vec<f64>>,
}

fn measure(case: &Case, rounds: usize, pairs: &mut Pairs) -> Figures {
    let mut figures = Figures {
        own: Vec::new(),
        peers: vec![Vec::new(); case.peers.len()],
    };
    let everybody = case.peers.len() + 1;
    let rounds = if case.op == Op::Idle { 3 } else { rounds };
    for round in 0..rounds {
        // each round begins with another subject, so that no subject always runs after the same one
        for turn in 0..everybody {
            let who = (round + turn) % everybody;
            let (kind, op, list) = match who.checked_sub(1) {
                None => (case.kind, case.op, &mut figures.own),
                Some(i) => (case.peers[i].kind, case.peers[i].op, &mut figures.peers[i]),
            };
            list.extend(pairs.run(kind, op, case.len));
        }
    }
    figures
}

fn verdict(value: f64, wanted: Option<f64>) -> String {
    match wanted {
        None => String::new(),
        Some(most) if value <= most => format!("<= {most:.2}: met"),
        Some(most) => format!("<= {most:.2}: MISSED"),
    }
}

fn print(case: &Case, figures: &Figures) {
    if figures.own.is_empty() {
        println!("{:<24} {:>8}  no figures", case.name, size(case.len));
        return;
    }
    let own = Quartiles::of(&figures.own);
    let head = format!(
        "{:<24} {:>8}  {:>9} ({} - {})",
        case.name,
        size(case.len),
        time(own.median),
        time(own.low),
        time(own.high)
    );
    if case.peers.is_empty() {
        let limit = case.limit.map_or(String::new(), |limit| {
            let word = if own.median <= limit { "met" } else { "MISSED" };
            format!("<= {}: {word}", time(limit))
        });
        println!("{head:<72} {limit}");
        return;
    }
    for (i, (peer, values)) in case.peers.iter().zip(&figures.peers).enumerate() {
        let head = if i == 0 { head.as_str() } else { "" };
        if values.len() != figures.own.len() {
            println!("{head:<72} {} {}: no figures", peer.kind, peer.op);
            continue;
        }
        let ratios: Vec<f64> = figures
            .own
            .iter()
            .zip(values)
            .map(|(own, peer)| own / peer)
            .collect();
        let theirs = Quartiles::of(values);
        let spread = Quartiles::of(&ratios);
        let ratio = own.median / theirs.median;
        println!(
            "{head:<72} {:<22} {:>9}  {ratio:>5.2} ({:.2} - {:.2})  {}",
            format!("{} {}", peer.kind, peer.op),
            time(theirs.median),
            spread.low,
            spread.high,
            verdict(ratio, peer.target)
        );
    }
}

/// Prints one line of tab-separated values for each case and each peer, for scripts.
fn print_tsv(case: &Case, figures: &Figures) {
    let own = Quartiles::of(&figures.own).median;
    println!("{}\t{}\t{own:.2}", case.name, case.kind);
    for (peer, values) in case.peers.iter().zip(&figures.peers) {
        if !values.is_empty() {
            let median = Quartiles::of(values).median;
            println!("{}\t{} {}\t{median:.2}", case.name, peer.kind, peer.op);
        }
    }
}

/// `weft-bench [--list] [--rounds N] [--tsv] [--no-peers] [FILTER...]`, as in the documentation of
/// the program.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let mut filters = Vec::new();
    let (mut rounds, mut tsv, mut list, mut no_peers) = (ROUNDS, false, false, false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--list" => list = true,
            "--tsv" => tsv = true,
            "--no-peers" => no_peers = true,
            "--rounds" => match rest.next().map(|n| n.parse()) {
                Some(Ok(n)) if n > 0 => rounds = n,
                _ => {
                    eprintln!("weft-bench: --rounds takes a number");
                    return ExitCode::from(2);
                }
            },
            option if option.starts_with('-') => {
                eprintln!("weft-bench: no option {option}");
                return ExitCode::from(2);
            }
            filter => filters.push(filter),
        }
    }
    let mut chosen = cases();
    chosen.retain(|case| filters.is_empty() || filters.iter().any(|f| case.name.contains(f)));
    // a whole name selects that case alone
    if filters
        .iter()
        .all(|f| chosen.iter().any(|case| case.name == *f))
        && !filters.is_empty()
    {
        chosen.retain(|case| filters.contains(&&*case.name));
    }
    if no_peers {
        chosen.iter_mut().for_each(|case| case.peers.clear());
    }
    if chosen.is_empty() {
        eprintln!("weft-bench: no case's name contains {filters:?}; --list shows them");
        return ExitCode::from(2);
    }
    if list {
        chosen.iter().for_each(|case| println!("{}", case.name));
        return ExitCode::SUCCESS;
    }
    if !tsv {
        println!(
            "medians of {rounds} rounds (quartiles); the ratio is weft / peer: below 1 weft is faster; its quartiles are those of the rounds' own ratios"
        );
    }
    let mut pairs = Pairs::default();
    for case in &chosen {
        let figures = measure(case, rounds, &mut pairs);
        if tsv && !figures.own.is_empty() {
            print_tsv(case, &figures);
        } else {
            print(case, &figures);
        }
    }
    let failed = pairs.0.values().filter(|pair| pair.is_err()).count();
    for (kind, pair) in &pairs.0 {
        if let Err(error) = pair {
            eprintln!("weft-bench: {kind}: {error}");
        }
    }
    // The status is bad if a subject did not run, not if a target is missed.
    ExitCode::from(u8::from(failed > 0))
}
