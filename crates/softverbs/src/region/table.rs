//! The owner's side: registering, looking up local keys, deregistering.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rdma_core_sys::{IBV_ACCESS_LOCAL_WRITE, ibv_sge};

use super::Range;
use crate::segment::OwnSegment;
use crate::segment::layout::{self, MAX_REGIONS, announce, header, region};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::pause;
use crate::sys::{Errno, Res};

/// A 32-bit key: an index of 20 bits, and a generation that differs between two regions of one
/// index. The low 8 bits belong to the generation, as a window's owner may choose those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(pub(crate) u32);

impl Key {
    fn new(index: u32, generation: u32) -> Self {
        Self((generation & 0xf00) << 20 | index << 8 | generation & 0xff)
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        (self.0 >> 8) as usize & (MAX_REGIONS - 1)
    }
}

/// One region as the owner knows it.
#[derive(Debug, Default)]
struct Entry {
    key: AtomicU32,
    access: AtomicU32,
    pd: AtomicU32,
    iova: AtomicU64,
    len: AtomicU64,
    addr: AtomicU64,
}

/// A region as it was registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Description {
    pub(crate) access: u32,
    pub(crate) pd: u32,
    pub(crate) range: Range,
}

const CHUNK: usize = if cfg!(all(test, loom)) { 64 } else { 1024 };

/// The regions of this process.
#[derive(Debug)]
pub(crate) struct Regions {
    chunks: Box<[OnceLock<Box<[Entry]>>]>,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    /// Indices that were used, the longest unused first, with their next generation.
    used: std::collections::VecDeque<(u32, u32)>,
    next: u32,
}

/// How many indices are out of use before one of them is used again.
const LATE: usize = if cfg!(all(test, loom)) { 1 } else { 4096 };

/// How long a deregistration waits for initiators that use the key.
const HAZARD_PATIENCE: Duration = Duration::from_secs(5);

