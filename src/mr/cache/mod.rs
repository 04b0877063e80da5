//! The registration cache: registrations of local buffers, cached for later operations.
//! `docs/registration-cache.md` specifies the structures and the order of events. The cache is
//! independent of verbs and of the kernel: it registers and watches memory through traits.
//!
//! - A hit ([`Cache::find`]) takes no lock, allocates nothing, and writes only to the
//!   registration's entry.
//! - No memory is allocated or freed, and no foreign code is called, under the slow lock.
//! - A registration whose memory changes ([`Index::kill`]) gets no new references, and is
//!   deregistered after its last reference is released.

#![allow(unsafe_code, reason = "registers memory that the caller keeps valid")]

mod drains;
mod entry;
mod slow;
mod tree;

#[cfg(all(test, loom))]
mod models;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use drains::Drains;
use entry::{NONE, Pool, Word};
use slow::Slow;
use tree::{Kind, Tree};

use crate::errno::{FiErrno, Result};
use crate::sync::{AtomicU32, Mutex, MutexGuard};
use crate::verbs::{Lkey, Rkey};

/// Maximum length in bytes of a joined registration without [`Bounds::merge`]; [`TIMES`] the
/// requested length if that is more.
const JOINED: u64 = 1 << 20;
const TIMES: u64 = 8;
/// Maximum number of evictions for one new registration.
const EVICTIONS: usize = 1024;

/// A key of a registration, which the cache stores as a number.
pub(crate) trait Key: Copy + Debug + PartialEq + Send {
    fn of(number: u32) -> Self;
    fn number(self) -> u32;
}

macro_rules! keys {
    ($($key:ty),*) => {$(
        impl Key for $key {
            #[inline]
            fn of(number: u32) -> Self {
                Self::new(number)
            }

            #[inline]
            fn number(self) -> u32 {
                self.get()
            }
        }
    )*};
}

keys!(Lkey, Rkey);

/// Registers memory on behalf of the cache.
pub(crate) trait Registrar: Debug + Send + Sync {
    /// A registration; dropping it deregisters the memory.
    type Mr: Debug + Send;
    /// The key that operations use.
    type Key: Key;

    /// Registers a range of whole pages, and returns the key too. May block and allocate.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// The caller uses the registration only for operations whose callers keep the memory valid.
    unsafe fn register(
        &self,
        start: u64,
        len: u64,
        writable: bool,
    ) -> Result<(Self::Mr, Self::Key)>;
}

/// A registration and its key.
type Made<R> = (<R as Registrar>::Mr, <R as Registrar>::Key);

/// Monitors memory and calls [`Index::kill`] when it changes.
pub(crate) trait Watch: Debug + Send + Sync {
    /// Whether cached registrations of a range are current. Fast path: must not block or allocate.
    fn is_current(&self, start: u64, end: u64) -> bool;

    /// Whether [`Self::is_current`] accepts only ranges as given to [`Self::watch`], not parts of
    /// them.
    fn asks_of_registrations(&self) -> bool;

    /// Whether no notification of a change is being processed.
    fn is_quiet(&self) -> bool;

    /// Adds a watch of a range of whole pages. May block and allocate.
    ///
    /// # Errors
    /// The range cannot be watched.
    fn watch(&self, start: u64, end: u64) -> Result<()>;

    /// Removes one watch of exactly this range.
    fn unwatch(&self, start: u64, end: u64);

    /// Whether all changes of a range are reported. The range is watched and its pages are present.
    fn tells_all(&self, start: u64, end: u64) -> bool;

    /// Whether this process is a forked child of the cache's process; a child must not touch the
    /// cache.
    fn is_forked(&self) -> bool;
}

/// Limits of the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Maximum bytes of all registrations.
    pub(crate) size: u64,
    /// Maximum number of registrations.
    pub(crate) count: usize,
    /// Whether adjacent registrations are merged.
    pub(crate) merge: bool,
}

/// A reference to a registration. It must be released by [`Cache::release`]; otherwise the
/// registration is never deregistered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held<K = Lkey> {
    word: Word,
    start: u64,
    end: u64,
    pub(crate) key: K,
}

