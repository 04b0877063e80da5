//! The word by which two ends agree on parked messages: `docs/softverbs.md` has the protocol.
//!
//! The sender alone shows messages, adds to them, and takes them back; the receiver alone holds the first and makes
//! it its own. All by compare-and-swap of the whole word, whose generation changes with each time that the sender
//! takes back.

use crate::segment::Mapping;
use crate::segment::layout::ParkedWord;
use crate::sync::atomic::Ordering;

/// The sender's side: what it has shown.
#[derive(Debug)]
pub(crate) struct Offer {
    /// What the shared word held when it was last written, if messages are to be had.
    shown: Option<ParkedWord>,
    generation: u32,
}

impl Offer {
    pub(crate) const fn new() -> Self {
        Self {
            shown: None,
            generation: 0,
        }
    }

    /// The next one in the place of `old`: words of that are not its own.
    pub(crate) fn continue_after(&mut self, old: &Self) {
        self.generation = old.generation;
    }

    /// Whether messages are to be had.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.shown.is_some()
    }

    /// Shows `count` messages from position `first` on. Their entries are written.
    pub(crate) fn show(&mut self, map: &Mapping, at: usize, count: u32, first: u32) {
        let word = ParkedWord::new(self.generation, count, first);
        map.u64(at).store(word.0, Ordering::Release);
        self.shown = Some(word);
    }

    /// One more message behind those that are shown; its entry is written. False where the receiver has
    /// taken some in the meantime: it may not look again.
    pub(crate) fn add(&mut self, map: &Mapping, at: usize) -> bool {
        let Some(word) = self.shown else { return false };
        let more = word.with_one_more();
        // It may take hold of the first one, and let go, at the same time.
        for (old, new) in [(word, more), (word.held(), more.held()), (word, more)] {
            let swapped =
                map.u64(at)
                    .compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Relaxed);
            if swapped.is_ok() {
                self.shown = Some(more);
                return true;
            }
        }
        false
    }

    /// Whether the receiver did nothing since the word was written.
    pub(crate) fn is_untouched(&self, map: &Mapping, at: usize) -> bool {
        let now = map.u64(at).load(Ordering::Acquire);
        self.shown.is_some_and(|word| word.0 == now)
    }

    /// From now on the receiver takes nothing more: how many it took, or `None` while it holds one.
    pub(crate) fn take_back(&mut self, map: &Mapping, at: usize) -> Option<u32> {
        let mut now = ParkedWord(map.u64(at).load(Ordering::Acquire));
        let empty = ParkedWord::new(self.generation.wrapping_add(1), 0, 0);
        loop {
            if now.is_held() {
                return None;
            }
            let swapped =
                map.u64(at)
                    .compare_exchange(now.0, empty.0, Ordering::AcqRel, Ordering::Acquire);
            match swapped {
                Ok(_) => break,
                Err(other) => now = ParkedWord(other),
            }
        }
        self.generation = empty.generation();
        Some(self.count(now))
    }

    /// As [`Self::take_back`], and a copy that is under way is for nothing.
    pub(crate) fn withdraw(&mut self, map: &Mapping, at: usize) -> u32 {
        let empty = ParkedWord::new(self.generation.wrapping_add(1), 0, 0);
        self.generation = empty.generation();
        let now = map.u64(at).swap(empty.0, Ordering::AcqRel);
        self.count(ParkedWord(now))
    }

    /// How many were taken until the word was `now`.
    fn count(&mut self, now: ParkedWord) -> u32 {
        self.shown.take().map_or(0, |word| word.taken(now))
    }
}

/// What the receiver may take.
pub(crate) fn look(map: &Mapping, at: usize) -> ParkedWord {
    ParkedWord(map.u64(at).load(Ordering::Acquire))
}

/// Keeps the sender from taking the first message back, until [`commit`] or [`let_go`]. What is to be
/// had then, or `None` where it is not any more.
pub(crate) fn hold(map: &Mapping, at: usize, word: ParkedWord) -> Option<ParkedWord> {
    map.u64(at)
        .compare_exchange(word.0, word.held().0, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
        .then(|| word.held())
}

/// Gives a held message back.
pub(crate) fn let_go(map: &Mapping, at: usize, held: ParkedWord) {
    let mut word = held;
    loop {
        let free = word.let_go().0;
        let swapped =
            map.u64(at)
                .compare_exchange(word.0, free, Ordering::AcqRel, Ordering::Acquire);
        match swapped {
            // Another message was added behind it.
            Err(now) if ParkedWord(now).has_grown_from(word) => word = ParkedWord(now),
            _ => return,
        }
    }
}

/// Makes the first message the receiver's own. False where the sender has taken it back.
pub(crate) fn commit(map: &Mapping, at: usize, seen: ParkedWord) -> bool {
    let mut word = seen;
    loop {
        let rest = word.without_first().0;
        let swapped =
            map.u64(at)
                .compare_exchange(word.0, rest, Ordering::AcqRel, Ordering::Acquire);
        match swapped {
            Ok(_) => return true,
            Err(now) if ParkedWord(now).has_grown_from(word) => word = ParkedWord(now),
            Err(_) => return false,
        }
    }
}
