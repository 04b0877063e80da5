//! Handles on XRC targets: `ibv_create_qp_ex` with `IBV_QPT_XRC_RECV`, `ibv_open_qp`, and the calls
//! on such handles.
//!
//! A handle has no queues. It has an index among the queue pairs of its process, so that progress
//! finds it when there may be an event for it; its number is the target's.

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use super::object::blank;
use super::state::transition_allowed;
use super::{DESTROYED, Qp, TARGET, entry_at, modify};
use crate::delivery::receives;
use crate::events::Element;
use crate::hazard::RIGHTS;
use crate::limits::PEER_WAIT;
use crate::object::Context;
use crate::peer::Peer;
use crate::segment::layout::{Fault, StateWord, qp as layout, qp_access, split_qp_num};
use crate::sync::{Arc, pause};
use crate::sys::{Errno, Res};
use crate::xrc::{Attr, Membership, Target, TargetWords, Xrcd};

/// The target of a handle, and the handle's view of it.
pub(super) struct Handle {
    target: Target,
    xrcd: &'static Xrcd,
    /// The state word that this handle read last: a difference raises an event.
    seen: StateWord,
    /// The process of the initiator, once it is open.
    initiator: Option<Arc<Peer>>,
    /// The incarnation of the target whose initiator that is.
    watched: u32,
}

impl Handle {
    /// Opens the initiator's process, so that its end is noticed.
    fn watch(&mut self) {
        self.watched = self.seen.incarnation();
        let process = self.target.membership().process;
        self.initiator = if receives(self.seen.state()) {
            let peer = process.peer(split_qp_num(self.seen.dest()).0).ok();
            // the initiator may have ended, and another process may have its slot
            peer.filter(|peer| self.target.may_be_from(&peer.identity))
        } else {
            None
        };
    }

    /// Whether the initiator was destroyed or reset before its process ended. The target of a
    /// connection is connected first: an initiator without a destination is not connected yet.
    fn initiator_was_reset(&self, peer: &Peer) -> bool {
        let (_, index) = split_qp_num(self.seen.dest());
        let at = entry_at(index);
        let theirs = StateWord(peer.map.u64(at + layout::STATE).load(Ordering::Acquire));
        match theirs.dest() {
            _ if theirs.state() == IBV_QPS_RESET => true,
            0 => peer.map.u32(at + layout::TYPE).load(Ordering::Relaxed) != IBV_QPT_XRC_SEND,
            dest => dest != self.target.number(),
        }
    }
}

/// Number of times that a change is tried while initiators and holders move the target to ERR: each
/// of them does so once for each connection.
const TRIES: u32 = 1000;

/// Maximum time in which a call repeats its wait for accesses to a target in RESET, because other
/// threads or a member that breaks the protocol have changed the target's word meanwhile. Shorter
/// in the tests of this crate.
const RESET_WAIT: Duration = if cfg!(test) {
    Duration::from_millis(300)
} else {
    PEER_WAIT
};

/// The repeated waits of one call for accesses to a target in RESET.
#[derive(Default)]
struct Rounds {
    /// The time before the first wait. What the call has waited for the domain's lock before does
    /// not count.
    begin: Option<Instant>,
    count: u32,
}

impl Rounds {
    /// Begins the next round. Pauses before a repetition, which is due only to a change of the
    /// word: a member that changes the word in each round causes no load.
    ///
    /// # Errors
    /// `EBUSY`: the rounds have lasted [`RESET_WAIT`].
    fn next(&mut self) -> Res<()> {
        match self.begin {
            None => self.begin = Some(Instant::now()),
            Some(begin) if begin.elapsed() > RESET_WAIT => return Err(Errno(libc::EBUSY)),
            Some(_) => {
                // the first 64 repetitions yield the processor, later ones sleep 50 microseconds
                self.count = self.count.saturating_add(1);
                pause(960_u32.saturating_add(self.count));
            }
        }
        Ok(())
    }
}

/// Result of [`Qp::change_target`].
enum Change {
    /// The target's word before and behind the change.
    Done(StateWord, StateWord),
    /// Nothing is changed: the target is in RESET, in which the caller has not waited for accesses.
    InReset(StateWord, TargetWords),
}

