//! Target queue pairs: entries of a domain, and this process's handles on them.
//!
//! An entry is free if no live process holds it. A process that creates, opens or destroys a target
//! holds the domain's lock. If it is killed meanwhile, the holders' bits still determine whether
//! the entry is free.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use rdma_core_sys::{IBV_QPS_ERR, IBV_QPS_RESET, IBV_QPT_XRC_RECV, ibv_qp_attr};

use super::{Domain, Membership, accesses, directory};
use crate::hazard::RIGHTS;
use crate::process::Process;
use crate::segment::layout::xrc::{self as layout, MAX_TARGETS};
use crate::segment::layout::{Fault, StateWord, qp, receives, split_qp_num};
use crate::signal;
use crate::sync::Arc;
use crate::sync::atomic::{Ordering, fence};
use crate::sys::{Errno, Grow, Identity, Res};

/// One handle of this process on a target.
#[derive(Debug)]
pub(crate) struct Target {
    membership: Arc<Membership>,
    index: u32,
    at: usize,
}

/// The words of a target, for a wait without a handle.
#[derive(Debug)]
pub(crate) struct TargetWords {
    membership: Arc<Membership>,
    at: usize,
}

impl TargetWords {
    /// Waits until no living process accesses memory through the target by a request that needs one
    /// of `rights`, which it does not grant any more. The caller holds no lock.
    ///
    /// # Errors
    /// `EBUSY`: a process still does after 5 seconds.
    pub(crate) fn await_accesses(&self, rights: u32) -> Res<()> {
        #[cfg(test)]
        in_reset::run();
        let (domain, process) = (&self.membership.domain, self.membership.process);
        accesses::wait(process, &domain.map, self.at, rights)
    }

    /// Whether [`Self::await_accesses`] would wait.
    pub(crate) fn has_accesses(&self, rights: u32) -> bool {
        let (domain, process) = (&self.membership.domain, self.membership.process);
        accesses::tidy(process, &domain.map, self.at, rights)
    }
}

/// Slots of the processes whose bits are set in the entry at `at`; they may have ended.
pub(crate) fn holders(domain: &Domain, at: usize) -> impl Iterator<Item = u32> + '_ {
    (0..layout::HOLDER_WORDS).flat_map(move |word| {
        let bits = domain
            .map
            .u64(at + layout::HOLDERS + 8 * word)
            .load(Ordering::Acquire);
        (0..64)
            .filter(move |bit| bits >> bit & 1 == 1)
            .map(move |bit| (64 * word + bit) as u32)
    })
}

/// Calls a process to check the states of its queue pairs.
fn call(process: &Process, slot: u32) {
    if slot == process.slot {
        signal::call_attention(&process.segment.map);
        process.wake_up();
    } else {
        process.call_process(slot);
    }
}

/// The offset of the word with the bit of the process in `slot`, and the bit.
fn holder_bit(at: usize, slot: u32) -> (usize, u64) {
    let word = slot as usize / 64 % layout::HOLDER_WORDS;
    (at + layout::HOLDERS + 8 * word, 1 << (slot % 64))
}

fn set_holder(domain: &Domain, at: usize, slot: u32, holds: bool) {
    let (word, bit) = holder_bit(at, slot);
    let word = domain.map.u64(word);
    if holds {
        word.fetch_or(bit, Ordering::AcqRel);
    } else {
        word.fetch_and(!bit, Ordering::AcqRel);
    }
}

/// An ended process of this slot may have held targets.
pub(super) fn forget(domain: &Domain, slot: u32) {
    for index in 0..domain.count() {
        set_holder(domain, layout::entry_at(index), slot, false);
    }
}

/// Whether the process in `slot`, which is not this one, is a live member.
fn lives(process: &Process, domain: &Domain, slot: u32) -> bool {
    directory::is_member(process.registry().file(), domain.number, slot) && process.lives(slot)
}

