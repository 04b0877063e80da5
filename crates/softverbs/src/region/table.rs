//! The owner's side: registration, look-up of local keys, deregistration.

use std::sync::{Mutex, OnceLock, PoisonError};

use rdma_core_sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_ON_DEMAND, ibv_sge};

use super::locked::Locked;
use super::{Range, null};
use crate::dm::Direct;
use crate::environment;
use crate::hazard::{self, Visitor};
use crate::key::Key;
use crate::segment::OwnSegment;
use crate::segment::layout::{MAX_REGIONS, region};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sys::{Errno, Grow, Res, list};

/// The owner's private entry of a region.
#[derive(Debug, Default)]
struct Entry {
    key: AtomicU32,
    access: AtomicU32,
    pd: AtomicU32,
    /// Version count: a reader compares it before and after to detect a concurrent change.
    version: AtomicU32,
    iova: AtomicU64,
    len: AtomicU64,
    addr: AtomicU64,
    /// Stamp of the device buffer that contains the region, or 0, and the offset in that buffer.
    stamp: AtomicU64,
    offset: AtomicU64,
    /// The key of this index, valid or invalid, until the index is released.
    holder: AtomicU32,
    /// The key of a null region; `key` is 0 then.
    null: AtomicU32,
    /// The key, from the start of a change of its region until the change is done. During that time
    /// the key is invalid and the other fields are unchanged.
    changing: AtomicU32,
    /// Pages that advice has made present since the key was assigned.
    prefetched: AtomicU64,
    /// Pages that count as locked.
    locked: AtomicU64,
    /// 1: receives may have been posted with the key since it was assigned.
    received: AtomicU32,
}

impl Entry {
    /// Writes all fields except the key, which is 0 during the change.
    fn write(&self, what: &Description) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.access.store(what.access, Ordering::Relaxed);
        self.pd.store(what.pd, Ordering::Relaxed);
        self.iova.store(what.range.iova, Ordering::Relaxed);
        self.len.store(what.range.len, Ordering::Relaxed);
        self.addr.store(what.range.addr, Ordering::Relaxed);
        self.stamp.store(what.direct.stamp, Ordering::Relaxed);
        self.offset.store(what.direct.offset, Ordering::Relaxed);
    }

    /// Reads all fields except the key. The caller checks that they are consistent.
    fn read(&self) -> Description {
        Description {
            access: self.access.load(Ordering::Relaxed),
            pd: self.pd.load(Ordering::Relaxed),
            range: Range {
                addr: self.addr.load(Ordering::Relaxed),
                len: self.len.load(Ordering::Relaxed),
                iova: self.iova.load(Ordering::Relaxed),
            },
            direct: Direct {
                stamp: self.stamp.load(Ordering::Relaxed),
                offset: self.offset.load(Ordering::Relaxed),
            },
            file: 0,
        }
    }
}

/// The parameters of a registered region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Description {
    pub(crate) access: u32,
    pub(crate) pd: u32,
    pub(crate) range: Range,
    pub(crate) direct: Direct,
    /// Descriptor of the file that a persistent flush writes back, + 1, or 0.
    pub(crate) file: u32,
}

const CHUNK: usize = if cfg!(all(test, loom)) { 64 } else { 1024 };

/// The regions of this process.
#[derive(Debug)]
pub(crate) struct Regions {
    chunks: Box<[OnceLock<Box<[Entry]>>]>,
    /// Count of invalidated keys. A cached look-up is valid only while the count is unchanged.
    pub(super) changes: AtomicU64,
    free: Mutex<Free>,
    locked: Locked,
    /// Keys are reused at once, as in some drivers (`SOFTVERBS_REUSE_KEYS=1`): for tests of
    /// programs that must not use stale keys.
    reuse: bool,
}

#[derive(Debug)]
struct Free {
    /// Released indices, the one released first in front, with their next generation.
    used: std::collections::VecDeque<(u32, u32)>,
    next: u32,
}

/// Number of released indices before one of them is reused.
const LATE: usize = if cfg!(all(test, loom)) { 1 } else { 4096 };

