//! The work that this process does at each poll, and before it sleeps.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::waiting::Waiting;
use super::{Process, progress_flags};
use crate::agent::Link;
use crate::cq::{Cq, Poll};
use crate::peer::{Peer, Push};
use crate::qp::{Qp, Went, notify_datagram, return_header};
use crate::ring::Header;
use crate::segment::layout::MAX_PROCESSES;
use crate::signal;
use crate::srq::PAUSE_TICKS;
use crate::sync::{Arc, Lock, heavy_fence};
use crate::sys::{self, Errno, Grow, Identity, epoll_readable};

pub(super) const TOKEN_DOORBELL: u64 = 1;
pub(super) const TOKEN_TIMER: u64 = 2;
/// The lower 32 bits are the peer's slot, and those of [`PEER_NAME`] those of its cookie.
const TOKEN_PEER: u64 = 1 << 32;
/// Of the link to a peer's agent. The lower 32 bits are the peer's slot.
pub(super) const TOKEN_LINK: u64 = 1 << 33;
/// Bits of a cookie in [`TOKEN_PEER`]: a token that was read before a process ended must not name
/// the next process of its slot.
const PEER_NAME: u64 = u64::MAX << 34;

/// The token of the descriptors that show the end of a process.
pub(super) fn peer_token(slot: u32, identity: &Identity) -> u64 {
    TOKEN_PEER | u64::from(slot) | identity.cookie & PEER_NAME
}

/// A cheap clock that limits how often expensive work is done; a tick is about 1 ns or less.
#[inline]
pub(crate) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has `rdtsc`.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    sys::now_ns()
}

/// A polling thread reads the clock at every 8th poll of a queue, as this takes longer than the
/// rest of the poll. Polls that take messages skip it until the 16th, except behind completions
/// that were in the queue (`cq/poll.rs`). A thread that polls 20 times per second still notices a
/// dead peer within 1 s.
const POLLS_PER_LOOK: u32 = 8;

/// About a millisecond of [`ticks`], more on slow clocks.
const LIVENESS_TICKS: u64 = 2_000_000;

/// Time that a rung sender has to send its pending messages itself before they are pulled: about 40
/// microseconds, more on slow clocks.
const PULL_TICKS: u64 = 100_000;

/// Maximum rounds of progress before sleeping. A round is repeated if its own progress, or a peer,
/// has rung this process.
const OWN_RINGS: usize = 4;
/// Batches of messages that are taken from each ring before sleeping: the capacity of a ring.
const ROUNDS: usize = 32;
/// Maximum rounds over the waiting queue pairs in one progress call.
const TURNS: usize = 16;
/// Delay before the receives of a failed queue pair are checked again for a sender that writes into
/// them, in nanoseconds.
const FLUSH_NS: u64 = 1_000_000;

/// Delay before further processes that wait for receives are rung, in nanoseconds.
const UNRUNG_NS: u64 = 1_000_000;

/// Maximum number of datagrams that are queued for one process that has not made a ring yet.
const MAX_LATE: usize = 64;

/// Number of late messages that are sent before their receivers are notified.
const MAX_SENT: usize = 16;

/// A message that belongs to no request and found no room.
#[derive(Debug)]
pub(super) struct Late {
    peer: Arc<Peer>,
    header: Header,
    payload: Box<[u8]>,
}

/// Capacity of the list of dead peers that are not cleaned up yet: twice the number of slots, as
/// one round of progress cleans up all of them.
pub(super) const DEAD_PEERS: usize = 2 * MAX_PROCESSES;

/// The numbers in a list that other threads change at the same time. Removing an entry only moves
/// later entries forward, so iterating from the end visits every entry that stays.
fn one_by_one(list: &Lock<Vec<u32>>) -> impl Iterator<Item = u32> {
    let count = list.lock().len();
    (0..count)
        .rev()
        .filter_map(|at| list.lock().get(at).copied())
}

/// The queue for which pending messages are pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Puller {
    Qp(u32),
    Srq(u32),
}

impl Process {
    /// Takes messages from the rings, retries waiting requests, and handles state changes by peers
    /// and the end of peers. If there is nothing to do, it costs a few loads, and a system call
    /// about once per millisecond.
    pub(crate) fn progress(&self) {
        self.progress_of_poll(u32::MAX, &mut Poll::none());
    }

