//! Tests of the cache with a fake device that records its registrations.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize};

use super::*;

/// A fake device.
#[derive(Debug, Default)]
struct Fake {
    next: AtomicU32,
    live: Arc<AtomicUsize>,
    /// Maximum number of registrations; 0 for no limit.
    most: usize,
    ranges: Arc<Mutex<Vec<(u64, u64)>>>,
}

#[derive(Debug)]
struct Registered(Arc<AtomicUsize>);

impl Drop for Registered {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Registrar for Fake {
    type Mr = Registered;
    type Key = Lkey;
    unsafe fn register(&self, start: u64, len: u64, _: bool) -> Result<(Registered, Lkey)> {
        if self.most != 0 && self.live.load(Ordering::Relaxed) >= self.most {
            return Err(FiErrno::ENOMEM);
        }
        self.live.fetch_add(1, Ordering::Relaxed);
        self.ranges.lock().unwrap().push((start, start + len));
        let lkey = self.next.fetch_add(1, Ordering::Relaxed);
        Ok((Registered(Arc::clone(&self.live)), Lkey::new(lkey)))
    }
}

/// A watch that reports no changes; the tests call `kill` themselves.
#[derive(Debug)]
pub(super) struct Manual;

impl Watch for Manual {
    fn is_current(&self, _: u64, _: u64) -> bool {
        true
    }
    fn asks_of_registrations(&self) -> bool {
        false
    }
    fn is_quiet(&self) -> bool {
        true
    }
    fn watch(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }
    fn unwatch(&self, _: u64, _: u64) {}
    fn tells_all(&self, _: u64, _: u64) -> bool {
        true
    }
    fn is_forked(&self) -> bool {
        false
    }
}

/// A watch that records its ranges and accepts only these.
#[derive(Debug, Default)]
struct Counted {
    ranges: Mutex<Vec<(u64, u64)>>,
    watched: AtomicUsize,
    /// If set, `is_current` kills the range in this cache, and returns true.
    kills: Mutex<Option<Arc<Inner<Registered>>>>,
    ends: AtomicUsize,
}

#[derive(Debug)]
struct Foreign(Arc<Counted>);

impl Watch for Foreign {
    fn is_current(&self, start: u64, end: u64) -> bool {
        let known = self.0.ranges.lock().unwrap().contains(&(start, end));
        assert!(known, "asked about {start:#x} to {end:#x}");
        if let Some(index) = &*self.0.kills.lock().unwrap() {
            index.kill(start, end);
        }
        true
    }
    fn asks_of_registrations(&self) -> bool {
        true
    }
    fn is_quiet(&self) -> bool {
        true
    }
    fn watch(&self, start: u64, end: u64) -> Result<()> {
        self.0.watched.fetch_add(1, Ordering::Relaxed);
        self.0.ranges.lock().unwrap().push((start, end));
        Ok(())
    }
    fn unwatch(&self, start: u64, end: u64) {
        let mut ranges = self.0.ranges.lock().unwrap();
        let at = ranges.iter().position(|range| *range == (start, end));
        match at {
            Some(at) => drop(ranges.swap_remove(at)),
            None => assert!(std::thread::panicking(), "{start:#x} was not watched"),
        }
    }
    fn tells_all(&self, start: u64, _: u64) -> bool {
        !(start / PAGE).is_multiple_of(7)
    }
    fn is_forked(&self) -> bool {
        false
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.0.ends.fetch_add(1, Ordering::Relaxed);
    }
}

const BOUNDS: Bounds = Bounds {
    size: 1 << 40,
    count: 1000,
    merge: false,
};
const PAGE: u64 = 4096;

fn cache(bounds: Bounds) -> Cache<Fake> {
    Cache::new(Fake::default(), bounds, |_| Ok(Box::new(Manual))).unwrap()
}

impl Cache<Fake> {
    fn kept(&self, addr: u64, len: u64, writable: bool) -> Held {
        // SAFETY: nothing is touched.
        match unsafe { self.get(addr, len, writable) } {
            Ok(Got::Kept(held)) => held,
            other => panic!("{other:?}"),
        }
    }

