//! Hazards: words in an owner's segment in which initiators publish the keys that they use, and the
//! queue pairs through which they do. The owner makes a key invalid, or ends rights of a queue
//! pair, and then waits until no hazard names the key or the queue pair with these rights.

use std::time::{Duration, Instant};

use rdma_core_sys::{IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

use crate::key::Key;
use crate::segment::layout::{self, StateWord, announce, header, xrc};
use crate::segment::{Mapping, OwnSegment};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{Arc, pause};
use crate::sys::{Errno, Res};

/// Longest wait for initiators.
const PATIENCE: Duration = Duration::from_secs(5);

/// Largest number of bytes that are copied under one hazard: a deregistration waits for at most one
/// such copy of each hazard.
pub(crate) const MOST_AT_ONCE: usize = 1 << 22;

/// The rights that hazards name, in the form of `ibv_access_flags`.
pub(crate) const RIGHTS: u32 =
    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/// The content of a hazard word. Bits 0 to 31: the key in use; 32: 1; 33 to 47: index + 1 of the
/// owner's queue pair or SRQ, 0 for none; 48: it is an SRQ; 49 to 51: the rights that an access
/// through the queue pair needs, 0 for a receive.
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

    /// The key of an access through a queue pair of the owner, by a request that needs `rights`,
    /// some of [`RIGHTS`].
    #[inline(always)]
    pub(crate) fn of_access(through: Through, key: Key, rights: u32) -> Self {
        Self(Self::from(key).0 | through.0 | rights_bits(rights))
    }

    fn to_word(self) -> u64 {
        self.0
    }

    fn names_access(self, qp: u32, rights: u32) -> bool {
        self.0 >> 33 & 0xffff == u64::from(qp) + 1 && self.0 & rights_bits(rights) != 0
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

#[inline(always)]
const fn rights_bits(rights: u32) -> u64 {
    const FIRST: u32 = IBV_ACCESS_REMOTE_WRITE.trailing_zeros();
    ((rights & RIGHTS) as u64) << (49 - FIRST)
}
const _: () = assert!(rights_bits(RIGHTS) == 7 << 49);

/// The queue pair of the owner that the hazards of accesses name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Through(u64);

impl Through {
    /// An XRC target, which is no queue pair of the owner.
    pub(crate) const TARGET: Self = Self(0);

    /// The queue pair with this index.
    pub(crate) fn queue_pair(index: u32) -> Self {
        Self((u64::from(index & 0x3fff) + 1) << 33)
    }
}

/// The process of a word in which accesses through an XRC target are published. Bits 0 to 2 of such
/// a word: the rights in use; 3 to 13: slot + 1; 14 to 63: the lowest bits of the process's cookie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Accessor(u64);

impl Accessor {
    const RIGHTS: u64 = 7;

    pub(crate) fn new(slot: u32, cookie: u64) -> Self {
        Self(cookie << 14 | (u64::from(slot & 0x3ff) + 1) << 3)
    }

    /// Publishes an access that needs `rights` in a free word of an XRC target; its words are at
    /// `at` in `map`. The caller then runs a full fence. `None`: no word is free.
    #[inline]
    pub(crate) fn enter(self, map: &Mapping, at: usize, rights: u32) -> Option<Entered<'_>> {
        let new = self.0 | rights_bits(rights) >> 49;
        // An initiator that is not connected any more may use one at the same time.
        (0..xrc::USED_WORDS).map(|i| at + 8 * i).find_map(|at| {
            let word = map.u64(at);
            let free = word.load(Ordering::Relaxed) == 0;
            let taken = free
                && word
                    .compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            // only of a word that was taken: dropping it clears the word
            taken.then(|| Entered(Some((word, at))))
        })
    }

    /// Whether the word has one of these rights.
    pub(crate) fn has(word: u64, rights: u32) -> bool {
        word & rights_bits(rights) >> 49 != 0
    }

    pub(crate) fn is_of(self, word: u64) -> bool {
        word & !Self::RIGHTS == self.0
    }

    pub(crate) fn slot_of(word: u64) -> u32 {
        ((word >> 3) as u32 & 0x7ff).saturating_sub(1)
    }
}

/// An access that has begun. For an XRC target its word and the word's offset, which shows it.
pub(crate) struct Entered<'a>(Option<(&'a AtomicU64, usize)>);

impl Entered<'_> {
    /// Through a queue pair: the hazard alone shows the access.
    #[inline(always)]
    fn queue_pair() -> Self {
        Self(None)
    }

    /// The offset of the word, which the caller clears.
    pub(crate) fn leak(mut self) -> usize {
        self.0.take().map_or(0, |(_, at)| at)
    }
}

impl Drop for Entered<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some((word, _)) = self.0 {
            word.store(0, Ordering::Release);
        }
    }
}

/// The queue pair of the other end through which an initiator accesses memory, and the state in
/// which the initiator has read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate<'a> {
    state: &'a AtomicU64,
    word: StateWord,
    through: Through,
    /// Where an XRC target's words for accesses are, and the initiator's process.
    target: Option<(&'a Mapping, usize, Accessor)>,
}

impl<'a> Gate<'a> {
    /// A queue pair. `state`: its state word. `word`: the value when it was read.
    #[inline(always)]
    pub(crate) fn new(state: &'a AtomicU64, word: StateWord, through: Through) -> Self {
        Self {
            state,
            word,
            through,
            target: None,
        }
    }

    /// The same for an XRC target, whose words for accesses are at `at` in `map`, and whose
    /// initiator's process is `accessor`.
    #[inline(always)]
    pub(crate) fn of_target(self, map: &'a Mapping, at: usize, accessor: Accessor) -> Self {
        Self {
            target: Some((map, at, accessor)),
            ..self
        }
    }

