use super::*;
use crate::region::{Target, resolve};
use crate::segment::layout::{announce, header};

const READ: u32 = IBV_ACCESS_REMOTE_READ;
const WRITE: u32 = IBV_ACCESS_REMOTE_WRITE;
const PD: u32 = 7;
const QP: u32 = 99;

struct Fixture {
    segment: OwnSegment,
    regions: Regions,
    windows: Windows,
}

impl Fixture {
    fn new() -> Self {
        Self {
            segment: OwnSegment::create(1, 0, true).unwrap(),
            regions: Regions::new().unwrap(),
            windows: Windows::default(),
        }
    }

    fn owner(&self) -> Owner<'_> {
        Owner {
            regions: &self.regions,
            segment: &self.segment,
            lives: &|_| true,
        }
    }

    /// A region of 0x1000 bytes at 0x50000, with iova 0x90000.
    fn region(&self, access: u32) -> Key {
        let range = Range {
            addr: 0x5_0000,
            len: 0x1000,
            iova: 0x9_0000,
        };
        self.regions
            .register(&self.segment, PD, range, access)
            .unwrap()
    }

    fn window(&self, kind: Kind) -> Key {
        self.windows.alloc(&self.owner(), kind, PD).unwrap()
    }

    fn bind(&self, bind: &Bind) -> Res<Progress> {
        self.windows.bind(&self.owner(), bind, QP, PD)
    }

    /// The address that a peer reaches with a key through a queue pair.
    fn reach(&self, key: Key, addr: u64, len: u64, right: u32, qp: u32) -> Option<u64> {
        let target = Target {
            key,
            addr,
            pd: PD,
            qp,
        };
        resolve(&self.segment.map, target, addr, len, right).map(|place| place.addr)
    }
}

fn to(window: Key, key: Key, region: Key, access: u32) -> Bind {
    Bind {
        window: window.index() as u32,
        key,
        region,
        addr: 0x9_0100,
        len: 0x80,
        access,
    }
}

fn next(key: Key) -> Key {
    Key(key.0 & !0xff | key.0.wrapping_add(1) & 0xff)
}

const BINDABLE: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
const BAD: Res<Progress> = Err(Errno(libc::EINVAL));

#[test]
fn bounds_and_rights_are_the_window_s() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    for kind in [Kind::One, Kind::TwoB] {
        let window = own.window(kind);
        assert_eq!(own.reach(window, 0x9_0100, 8, READ, QP), None);
        let key = next(window);
        assert_eq!(own.bind(&to(window, key, region, READ)), Ok(Progress::Done));
        assert_eq!(own.reach(window, 0x9_0100, 8, READ, QP), None);
        assert_eq!(own.reach(key, 0x9_0100, 0x80, READ, QP), Some(0x5_0100));
        assert_eq!(own.reach(key, 0x9_0100, 0x81, READ, QP), None);
        assert_eq!(own.reach(key, 0x9_00ff, 8, READ, QP), None);
        assert_eq!(own.reach(key, 0x9_0180, 1, READ, QP), None);
        assert_eq!(own.reach(key, 0x9_0100, 8, WRITE, QP), None);
        let other = own.reach(key, 0x9_0100, 8, READ, QP + 1);
        assert_eq!(other.is_some(), kind == Kind::One);
        // a window has no lkey
        let sge = ibv_sge {
            addr: 0x9_0100,
            length: 8,
            lkey: key.0,
        };
        assert_eq!(own.regions.local(&sge, PD, false), None);
        assert!(own.windows.has(key) && !own.windows.has(window));
        let busy = own.windows.unless_bound(&own.owner(), region, || ());
        assert_eq!(busy, Err(Errno(libc::EBUSY)));
        own.windows
            .free(&own.owner(), window.index() as u32)
            .unwrap();
        assert_eq!(own.reach(key, 0x9_0100, 8, READ, QP), None);
        assert_eq!(
            own.windows.unless_bound(&own.owner(), region, || ()),
            Ok(())
        );
    }
}

#[test]
fn type_1_is_bound_again_and_to_nothing() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    let window = own.window(Kind::One);
    let (first, second) = (next(window), next(next(window)));
    own.bind(&to(window, first, region, READ)).unwrap();
    own.bind(&to(window, second, region, READ)).unwrap();
    assert_eq!(own.reach(first, 0x9_0100, 8, READ, QP), None);
    assert!(own.reach(second, 0x9_0100, 8, READ, QP).is_some());
    let nothing = Bind {
        len: 0,
        region: Key(0),
        ..to(window, next(second), region, 0)
    };
    own.bind(&nothing).unwrap();
    assert_eq!(own.reach(second, 0x9_0100, 8, READ, QP), None);
    assert_eq!(
        own.windows.unless_bound(&own.owner(), region, || ()),
        Ok(())
    );
    let zero = to(window, next(second), region, READ | IBV_ACCESS_ZERO_BASED);
    assert_eq!(own.bind(&zero), BAD);
    let owner = own.owner();
    assert_eq!(own.windows.invalidate(&owner, second, PD), BAD);
}

