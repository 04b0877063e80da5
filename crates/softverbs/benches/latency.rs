//! Latency and bandwidth of the raw device between two pinned processes, beside what the machine
//! can do at all: a cache line handed over, a copy, a copy by the kernel.
//!
//! `cargo bench -p softverbs --bench latency`; each line is the median of 15 rounds, interleaved,
//! with the least and the greatest.

#![allow(unsafe_code, missing_docs, reason = "verbs is a C interface")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const ROUNDS: usize = 15;
const LIMIT: Duration = Duration::from_secs(20);

fn main() {
    if std::env::args().any(|a| a == "--test" || a == "--list") {
        return;
    }
    run(&[("latency", parent, child)]);
}

fn pin(cpu: usize) {
    // SAFETY: a set on the stack.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

struct Line {
    name: String,
    per_op: Vec<f64>,
    bytes: usize,
}

fn record(lines: &mut Vec<Line>, name: &str, bytes: usize, nanos: f64) {
    match lines.iter_mut().find(|l| l.name == name) {
        Some(line) => line.per_op.push(nanos),
        None => lines.push(Line {
            name: name.to_owned(),
            per_op: vec![nanos],
            bytes,
        }),
    }
}

const SIZES: [usize; 6] = [8, 64, 256, 4096, 65_536, 1 << 20];

fn count(len: usize) -> u64 {
    match len {
        0..=256 => 20_000,
        257..=8192 => 5_000,
        8193..=100_000 => 1_000,
        _ => 200,
    }
}

fn parent(link: &mut Link) {
    pin(0);
    let mut end = End::connect(link, 512, 512, 1);
    let buffer = end.buffer(&vec![1; 1 << 20]);
    let inbox = end.buffer(&vec![0; 1 << 20]);
    let (addr, rkey) = link.numbers();
    let mut lines = Vec::new();
    for _ in 0..ROUNDS {
        record(&mut lines, "cache line handover", 8, handover());
        for len in SIZES {
            record(&mut lines, &format!("memcpy {len}"), len, memcpy(len));
        }
        for len in SIZES {
            let name = format!("send latency {len}");
            record(
                &mut lines,
                &name,
                len,
                pingpong(&mut end, &buffer, &inbox, len, true),
            );
            link.expect("next");
        }
        for len in SIZES {
            let name = format!("send rate {len}");
            record(&mut lines, &name, len, stream(&mut end, &buffer, len));
            link.expect("next");
        }
        for len in SIZES {
            for (name, opcode) in [("write", IBV_WR_RDMA_WRITE), ("read", IBV_WR_RDMA_READ)] {
                let begin = Instant::now();
                let n = count(len) / 4;
                for _ in 0..n {
                    end.rdma(opcode, &buffer, len, addr, rkey as u32, None);
                    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
                }
                let nanos = begin.elapsed().as_nanos() as f64 / n as f64;
                record(&mut lines, &format!("{name} {len}"), len, nanos);
            }
        }
    }
    for line in &mut lines {
        line.per_op.sort_by(f64::total_cmp);
        let median = line.per_op[ROUNDS / 2];
        eprintln!(
            "{:<22} {:>10.1} ns  ({:.1}-{:.1})  {:>8.2} GB/s",
            line.name,
            median,
            line.per_op[0],
            line.per_op[ROUNDS - 1],
            line.bytes as f64 / median,
        );
    }
    link.say("over");
}

fn child(link: &mut Link) {
    pin(1);
    let mut end = End::create(link, 512, 512, 1);
    let buffer = end.buffer(&vec![1; 1 << 20]);
    let inbox = end.buffer(&vec![0; 1 << 20]);
    end.join(link);
    link.say_numbers(inbox.addr(), u64::from(inbox.rkey()));
    for _ in 0..ROUNDS {
        for len in SIZES {
            pingpong(&mut end, &buffer, &inbox, len, false);
            link.say("next");
        }
        for len in SIZES {
            sink(&mut end, &buffer, &inbox, len);
            link.say("next");
        }
    }
    link.expect("over");
}

/// One way, in nanoseconds.
fn pingpong(end: &mut End, buffer: &Buffer, inbox: &Buffer, len: usize, first: bool) -> f64 {
    let n = count(len);
    end.recv(inbox, 1);
    end.recv(inbox, 1);
    let flags = if len <= 64 { IBV_SEND_INLINE } else { 0 };
    let mut begin = Instant::now();
    if first {
        end.send(&mut buffer.again(), len, None, flags, 0);
    }
    for i in 0..n {
        let wc = end.wait_raw();
        assert_eq!(wc, IBV_WC_SUCCESS);
        if i == n / 10 {
            begin = Instant::now();
        }
        if i + 2 < n {
            end.recv(inbox, 1);
        }
        if i + 1 < n || !first {
            end.send(&mut buffer.again(), len, None, flags, 0);
        }
    }
    begin.elapsed().as_nanos() as f64 / (n - n / 10) as f64 / 2.0
}

fn stream(end: &mut End, buffer: &Buffer, len: usize) -> f64 {
    let n = count(len);
    let flags = if len <= 64 { IBV_SEND_INLINE } else { 0 };
    let credit = end.buffer(&[0; 8]);
    end.recv(&credit, 2);
    let begin = Instant::now();
    let mut open = 0;
    for i in 0..n {
        let signal = if i % 64 == 63 { IBV_SEND_SIGNALED } else { 0 };
        end.send(&mut buffer.again(), len, None, flags | signal, 0);
        if signal != 0 {
            open += 1;
        }
        while open > 2 {
            assert_eq!(end.wait_raw(), IBV_WC_SUCCESS);
            open -= 1;
        }
    }
    for _ in 0..open {
        assert_eq!(end.wait_raw(), IBV_WC_SUCCESS);
    }
    // The last message's answer.
    assert_eq!(end.wait_raw(), IBV_WC_SUCCESS);
    let nanos = begin.elapsed().as_nanos() as f64 / n as f64;
    end.release(credit);
    nanos
}

fn sink(end: &mut End, buffer: &Buffer, inbox: &Buffer, len: usize) {
    let n = count(len);
    let depth = 400.min(n);
    for _ in 0..depth {
        end.recv(inbox, 1);
    }
    for i in 0..n {
        assert_eq!(end.wait_raw(), IBV_WC_SUCCESS);
        if i + depth < n {
            end.recv(inbox, 1);
        }
    }
    end.send(&mut buffer.again(), 8, None, IBV_SEND_INLINE, 0);
}

fn memcpy(len: usize) -> f64 {
    let from = vec![1u8; len];
    let mut to = vec![0u8; len];
    let n = 2000.min((64 << 20) / len);
    let begin = Instant::now();
    for _ in 0..n {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
    }
    begin.elapsed().as_nanos() as f64 / n as f64
}

#[repr(align(128))]
struct Padded(AtomicU64);

/// Half a round trip of a word between the two processors.
fn handover() -> f64 {
    let (a, b) = (Padded(AtomicU64::new(0)), Padded(AtomicU64::new(0)));
    let n = 50_000;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            for i in 1..=n {
                while a.0.load(Ordering::Acquire) != i {}
                b.0.store(i, Ordering::Release);
            }
        });
        let mut begin = Instant::now();
        for i in 1..=n {
            if i == n / 10 {
                begin = Instant::now();
            }
            a.0.store(i, Ordering::Release);
            while b.0.load(Ordering::Acquire) != i {}
        }
        begin.elapsed().as_nanos() as f64 / (n - n / 10) as f64 / 2.0
    })
}