impl Domain {
    /// Live processes that hold the target with its entry at `at`. This process may be one of them.
    pub(crate) fn living_holders<'a>(
        &'a self,
        process: &'a Process,
        at: usize,
    ) -> impl Iterator<Item = u32> + 'a {
        holders(self, at).filter(|&slot| slot == process.slot || lives(process, self, slot))
    }

    /// Moves a target to ERR, if its state is still `word`, and notifies all holders. Returns
    /// whether it was moved.
    #[cold]
    pub(crate) fn fail_target(
        &self,
        process: &Process,
        at: usize,
        word: StateWord,
        fault: Fault,
    ) -> bool {
        let moved = signal::move_state(&self.map, at, word, word.failed(fault));
        if moved {
            self.call_holders(process, at);
            self.wake_initiators(process, at, &[word.dest()]);
        }
        moved
    }

    /// Records this process as that of the initiator of the target with its entry at `at`, if there
    /// was no process in its slot when the target was connected, or the recorded one is forgotten.
    pub(crate) fn record_initiator(&self, process: &Process, at: usize) {
        let recorded = self.map.u64(at + layout::INITIATOR);
        let own = process.identity.cookie;
        for none in [0, layout::FORGOTTEN] {
            // The holder that finds the word lost needs no order but that of the call behind it.
            let _ = recorded.compare_exchange(none, own, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Clears the words of ended processes that have accessed memory through the target with its
    /// entry at `at`.
    #[cold]
    pub(crate) fn tidy_accesses(&self, process: &Process, at: usize) {
        accesses::tidy(process, &self.map, at, u32::MAX);
    }

    /// Whether the bit of the process in `slot` is set in the entry at `at`.
    pub(crate) fn is_held_by(&self, at: usize, slot: u32) -> bool {
        let (word, bit) = holder_bit(at, slot);
        self.map.u64(word).load(Ordering::Acquire) & bit != 0
    }

    /// Calls all holders of a target to check its state.
    fn call_holders(&self, process: &Process, at: usize) {
        for slot in holders(self, at) {
            call(process, slot);
        }
    }

    /// Rings the initiators that may wait for this state, if any has asked: the last one that has
    /// asked, whose request has replaced those of others, and those with these numbers (0: none),
    /// to which the target was or is connected.
    fn wake_initiators(&self, process: &Process, at: usize, initiators: &[u32]) {
        fence(Ordering::SeqCst);
        let asked = self.map.u32(at + qp::WAITING).load(Ordering::Relaxed);
        if asked == 0 {
            return;
        }
        process.wake_process(split_qp_num(asked).0);
        for &initiator in initiators {
            if initiator != 0 && initiator != asked {
                process.wake_process(split_qp_num(initiator).0);
            }
        }
    }
}

impl Target {
    /// Creates a target in RESET.
    ///
    /// # Errors
    /// `ENOMEM`: the domain is full. `EBUSY`: another process holds the domain's lock for 5 s.
    pub(crate) fn create(membership: &Arc<Membership>) -> Res<Self> {
        let (domain, process) = (&membership.domain, membership.process);
        close_abandoned(membership)?;
        let mut locked = membership.lock()?;
        let held = &mut locked.handles;
        held.try_reserve(1).map_err(|_| Errno(libc::ENOMEM))?;
        let free = |index: u32| {
            let at = layout::entry_at(index);
            !held.contains_key(&index)
                && !holders(domain, at)
                    .any(|slot| slot != process.slot && lives(process, domain, slot))
                // an initiator of the entry's last target may be stopped in the middle
                && !accesses::tidy(process, &domain.map, at, RIGHTS)
        };
        // Not the entry that was freed last: initiators may still use its number.
        let start = crate::sys::random() as u32;
        let count = domain.count();
        let mut order = (0..count).map(|i| start.wrapping_add(i) % count);
        let index = match order.find(|&index| free(index)) {
            Some(index) if count as usize == MAX_TARGETS => index,
            // Entries that were never used come first.
            Some(index) if is_fresh(domain, index) => index,
            found => match (0..count).find(|&index| is_fresh(domain, index) && free(index)) {
                Some(index) => index,
                None => match domain.grow() {
                    Ok(()) => count,
                    Err(error) => found.ok_or(error)?,
                },
            },
        };
        let at = layout::entry_at(index);
        for word in 0..layout::HOLDER_WORDS {
            let bits = domain.map.u64(at + layout::HOLDERS + 8 * word);
            bits.store(0, Ordering::Relaxed);
        }
        let this = Self {
            membership: Arc::clone(membership),
            index,
            at,
        };
        this.put_attr(&Attr::default());
        let map = &domain.map;
        map.u32(at + layout::TYPE)
            .store(IBV_QPT_XRC_RECV, Ordering::Relaxed);
        map.u32(at + qp::WAITING).store(0, Ordering::Relaxed);
        set_holder(domain, at, process.slot, true);
        held.insert(index, 1);
        this.renew();
        Ok(this)
    }

    /// Opens a target that a process holds.
    ///
    /// # Errors
    /// `EINVAL`: no target of the domain has this number. `EBUSY`: as [`Self::create`].
    pub(crate) fn open(membership: &Arc<Membership>, num: u32) -> Res<Self> {
        let (domain, process) = (&membership.domain, membership.process);
        let none = Errno(libc::EINVAL);
        let (number, index) = crate::segment::layout::xrc::split_target(num).ok_or(none)?;
        if number != domain.number {
            return Err(none);
        }
        let at = domain.entry(index).ok_or(none)?;
        close_abandoned(membership)?;
        let mut locked = membership.lock()?;
        let held = &mut locked.handles;
        held.try_reserve(1).map_err(|_| Errno(libc::ENOMEM))?;
        let known = held.get(&index).copied().unwrap_or(0);
        let theirs =
            || holders(domain, at).any(|slot| slot != process.slot && lives(process, domain, slot));
        if known == 0 && !theirs() {
            return Err(none);
        }
        set_holder(domain, at, process.slot, true);
        held.insert(index, known + 1);
        Ok(Self {
            membership: Arc::clone(membership),
            index,
            at,
        })
    }

    /// Closes the handle, with the lock of the domain. If it is the last one and the target is not
    /// in the state `reset`, the handle stays: this call moves the target to RESET and returns its
    /// state. The caller then waits for accesses, and calls again with this state.
    pub(crate) fn close(
        &self,
        mut locked: DomainLock<'_>,
        reset: Option<StateWord>,
    ) -> Option<StateWord> {
        if self.close_one_of_several(&mut locked) {
            return None;
        }
        let word = self.word();
        if self.is_last() && reset != Some(word) {
            let new = self.renew();
            drop(locked);
            self.wake_initiators(word, new);
            return Some(new);
        }
        self.let_go(locked);
        self.call_initiator(word);
        None
    }

    /// If this process has other handles on the target, counts one less, and returns true.
    fn close_one_of_several(&self, locked: &mut DomainLock<'_>) -> bool {
        let count = locked.handles.get_mut(&self.index);
        let count = count.filter(|count| **count > 1);
        count.map(|count| *count -= 1).is_some()
    }

    /// Whether no other process holds the target.
    fn is_last(&self) -> bool {
        let (domain, process) = (&self.membership.domain, self.membership.process);
        !holders(domain, self.at).any(|slot| slot != process.slot && lives(process, domain, slot))
    }

    /// This process holds the target no more.
    fn let_go(&self, mut locked: DomainLock<'_>) {
        let (domain, process) = (&self.membership.domain, self.membership.process);
        locked.handles.remove(&self.index);
        set_holder(domain, self.at, process.slot, false);
    }

    /// The initiator may watch this process, and must watch another holder from now on.
    fn call_initiator(&self, word: StateWord) {
        if receives(word.state()) {
            call(self.membership.process, split_qp_num(word.dest()).0);
        }
    }

    /// As [`Self::close`], without a wait for accesses. If the domain's lock is not free, the next
    /// call that creates or opens a target of the domain closes the handle.
    pub(crate) fn abandon(self) {
        if self.close_now().is_err() {
            // Without memory, the holder's bit stays until this process leaves the domain.
            let _ = self.membership.unclosed().try_push(self.index);
        }
    }

    /// In one step under the lock, whatever other members write into the target's word.
    ///
    /// # Errors
    /// `EBUSY`: as [`Self::create`]; nothing is changed.
    fn close_now(&self) -> Res<()> {
        let mut locked = self.membership.lock()?;
        if self.close_one_of_several(&mut locked) {
            return Ok(());
        }
        let old = self.word();
        let new = self.is_last().then(|| self.renew());
        self.let_go(locked);
        match new {
            Some(new) => self.wake_initiators(old, new),
            None => self.call_initiator(old),
        }
        Ok(())
    }

    /// The words of the target.
    pub(crate) fn words(&self) -> TargetWords {
        TargetWords {
            membership: Arc::clone(&self.membership),
            at: self.at,
        }
    }

    /// Begins the next incarnation, in RESET. Returns the new state.
    fn renew(&self) -> StateWord {
        let state = self.membership.domain.map.u64(self.at + qp::STATE);
        let old = StateWord(state.load(Ordering::Relaxed));
        let word = StateWord::new(IBV_QPS_RESET, 0, 0, old.incarnation().wrapping_add(1));
        state.store(word.0, Ordering::Release);
        #[cfg(test)]
        in_reset::run();
        word
    }

    pub(crate) fn membership(&self) -> &Arc<Membership> {
        &self.membership
    }

    pub(crate) fn number(&self) -> u32 {
        layout::target_num(self.membership.domain.number, self.index)
    }

    pub(crate) fn word(&self) -> StateWord {
        let state = self.membership.domain.map.u64(self.at + qp::STATE);
        StateWord(state.load(Ordering::Acquire))
    }

    /// Moves the target from one state word to another. Returns false if the state has changed
    /// meanwhile. The caller has locked the domain, so only an initiator can have changed it, and
    /// calls [`Self::wake_initiators`] when it has released the lock.
    pub(crate) fn change(&self, from: StateWord, to: StateWord) -> bool {
        signal::move_state(&self.membership.domain.map, self.at, from, to)
    }

    /// Records that a connection has failed, before its state `failed` is reset: holders that have
    /// not seen this state find it here. The caller has locked the domain.
    pub(crate) fn record_failure(&self, failed: StateWord) {
        let record = self.membership.domain.map.u64(self.at + layout::FAILED);
        // the change of the state behind it orders it
        record.store(failed.0, Ordering::Relaxed);
    }

    /// The fault of the last connection that has failed and was reset between the states `old` and
    /// `new`, which were read in this order.
    pub(crate) fn missed_fault(&self, old: StateWord, new: StateWord) -> Option<Fault> {
        let record = self.membership.domain.map.u64(self.at + layout::FAILED);
        let failed = StateWord(record.load(Ordering::Relaxed));
        // incarnations have 24 bits
        let since =
            |word: StateWord| word.incarnation().wrapping_sub(old.incarnation()) & 0xff_ffff;
        let is_between = failed.state() == IBV_QPS_ERR && since(failed) < since(new);
        let is_known = since(failed) == 0 && old.state() == IBV_QPS_ERR;
        (is_between && !is_known).then(|| failed.fault())
    }

    /// Rings the initiators that wait for a change of the target's state from `old` to `new`.
    pub(crate) fn wake_initiators(&self, old: StateWord, new: StateWord) {
        let Membership {
            domain, process, ..
        } = &*self.membership;
        domain.wake_initiators(process, self.at, &[old.dest(), new.dest()]);
    }

    /// Calls all holders to check the target's state.
    pub(crate) fn call_holders(&self) {
        let Membership {
            domain, process, ..
        } = &*self.membership;
        domain.call_holders(process, self.at);
    }

    /// Records the processes on both ends of a connection that is about to be made to `initiator`,
    /// the number of a queue pair. The caller has locked the domain.
    pub(crate) fn record_connection(&self, initiator: u32) {
        let Membership {
            domain, process, ..
        } = &*self.membership;
        let (slot, _) = split_qp_num(initiator);
        let word = |at: usize| domain.map.u64(self.at + at);
        word(layout::INITIATOR).store(process.cookie_of(slot).unwrap_or(0), Ordering::Relaxed);
        word(layout::CONNECTOR).store(process.identity.cookie, Ordering::Relaxed);
        domain
            .map
            .u32(self.at + layout::CONNECTOR_SLOT)
            .store(process.slot, Ordering::Relaxed);
    }

    /// Whether the target may be connected to a queue pair of this process: it is the recorded one,
    /// or none is recorded.
    pub(crate) fn may_be_from(&self, identity: &Identity) -> bool {
        let recorded = self.membership.domain.map.u64(self.at + layout::INITIATOR);
        let recorded = recorded.load(Ordering::Relaxed);
        recorded == 0 || recorded == identity.cookie
    }

    /// The initiator was destroyed or reset before its process, which has this identity, ended: the
    /// target is connected to no process, and no holder misses one. The next process of the slot is
    /// another one, until it records itself. Another process that is recorded by now stays.
    pub(crate) fn forget_initiator(&self, identity: &Identity) {
        let recorded = self.membership.domain.map.u64(self.at + layout::INITIATOR);
        let (old, new) = (identity.cookie, layout::FORGOTTEN);
        let _ = recorded.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether the process of the initiator `initiator` (a queue pair number) ended before this
    /// process could watch it, and no other process watched it: the process that connected the
    /// target has also ended or has closed the target.
    pub(crate) fn initiator_is_lost(&self, initiator: u32) -> bool {
        let Membership {
            domain, process, ..
        } = &*self.membership;
        let word = |at: usize| domain.map.u64(self.at + at).load(Ordering::Relaxed);
        let recorded = word(layout::INITIATOR);
        let (slot, _) = split_qp_num(initiator);
        let ended = match process.cookie_of(slot) {
            Some(cookie) => cookie != recorded,
            None => !process.lives(slot),
        };
        if matches!(recorded, 0 | layout::FORGOTTEN) || !ended {
            return false;
        }
        let connector = domain.map.u32(self.at + layout::CONNECTOR_SLOT);
        let connector = connector.load(Ordering::Relaxed);
        let is_watched = connector != process.slot
            && process.cookie_of(connector) == Some(word(layout::CONNECTOR))
            && holders(domain, self.at).any(|holder| holder == connector);
        !is_watched
    }

    /// As [`Domain::fail_target`].
    pub(crate) fn fail(&self, word: StateWord, fault: Fault) {
        if word.state() != IBV_QPS_ERR {
            let domain = &self.membership.domain;
            domain.fail_target(self.membership.process, self.at, word, fault);
        }
    }

    pub(crate) fn set_rnr_timer(&self, timer: u8) {
        self.membership
            .domain
            .map
            .u32(self.at + layout::RNR_TIMER)
            .store(timer.into(), Ordering::Relaxed);
    }

    /// The attributes that holders have set. Not trusted, as any member can write them.
    pub(crate) fn attr(&self) -> Attr {
        let mut attr = Attr::default();
        let map = &self.membership.domain.map;
        for (i, word) in attr.0.iter_mut().enumerate() {
            let at = self.at + layout::ATTR + 4 * i;
            *word = map.u32(at).load(Ordering::Relaxed);
        }
        attr
    }

    pub(crate) fn put_attr(&self, attr: &Attr) {
        let map = &self.membership.domain.map;
        for (i, word) in attr.0.iter().enumerate() {
            let at = self.at + layout::ATTR + 4 * i;
            map.u32(at).store(*word, Ordering::Relaxed);
        }
    }
}

/// Attributes as words, all initialised: the padding between the fields is 0.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attr([u32; layout::ATTR_WORDS]);

impl Default for Attr {
    fn default() -> Self {
        Self([0; layout::ATTR_WORDS])
    }
}

impl Attr {
    pub(crate) fn get(&mut self) -> &mut ibv_qp_attr {
        const { assert!(align_of::<ibv_qp_attr>() <= align_of::<Attr>()) };
        // SAFETY: as large and aligned as the structure, of which any bytes are a value; its fields
        // are numbers.
        unsafe { &mut *(&raw mut self.0).cast::<ibv_qp_attr>() }
    }
}

/// Whether an entry has never been in use.
fn is_fresh(domain: &Domain, index: u32) -> bool {
    let state = domain.map.u64(layout::entry_at(index) + qp::STATE);
    state.load(Ordering::Relaxed) == 0
}

/// Closes the handles that [`Target::abandon`] could not close.
///
/// # Errors
/// `EBUSY`: as [`Target::create`].
fn close_abandoned(membership: &Arc<Membership>) -> Res<()> {
    loop {
        let Some(index) = membership.unclosed().pop() else {
            return Ok(());
        };
        let target = Target {
            membership: Arc::clone(membership),
            index,
            at: layout::entry_at(index),
        };
        if let Err(error) = target.close_now() {
            let _ = membership.unclosed().try_push(index);
            return Err(error);
        }
    }
}

/// Number of handles of this process on each target, by index. While it exists, no other holder
/// creates, opens, changes or closes a target of the domain.
pub(crate) struct DomainLock<'a> {
    // Released first: the lock may be one of the process's own open file, which does not exclude
    // its threads.
    _one: directory::RangeLock<'a>,
    handles: MutexGuard<'a, HashMap<u32, u32>>,
}

impl Membership {
    fn unclosed(&self) -> MutexGuard<'_, Vec<u32>> {
        self.unclosed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `EBUSY`: another process holds the domain's lock for 5 s.
    pub(crate) fn lock(&self) -> Res<DomainLock<'_>> {
        let handles = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self.process.registry().file();
        Ok(DomainLock {
            _one: directory::hold_domain(file, self.domain.number)?,
            handles,
        })
    }
}

/// What another member does while a target is in RESET, for tests.
#[cfg(test)]
pub(crate) mod in_reset {
    use std::cell::RefCell;

    type Action = Box<dyn Fn()>;

    thread_local!(static ACTION: RefCell<Option<Action>> = const { RefCell::new(None) });

    /// Runs `action` in each call of this thread that has moved a target to RESET, or waits for
    /// accesses; `None`: no more.
    pub(crate) fn set(action: Option<Action>) {
        ACTION.replace(action);
    }

    pub(super) fn run() {
        ACTION.with_borrow(|action| action.iter().for_each(|action| action()));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use rdma_core_sys::{IBV_QPS_INIT, IBV_QPS_RTS};

    use super::directory::Name;
    use super::*;
    use crate::segment::layout::qp_num;

    pub(crate) fn membership() -> Arc<Membership> {
        let process = Process::open().unwrap();
        let name = Name {
            node: process.node,
            file: None,
        };
        process.domains.open(process, name, true, false).unwrap()
    }

    /// The caller has no other way to know that accesses are to be awaited.
    #[test]
    fn the_last_handle_is_closed_in_reset() {
        let membership = membership();
        let process = membership.process;
        let first = Target::create(&membership).unwrap();
        let second = Target::open(&membership, first.number()).unwrap();
        let connected = StateWord::new(IBV_QPS_RTS, qp_num(process.slot, 2), 7, 9);
        assert!(first.change(first.word(), connected));
        let close = |target: &Target, reset| target.close(membership.lock().unwrap(), reset);
        assert_eq!(close(&first, None), None);
        assert_eq!(second.word(), connected);
        let reset = close(&second, None).unwrap();
        assert_eq!(reset, StateWord::new(IBV_QPS_RESET, 0, 0, 10));
        assert_eq!(second.word(), reset);
        // another thread has used the handle meanwhile
        assert!(second.change(reset, reset.with_state(IBV_QPS_INIT)));
        let again = close(&second, Some(reset)).unwrap();
        assert_eq!(again, StateWord::new(IBV_QPS_RESET, 0, 0, 11));
        assert_eq!(close(&second, Some(again)), None);
        assert!(Target::open(&membership, second.number()).is_err());
    }
    #[test]
    fn a_handle_that_could_not_be_closed_is_closed_later() {
        let membership = membership();
        let registry = membership.process.registry().file();
        // locks of another opening of the file are those of another process
        let path = format!("/proc/self/fd/{}", registry.as_raw_fd());
        let other = File::options().read(true).write(true).open(path).unwrap();
        let target = Target::create(&membership).unwrap();
        let number = target.number();
        let lock = directory::hold_domain(&other, membership.domain.number).unwrap();
        target.abandon();
        drop(lock);
        let next = Target::create(&membership).unwrap();
        if next.number() != number {
            assert!(Target::open(&membership, number).is_err());
        }
        assert_eq!(next.close_now(), Ok(()));
        assert!(membership.lock().unwrap().handles.is_empty());
    }

    /// The initiator was reset, and its process has ended. The next process of the slot is not
    /// watched in its place, so that its end fails nothing, unless it uses the target itself.
    #[test]
    fn a_forgotten_initiator_has_no_successor_by_chance() {
        let membership = membership();
        let (domain, process) = (&membership.domain, membership.process);
        let target = Target::create(&membership).unwrap();
        let initiator = qp_num(process.slot, 2);
        let of = |cookie: u64| Identity {
            cookie,
            ..process.identity
        };
        let own = process.identity.cookie;
        let recorded = domain.map.u64(target.at + layout::INITIATOR);
        let former = of(own.wrapping_add(2));
        recorded.store(former.cookie, Ordering::Relaxed);
        target.forget_initiator(&former);
        assert!(!target.may_be_from(&process.identity) && !target.may_be_from(&former));
        assert!(!target.initiator_is_lost(initiator));
        domain.record_initiator(process, target.at);
        assert!(target.may_be_from(&process.identity) && !target.may_be_from(&former));
        // another process is recorded by now
        target.forget_initiator(&former);
        assert!(target.may_be_from(&process.identity));
        // no process was in the slot when the target was connected
        recorded.store(0, Ordering::Relaxed);
        assert!(target.may_be_from(&process.identity));
        domain.record_initiator(process, target.at);
        assert_eq!(recorded.load(Ordering::Relaxed), own);
        assert_eq!(target.close_now(), Ok(()));
    }

    /// Another member changes the word between any two steps of this process.
    #[test]
    fn a_handle_is_closed_whatever_others_write() {
        let membership = membership();
        let target = Target::create(&membership).unwrap();
        let map = Arc::clone(&membership.domain.map);
        let at = target.at + qp::STATE;
        in_reset::set(Some(Box::new(move || {
            map.u64(at).fetch_add(1, Ordering::Relaxed);
        })));
        assert_eq!(target.close_now(), Ok(()));
        in_reset::set(None);
        assert!(membership.lock().unwrap().handles.is_empty());
    }
}
