//! The sends of a queue pair through the receive ring of the other one (`docs/softverbs-ring.md`).
//!
//! While a queue pair writes into a ring, it names the receiver in its own word ([`Destination`]).

use crate::sync::atomic::{AtomicU64, Ordering};

use rdma_core_sys::{IBV_QPS_RTS, IBV_QPS_SQD};

use super::Qp;
use super::remote_qp::Connection;
use crate::peer::Peer;
use crate::receive_ring::{
    ARRIVALS_LEN, Destination, Fill, RingArea, Sender, Usage, UseWord, is_valid, max_payload,
    note_arrival, ring_len,
};
use crate::segment::layout::{MAX_CQS, cq, fits, qp as layout, receive_rings};
use crate::segment::{Mapping, Word};
use crate::sync::{Arc, are_light, known_light_fence};
use crate::sys::{Errno, Res};

/// The sending side of a connection.
pub(super) struct Outbound {
    sender: Sender,
    peer: Arc<Peer>,
    destination: Destination,
    /// Offset of the receiver's entry.
    entry_at: usize,
    /// `RING_USE` of the queue pair.
    using: Word<AtomicU64>,
    /// Index of the receiver.
    index: u32,
    arrivals_at: usize,
}

/// A message to send.
pub(crate) struct OutgoingMessage<F> {
    pub(crate) words: [u64; 3],
    pub(crate) len: usize,
    pub(crate) solicited: bool,
    /// Writes the payload.
    pub(crate) fill: F,
}

/// A range that a peer's tables name, if it lies in the part for rings.
fn checked(at: u64, len: usize) -> Option<usize> {
    let at = usize::try_from(at).ok()?;
    let part = receive_rings::AT..receive_rings::END;
    (at.is_multiple_of(64) && fits(part, at, 1, len)).then_some(at)
}

/// The larger ring of the receiver, in whose use the sender is, if there is one.
fn larger_ring(map: &Mapping, entry: usize) -> Option<RingArea> {
    let at = map.u64(entry + layout::LARGER_AT).load(Ordering::Acquire);
    let slots = map.u32(entry + layout::LARGER_SLOTS);
    let slots = slots.load(Ordering::Relaxed);
    if at == 0 || !is_valid(slots) {
        return None;
    }
    checked(at, ring_len(slots)).map(|at| RingArea { at, slots })
}

