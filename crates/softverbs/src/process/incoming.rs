//! The rings through which other processes send to this one.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::Process;
use crate::cq::Poll;
use crate::peer::Peer;
use crate::ring::{Consumer, SLOTS};
use crate::segment::Mapping;
use crate::segment::layout::{MAX_PROCESSES, announce, header, rings};
use crate::signal;
use crate::sync::{Arc, Holder, Lock, Mark, heavy_fence, light_fence};
use crate::sys::{self, Res, list, try_box};

/// Maximum number of messages that are taken from one ring before the next ring is served.
const BATCH: usize = 64;

/// All incoming rings. The entry for a sender's slot is created with its first ring and never
/// freed; the ring in it is replaced.
#[derive(Debug)]
pub(super) struct Incoming {
    /// The first `count` entries are set and do not change.
    active: Box<[AtomicPtr<Sender>]>,
    /// For each entry of `active` the word of the next message, as a [`Next`]. All of them are
    /// examined by each poll, so they are here one behind the other: the number of senders
    /// multiplies what one costs.
    next: Box<[AtomicU64]>,
    count: AtomicUsize,
    seen: AtomicU32,
    grant: Mutex<()>,
}

/// Where the next message of a ring will be: the offset of its first word in the segment, in words
/// (upper half), and the sequence number that the word has then. 0: there is no ring. A hint that a
/// thread with the ring's lock keeps up to date: the word is compared again under the lock.
#[derive(Clone, Copy, Debug)]
struct Next(u64);

impl Next {
    const NONE: Self = Self(0);

    fn of(slot: u32, consumer: &Consumer) -> Self {
        let word = (rings::ring_at(slot) + consumer.place()) / 8;
        Self((word as u64) << 32 | u64::from(consumer.expects()))
    }

    /// Whether the message is there.
    #[inline(always)]
    fn is_there(self, map: &Mapping) -> bool {
        self.0 != 0 && {
            let word = map.u64((self.0 >> 32) as usize * 8).load(Ordering::Acquire);
            word as u32 == self.0 as u32
        }
    }
}

/// The process of a slot, as a sender.
#[derive(Debug)]
struct Sender {
    slot: u32,
    /// Its place in [`Incoming::next`].
    place: usize,
    ring: Lock<Option<Attached>>,
}

#[derive(Debug)]
struct Attached {
    consumer: Consumer,
    peer: Arc<Peer>,
}

impl Incoming {
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn new() -> Res<Self> {
        Ok(Self {
            active: list(MAX_PROCESSES, |_| AtomicPtr::new(std::ptr::null_mut()))?,
            next: list(MAX_PROCESSES, |_| AtomicU64::new(0))?,
            count: AtomicUsize::new(0),
            seen: AtomicU32::new(0),
            grant: Mutex::new(()),
        })
    }

    #[inline]
    fn senders(&self) -> impl Iterator<Item = &Sender> {
        let count = self.count.load(Ordering::Acquire);
        self.active[..count].iter().map(|sender| {
            // SAFETY: set before `count` was raised over it, and never freed.
            unsafe { &*sender.load(Ordering::Relaxed) }
        })
    }

    /// The entries whose next message is there.
    #[inline(always)]
    fn ready<'a>(&'a self, map: &'a Mapping) -> impl Iterator<Item = &'a Sender> {
        let count = self.count.load(Ordering::Acquire);
        let ready = self.next[..count]
            .iter()
            .zip(&self.active[..count])
            .filter(|(next, _)| Next(next.load(Ordering::Relaxed)).is_there(map));
        ready.map(|(_, sender)| {
            // SAFETY: as in `senders`.
            unsafe { &*sender.load(Ordering::Relaxed) }
        })
    }

    /// Stores where the next message of a ring will be. The caller has the ring's lock.
    #[inline(always)]
    fn expect(&self, sender: &Sender, next: Next) {
        self.next[sender.place].store(next.0, Ordering::Relaxed);
    }

