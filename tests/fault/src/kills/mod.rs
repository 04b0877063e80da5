//! Two to eight processes that are all connected to each other. One of them is killed at a random
//! moment and started again, repeatedly, while the others continue.

mod audit;
mod bond;
mod layout;
mod message;
mod moment;
pub(crate) mod worker;

use std::process::Child;
use std::time::{Duration, Instant};

use crate::guard;
use crate::link::{Gone, Link, numbers, ready};
use crate::notice::{LIMIT, Times, Way};
use crate::options::Options;
use crate::random::Random;
use layout::MOST;

/// Nanoseconds of the clock that all processes share.
fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a writable time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// The coordinator's state of a process.
struct Worker {
    child: Child,
    link: Link,
    way: Way,
    killed: bool,
    /// The last answer to a command that all processes get: `rests`, `audited`.
    said: String,
}

/// The connection between two processes, as far as the coordinator has made it.
#[derive(Default)]
struct Between {
    nonce: u32,
    /// The numbers that each process has reported.
    made: [Option<String>; 2],
    told: bool,
    joined: [bool; 2],
    up: [bool; 2],
}

/// A process that must report that it has destroyed its connection to a dead one.
#[derive(Debug)]
struct Owed {
    from: usize,
    of: usize,
    nonce: u32,
    killed: u64,
    /// Whether it was connected, so that it must detect the death itself.
    notices: bool,
}

/// Number of kills between two audits.
const AUDITED: usize = 12;

struct Run<'a> {
    workers: Vec<Worker>,
    /// Indexed by the lower and the higher number.
    between: Vec<Vec<Between>>,
    owed: Vec<Owed>,
    nonce: u32,
    sums: [u64; 6],
    random: &'a mut Random,
    times: &'a mut Times,
}

/// Runs the number of kills that the options name, on two to eight processes in turn. Returns
/// whether all checks succeeded.
pub(crate) fn run(options: &Options) -> bool {
    println!("kills: {}, seed {}", options.kills, options.seed);
    let begin = Instant::now();
    let mut random = Random::new(options.seed);
    let mut times = Times::default();
    let mut passed = 0;
    let mut failed = 0;
    for count in 2..=MOST {
        let upto = |turns: usize| options.kills * turns / (MOST - 1);
        let share = match options.processes {
            Some(only) if only == count => options.kills,
            Some(_) => continue,
            None => upto(count - 1) - upto(count - 2),
        };
        let started = Instant::now();
        let mut run = Run {
            workers: Vec::new(),
            between: Vec::new(),
            owed: Vec::new(),
            nonce: 0,
            sums: [0; 6],
            random: &mut random,
            times: &mut times,
        };
        let left = Duration::from_secs_f64(options.minutes * 60.0).saturating_sub(begin.elapsed());
        let result = run.kill_some(count, share, left);
        let seconds = started.elapsed().as_secs_f64();
        match result {
            Ok((kills, sums)) => {
                println!("ok     {count} processes: {kills} kills; {sums} ({seconds:.1} s)");
                passed += 1;
            }
            Err(problem) => {
                run.show();
                println!("FAILED {count} processes: {problem} ({seconds:.1} s)");
                failed += 1;
            }
        }
        for worker in &mut run.workers {
            let _ = worker.child.kill();
            let _ = worker.child.wait();
        }
    }
    times.print();
    println!("{passed} passed, {failed} failed, 0 skipped");
    failed == 0
}

