//! The shared word by which two ends agree on pending messages. `docs/softverbs.md` has the
//! protocol.
//!
//! Only the sender shows, adds and withdraws messages. Only the receiver holds the first message
//! and commits it. Both use compare-and-swap of the whole word, whose generation changes each time
//! the sender withdraws.

use crate::segment::Mapping;
use crate::segment::layout::PendingWord;
use crate::sync::atomic::Ordering;

/// The sender's side: the messages that it has shown.
#[derive(Debug)]
pub(crate) struct Offer {
    /// The value that the sender last wrote to the shared word, if messages are shown.
    shown: Option<PendingWord>,
    generation: u32,
}

impl Offer {
    pub(crate) const fn new() -> Self {
        Self {
            shown: None,
            generation: 0,
        }
    }

    /// Continues the generation of `old` at the same place, so that words of `old` are not mistaken
    /// for words of this offer.
    pub(crate) fn continue_after(&mut self, old: &Self) {
        self.generation = old.generation;
    }

    /// Whether messages are shown.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.shown.is_some()
    }

    /// Shows `count` messages from position `first` on. The caller has written their entries.
    pub(crate) fn show(&mut self, map: &Mapping, at: usize, count: u32, first: u32) {
        let word = PendingWord::new(self.generation, count, first);
        map.u64(at).store(word.0, Ordering::Release);
        self.shown = Some(word);
    }

    /// Adds one message behind those that are shown. The caller has written its entry. Returns
    /// false if the receiver has taken messages in the meantime: the receiver may not check again.
    pub(crate) fn add(&mut self, map: &Mapping, at: usize) -> bool {
        let Some(word) = self.shown else { return false };
        let more = word.with_one_more();
        // The receiver may hold the first message, and let it go, at the same time.
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

    /// Whether the receiver has not changed the word since the sender wrote it.
    pub(crate) fn is_untouched(&self, map: &Mapping, at: usize) -> bool {
        let now = map.u64(at).load(Ordering::Acquire);
        self.shown.is_some_and(|word| word.0 == now)
    }

    /// Withdraws the messages. Returns the number of messages that the receiver took, or `None`
    /// while it holds one.
    pub(crate) fn take_back(&mut self, map: &Mapping, at: usize) -> Option<u32> {
        let mut now = PendingWord(map.u64(at).load(Ordering::Acquire));
        let empty = PendingWord::new(self.generation.wrapping_add(1), 0, 0);
        loop {
            if now.is_held() {
                return None;
            }
            let swapped =
                map.u64(at)
                    .compare_exchange(now.0, empty.0, Ordering::AcqRel, Ordering::Acquire);
            match swapped {
                Ok(_) => break,
                Err(other) => now = PendingWord(other),
            }
        }
        self.generation = empty.generation();
        Some(self.count(now))
    }

    /// As [`Self::take_back`], also while the receiver holds a message: its commit then fails.
    pub(crate) fn withdraw(&mut self, map: &Mapping, at: usize) -> u32 {
        let empty = PendingWord::new(self.generation.wrapping_add(1), 0, 0);
        self.generation = empty.generation();
        let now = map.u64(at).swap(empty.0, Ordering::AcqRel);
        self.count(PendingWord(now))
    }

    /// Number of messages that were taken until the word was `now`.
    fn count(&mut self, now: PendingWord) -> u32 {
        self.shown.take().map_or(0, |word| word.taken(now))
    }
}

/// Reads the word: the messages that the receiver may take.
pub(crate) fn look(map: &Mapping, at: usize) -> PendingWord {
    PendingWord(map.u64(at).load(Ordering::Acquire))
}

/// Prevents [`Offer::take_back`] until [`commit`] or [`release`]. Returns the new word, or `None`
/// if the messages are not shown any more.
pub(crate) fn hold(map: &Mapping, at: usize, word: PendingWord) -> Option<PendingWord> {
    map.u64(at)
        .compare_exchange(word.0, word.held().0, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
        .then(|| word.held())
}

/// Releases a held message without taking it.
pub(crate) fn release(map: &Mapping, at: usize, held: PendingWord) {
    let mut word = held;
    loop {
        let free = word.released().0;
        let swapped =
            map.u64(at)
                .compare_exchange(word.0, free, Ordering::AcqRel, Ordering::Acquire);
        match swapped {
            // Another message was added behind it.
            Err(now) if PendingWord(now).has_grown_from(word) => word = PendingWord(now),
            _ => return,
        }
    }
}

/// Commits the first message: the receiver has taken it. Returns false if the sender has withdrawn
/// it.
pub(crate) fn commit(map: &Mapping, at: usize, seen: PendingWord) -> bool {
    let mut word = seen;
    loop {
        let rest = word.without_first().0;
        let swapped =
            map.u64(at)
                .compare_exchange(word.0, rest, Ordering::AcqRel, Ordering::Acquire);
        match swapped {
            Ok(_) => return true,
            Err(now) if PendingWord(now).has_grown_from(word) => word = PendingWord(now),
            Err(_) => return false,
        }
    }
}