    /// # Errors
    /// `ENOMEM`.
    fn sender(&self, slot: u32) -> Res<&Sender> {
        if let Some(sender) = self.senders().find(|sender| sender.slot == slot) {
            return Ok(sender);
        }
        let count = self.count.load(Ordering::Relaxed);
        let sender = Box::leak(try_box(Sender {
            slot,
            place: count,
            ring: Lock::new(None),
        })?);
        self.active[count].store(sender, Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Release);
        Ok(sender)
    }
}

impl Process {
    /// Takes the messages in the rings, and creates the rings that senders requested. Returns true
    /// if there was a message.
    #[inline(always)]
    pub(super) fn drain_rings(&self, poll: &mut Poll) -> bool {
        let mut any = false;
        for sender in self.incoming.ready(&self.segment.map) {
            if let Some(mut ring) = sender.ring.try_lock()
                && let Some(attached) = ring.as_mut()
                && attached.consumer.ready()
            {
                any |= self.drain(sender, attached, BATCH, poll);
            }
        }
        let wanted = self.segment.map.u32(header::RING_REQUESTS);
        if wanted.load(Ordering::Relaxed) != self.incoming.seen.load(Ordering::Relaxed) {
            self.grant_rings();
        }
        any
    }

    /// Takes at most `most` messages. Returns true if there was one.
    #[inline(never)]
    fn drain(
        &self,
        sender: &Sender,
        attached: &mut Attached,
        most: usize,
        poll: &mut Poll,
    ) -> bool {
        let mut broken = false;
        for _ in 0..most {
            match attached.consumer.peek() {
                Ok(Some(message)) => {
                    let (from, ring) = (&attached.peer, &attached.consumer);
                    if !crate::qp::deliver_fast(self, from, ring, &message, poll) {
                        crate::qp::deliver(self, from, ring, &message);
                    }
                    attached.consumer.advance(&message);
                    // The next message is left for another poll: peeking it would fetch its cache
                    // line and delay the caller.
                    if poll.is_full() {
                        break;
                    }
                }
                Ok(None) => break,
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        self.incoming
            .expect(sender, Next::of(sender.slot, &attached.consumer));
        let any = attached.consumer.publish();
        if any {
            light_fence(attached.peer.barriers);
            if attached.consumer.sender_waits() {
                attached.peer.ring_process();
            }
        }
        if broken {
            // The sender wrote an invalid message: it is treated as a dead peer.
            self.request_cleanup(&attached.peer);
        }
        any
    }

    /// Creates the rings that senders requested. A ring that cannot be created for a passing reason
    /// is tried again, see [`crate::repeat`].
    #[cold]
    pub(super) fn grant_rings(&self) {
        let map = &self.segment.map;
        let wanted = map.u32(header::RING_REQUESTS).load(Ordering::Acquire);
        for slot in 0..MAX_PROCESSES as u32 {
            let at = announce::AT + announce::STRIDE * slot as usize;
            let cookie = map
                .u64(at + announce::RING_WANTED_BY)
                .load(Ordering::Acquire);
            if cookie == 0 || cookie == map.u64(at + announce::GRANTED).load(Ordering::Relaxed) {
                continue;
            }
            // An ended sender leaves its request behind, and its slot may now belong to a process
            // that is no peer of this one.
            if self.cookie_of(slot) != Some(cookie) {
                continue;
            }
            let began = sys::now_ns();
            let granted = self.peer(slot).and_then(|peer| {
                // another one only if the sender has ended since
                if peer.identity.cookie == cookie {
                    self.clean_up_dead_peers();
                    self.grant_ring(&peer)?;
                }
                Ok(())
            });
            // The request stays in the segment: `repeat_failed` calls this function again.
            if granted.is_err_and(|error| self.repeats.may_pass(error)) {
                self.repeats.add(began);
            }
        }
        self.incoming.seen.store(wanted, Ordering::Relaxed);
    }

    /// Creates the ring for messages from `peer`, and rings the peer if it has requested the ring.
    /// Does neither if the ring exists: a peer that had requested it before was rung, and one that
    /// requests it later finds it. From then on the peer claims receives of shared queues, so the
    /// caller has cleaned up the former process of its slot before
    /// ([`Self::clean_up_dead_peers`]). The caller holds no lock of a queue.
    ///
    /// # Errors
    /// `ENOMEM`: no memory for the ring.
    pub(crate) fn grant_ring(&self, peer: &Arc<Peer>) -> Res<()> {
        let _one = self
            .incoming
            .grant
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let sender = self.incoming.sender(peer.slot)?;
        let mut ring = sender.ring.lock();
        if let Some(old) = ring.as_mut() {
            if old.peer.identity == peer.identity {
                return Ok(());
            }
            // Messages that an ended process of that slot had sent are delivered.
            self.drain(sender, old, SLOTS as usize, &mut Poll::none());
            self.incoming.expect(sender, Next::NONE);
            *ring = None;
        }
        let cookie = peer.identity.cookie;
        let consumer = Consumer::new(self.segment.open_ring(peer.slot)?, cookie);
        if !peer.barriers {
            self.unfenced.store(true, Ordering::Relaxed);
            // Pairs with threads that post shared receives: after this fence each of them sees the
            // flag, or its posted receive is visible to the peer before the peer waits for one. The
            // fence is needed even if another thread has set the flag for another peer, as that
            // thread may not have fenced yet.
            heavy_fence();
        }
        let map = &self.segment.map;
        let at = announce::AT + announce::STRIDE * peer.slot as usize;
        let granted = map.u64(at + announce::GRANTED);
        let rings = signal::grant(granted, map.u64(at + announce::RING_WANTED_BY), cookie);
        self.incoming
            .expect(sender, Next::of(sender.slot, &consumer));
        *ring = Some(Attached {
            consumer,
            peer: Arc::clone(peer),
        });
        drop(ring);
        if rings {
            peer.ring_process();
        }
        Ok(())
    }

    /// Takes the messages that the process in `slot` has sent until now. The caller holds no lock
    /// of a queue.
    pub(crate) fn drain_ring_of(&self, slot: u32) {
        for sender in self.incoming.senders().filter(|sender| sender.slot == slot) {
            if let Some(attached) = sender.ring.lock().as_mut() {
                // At most one ring's capacity, as the sender may keep sending.
                self.drain(sender, attached, SLOTS as usize, &mut Poll::none());
            }
        }
    }

    /// Takes the messages that all other processes have sent until now. The caller holds no lock of
    /// a queue.
    pub(crate) fn drain_all_rings(&self) {
        for sender in self.incoming.senders() {
            if let Some(attached) = sender.ring.lock().as_mut() {
                self.drain(sender, attached, SLOTS as usize, &mut Poll::none());
            }
        }
    }

    /// Takes all messages that an ended process had sent, and frees its ring.
    pub(super) fn close_ring_of(&self, peer: &Arc<Peer>) {
        for sender in self
            .incoming
            .senders()
            .filter(|sender| sender.slot == peer.slot)
        {
            let mut ring = sender.ring.lock();
            if let Some(attached) = ring.as_mut()
                && Arc::ptr_eq(&attached.peer, peer)
            {
                // At most one ring's capacity: a sender of invalid messages may be alive and keep
                // sending.
                self.drain(sender, attached, SLOTS as usize, &mut Poll::none());
                self.incoming.expect(sender, Next::NONE);
                *ring = None;
                self.segment
                    .close_ring(peer.slot, peer.has_ended_for_good());
            }
        }
    }

    /// Marks the threads that deliver messages.
    pub(super) fn mark_deliveries(&self, mark: Mark) -> impl Iterator<Item = Holder<'_>> {
        let senders = self.incoming.senders();
        senders.filter_map(move |sender| sender.ring.mark_holder(mark))
    }

    /// Whether a message waits in a ring. Waits for a thread that is taking messages, as that
    /// thread may leave the rest.
    pub(super) fn rings_ready(&self) -> bool {
        self.incoming.ready(&self.segment.map).any(|sender| {
            let ring = sender.ring.lock();
            ring.as_ref().is_some_and(|a| a.consumer.ready())
        })
    }
}
