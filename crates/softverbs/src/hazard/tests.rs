//! Tests of hazards.

use super::*;
use crate::region::{Range, Regions};

#[test]
fn hazards_do_not_depend_on_what_their_words_hold() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let map = &segment.map;
    let word = |i: usize| map.u64(announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8 * i);
    for i in 0..announce::HAZARD_COUNT {
        word(i).store(77, Ordering::Relaxed);
    }
    let hazards = Hazards::new();
    let publish = || Hazard::publish(&hazards, map, 3, Key(5));
    let mut all: Vec<_> = (0..announce::HAZARD_COUNT).map(|_| publish()).collect();
    for i in 0..announce::HAZARD_COUNT {
        assert_eq!(word(i).load(Ordering::Relaxed), 5 | 1 << 32);
    }
    std::thread::scope(|scope| {
        let one_more = scope.spawn(|| drop(publish()));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!one_more.is_finished());
        all.pop();
        one_more.join().unwrap();
    });
    drop(all);
    for i in 0..announce::HAZARD_COUNT {
        assert_eq!(word(i).load(Ordering::Relaxed), 0);
    }
}

#[test]
fn uses_name_what_they_are_of() {
    let (write, read) = (IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ);
    let access = Use::of_access(
        Through::queue_pair(7),
        Key(5),
        write | IBV_ACCESS_REMOTE_ATOMIC,
    );
    assert!(access.names_key(Key(5)) && !access.names_key(Key(6)));
    assert!(access.names_access(7, RIGHTS) && access.names_access(7, write));
    assert!(!access.names_access(7, read) && !access.names_access(6, RIGHTS));
    assert!(!access.names_receive(7) && !access.names_shared_receive(7));
    // the highest index, and all bits of a key
    let last = Use::of_access(Through::queue_pair(0x3fff), Key(u32::MAX), RIGHTS);
    assert!(last.names_key(Key(u32::MAX)) && last.names_access(0x3fff, read));
    assert_eq!(last.to_word() >> 52, 0);
    for other in [
        Use::of_receive(7, Key(5)),
        Use::of_shared_receive(7, Key(5)),
        Use::from(Key(5)),
        Use::of_access(Through::TARGET, Key(5), RIGHTS),
    ] {
        assert!(other.names_key(Key(5)));
        assert!(
            (0..0x4000).all(|qp| !other.names_access(qp, RIGHTS)),
            "{other:?}"
        );
    }
}

#[test]
fn accesses_through_a_target_leave_the_words_of_others() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    // any 8 words
    let (map, at) = (&segment.map, word_at(3, 0));
    let words = || {
        let all = (0..xrc::USED_WORDS).map(|i| map.u64(at + 8 * i).load(Ordering::Relaxed));
        all.collect::<Vec<_>>()
    };
    let enter = |slot, rights| Accessor::new(slot, 7).enter(map, at, rights);
    let mut all = Vec::new();
    let mut expected = vec![0; xrc::USED_WORDS];
    for i in 0..xrc::USED_WORDS {
        all.push(enter(i as u32, IBV_ACCESS_REMOTE_ATOMIC).unwrap());
        expected[i] = Accessor::new(i as u32, 7).0 | 4;
        assert_eq!(words(), expected);
    }
    assert!(enter(99, IBV_ACCESS_REMOTE_READ).is_none());
    assert_eq!(words(), expected);
    drop(all.remove(2));
    expected[2] = 0;
    assert_eq!(words(), expected);
    all.push(enter(99, IBV_ACCESS_REMOTE_WRITE).unwrap());
    expected[2] = Accessor::new(99, 7).0 | 1;
    assert_eq!(words(), expected);
    drop(all);
    assert!(words().iter().all(|&word| word == 0));
}

#[test]
fn a_neighbour_that_restores_words_ends_the_wait_late() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let words = [0, 1].map(|i| segment.map.u64(word_at(3, i)));
    let visitors = segment.map.u64(header::VISITORS);
    visitors.store(1 << 3, Ordering::Relaxed);
    words[0].store(5 | 1 << 32, Ordering::Relaxed);
    let (limit, begin) = (Duration::from_millis(100), Instant::now());
    let lives = |_: Visitor| {
        // only one of them is cleared
        words
            .iter()
            .for_each(|word| word.store(5 | 1 << 32, Ordering::Relaxed));
        // for the test to end, the process lives from a time on
        begin.elapsed() > 100 * limit
    };
    let found = || find(&segment, |used| used.names_key(Key(5)));
    let tidy = |found: Found| {
        found.is_alive(&segment.map, lives);
    };
    let waited = wait_at_most(limit, found, tidy);
    assert_eq!(waited, Err(Errno(libc::EBUSY)));
    assert!(begin.elapsed() < 50 * limit);
}

