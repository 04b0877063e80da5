//! The address vector beside a naive list.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Few addresses, so that many are duplicates; some differ in one part alone.
fn addr() -> impl Strategy<Value = SocketAddr> {
    let text = [
        "10.0.0.1:1",
        "10.0.0.1:2",
        "10.0.0.2:1",
        "[::ffff:10.0.0.1]:1",
        "[fe80::1%1]:1",
        "[fe80::1%2]:1",
        "[2001:db8::1]:1",
        "[2001:db8::1%7]:1",
    ];
    let far = (0..2000_u32).prop_map(|i| SocketAddr::from(([10, 1, (i >> 8) as u8, i as u8], 9)));
    prop_oneof![
        3 => (0..text.len()).prop_map(move |i| text[i].parse().unwrap()),
        1 => far,
    ]
}

/// What all forms of an address have in common.
fn key(addr: &SocketAddr) -> (IpAddr, u16, u32) {
    let scope = match addr {
        SocketAddr::V6(v6) if v6.ip().segments()[0] >> 6 == 0xfe80 >> 6 => v6.scope_id(),
        _ => 0,
    };
    (addr.ip().to_canonical(), addr.port(), scope)
}

#[derive(Clone, Debug)]
enum Op {
    Insert(SocketAddr),
    InsertAll(Vec<Option<SocketAddr>>),
    Remove(usize),
    Learn(SocketAddr),
    Hold(usize),
    Release(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let list = proptest::collection::vec(proptest::option::weighted(0.8, addr()), 0..6);
    prop_oneof![
        8 => addr().prop_map(Op::Insert),
        1 => list.prop_map(Op::InsertAll),
        7 => any::<usize>().prop_map(Op::Remove),
        2 => addr().prop_map(Op::Learn),
        1 => any::<usize>().prop_map(Op::Hold),
        3 => any::<usize>().prop_map(Op::Release),
    ]
}

/// Addresses by their `fi_addr_t`, with the number of their insertion; and holds.
#[derive(Default)]
struct Model {
    live: BTreeMap<u64, (SocketAddr, usize)>,
    insertions: usize,
    held: Vec<(SocketAddr, PeerIndex)>,
}

impl Model {
    fn lowest(&self, except: &[u64]) -> u64 {
        (0..)
            .find(|index| !self.live.contains_key(index) && !except.contains(index))
            .unwrap()
    }

    fn insert(&mut self, index: u64, addr: SocketAddr) {
        self.insertions += 1;
        self.live.insert(index, (addr, self.insertions));
    }

