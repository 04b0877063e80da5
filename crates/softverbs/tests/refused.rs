//! The tests of other files on a kernel that refuses copies between processes: they pass, with the
//! help of the owners' agents.

#![allow(unsafe_code, reason = "verbs is a C interface")]
#![allow(dead_code, reason = "each suite has what all share")]
#![allow(
    clippy::duplicate_mod,
    reason = "each suite is a program of its own elsewhere"
)]

mod everywhere;
#[path = "forked.rs"]
mod forked;
#[path = "hostile.rs"]
mod hostile;
#[path = "resources.rs"]
mod resources;
#[path = "xrc.rs"]
mod xrc;

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use everywhere::SUITES;
use everywhere::common::suites::{Suite, run_suites};
use everywhere::common::{End, Link, Wc, refuse, run};
use rdma_core_sys::*;

/// Cases that cannot pass here:
/// - `a_stopped_target`, `a_stopped_sender`: their agents are stopped with them;
/// - `a_write_between`: the receiver does not take a write behind a pending message, but an agent
///   continues with it;
/// - `rdma_without_a_request`: what a call executes is copied by this process;
/// - `a_stopped_initiator`, `a_stopped_initiator_of_xrc`: the target's agent makes the accesses.
const NOT_HERE: &str = "a_stopped_target a_stopped_sender a_write_between rdma_without_a_request \
                        a_stopped_initiator a_stopped_initiator_of_xrc";

fn main() {
    let more: [Suite; 5] = [
        ("xrc", xrc::main),
        ("forked", forked::main),
        ("resources", resources::main),
        ("hostile", hostile::main),
        ("agents", agents),
    ];
    let suites = [&SUITES[..], &more].concat();
    run_suites(&suites, refuse::refuse_copies, NOT_HERE);
}

const LIMIT: Duration = Duration::from_secs(60);

/// Tests of agents.
fn agents() {
    run(&[
        ("said_once", said_parent, said_child),
        ("a_stopped_owner", stopped_parent, stopped_child),
        ("flushed_under_a_request", flushed_parent, flushed_child),
        ("killed_under_requests", killed_parent, killed_child),
        ("more_queues_than_places", many_parent, many_child),
        ("a_line_without_a_descriptor", short_parent, stopped_child),
        (
            "a_receiver_without_a_descriptor",
            short_receiver_parent,
            short_receiver_child,
        ),
    ]);
}

/// One line in the log, independent of the number of operations.
fn said_parent(link: &mut Link) {
    let lines = std::env::temp_dir().join(format!("softverbs-said-{}", std::process::id()));
    let file = std::fs::File::create(&lines).unwrap();
    // SAFETY: two descriptors of this process; the output on its standard error stream is read
    // below.
    let old = unsafe {
        let old = libc::dup(2);
        assert!(libc::dup2(file.as_raw_fd(), 2) == 2);
        old
    };
    for _ in 0..2 {
        let mut end = End::connect(link, 8, 8, 1);
        let (addr, rkey) = link.numbers();
        let buffer = end.buffer(&[7; 64]);
        for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
            end.rdma(opcode, &buffer, 64, addr, rkey as u32, None);
            assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        }
        link.say("next");
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::dup2(old, 2) }, 2);
    let said = std::fs::read_to_string(&lines).unwrap();
    std::fs::remove_file(&lines).unwrap();
    assert_eq!(said.matches("slower copies").count(), 1, "{said}");
}

fn said_child(link: &mut Link) {
    for _ in 0..2 {
        let end = End::connect(link, 8, 8, 1);
        let buffer = end.buffer(&[0; 64]);
        link.say_numbers(buffer.addr(), buffer.rkey().into());
        link.expect("next");
        assert_eq!(buffer.bytes(), [7; 64]);
    }
}

/// Requests to a stopped process wait, others continue, and none is lost.
fn stopped_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, rkey) = link.numbers();
    let buffer = end.buffer(&vec![9; 1 << 20]);
    link.stop();
    let begin = Instant::now();
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 1 << 20, addr, rkey as u32, None);
    assert!(begin.elapsed() < Duration::from_secs(2), "the post waits");
    // destroying a queue pair with an outstanding request does not wait
    let other = End::with(8, 8, 1);
    other.release(other.buffer(&[1; 8]));
    while begin.elapsed() < Duration::from_millis(300) {
        assert!(end.poll().is_none());
    }
    link.go_on();
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    link.say("written");
    link.expect("seen");
}

fn stopped_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let buffer = end.buffer(&vec![0; 1 << 20]);
    link.say_numbers(buffer.addr(), buffer.rkey().into());
    link.expect("written");
    assert!(buffer.bytes().iter().all(|&byte| byte == 9));
    link.say("seen");
}

/// Requests are flushed of which the owner's agent may execute the first: it alone may have been
/// executed (`docs/softverbs.md`, "READ and WRITE").
fn flushed_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, rkey) = link.numbers();
    let buffer = end.buffer(&[9; 64]);
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 64, addr, rkey as u32, None);
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    link.stop();
    for _ in 0..2 {
        end.rdma(IBV_WR_RDMA_WRITE, &buffer, 64, addr, rkey as u32, None);
    }
    assert!(end.poll().is_none());
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    end.modify(&mut attr, IBV_QP_STATE);
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 64, addr, rkey as u32, None);
    let flushed: Vec<_> = (0..3)
        .map(|_| end.wait(LIMIT))
        .map(|wc| (wc.status, wc.vendor_err))
        .collect();
    let expected = [0, 1, 1].map(|not_executed| (IBV_WC_WR_FLUSH_ERR, not_executed));
    assert_eq!(flushed, expected);
    link.go_on();
    link.say("over");
}

