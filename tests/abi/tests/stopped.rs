//! One-sided operations complete while the target process is stopped; and a region cannot be closed
//! while a stopped initiator is in the middle of a write to it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use abi_tests::outside::{Libfabric, peer, probe, provider_dir, system};

const PROBE: &str = env!("CARGO_BIN_EXE_abi-probe");

/// A process that exchanges lines with the test; killed on drop.
struct Peer {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Peer {
    fn start(libfabric: &Libfabric, role: &str, argument: Option<&str>) -> Self {
        let mut command = probe(PROBE, libfabric, &provider_dir(), role);
        command
            .args(argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("the probe starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, lines }
    }

    fn hear(&mut self) -> String {
        self.lines.next().expect("another line").expect("text")
    }

    fn say(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("a pipe");
        writeln!(input, "{line}").expect("the peer listens");
    }

    fn signal(&self, signal: &str) {
        let status = std::process::Command::new("kill")
            .args(["-s", signal, &self.child.id().to_string()])
            .status()
            .expect("kill");
        assert!(status.success());
    }

    /// Stops the process; it is stopped when this returns.
    fn stop(&self) {
        self.signal("STOP");
        let start = Instant::now();
        while self.state() != 'T' {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "it does not stop"
            );
            std::thread::yield_now();
        }
    }

    /// The state in `/proc`; `T`: stopped.
    fn state(&self) -> char {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("a process");
        let after = stat.rsplit_once(") ").expect("a state").1;
        after.chars().next().expect("a state")
    }

    fn ends_well(&mut self) {
        let status = self.child.wait().expect("an end");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connected target and initiator, and the address and key of the memory that the target exposes.
fn pair(libfabric: &Libfabric) -> (Peer, Peer, String) {
    let mut target = Peer::start(libfabric, "serve", None);
    let port = target.hear();
    let port = port.strip_prefix("port ").expect("a port").to_owned();
    let initiator = Peer::start(libfabric, "access", Some(&port));
    let memory = target.hear();
    let memory = memory
        .strip_prefix("memory ")
        .expect("an address and a key")
        .to_owned();
    (target, initiator, memory)
}

fn stopped_target(libfabric: &Libfabric) {
    let (mut target, mut initiator, memory) = pair(libfabric);
    target.stop();
    initiator.say(&memory);
    assert_eq!(initiator.hear(), "done");
    assert_eq!(target.state(), 'T', "the target ran meanwhile");
    target.signal("CONT");

    target.say("check");
    assert_eq!(target.hear(), "ok");
    initiator.say("close");
    assert_eq!(initiator.hear(), "closed");
    assert_eq!(target.hear(), "closed");
    initiator.ends_well();
    target.ends_well();
}

#[test]
fn a_stopped_target_is_still_served() {
    stopped_target(&system());
}

#[test]
fn a_stopped_target_is_still_served_in_2_5() {
    if let Some(libfabric) = peer("libfabric-2.5") {
        stopped_target(&libfabric);
    }
}

/// Stops an initiator that writes continuously, and closes the region: the result is `-FI_EBUSY` if
/// the initiator was stopped in the middle of a write, until it continues. Returns whether that was
/// so. In either case no write takes effect after the region is closed.
fn stopped_initiator(libfabric: &Libfabric) -> bool {
    let (mut target, mut initiator, memory) = pair(libfabric);
    initiator.say(&format!("flood {memory}"));
    target.say("wait");
    assert_eq!(target.hear(), "written");
    initiator.stop();
    target.say("revoke");
    let busy = match target.hear().as_str() {
        "revoked" => false,
        "busy" => true,
        other => panic!("{other}"),
    };
    if busy {
        target.say("revoke");
        assert_eq!(target.hear(), "busy", "it is still stopped");
        initiator.signal("CONT");
        let start = Instant::now();
        loop {
            target.say("revoke");
            if target.hear() == "revoked" {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "busy for ever");
        }
    }
    target.say("clear");
    assert_eq!(target.hear(), "cleared");
    if !busy {
        initiator.signal("CONT");
    }
    assert_eq!(initiator.hear(), "done", "refused");
    initiator.say("close");
    assert_eq!(initiator.hear(), "closed");
    target.say("clean");
    assert_eq!(target.hear(), "clean");
    assert_eq!(target.hear(), "closed");
    initiator.ends_well();
    target.ends_well();
    busy
}

#[test]
fn a_region_that_a_stopped_initiator_writes_to_is_busy() {
    let caught = (0..100).any(|_| stopped_initiator(&system()));
    assert!(caught, "no initiator was stopped in the middle of a write");
}