    /// Acquires and releases a registration of a buffer; returns the lkey.
    fn used(&self, addr: u64, len: u64, writable: bool) -> Lkey {
        let held = self.kept(addr, len, writable);
        self.release(&held);
        held.key
    }

    /// As [`Self::used`], for a full cache, which caches a buffer on its second miss.
    fn admitted(&self, addr: u64, len: u64, writable: bool) -> Lkey {
        // SAFETY: nothing is touched.
        let first = unsafe { self.get(addr, len, writable) };
        assert!(matches!(first, Ok(Got::Once(..))), "{first:?}");
        drop(first);
        self.used(addr, len, writable)
    }

    fn live(&self) -> usize {
        self.drain();
        self.registrar.live.load(Ordering::Relaxed)
    }
}

#[test]
fn what_lies_in_a_kept_registration_is_a_hit() {
    let cache = cache(BOUNDS);
    let first = cache.used(10 * PAGE + 5, 3 * PAGE, false);
    assert_eq!(cache.used(10 * PAGE, 4 * PAGE, false), first);
    assert_eq!(cache.used(12 * PAGE + 7, 1, false), first);
    assert_ne!(cache.used(14 * PAGE, 1, false), first);
    assert_eq!(cache.live(), 2);
}

#[test]
fn a_sink_needs_the_right_and_a_source_takes_any() {
    let cache = cache(BOUNDS);
    let source = cache.used(PAGE, PAGE, false);
    let sink = cache.used(PAGE, PAGE, true);
    assert_ne!(source, sink);
    assert_eq!(cache.used(PAGE, 8, false), source);
    let other = cache.used(9 * PAGE, PAGE, true);
    assert_eq!(cache.used(9 * PAGE, PAGE, false), other);
}

#[test]
fn what_is_killed_is_not_used_and_goes_behind_its_operations() {
    let cache = cache(BOUNDS);
    let held = cache.kept(2 * PAGE, 4 * PAGE, true);
    let other = cache.used(7 * PAGE, PAGE, true);
    cache.inner.kill(5 * PAGE, 7 * PAGE);
    assert_eq!(cache.find(2 * PAGE, 3 * PAGE, true, None), None);
    assert_eq!(cache.find(2 * PAGE, 3 * PAGE, true, Some(&held)), None);
    assert_eq!(cache.live(), 2);
    cache.release(&held);
    assert_eq!(cache.live(), 1);
    assert_eq!(cache.used(7 * PAGE, PAGE, true), other);
    assert_ne!(cache.used(2 * PAGE, PAGE, true), held.key);
    cache.inner.kill_all();
    assert_eq!(cache.live(), 0);
}

#[test]
fn overlapping_ones_become_one() {
    let cache = cache(BOUNDS);
    let first = cache.used(0x10 * PAGE, 2 * PAGE, false);
    let second = cache.used(0x11 * PAGE, 2 * PAGE, false);
    assert_ne!(first, second);
    assert_eq!(cache.used(0x10 * PAGE, 3 * PAGE, false), second);
    assert_eq!(cache.live(), 1);
    // not joined with a much longer registration, which is retired
    let long = cache.used(0x1000 * PAGE, 1000 * PAGE, false);
    let short = cache.used((0x1000 + 999) * PAGE, 2 * PAGE, false);
    assert_ne!(cache.used(0x1000 * PAGE, PAGE, false), long);
    assert_eq!(cache.used((0x1000 + 1000) * PAGE, 1, false), short);
    assert_eq!(cache.live(), 3);
}

#[test]
fn neighbours_are_merged_where_that_is_asked_for() {
    for merge in [false, true] {
        let cache = cache(Bounds { merge, ..BOUNDS });
        cache.used(PAGE, PAGE, false);
        cache.used(3 * PAGE, PAGE, false);
        let between = cache.used(2 * PAGE, PAGE, false);
        assert_eq!(cache.live(), if merge { 1 } else { 3 });
        assert_eq!(cache.used(PAGE, PAGE, false) == between, merge);
    }
}

#[test]
fn the_bounds_are_kept_and_what_is_used_stays() {
    let cache = cache(Bounds { count: 4, ..BOUNDS });
    let keys: Vec<_> = (1..=4)
        .map(|i| cache.used(i * 10 * PAGE, 1, false))
        .collect();
    for i in 5..50 {
        assert_eq!(cache.used(20 * PAGE, 1, false), keys[1], "{i}");
        match i {
            5.. => cache.admitted(i * 10 * PAGE, 1, false),
            _ => cache.used(i * 10 * PAGE, 1, false),
        };
        assert_eq!(cache.live(), 4);
    }
    assert_ne!(cache.admitted(10 * PAGE, 1, false), keys[0]);
    let small = self::cache(Bounds {
        size: 10 * PAGE,
        ..BOUNDS
    });
    for i in 1..20 {
        match i {
            4.. => small.admitted(i * 100 * PAGE, 3 * PAGE, false),
            _ => small.used(i * 100 * PAGE, 3 * PAGE, false),
        };
        assert!(small.live() <= 3);
    }
    // the range exceeds the limit of the cache
    // SAFETY: nothing is touched.
    let got = unsafe { small.get(PAGE, 11 * PAGE, false) };
    assert!(matches!(got, Ok(Got::Once(..))), "{got:?}");
}

/// More buffers than the cache has room for are used in turn: the cached ones are hits, and the
/// others are registered for one operation each, without being cached. The number of hits has a
/// lower bound, and the number of watched ranges an upper bound.
#[test]
fn a_cache_that_is_too_small_does_not_evict_in_vain() {
    for (buffers, most) in [(64, 0), (1000, 0), (9, 3), (12, 6)] {
        let bounds = Bounds { count: 8, ..BOUNDS };
        let (cache, counted) = counted(Fake::default(), bounds);
        let mut hits = 0;
        const ROUNDS: u64 = 50;
        for _ in 0..ROUNDS {
            for buffer in 0..buffers {
                let before = cache.registrar.next.load(Ordering::Relaxed);
                // SAFETY: nothing is touched.
                match unsafe { cache.get((7 * buffer + 1) * PAGE, 1, false) } {
                    Ok(Got::Kept(held)) => cache.release(&held),
                    Ok(Got::Once(..)) => {}
                    Err(error) => panic!("{error}"),
                }
                hits += u64::from(cache.registrar.next.load(Ordering::Relaxed) == before);
            }
        }
        let made = counted.watched.load(Ordering::Relaxed) as u64;
        assert!(made <= 8 + most * ROUNDS, "{buffers} buffers: {made} kept");
        let wanted = if most == 0 { 8 } else { buffers / 3 };
        assert!(
            hits >= wanted * (ROUNDS - 1),
            "{buffers} buffers: {hits} hits"
        );
    }
}

/// After the set of buffers changes, the new buffers are cached at their second miss.
#[test]
fn a_full_cache_follows_the_program() {
    let cache = cache(Bounds { count: 8, ..BOUNDS });
    let at = |i: u64| i * 10 * PAGE;
    for i in 1..=8 {
        cache.used(at(i), 1, false);
    }
    for round in 0..6 {
        for i in 9..=12 {
            // SAFETY: nothing is touched.
            match unsafe { cache.get(at(i), 1, false) } {
                Ok(Got::Kept(held)) => cache.release(&held),
                other => assert_eq!(round, 0, "{other:?}"),
            }
        }
    }
    assert_eq!(cache.registrar.next.load(Ordering::Relaxed), 8 + 4 + 4);
}

/// All registrations of a full cache are in use, for instance by posted receives: a miss that is
/// admitted evicts none of them, because that would make no room. When an operation is complete,
/// its registration can be evicted.
#[test]
fn what_operations_use_is_not_evicted() {
    for count in [8, 100] {
        let cache = cache(Bounds { count, ..BOUNDS });
        let at = |i: u64| i * 10 * PAGE;
        let mut held: Vec<_> = (1..=count as u64)
            .map(|i| cache.kept(at(i), 1, false))
            .collect();
        for _ in 0..3 {
            // SAFETY: nothing is touched.
            let got = unsafe { cache.get(at(1000), 1, false) };
            assert!(matches!(got, Ok(Got::Once(..))), "{got:?}");
        }
        for (i, held) in (1..).zip(&held) {
            assert_eq!(cache.used(at(i), 1, false), held.key, "{i}");
        }
        assert_eq!(cache.live(), count);
        let done = held.pop().unwrap();
        cache.release(&done);
        // at most 64 are examined for each miss
        let admitted = (0..8).any(|_| {
            // SAFETY: nothing is touched.
            match unsafe { cache.get(at(1000), 1, false) } {
                Ok(Got::Kept(held)) => {
                    cache.release(&held);
                    true
                }
                _ => false,
            }
        });
        assert!(admitted);
        for (i, held) in (1..).zip(&held) {
            assert_eq!(cache.used(at(i), 1, false), held.key, "{i}");
            cache.release(held);
        }
        assert_eq!(cache.live(), count);
    }
}

/// A longer registration takes the room of the one that it replaces, although operations use all
/// others: in a cache that is full by its count, or by its bytes.
#[test]
fn the_room_of_a_replaced_registration_is_used() {
    let bytes = Bounds {
        size: 9 * PAGE,
        ..BOUNDS
    };
    for bounds in [Bounds { count: 8, ..BOUNDS }, bytes] {
        let cache = cache(bounds);
        let at = |i: u64| i * 10 * PAGE;
        let held: Vec<_> = (1..8).map(|i| cache.kept(at(i), 1, false)).collect();
        let short = cache.kept(at(20), 1, false);
        cache.release(&short);
        let long = cache.kept(at(20), 2 * PAGE, false);
        assert_eq!(cache.used(at(20), 2 * PAGE, false), long.key);
        for held in held.iter().chain([&long]) {
            cache.release(held);
        }
        assert_eq!(cache.live(), 8);
    }
}

/// An eviction takes a bounded time, independent of the number of registrations in use.
#[test]
fn not_all_are_passed_over_for_one() {
    let cache = cache(Bounds {
        count: 500,
        ..BOUNDS
    });
    let at = |i: u64| i * 10 * PAGE;
    let keys: Vec<_> = (1..=500).map(|i| cache.used(at(i), 1, false)).collect();
    // all registrations are used after a miss
    let once = cache.inner.clock.fetch_add(1, Ordering::Relaxed);
    for (i, key) in (1..).zip(&keys) {
        assert_eq!(cache.used(at(i), 1, false), *key, "{once}");
    }
    cache.admitted(at(1000), 1, false);
    assert_eq!(cache.live(), 500);
    let gone: Vec<_> = (1..=500)
        .filter(|i| {
            let found = cache.find(at(*i), at(*i) + 1, false, None);
            found.inspect(|held| cache.release(held)).is_none()
        })
        .collect();
    assert_eq!(gone, [65]);
}

#[test]
fn what_operations_use_counts() {
    let cache = cache(Bounds { count: 2, ..BOUNDS });
    let held = [cache.kept(PAGE, 1, false), cache.kept(9 * PAGE, 1, false)];
    // SAFETY: nothing is touched.
    let got = unsafe { cache.get(20 * PAGE, 1, false) };
    assert!(matches!(got, Ok(Got::Once(..))), "{got:?}");
    for held in held {
        cache.release(&held);
    }
    cache.used(20 * PAGE, 1, false);
}

#[test]
fn a_device_that_is_full_takes_what_was_kept() {
    let fake = Fake {
        most: 8,
        ..Fake::default()
    };
    let cache = Cache::new(fake, BOUNDS, |_| Ok(Box::new(Manual) as Box<dyn Watch>)).unwrap();
    for i in 1..100 {
        cache.used(i * 10 * PAGE, 1, true);
    }
    assert!(cache.live() <= 8);
}

/// A device whose memory changes during each registration.
#[derive(Debug)]
struct Late(Mutex<Option<Arc<Inner<()>>>>);

impl Registrar for Late {
    type Mr = ();
    type Key = Lkey;
    unsafe fn register(&self, start: u64, _: u64, _: bool) -> Result<((), Lkey)> {
        if let Some(index) = &*self.0.lock().unwrap() {
            index.kill(start, start + 1);
        }
        Ok(((), Lkey::new(1)))
    }
}

#[test]
fn memory_that_changes_while_it_is_registered_is_not_kept() {
    let mut inner = None;
    let cache = Cache::new(Late(Mutex::new(None)), BOUNDS, |index| {
        inner = Some(Arc::clone(index));
        Ok(Box::new(Manual))
    })
    .unwrap();
    *cache.registrar.0.lock().unwrap() = inner;
    for _ in 0..100 {
        // SAFETY: nothing is touched.
        let got = unsafe { cache.get(PAGE, PAGE, false) };
        assert!(matches!(got, Ok(Got::Once(..))), "{got:?}");
    }
    *cache.registrar.0.lock().unwrap() = None;
    // SAFETY: as above.
    let got = unsafe { cache.get(PAGE, PAGE, false) };
    assert!(matches!(got, Ok(Got::Kept(_))), "{got:?}");
}

#[test]
fn addresses_beyond_the_tree_are_not_kept() {
    let cache = cache(BOUNDS);
    for addr in [1_u64 << 48, u64::MAX - 4 * PAGE, (1 << 48) - PAGE] {
        // SAFETY: nothing is touched.
        let got = unsafe { cache.get(addr, 2 * PAGE, true) };
        assert!(matches!(got, Ok(Got::Once(..))), "{got:?}");
    }
    // SAFETY: as above.
    let got = unsafe { cache.get(u64::MAX, 2, true) };
    assert!(got.is_err());
}

/// A device that deregisters the memory below page 25 only while nobody holds the lock.
#[derive(Debug, Default)]
struct Blocked {
    lock: Arc<Mutex<()>>,
    live: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Blocking(Option<Arc<Mutex<()>>>, Arc<AtomicUsize>);

impl Drop for Blocking {
    fn drop(&mut self) {
        drop(self.0.as_ref().map(|lock| lock.lock().unwrap()));
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Registrar for Blocked {
    type Mr = Blocking;
    type Key = Lkey;
    unsafe fn register(&self, start: u64, _: u64, _: bool) -> Result<(Blocking, Lkey)> {
        self.live.fetch_add(1, Ordering::SeqCst);
        let lock = (start < 25 * PAGE).then(|| Arc::clone(&self.lock));
        let mr = Blocking(lock, Arc::clone(&self.live));
        Ok((mr, Lkey::new(1)))
    }
}

/// Another thread has taken the list of dead registrations, and is busy with the first one.
#[test]
fn a_retired_registration_has_ended_when_the_call_returns() {
    let device = Blocked::default();
    let (lock, live) = (Arc::clone(&device.lock), Arc::clone(&device.live));
    let cache = Cache::new(device, BOUNDS, |_| Ok(Box::new(Manual) as Box<dyn Watch>)).unwrap();
    let kept = |at: u64| {
        // SAFETY: nothing is touched.
        match unsafe { cache.get(at * PAGE, PAGE, false) } {
            Ok(Got::Kept(held)) => held,
            other => panic!("{other:?}"),
        }
    };
    let all = [10, 20, 30].map(kept);
    cache.inner.kill(0, 25 * PAGE);
    let blocked = lock.lock().unwrap();
    all[..2].iter().for_each(|held| cache.release(held));
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| cache.drain());
        while cache.has_zombies() {
            std::thread::yield_now();
        }
        let [_, _, last] = all;
        let cache = &cache;
        let retiring = scope.spawn(move || cache.retire(last));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!retiring.is_finished());
        drop(blocked);
        retiring.join().unwrap();
        assert_eq!(live.load(Ordering::SeqCst), 0);
        busy.join().unwrap();
    });
}

