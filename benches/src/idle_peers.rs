//! Idle peers: the time of an empty poll of a reliable datagram endpoint, and the time of
//! connecting its peers.
//!
//! The peers are endpoints of at most [`PROCESSES`] processes; each sends one message and is idle
//! afterwards.

use std::io::{BufRead as _, Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::stats::Quartiles;
use crate::subject::fabric::Endpoint;
use crate::subject::{Fabric, Side, Subject as _};

/// Numbers of peers. All are compared with the first.
const PEERS: [usize; 3] = [1, 64, 1000];
const PROCESSES: usize = 64;
const ROUNDS: usize = 31;
/// Polls of one round.
const POLLS: u32 = 20_000;
/// Target: nanoseconds that a poll takes longer than with one peer.
const MORE: f64 = 70.0;
/// Time for timers of new connections to end.
const SETTLE: Duration = Duration::from_millis(1500);

/// Starts a process with `count` peers of `address`.
fn start(address: &str, count: usize) -> Child {
    let program = std::env::current_exe().expect("the program's own path");
    Command::new(program)
        .args(["idle-peers", address, &count.to_string()])
        .stdin(Stdio::piped())
        .spawn()
        .expect("a process with peers")
}

/// `weft-bench idle-peers ADDRESS COUNT`: one process with peers. It makes progress until it gets a
/// line, and lives until the end of its input.
pub(crate) fn peers(arguments: &[String]) {
    let [address, count] = arguments else {
        panic!("idle-peers ADDRESS COUNT");
    };
    let count: usize = count.parse().expect("a number");
    let mut end = Fabric::open("weft", Endpoint::Tagged, Side::Second);
    end.connect(address);
    for _ in 0..count {
        end.send_from_another();
    }
    let told = std::thread::spawn(|| {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line)
    });
    while !told.is_finished() {
        end.poll(end.tx(), 1);
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut rest = Vec::new();
    // the end of the input, or an error: the process ends
    let _ = std::io::stdin().lock().read_to_end(&mut rest);
}

/// Raises the limit of descriptors: a connected peer has up to five.
fn allow_descriptors() {
    // SAFETY: a structure on the stack.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
}

/// Nanoseconds of an empty poll in each round, and of the connection of one peer.
fn measure(peers: usize) -> (Vec<f64>, f64) {
    let mut end = Fabric::open("weft", Endpoint::Tagged, Side::First);
    let address = end.address();
    let processes = peers.min(PROCESSES);
    let begin = Instant::now();
    let mut children: Vec<Child> = (0..processes)
        .map(|i| {
            start(
                &address,
                peers / processes + usize::from(i < peers % processes),
            )
        })
        .collect();
    let mut first = None;
    let mut left = peers;
    while left != 0 {
        if end.poll(end.rx(), 1) == 1 {
            end.post_recv();
            first.get_or_insert_with(Instant::now);
            left -= 1;
        }
    }
    let connecting = first.unwrap_or(begin).elapsed().as_nanos() as f64 / peers as f64;
    for child in &mut children {
        let mut input = child.stdin.as_ref().expect("the child's input");
        writeln!(input).expect("a line for the child");
    }
    std::thread::sleep(SETTLE);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        for _ in 0..POLLS {
            assert_eq!(end.poll(end.rx(), 1), 0);
        }
        times.push(begin.elapsed().as_nanos() as f64 / f64::from(POLLS));
    }
    for mut child in children {
        drop(child.stdin.take());
        assert!(child.wait().expect("the child").success());
    }
    (times, connecting)
}

/// `weft-bench polls`: measures polls beside idle peers.
pub(crate) fn main() {
    allow_descriptors();
    println!("an empty fi_cq_read of an endpoint with idle connected peers (quartiles)");
    let mut alone = None;
    for peers in PEERS {
        let (times, connecting) = measure(peers);
        let times = Quartiles::of(&times);
        let more = times.median - *alone.get_or_insert(times.median);
        let verdict = if more <= MORE { "met" } else { "MISSED" };
        println!(
            "{peers:>5} peers {:>7.1} ns ({:.1} - {:.1})  {more:>+6.1}, <= {MORE}: {verdict}; connected in {:.0} us each",
            times.median,
            times.low,
            times.high,
            connecting / 1e3
        );
    }
}
