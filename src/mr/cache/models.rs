//! loom models of the cache: hits concurrent with the ends of registrations. The tree has eight
//! pages here.

use loom::thread::{JoinHandle, spawn};

use super::tests::Manual;
use super::*;
use crate::sync::UnsafeCell;

const PAGE: u64 = 4096;
const MOST: usize = 4;

/// State of a device: whether each lkey is registered. loom reports an access that is concurrent
/// with a change.
type Registered = Arc<[UnsafeCell<bool>; MOST]>;

/// A device whose registrations the holders of references read.
#[derive(Debug)]
struct Device {
    registered: Registered,
    next: AtomicU32,
}

#[derive(Debug)]
struct Mr(Registered, u32);

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: that no thread uses the registration any more is the property under test; loom
        // checks it.
        self.0[self.1 as usize].with_mut(|there| unsafe { assert!(there.replace(false)) });
    }
}

// SAFETY: as above.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Registrar for Device {
    type Mr = Mr;
    type Key = Lkey;
    unsafe fn register(&self, _: u64, _: u64, _: bool) -> Result<(Mr, Lkey)> {
        let lkey = self.next.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        self.registered[lkey as usize].with_mut(|there| unsafe { *there = true });
        Ok((Mr(Arc::clone(&self.registered), lkey), Lkey::new(lkey)))
    }
}

type Modelled = Arc<Cache<Device>>;

fn cache() -> Modelled {
    let device = Device {
        registered: Arc::new(std::array::from_fn(|_| UnsafeCell::new(false))),
        next: AtomicU32::new(0),
    };
    let bounds = Bounds {
        size: 100 * PAGE,
        count: 10,
        merge: false,
    };
    Arc::new(Cache::new(device, bounds, |_| Ok(Box::new(Manual))).unwrap())
}

/// Caches a registration of a page; returns its lkey.
fn keep(cache: &Modelled, page: u64, writable: bool) -> u32 {
    // SAFETY: the memory is not accessed.
    match unsafe { cache.get(page * PAGE, 1, writable) } {
        Ok(Got::Kept(held)) => {
            cache.release(&held);
            held.key.get()
        }
        other => panic!("{other:?}"),
    }
}

/// Looks up a page and, on a hit, uses the registration; returns the lkey.
fn hit(cache: &Modelled, page: u64, writable: bool) -> Option<u32> {
    let held = cache.find(page * PAGE, page * PAGE + 1, writable, None)?;
    // SAFETY: as for `Device`.
    let there = |there: *const bool| unsafe { *there };
    assert!(cache.registrar.registered[held.key.get() as usize].with(there));
    assert_eq!((held.start, held.end), (page * PAGE, (page + 1) * PAGE));
    cache.release(&held);
    Some(held.key.get())
}

fn with(cache: &Modelled, run: impl FnOnce(&Modelled) + 'static) -> JoinHandle<()> {
    let cache = Arc::clone(cache);
    spawn(move || run(&cache))
}

/// Checks that no registration is left and that the counts are 0.
fn end(cache: &Modelled) {
    cache.inner.kill_all();
    cache.drain();
    let slow = cache.inner.slow();
    assert_eq!((slow.live, slow.count, slow.bytes), (0, 0, 0));
    drop(slow);
    for one in cache.registrar.registered.iter() {
        // SAFETY: as for `Device`.
        one.with(|there| unsafe { assert!(!*there) });
    }
}

fn check(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

/// Two hits use a registration, which exists until both have released it, in either order.
#[test]
fn what_is_used_stays_until_the_last_has_done_with_it() {
    check(|| {
        let cache = cache();
        keep(&cache, 1, true);
        let other = with(&cache, |cache| {
            hit(cache, 1, true);
        });
        let killer = with(&cache, |cache| {
            cache.inner.kill(PAGE, 2 * PAGE);
            cache.drain();
            assert_eq!(hit(cache, 1, true), None, "it was killed");
        });
        hit(&cache, 1, true);
        other.join().unwrap();
        killer.join().unwrap();
        end(&cache);
    });
}

/// A registration is evicted, and its entry is reused for another page or with other rights: a
/// concurrent hit of the first one does not get the second one.
#[test]
fn a_late_hit_gets_no_other_registration() {
    check(|| {
        let cache = cache();
        let first = keep(&cache, 1, true);
        let next = with(&cache, |cache| {
            cache.make_room();
            // read-only
            keep(cache, 1, false);
        });
        let found = hit(&cache, 1, true);
        assert!(found.is_none() || found == Some(first), "{found:?}");
        next.join().unwrap();
        end(&cache);
    });
}

/// A hit that is concurrent with a miss reads a completely initialized registration.
#[test]
fn a_hit_beside_a_miss_knows_the_registration() {
    check(|| {
        let cache = cache();
        let miss = with(&cache, |cache| {
            keep(cache, 2, true);
        });
        hit(&cache, 2, false);
        miss.join().unwrap();
        end(&cache);
    });
}

/// Memory changes while its registration is evicted and used by a hit: the registration is
/// deregistered once.
#[test]
fn one_that_is_killed_and_evicted_goes_once() {
    check(|| {
        let cache = cache();
        keep(&cache, 1, true);
        let killer = with(&cache, |cache| cache.inner.kill(PAGE, 2 * PAGE));
        let evicts = with(&cache, |cache| {
            cache.make_room();
        });
        hit(&cache, 1, true);
        killer.join().unwrap();
        evicts.join().unwrap();
        end(&cache);
    });
}
