//! The receive ring of a queue pair (`docs/softverbs-ring.md`).
//!
//! The sends of one ring are serialized by the caller, and so are its polls; the two may run at the
//! same time. Creating, attaching, RESET and destruction exclude all other calls. So the two sides
//! are accessed through raw pointers without a lock, and never both through one reference.
//!
//! While a queue pair writes into a ring, it names the receiver in a word of its own. A receiver
//! that stops to receive changes its state word, runs a heavy fence and reads that word. It neither
//! ends the ring nor uses its memory again while the sender writes.
//!
//! Threads sleep on the channel of the completion queue to which a queue pair receives, also for
//! room and for the end of a ring: only a call for that channel takes its rings of the doorbell.

use std::ptr::{addr_of, addr_of_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rdma_core_sys::{
    IBV_EVENT_QP_REQ_ERR, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPT_RC, softdv_ring,
    softdv_ring_info,
};

use super::remote_qp::Unreachable;
use super::ring_sends::{Outbound, OutgoingMessage};
use super::{Qp, RecvQueue, entry_at};
use crate::cq::Cq;
use crate::delivery::receives;
use crate::environment;
use crate::limits::PEER_WAIT_NS;
use crate::peer::Peer;
use crate::process::Process;
use crate::receive_ring::{
    Fill, Message, Receiver, RingArea, SLOT, Stop, UseWord, WAITING_AT, is_awaited, is_valid,
    is_writing, ring_len,
};
use crate::segment::layout::{qp as layout, split_qp_num};
use crate::sync::{Arc, heavy_fence, light_fence, pause};
use crate::sys::{self, Errno, Res, try_box};

/// The receive ring of a queue pair. The C structure is the first field, so a pointer to it is also
/// a pointer to this. Freed with the queue pair.
#[repr(C)]
pub(crate) struct OwnRing {
    face: softdv_ring,
    qp: &'static Qp,
    /// The memory of the ring. It is kept when the sender has moved to the larger ring: a thread
    /// that ends the connection may read words of both.
    first: RingArea,
    larger: Option<RingArea>,
    inbound: Inbound,
    outbound: Option<Outbound>,
    /// [`Outbound::next_slot`], for the user of the ring (`softdv_ring_info`).
    next_slot: AtomicPtr<u8>,
}

/// The receiving side.
struct Inbound {
    receiver: Receiver,
    /// Slots of the message that the last poll returned, 0 if it is consumed.
    polled: u32,
    phase: Phase,
    /// The process of the other queue pair, if it is attached.
    peer: Option<Arc<Peer>>,
    /// The last connection, until no sender of it writes any more.
    former: Option<Former>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// The queue pair is in ERR, and the sender may be writing until this time, in nanoseconds of
    /// the monotonic clock.
    Ending(u64),
    /// No sender writes any more; the rest of the ring is delivered.
    Last,
    /// The end was reported, or the queue pair was reset. The ring is not read.
    Closed,
    /// The sender has written an invalid header. The ring is not read.
    Broken,
}

/// A connection that has ended.
struct Former {
    peer: Option<Arc<Peer>>,
    /// Number of the other queue pair.
    dest: u32,
    /// This queue pair in that connection.
    used: UseWord,
}

fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| environment::RING.value().is_none_or(|value| value != "0"))
}

/// A word that is never `expected`: a ring that is not read has no message.
static NEVER: AtomicU32 = AtomicU32::new(0);

/// Whether the queue pair `dest` of `peer` writes into the ring of this receiver, which does not
/// receive since before the last heavy fence.
fn writes(peer: &Peer, dest: u32, receiver: UseWord) -> bool {
    let (_, index) = split_qp_num(dest);
    is_writing(&peer.map, entry_at(index), receiver) && !peer.has_ended()
}

