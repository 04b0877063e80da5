//! Hazards: words in an owner's segment in which initiators publish the keys that they use. The
//! owner makes a key invalid and then waits until no hazard names it.

use std::time::{Duration, Instant};

use crate::key::Key;
use crate::segment::layout::{self, announce, header};
use crate::segment::{Mapping, OwnSegment};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{Arc, pause};
use crate::sys::{Errno, Res};

/// Longest wait for initiators.
const PATIENCE: Duration = Duration::from_secs(5);

/// Largest number of bytes that are copied under one hazard: a deregistration waits for at most one
/// such copy of each hazard.
pub(crate) const MOST_AT_ONCE: usize = 1 << 22;

/// The content of a hazard word: the key in use, and for the key of a receive also the queue pair
/// or SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use(u64);

impl From<Key> for Use {
    fn from(key: Key) -> Self {
        Self(u64::from(key.0) | 1 << 32)
    }
}

impl Use {
    /// The key of a receive of the queue pair with this index, which is being written.
    pub(crate) fn of_receive(qp: u32, key: Key) -> Self {
        Self(Self::from(key).0 | (u64::from(qp & 0x3fff) + 1) << 33)
    }

    /// The key of a receive of the SRQ with this index, which is being written.
    pub(crate) fn of_shared_receive(srq: u32, key: Key) -> Self {
        Self(Self::of_receive(srq, key).0 | 1 << 48)
    }

    fn to_word(self) -> u64 {
        self.0
    }

    fn names_key(self, key: Key) -> bool {
        self.0 & 0x1_ffff_ffff == Self::from(key).0
    }

    fn names_receive(self, qp: u32) -> bool {
        self.0 >> 33 == u64::from(qp) + 1
    }

    fn names_shared_receive(self, srq: u32) -> bool {
        self.0 >> 33 == (u64::from(srq) + 1) | (1 << 15)
    }
}

/// The hazard words of this process at one owner that its threads use. Kept in private memory: the
/// words in the owner's segment are only written, because other processes may write them.
#[derive(Debug)]
pub(crate) struct Hazards {
    taken: AtomicU32,
}

impl Hazards {
    pub(crate) fn new() -> Self {
        Self {
            taken: AtomicU32::new(0),
        }
    }

    /// Takes one of the first `words` words, if one is free.
    fn reserve_below(&self, words: u32) -> Option<u32> {
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        let mut taken = self.taken.load(relaxed);
        loop {
            let number = taken.trailing_ones();
            if number >= words {
                return None;
            }
            let more = taken | 1 << number;
            let exchanged = self.taken.compare_exchange(taken, more, acquire, relaxed);
            match exchanged {
                Ok(_) => return Some(number),
                Err(found) => taken = found,
            }
        }
    }

    fn give_back(&self, number: u32) {
        self.taken.fetch_and(!(1 << number), Ordering::Release);
    }

    fn take(&self) -> u32 {
        let mut round = 0u32;
        // If more threads than words access one peer, they take turns; each turn is one copy of at
        // most [`MOST_AT_ONCE`] bytes.
        loop {
            if let Some(number) = self.reserve_below(announce::HAZARD_COUNT as u32) {
                return number;
            }
            pause(round);
            round = round.saturating_add(1);
        }
    }
}

/// The words that queue pairs keep, at most: the others are for the calls of all threads.
const OWNED: u32 = 4;
const _: () = assert!((OWNED as usize) < announce::HAZARD_COUNT);

/// The offset of a hazard word of the process in `slot`.
fn word_at(slot: u32, number: u32) -> usize {
    let base = announce::AT + announce::STRIDE * slot as usize + announce::HAZARDS;
    base + 8 * number as usize
}

