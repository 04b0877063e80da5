//! The module beside a naive list, and the numbers of lines and entries that its operations read.

use std::collections::HashMap;

use proptest::prelude::*;

use super::cost::{self, Visits};
use super::*;

/// Masks of programs, and more than there are classes.
const MASKS: [u64; 14] = [
    0,
    u64::MAX,
    // MPICH: the bits of synchronous sends; any tag; any source in the tag; both
    0x7000_0000_0000_0000,
    0x7000_0000_7fff_ffff,
    0x7000_00ff_0000_0000,
    0x7000_00ff_7fff_ffff,
    // Open MPI: the bits of synchronous sends; any tag; any source; both
    0x0000_0003_0000_0000,
    0x0000_0003_7fff_ffff,
    0x0fff_fc03_0000_0000,
    0x0fff_fc03_7fff_ffff,
    // others
    0xffff_ffff_0000_0000,
    1,
    1 << 63,
    0x5555_5555_5555_5555,
];

/// Tags that agree under many of the masks.
fn tag() -> impl Strategy<Value = u64> {
    const BITS: [u32; 9] = [0, 1, 2, 32, 34, 40, 41, 60, 63];
    proptest::collection::vec(proptest::sample::select(&BITS[..]), 0..3)
        .prop_map(|set| set.into_iter().fold(0x4_0000, |tag, bit| tag | 1 << bit))
}

fn peer() -> impl Strategy<Value = PeerIndex> {
    (0..4_u32).prop_map(PeerIndex)
}

fn want() -> impl Strategy<Value = Want> {
    // most programs use few masks, some use many
    let mask = prop_oneof![8 => 0..6_usize, 2 => 0..MASKS.len()];
    let from = proptest::option::weighted(0.4, peer());
    (tag(), mask, from).prop_map(|(tag, mask, from)| Want::tagged(tag, MASKS[mask], from))
}

#[derive(Clone, Debug)]
enum Op {
    Receive(Want),
    /// One of the receives that have got a message, in its earlier place.
    Again(usize),
    Multi(Want, u64, u64),
    Arrive(u64, PeerIndex, u64),
    Peek(Want),
    Claim(Want),
    Discard(Want),
    Redeem(usize),
    Finished(usize),
    Cancel(usize),
    CancelFrom(PeerIndex),
    Retain(PeerIndex),
    Merge(PeerIndex, PeerIndex),
}

fn op() -> impl Strategy<Value = Op> {
    let len = 0..50_u64;
    prop_oneof![
        30 => want().prop_map(Op::Receive),
        4 => any::<usize>().prop_map(Op::Again),
        3 => (want(), 0..200_u64, 0..40_u64).prop_map(|(want, size, min)| Op::Multi(want, size, min)),
        35 => (tag(), peer(), len).prop_map(|(tag, peer, len)| Op::Arrive(tag, peer, len)),
        4 => want().prop_map(Op::Peek),
        3 => want().prop_map(Op::Claim),
        2 => want().prop_map(Op::Discard),
        3 => any::<usize>().prop_map(Op::Redeem),
        4 => any::<usize>().prop_map(Op::Finished),
        4 => any::<usize>().prop_map(Op::Cancel),
        1 => peer().prop_map(Op::CancelFrom),
        1 => peer().prop_map(Op::Retain),
        1 => (peer(), peer()).prop_map(|(from, into)| Op::Merge(from, into)),
    ]
}

/// A receive in the model. Its handle is the number of its operation.
#[derive(Clone, Copy, Debug)]
struct Receive {
    want: Want,
    context: usize,
    number: usize,
    buffer: Option<usize>,
}

/// A multi-receive buffer in the model.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    size: u64,
    used: u64,
    min: u64,
    pending: u32,
    cancelled: bool,
    full: bool,
}