/// The process of the queue pair `dest`, which may write into a ring; `None`: it has ended.
///
/// # Errors
/// The process may run, but cannot be opened: a lack of descriptors or memory, or its agent does
/// not answer.
fn writer_of(process: &Process, dest: u32) -> Res<Option<Arc<Peer>>> {
    match process.peer(split_qp_num(dest).0) {
        Ok(peer) => Ok(Some(peer)),
        // A process that cannot be opened for one of the last two reasons is not the one that the
        // queue pair was connected to.
        Err(Errno(libc::ESRCH | libc::ENOENT | libc::EPERM | libc::EPROTO)) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Qp {
    /// Gives the queue pair a receive ring.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: not RC, or the device has no rings. `EINVAL`: neither in RESET nor in INIT, or
    /// a wrong number of slots. `EEXIST`: it has one. `ENOMEM`.
    pub(crate) fn create_receive_ring(&'static self, slots: u32, cookie: u64) -> Res<*mut OwnRing> {
        if !enabled() || self.sq.lock().kind != IBV_QPT_RC {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        if !is_valid(slots) || !matches!(self.state(), IBV_QPS_RESET | IBV_QPS_INIT) {
            return Err(Errno(libc::EINVAL));
        }
        if !self.receive_ring.load(Ordering::Acquire).is_null() {
            return Err(Errno(libc::EEXIST));
        }
        let process = self.process();
        let cq = self.rq.lock().cq.cast_mut();
        // SAFETY: a queue pair in use holds a reference to its completion queues.
        unsafe { &*cq }.make_arrivals()?;
        let at = process.segment.take_ring(ring_len(slots))?;
        let map = Arc::clone(&process.segment.map);
        let ring = OwnRing {
            face: softdv_ring {
                next: std::ptr::null(),
                expected: 0,
                left: 0,
                longest: 0,
                ahead: 0,
            },
            qp: self,
            first: RingArea { at, slots },
            larger: None,
            inbound: Inbound {
                receiver: Receiver::new(map, at, slots),
                polled: 0,
                phase: Phase::Open,
                peer: None,
                former: None,
            },
            outbound: None,
            next_slot: AtomicPtr::default(),
        };
        let ring = try_box(ring)
            .map(Box::into_raw)
            .inspect_err(|_| process.segment.give_ring(at, ring_len(slots)))?;
        // SAFETY: just allocated; no other thread has it.
        unsafe { OwnRing::show_next(ring) };
        let null = std::ptr::null_mut();
        let first =
            self.receive_ring
                .compare_exchange(null, ring, Ordering::AcqRel, Ordering::Relaxed);
        if first.is_err() {
            // another thread has created one
            // SAFETY: made by `Box::into_raw` above, and nothing else refers to it.
            drop(unsafe { Box::from_raw(ring) });
            process.segment.give_ring(at, ring_len(slots));
            return Err(Errno(libc::EEXIST));
        }
        self.show_ring(Some(RingArea { at, slots }));
        self.receive_ring_cookie.store(cookie, Ordering::Relaxed);
        self.receive_ring_cq.store(cq, Ordering::Release);
        Ok(ring)
    }

    /// Publishes the area of the ring, and no larger one.
    fn show_ring(&self, ring: Option<RingArea>) {
        let (map, entry) = (self.map(), self.at());
        map.u64(entry + layout::LARGER_AT)
            .store(0, Ordering::Relaxed);
        let (at, slots) = ring.map_or((0, 0), |ring| (ring.at, ring.slots));
        map.u32(entry + layout::RING_SLOTS)
            .store(slots, Ordering::Relaxed);
        map.u64(entry + layout::RING_AT)
            .store(at as u64, Ordering::Release);
    }

    /// The cookie of the queue pair's ring, if its messages are noted at `cq`. Takes no lock.
    pub(crate) fn cookie_of_ring(&self, cq: &Cq) -> Option<u64> {
        let here = std::ptr::eq(self.receive_ring_cq.load(Ordering::Acquire), cq);
        here.then(|| self.receive_ring_cookie.load(Ordering::Relaxed))
    }

    /// Whether a sender waits for a change of the ring; withdraws its request. The caller has
    /// changed the state word and run a fence, and holds the lock of the receive queue.
    pub(super) fn receive_ring_is_awaited(&self) -> bool {
        if self.receive_ring.load(Ordering::Acquire).is_null() {
            return false;
        }
        // Only this process writes the places, and it clears them before it gives the memory back.
        [layout::RING_AT, layout::LARGER_AT]
            .map(|word| {
                let at = self.map().u64(self.at() + word);
                let at = at.load(Ordering::Relaxed) as usize;
                at != 0 && is_awaited(self.map(), at + WAITING_AT)
            })
            .contains(&true)
    }

    /// Wakes the sender, if it waits for a change of the ring, after the queue pair went to ERR.
    /// The caller has run a light fence.
    pub(super) fn wake_receive_ring_sender(&self, rq: &mut RecvQueue) {
        if self.receive_ring_is_awaited() {
            self.notify_ring_sender(rq);
        }
    }

    /// Wakes the sender into the ring.
    fn notify_ring_sender(&self, rq: &mut RecvQueue) {
        let dest = rq.dest;
        if let Some(peer) = self.sender(rq) {
            peer.notify_cq_of(dest);
        }
    }

    /// Ends the connection of the ring: part of a reset, under the locks of both queues.
    pub(super) fn close_receive_ring(&self, rq: &RecvQueue) {
        let ring = self.receive_ring.load(Ordering::Acquire);
        if ring.is_null() {
            return;
        }
        // SAFETY: a ring is freed only when its queue pair is destroyed, and the caller of a reset
        // excludes all other calls on the ring.
        let ring = unsafe { &mut *ring };
        ring.outbound = None;
        let peer = ring.inbound.peer.take().or_else(|| rq.peer.clone());
        ring.inbound.phase = Phase::Closed;
        ring.inbound.polled = 0;
        if rq.dest != 0 {
            ring.inbound.former = Some(Former {
                peer,
                dest: rq.dest,
                used: UseWord::new(self.number(), rq.incarnation),
            });
        }
        // SAFETY: the caller of a reset excludes all other calls on the ring.
        unsafe { OwnRing::hide_next(ring) };
    }

    /// Empties the ring for the next connection when no sender of the last one writes any more. A
    /// ring that is open already is left as it is.
    ///
    /// # Errors
    /// `EBUSY`: a sender writes for longer than 5 s, or its process cannot be opened to find that
    /// out. The call can be repeated.
    pub(super) fn reopen_receive_ring(&self) -> Res<()> {
        let ring = self.receive_ring.load(Ordering::Acquire);
        if ring.is_null() {
            return Ok(());
        }
        // SAFETY: as in `close_receive_ring`.
        let ring = unsafe { &mut *ring };
        let inbound = &mut ring.inbound;
        if inbound.phase != Phase::Closed {
            return Ok(());
        }
        if let Some(former) = &inbound.former {
            heavy_fence();
            let peer = match &former.peer {
                Some(peer) => Some(Arc::clone(peer)),
                None => writer_of(self.process(), former.dest).map_err(|_| Errno(libc::EBUSY))?,
            };
            if let Some(peer) = peer {
                await_writer(|| writes(&peer, former.dest, former.used))?;
            }
        }
        inbound.former = None;
        inbound.polled = 0;
        inbound.receiver.clear();
        self.show_ring(Some(inbound.receiver.area()));
        inbound.phase = Phase::Open;
        // SAFETY: as above.
        unsafe { OwnRing::show_next(ring) };
        Ok(())
    }

    /// Whether [`Self::reopen_receive_ring`] would wait for a sender that this process has open.
    pub(super) fn is_receive_ring_in_use(&self) -> bool {
        let ring = self.receive_ring.load(Ordering::Acquire);
        if ring.is_null() {
            return false;
        }
        // SAFETY: as in `close_receive_ring`.
        let inbound = unsafe { &(*ring).inbound };
        let Some(former) = inbound.former.as_ref() else {
            return false;
        };
        heavy_fence();
        let (slot, _) = split_qp_num(former.dest);
        let peer = former.peer.clone();
        let peer = peer.or_else(|| self.process().mapped_peer(slot));
        inbound.phase == Phase::Closed
            && peer.is_some_and(|peer| writes(&peer, former.dest, former.used))
    }

    /// Frees the ring of a queue pair that is being destroyed, after [`Self::reopen_receive_ring`].
    pub(super) fn free_receive_ring(&self) {
        let ring = self
            .receive_ring
            .swap(std::ptr::null_mut(), Ordering::AcqRel);
        if ring.is_null() {
            return;
        }
        let null = std::ptr::null_mut();
        self.receive_ring_cq.store(null, Ordering::Relaxed);
        self.show_ring(None);
        // SAFETY: made by `Box::into_raw` in `create_receive_ring`, and nothing else refers to it.
        let ring = unsafe { Box::from_raw(ring) };
        let segment = &self.process().segment;
        for area in [Some(ring.first), ring.larger].into_iter().flatten() {
            segment.give_ring(area.at, ring_len(area.slots));
        }
    }
}

/// # Errors
/// `EBUSY`: `writes` is true for longer than 5 s.
fn await_writer(writes: impl Fn() -> bool) -> Res<()> {
    let begin = sys::now_ns();
    let mut round = 0;
    while writes() {
        if sys::now_ns() - begin > PEER_WAIT_NS {
            return Err(Errno(libc::EBUSY));
        }
        pause(round);
        round = round.saturating_add(1);
    }
    Ok(())
}

impl OwnRing {
    /// The ring of a C object, which comes from [`Qp::create_receive_ring`].
    #[inline(always)]
    pub(crate) fn from_ptr(ring: *mut softdv_ring) -> *mut Self {
        ring.cast()
    }

    /// The queue pair of the ring.
    ///
    /// # Safety
    /// `ring` must be live.
    #[inline(always)]
    pub(crate) unsafe fn qp(ring: *mut Self) -> &'static Qp {
        // SAFETY: the caller promises a live ring; the field never changes.
        unsafe { *addr_of!((*ring).qp) }
    }

    /// # Safety
    /// `ring` must be live; the caller serializes this call with other calls of the receiving side.
    #[inline(always)]
    unsafe fn inbound<'a>(ring: *mut Self) -> &'a mut Inbound {
        // SAFETY: the caller promises exclusive access to this field.
        unsafe { &mut *addr_of_mut!((*ring).inbound) }
    }

    /// # Safety
    /// `ring` must be live; the caller serializes this call with other calls of the sending side.
    #[inline(always)]
    unsafe fn outbound<'a>(ring: *mut Self) -> Option<&'a mut Outbound> {
        // SAFETY: the caller promises exclusive access to this field.
        unsafe { (*addr_of_mut!((*ring).outbound)).as_mut() }
    }

    /// Publishes the place of the next message to the ring's user.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[inline(always)]
    unsafe fn show_next(ring: *mut Self) {
        // SAFETY: the caller promises exclusive access to the receiving side, of which `face` is a
        // part.
        unsafe {
            let receiver = &(*addr_of!((*ring).inbound)).receiver;
            let (next, expected) = (receiver.next(), receiver.expected());
            let face = addr_of_mut!((*ring).face);
            (*face).next = next;
            (*face).expected = expected;
            (*face).left = receiver.to_end();
            (*face).longest = receiver.longest() as u32;
            (*face).ahead = 0;
        }
    }

    /// Tells the ring's user that there is no message.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[cold]
    unsafe fn hide_next(ring: *mut Self) {
        // SAFETY: as in `show_next`.
        unsafe {
            let face = addr_of_mut!((*ring).face);
            (*face).next = NEVER.as_ptr();
            (*face).expected = 1;
            (*face).left = 0;
            (*face).ahead = 0;
        }
    }

    /// Finds the other queue pair's ring.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: it has none. `EAGAIN`: it is not connected yet, or was reset. `ENOTCONN`: it
    /// never will be. `ENOMEM`.
    ///
    /// # Safety
    /// `ring` must be live, and the caller excludes all other calls on it.
    pub(crate) unsafe fn attach(ring: *mut Self) -> Res<softdv_ring_info> {
        // SAFETY: the caller's promise.
        let (this, qp) = unsafe { (&mut *ring, Self::qp(ring)) };
        match qp.state() {
            now if receives(now) => {}
            IBV_QPS_RESET | IBV_QPS_INIT => return Err(Errno(libc::EAGAIN)),
            _ => return Err(Errno(libc::ENOTCONN)),
        }
        let mut sq = qp.sq.lock();
        qp.reach(&mut sq).map_err(|unreachable| {
            Errno(match unreachable {
                Unreachable::Yet => libc::EAGAIN,
                Unreachable::Gone | Unreachable::Invalid => libc::ENOTCONN,
            })
        })?;
        let conn = sq.conn.as_ref().ok_or(Errno(libc::EAGAIN))?;
        let again = this.outbound.as_ref().is_some_and(|out| out.is_of(conn));
        if !again {
            this.outbound = Some(Outbound::find(qp, conn, sq.dest)?);
            this.inbound.peer = Some(Arc::clone(&conn.peer));
        }
        let next = this.outbound.as_ref().map(Outbound::next_slot);
        this.next_slot
            .store(next.unwrap_or_default(), Ordering::Relaxed);
        let max_send = this.outbound.as_ref().map_or(0, Outbound::max_payload);
        Ok(softdv_ring_info {
            max_send: max_send as u32,
            max_recv: this.inbound.receiver.max_payload() as u32,
            slot: this.next_slot.as_ptr().cast(),
        })
    }

    /// Offers the sender a larger ring, to which it moves when it has no room for a message.
    ///
    /// # Errors
    /// `EALREADY`: it was offered one. `EINVAL`: the number of slots is invalid, or not larger.
    /// `ENOTCONN`: the queue pair does not receive. `ENOMEM`.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    pub(crate) unsafe fn grow(ring: *mut Self, slots: u32) -> Res<()> {
        // SAFETY: the caller's promise.
        unsafe { Self::give_taken_back(ring) };
        // SAFETY: the caller's promise; the two fields are used by the receiving side alone.
        let (qp, inbound, first, larger) = unsafe {
            let larger = &mut *addr_of_mut!((*ring).larger);
            let first = *addr_of!((*ring).first);
            (Self::qp(ring), Self::inbound(ring), first, larger)
        };
        if larger.is_some() {
            return Err(Errno(libc::EALREADY));
        }
        if !is_valid(slots) || slots <= first.slots {
            return Err(Errno(libc::EINVAL));
        }
        if !receives(qp.state()) || inbound.phase != Phase::Open {
            return Err(Errno(libc::ENOTCONN));
        }
        let at = qp.process().segment.take_ring(ring_len(slots))?;
        let area = *larger.insert(RingArea { at, slots });
        inbound.receiver.offer(area, || {
            let (map, entry) = (qp.map(), qp.at());
            map.u32(entry + layout::LARGER_SLOTS)
                .store(slots, Ordering::Relaxed);
            map.u64(entry + layout::LARGER_AT)
                .store(at as u64, Ordering::Release);
        });
        // The sender may wait for room.
        light_fence(inbound.peer.as_ref().is_some_and(|peer| peer.barriers));
        if inbound.receiver.sender_waits() {
            wake_sender(qp);
        }
        Ok(())
    }

    /// Sends a message. Returns 0 or an errno: `EAGAIN`, `EBUSY`, `ENOTCONN`, `EMSGSIZE`.
    ///
    /// # Safety
    /// As [`Self::outbound`]; `fill` must be sound for `len` bytes.
    #[inline(always)]
    pub(crate) unsafe fn post<F: Fill + Copy>(
        ring: *mut Self,
        message: &OutgoingMessage<F>,
    ) -> i32 {
        // SAFETY: the caller's promise.
        let (qp, outbound) = unsafe { (Self::qp(ring), Self::outbound(ring)) };
        match outbound {
            Some(outbound) => {
                let ret = outbound.post(qp, message);
                // SAFETY: the caller promises a live ring.
                let shown = unsafe { &*addr_of!((*ring).next_slot) };
                shown.store(outbound.next_slot(), Ordering::Relaxed);
                ret
            }
            None => libc::ENOTCONN,
        }
    }

    /// Position behind the last message sent.
    ///
    /// # Safety
    /// As [`Self::outbound`].
    pub(crate) unsafe fn sent(ring: *mut Self) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { Self::outbound(ring) }.map_or(0, |out| out.sent())
    }

    /// Position behind the last message that the receiver has consumed.
    ///
    /// # Safety
    /// As [`Self::outbound`].
    pub(crate) unsafe fn delivered(ring: *mut Self) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { Self::outbound(ring) }.map_or(0, Outbound::delivered)
    }

    /// Asks the receiver for a wake-up when it consumes. Returns 0, or `ENOTCONN`.
    ///
    /// # Safety
    /// As [`Self::outbound`].
    pub(crate) unsafe fn wait(ring: *mut Self) -> i32 {
        // SAFETY: the caller's promise.
        let (qp, outbound) = unsafe { (Self::qp(ring), Self::outbound(ring)) };
        outbound.map_or(libc::ENOTCONN, |out| out.wait(qp))
    }

    /// The next message; `None` if there is none.
    ///
    /// # Errors
    /// `EAGAIN`: the connection has ended, and the sender is in the middle of a message.
    /// `ENOTCONN`: there will be none. `EPROTO`: the sender has written an invalid header.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[inline(always)]
    pub(crate) unsafe fn poll(ring: *mut Self) -> Res<Option<Message>> {
        // SAFETY: the caller's promise.
        unsafe { Self::give_taken_back(ring) };
        // SAFETY: the caller's promise.
        let (qp, inbound) = unsafe { (Self::qp(ring), Self::inbound(ring)) };
        let polled = inbound.poll(qp);
        // SAFETY: the caller's promise; `face` is a part of the receiving side.
        let shown = unsafe { (*addr_of!((*ring).face)).expected };
        if shown != inbound.receiver.expected() && inbound.is_read() {
            // behind padding, or in the larger ring
            // SAFETY: as above.
            unsafe { Self::show_next(ring) };
        }
        if polled.is_err() && !inbound.is_read() {
            inbound.polled = 0;
            // SAFETY: the caller's promise.
            unsafe { Self::hide_next(ring) };
        }
        polled
    }

    /// Consumes the message of the last poll.
    ///
    /// # Errors
    /// `EINVAL`: there is none.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[inline(always)]
    pub(crate) unsafe fn consume(ring: *mut Self) -> Res<()> {
        // SAFETY: the caller's promise.
        let inbound = unsafe { Self::inbound(ring) };
        let slots = std::mem::take(&mut inbound.polled);
        if slots == 0 {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller's promise.
        unsafe { Self::give_back(ring, slots) };
        Ok(())
    }

    /// Consumes messages of so many slots, which the user has read at the published place, and
    /// those that it has taken before. Returns 0, or `EINVAL`: there are none, or more slots than
    /// up to the end of the ring.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[inline(always)]
    pub(crate) unsafe fn advance(ring: *mut Self, slots: u32) -> i32 {
        // SAFETY: the caller's promise; `face` is a part of the receiving side.
        let (face, inbound) = unsafe { (&mut *addr_of_mut!((*ring).face), Self::inbound(ring)) };
        let taken = face.ahead;
        // no slot is left when the ring has ended
        let none = slots == 0 && taken == 0;
        if none || slots > face.left || face.expected != inbound.receiver.expected_behind(taken) {
            return libc::EINVAL;
        }
        inbound.polled = 0;
        face.ahead = 0;
        inbound.receiver.advance_by(taken.wrapping_add(slots));
        if slots == face.left {
            // SAFETY: the caller's promise.
            unsafe { Self::show_next(ring) };
        } else {
            face.left -= slots;
            face.expected = inbound.receiver.expected();
            face.next = face.next.wrapping_byte_add(SLOT * slots as usize);
        }
        // SAFETY: the caller's promise.
        unsafe { Self::consumed(ring) };
        0
    }

    /// Gives the slots back that the user has taken at the published place.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[inline(always)]
    unsafe fn give_taken_back(ring: *mut Self) {
        // SAFETY: the caller's promise; `face` is a part of the receiving side.
        let taken = unsafe { std::mem::take(&mut (*addr_of_mut!((*ring).face)).ahead) };
        if taken != 0 {
            // SAFETY: the caller's promise.
            unsafe { Self::give_back(ring, taken) };
        }
    }

    /// Gives slots back to the sender, and wakes it if it waits for them.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[inline(always)]
    unsafe fn give_back(ring: *mut Self, slots: u32) {
        // SAFETY: the caller's promise.
        let inbound = unsafe { Self::inbound(ring) };
        inbound.receiver.advance_by(slots);
        // SAFETY: the caller's promise.
        unsafe {
            Self::show_next(ring);
            Self::consumed(ring);
        }
    }

    /// Messages were consumed: wakes the sender, if it waits for room.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    #[inline(always)]
    unsafe fn consumed(ring: *mut Self) {
        // SAFETY: the caller's promise.
        let inbound = unsafe { Self::inbound(ring) };
        light_fence(inbound.peer.as_ref().is_some_and(|peer| peer.barriers));
        if inbound.receiver.sender_waits() {
            // SAFETY: the caller's promise.
            wake_sender(unsafe { Self::qp(ring) });
        }
    }

    /// Publishes whether the ring is examined without a noted arrival. Returns whether it may hold
    /// a message.
    ///
    /// # Safety
    /// As [`Self::inbound`].
    pub(crate) unsafe fn set_hot(ring: *mut Self, hot: bool) -> bool {
        // SAFETY: the caller's promise.
        unsafe { Self::give_taken_back(ring) };
        // SAFETY: the caller's promise.
        let inbound = unsafe { Self::inbound(ring) };
        inbound.receiver.set_hot(hot) && inbound.is_read()
    }
}

