//! A process with few descriptors left opens none to watch its peers, and detects their end
//! nevertheless.

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
