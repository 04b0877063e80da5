//! Compare and swap on a region whose modifications are counted: one that fails does not modify
//! (fi_mr(3), `fi_mr_bind`).
//!
//! Its event is posted after its result has arrived. Later operations are pending until then, so
//! the order of events is kept. The request has a slot as a part of the operation; the event
//! completes the operation.

#![allow(unsafe_code, reason = "posts requests")]

use std::mem::MaybeUninit;

use super::{EventTarget, MOST_EVENTS};
use crate::errno::{FiErrno, Result};

use crate::msg::atomic::ATOMIC_SIZE;
use crate::msg::local::{LocalIov, MAX_IOV};
use crate::msg::pieces::Batch;
use crate::msg::transmit::Transmit;
use crate::msg::tx::{TxSide, post_errno};
use crate::queue::event_cell::Event;
use crate::queue::slots::{Slot, SlotRing};
use crate::verbs::SendRequest;

/// A compare and swap that is posted, and whose event is not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comparing {
    /// Slot number of its request.
    number: u32,
    /// Event cells that count it if it succeeds, the region's first.
    events: [EventTarget; MOST_EVENTS],
    count: usize,
}

impl TxSide {
    pub(super) fn is_comparing(&self) -> bool {
        let remote = self.remote.as_ref();
        remote.is_some_and(|remote| remote.comparing.is_some())
    }

    /// Posts a compare and swap at `offset` in its region, and its event if the result arrives
    /// within [`super::polls`] polls. Otherwise the caller keeps the operation first among the
    /// pending ones, for [`Self::count_compare`]. Returns whether all of it is posted.
    ///
    /// # Errors
    /// Errors of posting; nothing was posted.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    pub(super) unsafe fn compare(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        offset: u64,
    ) -> Result<bool> {
        if ring.is_full() && !self.make_room(ring)? {
            return Err(FiErrno::EAGAIN);
        }
        let region = self.region(op).ok_or(FiErrno::EKEYREJECTED)?;
        let piece = region.piece(offset, ATOMIC_SIZE as u64);
        let piece = piece.map_err(|_| FiErrno::EKEYREJECTED)?;
        let mut events = [EventTarget::default(); MOST_EVENTS];
        let count = self.events(op, region, Event::Write, &mut events);
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: as this function.
        let (sges, inline) = unsafe { self.gather(ring, op, len, &mut sges) }?;
        let number = ring.push(Slot {
            context: op.context,
            flags: op.kind,
            reports_failure: !op.silent,
            signaled: true,
            part: true,
            ..Slot::default()
        });
        let request = SendRequest {
            sges,
            inline,
            signaled: true,
            fence: op.flags.contains(crate::flags::Flags::FENCE),
            remote_addr: piece.addr,
            rkey: piece.rkey,
            compare_add: op.compare_add,
            swap: op.swap,
            ..SendRequest::empty(self.place.send(number), op.opcode)
        };
        // SAFETY: as this function.
        if let Err(error) = unsafe { self.qp.post_send(&request) } {
            ring.unpush();
            self.local.refused();
            return Err(post_errno(error));
        }
        self.posted(number, ring.tail());
        self.unsignaled = 0;
        if let Some(remote) = &mut self.remote {
            remote.comparing = Some(Comparing {
                number,
                events,
                count,
            });
        }
        // SAFETY: as this function.
        Ok(unsafe { self.count_compare(ring, op) })
    }

    /// Posts the event of the compare and swap under way, if its result has arrived or arrives
    /// within [`super::polls`] polls. Returns whether that is done.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`], for the operation that [`Self::compare`] has posted.
    pub(super) unsafe fn count_compare(&mut self, ring: &SlotRing, op: &Transmit<'_>) -> bool {
        let Some(mut comparing) = self.remote.as_ref().and_then(|remote| remote.comparing) else {
            return false;
        };
        let mut polls = 0;
        while ring.is_outstanding(comparing.number) {
            if polls >= super::polls() {
                return false;
            }
            polls += 1;
            let _ = self.cq.poll_quietly();
        }
        let mut before = [0; ATOMIC_SIZE];
        // SAFETY: `Endpoint::atomic` has checked that the result has 8 bytes; the caller keeps it
        // valid until completion.
        unsafe { op.local.copy_to(before.as_mut_ptr()) };
        if u64::from_ne_bytes(before) != op.compare_add {
            // a failed compare and swap counts as a read
            let read = Event::Read.offset() - Event::Write.offset();
            comparing.events[0].addr = comparing.events[0].addr.wrapping_add(read);
        }
        let events = &comparing.events[..comparing.count];
        let event = Transmit {
            local: LocalIov::NONE,
            ..*op
        };
        // SAFETY: no buffers.
        let posted =
            match unsafe { self.post_pieces(ring, &event, 0, &[], events, Batch::default()) } {
                Ok(_) => true,
                Err(FiErrno::EAGAIN) => false,
                Err(error) => self.post_failure(ring, op, error).is_ok(),
            };
        if posted && let Some(remote) = &mut self.remote {
            remote.comparing = None;
            remote.last_used = ring.next_number().wrapping_sub(1);
            remote.acknowledge(); // deferred until this event
        }
        posted
    }
}
