//! Operations that are not posted as exactly one unmodified request: operations on several
//! fragments of the target, and operations that fail in posting order. A fragment is the part of an
//! operation that lies in one contiguous range of one registration of the peer.

#![allow(unsafe_code, reason = "posts buffers that the caller keeps valid")]

use std::mem::MaybeUninit;

use super::keys::EventTarget;
use super::local::MAX_IOV;
use super::post::Initiator;
use super::sq::{Link, Part, Signal, Sq};
use super::transmit::Transmit;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::keys::Fragment;
use crate::verbs::{SendOpcode, SendRequest, Sge};

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

/// The share of an operation that is posted in one call: all of it, or some fragments if the send
/// queue has no room for all at once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Batch {
    /// Whether earlier fragments are posted already.
    pub(super) begun: bool,
    /// Whether more fragments follow, so that the operation does not complete with this batch.
    pub(super) more: bool,
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
        let (mut rest, inline) = unsafe { self.gather(op, len, &mut sges) }?;
        let visible = !batch.more && self.is_visible(op);
        let plan = Plan {
            fragments: fragments.len(),
            durable: op.is_durable(),
            data: op.opcode == SendOpcode::WriteImm && !batch.more,
            events: events.len(),
        };
        let count = plan.count();
        let mut posted_all = true;
        // number of bytes of the first sge in `rest` that are already used
        let mut taken = 0;
        let mut last = 0;
        for index in 0..count {
            let mut sges = [Sge::default(); MAX_IOV];
            let is_last = index + 1 == count;
            let part = Part {
                context: op.context,
                flags: op.kind,
                visible: is_last && visible,
                reports_failure: !op.silent,
                signal: match is_last {
                    false => Signal::No,
                    // the completion of a batch frees the records for the next one
                    true if visible || batch.more => Signal::Yes,
                    true => Signal::Auto,
                },
                more: !is_last || batch.more,
                refused: None,
            };
            let empty = SendRequest::empty(0, op.opcode);
            let mut flush = None;
            let request = match plan.step(index) {
                Step::Fragment(index) => {
                    let fragment = &fragments[index];
                    let used = if op.opcode.is_atomic() {
                        sges[0] = rest.first().copied().unwrap_or_default();
                        1
                    } else {
                        cut(&mut rest, &mut taken, fragment.len, &mut sges)
                    };
                    SendRequest {
                        opcode: if fragment.last && !plan.durable {
                            op.opcode
                        } else {
                            op.opcode.without_imm()
                        },
                        sges: &sges[..used],
                        inline,
                        fence: index == 0 && !batch.begun && op.flags.contains(Flags::FENCE),
                        imm: op.data as u32,
                        remote_addr: fragment.addr,
                        rkey: fragment.rkey,
                        compare_add: op.compare_add,
                        swap: op.swap,
                        ..empty
                    }
                }
                Step::Flush(index) => {
                    flush = Some(&fragments[index]);
                    empty
                }
                // remote data is sent after the whole operation is durable
                Step::Data => SendRequest {
                    imm: op.data as u32,
                    ..empty
                },
                Step::Event(index) => {
                    sges[0] = events[index].sink;
                    SendRequest {
                        sges: &sges[..1],
                        remote_addr: events[index].addr,
                        rkey: events[index].rkey,
                        compare_add: 1,
                        ..SendRequest::empty(0, SendOpcode::FetchAdd)
                    }
                }
            };
            let posted = match flush {
                Some(fragment) => {
                    let to = (fragment.addr, fragment.rkey);
                    self.sq.post_flush(to, fragment.len as usize, part)
                }
                // SAFETY: as this function; the memory for the event's result lives as long as the
                // queue pair.
                None => unsafe { self.sq.post(request, part) },
            };
            match posted {
                Ok(number) => last = number,
                Err(error) => {
                    let nothing = index == 0 && !batch.begun;
                    if nothing || (index == 0 && error == FiErrno::EAGAIN) {
                        self.not_posted();
                        return Err(error);
                    }
                    self.sq.fail();
                    let _ = self.post_failure(op, error);
                    // the last posted request: its completion releases the registrations
                    last = self.sq.link().next_number().wrapping_sub(1);
                    posted_all = false;
                    break;
                }
            }
        }
        self.posted(last);
        Ok(posted_all)
    }

    /// Makes an operation fail in posting order: posts an empty write whose completion reports the
    /// error.
    pub(super) fn post_failure(&mut self, op: &Transmit<'_>, error: FiErrno) -> Result<()> {
        self.sq.reserve()?;
        let part = Part {
            context: op.context,
            flags: op.kind,
            visible: true,
            reports_failure: true,
            signal: Signal::Yes,
            more: false,
            refused: Some(error),
        };
        let request = SendRequest::empty(0, SendOpcode::Write);
        // SAFETY: no buffers.
        unsafe { self.sq.post(request, part) }.map(|_| ())
    }
}

/// Moves `len` bytes from the local sges in `rest` to `part`, and returns the number of sges in
/// `part`. `taken`: bytes of the first sge of `rest` that are used already.
fn cut(rest: &mut &[Sge], taken: &mut u32, len: u64, part: &mut [Sge; MAX_IOV]) -> usize {
    let mut count = 0;
    let mut left = len;
    while left > 0
        && let Some((first, others)) = rest.split_first()
        && let Some(place) = part.get_mut(count)
    {
        let bytes = left.min(u64::from(first.length - *taken)) as u32;
        *place = Sge {
            addr: first.addr + u64::from(*taken),
            length: bytes,
            lkey: first.lkey,
        };
        count += 1;
        left -= u64::from(bytes);
        *taken += bytes;
        if *taken == first.length {
            (*rest, *taken) = (others, 0);
        }
    }
    count
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
