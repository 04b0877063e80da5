//! Models of data structures, and decoders of untrusted data, driven by bytes: property tests in
//! `cargo test`, fuzz targets in `make fuzz`. `crates/softverbs/src/fuzz` has those of the device.

mod wire;

use std::collections::{HashMap, VecDeque};

pub use self::wire::{cm_data, rdm_wire};
use crate::errno::{FiErrno, Result};
use crate::mr::key_cache::{KeyCache, There};
use crate::mr::lookup::{Lookup, Map, Outcome, READ_WORDS, Resolved};
use crate::queue::slots::{Slot, SlotRing};
use crate::rdm::{
    Config, Core, Failure, Form, Io, LinkKey, Origin, PeerKey, Post, Random, SendOp, Unposted, Uses,
};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::packet::{HEADER_SIZE, Message, Payload};
use crate::wire::rdm::{
    Body, Close, Credit, EndpointId, Epoch, Grant, GrantNumber, Header as PacketHeader, Hello,
    Listener, Number, OpId, Packet, PeerIndex, Rejection, Reply, Request, Secret, Terms,
};
use crate::wire::records::{Block, Entry, Header, MAX_SEGMENTS, Segment, WORDS};
use crate::wire::segment_list::{BlockRef, MAX_BLOCKS, encode_block, encode_index};

/// Numbers that follow from `seed`, as a source of tokens.
fn random(mut seed: u64) -> Random {
    Box::new(move || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        Ok(seed.wrapping_mul(0xbf58_476d_1ce4_e5b9))
    })
}

/// What an endpoint asks for, while hostile peers send to it.
#[derive(Default)]
struct Hands {
    /// Accepted links, with the replies to them.
    accepted: Vec<(LinkKey, Reply)>,
    dialled: Vec<LinkKey>,
    ending: Vec<LinkKey>,
    ended: Vec<LinkKey>,
    /// Numbers of the packets that were posted on each link.
    posted: Vec<(LinkKey, Number)>,
    completed: usize,
    delivered: Vec<Origin>,
    /// Links for posts.
    up: HashMap<u32, LinkKey>,
}

impl Io for Hands {
    type Op = ();
    type Held = ();
    type Slot = ();

    fn dial(&mut self, link: LinkKey, _: Listener, _: &Request) {
        self.dialled.push(link);
    }

    fn has_place(&mut self) -> bool {
        true
    }

    fn accept(&mut self, link: LinkKey, (): (), reply: &Reply, _: Option<Listener>) {
        self.accepted.push((link, *reply));
    }

    fn reject(&mut self, (): (), _: &Rejection) {}

    fn post(&mut self, link: LinkKey, header: PacketHeader, (): (), _: Form) -> Post {
        self.posted.push((link, header.number));
        Post::Posted
    }

    fn control(&mut self, _: LinkKey, _: &Packet) -> bool {
        true
    }

    fn end(&mut self, link: LinkKey) {
        assert!(!self.ended.contains(&link) && !self.ending.contains(&link));
        self.ending.push(link);
    }

    fn complete(&mut self, (): (), _: Result<()>) {
        self.completed += 1;
    }

    fn deliver(&mut self, from: Origin, _: &Packet, (): ()) -> Credit {
        self.delivered.push(from);
        Credit::ZERO
    }

    fn discard(&mut self, (): ()) {}

    fn fail_peer(&mut self, _: PeerKey, _: FiErrno, _: Unposted) -> u32 {
        0
    }

    fn block(&mut self, _: PeerKey, _: LinkKey) -> (RemoteAddr, Rkey) {
        (RemoteAddr::NULL, Rkey::new(0))
    }

    fn up(&mut self, _: PeerKey, link: LinkKey, _: &Terms) {
        assert_eq!(self.up.insert(link.number(), link), None);
    }

    fn down(&mut self, _: PeerKey, link: LinkKey) {
        assert_eq!(self.up.remove(&link.number()), Some(link));
    }

    fn probe(&mut self, link: LinkKey) -> bool {
        assert_eq!(self.up.get(&link.number()), Some(&link));
        false
    }

    fn loop_back(&mut self, (): ()) {}