#[test]
fn type_2_is_bound_once_until_it_is_invalidated() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    let window = own.window(Kind::TwoB);
    let first = Key(window.0 & !0xff | 0x42);
    own.bind(&to(window, first, region, READ)).unwrap();
    assert_eq!(own.bind(&to(window, next(first), region, READ)), BAD);
    let owner = own.owner();
    assert_eq!(own.windows.invalidate(&owner, next(first), PD), BAD);
    assert_eq!(own.windows.invalidate(&owner, first, PD + 1), BAD);
    assert_eq!(own.windows.invalidate(&owner, region, PD), BAD);
    assert!(own.reach(first, 0x9_0100, 8, READ, QP).is_some());
    let done = own.windows.invalidate(&owner, first, PD);
    assert_eq!(done, Ok(Progress::Done));
    assert_eq!(own.reach(first, 0x9_0100, 8, READ, QP), None);
    assert_eq!(own.windows.invalidate(&owner, first, PD), BAD);
    // zero-based; its peer invalidates it, and the peer of another queue pair cannot
    let second = next(first);
    let zero = to(window, second, region, READ | IBV_ACCESS_ZERO_BASED);
    own.bind(&zero).unwrap();
    assert_eq!(own.reach(second, 8, 8, READ, QP), Some(0x5_0108));
    let stranger = own.windows.invalidate_remotely(&owner, second, QP + 1);
    assert_eq!(stranger, Err(Errno(libc::EINVAL)));
    assert!(own.reach(second, 8, 8, READ, QP).is_some());
    own.windows.invalidate_remotely(&owner, second, QP).unwrap();
    assert_eq!(own.reach(second, 8, 8, READ, QP), None);
    // destroyed with its queue pair
    own.bind(&to(window, first, region, READ)).unwrap();
    own.windows.release(&owner, QP + 1);
    assert!(own.reach(first, 0x9_0100, 8, READ, QP).is_some());
    own.windows.release(&owner, QP);
    assert_eq!(own.reach(first, 0x9_0100, 8, READ, QP), None);
    assert_eq!(
        own.windows.unless_bound(&own.owner(), region, || ()),
        Ok(())
    );
}

#[test]
fn what_cannot_be_bound() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    let unbindable = own.region(IBV_ACCESS_LOCAL_WRITE);
    let read_only = own.region(IBV_ACCESS_MW_BIND);
    let based = own.region(BINDABLE | IBV_ACCESS_ZERO_BASED);
    for kind in [Kind::One, Kind::TwoB] {
        let window = own.window(kind);
        let good = to(window, next(window), region, READ);
        let wrong = [
            Bind {
                region: Key(region.0 ^ 1),
                ..good
            },
            Bind {
                region: unbindable,
                ..good
            },
            Bind {
                region: based,
                addr: 0,
                ..good
            },
            Bind {
                region: read_only,
                access: WRITE,
                ..good
            },
            Bind {
                key: region,
                ..good
            },
            Bind {
                window: region.index() as u32,
                ..good
            },
            Bind {
                addr: 0x8_ffff,
                ..good
            },
            Bind {
                addr: 0x9_0fff,
                ..good
            },
            Bind {
                len: 0x1000,
                ..good
            },
            Bind {
                len: u64::MAX,
                ..good
            },
            Bind {
                access: IBV_ACCESS_ON_DEMAND,
                ..good
            },
        ];
        for bind in wrong {
            assert_eq!(own.bind(&bind), BAD, "{bind:?}");
        }
        let elsewhere = own.windows.bind(&own.owner(), &good, QP, PD + 1);
        assert_eq!(elsewhere, BAD);
        let reads = Bind {
            region: read_only,
            ..good
        };
        assert_eq!(own.bind(&reads), Ok(Progress::Done));
    }
    let two = own.window(Kind::TwoB);
    let nothing = Bind {
        len: 0,
        ..to(two, next(two), region, READ)
    };
    assert_eq!(own.bind(&nothing), BAD);
}