/// The result of [`Cache::get`]: the registration that an operation uses.
#[derive(Debug)]
pub(crate) enum Got<M, K = Lkey> {
    /// A cached registration.
    Kept(Held<K>),
    /// A registration for this operation only, and its key.
    Once(M, K),
}

/// The cache's interface for the monitor, independent of the registrar. Thread safe; no call
/// allocates, or blocks except on the slow lock.
pub(crate) trait Index: Sync {
    /// Must be called when the memory of a range changes: afterwards the registrations that overlap
    /// the range get no new references.
    fn kill(&self, start: u64, end: u64);
}

/// The registration cache; see the module. Thread safe.
#[derive(Debug)]
pub(crate) struct Cache<R: Registrar> {
    registrar: R,
    bounds: Bounds,
    /// Base-2 logarithm of the size of a page.
    shift: u32,
    inner: Arc<Inner<R::Mr>>,
    watch: Box<dyn Watch>,
    /// The value of [`Watch::asks_of_registrations`].
    whole: bool,
    drains: Drains,
}

/// The state that the cache shares with the monitor's thread.
#[derive(Debug)]
pub(crate) struct Inner<M> {
    shift: u32,
    tree: Tree,
    pool: Pool<M>,
    /// Number of misses, used as the clock of last use.
    clock: AtomicU32,
    slow: Mutex<Slow>,
    /// Index of the first dead registration without references; the list is linked by
    /// [`entry::Entry::next`].
    zombies: AtomicU32,
}

fn kinds() -> [Kind; 2] {
    [Kind::Read, Kind::Write]
}

impl<M> Inner<M> {
    fn slow(&self) -> MutexGuard<'_, Slow> {
        match self.slow.lock() {
            Ok(slow) => slow,
            // no code under this lock panics, and a panic would leave the state consistent
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Queues a registration for deregistration by [`Cache::drain`].
    #[cold]
    fn queue(&self, index: u32) {
        let Some(entry) = self.pool.get(index) else {
            return;
        };
        let mut first = self.zombies.load(Ordering::Relaxed);
        loop {
            entry.next.store(first, Ordering::Relaxed);
            let (set, read) = (Ordering::Release, Ordering::Relaxed);
            match self.zombies.compare_exchange_weak(first, index, set, read) {
                Ok(_) => return,
                Err(other) => first = other,
            }
        }
    }

    /// Removes a live registration from the tree: it gets no new references. The slow lock is held.
    fn retire(&self, slow: &mut Slow, word: Word) {
        let Some((index, entry)) = word
            .index()
            .and_then(|index| Some((index, self.pool.get(index)?)))
        else {
            return;
        };
        let (start, end) = entry.range();
        let kind = if entry.is_writable() {
            Kind::Write
        } else {
            Kind::Read
        };
        self.tree
            .set(start >> self.shift, end >> self.shift, kind, 0);
        slow.unlink(&self.pool, entry);
        slow.live -= 1;
        if entry.kill() {
            self.queue(index);
        }
    }

    /// Evicts a registration that is not in use and was not used recently. Returns false if none
    /// was found ([`Slow::victim`]). The slow lock is held.
    fn evict(&self, slow: &mut Slow) -> bool {
        let Some(index) = slow.victim(&self.pool) else {
            return false;
        };
        let Some(entry) = self.pool.get(index) else {
            return false;
        };
        self.retire(slow, entry.word(index));
        true
    }

    /// Retires all registrations.
    pub(crate) fn kill_all(&self) {
        let mut slow = self.slow();
        slow.spoil(0, u64::MAX);
        while let Some(index) = slow.oldest()
            && let Some(entry) = self.pool.get(index)
        {
            self.retire(&mut slow, entry.word(index));
        }
    }
}

impl<M: Send> Index for Inner<M> {
    fn kill(&self, start: u64, end: u64) {
        if (start, end) == (0, u64::MAX) {
            return self.kill_all();
        }
        let first = start >> self.shift;
        let behind = end.saturating_add((1 << self.shift) - 1) >> self.shift;
        let mut slow = self.slow();
        slow.spoil(start, end);
        for kind in kinds() {
            let retire = |word| self.retire(&mut slow, Word(word));
            self.tree.words(first, behind, kind, retire);
        }
    }
}

impl<R: Registrar> Cache<R> {
    /// Creates an empty cache. `watch` creates the monitor, which reports changes to the given
    /// [`Inner`].
    pub(crate) fn new(
        registrar: R,
        bounds: Bounds,
        watch: impl FnOnce(&Arc<Inner<R::Mr>>) -> Result<Box<dyn Watch>>,
    ) -> Result<Self> {
        // SAFETY: `sysconf` has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let shift = page.unsigned_abs().trailing_zeros();
        let inner = Arc::new(Inner {
            shift,
            tree: Tree::new(),
            pool: Pool::new(),
            clock: AtomicU32::new(0),
            slow: Mutex::new(Slow::new(bounds.count)),
            zombies: AtomicU32::new(NONE),
        });
        let watch = watch(&inner)?;
        let whole = watch.asks_of_registrations();
        Ok(Self {
            registrar,
            bounds,
            shift,
            inner,
            watch,
            whole,
            drains: Drains::default(),
        })
    }