/// A message was consumed for which the sender waits.
#[cold]
fn wake_sender(qp: &Qp) {
    qp.notify_ring_sender(&mut qp.rq.lock());
}

impl Inbound {
    /// Whether the ring may still be read.
    #[inline(always)]
    fn is_read(&self) -> bool {
        !matches!(self.phase, Phase::Closed | Phase::Broken)
    }

    #[inline(always)]
    fn poll(&mut self, qp: &Qp) -> Res<Option<Message>> {
        if !self.is_read() {
            return Err(self.ended());
        }
        match self.receiver.peek() {
            Ok(Some(message)) => {
                self.polled = message.slots();
                Ok(Some(message))
            }
            Ok(None) if receives(qp.state()) => Ok(None),
            Ok(None) => self.end(qp),
            Err(Stop::Moved) => self.follow(qp),
            Err(Stop::Broken) => {
                self.phase = Phase::Broken;
                // The caller of a RESET excludes this call, so the ring is the incarnation's.
                qp.fail_asynchronously(qp.incarnation(), IBV_EVENT_QP_REQ_ERR);
                Err(self.ended())
            }
        }
    }

    /// The receiver has entered the larger ring, which is not entered again.
    #[cold]
    fn follow(&mut self, qp: &Qp) -> Res<Option<Message>> {
        light_fence(self.peer.as_ref().is_some_and(|peer| peer.barriers));
        if self.receiver.moved_sender_waits() {
            wake_sender(qp);
        }
        self.poll(qp)
    }