/// Publishes what is used, before the caller's later loads.
#[inline(always)]
fn publish(word: &AtomicU64, what: Use) {
    // On x86-64 an exchange is a full barrier, and takes less time than a store and a fence.
    if cfg!(all(target_arch = "x86_64", not(all(test, loom)))) {
        word.swap(what.to_word(), Ordering::SeqCst);
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        word.store(what.to_word(), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

/// The hazard word of a queue pair, which publishes without taking one for each access. Used under
/// the lock of its send queue.
#[derive(Debug)]
pub(crate) struct OwnHazard {
    hazards: Arc<Hazards>,
    /// The word and its offset. `None`: other queue pairs have all of them.
    word: Option<(u32, usize)>,
}

impl OwnHazard {
    /// That of a queue pair of the process in `own_slot`, among those at the owner of the memory.
    pub(crate) fn new(hazards: &Arc<Hazards>, own_slot: u32) -> Self {
        let number = hazards.reserve_below(OWNED);
        Self {
            hazards: Arc::clone(hazards),
            word: number.map(|number| (number, word_at(own_slot, number))),
        }
    }

    /// Publishes `what` in the owner's segment (`map`). One at a time.
    #[inline(always)]
    pub(crate) fn publish<'a>(
        &'a self,
        map: &'a Mapping,
        own_slot: u32,
        what: impl Into<Use>,
    ) -> Hazard<'a> {
        let Some((_, at)) = self.word else {
            return Hazard::publish(&self.hazards, map, own_slot, what);
        };
        let word = map.u64(at);
        publish(word, what.into());
        Hazard { word, taken: None }
    }

    /// Publishes one more key beside [`Self::publish`], in a word of the process that is free now.
    /// `None`: none is.
    #[inline]
    pub(crate) fn publish_more<'a>(
        &'a self,
        map: &'a Mapping,
        own_slot: u32,
        key: Key,
    ) -> Option<Hazard<'a>> {
        let number = self.hazards.reserve_below(announce::HAZARD_COUNT as u32)?;
        Some(Hazard::publish_in(
            &self.hazards,
            map,
            (own_slot, number),
            key,
        ))
    }
}

impl Drop for OwnHazard {
    fn drop(&mut self) {
        if let Some((number, _)) = self.word {
            self.hazards.give_back(number);
        }
    }
}

/// A hazard word in the owner's segment, which holds the key in use.
pub(crate) struct Hazard<'a> {
    word: &'a AtomicU64,
    /// The number of the word, if it was taken for this access.
    taken: Option<(&'a Hazards, u32)>,
}

impl<'a> Hazard<'a> {
    pub(crate) fn publish(
        hazards: &'a Hazards,
        map: &'a Mapping,
        own_slot: u32,
        what: impl Into<Use>,
    ) -> Self {
        let number = hazards.take();
        Self::publish_in(hazards, map, (own_slot, number), what)
    }

    /// As [`Self::publish`], in the word with this number, which was taken.
    fn publish_in(
        hazards: &'a Hazards,
        map: &'a Mapping,
        (own_slot, number): (u32, u32),
        what: impl Into<Use>,
    ) -> Self {
        let word = map.u64(word_at(own_slot, number));
        publish(word, what.into());
        Self {
            word,
            taken: Some((hazards, number)),
        }
    }
}

impl Drop for Hazard<'_> {
    fn drop(&mut self) {
        self.word.store(0, Ordering::Release);
        if let Some((hazards, number)) = self.taken {
            hazards.give_back(number);
        }
    }
}

/// Waits until no living process uses `key`, which is already invalid.
///
/// # Errors
/// `EBUSY`: a process still does after 5 seconds.
pub(crate) fn wait(segment: &OwnSegment, key: Key, lives: impl Fn(u32) -> bool) -> Res<()> {
    wait_for(segment, |used| used.names_key(key), lives)
}

/// Waits until no living process writes into receives of the queue pair with this index, which
/// accepts no further messages.
///
/// # Errors
/// `EBUSY`: a process still does after 5 seconds.
pub(crate) fn await_receive(segment: &OwnSegment, qp: u32, lives: impl Fn(u32) -> bool) -> Res<()> {
    fence(Ordering::SeqCst);
    wait_for(segment, |used| used.names_receive(qp), lives)
}

/// As [`await_receive`], for the SRQ with this index.
///
/// # Errors
/// As [`await_receive`].
pub(crate) fn await_shared_receive(
    segment: &OwnSegment,
    srq: u32,
    lives: impl Fn(u32) -> bool,
) -> Res<()> {
    fence(Ordering::SeqCst);
    wait_for(segment, |used| used.names_shared_receive(srq), lives)
}

/// Whether a process has a hazard for receives of the queue pair with this index, which accepts no
/// further messages.
pub(crate) fn receive_in_use(segment: &OwnSegment, qp: u32) -> bool {
    fence(Ordering::SeqCst);
    let found = find(segment, |used| used.names_receive(qp)).is_some();
    fence(Ordering::Acquire);
    found
}

fn wait_for(
    segment: &OwnSegment,
    named: impl Fn(Use) -> bool,
    lives: impl Fn(u32) -> bool,
) -> Res<()> {
    wait_at_most(PATIENCE, segment, named, lives)
}

