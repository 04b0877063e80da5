//! A queue pair is connected while the process of its other end does not exist. That process starts
//! later, in the slot and with the number of an ended one. It is found, its pending messages are
//! taken, and its end is detected.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(60);
/// Set in all incarnations of the other process except the first.
const AGAIN: &str = "SOFTVERBS_TEST_AGAIN";
/// Maximum number of tries: another process of the machine may get the slot in between.
const TRIES: u32 = 100;

fn main() {
    run(&[
        ("is_rung", rung_parent, rung_child),
        ("is_rung_later", rung_later_parent, rung_later_child),
        ("is_pulled_from", pulled_parent, pulled_child),
        ("has_ended", ended_parent, ended_child),
        ("is_open_already", open_parent, open_child),
        ("waits_for_room_in_a_ring", full_parent, full_child),
        ("writes_into_a_ring", writing_parent, writing_child),
    ]);
}

/// The receiving end, in RTR before a process exists with the number that it is connected to.
fn early(link: &mut Link) -> End {
    early_of(link, End::with(4, 4, 1))
}

fn early_of(link: &mut Link, mut end: End) -> End {
    let mut first = opened(link);
    for _ in 0..TRIES {
        link.say("execute");
        link.expect("new");
        end.enter_rtr(first);
        let second = opened(link);
        if second.qpn == first.qpn {
            end.say_address(link);
            link.expect("connected");
            return end;
        }
        end.reset();
        end.enter_init();
        first = second;
    }
    panic!("another process has the place each time");
}

fn opened(link: &mut Link) -> Address {
    link.say("open");
    Address::parse(&link.hear())
}

/// The other end, in a process that replaces one with the same number. The process executes itself:
/// it keeps its pid, which determines the slot, and for all others the old process has ended.
fn late(link: &mut Link) -> End {
    late_with(link, |_| ()).0
}

/// As [`late`]; `prepare` gets the end before it is connected.
fn late_with<T>(link: &mut Link, prepare: impl FnOnce(&End) -> T) -> (End, T) {
    if std::env::var_os(AGAIN).is_some() {
        link.say("new");
    }
    link.expect("open");
    let mut end = End::with(4, 4, 1);
    end.say_address(link);
    let line = link.hear();
    if line == "execute" {
        let error = std::process::Command::new(std::env::current_exe().unwrap())
            .env(AGAIN, "1")
            .exec();
        panic!("{error}");
    }
    let prepared = prepare(&end);
    end.enter_rtr(Address::parse(&line));
    end.enter_rts();
    link.say("connected");
    (end, prepared)
}