    fn source(&self, addr: &SocketAddr) -> Option<FiAddr> {
        let of = self
            .live
            .iter()
            .filter(|(_, (live, _))| key(live) == key(addr));
        of.min_by_key(|(_, (_, insertion))| *insertion)
            .map(|(index, _)| FiAddr(*index))
    }
}

fn agree(ops: &[Op]) {
    let mut av = Av::new(ops.len() as u64, 0);
    let mut model = Model::default();
    for op in ops {
        match op {
            Op::Insert(addr) => {
                let index = model.lowest(&[]);
                assert_eq!(av.insert(addr), Ok(FiAddr(index)));
                model.insert(index, *addr);
            }
            Op::InsertAll(addrs) => {
                let items = addrs.iter().map(|addr| addr.ok_or(FiErrno::ENODATA));
                let mut results = Vec::new();
                let inserted = av.insert_all(items, |position, result| {
                    assert_eq!(position, results.len());
                    results.push(result);
                });
                let mut skipped = Vec::new();
                for (addr, result) in addrs.iter().zip(&results) {
                    let index = model.lowest(&skipped);
                    match addr {
                        Some(addr) => {
                            assert_eq!(*result, Ok(FiAddr(index)));
                            model.insert(index, *addr);
                        }
                        None => {
                            assert_eq!(*result, Err(FiErrno::ENODATA));
                            skipped.push(index);
                        }
                    }
                }
                assert_eq!(results.len(), addrs.len());
                assert_eq!(inserted, addrs.iter().flatten().count());
            }
            Op::Remove(which) => {
                if !model.live.is_empty() {
                    let index = *model.live.keys().nth(which % model.live.len()).unwrap();
                    let peer = av.peer(FiAddr(index)).unwrap();
                    let (addr, _) = model.live.remove(&index).unwrap();
                    let source = model.source(&addr);
                    assert_eq!(av.remove(FiAddr(index)), Ok(Removed { peer, source }));
                    assert_eq!(av.remove(FiAddr(index)), Err(FiErrno::EINVAL));
                    av.release_index(FiAddr(index));
                }
            }
            Op::Learn(addr) => {
                let earlier = av.find(addr);
                let peer = av.learn(addr).unwrap();
                assert!(earlier.is_none_or(|earlier| earlier == peer));
                model.held.push((*addr, peer));
            }
            Op::Hold(which) => {
                if !model.live.is_empty() {
                    let (index, (addr, _)) =
                        model.live.iter().nth(which % model.live.len()).unwrap();
                    let peer = av.peer(FiAddr(*index)).unwrap();
                    av.hold(peer);
                    model.held.push((*addr, peer));
                }
            }
            Op::Release(which) => {
                if !model.held.is_empty() {
                    let (_, peer) = model.held.swap_remove(which % model.held.len());
                    av.release(peer);
                }
            }
        }
        check(&av, &model);
    }
}

fn check(av: &Av, model: &Model) {
    assert_eq!(av.len(), model.live.len());
    let mut peers = BTreeMap::new();
    for (index, (addr, _)) in &model.live {
        assert_eq!(av.lookup(FiAddr(*index)), Ok(*addr));
        let peer = av.peer(FiAddr(*index)).unwrap();
        assert_eq!(
            *peers.entry(peer).or_insert(key(addr)),
            key(addr),
            "one address"
        );
        assert_eq!(av.find(addr), Some(peer), "one peer");
        assert_eq!(av.source(peer), model.source(addr));
    }
    for (addr, peer) in &model.held {
        assert_eq!(
            av.peer_addr(*peer).as_ref().map(key),
            Some(key(addr)),
            "the index is not used again"
        );
        assert_eq!(av.find(addr), Some(*peer));
        assert_eq!(av.source(*peer), model.source(addr));
        peers.insert(*peer, key(addr));
    }
    assert_eq!(av.peers(), peers.len());
    let keys: BTreeSet<_> = peers.values().collect();
    assert_eq!(keys.len(), peers.len(), "one peer for all forms");
    let unused = model.live.keys().next_back().map_or(0, |index| index + 1);
    for addr in [unused, u64::MAX, 1 << 32] {
        assert_eq!(av.lookup(FiAddr(addr)), Err(FiErrno::EINVAL));
        assert_eq!(av.peer(FiAddr(addr)), Err(FiErrno::EINVAL));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// About 37,000 operations; every address is looked up after each.
    #[test]
    fn it_agrees_with_a_naive_list(ops in proptest::collection::vec(op(), 100..400)) {
        agree(&ops);
    }
}

#[test]
fn addresses_that_no_peer_can_have_are_refused() {
    let mut av = Av::new(0, 0);
    for text in ["0.0.0.0:5", "[::]:5", "[::ffff:0.0.0.0]:5", "10.0.0.1:0"] {
        assert_eq!(
            av.insert(&text.parse().unwrap()),
            Err(FiErrno::EADDRNOTAVAIL)
        );
    }
    assert_eq!((av.len(), av.peers()), (0, 0));
}

/// `fi_av_insert` with an array of results that is NULL: the indices of the good addresses do not
/// depend on the bad ones, and a later insertion uses the indices that were left out.
#[test]
fn a_failed_address_leaves_its_index_unused() {
    let mut av = Av::new(0, 0);
    let good = |port| Ok(SocketAddr::from(([10, 0, 0, 1], port)));
    let list = [good(1), good(0), Err(FiErrno::EINVAL), good(2)];
    assert_eq!(av.insert_all(list, |_, _| {}), 2);
    assert_eq!(av.lookup(FiAddr(3)).ok(), good(2).ok());
    assert_eq!(av.lookup(FiAddr(1)), Err(FiErrno::EINVAL));
    assert_eq!(av.insert(&good(3).unwrap()), Ok(FiAddr(1)));
}

#[test]
fn the_flow_label_is_returned_but_no_part_of_the_address() {
    let mut av = Av::new(0, 0);
    let with = |flow| SocketAddr::from(SocketAddrV6::new(Ipv6Addr::LOCALHOST, 5, flow, 0));
    let first = av.insert(&with(7)).unwrap();
    let second = av.insert(&with(8)).unwrap();
    assert_eq!(av.peer(first), av.peer(second));
    assert_eq!(av.lookup(first), Ok(with(7)));
    assert_eq!(av.lookup(second), Ok(with(8)));
}

/// The addresses that peers announce are IPv4 where they can be, and have no scope.
#[test]
fn an_address_in_another_form_is_the_same_peer() {
    let mut av = Av::new(0, 0);
    let text = |text: &str| text.parse::<SocketAddr>().unwrap();
    for (announced, inserted) in [
        ("10.1.2.3:5", "[::ffff:10.1.2.3]:5"),
        ("[2001:db8::1]:5", "[2001:db8::1%2]:5"),
    ] {
        let (announced, inserted) = (text(announced), text(inserted));
        let fi_addr = av.insert(&inserted).unwrap();
        let peer = av.find(&announced).unwrap();
        assert_eq!(av.source(peer), Some(fi_addr));
        assert_eq!(av.lookup(fi_addr), Ok(inserted));
        // a peer that was known before the insertion
        av.hold(peer);
        av.remove(fi_addr).unwrap();
        av.release_index(fi_addr);
        let again = av.insert(&announced).unwrap();
        assert_eq!((again, av.peer(again)), (fi_addr, Ok(peer)));
        assert_eq!(av.lookup(again), Ok(announced));
        av.release(peer);
        av.remove(again).unwrap();
        av.release_index(again);
        assert_eq!(av.find(&inserted), None);
    }
    let first = av.insert(&text("[fe80::1%1]:5")).unwrap();
    let second = av.insert(&text("[fe80::1%2]:5")).unwrap();
    assert_ne!(av.peer(first), av.peer(second));
}

/// A peer that sent something before its address was inserted keeps its index.
#[test]
fn a_late_insertion_finds_the_peer() {
    let mut av = Av::new(0, 0);
    let addr: SocketAddr = "10.0.0.1:5".parse().unwrap();
    let peer = av.learn(&addr).unwrap();
    assert_eq!(av.source(peer), None);
    let fi_addr = av.insert(&addr).unwrap();
    assert_eq!(av.peer(fi_addr), Ok(peer));
    assert_eq!(av.source(peer), Some(fi_addr));
    av.remove(fi_addr).unwrap();
    av.release_index(fi_addr);
    assert_eq!(av.peer_addr(peer), Some(addr));
    av.release(peer);
    assert_eq!(av.peer_addr(peer), None);
}

/// A million peers: less than 64 bytes for each, at every number of them, and indices in order.
#[test]
fn a_known_peer_takes_less_than_64_bytes() {
    let mut av = Av::new(1, 0);
    let addr = |i: u32| {
        let host = 0xfd00_u128 << 112 | u128::from(i >> 10);
        SocketAddr::new(Ipv6Addr::from(host).into(), 1000 + (i & 1023) as u16)
    };
    for i in 0..1_000_000 {
        assert_eq!(av.insert(&addr(i)), Ok(FiAddr(i.into())));
        if i > 10_000 && i % 4096 == 0 {
            let each = av.bytes() as f64 / f64::from(i);
            assert!(each < 60.0, "{each} bytes at {i}");
        }
    }
    for i in (0..1_000_000).step_by(997) {
        assert_eq!(av.find(&addr(i)), Some(PeerIndex(i)));
    }
    let longest = av.chains.iter().map(|first| {
        let next = |at: u32| (at != NIL).then_some(at);
        std::iter::successors(next(*first), |at| next(av.peers[*at].next)).count()
    });
    assert!(longest.max() < Some(24), "chains are short");
}

/// A million addresses of one peer: each is removed without reading the others.
#[test]
fn many_duplicates_are_one_peer() {
    // an application may expect any number of addresses
    let mut av = Av::new(2, usize::MAX);
    let addr: SocketAddr = "10.0.0.1:5".parse().unwrap();
    for _ in 0..1_000_000 {
        av.insert(&addr).unwrap();
    }
    assert_eq!(av.peers(), 1);
    for i in 0..999_999 {
        let source = av.remove(FiAddr(i)).unwrap().source;
        av.release_index(FiAddr(i));
        assert_eq!(source, Some(FiAddr(i + 1)));
    }
    assert_eq!(av.remove(FiAddr(999_999)).unwrap().source, None);
    assert_eq!(av.peers(), 0);
}

#[test]
fn a_hash_without_memory_is_an_error() {
    for count in [1 << 60, usize::MAX] {
        assert_eq!(chains(count), Err(FiErrno::ENOMEM));
    }
}