/// As [`wait_for`], with another limit. It ends the wait for processes that have ended too: a
/// process that breaks the protocol can restore the words that are cleared.
fn wait_at_most(
    patience: Duration,
    segment: &OwnSegment,
    named: impl Fn(Use) -> bool,
    lives: impl Fn(u32) -> bool,
) -> Res<()> {
    let begin = Instant::now();
    let mut round = 0u32;
    while let Some((visitor, word)) = find(segment, &named) {
        round += 1;
        if round > 100 {
            if !lives(visitor) {
                segment.map.u64(word).store(0, Ordering::Relaxed);
            }
            if begin.elapsed() > patience {
                return Err(Errno(libc::EBUSY));
            }
            std::thread::sleep(Duration::from_micros(50));
        } else {
            pause(round / 2);
        }
    }
    // Orders the initiators' accesses under their hazards before the caller's next steps.
    fence(Ordering::Acquire);
    Ok(())
}

/// Whether a living process may still use `key`, which is already invalid. Does not wait.
pub(crate) fn is_used(segment: &OwnSegment, key: Key, lives: impl Fn(u32) -> bool) -> bool {
    // One round for each hazard word. A process that restores a cleared word breaks the protocol,
    // and cannot extend the loop.
    for _ in 0..layout::MAX_PROCESSES * announce::HAZARD_COUNT {
        let Some((visitor, word)) = find(segment, |used| used.names_key(key)) else {
            fence(Ordering::Acquire);
            return false;
        };
        if lives(visitor) {
            return true;
        }
        segment.map.u64(word).store(0, Ordering::Relaxed);
    }
    true
}

