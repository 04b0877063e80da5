//! A forked child uses nothing that was kept, keeps nothing, and can drop the cache.

#![allow(unsafe_code, reason = "forks")]

use super::super::{list, userfault};
use super::ways::{hit, kept};
use super::{BOUNDS, PAGE, map, open};

pub(super) fn child() {
    let cache = open(BOUNDS);
    let place = map(std::ptr::null_mut(), 4, 0);
    // SAFETY: the child calls only what must be possible there, and ends.
    unsafe {
        place.write_bytes(1, 4 * PAGE);
        assert!(kept(&cache, place));
        // a thread that has a lock when the process forks: the child has it for ever
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
            // one that it registers itself serves its operation
            for _ in 0..3 {
                let got = cache.get(place as u64, 4 * PAGE as u64, false);
                clean &= matches!(got, Ok(crate::mr::cache::Got::Once(..)));
                clean &= !hit(&cache, place);
            }
            // what the parent is told by its monitor it is not
            crate::mr::memory_changed(0, u64::MAX);
            drop(cache);
            // and forks in its turn
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
        // the parent goes on, with new registrations
        assert!(kept(&cache, place));
    }
}
