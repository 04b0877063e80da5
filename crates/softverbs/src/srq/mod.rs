//! Shared receive queues.
//!
//! Posted receives are listed in order in a ring of words in the owner's segment. A sender claims
//! the first unclaimed receive by a compare-and-swap, which writes the sender's slot into the word,
//! and names the receive's descriptor in its message. The owner follows the claims with a private
//! position and keeps a private list of the claimant of each receive. A message can therefore
//! consume only a receive that its sender has claimed, and the owner posts the claims of an ended
//! process again.

mod fast_path;
mod object;
mod order;
mod shared;
mod unrung;
mod words;
mod xrc;

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rdma_core_sys::{IBV_EVENT_SRQ_LIMIT_REACHED, ibv_event_type, ibv_recv_wr, ibv_sge, ibv_srq};

pub(crate) use object::{SrqInit, create, destroy, enabled, modify, query};
pub(crate) use order::Order;
#[cfg(test)]
pub(crate) use shared::before_claim;
pub(crate) use shared::{Claim, Shared};
pub(crate) use unrung::PAUSE_TICKS;
#[cfg(any(test, fuzzing))]
pub(crate) use xrc::srq_num;
pub(crate) use xrc::{
    XrcInit, abandon, complete_fast, deliver as deliver_xrc, deliver_fast as deliver_xrc_fast,
    number_of, split_srq_num,
};

use crate::cq::Retires;
use crate::delivery::{Receive, post_receives};
use crate::events::Element;
use crate::limits::MAX_SGE;
use crate::object::Context;
use crate::process::Process;
use crate::region::{LastRegion, Places};
use crate::segment::layout::{desc, srq as layout};
use crate::signal;
use crate::sync::{Lock, heavy_fence, light_fence_towards_all};
use crate::sys::{Errno, Res, Zero};

/// A shared receive queue. The C object is the first field, so a pointer to it is a pointer to this
/// structure. The memory stays when the queue is destroyed, for the next queue with the same index.
#[repr(C)]
pub(crate) struct Srq {
    object: UnsafeCell<ibv_srq>,
    index: u32,
    /// The process in whose pool the object is.
    process: &'static Process,
    /// Number of queue pairs that use this SRQ.
    pub(crate) users: AtomicU32,
    events: AtomicU32,
    /// A pull is already requested: see [`Self::pull`].
    pulls: AtomicBool,
    /// Processes that wait for a receive and are not rung yet, and whether there are any.
    unrung: unrung::Unrung,
    any_unrung: AtomicBool,
    queue: Lock<Queue>,
    kept: Lock<words::Kept>,
    /// The additional state of an XRC SRQ.
    xrc: Lock<xrc::Part>,
}

// SAFETY: the C object is written by this crate only at creation and under its own mutex.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl std::fmt::Debug for Srq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Srq({})", self.index)
    }
}

/// The owner's private state of a receive.
#[derive(Clone, Copy, Default)]
struct Posted {
    wr_id: u64,
    total: u32,
    num_sge: u32,
    /// The length that senders see; 0 if a sge is not writable, or the region of one has been
    /// deregistered.
    room: u32,
    state: State,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(u32)]
enum State {
    #[default]
    Free = 0,
    Posted,
    /// Claimed by the process in this slot.
    Claimed(u32),
    /// Claimed by a process that has ended.
    Lost,
}

// SAFETY: integers, and an enumeration with a value 0.
unsafe impl Zero for Posted {}

#[derive(Default)]
struct Queue {
    max_wr: u32,
    max_sge: u32,
    limit: u32,
    pd: u32,
    order: Order,
    /// Indices of unused descriptors.
    free: Vec<u32>,
    posted: Box<[Posted]>,
    sges: Box<[ibv_sge]>,
    desc_at: usize,
    desc_stride: usize,
    last_region: LastRegion,
}

/// A receive that a message has consumed and that must be completed.
pub(crate) struct Taken {
    pub(crate) wr_id: u64,
    pub(crate) total: u32,
    pub(crate) pd: u32,
    sges: [ibv_sge; MAX_SGE as usize],
    num_sge: usize,
}

impl Taken {
    pub(crate) fn sges(&self) -> &[ibv_sge] {
        &self.sges[..self.num_sge]
    }

    /// The receive, for delivering the message into it.
    pub(crate) fn receive(&self) -> Receive<'_> {
        Receive {
            wr_id: self.wr_id,
            total: self.total,
            pd: self.pd,
            sges: self.sges(),
            done: 0,
            retires: Retires::Nothing,
        }
    }
}

