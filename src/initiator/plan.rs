//! Operations that are not posted as exactly one unmodified request: operations on several
//! fragments of the target, and operations that fail in posting order. A fragment is the range of
//! an operation that lies in one segment of the peer's region.

#![allow(unsafe_code, reason = "posts buffers that the caller keeps valid")]

use std::mem::MaybeUninit;

use super::elements::{Elements, Shape};
use super::keys::EventTarget;
use super::link::Link;
use super::local::MAX_IOV;
use super::post::Initiator;
use super::sq::{Signal, Sq};
use super::transmit::Transmit;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::key_cache::Fragment;
use crate::queue::slots::Slot;
use crate::verbs::{RemoteAddr, Rkey, SendOpcode, SendRequest, Sge};

/// The requests of an operation, in posting order.
#[derive(Clone, Copy, Debug)]
struct Plan {
    fragments: usize,
    /// Whether a flush of each fragment follows the fragments.
    durable: bool,
    /// Whether remote data follows in a request of its own.
    data: bool,
    events: usize,
}

/// One request of a [`Plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Fragment(usize),
    Flush(usize),
    /// Remote data in a request of its own, after the flushes.
    Data,
    Event(usize),
}

impl Plan {
    fn count(self) -> usize {
        let more = if self.durable {
            self.fragments + usize::from(self.data)
        } else {
            0
        };
        self.fragments + more + self.events
    }

    /// The request at `index`, which must be less than [`Self::count`].
    fn step(self, index: usize) -> Step {
        let behind = |count: usize| index.wrapping_sub(count);
        if index < self.fragments {
            return Step::Fragment(index);
        }
        if !self.durable {
            return Step::Event(behind(self.fragments));
        }
        let flushes = 2 * self.fragments;
        match behind(flushes) {
            _ if index < flushes => Step::Flush(behind(self.fragments)),
            0 if self.data => Step::Data,
            event => Step::Event(event - usize::from(self.data)),
        }
    }
}

/// The fragments of an operation that are posted in one call: all, or some if the send queue has no
/// room for all at once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Batch {
    /// Whether earlier fragments are posted already.
    pub(super) begun: bool,
    /// Whether more fragments follow, so that the operation does not complete with this batch.
    pub(super) more: bool,
}

/// An operation on several fragments, while its requests are posted.
struct Sequence<'a> {
    op: &'a Transmit<'a>,
    plan: Plan,
    batch: Batch,
    fragments: &'a [Fragment],
    events: &'a [EventTarget],
    source: Source<'a>,
    inline: bool,
    /// Whether the success of the last request is reported to the application.
    visible: bool,
}

impl Sequence<'_> {
    /// The record of the request at `index`, and whether it is signaled.
    fn slot(&self, index: usize) -> (Slot, Signal) {
        let is_last = index + 1 == self.plan.count();
        let signal = match is_last {
            false => Signal::No,
            // the completion of a batch frees the records for the next one
            true if self.visible || self.batch.more => Signal::Yes,
            true => Signal::Auto,
        };
        let slot = Slot {
            more: !is_last || self.batch.more,
            ..self.op.slot(is_last && self.visible)
        };
        (slot, signal)
    }

    /// The request of the fragment at `index`, whose local buffers are stored in `sges`.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    unsafe fn fragment<'b>(
        &mut self,
        index: usize,
        sges: &'b mut [Sge; MAX_IOV],
    ) -> SendRequest<'b> {
        let (op, fragment) = (self.op, &self.fragments[index]);
        let elements = op.opcode == SendOpcode::Elements;
        let count = if op.opcode.is_atomic() && !elements {
            self.source.first(sges)
        } else {
            self.source.cut(fragment.len, sges)
        };
        let opcode = if fragment.last && !self.plan.durable {
            op.opcode
        } else {
            op.opcode.without_imm()
        };
        let target = (fragment.addr, fragment.rkey);
        let mut request = op.request(opcode, &sges[..count], target);
        if elements && self.fragments.len() != 1 {
            let before = self.fragments[..index].iter().map(|fragment| fragment.len);
            let skipped = before.sum::<u64>() as usize;
            let count = fragment.len as usize / Shape::of(op).size.max(1);
            // SAFETY: as this function.
            let part = unsafe { Elements::part(op, index, skipped, count) };
            request.atomic(target, part, 0);
        }
        let is_first = index == 0 && !self.batch.begun;
        request
            .inline(self.inline)
            .fence(is_first && op.flags.contains(Flags::FENCE));
        request
    }

    /// The request that counts the operation in the event cell at `index`.
    fn event<'b>(&self, index: usize, sges: &'b mut [Sge; MAX_IOV]) -> SendRequest<'b> {
        let event = &self.events[index];
        sges[0] = event.sink;
        let mut request = SendRequest::new(SendOpcode::FetchAdd, &sges[..1]);
        request.atomic((event.addr, event.rkey), 1, 0);
        request
    }
}

/// The sges of an operation's local buffers that no fragment uses yet.
struct Source<'a> {
    rest: &'a [Sge],
    /// Number of bytes of the first sge in `rest` that a fragment uses already.
    used: u32,
}

