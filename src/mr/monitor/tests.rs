//! The cache with the kernel's events, and a device that keeps references to pages as hardware
//! does.
//!
//! The tests run in child processes of this program: the cache would also notice forks and
//! unmappings of other tests. `WEFT_CACHE_OPS` sets the number of operations of the mixture.

#![allow(unsafe_code, reason = "changes memory")]

mod device;
mod forks;
mod gate;
mod mixture;
mod ways;
mod window;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::device::{Pipes, Tested};
use super::{Watching, userfault};
use crate::errno::FiErrno;
use crate::mr::cache::{Bounds, Cache};

const ROLE: &str = "WEFT_TEST_CACHE";
const OPS: &str = "WEFT_CACHE_OPS";
const PAGE: usize = 4096;
const BOUNDS: Bounds = Bounds {
    size: 8 << 20,
    count: 48,
    merge: false,
};

fn open(bounds: Bounds) -> Tested {
    let cache = Cache::new(Pipes, bounds, |index| {
        let index = Arc::clone(index);
        Ok(Box::new(Watching::new(index, true)?))
    });
    cache.expect("userfaultfd")
}

fn map(at: *mut u8, pages: usize, more: libc::c_int) -> *mut u8 {
    // SAFETY: a new mapping, or one that replaces a mapping of this thread.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | more;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let new = libc::mmap(at.cast(), pages * PAGE, prot, flags, -1, 0);
        assert_ne!(new, libc::MAP_FAILED, "{}", FiErrno::last());
        new.cast()
    }
}

/// Installs a seccomp filter that refuses userfaultfd and its device, for this thread and the
/// threads it starts.
fn refuse() {
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let errno = 0x0005_0000 | libc::EPERM.cast_unsigned();
    let mut steps = [
        step(0x20, 0, 0, 0),
        step(0x15, 0, 1, libc::SYS_userfaultfd as u32),
        step(0x06, 0, 0, errno),
        // ioctl, of which only the one that makes descriptors is refused
        step(0x15, 0, 3, libc::SYS_ioctl as u32),
        step(0x20, 0, 0, 24),
        step(0x15, 0, 1, 0xaa00),
        step(0x06, 0, 0, errno),
        step(0x06, 0, 0, 0x7fff_0000),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: `program` has the length and address of `steps`, which the kernel copies.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        );
        assert_eq!(set, 0, "{}", FiErrno::last());
    }
}

/// Runs this program in a role; kills it after 600 seconds.
fn run(role: &str, preload: Option<&str>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--nocapture", "mr::monitor::tests::in_a_process"])
        .env(ROLE, role)
        .stdin(Stdio::null());
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", preload);
    }
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > Duration::from_secs(600) {
            let _ = child.kill();
            panic!("{role} with {preload:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "{role} with {preload:?}: {status}");
}

/// Whether the kernel permits userfaultfd; prints the error if not.
pub(crate) fn available() -> bool {
    match userfault::Userfault::get() {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: userfaultfd can't be had here: {error}");
            false
        }
    }
}

/// Entry point of the child processes; does nothing without a role.
#[test]
fn in_a_process() {
    let role = std::env::var(ROLE);
    if role.as_deref() == Ok("ended") {
        return forks::ended();
    }
    if role.is_ok() && !available() {
        return;
    }
    match role.as_deref() {
        Ok("mixture") => mixture::mixture(),
        Ok("ways") => ways::lost(),
        Ok("stays") => ways::stays(),
        Ok("untold") => ways::untold(),
        Ok("forks") => forks::child(),
        Ok("no descriptor") => forks::without_descriptor(),
        Ok("unshared") => forks::unshared(),
        Ok("renumbered") => forks::renumbered(),
        Ok("gate") => gate::closed(),
        Ok("taken") => ways::taken(),
        Ok("window") => window::window(),
        Ok("refused") => {
            refuse();
            let cache = Cache::new(Pipes, BOUNDS, |index| {
                let index = Arc::clone(index);
                Ok(Box::new(Watching::new(index, true)?))
            });
            assert_eq!(cache.err(), Some(FiErrno::EPERM));
        }
        _ => {}
    }
}

#[test]
fn what_loses_its_pages_is_not_used() {
    run("ways", None);
}

#[test]
fn what_keeps_its_pages_is_kept() {
    run("stays", None);
}

#[test]
fn memory_whose_changes_are_not_told_is_not_kept() {
    run("untold", None);
}

#[test]
fn a_program_cannot_watch_what_is_watched() {
    run("taken", None);
}

#[test]
fn the_gate_is_closed_while_a_change_is_told() {
    run("gate", None);
}

#[test]
fn a_child_keeps_nothing() {
    run("forks", None);
}

#[test]
fn memory_can_be_unmapped_after_an_end_without_a_free_descriptor() {
    run("no descriptor", None);
}

#[test]
fn a_child_does_not_share_the_monitor() {
    run("unshared", None);
}

#[test]
fn a_fork_has_ended_in_the_child() {
    run("ended", None);
}

#[test]
fn a_grandchild_keeps_the_files_of_a_bare_child() {
    run("renumbered", None);
}

#[test]
fn the_kernel_tells_of_changes_whose_event_was_not_read() {
    run("window", None);
}

#[test]
fn what_is_refused_is_said() {
    run("refused", None);
}

#[test]
fn a_random_mixture_of_changes_and_transfers() {
    run("mixture", None);
}

/// Allocators that unmap memory while they hold their locks.
#[test]
fn other_allocators_do_not_deadlock() {
    for library in ["libjemalloc.so.2", "libmimalloc.so.2.0"] {
        let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
        let found = places.map(|place| format!("{place}/{library}"));
        match found
            .iter()
            .find(|path| std::path::Path::new(path).exists())
        {
            Some(path) => run("mixture", Some(path)),
            None => println!("skipped {library}: not installed (make deps)"),
        }
    }
}
