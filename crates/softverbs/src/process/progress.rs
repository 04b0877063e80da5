//! What this process does whenever it polls, and before it sleeps.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::{Process, chores};
use crate::cq::{Cq, Poll};
use crate::peer::{Peer, Push};
use crate::qp::{Qp, Went, notify_datagram};
use crate::ring::Header;
use crate::segment::layout::MAX_PROCESSES;
use crate::signal;
use crate::sync::{Arc, Lock, heavy_fence};
use crate::sys::{self, Grow};

pub(super) const TOKEN_DOORBELL: u64 = 1;
pub(super) const TOKEN_TIMER: u64 = 2;
/// With the slot in the lower half.
pub(super) const TOKEN_PEER: u64 = 1 << 32;
/// Of the line to a peer's agent.
pub(super) const TOKEN_LINK: u64 = 1 << 33;

/// A cheap clock, for spacing out what costs more; about a nanosecond or less a tick.
#[inline]
fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has it.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    sys::now_ns()
}

/// Every so many polls of a queue one looks at the clock, which takes longer than all the rest of a poll; of those that take messages,
/// which do not wait for that while others come in between, twice as many. Who polls twenty times a second still sees within one that a
/// peer has died.
const POLLS_PER_LOOK: u32 = 8;

/// About a millisecond of [`ticks`], more on slow clocks.
const LIVENESS_TICKS: u64 = 2_000_000;

/// How long a sender that was rung is left alone: about 40 microseconds, more on slow clocks.
const PULL_TICKS: u64 = 100_000;

/// Batches of messages from each ring that are taken before sleeping: what all rings hold.
const ROUNDS: usize = 32;
/// Rounds of turns at full rings in one look at what waits.
const TURNS: usize = 16;
/// After how long receives are flushed that a sender was writing into, if it is done.
const FLUSH_NS: u64 = 1_000_000;

/// Datagrams that are kept for one process that has not made a ring yet.
const KEPT: usize = 64;

/// A message that belongs to no request and found no room.
#[derive(Debug)]
pub(super) struct Late {
    peer: Arc<Peer>,
    header: Header,
    payload: Box<[u8]>,
}

/// Ended processes that are not buried yet: at most one more for each place than there are, as a round of progress
/// buries all.
pub(super) const GRAVES: usize = 2 * MAX_PROCESSES;

/// The numbers in a list that others change meanwhile. Whoever takes one out moves others forward only, so from the end
/// none that stays is left out.
fn one_by_one(list: &Lock<Vec<u32>>) -> impl Iterator<Item = u32> {
    let count = list.lock().len();
    (0..count)
        .rev()
        .filter_map(|at| list.lock().get(at).copied())
}

/// Who looks for parked messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Puller {
    Qp(u32),
    Srq(u32),
}

impl Process {
    /// Takes messages from the rings, goes on with requests that waited, and notices what peers
    /// did and that they ended. Costs some loads where there is nothing to do, and a system
    /// call about once in a millisecond.
    pub(crate) fn progress(&self) {
        self.progress_of_poll(u32::MAX, &mut Poll::none());
    }

    /// As [`Self::progress`], the `polls`th since one looked at the end of peers; true where this one did. Where there were messages nothing
    /// else is done, if it can wait: they are what the caller polls for. Their completions may go to `poll` at once.
    #[inline(always)]
    pub(crate) fn progress_of_poll(&self, polls: u32, poll: &mut Poll) -> bool {
        if self.drain_rings(poll) && polls < 2 * POLLS_PER_LOOK {
            return false;
        }
        let look = polls >= POLLS_PER_LOOK;
        if self.attention.called(&self.segment.map) {
            self.attend();
        }
        if look {
            self.look_at_clock();
        }
        if self.chores.any() {
            self.do_chores();
        }
        look
    }

    #[cold]
    fn do_chores(&self) {
        // First: a request that waits for one that has ended would fail without its event.
        if self.chores.has(chores::GRAVES) {
            self.bury_all();
        }
        if self.chores.has(chores::OVERRUN) {
            self.fail_overrun();
        }
        if self.chores.has(chores::WAITING) {
            self.retry_waiting();
        }
        if self.chores.has(chores::LATE) {
            self.push_late();
        }
        if self.chores.has(chores::MODERATED) {
            self.raise_moderated();
        }
        if self.chores.has(chores::PULLS) {
            self.pull_parked(ticks());
        }
        if self.chores.has(chores::CLOSING) {
            self.flush_closing();
        }
    }

    #[inline]
    fn look_at_clock(&self) {
        let now = ticks();
        if now.wrapping_sub(self.liveness_tick.load(Ordering::Relaxed)) > LIVENESS_TICKS {
            self.liveness_tick.store(now, Ordering::Relaxed);
            self.look_at_peers();
        }
    }

