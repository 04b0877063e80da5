//! Operations that are not posted as exactly one request: those on several pieces of the target,
//! and those that fail in their place in the order.

#![allow(unsafe_code, reason = "posts buffers whose caller promises for them")]

use std::mem::MaybeUninit;

use super::local::MAX_IOV;
use super::remote::EventTarget;
use super::transmit::Transmit;
use super::tx::{TxSide, post_errno};
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::keys::Piece;
use crate::queue::slots::{Slot, SlotRing};
use crate::verbs::{SendOpcode, SendRequest, Sge};

/// The requests of an operation, in posting order.
#[derive(Clone, Copy, Debug)]
struct Plan {
    pieces: usize,
    /// Each piece is followed by a flush.
    durable: bool,
    /// The operation carries remote data.
    data: bool,
    events: usize,
}

/// One request of a [`Plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Piece(usize),
    Flush(usize),
    /// Remote data in a request of its own, behind the flushes.
    Data,
    Event(usize),
}

impl Plan {
    fn count(self) -> usize {
        let more = if self.durable {
            self.pieces + usize::from(self.data)
        } else {
            0
        };
        self.pieces + more + self.events
    }

    /// The request at `index`, which must be less than [`Self::count`].
    fn part(self, index: usize) -> Part {
        let behind = |count: usize| index.wrapping_sub(count);
        if index < self.pieces {
            return Part::Piece(index);
        }
        if !self.durable {
            return Part::Event(behind(self.pieces));
        }
        let flushes = 2 * self.pieces;
        match behind(flushes) {
            _ if index < flushes => Part::Flush(behind(self.pieces)),
            0 if self.data => Part::Data,
            event => Part::Event(event - usize::from(self.data)),
        }
    }
}

/// The share of an operation that is posted in one call: all of it, or some pieces if the send
/// queue has no room for all at once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Batch {
    /// Earlier pieces are posted already.
    pub(super) begun: bool,
    /// More pieces follow: the operation does not complete with this batch.
    pub(super) more: bool,
}

