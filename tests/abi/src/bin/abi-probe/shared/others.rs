//! With other processes, which run this program in other roles. They read commands, one per line,
//! from standard input.

use std::io::{BufRead, BufReader, Lines, Write as _};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use abi_tests::load::Lib;
use abi_tests::objects::close;
use libfabric_sys::*;

use super::{ALL, LOOK, Memory, PAGE, World, key};

const LEN: usize = 5 * PAGE;
const MODE: i32 = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

/// A process in another role; killed on drop.
struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(role: &str, handle: Option<&[u8]>) -> Self {
        let libfabric = std::env::args().nth(1).expect("the path of a libfabric");
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args([libfabric, role.to_owned()]);
        command.args(handle.map(to_text));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, lines }
    }

    fn hear(&mut self) -> String {
        self.lines.next().expect("another line").expect("text")
    }

    fn say(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("a pipe");
        writeln!(input, "{line}").expect("it listens");
    }

    fn kill(&mut self) {
        self.child.kill().expect("a process");
        let status = self.child.wait().expect("an end");
        assert_eq!(status.signal(), Some(libc::SIGKILL));
    }

    fn end(&mut self) -> ExitStatus {
        drop(self.child.stdin.take());
        self.child.wait().expect("an end")
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn to_text(handle: &[u8]) -> String {
    handle.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_text(text: &str) -> Vec<u8> {
    let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("two digits");
    (0..text.len()).step_by(2).map(digits).collect()
}

fn tell(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("standard output");
}

fn heard() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line);
    (read.expect("standard input") > 0).then(|| line.trim().to_owned())
}

/// Allocates, prints the handle, and exits on command.
pub(crate) fn exporter(lib: &Lib) {
    let world = World::new(lib, MODE);
    let memory = world.alloc(LEN, ALL);
    memory.fill(11);
    tell(&to_text(&world.export(memory.mr, ALL).expect("mr_export")));
    tell(&to_text(&world.export(memory.mr, LOOK).expect("mr_export")));
    while heard().is_some() {}
    assert_eq!(world.free(memory), 0);
    world.setup.close();
}

/// Imports, then reads, writes or exits on command.
pub(crate) fn importer(lib: &Lib, handle: &str) {
    let world = World::new(lib, MODE);
    let memory = world.import(&from_text(handle), ALL).expect("mr_import");
    assert_eq!(memory.len, LEN);
    tell("imported");
    while let Some(line) = heard() {
        let (what, seed) = line.split_once(' ').expect("two words");
        let seed = seed.parse().expect("a number");
        match what {
            "has" => tell(if memory.has(seed) { "yes" } else { "no" }),
            "fill" => {
                memory.fill(seed);
                tell("filled");
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(world.free(memory), 0);
    world.setup.close();
}

/// Imports for reading only, and writes nevertheless.
pub(crate) fn storer(lib: &Lib, handle: &str) {
    let world = World::new(lib, MODE);
    let memory = world.import(&from_text(handle), LOOK).expect("mr_import");
    assert!(memory.has(12));
    tell("imported");
    // a handler of one of libfabric's providers may be installed
    // SAFETY: the default action.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
    memory.put(0, 1);
    tell("stored");
}

/// Imports as another user, `nobody`.
pub(crate) fn stranger(lib: &Lib, handle: &str) {
    let world = World::new(lib, MODE);
    let became =
        // SAFETY: numbers.
        unsafe { libc::setresgid(65534, 65534, 65534) | libc::setresuid(65534, 65534, 65534) };
    assert_eq!(became, 0);
    let refused = world
        .import(&from_text(handle), LOOK)
        .expect_err("another user's");
    assert_eq!(refused, -FI_EACCES);
    tell("refused");
    std::process::exit(0); // what is open is root's
}

pub(super) fn run(lib: &Lib) {
    let world = World::new(lib, MODE);
    let mut first = Other::start("shared-exporter", None);
    let (all, look) = (from_text(&first.hear()), from_text(&first.hear()));
    assert_eq!(
        world.import(&look, ALL).expect_err("not granted"),
        -FI_EACCES
    );
    assert_eq!(
        world.import(&look, FI_RECV).expect_err("not granted"),
        -FI_EACCES
    );
    let memory = world.import(&all, ALL).expect("mr_import");
    assert!(memory.len == LEN && memory.has(11), "its contents");
    let view = world
        .import_with(&look, &World::attr(LOOK))
        .expect("mr_import");
    let mut second = Other::start("shared-importer", Some(&all));
    assert_eq!(second.hear(), "imported");
    second.say("fill 12");
    assert_eq!(second.hear(), "filled");
    assert!(memory.has(12) && view.has(12));

    let mut reader = Other::start("shared-storer", Some(&look));
    assert_eq!(reader.hear(), "imported");
    let status = reader.end();
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status:?}");
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } == 0 {
        let mut stranger = Other::start("shared-stranger", Some(&look));
        assert_eq!(stranger.hear(), "refused");
        assert!(stranger.end().success());
    } else {
        println!("not root: no other user was tried");
    }

    // the allocating process is killed: the memory stays with the others, and its handles are stale
    first.kill();
    assert!(memory.has(12) && view.has(12));
    for handle in [&all, &look] {
        assert_eq!(world.import(handle, LOOK).expect_err("stale"), -FI_ENOENT);
    }
    memory.fill(13);
    second.say("has 13");
    assert_eq!(second.hear(), "yes");
    rma(&world, memory, &mut second);

    // a third process imports from an importer's handle; they close in any order
    let again = world.export(memory.mr, ALL).expect("mr_export");
    let mut third = Other::start("shared-importer", Some(&again));
    assert_eq!(third.hear(), "imported");
    second.kill();
    third.say("has 14");
    assert_eq!(third.hear(), "yes");
    assert_eq!(world.free(memory), 0);
    third.say("fill 15");
    assert_eq!(third.hear(), "filled");
    assert!(view.has(15));
    assert!(third.end().success());
    assert!(view.has(15));
    // SAFETY: an open region.
    assert_eq!(unsafe { close(view.mr) }, 0);
    world.setup.close();
}

/// Peers access the memory with an importer's key after the allocating process has ended.
fn rma(world: &World, memory: Memory, other: &mut Other) {
    let pair = world.connect();
    let local = world.alloc(LEN, FI_SEND | FI_RECV | FI_READ | FI_WRITE);
    local.fill(14);
    let at = (memory.addr as u64, key(memory.mr));
    world.transfer(&pair, true, local, at, LEN);
    other.say("has 14");
    assert_eq!(other.hear(), "yes");
    // SAFETY: opened here.
    unsafe { pair.close() };
    assert_eq!(world.free(local), 0);
}