impl Outbound {
    /// Finds the ring of the other end.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: it has none. `ENOTCONN`: its tables are invalid. `ENOMEM`.
    pub(super) fn find(qp: &Qp, conn: &Connection, dest: u32) -> Res<Self> {
        const INVALID: Errno = Errno(libc::ENOTCONN);
        let map: &Arc<Mapping> = &conn.peer.map;
        let at = map.u64(conn.at + layout::RING_AT).load(Ordering::Acquire);
        if at == 0 {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let slots = map.u32(conn.at + layout::RING_SLOTS);
        let slots = slots.load(Ordering::Relaxed);
        if !is_valid(slots) {
            return Err(INVALID);
        }
        let at = checked(at, ring_len(slots)).ok_or(INVALID)?;
        let recv_cq = conn.recv_cq % MAX_CQS as u32;
        let cq_at = cq::AT + cq::STRIDE * recv_cq as usize;
        let arrivals = map.u64(cq_at + cq::ARRIVALS_AT).load(Ordering::Acquire);
        Ok(Self {
            sender: Sender::new(Arc::clone(map), at, slots)?,
            peer: Arc::clone(&conn.peer),
            destination: Destination {
                state: Word::u64(map, conn.at + layout::STATE),
                word: conn.word,
                used: UseWord::new(dest, conn.word.incarnation()),
                cq_at,
                armed: Word::u32(map, cq_at + cq::ARMED),
                light: are_light(conn.peer.barriers),
            },
            entry_at: conn.at,
            using: Word::u64(&qp.process().segment.map, qp.at() + layout::RING_USE),
            index: conn.index,
            arrivals_at: checked(arrivals, ARRIVALS_LEN).ok_or(INVALID)?,
        })
    }

    /// Whether this is the sending side of that connection.
    pub(super) fn is_of(&self, conn: &Connection) -> bool {
        Arc::ptr_eq(&self.peer, &conn.peer)
            && self.destination.word.incarnation() == conn.word.incarnation()
    }

    /// Longest payload of a message, in bytes.
    pub(super) fn max_payload(&self) -> usize {
        self.sender.max_payload()
    }

    /// The address of the slot of the next message.
    #[inline(always)]
    pub(super) fn next_slot(&self) -> *mut u8 {
        self.sender.next_slot()
    }

    /// Position behind the last message sent.
    pub(super) fn sent(&self) -> u32 {
        self.sender.sent()
    }

    /// Sends a message. Returns 0 or an errno: `EAGAIN`, `EBUSY`, `ENOTCONN`, `EMSGSIZE`.
    #[inline(always)]
    pub(super) fn post<F: Fill + Copy>(&mut self, qp: &Qp, message: &OutgoingMessage<F>) -> i32 {
        if qp.state() != IBV_QPS_RTS {
            return if qp.state() == IBV_QPS_SQD {
                libc::EBUSY
            } else {
                libc::ENOTCONN
            };
        }
        let (peer, destination) = (&self.peer, &mut self.destination);
        let ring = |at| peer.ring_cq(at);
        let Some(usage) = destination.begin(&self.using, ring) else {
            return libc::ENOTCONN;
        };
        let to = Receiving {
            destination,
            peer,
            entry_at: self.entry_at,
            arrival: (self.arrivals_at, self.index),
        };
        if !self.sender.push(message.words, message.len, message.fill) {
            return to.post_to_larger(&mut self.sender, usage, message);
        }
        match to.publish(&self.sender, usage, message.solicited) {
            true => 0,
            false => libc::ENOTCONN,
        }
    }

    /// Position behind the last message that the receiver has consumed.
    pub(super) fn delivered(&mut self) -> u32 {
        let destination = &mut self.destination;
        self.sender.delivered(|| destination.was_connected())
    }

    /// Asks the receiver for a wake-up when it consumes. Returns 0, or `ENOTCONN`.
    pub(super) fn wait(&mut self, qp: &Qp) -> i32 {
        let (peer, destination) = (&self.peer, &mut self.destination);
        let ring = |at| peer.ring_cq(at);
        let connected = destination.ask(&self.using, &self.sender, ring);
        // The state word of a dead receiver does not change: only the own state shows its end.
        match connected && matches!(qp.state(), IBV_QPS_RTS | IBV_QPS_SQD) {
            true => 0,
            false => libc::ENOTCONN,
        }
    }
}

/// The receiver of a message, in whose use the sender is.
struct Receiving<'a> {
    destination: &'a mut Destination,
    peer: &'a Peer,
    /// Offset of its entry.
    entry_at: usize,
    /// Offset of the arrivals, and its index there.
    arrival: (usize, u32),
}

impl Receiving<'_> {
    /// Ends the usage after a message or a marker. Returns false if the connection has ended.
    #[inline(always)]
    fn publish(self, sender: &Sender, usage: Usage<'_>, solicited: bool) -> bool {
        known_light_fence(self.destination.light);
        if sender.is_cold() {
            let (at, index) = self.arrival;
            note_arrival(&self.peer.map, at, index);
        }
        let ring = |at| self.peer.ring_cq(at);
        self.destination.end(usage, solicited, ring)
    }

    /// [`Outbound::post`] without room: moves to the larger ring of the receiver, if there is one.
    #[cold]
    fn post_to_larger<F: Fill + Copy>(
        self,
        sender: &mut Sender,
        usage: Usage<'_>,
        message: &OutgoingMessage<F>,
    ) -> i32 {
        let larger = larger_ring(&self.peer.map, self.entry_at);
        let longest = larger.map_or(0, |ring| max_payload(ring.slots));
        let too_long = message.len > longest.max(sender.max_payload());
        let moved = !too_long && larger.is_some_and(|ring| sender.move_to(ring));
        let sent = moved && sender.push(message.words, message.len, message.fill);
        let connected = if moved {
            // The receiver has to find a marker without a message too: the sender may wait until
            // then.
            self.publish(sender, usage, message.solicited || !sent)
        } else {
            let ring = |at| self.peer.ring_cq(at);
            self.destination.release(usage, ring)
        };
        match (connected, sent) {
            (true, true) => 0,
            (true, false) if too_long => libc::EMSGSIZE,
            (true, false) => libc::EAGAIN,
            (false, _) => libc::ENOTCONN,
        }
    }
}
