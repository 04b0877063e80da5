//! The descriptors that operations which waited follow at this moment. `docs/mr-modes.md`,
//! "Descriptors of operations that wait", has the protocol and its proof.
//!
//! A thread publishes the descriptors before it reads the mark of their regions, and removes them
//! when the request is posted. A close changes the mark, and waits while a thread has published the
//! region's descriptor. No thread waits to publish one. A forked child ignores what threads of its
//! parent had published.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forks::generation;

use super::Desc;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, fence};

/// Threads that have places of their own, and descriptors of each; further ones are counted.
const SLOTS: usize = if cfg!(all(test, loom)) { 1 } else { 64 };
const MOST: usize = if cfg!(all(test, loom)) { 1 } else { 16 };
/// How long a close waits. A post takes microseconds, and milliseconds if the device copies; the
/// rest is for threads that the system does not run.
const LIMIT: Duration = Duration::from_secs(5);
/// Looks before the first sleep; initial and maximum sleep between further ones.
const SPINS: u32 = 500;
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The table of the process. A close finds none before the first use; it never waits for its
/// initialization, which another thread of the parent may have begun before a fork.
static TABLE: OnceLock<Table> = OnceLock::new();

/// The descriptors that one thread follows.
#[derive(Debug)]
#[repr(align(64))]
struct Slot {
    /// [`generation`] of the thread's process; 0: the slot is free.
    owner: AtomicU32,
    /// Addresses of regions; 0: none.
    descs: [AtomicUsize; MOST],
}

/// See the module.
#[derive(Debug)]
struct Table {
    slots: [Slot; SLOTS],
    /// The slots from this one on were never claimed.
    used: AtomicUsize,
    /// Number of threads that follow unknown descriptors, below it [`generation`].
    crowd: AtomicU64,
}

/// The number of threads in a value of [`Table::crowd`].
fn crowd_of(value: u64) -> u64 {
    if value as u32 == generation() {
        value >> 32
    } else {
        0
    }
}

impl Table {
    fn new() -> Self {
        if !forks::are_counted() {
            // a child of this process may wait for `LIMIT`, and nothing ends the wait
            warn_log!(Mr, "forks cannot be recognized: no memory");
        }
        Self {
            slots: std::array::from_fn(|_| Slot {
                owner: AtomicU32::new(0),
                descs: std::array::from_fn(|_| AtomicUsize::new(0)),
            }),
            used: AtomicUsize::new(0),
            crowd: AtomicU64::new(0),
        }
    }

    /// Claims a slot for the calling thread. `None`: all are in use.
    fn claim(&self) -> Option<&Slot> {
        let now = generation();
        for (index, slot) in self.slots.iter().enumerate() {
            let owner = slot.owner.load(Ordering::Relaxed);
            if owner == now {
                continue;
            }
            // Acquire: a thread that sees what this one does sees what the one before did too
            let claimed =
                slot.owner
                    .compare_exchange(owner, now, Ordering::Acquire, Ordering::Relaxed);
            if claimed.is_err() {
                continue;
            }
            if owner != 0 {
                // of a thread of this process's parent
                for desc in &slot.descs {
                    desc.store(0, Ordering::Relaxed);
                }
            }
            if self.used.load(Ordering::Relaxed) <= index {
                self.used.fetch_max(index + 1, Ordering::Relaxed);
            }
            return Some(slot);
        }
        None
    }

    /// Counts a thread that has no place for a descriptor, or removes it.
    fn crowd(&self, joins: bool) {
        let next = |value| {
            let count = crowd_of(value);
            let count = if joins {
                count + 1
            } else {
                count.saturating_sub(1)
            };
            Some(count << 32 | u64::from(generation()))
        };
        // Release: a close that sees the thread gone sees the end of what it has done
        let (set, read) = (Ordering::Release, Ordering::Relaxed);
        let _ = self.crowd.fetch_update(set, read, next);
    }

