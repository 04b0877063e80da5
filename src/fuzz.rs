//! Models of data structures, and decoders of untrusted data, driven by bytes: property tests in
//! `cargo test`, fuzz targets in `make fuzz`. `crates/softverbs/src/fuzz` has those of the device.

use std::collections::VecDeque;

use crate::mr::key_cache::{KeyCache, There};
use crate::mr::lookup::{Lookup, Map, Outcome, READ_WORDS, Resolved};
use crate::queue::slots::{Slot, SlotRing};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::cm_data::{CM_DATA_SIZE, CmData, MAX_CM_DATA};
use crate::wire::rdm::packet::{HEADER_SIZE, MAX_HEAD};
use crate::wire::rdm::{Body, Packet, Rejection, Reply, Request};
use crate::wire::records::{Block, Entry, Header, MAX_SEGMENTS, Segment, WORDS};
use crate::wire::segment_list::{MAX_BLOCKS, Place, encode_block, encode_index};

/// Private data decodes to at most as many bytes as were received, and the data of the sender is
/// equal to that of the receiver, padded or not.
///
/// # Panics
/// If not.
pub fn cm_data(data: &[u8]) {
    let decoded = CmData::decode(data);
    assert!(decoded.data().len() <= data.len().saturating_sub(1).min(MAX_CM_DATA));
    assert!(
        data.get(1..)
            .unwrap_or_default()
            .starts_with(decoded.data())
    );
    match CmData::new(data) {
        Ok(sent) => {
            let mut packet = sent.encoded().to_vec();
            assert_eq!(CmData::decode(&packet).data(), data);
            packet.resize(196, 0xff);
            assert_eq!(CmData::decode(&packet).data(), data);
        }
        Err(_) => assert!(data.len() > CM_DATA_SIZE),
    }
}

/// Private data and packets of RDM endpoints: what is accepted has one encoding, which is equal to
/// the received bytes, and the payload lies in the packet.
///
/// # Panics
/// If not.
pub fn rdm_wire(data: &[u8]) {
    if let Ok(request) = Request::decode(data) {
        assert!(data.starts_with(&request.encode()));
    }
    if let Ok(reply) = Reply::decode(data) {
        assert!(data.starts_with(&reply.encode()));
    }
    if let Ok(rejection) = Rejection::decode(data) {
        assert!(data.starts_with(&rejection.encode()));
    }
    // the length of the input, and the one that the header states
    rdm_packet(data, data.len());
    if let Some(length) = data.get(16..20).and_then(|bytes| bytes.first_chunk()) {
        let length = u32::from_le_bytes(*length) as usize;
        rdm_packet(data, HEADER_SIZE.saturating_add(length));
    }
}

fn rdm_packet(data: &[u8], total: usize) {
    let Ok(packet) = Packet::decode(data, total) else {
        return;
    };
    let mut head = [0xee; MAX_HEAD];
    let size = packet.encode(&mut head);
    assert!(data.starts_with(&head[..size]));
    let payload = match packet.body {
        Body::Eager { payload, .. } | Body::Data { payload, .. } => payload,
        Body::Atomic { operands, .. } => operands,
        Body::Result { values, .. } => values,
        _ => return assert_eq!(size, total),
    };
    assert_eq!(
        (payload.offset, payload.offset + payload.len as usize),
        (size, total)
    );
}

/// A request in the model.
#[derive(Clone, Copy)]
struct Posted {
    number: u32,
    context: usize,
    signaled: bool,
    done: bool,
}