impl Source<'_> {
    /// Copies the first sge: the result of an atomic has one. Returns the number of sges.
    fn first(&self, sges: &mut [Sge; MAX_IOV]) -> usize {
        sges[0] = self.rest.first().copied().unwrap_or_default();
        1
    }

    /// Moves `len` bytes to `sges`, and returns the number of sges there.
    fn cut(&mut self, len: u64, sges: &mut [Sge; MAX_IOV]) -> usize {
        let mut count = 0;
        let mut left = len;
        while left > 0
            && let Some((first, others)) = self.rest.split_first()
            && let Some(place) = sges.get_mut(count)
        {
            let bytes = left.min(u64::from(first.length - self.used)) as u32;
            *place = Sge {
                addr: first.addr + u64::from(self.used),
                length: bytes,
                lkey: first.lkey,
            };
            count += 1;
            left -= u64::from(bytes);
            self.used += bytes;
            if self.used == first.length {
                (self.rest, self.used) = (others, 0);
            }
        }
        count
    }
}

impl<Q: Sq> Initiator<Q> {
    /// Posts an operation as one request per fragment, followed by the requests that count the
    /// operation. The completion of the last request completes the operation. Returns false if the
    /// operation is partly posted and another request could not be posted: the queue pair is then
    /// in its error state, the operation completes in error, and its later requests are not posted.
    ///
    /// # Errors
    /// Any error: this call has posted no request.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    pub(super) unsafe fn post_fragments(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        fragments: &[Fragment],
        events: &[EventTarget],
        batch: Batch,
    ) -> Result<bool> {
        self.sq.reserve()?;
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: as this function.
        let (rest, inline) = unsafe { self.gather(op, len, &mut sges) }?;
        let plan = Plan {
            fragments: fragments.len(),
            durable: op.is_durable(),
            data: op.opcode == SendOpcode::WriteImm && !batch.more,
            events: events.len(),
        };
        let mut sequence = Sequence {
            op,
            plan,
            batch,
            fragments,
            events,
            source: Source { rest, used: 0 },
            inline,
            visible: !batch.more && self.is_visible(op),
        };
        for index in 0..plan.count() {
            // SAFETY: as this function.
            if let Err(error) = unsafe { self.post_step(&mut sequence, index) } {
                self.break_off(op, index == 0, batch, error)?;
                return Ok(false);
            }
        }
        self.posted(self.last_number());
        Ok(true)
    }

    /// Posts the request at `index` of a sequence.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    unsafe fn post_step(&mut self, sequence: &mut Sequence<'_>, index: usize) -> Result<()> {
        let (slot, signal) = sequence.slot(index);
        let mut sges = [Sge::default(); MAX_IOV];
        let mut request = match sequence.plan.step(index) {
            // SAFETY: as this function.
            Step::Fragment(index) => unsafe { sequence.fragment(index, &mut sges) },
            Step::Flush(index) => {
                let fragment = &sequence.fragments[index];
                let to = (fragment.addr, fragment.rkey);
                let flushed = self.sq.post_flush(to, fragment.len as usize, slot, signal);
                return flushed.map(|_| ());
            }
            // remote data is sent after the whole operation is durable
            Step::Data => {
                let nothing = (RemoteAddr::NULL, Rkey::default());
                sequence.op.request(sequence.op.opcode, &[], nothing)
            }
            Step::Event(index) => sequence.event(index, &mut sges),
        };
        // SAFETY: as this function; the memory for an event's result lives as long as the queue
        // pair.
        unsafe { self.sq.post(&mut request, slot, signal) }.map(|_| ())
    }

    /// Handles a request that could not be posted, `first`: the first of its batch. If other
    /// requests of the operation are posted, the queue pair enters its error state.
    ///
    /// # Errors
    /// The same error: this call has posted no request, so the operation can be retried or refused.
    fn break_off(
        &mut self,
        op: &Transmit<'_>,
        first: bool,
        batch: Batch,
        error: FiErrno,
    ) -> Result<()> {
        if first && (!batch.begun || error == FiErrno::EAGAIN) {
            self.not_posted();
            return Err(error);
        }
        self.sq.fail();
        let _ = self.post_failure(op, error);
        // the completion of the last posted request releases the registrations
        self.posted(self.last_number());
        Ok(())
    }

    /// Number of the last posted request.
    pub(super) fn last_number(&self) -> u32 {
        self.sq.link().next_number().wrapping_sub(1)
    }

    /// Makes an operation fail in posting order: posts an empty write whose completion reports the
    /// error.
    pub(super) fn post_failure(&mut self, op: &Transmit<'_>, error: FiErrno) -> Result<()> {
        self.sq.reserve()?;
        let slot = Slot {
            refused: Some(error),
            ..op.slot(true)
        };
        let mut request = SendRequest::new(SendOpcode::Write, &[]);
        // SAFETY: no buffers.
        unsafe { self.sq.post(&mut request, slot, Signal::Yes) }.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_has_each_step_once_and_in_order() {
        use Step::{Data, Event, Flush, Fragment};
        for fragments in 1..=3 {
            for events in 0..=2 {
                for (durable, data) in [(false, false), (false, true), (true, false), (true, true)]
                {
                    let plan = Plan {
                        fragments,
                        durable,
                        data,
                        events,
                    };
                    let mut wanted: Vec<_> = (0..fragments).map(Fragment).collect();
                    if durable {
                        wanted.extend((0..fragments).map(Flush));
                        wanted.extend(data.then_some(Data));
                    }
                    wanted.extend((0..events).map(Event));
                    let steps: Vec<_> = (0..plan.count()).map(|index| plan.step(index)).collect();
                    assert_eq!(steps, wanted);
                }
            }
        }
    }
}