#[test]
fn a_used_key_delays_what_replaces_it() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    let window = own.window(Kind::One);
    let (first, second) = (next(window), next(next(window)));
    own.bind(&to(window, first, region, READ)).unwrap();
    let word = announce::AT + announce::STRIDE * 3 + announce::HAZARDS;
    let map = &own.segment.map;
    map.u64(header::VISITORS).store(1 << 3, Ordering::SeqCst);
    map.u64(word)
        .store(u64::from(first.0) | 1 << 32, Ordering::SeqCst);
    let again = to(window, second, region, READ);
    for _ in 0..3 {
        assert_eq!(own.bind(&again), Ok(Progress::Used));
        assert_eq!(own.reach(first, 0x9_0100, 8, READ, QP), None);
        assert_eq!(own.reach(second, 0x9_0100, 8, READ, QP), None);
    }
    // the memory of the region is still reached, and no other region's
    let unused = own.region(BINDABLE);
    let end = |region| own.windows.unless_bound(&own.owner(), region, || ());
    assert_eq!(end(region), Err(Errno(libc::EBUSY)));
    assert_eq!(end(unused), Ok(()));
    map.u64(word).store(0, Ordering::SeqCst);
    assert_eq!(end(region), Ok(()));
    assert_eq!(own.bind(&again), Ok(Progress::Done));
    assert!(own.reach(second, 0x9_0100, 8, READ, QP).is_some());
    // bind does not wait for a sender that has ended
    map.u64(word)
        .store(u64::from(second.0) | 1 << 32, Ordering::SeqCst);
    let owner = Owner {
        lives: &|_| false,
        ..own.owner()
    };
    own.windows.free(&owner, window.index() as u32).unwrap();
}

/// A binding that waits for the earlier one is tried again while the window is freed.
#[test]
fn a_window_that_is_being_freed_is_not_bound() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    let window = own.window(Kind::One);
    let (first, second) = (next(window), next(next(window)));
    own.bind(&to(window, first, region, READ)).unwrap();
    let word = announce::AT + announce::STRIDE * 3 + announce::HAZARDS;
    let map = &own.segment.map;
    map.u64(header::VISITORS).store(1 << 3, Ordering::SeqCst);
    map.u64(word)
        .store(u64::from(first.0) | 1 << 32, Ordering::SeqCst);
    let again = to(window, second, region, READ);
    let bound = std::cell::Cell::new(None);
    let owner = Owner {
        // called by `free`, without its lock: the initiator ends
        lives: &|_| {
            map.u64(word).store(0, Ordering::SeqCst);
            bound.set(Some(own.bind(&again)));
            false
        },
        ..own.owner()
    };
    own.windows.free(&owner, window.index() as u32).unwrap();
    assert_eq!(bound.take(), Some(BAD));
    assert!(own.reach(second, 0x9_0100, 8, READ, QP).is_none());
    own.windows
        .unless_bound(&own.owner(), region, || ())
        .expect("nothing is bound");
}

/// An initiator is in the middle of an access through a window that ends with its queue pair.
#[test]
fn the_end_of_a_region_waits_for_an_access_through_a_former_window() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    let window = own.window(Kind::TwoB);
    let key = next(window);
    own.bind(&to(window, key, region, READ)).unwrap();
    let word = announce::AT + announce::STRIDE * 3 + announce::HAZARDS;
    let map = &own.segment.map;
    map.u64(header::VISITORS).store(1 << 3, Ordering::SeqCst);
    map.u64(word)
        .store(u64::from(key.0) | 1 << 32, Ordering::SeqCst);
    own.windows.release(&own.owner(), QP);
    let end = |owner: &Owner<'_>| own.windows.unless_bound(owner, region, || ());
    assert_eq!(end(&own.owner()), Err(Errno(libc::EBUSY)));
    let asked = std::cell::Cell::new(0);
    let owner = Owner {
        // the access ends while the owner waits
        lives: &|_| {
            asked.set(asked.get() + 1);
            if asked.get() == 3 {
                map.u64(word).store(0, Ordering::SeqCst);
            }
            true
        },
        ..own.owner()
    };
    own.windows.await_former(&owner, region).unwrap();
    assert_eq!(asked.get(), 3);
    assert_eq!(end(&own.owner()), Ok(()));
}

/// The request that invalidates a window waits while the region is deregistered.
#[test]
fn the_end_of_a_region_leaves_a_request_that_waits_for_the_former_window() {
    let own = Fixture::new();
    let region = own.region(BINDABLE);
    let window = own.window(Kind::TwoB);
    let key = next(window);
    own.bind(&to(window, key, region, READ)).unwrap();
    let word = announce::AT + announce::STRIDE * 3 + announce::HAZARDS;
    let map = &own.segment.map;
    map.u64(header::VISITORS).store(1 << 3, Ordering::SeqCst);
    map.u64(word)
        .store(u64::from(key.0) | 1 << 32, Ordering::SeqCst);
    let owner = own.owner();
    let invalidate = || own.windows.invalidate(&owner, key, PD);
    assert_eq!(invalidate(), Ok(Progress::Used));
    map.u64(word).store(0, Ordering::SeqCst);
    own.windows.await_former(&owner, region).unwrap();
    own.windows.unless_bound(&owner, region, || ()).unwrap();
    assert_eq!(invalidate(), Ok(Progress::Done));
    assert_eq!(invalidate(), BAD);
}