    /// Whether the application supplies the monitor.
    pub(crate) fn is_foreign(&self) -> bool {
        self.whole
    }

    /// Number of attempts to cache a registration.
    #[cfg(test)]
    pub(crate) fn misses(&self) -> u32 {
        self.inner.clock.load(Ordering::Relaxed)
    }

    /// The registration of a reference.
    #[cfg(test)]
    pub(crate) fn owned(&self, held: &Held<R::Key>) -> Option<R::Mr>
    where
        R::Mr: Clone,
    {
        self.inner.pool.peek(held.word.index()?)
    }

    /// A reference to a registration of this range, which has at least one byte. `known` is a
    /// reference that the caller holds. If its registration covers the range, it is returned, and
    /// no other reference is acquired.
    #[inline]
    pub(crate) fn find(
        &self,
        start: u64,
        end: u64,
        writable: bool,
        known: Option<&Held<R::Key>>,
    ) -> Option<Held<R::Key>> {
        if self.whole {
            return self.find_whole(start, end, writable, known);
        }
        // `is_current` may need a system call, so it is called only if a registration exists; the
        // valid search is the one after it
        if !self.has_some(start) || !self.watch.is_current(start, end) {
            return None;
        }
        self.look(start, end, writable, known)
    }

    /// Whether the page of an address has a cached registration of either kind.
    #[inline]
    fn has_some(&self, addr: u64) -> bool {
        let page = addr >> self.shift;
        let has = |kind| self.inner.tree.get(page, kind) != 0;
        kinds().into_iter().any(has)
    }

    /// As [`Self::find`], for a watch that accepts only whole registrations: the registration that
    /// was found before the call of `is_current` must still be in the tree after it.
    fn find_whole(
        &self,
        start: u64,
        end: u64,
        writable: bool,
        known: Option<&Held<R::Key>>,
    ) -> Option<Held<R::Key>> {
        let held = self.look(start, end, writable, known)?;
        let page = start >> self.shift;
        let stays = |kind| self.inner.tree.get(page, kind) == held.word.0;
        if self.watch.is_current(held.start, held.end) && kinds().into_iter().any(stays) {
            return Some(held);
        }
        if known != Some(&held) {
            self.release(&held);
        }
        None
    }