    /// As [`Self::progress`], in the `polls`th poll since the last check for ended peers. Returns
    /// true if this call did that check. If messages arrived, the other work is postponed if
    /// possible, as the caller polls for the messages. Their completions may go directly to `poll`.
    #[inline(always)]
    pub(crate) fn progress_of_poll(&self, polls: u32, poll: &mut Poll) -> bool {
        if self.drain_rings(poll) && polls < 2 * POLLS_PER_LOOK {
            return false;
        }
        let look = polls >= POLLS_PER_LOOK;
        if self.attention.called(&self.segment.map) {
            self.handle_attention();
        }
        if look {
            self.look_at_clock();
        }
        if self.progress_flags.any() {
            self.do_flagged_work();
        }
        look
    }

    #[cold]
    fn do_flagged_work(&self) {
        // Dead peers come first: otherwise a request that waits for a dead peer would fail without
        // the asynchronous event.
        if self.progress_flags.has(progress_flags::DEAD_PEERS) {
            self.clean_up_dead_peers();
        }
        if self.progress_flags.has(progress_flags::OVERRUN) {
            self.fail_overrun();
        }
        if self.progress_flags.has(progress_flags::WAITING) {
            self.retry_waiting();
        }
        if self.progress_flags.has(progress_flags::LATE) {
            self.push_late();
        }
        if self.progress_flags.has(progress_flags::MODERATED) {
            self.raise_moderated();
        }
        if self.progress_flags.has(progress_flags::PULLS) {
            self.pull_pending(ticks());
        }
        if self.progress_flags.has(progress_flags::CLOSING) {
            self.flush_closing();
        }
        if self.progress_flags.has(progress_flags::UNRUNG) {
            self.ring_further();
        }
    }

    /// To be called when processes that wait for receives of a shared receive queue are not rung
    /// yet. `rung`: when others were rung, in [`ticks`]. The first progress after the pause rings
    /// them, or the retry thread. Takes no lock of a queue.
    #[cold]
    pub(crate) fn ring_later(&self, rung: u64) {
        // Always in one step: a progress that has cleared the flag before finds no names, or this
        // call sets it again.
        let first = self.progress_flags.raise(progress_flags::UNRUNG);
        // Behind the flag: a progress that removes this time clears the flag afterwards, and then
        // looks at the queue.
        let due = rung.saturating_add(PAUSE_TICKS);
        self.unrung_due.fetch_min(due, Ordering::Relaxed);
        if first {
            self.unpark_retry_thread();
        }
        self.timer.arm(sys::now_ns() + UNRUNG_NS);
    }

    /// Whether [`Self::ring_later`] was called, and no progress has rung all since.
    pub(super) fn rings_later(&self) -> bool {
        self.progress_flags.has(progress_flags::UNRUNG)
    }

