//! A process that exchanges all kinds of operations with all others until it is killed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdma_core_sys::IBV_WC_SUCCESS;

use super::audit::Audit;
use super::bond::{Bond, Common, Sums};
use super::layout::{Kind, MOST, ROOM, id_of, parts_of, target};
use super::{moment, now_ns};
use crate::device::{Device, Region, Wc};
use crate::leftovers;
use crate::link::{Gone, Link, numbers};
use crate::notice::Way;
use crate::random::Random;
use crate::refuse;

/// Number of receives of the shared queue.
const SHARED: usize = 16;
/// Number of messages that the shared queue consumes until each of its receives must have been used
/// again: all other receives, and those of withdrawn claims behind it.
const AGE: u64 = 8 * SHARED as u64;
const PATIENCE: Duration = Duration::from_secs(5);

type Commands = Arc<Mutex<VecDeque<String>>>;

struct Worker {
    common: Common,
    way: Way,
    bonds: Vec<Option<Bond>>,
    shared_region: Region,
    /// For each receive: the number of messages that the shared queue had consumed when it was
    /// posted, and the time.
    posted: Vec<(u64, Instant)>,
    taken: u64,
    link: Link,
    /// Number of descriptors before the first connection.
    base: usize,
    /// `Some` while no new requests are sent; whether `rests` was answered.
    rests: Option<bool>,
}

/// `worker NUMBER SEED WAY`. Its commands:
/// - `make OTHER NONCE`, answered by `made OTHER NONCE ...` with its numbers;
/// - `peer OTHER NONCE ...` with the other's numbers, answered by `joined`;
/// - `go OTHER NONCE` when both have joined or one is dead, answered by `up` after the first
///   message;
/// - `drop OTHER NONCE` for a process that never was connected, answered by `clean`;
/// - `rest`, answered by `rests` when all its requests have completed; then `audit`, answered by
///   `audited`; `resume`;
/// - `die NANOSECONDS`: end this long after the start of the next post; `show`; `stop`.
///
/// It prints `dead OTHER NONCE TIME KIND STATUS` at the first error, and `clean OTHER NONCE` when
/// the connection is destroyed.
pub(crate) fn run(arguments: &[String]) {
    let given = numbers(&arguments.join(" "));
    crate::signals::be_interruptible();
    let commands = Commands::default();
    listen(&commands);
    let device = Device::open();
    let mut worker = Worker {
        common: Common {
            device,
            queue: device.queue(4096),
            shared: device.shared(SHARED as u32),
            handle: device.handle(),
            target: device.region(target::LEN),
            number: given[0] as u8,
            random: Random::new(given[1]),
            sums: Sums::default(),
        },
        way: Way::of(given[2]),
        bonds: (0..MOST).map(|_| None).collect(),
        shared_region: device.region(SHARED * ROOM),
        posted: vec![(0, Instant::now()); SHARED],
        taken: 0,
        link: Link::of_child(),
        base: 0,
        rests: None,
    };
    (0..SHARED).for_each(|place| worker.post_shared(place));
    worker.base = leftovers::count().0;
    worker.link.say("ready");
    let mut wcs = Vec::new();
    loop {
        while let Some(command) = lock(&commands).pop_front() {
            if command == "stop" {
                worker.say_sums();
                worker.link.say("stopped");
                // the coordinator ends this process: the others have not stopped yet
                loop {
                    std::thread::park();
                }
            }
            match command.as_str() {
                "show" => worker.show(),
                "rest" => worker.rest(true),
                "resume" => worker.rest(false),
                "audit" => worker.audit(),
                _ => worker.obey(&command),
            }
        }
        // a process that was given new peers sends before it waits
        worker.go_on();
        let way = worker.way_now();
        way.wait(&worker.common.queue, &mut wcs, Duration::from_millis(500));
        let idle = wcs.is_empty();
        for wc in wcs.drain(..) {
            worker.take(&wc);
        }
        if idle && way == Way::Polls {
            std::thread::yield_now();
        }
    }
}