    /// Searches the tree for a registration that covers the range.
    #[inline]
    fn look(
        &self,
        start: u64,
        end: u64,
        writable: bool,
        known: Option<&Held<R::Key>>,
    ) -> Option<Held<R::Key>> {
        let page = start >> self.shift;
        let kinds: &[Kind] = if writable {
            &[Kind::Write]
        } else {
            &[Kind::Read, Kind::Write]
        };
        for &kind in kinds {
            let word = Word(self.inner.tree.get(page, kind));
            if let Some(known) = known
                && known.word == word
            {
                if known.start <= start && end <= known.end {
                    return Some(*known);
                }
                continue;
            }
            let Some(entry) = word.index().and_then(|index| self.inner.pool.get(index)) else {
                continue;
            };
            if entry.acquire(word) && entry.covers(start, end) {
                entry.touch(self.inner.clock.load(Ordering::Relaxed));
                let (first, behind) = entry.range();
                return Some(Held {
                    word,
                    start: first,
                    end: behind,
                    key: R::Key::of(entry.key()),
                });
            }
            self.give_back(word);
        }
        None
    }

    /// Releases a reference.
    #[inline]
    pub(crate) fn release(&self, held: &Held<R::Key>) {
        self.give_back(held.word);
    }

    #[inline]
    fn give_back(&self, word: Word) {
        if let Some(index) = word.index()
            && let Some(entry) = self.inner.pool.get(index)
            && entry.release()
        {
            self.inner.queue(index);
        }
    }

    /// Retires the registrations of a reference's range, and releases the reference. Those that no
    /// other operation uses are deregistered when the call returns; it blocks.
    #[cold]
    pub(crate) fn retire(&self, held: Held<R::Key>) {
        if !self.watch.is_forked() {
            self.inner.kill(held.start, held.end);
            self.release(&held);
            self.drain();
            // other threads may have taken the registrations, and may still be busy with others
            self.drains.await_earlier();
        }
    }

    /// Whether registrations wait for [`Self::drain`].
    #[inline]
    pub(crate) fn has_zombies(&self) -> bool {
        self.inner.zombies.load(Ordering::Relaxed) != NONE
    }

    /// Deregisters the dead registrations without references. Blocks while the device deregisters
    /// them.
    #[cold]
    pub(crate) fn drain(&self) {
        if self.watch.is_forked() {
            return;
        }
        let _drain = self.drains.begin();
        let mut index = self.inner.zombies.swap(NONE, Ordering::Acquire);
        while let Some(entry) = self.inner.pool.get(index) {
            let next = entry.next.load(Ordering::Relaxed);
            // calls the registrar's code, and therefore precedes the lock
            drop(self.inner.pool.replace(index, None));
            let (start, end) = entry.range();
            self.watch.unwatch(start, end);
            let mut slow = self.inner.slow();
            slow.count -= 1;
            slow.bytes -= end - start;
            slow.give_back(index, entry);
            drop(slow);
            index = next;
        }
    }

    /// A registration for a buffer of at least one byte: a cached one, or a new one, which is
    /// cached if possible. On a miss, blocks while the device registers the memory.
    ///
    /// # Errors
    /// Errors of the device for a registration of exactly that buffer.
    ///
    /// # Safety
    /// As [`Registrar::register`].
    pub(crate) unsafe fn get(
        &self,
        addr: u64,
        len: u64,
        writable: bool,
    ) -> Result<Got<R::Mr, R::Key>> {
        let end = addr.checked_add(len).ok_or(FiErrno::EFAULT)?;
        // a notification is processed in a few microseconds
        for _ in 0..64 {
            if self.watch.is_quiet() {
                break;
            }
            std::hint::spin_loop();
        }
        // the caller has just had a miss, so `find` is called again only if a registration exists
        let page = addr >> self.shift;
        let known = kinds()
            .into_iter()
            .any(|kind| self.inner.tree.get(page, kind) != 0);
        if known && let Some(held) = self.find(addr, end, writable, None) {
            return Ok(Got::Kept(held));
        }
        if !self.watch.is_forked() {
            self.drain();
            // SAFETY: the caller uses the registration only while the memory is valid.
            if let Some(got) = unsafe { self.make(addr, end, writable) } {
                return Ok(got);
            }
        }
        // SAFETY: the caller uses the registration only while the memory is valid.
        let made = unsafe { self.register(addr, len, writable) };
        made.map(|(mr, key)| Got::Once(mr, key))
    }