/// Each request completes once, with its own context; unsignaled requests complete with a later
/// one; no more are outstanding than the depth permits; an unknown number is refused.
///
/// # Panics
/// If not.
pub fn slots(data: &[u8]) {
    let (&depth, data) = data.split_first().unwrap_or((&0, &[]));
    let ring = SlotRing::new(usize::from(depth % 20) + 1);
    let mut model: VecDeque<Posted> = VecDeque::new();
    let mut context = 0;
    let mut bytes = data.iter().copied();
    while let Some(choice) = bytes.next() {
        let argument = usize::from(bytes.next().unwrap_or(0));
        match choice % 6 {
            0..=2 => {
                assert_eq!(ring.is_full(), model.len() >= ring.depth() as usize);
                if ring.is_full() {
                    continue;
                }
                let signaled = argument.is_multiple_of(2);
                context += 1;
                let number = ring.push(Slot {
                    context,
                    signaled,
                    visible: signaled,
                    ..Slot::default()
                });
                if let Some(last) = model.back() {
                    assert_eq!(number, last.number.wrapping_add(1));
                }
                if argument > 240 {
                    ring.unpush();
                    continue;
                }
                model.push_back(Posted {
                    number,
                    context,
                    signaled,
                    done: false,
                });
            }
            3..=4 if !model.is_empty() => {
                let at = argument % model.len();
                let request = model[at];
                let slot = ring.complete(request.number);
                assert_eq!(
                    slot.map(|slot| slot.context),
                    (!request.done).then_some(request.context)
                );
                if request.done {
                    continue;
                }
                model[at].done = true;
                let mut index = 0;
                while let Some(first) = model.front() {
                    if !(first.done || !first.signaled && index <= at) {
                        break;
                    }
                    model.pop_front();
                    index += 1;
                }
            }
            _ => {
                // one before the oldest, or behind the newest
                let number = match (model.front(), model.back(), argument % 2) {
                    (Some(first), _, 0) => first.number.wrapping_sub(1),
                    (_, Some(last), _) => last.number.wrapping_add(1 + argument as u32),
                    _ => continue,
                };
                assert!(ring.complete(number).is_none());
            }
        }
        assert_eq!(ring.outstanding() as usize, model.len());
    }
    for request in model.into_iter().filter(|request| !request.done) {
        assert_eq!(
            ring.abandon().map(|slot| slot.context),
            Some(request.context)
        );
    }
}

/// Numbers from bytes; zeros after the last byte.
struct Numbers<'a>(std::slice::Iter<'a, u8>);

impl Numbers<'_> {
    fn byte(&mut self) -> u8 {
        self.0.next().copied().unwrap_or_default()
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A multiple of 64 up to 16 256, or any number.
    fn size(&mut self) -> u64 {
        match self.byte() {
            255 => self.word(),
            small => u64::from(small) * 64,
        }
    }
}

/// The answer of a peer to a read: arbitrary words, or a complete record with arbitrary fields.
fn answer(numbers: &mut Numbers<'_>, key: u64, generation: u64, words: usize) -> Vec<u64> {
    let mut answer = match numbers.byte() % 8 {
        0 => (0..words).map(|_| numbers.word()).collect(),
        1 => {
            let block = Block {
                header_addr: RemoteAddr::new(numbers.word()),
                header_rkey: Rkey::new(1),
                cell: RemoteAddr::new(numbers.word() & !7),
            };
            [vec![0; Block::OWNERS], block.encode().to_vec()].concat()
        }
        2 => {
            let header = Header {
                log2: u32::from(numbers.byte() % 42),
                moves: numbers.byte().into(),
                ..Header::default()
            };
            header.encode().to_vec()
        }
        3 | 4 => {
            let entries = (0..words / WORDS).map(|_| Entry {
                key: if numbers.byte().is_multiple_of(4) {
                    numbers.word()
                } else {
                    key
                },
                addr: RemoteAddr::new(numbers.word()),
                len: numbers.size(),
                segments: match numbers.byte() % 16 {
                    0..=8 => Entry::LONG,
                    other => u16::from(other - 9),
                },
                once: numbers.byte().is_multiple_of(8),
                generation,
                start: numbers.size(),
                ..Entry::default()
            });
            entries.flat_map(|entry| entry.encode()).collect()
        }
        5 => {
            let segments =
                (0..usize::from(numbers.byte()) % (MAX_SEGMENTS + 1)).map(|_| segment(numbers));
            Segment::encode_list(generation, &segments.collect::<Vec<_>>())
        }
        6 => {
            let mut first = u64::from(numbers.byte() / 255);
            let places = (0..numbers.byte()).map(|_| {
                let place = Place {
                    first,
                    addr: RemoteAddr::new(numbers.word()),
                    rkey: Rkey::new(1),
                };
                first = first.wrapping_add(numbers.size());
                place
            });
            let mut words = encode_index(generation, places.collect::<Vec<_>>().into_iter());
            if numbers.byte() == 255 {
                words[2] = numbers.word() % (2 * MAX_BLOCKS as u64);
            }
            words
        }
        _ => {
            let first = numbers.size();
            let segments: Vec<_> = (0..numbers.byte() % 90).map(|_| segment(numbers)).collect();
            encode_block(generation, first, &segments)
        }
    };
    answer.resize(words, 0);
    answer
}

