//! Two processes that poll on one processor: neither prevents the other one from running. Polls are
//! counted, not time, so other load on the processor does not change the result.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(60);
const ROUNDS: u64 = 400;
/// Empty polls for a round trip, on average. Each wait takes two yields or three, 64 polls apart.
const MOST_POLLS: u64 = 400;

fn main() {
    run(&[
        ("round_trips", first, second),
        ("messages_before_later_writes", watching, writing),
    ]);
}

/// Binds this process to one processor, the same in parent and child.
fn use_one_processor() {
    // SAFETY: all zeros is an empty set; both calls get a live set and its size.
    let ret = unsafe {
        let size = size_of::<libc::cpu_set_t>();
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size, &raw mut set), 0);
        let processor = (0..libc::CPU_SETSIZE as usize).find(|&n| libc::CPU_ISSET(n, &set));
        libc::CPU_ZERO(&mut set);
        libc::CPU_SET(processor.expect("a processor"), &mut set);
        libc::sched_setaffinity(0, size, &raw const set)
    };
    assert_eq!(ret, 0, "{}", std::io::Error::last_os_error());
}

/// The status of the next completion, and the number of empty polls before it.
fn wait(end: &mut End) -> (Wc, u64) {
    let begin = Instant::now();
    for empty in 0.. {
        if let Some(wc) = end.poll() {
            return (wc, empty);
        }
        assert!(
            empty % 4096 != 0 || begin.elapsed() < LIMIT,
            "no completion"
        );
    }
    unreachable!()
}

/// Sends a message and takes the answer, or the reverse. Returns the number of empty polls. A
/// receive must be posted; another one is posted before the next message can come.
fn exchange(end: &mut End, outbox: &mut Buffer, inbox: &Buffer, begins: bool) -> u64 {
    let (mut sent, mut received, mut empty) = (false, false, 0);
    if begins {
        end.send(outbox, 8, None, IBV_SEND_SIGNALED, 0);
    }
    while !(sent && received) {
        let (wc, polls) = wait(end);
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        empty += polls;
        if wc.wr_id == 0 {
            sent = true;
        } else {
            received = true;
            end.recv(inbox, 1);
            if !begins {
                end.send(outbox, 8, None, IBV_SEND_SIGNALED, 0);
            }
        }
    }
    empty
}

fn rounds(end: &mut End, begins: bool) {
    let mut outbox = end.buffer(&[7; 8]);
    let inbox = end.buffer(&[0; 8]);
    end.recv(&inbox, 1);
    // the first rounds are slow: the device does not assume that the peer shares the processor
    let _warm_up: u64 = (0..16)
        .map(|_| exchange(end, &mut outbox, &inbox, begins))
        .sum();
    let empty: u64 = (0..ROUNDS)
        .map(|_| exchange(end, &mut outbox, &inbox, begins))
        .sum();
    let average = empty / ROUNDS;
    assert!(average <= MOST_POLLS, "{average} empty polls in each round");
}

fn first(link: &mut Link) {
    use_one_processor();
    let mut end = End::connect(link, 16, 16, 1);
    rounds(&mut end, true);
    link.expect("done");
}

fn second(link: &mut Link) {
    use_one_processor();
    let mut end = End::connect(link, 16, 16, 1);
    rounds(&mut end, false);
    link.say("done");
}

/// A side of [`watching`] and [`writing`]: the end, and buffers for a message, for a receive and for
/// the number of the last message.
fn open(link: &mut Link) -> (End, Buffer, Buffer, Buffer) {
    use_one_processor();
    let end = End::connect(link, 16, 16, 1);
    let [outbox, inbox, number] = [7, 0, 0].map(|byte| end.buffer(&[byte; 8]));
    (end, outbox, inbox, number)
}

/// A poll that finds nothing returns at once: the application does not see what a peer did after a
/// message before the message's completion. Each message is followed by a write of its number.
fn watching(link: &mut Link) {
    let (mut end, mut outbox, inbox, number) = open(link);
    link.say_numbers(number.addr(), u64::from(number.rkey()));
    link.expect("ready");
    let mut overtaken = 0;
    for round in 1..=ROUNDS {
        end.recv(&inbox, 1);
        end.send(&mut outbox, 8, None, 0, 0);
        let begin = Instant::now();
        let mut written = false;
        let wc = loop {
            if let Some(wc) = end.poll() {
                break wc;
            }
            // SAFETY: eight bytes of a live buffer.
            written |= unsafe { (number.addr() as *const u64).read_volatile() } == round;
            assert!(begin.elapsed() < LIMIT, "no completion");
        };
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 1));
        overtaken += u64::from(written);
    }
    // The kernel can interrupt this process between a poll and the look at the number.
    assert!(
        overtaken < ROUNDS / 4,
        "{overtaken} messages came after later writes"
    );
    link.say("end");
    link.expect("done");
}

fn writing(link: &mut Link) {
    let (mut end, mut outbox, inbox, number) = open(link);
    let (addr, rkey) = link.numbers();
    end.recv(&inbox, 1);
    link.say("ready");
    for round in 1..=ROUNDS {
        assert_eq!(wait(&mut end).0.wr_id, 1);
        end.recv(&inbox, 1);
        // SAFETY: eight bytes of a live buffer.
        unsafe { (number.addr() as *mut u64).write_volatile(round) };
        end.send(&mut outbox, 8, None, 0, 0);
        end.rdma(IBV_WR_RDMA_WRITE, &number, 8, addr, rkey as u32, None);
        assert_eq!(wait(&mut end).0.status, IBV_WC_SUCCESS);
    }
    link.expect("end");
    link.say("done");
}