impl Queue {
    fn claimed(&self, index: u32, slot: u32) -> Option<Taken> {
        let posted = *self.posted.get(index as usize)?;
        if posted.state != State::Claimed(slot) {
            return None;
        }
        let first = index as usize * self.max_sge as usize;
        let num_sge = posted.num_sge as usize;
        let mut sges = [ibv_sge::default(); MAX_SGE as usize];
        sges[..num_sge].copy_from_slice(&self.sges[first..first + num_sge]);
        Some(Taken {
            wr_id: posted.wr_id,
            total: posted.total,
            pd: self.pd,
            sges,
            num_sge,
        })
    }
}

impl Srq {
    /// # Safety
    /// `srq` must come from [`create`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(srq: *mut ibv_srq) -> &'a Self {
        // SAFETY: the C object is the first field, and the caller promises that `create` returned
        // it; the memory is never freed.
        unsafe { &*srq.cast::<Self>() }
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_srq {
        self.object.get()
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    pub(crate) fn process(&self) -> &'static Process {
        self.process
    }

    fn context(&self) -> &Context {
        // SAFETY: the application closes a context only after it has destroyed the context's
        // queues.
        unsafe { Context::from_ptr((*self.as_ptr()).context) }
    }

    fn at(&self) -> usize {
        layout::AT + layout::STRIDE * self.index as usize
    }

    #[inline(never)]
    fn post(&self, queue: &mut Queue, wr: &ibv_recv_wr) -> Res<()> {
        let num_sge = wr.num_sge.cast_unsigned();
        if num_sge > queue.max_sge {
            return Err(Errno(libc::EINVAL));
        }
        let Some(index) = queue.free.pop() else {
            return Err(Errno(libc::ENOMEM));
        };
        let sges = if num_sge == 0 {
            &[]
        } else {
            // SAFETY: the caller promises a list of `num_sge` sges.
            unsafe { std::slice::from_raw_parts(wr.sg_list, num_sge as usize) }
        };
        let process = self.process();
        let map = &process.segment.map;
        let shared = queue.desc_at + queue.desc_stride * index as usize;
        let first = index as usize * queue.max_sge as usize;
        let mut total = 0u32;
        let mut good = true;
        for (i, sge) in sges.iter().enumerate() {
            queue.sges[first + i] = *sge;
            total = total.saturating_add(sge.length);
            let sge_at = shared + desc::FIRST + desc::SGE_STRIDE * i;
            match process.regions.local_of_receive(sge, queue.pd) {
                Some(addr) => {
                    map.u64(sge_at).store(addr, Ordering::Relaxed);
                    map.u32(sge_at + 8).store(sge.length, Ordering::Relaxed);
                    map.u32(sge_at + desc::LKEY)
                        .store(sge.lkey, Ordering::Relaxed);
                }
                None => good = false,
            }
        }
        map.u32(shared + desc::TOTAL)
            .store(total, Ordering::Relaxed);
        let shown = if good { num_sge } else { desc::POISONED };
        map.u32(shared + desc::NUM_SGE)
            .store(shown, Ordering::Relaxed);
        queue.posted[index as usize] = Posted {
            wr_id: wr.wr_id,
            total,
            num_sge,
            room: if good { total } else { 0 },
            state: State::Posted,
        };
        self.publish(queue, index);
        Ok(())
    }

    /// Publishes a receive to senders, at the end of the order.
    #[inline]
    fn publish(&self, queue: &mut Queue, index: u32) {
        if queue.order.is_full() {
            self.follow(queue);
        }
        let posted = &mut queue.posted[index as usize];
        posted.state = State::Posted;
        let room = posted.room;
        queue.order.append(&self.process().segment.map, index, room);
    }

    /// Reads the claims since the last call into the private list, and raises the limit event if
    /// the unclaimed receives are fewer than the limit.
    fn follow(&self, queue: &mut Queue) {
        let map = &self.process().segment.map;
        while let Some((index, claimant)) = queue.order.follow(map) {
            queue.posted[index as usize].state = State::Claimed(claimant);
        }
        if queue.order.left() < queue.limit {
            self.set_limit(queue, 0);
            self.raise(IBV_EVENT_SRQ_LIMIT_REACHED);
        }
    }

    /// Sets the limit and publishes it to claimants.
    fn set_limit(&self, queue: &mut Queue, limit: u32) {
        queue.limit = limit;
        let shared = self.process().segment.map.u32(self.at() + layout::LIMIT);
        shared.store(limit, Ordering::SeqCst);
    }

