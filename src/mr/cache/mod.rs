//! The registration cache: registrations of local buffers, kept for later operations. `docs/registration-cache.md` has the
//! structures and the order of events. Knows neither verbs nor the kernel: who registers and who watches memory
//! are traits.
//!
//! - A hit ([`Cache::find`]) takes no lock, allocates nothing, and writes to the registration's entry only.
//! - Nothing is allocated, freed or called under the slow lock.
//! - A registration that memory changes under ([`Index::kill`]) is given to nobody any more, and deregistered
//!   behind the last reference.

#![allow(unsafe_code, reason = "registers memory that the caller promises for")]

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

use entry::{NONE, Pool, Word};
use slow::Slow;
use tree::{Kind, Tree};

use crate::errno::{FiErrno, Result};
use crate::sync::{AtomicU32, Mutex, MutexGuard};

/// Registrations that are joined without being asked for are at most so long, or eight times what is needed.
const JOINED: u64 = 1 << 20;
const TIMES: u64 = 8;
/// How many are evicted for one, at most.
const EVICTIONS: usize = 1024;

/// Who registers memory.
pub(crate) trait Registrar: Debug + Send + Sync {
    /// A registration; dropping it deregisters.
    type Mr: Debug + Send;

    /// Registers a range of whole pages for local use; gives the lkey too. May block and allocate.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// The memory is used by operations whose callers promise for it, and by nobody else.
    unsafe fn register(&self, start: u64, len: u64, writable: bool) -> Result<(Self::Mr, u32)>;
}

/// Who says when memory changes: calls [`Index::kill`].
pub(crate) trait Watch: Debug + Send + Sync {
    /// Whether what is kept of a range may be used now. On the fast path: neither blocks nor allocates.
    fn is_current(&self, start: u64, end: u64) -> bool;

    /// Whether it is asked about ranges as they were given to [`Self::watch`], not about parts of them.
    fn asks_of_registrations(&self) -> bool;

    /// Whether no change is being told of at this moment.
    fn is_quiet(&self) -> bool;

    /// Watches a range of whole pages from now on. May block and allocate.
    ///
    /// # Errors
    /// It can't be watched.
    fn watch(&self, start: u64, end: u64) -> Result<()>;

    /// Undoes one [`Self::watch`] of just this range.
    fn unwatch(&self, start: u64, end: u64);

    /// Whether all changes of a range, which is watched and whose pages are there, will be told.
    fn tells_all(&self, start: u64, end: u64) -> bool;

    /// Whether this process is a child of the one that the cache belongs to: nothing is to be touched then.
    fn is_forked(&self) -> bool;
}

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Bytes of all registrations.
    pub(crate) size: u64,
    /// How many.
    pub(crate) count: usize,
    /// Whether those that touch each other become one.
    pub(crate) merge: bool,
}

/// A reference on a registration: to be given back by [`Cache::release`], else it is never deregistered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    word: Word,
    start: u64,
    end: u64,
    pub(crate) lkey: u32,
}

/// What an operation uses.
#[derive(Debug)]
pub(crate) enum Got<M> {
    /// One of the cache.
    Kept(Held),
    /// One that serves this operation only, and its lkey.
    Once(M, u32),
}

/// What the monitor needs of a cache, whatever it registers with. Thread safe; no call allocates or blocks, but for the
/// slow lock.
pub(crate) trait Index: Sync {
    /// The memory of a range changes: nothing that covers a part of it is used from now on.
    fn kill(&self, start: u64, end: u64);
}

/// See the module. Thread safe.
#[derive(Debug)]
pub(crate) struct Cache<R: Registrar> {
    registrar: R,
    bounds: Bounds,
    /// Base-2 logarithm of the size of a page.
    shift: u32,
    inner: Arc<Inner<R::Mr>>,
    watch: Box<dyn Watch>,
    /// What the watch says of [`Watch::asks_of_registrations`].
    whole: bool,
}

/// What the monitor's thread knows too.
#[derive(Debug)]
pub(crate) struct Inner<M> {
    shift: u32,
    tree: Tree,
    pool: Pool<M>,
    /// Counts misses: the unit in which use is remembered.
    clock: AtomicU32,
    slow: Mutex<Slow>,
    /// First of the dead ones without references, linked by `next`.
    zombies: AtomicU32,
}

fn kinds() -> [Kind; 2] {
    [Kind::Read, Kind::Write]
}