fn counted(fake: Fake, bounds: Bounds) -> (Cache<Fake>, Arc<Counted>) {
    let counted = Arc::new(Counted::default());
    let watch = Foreign(Arc::clone(&counted));
    let cache = Cache::new(fake, bounds, |_| Ok(Box::new(watch))).unwrap();
    (cache, counted)
}

/// Every watch of a range is removed once, for each result of the registration.
#[test]
fn all_that_is_watched_is_given_back() {
    for merge in [false, true] {
        let fake = Fake {
            most: 4, // less than the maximum number in use
            ..Fake::default()
        };
        let bounds = Bounds {
            size: 40 * PAGE,
            count: 10,
            merge,
        };
        let (cache, counted) = counted(fake, bounds);
        let mut seed = 9_u64;
        let mut below = |end: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % end
        };
        let mut held = Vec::new();
        for _ in 0..20_000 {
            let (addr, len) = ((1 + below(60)) * PAGE + below(100), 1 + below(5 * PAGE));
            // SAFETY: nothing is touched.
            match unsafe { cache.get(addr, len, below(2) == 0) } {
                Ok(Got::Kept(one)) => held.push(one),
                Ok(Got::Once(..)) => {}
                Err(error) => assert_eq!(error, FiErrno::ENOMEM),
            }
            if held.len() > 6 || below(3) == 0 {
                while held.len() as u64 > below(6) {
                    cache.release(&held.swap_remove(below(held.len() as u64) as usize));
                }
            }
            if below(20) == 0 {
                cache.inner.kill(addr, addr + len);
            }
            let slow = cache.inner.slow();
            assert!(slow.count <= 10 && slow.bytes <= 40 * PAGE);
            assert!(slow.live <= slow.count);
        }
        assert!(counted.watched.load(Ordering::Relaxed) > 2000);
        for one in held.drain(..) {
            cache.release(&one);
        }
        cache.drain();
        let live = cache.inner.slow().live;
        let watched = counted.ranges.lock().unwrap().len();
        assert_eq!(watched, live);
        assert_eq!(cache.registrar.live.load(Ordering::Relaxed), live);
        drop(cache);
        let watched = counted.ranges.lock().unwrap().len();
        assert_eq!(watched, 0);
        assert_eq!(counted.ends.load(Ordering::Relaxed), 1);
    }
}

/// A change is reported during the call of `is_current`: the registration that was found before is
/// not used.
#[test]
fn what_is_killed_while_the_watch_is_asked_is_not_used() {
    let (cache, counted) = counted(Fake::default(), BOUNDS);
    let held = cache.kept(PAGE, PAGE, true);
    assert_eq!(cache.find(PAGE, PAGE + 1, true, Some(&held)), Some(held));
    assert_eq!(cache.find(PAGE, PAGE + 1, false, None), Some(held));
    cache.release(&held);
    *counted.kills.lock().unwrap() = Some(Arc::clone(&cache.inner));
    assert_eq!(cache.find(PAGE, PAGE + 1, true, Some(&held)), None);
    let again = cache.kept(3 * PAGE, PAGE, true);
    assert_eq!(cache.find(3 * PAGE, 3 * PAGE + 1, true, None), None);
    *counted.kills.lock().unwrap() = None;
    cache.release(&held);
    cache.release(&again);
    assert_eq!(cache.live(), 0);
}