    /// Registers a range. On `ENOMEM`, evicts half of the cached registrations and retries once.
    unsafe fn register(&self, start: u64, len: u64, writable: bool) -> Result<(R::Mr, R::Key)> {
        // SAFETY: the caller uses the registration only while the memory is valid.
        match unsafe { self.registrar.register(start, len, writable) } {
            Err(FiErrno::ENOMEM) if self.make_room() => {
                // SAFETY: the caller uses the registration only while the memory is valid.
                unsafe { self.registrar.register(start, len, writable) }
            }
            made => made,
        }
    }

    /// Evicts half of the cached registrations, without those in use. Returns false if none was
    /// evicted: all of them are in use, or none is cached.
    fn make_room(&self) -> bool {
        if self.watch.is_forked() {
            return false;
        }
        let mut slow = self.inner.slow();
        let half = slow.live.div_ceil(2);
        // an eviction that found none has examined `CHANCES` registrations and moved them to the
        // end
        let (mut evicted, mut vain) = (0, 0);
        while evicted < half && vain * slow::CHANCES <= slow.live {
            match self.inner.evict(&mut slow) {
                true => (evicted, vain) = (evicted + 1, 0),
                false => vain += 1,
            }
        }
        drop(slow);
        self.drain();
        evicted > 0
    }

    /// Registers the pages of a range, and caches the registration if possible. `None`: registering
    /// was not attempted, or failed.
    unsafe fn make(&self, addr: u64, end: u64, writable: bool) -> Option<Got<R::Mr, R::Key>> {
        let page = 1_u64 << self.shift;
        let start = addr & !(page - 1);
        let end = end.checked_add(page - 1)? & !(page - 1);
        let own = (start, end);
        if end - start > self.bounds.size
            || self.bounds.count == 0
            || !Tree::holds((end - 1) >> self.shift)
        {
            return None;
        }
        let kind = if writable { Kind::Write } else { Kind::Read };
        let clock = self.inner.clock.fetch_add(1, Ordering::Relaxed) + 1;
        let (making, joined) = {
            let mut slow = self.inner.slow();
            let joined = self.joined(own, kind);
            if self.is_full(&slow, joined) && !self.displaces(joined, kind) {
                let tag = (start >> self.shift) << 1 | u64::from(writable);
                if !slow.admits(tag, clock) {
                    return None;
                }
            }
            (slow.begin(joined.0, joined.1)?, joined)
        };
        for range in [joined, own] {
            // the joined range first; if that fails, only the requested range. The record of
            // `Slow::begin` covers both.
            // SAFETY: as this function: the caller keeps the memory valid.
            let Some((made, keep)) = (unsafe { self.watched(range, writable) }) else {
                continue;
            };
            let published = if keep {
                self.publish(making, range, kind, made, clock)
            } else {
                self.inner.slow().finish(making);
                Err(made)
            };
            return Some(published.map_or_else(
                |(mr, key)| {
                    self.watch.unwatch(range.0, range.1);
                    Got::Once(mr, key)
                },
                Got::Kept,
            ));
        }
        self.inner.slow().finish(making);
        None
    }

    /// Whether caching a range requires evictions. The slow lock is held.
    fn is_full(&self, slow: &Slow, (start, end): (u64, u64)) -> bool {
        let bytes = slow.bytes.saturating_add(end - start);
        slow.count >= self.bounds.count || bytes > self.bounds.size
    }

    /// Whether a cached registration overlaps the range. The slow lock is held.
    fn displaces(&self, (start, end): (u64, u64), kind: Kind) -> bool {
        let mut some = false;
        let (first, behind) = (start >> self.shift, end >> self.shift);
        self.inner.tree.words(first, behind, kind, |_| some = true);
        some
    }

    /// Watches and registers a range. The boolean: whether the registration may be cached.
    unsafe fn watched(&self, (start, end): (u64, u64), writable: bool) -> Option<(Made<R>, bool)> {
        self.watch.watch(start, end).ok()?;
        // SAFETY: the caller uses the registration only while the memory is valid.
        match unsafe { self.register(start, end - start, writable) } {
            Ok(made) => Some((made, self.watch.tells_all(start, end))),
            Err(_) => {
                self.watch.unwatch(start, end);
                None
            }
        }
    }