    /// Whether a thread of this process follows the descriptor at `addr`, or an unknown one. After
    /// `false`, what threads did that had followed it happens before what the caller does next.
    fn is_followed(&self, addr: usize) -> bool {
        let now = generation();
        let used = self.used.load(Ordering::Relaxed);
        let follows = |slot: &Slot| {
            slot.owner.load(Ordering::Acquire) == now
                && slot
                    .descs
                    .iter()
                    .any(|desc| desc.load(Ordering::Acquire) == addr)
        };
        self.slots.iter().take(used).any(follows)
            || crowd_of(self.crowd.load(Ordering::Acquire)) != 0
    }
}

/// While it exists, the close of a region waits if its descriptor was added and was valid then.
/// Costs nothing until a descriptor is added, then two atomic operations and a fence.
#[derive(Debug, Default)]
pub(crate) struct Following<'t> {
    slot: Option<&'t Slot>,
    /// Number of descriptors in the slot.
    count: usize,
    /// The table that counts this thread, for a descriptor without a place.
    crowd: Option<&'t Table>,
}

impl Following<'static> {
    /// To be called before a thread of the engine follows the descriptor, unless the application's
    /// call that names it has not returned yet. NULL has no effect, and any other value is
    /// permitted. Never waits.
    #[inline]
    pub(crate) fn add(&mut self, desc: Desc) {
        if !desc.0.is_null() {
            self.follow(TABLE.get_or_init(Table::new), desc.0.addr());
        }
    }
}

impl<'t> Following<'t> {
    fn follow(&mut self, table: &'t Table, addr: usize) {
        if self.crowd.is_some() || self.has(addr) {
            return;
        }
        if self.slot.is_none() {
            self.slot = table.claim();
        }
        match self.slot.and_then(|slot| slot.descs.get(self.count)) {
            Some(desc) => {
                // Release: the descriptor before it, of another thread, is followed no more
                desc.store(addr, Ordering::Release);
                self.count += 1;
            }
            None => {
                table.crowd(true);
                self.crowd = Some(table);
            }
        }
        // Either the mark that is read next is that of a closed region, or its close finds the
        // descriptor: `mark_changed` has the other fence.
        fence(Ordering::SeqCst);
    }

    fn has(&self, addr: usize) -> bool {
        let descs = self.slot.iter().flat_map(|slot| &slot.descs);
        let mut own = descs.take(self.count);
        own.any(|desc| desc.load(Ordering::Relaxed) == addr)
    }
}

impl Drop for Following<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            for desc in slot.descs.iter().take(self.count) {
                desc.store(0, Ordering::Release);
            }
            slot.owner.store(0, Ordering::Release);
        }
        if let Some(table) = self.crowd {
            table.crowd(false);
        }
    }
}

/// To be called between the change of a mark and the looks at the table.
fn mark_changed() {
    // `Following::follow` has the other fence
    fence(Ordering::SeqCst);
}

/// To be called by a close that has changed the mark of the region at `addr`: waits until no thread
/// of this process follows its descriptor. No thread begins to follow it any more.
///
/// # Errors
/// `EBUSY`: a thread still follows it after [`LIMIT`]; logged.
pub(super) fn wait_for(addr: usize) -> Result<()> {
    mark_changed();
    let Some(table) = TABLE.get() else {
        return Ok(());
    };
    if !table.is_followed(addr) {
        return Ok(());
    }
    #[cfg(test)]
    if stops::AT_ONCE.get() {
        return Err(FiErrno::EBUSY);
    }
    let deadline = Instant::now() + LIMIT;
    let (mut looks, mut pause) = (0, SHORTEST);
    while table.is_followed(addr) {
        if looks < SPINS {
            looks += 1;
            std::hint::spin_loop();
            continue;
        }
        if Instant::now() >= deadline {
            warn_log!(
                Mr,
                "fi_close of a region: a thread has posted an operation on it for {LIMIT:?}"
            );
            return Err(FiErrno::EBUSY);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST);
    }
    Ok(())
}

/// Stops of threads that follow descriptors.
#[cfg(test)]
pub(crate) mod stops {
    use std::cell::Cell;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::super::{Desc, Region};
    use crate::errno::Result;