/// The naive lists. Messages have their number as handle.
#[derive(Debug, Default)]
struct Model {
    posted: Vec<Receive>,
    /// Receives that have got a message.
    taken: Vec<Receive>,
    listed: Vec<Message<u64>>,
    claimed: Vec<(Claim, Message<u64>)>,
    buffers: Vec<Buffer>,
    /// Parts that are not finished: the buffer here and there.
    pieces: Vec<(usize, MultiId)>,
}

impl Model {
    fn fill(&mut self, buffer: usize, len: u64) -> (u64, u64, bool) {
        let buffer = &mut self.buffers[buffer];
        let len = len.min(buffer.size - buffer.used);
        let offset = buffer.used;
        buffer.used += len;
        buffer.pending += 1;
        let left = buffer.size - buffer.used;
        buffer.full = left == 0 || left < buffer.min;
        (offset, len, buffer.full)
    }

    /// Checks a match of the first posted receive.
    fn arrive(&mut self, message: &Message<u64>, matched: Option<Matched<usize>>) {
        let index = self
            .posted
            .iter()
            .position(|receive| receive.want.matches(message.tag, message.peer));
        assert_eq!(
            matched.map(|matched| matched.receive),
            index.map(|index| self.posted[index].number)
        );
        let (Some(index), Some(matched)) = (index, matched) else {
            self.listed.push(*message);
            return;
        };
        let receive = self.posted[index];
        assert_eq!(matched.context, receive.context);
        let Some(buffer) = receive.buffer else {
            assert_eq!(matched.piece, None);
            self.taken.push(self.posted.remove(index));
            return;
        };
        let (offset, len, full) = self.fill(buffer, message.len);
        let piece = matched.piece.expect("a part");
        assert_eq!((piece.offset, piece.len), (offset, len));
        self.pieces.push((buffer, piece.buffer));
        if full {
            self.posted.remove(index);
        }
    }

    fn first(&self, want: &Want) -> Option<usize> {
        self.listed
            .iter()
            .position(|message| want.matches(message.tag, message.peer))
    }

    fn cancel(&mut self, cancelled: Cancelled<usize>, index: usize) {
        let receive = self.posted.remove(index);
        assert_eq!(cancelled.context, receive.context);
        assert_eq!(cancelled.receive, receive.number);
        let pending = receive.buffer.map_or(0, |buffer| {
            self.buffers[buffer].cancelled = true;
            self.buffers[buffer].pending
        });
        assert_eq!(cancelled.released, pending == 0);
    }
}

/// Removes the posted receives whose `from` fulfils `is`, in the order of posting: those from a
/// peer, or all.
fn cancel_where(
    of: &mut Matching<usize, u64>,
    is: impl Fn(Option<PeerIndex>) -> bool,
) -> Vec<Cancelled<usize>> {
    let found = of.posted.all(is);
    found.into_iter().map(|at| of.cancel_entry(at)).collect()
}