    /// Peers moved queue pairs of this process to ERR; their owner does the rest.
    #[cold]
    fn attend(&self) {
        if signal::agent_called(&self.segment.map) {
            self.start_agent();
        }
        let newcomers = self.newcomers.swap(false, Ordering::AcqRel);
        for qp in self.qps.iter() {
            qp.notice_failure();
            if newcomers {
                qp.find_sender();
            }
        }
    }

    /// Has the queue pairs of overrun completion queues failed at the next progress. Takes no
    /// lock.
    pub(crate) fn request_failure(&self) {
        self.chores.set(chores::OVERRUN, true);
        self.doorbell.ring();
    }

    /// Has the receives of failed queue pairs flushed at the next progress. Takes no lock.
    pub(crate) fn request_flush(&self) {
        self.chores.set(chores::CLOSING, true);
        self.doorbell.ring();
    }

    /// As [`Self::request_flush`], where a sender is still writing: soon.
    pub(crate) fn flush_again(&self) {
        self.chores.set(chores::CLOSING, true);
    }

    #[cold]
    fn flush_closing(&self) {
        self.chores.set(chores::CLOSING, false);
        // Senders publish a message, fence lightly, and look whether the state still is what it was.
        heavy_fence();
        for qp in self.qps.iter() {
            qp.flush_closing();
        }
    }

    #[cold]
    fn fail_overrun(&self) {
        self.chores.set(chores::OVERRUN, false);
        std::sync::atomic::fence(Ordering::SeqCst);
        for qp in self.qps.iter() {
            qp.notice_overrun();
        }
        for srq in self.srqs.iter() {
            srq.notice_overrun();
        }
    }

    /// Has a queue pair tried again at each progress. Its first request waits.
    pub(crate) fn wait(&self, index: u32) {
        let mut waiting = self.waiting.lock();
        if !waiting.contains(&index) {
            waiting.push(index);
            self.chores.set(chores::WAITING, true);
        }
        drop(waiting);
        self.will_sleep();
        // What it waits for may have come before the peer could see that it is waited for.
        heavy_fence();
        // A queue may have been armed before.
        if let Some(deadline) = self.qps.get(index).and_then(Qp::deadline) {
            self.timer.arm(deadline);
        }
    }