/// `ibv_create_qp_ex` of a target.
///
/// # Errors
/// `ENOMEM`: no memory. `EBUSY`: another process holds the domain's lock until the timeout.
///
/// # Safety
/// The handle on the domain must be live.
pub(crate) unsafe fn create(xrcd: *mut ibv_xrcd, qp_context: *mut c_void) -> Res<&'static Qp> {
    // SAFETY: the caller promises a live handle on the domain; it can't be closed while this handle
    // counts as its child.
    let xrcd: &'static Xrcd = unsafe { Xrcd::from_ptr(xrcd) };
    make(xrcd, qp_context, Target::create(&xrcd.membership)?)
}

/// `ibv_open_qp`.
///
/// # Errors
/// `EINVAL`: the number is of no target of the domain, or attributes are missing. `EOPNOTSUPP`:
/// attributes of later releases.
///
/// # Safety
/// The handle on the domain must be live.
pub(crate) unsafe fn open(attr: &ibv_qp_open_attr) -> Res<&'static Qp> {
    let needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    if attr.comp_mask >= IBV_QP_OPEN_ATTR_RESERVED {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    if attr.comp_mask & needed != needed || attr.xrcd.is_null() || attr.qp_type != IBV_QPT_XRC_RECV
    {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: not NULL; the caller promises a live handle on the domain.
    let xrcd: &'static Xrcd = unsafe { Xrcd::from_ptr(attr.xrcd) };
    let qp_context = if attr.comp_mask & IBV_QP_OPEN_ATTR_CONTEXT != 0 {
        attr.qp_context
    } else {
        std::ptr::null_mut()
    };
    make(
        xrcd,
        qp_context,
        Target::open(&xrcd.membership, attr.qp_num)?,
    )
}

/// Creates the C object for a target; closes the target if there is no room for the object.
fn make(xrcd: &'static Xrcd, qp_context: *mut c_void, target: Target) -> Res<&'static Qp> {
    let context = xrcd.context();
    let process = target.membership().process;
    let placed = match process.qps.take(blank) {
        Err(error) => Err(error),
        Ok(qp) => match process.segment.back_halves(qp.at(), layout::STRIDE) {
            Ok(()) => Ok(qp),
            Err(error) => {
                process.qps.give(qp.index);
                Err(error)
            }
        },
    };
    let qp = match placed {
        Ok(qp) => qp,
        Err(error) => {
            target.abandon();
            return Err(error);
        }
    };
    qp.process
        .store(std::ptr::from_ref(process).cast_mut(), Ordering::Relaxed);
    let object = qp.as_ptr();
    // SAFETY: the object is not handed out yet; mutex and condition are initialised in place.
    unsafe {
        object.cast::<u8>().write_bytes(0, size_of::<ibv_qp_ex>());
        (*object).context = context;
        (*object).qp_context = qp_context;
        (*object).handle = qp.index;
        (*object).qp_num = target.number();
        (*object).state = target.word().state();
        (*object).qp_type = IBV_QPT_XRC_RECV;
        libc::pthread_mutex_init(&raw mut (*object).mutex, std::ptr::null());
        libc::pthread_cond_init(&raw mut (*object).cond, std::ptr::null());
    }
    qp.begin_events();
    qp.set_access_wait(true);
    let handle = Handle {
        seen: target.word(),
        target,
        xrcd,
        initiator: None,
        watched: 0,
    };
    *qp.handle() = Some(handle);
    xrcd.children.fetch_add(1, Ordering::Relaxed);
    // SAFETY: a handle's context is live.
    let owner = unsafe { Context::from_ptr(context) };
    owner.children.fetch_add(1, Ordering::Relaxed);
    qp.state.store(TARGET, Ordering::Release);
    // A connected target: opens the initiator's process, or finds that it has ended.
    qp.notice_target();
    Ok(qp)
}

impl Qp {
    fn handle(&self) -> MutexGuard<'_, Option<Handle>> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The membership of the target's domain. Its lock precedes that of the handle.
    fn target_membership(&self) -> Res<Arc<Membership>> {
        let handle = self.handle();
        let handle = handle.as_ref().ok_or(Errno(libc::EINVAL))?;
        Ok(Arc::clone(handle.target.membership()))
    }

    /// `ibv_modify_qp` of a target. As [`super::modify::modify_now`].
    ///
    /// # Errors
    /// Also `EBUSY`: another process holds the domain's lock until the timeout, or changes the word
    /// of a target in RESET for as long; nothing is changed.
    pub(super) fn modify_target(&self, attr: &ibv_qp_attr, mask: u32) -> Res<u32> {
        self.notice_target();
        let mut reset = None;
        let mut rounds = Rounds::default();
        let (old, new) = loop {
            match self.change_target(attr, mask, reset)? {
                Change::Done(old, new) => break (old, new),
                Change::InReset(word, words) => {
                    rounds.next()?;
                    words.await_accesses(RIGHTS)?;
                    reset = Some(word);
                }
            }
        };
        let process = self.process();
        let initiator = {
            let mut handle = self.handle();
            let handle = handle.as_mut().ok_or(Errno(libc::EINVAL))?;
            handle.target.wake_initiators(old, new);
            handle.watch();
            if receives(new.state()) && !receives(old.state()) {
                // The other holders watch the initiator too, as this process may end before it.
                handle.target.call_holders();
            }
            handle.initiator.clone()
        };
        if let Some(initiator) = initiator {
            // The initiator most likely sends to this process first. If the ring can't be created
            // now, the initiator requests it again.
            process.clean_up_dead_peers();
            let _ = process.grant_ring(&initiator);
        }
        Ok(match new.state() {
            IBV_QPS_RESET | IBV_QPS_ERR => RIGHTS,
            _ => modify::ended_rights(old.state(), attr, mask),
        })
    }

    /// Changes the target's word and attributes. `reset`: the RESET in which the caller has waited
    /// for accesses.
    fn change_target(
        &self,
        attr: &ibv_qp_attr,
        mask: u32,
        reset: Option<StateWord>,
    ) -> Res<Change> {
        let membership = self.target_membership()?;
        // No other holder changes the target meanwhile. A move to ERR writes the word alone, and
        // does not wait for a holder that is stopped.
        let ends = mask & IBV_QP_STATE != 0 && attr.qp_state == IBV_QPS_ERR;
        let _locked = if ends { None } else { Some(membership.lock()?) };
        let mut handle = self.handle();
        let handle = handle.as_mut().ok_or(Errno(libc::EINVAL))?;
        for _ in 0..TRIES {
            let old = handle.target.word();
            self.see(handle, old);
            let target = &handle.target;
            let from = old.state();
            let to = if mask & IBV_QP_STATE != 0 {
                attr.qp_state
            } else {
                from
            };
            if mask & IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != from
                || !transition_allowed(IBV_QPT_XRC_RECV, from, to, mask)
            {
                return Err(Errno(libc::EINVAL));
            }
            modify::check(attr, mask)?;
            if from == IBV_QPS_RESET && to != from && reset != Some(old) {
                // The RESET may have returned `EBUSY`. The word of the next initiator is the same.
                return Ok(Change::InReset(old, target.words()));
            }
            let mut known = target.attr();
            modify::remember(known.get(), attr, mask);
            let new = match to {
                IBV_QPS_RESET => {
                    known = Attr::default();
                    StateWord::new(to, 0, 0, old.incarnation().wrapping_add(1))
                }
                // the reason stays, of which other holders may have to raise the event yet
                IBV_QPS_ERR if from == IBV_QPS_ERR => old,
                IBV_QPS_ERR => old.failed(Fault::Asked),
                _ => {
                    let dest = if mask & IBV_QP_DEST_QPN != 0 {
                        attr.dest_qp_num
                    } else {
                        old.dest()
                    };
                    let access = if mask & IBV_QP_ACCESS_FLAGS != 0 {
                        qp_access(attr.qp_access_flags)
                    } else {
                        old.access()
                    };
                    StateWord::new(to, dest, access, old.incarnation())
                }
            };
            if receives(to) && !receives(from) {
                // An initiator that sees the new state adds its process.
                target.record_connection(new.dest());
            }
            if (from, to) == (IBV_QPS_ERR, IBV_QPS_RESET) && old.fault() != Fault::Asked {
                target.record_failure(old);
            }
            if !target.change(old, new) {
                // An initiator or another holder has moved the target to ERR.
                continue;
            }
            if to != IBV_QPS_ERR {
                target.put_attr(&known);
            }
            if receives(to) && mask & IBV_QP_MIN_RNR_TIMER != 0 {
                target.set_rnr_timer(attr.min_rnr_timer);
            }
            handle.seen = new;
            // SAFETY: the object is live; `ibv_qp.state` is a hint that C code reads without a
            // lock.
            unsafe { (*self.as_ptr()).state = to };
            return Ok(Change::Done(old, new));
        }
        Err(Errno(libc::EBUSY))
    }

    /// `ibv_query_qp` of a target.
    ///
    /// # Safety
    /// The outputs must be writable.
    pub(super) unsafe fn query_target(
        &self,
        attr: *mut ibv_qp_attr,
        init: *mut ibv_qp_init_attr,
    ) -> Res<()> {
        self.notice_target();
        let handle = self.handle();
        let target = &handle.as_ref().ok_or(Errno(libc::EINVAL))?.target;
        let state = target.word().state();
        let mut known = target.attr();
        // SAFETY: the caller promises writable outputs; plain data. The object is live.
        unsafe {
            attr.copy_from(&raw const *known.get(), 1);
            (*attr).qp_state = state;
            (*attr).cur_qp_state = state;
            init.write(ibv_qp_init_attr {
                qp_context: (*self.as_ptr()).qp_context,
                qp_type: IBV_QPT_XRC_RECV,
                ..Default::default()
            });
        }
        Ok(())
    }

    /// `ibv_destroy_qp` of a target: waits until the application has acknowledged every event that
    /// it has read.
    ///
    /// # Errors
    /// `EBUSY`: another process holds the domain's lock until the timeout; nothing is changed. Or a
    /// stopped process may still access memory through the target, of which this is the last
    /// handle; it is in RESET, and the call can be repeated. Or another process has changed the
    /// word of the target in RESET for 5 s.
    pub(super) fn destroy_target(&self) -> Res<()> {
        let (process, context) = (self.process(), self.context());
        // Events of earlier changes are raised first.
        process.progress();
        let membership = self.target_membership()?;
        let mut reset = None;
        let mut rounds = Rounds::default();
        let xrcd = loop {
            // in this order: other threads need the handle for a poll
            let locked = membership.lock()?;
            let mut handle = self.handle();
            let there = handle.as_ref().ok_or(Errno(libc::EINVAL))?;
            reset = there.target.close(locked, reset);
            if reset.is_none() {
                let xrcd = there.xrcd;
                self.state.store(DESTROYED, Ordering::Relaxed);
                *handle = None;
                break xrcd;
            }
            let words = there.target.words();
            drop(handle);
            rounds.next()?;
            if self.awaits_accesses.load(Ordering::Relaxed) {
                words.await_accesses(RIGHTS)?;
            }
        };
        self.await_acknowledgements();
        // The last reference is dropped by `ibv_close_xrcd`, under the lock of the memberships: the
        // call may be made from here on.
        drop(membership);
        xrcd.children.fetch_sub(1, Ordering::Release);
        #[cfg(test)]
        behind_child::run();
        context.children.fetch_sub(1, Ordering::Relaxed);
        process.qps.give(self.index);
        Ok(())
    }

    /// The target's words; `None` if this is no handle on one.
    pub(super) fn target_words(&self) -> Option<TargetWords> {
        self.handle().as_ref().map(|handle| handle.target.words())
    }

    /// Closes the handle, as its context is closed.
    pub(super) fn abandon_target(&self) {
        let gone = self.handle().take();
        if let Some(Handle { target, xrcd, .. }) = gone {
            // as in `destroy_target`
            target.abandon();
            xrcd.children.fetch_sub(1, Ordering::Release);
        }
    }

    /// Follows changes of the target by other processes, and raises the event. Returns false if
    /// this is no handle on a target.
    pub(super) fn notice_target(&self) -> bool {
        if self.state() != TARGET {
            return false;
        }
        let mut handle = self.handle();
        let Some(handle) = handle.as_mut() else {
            return true;
        };
        let (old, new) = (handle.seen, handle.target.word());
        let failed = self.see(handle, new);
        if !failed
            && (new.dest() != old.dest()
                || new.incarnation() != handle.watched
                || handle.initiator.is_none())
        {
            // Another holder has connected the target, or the initiator's process could not be
            // opened before. The next initiator may have the number of the last one.
            handle.watch();
            if handle.initiator.is_none()
                && receives(new.state())
                && handle.target.initiator_is_lost(new.dest())
            {
                handle.target.fail(new, Fault::Fatal);
            }
        }
        true
    }

    /// Records the target's state; raises the event if the target has failed since the last call,
    /// and returns true. Also raises that of a connection that was reset meanwhile.
    fn see(&self, handle: &mut Handle, new: StateWord) -> bool {
        let old = std::mem::replace(&mut handle.seen, new);
        if let Some(fault) = handle.target.missed_fault(old, new) {
            self.raise_fault(fault);
        }
        let failed = new.state() == IBV_QPS_ERR
            && (old.state() != IBV_QPS_ERR || old.incarnation() != new.incarnation());
        if failed {
            self.raise_fault(new.fault());
        }
        failed
    }

    /// Any member of the domain can write as many failures of ever new connections as it likes, so
    /// one event of each type is unread at most.
    fn raise_fault(&self, fault: Fault) {
        match fault {
            Fault::Access => self.raise_once(IBV_EVENT_QP_ACCESS_ERR),
            Fault::Request => self.raise_once(IBV_EVENT_QP_REQ_ERR),
            Fault::Fatal => self.raise_once(IBV_EVENT_QP_FATAL),
            Fault::Asked => {}
        }
    }

    /// Handles the end of a process, which may be the initiator's.
    pub(super) fn initiator_died(&self, peer: &Arc<Peer>) {
        if self.state() != TARGET {
            return;
        }
        let mut handle = self.handle();
        let Some(handle) = handle.as_mut() else {
            return;
        };
        let known = |initiator: &mut Arc<Peer>| Arc::ptr_eq(initiator, peer);
        if handle.initiator.take_if(known).is_none() {
            return;
        }
        let word = handle.target.word();
        // the target may be connected to another process by now
        let same = word.dest() == handle.seen.dest() && word.incarnation() == handle.watched;
        if !receives(word.state()) || !same {
            return;
        }
        if handle.initiator_was_reset(peer) {
            // From now on the process is one that has ended, for this holder and the others.
            handle.target.forget_initiator(&peer.identity);
        } else {
            handle.target.fail(word, Fault::Fatal);
        }
    }

    /// Ends the events, as the last step but giving the index back: the object's mutex and
    /// condition are destroyed.
    pub(super) fn await_acknowledgements(&self) {
        self.settle_events();
        let qp = self.as_ptr();
        // SAFETY: the object is live until its index is given back. No thread waits for the
        // condition, and none acknowledges further events.
        unsafe {
            libc::pthread_mutex_destroy(&raw mut (*qp).mutex);
            libc::pthread_cond_destroy(&raw mut (*qp).cond);
        }
    }

    /// Drops the events that were not read, and waits until the application has acknowledged the
    /// events that it has read.
    fn settle_events(&self) {
        let qp = self.as_ptr();
        let unread = self.context().events.forget(Element::Qp(qp));
        self.events.fetch_sub(unread, Ordering::Relaxed);
        let raised = self.events.load(Ordering::Relaxed);
        // SAFETY: the object is live until its index is given back.
        unsafe {
            libc::pthread_mutex_lock(&raw mut (*qp).mutex);
            while (*qp).events_completed != raised {
                libc::pthread_cond_wait(&raw mut (*qp).cond, &raw mut (*qp).mutex);
            }
            libc::pthread_mutex_unlock(&raw mut (*qp).mutex);
        }
    }

    /// The application has given the queue pair up, which is still in use: as
    /// [`Self::settle_events`], and no event is raised until it is destroyed.
    pub(super) fn end_events(&self) {
        {
            // Each event of a queue pair that is in RESET, or of a handle, is raised under one of
            // these locks.
            let _sq = self.sq.lock();
            let _handle = self.handle();
            self.raises_events.store(false, Ordering::Relaxed);
        }
        self.settle_events();
    }
}

/// What another thread does as soon as a handle is no child of its domain, for tests.
#[cfg(test)]
pub(crate) mod behind_child {
    use std::cell::Cell;

    type Action = Box<dyn FnOnce()>;

    thread_local!(static NEXT: Cell<Option<Action>> = const { Cell::new(None) });

    /// Runs `action` once, in the next destruction of a handle by this thread.
    pub(crate) fn once(action: impl FnOnce() + 'static) {
        NEXT.set(Some(Box::new(action)));
    }

    pub(super) fn run() {
        if let Some(action) = NEXT.take() {
            action();
        }
    }
}