impl<M> Inner<M> {
    fn slow(&self) -> MutexGuard<'_, Slow> {
        match self.slow.lock() {
            Ok(slow) => slow,
            // nothing panics under it; and if, the numbers are whole
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Lets it be deregistered by who posts next.
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

    /// A live one is given to nobody any more. The slow lock is held.
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

    /// Evicts the one that was not used for long. The slow lock is held.
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

    /// Kills everything.
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
    /// An empty one. The watch is to be told of [`Self::index`].
    pub(crate) fn new(
        registrar: R,
        bounds: Bounds,
        watch: impl FnOnce(&Arc<Inner<R::Mr>>) -> Result<Box<dyn Watch>>,
    ) -> Result<Self> {
        // SAFETY: has no preconditions.
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
        })
    }

    /// Whether a monitor of the application's watches.
    pub(crate) fn is_foreign(&self) -> bool {
        self.whole
    }

    /// How many registrations were tried that were to be kept.
    #[cfg(test)]
    pub(crate) fn misses(&self) -> u32 {
        self.inner.clock.load(Ordering::Relaxed)
    }

    /// The registration that a reference is on.
    #[cfg(test)]
    pub(crate) fn owned(&self, held: &Held) -> Option<R::Mr>
    where
        R::Mr: Clone,
    {
        self.inner.pool.peek(held.word.index()?)
    }

    /// A reference on a registration of this range, which has at least one byte. `known` is one that the caller holds:
    /// where that will do it is given again, without another reference.
    #[inline]
    pub(crate) fn find(
        &self,
        start: u64,
        end: u64,
        writable: bool,
        known: Option<&Held>,
    ) -> Option<Held> {
        if self.whole {
            return self.find_whole(start, end, writable, known);
        }
        // where nothing is kept the kernel need not be asked; what there is counts behind its
        // answer
        if !self.has_some(start) || !self.watch.is_current(start, end) {
            return None;
        }
        self.look(start, end, writable, known)
    }

    /// Whether the page of an address is kept, of either kind.
    #[inline]
    fn has_some(&self, addr: u64) -> bool {
        let page = addr >> self.shift;
        let has = |kind| self.inner.tree.get(page, kind) != 0;
        kinds().into_iter().any(has)
    }

    /// As [`Self::find`], where the watch knows registrations, not parts of them: what is found before it is asked must be
    /// there behind it too.
    fn find_whole(
        &self,
        start: u64,
        end: u64,
        writable: bool,
        known: Option<&Held>,
    ) -> Option<Held> {
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

    /// What the tree has.
    #[inline]
    fn look(&self, start: u64, end: u64, writable: bool, known: Option<&Held>) -> Option<Held> {
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
                    lkey: entry.lkey(),
                });
            }
            self.give_back(word);
        }
        None
    }

    /// Gives a reference back.
    #[inline]
    pub(crate) fn release(&self, held: &Held) {
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

    /// Whether something waits for [`Self::drain`].
    #[inline]
    pub(crate) fn has_zombies(&self) -> bool {
        self.inner.zombies.load(Ordering::Relaxed) != NONE
    }

    /// Deregisters what nobody uses any more. Blocks as deregistering does.
    #[cold]
    pub(crate) fn drain(&self) {
        if self.watch.is_forked() {
            return;
        }
        let mut index = self.inner.zombies.swap(NONE, Ordering::Acquire);
        while let Some(entry) = self.inner.pool.get(index) {
            let next = entry.next.load(Ordering::Relaxed);
            // foreign code, so before the lock
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

    /// A registration for a buffer of at least one byte: a kept one, or a new one, which is kept if that can be.
    /// Blocks as registering does where it is no hit.
    ///
    /// # Errors
    /// The device's, of a registration of just that buffer.
    ///
    /// # Safety
    /// As [`Registrar::register`].
    pub(crate) unsafe fn get(&self, addr: u64, len: u64, writable: bool) -> Result<Got<R::Mr>> {
        let end = addr.checked_add(len).ok_or(FiErrno::EFAULT)?;
        // the gate is closed for a few microseconds at a time
        for _ in 0..64 {
            if self.watch.is_quiet() {
                break;
            }
            std::hint::spin_loop();
        }
        // the caller has just asked; where nothing is there the watch need not answer once more
        let page = addr >> self.shift;
        let known = kinds()
            .into_iter()
            .any(|kind| self.inner.tree.get(page, kind) != 0);
        if known && let Some(held) = self.find(addr, end, writable, None) {
            return Ok(Got::Kept(held));
        }
        if !self.watch.is_forked() {
            self.drain();
            // SAFETY: the caller's promise.
            if let Some(got) = unsafe { self.make(addr, end, writable) } {
                return Ok(got);
            }
        }
        // SAFETY: the caller's promise.
        let made = unsafe { self.register(addr, len, writable) };
        made.map(|(mr, lkey)| Got::Once(mr, lkey))
    }

    /// Registers. Where there is no more room, half of what is kept goes first.
    unsafe fn register(&self, start: u64, len: u64, writable: bool) -> Result<(R::Mr, u32)> {
        // SAFETY: the caller's promise.
        match unsafe { self.registrar.register(start, len, writable) } {
            Err(FiErrno::ENOMEM) if self.make_room() => {
                // SAFETY: as above.
                unsafe { self.registrar.register(start, len, writable) }
            }
            made => made,
        }
    }

    /// Half of what is kept goes; false where nothing is.
    fn make_room(&self) -> bool {
        if self.watch.is_forked() {
            return false;
        }
        let mut slow = self.inner.slow();
        let half = slow.live.div_ceil(2);
        for _ in 0..half {
            self.inner.evict(&mut slow);
        }
        drop(slow);
        self.drain();
        half > 0
    }

    /// Registers the pages of a range, and keeps that if it can be; `None`: it could not be tried, or failed.
    unsafe fn make(&self, addr: u64, end: u64, writable: bool) -> Option<Got<R::Mr>> {
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
            // if what it was to be joined with has changed, it alone; the note covers both
            // SAFETY: the caller's promise.
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
                |(mr, lkey)| {
                    self.watch.unwatch(range.0, range.1);
                    Got::Once(mr, lkey)
                },
                Got::Kept,
            ));
        }
        self.inner.slow().finish(making);
        None
    }

    /// Whether keeping a range takes the place of others that are kept. The slow lock is held.
    fn is_full(&self, slow: &Slow, (start, end): (u64, u64)) -> bool {
        let bytes = slow.bytes.saturating_add(end - start);
        slow.count >= self.bounds.count || bytes > self.bounds.size
    }

    /// Whether some of a range is kept already. The slow lock is held.
    fn displaces(&self, (start, end): (u64, u64), kind: Kind) -> bool {
        let mut some = false;
        let (first, behind) = (start >> self.shift, end >> self.shift);
        self.inner.tree.words(first, behind, kind, |_| some = true);
        some
    }

    /// Watches and registers a range; says whether it may be kept.
    unsafe fn watched(
        &self,
        (start, end): (u64, u64),
        writable: bool,
    ) -> Option<((R::Mr, u32), bool)> {
        self.watch.watch(start, end).ok()?;
        // SAFETY: the caller's promise.
        match unsafe { self.register(start, end - start, writable) } {
            Ok(made) => Some((made, self.watch.tells_all(start, end))),
            Err(_) => {
                self.watch.unwatch(start, end);
                None
            }
        }
    }

    /// A range with those that it is joined with. The slow lock is held.
    fn joined(&self, own: (u64, u64), kind: Kind) -> (u64, u64) {
        let limit = if self.bounds.merge {
            self.bounds.size
        } else {
            let most = JOINED.max((own.1 - own.0).saturating_mul(TIMES));
            most.min(self.bounds.size)
        };
        // neighbours count where they are merged
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

    /// Makes a registration of a range known, in the place of all that it overlaps, with one reference. It comes back, to serve
    /// its operation only, if its memory changed meanwhile, or there is no room.
    fn publish(
        &self,
        making: usize,
        range: (u64, u64),
        kind: Kind,
        (mr, lkey): (R::Mr, u32),
        clock: u32,
    ) -> std::result::Result<Held, (R::Mr, u32)> {
        let (inner, bounds) = (&self.inner, &self.bounds);
        let (first, behind) = (range.0 >> self.shift, range.1 >> self.shift);
        let len = range.1 - range.0;
        inner.tree.prepare(first, behind);
        let mut slow = inner.slow();
        let displaced = |word| inner.retire(&mut slow, Word(word));
        inner.tree.words(first, behind, kind, displaced);
        // what is used by operations can be evicted and still takes room, so this has an end
        for _ in 0..EVICTIONS {
            let next = slow.next();
            let full = slow.count >= bounds.count || slow.bytes.saturating_add(len) > bounds.size;
            if full {
                inner.evict(&mut slow);
            } else if inner.pool.get(next).is_some() {
                break;
            }
            drop(slow);
            if full {
                self.drain();
            } else if !inner.pool.prepare(next) {
                inner.slow().finish(making);
                return Err((mr, lkey));
            }
            slow = inner.slow();
        }
        let full = slow.count >= bounds.count || slow.bytes.saturating_add(len) > bounds.size;
        // in this order: the note is taken away in any case
        if !slow.finish(making) || full {
            return Err((mr, lkey));
        }
        // the lock was given back in between
        let displaced = |word| inner.retire(&mut slow, Word(word));
        inner.tree.words(first, behind, kind, displaced);
        let Some((index, entry)) = slow
            .take(&inner.pool)
            .and_then(|index| Some((index, inner.pool.get(index)?)))
        else {
            return Err((mr, lkey));
        };
        let was = inner.pool.replace(index, Some(mr));
        debug_assert!(was.is_none(), "an entry of the free list owns something");
        let word = entry.begin(index, range, kind == Kind::Write, lkey, clock);
        slow.append(&inner.pool, index, entry);
        slow.live += 1;
        slow.count += 1;
        slow.bytes += len;
        inner.tree.set(first, behind, kind, word.0);
        Ok(Held {
            word,
            start: range.0,
            end: range.1,
            lkey,
        })
    }
}

impl<R: Registrar> Drop for Cache<R> {
    /// Deregisters all and watches nothing any more. In a child nothing is touched.
    fn drop(&mut self) {
        if !self.watch.is_forked() {
            self.inner.kill_all();
            self.drain();
        }
    }
}