/// Finds a hazard for which `named` returns true: its process's slot and its offset in the segment.
fn find(segment: &OwnSegment, named: impl Fn(Use) -> bool) -> Option<(u32, usize)> {
    const WORDS: usize = layout::MAX_PROCESSES / 64;
    let all = segment.map.words::<WORDS>(header::VISITORS);
    all.iter().enumerate().find_map(|(word, visitors)| {
        let mut visitors = visitors.load(Ordering::Relaxed);
        while visitors != 0 {
            let slot = word * 64 + visitors.trailing_zeros() as usize;
            visitors &= visitors - 1;
            let at = announce::AT + announce::STRIDE * slot + announce::HAZARDS;
            let found = (0..announce::HAZARD_COUNT)
                .map(|i| at + 8 * i)
                .find(|&at| named(Use(segment.map.u64(at).load(Ordering::Relaxed))));
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
    use crate::region::{Range, Regions};

    #[test]
    fn hazards_do_not_depend_on_what_their_words_hold() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let map = &segment.map;
        let word =
            |i: usize| map.u64(announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8 * i);
        for i in 0..announce::HAZARD_COUNT {
            word(i).store(77, Ordering::Relaxed);
        }
        let hazards = Hazards::new();
        let publish = || Hazard::publish(&hazards, map, 3, Key(5));
        let mut all: Vec<_> = (0..announce::HAZARD_COUNT).map(|_| publish()).collect();
        for i in 0..announce::HAZARD_COUNT {
            assert_eq!(word(i).load(Ordering::Relaxed), 5 | 1 << 32);
        }
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| drop(publish()));
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!one_more.is_finished());
            all.pop();
            one_more.join().unwrap();
        });
        drop(all);
        for i in 0..announce::HAZARD_COUNT {
            assert_eq!(word(i).load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn a_neighbour_that_restores_words_ends_the_wait_late() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let words = [0, 1].map(|i| segment.map.u64(word_at(3, i)));
        let visitors = segment.map.u64(header::VISITORS);
        visitors.store(1 << 3, Ordering::Relaxed);
        words[0].store(5 | 1 << 32, Ordering::Relaxed);
        let (patience, begin) = (Duration::from_millis(100), Instant::now());
        let lives = |_| {
            // only one of them is cleared
            words
                .iter()
                .for_each(|word| word.store(5 | 1 << 32, Ordering::Relaxed));
            // for the test to end, the process lives from a time on
            begin.elapsed() > 100 * patience
        };
        let waited = wait_at_most(patience, &segment, |used| used.names_key(Key(5)), lives);
        assert_eq!(waited, Err(Errno(libc::EBUSY)));
        assert!(begin.elapsed() < 50 * patience);
    }

    #[test]
    fn a_further_key_takes_a_word_that_is_free() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let map = &segment.map;
        let word = |i: u32| map.u64(word_at(3, i)).load(Ordering::Relaxed);
        let hazards = Arc::try_new(Hazards::new()).unwrap();
        let own = OwnHazard::new(&hazards, 3);
        let first = own.publish(map, 3, Key(5));
        let mut more = Vec::new();
        while let Some(hazard) = own.publish_more(map, 3, Key(6)) {
            more.push(hazard);
        }
        assert_eq!(more.len(), announce::HAZARD_COUNT - 1);
        assert_eq!((word(0), word(1)), (5 | 1 << 32, 6 | 1 << 32));
        drop(more);
        assert_eq!((word(0), word(1)), (5 | 1 << 32, 0));
        assert!(own.publish_more(map, 3, Key(7)).is_some());
        drop(first);
    }

    #[test]
    fn queue_pairs_keep_half_of_the_words() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let map = &segment.map;
        let word = |i: u32| map.u64(word_at(3, i)).load(Ordering::Relaxed);
        let hazards = Arc::try_new(Hazards::new()).unwrap();
        let mut own: Vec<_> = (0..5).map(|_| OwnHazard::new(&hazards, 3)).collect();
        for (i, hazard) in own.iter().enumerate() {
            let published = hazard.publish(map, 3, Key(9));
            assert_eq!(word(i as u32), 9 | 1 << 32);
            drop(published);
            assert_eq!(word(i as u32), 0);
        }
        let call = Hazard::publish(&hazards, map, 3, Key(5));
        assert_eq!(word(4), 5 | 1 << 32);
        drop(call);
        own.remove(1);
        let again = OwnHazard::new(&hazards, 3);
        let published = again.publish(map, 3, Key(7));
        assert_eq!(word(1), 7 | 1 << 32);
        drop(published);
        drop((own, again));
        let all: Vec<_> = (0..announce::HAZARD_COUNT)
            .map(|_| Hazard::publish(&hazards, map, 3, Key(5)))
            .collect();
        assert_eq!(all.len(), announce::HAZARD_COUNT);
    }

    /// A call that fails with `EBUSY` can be repeated, and succeeds when no process uses the key
    /// any more.
    #[test]
    fn who_was_refused_can_come_again() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        let range = |addr| Range {
            addr,
            len: 8,
            iova: 0,
        };
        let register = || regions.register(&segment, 1, range(0x1000), 0).unwrap();
        let (ended, changed) = (register(), register());
        let word = |i: usize| {
            let at = announce::AT + announce::STRIDE * 3 + announce::HAZARDS + 8 * i;
            segment.map.u64(at)
        };
        let visitors = segment.map.u64(header::VISITORS);
        visitors.store(1 << 3, Ordering::SeqCst);
        for (i, key) in [ended, changed].into_iter().enumerate() {
            word(i).store(Use::from(key).to_word(), Ordering::SeqCst);
        }
        let mut to = regions.describe(changed).unwrap();
        to.range = range(0x2000);
        let local = |key: Key| {
            let sge = rdma_core_sys::ibv_sge {
                addr: 0,
                length: 8,
                lkey: key.0,
            };
            regions.local(&sge, 1, false)
        };
        let busy = Err(Errno(libc::EBUSY));
        std::thread::scope(|scope| {
            let end = scope.spawn(|| regions.deregister(&segment, ended, |_| true));
            assert_eq!(regions.change(&segment, changed, &to, |_| true), busy);
            assert_eq!(end.join().unwrap(), busy);
        });
        assert_eq!((local(ended), local(changed)), (None, None));
        assert_eq!(regions.describe_unchanged(ended).map(|was| was.pd), None);
        let was = regions.describe_unchanged(changed).unwrap();
        assert_eq!(was.range, range(0x1000));
        for i in 0..2 {
            word(i).store(0, Ordering::SeqCst);
        }
        regions.change(&segment, changed, &to, |_| true).unwrap();
        assert_eq!(local(changed), Some(0x2000));
        assert_eq!(regions.describe_unchanged(changed).map(|was| was.pd), None);
        regions.deregister(&segment, ended, |_| true).unwrap();
        let again = regions.deregister(&segment, ended, |_| true);
        assert_eq!(again, Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn a_dead_visitor_is_not_awaited_and_a_living_one_is() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let regions = Regions::new().unwrap();
        let range = Range {
            addr: 0,
            len: 1,
            iova: 0,
        };
        let register = || regions.register(&segment, 1, range, 0).unwrap();
        let key = register();
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
        let key = register();
        visit(key);
        let now = |lives| regions.deregister_now(&segment, key, |_| lives);
        assert_eq!(now(true), Err(Errno(libc::EBUSY)));
        assert_eq!(now(true), Err(Errno(libc::EBUSY)));
        now(false).unwrap();
        assert_eq!(now(false), Err(Errno(libc::EINVAL)));
        let key = register();
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
