//! A process of another user can open nothing: no registry, no descriptor, no memory; and no agent
//! answers it. The same attempts succeed for the same user.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use common::*;

const WHO: &str = "SOFTVERBS_TEST_STRANGER";
/// Length of a message to an agent; `docs/softverbs-agent.md` has its format.
const REQUEST: usize = 72;
const HELLO: u32 = 1;
const FILE: u32 = 8;

fn main() {
    if let Ok(who) = std::env::var(WHO) {
        return stranger(&who);
    }
    // SAFETY: no memory is passed.
    let root = unsafe { libc::geteuid() } == 0;
    // SAFETY: there is no other thread yet. Others are asked for what this one may give.
    unsafe { std::env::set_var("SOFTVERBS_AGENT", "1") };
    if !root {
        eprintln!("skipped: this user can't become another one");
        // SAFETY: as above.
        unsafe { std::env::set_var(SKIPPED, "another_user") };
    }
    run(&[
        (
            "the_same_user",
            |link| strange_parent(link, "same"),
            strange_child,
        ),
        (
            "another_user",
            |link| strange_parent(link, "other"),
            strange_child,
        ),
    ]);
}

/// Opens the device; another process tries to access it.
fn strange_parent(link: &mut Link, who: &str) {
    let end = End::connect(link, 4, 4, 1);
    let buffer = end.buffer(&[7; 8]);
    let done = std::process::Command::new(std::env::current_exe().unwrap())
        .env(WHO, who)
        .env("ADDR", buffer.addr().to_string())
        .status();
    assert!(done.unwrap().success(), "{who}");
    link.say("done");
}

fn strange_child(link: &mut Link) {
    let _end = End::connect(link, 4, 4, 1);
    link.expect("done");
}

/// Tries every access to its parent.
fn stranger(who: &str) {
    // SAFETY: no memory is passed.
    let pid = unsafe { libc::getppid() };
    let (fds, name) = (files_of(pid), agent_of(pid));
    let registry = registry_of(pid);
    let addr: u64 = std::env::var("ADDR").unwrap().parse().unwrap();
    assert!(fds.len() > 3, "the device's files are not found: {fds:?}");
    let other = who == "other";
    if other {
        refuse::become_nobody();
    }
    let expected = |errno| if other { errno } else { 0 };
    for &fd in &fds {
        assert_eq!(refuse::opening(pid, fd), expected(libc::EACCES));
    }
    let opened = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&registry);
    let errno = opened
        .err()
        .map_or(0, |error| error.raw_os_error().unwrap());
    assert_eq!(errno, expected(libc::EACCES), "{registry:?}");
    let mut bytes = [0u8; 8];
    let (local, remote) = (piece((&raw mut bytes) as u64, 8), piece(addr, 8));
    // SAFETY: the local piece is this function's; nothing of the other process changes.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(read, if other { -1 } else { 8 });
    let slot: u64 = name.split('.').nth(1).unwrap().parse().unwrap();
    // every process may connect; the agent closes the line of a process that the registry does not
    // list
    let file = ask_agent(&name, slot, fds[0]);
    assert!(
        file.is_none(),
        "the agent answers who is not in the registry"
    );
    let context = open();
    let own = agent_of(std::process::id().cast_signed());
    let slot: u64 = own.split('.').nth(1).unwrap().parse().unwrap();
    let file = ask_agent(&name, slot, segment_of(pid, &fds, other));
    assert_eq!(file.is_none(), other, "{who}");
    // SAFETY: live, and nothing of it is in use.
    unsafe { (verbs().ibv_close_device)(context) };
}

fn piece(addr: u64, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: std::ptr::without_provenance_mut(addr as usize),
        iov_len: len,
    }
}

/// The device's descriptors of a process, as root sees them.
fn files_of(pid: i32) -> Vec<i32> {
    let list = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let of_device = |path: &std::path::Path| {
        std::fs::read_link(path).is_ok_and(|name| {
            let name = name.to_string_lossy();
            name.starts_with("/memfd:softverbs") || name.starts_with("pipe:")
        })
    };
    list.flatten()
        .filter(|entry| of_device(&entry.path()))
        .map(|entry| entry.file_name().to_str().unwrap().parse().unwrap())
        .collect()
}

/// The file that the registry names: the first memfd.
fn segment_of(pid: i32, fds: &[i32], closed: bool) -> i32 {
    let name = |fd| std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap();
    let is_segment =
        |fd: &i32| closed || name(*fd).to_string_lossy().starts_with("/memfd:softverbs ");
    fds.iter().copied().find(is_segment).unwrap()
}

/// The name of a process's agent, which all processes can see.
fn agent_of(pid: i32) -> String {
    let list = std::fs::read_to_string("/proc/net/unix").unwrap();
    let name = list.lines().filter_map(|line| line.split('@').nth(1));
    let of_it = |name: &&str| {
        let mut parts = name.split('.');
        parts.next() == Some("softverbs") && parts.nth(1) == Some(&pid.to_string())
    };
    name.map(str::trim_end)
        .find(of_it)
        .expect("no agent")
        .to_owned()
}

/// The registry, which a process keeps open.
fn registry_of(pid: i32) -> std::path::PathBuf {
    let list = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let is_registry = |path: &std::path::PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy());
        name.is_some_and(|name| name.starts_with("softverbs") && name.contains('.'))
            && path.exists()
    };
    list.flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .find(is_registry)
        .expect("no registry among the open files")
}

/// Asks an agent for a file, as a process in `slot`.
fn ask_agent(name: &str, slot: u64, fd: i32) -> Option<OwnedFd> {
    // SAFETY: all structures live as long as the calls that take them.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        let socket = OwnedFd::from_raw_fd(socket);
        let limit = libc::timeval {
            tv_sec: 20,
            tv_usec: 0,
        };
        let (level, option) = (libc::SOL_SOCKET, libc::SO_RCVTIMEO);
        let size = size_of::<libc::timeval>() as u32;
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const limit).cast(),
            size,
        );
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        let len = (3 + name.len()) as u32;
        assert_eq!(
            libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len),
            0
        );
        for (kind, a) in [(HELLO, slot), (FILE, fd as u64)] {
            let mut bytes = [0u8; REQUEST];
            bytes[..4].copy_from_slice(&kind.to_ne_bytes());
            bytes[48..56].copy_from_slice(&a.to_ne_bytes());
            libc::send(
                socket.as_raw_fd(),
                bytes.as_ptr().cast(),
                REQUEST,
                libc::MSG_NOSIGNAL,
            );
        }
        let mut reply = [0u8; 24];
        let mut control = [0u64; 3];
        let mut message: libc::msghdr = std::mem::zeroed();
        let mut into = piece((&raw mut reply) as u64, 24);
        message.msg_iov = &raw mut into;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = 24;
        let n = libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0);
        let end = std::io::Error::last_os_error();
        assert!(
            n == 24 || n == 0 || end.kind() == std::io::ErrorKind::ConnectionReset,
            "{n} {end}"
        );
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (n == 24 && !header.is_null())
            .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<i32>().read_unaligned()))
    }
}
