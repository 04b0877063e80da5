//! 64-bit atomics on a peer's region. Cross-memory attach has no atomic operations, so an initiator
//! holds one of the owner's locks, chosen by the word's address, while it reads and writes the
//! word. All atomics on a process's memory use these locks, also those of the process itself. The
//! exception is memory in device buffers, which every process changes with the processor's atomics.

use std::time::{Duration, Instant};

use rdma_core_sys::{IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_WRITE};

use super::device_buffer;
use super::remote::{AccessError, Target, resolve};
use crate::dm::{Buffers, Direct, Shown};
use crate::hazard::{Gate, Hazard};
use crate::peer::Peer;
use crate::segment::Mapping;
use crate::segment::layout::stripe;
use crate::sync::atomic::Ordering;
use crate::sync::pause;
use crate::sys;

/// The operation on the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Add(u64),
    /// Compare and swap: if the word equals the first value, it becomes the second.
    Swap(u64, u64),
    /// Atomic write: the word becomes this value.
    Store(u64),
}

impl Change {
    fn apply(self, old: u64) -> Option<u64> {
        match self {
            Self::Add(add) => Some(old.wrapping_add(add)),
            Self::Swap(compare, swap) => (old == compare).then_some(swap),
            Self::Store(value) => Some(value),
        }
    }

    /// The access right that the operation needs.
    pub(crate) fn right(self) -> u32 {
        match self {
            Self::Store(_) => IBV_ACCESS_REMOTE_WRITE,
            _ => IBV_ACCESS_REMOTE_ATOMIC,
        }
    }
}

/// Longest wait of a call for a lock that a living process holds. A process that is not stopped
/// holds a lock only for a read and a write of one word.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(2);
/// As [`LOCK_WAIT`], for a request, which waits in its send queue afterwards.
pub(crate) const REQUEST_LOCK_WAIT: Duration = Duration::from_millis(1);
/// Longest part of a wait that counts between two looks at the clock. A process that was stopped
/// does not find its time over when it continues: the holder may have been stopped with it.
const STEP: Duration = Duration::from_millis(50);

/// The time that an operation waits for locks.
pub(super) struct LockWait {
    left: Duration,
    seen: Option<Instant>,
}

impl LockWait {
    pub(super) fn new(left: Duration) -> Self {
        Self { left, seen: None }
    }

    /// Attempts before the holder of a lock is looked at.
    fn rounds(&self) -> u32 {
        if self.left.is_zero() { 0 } else { ROUNDS }
    }

    /// Whether the time is over.
    fn is_over(&mut self) -> bool {
        let now = Instant::now();
        if let Some(seen) = self.seen.replace(now) {
            let passed = now.saturating_duration_since(seen).min(STEP);
            self.left = self.left.saturating_sub(passed);
        }
        self.left.is_zero()
    }
}

/// Attempts before the liveness of the lock's holder is checked; in tests the check comes at once.
const ROUNDS: u32 = if cfg!(any(test, fuzzing)) { 0 } else { 1000 };

/// A held lock in the owner's segment. The lock word names the holder: slot + 1, and the lower 48
/// bits of its cookie.
pub(crate) struct Stripe<'a> {
    map: &'a Mapping,
    at: usize,
    own: u64,
}

impl<'a> Stripe<'a> {
    /// Acquires the lock for `addr` in the owner's segment (`map`) for the process that `own`
    /// names. `lives` returns whether the holder in a lock word may still be running. `None` if
    /// another living process holds the lock for longer than `wait`.
    pub(crate) fn lock(
        map: &'a Mapping,
        addr: u64,
        own: u64,
        wait: Duration,
        lives: impl Fn(u64) -> bool,
    ) -> Option<Self> {
        let wait = &mut LockWait::new(wait);
        Self::lock_index(map, index_of(addr), own, wait, lives)
    }

