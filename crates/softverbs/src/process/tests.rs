//! Tests of this process's tables.

use super::*;

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
