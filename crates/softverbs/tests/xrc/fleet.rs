//! Processes that execute commands, and the commands of the tests.

#![allow(dead_code, reason = "shared by tests, each of which uses a part")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::common::is_skipped;
use rdma_core_sys::*;

/// Set for a process of this program that is an actor.
pub(crate) const ACTOR: &str = "SOFTVERBS_TEST_ACTOR";

/// Runs the cases that the command line names (without names all), or one actor.
pub(crate) fn main(cases: &[(&str, fn())]) {
    if std::env::var_os(ACTOR).is_some() {
        return super::actor::run();
    }
    let asked: Vec<_> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    if std::env::args().any(|a| a == "--list") {
        // A runner asks twice: for all cases, and for the ignored ones, which it counts.
        let ignored = std::env::args().any(|a| a == "--ignored");
        for case in cases.iter().filter(|case| !ignored || is_skipped(case.0)) {
            println!("{}: test", case.0);
        }
        return;
    }
    let wanted = |name: &str| asked.is_empty() || asked.iter().any(|a| name.contains(a.as_str()));
    for (name, test) in cases.iter().filter(|case| wanted(case.0)) {
        if is_skipped(name) {
            println!("test {name} ... ignored");
            continue;
        }
        let begin = std::time::Instant::now();
        test();
        println!("test {name} ... ok ({} ms)", begin.elapsed().as_millis());
    }
}

/// The test's handle of an actor.
pub(crate) struct Actor {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Actor {
    pub(crate) fn start() -> Self {
        Self::on_node(0)
    }

    pub(crate) fn on_node(node: u32) -> Self {
        Self::with("SOFTVERBS_NODE", &node.to_string())
    }

    /// An actor with a variable in its environment.
    pub(crate) fn with(variable: &str, value: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(ACTOR, "1")
            .env(variable, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        Self { child, to, from }
    }

    /// Sends a command without waiting for its answer.
    pub(crate) fn say(&mut self, command: &str) {
        writeln!(self.to, "{command}").unwrap();
    }

    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "an actor has ended");
        line.trim_end().to_owned()
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.say(command);
        self.hear()
    }

    /// Executes a command that must succeed.
    #[track_caller]
    pub(crate) fn does(&mut self, command: &str) {
        assert_eq!(self.ask(command), "ok", "{command}");
    }

    #[track_caller]
    pub(crate) fn number(&mut self, command: &str) -> u32 {
        let reply = self.ask(command);
        reply
            .parse()
            .unwrap_or_else(|_| panic!("{command}: {reply}"))
    }

    #[track_caller]
    pub(crate) fn refuses(&mut self, command: &str, errno: i32) {
        assert_eq!(self.ask(command), format!("errno {errno}"), "{command}");
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child is this process's own and not waited for yet.
        let ret = unsafe { libc::kill(self.child.id().cast_signed(), signal) };
        assert_eq!(ret, 0);
    }

    /// Sets its limit of descriptors, whatever it does now.
    pub(crate) fn allow_descriptors(&self, count: u64) {
        let pid = self.child.id().cast_signed();
        let (none, nofile) = (std::ptr::null(), libc::RLIMIT_NOFILE);
        // SAFETY: structures on the stack; all zeros is a value of them. The child is this
        // process's own and not waited for yet.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            assert_eq!(libc::prlimit(pid, nofile, none, &raw mut limit), 0);
            limit.rlim_cur = count;
            let set = libc::prlimit(pid, nofile, &raw const limit, std::ptr::null_mut());
            assert_eq!(set, 0);
        }
    }

    /// Stops it, and returns when it has stopped.
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let path = format!("/proc/{}/stat", self.child.id());
        while !std::fs::read_to_string(&path).unwrap().contains(") T ") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    pub(crate) fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The result of the next request.
    #[track_caller]
    pub(crate) fn sent(&mut self, message: u64, status: u32) {
        assert_eq!(self.ask("sent"), format!("{message} {status}"));
    }

    /// The next receive must have this message, through this target.
    #[track_caller]
    pub(crate) fn got(&mut self, place: u64, message: u64, len: usize, target: u32) {
        let wanted = format!("{place} {IBV_WC_SUCCESS} {len} 0 {target}");
        assert_eq!(self.ask("received"), wanted);
        assert_eq!(self.ask(&format!("holds {place} {message} {len}")), "true");
    }

    #[track_caller]
    pub(crate) fn event(&mut self, event: u32, qp: u32) {
        assert_eq!(self.ask("event"), format!("{event} {qp}"));
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file of a domain, removed on drop.
pub(crate) struct Place(pub(crate) String);

impl Place {
    pub(crate) fn new() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("softverbs-xrc-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        Self(path.to_str().unwrap().to_owned())
    }

    pub(crate) fn open(&self, flags: i32) -> String {
        format!("domain {} {flags}", self.0)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Creates an initiator, connects it through a target, and returns its number.
pub(crate) fn connect(initiator: &mut Actor, holder: &mut Actor, target: u32) -> u32 {
    connect_with(initiator, holder, target, 7)
}

/// As [`connect`], with the timeout of the initiator.
pub(crate) fn connect_with_timeout(
    initiator: &mut Actor,
    holder: &mut Actor,
    target: u32,
    timeout: u8,
) -> u32 {
    connect_between(initiator, holder, target, timeout, |_, _| {})
}

/// As [`connect_with_timeout`], with `between` after the holder has connected the target, and before
/// the initiator is connected.
pub(crate) fn connect_between(
    initiator: &mut Actor,
    holder: &mut Actor,
    target: u32,
    timeout: u8,
    between: impl FnOnce(&mut Actor, &mut Actor),
) -> u32 {
    let last = |source| format!("rts_timeout {source} {timeout}");
    connect_by(initiator, holder, target, last, between)
}

/// As [`connect`], with the RNR retry count of the initiator.
pub(crate) fn connect_with(
    initiator: &mut Actor,
    holder: &mut Actor,
    target: u32,
    rnr_retry: u8,
) -> u32 {
    let last = |source| format!("rts_retries {source} {rnr_retry}");
    connect_by(initiator, holder, target, last, |_, _| {})
}

fn connect_by(
    initiator: &mut Actor,
    holder: &mut Actor,
    target: u32,
    last: impl Fn(u32) -> String,
    between: impl FnOnce(&mut Actor, &mut Actor),
) -> u32 {
    let source = initiator.number("initiator 7");
    for command in [
        format!("init {target}"),
        format!("rtr {target} {source}"),
        format!("rts {target}"),
    ] {
        holder.does(&command);
    }
    between(initiator, holder);
    for command in [
        format!("init {source}"),
        format!("rtr {source} {target}"),
        last(source),
    ] {
        initiator.does(&command);
    }
    source
}