/// The sender waits for a receive, and sleeps on its channel. The receiver cannot pull its message,
/// so the sender must continue itself.
fn rung_parent(link: &mut Link) {
    let mut end = early(link);
    let target = end.buffer(&[0; 8]);
    // the first message creates the ring
    end.recv(&target, 0);
    link.say_numbers(target.addr(), target.rkey().into());
    assert_eq!(end.wait(LIMIT).opcode, IBV_WC_RECV);
    link.expect("waits");
    end.recv(&target, 1);
    assert_eq!(end.wait(LIMIT).opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    assert_eq!(target.bytes(), [5; 8]);
    link.expect("sent");
}

fn rung_child(link: &mut Link) {
    let mut end = late(link);
    let (addr, rkey) = link.numbers();
    let mut source = end.buffer(&[5; 8]);
    end.send(&mut source, 8, None, IBV_SEND_SIGNALED, 1);
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    let opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    end.rdma(opcode, &source, 8, addr, rkey as u32, Some(9));
    assert!(end.poll().is_none());
    link.say("waits");
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    link.say("sent");
}

/// The receiver has no descriptor to open the sender's process when it posts the receive, and then
/// sleeps.
fn rung_later_parent(link: &mut Link) {
    let mut end = early(link);
    let receive = end.buffer(&[0; 8]);
    link.expect("waits");
    let limit = limit_descriptors(0);
    end.recv(&receive, 1);
    limit_descriptors(limit);
    assert_eq!(end.sleep(LIMIT / 3).status, IBV_WC_SUCCESS);
    assert_eq!(receive.bytes(), [4; 8]);
    link.expect("sent");
}

fn rung_later_child(link: &mut Link) {
    let mut end = late(link);
    end.send_unregistered(&mut [4; 8], None, IBV_SEND_INLINE | IBV_SEND_SIGNALED, 2);
    assert!(end.poll().is_none());
    link.say("waits");
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    link.say("sent");
}

/// The sender waits for a receive, and for another event.
fn pulled_parent(link: &mut Link) {
    let mut end = early(link);
    link.expect("waits");
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    assert_eq!(receive.bytes(), [6; 8]);
    link.say("taken");
    link.expect("seen");
}

fn pulled_child(link: &mut Link) {
    let mut end = late(link);
    end.send_unregistered(&mut [6; 8], None, IBV_SEND_INLINE | IBV_SEND_SIGNALED, 2);
    assert!(end.poll().is_none());
    link.say("waits");
    link.expect("taken");
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("seen");
}

/// The sender sends one message, which creates its ring, and ends. The receiver never sends.
fn ended_parent(link: &mut Link) {
    let mut end = early(link);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    end.recv(&receive, 2);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("sent");
    link.kill();
    let flushed = end.sleep(LIMIT);
    assert_eq!((flushed.wr_id, flushed.status), (2, IBV_WC_WR_FLUSH_ERR));
    assert_eq!(end.state(), IBV_QPS_ERR);
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
}

fn ended_child(link: &mut Link) {
    let mut end = late(link);
    end.send_unregistered(&mut [7; 8], None, IBV_SEND_INLINE | IBV_SEND_SIGNALED, 2);
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    link.say("sent");
    link.wait_end();
}

/// The process is opened for another queue pair, and ends without a message to this one.
fn open_parent(link: &mut Link) {
    let mut end = early(link);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    let mut other = End::with(4, 4, 1);
    other.join(link);
    link.kill();
    let begin = Instant::now();
    let flushed = end.sleep(LIMIT);
    assert_eq!((flushed.wr_id, flushed.status), (1, IBV_WC_WR_FLUSH_ERR));
    assert!(begin.elapsed() < LIMIT);
}

fn open_child(link: &mut Link) {
    let _end = late(link);
    let mut other = End::with(4, 4, 1);
    other.join(link);
    link.wait_end();
}

/// The receiving end, with a ring to which the sender attaches. This process does not attach, which
/// would open the sender's.
fn early_ring(link: &mut Link) -> (End, Ring) {
    let end = End::with(4, 4, 1);
    let ring = Ring::create(&end, 64);
    (early_of(link, end), ring)
}

fn late_ring(link: &mut Link) -> (End, Ring) {
    let (end, ring) = late_with(link, |end| Ring::create(end, 64));
    ring.join();
    (end, ring)
}

fn full_parent(link: &mut Link) {
    let (_end, ring) = early_ring(link);
    link.expect("full");
    assert_eq!(ring.wait(LIMIT).words[0], 0);
    link.expect("woken");
}

fn full_child(link: &mut Link) {
    let (end, ring) = late_ring(link);
    let mut sent = 0;
    while ring.post([sent, 0, 0], &[], 0) == 0 {
        sent += 1;
    }
    end.arm(false);
    assert_eq!(ring.await_consume(), 0);
    assert_eq!(ring.post([sent, 0, 0], &[], 0), libc::EAGAIN);
    link.say("full");
    assert!(end.sleep_on_channel(Duration::from_secs(20)), "nobody rang");
    assert_eq!(ring.post([sent, 0, 0], &[], 0), 0);
    link.say("woken");
}

/// Sets the number of descriptors that this process may have. Returns the earlier one.
fn limit_descriptors(count: libc::rlim_t) -> libc::rlim_t {
    // SAFETY: plain structures.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let before = std::mem::replace(&mut limit.rlim_cur, count);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        before
    }
}

/// The sender is in the middle of a message, and its process cannot be opened to find that out.
fn writing_parent(link: &mut Link) {
    let (mut end, ring) = early_ring(link);
    link.expect("writing");
    let limit = limit_descriptors(0);
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    end.modify(&mut attr, IBV_QP_STATE);
    assert_eq!(ring.poll(), Err(-libc::EAGAIN));
    limit_descriptors(limit);
    assert_eq!(ring.poll(), Err(-libc::EAGAIN));
    link.say("go");
    link.expect("posted");
    let (rest, error) = ring.wait_end(&mut end, LIMIT);
    assert_eq!((rest.len(), error), (1, -libc::ENOTCONN));
}

fn writing_child(link: &mut Link) {
    let (_end, ring) = late_ring(link);
    assert_eq!(ring.post_slowly([1, 0, 0]), libc::ENOTCONN);
    link.say("posted");
}
