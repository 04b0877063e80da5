//! Atomics that may leave the memory unchanged, on a region whose modifications are counted: a
//! failed compare and swap does not modify the memory (fi_mr(3), `fi_mr_bind`), nor does a maximum
//! that is there already.
//!
//! The event is posted after the result has arrived. Later operations are deferred until then, so
//! the order of events is preserved. The request is the first one of the operation; the event
//! completes the operation.

#![allow(unsafe_code, reason = "posts requests")]

use std::mem::MaybeUninit;

use super::resolve::need;
use super::submit::{EventTarget, MOST_EVENTS, fragments_at};
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::elements::Elements;
use crate::initiator::link::Link;
use crate::initiator::local::{LocalIov, MAX_IOV};
use crate::initiator::plan::Batch;
use crate::initiator::sq::{Signal, Sq};
use crate::initiator::{ATOMIC_SIZE, Initiator, Transmit};
use crate::mr::key_cache::Fragment;
use crate::queue::event_cell::Event;
use crate::queue::slots::Slot;
use crate::verbs::SendOpcode;
use crate::wire::records::MAX_SEGMENTS;

/// A posted compare and swap whose event is not posted yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompareSwap {
    /// Number of the request.
    number: u32,
    /// Event cells that count the operation if it succeeds, the region's first.
    events: [EventTarget; MOST_EVENTS],
    count: usize,
    /// Number of requests, of an atomic on elements.
    parts: usize,
}

impl<Q: Sq> Initiator<Q> {
    pub(super) fn has_compare_swap(&self) -> bool {
        let peer = self.peer.as_ref();
        peer.is_some_and(|peer| peer.compare_swap.is_some())
    }

    /// Posts a compare and swap at `offset` in its region, and its event if the result arrives
    /// while the link polls. Otherwise the caller makes the operation the first of the deferred
    /// ones, for [`Self::count_compare`]. Returns whether the event is posted too.
    ///
    /// # Errors
    /// Errors of posting; nothing was posted.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    pub(super) unsafe fn compare(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        offset: u64,
    ) -> Result<bool> {
        self.sq.reserve()?;
        if op.opcode == SendOpcode::Elements {
            // SAFETY: as this function.
            return unsafe { self.change(op, len, offset) };
        }
        let region = self.region(op).ok_or(FiErrno::EKEYREJECTED)?;
        let fragment = region.fragment(offset, ATOMIC_SIZE as u64);
        let fragment = fragment.map_err(|_| FiErrno::EKEYREJECTED)?;
        let mut events = [EventTarget::default(); MOST_EVENTS];
        let count = self.events(op, region, Event::Write, &mut events);
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: as this function.
        let (sges, inline) = unsafe { self.gather(op, len, &mut sges) }?;
        let slot = Slot {
            more: true,
            ..op.slot(false)
        };
        let mut request = op.request(op.opcode, sges, (fragment.addr, fragment.rkey));
        request
            .inline(inline)
            .fence(op.flags.contains(Flags::FENCE));
        // SAFETY: as this function.
        let number = match unsafe { self.sq.post(&mut request, slot, Signal::Yes) } {
            Ok(number) => number,
            Err(error) => {
                self.not_posted();
                return Err(error);
            }
        };
        self.posted(number);
        if let Some(peer) = &mut self.peer {
            peer.compare_swap = Some(CompareSwap {
                number,
                events,
                count,
                parts: 1,
            });
        }
        // SAFETY: as this function.
        Ok(unsafe { self.count_compare(op) })
    }

    /// As [`Self::compare`], for an atomic on elements.
    ///
    /// # Errors
    /// As [`Self::compare`].
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    unsafe fn change(&mut self, op: &Transmit<'_>, len: usize, offset: u64) -> Result<bool> {
        let region = self.region(op).ok_or(FiErrno::EKEYREJECTED)?;
        let mut events = [EventTarget::default(); MOST_EVENTS];
        let count = self.events(op, region, Event::Write, &mut events);
        let mut fragments = [Fragment::default(); MAX_SEGMENTS];
        let (_, whole) = need(op, len);
        let (parts, _) = fragments_at(region, offset, whole, &mut fragments);
        let batch = Batch {
            begun: false,
            more: true,
        };
        // SAFETY: as this function.
        if !unsafe { self.post_fragments(op, len, &fragments[..parts], &[], batch) }? {
            return Ok(true);
        }
        let number = self.last_number();
        if let Some(peer) = &mut self.peer {
            peer.compare_swap = Some(CompareSwap {
                number,
                events,
                count,
                parts,
            });
        }
        // SAFETY: as this function.
        Ok(unsafe { self.count_compare(op) })
    }

    /// Posts the event of the posted compare and swap, if the result has arrived or arrives while
    /// the link polls. Returns whether the event is posted.
    ///
    /// # Safety
    /// As [`Initiator::submit`], for the operation that [`Self::compare`] has posted.
    pub(super) unsafe fn count_compare(&mut self, op: &Transmit<'_>) -> bool {
        let Some(mut compare_swap) = self.peer.as_ref().and_then(|peer| peer.compare_swap) else {
            return false;
        };
        let link = self.sq.link();
        let mut polls = 0;
        while link.is_outstanding(compare_swap.number) {
            if !link.poll_once_more(&mut polls) {
                return false;
            }
        }
        let unchanged = if op.opcode == SendOpcode::Elements {
            // SAFETY: as this function.
            unsafe { Elements::unchanged(op, compare_swap.parts) }
        } else {
            let mut before = [0; ATOMIC_SIZE];
            // SAFETY: `Endpoint::atomic` has checked that the result has 8 bytes; the caller keeps
            // it valid until completion.
            unsafe { op.local.copy_to(before.as_mut_ptr()) };
            u64::from_ne_bytes(before) != op.compare_add
        };
        if unchanged {
            // what changes nothing counts as a read
            let read = Event::Read.offset() - Event::Write.offset();
            compare_swap.events[0].addr = compare_swap.events[0].addr.wrapping_add(read);
        }
        let events = &compare_swap.events[..compare_swap.count];
        let event = Transmit {
            local: LocalIov::NONE,
            ..*op
        };
        // SAFETY: no buffers.
        let posted = match unsafe { self.post_fragments(&event, 0, &[], events, Batch::default()) }
        {
            Ok(_) => true,
            Err(FiErrno::EAGAIN) => false,
            Err(error) => self.post_failure(op, error).is_ok(),
        };
        let last = self.last_number();
        if posted && let Some(peer) = &mut self.peer {
            peer.compare_swap = None;
            (peer.last_used, peer.last_read) = (last, last);
            peer.acknowledge(); // the acknowledgement was deferred until this event
        }
        posted
    }
}
