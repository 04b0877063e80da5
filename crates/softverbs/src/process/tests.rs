//! Tests of this process's tables.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    assert!(!peer.is_given_up() && process.mapped_peer(peer.slot).is_some());
    assert!(process.handle_token(progress::peer_token(peer.slot, &peer.identity)));
    assert!(peer.is_given_up() && process.mapped_peer(peer.slot).is_none());
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
    opened.give_up();
    assert_eq!(process.open_now(slot).err(), later);
}

/// A forked child with a line to this process.
struct Child {
    pid: libc::pid_t,
    line: UnixStream,
}

impl Child {
    /// Runs `part` in a child, until it returns or the object is dropped.
    fn run(part: impl FnOnce(UnixStream)) -> Self {
        let (line, theirs) = UnixStream::pair().unwrap();
        // SAFETY: the child uses no object of this process's device, and ends here.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                drop(line);
                let done = catch_unwind(AssertUnwindSafe(|| part(theirs)));
                libc::_exit(i32::from(done.is_err()));
            }
            Self { pid, line }
        }
    }

    /// The next 4 bytes on the line.
    fn hear(&mut self) -> u32 {
        hear(&mut self.line).expect("the child has failed")
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: this process's child, which is not waited for yet.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

fn hear(line: &mut UnixStream) -> Option<u32> {
    let mut bytes = [0; 4];
    line.read_exact(&mut bytes).ok()?;
    Some(u32::from_ne_bytes(bytes))
}

fn say(line: &mut UnixStream, number: u32) {
    line.write_all(&number.to_ne_bytes()).unwrap();
}

/// The process of a slot ends, and the next one with this slot requests a ring, before this process
/// looks at the former one again.
#[test]
fn the_next_process_of_a_slot_is_not_taken_for_the_former_one() {
    // SAFETY: no other thread of this test reads the environment.
    unsafe { std::env::set_var("SOFTVERBS_REUSE_SRQ", "1") };
    let process = Process::open().unwrap();
    let opens = |line: &mut UnixStream| {
        let own = Process::open().unwrap();
        say(line, own.slot);
        own
    };
    for _ in 0..100 {
        let mut first = Child::run(|mut line| {
            opens(&mut line);
            hear(&mut line);
        });
        let mut second = Child::run(|mut line| {
            hear(&mut line);
            let own = opens(&mut line);
            let to = own.peer(process.slot).unwrap();
            while hear(&mut line).is_some() {
                let there = to.has_ring(own.signature()).unwrap();
                say(&mut line, u32::from(there));
            }
        });
        let slot = first.hear();
        let former = process.peer(slot).unwrap();
        drop(first);
        say(&mut second.line, 0);
        if second.hear() != slot {
            // another test has taken the slot
            continue;
        }
        say(&mut second.line, 0);
        assert_eq!(second.hear(), 0);
        former.was_looked_at();
        process.progress();
        assert!(former.is_given_up());
        let next = process.mapped_peer(slot).expect("the ring is not made");
        assert_ne!(next.identity.cookie, former.identity.cookie);
        say(&mut second.line, 0);
        assert_eq!(second.hear(), 1, "the ring is not made");
        return;
    }
    panic!("another process has the slot each time");
}

/// As above, with a connection to the next process.
#[test]
fn the_next_process_of_a_slot_is_opened() {
    // SAFETY: as above.
    unsafe { std::env::set_var("SOFTVERBS_REUSE_SRQ", "1") };
    let process = Process::open().unwrap();
    let opens = |mut line: UnixStream| {
        hear(&mut line);
        let own = Process::open().unwrap();
        say(&mut line, own.slot);
        hear(&mut line);
    };
    for _ in 0..100 {
        let [mut first, mut second] = [(); 2].map(|()| Child::run(opens));
        say(&mut first.line, 0);
        let slot = first.hear();
        let former = process.peer(slot).unwrap();
        drop(first);
        say(&mut second.line, 0);
        if second.hear() == slot {
            former.was_looked_at();
            let next = process.peer(slot).unwrap();
            assert_ne!(next.identity.cookie, former.identity.cookie);
            return;
        }
    }
    panic!("another process has the slot each time");
}