    /// A turn at a full ring is over, so that queue pairs that were refused for it may go on.
    pub(crate) fn note_turn(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts calls of [`Self::note_turn`].
    pub(crate) fn turns(&self) -> u32 {
        self.turns.load(Ordering::Relaxed)
    }

    #[cold]
    fn retry_waiting(&self) {
        for _ in 0..TURNS {
            let before = self.turns();
            self.retry_each();
            // In the last round no turn ended: each was refused by the ring, whose receiver rings
            // this process, or for the turn of a queue pair that was refused by it.
            if self.turns() == before {
                return;
            }
        }
        // A receiver that consumes as fast must not keep the caller here: a thread that sleeps is
        // woken and goes on.
        self.doorbell.ring();
    }

    /// Each that waits now, in the order in which they began to or had their last turn.
    fn retry_each(&self) {
        let mut at = 0;
        let count = self.waiting.lock().len();
        for _ in 0..count {
            // One at a time: a request that completes may take other locks.
            let Some(index) = self.waiting.lock().get(at).copied() else {
                return;
            };
            let went = self.qps.get(index).map_or(Went::Through, Qp::have_turn);
            if went == Went::Waits {
                at += 1;
                continue;
            }
            let mut waiting = self.waiting.lock();
            if let Some(position) = waiting.iter().position(|&i| i == index) {
                waiting.remove(position);
                if went == Went::Yields {
                    // There is room: one was just taken out.
                    waiting.push(index);
                }
            }
            self.chores.set(chores::WAITING, !waiting.is_empty());
            drop(waiting);
            // It may have begun to wait again in between.
            if went == Went::Through
                && let Some(qp) = self.qps.get(index)
                && qp.waits()
            {
                self.wait(index);
            }
        }
    }

    /// Sends a message when there is room for it; it belongs to no request. Takes no other lock.
    ///
    /// Without memory for it nobody gets it, as if this process had ended with it: what it gives back is the other's again
    /// when it does.
    #[cold]
    pub(crate) fn push_later(&self, peer: &Arc<Peer>, header: Header) {
        let mut late = self.late.lock();
        if late.make_room(1).is_ok() {
            self.add_late(&mut late, peer, header, Box::default());
        }
    }

    fn add_late(&self, late: &mut Vec<Late>, peer: &Arc<Peer>, header: Header, payload: Box<[u8]>) {
        late.push(Late {
            peer: Arc::clone(peer),
            header,
            payload,
        });
        self.chores.set(chores::LATE, !late.is_empty());
    }

    /// As [`Self::push_later`], for a datagram to a process that has not made a ring yet. False where there are too
    /// many already.
    #[cold]
    pub(crate) fn keep_datagram(
        &self,
        peer: &Arc<Peer>,
        header: Header,
        gather: impl FnOnce(*mut u8),
    ) -> bool {
        let mut late = self.late.lock();
        let same = late.iter().filter(|one| Arc::ptr_eq(&one.peer, peer));
        if same.count() >= KEPT || late.make_room(1).is_err() {
            return false;
        }
        let Ok(mut payload) = sys::zeroed::<u8>(header.len as usize) else {
            return false;
        };
        gather(payload.as_mut_ptr());
        self.add_late(&mut late, peer, header, payload);
        true
    }

    /// Whether messages that belong to no request wait for room.
    pub(crate) fn has_late(&self) -> bool {
        self.chores.has(chores::LATE)
    }

    /// Whether some of them are for this peer, after another try: what comes later is to stay behind them.
    #[cold]
    pub(crate) fn has_late_for(&self, peer: &Arc<Peer>) -> bool {
        self.push_late();
        let late = self.late.lock();
        late.iter().any(|one| Arc::ptr_eq(&one.peer, peer))
    }

    #[cold]
    fn push_late(&self) {
        let mut late = self.late.lock();
        late.retain(
            |Late {
                 peer,
                 header,
                 payload,
             }| {
                if peer.is_dead() {
                    return false;
                }
                let pushed = peer.push(self.signature(), header, |to| {
                    // SAFETY: the place has room for the message, whose payload this is.
                    unsafe { to.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
                });
                if pushed == Push::Sent {
                    notify_datagram(peer, header);
                }
                matches!(pushed, Push::Full | Push::Unmade)
            },
        );
        self.chores.set(chores::LATE, !late.is_empty());
    }

    /// A completion queue holds an event back until its period is over: who sleeps on it has to set the
    /// clock. Takes no other lock.
    #[cold]
    pub(crate) fn will_raise(&self, cq: u32) {
        let mut moderated = self.moderated.lock();
        if !moderated.contains(&cq) {
            moderated.push(cq);
            self.chores.set(chores::MODERATED, true);
            self.doorbell.ring();
        }
    }

    #[cold]
    fn raise_moderated(&self) {
        // Those that still wait come behind the others again.
        let count = self.moderated.lock().len();
        for _ in 0..count {
            let mut moderated = self.moderated.lock();
            if moderated.is_empty() {
                return;
            }
            let index = moderated.remove(0);
            self.chores.set(chores::MODERATED, !moderated.is_empty());
            drop(moderated);
            if self.cqs.get(index).is_some_and(Cq::raise_if_due) {
                self.will_raise(index);
            }
        }
    }

    /// A queue pair has receives for which its sender waits. Takes no other lock.
    pub(crate) fn request_pull(&self, qp: u32) {
        self.add_pull(Puller::Qp(qp));
    }

    /// As [`Self::request_pull`], for all that take receives of a shared queue.
    pub(crate) fn request_shared_pull(&self, srq: u32) {
        self.add_pull(Puller::Srq(srq));
    }

    fn add_pull(&self, who: Puller) {
        let mut pulls = self.pulls.lock();
        pulls.push((who, ticks()));
        self.chores.set(chores::PULLS, true);
    }

    /// Takes parked messages of senders that did not hear the doorbell in time.
    #[cold]
    fn pull_parked(&self, now: u64) {
        // Whoever has to look once more comes behind the others again.
        let count = self.pulls.lock().len();
        for _ in 0..count {
            let mut pulls = self.pulls.lock();
            let late = |&(_, since): &(Puller, u64)| now.wrapping_sub(since) > PULL_TICKS;
            let Some(at) = pulls.iter().position(late) else {
                return;
            };
            let (who, _) = pulls.remove(at);
            self.chores.set(chores::PULLS, !pulls.is_empty());
            drop(pulls);
            match who {
                Puller::Qp(index) => {
                    if let Some(qp) = self.qps.get(index) {
                        qp.pull();
                    }
                }
                Puller::Srq(index) => {
                    if let Some(srq) = self.srqs.get(index) {
                        srq.pull();
                    }
                }
            }
        }
    }

    /// As [`Self::pull_parked`], for a process that may not look again soon.
    fn pull_all_parked(&self) {
        if self.chores.has(chores::PULLS) {
            self.pull_parked(ticks().wrapping_add(2 * PULL_TICKS));
        }
    }

    /// Wakes this process's own sleepers, so that they look once more.
    pub(crate) fn wake_up(&self) {
        self.doorbell.ring();
    }

    /// When the next waiting request gives up or tries again by itself, an event is held back no longer, or receives
    /// can be flushed; 0 for never.
    fn next_deadline(&self) -> u64 {
        // One at a time: what is asked takes locks that come before the lists'. Who is put there meanwhile sets the timer.
        let requests = one_by_one(&self.waiting)
            .filter_map(|index| self.qps.get(index).and_then(Qp::deadline));
        let events = one_by_one(&self.moderated)
            .filter_map(|index| self.cqs.get(index).and_then(Cq::held_until));
        // A sender that writes into a receive is soon done.
        let flushes = self
            .chores
            .has(chores::CLOSING)
            .then(|| sys::now_ns() + FLUSH_NS);
        requests.chain(events).chain(flushes).min().unwrap_or(0)
    }

    /// Finds out which peers have ended.
    #[cold]
    fn look_at_peers(&self) {
        while let Ok((tokens, n)) = self.wake.wait(0) {
            let mut any = false;
            for &token in &tokens[..n] {
                if token & TOKEN_LINK != 0 {
                    // Answers that nobody waits for any more; a line that broke is of no more use.
                    if let Some(link) = self.link_of(token as u32) {
                        if link.look() {
                            // Not a round of progress more may follow before the caller sleeps.
                            self.doorbell.ring();
                        }
                        if link.is_broken() {
                            self.wake.remove(link.fd());
                        }
                    }
                }
                if token & TOKEN_PEER != 0 {
                    let peer = self.known_peer(token as u32);
                    if let Some(peer) = peer {
                        self.request_burial(&peer);
                        any = true;
                    }
                }
            }
            if !any {
                break;
            }
        }
    }

    /// Leaves an ended peer for the next progress to deal with. Takes no lock that the caller
    /// may hold.
    pub(crate) fn request_burial(&self, peer: &Arc<Peer>) {
        peer.mark_dead();
        peer.unwatch(&self.wake);
        let mut peers = self.peers();
        if peers.get(&peer.slot).is_some_and(|p| Arc::ptr_eq(p, peer)) {
            peers.remove(&peer.slot);
        }
        drop(peers);
        let mut graves = self.graves.lock().unwrap_or_else(PoisonError::into_inner);
        if !graves.iter().any(|grave| Arc::ptr_eq(grave, peer)) {
            // There is room, see `GRAVES`; an ended process that nobody buries is still no process to its users.
            let _ = graves.try_push(Arc::clone(peer));
        }
        self.chores.set(chores::GRAVES, !graves.is_empty());
        drop(graves);
        // Whoever sleeps now has to do it.
        self.doorbell.ring();
    }

    /// Deals with peers that have ended; when it returns that is done, whoever did it. The caller holds no lock.
    #[cold]
    pub(crate) fn bury_all(&self) {
        let _one = self.burying.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut graves = self.graves.lock().unwrap_or_else(PoisonError::into_inner);
            if graves.is_empty() {
                return;
            }
            let peer = graves.remove(0);
            self.chores.set(chores::GRAVES, !graves.is_empty());
            drop(graves);
            // What it had sent before it ended was sent.
            self.close_ring_of(&peer);
            for srq in self.srqs.iter() {
                srq.claimant_died(peer.slot);
            }
            for qp in self.qps.iter() {
                qp.peer_died(&peer);
            }
        }
    }

    /// To be called before sleeping on a set that [`Process::wake`] is in, after the caller armed
    /// whatever wakes it: after it, nothing that is there already goes unnoticed.
    pub(crate) fn prepare_sleep(&self) {
        self.doorbell.drain();
        self.timer.disarm();
        self.will_sleep();
        heavy_fence();
        self.look_at_peers();
        self.progress();
        for _ in 0..ROUNDS {
            if !self.rings_ready() {
                break;
            }
            self.progress();
        }
        // Whoever keeps sending must not keep the caller from what it has got: it comes back.
        if self.rings_ready() {
            self.doorbell.ring();
        }
        self.pull_all_parked();
        self.arm_timer();
    }

    /// Whoever sleeps wakes up for the next retry.
    fn arm_timer(&self) {
        self.timer.arm(self.next_deadline());
    }

    /// After a completion queue was armed: a message that came before is not rung for any more.
    pub(crate) fn after_arming(&self, pipe: &sys::Pipe) {
        heavy_fence();
        self.pull_all_parked();
        if self.rings_ready() {
            pipe.ring();
        }
        // A caller may poll the descriptor without asking for an event first.
        let closing = self.chores.has(chores::CLOSING);
        if closing || !self.waiting.lock().is_empty() || !self.moderated.lock().is_empty() {
            self.arm_timer();
        }
    }
}