    #[cold]
    fn ended(&self) -> Errno {
        Errno(match self.phase {
            Phase::Broken => libc::EPROTO,
            _ => libc::ENOTCONN,
        })
    }

    /// The ring of a queue pair that does not receive is empty: finds out whether a sender may
    /// still publish a message.
    #[cold]
    fn end(&mut self, qp: &Qp) -> Res<Option<Message>> {
        let rq = qp.rq.lock();
        match qp.state() {
            state if receives(state) || state == IBV_QPS_INIT => return Ok(None),
            // Under the lock: the thread that has moved the queue pair to ERR has stored the state
            // word, which neighbours can change since.
            IBV_QPS_ERR => {}
            _ => return Err(Errno(libc::ENOTCONN)),
        }
        let peer = self.peer.clone().or_else(|| rq.peer.clone());
        let (dest, incarnation) = (rq.dest, rq.incarnation);
        drop(rq);
        if self.phase == Phase::Open {
            heavy_fence();
            self.phase = Phase::Ending(sys::now_ns() + PEER_WAIT_NS);
        }
        if let Phase::Ending(until) = self.phase {
            let used = UseWord::new(qp.number(), incarnation);
            if is_written(qp.process(), peer, dest, used) && sys::now_ns() < until {
                return Err(Errno(libc::EAGAIN));
            }
            self.phase = Phase::Last;
            return self.poll(qp);
        }
        self.phase = Phase::Closed;
        Err(Errno(libc::ENOTCONN))
    }
}

/// Whether the queue pair `dest` may be writing into the ring of this receiver.
fn is_written(process: &Process, peer: Option<Arc<Peer>>, dest: u32, receiver: UseWord) -> bool {
    if dest == 0 {
        return false;
    }
    match peer.map_or_else(|| writer_of(process, dest), |peer| Ok(Some(peer))) {
        Ok(Some(peer)) => writes(&peer, dest, receiver),
        Ok(None) => false,
        Err(_) => true,
    }
}
