//! Keys: use by initiators and by the owner during their end.

use std::sync::Arc;

use loom::thread;
use rdma_core_sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_QPS_RTS, ibv_sge};

use super::{Memory, check, check_within};
use crate::hazard::{
    Gate, Hazard, Hazards, OwnHazard, RIGHTS, Through, Visitor, await_accesses, await_words,
    become_visitor, is_used,
};
use crate::key::Key;
use crate::region::{LastRegion, Range, Regions, Target, resolve};
use crate::segment::OwnSegment;
use crate::segment::layout::{MAX_PROCESSES, StateWord, announce, header, qp};
use crate::signal;
use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sync::{Holder, Lock, Mark};

const ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
const PD: u32 = 7;
const OLD: u64 = 0x5000;
const NEW: u64 = 0x9000;

/// A process in slot 3 may have hazards.
const VISITOR: u32 = 3;

/// The queue pair through which it accesses memory.
const INDEX: u32 = 2;
const QP: usize = qp::AT + INDEX as usize * qp::STRIDE;

fn at(addr: u64) -> Range {
    Range {
        addr,
        len: 0x100,
        iova: OLD,
    }
}

/// What a request with this key names.
fn named(key: Key) -> Target {
    Target {
        key,
        addr: OLD,
        pd: PD,
        qp: INDEX,
    }
}

fn owner() -> (Arc<OwnSegment>, Arc<Regions>, Key) {
    let segment = OwnSegment::create(1, 0, true).unwrap();
    segment
        .map
        .u64(header::VISITORS)
        .store(1 << VISITOR, Ordering::SeqCst);
    let hazards = announce::AT + announce::STRIDE * VISITOR as usize + announce::HAZARDS;
    let visitors = (0..MAX_PROCESSES / 64).map(|i| header::VISITORS + 8 * i);
    segment.map.prepare(
        [],
        visitors
            .chain((0..announce::HAZARD_COUNT).map(|i| hazards + 8 * i))
            .chain([QP + qp::STATE]),
    );
    let regions = Regions::new().unwrap();
    let key = regions.register(&segment, PD, at(OLD), ACCESS).unwrap();
    (Arc::new(segment), Arc::new(regions), key)
}

/// The application may use the memory again when deregistration returns. The key is invalid
/// although its index is used again.
#[test]
fn no_initiator_uses_memory_after_its_deregistration() {
    deregistered(false);
}

/// The same; the initiator is a queue pair with a hazard word of its own.
#[test]
fn no_queue_pair_uses_memory_after_its_deregistration() {
    deregistered(true);
}

fn deregistered(own_word: bool) {
    check(move || {
        let (segment, regions, key) = owner();
        let memory = Memory::new(1);
        let (their_segment, theirs) = (Arc::clone(&segment), memory.clone());
        let initiator = thread::spawn(move || {
            let map = &their_segment.map;
            let target = named(key);
            let hazards = crate::sync::Arc::try_new(Hazards::new()).unwrap();
            let own = own_word.then(|| OwnHazard::new(&hazards, VISITOR));
            let hazard = match &own {
                Some(own) => own.publish(map, VISITOR, key),
                None => Hazard::publish(&hazards, map, VISITOR, key),
            };
            if let Some(place) = resolve(map, target, OLD, 8, IBV_ACCESS_REMOTE_READ) {
                assert_eq!(place.addr, OLD);
                assert_eq!(theirs.read(), 1);
            }
            drop(hazard);
        });
        regions.deregister(&segment, key, |_| true).unwrap();
        memory.write(2);
        let again = regions.register(&segment, PD, at(NEW), ACCESS).unwrap();
        assert_eq!(again.index(), key.index());
        initiator.join().unwrap();
    });
}

/// The application may use the memory again when the queue pair does not grant the right any more,
/// although the key stays valid.
#[test]
fn no_initiator_uses_memory_after_the_end_of_its_right() {
    ended(false);
}

/// The same; the initiator is a queue pair with a hazard word of its own.
#[test]
fn no_queue_pair_uses_memory_after_the_end_of_its_right() {
    ended(true);
}