    fn alias(&mut self, _: PeerKey, _: Option<PeerKey>) {}

    fn free(&mut self, peers: &mut Vec<(PeerKey, Option<Listener>)>) {
        peers.retain(|(peer, _)| !self.delivered.iter().any(|from| from.peer == *peer));
    }
}

/// Endpoints that send arbitrary requests and packets, beside one that follows the protocol: the
/// link of that one is not ended, its packets are delivered, and what is posted to it completes.
///
/// # Panics
/// If not.
pub fn rdm_peer(data: &[u8]) {
    let mut numbers = Numbers(data.iter());
    let id = |number| EndpointId::new(number).expect("not 0");
    let place = |port| Listener::new(std::net::Ipv4Addr::LOCALHOST.into(), port).expect("a port");
    let mut core = Core::<Hands>::new(Config {
        id: id(1),
        listener: place(1),
        auth: 0,
        further: Vec::new(),
        application_keys: false,
        circuits: false,
        device_atomics: false,
        random: random(numbers.word()),
        eager: 8192,
        dials: 2,
        peers: 8,
        timeout: 1_000_000_000,
        answer: 200_000_000,
        beat: Some(750_000_000),
        retries: 100_000_000,
        idle: (600_000_000, 300_000_000),
        pool: Credit::new(300, 20),
    });
    let mut hands = Hands::default();
    let honest = Request {
        listener: place(2),
        id: id(2),
        auth: 0,
        epoch: Epoch::FIRST,
        ended: None,
        gives: Secret::new(7).expect("not 0"),
        shows: None,
        fresh: false,
    };
    core.requested((), &honest.encode(), &mut hands);
    let (link, reply) = hands.accepted.pop().expect("an accepted link");
    let header = PacketHeader {
        to: reply.terms.index,
        ..PacketHeader::default()
    };
    let terms = Terms {
        grant: Grant {
            number: GrantNumber::new(1),
            limit: Credit::new(1 << 20, 1 << 20),
        },
        eager: 8192,
        ..Terms::default()
    };
    let body = Body::Hello(Box::new(Hello::new(Epoch::FIRST, terms, [])));
    core.arrived(link, &Packet { header, body }, (), &mut hands);
    let peer = core.peer_at(place(2)).expect("a peer");
    let mut now = 0;
    while !numbers.0.as_slice().is_empty() {
        now += u64::from(numbers.byte()) << 20;
        core.set_now(now);
        let choice = usize::from(numbers.byte());
        let hostile = hands.accepted.len();
        match numbers.byte() % 8 {
            0 | 1 => {
                let request = Request {
                    listener: place(1 + u16::from(numbers.byte() % 4)),
                    id: id(1 + u64::from(numbers.byte() % 4)),
                    epoch: Epoch::new(1 + u32::from(numbers.byte())).expect("not 0"),
                    ended: Epoch::new(numbers.byte().into()),
                    shows: Secret::new(numbers.byte().into()),
                    fresh: numbers.byte().is_multiple_of(4),
                    ..honest
                };
                core.requested((), &request.encode(), &mut hands);
            }
            2..=5 if hostile > 0 => {
                let (link, reply) = hands.accepted[choice % hostile];
                let packet = hostile_packet(&mut numbers, &reply);
                core.arrived(link, &packet, (), &mut hands);
            }
            6 if !hands.dialled.is_empty() => {
                let dialled = hands.dialled[choice % hands.dialled.len()];
                let reply = Reply {
                    epoch: Epoch::new(numbers.byte().max(1).into()).expect("not 0"),
                    id: id(2 + u64::from(numbers.byte() % 3)),
                    auth: 0,
                    gives: honest.gives,
                    ended: Epoch::new(numbers.byte().into()),
                    terms: hostile_terms(&mut numbers),
                };
                match numbers.byte() % 3 {
                    0 => core.dial_failed(dialled, Failure::Refused, &mut hands),
                    1 => core.rejected(dialled, data, &mut hands),
                    _ => core.replied(dialled, &reply.encode(), &mut hands),
                }
            }
            7 if !hands.delivered.is_empty() => {
                let from = hands.delivered[choice % hands.delivered.len()];
                // at most what the message has used
                hands.delivered.retain(|other| *other != from);
                core.give_back(from, Credit::new(0, 1));
            }
            _ => {
                let to = core.peer_at(place(1 + u16::from(numbers.byte() % 4)));
                let send = SendOp {
                    op: (),
                    uses: Uses::Message(numbers.byte().into()),
                    ack: false,
                };
                let _ = core.send(to.expect("a peer"), send, &mut hands);
            }
        }
        core.flush(&mut hands);
        core.tick(&mut hands);
        while let Some(ending) = hands.ending.pop() {
            assert_ne!(ending, link, "the link of another peer");
            hands.ended.push(ending);
            core.ended(ending, &mut hands);
        }
    }
    hands.delivered.clear();
    let body = Body::Fin {
        op: OpId::new(1),
        status: 0,
    };
    core.arrived(link, &Packet { header, body }, (), &mut hands);
    assert_eq!(hands.delivered.len(), 1);
    let posted = hands.posted.iter().filter(|(on, _)| *on == link).count();
    let send = SendOp {
        op: (),
        uses: Uses::Answer,
        ack: false,
    };
    core.send(peer, send, &mut hands).expect("a peer");
    let last = hands.posted.last().copied();
    assert_eq!(last, Some((link, Number::new(posted as u32))));
    let completed = hands.completed;
    core.sent(link, Number::new(posted as u32), &mut hands);
    assert_eq!(hands.completed, completed + posted + 1);
}