    /// The range, extended by the cached registrations that are joined with it. The slow lock is
    /// held.
    fn joined(&self, own: (u64, u64), kind: Kind) -> (u64, u64) {
        let limit = if self.bounds.merge {
            self.bounds.size
        } else {
            let most = JOINED.max((own.1 - own.0).saturating_mul(TIMES));
            most.min(self.bounds.size)
        };
        // adjacent registrations are included if merging is enabled
        let more = u64::from(self.bounds.merge);
        let mut range = own;
        let join = |word| {
            let index = Word(word).index();
            if let Some(entry) = index.and_then(|index| self.inner.pool.get(index)) {
                let (start, end) = entry.range();
                let wider = (range.0.min(start), range.1.max(end));
                if wider.1 - wider.0 <= limit {
                    range = wider;
                }
            }
        };
        let first = (own.0 >> self.shift).saturating_sub(more);
        let behind = (own.1 >> self.shift) + more;
        self.inner.tree.words(first, behind, kind, join);
        range
    }

    /// Publishes a registration of a range with one reference, and retires all registrations that
    /// it overlaps. Returns the registration as an error, for use by one operation only, if its
    /// memory has changed meanwhile or the cache is full.
    fn publish(
        &self,
        making: usize,
        range: (u64, u64),
        kind: Kind,
        (mr, key): Made<R>,
        clock: u32,
    ) -> std::result::Result<Held<R::Key>, Made<R>> {
        let (inner, bounds) = (&self.inner, &self.bounds);
        let (first, behind) = (range.0 >> self.shift, range.1 >> self.shift);
        let len = range.1 - range.0;
        inner.tree.prepare(first, behind);
        let mut slow = inner.slow();
        let displaced = |word| inner.retire(&mut slow, Word(word));
        inner.tree.words(first, behind, kind, displaced);
        // bounded, because other threads take the room of evicted registrations, and an operation
        // may begin to use one in the moment in which it is evicted
        for _ in 0..EVICTIONS {
            let next = slow.next();
            let full = slow.count >= bounds.count || slow.bytes.saturating_add(len) > bounds.size;
            if full {
                // what this registration replaces has its room until it is drained
                if !inner.evict(&mut slow) && !self.has_zombies() {
                    break;
                }
            } else if inner.pool.get(next).is_some() {
                break;
            }
            drop(slow);
            if full {
                self.drain();
            } else if !inner.pool.prepare(next) {
                inner.slow().finish(making);
                return Err((mr, key));
            }
            slow = inner.slow();
        }
        let full = slow.count >= bounds.count || slow.bytes.saturating_add(len) > bounds.size;
        // `finish` first, because it must be called in either case
        if !slow.finish(making) || full {
            return Err((mr, key));
        }
        // the lock was released above: other registrations may overlap now
        let displaced = |word| inner.retire(&mut slow, Word(word));
        inner.tree.words(first, behind, kind, displaced);
        let Some((index, entry)) = slow
            .take(&inner.pool)
            .and_then(|index| Some((index, inner.pool.get(index)?)))
        else {
            return Err((mr, key));
        };
        let was = inner.pool.replace(index, Some(mr));
        debug_assert!(
            was.is_none(),
            "an entry of the free list has a registration"
        );
        let word = entry.begin(index, range, kind == Kind::Write, key.number(), clock);
        slow.append(&inner.pool, index, entry);
        slow.live += 1;
        slow.count += 1;
        slow.bytes += len;
        inner.tree.set(first, behind, kind, word.0);
        Ok(Held {
            word,
            start: range.0,
            end: range.1,
            key,
        })
    }
}

impl<R: Registrar> Drop for Cache<R> {
    /// Deregisters all registrations and ends their watches. No effect in a forked child.
    fn drop(&mut self) {
        if !self.watch.is_forked() {
            self.inner.kill_all();
            self.drain();
        }
    }
}