#[test]
fn a_further_key_takes_a_word_that_is_free() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let map = &segment.map;
    let word = |i: u32| map.u64(word_at(3, i)).load(Ordering::Relaxed);
    let hazards = Arc::try_new(Hazards::new()).unwrap();
    let own = OwnHazard::new(&hazards, 3);
    let first = own.publish(map, 3, Key(5));
    let mut more = Vec::new();
    while let Some(hazard) = own.publish_more(map, 3, Key(6)) {
        more.push(hazard);
    }
    assert_eq!(more.len(), announce::HAZARD_COUNT - 1);
    assert_eq!((word(0), word(1)), (5 | 1 << 32, 6 | 1 << 32));
    drop(more);
    assert_eq!((word(0), word(1)), (5 | 1 << 32, 0));
    assert!(own.publish_more(map, 3, Key(7)).is_some());
    drop(first);
}

#[test]
fn queue_pairs_keep_half_of_the_words() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let map = &segment.map;
    let word = |i: u32| map.u64(word_at(3, i)).load(Ordering::Relaxed);
    let hazards = Arc::try_new(Hazards::new()).unwrap();
    let mut own: Vec<_> = (0..5).map(|_| OwnHazard::new(&hazards, 3)).collect();
    for (i, hazard) in own.iter().enumerate() {
        let published = hazard.publish(map, 3, Key(9));
        assert_eq!(word(i as u32), 9 | 1 << 32);
        drop(published);
        assert_eq!(word(i as u32), 0);
    }
    let call = Hazard::publish(&hazards, map, 3, Key(5));
    assert_eq!(word(4), 5 | 1 << 32);
    drop(call);
    own.remove(1);
    let again = OwnHazard::new(&hazards, 3);
    let published = again.publish(map, 3, Key(7));
    assert_eq!(word(1), 7 | 1 << 32);
    drop(published);
    drop((own, again));
    let all: Vec<_> = (0..announce::HAZARD_COUNT)
        .map(|_| Hazard::publish(&hazards, map, 3, Key(5)))
        .collect();
    assert_eq!(all.len(), announce::HAZARD_COUNT);
}

/// A call that fails with `EBUSY` can be repeated, and succeeds when no process uses the key
/// any more.
#[test]
fn who_was_refused_can_come_again() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let regions = Regions::new().unwrap();
    let range = |addr| Range {
        addr,
        len: 8,
        iova: 0,
    };
    let register = || regions.register(&segment, 1, range(0x1000), 0).unwrap();
    let (ended, changed) = (register(), register());
    let word = |i: usize| {
        let at = announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8 * i;
        segment.map.u64(at)
    };
    let visitors = segment.map.u64(header::VISITORS);
    visitors.store(1 << 3, Ordering::SeqCst);
    for (i, key) in [ended, changed].into_iter().enumerate() {
        word(i).store(Use::from(key).to_word(), Ordering::SeqCst);
    }
    let mut to = regions.describe(changed).unwrap();
    to.range = range(0x2000);
    let local = |key: Key| {
        let sge = rdma_core_sys::ibv_sge {
            addr: 0,
            length: 8,
            lkey: key.0,
        };
        regions.local(&sge, 1, false)
    };
    let busy = Err(Errno(libc::EBUSY));
    std::thread::scope(|scope| {
        let end = scope.spawn(|| regions.deregister(&segment, ended, |_| true));
        assert_eq!(
            regions.change(&segment, changed, &to, |_| true, || Ok(())),
            busy
        );
        assert_eq!(end.join().unwrap(), busy);
    });
    assert_eq!((local(ended), local(changed)), (None, None));
    assert_eq!(regions.describe_unchanged(ended).map(|was| was.pd), None);
    let was = regions.describe_unchanged(changed).unwrap();
    assert_eq!(was.range, range(0x1000));
    for i in 0..2 {
        word(i).store(0, Ordering::SeqCst);
    }
    regions
        .change(&segment, changed, &to, |_| true, || Ok(()))
        .unwrap();
    assert_eq!(local(changed), Some(0x2000));
    assert_eq!(regions.describe_unchanged(changed).map(|was| was.pd), None);
    regions.deregister(&segment, ended, |_| true).unwrap();
    let again = regions.deregister(&segment, ended, |_| true);
    assert_eq!(again, Err(Errno(libc::EINVAL)));
}

