//! Accesses to memory through a target: words in its entry in which initiators and agents publish
//! the rights that they use, beside the hazards in the segment of the memory's owner. A process
//! that ends rights of the target stores its new state, and waits until no word has these rights.

use crate::hazard::{Accessor, Entered, await_words};
use crate::process::Process;
use crate::segment::Mapping;
use crate::segment::layout::xrc as layout;
use crate::sync::Arc;
use crate::sync::atomic::{Ordering, fence};
use crate::sys::Res;

/// The words of the entry at `at` that have one of `rights`: their content and offsets.
fn find(map: &Mapping, at: usize, rights: u32) -> impl Iterator<Item = (u64, usize)> {
    (0..layout::USED_WORDS)
        .map(move |i| at + layout::USED + 8 * i)
        .map(|at| (map.u64(at).load(Ordering::Relaxed), at))
        .filter(move |&(word, _)| Accessor::has(word, rights))
}

/// Whether the process that has stored the word may still run. The slot of an ended one may belong
/// to another process.
fn lives(process: &Process, word: u64) -> bool {
    let slot = Accessor::slot_of(word);
    match process.cookie_of(slot) {
        Some(cookie) => Accessor::new(slot, cookie).is_of(word),
        None => process.lives(slot),
    }
}

/// Clears a word if the process that has stored it has ended. Returns whether it may still run.
fn tidy_word(process: &Process, map: &Mapping, (word, at): (u64, usize)) -> bool {
    let living = lives(process, word);
    if !living {
        // If the word has changed, another process uses it by now.
        let _ = map
            .u64(at)
            .compare_exchange(word, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
    living
}

/// Waits until no living process accesses memory through the target with its entry at `at` by a
/// request that needs one of `rights`, which the target does not grant any more. The caller holds
/// no lock.
///
/// # Errors
/// `EBUSY`: a process still does after 5 seconds.
pub(super) fn wait(process: &Process, map: &Mapping, at: usize, rights: u32) -> Res<()> {
    fence(Ordering::SeqCst);
    await_words(
        || find(map, at, rights).next(),
        |found| {
            tidy_word(process, map, found);
        },
    )
}

/// Clears the words of ended processes. Returns whether a living one may access memory through the
/// target with its entry at `at`.
pub(super) fn tidy(process: &Process, map: &Mapping, at: usize, rights: u32) -> bool {
    let living = find(map, at, rights).filter(|&found| tidy_word(process, map, found));
    living.count() > 0
}

/// An access of this process's agent through a target.
pub(crate) struct AgentAccess {
    map: Arc<Mapping>,
    at: usize,
}

impl AgentAccess {
    /// Publishes that the agent of `process` uses `rights` of the target with its entry at `at`.
    /// The caller then runs a full fence and checks the target. `None`: more processes are in the
    /// middle of an access than requests of one initiator can cause.
    pub(crate) fn enter(
        process: &Process,
        map: &Arc<Mapping>,
        at: usize,
        rights: u32,
    ) -> Option<Self> {
        let who = Accessor::new(process.slot, process.identity.cookie);
        let enter = || who.enter(map, at + layout::USED, rights).map(Entered::leak);
        let word = enter().or_else(|| {
            tidy(process, map, at, u32::MAX);
            enter()
        })?;
        Some(Self {
            map: Arc::clone(map),
            at: word,
        })
    }
}

impl Drop for AgentAccess {
    fn drop(&mut self) {
        self.map.u64(self.at).store(0, Ordering::Release);
    }
}