fn lock(commands: &Commands) -> std::sync::MutexGuard<'_, VecDeque<String>> {
    commands.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads commands. The main thread may sleep in a call without a timeout, so it is interrupted
/// until it has taken the command.
fn listen(commands: &Commands) {
    let commands = Arc::clone(commands);
    let main = crate::signals::this_thread();
    std::thread::spawn(move || {
        let mut link = Link::of_child();
        loop {
            match link.hear_within(Duration::from_secs(60)) {
                Ok(Some(line)) => {
                    if let Some(delay) = line.strip_prefix("die ") {
                        moment::end_in_a_post(delay.parse().expect("a number"));
                    }
                    lock(&commands).push_back(line);
                }
                Ok(None) => {}
                // the coordinator has ended
                Err(Gone) => std::process::exit(1),
            }
            while !lock(&commands).is_empty() {
                main.interrupt();
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    });
}

impl Worker {
    /// A connection whose operations have all completed produces no event any more; its second
    /// queue pair is in ERR at the next check.
    fn way_now(&self) -> Way {
        if self.rests.is_some() || self.bonds.iter().flatten().any(Bond::is_flushed) {
            Way::Polls
        } else {
            self.way
        }
    }

    fn post_shared(&mut self, place: usize) {
        let id = id_of(0, Kind::SharedReceive, place);
        let at = place * ROOM;
        self.common
            .shared
            .receive(id, &self.shared_region, at, ROOM);
        self.posted[place] = (self.taken, Instant::now());
    }

    fn obey(&mut self, command: &str) {
        let (verb, rest) = command.split_once(' ').expect("a command");
        let given = numbers(rest);
        let (other, nonce) = (given[0] as usize, given[1] as u32);
        let device = self.common.device;
        match verb {
            "make" => {
                assert!(self.bonds[other].is_none(), "two connections");
                let bond = Bond::new(&self.common, other as u8, nonce);
                let target = &self.common.target;
                let made = format!(
                    "made {other} {nonce} {} {} {}",
                    bond.numbers(),
                    target.addr(0),
                    target.rkey()
                );
                self.bonds[other] = Some(bond);
                self.link.say(&made);
            }
            "peer" => {
                let bond = self.bonds[other].as_mut().expect("a connection");
                bond.connect(&device, &given[2..]);
                self.link.say(&format!("joined {other} {nonce}"));
            }
            "go" => {
                if let Some(bond) = self.bonds[other].as_mut() {
                    bond.goes = true;
                }
            }
            _ => {
                let bond = self.bonds[other].take().expect("a connection");
                assert!(bond.nonce == nonce && !bond.connected);
                self.clean(bond);
            }
        }
    }

    fn rest(&mut self, rests: bool) {
        self.rests = rests.then_some(false);
        for bond in self.bonds.iter_mut().flatten() {
            bond.rests = rests;
        }
    }

    /// Every receive of the shared queue is available: no killed process holds one.
    fn audit(&mut self) {
        while !self.is_quiet() {}
        let mut audit = Audit::begin(&self.common, SHARED);
        let mut wcs = Vec::new();
        while !audit.is_over(SHARED) {
            self.common.queue.poll(&mut wcs);
            for wc in wcs.drain(..) {
                if !audit.take(&wc) {
                    self.take(&wc);
                }
            }
            std::thread::yield_now();
        }
        for place in audit.end() {
            self.post_shared(place);
        }
        self.link.say("audited");
    }

    fn take(&mut self, wc: &Wc) {
        let (nonce, kind, place) = parts_of(wc.id);
        if kind == Kind::SharedReceive {
            self.take_shared(wc, place);
            return;
        }
        let at = self
            .bonds
            .iter()
            .position(|bond| bond.as_ref().is_some_and(|bond| bond.nonce == nonce));
        let at = at.unwrap_or_else(|| panic!("a completion of nobody's: {wc:?}"));
        let Some(bond) = self.bonds[at].as_mut() else {
            return;
        };
        if wc.status != IBV_WC_SUCCESS {
            if bond.failed.is_none() {
                let (kind, status) = (kind as u8, wc.status);
                let dead = format!("dead {at} {nonce} {} {kind} {status}", now_ns());
                self.link.say(&dead);
            }
            bond.note_error(kind, wc);
            return;
        }
        let first = kind == Kind::Receive && !bond.heard_anything();
        bond.complete(kind, place, wc, &mut self.common);
        if first {
            self.link.say(&format!("up {at} {nonce}"));
        }
    }

    fn take_shared(&mut self, wc: &Wc, place: usize) {
        assert_eq!(wc.status, IBV_WC_SUCCESS, "a receive of the shared queue");
        let bond = self
            .bonds
            .iter_mut()
            .flatten()
            .find(|bond| bond.on_shared.number() == wc.number);
        let bond = bond.unwrap_or_else(|| panic!("a message of nobody's: {wc:?}"));
        bond.receive(1, &self.shared_region.read(place * ROOM, wc.len));
        self.common.sums.shared += 1;
        self.common.sums.bytes += wc.len as u64;
        self.taken += 1;
        self.post_shared(place);
        let now = self.taken;
        // a living process that has claimed a receive may be delayed
        let late = self
            .posted
            .iter()
            .position(|(taken, at)| now - taken > AGE && at.elapsed() > PATIENCE);
        assert_eq!(late, None, "a receive of the shared queue got lost");
    }

    /// Sends the messages that may be sent, and destroys connections to dead processes.
    fn go_on(&mut self) {
        for at in 0..MOST {
            let Some(bond) = self.bonds[at].as_mut() else {
                continue;
            };
            if bond.failed.is_some() {
                bond.ask(&mut self.common.random);
                if bond.is_over()
                    && self.is_quiet()
                    && let Some(bond) = self.bonds[at].take()
                {
                    self.clean(bond);
                }
            } else {
                bond.pump(&mut self.common.random);
            }
        }
        let idle = self.bonds.iter().flatten().all(Bond::is_idle);
        if self.rests == Some(false) && idle {
            self.rests = Some(true);
            self.link.say("rests");
        }
    }

    /// Takes the last completions of a queue pair before it is destroyed.
    fn is_quiet(&mut self) -> bool {
        let mut wcs = Vec::new();
        self.common.queue.poll(&mut wcs);
        for wc in &wcs {
            self.take(wc);
        }
        wcs.is_empty()
    }

    fn clean(&mut self, bond: Bond) {
        let (other, nonce) = (bond.other, bond.nonce);
        bond.destroy(&self.common.device);
        let others = self.bonds.iter().flatten().count() + 1;
        let (fds, maps) = leftovers::count();
        // if the kernel refuses copies, there are an agent, and a line and a bounce file per
        // direction
        let refused = refuse::reading(std::process::id().cast_signed()) != 0;
        let (own, each) = if refused { (2, 9) } else { (0, 5) };
        // For each other process, including one that is connecting: its segment in two parts and
        // two rings; its pidfd and its life pipe, the ring from it, its doorbell and that of its
        // channel.
        assert!(
            maps <= 2 + 4 * (others + 1) && fds <= self.base + own + each * (others + 1),
            "{others} others, {maps} mappings, {} descriptors",
            fds - self.base
        );
        self.say_sums();
        self.link.say(&format!("clean {other} {nonce}"));
    }

    /// Prints the state, for diagnosis.
    fn show(&self) {
        let number = self.common.number;
        let used: Vec<u64> = self.posted.iter().map(|at| self.taken - at.0).collect();
        eprintln!(
            "process {number}, {:?}, messages since each shared receive was posted {used:?}",
            self.way
        );
        for bond in self.bonds.iter().flatten() {
            eprintln!("  {}", bond.show());
        }
    }

    /// Prints the counts of checks since the last call.
    fn say_sums(&mut self) {
        let sums = std::mem::take(&mut self.common.sums);
        self.link.say(&format!(
            "sums {} {} {} {} {} {}",
            sums.messages, sums.shared, sums.datagrams, sums.accesses, sums.atomics, sums.bytes
        ));
    }
}