impl TxSide {
    /// Posts an operation as one request per piece of the target, followed by the requests that
    /// count it. The completion of the last request completes the operation. Returns whether all
    /// were posted; if not, the operation gets an error completion and none of its later requests
    /// is posted.
    ///
    /// # Errors
    /// Any error: no request was posted.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    pub(super) unsafe fn post_pieces(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        pieces: &[Piece],
        events: &[EventTarget],
        batch: Batch,
    ) -> Result<bool> {
        if ring.is_full() && !self.make_room(ring)? {
            return Err(FiErrno::EAGAIN);
        }
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: as this function.
        let (mut rest, inline) = unsafe { self.gather(ring, op, len, &mut sges) }?;
        let visible =
            !batch.more && !op.silent && (!self.selective || op.flags.contains(Flags::COMPLETION));
        let plan = Plan {
            pieces: pieces.len(),
            durable: op.is_durable(),
            data: op.opcode == SendOpcode::WriteImm && !batch.more,
            events: events.len(),
        };
        let count = plan.count();
        // the completion of a batch frees the slots for the next one
        let signaled = visible
            || batch.more
            || self.counted
            || self.unsignaled as usize + count >= self.period as usize;
        let mut posted_all = true;
        // bytes of the first sge in `rest` that are used already
        let mut taken = 0;
        let mut last = 0;
        for index in 0..count {
            let mut part = [Sge::default(); MAX_IOV];
            let is_last = index + 1 == count;
            let empty = SendRequest::empty(0, op.opcode);
            let mut flush = None;
            let request = match plan.part(index) {
                Part::Piece(index) => {
                    let piece = &pieces[index];
                    let used = if op.opcode.is_atomic() {
                        part[0] = rest.first().copied().unwrap_or_default();
                        1
                    } else {
                        cut(&mut rest, &mut taken, piece.len, &mut part)
                    };
                    SendRequest {
                        opcode: if piece.last && !plan.durable {
                            op.opcode
                        } else {
                            op.opcode.without_imm()
                        },
                        sges: &part[..used],
                        inline,
                        fence: index == 0 && !batch.begun && op.flags.contains(Flags::FENCE),
                        imm: op.data as u32,
                        remote_addr: piece.addr,
                        rkey: piece.rkey,
                        compare_add: op.compare_add,
                        swap: op.swap,
                        ..empty
                    }
                }
                Part::Flush(index) => {
                    flush = Some(&pieces[index]);
                    empty
                }
                // remote data is sent when all of the operation is durable
                Part::Data => SendRequest {
                    imm: op.data as u32,
                    ..empty
                },
                Part::Event(index) => {
                    part[0] = events[index].sink;
                    SendRequest {
                        sges: &part[..1],
                        remote_addr: events[index].addr,
                        rkey: events[index].rkey,
                        compare_add: 1,
                        ..SendRequest::empty(0, SendOpcode::FetchAdd)
                    }
                }
            };
            last = ring.push(Slot {
                context: op.context,
                flags: op.kind,
                visible: is_last && visible,
                reports_failure: !op.silent,
                signaled: is_last && signaled,
                part: !is_last || batch.more,
                ..Slot::default()
            });
            let request = SendRequest {
                wr_id: self.place.send(last),
                signaled: is_last && signaled,
                ..request
            };
            let posted = match flush {
                Some(piece) => {
                    let (to, len) = ((piece.addr, piece.rkey), piece.len as usize);
                    let (wr_id, signaled) = (request.wr_id, request.signaled);
                    self.qp.post_flush(wr_id, to, len, signaled)
                }
                // SAFETY: as this function; the sink lives as long as the queue pair.
                None => unsafe { self.qp.post_send(&request) },
            };
            if let Err(error) = posted {
                ring.unpush();
                let error = post_errno(error);
                let nothing = index == 0 && !batch.begun;
                if nothing || (index == 0 && error == FiErrno::EAGAIN) {
                    self.local.refused();
                    return Err(error);
                }
                // a partly posted operation cannot be withdrawn: moves the queue pair to its error
                // state
                let _ = self.qp.set_error();
                let _ = self.post_failure(ring, op, error);
                posted_all = false;
                break;
            }
            self.unsignaled = if is_last && signaled {
                0
            } else {
                self.unsignaled + 1
            };
        }
        self.posted(last, ring.tail());
        Ok(posted_all)
    }

    /// Makes an operation fail in its place in the order: posts an empty write whose slot carries
    /// the error.
    pub(super) fn post_failure(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        error: FiErrno,
    ) -> Result<()> {
        if ring.is_full() && !self.make_room(ring)? {
            return Err(FiErrno::EAGAIN);
        }
        let number = ring.push(Slot {
            context: op.context,
            flags: op.kind,
            visible: true,
            reports_failure: true,
            signaled: true,
            refused: Some(error),
            ..Slot::default()
        });
        let request = SendRequest {
            wr_id: self.place.send(number),
            opcode: SendOpcode::Write,
            sges: &[],
            inline: false,
            signaled: true,
            fence: false,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
        };
        // SAFETY: no buffers.
        if let Err(error) = unsafe { self.qp.post_send(&request) } {
            ring.unpush();
            return Err(post_errno(error));
        }
        self.unsignaled = 0;
        Ok(())
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
    fn an_operation_has_each_part_once_and_in_order() {
        use Part::{Data, Event, Flush, Piece};
        for pieces in 1..=3 {
            for events in 0..=2 {
                for (durable, data) in [(false, false), (false, true), (true, false), (true, true)]
                {
                    let plan = Plan {
                        pieces,
                        durable,
                        data,
                        events,
                    };
                    let mut wanted: Vec<_> = (0..pieces).map(Piece).collect();
                    if durable {
                        wanted.extend((0..pieces).map(Flush));
                        wanted.extend(data.then_some(Data));
                    }
                    wanted.extend((0..events).map(Event));
                    let parts: Vec<_> = (0..plan.count()).map(|index| plan.part(index)).collect();
                    assert_eq!(parts, wanted);
                }
            }
        }
    }
}