fn ended(own_word: bool) {
    check(move || {
        let (segment, _, key) = owner();
        let memory = Memory::new(1);
        let word = StateWord::new(IBV_QPS_RTS, 5, ACCESS, 1);
        let state = segment.map.u64(QP + qp::STATE);
        state.store(word.0, Ordering::Relaxed);
        let (their_segment, theirs) = (Arc::clone(&segment), memory.clone());
        let initiator = thread::spawn(move || {
            let map = &their_segment.map;
            let through = Through::queue_pair(INDEX);
            let gate = Gate::new(map.u64(QP + qp::STATE), word, through);
            let used = gate.used(key, IBV_ACCESS_REMOTE_READ);
            let hazards = crate::sync::Arc::try_new(Hazards::new()).unwrap();
            let own = own_word.then(|| OwnHazard::new(&hazards, VISITOR));
            let hazard = match &own {
                Some(own) => own.publish(map, VISITOR, used),
                None => Hazard::publish(&hazards, map, VISITOR, used),
            };
            if gate.is_open() {
                assert_eq!(theirs.read(), 1);
            }
            drop(hazard);
        });
        let without = StateWord::new(IBV_QPS_RTS, 5, 0, 1);
        assert!(signal::move_state(&segment.map, QP, word, without));
        await_accesses(&segment, INDEX, RIGHTS, |_| true).unwrap();
        memory.write(2);
        initiator.join().unwrap();
    });
}

const ENDED: u64 = 5;
const NEXT: u64 = 7;

/// The registry has the next process of the slot.
fn lives(visitor: Visitor) -> bool {
    visitor.cookie == Some(NEXT)
}

/// An ended process has left a hazard with this key.
fn leave_hazard(segment: &OwnSegment, key: Key) {
    let announced = announce::AT + announce::STRIDE * VISITOR as usize;
    let (map, relaxed) = (&segment.map, Ordering::Relaxed);
    map.u64(announced + announce::VISITOR).store(ENDED, relaxed);
    map.u64(announced + announce::HAZARDS)
        .store(u64::from(key.0) | 1 << 32, relaxed);
}

/// The next process of its slot opens the owner, and uses the same key.
#[test]
fn the_key_in_an_ended_process_s_hazard_is_awaited_for_the_next_one() {
    // each word of a process is a step of both threads: three preemptions take minutes
    check_within(2, || {
        let (segment, regions, key) = owner();
        leave_hazard(&segment, key);
        let memory = Memory::new(1);
        let (their_segment, theirs) = (Arc::clone(&segment), memory.clone());
        let initiator = thread::spawn(move || {
            let map = &their_segment.map;
            let target = named(key);
            become_visitor(map, VISITOR, NEXT);
            let hazards = Hazards::new();
            let hazard = Hazard::publish(&hazards, map, VISITOR, key);
            if resolve(map, target, OLD, 8, IBV_ACCESS_REMOTE_READ).is_some() {
                assert_eq!(theirs.read(), 1);
            }
            drop(hazard);
        });
        if regions.deregister_now(&segment, key, lives).is_ok() {
            memory.write(2);
        }
        initiator.join().unwrap();
    });
}

/// The next process of its slot opens the owner, and uses another key in the same word, while the
/// owner clears the word.
#[test]
fn another_key_in_the_word_of_an_ended_process_is_awaited() {
    check_within(2, || {
        let (segment, _, first) = owner();
        leave_hazard(&segment, first);
        let second = Key(first.0 ^ 0x100);
        // the keys are not looked up: this takes less steps
        let ended = Arc::new(AtomicU32::new(0));
        let memory = Memory::new(1);
        let (their_segment, theirs) = (Arc::clone(&segment), memory.clone());
        let seen = Arc::clone(&ended);
        let initiator = thread::spawn(move || {
            let map = &their_segment.map;
            become_visitor(map, VISITOR, NEXT);
            let hazards = Hazards::new();
            let hazard = Hazard::publish(&hazards, map, VISITOR, second);
            if seen.load(Ordering::Acquire) == 0 {
                assert_eq!(theirs.read(), 1);
            }
            drop(hazard);
        });
        is_used(&segment, first, lives);
        ended.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if !is_used(&segment, second, lives) {
            memory.write(2);
        }
        initiator.join().unwrap();
    });
}

/// Waits for the present holder, as `Process::await_own_copies` does for several.
fn await_holder(lock: &Lock<()>) {
    let holder = lock.mark_holder(Mark::new());
    await_words(|| holder.filter(Holder::stays), |_| ()).unwrap();
}

/// A thread of the owner looks a local key up and copies, under a lock; then it does so again,
/// under the same lock, or acquires it again. The application uses the memory again when the key
/// has ended and the holder that was marked has passed.
#[test]
fn no_thread_of_the_owner_uses_memory_after_its_deregistration() {
    for passes in [false, true] {
        check(move || {
            let (segment, regions, key) = owner();
            let memory = Memory::new(1);
            let lock = Arc::new(Lock::new(()));
            let (theirs, their_lock) = (Arc::clone(&regions), Arc::clone(&lock));
            let their_memory = memory.clone();
            let user = thread::spawn(move || {
                let mut last_region = LastRegion::default();
                let mut copy = || {
                    let sge = ibv_sge {
                        addr: OLD,
                        length: 8,
                        lkey: key.0,
                    };
                    if theirs
                        .local_again(&mut last_region, &sge, PD, true)
                        .is_some()
                    {
                        assert_eq!(their_memory.read(), 1);
                    }
                };
                // a locked instruction of x86-64, which acquires the lock, is a full fence
                let mut held = their_lock.lock();
                fence(Ordering::SeqCst);
                copy();
                if passes {
                    their_lock.let_pass();
                } else {
                    drop(held);
                    held = their_lock.lock();
                    fence(Ordering::SeqCst);
                }
                copy();
                drop(held);
            });
            regions.kill(&segment, key);
            await_holder(&lock);
            memory.write(2);
            user.join().unwrap();
        });
    }
}

