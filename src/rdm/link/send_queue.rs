//! The requests of one queue pair that have not completed, its room, and which requests are
//! signaled. On RC a link has a queue of its own; on XRC a circuit has one, whose records name
//! their links.

#![allow(unsafe_code, reason = "posts requests")]

use std::collections::VecDeque;

use crate::errno::Result;
use crate::rdm::packet_memory::Slot;
use crate::rdm::table_keys::ReadKey;
use crate::verbs::{Qp, SendRequest};
use crate::wire::rdm::Number;

/// Size of the send queue of a link.
pub(in crate::rdm) const DEPTH: usize = 64;
/// Requests of a queue that numbered packets do not use: packets without number, and the marker.
const RESERVED: usize = 8;
/// Of so many packets without number on a link, one is signaled.
pub(in crate::rdm) const UNSIGNALED: usize = 16;

/// A request that has not completed.
#[derive(Debug)]
pub(in crate::rdm) enum Sent {
    /// A numbered packet.
    Numbered(Number),
    /// A packet without number, with its memory if it was not sent inline.
    Control(Option<Slot>),
    /// A READ of a piece of a message. Each of them completes.
    Read(ReadKey),
    /// A WRITE of 0 bytes, which the peer's device acknowledges (`conn/silence.rs`).
    Probe,
    /// The last request of a queue pair in its error state.
    Marker,
}

/// The requests of a queue pair. `L`: what a record has besides its request.
#[derive(Debug)]
pub(in crate::rdm) struct SendQueue<L> {
    /// Requests that have not completed, oldest first.
    sent: VecDeque<(L, Sent)>,
    depth: usize,
    /// Of so many packets without number one is signaled.
    signaled: usize,
    /// Position of the first of them.
    first: u16,
    /// Number of SENDs among them, and of READs.
    packets: usize,
    reads: usize,
    /// Requests since the last one with a completion.
    unsignaled: usize,
}

impl<L> SendQueue<L> {
    /// A queue with room for `depth` requests, at most 2^15. Of `signaled` packets without number
    /// one is signaled.
    pub(in crate::rdm) fn new(depth: usize, signaled: usize) -> Self {
        Self {
            sent: VecDeque::with_capacity(depth),
            depth,
            signaled,
            first: 0,
            packets: 0,
            reads: 0,
            unsignaled: 0,
        }
    }

    /// Whether a request can be posted: a numbered packet or READ, or another one.
    #[inline]
    pub(in crate::rdm) fn has_room(&self, numbered: bool) -> bool {
        let reserved = if numbered { RESERVED } else { 1 };
        self.sent.len() < self.depth - reserved
    }

    /// Position of the first request that has not completed; wraps.
    pub(in crate::rdm) fn position(&self) -> u16 {
        self.first
    }

    /// What the records of the requests besides probes have, oldest first.
    pub(in crate::rdm) fn owners(&self) -> impl Iterator<Item = &L> {
        let asked = self.sent.iter();
        let asked = asked.filter(|(_, sent)| !matches!(sent, Sent::Probe));
        asked.map(|(of, _)| of)
    }

    /// Whether all requests have completed.
    pub(in crate::rdm) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// Whether a SEND has not completed.
    #[inline]
    pub(in crate::rdm) fn has_packets(&self) -> bool {
        self.packets != 0
    }

    /// Number of READs that have not completed.
    pub(in crate::rdm) fn reads(&self) -> usize {
        self.reads
    }

    /// Whether packets without number have not completed.
    pub(in crate::rdm) fn has_control(&self) -> bool {
        let control = |(_, sent): &(L, Sent)| matches!(sent, Sent::Control(_));
        self.sent.iter().any(control)
    }

    /// As if a request had been posted.
    #[cfg(test)]
    pub(in crate::rdm) fn record(&mut self, of: L, sent: Sent) {
        self.packets += usize::from(matches!(sent, Sent::Numbered(_) | Sent::Control(_)));
        self.sent.push_back((of, sent));
    }

    /// As if a SEND were under way for ever.
    #[cfg(test)]
    pub(in crate::rdm) fn occupy(&mut self) {
        self.packets += 1;
    }

    /// Posts a request. `wr_id` makes its `wr_id` of its position. Packets with a number, and all
    /// requests that are no packets, are signaled, because something ends with each of them.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// As [`Qp::post_send`]; the buffers of the request can be accessed until it has completed or
    /// the queue pair is destroyed.
    #[inline]
    pub(in crate::rdm) unsafe fn post(
        &mut self,
        qp: &Qp,
        wr_id: impl FnOnce(u16) -> u64,
        request: &mut SendRequest<'_>,
        record: (L, Sent),
    ) -> Result<()> {
        let position = self.first.wrapping_add(self.sent.len() as u16);
        let control = matches!(record.1, Sent::Control(_));
        let signaled = !control || self.unsignaled + 1 >= self.signaled;
        request.wr_id(wr_id(position)).signaled(signaled);
        // SAFETY: the caller promises for the buffers.
        unsafe { qp.post_send(request) }?;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        match record.1 {
            Sent::Numbered(_) | Sent::Control(_) => self.packets += 1,
            Sent::Read(_) => self.reads += 1,
            Sent::Probe | Sent::Marker => {}
        }
        self.sent.push_back(record);
        Ok(())
    }

    /// A request has completed, and all before it: calls `end` with each of them.
    #[inline]
    pub(in crate::rdm) fn completed(
        &mut self,
        position: u16,
        mut end: impl FnMut(L, Sent),
    ) -> bool {
        let count = usize::from(position.wrapping_sub(self.first)) + 1;
        if count > self.sent.len() {
            return false;
        }
        for _ in 0..count {
            if let Some((of, sent)) = self.pop() {
                end(of, sent);
            }
        }
        true
    }

    /// As [`Self::completed`], of one request at a time: takes the first one of them that was not
    /// taken.
    #[inline]
    pub(in crate::rdm) fn take_completed(&mut self, position: u16) -> Option<(L, Sent)> {
        let count = usize::from(position.wrapping_sub(self.first)) + 1;
        if count > self.sent.len() {
            return None;
        }
        self.pop()
    }

    #[inline]
    fn pop(&mut self) -> Option<(L, Sent)> {
        let (of, sent) = self.sent.pop_front()?;
        match sent {
            Sent::Numbered(_) | Sent::Control(_) => self.packets -= 1,
            Sent::Read(_) => self.reads -= 1,
            Sent::Probe | Sent::Marker => {}
        }
        self.first = self.first.wrapping_add(1);
        Some((of, sent))
    }

    /// Takes the requests that have not completed: their queue pair is not used any more.
    pub(in crate::rdm) fn drain(&mut self) -> impl Iterator<Item = (L, Sent)> + '_ {
        self.sent.drain(..)
    }
}