impl Regions {
    pub(crate) fn new() -> Self {
        Self {
            chunks: (0..MAX_REGIONS / CHUNK).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(Free {
                used: std::collections::VecDeque::new(),
                // Index 0 stays unused: a key of 0 is nobody's.
                next: 1,
            }),
        }
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn entry(&self, index: usize) -> Option<&Entry> {
        self.chunks[index / CHUNK]
            .get()
            .map(|chunk| &chunk[index % CHUNK])
    }

    /// Makes memory known to peers.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn register(
        &self,
        segment: &OwnSegment,
        pd: u32,
        range: Range,
        access: u32,
    ) -> Res<Key> {
        let Range { addr, len, iova } = range;
        let (index, generation) = {
            let mut free = self.free();
            // Keys come back late, so that a stale one is recognised for long.
            if free.next < MAX_REGIONS as u32 && free.used.len() < LATE {
                let index = free.next;
                segment.back(region::AT + region::STRIDE * index as usize, region::STRIDE)?;
                free.next += 1;
                (index, 1)
            } else {
                free.used.pop_front().ok_or(Errno(libc::ENOMEM))?
            }
        };
        let key = Key::new(index, generation);
        let chunk = self.chunks[index as usize / CHUNK]
            .get_or_init(|| (0..CHUNK).map(|_| Entry::default()).collect());
        let entry = &chunk[index as usize % CHUNK];
        entry.access.store(access, Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        entry.iova.store(iova, Ordering::Relaxed);
        entry.len.store(len, Ordering::Relaxed);
        entry.addr.store(addr, Ordering::Relaxed);
        entry.key.store(key.0, Ordering::Release);
        let at = region::AT + region::STRIDE * index as usize;
        let map = &segment.map;
        map.u32(at + region::ACCESS)
            .store(access, Ordering::Relaxed);
        map.u32(at + region::PD).store(pd, Ordering::Relaxed);
        map.u64(at + region::IOVA).store(iova, Ordering::Relaxed);
        map.u64(at + region::LEN).store(len, Ordering::Relaxed);
        map.u64(at + region::ADDR).store(addr, Ordering::Relaxed);
        map.u32(at + region::KEY).store(key.0, Ordering::Release);
        Ok(key)
    }

    /// What a live key stands for.
    pub(crate) fn describe(&self, key: Key) -> Option<Description> {
        let entry = self.entry(key.index())?;
        if entry.key.load(Ordering::Acquire) != key.0 || key.0 == 0 {
            return None;
        }
        Some(Description {
            access: entry.access.load(Ordering::Relaxed),
            pd: entry.pd.load(Ordering::Relaxed),
            range: Range {
                addr: entry.addr.load(Ordering::Relaxed),
                len: entry.len.load(Ordering::Relaxed),
                iova: entry.iova.load(Ordering::Relaxed),
            },
        })
    }

    /// The address behind a piece of a local region, or `None` where the key does not cover it.
    /// A piece of length 0 needs no key.
    #[inline]
    pub(crate) fn local(&self, sge: &ibv_sge, pd: u32, write: bool) -> Option<u64> {
        if sge.length == 0 {
            return Some(sge.addr);
        }
        let entry = self.entry(Key(sge.lkey).index())?;
        if entry.key.load(Ordering::Acquire) != sge.lkey || sge.lkey == 0 {
            return None;
        }
        let access = entry.access.load(Ordering::Relaxed);
        let start = entry.iova.load(Ordering::Relaxed);
        let len = entry.len.load(Ordering::Relaxed);
        let addr = entry.addr.load(Ordering::Relaxed);
        let offset = sge.addr.wrapping_sub(start);
        let inside = offset <= len && u64::from(sge.length) <= len - offset;
        let same_pd = entry.pd.load(Ordering::Relaxed) == pd;
        fence(Ordering::Acquire);
        let unchanged = entry.key.load(Ordering::Relaxed) == sge.lkey;
        let writable = !write || access & IBV_ACCESS_LOCAL_WRITE != 0;
        (inside && same_pd && writable && unchanged).then(|| addr.wrapping_add(offset))
    }

    /// Ends a key, and waits until no initiator uses it.
    ///
    /// # Errors
    /// `EBUSY` where one still does after some seconds: the key is dead, and the call can be
    /// repeated.
    pub(crate) fn deregister(
        &self,
        segment: &OwnSegment,
        key: Key,
        lives: impl Fn(u32) -> bool,
    ) -> Res<()> {
        let Some(entry) = self.entry(key.index()) else {
            return Err(Errno(libc::EINVAL));
        };
        let at = region::AT + region::STRIDE * key.index();
        entry.key.store(0, Ordering::Relaxed);
        segment
            .map
            .u32(at + region::KEY)
            .store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let begin = Instant::now();
        let mut round = 0u32;
        while let Some((visitor, word)) = hazard(segment, key) {
            round += 1;
            if round > 100 {
                if !lives(visitor) {
                    segment.map.u64(word).store(0, Ordering::Relaxed);
                } else if begin.elapsed() > HAZARD_PATIENCE {
                    return Err(Errno(libc::EBUSY));
                }
                std::thread::sleep(Duration::from_micros(50));
            } else {
                pause(round / 2);
            }
        }
        // What initiators did under their hazards is done.
        fence(Ordering::Acquire);
        let generation = key.0 >> 20 & 0xf00 | key.0 & 0xff;
        let next = if generation == 0xfff {
            1
        } else {
            generation + 1
        };
        self.free().used.push_back((key.index() as u32, next));
        Ok(())
    }
}

/// A process that uses `key` now, and where in the segment it says so.
fn hazard(segment: &OwnSegment, key: Key) -> Option<(u32, usize)> {
    let wanted = u64::from(key.0) | 1 << 32;
    (0..layout::MAX_PROCESSES / 64).find_map(|word| {
        let mut visitors = segment
            .map
            .u64(header::VISITORS + 8 * word)
            .load(Ordering::Relaxed);
        while visitors != 0 {
            let slot = word * 64 + visitors.trailing_zeros() as usize;
            visitors &= visitors - 1;
            let at = announce::AT + announce::STRIDE * slot + announce::HAZARDS;
            let found = (0..announce::HAZARD_COUNT)
                .map(|i| at + 8 * i)
                .find(|&at| segment.map.u64(at).load(Ordering::Relaxed) == wanted);
            if let Some(at) = found {
                return Some((slot as u32, at));
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(addr: u64, length: u32, key: Key) -> ibv_sge {
        ibv_sge {
            addr,
            length,
            lkey: key.0,
        }
    }

    fn at(addr: u64, len: u64, iova: u64) -> Range {
        Range { addr, len, iova }
    }

    #[test]
    fn keys_are_bounded_and_die() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new();
        let write = IBV_ACCESS_LOCAL_WRITE;
        let key = regions
            .register(&segment, 7, at(0x5000, 0x100, 0x9000), write)
            .unwrap();
        assert_ne!(key.0, 0);
        assert_eq!(
            regions.local(&sge(0x9010, 0xf0, key), 7, true),
            Some(0x5010)
        );
        assert_eq!(regions.local(&sge(0x9010, 0xf1, key), 7, true), None);
        assert_eq!(regions.local(&sge(0x8fff, 2, key), 7, true), None);
        assert_eq!(regions.local(&sge(u64::MAX, 2, key), 7, true), None);
        assert_eq!(regions.local(&sge(0x9000, 1, key), 8, true), None);
        assert_eq!(
            regions.local(&sge(0x9000, 1, Key(key.0 ^ 1)), 7, true),
            None
        );
        assert_eq!(regions.local(&sge(0, 0, Key(0)), 7, true), Some(0));
        assert_eq!(regions.local(&sge(0, 1, Key(0)), 7, true), None);
        regions.deregister(&segment, key, |_| true).unwrap();
        assert_eq!(regions.local(&sge(0x9000, 1, key), 7, false), None);
        let read_only = regions
            .register(&segment, 7, at(0x5000, 0x100, 0), 0)
            .unwrap();
        assert_eq!(regions.local(&sge(0, 1, read_only), 7, true), None);
        assert_eq!(regions.local(&sge(0, 1, read_only), 7, false), Some(0x5000));
    }

    #[test]
    fn keys_differ_for_long() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..20_000 {
            let key = regions.register(&segment, 1, at(0, 1, 0), 0).unwrap();
            assert!(seen.insert(key.0));
            regions.deregister(&segment, key, |_| true).unwrap();
        }
        assert!(regions.free().next <= 4100);
    }

    #[test]
    fn a_dead_visitor_is_not_awaited_and_a_living_one_is() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new();
        let key = regions.register(&segment, 1, at(0, 1, 0), 0).unwrap();
        let visit = |key: Key| {
            segment
                .map
                .u64(header::VISITORS)
                .store(1 << 3, Ordering::SeqCst);
            segment
                .map
                .u64(announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8)
                .store(u64::from(key.0) | 1 << 32, Ordering::SeqCst);
        };
        visit(key);
        regions.deregister(&segment, key, |slot| slot != 3).unwrap();
        let key = regions.register(&segment, 1, at(0, 1, 0), 0).unwrap();
        visit(key);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| regions.deregister(&segment, key, |_| true));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!waiting.is_finished());
            segment
                .map
                .u64(announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8)
                .store(0, Ordering::SeqCst);
            waiting.join().unwrap().unwrap();
        });
    }
}
