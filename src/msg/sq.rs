//! The send queue of an MSG endpoint: its queue pair, and a slot for each posted request.

#![allow(unsafe_code, reason = "posts buffers whose caller promises for them")]

use std::sync::{Arc, Weak};

use crate::errno::{FiErrno, Result};
use crate::initiator::sq::{Link, Signal, Sq};
use crate::queue::slots::{FailureListener, Own, OwnRequests, Rings, Slot, SlotRing};
use crate::queue::{CompletionQueue, OwnLink, WrId};
use crate::verbs::{Pd, Qp, RemoteAddr, Rkey, SendOpcode, SendRequest};

/// Maximum number of polls of the application's completion queue, in one call, for a completion that
/// an operation waits for; counted again after each completed read of a look-up. Then the operation
/// is deferred, so a call never waits for a round trip. soft0 completes a read while it is posted:
/// one poll finds it, after another one for the announcement.
pub(super) const POLL_LIMIT: u32 = 2;

#[cfg(not(test))]
fn poll_limit() -> u32 {
    POLL_LIMIT
}

#[cfg(test)]
thread_local! {
    /// Lets a test defer operations on a device that answers at once.
    pub(super) static POLLS: std::cell::Cell<u32> = const { std::cell::Cell::new(POLL_LIMIT) };
}

#[cfg(test)]
fn poll_limit() -> u32 {
    POLLS.get()
}

/// The queue pair, the completion queue and the place of its requests, and their records.
#[derive(Clone, Debug)]
pub(crate) struct QpLink {
    pub(super) qp: Arc<Qp>,
    pub(super) cq: Arc<CompletionQueue>,
    pub(super) place: WrId,
    pub(super) rings: Arc<Rings>,
}

/// The transmit side's records of posted requests.
#[derive(Debug)]
pub(crate) struct SendQueue {
    link: QpLink,
    /// At least one request in `period` is signaled, because its completion frees the slots of the
    /// unsignaled requests before it.
    period: u32,
    unsignaled: u32,
    /// Whether a counter is bound: every request is then signaled, because an unsignaled last
    /// request would never be counted.
    counted: bool,
}

impl SendQueue {
    pub(super) fn new(link: QpLink) -> Self {
        let rings = &link.rings;
        Self {
            period: (rings.tx.depth() / 4).max(1),
            unsignaled: 0,
            counted: rings.counters().is_some_and(|c| c.tx().next().is_some()),
            link,
        }
    }

    #[inline]
    fn ring(&self) -> &SlotRing {
        &self.link.rings.tx
    }

    /// Stores the record of a request in its slot. Returns the slot number, and whether the request
    /// is signaled.
    #[inline(always)]
    fn push(&self, slot: Slot, signal: Signal) -> (u32, bool) {
        let signaled = match signal {
            Signal::Yes => true,
            Signal::Auto => self.counted || self.unsignaled + 1 >= self.period,
            Signal::No => false,
        };
        let number = self.ring().push(Slot { signaled, ..slot });
        (number, signaled)
    }

    /// Processes the result of posting the request in slot `number`.
    #[inline(always)]
    fn posted(&mut self, number: u32, signaled: bool, posted: Result<()>) -> Result<u32> {
        if let Err(error) = posted {
            self.ring().unpush();
            return Err(post_errno(error));
        }
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        Ok(number)
    }

    /// Posts an empty request behind all others. On a queue pair in its error state it is flushed
    /// last: an unsignaled request for which no error was reported before has succeeded.
    pub(super) fn post_marker(&mut self) {
        let ring = self.ring();
        if ring.outstanding() == 0 || ring.outstanding() > ring.depth() {
            return;
        }
        let number = ring.push(Slot {
            signaled: true,
            ..Slot::default()
        });
        let mut request = SendRequest::new(SendOpcode::Send, &[]);
        request.wr_id(self.link.place.send(number)).signaled(true);
        // SAFETY: no buffers.
        if unsafe { self.link.qp.post_send(&mut request) }.is_err() {
            ring.unpush();
        }
    }
}

impl Sq for SendQueue {
    type Link = QpLink;

    #[inline]
    fn link(&self) -> &QpLink {
        &self.link
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.ring().is_full()
    }

    /// Polls the application's completion queue, because an application that only injects may never
    /// read it.
    #[cold]
    fn make_room(&self) -> Result<bool> {
        self.link.cq.poll_quietly()?;
        Ok(!self.is_full())
    }

    fn can_defer(&self, deferred: usize) -> bool {
        let ring = self.ring();
        ring.outstanding() as usize + deferred < ring.depth() as usize
    }

    #[inline]
    fn next_index(&self) -> usize {
        self.ring().next_index()
    }

    #[inline]
    fn tail(&self) -> u32 {
        self.ring().tail()
    }

    #[inline(always)]
    unsafe fn post(
        &mut self,
        request: &mut SendRequest<'_>,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32> {
        let (number, signaled) = self.push(slot, signal);
        request
            .wr_id(self.link.place.send(number))
            .signaled(signaled);
        // SAFETY: the caller keeps the contract of this function.
        let posted = unsafe { self.link.qp.post_send(request) };
        self.posted(number, signaled, posted)
    }

    fn post_flush(
        &mut self,
        to: (RemoteAddr, Rkey),
        len: usize,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32> {
        let (number, signaled) = self.push(slot, signal);
        let wr_id = self.link.place.send(number);
        let posted = self.link.qp.post_flush(wr_id, to, len, signaled);
        self.posted(number, signaled, posted)
    }

    fn fail(&self) {
        let _ = self.link.qp.set_error();
    }
}

impl OwnLink for QpLink {
    fn own(&self) -> &OwnRequests {
        &self.rings.own
    }

    unsafe fn post_request(&self, own: Own, request: &mut SendRequest<'_>) -> Result<()> {
        request.wr_id(self.place.own(own)).signaled(true);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.qp.post_send(request) }
    }

    fn poll(&self) {
        let _ = self.cq.progress_own();
    }

    fn request_progress(&self) {
        self.rings.set_waiting();
        let rings = Arc::downgrade(&self.rings);
        self.cq.domain().helper().add(rings, &self.cq);
    }

    fn owner(&self) -> Option<Arc<dyn FailureListener>> {
        self.rings.owner.get().and_then(Weak::upgrade)
    }

    fn sever(&self) {
        let _ = self.qp.set_error();
        // reported here, because the device may have no request to flush
        self.rings.notify_failure();
    }
}

impl Link for QpLink {
    fn pd(&self) -> &Arc<Pd> {
        self.qp.pd()
    }

    #[inline]
    fn next_number(&self) -> u32 {
        self.rings.tx.next_number()
    }

    fn is_outstanding(&self, number: u32) -> bool {
        self.rings.tx.is_outstanding(number)
    }

    fn poll_once_more(&self, polls: &mut u32) -> bool {
        if *polls >= poll_limit() {
            return false;
        }
        *polls += 1;
        self.poll();
        true
    }

    fn clear_progress_request(&self) {
        if !self.rings.clear_waiting() {
            self.request_progress();
        }
    }

    fn set_holds_keys(&self, holds: bool) {
        self.rings.set_holds_keys(holds);
    }

    fn start_lease(&self) {
        let rings = Arc::downgrade(&self.rings);
        self.cq.domain().helper().hold(rings, &self.cq);
    }
}

/// Maps the device's "queue full" (`ENOMEM`) to `EAGAIN`.
pub(super) fn post_errno(error: FiErrno) -> FiErrno {
    if error == FiErrno::ENOMEM {
        FiErrno::EAGAIN
    } else {
        error
    }
}
