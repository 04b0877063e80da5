//! A forked child uses no registration of the parent, caches none, and can drop the cache.

#![allow(unsafe_code, reason = "forks")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::super::{fork, list, userfault};
use super::ways::{hit, kept};
use super::window::alone;
use super::{BOUNDS, PAGE, map, open};

pub(super) fn child() {
    let cache = open(BOUNDS);
    let place = map(std::ptr::null_mut(), 4, 0);
    // SAFETY: the child calls only functions that must be possible there, and exits.
    unsafe {
        place.write_bytes(1, 4 * PAGE);
        assert!(kept(&cache, place));
        // a thread that holds the lock at the fork: in the child it is never released
        let (says, said) = channel();
        let other = std::thread::spawn(move || {
            let held = list::hold();
            says.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(200));
            drop(held);
        });
        said.recv().unwrap();
        let child = libc::fork();
        if child == 0 {
            libc::alarm(60);
            let mut clean = !hit(&cache, place) && userfault::Userfault::get().is_err();
            // a registration that the child makes is for its operation only
            for _ in 0..3 {
                let got = cache.get(place as u64, 4 * PAGE as u64, false);
                clean &= matches!(got, Ok(crate::mr::cache::Got::Once(..)));
                clean &= !hit(&cache, place);
            }
            // a report to the child has no effect
            crate::mr::memory_changed(0, u64::MAX);
            drop(cache);
            // the child forks again
            let grandchild = libc::fork();
            if grandchild > 0 {
                libc::waitpid(grandchild, std::ptr::null_mut(), 0);
            }
            libc::_exit(i32::from(!clean));
        }
        let mut status = -1;
        libc::waitpid(child, &raw mut status, 0);
        assert_eq!(status, 0);
        other.join().unwrap();
        // the parent caches new registrations
        assert!(kept(&cache, place));
    }
}

/// As `fork(2)`, without the handlers of `pthread_atfork(3)`.
///
/// # Safety
/// As `_Fork(3)`.
unsafe fn bare_fork() -> libc::pid_t {
    // SAFETY: the caller's promise; no memory is passed.
    unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t }
}

/// A child that only sleeps, until it is killed. `bare`: it is made without the handlers of
/// `pthread_atfork(3)`, so it shares the monitor's descriptor.
fn sleeper(bare: bool) -> libc::pid_t {
    // SAFETY: the child makes only system calls.
    unsafe {
        let child = if bare { bare_fork() } else { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            libc::alarm(60);
            loop {
                libc::pause();
            }
        }
        child
    }
}

/// A thread that unmaps four pages at the address that it gets, and reports this.
fn unmapper() -> (Sender<usize>, Receiver<()>, JoinHandle<()>) {
    let (says, said) = channel();
    let (go, goes) = channel::<usize>();
    let other = std::thread::spawn(move || {
        let at: *mut u8 = std::ptr::without_provenance_mut(goes.recv().unwrap());
        // SAFETY: the test's mapping.
        assert_eq!(unsafe { libc::munmap(at.cast(), 4 * PAGE) }, 0);
        says.send(()).unwrap();
    });
    (go, said, other)
}

/// Memory is still watched when the monitor ends, because another thread has moved it from where
/// the monitor has looked for it. A thread that unmaps it waits for nobody, although a forked child
/// of that time lives.
pub(super) fn unshared() {
    let (go, said, other) = unmapper();
    let place = alone();
    let (monitor, reader) = userfault::without_thread();
    let end = place as u64 + 4 * PAGE as u64;
    monitor.watch_range(place as u64, end).unwrap();
    let child = sleeper(false);
    reader.end();
    drop(monitor);
    go.send(place as usize).unwrap();
    let unmapped = said.recv_timeout(Duration::from_secs(10));
    // SAFETY: the child of this test. Its end releases a thread that waits.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert_eq!(unmapped, Ok(()));
    other.join().unwrap();
    // a descriptor that was opened during a fork is opened again, and used if each was
    for (forks, used) in [(1, 2), (u32::MAX, 6)] {
        let mut calls = 0;
        let made = fork::apart_from_forks(|| {
            calls += 1;
            if calls <= forks {
                let child = sleeper(false);
                // SAFETY: the child of this test.
                unsafe {
                    libc::kill(child, libc::SIGKILL);
                    libc::waitpid(child, std::ptr::null_mut(), 0);
                }
            }
            Ok(calls)
        });
        assert_eq!(made, Ok(used));
    }
    // a full list does not prevent a monitor
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let (fd, replacement) = (null(), null());
    let full = [(); 4].map(|()| fork::Unshared::new(&fd, &replacement));
    let (monitor, reader) = userfault::without_thread();
    reader.end();
    drop((monitor, full));
}

/// In a child of a process that has a domain and no cache, forks that overlap the opening of a
/// monitor are counted as in a process that is no child.
pub(super) fn ended() {
    fork::count_forks();
    // SAFETY: the child acquires no lock, allocates nothing, and exits.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            let mut calls = 0;
            let made = fork::apart_from_forks(|| {
                calls += 1;
                Ok(calls)
            });
            libc::_exit(i32::from(made != Ok(1)));
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0);
    }
}

/// A child that was made without the handlers of `pthread_atfork(3)` opens a file of its own under
/// the number of the parent's descriptor. Its forked child has this file there.
pub(super) fn renumbered() {
    let (monitor, reader) = userfault::without_thread();
    let number = monitor.number();
    let null = std::fs::File::open("/dev/null").unwrap();
    let mut status = -1;
    // SAFETY: the children make only system calls, and end; the parent's other thread, which waits
    // for this one, holds no lock that `fork(3)` acquires.
    unsafe {
        let child = bare_fork();
        assert!(child >= 0);
        if child == 0 {
            libc::alarm(60);
            if libc::dup2(null.as_raw_fd(), number) == number {
                let grandchild = libc::fork();
                if grandchild == 0 {
                    let mut stat = std::mem::zeroed::<libc::stat>();
                    let got = libc::fstat(number, &raw mut stat);
                    let is_null = got == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFCHR;
                    libc::_exit(i32::from(!is_null));
                }
                libc::waitpid(grandchild, &raw mut status, 0);
            }
            libc::_exit(i32::from(status != 0));
        }
        libc::waitpid(child, &raw mut status, 0);
    }
    assert_eq!(status, 0);
    reader.end();
    drop(monitor);
}

/// The last cache is closed while a child has the monitor's descriptor and the process has
/// no free descriptor: no memory is watched afterwards, so a thread that unmaps some waits for
/// nobody.
pub(super) fn without_descriptor() {
    let cache = open(BOUNDS);
    let place = map(std::ptr::null_mut(), 4, 0);
    // SAFETY: the child only sleeps, until it is killed; the mapping is the test's.
    unsafe {
        place.write_bytes(1, 4 * PAGE);
        assert!(kept(&cache, place));
        let child = sleeper(true);
        let (go, said, other) = unmapper();
        let mut limit = std::mem::zeroed::<libc::rlimit>();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let before = limit;
        limit.rlim_cur = 0;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        assert!(std::fs::File::open("/proc/self/maps").is_err());
        drop(cache);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const before), 0);
        go.send(place as usize).unwrap();
        let unmapped = said.recv_timeout(Duration::from_secs(10));
        // its end releases a thread that waits
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        assert_eq!(unmapped, Ok(()));
        other.join().unwrap();
    }
}
