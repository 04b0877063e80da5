//! Matching: the time of one match among 100,000 and among 1,000,000 posted receives or unexpected
//! messages, the ratio of the two, and the longest call that adds one of 1,000,000.

use std::time::Instant;

use weft::PeerIndex;
use weft::matching::{Matching, Want};

use crate::stats::Quartiles;
use crate::worker::pin;

const COUNTS: [u64; 2] = [100_000, 1_000_000];
const ROUNDS: usize = 31;
/// Matches of one round.
const BATCH: u64 = 5_000;
/// Targets: maximum nanoseconds of a match, and maximum ratio of the times for the two counts.
const LIMIT: f64 = 1000.0;
const RATIO: f64 = 1.5;
/// Ignored bits, as those of MPI's synchronous sends.
const IGNORE: u64 = 0x7000_0000_0000_0000;

/// An instance with handles of the largest size for entries of 96 and 64 bytes.
type Tags = Matching<[u64; 5], [u64; 3]>;

#[derive(Clone, Copy)]
enum Order {
    /// A receive is posted behind the others, which do not match, and matched; 64 in turn.
    Last,
    /// The entries are matched in the order in which they were added, and added again.
    Added,
    /// In an order without a pattern: each match reads memory that no cache has.
    Random,
}

/// The tags of a round, and those that are added again.
fn batch(order: Order, count: u64, round: usize) -> Vec<u64> {
    let first = round as u64 * BATCH;
    (first..first + BATCH)
        .map(|i| match order {
            Order::Last => count + i % 64,
            Order::Added => i % count,
            // coprime to both counts: no tag twice in a round
            Order::Random => i.wrapping_mul(618_033_989) % count,
        })
        .collect()
}

fn peer(tag: u64) -> PeerIndex {
    PeerIndex((tag % 64) as u32)
}

fn post(tags: &mut Tags, tag: u64) {
    let found = tags.receive(&Want::tagged(tag, IGNORE, None), 1, [tag; 5]);
    assert!(found.is_none());
}

fn take_posted(tags: &mut Tags, tag: u64) {
    let found = tags.arrive(tag, peer(tag), 8);
    assert_eq!(found.expect("a match").receive[0], tag);
}

fn store(tags: &mut Tags, tag: u64) {
    tags.store(tag, peer(tag), 8, [tag; 3]);
}

fn take_unexpected(tags: &mut Tags, tag: u64) {
    let found = tags.receive(&Want::tagged(tag, IGNORE, None), 1, [tag; 5]);
    assert_eq!(found.expect("a message").payload[0], tag);
}

/// Nanoseconds of one match in each round.
fn measure(
    add: fn(&mut Tags, u64),
    take: fn(&mut Tags, u64),
    order: Order,
    count: u64,
) -> Vec<f64> {
    let mut tags = Tags::new(1, 0, 0);
    for tag in 0..count {
        add(&mut tags, tag);
    }
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let batch = batch(order, count, round);
        let begin = Instant::now();
        if matches!(order, Order::Last) {
            for window in batch.chunks(64) {
                for tag in window {
                    add(&mut tags, *tag);
                }
                for tag in window {
                    take(&mut tags, *tag);
                }
            }
        } else {
            for tag in &batch {
                take(&mut tags, *tag);
            }
        }
        times.push(begin.elapsed().as_nanos() as f64 / BATCH as f64);
        if !matches!(order, Order::Last) {
            for tag in &batch {
                add(&mut tags, *tag);
            }
        }
    }
    times
}

/// Fills of which each is measured.
const FILLS: usize = 9;

/// Microseconds of the longest single call that adds one of 1,000,000 entries; the least of some
/// fills, because others have calls that were interrupted.
fn longest(add: fn(&mut Tags, u64)) -> f64 {
    let fill = || {
        let mut tags = Tags::new(1, 0, 0);
        let calls = (0..COUNTS[1]).map(|tag| {
            let begin = Instant::now();
            add(&mut tags, tag);
            begin.elapsed().as_nanos()
        });
        calls.max().unwrap_or_default() as f64 / 1000.0
    };
    (0..FILLS).map(|_| fill()).fold(f64::INFINITY, f64::min)
}

/// `weft-bench matching`: measures matches among many entries.
pub(crate) fn main() {
    pin(0);
    println!("one match (quartiles)");
    type Operation = fn(&mut Tags, u64);
    let kinds: [(&str, Operation, Operation); 2] = [
        ("posted", post, take_posted),
        ("unexpected", store, take_unexpected),
    ];
    let orders = [
        ("add and match the last", Order::Last),
        ("in the order of adding", Order::Added),
        ("random", Order::Random),
    ];
    for (kind, add, take) in kinds {
        println!(
            "{kind:<10} longest call while 1,000,000 are added {:>9.1} us",
            longest(add)
        );
        for (name, order) in orders {
            let mut medians = [0.0; 2];
            for (median, count) in medians.iter_mut().zip(COUNTS) {
                let times = Quartiles::of(&measure(add, take, order, count));
                *median = times.median;
                let verdict = if times.median <= LIMIT {
                    "met"
                } else {
                    "MISSED"
                };
                println!(
                    "{kind:<10} {name:<23} among {count:>9}  {:>7.1} ns ({:.1} - {:.1})  <= 1000: {verdict}",
                    times.median, times.low, times.high
                );
            }
            let ratio = medians[1] / medians[0];
            let verdict = if ratio <= RATIO { "met" } else { "MISSED" };
            println!("{kind:<10} {name:<23} ratio {ratio:>30.2}  <= 1.5: {verdict}");
        }
    }
}