/// Runs the operations on both.
fn agree(ops: &[Op]) {
    let mut real: Matching<usize, u64> = Matching::new(ops.len() as u64, 0, 0);
    let mut model = Model::default();
    // the post numbers of operations
    let mut numbers = HashMap::new();
    for (number, op) in ops.iter().enumerate() {
        // two receives in a row may have one context
        let context = number / 2 * 2;
        match op {
            Op::Receive(want) => {
                let found = if number.is_multiple_of(2) {
                    real.receive(want, context, number)
                } else {
                    let of = *numbers.entry(number).or_insert(real.next_number());
                    real.receive_again(want, context, number, of)
                };
                let receive = Receive {
                    want: *want,
                    context,
                    number,
                    buffer: None,
                };
                match model.first(want) {
                    Some(index) => {
                        assert_eq!(found, Some(model.listed.remove(index)));
                        model.taken.push(receive);
                    }
                    None => {
                        assert_eq!(found, None);
                        model.posted.push(receive);
                    }
                }
            }
            Op::Again(which) => {
                let with_number = |of: &Receive| numbers.contains_key(&of.number);
                model.taken.retain(with_number);
                for _ in 0..1 + which % 3 {
                    if model.taken.is_empty() {
                        break;
                    }
                    let index = which % model.taken.len();
                    let receive = model.taken.swap_remove(index);
                    let Receive { want, number, .. } = receive;
                    let of = numbers[&number];
                    let found = real.receive_again(&want, receive.context, number, of);
                    match model.first(&want) {
                        Some(index) => {
                            assert_eq!(found, Some(model.listed.remove(index)));
                            model.taken.push(receive);
                        }
                        None => {
                            assert_eq!(found, None);
                            let later = model.posted.iter().position(|it| it.number > number);
                            let place = later.unwrap_or(model.posted.len());
                            model.posted.insert(place, receive);
                        }
                    }
                }
                real.restore_order();
            }
            Op::Multi(want, size, min) => {
                let mut found = Vec::new();
                real.receive_multi(want, context, number, (*size, *min), |message, piece| {
                    found.push((message, piece));
                });
                model.buffers.push(Buffer {
                    size: *size,
                    used: 0,
                    min: *min,
                    pending: 0,
                    cancelled: false,
                    full: false,
                });
                let buffer = model.buffers.len() - 1;
                for (message, piece) in found {
                    assert!(!model.buffers[buffer].full);
                    let index = model.first(want).expect("a message");
                    assert_eq!(message, model.listed.remove(index));
                    let (offset, len, _) = model.fill(buffer, message.len);
                    assert_eq!((piece.offset, piece.len), (offset, len));
                    model.pieces.push((buffer, piece.buffer));
                }
                if !model.buffers[buffer].full {
                    assert_eq!(model.first(want), None);
                    model.posted.push(Receive {
                        want: *want,
                        context,
                        number,
                        buffer: Some(buffer),
                    });
                }
            }
            Op::Arrive(tag, peer, len) => {
                let message = Message {
                    tag: *tag,
                    peer: *peer,
                    len: *len,
                    payload: number as u64,
                };
                let matched = real.arrive(*tag, *peer, *len);
                if matched.is_none() {
                    real.store(*tag, *peer, *len, message.payload);
                }
                model.arrive(&message, matched);
            }
            Op::Peek(want) => {
                let found = model.first(want).map(|index| model.listed[index]);
                assert_eq!(real.peek(want), found);
            }
            Op::Claim(want) => {
                let found = model.first(want).map(|index| model.listed.remove(index));
                let claimed = real.claim(want);
                assert_eq!(claimed.map(|(_, message)| message), found);
                model.claimed.extend(claimed);
            }
            Op::Discard(want) => {
                let found = model.first(want).map(|index| model.listed.remove(index));
                assert_eq!(real.discard(want), found);
            }
            Op::Redeem(which) => {
                if !model.claimed.is_empty() {
                    let index = which % model.claimed.len();
                    let (claim, message) = model.claimed.swap_remove(index);
                    assert_eq!(
                        real.redeem(Claim::from_bits(claim.to_bits())),
                        Some(message)
                    );
                    assert_eq!(real.redeem(claim), None, "a claim is used once");
                }
            }
            Op::Finished(which) => {
                if !model.pieces.is_empty() {
                    let index = which % model.pieces.len();
                    let (buffer, id) = model.pieces.swap_remove(index);
                    let buffer = &mut model.buffers[buffer];
                    buffer.pending -= 1;
                    let expected = match (buffer.pending, buffer.full, buffer.cancelled) {
                        (0, true, _) => Release::Last,
                        (0, _, true) => Release::Cancelled,
                        _ => Release::Held,
                    };
                    assert_eq!(real.finished(id), expected);
                }
            }
            Op::Cancel(which) => {
                let context = which % (number + 1) / 2 * 2;
                let cancelled = real.cancel(context);
                let mut posted = model.posted.iter();
                let found = match cancelled {
                    Some(cancelled) => {
                        posted.position(|receive| receive.number == cancelled.receive)
                    }
                    None => posted.position(|receive| receive.context == context),
                };
                assert_eq!(found.is_some(), cancelled.is_some());
                if let (Some(cancelled), Some(index)) = (cancelled, found) {
                    assert_eq!(cancelled.context, context);
                    model.cancel(cancelled, index);
                }
            }
            Op::CancelFrom(peer) => {
                for entry in cancel_where(&mut real, |from| from == Some(*peer)) {
                    let index = model
                        .posted
                        .iter()
                        .position(|receive| receive.want.from == Some(*peer))
                        .expect("a receive");
                    model.cancel(entry, index);
                }
                assert!(
                    model
                        .posted
                        .iter()
                        .all(|receive| receive.want.from != Some(*peer))
                );
            }
            Op::Retain(peer) => {
                let mut listed = Vec::new();
                real.retain(|message, claimed| {
                    let keep = message.peer != *peer;
                    if !keep && !claimed {
                        listed.push(*message);
                    }
                    keep
                });
                let gone: Vec<_> = model
                    .listed
                    .extract_if(.., |message| message.peer == *peer)
                    .collect();
                assert_eq!(listed, gone);
                for (claim, _) in model
                    .claimed
                    .extract_if(.., |(_, message)| message.peer == *peer)
                {
                    assert_eq!(real.redeem(claim), None);
                }
            }
            Op::Merge(from, into) => {
                let mut pairs = Vec::new();
                real.merge(*from, *into, |message, matched| {
                    pairs.push((message, matched))
                });
                for receive in model.posted.iter_mut().chain(&mut model.taken) {
                    if receive.want.from == Some(*from) {
                        receive.want.from = Some(*into);
                    }
                }
                let claimed = model.claimed.iter_mut().map(|(_, message)| message);
                for message in model.listed.iter_mut().chain(claimed) {
                    if message.peer == *from {
                        message.peer = *into;
                    }
                }
                // they arrive once more
                let listed = std::mem::take(&mut model.listed);
                let mut pairs = pairs.into_iter().peekable();
                for message in listed {
                    let pair = pairs.next_if(|(found, _)| *found == message);
                    model.arrive(&message, pair.map(|(_, matched)| matched));
                }
                assert!(pairs.next().is_none());
            }
        }
        assert_eq!(real.posted(), model.posted.len());
        assert_eq!(real.listed(), model.listed.len());
        assert_eq!(real.claimed(), model.claimed.len());
    }
    // what is left comes out in the order of posting and of arrival
    let mut listed = Vec::new();
    real.retain(|message, claimed| {
        if !claimed {
            listed.push(*message);
        }
        false
    });
    assert_eq!(listed, model.listed);
    let cancelled = cancel_where(&mut real, |_| true);
    let posted: Vec<usize> = cancelled.iter().map(|entry| entry.receive).collect();
    let numbers: Vec<usize> = model.posted.iter().map(|receive| receive.number).collect();
    assert_eq!(posted, numbers);
    assert_eq!((real.posted(), real.listed(), real.claimed()), (0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// About 180,000 operations.
    #[test]
    fn it_agrees_with_a_naive_list(ops in proptest::collection::vec(op(), 200..1000)) {
        agree(&ops);
    }
}

const ANY: u64 = u64::MAX;

fn peer_of(number: u64) -> PeerIndex {
    PeerIndex((number % 64) as u32)
}

/// Runs `one` for each number, and returns the lines and entries read per call on average, and the
/// most that one call has read.
fn visits(numbers: impl Iterator<Item = u64>, mut one: impl FnMut(u64)) -> (f64, f64, u64) {
    let (mut sum, mut most, mut calls) = (Visits::default(), 0, 0_u64);
    for number in numbers {
        cost::take();
        one(number);
        let Visits { lines, entries } = cost::take();
        sum.lines += lines;
        sum.entries += entries;
        most = most.max(lines + entries);
        calls += 1;
    }
    (
        sum.lines as f64 / calls as f64,
        sum.entries as f64 / calls as f64,
        most,
    )
}

/// 10,000 numbers below `among`, in an order without a pattern.
fn some(among: u64) -> impl Iterator<Item = u64> {
    (0..10_000_u64).map(move |i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % among)
}

/// The costs of each operation among `count` entries: name, lines, entries, the most of one call.
fn costs(count: u64) -> Vec<(&'static str, (f64, f64, u64))> {
    let mut out = Vec::new();
    let sync = 0x7000_0000_0000_0000;
    let mut of: Matching<u64, u64> = Matching::new(1, 0, 0);
    // a mask of Open MPI, exact tags and directed receives
    let want = |i: u64| match i % 3 {
        0 => Want::tagged(i, sync, None),
        1 => Want::tagged(i, 0, None),
        _ => Want::tagged(i, sync, Some(peer_of(i))),
    };
    let post = |of: &mut Matching<u64, u64>, i| {
        assert_eq!(of.receive(&want(i), i as usize, i), None);
    };
    out.push(("post", visits(0..count, |i| post(&mut of, i))));
    let matched = visits(some(count), |i| {
        // a number that occurs twice was posted again
        let found = of.arrive(i, peer_of(i), 8).expect("a match");
        assert_eq!(found.receive, i);
        post(&mut of, i);
    });
    out.push(("match and post", matched));
    let missed = visits(some(count), |i| {
        assert_eq!(of.arrive(i + count, peer_of(i), 8), None);
    });
    out.push(("no match", missed));

    let mut of: Matching<u64, u64> = Matching::new(2, 0, 0);
    for _ in 0..count {
        of.receive(&Want::tagged(0, ANY, None), 0, 0);
        of.receive(&Want::tagged(5, 0, Some(PeerIndex(1))), 0, 0);
    }
    let one_key = visits(some(count), |_| {
        assert!(of.arrive(5, PeerIndex(1), 8).is_some());
        of.receive(&Want::tagged(0, ANY, None), 0, 0);
    });
    out.push(("posted with one key", one_key));

    let mut of: Matching<u64, u64> = Matching::new(3, 0, 0);
    let store = |of: &mut Matching<u64, u64>, i| {
        assert_eq!(of.arrive(i, peer_of(i), 8), None);
        of.store(i, peer_of(i), 8, i);
    };
    out.push(("store", visits(0..count, |i| store(&mut of, i))));
    // builds the three classes
    for i in 0..3 {
        let build = visits(std::iter::once(i), |i| assert!(of.peek(&want(i)).is_some()));
        assert!(build.1 >= count as f64, "one walk: {build:?}");
    }
    let peek = visits(some(count), |i| {
        assert_eq!(of.peek(&want(i)).map(|m| m.payload), Some(i))
    });
    out.push(("peek", peek));
    let receive = visits(some(count), |i| {
        let found = of.receive(&want(i), 0, 0).expect("a message");
        assert_eq!(found.payload, i);
        store(&mut of, i);
    });
    out.push(("receive and store", receive));
    let any = visits(some(count), |i| {
        let found = of
            .receive(&Want::tagged(0, ANY, None), 0, 0)
            .expect("a message");
        store(&mut of, found.payload);
        let _ = i;
    });
    out.push(("receive any and store", any));
    out
}

/// Among 1,000,000 entries as many entries are read as among 100,000; and as many lines as among
/// 125,000, where the tables have the same load.
#[test]
fn costs_do_not_depend_on_the_number_of_entries() {
    let [few, eighth, many] = [100_000, 125_000, 1_000_000].map(costs);
    for ((few, eighth), many) in few.into_iter().zip(eighth).zip(many) {
        let (name, (lines, entries, most)) = many;
        println!(
            "{name}: lines {lines:.2}, entries {entries:.2}, at most {most}; {few:?} {eighth:?}"
        );
        assert!(
            (entries - few.1.1).abs() <= 0.01 * entries.max(1.0),
            "{name}: entries"
        );
        assert!(
            (lines - eighth.1.0).abs() <= 0.1 * lines.max(1.0),
            "{name}: lines"
        );
        assert!(entries < 20.0 && lines < 80.0, "{name}: a constant");
        // growth is spread: no call moves a table
        assert!(most < 1000, "{name}: one call");
    }
}

/// What a search with a mask beyond the classes costs, so that the test above can fail.
#[test]
fn masks_beyond_the_classes_are_walked() {
    let mut of: Matching<u64, u64> = Matching::new(4, 0, 0);
    for i in 0..10_000 {
        of.receive(&Want::tagged(i << 16, 1 << (i % 12), None), 0, i);
    }
    let (_, entries, _) = visits(std::iter::once(9_999 << 16), |tag| {
        assert_eq!(of.arrive(tag, PeerIndex(0), 0).unwrap().receive, 9_999);
    });
    assert!(entries > 3000.0, "{entries}");
}

/// A class of posted receives is free for another mask when it is empty, and one of unexpected
/// messages when searches no longer use it.
#[test]
fn unused_classes_are_replaced() {
    let mut of: Matching<u64, u64> = Matching::new(5, 0, 0);
    for round in 0..3 {
        for bit in 0..8 {
            let ignore = 1 << (8 * round + bit);
            of.receive(&Want::tagged(1 << 40, ignore, None), 7, 0);
        }
        let (_, entries, _) = visits(std::iter::once(1 << 40), |tag| {
            for _ in 0..8 {
                assert!(of.arrive(tag, PeerIndex(0), 0).is_some());
            }
        });
        // each probes at most eight classes, and none is in the list
        assert!(entries <= 80.0, "{entries}");
        assert_eq!(of.posted.len(), 0);
    }

    for i in 0..5000 {
        of.store(i, PeerIndex(0), 0, i);
    }
    for bit in 0..8 {
        assert!(of.peek(&Want::tagged(4999, 1 << bit, None)).is_some());
    }
    let want = Want::tagged(4999, 1 << 20, None);
    let (_, entries, _) = visits(0..100, |_| assert!(of.peek(&want).is_some()));
    assert_eq!(entries, 5000.0, "walks, since all classes are in use");
    for _ in 0..50 {
        visits(0..100, |_| assert!(of.peek(&want).is_some()));
    }
    let (_, entries, _) = visits(0..100, |_| assert!(of.peek(&want).is_some()));
    assert_eq!(entries, 1.0, "it has a class now");
}

#[test]
fn receives_cancelled_in_the_order_of_posting_are_found_at_once() {
    let mut of: Matching<u64, u64> = Matching::new(10, 0, 0);
    for i in 1..=10_000 {
        of.receive(&Want::tagged(i, 0, None), i as usize, i);
    }
    let (_, _, most) = visits(1..=10_000, |context| {
        let index = of.posted.with_context(context as usize);
        assert_eq!(index, Some(context as u32 - 1));
        of.posted.remove(context as u32 - 1);
    });
    let (_, entries, _) = visits(0..1, |_| assert_eq!(of.cancel(5), None));
    assert_eq!(entries, 10_000.0, "a context that is not posted");
    assert!(most < 200, "{most}");
}

#[test]
fn entries_have_the_sizes_of_the_documentation() {
    assert_eq!(Posted::<[u64; 5]>::ENTRY, 96);
    assert_eq!(Unexpected::<[u64; 3]>::ENTRY, 64);
}

/// A message from an address that is in no address vector has a peer without `fi_addr`. When the
/// address is inserted, a directed receive of that peer takes the earlier message.
#[test]
fn a_directed_receive_takes_messages_that_arrived_before_the_insertion() {
    let mut of: Matching<&str, &str> = Matching::new(6, 0, 0);
    let (stranger, other) = (PeerIndex(8), PeerIndex(9));
    for (peer, payload) in [(other, "other"), (stranger, "first"), (stranger, "second")] {
        assert_eq!(of.arrive(3, peer, 1), None);
        of.store(3, peer, 1, payload);
    }
    let directed = Want::tagged(3, 0, Some(stranger));
    assert_eq!(of.receive(&directed, 0, "r").unwrap().payload, "first");
    assert_eq!(of.receive(&directed, 0, "r").unwrap().payload, "second");
    assert_eq!(of.receive(&directed, 0, "r"), None);
    assert_eq!(of.arrive(3, stranger, 1).unwrap().receive, "r");
}

/// `FI_ADDR_UNSPEC` and a directed receive compete for a message by the order of posting.
#[test]
fn directed_and_undirected_receives_match_in_the_order_of_posting() {
    let mut of: Matching<u8, ()> = Matching::new(7, 0, 0);
    for (from, name) in [
        (Some(1), 1),
        (None, 2),
        (Some(1), 3),
        (Some(2), 4),
        (None, 5),
    ] {
        of.receive(&Want::untagged(from.map(PeerIndex)), 0, name);
    }
    let order: Vec<u8> = [1, 2, 1, 1, 2]
        .map(|peer| of.arrive(0, PeerIndex(peer), 0).unwrap().receive)
        .into();
    assert_eq!(order, [1, 2, 3, 5, 4]);
}

#[test]
fn a_multi_receive_buffer_is_released_with_its_last_completion() {
    let mut of: Matching<(), &str> = Matching::new(8, 0, 0);
    of.store(0, PeerIndex(0), 30, "early");
    let mut early = Vec::new();
    of.receive_multi(&Want::untagged(None), 9, (), (100, 20), |message, piece| {
        early.push((message.payload, piece.offset, piece.len));
        assert_eq!(piece.buffer, MultiId(0));
    });
    assert_eq!(early, [("early", 0, 30)]);
    let second = of.arrive(0, PeerIndex(0), 40).unwrap().piece.unwrap();
    assert_eq!((second.offset, second.len, of.posted()), (30, 40, 1));
    // truncated; nothing is left
    let third = of.arrive(0, PeerIndex(0), 31).unwrap().piece.unwrap();
    assert_eq!((third.offset, third.len, of.posted()), (70, 30, 0));
    assert_eq!(of.arrive(0, PeerIndex(0), 1), None);
    assert_eq!(of.finished(third.buffer), Release::Held);
    assert_eq!(of.finished(MultiId(0)), Release::Held);
    assert_eq!(of.finished(second.buffer), Release::Last);

    of.receive_multi(&Want::untagged(None), 9, (), (100, 20), |_, _| {});
    let piece = of.arrive(0, PeerIndex(0), 10).unwrap().piece.unwrap();
    assert_eq!(piece.buffer, MultiId(0), "its record is used again");
    assert!(!of.cancel(9).unwrap().released);
    assert_eq!(of.cancel(9), None);
    assert_eq!(of.finished(piece.buffer), Release::Cancelled);
}

#[test]
fn a_forged_claim_is_refused() {
    let mut of: Matching<(), u8> = Matching::new(9, 0, 0);
    of.store(1, PeerIndex(0), 0, 1);
    of.store(1, PeerIndex(0), 0, 2);
    let want = Want::tagged(1, 0, None);
    let (claim, message) = of.claim(&want).unwrap();
    assert_eq!(message.payload, 1);
    assert_eq!(
        of.peek(&want).unwrap().payload,
        2,
        "it is out of every index"
    );
    for bits in [1, 2, u64::MAX, claim.to_bits() | 1 << 32] {
        assert_eq!(of.redeem(Claim::from_bits(bits)), None, "{bits:x}");
    }
    assert_eq!(of.redeem(claim).unwrap().payload, 1);
    // the entry is in use again, then claimed again
    of.store(5, PeerIndex(0), 0, 3);
    assert_eq!(of.redeem(claim), None);
    let (second, _) = of.claim(&Want::tagged(5, 0, None)).unwrap();
    assert_eq!(second.parts().0, claim.parts().0, "the same entry");
    assert_eq!(of.redeem(claim), None);
    assert_eq!(of.redeem(second).unwrap().payload, 3);
}
