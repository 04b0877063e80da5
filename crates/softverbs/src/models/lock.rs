//! The lock inside a process, and the lock between processes for atomics.

use std::sync::Arc;

use loom::thread;

use super::{Memory, check};
use crate::region::Stripe;
use crate::segment::Mapping;
use crate::segment::layout::{SEGMENT_SIZE, stripe};
use crate::sync::Lock;

/// Longer than the run time of any model.
const WAIT: std::time::Duration = std::time::Duration::from_secs(60);

#[test]
fn the_lock_of_a_process_excludes() {
    check(|| {
        let lock = Arc::new(Lock::new(Memory::new(0)));
        let theirs = Arc::clone(&lock);
        let other = thread::spawn(move || {
            let value = theirs.lock();
            value.write(value.read() + 1);
        });
        {
            let value = lock.lock();
            value.write(value.read() + 1);
        }
        if let Some(value) = lock.try_lock() {
            value.write(value.read() + 1);
        }
        other.join().unwrap();
        assert!(lock.lock().read() >= 2);
    });
}

#[test]
fn the_lock_of_an_address_excludes_processes() {
    check(|| {
        let map = Mapping::model(SEGMENT_SIZE);
        map.prepare(
            [],
            (0..stripe::COUNT).map(|i| stripe::AT + stripe::STRIDE * i),
        );
        let word = Memory::new(0);
        let add = |map: &Mapping, word: &Memory, own: u64| {
            let held = Stripe::lock(map, 0x1000, own, WAIT, |_| true).unwrap();
            word.write(word.read() + 1);
            drop(held);
        };
        let (their_map, their_word) = (map.again(), word.clone());
        let other = thread::spawn(move || add(&their_map, &their_word, 2 << 48));
        add(&map, &word, 1 << 48);
        other.join().unwrap();
        assert_eq!(word.read(), 2);
    });
}

/// If two processes find the lock of a process that has ended, only one of them holds it at a time.
#[test]
fn the_lock_of_one_that_has_ended_is_taken_over_once() {
    const DEAD: u64 = 9 << 48;
    check(|| {
        let map = Mapping::model(SEGMENT_SIZE);
        map.prepare(
            [],
            (0..stripe::COUNT).map(|i| stripe::AT + stripe::STRIDE * i),
        );
        let word = Memory::new(0);
        let dead = Stripe::lock(&map, 0x1000, DEAD, WAIT, |_| true).unwrap();
        let add = |map: &Mapping, word: &Memory, own: u64| {
            let held = Stripe::lock(map, 0x1000, own, WAIT, |held| held != DEAD).unwrap();
            word.write(word.read() + 1);
            drop(held);
        };
        let (their_map, their_word) = (map.again(), word.clone());
        let other = thread::spawn(move || add(&their_map, &their_word, 2 << 48));
        add(&map, &word, 1 << 48);
        drop(dead);
        other.join().unwrap();
        assert_eq!(word.read(), 2);
    });
}