impl Regions {
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new() -> Res<Self> {
        Ok(Self {
            chunks: list(MAX_REGIONS / CHUNK, |_| OnceLock::new())?,
            changes: AtomicU64::new(1),
            free: Mutex::new(Free {
                used: std::collections::VecDeque::new(),
                // Index 0 stays unused: the key 0 is invalid.
                next: 1,
            }),
            reuse: environment::REUSE_KEYS.is_on(),
            locked: Locked::new(),
        })
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

    /// Registers ordinary memory and publishes it to peers.
    ///
    /// # Errors
    /// `ENOMEM`.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn register(
        &self,
        segment: &OwnSegment,
        pd: u32,
        range: Range,
        access: u32,
    ) -> Res<Key> {
        let direct = Direct::default();
        self.add(
            segment,
            &Description {
                access,
                pd,
                range,
                direct,
                file: 0,
            },
        )
    }

    /// Registers memory and publishes it to peers.
    ///
    /// # Errors
    /// `ENOMEM`: no memory or index is left, or the limit of locked memory is exceeded, if that is
    /// counted.
    pub(crate) fn add(&self, segment: &OwnSegment, what: &Description) -> Res<Key> {
        let pages = self.locked.charge(what)?;
        let key = self
            .take_key(segment)
            .inspect_err(|_| self.locked.give_back(pages))?;
        let entry = self.made_entry(key.index());
        entry.prefetched.store(0, Ordering::Relaxed);
        entry.locked.store(pages, Ordering::Relaxed);
        entry.received.store(0, Ordering::Relaxed);
        self.publish(segment, key, what);
        Ok(key)
    }

    /// Counts pages of a region that advice has made present.
    pub(super) fn count_prefetched(&self, key: Key, pages: u64) {
        if let Some(entry) = self.entry(key.index()) {
            entry.prefetched.fetch_add(pages, Ordering::Relaxed);
        }
    }

    /// The number of pages that [`Self::count_prefetched`] has counted for a registered region.
    pub(crate) fn prefetched(&self, key: Key) -> u64 {
        let entry = self.entry(key.index());
        entry.map_or(0, |entry| entry.prefetched.load(Ordering::Relaxed))
    }

    /// The stamp of the device buffer that contains or contained the key's region, or 0.
    pub(crate) fn stamp_of(&self, key: Key) -> u64 {
        let entry = self.entry(key.index());
        entry.map_or(0, |entry| entry.stamp.load(Ordering::Relaxed))
    }