/// A process that has ended left a hazard; the next one of its slot has not opened the owner.
#[test]
fn the_hazard_of_an_ended_process_is_not_that_of_the_next_one_of_its_slot() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let map = &segment.map;
    let (ended, next) = (Some(5), Some(7));
    let registry = |visitor: Visitor| visitor.cookie.is_none() || visitor.cookie == next;
    let hazards = Hazards::new();
    let uses = [
        Use::from(Key(5)),
        Use::of_access(Through::queue_pair(2), Key(6), RIGHTS),
        Use::of_receive(2, Key(6)),
        Use::of_shared_receive(2, Key(6)),
    ];
    let leave = |cookie: Option<u64>| {
        become_visitor(map, 3, cookie.unwrap());
        for used in uses {
            std::mem::forget(Hazard::publish(&hazards, map, 3, used));
        }
        hazards.taken.store(0, Ordering::Relaxed);
    };
    leave(ended);
    wait(&segment, Key(5), registry).unwrap();
    await_accesses(&segment, 2, RIGHTS, registry).unwrap();
    await_receive(&segment, 2, registry).unwrap();
    await_shared_receive(&segment, 2, registry).unwrap();
    assert!(find(&segment, |used| used.to_word() != 0).is_none());
    leave(ended);
    assert!(!is_used(&segment, Key(5), registry));
    assert!(!receive_in_use(&segment, 2, registry));
    leave(next);
    assert!(is_used(&segment, Key(5), registry));
    assert!(receive_in_use(&segment, 2, registry));
    // it has stored no cookie
    map.u64(announce::AT + announce::STRIDE * 3 + announce::VISITOR)
        .store(0, Ordering::Relaxed);
    assert!(is_used(&segment, Key(5), registry));
}

/// The owner finds the hazard of an ended process; before it clears the word, the next process
/// of the slot publishes another key in it.
#[test]
fn a_word_that_has_changed_is_not_cleared() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let map = &segment.map;
    let hazards = Hazards::new();
    become_visitor(map, 3, 5);
    std::mem::forget(Hazard::publish(&hazards, map, 3, Key(5)));
    let next = Hazards::new();
    let hazard = std::cell::OnceCell::new();
    let used = is_used(&segment, Key(5), |visitor| {
        become_visitor(map, 3, 7);
        assert!(hazard.set(Hazard::publish(&next, map, 3, Key(6))).is_ok());
        visitor.cookie != Some(5)
    });
    assert!(!used);
    assert!(is_used(&segment, Key(6), |visitor| visitor.cookie == Some(7)));
    drop(hazard);
    assert!(!is_used(&segment, Key(6), |_| true));
}

#[test]
fn a_dead_visitor_is_not_awaited_and_a_living_one_is() {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let regions = Regions::new().unwrap();
    let range = Range {
        addr: 0,
        len: 1,
        iova: 0,
    };
    let register = || regions.register(&segment, 1, range, 0).unwrap();
    let key = register();
    let visit = |key: Key| {
        segment
            .map
            .u64(header::VISITORS)
            .store(1 << 3, Ordering::SeqCst);
        segment
            .map
            .u64(announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8)
            .store(u64::from(key.0) | 1 << 32, Ordering::SeqCst);
    };
    visit(key);
    regions
        .deregister(&segment, key, |visitor| visitor.slot != 3)
        .unwrap();
    let key = register();
    visit(key);
    let now = |lives| regions.deregister_now(&segment, key, |_| lives);
    assert_eq!(now(true), Err(Errno(libc::EBUSY)));
    assert_eq!(now(true), Err(Errno(libc::EBUSY)));
    now(false).unwrap();
    assert_eq!(now(false), Err(Errno(libc::EINVAL)));
    let key = register();
    visit(key);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| regions.deregister(&segment, key, |_| true));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished());
        segment
            .map
            .u64(announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8)
            .store(0, Ordering::SeqCst);
        waiting.join().unwrap().unwrap();
    });
}