    type Call = Box<dyn FnOnce() + Send>;

    thread_local! {
        /// Closes of this thread do not wait.
        pub(crate) static AT_ONCE: Cell<bool> = const { Cell::new(false) };
    }

    static STOPS: Mutex<Vec<(usize, Call)>> = Mutex::new(Vec::new());

    /// The next thread that finds the region open by its descriptor closes it, without a wait,
    /// before it reads more of it. The result of the close, once that has happened.
    pub(crate) fn close_at_next(region: &Arc<Region>) -> Arc<Mutex<Option<Result<()>>>> {
        let result = Arc::new(Mutex::new(None));
        let (closed, to) = (Arc::clone(region), Arc::clone(&result));
        let call = move || {
            AT_ONCE.set(true);
            *to.lock() = Some(closed.close());
            AT_ONCE.set(false);
        };
        let addr = region.desc().addr();
        STOPS.lock().push((addr, Box::new(call)));
        result
    }

    /// A thread has found the mark of an open region.
    pub(crate) fn reached(desc: Desc) {
        let mut stops = STOPS.lock();
        let at = stops.iter().position(|(addr, _)| *addr == desc.0.addr());
        let stop = at.map(|at| stops.swap_remove(at));
        drop(stops);
        if let Some((_, call)) = stop {
            call();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn desc(addr: usize) -> Desc {
        Desc(std::ptr::without_provenance_mut(addr))
    }

    /// Whether a close of the region at `addr` would wait.
    fn waits(addr: usize) -> bool {
        stops::AT_ONCE.set(true);
        let result = wait_for(addr);
        stops::AT_ONCE.set(false);
        result == Err(FiErrno::EBUSY)
    }

    /// A close waits for its own region only, and for the descriptors of all operations of a
    /// thread.
    #[test]
    fn a_close_waits_for_what_follows_its_own_descriptor() {
        const FIRST: usize = 0x10_0000;
        let mut first = Following::default();
        first.add(desc(0));
        assert!(first.slot.is_none(), "NULL has taken a place");
        (0..MOST).for_each(|at| first.add(desc(FIRST + 64 * at)));
        first.add(desc(FIRST));
        let mut second = Following::default();
        second.add(desc(FIRST));
        second.add(desc(FIRST + 1));
        let followed = |addr| TABLE.get().unwrap().is_followed(addr);
        for at in 0..MOST {
            assert!(followed(FIRST + 64 * at) && waits(FIRST + 64 * at));
        }
        assert!(!waits(FIRST + 64 * MOST));
        drop(first);
        assert!(waits(FIRST) && waits(FIRST + 1) && !waits(FIRST + 64));
        drop(second);
        assert!(!waits(FIRST) && !waits(FIRST + 1));
    }

    /// More descriptors than there are places for: a close waits for all of them.
    #[test]
    fn descriptors_without_a_place_are_waited_for() {
        let table = Table::new();
        let mut several = Following::default();
        (1..=MOST).for_each(|addr| several.follow(&table, addr));
        assert!(!table.is_followed(MOST + 1));
        several.follow(&table, MOST + 1);
        assert!(table.is_followed(MOST + 1) && table.is_followed(MOST + 100));
        drop(several);
        assert!(!table.is_followed(1) && !table.is_followed(MOST + 1));
        let mut all: Vec<_> = (0..=SLOTS).map(|_| Following::default()).collect();
        for (at, one) in all.iter_mut().enumerate() {
            one.follow(&table, 1 + at);
        }
        assert!(table.is_followed(SLOTS + 1) && table.is_followed(SLOTS + 100));
        let last = all.pop();
        drop(all);
        assert!(table.is_followed(SLOTS + 100), "the last one is counted");
        drop(last);
        assert!(!table.is_followed(SLOTS + 1) && !table.is_followed(1));
    }

    /// A child of fork(2) has none of the threads that followed descriptors.
    #[test]
    #[allow(unsafe_code, reason = "forks")]
    fn a_child_does_not_wait_for_threads_of_its_parent() {
        let table = Table::new();
        // all slots, and one that is counted
        let mut all: Vec<_> = (0..=SLOTS).map(|_| Following::default()).collect();
        all.iter_mut().for_each(|one| one.follow(&table, 64));
        let mut own = Following::default();
        let child = || {
            let before = table.is_followed(64);
            own.follow(&table, 128);
            let meanwhile = table.is_followed(128) && !table.is_followed(64);
            own = Following::default();
            !before && meanwhile && !table.is_followed(128)
        };
        // SAFETY: the child uses the table alone, and exits.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                let mut child = child;
                libc::_exit(i32::from(!child()));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            assert_eq!(status, 0);
        }
        assert!(table.is_followed(64));
        drop(all);
        assert!(!table.is_followed(64));
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::thread::{JoinHandle, spawn, yield_now};
    use std::sync::Arc;

    use super::*;
    use crate::sync::{AtomicBool, UnsafeCell};

    /// Addresses of the region that is closed, and of others.
    const REGION: usize = 64;
    const OTHER: usize = 128;

    /// A table, the mark of a region, and its record, which is freed by the close. loom reports an
    /// access that is concurrent with that.
    struct Shared {
        table: Table,
        open: AtomicBool,
        record: UnsafeCell<bool>,
    }

    // SAFETY: that no thread reads the record while it is freed is the property under test; loom
    // checks it.
    #[allow(unsafe_code, reason = "the model's region")]
    unsafe impl Sync for Shared {}
    // SAFETY: as above.
    #[allow(unsafe_code, reason = "the model's region")]
    unsafe impl Send for Shared {}

    impl Shared {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                table: Table::new(),
                open: AtomicBool::new(true),
                record: UnsafeCell::new(true),
            })
        }

