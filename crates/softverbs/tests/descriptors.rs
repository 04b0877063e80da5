//! A process with few descriptors left opens none to watch its peers, and detects their end
//! nevertheless. A process with none left wakes its peers when it has one again.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::time::Duration;

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(60);

fn main() {
    run(&[
        ("a_watched_peer", watched_parent, child),
        ("an_unwatched_peer", unwatched_parent, child),
        ("an_unwatched_sender", unwatched_sender_parent, child),
        ("a_sleeper_is_rung_later", ringing_parent, sleeping_child),
        (
            "a_sleeper_is_rung_by_a_thread_that_sleeps",
            sleeping_parent,
            sleeping_child,
        ),
        ("a_sleeper_makes_a_ring_later", datagram_parent, full_child),
    ]);
}

/// Descriptors of this process, and those of them that are pidfds.
fn descriptors() -> (usize, usize) {
    let names = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let names: Vec<_> = names
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .collect();
    let pidfds = names
        .iter()
        .filter(|name| name.to_string_lossy() == "anon_inode:[pidfd]");
    (names.len(), pidfds.count())
}

fn allow(count: usize) {
    // SAFETY: a structure on the stack; all zeros is a value of it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = count as u64;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
}

fn child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("killed before");
}

/// The peer is killed while a receive is posted and a send waits.
fn peer_ends(link: &mut Link, mut end: End, pidfds: usize) {
    end.join(link);
    assert_eq!(descriptors().1, pidfds);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 9);
    let mut buffer = end.buffer(&[1; 8]);
    // there is no receive, so this message waits
    end.send(&mut buffer, 8, None, 0, 1);
    link.kill();
    let seen: Vec<_> = (0..2)
        .map(|_| end.wait(LIMIT))
        .map(|wc| (wc.status, wc.wr_id))
        .collect();
    assert!(seen.contains(&(IBV_WC_RETRY_EXC_ERR, 1)), "{seen:?}");
    assert!(seen.contains(&(IBV_WC_WR_FLUSH_ERR, 9)), "{seen:?}");
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
    assert_eq!(end.state(), IBV_QPS_ERR);
}

fn watched_parent(link: &mut Link) {
    let end = End::create(link, 16, 16, 1);
    peer_ends(link, end, 1);
}

/// More than half of the descriptors are in use.
fn unwatched_parent(link: &mut Link) {
    let end = End::create(link, 16, 16, 1);
    allow(descriptors().0 * 3 / 2);
    peer_ends(link, end, 0);
}

/// Nothing is requested of the peer, so only polls find its end.
fn unwatched_sender_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    allow(descriptors().0 * 3 / 2);
    end.join(link);
    assert_eq!(descriptors().1, 0);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 9);
    link.kill();
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 9));
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
}

/// More descriptors than any test needs.
const ENOUGH: usize = 1024;
/// Time in which a process falls asleep, or uses a resource that it has again.
const WHILE: Duration = Duration::from_millis(300);
/// The wake-up must not come from anything slower.
const SOON: Duration = Duration::from_secs(5);

/// Lets this process open no more descriptors.
fn exhaust() {
    allow(3);
    let file = std::fs::File::open("/proc/self/stat");
    assert_eq!(file.unwrap_err().raw_os_error(), Some(libc::EMFILE));
}

/// Sends a message to the sleeping peer without a descriptor to wake it; a receive for its answer
/// is posted.
fn send_unheard(link: &mut Link) -> End {
    let mut end = End::connect(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 9);
    let mut buffer = end.buffer(&[1; 8]);
    link.expect("sleeps");
    std::thread::sleep(WHILE);
    exhaust();
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 1);
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 1));
    end
}

/// The sender polls when it has a descriptor again.
fn ringing_parent(link: &mut Link) {
    let mut end = send_unheard(link);
    std::thread::sleep(WHILE);
    assert!(end.poll().is_none(), "the peer was woken");
    allow(ENOUGH);
    let wc = end.wait(SOON);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 9));
    link.say("done");
}

/// The sender sleeps when it has a descriptor again.
fn sleeping_parent(link: &mut Link) {
    let mut end = send_unheard(link);
    let freed = std::thread::spawn(|| {
        std::thread::sleep(WHILE);
        allow(ENOUGH);
    });
    let wc = end.sleep(SOON);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 9));
    freed.join().unwrap();
    link.say("done");
}

/// Sleeps until a message arrives, and answers it.
fn sleeping_child(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 8);
    link.say("sleeps");
    let wc = end.sleep(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 8));
    let mut buffer = end.buffer(&[2; 8]);
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 2);
    assert_eq!(end.wait(LIMIT).wr_id, 2);
    link.expect("done");
}

/// The first datagram to a process requests a ring.
fn datagram_parent(link: &mut Link) {
    let mut end = datagram_end();
    let to = Address::parse(&link.hear());
    let ah = address_handle(&end, to);
    let buffer = end.buffer(&[1; 8]);
    link.expect("sleeps");
    std::thread::sleep(WHILE);
    send_datagram(&mut end, &buffer, 8, (ah, to.qpn, QKEY));
    let wc = end.wait(LIMIT);
    assert_eq!(wc.status, IBV_WC_SUCCESS);
    // if that took 1 s, the datagram is in the list of late messages
    let begin = std::time::Instant::now();
    while begin.elapsed() < SOON / 2 {
        assert!(end.poll().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    link.expect("received");
}

/// Has no descriptor to open the sender's process, and then sleeps.
fn full_child(link: &mut Link) {
    let mut end = datagram_end();
    end.say_address(link);
    let receive = end.buffer(&[0; 64]);
    end.recv(&receive, 8);
    link.say("sleeps");
    exhaust();
    let freed = std::thread::spawn(|| {
        std::thread::sleep(2 * WHILE);
        allow(ENOUGH);
    });
    let wc = end.sleep(SOON);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 8));
    freed.join().unwrap();
    link.say("received");
}
