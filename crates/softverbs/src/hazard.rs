//! Hazards: words in an owner's segment in which initiators publish the keys that they use, and the
//! queue pairs through which they do. The owner makes a key invalid, or ends rights of a queue
//! pair, and then waits until no hazard names the key or the queue pair with these rights.

use std::time::{Duration, Instant};

use rdma_core_sys::{IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

use crate::key::Key;
use crate::limits::PEER_WAIT;
use crate::segment::layout::{self, StateWord, announce, header, xrc};
use crate::segment::{Mapping, OwnSegment};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{Arc, pause};
use crate::sys::{Errno, Res};

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

/// A process whose hazards an owner reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Visitor {
    pub(crate) slot: u32,
    /// Distinguishes the process from earlier and later ones of its slot. `None`: any of them.
    pub(crate) cookie: Option<u64>,
}

impl From<u32> for Visitor {
    fn from(slot: u32) -> Self {
        Self { slot, cookie: None }
    }
}

/// Enters the process in `slot` into the list of processes whose hazards the owner of the segment
/// (`map`) reads. To be called before the process publishes its first hazard there.
pub(crate) fn become_visitor(map: &Mapping, slot: u32, cookie: u64) {
    let at = announce::AT + announce::STRIDE * slot as usize;
    map.u64(at + announce::VISITOR)
        .store(cookie, Ordering::Relaxed);
    // An ended process that had this slot may have left hazards. An exchange, because the owner may
    // clear the same word at the same time: one of the two finds the other's.
    for number in 0..announce::HAZARD_COUNT {
        map.u64(at + announce::HAZARDS + 8 * number)
            .swap(0, Ordering::Relaxed);
    }
    map.u64(header::VISITORS + 8 * (slot as usize / 64))
        .fetch_or(1 << (slot % 64), Ordering::SeqCst);
}

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
pub(crate) fn wait(segment: &OwnSegment, key: Key, lives: impl Fn(Visitor) -> bool) -> Res<()> {
    wait_for(segment, |used| used.names_key(key), lives)
}

/// Waits until no living process writes into receives of the queue pair with this index, which
/// accepts no further messages.
///
/// # Errors
/// `EBUSY`: a process still does after 5 seconds.
pub(crate) fn await_receive(
    segment: &OwnSegment,
    qp: u32,
    lives: impl Fn(Visitor) -> bool,
) -> Res<()> {
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
    lives: impl Fn(Visitor) -> bool,
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
    lives: impl Fn(Visitor) -> bool,
) -> Res<()> {
    fence(Ordering::SeqCst);
    wait_for(segment, |used| used.names_shared_receive(srq), lives)
}

/// Whether a living process has a hazard for receives of the queue pair with this index, which
/// accepts no further messages. Does not wait.
pub(crate) fn receive_in_use(
    segment: &OwnSegment,
    qp: u32,
    lives: impl Fn(Visitor) -> bool,
) -> bool {
    fence(Ordering::SeqCst);
    is_named(segment, |used| used.names_receive(qp), lives)
}

fn wait_for(
    segment: &OwnSegment,
    named: impl Fn(Use) -> bool,
    lives: impl Fn(Visitor) -> bool,
) -> Res<()> {
    let tidy = |found: Found| {
        found.is_alive(&segment.map, &lives);
    };
    await_words(|| find(segment, &named), tidy)
}

/// Waits until `find` finds no word that a process has stored. `tidy` clears the word that was
/// found if its process has ended.
///
/// # Errors
/// `EBUSY`: it still finds one after 5 seconds.
pub(crate) fn await_words<T>(find: impl Fn() -> Option<T>, tidy: impl Fn(T)) -> Res<()> {
    wait_at_most(PEER_WAIT, find, tidy)
}

/// As [`await_words`], with another limit. It ends the wait for processes that have ended too: a
/// process that breaks the protocol can restore the words that are cleared.
fn wait_at_most<T>(limit: Duration, find: impl Fn() -> Option<T>, tidy: impl Fn(T)) -> Res<()> {
    let begin = Instant::now();
    let mut round = 0u32;
    while let Some(found) = find() {
        round += 1;
        if round > 100 {
            tidy(found);
            if begin.elapsed() > limit {
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
pub(crate) fn is_used(segment: &OwnSegment, key: Key, lives: impl Fn(Visitor) -> bool) -> bool {
    is_named(segment, |used| used.names_key(key), lives)
}

/// Whether a living process may still write into receives of the queue pair with this index, or
/// access memory through it. The queue pair permits neither any more. Does not wait.
pub(crate) fn queue_pair_in_use(
    segment: &OwnSegment,
    qp: u32,
    lives: impl Fn(Visitor) -> bool,
) -> bool {
    let named = |used: Use| used.names_receive(qp) || used.names_access(qp, RIGHTS);
    fence(Ordering::SeqCst);
    is_named(segment, named, lives)
}

fn is_named(
    segment: &OwnSegment,
    named: impl Fn(Use) -> bool,
    lives: impl Fn(Visitor) -> bool,
) -> bool {
    // One round for each hazard word. A process that restores a cleared word breaks the protocol,
    // and cannot extend the loop.
    for _ in 0..layout::MAX_PROCESSES * announce::HAZARD_COUNT {
        let Some(found) = find(segment, &named) else {
            fence(Ordering::Acquire);
            return false;
        };
        if found.is_alive(&segment.map, &lives) {
            return true;
        }
    }
    true
}

/// A hazard: the slot of its process, its offset in the owner's segment, and its content.
#[derive(Clone, Copy, Debug)]
struct Found {
    slot: u32,
    at: usize,
    used: Use,
}

impl Found {
    /// Whether the process that has published it may still run. If not, clears the word, unless a
    /// later process of the slot has changed it meanwhile.
    ///
    /// The caller has ended the key or the right and then run a full fence. If the later process
    /// publishes before this fence, the cookie is read as it has stored it. Otherwise it finds that
    /// the key or the right has ended, and uses neither: nothing is lost if its word, with the same
    /// value, is cleared.
    fn is_alive(self, map: &Mapping, lives: impl Fn(Visitor) -> bool) -> bool {
        let at = announce::AT + announce::STRIDE * self.slot as usize + announce::VISITOR;
        let cookie = map.u64(at).load(Ordering::Relaxed);
        let living = lives(Visitor {
            slot: self.slot,
            cookie: Some(cookie).filter(|&cookie| cookie != 0),
        });
        if !living {
            let (word, relaxed) = (map.u64(self.at), Ordering::Relaxed);
            let _ = word.compare_exchange(self.used.to_word(), 0, relaxed, relaxed);
        }
        living
    }
}

/// Finds a hazard for which `named` returns true.
fn find(segment: &OwnSegment, named: impl Fn(Use) -> bool) -> Option<Found> {
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
                .map(|at| (at, Use(segment.map.u64(at).load(Ordering::Relaxed))))
                .find(|&(_, used)| named(used));
            if let Some((at, used)) = found {
                let slot = slot as u32;
                return Some(Found { slot, at, used });
            }
        }
        None
    })
}

#[cfg(test)]
mod tests;
