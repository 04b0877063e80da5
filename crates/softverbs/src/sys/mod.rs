//! System calls, wrapped so that the rest of the crate sees owned descriptors and errnos.

mod bounce;
mod fd;
mod limits;
mod lock;
mod memfd;
mod memory;
mod proc;
mod reach;
mod seqpacket;
mod text;
mod thread;
mod vm;

pub(crate) use bounce::BounceFile;
pub(crate) use fd::{Epoll, Pipe, Timer, epoll_readable, is_pipe, one_readable, ring_fd};
#[cfg(test)]
pub(crate) use fd::{count_entries, with_descriptors};
use limits::fsize;
pub(crate) use limits::{is_spare, may_exceed_memlock, memlock};
pub(crate) use lock::{holder, lock, locked, reopen, unlock};
pub(crate) use memfd::{
    Tables, create as memfd_create, fallocate, inode_of, is_guarded, is_writable, name_of,
    punch_hole, read_sealed, read_word, sealed_file, sealed_size,
};
pub(crate) use memory::{Grow, Zero, list, room, try_box, with_room, zeroed};
pub(crate) use proc::{
    Identity, OpenFile, PidFd, has_open, hash, is_stopped, machine_id, may_run, namespace,
    open_fd_of, own_start_time, start_time,
};
pub(crate) use reach::{allow_tracers, block_signals, dumpable, restore_signals, yama_restricts};
pub(crate) use seqpacket::{Credentials, Line, Listener};
pub(crate) use text::ShortPath;
pub(crate) use thread::{Thread, start_thread};
pub(crate) use vm::{
    MAX_IOV, as_local, copies_allowed, file_behind, page_end, pages_huge, pages_of, pages_usable,
    readable_locally, refused, same_page_offset, vm_read, vm_write, writable_locally, write_back,
};

use std::fmt;
use std::io::Read;

/// A positive errno of the C library.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    /// The calling thread's `errno`.
    pub(crate) fn last() -> Self {
        // SAFETY: the C library gives each thread its own errno.
        Self(unsafe { *libc::__errno_location() })
    }

    /// Sets the calling thread's `errno` to it.
    pub(crate) fn set(self) {
        // SAFETY: the C library gives each thread its own errno.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        // errors of the standard library have no errno
        let none = match error.kind() {
            std::io::ErrorKind::OutOfMemory => libc::ENOMEM,
            _ => libc::EIO,
        };
        Self(error.raw_os_error().unwrap_or(none))
    }
}

/// A result with an errno.
pub(crate) type Res<T> = Result<T, Errno>;

/// Whether this process or the kernel lacks a descriptor or memory for the call: it may succeed
/// later.
pub(crate) fn is_shortage(error: Errno) -> bool {
    matches!(
        error.0,
        libc::EMFILE
            | libc::ENFILE
            | libc::ENOMEM
            | libc::ENOBUFS
            | libc::ENOSPC
            | libc::ETOOMANYREFS
    )
}

/// `ret` of a system call, or its errno.
pub(crate) fn check(ret: libc::c_int) -> Res<libc::c_int> {
    if ret < 0 { Err(Errno::last()) } else { Ok(ret) }
}

/// Nanoseconds of the monotonic clock.
#[inline]
pub(crate) fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// The time of the kernel's last tick in nanoseconds: 1 to 10 ms ago at most, by the kernel's
/// configuration. A tenth of the cost of [`now_ns`], where that reads the clock of a hypervisor.
pub(crate) fn tick_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

#[inline]
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is writable; both clocks always exist.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The effective user of this process.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: no memory is passed.
    unsafe { libc::geteuid() }
}

/// Whether the process with these credentials, as the kernel reports them for a socket, is of this
/// process's effective user.
///
/// In a user namespace the kernel shows each user that the namespace does not map as the overflow
/// user (`user_namespaces(7)`), so that a process of any such user can look like this one.
/// `kill(2)` compares the users themselves.
pub(crate) fn is_own_user(uid: u32, pid: u32) -> bool {
    uid == effective_uid() && (uid != overflow_uid() || may_signal(pid))
}

/// Whether this process may send signals to another one, which exists.
fn may_signal(pid: u32) -> bool {
    // 0 is a process of another pid namespace, and for `kill` this process's group.
    let pid = pid.cast_signed();
    // SAFETY: no memory is passed; signal 0 only checks the permission.
    pid > 0 && unsafe { libc::kill(pid, 0) } == 0
}

/// The number that stands for all users that a namespace does not map.
fn overflow_uid() -> u32 {
    static NUMBER: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *NUMBER.get_or_init(|| {
        let mut text = [0; 16];
        let read = std::fs::File::open("/proc/sys/kernel/overflowuid")
            .and_then(|mut file| file.read(&mut text));
        let digits = read
            .ok()
            .and_then(|len| std::str::from_utf8(&text[..len]).ok());
        let number = digits.and_then(|digits| digits.trim().parse().ok());
        // DEFAULT_OVERFLOWUID of the kernel's `include/linux/highuid.h`
        number.unwrap_or(65_534)
    })
}

/// A random number from the kernel.
pub(crate) fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer has the length given.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 8 {
        u64::from_ne_bytes(bytes)
    } else {
        // only kernels that lack other calls used here refuse this one
        now_ns() ^ (u64::from(std::process::id()) << 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child of another user, which sleeps until it is killed.
    fn stranger(uid: u32) -> libc::pid_t {
        // SAFETY: the child makes system calls only.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::syscall(libc::SYS_setresuid, uid, uid, uid);
                loop {
                    libc::pause();
                }
            }
            child
        }
    }

    #[test]
    fn an_own_process_is_of_the_own_user() {
        assert!(is_own_user(effective_uid(), std::process::id()));
        assert!(!is_own_user(effective_uid() ^ 1, std::process::id()));
        assert!(!may_signal(0));
        assert!(!may_signal(u32::MAX));
        // SAFETY: no memory is passed.
        let parent = unsafe { libc::getppid() };
        assert!(effective_uid() != 0 || may_signal(parent.cast_unsigned()));
    }

    /// In a namespace that maps no user, a process of another user has the number of this one.
    #[test]
    fn a_user_that_is_not_mapped_is_not_this_one() {
        if effective_uid() != 0 {
            println!("skipped: the test needs processes of two users");
            return;
        }
        const USER: u32 = 2001;
        let overflow = overflow_uid();
        let (same, other) = (stranger(USER), stranger(USER + 1));
        // the children change their users in this time at the latest
        std::thread::sleep(std::time::Duration::from_millis(100));
        // SAFETY: the child makes system calls only.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::syscall(libc::SYS_setresuid, USER, USER, USER);
                if libc::unshare(libc::CLONE_NEWUSER) != 0 {
                    libc::_exit(77);
                }
                let own = libc::getpid().cast_unsigned();
                let good = effective_uid() == overflow
                    && is_own_user(overflow, own)
                    && is_own_user(overflow, same.cast_unsigned())
                    && !is_own_user(overflow, other.cast_unsigned());
                libc::_exit(i32::from(!good));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            for child in [same, other] {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
            libc::WEXITSTATUS(status)
        };
        if status == 77 {
            println!("skipped: the kernel refuses user namespaces");
            return;
        }
        assert_eq!(status, 0);
    }
}
