//! A forked child uses no registration of the parent, caches none, and can drop the cache.

#![allow(unsafe_code, reason = "forks")]

use super::super::{list, userfault};
use super::ways::{hit, kept};
use super::{BOUNDS, PAGE, map, open};

pub(super) fn child() {
    let cache = open(BOUNDS);
    let place = map(std::ptr::null_mut(), 4, 0);
    // SAFETY: the child calls only functions that must be possible there, and exits.
    unsafe {
        place.write_bytes(1, 4 * PAGE);
        assert!(kept(&cache, place));
        // a thread that holds the lock at the fork: in the child it is never released
        let (says, said) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            let held = list::hold();
            says.send(()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(200));
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

/// The last cache is closed while a forked child has the monitor's descriptor and the process has
/// no free descriptor: no memory is watched afterwards, so a thread that unmaps some waits for
/// nobody.
pub(super) fn without_descriptor() {
    let cache = open(BOUNDS);
    let place = map(std::ptr::null_mut(), 4, 0);
    // SAFETY: the child only sleeps, until it is killed; the mapping is the test's.
    unsafe {
        place.write_bytes(1, 4 * PAGE);
        assert!(kept(&cache, place));
        let child = libc::fork();
        if child == 0 {
            libc::alarm(60);
            loop {
                libc::pause();
            }
        }
        let (says, said) = std::sync::mpsc::channel();
        let (go, goes) = std::sync::mpsc::channel::<usize>();
        let other = std::thread::spawn(move || {
            let at: *mut u8 = std::ptr::without_provenance_mut(goes.recv().unwrap());
            assert_eq!(libc::munmap(at.cast(), 4 * PAGE), 0);
            says.send(()).unwrap();
        });
        let mut limit = std::mem::zeroed::<libc::rlimit>();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let before = limit;
        limit.rlim_cur = 0;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        assert!(std::fs::File::open("/proc/self/maps").is_err());
        drop(cache);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const before), 0);
        go.send(place as usize).unwrap();
        let unmapped = said.recv_timeout(std::time::Duration::from_secs(10));
        // its end releases a thread that waits
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        assert_eq!(unmapped, Ok(()));
        other.join().unwrap();
    }
}