fn hostile_terms(numbers: &mut Numbers<'_>) -> Terms {
    let limit = Credit::new(numbers.byte().into(), numbers.byte().into());
    Terms {
        expected: Number::new(numbers.byte().into()),
        grant: Grant {
            number: GrantNumber::new(numbers.byte().into()),
            limit,
        },
        eager: 32 * u32::from(numbers.byte()),
        ..Terms::default()
    }
}

fn hostile_packet(numbers: &mut Numbers<'_>, reply: &Reply) -> Packet {
    let grant = |numbers: &mut Numbers<'_>| Grant {
        number: GrantNumber::new(numbers.byte().into()),
        limit: Credit::new(numbers.byte().into(), numbers.byte().into()),
    };
    let body = match numbers.byte() % 8 {
        0 | 1 => {
            let epoch = reply.epoch;
            Body::Hello(Box::new(Hello::new(epoch, hostile_terms(numbers), [])))
        }
        2 => Body::Eager {
            message: Message {
                ack: numbers.byte().is_multiple_of(2),
                ..Message::default()
            },
            payload: Payload {
                offset: HEADER_SIZE,
                len: numbers.byte().into(),
            },
        },
        3 => Body::Rts {
            message: Message::default(),
            op: OpId::new(0),
            addr: RemoteAddr::NULL,
            len: numbers.size(),
            rkey: Rkey::new(0),
        },
        4 => Body::Credit {
            grant: grant(numbers),
            recall: numbers.byte().is_multiple_of(2),
        },
        5 => Body::Return(grant(numbers)),
        6 => Body::Close(match numbers.byte() % 4 {
            0 => Close::Ask,
            1 => Close::Accept,
            2 => Close::Refuse,
            _ => Close::End,
        }),
        _ => Body::Fin {
            op: OpId::new(0),
            status: 0,
        },
    };
    Packet {
        header: PacketHeader {
            number: Number::new(u32::from(numbers.byte() % 4)),
            processed: Number::new(u32::from(numbers.byte() % 4)),
            seen: GrantNumber::new(u16::from(numbers.byte() % 4)),
            to: match numbers.byte() % 8 {
                0 => PeerIndex::new(numbers.byte().into()),
                _ => reply.terms.index,
            },
        },
        body,
    }
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
                let place = BlockRef {
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
    fn rdm_peer() {
        proptest!(cases(2000), |(data in prop::collection::vec(any::<u8>(), 0..1200))| {
            super::rdm_peer(&data);
        });
    }

    #[test]
    fn rdm_wire() {
        let kind = prop::sample::select(vec![
            1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 64, 65, 66, 67, 68, 69, 11,
        ]);
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