fn segment(numbers: &mut Numbers<'_>) -> Segment {
    Segment {
        addr: RemoteAddr::new(numbers.size()),
        len: numbers.size(),
        rkey: Rkey::new(u32::from(numbers.byte() % 4)),
        absent: numbers.byte().is_multiple_of(4),
    }
}

/// A peer that answers look-ups arbitrarily: each read is bounded, and the resolution can be used
/// for every range of the region without leaving it: segments are not empty, and their sum is the
/// range.
///
/// # Panics
/// If not.
pub fn lookup(data: &[u8]) {
    let mut numbers = Numbers(data.iter());
    let (key, generation) = (numbers.word(), 5);
    let mut map = Map::new(RemoteAddr::new(numbers.word()), Rkey::new(1), 7);
    let mut kept = KeyCache::default();
    let mut lookup = Lookup::new(key, &map);
    while !numbers.0.as_slice().is_empty() {
        let read = lookup.read(&map);
        assert!((1..=READ_WORDS).contains(&read.words));
        let words = answer(&mut numbers, key, generation, read.words);
        match lookup.feed(&mut map, &words) {
            Outcome::More | Outcome::Torn => continue,
            Outcome::Found(resolved) => {
                assert_eq!(resolved.entry.key, key);
                kept.clear();
                kept.admit(resolved);
            }
            Outcome::Segments(block, segments) => {
                assert!(kept.fill(key, block, segments));
            }
            Outcome::Checked(_) => unreachable!("nothing is checked"),
            Outcome::Stale | Outcome::Missing | Outcome::Broken => kept.clear(),
        }
        let next = kept
            .get(key)
            .and_then(|resolved| used(resolved, &mut numbers));
        lookup = next.unwrap_or_else(|| Lookup::new(key, &map));
    }
}

/// Uses a range of a resolved region; returns the look-up of a block that must be read first.
fn used(resolved: &Resolved, numbers: &mut Numbers<'_>) -> Option<Lookup> {
    let whole = resolved.entry.len;
    let mut offset = numbers.size().min(whole);
    let mut left = numbers.size().min(whole - offset);
    match resolved.there(offset, left) {
        There::All => {}
        There::Absent => return None,
        There::Unread(block) => {
            return Some(Lookup::of_block(resolved, block).expect("one of its blocks"));
        }
    }
    loop {
        let fragment = resolved.fragment(offset, left).expect("it is all there");
        assert!(!fragment.absent && fragment.len <= left);
        assert!(fragment.addr.checked_add(fragment.len).is_some());
        assert_eq!(fragment.last, fragment.len == left);
        if fragment.last {
            return None;
        }
        assert_ne!(fragment.len, 0);
        offset += fragment.len;
        left -= fragment.len;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// A failing case is copied into a test by its author; the tests write no files into the tree.
    fn cases(cases: u32) -> ProptestConfig {
        ProptestConfig {
            cases,
            failure_persistence: None,
            ..ProptestConfig::default()
        }
    }

    #[test]
    fn cm_data() {
        proptest!(cases(2000), |(data in prop::collection::vec(any::<u8>(), 0..80))| {
            super::cm_data(&data);
        });
    }

    #[test]
    fn lookup() {
        proptest!(cases(2000), |(data in prop::collection::vec(any::<u8>(), 0..6000))| {
            super::lookup(&data);
        });
    }

    #[test]
    fn rdm_wire() {
        let kind = prop::sample::select(vec![1, 2, 3, 4, 5, 6, 7, 8, 64, 65, 66, 67, 68, 9]);
        let rest = prop::collection::vec(prop_oneof![3 => Just(0), 1 => any::<u8>()], 0..260);
        proptest!(cases(4000), |(kind in kind, flags in 0_u8..64, mut rest in rest)| {
            if rest.len() >= 32 {
                let length = (rest.len() - 32) as u32;
                (rest[8], rest[9]) = (kind, flags);
                rest[16..20].copy_from_slice(&length.to_le_bytes());
            }
            super::rdm_wire(&rest);
        });
    }

    #[test]
    fn slots() {
        proptest!(cases(500), |(data in prop::collection::vec(any::<u8>(), 0..400))| {
            super::slots(&data);
        });
    }
}