    /// Registers a null region: its key is valid only for local sges, at any address.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn register_null(&self, segment: &OwnSegment, pd: u32) -> Res<Key> {
        null::prepare()?;
        let key = self.take_key(segment)?;
        let entry = self.made_entry(key.index());
        entry.pd.store(pd, Ordering::Relaxed);
        entry.stamp.store(0, Ordering::Relaxed);
        entry.received.store(0, Ordering::Relaxed);
        entry.holder.store(key.0, Ordering::Relaxed);
        entry.null.store(key.0, Ordering::Release);
        // Senders check whether the key is valid if a receive uses it; the entry grants access to
        // no memory.
        let (map, at) = (&segment.map, shared_at(key.index()));
        for part in [region::IOVA, region::LEN, region::ADDR] {
            map.u64(at + part).store(0, Ordering::Relaxed);
        }
        map.u32(at + region::ACCESS).store(0, Ordering::Relaxed);
        map.u32(at + region::KEY).store(key.0, Ordering::Release);
        Ok(key)
    }

    pub(crate) fn is_null(&self, key: Key) -> bool {
        let entry = self.entry(key.index());
        key.0 != 0 && entry.is_some_and(|entry| entry.null.load(Ordering::Acquire) == key.0)
    }

    /// Assigns an unused key.
    fn take_key(&self, segment: &OwnSegment) -> Res<Key> {
        let mut free = self.free();
        // An index is reused late, so that a stale key is detected for a long time.
        let late = if self.reuse { 1 } else { LATE };
        let (index, generation) = if free.next < MAX_REGIONS as u32 && free.used.len() < late {
            let index = free.next;
            segment.back(shared_at(index as usize), region::STRIDE)?;
            self.make_entry(index as usize)?;
            // Reserves the space now, so that releasing the index needs no memory.
            let out = index as usize + 1 - free.used.len();
            free.used.make_room(out)?;
            free.next += 1;
            (index, 1)
        } else {
            free.used.pop_front().ok_or(Errno(libc::ENOMEM))?
        };
        Ok(Key::new(index, generation))
    }

    /// Assigns a key for a memory window. The user may choose its low 8 bits: no region has had any
    /// of the resulting keys.
    pub(crate) fn take_window_key(&self, segment: &OwnSegment) -> Res<Key> {
        let key = self.take_key(segment)?;
        Ok(Key(key.with_next_upper() | 1))
    }

    /// Releases the index of a memory window's invalid key. The next keys of that index differ from
    /// all keys that the window can have had.
    pub(crate) fn give_window_key(&self, key: Key) {
        let next = key.with_next_upper() >> 20 & 0xf00 | 1;
        self.free().used.push_back((key.index() as u32, next));
    }

    /// Releases the index of an invalid key.
    fn give_key(&self, key: Key) {
        let generation = key.0 >> 20 & 0xf00 | key.0 & 0xff;
        if self.reuse {
            self.free()
                .used
                .push_front((key.index() as u32, generation));
            return;
        }
        let next = if generation == 0xfff {
            1
        } else {
            generation + 1
        };
        self.free().used.push_back((key.index() as u32, next));
    }

    /// The caller holds the lock of `free`.
    fn make_entry(&self, index: usize) -> Res<()> {
        let chunk = &self.chunks[index / CHUNK];
        if chunk.get().is_none() {
            let _ = chunk.set(list(CHUNK, |_| Entry::default())?);
        }
        Ok(())
    }

    /// The entry of an assigned index.
    fn made_entry(&self, index: usize) -> &Entry {
        self.entry(index).expect("made when its index was taken")
    }

    /// Publishes a region under a key that is invalid so far.
    fn publish(&self, segment: &OwnSegment, key: Key, what: &Description) {
        let entry = self.made_entry(key.index());
        entry.write(what);
        entry.holder.store(key.0, Ordering::Relaxed);
        entry.changing.store(0, Ordering::Relaxed);
        entry.key.store(key.0, Ordering::Release);
        Self::show(segment, key, what, 0);
    }

    /// Publishes a memory window to peers, under a key that is invalid so far; the private table
    /// has no entry for it. `qp` is the number of the only queue pair that may use the window, or
    /// 0.
    pub(crate) fn publish_window(
        &self,
        segment: &OwnSegment,
        key: Key,
        what: &Description,
        qp: u32,
    ) {
        Self::show(segment, key, what, qp);
    }

    fn show(segment: &OwnSegment, key: Key, what: &Description, qp: u32) {
        let (map, at) = (&segment.map, shared_at(key.index()));
        map.u32(at + region::QP).store(qp, Ordering::Relaxed);
        map.u32(at + region::ACCESS)
            .store(what.access, Ordering::Relaxed);
        map.u32(at + region::PD).store(what.pd, Ordering::Relaxed);
        let Range { addr, len, iova } = what.range;
        map.u64(at + region::IOVA).store(iova, Ordering::Relaxed);
        map.u64(at + region::LEN).store(len, Ordering::Relaxed);
        map.u64(at + region::ADDR).store(addr, Ordering::Relaxed);
        map.u32(at + region::FILE)
            .store(what.file, Ordering::Relaxed);
        let Direct { stamp, offset } = what.direct;
        map.u64(at + region::BUFFER).store(stamp, Ordering::Relaxed);
        map.u64(at + region::OFFSET)
            .store(offset, Ordering::Relaxed);
        map.u32(at + region::KEY).store(key.0, Ordering::Release);
    }

    /// Changes a region under the same key, after all initiators have stopped using the old one,
    /// and `await_own` has waited for the owner's threads.
    ///
    /// # Errors
    /// `EBUSY`: an initiator still uses the key after 5 seconds, or the error of `await_own`; the
    /// key is invalid then, and the caller can repeat the call. `ENOMEM`: the limit of locked
    /// memory is exceeded; the old memory counts until the new memory does.
    pub(crate) fn change(
        &self,
        segment: &OwnSegment,
        key: Key,
        to: &Description,
        lives: impl Fn(Visitor) -> bool,
        await_own: impl FnOnce() -> Res<()>,
    ) -> Res<()> {
        self.kill(segment, key);
        let entry = self.made_entry(key.index());
        // a change of access rights alone does not change the locked pages
        let was = entry.read();
        let moves = was.range != to.range || (was.access ^ to.access) & IBV_ACCESS_ON_DEMAND != 0;
        let pages = if moves { self.locked.charge(to)? } else { 0 };
        entry.changing.store(key.0, Ordering::Relaxed);
        await_own()
            .and_then(|()| hazard::wait(segment, key, lives))
            .inspect_err(|_| self.locked.give_back(pages))?;
        if moves {
            self.locked
                .give_back(entry.locked.swap(pages, Ordering::Relaxed));
        }
        self.publish(segment, key, to);
        Ok(())
    }

    /// Waits until no initiator uses an invalid key.
    ///
    /// # Errors
    /// `EBUSY`: an initiator still does after 5 seconds.
    pub(crate) fn await_unused(
        &self,
        segment: &OwnSegment,
        key: Key,
        lives: impl Fn(Visitor) -> bool,
    ) -> Res<()> {
        hazard::wait(segment, key, lives)
    }

    /// Whether a living process may still use an invalid key.
    pub(crate) fn in_use(
        &self,
        segment: &OwnSegment,
        key: Key,
        lives: impl Fn(Visitor) -> bool,
    ) -> bool {
        hazard::is_used(segment, key, lives)
    }

    /// Makes a key invalid. Initiators that have checked the key before may still be using it.
    pub(crate) fn kill(&self, segment: &OwnSegment, key: Key) {
        // A key that was deregistered before may have left its index to another key.
        let clear = |word: &AtomicU32| {
            word.load(Ordering::Relaxed) == key.0
                && word
                    .compare_exchange(key.0, 0, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
        };
        let shared = segment.map.u32(shared_at(key.index()) + region::KEY);
        let entry = self.entry(key.index());
        let cleared = entry.is_some_and(|entry| clear(&entry.key));
        self.changes.fetch_add(1, Ordering::Release);
        if cleared {
            // only one caller has cleared the entry, and the index is not released before
            shared.store(0, Ordering::Relaxed);
        } else {
            // a null region, a memory window, or a key that is invalid already
            if let Some(entry) = entry {
                clear(&entry.null);
            }
            clear(shared);
        }
        fence(Ordering::SeqCst);
    }

    /// The description of a valid key's region.
    pub(crate) fn describe(&self, key: Key) -> Option<Description> {
        let entry = self.entry(key.index())?;
        let version = entry.version.load(Ordering::Acquire);
        if entry.key.load(Ordering::Acquire) != key.0 || key.0 == 0 {
            return None;
        }
        let found = entry.read();
        fence(Ordering::Acquire);
        (entry.version.load(Ordering::Relaxed) == version).then_some(found)
    }

    /// The description of a region whose change failed with `EBUSY`, as it was before that change.
    /// The owner must not run two calls for one region at the same time.
    pub(crate) fn describe_unchanged(&self, key: Key) -> Option<Description> {
        let entry = self.entry(key.index())?;
        let same = key.0 != 0
            && entry.holder.load(Ordering::Relaxed) == key.0
            && entry.changing.load(Ordering::Relaxed) == key.0;
        same.then(|| entry.read())
    }

    /// The address of an sge in a local region, or `None` if the lkey does not cover the sge. An
    /// sge of length 0 needs no lkey.
    #[inline]
    pub(crate) fn local(&self, sge: &ibv_sge, pd: u32, write: bool) -> Option<u64> {
        if sge.length == 0 {
            return Some(sge.addr);
        }
        let entry = self.entry(Key(sge.lkey).index())?;
        let version = entry.version.load(Ordering::Acquire);
        if entry.key.load(Ordering::Acquire) != sge.lkey || sge.lkey == 0 {
            return null_sge(entry, sge, pd, write);
        }
        let access = entry.access.load(Ordering::Relaxed);
        let start = entry.iova.load(Ordering::Relaxed);
        let len = entry.len.load(Ordering::Relaxed);
        let addr = entry.addr.load(Ordering::Relaxed);
        let offset = sge.addr.wrapping_sub(start);
        let inside = offset <= len && u64::from(sge.length) <= len - offset;
        let same_pd = entry.pd.load(Ordering::Relaxed) == pd;
        fence(Ordering::Acquire);
        let unchanged = entry.version.load(Ordering::Relaxed) == version;
        let writable = !write || access & IBV_ACCESS_LOCAL_WRITE != 0;
        (inside && same_pd && writable && unchanged).then(|| addr.wrapping_add(offset))
    }

    /// As [`Self::local`], for the memory of a receive that is posted: [`Self::is_received`] is
    /// true for its key from then on.
    #[inline]
    pub(crate) fn local_of_receive(&self, sge: &ibv_sge, pd: u32) -> Option<u64> {
        let found = self.local(sge, pd, true)?;
        self.mark_received(sge);
        Some(found)
    }

    #[inline]
    pub(super) fn mark_received(&self, sge: &ibv_sge) {
        if let Some(entry) = self.entry(Key(sge.lkey).index())
            && entry.received.load(Ordering::Relaxed) == 0
        {
            entry.received.store(1, Ordering::Relaxed);
        }
    }

    /// Whether receives may have been posted with a key that has not been released.
    pub(crate) fn is_received(&self, key: Key) -> bool {
        let entry = self.entry(key.index());
        entry.is_some_and(|entry| entry.received.load(Ordering::Relaxed) != 0)
    }

    /// Makes a key invalid, waits until no initiator uses it, and releases its index.
    ///
    /// # Errors
    /// `EBUSY`: an initiator still does after 5 seconds; the key is invalid, and the caller can
    /// repeat the call. `EINVAL`: the key has been deregistered before.
    pub(crate) fn deregister(
        &self,
        segment: &OwnSegment,
        key: Key,
        lives: impl Fn(Visitor) -> bool,
    ) -> Res<()> {
        self.kill(segment, key);
        hazard::wait(segment, key, lives)?;
        self.release(key)
    }

    /// As [`Self::deregister`], without a wait.
    ///
    /// # Errors
    /// As [`Self::deregister`]. `EBUSY`: at the time of the call.
    pub(crate) fn deregister_now(
        &self,
        segment: &OwnSegment,
        key: Key,
        lives: impl Fn(Visitor) -> bool,
    ) -> Res<()> {
        self.kill(segment, key);
        if hazard::is_used(segment, key, lives) {
            return Err(Errno(libc::EBUSY));
        }
        self.release(key)
    }

    /// Releases the index of a key that is invalid and not used.
    fn release(&self, key: Key) -> Res<()> {
        // Either object of an imported region may deregister it, but only once.
        let holder = self.entry(key.index()).map(|entry| &entry.holder);
        let mine = holder.is_some_and(|holder| {
            holder
                .compare_exchange(key.0, 0, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        });
        if !mine {
            return Err(Errno(libc::EINVAL));
        }
        if let Some(entry) = self.entry(key.index()) {
            // the next key of this index may be that of a region without pages
            self.locked
                .give_back(entry.locked.swap(0, Ordering::Relaxed));
        }
        self.give_key(key);
        Ok(())
    }
}

/// Offset of the entry of this index in a segment.
fn shared_at(index: usize) -> usize {
    region::AT + region::STRIDE * index
}

#[cold]
fn null_sge(entry: &Entry, sge: &ibv_sge, pd: u32, write: bool) -> Option<u64> {
    let good = sge.lkey != 0
        && entry.null.load(Ordering::Acquire) == sge.lkey
        && entry.pd.load(Ordering::Relaxed) == pd;
    good.then(|| null::address(write, sge.length)).flatten()
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

    /// Of two objects of one region, the second deregisters it after the index has a new region.
    #[test]
    fn a_second_deregistration_leaves_the_next_region_of_the_index() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        let register = || regions.register(&segment, 7, at(0x5000, 0x100, 0x9000), 0);
        let deregister = |key| regions.deregister(&segment, key, |_| true);
        let first = register().unwrap();
        deregister(first).unwrap();
        let others: Vec<_> = (0..LATE).map(|_| register().unwrap()).collect();
        for key in others {
            deregister(key).unwrap();
        }
        let next = register().unwrap();
        assert_eq!(next.index(), first.index());
        assert_ne!(next, first);
        assert_eq!(deregister(first), Err(Errno(libc::EINVAL)));
        assert!(regions.describe(next).is_some(), "another region has ended");
        let shared = segment.map.u32(shared_at(next.index()) + region::KEY);
        assert_eq!(shared.load(Ordering::Relaxed), next.0);
    }

    #[test]
    fn keys_are_bounded_and_die() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
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
        let regions = Regions::new().unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..20_000 {
            let key = regions.register(&segment, 1, at(0, 1, 0), 0).unwrap();
            assert!(seen.insert(key.0));
            regions.deregister(&segment, key, |_| true).unwrap();
        }
        assert!(regions.free().next <= 4100);
    }

    #[test]
    fn a_changed_region_keeps_its_key() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        let write = IBV_ACCESS_LOCAL_WRITE;
        let first = at(0x5000, 0x100, 0x5000);
        let key = regions.register(&segment, 7, first, write).unwrap();
        let to = Description {
            access: 0,
            pd: 8,
            range: at(0x9000, 0x10, 0),
            direct: Direct::default(),
            file: 0,
        };
        regions
            .change(&segment, key, &to, |_| true, || Ok(()))
            .unwrap();
        assert_eq!(regions.local(&sge(0x5000, 1, key), 7, false), None);
        assert_eq!(regions.local(&sge(8, 8, key), 8, false), Some(0x9008));
        assert_eq!(regions.local(&sge(8, 9, key), 8, false), None);
        assert_eq!(regions.local(&sge(8, 8, key), 8, true), None);
    }

    #[test]
    fn readers_of_a_changing_region_see_one_or_the_other() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        // Address and iova differ by the same amount in both regions.
        let [low, high] = [(0x1_0000, 0), (0x11_0000, 0x10_0000)].map(|(addr, iova)| Description {
            access: 0,
            pd: 1,
            range: at(addr, 0x1000, iova),
            direct: Direct::default(),
            file: 0,
        });
        let key = regions.register(&segment, 1, low.range, 0).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for name in [0, 0x10_0000] {
                        if let Some(addr) = regions.local(&sge(name, 8, key), 1, false) {
                            assert_eq!(addr, name + 0x1_0000);
                        }
                    }
                }
            });
            for _ in 0..20_000 {
                regions
                    .change(&segment, key, &high, |_| true, || Ok(()))
                    .unwrap();
                regions
                    .change(&segment, key, &low, |_| true, || Ok(()))
                    .unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_null_region_is_zeros_and_a_sink() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        let key = regions.register_null(&segment, 7).unwrap();
        assert!(regions.describe(key).is_none());
        let map = &segment.map;
        let entry = |part: usize| {
            map.u32(shared_at(key.index()) + part)
                .load(Ordering::Relaxed)
        };
        assert_eq!((entry(region::KEY), entry(region::ACCESS)), (key.0, 0));
        let source = regions
            .local(&sge(u64::MAX - 9, 1 << 30, key), 7, false)
            .unwrap();
        let sink = regions.local(&sge(12345, 1 << 30, key), 7, true).unwrap();
        assert_eq!(regions.local(&sge(0, 8, key), 8, true), None);
        for at in [0usize, 5000, (1 << 30) - 8] {
            // SAFETY: both ranges have that length, and no other thread uses them.
            unsafe {
                let to = std::ptr::without_provenance_mut::<u8>(sink as usize).add(at);
                to.write_bytes(0xee, 8);
                let from = std::ptr::without_provenance::<[u8; 8]>(source as usize).byte_add(at);
                assert_eq!(from.read_unaligned(), [0; 8]);
            }
        }
        regions.deregister(&segment, key, |_| true).unwrap();
        assert_eq!(regions.local(&sge(0, 8, key), 7, true), None);
    }
}