    /// Arms the limit, and raises the event if the receives are fewer than the limit already.
    fn arm_limit(&self, queue: &mut Queue, limit: u32) {
        self.set_limit(queue, limit);
        if limit != 0 {
            // Pairs with the light fence of claimants between their claim and the limit.
            heavy_fence();
            self.follow(queue);
        }
    }

    /// Reads the claims if a claimant may have reported that they pass the limit.
    pub(crate) fn notice_limit(&self) {
        let mut queue = self.queue.lock();
        let limit = queue.limit;
        if limit == 0 {
            return;
        }
        let shared = self.process().segment.map.u32(self.at() + layout::LIMIT);
        if shared.load(Ordering::Acquire) == 0 {
            // Receives may have been posted since: then the limit is armed again.
            self.arm_limit(&mut queue, limit);
        }
    }

    fn raise(&self, event: ibv_event_type) {
        self.events.fetch_add(1, Ordering::Relaxed);
        let events = &self.context().events;
        if !events.push(event, Element::Srq(self.as_ptr())) {
            self.events.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes the receive with this descriptor, if the process in `slot` has claimed it. The
    /// descriptor becomes free.
    pub(crate) fn take(&self, index: u32, slot: u32) -> Option<Taken> {
        let mut queue = self.queue.lock();
        self.follow(&mut queue);
        let taken = queue.claimed(index, slot)?;
        queue.posted[index as usize].state = State::Free;
        queue.free.push(index);
        Some(taken)
    }

    /// As [`Self::take`], but the receive stays claimed.
    pub(crate) fn claimed(&self, index: u32, slot: u32) -> Option<Taken> {
        let mut queue = self.queue.lock();
        self.follow(&mut queue);
        queue.claimed(index, slot)
    }

    /// As [`Qp::receive_places`](crate::qp::Qp::receive_places), for the receive with this
    /// descriptor, if the process in `slot` has claimed it.
    pub(crate) fn receive_places(
        &self,
        index: u32,
        skip: u64,
        len: u32,
        slot: u32,
    ) -> Option<Places> {
        let taken = self.claimed(index, slot)?;
        Places::of(&self.process().regions, taken.sges(), taken.pd, skip, len)
    }

    /// Claims the next receive for this process if its length is at least `len`; otherwise the
    /// receive stays unclaimed.
    pub(crate) fn claim_next(&self, len: u32) -> Option<u32> {
        let process = self.process();
        let map = &process.segment.map;
        let queue = self.queue.lock();
        let shared = Shared::read(map, self.index)?;
        let claim = shared.claim_if(map, process.slot, |index| {
            queue
                .posted
                .get(index as usize)
                .is_some_and(|posted| posted.total >= len)
        });
        claim.map(|claim| claim.index)
    }

    /// Takes the next receive if its length is at least `len`, for a message whose sender has
    /// claimed none.
    pub(crate) fn take_next(&self, len: u32) -> Option<Taken> {
        let index = self.claim_next(len)?;
        self.take(index, self.process().slot)
    }

    /// Returns a claimed receive that no message will consume: publishes it again.
    pub(crate) fn give_back(&self, index: u32, slot: u32) {
        let mut queue = self.queue.lock();
        self.follow(&mut queue);
        let claimed = queue.posted.get(index as usize).map(|posted| posted.state);
        if claimed == Some(State::Claimed(slot)) {
            self.publish(&mut queue, index);
            drop(queue);
            self.ring_again();
        }
    }

    /// As [`crate::qp::Qp::poison_receives`].
    pub(crate) fn poison_receives(&self, lkey: u32) {
        let mut queue = self.queue.lock();
        let queue = &mut *queue;
        let map = &self.process().segment.map;
        let mut any = false;
        for (index, posted) in queue.posted.iter_mut().enumerate() {
            let first = index * queue.max_sge as usize;
            let sges = &queue.sges[first..first + posted.num_sge as usize];
            let named = || sges.iter().any(|sge| sge.lkey == lkey && sge.length > 0);
            if posted.state != State::Free && named() {
                let at = queue.desc_at + queue.desc_stride * index + desc::NUM_SGE;
                map.u32(at).store(desc::POISONED, Ordering::Relaxed);
                posted.room = 0;
                any = true;
            }
        }
        if any {
            let posted = &queue.posted;
            let poisoned = |index: u32| posted[index as usize].room == 0;
            queue.order.hide_room(map, poisoned);
        }
    }

    /// Publishes the claimed receives of the process in `slot` again. The process has ended, and
    /// all its messages have been delivered.
    pub(crate) fn claimant_died(&self, slot: u32) {
        let mut queue = self.queue.lock();
        if queue.order.len() == 0 {
            return;
        }
        self.follow(&mut queue);
        // In two passes: a receive that is published again can be claimed at once, by the process
        // that has the slot now.
        let claimed = State::Claimed(slot);
        for index in 0..queue.posted.len() {
            if queue.posted[index].state == claimed {
                queue.posted[index].state = State::Lost;
            }
        }
        for index in 0..queue.posted.len() {
            if queue.posted[index].state == State::Lost {
                self.publish(&mut queue, index as u32);
            }
        }
        drop(queue);
        self.wake_senders(unrung::ALL);
        // The process may have taken the limit without the call that reports it.
        self.notice_limit();
    }

    /// As [`Self::wake_senders`], for a receive that was claimed in vain. The requests of the
    /// senders stay if queue pairs use the SRQ: a pull that cannot copy a message comes here, has
    /// asked in the place of all of them, and must not request the next pull, which would do the
    /// same.
    #[cold]
    fn ring_again(&self) {
        let process = self.process();
        if self.users.load(Ordering::Relaxed) == 0 {
            return self.wake_senders(unrung::ALL);
        }
        light_fence_towards_all(&process.unfenced);
        if signal::is_asked_in_turn(&process.segment.map, self.at() + layout::WAITING) {
            process.ring_all_peers();
        }
    }

    /// Rings some of the processes with these slots, for so many receives ([`Self::ring_some`]). If
    /// queue pairs use the SRQ, rings all peers, and requests a pull.
    #[cold]
    fn ring_senders(&self, waiters: &unrung::Names, posted: u32) {
        let process = self.process();
        if self.users.load(Ordering::Relaxed) == 0 {
            return self.ring_some(waiters, posted);
        }
        // A sender with pending messages does not name its process again when it finds no receive:
        // the pull asks in its place. It is requested before the rings: a sender that was rung can
        // take a receive, and the message can make a thread of this process look for the last time
        // before it sleeps, while this one has not returned from the rings.
        let requested = !self.pulls.swap(true, Ordering::AcqRel);
        if requested {
            process.request_shared_pull(self.index);
        }
        process.ring_all_peers();
        if requested && signal::must_ring(&process.segment.map) {
            process.wake_up();
        }
    }

    /// Whether initiators of XRC may wait for receives of this SRQ. Takes no lock.
    fn serves_initiators(&self) -> bool {
        let map = &self.process().segment.map;
        map.u32(self.at() + layout::STAMP).load(Ordering::Relaxed) != 0
    }

    /// Makes the queue pairs that use this SRQ check for pending messages of waiting senders. The
    /// caller holds no lock of a queue.
    pub(crate) fn pull(&self) {
        self.pulls.store(false, Ordering::Release);
        let process = self.process();
        let (map, waiting) = (&process.segment.map, self.at() + layout::WAITING);
        // A receive that is posted during this call requests another pull.
        signal::ask_in_turn(map, waiting);
        heavy_fence();
        for qp in process.qps.iter().filter(|qp| qp.has_waiting_sender(self)) {
            qp.pull();
        }
        // If no sender waits, the next receive need not ring: a sender marks its queue pair before
        // it asks. An initiator of XRC has no queue pair of this process to mark, so its request
        // stays.
        let waits = || process.qps.iter().any(|qp| qp.has_waiting_sender(self));
        if !self.serves_initiators() && signal::stop_asking_in_turn(map, waiting, waits) {
            // A sender began to wait while the request was still set, and a receive posted since
            // then rang no process.
            self.ring_senders(&unrung::Names::default(), 1);
        }
    }
}

/// `ibv_post_srq_recv`.
///
/// # Safety
/// `srq` must be live, `wr` a valid chain, `bad` writable.
pub(crate) unsafe fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> i32 {
    // SAFETY: the caller promises a live queue.
    let this = unsafe { Srq::from_ptr(srq) };
    if this.process().forked() {
        // SAFETY: the caller promises a writable pointer.
        unsafe { *bad = wr };
        return libc::EIO;
    }
    let (posted, ret) = {
        let mut queue = this.queue.lock();
        let post = |receive: &ibv_recv_wr| {
            // SAFETY: the caller promises a valid chain.
            if unsafe { this.post_fast(&mut queue, receive) } {
                return Ok(());
            }
            this.post(&mut queue, receive)
        };
        // SAFETY: the caller promises a valid chain and a writable pointer.
        unsafe { post_receives(wr, bad, post) }
    };
    this.wake_senders(posted);
    ret
}
