//! Tests of this process's tables.

use std::fs::File;
use std::time::{Duration, Instant};

use super::*;
use crate::hazard::{self, Hazard, OwnHazard};
use crate::sys::{Line, Listener};

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

/// Another thread has gone to sleep while this one looks at the receives, into one of which a
/// sender still writes.
#[test]
fn a_thread_that_sleeps_looks_again_at_a_failed_queue_pair() {
    let process = Process::open().unwrap();
    process.prepare_sleep();
    process.flush_again();
    let (tokens, count) = process.wake.wait(1000).unwrap();
    assert!(tokens[..count].contains(&progress::TOKEN_TIMER));
}

/// The sender of a pending message may sleep outside of the device, and nothing else reminds it.
#[test]
fn an_agent_with_a_full_queue_of_connections_is_asked_again() {
    let process = Process::open().unwrap();
    let peer = process.peer(process.slot).unwrap();
    let name = agent::name(process.slot, &process.identity);
    let listener = Listener::bind_for(&name, 0).unwrap();
    let others: Vec<_> = std::iter::from_fn(|| Line::connect(&name).ok()).collect();
    assert!(!others.is_empty());
    process.ask_to_go_on(&peer);
    while listener.accept().is_ok() {}
    let begin = Instant::now();
    let line = loop {
        process.prepare_sleep();
        if let Ok(line) = listener.accept() {
            break line;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "it is not asked");
        process.wake.wait(1000).unwrap();
    };
    for kind in [agent::Kind::Hello, agent::Kind::GoOn] {
        let mut bytes = [0; agent::REQUEST];
        line.receive(&mut bytes).unwrap();
        assert_eq!(agent::Request::of_bytes(&bytes).unwrap().kind, kind);
    }
}

/// A thread has read a token of the wake set, and handles it after another one has opened the next
/// process of the slot.
#[test]
fn a_late_token_does_not_end_the_next_process_of_a_slot() {
    let process = Process::open().unwrap();
    let peer = process.peer(process.slot).unwrap();
    let former = Identity {
        cookie: !peer.identity.cookie,
        ..peer.identity
    };
    assert!(!process.handle_token(progress::peer_token(peer.slot, &former)));
    assert!(!peer.is_dead() && process.mapped_peer(peer.slot).is_some());
    assert!(process.handle_token(progress::peer_token(peer.slot, &peer.identity)));
    assert!(peer.is_dead() && process.mapped_peer(peer.slot).is_none());
}

/// A thread that holds a lock does not open the process, which could take 2 s, while a repetition
/// does that.
#[test]
fn a_process_that_a_repetition_opens_is_left_to_it() {
    let process = Process::open().unwrap();
    let slot = process.slot;
    process.call_later(slot);
    let later = Some(Errno(libc::EAGAIN));
    assert_eq!(process.open_now(slot).err(), later);
    assert!(process.open_now_or_later(slot).is_none());
    process.calling[slot as usize / 64].store(1 << (slot % 64), Ordering::Release);
    process.uncalled[slot as usize / 64].store(0, Ordering::Release);
    assert_eq!(process.open_now(slot).err(), later);
    process.calling[slot as usize / 64].store(0, Ordering::Release);
    process.call_later(slot);
    while process.mapped_peer(slot).is_none() {
        process.repeat_failed();
        std::thread::yield_now();
    }
    let opened = process.mapped_peer(slot).unwrap();
    assert!(Arc::ptr_eq(&process.open_now(slot).unwrap(), &opened));
    // an ended process is not taken for the one that a repetition opens
    process.call_later(slot);
    assert!(process.open_now(slot).is_ok());
    opened.mark_dead();
    assert_eq!(process.open_now(slot).err(), later);
}
