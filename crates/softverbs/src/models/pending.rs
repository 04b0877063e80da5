//! Messages that a sender shows and a receiver takes, until the sender withdraws them.

use loom::thread;

use super::{Memory, check};
use crate::qp::pending_word::{self, Offer};
use crate::segment::Mapping;
use crate::segment::layout::{PendingWord, SEGMENT_SIZE, arena, qp};
use crate::sync::atomic::Ordering;

const WORD: usize = qp::AT + 2 * qp::STRIDE + qp::PENDING;
/// An entry contains the number of its message.
const ENTRIES: usize = arena::AT;

fn maps(entries: usize) -> (Mapping, Mapping) {
    let map = Mapping::model(SEGMENT_SIZE);
    map.prepare((0..entries).map(|i| ENTRIES + 8 * i), [WORD]);
    (map.again(), map)
}

fn write_entry(map: &Mapping, place: usize, message: u32) {
    map.u32(ENTRIES + 8 * place)
        .store(message, Ordering::Relaxed);
}

fn entry(map: &Mapping, word: PendingWord) -> u32 {
    map.u32(ENTRIES + 8 * word.first() as usize)
        .load(Ordering::Relaxed)
}

/// Takes the available messages without holding the first one. Returns each message's number, from
/// its entry, and the content of its memory.
fn take(map: &Mapping, memory: &[Memory], most: usize) -> Vec<u32> {
    let mut taken = Vec::new();
    for _ in 0..most {
        let word = pending_word::look(map, WORD);
        if word.count() == 0 || word.is_held() {
            break;
        }
        let message = entry(map, word);
        let bytes = memory[word.first() as usize].read();
        if pending_word::commit(map, WORD, word) {
            assert_eq!(bytes, u64::from(message), "payload of another message");
            taken.push(message);
        }
    }
    taken
}

/// The sender may use the memory of a message again after the message was taken, and not before.
/// Each message was either taken or withdrawn.
fn each_once(take_back: fn(&mut Offer, &Mapping) -> u32) {
    let (map, theirs) = maps(2);
    let memory = [Memory::new(1), Memory::new(2)];
    let at_receiver = memory.clone();
    let mut offer = Offer::new();
    let receiver = thread::spawn(move || take(&theirs, &at_receiver, 3));
    write_entry(&map, 0, 1);
    offer.show(&map, WORD, 1, 0);
    write_entry(&map, 1, 2);
    let added = offer.add(&map, WORD);
    let count = take_back(&mut offer, &map);
    for memory in &memory[..count as usize] {
        memory.write(9);
    }
    let taken = receiver.join().unwrap();
    assert_eq!(taken, [1, 2][..count as usize]);
    assert!(added || count == 1, "one that was not shown was taken");
    assert!(!offer.is_live());
}

#[test]
fn what_was_not_taken_back_was_delivered_once() {
    check(|| each_once(|offer, map| offer.take_back(map, WORD).expect("nobody holds one")));
}

#[test]
fn a_sender_that_fails_knows_what_was_delivered() {
    check(|| each_once(|offer, map| offer.withdraw(map, WORD)));
}

/// An entry is reused for another message while the receiver reads the first message.
#[test]
fn a_message_of_an_earlier_time_is_not_taken_for_a_later_one() {
    check(|| {
        let (map, theirs) = maps(1);
        let mut offer = Offer::new();
        let receiver = thread::spawn(move || {
            let word = pending_word::look(&theirs, WORD);
            if word.count() == 0 {
                return None;
            }
            let message = entry(&theirs, word);
            pending_word::commit(&theirs, WORD, word).then_some(message)
        });
        write_entry(&map, 0, 1);
        offer.show(&map, WORD, 1, 0);
        let mut expected = Vec::new();
        if offer.take_back(&map, WORD) == Some(1) {
            expected.push(1);
        }
        write_entry(&map, 0, 2);
        offer.show(&map, WORD, 1, 0);
        let taken = receiver.join().unwrap();
        if offer.take_back(&map, WORD) == Some(1) {
            expected.push(2);
        }
        assert_eq!(taken.as_slice(), expected);
    });
}

/// The receive of a long message is written by the sender or by the receiver, never by both.
#[test]
fn the_receive_of_a_held_message_is_written_by_its_holder_alone() {
    for commits in [true, false] {
        check(move || {
            let (map, theirs) = maps(1);
            let receive = Memory::new(0);
            let at_receiver = receive.clone();
            let mut offer = Offer::new();
            offer.show(&map, WORD, 1, 0);
            let receiver = thread::spawn(move || {
                let word = pending_word::look(&theirs, WORD);
                if word.count() == 0 {
                    return false;
                }
                let Some(held) = pending_word::hold(&theirs, WORD, word) else {
                    return false;
                };
                at_receiver.write(1);
                if commits {
                    assert!(pending_word::commit(&theirs, WORD, held), "it was held");
                } else {
                    pending_word::release(&theirs, WORD, held);
                }
                commits
            });
            let added = offer.add(&map, WORD);
            // The sender copies the message itself, if the receiver has not taken it.
            let first = offer.take_back(&map, WORD);
            if first == Some(0) {
                receive.write(2);
                assert_eq!(receive.read(), 2);
                // Then the sender shows it again.
                offer.show(&map, WORD, 1, 0);
            }
            let committed = receiver.join().unwrap();
            let taken = match first {
                None => offer.take_back(&map, WORD).expect("nobody holds it"),
                Some(taken) => taken,
            };
            assert_eq!(taken == 1, committed && first != Some(0));
            assert!(added || committed || first == Some(0) || taken == 0);
        });
    }
}
