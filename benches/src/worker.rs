//! One process of a pair. It writes its address to standard output, reads the peer's address from
//! standard input, and then runs one operation for each line that it reads. It sleeps while it
//! waits for a line.

use std::io::{BufRead as _, Write as _};

use crate::op::Op;
use crate::subject::{Kind, Side};

/// Pins this thread, and threads that it starts later, to one processor.
pub(crate) fn pin(cpu: usize) {
    // SAFETY: a set on the stack.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        let ret = libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        assert_eq!(ret, 0, "processor {cpu} is not there for this process");
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("standard output");
}

fn hear() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .expect("standard input");
    (read > 0).then(|| line.trim().to_owned())
}

/// `worker KIND SIDE CPU`
pub(crate) fn main(arguments: &[String]) {
    let [kind, side, cpu] = arguments else {
        panic!("worker KIND SIDE CPU");
    };
    pin(cpu.parse().expect("a processor's number"));
    let side = if side == "first" {
        Side::First
    } else {
        Side::Second
    };
    let mut subject = kind.parse::<Kind>().expect("a subject").open(side);
    say(&subject.address());
    let Some(other) = hear() else { return };
    subject.connect(&other);
    say("connected");
    while let Some(line) = hear() {
        let words: Vec<_> = line.split(' ').collect();
        let [op, len, count] = words[..] else {
            panic!("{line}: OPERATION BYTES COUNT")
        };
        let op: Op = op.parse().expect("an operation");
        let (len, count) = (
            len.parse().expect("bytes"),
            count.parse().expect("a number"),
        );
        say(&subject.run(op, len, count).to_string());
    }
}
