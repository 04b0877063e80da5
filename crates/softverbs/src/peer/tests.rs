//! Tests of the watch over a peer.

use std::fs::File;
use std::process::{Command, Stdio};

use super::*;

/// Permits one further descriptor, or none, during the call.
fn with_descriptors<T>(count: u64, call: impl FnOnce() -> T) -> T {
    let limits = |limit: &libc::rlimit| {
        // SAFETY: a structure that lives as long as the call.
        sys::check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) }).unwrap();
    };
    let mut before = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writable structure.
    sys::check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) }).unwrap();
    // the lowest one that is free
    let lowest = File::open("/dev/null").unwrap().as_raw_fd();
    let few = u64::try_from(lowest).unwrap() + count;
    limits(&libc::rlimit {
        rlim_cur: few,
        ..before
    });
    let result = call();
    limits(&before);
    result
}

#[test]
fn the_last_descriptor_watches_a_living_process() {
    let null = OwnedFd::from(File::open("/dev/null").unwrap());
    let mut command = Command::new("sleep");
    let mut child = command.arg("60").stdin(Stdio::null()).spawn().unwrap();
    let pid = child.id();
    let life = Life {
        pid,
        start_time: sys::start_time(pid).unwrap(),
        tables: OpenFile::new(pid, 0, &null).unwrap(),
        watch: Lock::new(Watch::default()),
    };
    let set = Epoll::new().unwrap();
    let unreadable = with_descriptors(0, || sys::start_time(pid));
    assert_eq!(unreadable, Err(Errno(libc::EMFILE)));
    assert_eq!(with_descriptors(1, || life.watch_now(&set, 7)), Ok(()));
    assert!(life.is_there());
    assert_eq!(set.wait(0).unwrap().1, 0);
    child.kill().unwrap();
    child.wait().unwrap();
    let (tokens, count) = set.wait(20_000).unwrap();
    assert_eq!((tokens[0], count), (7, 1));
    assert!(!life.is_there());
    assert_eq!(sys::start_time(pid), Err(Errno(libc::ESRCH)));
}