    /// As [`Self::lock`], for the lock with an index.
    pub(super) fn lock_index(
        map: &'a Mapping,
        index: usize,
        own: u64,
        wait: &mut LockWait,
        lives: impl Fn(u64) -> bool,
    ) -> Option<Self> {
        let at = stripe::AT + stripe::STRIDE * index;
        let word = map.u64(at);
        let (mut round, rounds) = (0u32, wait.rounds());
        loop {
            let held = word.load(Ordering::Relaxed);
            // On a busy machine the rounds up to here may take longer than `wait`.
            let late = round > rounds && wait.is_over();
            let look = late || round > rounds && round.is_multiple_of(64);
            // A holder that has ended has either changed the word or not; each outcome is an atomic
            // operation, so the lock can be taken over.
            let free = held == 0 || look && !lives(held);
            if free
                && word
                    .compare_exchange(held, own, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
            {
                return Some(Self { map, at, own });
            }
            // also if another process has changed the word since: it may do so each time
            if late {
                return None;
            }
            pause(round);
            round = round.saturating_add(1);
        }
    }
}

/// The index of the lock of an address. Adjacent words have different locks.
pub(super) fn index_of(addr: u64) -> usize {
    (addr >> 3 ^ addr >> 12) as usize % stripe::COUNT
}

impl Drop for Stripe<'_> {
    fn drop(&mut self) {
        // Fails if another process considered this process dead and has taken the lock over.
        let word = self.map.u64(self.at);
        let _ = word.compare_exchange(self.own, 0, Ordering::Release, Ordering::Relaxed);
    }
}

pub(super) fn holder(slot: u32, cookie: u64) -> u64 {
    (u64::from(slot) + 1) << 48 | cookie & 0xffff_ffff_ffff
}

/// Holds the lock of a word of a segment's owner, as a process that is stopped between a read and a
/// write does.
#[cfg(test)]
pub(crate) fn hold_lock<'a>(initiator: &impl Initiator, map: &'a Mapping, addr: u64) -> Stripe<'a> {
    let (slot, cookie) = initiator.identity();
    Stripe::lock(map, addr, holder(slot, cookie), LOCK_WAIT, |_| true).unwrap()
}

/// The process that executes an atomic: the locks of words name it, and it finds out whether other
/// holders of locks live.
pub(crate) trait Initiator {
    /// Its slot, and the cookie that identifies it in the slot.
    fn identity(&self) -> (u32, u64);
    /// The cookie of the live process in a slot, if the registry has one.
    fn cookie_of(&self, slot: u32) -> Option<u64>;
    /// Whether the process in a slot may still be alive.
    fn lives(&self, slot: u32) -> bool;
}

pub(super) fn lives(initiator: &impl Initiator, held: u64) -> bool {
    let slot = ((held >> 48) as u32).wrapping_sub(1);
    match initiator.cookie_of(slot) {
        Some(cookie) => holder(slot, cookie) == held,
        None => initiator.lives(slot),
    }
}