    #[cold]
    fn ring_further(&self) {
        self.retry_thread.note_round();
        let now = ticks();
        if now < self.unrung_due.load(Ordering::Relaxed) {
            return;
        }
        // A queue of which processes are still not rung sets both again.
        self.unrung_due.store(u64::MAX, Ordering::Relaxed);
        self.progress_flags.set(progress_flags::UNRUNG, false);
        let early = self.srqs.iter().filter_map(|srq| srq.ring_further(now));
        if let Some(rung) = early.min() {
            self.ring_later(rung);
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

    /// Handles a call for attention: peers moved queue pairs of this process to ERR, and this
    /// process, their owner, completes the transition; or an XRC target that it holds has changed;
    /// a peer requested the agent, or has claimed a receive with which the others of the queue are
    /// fewer than its limit; or this process has opened one for which a queue pair has waited.
    #[cold]
    fn handle_attention(&self) {
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
        for srq in self.srqs.iter() {
            srq.notice_limit();
        }
    }

    /// Requests that the next progress fails the queue pairs of overrun completion queues. Takes no
    /// lock.
    pub(crate) fn request_failure(&self) {
        self.progress_flags.set(progress_flags::OVERRUN, true);
        self.doorbell.ring();
    }

    /// Requests that the next progress flushes the receives of failed queue pairs. Takes no lock.
    pub(crate) fn request_flush(&self) {
        self.progress_flags.set(progress_flags::CLOSING, true);
        self.doorbell.ring();
    }

    /// As [`Self::request_flush`], but after a pause: a sender still writes into a receive. Takes
    /// no lock that another lock is taken under.
    pub(crate) fn flush_again(&self) {
        self.progress_flags.set(progress_flags::CLOSING, true);
        // A thread that has gone to sleep meanwhile has not seen the flag.
        self.timer.arm(sys::now_ns() + FLUSH_NS);
    }

    /// Takes the last messages of failed queue pairs and flushes their receives. A queue pair that
    /// fails meanwhile is left to the next round, which it has requested. The caller holds no lock.
    #[cold]
    pub(crate) fn flush_closing(&self) {
        self.progress_flags.set(progress_flags::CLOSING, false);
        let round = self.flush_round.fetch_add(1, Ordering::Relaxed) + 1;
        let mut any = false;
        for qp in self.qps.iter() {
            any |= qp.enter_flush(round);
        }
        if !any {
            return;
        }
        // Pairs with the light fence of senders: a sender publishes a message, executes a light
        // fence, and checks whether the state is unchanged. One fence for all queue pairs of the
        // round, as it interrupts the processors of other processes.
        heavy_fence();
        for qp in self.qps.iter() {
            qp.flush_closing(round);
        }
    }

    #[cold]
    fn fail_overrun(&self) {
        self.progress_flags.set(progress_flags::OVERRUN, false);
        std::sync::atomic::fence(Ordering::SeqCst);
        for qp in self.qps.iter() {
            qp.notice_overrun();
        }
        for srq in self.srqs.iter() {
            srq.notice_overrun();
        }
    }

    /// Adds a queue pair to those that are retried at each progress. Its first request waits.
    pub(crate) fn wait(&self, index: u32) {
        let mut waiting = self.waiting.lock();
        if waiting.add(index) {
            self.progress_flags.set(progress_flags::WAITING, true);
        }
        drop(waiting);
        self.will_sleep();
        // The awaited change may have happened before the peer could see that this process waits
        // for it.
        heavy_fence();
        // A completion queue may have been armed before, so the timer may have to be set earlier.
        let qp = self.qps.get(index);
        if let Some(deadline) = qp.and_then(Qp::deadline) {
            self.timer.arm(deadline);
        }
        if qp.is_some_and(Qp::is_waiting_initiator) {
            self.unpark_retry_thread();
        }
    }

    /// Counts the end of a turn at a full ring: queue pairs that waited for this turn can be
    /// retried.
    pub(crate) fn note_turn(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts calls of [`Self::note_turn`].
    pub(crate) fn turns(&self) -> u32 {
        self.turns.load(Ordering::Relaxed)
    }

    #[cold]
    fn retry_waiting(&self) {
        self.retry_thread.note_round();
        for _ in 0..TURNS {
            let before = self.turns();
            self.retry_each();
            // In the last round no turn ended: each queue pair waits either for the full ring,
            // whose receiver will ring this process, or for the turn of a queue pair that waits for
            // the ring.
            if self.turns() == before {
                return;
            }
        }
        // A receiver that consumes as fast as this process sends must not keep the caller here. The
        // doorbell wakes a sleeping thread, which continues.
        self.doorbell.ring();
    }

    /// Retries each queue pair that waits now, in the order in which they began to wait or had
    /// their last turn.
    fn retry_each(&self) {
        Waiting::round(
            &self.waiting,
            |index| self.qps.get(index).map_or(Went::Through, Qp::have_turn),
            |waiting| {
                self.progress_flags
                    .set(progress_flags::WAITING, !waiting.is_empty());
            },
            |index| {
                let waits = self.qps.get(index).is_some_and(Qp::waits);
                if waits {
                    self.wait(index);
                }
                waits
            },
            || self.doorbell.ring(),
        );
    }

    /// Queues a message that belongs to no request; it is sent when the ring has room. Takes no
    /// other lock.
    ///
    /// Without memory the message is dropped. The receive that it would give back returns to its
    /// owner when this process ends.
    #[cold]
    pub(crate) fn push_later(&self, peer: &Arc<Peer>, header: Header) {
        let mut late = self.late.lock();
        if late.make_room(1).is_ok() {
            self.add_late(&mut late, peer, header, Box::default());
        }
    }

    /// Returns by the ring the receives that could not be given back over a line to the peer's
    /// agent before the line broke.
    pub(super) fn return_unsent(&self, peer: &Arc<Peer>, broken: &Link) {
        for claim in broken.take_unreturned() {
            let header = return_header(
                claim.dest,
                claim.from,
                (claim.srq, claim.index),
                claim.stamp,
            );
            self.push_later(peer, header);
        }
    }

    fn add_late(&self, late: &mut Vec<Late>, peer: &Arc<Peer>, header: Header, payload: Box<[u8]>) {
        late.push(Late {
            peer: Arc::clone(peer),
            header,
            payload,
        });
        self.progress_flags
            .set(progress_flags::LATE, !late.is_empty());
    }

    /// As [`Self::push_later`], for a datagram to a process that has not made a ring yet. Returns
    /// false if 64 datagrams are queued for that process already, or without memory.
    #[cold]
    pub(crate) fn keep_datagram(
        &self,
        peer: &Arc<Peer>,
        header: Header,
        gather: impl FnOnce(*mut u8),
    ) -> bool {
        let mut late = self.late.lock();
        let same = late.iter().filter(|one| Arc::ptr_eq(&one.peer, peer));
        if same.count() >= MAX_LATE || late.make_room(1).is_err() {
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
        self.progress_flags.has(progress_flags::LATE)
    }

    /// Whether late messages for this peer remain after another try to send them. Later messages
    /// must stay behind them.
    #[cold]
    pub(crate) fn has_late_for(&self, peer: &Arc<Peer>) -> bool {
        self.push_late();
        let late = self.late.lock();
        late.iter().any(|one| Arc::ptr_eq(&one.peer, peer))
    }

    #[cold]
    fn push_late(&self) {
        loop {
            let mut sent = [const { None }; MAX_SENT];
            let count = self.push_some_late(&mut sent);
            // Without the lock: this takes 2 s if the agent of a stopped process is to open the
            // doorbell.
            for (peer, header) in sent.iter().flatten() {
                notify_datagram(peer, header);
            }
            if count < MAX_SENT {
                return;
            }
        }
    }

    /// Sends late messages until `sent` is full. Returns their number.
    fn push_some_late(&self, sent: &mut [Option<(Arc<Peer>, Header)>; MAX_SENT]) -> usize {
        let mut count = 0;
        let mut late = self.late.lock();
        late.retain(
            |Late {
                 peer,
                 header,
                 payload,
             }| {
                if peer.is_given_up() {
                    return false;
                }
                let Some(place) = sent.get_mut(count) else {
                    return true;
                };
                let pushed = peer.push(self.signature(), header, |to| {
                    // SAFETY: the ring reserved room for the message, whose payload is `payload`.
                    unsafe { to.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
                });
                if pushed == Push::Sent {
                    *place = Some((Arc::clone(peer), *header));
                    count += 1;
                }
                matches!(pushed, Push::Full | Push::Unmade)
            },
        );
        self.progress_flags
            .set(progress_flags::LATE, !late.is_empty());
        count
    }

    /// A completion queue holds an event back until `until`, in nanoseconds of the monotonic clock.
    /// A thread that sleeps wakes up for it then. Takes no lock that another lock is taken under.
    #[cold]
    pub(crate) fn will_raise(&self, cq: u32, until: u64) {
        let mut moderated = self.moderated.lock();
        if !moderated.contains(&cq) {
            moderated.push(cq);
            self.progress_flags.set(progress_flags::MODERATED, true);
        }
        drop(moderated);
        // Also if the queue is in the list from an earlier event: a thread that goes to sleep may
        // have looked at the queue between the two.
        self.timer.arm(until);
    }

    #[cold]
    fn raise_moderated(&self) {
        // Queues whose period is not over are appended again.
        let count = self.moderated.lock().len();
        for _ in 0..count {
            let mut moderated = self.moderated.lock();
            if moderated.is_empty() {
                return;
            }
            let index = moderated.remove(0);
            self.progress_flags
                .set(progress_flags::MODERATED, !moderated.is_empty());
            drop(moderated);
            if let Some(until) = self.cqs.get(index).and_then(Cq::raise_if_due) {
                self.will_raise(index, until);
            }
        }
    }

    /// Requests a pull for a queue pair with receives that its sender waits for. Takes no other
    /// lock.
    pub(crate) fn request_pull(&self, qp: u32) {
        self.add_pull(Puller::Qp(qp));
    }

    /// As [`Self::request_pull`], for all queue pairs that use a shared receive queue.
    pub(crate) fn request_shared_pull(&self, srq: u32) {
        self.add_pull(Puller::Srq(srq));
    }

    fn add_pull(&self, who: Puller) {
        let mut pulls = self.pulls.lock();
        pulls.push((who, ticks()));
        self.progress_flags.set(progress_flags::PULLS, true);
    }

    /// Takes the pending messages of senders that did not react to the doorbell in time.
    #[cold]
    fn pull_pending(&self, now: u64) {
        // A queue that must be checked again is appended behind the others.
        let count = self.pulls.lock().len();
        for _ in 0..count {
            let mut pulls = self.pulls.lock();
            let late = |&(_, since): &(Puller, u64)| now.wrapping_sub(since) > PULL_TICKS;
            let Some(at) = pulls.iter().position(late) else {
                return;
            };
            let (who, _) = pulls.remove(at);
            self.progress_flags
                .set(progress_flags::PULLS, !pulls.is_empty());
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

    /// As [`Self::pull_pending`] without the delay, for a process that is about to sleep.
    fn pull_all_pending(&self) {
        if self.progress_flags.has(progress_flags::PULLS) {
            self.pull_pending(ticks().wrapping_add(2 * PULL_TICKS));
        }
    }

    /// Wakes the sleeping threads of this process, so that they check again.
    pub(crate) fn wake_up(&self) {
        self.doorbell.ring();
    }

    /// Time of the next timed action, in nanoseconds of the monotonic clock: a waiting request
    /// fails or is retried, a moderated event is raised, receives are flushed, or an action that
    /// failed is repeated; 0 if there is none.
    fn next_deadline(&self) -> u64 {
        // The lists are locked for one lookup at a time: the calls take locks that come before the
        // lists' locks in the lock order. A thread that adds an entry meanwhile sets the timer
        // itself.
        let requests = Waiting::each(&self.waiting)
            .filter_map(|index| self.qps.get(index).and_then(Qp::deadline));
        let events = one_by_one(&self.moderated)
            .filter_map(|index| self.cqs.get(index).and_then(Cq::held_until));
        // A sender that writes into a receive finishes soon.
        let flushes = self
            .progress_flags
            .has(progress_flags::CLOSING)
            .then(|| sys::now_ns() + FLUSH_NS);
        let repeats = Some(self.repeats.due()).filter(|&due| due != 0);
        let unrung = self.rings_later().then(|| sys::now_ns() + UNRUNG_NS);
        let all = requests.chain(events).chain(flushes);
        let all = all.chain(repeats).chain(unrung);
        all.min().unwrap_or(0)
    }

    /// Finds the peers that have ended, reads the answers of agents, and repeats actions towards
    /// peers that have failed.
    #[cold]
    fn look_at_peers(&self) {
        while let Ok((tokens, n)) = self.wake.wait(0) {
            let mut any = false;
            for &token in &tokens[..n] {
                any |= self.handle_token(token);
            }
            if !any {
                break;
            }
        }
        self.look_at_unwatched();
        self.repeat_failed();
    }

    /// Handles a token that the wake set has reported, possibly some time ago. Returns true if a
    /// peer has ended.
    pub(super) fn handle_token(&self, token: u64) -> bool {
        if token & TOKEN_PEER != 0 {
            let name = |peer: &Arc<Peer>| peer_token(peer.slot, &peer.identity);
            let ended = self.mapped_peer(token as u32);
            let ended = ended.filter(|peer| name(peer) == token);
            if let Some(peer) = &ended {
                self.request_cleanup(peer);
            }
            return ended.is_some();
        }
        if token & TOKEN_LINK != 0
            && let Some(peer) = self.mapped_peer(token as u32)
            && let Some(link) = peer.link()
        {
            // Reads answers that no thread waits for any more, and removes a broken link.
            if link.look() {
                // The caller may sleep without another round of progress, so the doorbell keeps it
                // awake.
                self.doorbell.ring();
            }
            if link.is_broken() {
                self.wake.remove(link.fd());
                self.return_unsent(&peer, &link);
            }
        }
        false
    }

    /// Looks at one of the peers whose end makes no descriptor readable, at another one with each
    /// call.
    fn look_at_unwatched(&self) {
        if !self.any_unwatched.load(Ordering::Relaxed) {
            return;
        }
        let peers = self.peers();
        let last = self.last_look.load(Ordering::Relaxed);
        let next = peers
            .values()
            .filter(|peer| peer.is_unwatched())
            // the next slot, in a circle
            .min_by_key(|peer| peer.slot.wrapping_sub(last + 1))
            .cloned();
        drop(peers);
        match next {
            Some(peer) => {
                self.last_look.store(peer.slot, Ordering::Relaxed);
                if peer.has_ended() {
                    self.request_cleanup(&peer);
                }
            }
            None => self.any_unwatched.store(false, Ordering::Relaxed),
        }
    }

    /// A conversation with the process in `slot` has ended, which is a sign of the end of that
    /// process. Takes no lock that the caller may hold.
    pub(crate) fn conversation_ended(&self, slot: u32) {
        let Some(peer) = self.mapped_peer(slot).filter(|peer| peer.is_unwatched()) else {
            return;
        };
        let token = peer_token(slot, &peer.identity);
        let watched = peer.watch_now(&self.wake, token);
        if peer.has_ended() || matches!(watched, Err(Errno(libc::ESRCH))) {
            self.request_cleanup(&peer);
        }
    }

    /// Marks a peer as dead and leaves its cleanup to the next progress. Takes no lock that the
    /// caller may hold.
    pub(crate) fn request_cleanup(&self, peer: &Arc<Peer>) {
        peer.give_up();
        peer.unwatch(&self.wake);
        let mut peers = self.peers();
        if peers.get(&peer.slot).is_some_and(|p| Arc::ptr_eq(p, peer)) {
            peers.remove(&peer.slot);
        }
        drop(peers);
        let mut dead_peers = self
            .dead_peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !dead_peers
            .iter()
            .any(|dead_peer| Arc::ptr_eq(dead_peer, peer))
        {
            // There is room, see `DEAD_PEERS`. A dead peer that is never cleaned up is still marked
            // dead for its users.
            let _ = dead_peers.try_push(Arc::clone(peer));
        }
        self.progress_flags
            .set(progress_flags::DEAD_PEERS, !dead_peers.is_empty());
        drop(dead_peers);
        // A thread that sleeps now must wake up and do the cleanup.
        self.doorbell.ring();
    }

    /// Cleans up after dead peers. On return the cleanup is complete, also if another thread did
    /// it. The caller holds no lock of the device's objects; it may hold those of the connection
    /// manager's, which precede them.
    #[cold]
    pub(crate) fn clean_up_dead_peers(&self) {
        let _one = self
            .cleaning_up
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut dead_peers = self
                .dead_peers
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if dead_peers.is_empty() {
                return;
            }
            let peer = dead_peers.remove(0);
            self.progress_flags
                .set(progress_flags::DEAD_PEERS, !dead_peers.is_empty());
            drop(dead_peers);
            // Messages that the peer had sent before it ended are delivered.
            self.close_ring_of(&peer);
            if peer.begin_return_of_claims() {
                for srq in self.srqs.iter() {
                    srq.claimant_died(peer.slot);
                }
            }
            for qp in self.qps.iter() {
                qp.peer_died(&peer);
            }
        }
    }

    /// To be called before sleeping on a set that contains [`Process::wake`], after the caller
    /// armed its wake-up sources. Events that happened before the call are handled or leave the set
    /// readable.
    pub(crate) fn prepare_sleep(&self) {
        for _ in 0..OWN_RINGS {
            self.remove_wakes();
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
            self.pull_all_pending();
            if epoll_readable(self.doorbell.read_fd(), 0) != Ok(true) {
                break;
            }
        }
        // A peer that sends continuously must not keep the caller here. The doorbell makes the
        // caller return to the rest.
        if self.rings_ready() {
            self.doorbell.ring();
        }
        self.arm_timer();
    }

    /// Sets the timer, so that a sleeping thread wakes up for the next retry.
    fn arm_timer(&self) {
        self.timer.arm(self.next_deadline());
    }

    /// Makes [`Process::wake`] unreadable, as far as doorbell and timer do. (The end of a peer
    /// rings the doorbell.)
    fn remove_wakes(&self) {
        // Under the lock: another thread that has found the descriptor readable finds it readable
        // now, or the new number.
        let mut removed = self.removed_wakes.lock();
        if self.doorbell.drain() | self.timer.disarm() {
            *removed = removed.wrapping_add(1);
        }
    }

    /// How often a thread has made [`Process::wake`] unreadable, wraps; and what `look` returns,
    /// during which no thread does so.
    pub(crate) fn removed_wakes<T>(&self, look: impl FnOnce() -> T) -> (u32, T) {
        let removed = self.removed_wakes.lock();
        (*removed, look())
    }
}