impl Run<'_> {
    fn kill_some(
        &mut self,
        count: usize,
        kills: usize,
        left: Duration,
    ) -> Result<(usize, String), String> {
        let begin = Instant::now();
        self.between = (0..count)
            .map(|_| (0..count).map(|_| Between::default()).collect())
            .collect();
        for number in 0..count {
            let worker = self.start(number);
            self.workers.push(worker);
        }
        for number in 0..count {
            self.wait_ready(number)?;
        }
        for low in 0..count {
            for high in low + 1..count {
                self.introduce(low, high);
            }
        }
        let (mut done, mut kept) = (0, 0);
        while done < kills && begin.elapsed() < left {
            guard::expect(&format!("{count} processes, kill {done}"));
            // part of the kills happen while connections are made, most of them during transfers
            if self.random.below(4) == 0 {
                let pause = self.random.below(30_000);
                self.listen(Duration::from_micros(pause))?;
            } else {
                self.wait_until(|run| run.all_up(), "all connections")?;
                let pause = self.random.below(40_000);
                self.listen(Duration::from_micros(pause))?;
            }
            // with an even count, one process survives all kills, and its sums include all rounds
            let spared = usize::from(count.is_multiple_of(2));
            let mut victims = vec![self.random.range(spared, count)];
            let second = self.random.range(spared, count);
            if count > 3 && second != victims[0] && self.random.below(6) == 0 {
                victims.push(second);
            }
            let in_a_post = self.random.below(3) == 0;
            self.kill(&victims, in_a_post)?;
            done += victims.len();
            self.wait_until(|run| run.owed.is_empty(), "notice of the dead")?;
            for &victim in &victims {
                self.workers[victim] = self.start(victim);
            }
            for &victim in &victims {
                self.wait_ready(victim)?;
            }
            for &victim in &victims {
                for other in 0..count {
                    // a pair of new processes is connected once
                    if other != victim && !(victims.contains(&other) && other < victim) {
                        self.introduce(victim.min(other), victim.max(other));
                    }
                }
            }
            kept += victims.len();
            if kept >= AUDITED {
                kept = 0;
                self.audit()?;
            }
        }
        self.audit()?;
        Ok((done, self.stop()?))
    }

    /// In an idle system no process holds a receive of another process's shared queue.
    fn audit(&mut self) -> Result<(), String> {
        self.wait_until(|run| run.all_up(), "all connections")?;
        for (command, answer) in [("rest", "rests"), ("audit", "audited")] {
            for worker in &mut self.workers {
                worker.link.say(command);
            }
            let all = |run: &Self| run.workers.iter().all(|worker| worker.said == answer);
            self.wait_until(all, answer)?;
        }
        for worker in &mut self.workers {
            worker.link.say("resume");
        }
        Ok(())
    }

    fn start(&mut self, number: usize) -> Worker {
        let way = self.random.below(3);
        let arguments = [
            "worker".to_owned(),
            number.to_string(),
            self.random.next().to_string(),
            way.to_string(),
        ];
        let (child, link) = Link::start(&arguments);
        Worker {
            child,
            link,
            way: Way::of(way),
            killed: false,
            said: String::new(),
        }
    }

    fn wait_ready(&mut self, number: usize) -> Result<(), String> {
        match self.workers[number].link.hear_within(LIMIT) {
            Ok(Some(line)) if line == "ready" => Ok(()),
            other => Err(format!("process {number} did not start: {other:?}")),
        }
    }

    fn introduce(&mut self, low: usize, high: usize) {
        self.nonce += 1;
        self.between[low][high] = Between {
            nonce: self.nonce,
            ..Between::default()
        };
        self.tell(low, &format!("make {high} {}", self.nonce));
        self.tell(high, &format!("make {low} {}", self.nonce));
    }

    /// Sends a command. If the process has ended, `listen` detects that.
    fn tell(&mut self, number: usize, line: &str) {
        self.workers[number].link.say(line);
    }

    fn all_up(&self) -> bool {
        let count = self.between.len();
        (0..count).all(|low| (low + 1..count).all(|high| self.between[low][high].up == [true; 2]))
    }

    /// Kills the processes now, or makes the first one end itself in the middle of a post.
    fn kill(&mut self, victims: &[usize], in_a_post: bool) -> Result<(), String> {
        if in_a_post {
            let delay = self.random.below(60_000);
            let worker = &mut self.workers[victims[0]];
            worker.link.say(&format!("die {delay}"));
            worker.killed = true;
            let begin = Instant::now();
            while matches!(worker.child.try_wait(), Ok(None)) && begin.elapsed() < LIMIT {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        let killed = now_ns();
        for &victim in victims {
            let child = &mut self.workers[victim].child;
            child.kill().map_err(|error| error.to_string())?;
            self.workers[victim].killed = true;
        }
        for &victim in victims {
            let status = self.workers[victim].child.wait();
            // detects a process that had failed before
            let status = status.map_err(|error| error.to_string())?;
            if status.code().is_some() {
                return Err(format!("process {victim} ended by itself: {status}"));
            }
        }
        for &of in victims {
            for from in 0..self.workers.len() {
                if victims.contains(&from) {
                    continue;
                }
                let between = &self.between[of.min(from)][of.max(from)];
                let (nonce, notices) = (between.nonce, between.told);
                // a process that was connected detects the death when it sends
                let verb = if notices { "go" } else { "drop" };
                self.tell(from, &format!("{verb} {of} {nonce}"));
                self.owed.push(Owed {
                    from,
                    of,
                    nonce,
                    killed,
                    notices,
                });
            }
        }
        Ok(())
    }

    /// Reads lines of all processes for at most `patience`.
    fn listen(&mut self, patience: Duration) -> Result<(), String> {
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let living: Vec<usize> = (0..self.workers.len())
                .filter(|&number| !self.workers[number].killed)
                .collect();
            let fds: Vec<_> = living
                .iter()
                .map(|&number| self.workers[number].link.fd())
                .collect();
            for index in ready(&fds, left) {
                let number = living[index];
                loop {
                    let heard = self.workers[number].link.hear_within(Duration::ZERO);
                    match heard {
                        Ok(Some(line)) => self.hear(number, &line)?,
                        Ok(None) => break,
                        Err(Gone) => {
                            let status = self.workers[number].child.wait();
                            return Err(format!("process {number} ended by itself: {status:?}"));
                        }
                    }
                }
            }
            if left.is_zero() {
                return Ok(());
            }
        }
    }

    fn wait_until(&mut self, done: impl Fn(&Self) -> bool, what: &str) -> Result<(), String> {
        // connecting and detecting a death have the same limit
        let begin = Instant::now();
        while !done(self) {
            self.listen(Duration::from_millis(1))?;
            if begin.elapsed() > 3 * LIMIT {
                return Err(format!(
                    "{what}: not after {:?}; owed {:?}",
                    3 * LIMIT,
                    self.owed
                ));
            }
            for owed in &self.owed {
                if owed.notices && now_ns() - owed.killed > LIMIT.as_nanos() as u64 {
                    let way = self.workers[owed.from].way;
                    return Err(format!("no notice within {LIMIT:?} by {way:?}: {owed:?}"));
                }
            }
        }
        Ok(())
    }

    /// Handles a line of process `from`.
    fn hear(&mut self, from: usize, line: &str) -> Result<(), String> {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "sums" => {
                self.add(rest);
                return Ok(());
            }
            "rests" | "audited" => {
                line.clone_into(&mut self.workers[from].said);
                return Ok(());
            }
            _ => {}
        }
        let given = numbers(rest);
        if given.len() < 2 {
            return Err(format!("process {from} says {line}"));
        }
        let (other, nonce) = (given[0] as usize, given[1] as u32);
        let (low, high) = (from.min(other), from.max(other));
        let between = &mut self.between[low][high];
        let side = usize::from(from == high);
        match verb {
            "made" if between.nonce == nonce => {
                let words: Vec<_> = given[2..].iter().map(u64::to_string).collect();
                between.made[side] = Some(words.join(" "));
                let dead = self.owed.iter().any(|owed| owed.nonce == nonce);
                if let ([Some(of_low), Some(of_high)], false) = (&between.made, dead) {
                    let to_low = format!("peer {high} {nonce} {of_high}");
                    let to_high = format!("peer {low} {nonce} {of_low}");
                    between.told = true;
                    self.tell(low, &to_low);
                    self.tell(high, &to_high);
                }
            }
            "joined" if between.nonce == nonce => {
                between.joined[side] = true;
                // a message sent before that would wait for the connection, with a limit
                if between.joined == [true; 2] {
                    self.tell(low, &format!("go {high} {nonce}"));
                    self.tell(high, &format!("go {low} {nonce}"));
                }
            }
            "up" if between.nonce == nonce => between.up[side] = true,
            "dead" | "clean" => {
                let at = self
                    .owed
                    .iter()
                    .position(|owed| (owed.from, owed.of, owed.nonce) == (from, other, nonce));
                let Some(at) = at else {
                    return Err(format!("process {from} says of living {other}: {line}"));
                };
                if verb == "clean" {
                    self.owed.swap_remove(at);
                } else {
                    let time = given[2].saturating_sub(self.owed[at].killed);
                    let way = self.workers[from].way;
                    self.times.add(way, Duration::from_nanos(time));
                }
            }
            "made" | "joined" | "up" => {}
            _ => return Err(format!("process {from} says {line}")),
        }
        Ok(())
    }

    fn add(&mut self, numbers_of: &str) {
        for (sum, number) in self.sums.iter_mut().zip(numbers(numbers_of)) {
            *sum += number;
        }
    }

    /// Makes the living processes print their state.
    fn show(&mut self) {
        for worker in self.workers.iter_mut().filter(|worker| !worker.killed) {
            worker.link.say("show");
        }
        std::thread::sleep(Duration::from_millis(500));
    }

    /// Ends all processes normally; returns the sums of their checks.
    fn stop(&mut self) -> Result<String, String> {
        for worker in &mut self.workers {
            worker.link.say("stop");
        }
        for number in 0..self.workers.len() {
            loop {
                let heard = self.workers[number].link.hear_within(LIMIT);
                let Ok(Some(line)) = heard else {
                    return Err(format!("process {number} did not stop: {heard:?}"));
                };
                match line.strip_prefix("sums ") {
                    Some(rest) => self.add(rest),
                    None if line == "stopped" => break,
                    None => {}
                }
            }
        }
        let sums = self.sums;
        let [messages, shared, datagrams, accesses, atomics, bytes] = sums;
        if messages == 0 || shared == 0 || datagrams == 0 || accesses == 0 || atomics == 0 {
            return Err(format!("not everything was tried: {sums:?}"));
        }
        Ok(format!(
            "{messages} messages, {shared} on shared queues, {datagrams} datagrams, {accesses} writes and reads, \
             {atomics} atomics, {} MB",
            bytes >> 20
        ))
    }
}