    /// Begins an access that needs `rights`. The caller publishes [`Self::used`] next, and then
    /// checks [`Self::is_open`]. `None`: no access is possible now.
    #[inline(always)]
    pub(crate) fn enter(&self, rights: u32) -> Option<Entered<'a>> {
        match self.target {
            None => Some(Entered::queue_pair()),
            Some((map, at, accessor)) => accessor.enter(map, at, rights),
        }
    }

    /// What the hazard of a request that needs `rights` names.
    #[inline(always)]
    pub(crate) fn used(&self, key: Key, rights: u32) -> Use {
        Use::of_access(self.through, key, rights)
    }

    /// Whether the queue pair still is in the state in which it was read. If so, and the caller has
    /// published [`Self::used`] before, the owner waits for the caller when it ends these rights.
    #[inline(always)]
    pub(crate) fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) == self.word.0
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
        what: impl Into<Use>,
    ) -> Option<Hazard<'a>> {
        let number = self.hazards.reserve_below(announce::HAZARD_COUNT as u32)?;
        Some(Hazard::publish_in(
            &self.hazards,
            map,
            (own_slot, number),
            what,
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

/// Waits until no living process accesses memory through the queue pair with this index by a
/// request that needs one of `rights`. The queue pair does not grant them any more.
///
/// # Errors
/// `EBUSY`: a process still does after 5 seconds.
pub(crate) fn await_accesses(
    segment: &OwnSegment,
    qp: u32,
    rights: u32,
    lives: impl Fn(u32) -> bool,
) -> Res<()> {
    fence(Ordering::SeqCst);
    wait_for(segment, |used| used.names_access(qp, rights), lives)
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
    let tidy = |(visitor, word)| {
        if !lives(visitor) {
            segment.map.u64(word).store(0, Ordering::Relaxed);
        }
    };
    await_words(|| find(segment, &named), tidy)
}

/// Waits until `find` finds no word that a process has stored. `tidy` clears the word that was
/// found if its process has ended.
///
/// # Errors
/// `EBUSY`: it still finds one after 5 seconds.
pub(crate) fn await_words<T>(find: impl Fn() -> Option<T>, tidy: impl Fn(T)) -> Res<()> {
    wait_at_most(PATIENCE, find, tidy)
}

/// As [`await_words`], with another limit. It ends the wait for processes that have ended too: a
/// process that breaks the protocol can restore the words that are cleared.
fn wait_at_most<T>(patience: Duration, find: impl Fn() -> Option<T>, tidy: impl Fn(T)) -> Res<()> {
    let begin = Instant::now();
    let mut round = 0u32;
    while let Some(found) = find() {
        round += 1;
        if round > 100 {
            tidy(found);
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
    fn uses_name_what_they_are_of() {
        let (write, read) = (IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ);
        let access = Use::of_access(
            Through::queue_pair(7),
            Key(5),
            write | IBV_ACCESS_REMOTE_ATOMIC,
        );
        assert!(access.names_key(Key(5)) && !access.names_key(Key(6)));
        assert!(access.names_access(7, RIGHTS) && access.names_access(7, write));
        assert!(!access.names_access(7, read) && !access.names_access(6, RIGHTS));
        assert!(!access.names_receive(7) && !access.names_shared_receive(7));
        // the highest index, and all bits of a key
        let last = Use::of_access(Through::queue_pair(0x3fff), Key(u32::MAX), RIGHTS);
        assert!(last.names_key(Key(u32::MAX)) && last.names_access(0x3fff, read));
        assert_eq!(last.to_word() >> 52, 0);
        for other in [
            Use::of_receive(7, Key(5)),
            Use::of_shared_receive(7, Key(5)),
            Use::from(Key(5)),
            Use::of_access(Through::TARGET, Key(5), RIGHTS),
        ] {
            assert!(other.names_key(Key(5)));
            assert!(
                (0..0x4000).all(|qp| !other.names_access(qp, RIGHTS)),
                "{other:?}"
            );
        }
    }

    #[test]
    fn accesses_through_a_target_leave_the_words_of_others() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        // any 8 words
        let (map, at) = (&segment.map, word_at(3, 0));
        let words = || {
            let all = (0..xrc::USED_WORDS).map(|i| map.u64(at + 8 * i).load(Ordering::Relaxed));
            all.collect::<Vec<_>>()
        };
        let enter = |slot, rights| Accessor::new(slot, 7).enter(map, at, rights);
        let mut all = Vec::new();
        let mut expected = vec![0; xrc::USED_WORDS];
        for i in 0..xrc::USED_WORDS {
            all.push(enter(i as u32, IBV_ACCESS_REMOTE_ATOMIC).unwrap());
            expected[i] = Accessor::new(i as u32, 7).0 | 4;
            assert_eq!(words(), expected);
        }
        assert!(enter(99, IBV_ACCESS_REMOTE_READ).is_none());
        assert_eq!(words(), expected);
        drop(all.remove(2));
        expected[2] = 0;
        assert_eq!(words(), expected);
        all.push(enter(99, IBV_ACCESS_REMOTE_WRITE).unwrap());
        expected[2] = Accessor::new(99, 7).0 | 1;
        assert_eq!(words(), expected);
        drop(all);
        assert!(words().iter().all(|&word| word == 0));
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
        let found = || find(&segment, |used| used.names_key(Key(5)));
        let tidy = |(visitor, word)| {
            if !lives(visitor) {
                segment.map.u64(word).store(0, Ordering::Relaxed);
            }
        };
        let waited = wait_at_most(patience, found, tidy);
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