/// Changes a word of a peer's region, through the queue pair of `gate`, and returns its earlier
/// value. The address in the request is a multiple of 8. Waits at most `wait` for the word's lock.
///
/// # Errors
/// [`AccessError`]; the word is unchanged.
pub(crate) fn change(
    initiator: &impl Initiator,
    peer: &Peer,
    (target, gate): (Target, Gate<'_>),
    change: Change,
    wait: Duration,
) -> Result<u64, AccessError> {
    let (slot, _) = initiator.identity();
    let entered = gate.enter(change.right()).ok_or(AccessError::Moved)?;
    let used = gate.used(target.key, change.right());
    let hazard = Hazard::publish(&peer.hazards, &peer.map, slot, used);
    if !gate.is_open() {
        return Err(AccessError::Moved);
    }
    let place =
        resolve(&peer.map, target, target.addr, 8, change.right()).ok_or(AccessError::Remote)?;
    // The word's address, not the key, decides the method: an implicit region also covers device
    // buffers.
    let direct = if place.direct.stamp == 0 {
        Shown::at(&peer.map, place.addr, true).map(|shown| Direct {
            stamp: shown.stamp,
            offset: place.addr.wrapping_sub(shown.addr),
        })
    } else {
        Some(place.direct)
    };
    if let Some(direct) = direct {
        let there = peer.direct(direct.stamp).ok_or(AccessError::Refused)?;
        return device_buffer::change(&there, direct.offset, |old| change.apply(old));
    }
    if !peer.check_alive() {
        return Err(AccessError::Dead);
    }
    let at = place.addr;
    if !at.is_multiple_of(8) {
        // Behind an aligned address of a zero-based region or window. The word would lie in two
        // words, each with a lock of its own.
        return Err(AccessError::Remote);
    }
    if peer.refuses() {
        return Err(AccessError::Refused);
    }
    let old = change_ordinary(initiator, peer, at, change, wait)?;
    drop((hazard, entered));
    Ok(old)
}

/// Changes a word of this process's own memory for a peer; `own` is this process as a peer. The
/// caller holds a hazard for the key that permits the access.
///
/// # Errors
/// [`AccessError::Unavailable`]: another process has held the word's lock for more than 1 ms.
/// [`AccessError::Remote`]: the word is not mapped.
pub(crate) fn change_own(
    initiator: &impl Initiator,
    buffers: &Buffers,
    own: &Peer,
    addr: u64,
    change: Change,
) -> Result<u64, AccessError> {
    match buffers.find(addr, 8, true) {
        Some((buffer, offset)) => {
            device_buffer::change(&buffer.map, offset, |old| change.apply(old))
        }
        None => change_ordinary(initiator, own, addr, change, Duration::from_millis(1)),
    }
}

/// Changes a word outside device buffers, under its lock.
fn change_ordinary(
    initiator: &impl Initiator,
    peer: &Peer,
    at: u64,
    change: Change,
    wait: Duration,
) -> Result<u64, AccessError> {
    let (slot, cookie) = initiator.identity();
    let own = holder(slot, cookie);
    let stripe = Stripe::lock(&peer.map, at, own, wait, |held| lives(initiator, held))
        .ok_or(AccessError::Unavailable)?;
    let mut old = [0u8; 8];
    let local = [sys::as_local(old.as_mut_ptr() as u64, 8)];
    let remote = [sys::as_local(at, 8)];
    let pid = peer.identity.pid;
    whole(peer, sys::vm_read(pid, &local, &remote), 8)?;
    let old = u64::from_ne_bytes(old);
    if let Some(new) = change.apply(old) {
        let new = new.to_ne_bytes();
        let local = [sys::as_local(new.as_ptr() as u64, 8)];
        whole(peer, sys::vm_write(pid, &local, &remote), 8)?;
    }
    drop(stripe);
    Ok(old)
}

/// The result of a copy of `len` bytes.
pub(super) fn whole(peer: &Peer, copied: sys::Res<usize>, len: usize) -> Result<(), AccessError> {
    match copied {
        Ok(bytes) if bytes == len => Ok(()),
        Ok(_) => Err(AccessError::Remote),
        Err(error) => Err(match error.0 {
            libc::ESRCH => AccessError::Dead,
            _ if sys::refused(error) => {
                peer.set_refuses(error);
                AccessError::Refused
            }
            _ => AccessError::Remote,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(loom))]
    #[test]
    fn the_holder_is_looked_at_before_the_lock_is_given_up() {
        let segment = crate::segment::OwnSegment::create(1, 0, true).unwrap();
        segment
            .back(stripe::AT, stripe::STRIDE * stripe::COUNT)
            .unwrap();
        let lock =
            |own: u64, lives: bool| Stripe::lock(&segment.map, 8, own, Duration::ZERO, |_| lives);
        std::mem::forget(lock(1, true).unwrap());
        assert!(lock(2, true).is_none());
        assert!(lock(2, false).is_some());
    }

    #[test]
    fn a_lock_that_changes_whenever_it_could_be_taken_is_given_up() {
        let segment = crate::segment::OwnSegment::create(1, 0, true).unwrap();
        let map = &segment.map;
        let word = map.u64(stripe::AT + stripe::STRIDE * index_of(64));
        word.store(holder(3, 1), Ordering::Relaxed);
        let asked = std::cell::Cell::new(0_u64);
        let lives = |_| {
            asked.set(asked.get() + 1);
            assert!(asked.get() < 1_000_000, "the wait does not end");
            // another holder that has ended
            word.store(holder(3, 1 + asked.get()), Ordering::Relaxed);
            false
        };
        let lock = Stripe::lock(map, 64, holder(4, 1), Duration::from_millis(20), lives);
        assert!(lock.is_none());
    }

    #[test]
    fn a_stopped_process_does_not_lose_its_wait() {
        let mut wait = LockWait::new(3 * STEP);
        assert!(!wait.is_over());
        let stop = |wait: &mut LockWait| {
            let seen = wait.seen.as_mut().unwrap();
            *seen = seen.checked_sub(Duration::from_secs(10)).unwrap();
        };
        for _ in 0..2 {
            stop(&mut wait);
            assert!(!wait.is_over());
        }
        stop(&mut wait);
        assert!(wait.is_over());
        assert!(LockWait::new(Duration::ZERO).is_over());
    }

    #[test]
    fn changes() {
        assert_eq!(Change::Add(3).apply(u64::MAX), Some(2));
        assert_eq!(Change::Swap(1, 9).apply(1), Some(9));
        assert_eq!(Change::Swap(1, 9).apply(2), None);
        assert_eq!(Change::Store(9).apply(2), Some(9));
        assert_ne!(holder(0, 1), 0);
        assert_ne!(holder(1, 7), holder(2, 7));
    }
}
