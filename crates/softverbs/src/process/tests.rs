//! Tests of this process's tables.

use std::fs::File;

use super::*;
use crate::hazard::{self, Hazard, OwnHazard};

#[test]
fn a_visitor_lives_with_its_cookie() {
    let process = Process::open().unwrap();
    let (slot, cookie) = (process.slot, process.identity.cookie);
    let lives = |cookie| process.lives(Visitor { slot, cookie });
    // before and after the registry's entry is confirmed by an open peer
    for _ in 0..2 {
        assert!(process.lives(slot) && lives(None) && lives(Some(cookie)));
        assert!(!lives(Some(cookie + 2)));
        process.peer(slot).unwrap();
    }
}

/// A living process can be opened again: after it has sent an invalid message.
#[test]
fn a_process_that_is_opened_again_has_the_same_hazards() {
    let process = Process::open().unwrap();
    let slot = process.slot;
    let first = process.peer(slot).unwrap();
    let own = OwnHazard::new(&first.hazards, slot);
    let all = [
        own.publish(&first.map, slot, Key(5)),
        Hazard::publish(&first.hazards, &first.map, slot, Key(6)),
    ];
    process.request_cleanup(&first);
    process.clean_up_dead_peers();
    let again = process.peer(slot).unwrap();
    assert!(!Arc::ptr_eq(&first, &again));
    let used = || {
        let lives = |visitor| process.lives(visitor);
        [5, 6, 7].map(|key| hazard::is_used(&process.segment, Key(key), lives))
    };
    assert_eq!(used(), [true, true, false]);
    let own_again = OwnHazard::new(&again.hazards, slot);
    let further = own_again.publish(&again.map, slot, Key(7));
    assert_eq!(used(), [true, true, true]);
    drop(all);
    assert_eq!(used(), [false, false, true]);
    drop(further);
    assert_eq!(used(), [false, false, false]);
}

/// A thread ends a region with a file; before it removes the file, another thread has registered a
/// region under the same key.
#[test]
fn the_file_of_a_later_region_stays() {
    let process = Process::open().unwrap();
    let open = |path| OwnedFd::from(File::open(path).unwrap());
    let range = Range {
        addr: 0x1000,
        len: 8,
        iova: 0,
    };
    let key = process.add_region(1, range, 0).unwrap();
    process.files().insert(key, open("/dev/null"));
    let later = open("/dev/zero");
    let fd = later.as_raw_fd();
    process
        .end_region_by(key, || {
            process.files().insert(key, later);
            Ok(())
        })
        .unwrap();
    assert!(process.shown_file(fd).is_some());
    let busy = Err(Errno(libc::EBUSY));
    assert_eq!(process.end_region_by(key, || busy), busy);
    assert!(process.shown_file(fd).is_some());
    process.end_region(key).unwrap();
    assert!(process.files().of_keys.is_empty());
}