/// Of two threads that end keys, the second finds the mark of the first.
#[test]
fn a_holder_that_another_thread_has_marked_is_awaited() {
    check_within(2, || {
        let (segment, regions, key) = owner();
        let other = regions.register(&segment, PD, at(NEW), ACCESS).unwrap();
        let memory = Memory::new(1);
        let lock = Arc::new(Lock::new(()));
        let (theirs, their_lock) = (Arc::clone(&regions), Arc::clone(&lock));
        let their_memory = memory.clone();
        let user = thread::spawn(move || {
            let held = their_lock.lock();
            fence(Ordering::SeqCst);
            for _ in 0..2 {
                let sge = ibv_sge {
                    addr: OLD,
                    length: 8,
                    lkey: key.0,
                };
                if theirs.local(&sge, PD, true).is_some() {
                    assert_eq!(their_memory.read(), 1);
                }
                their_lock.let_pass();
            }
            drop(held);
        });
        let (theirs, their_lock) = (Arc::clone(&regions), Arc::clone(&lock));
        let their_segment = Arc::clone(&segment);
        let first = thread::spawn(move || {
            theirs.kill(&their_segment, other);
            their_lock.mark_holder(Mark::new());
        });
        regions.kill(&segment, key);
        await_holder(&lock);
        memory.write(2);
        user.join().unwrap();
        first.join().unwrap();
    });
}

#[test]
fn a_local_key_leads_to_its_own_region_or_nowhere() {
    check(|| {
        let (segment, regions, key) = owner();
        let theirs = Arc::clone(&regions);
        let user = thread::spawn(move || {
            let sge = ibv_sge {
                addr: OLD,
                length: 8,
                lkey: key.0,
            };
            let found = theirs.local(&sge, PD, true);
            assert!(matches!(found, None | Some(OLD)), "{found:?}");
        });
        regions.deregister(&segment, key, |_| true).unwrap();
        regions.register(&segment, PD, at(NEW), ACCESS).unwrap();
        user.join().unwrap();
    });
}

/// A region that changes keeps its key. A look-up returns the old or the new description, never a
/// part of both.
#[test]
fn a_key_whose_region_changes_leads_to_one_or_the_other() {
    check(|| {
        let (segment, regions, key) = owner();
        let theirs = Arc::clone(&regions);
        let user = thread::spawn(move || {
            let sge = ibv_sge {
                addr: OLD + 0x80,
                length: 8,
                lkey: key.0,
            };
            let found = theirs.local(&sge, PD, true);
            assert!(matches!(found, None | Some(0x5080 | 0x9000)), "{found:x?}");
        });
        // The first byte of the new range has another IOVA.
        let mut to = regions.describe(key).unwrap();
        to.range.addr = NEW;
        to.range.iova = OLD + 0x80;
        regions
            .change(&segment, key, &to, |_| true, || Ok(()))
            .unwrap();
        user.join().unwrap();
    });
}

/// A thread that observes a region's change finds the new description, whatever it has found
/// before.
#[test]
fn a_region_that_was_seen_is_not_found_behind_its_change() {
    check(|| {
        let (segment, regions, key) = owner();
        let told = Arc::new(AtomicU32::new(0));
        let (theirs, hears) = (Arc::clone(&regions), Arc::clone(&told));
        let user = thread::spawn(move || {
            let sge = ibv_sge {
                addr: OLD,
                length: 8,
                lkey: key.0,
            };
            let mut last_region = LastRegion::default();
            let found = theirs.local_again(&mut last_region, &sge, PD, true);
            assert!(matches!(found, None | Some(OLD | NEW)), "{found:x?}");
            if hears.load(Ordering::Acquire) != 0 {
                let found = theirs.local_again(&mut last_region, &sge, PD, true);
                assert_eq!(found, Some(NEW));
            }
        });
        let mut to = regions.describe(key).unwrap();
        to.range.addr = NEW;
        regions
            .change(&segment, key, &to, |_| true, || Ok(()))
            .unwrap();
        told.store(1, Ordering::Release);
        user.join().unwrap();
    });
}