        /// Follows a descriptor as `Desc::lkey` does.
        #[allow(unsafe_code, reason = "the model's region")]
        fn follow(&self, before: Option<usize>) {
            let mut follows = Following::default();
            before
                .iter()
                .for_each(|addr| follows.follow(&self.table, *addr));
            follows.follow(&self.table, REGION);
            if self.open.load(Ordering::Relaxed) {
                // SAFETY: as above.
                self.record.with(|there| unsafe { assert!(*there) });
            }
        }

        /// Closes the region as `Region::close` does.
        #[allow(unsafe_code, reason = "the model's region")]
        fn close(&self) {
            self.open.store(false, Ordering::Relaxed);
            mark_changed();
            while self.table.is_followed(REGION) {
                yield_now();
            }
            // SAFETY: as above.
            self.record.with_mut(|there| unsafe { *there = false });
        }
    }

    fn check(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    fn follower(shared: &Arc<Shared>, before: Option<usize>) -> JoinHandle<()> {
        let shared = Arc::clone(shared);
        spawn(move || shared.follow(before))
    }

    /// No thread reads the record of a region after its close, in a slot of its own.
    #[test]
    fn a_descriptor_is_followed_before_the_close_or_refused() {
        check(|| {
            let shared = Shared::new();
            let thread = follower(&shared, None);
            shared.close();
            thread.join().unwrap();
        });
    }

    /// The same if another thread claims the slot next, for another region.
    #[test]
    fn a_slot_of_another_thread_hides_no_descriptor() {
        check(|| {
            let shared = Shared::new();
            let thread = follower(&shared, None);
            let theirs = Arc::clone(&shared);
            let other = spawn(move || {
                let mut follows = Following::default();
                follows.follow(&theirs.table, OTHER);
            });
            shared.close();
            thread.join().unwrap();
            other.join().unwrap();
        });
    }

    /// The same for a descriptor without a place.
    #[test]
    fn a_descriptor_without_a_place_is_followed_before_the_close_or_refused() {
        check(|| {
            let shared = Shared::new();
            let thread = follower(&shared, Some(OTHER));
            shared.close();
            thread.join().unwrap();
        });
    }
}