fn flushed_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let buffer = end.buffer(&[0; 64]);
    link.say_numbers(buffer.addr(), buffer.rkey().into());
    link.expect("over");
}

/// The owner is killed while its agent copies: errors, and no hang.
fn killed_parent(link: &mut Link) {
    let mut end = End::connect(link, 64, 8, 1);
    let (addr, rkey) = link.numbers();
    let buffer = end.buffer(&vec![9; 4 << 20]);
    for _ in 0..32 {
        end.rdma(IBV_WR_RDMA_WRITE, &buffer, 4 << 20, addr, rkey as u32, None);
    }
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.kill();
    let mut statuses = Vec::new();
    for _ in 1..32 {
        statuses.push(end.sleep(LIMIT).status);
    }
    let failed = statuses.iter().position(|&status| status != IBV_WC_SUCCESS);
    let failed = failed.expect("the dead one copies");
    assert_eq!(statuses[failed], IBV_WC_RETRY_EXC_ERR);
    let flushed = |&status: &u32| status == IBV_WC_WR_FLUSH_ERR;
    assert!(statuses[failed + 1..].iter().all(flushed), "{statuses:?}");
}

fn killed_child(link: &mut Link) {
    let end = End::connect(link, 64, 8, 1);
    let buffer = end.buffer(&vec![0; 4 << 20]);
    link.say_numbers(buffer.addr(), buffer.rkey().into());
    link.wait_end();
}

/// Descriptors of this process from now on; those that are open stay open.
fn allow_descriptors(count: u64) {
    // SAFETY: a structure on the stack; all zeros is a value of it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = count;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
}

/// More descriptors than any test needs.
const ENOUGH: u64 = 1024;
/// The wake-up must not come from anything slower.
const SOON: Duration = Duration::from_secs(5);

/// Nothing completes while no descriptor is free. Sleeps until something does, while another thread
/// permits descriptors again.
fn completion_with_descriptors(end: &mut End) -> Wc {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(100) {
        assert!(end.poll().is_none());
    }
    let later = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(200));
        allow_descriptors(ENOUGH);
    });
    let wc = end.sleep(SOON);
    later.join().unwrap();
    wc
}

/// A request waits while no descriptor is free for the line to the agent, and the sleeping process
/// repeats it.
fn short_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, rkey) = link.numbers();
    let buffer = end.buffer(&vec![9; 1 << 20]);
    allow_descriptors(3);
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 1 << 20, addr, rkey as u32, None);
    assert_eq!(completion_with_descriptors(&mut end).status, IBV_WC_SUCCESS);
    link.say("written");
    link.expect("seen");
}

/// The receiver of a pending message has no descriptor for the line by which it asks the sender's
/// agent to send the message. The sender makes no call of the device meanwhile.
fn short_receiver_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    link.expect("sent");
    allow_descriptors(3);
    let buffer = end.buffer(&vec![0; 1 << 20]);
    end.recv(&buffer, 5);
    let wc = completion_with_descriptors(&mut end);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 5));
    assert!(buffer.bytes().iter().all(|&byte| byte == 9));
    link.say("over");
}

fn short_receiver_child(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let mut buffer = end.buffer(&vec![9; 1 << 20]);
    end.send(&mut buffer, 1 << 20, None, IBV_SEND_SIGNALED, 1);
    link.say("sent");
    link.expect("over");
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
}

const QUEUES: usize = 24;

const PART: usize = 600 << 10;

/// All requesting processes get their turns.
fn many_parent(link: &mut Link) {
    let mut ends: Vec<_> = (0..QUEUES).map(|_| End::connect(link, 8, 8, 1)).collect();
    let targets: Vec<_> = ends.iter().map(|_| link.numbers()).collect();
    for _ in 0..10 {
        let mut buffers = Vec::new();
        for (i, end) in ends.iter_mut().enumerate() {
            let buffer = end.buffer(&vec![i as u8 + 1; PART]);
            let (addr, rkey) = targets[i];
            end.rdma(IBV_WR_RDMA_WRITE, &buffer, PART, addr, rkey as u32, None);
            buffers.push(buffer);
        }
        for (end, buffer) in ends.iter_mut().zip(buffers) {
            assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
            end.release(buffer);
        }
    }
    link.say("written");
    link.expect("seen");
}

fn many_child(link: &mut Link) {
    let ends: Vec<_> = (0..QUEUES).map(|_| End::connect(link, 8, 8, 1)).collect();
    let buffers: Vec<_> = ends.iter().map(|end| end.buffer(&[0; PART])).collect();
    for buffer in &buffers {
        link.say_numbers(buffer.addr(), buffer.rkey().into());
    }
    link.expect("written");
    for (i, buffer) in buffers.iter().enumerate() {
        assert!(
            buffer.bytes().iter().all(|&byte| byte == i as u8 + 1),
            "{i}"
        );
    }
    link.say("seen");
}
