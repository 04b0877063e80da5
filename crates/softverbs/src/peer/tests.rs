//! Tests of the watch over a peer.

use std::fs::File;
use std::os::fd::FromRawFd;
use std::process::{Command, Stdio};

use super::*;
use crate::process::Process;
use crate::sys::{Listener, with_descriptors};

impl Peer {
    /// As if the kernel refused copies from and to the peer's memory, which may be this process's.
    pub(crate) fn refuse(&self) {
        self.refuses.store(true, Ordering::Relaxed);
    }

    /// As if the peer had been found alive at this moment.
    pub(crate) fn was_looked_at(&self) {
        self.checked.store(sys::tick_ns(), Ordering::Relaxed);
    }
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

/// Any process of the user can write to the pipe of another one.
#[test]
fn a_pipe_tells_the_end_by_its_hang_up_alone() {
    let (mut fds, set) = ([0; 2], Epoll::new().unwrap());
    // SAFETY: room for two descriptors.
    sys::check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }).unwrap();
    // SAFETY: the call made both, and nothing else owns them.
    let [read, write] = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let watch = Watch {
        pidfd: None,
        pipe: Some(read),
    };
    watch.add_to(&set, 7).unwrap();
    sys::ring_fd(write.as_raw_fd());
    assert_eq!(set.wait(0).unwrap().1, 0);
    drop(write);
    let (tokens, count) = set.wait(0).unwrap();
    assert_eq!((tokens[0], count), (7, 1));
}

/// The peer ends while a thread opens a line to its agent.
#[test]
fn a_line_to_the_agent_of_an_ended_peer_wakes_nobody() {
    let process = Process::open().unwrap();
    let peer = process.peer(process.slot).unwrap();
    let listener = Listener::bind(&agent::name(peer.slot, &peer.identity)).unwrap();
    let set = Epoll::new().unwrap();
    peer.give_up();
    peer.unwatch(&set);
    let (link, former) = peer.open_link(process.slot, &set, 7).unwrap();
    assert!(former.is_none());
    listener.accept().unwrap().hang_up();
    assert!(sys::epoll_readable(link.fd(), 0).unwrap());
    assert_eq!(set.wait(0).unwrap().1, 0);
}
