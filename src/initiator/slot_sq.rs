//! The send queue of one queue pair, with a slot for each posted request. The last step of the
//! engine before the device: decides whether a request is signaled, stores its slot, posts it.

#![allow(unsafe_code, reason = "posts buffers whose caller promises for them")]

use super::link::Link;
use super::qp_link::QpLink;
use super::sq::{Signal, Sq};
use super::{Initiator, REQUEST_ONLY, Transmit};
use crate::errno::Result;
use crate::queue::slots::{Slot, SlotRing};
use crate::queue::{Completion, EngineLink};
use crate::verbs::{DelayedRequests, RemoteAddr, Rkey, SendOpcode, SendRequest};

/// The send queue of one queue pair: posts to it, and stores the records of the posted requests.
#[derive(Debug)]
pub(crate) struct SlotSq {
    link: QpLink,
    /// At least one request in `period` is signaled, because its completion frees the slots of the
    /// unsignaled requests before it.
    period: u32,
    unsignaled: u32,
    /// Whether a counter is bound: every request is then signaled, because an unsignaled last
    /// request would never be counted.
    counted: bool,
    delayed: DelayedRequests,
}

impl Initiator<SlotSq> {
    /// Executes a read or write in this call, if the device can and nothing is in front of it, and
    /// puts its entry into the completion queue. `false`: it has to be submitted.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    #[inline]
    pub(crate) unsafe fn execute_rma(&mut self, op: &Transmit<'_>) -> bool {
        let visible = self.is_visible(op);
        if !self.sq.executes()
            || op.flags.intersects(REQUEST_ONLY)
            || visible && !self.sq.link.cq.takes_entries()
        {
            return false;
        }
        // SAFETY: the caller keeps the contract of this function.
        if !unsafe { self.execute(op) } {
            return false;
        }
        if visible {
            self.sq
                .link
                .cq
                .put(&Completion::new(op.context, op.completion_flags));
        }
        true
    }
}

impl SlotSq {
    pub(crate) fn new(link: QpLink) -> Self {
        let slots = &link.slots;
        Self {
            // a request of an initiator of XRC leaves the queue by its own completion: other
            // endpoints may have no room until then
            period: match link.peer {
                Some(_) => 1,
                None => (slots.tx.depth() / 4).max(1),
            },
            unsignaled: 0,
            counted: slots.counters().is_some_and(|c| c.tx().next().is_some()),
            link,
            delayed: DelayedRequests::default(),
        }
    }

    #[inline]
    fn slots(&self) -> &SlotRing {
        &self.link.slots.tx
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
        let number = self.slots().push(Slot { signaled, ..slot });
        (number, signaled)
    }

    /// Processes the result of posting the request in slot `number`.
    #[inline(always)]
    fn posted(&mut self, number: u32, signaled: bool, posted: Result<()>) -> Result<u32> {
        let number = self.slots().unpush_if_refused(number, posted)?;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        Ok(number)
    }

    #[cold]
    #[inline(never)]
    fn post_chain(&mut self) {
        self.delayed.post(&self.link.qp);
        self.link.clear_progress_request();
    }

    /// Posts an empty request behind all others. On a queue pair in its error state it is flushed
    /// last: an unsignaled request for which no error was reported before has succeeded. Each
    /// request of an initiator of XRC is signaled, and that queue pair may work.
    pub(crate) fn post_marker(&mut self) {
        self.post_delayed();
        if self.link.peer.is_some() {
            return;
        }
        let slots = self.slots();
        if slots.outstanding() == 0 || slots.outstanding() > slots.depth() {
            return;
        }
        let number = slots.push(Slot {
            signaled: true,
            ..Slot::default()
        });
        let mut request = SendRequest::new(SendOpcode::Send, &[]);
        request.wr_id(self.link.member.send(number)).signaled(true);
        // SAFETY: no buffers.
        if unsafe { self.link.qp.post_send(&mut request) }.is_err() {
            slots.unpush();
        }
    }
}

impl Sq for SlotSq {
    type Link = QpLink;

    #[inline]
    fn link(&self) -> &QpLink {
        &self.link
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.slots().is_full()
    }

    /// Polls the application's completion queue, because an application that only injects may never
    /// read it.
    #[cold]
    fn make_room(&self) -> Result<bool> {
        self.link.cq.poll_quietly()?;
        Ok(!self.is_full())
    }

    fn can_defer(&self, deferred: usize) -> bool {
        let slots = self.slots();
        slots.outstanding() as usize + deferred < slots.depth() as usize
    }

    #[inline]
    fn next_index(&self) -> usize {
        self.slots().next_index()
    }

    #[inline]
    fn tail(&self) -> u32 {
        self.slots().tail()
    }

    #[inline(always)]
    unsafe fn post(
        &mut self,
        request: &mut SendRequest<'_>,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32> {
        self.post_delayed();
        let (number, signaled) = self.push(slot, signal);
        request
            .wr_id(self.link.member.send(number))
            .signaled(signaled);
        self.link.address(request);
        // SAFETY: the caller keeps the contract of this function.
        let posted = unsafe { self.link.qp.post_send(request) };
        self.posted(number, signaled, posted)
    }

    /// A counter is moved by the completion of a request. On an initiator of XRC the requests of
    /// other endpoints may be under way.
    #[inline(always)]
    fn executes(&self) -> bool {
        self.link.qp.executes()
            && !self.counted
            && self.slots().outstanding() == 0
            && self.link.peer.is_none()
    }

    #[inline]
    fn has_delayed(&self) -> bool {
        !self.delayed.is_empty()
    }

    #[cold]
    #[inline(never)]
    unsafe fn post_in_list(
        &mut self,
        request: &mut SendRequest<'_>,
        slot: Slot,
        signal: Signal,
        more: bool,
    ) -> Result<u32> {
        let (number, signaled) = self.push(slot, signal);
        request
            .wr_id(self.link.member.send(number))
            .signaled(signaled);
        self.link.address(request);
        let first = self.delayed.is_empty();
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.delayed.push(request) };
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        if first && more {
            self.link.request_progress();
            self.link.cq.resume_in_next_read(self.link.member);
        }
        // the next request must find room
        if !more || self.is_full() || self.delayed.is_full() {
            self.post_delayed();
        }
        Ok(number)
    }

    #[inline]
    fn post_delayed(&mut self) {
        if !self.delayed.is_empty() {
            self.post_chain();
        }
    }

    fn post_flush(
        &mut self,
        to: (RemoteAddr, Rkey),
        len: usize,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32> {
        self.post_delayed();
        let (number, signaled) = self.push(slot, signal);
        let wr_id = self.link.member.send(number);
        let posted = self.link.qp.post_flush(wr_id, None, (to, len), signaled);
        self.posted(number, signaled, posted)
    }

    fn fail(&self) {
        let _ = self.link.qp.set_error();
    }
}
